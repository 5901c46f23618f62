"""A prompt that vLLM computes, keeps in a codec's store and serves from there after a restart."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import manifoldkv
from engines.base import ORIGINAL, Asked, EngineError
from engines.stock import greedy, tensors_of
from engines.vllm_server import Server
from manifoldkv import Codec, CompressionPlan, load_model

HERE = Path(__file__).resolve().parent
PATHS = (HERE, Path(manifoldkv.__file__).resolve().parents[1])
"""Where the connector and manifoldkv are imported from."""
BITS = 16
"""Of the numbers of a cache that sizes are compared to."""


def served_from_store(asked: Asked, python: str, plan: Path, prompt: list[int]) -> pd.DataFrame:
    """Return one row: what a store takes, and whether the texts are those of transformers.

    Parameters
    ----------
    asked : Asked
        The original of its checkpoints is served.
    python : str
        An interpreter that has vLLM and what manifoldkv imports.
    plan : Path
        Of recipe ``"stored"``, for the original.
    prompt : list of int
        Token ids.

    Raises
    ------
    EngineError
        If vLLM does not start, or keeps or finds nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        computed = _ask(asked, python, plan, prompt, store)
        files = list(store.iterdir())
        if len(files) != 1:
            raise EngineError(f"vLLM has stored {len(files)} prompts instead of 1")
        served = _ask(asked, python, plan, prompt, store)
        blob = files[0].read_bytes()
    tokens = int((served["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
    if not tokens:
        raise EngineError("vLLM has computed a prompt that was stored")
    model, _ = load_model(asked.folders[ORIGINAL], dtype=getattr(torch, asked.dtype))
    decoded = Codec(model, CompressionPlan.load(plan)).decode(blob, tokens)
    numbers = sum(x.numel() for x in tensors_of(decoded))
    ids = torch.tensor([prompt])
    of_stock = greedy(model, ids, asked.new_tokens)
    of_decoded = greedy(model, ids, asked.new_tokens, decoded)
    row = {
        "prompt_tokens": len(prompt),
        "tokens_served": tokens,
        "nbytes": len(blob),
        "times_smaller": numbers * BITS / 8 / len(blob),
        "new_tokens": asked.new_tokens,
        "computed_as_stock": _ids(computed) == of_stock,
        "served_as_decoded": _ids(served) == of_decoded,
        "served_as_computed": _ids(served) == _ids(computed),
        "seconds_computed": computed["seconds"],
        "seconds_served": served["seconds"],
    }
    return pd.DataFrame([row])


def _ask(asked: Asked, python: str, plan: Path, prompt: list[int], store: Path) -> dict[str, Any]:
    """Return the answer of a server that is started for it, with a store."""
    connector = {
        "kv_connector": "CodecConnector",
        "kv_connector_module_path": "codec_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"plan": str(plan.absolute()), "folder": str(store)},
    }
    server = Server(
        python,
        asked.folders[ORIGINAL],
        asked.dtype,
        asked.threads,
        *("--kv-transfer-config", json.dumps(connector), "--enable-prompt-tokens-details"),
        paths=PATHS,
    )
    try:
        return server.complete(prompt, asked.new_tokens)
    finally:
        server.close()


def _ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])
