"""What llama.cpp is asked, in the environment of llama-cpp-python: one task, read and answered.

Standard input is a JSON object with a ``task`` and what it needs (`TASKS`), the last line of
standard output the rows of its answer. It imports nothing of manifoldkv.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import llama_cpp
import numpy as np

BATCH = 512
"""Tokens that are read at a time."""
LOGITS_AT_ONCE = 64
"""Rows of logits that are turned into losses at a time, which bounds memory."""
TYPES = {
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
SIZE = re.compile(
    r"size = +([\d.]+) MiB \( *(\d+) cells, +(\d+) layers.*K \((\w+)\): .*V \((\w+)\):"
)
"""What the log says of a cache."""
LOG: list[str] = []


def keep(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    LOG.append(text.decode("utf-8", "replace"))


CALLBACK = llama_cpp.llama_log_callback(keep)


class Running:
    """A model with a cache of one type, whose tokens can be taken out again.

    Flash attention is on for all types, since llama.cpp has rounded values with it alone.
    """

    def __init__(self, path: str, cache: str, tokens: int, threads: int) -> None:
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), settings)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}: {''.join(LOG[-3:]).strip()}")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = tokens
        context.n_batch = context.n_ubatch = BATCH
        context.n_threads = context.n_threads_batch = threads
        context.type_k = context.type_v = TYPES[cache]
        context.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        LOG.clear()
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no cache of {cache}: {''.join(LOG[-3:]).strip()}")
        self.bytes_per_token = bytes_per_token("".join(LOG))
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.tokens = 0

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def read(self, ids: list[int], *, every: bool = False) -> np.ndarray[Any, Any]:
        """Read at most `BATCH` tokens; return logits after the last, or (n, V) after every one."""
        for place, token in enumerate(ids):
            self.batch.token[place] = token
            self.batch.pos[place] = self.tokens + place
            self.batch.n_seq_id[place] = 1
            self.batch.seq_id[place][0] = 0
            self.batch.logits[place] = every or place + 1 == len(ids)
        self.batch.n_tokens = len(ids)
        code = llama_cpp.llama_decode(self.context, self.batch)
        if code:
            raise RuntimeError(f"llama.cpp cannot read {len(ids)} tokens: code {code}")
        self.tokens += len(ids)
        rows = len(ids) if every else 1
        logits = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(self.context), (rows, self.vocabulary)
        )
        return logits if every else logits[0]

    def read_all(self, ids: list[int]) -> np.ndarray[Any, Any]:
        """Read any number of tokens; return logits after the last."""
        for start in range(0, len(ids), BATCH):
            logits = self.read(ids[start : start + BATCH])
        return logits

    def greedy(self, logits: np.ndarray[Any, Any], count: int) -> Iterator[int]:
        """Yield so many tokens that come next; the last is not read."""
        for left in reversed(range(count)):
            token = int(logits.argmax())
            yield token
            if left:
                logits = self.read([token])

    def crop(self, tokens: int) -> None:
        """Keep the first tokens alone."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), 0, tokens, -1)
        self.tokens = tokens


def bytes_per_token(log: str) -> float:
    """Return what a cache takes, by the log of llama.cpp."""
    found = SIZE.search(log)
    if found is None:
        raise RuntimeError("the log of llama.cpp does not say what its cache takes")
    return float(found[1]) * 2**20 / int(found[2])


def caches(models: dict[str, str], types: list[str], tokens: int) -> Iterator[dict[str, Any]]:
    for name, path in models.items():
        for cache in types:
            running = Running(path, cache, tokens, threads=1)
            yield {"checkpoint": name, "cache": cache, "bytes_per_token": running.bytes_per_token}
            running.close()


def texts(
    models: dict[str, str], prompts: list[list[int]], new_tokens: int, threads: int
) -> Iterator[dict[str, Any]]:
    longest = max(map(len, prompts)) + new_tokens
    for name, path in models.items():
        running = Running(path, "f16", longest, threads)
        for number, prompt in enumerate(prompts):
            found = list(running.greedy(running.read_all(prompt), new_tokens))
            running.crop(0)
            yield {"checkpoint": name, "prompt": number, "ids": json.dumps(found)}
        running.close()


def speeds(
    models: dict[str, str],
    types: list[str],
    ids: list[int],
    steps: int,
    rounds: int,
    threads: int,
) -> Iterator[dict[str, Any]]:
    """Yield speeds over one context; all models with all types take turns, the first warms up."""
    running = {
        (name, cache): Running(path, cache, len(ids) + steps, threads)
        for name, path in models.items()
        for cache in types
    }
    for one in running.values():
        one.read_all(ids[:-1])
    for turn in range(rounds + 1):
        for (name, cache), one in running.items():
            start = time.perf_counter()
            for _ in one.greedy(one.read(ids[-1:]), steps):
                pass
            seconds = time.perf_counter() - start
            one.crop(len(ids) - 1)
            if turn:
                yield {
                    "checkpoint": name,
                    "cache": cache,
                    "round": turn,
                    "tokens_per_second": steps / seconds,
                }
    for one in running.values():
        one.close()


def losses(
    models: dict[str, str], types: list[str], windows: list[list[int]], threads: int
) -> Iterator[dict[str, Any]]:
    """Yield the mean NLL of every window with every model and type, in nats per token."""
    for name, path in models.items():
        for cache in types:
            running = Running(path, cache, max(map(len, windows)), threads)
            for number, window in enumerate(windows):
                yield {
                    "checkpoint": name,
                    "cache": cache,
                    "window": number,
                    "nll": mean_nll(running, window),
                }
                running.crop(0)
            running.close()


def mean_nll(running: Running, window: list[int]) -> float:
    total = 0.0
    for start in range(0, len(window) - 1, BATCH):
        ids = window[start : min(start + BATCH, len(window) - 1)]
        logits = running.read(ids, every=True)
        for first in range(0, len(ids), LOGITS_AT_ONCE):
            rows = logits[first : first + LOGITS_AT_ONCE].astype(np.float64)
            after = window[start + first + 1 :][: len(rows)]
            highest = rows.max(axis=1)
            norms = highest + np.log(np.exp(rows - highest[:, None]).sum(axis=1))
            total += float((norms - rows[np.arange(len(rows)), after]).sum())
    return total / (len(window) - 1)


TASKS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "caches": caches,
    "texts": texts,
    "speeds": speeds,
    "losses": losses,
}


def main() -> None:
    llama_cpp.llama_log_set(CALLBACK, ctypes.c_void_p(0))
    given = json.load(sys.stdin)
    print(json.dumps(list(TASKS[given.pop("task")](**given))))


if __name__ == "__main__":
    main()
