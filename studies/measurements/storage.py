"""Size, loss and speed of a cache that is stored and read back.

    python studies/benchmark.py storage
    python studies/benchmark.py storage --model smollm2 --text allenai/c4:en --prompt 2048 \\
        --sequences 16

Plans of recipe "stored" are made for every ratio, calibrated on the same text. A prompt is read
uncompressed in bfloat16, its cache is stored and reconstructed, and the text after it is predicted
from the reconstruction; questions are answered from it too. Bytes are those of the whole blob,
against those of the cache; speeds are in bytes of the latter. The baseline is zstd on the 16-bit
cache, in the same run and on the same threads. Written into --out: results.csv (a row for each
cache), windows.csv (a row for each window and cache), answers.csv, summary.md and a figure.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TypeVar

import common
import pandas as pd
import torch
from methods.stored import through_codec
from reports.storage import LEVEL, STOCK, ZSTD, draw, summarized, summary
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from manifoldkv import Codec, compress
from manifoldkv.core.errors import RunError
from manifoldkv.evaluate.questions import Question
from manifoldkv.evaluate.retrieval import Holder, retrieval_through, uncompressed
from manifoldkv.runs.checkpoints import digest_of_tokens
from measurements import base
from measurements.base import Benchmark

T = TypeVar("T")


def add_arguments(parser: common.Parser) -> None:
    base.add_calibration(parser, ratios=(8, 12, 16))
    base.add_questions(parser, tasks=["passkey"], items=12)
    add = parser.add_argument
    add("--prompt", type=int, default=512, help="tokens of a prompt, and of ratios (%(default)s)")
    add("--continuation", type=int, help="tokens predicted after it (--prompt)")
    add("--held-out", type=int, default=8, help="held-out prompts (%(default)s)")


def run(given: argparse.Namespace, out: Path) -> None:
    if find_spec("zstandard") is None:
        raise RunError("the baseline zstd needs the package zstandard: pip install zstandard")
    if given.continuation is None:
        given.continuation = given.prompt
    benchmark = StorageBenchmark(given, out)
    windows, answers = benchmark.windows(), benchmark.answers()
    columns = {"model": Path(given.model).name, "prompt": given.prompt, "windows": given.held_out}
    columns |= {"tasks": " ".join(given.tasks), "items": given.items}
    columns |= {"threads": given.threads, "seed": given.seed}
    results = summarized(windows, answers, benchmark.predicted_nats).assign(**columns)
    for frame, file in ((results, "results"), (windows, "windows"), (answers, "answers")):
        frame.to_csv(out / f"{file}.csv", index=False)
    redraw(out)
    common.write_summary(out, summary(results, given))


def redraw(out: Path) -> None:
    common.draw(out, draw)


class StorageBenchmark(Benchmark):
    """Caches of plans, stored and read back, beside the 16-bit cache and zstd."""

    def __init__(self, given: argparse.Namespace, out: Path) -> None:
        longest = given.prompt + given.continuation
        super().__init__(given, out, longest)
        self.tokens = self.held_out(given.text, longest)
        self.tasks = {task: self.questions(task, given.prompt) for task in given.tasks}
        self.steps = self.checkpoints.made_by(compress, Codec).keyed(
            calibration=digest_of_tokens(self.calibration),
            tokens=digest_of_tokens(self.tokens),
            settings=[given.ratios, given.prompt, given.seed, given.threads],
        )
        plans = {
            label(ratio): compress(
                self.model,
                self.calibration,
                recipe="stored",
                ratio=ratio,
                context=given.prompt,
                seed=given.seed,
                folder=self.plans,
            )
            for ratio in given.ratios
        }
        self.model = self.model.bfloat16()  # as models are served; plans are made in float32
        self.codecs = {name: Codec(self.model, plan) for name, plan in plans.items()}
        self.predicted_nats = {name: plan.provenance.predicted_nats for name, plan in plans.items()}

    def windows(self) -> pd.DataFrame:
        """Return bytes, seconds and loss of each held-out window and cache."""
        frames = [
            self.steps.frame(f"window-{index}", partial(self.window, text)).assign(window=index)
            for index, text in enumerate(tqdm(self.tokens, desc="windows", disable=None))
        ]
        return pd.concat(frames, ignore_index=True)

    @torch.no_grad()
    def window(self, text: Tensor) -> pd.DataFrame:
        prompt, after = text[None, : self.given.prompt], text[None, self.given.prompt :]
        cache = DynamicCache(config=self.model.config)
        self.model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
        raw = sixteen_bits(cache)
        rows = [zstd_row(raw, self.given.threads)]
        for name, codec in self.codecs.items():
            blob, encoding = timed(partial(codec.encode, cache, prompt))
            reconstructed, decoding = timed(partial(codec.decode, blob))
            rows.append(
                {
                    "cache": name,
                    "nbytes": len(blob),
                    "encode_seconds": encoding,
                    "decode_seconds": decoding,
                    "nll": loss(self.model, reconstructed, after),
                }
            )
        rows.append({"cache": STOCK, "nbytes": len(raw), "nll": loss(self.model, cache, after)})
        return pd.DataFrame(rows).assign(stock_bytes=len(raw))

    def answers(self) -> pd.DataFrame:
        """Return the answers to each task's questions from each cache."""
        steps = self.steps.keyed(items=self.given.items)
        frames = [
            steps.frame(f"answers-{task}", partial(self.answered, posed))
            for task, posed in self.tasks.items()
        ]
        return pd.concat(frames, ignore_index=True)

    def answered(self, posed: Sequence[Question]) -> pd.DataFrame:
        holders: dict[str, Holder] = {STOCK: uncompressed} | {
            name: through_codec(codec) for name, codec in self.codecs.items()
        }
        return retrieval_through(self.model, self.tokenizer, posed, holders, batch_size=1)


def label(ratio: float) -> str:
    return f"1/{1 / ratio:g}"


def sixteen_bits(cache: DynamicCache) -> bytes:
    """Return the bytes of a cache in bfloat16."""
    tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)]  # noqa: PD011
    return b"".join(x.bfloat16().view(torch.int16).numpy().tobytes() for x in tensors)


def zstd_row(raw: bytes, threads: int) -> dict[str, object]:
    import zstandard  # needed by this baseline alone

    compressor = zstandard.ZstdCompressor(level=LEVEL, threads=threads)
    packed, encoding = timed(lambda: compressor.compress(raw))
    _, decoding = timed(lambda: zstandard.ZstdDecompressor().decompress(packed))
    return {
        "cache": ZSTD,
        "nbytes": len(packed),
        "encode_seconds": encoding,
        "decode_seconds": decoding,
    }


def loss(model: PreTrainedModel, cache: DynamicCache, after: Tensor) -> float:
    """Return the mean NLL of a text (1, m) after its first token, which extends the cache."""
    logits = model(input_ids=after, past_key_values=cache).logits
    return float(cross_entropy(logits[0, :-1].float(), after[0, 1:]))


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of some work and its seconds, the median of three calls."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    return result, median(seconds)
