"""What engines have answered: tables, a figure and a summary."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field

import common
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engines.base import EXPORTED, ORIGINAL
from manifoldkv.figures.style import title_above

REFERENCE = "transformers"
"""The engine whose texts the others' are compared to."""
COLOURS = {"transformers": "#009E73", "vllm": "#D55E00", "llama.cpp": "#0072B2"}
OTHER = "#999999"
STYLES, MARKERS = ("-", "--", ":"), ("o", "s", "^")
CELL = ["engine", "cache", "tokens"]


@dataclass
class Served:
    """The answers of all engines.

    Parameters
    ----------
    results : DataFrame
        A row for each engine, checkpoint and cache: bytes per token, tokens held, and of how many
        greedy texts every token is that of transformers.
    speeds : DataFrame
        A row for each of these and context: medians over rounds, and of ratios within a round.
    losses : DataFrame
        A row for each checkpoint and cache of llama.cpp and text: means over windows.
    store : DataFrame
        One row: a prompt that vLLM serves from a store.
    versions, missing : dict of str to str
        By engine: its version, or why it has not answered.
    """

    results: pd.DataFrame = field(default_factory=pd.DataFrame)
    speeds: pd.DataFrame = field(default_factory=pd.DataFrame)
    losses: pd.DataFrame = field(default_factory=pd.DataFrame)
    store: pd.DataFrame = field(default_factory=pd.DataFrame)
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    texts: dict[str, pd.DataFrame] = field(default_factory=dict)

    def add(
        self,
        engine: str,
        caches: pd.DataFrame,
        texts: pd.DataFrame,
        speeds: pd.DataFrame,
        losses: pd.DataFrame,
        store: pd.DataFrame,
    ) -> None:
        """Add what an engine has answered, as `Engine` describes it."""
        self.texts[engine] = texts
        rows = caches.assign(engine=engine, **dict.fromkeys(("texts", "same_texts")))
        first = rows.groupby("checkpoint").head(1)
        for index, row in first.iterrows():
            same = self._same_texts(engine, row["checkpoint"])
            rows.loc[index, ["texts", "same_texts"]] = [len(same), sum(same)]
        self.results = _with(self.results, rows)
        self.speeds = _with(self.speeds, summarized(speeds.assign(engine=engine)))
        if len(losses):
            sizes = rows[["checkpoint", "cache", "bytes_per_token"]]
            of_engine = added(losses.assign(engine=engine))
            self.losses = _with(self.losses, of_engine.merge(sizes, on=["checkpoint", "cache"]))
        if len(store):
            self.store = store

    def _same_texts(self, engine: str, checkpoint: str) -> list[bool]:
        own, reference = (
            frame[frame["checkpoint"] == checkpoint].sort_values("prompt")["ids"].map(json.loads)
            for frame in (self.texts[engine], self.texts[REFERENCE])
        )
        return [mine == its for mine, its in zip(own, reference, strict=True)]


def _with(frame: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    front = ["engine", "checkpoint", "cache"]
    rows = rows[[*front, *(name for name in rows.columns if name not in front)]]
    return pd.concat([frame, rows], ignore_index=True) if len(frame) else rows


def summarized(speeds: pd.DataFrame) -> pd.DataFrame:
    """Return medians over rounds: of speeds, and of their ratios to the original's in a round."""
    own = speeds.pivot_table("tokens_per_second", [*CELL, "round"], "checkpoint", sort=False)
    rows = []
    for checkpoint in (ORIGINAL, EXPORTED):
        ratios = own[checkpoint] / own[ORIGINAL]
        medians = pd.DataFrame({"tokens_per_second": own[checkpoint], "ratio_to_original": ratios})
        found = medians.groupby(CELL, sort=False).median().reset_index()
        rows.append(found.assign(checkpoint=checkpoint, rounds=own.groupby(CELL).size().max()))
    return pd.concat(rows, ignore_index=True)


def added(losses: pd.DataFrame) -> pd.DataFrame:
    """Return losses, mean and standard error over windows, and what is added to the original's.

    The original is that with the first type of cache.
    """
    stock = losses[
        (losses["checkpoint"] == ORIGINAL) & (losses["cache"] == losses["cache"].iloc[0])
    ]
    beside = losses.merge(stock[["text", "window", "nll"]], on=["text", "window"])
    beside["added_nll"] = beside["nll_x"] - beside["nll_y"]
    groups = beside.groupby(["engine", "checkpoint", "cache", "text"], sort=False)
    return groups.agg(
        nll=("nll_x", "mean"),
        added_nll=("added_nll", "mean"),
        nll_error=("added_nll", "sem"),
        windows=("window", "size"),
    ).reset_index()


def draw(results: pd.DataFrame, speeds: pd.DataFrame, losses: pd.DataFrame) -> Figure:
    """Return bytes per token, speeds beside the original's, and losses against bytes."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    size_axes, speed_axes, loss_axes = figure.subplots(1, 3)
    _draw_sizes(size_axes, results)
    _draw_speeds(speed_axes, speeds)
    _draw_losses(loss_axes, losses)
    bytes_by = results.pivot_table(
        index=["engine", "cache"], columns="checkpoint", values="bytes_per_token"
    )
    share = (bytes_by[EXPORTED] / bytes_by[ORIGINAL]).mean()
    first = results.iloc[0]
    title_above(
        figure,
        f"{first['model']}: the cache of the exported checkpoint takes {share:.2f} of the "
        f"original's bytes in {', '.join(dict.fromkeys(results['version']))}; "
        f"{common.counted(int(first['threads']), 'thread')}, standard errors over windows",
    )
    return figure


def _draw_sizes(axes: Axes, results: pd.DataFrame) -> None:
    labels = list(dict.fromkeys(results["engine"] + "\n" + results["cache"]))
    for offset, checkpoint in ((-0.2, ORIGINAL), (0.2, EXPORTED)):
        rows = results[results["checkpoint"] == checkpoint]
        axes.bar(
            [place + offset for place in range(len(rows))],
            rows["bytes_per_token"] / 1024,
            0.4,
            label=checkpoint,
            color=OTHER if checkpoint == ORIGINAL else [COLOURS[e] for e in rows["engine"]],
        )
    axes.set_xticks(range(len(labels)), labels, fontsize=7)
    axes.set_ylabel("KiB of cache per token, as the engine says\n(grey: the original)")


def _draw_speeds(axes: Axes, speeds: pd.DataFrame) -> None:
    rows = speeds[speeds["checkpoint"] == EXPORTED]
    for engine, own in rows.groupby("engine", sort=False):
        by_cache = own.groupby("cache", sort=False)
        for style, marker, (cache, points) in zip(STYLES, MARKERS, by_cache, strict=False):
            axes.plot(
                points["tokens"],
                points["ratio_to_original"],
                style,
                marker=marker,
                color=COLOURS[str(engine)],
                label=f"{engine}, {cache}",
            )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(rows["tokens"])), sorted(set(rows["tokens"])))
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("tokens per second, exported / original")
    axes.legend(fontsize=7, frameon=False)


def _draw_losses(axes: Axes, losses: pd.DataFrame) -> None:
    if not len(losses):
        axes.text(0.5, 0.5, "no losses:\nllama.cpp is missing", transform=axes.transAxes)
        axes.set_axis_off()
        return
    by_text = losses.groupby("text", sort=False)
    for style, marker, (text, of_text) in zip(STYLES, MARKERS, by_text, strict=False):
        for checkpoint, own in of_text.groupby("checkpoint", sort=False):
            axes.errorbar(
                own["bytes_per_token"] / 1024,
                own["added_nll"],
                yerr=own["nll_error"],
                linestyle=style,
                marker=marker,
                capsize=3,
                color=OTHER if checkpoint == ORIGINAL else COLOURS["llama.cpp"],
                label=f"{checkpoint}, {text}",
            )
    axes.set_xlabel("KiB of cache per token (llama.cpp)")
    axes.set_ylabel("added nats per token")
    axes.legend(fontsize=7, frameon=False)


def summary(served: Served, given: argparse.Namespace) -> list[str]:
    """Return the lines of summary.md."""
    lines = [
        f"# {common.short(given.model)} and its exported checkpoint, served",
        "",
        f"Engines: {', '.join(served.versions.values())}; on "
        f"{common.counted(given.threads, 'thread')}. transformers and vLLM compute in "
        f"{given.dtype}, llama.cpp on GGUF files with weights in float16 and with "
        "flash attention. Bytes are what each engine reports. Greedy texts go on by "
        f"{given.new_tokens} tokens from {common.counted(given.prompts, 'prompt')} of "
        f"{given.prompt} token ids of {common.short(given.texts[0])}; one counts as the same if "
        "every token is that of transformers with the same checkpoint.",
        "",
        *(f"Missing: {name}: {reason}." for name, reason in served.missing.items()),
        *([""] if served.missing else []),
        *common.table(
            ["engine", "checkpoint", "cache", "bytes per token", "tokens held", "same texts"],
            [_size_cells(row) for _, row in served.results.iterrows()],
        ),
        "",
        "## Speed",
        "",
        f"Tokens per second of one sequence, {given.steps} at a time: medians over "
        f"{common.counted(given.rounds, 'round')} in which the checkpoints take turns, the ratio "
        "that of a round.",
        "",
        *common.table(
            ["engine", "cache", "tokens in it", "checkpoint", "tokens per second", "ratio"],
            [
                [
                    *(row[name] for name in (*CELL, "checkpoint")),
                    f"{row['tokens_per_second']:.3g}",
                    f"{row['ratio_to_original']:.2f}",
                ]
                for _, row in served.speeds.sort_values(CELL, kind="stable").iterrows()
            ],
        ),
    ]
    return [*lines, *_losses(served, given), *_store(served)]


def _size_cells(row: pd.Series) -> list[str]:
    held = "" if pd.isna(row["tokens_held"]) else f"{row['tokens_held']:,.0f}"
    same = "" if pd.isna(row["texts"]) else f"{row['same_texts']:.0f} of {row['texts']:.0f}"
    return [
        *(str(row[name]) for name in ("engine", "checkpoint", "cache")),
        f"{row['bytes_per_token']:,.0f}",
        held,
        same,
    ]


def _losses(served: Served, given: argparse.Namespace) -> list[str]:
    if not len(served.losses):
        return []
    return [
        "",
        "## Loss in llama.cpp",
        "",
        f"Nats per token on {given.windows} windows of {given.window} held-out tokens of each text "
        "that go through the cache, standard errors over these; added to the original with a "
        "cache in 16 bits.",
        "",
        *common.table(
            ["text", "checkpoint", "cache", "bytes per token", "nats per token", "added"],
            [
                [
                    *(row[name] for name in ("text", "checkpoint", "cache")),
                    f"{row['bytes_per_token']:,.0f}",
                    f"{row['nll']:.4f}",
                    f"{row['added_nll']:.4f}"
                    + ("" if pd.isna(row["nll_error"]) else f" ± {row['nll_error']:.4f}"),
                ]
                for _, row in served.losses.iterrows()
            ],
        ),
    ]


def _store(served: Served) -> list[str]:
    if not len(served.store):
        return []
    row = served.store.iloc[0]
    said = {True: "yes", False: "no"}
    return [
        "",
        "## A prompt served from disk by vLLM",
        "",
        f"A prompt of {row['prompt_tokens']} tokens is computed by a server with the original and "
        "a codec as its KV connector, the server is restarted, and the same prompt is served.",
        "",
        *common.table(
            ["what", ""],
            [
                ["tokens served from disk", row["tokens_served"]],
                ["bytes on disk", f"{row['nbytes']:,}"],
                ["times smaller than in 16 bits", f"{row['times_smaller']:.2f}"],
                ["computed: text as transformers'", said[bool(row["computed_as_stock"])]],
                [
                    "served: text as transformers' on the decoded cache",
                    said[bool(row["served_as_decoded"])],
                ],
                ["served: text as computed", said[bool(row["served_as_computed"])]],
                ["seconds to the last token, computed", f"{row['seconds_computed']:.1f}"],
                ["seconds to the last token, served", f"{row['seconds_served']:.1f}"],
            ],
        ),
    ]
