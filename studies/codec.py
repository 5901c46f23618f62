"""What does a stored cache lose, and how small and how quick is it?

    python studies/codec.py
    python studies/codec.py --model smollm2 --text allenai/c4:en --prompt 2048 --context 2048 \\
        --sequences 16

Plans of recipe "stored" are made for every ratio from the same calibration text. A prompt is read
as it is, its cache is stored and read back, and the text after it is predicted from what comes
back; questions that look back, passkeys if no others are named, are answered likewise. Bytes are
those of the blob, everything in it, against those of the cache in 16 bits; speeds are of these too,
beside zstd on the 16-bit cache, all in turns on the same threads. Written into --out: results.csv
(a row for each way to store), windows.csv (a row for each window), answers.csv, summary.md and a
figure. What is measured is stored in --out/steps: an interrupted run goes on where it was, a
repeated one draws at once.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import common
import pandas as pd
import torch
import zstandard
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from manifoldkv import Codec, CompressionPlan, compress, open_text, sample_tokens
from manifoldkv.diagnostics.figures import legend_below, mark_of
from manifoldkv.diagnostics.figures.palette import colour_at
from manifoldkv.diagnostics.figures.style import label_axes, reference, title_above
from manifoldkv.errors import ArgumentError
from manifoldkv.evaluation.questions import TASKS, Question, questions
from manifoldkv.evaluation.retrieval import Holder, Prompts, retrieval_through, uncompressed
from manifoldkv.runs.checkpoints import digest_of_model, digest_of_tokens
from manifoldkv.seeds import check_seed
from manifoldkv.text.tokens import check_length

T = TypeVar("T")
STOCK, ZSTD = "16-bit cache", "zstd"
LEVEL = 3
"""Of zstd: its default."""


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_model()
    parser.add_text()
    add = parser.add_argument
    add("--times", type=float, nargs="+", default=[8, 12, 16], help="smaller (8 12 16)")
    add("--sequences", type=int, default=64, help="for calibration (%(default)s)")
    add("--sequence-length", type=int, default=512, help="of these (%(default)s)")
    add("--context", type=int, help="tokens that a plan's ratio is kept for (--prompt)")
    add("--prompt", type=int, default=512, help="tokens of a prompt (%(default)s)")
    add("--continuation", type=int, help="tokens after it that are predicted (--prompt)")
    add("--held-out", type=int, default=8, help="prompts measured on (%(default)s)")
    add("--tasks", nargs="+", default=["passkey"], help=f"of {', '.join(TASKS)} (passkey)")
    add("--items", type=int, default=12, help="questions of a task (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_threads()
    parser.add_out("figures/codec/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    for times in given.times:
        if not times >= 1:
            raise ArgumentError(f"--times {times:g} is not at least 1")
    check_seed(given.seed)
    name = Path(given.model).name
    out = common.output_folder(given, "codec", name)
    if given.redraw:
        common.draw(out, draw)
        return
    measured = Measured(given, out)
    windows, answers = measured.windows(), measured.answers()
    known = {"model": name, "prompt": given.prompt, "windows": given.held_out}
    known |= {"tasks": " ".join(given.tasks), "items": given.items}
    known |= {"threads": given.threads, "seed": given.seed}
    results = summarized(windows, answers, measured.plans).assign(**known)
    for frame, file in ((results, "results"), (windows, "windows"), (answers, "answers")):
        frame.to_csv(out / f"{file}.csv", index=False)
    common.draw(out, draw)
    common.write_summary(out, summary(results, given, name))


class Measured:
    """Plans of a model, and what caches lose that they store."""

    def __init__(self, given: argparse.Namespace, out: Path) -> None:
        self.given = given
        self.model, self.tokenizer = common.load(given.model)
        self.source = open_text(given.text)
        continuation = given.prompt if given.continuation is None else given.continuation
        check_length(self.model, given.prompt + continuation)
        self.tokens = sample_tokens(
            self.source,
            self.tokenizer,
            sequences=given.held_out,
            length=given.prompt + continuation,
            split="held-out",
        )
        self.questions = {
            task: questions(
                task,
                self.tokenizer,
                self.source,
                length=given.prompt,
                items=given.items,
                seed=given.seed,
            )
            for task in given.tasks
        }
        calibration = sample_tokens(
            self.source,
            self.tokenizer,
            sequences=given.sequences,
            length=given.sequence_length,
            split="calibration",
        )
        stored = common.stored_in(out, given)
        self.stored = stored.made_by(compress, Codec).keyed(
            model=digest_of_model(self.model),
            calibration=digest_of_tokens(calibration),
            tokens=digest_of_tokens(self.tokens),
            settings=[given.times, given.context, given.prompt, given.seed, given.threads],
        )
        self.plans = {
            label(times): compress(
                self.model,
                calibration,
                recipe="stored",
                ratio=1 / times,
                context=given.prompt if given.context is None else given.context,
                seed=given.seed,
                folder=out / "steps" / "plans",
            )
            for times in given.times
        }
        self.codecs = {name: Codec(self.model, plan) for name, plan in self.plans.items()}

    def windows(self) -> pd.DataFrame:
        """Return bytes, seconds and losses by window and way to store."""
        frames = [
            self.stored.frame(f"window-{index}", partial(self.window, text))
            for index, text in enumerate(tqdm(self.tokens, desc="windows", disable=None))
        ]
        return pd.concat(
            [frame.assign(window=index) for index, frame in enumerate(frames)], ignore_index=True
        )

    @torch.no_grad()
    def window(self, text: Tensor) -> pd.DataFrame:
        prompt, after = text[None, : self.given.prompt], text[None, self.given.prompt :]
        cache = DynamicCache(config=self.model.config)
        self.model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
        raw = sixteen_bits(cache)
        rows = [zstd_row(raw, self.given.threads)]
        for name, codec in self.codecs.items():
            blob, encoding = timed(partial(codec.encode, cache, prompt))
            read, decoding = timed(partial(codec.decode, blob))
            rows.append(
                {
                    "cache": name,
                    "nbytes": len(blob),
                    "encode_seconds": encoding,
                    "decode_seconds": decoding,
                    "nll": loss(self.model, read, after),
                }
            )
        rows.append({"cache": STOCK, "nbytes": len(raw), "nll": loss(self.model, cache, after)})
        return pd.DataFrame(rows).assign(stock_bytes=len(raw))

    def answers(self) -> pd.DataFrame:
        """Return how questions are answered, by task, question and way to store."""
        stored = self.stored.keyed(items=self.given.items)
        return pd.concat(
            [
                stored.frame(f"answers-{task}", partial(self.answered, posed))
                for task, posed in self.questions.items()
            ],
            ignore_index=True,
        )

    def answered(self, posed: Sequence[Question]) -> pd.DataFrame:
        holders: dict[str, Holder] = {STOCK: uncompressed} | {
            name: through_codec(codec) for name, codec in self.codecs.items()
        }
        return retrieval_through(self.model, self.tokenizer, posed, holders, batch_size=1)


def through_codec(codec: Codec) -> Holder:
    """Return how prompts are held in caches that were stored and read back."""

    @contextmanager
    def holder(model: PreTrainedModel, prompts: Prompts) -> Iterator[Callable[[], Cache]]:
        read = codec.decode(codec.encode(prompts.stock, prompts.ids))
        yield lambda: copy.deepcopy(read)

    return holder


def label(times: float) -> str:
    return f"1/{times:g}"


def sixteen_bits(cache: DynamicCache) -> bytes:
    """Return the bytes of a cache in bfloat16."""
    tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)]  # noqa: PD011
    return b"".join(x.bfloat16().view(torch.int16).numpy().tobytes() for x in tensors)


def zstd_row(raw: bytes, threads: int) -> dict[str, object]:
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
    start = time.perf_counter()
    found = work()
    return found, time.perf_counter() - start


def summarized(
    windows: pd.DataFrame, answers: pd.DataFrame, plans: dict[str, CompressionPlan]
) -> pd.DataFrame:
    """Return a row for each way to store: means over windows and questions, and errors."""
    stock = windows[windows["cache"] == STOCK].set_index("window")["nll"]
    found = answers.pivot_table("score", "cache", "task", aggfunc="sum")
    rows = []
    for name, own in windows.groupby("cache", sort=False):
        by_window = own.set_index("window")
        added = by_window["nll"] - stock
        plan = plans.get(str(name))
        rows.append(
            {
                "cache": name,
                "times_smaller": own["stock_bytes"].sum() / own["nbytes"].sum(),
                "nbytes": own["nbytes"].mean(),
                "added_nll": added.mean(),
                "nll_error": added.sem(),
                "predicted_nats": None if plan is None else plan.provenance.predicted_nats,
                **found.reindex([name]).iloc[0],
                "encode_mb_per_second": speed(own, "encode_seconds"),
                "decode_mb_per_second": speed(own, "decode_seconds"),
            }
        )
    return pd.DataFrame(rows).sort_values("times_smaller", ignore_index=True)


def speed(windows: pd.DataFrame, column: str) -> float:
    """Return megabytes of the 16-bit cache in a second."""
    return float(windows["stock_bytes"].sum() / windows[column].sum(min_count=1) / 1e6)


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    """Return loss against size, answers found, and speeds."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    losses, recall, speeds = figure.subplots(1, 3)
    stored = results[results["predicted_nats"].notna()]
    losses.errorbar(
        stored["times_smaller"],
        stored["added_nll"],
        yerr=stored["nll_error"],
        capsize=3,
        label="recipe stored",
        **mark_of("stored").style,
    )
    reference(losses, 0, STOCK)
    label_axes(losses, "times smaller than in 16 bits", "added nats per token")
    first = results.iloc[0]
    tasks = first["tasks"].split()
    asked = results[results[tasks[0]].notna()]
    for place, task in enumerate(tasks):
        bars(recall, asked[task], place, len(tasks), color=colour_at(place), label=task)
    recall.set_xticks(range(len(asked)), list(asked["cache"]))
    recall.set_ylim(0, first["items"])
    recall.yaxis.set_major_locator(MaxNLocator(integer=True))
    label_axes(recall, "cache", f"answers found, of {first['items']}")
    coded = results[results["encode_mb_per_second"].notna()]
    for place, way in enumerate(("encode", "decode")):
        colour = colour_at(len(tasks) + place)
        heights = bars(speeds, coded[f"{way}_mb_per_second"], place, 2, color=colour, label=way)
        speeds.bar_label(heights, fmt="%.0f", fontsize=7)
    speeds.set_xticks(range(len(coded)), list(coded["cache"]))
    label_axes(speeds, "cache", "MB of the 16-bit cache per second")
    legend_below(figure)
    smallest = stored.iloc[-1]
    title_above(
        figure,
        f"{first['model']}: caches stored and read back lose {smallest['added_nll']:.3f} nats per "
        f"token where they are {smallest['times_smaller']:.1f} times smaller; prompts of "
        f"{first['prompt']} tokens, {first['windows']} windows (standard errors), "
        f"{common.counted(first['threads'], 'thread')}, seed {first['seed']}",
    )
    return {"stored_caches": figure}


def bars(axes: Axes, heights: pd.Series, place: int, kinds: int, **style: Any) -> BarContainer:
    """Draw a bar for each cache, one of so many kinds beside each other."""
    width = 0.8 / kinds
    shift = (place - (kinds - 1) / 2) * width
    return axes.bar([cache + shift for cache in range(len(heights))], heights, width, **style)


def summary(results: pd.DataFrame, given: argparse.Namespace, name: str) -> list[str]:
    """Return the lines of summary.md."""
    continuation = given.prompt if given.continuation is None else given.continuation
    rows = [
        [
            row["cache"],
            f"{row['times_smaller']:.2f}",
            f"{row['nbytes'] / 1e6:.3f}",
            *(["", ""] if row["cache"] in (STOCK, ZSTD) else loss_cells(row)),
            *("" if pd.isna(row[task]) else f"{row[task]:g}" for task in given.tasks),
            *(
                "" if pd.isna(row[f"{way}_mb_per_second"]) else f"{row[f'{way}_mb_per_second']:.1f}"
                for way in ("encode", "decode")
            ),
        ]
        for _, row in results.iterrows()
    ]
    return [
        f"# What a stored cache of {name} loses",
        "",
        f"Prompts of {given.prompt} held-out tokens of {common.short(given.text)} are read as "
        f"they are, their caches stored by recipe `stored` and read back, and the {continuation} "
        f"tokens after them predicted from what comes back: {given.held_out} windows, standard "
        f"errors over these. Answers found are of {given.items} prompts as long for each task. "
        f"Calibrated on "
        f"{given.sequences} × {given.sequence_length} other tokens of the text, seed "
        f"{given.seed}. Bytes are those of the blob with everything in it; times smaller and "
        f"megabytes per second are of the cache in bfloat16, which zstd (level {LEVEL}) stores "
        "without loss, on "
        f"{common.counted(given.threads, 'thread')}, in turns in one run.",
        "",
        *common.table(
            [
                "cache",
                "times smaller",
                "MB",
                "added nats per token",
                "predicted",
                *(f"{task}, of {given.items}" for task in given.tasks),
                "MB/s stored",
                "MB/s read",
            ],
            rows,
        ),
    ]


def loss_cells(row: pd.Series) -> list[str]:
    error = "" if pd.isna(row["nll_error"]) else f" ± {row['nll_error']:.4f}"
    return [f"{row['added_nll']:.4f}{error}", f"{row['predicted_nats']:.4f}"]


if __name__ == "__main__":
    sys.exit(main())
