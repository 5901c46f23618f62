"""What does a cache take of memory, with the bases that come once, and from where on is it less?

    python studies/memory.py
    python studies/memory.py --times 12

A stock cache, integers of 4 bits and recipe `best` are compared by what they hold for a context,
for one sequence and for several at once: bytes of tokens and of bases are those that frontier has
measured of a model (its results.csv), and counted for other lengths as plans count them. Nothing is
measured and no model is loaded. Written into --out: results.csv, a figure and summary.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import common
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from manifoldkv import RECIPES, BitRecipe, ManifoldKVError, OutputError
from manifoldkv.figures import legend_below, mark_of
from manifoldkv.figures.style import label_axes, title_above

BEST, INTEGERS, STOCK = "best", "integers", "uncompressed"
SAID = {STOCK: "stock cache, 16 bits", INTEGERS: "integers of 4 bits"}
FOUR_BITS = 4 / 16
MIB = 2**20
POINTS = 65


def main() -> int:
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="smollm2", help="that frontier has measured (%(default)s)")
    add("--times", type=float, default=8, help="smaller, of recipe best (%(default)s)")
    add("--context", type=int, default=8192, help="the longest (%(default)s)")
    add("--batches", type=int, nargs="+", default=[1, 8], help="sequences at once (1 8)")
    add(
        "--frontier",
        type=common.folder_named,
        help="folder with the results of frontier (figures/frontier/<model>)",
    )
    parser.add_threads()
    parser.add_out("figures/memory/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    if min(given.context, *given.batches) < 1:
        raise ManifoldKVError("--context and --batches must be at least 1")
    name = Path(given.model).name
    out = common.output_folder(given, "memory", name)
    if given.redraw:
        common.draw(out, draw)
        return
    measured = given.frontier or common.FIGURES / "frontier" / name
    results = memory(read(measured), given.times, given.context, given.batches)
    results.to_csv(out / "results.csv", index=False)
    common.draw(out, draw)
    common.write_summary(out, summary(results))


def read(folder: Path) -> pd.DataFrame:
    """Return the results of frontier in a folder.

    Raises
    ------
    OutputError
        If there are none.
    """
    path = folder / "results.csv"
    if not path.is_file():
        raise OutputError(f"{folder} has no results.csv of frontier; --frontier names the folder")
    return pd.read_csv(path)


def memory(measured: pd.DataFrame, times: float, context: int, batches: list[int]) -> pd.DataFrame:
    """Return bytes, bases among them, by cache, number of sequences and context.

    Parameters
    ----------
    measured : DataFrame
        From frontier.
    times : float
        Smaller, of `best`.
    context : int
        The longest, in tokens.
    batches : list of int
        Sequences at once, which share the bases.

    Raises
    ------
    ManifoldKVError
        If something was not measured.
    """
    stock = float((measured["bytes_per_token"] / measured["ratio"]).mean())
    tokens = np.unique(np.linspace(0, context, POINTS).astype(int))
    rows = []
    for name, ratio in ((STOCK, 1.0), (INTEGERS, FOUR_BITS), (BEST, 1 / times)):
        bases, latents, sinks, achieved = 0.0, stock, 0, 1.0
        if name != STOCK:
            bases, latents, sinks, achieved = _counted(measured, name, ratio, stock)
        # Of a sequence, as `CompressionPlan.nbytes`: the first tokens are held as they are, too.
        held = latents * tokens + stock * np.minimum(tokens, sinks)
        rows += [
            {"model": measured["model"].iloc[0], "cache": name, "sequences": batch}
            | {"tokens": int(length), "nbytes": bases + batch * float(nbytes)}
            | {"basis_bytes": bases, "bytes_per_token": latents, "sinks": sinks}
            | {"times_smaller": 1 / achieved}
            for batch in batches
            for length, nbytes in zip(tokens, held, strict=True)
        ]
    return pd.DataFrame(rows)


def _counted(
    measured: pd.DataFrame, name: str, ratio: float, stock: float
) -> tuple[float, float, int, float]:
    """Return bytes of the bases and of one more token, tokens held in full too, and the ratio."""
    near = measured["requested_ratio"].sub(ratio).abs() < 0.005 * ratio
    rows = measured[near & (measured["composition"] == name)]
    if rows.empty:
        raise ManifoldKVError(f"frontier has not measured {name} at a ratio of {ratio:g}")
    row, recipe = rows.iloc[0], RECIPES.get(name)
    sinks = recipe.sinks if isinstance(recipe, BitRecipe) else 0
    # Those of the window's length, the first tokens spread over it.
    latents = row["bytes_per_token"] - stock * min(sinks, row["window"]) / row["window"]
    return float(row["basis_bytes"]), float(latents), sinks, float(row["ratio"])


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    """Return memory against context, a panel for each number of sequences."""
    batches = list(dict.fromkeys(results["sequences"]))
    figure = Figure(figsize=(max(5.4, 4.4 * len(batches)), 4.0), layout="constrained")
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    for axes, batch in zip(panels, batches, strict=True):
        part = results[results["sequences"] == batch]
        for name, line in part.groupby("cache", sort=False):
            style = mark_of(str(name)).style | {"markevery": 8, "markersize": 5}
            axes.plot(line["tokens"], line["nbytes"] / MIB, label=said(str(name), line), **style)
        y = "memory of cache and bases, MiB" if batch == batches[0] else ""
        label_axes(axes, "context, tokens", y, _found(results, batch))
        axes.set_xlim(0, part["tokens"].max())
        axes.set_ylim(bottom=0)
    legend_below(figure)
    bases = results[results["cache"] == BEST]["basis_bytes"].iloc[0]
    once = f"with the {bases / MIB:.0f} MiB of bases and predictions that come once"
    title_above(figure, f"{results['model'].iloc[0]}: memory of recipe best, {once}")
    return {"memory_against_context": figure}


def said(name: str, line: pd.DataFrame) -> str:
    """Return what a cache is called in the figure."""
    if name in SAID:
        return SAID[name]
    return f"{name}, {line['times_smaller'].iloc[0]:.3g} times smaller"


def _found(results: pd.DataFrame, batch: int) -> str:
    """Return from which context on `best` takes the least memory."""
    by_cache = results[results["sequences"] == batch].pivot_table(
        index="tokens", columns="cache", values="nbytes"
    )
    stock, integers = (_from(by_cache, other) for other in (STOCK, INTEGERS))
    return (
        f"{common.counted(batch, 'sequence')}: less than the stock cache {stock},\n"
        f"than integers of 4 bits {integers}"
    )


def _from(by_cache: pd.DataFrame, other: str) -> str:
    """Return the context where two lines cross."""
    gap = (by_cache[BEST] - by_cache[other]).to_numpy()
    if gap[-1] >= 0:
        return "at no context here"
    first = int(np.argmax(gap < 0))
    tokens = by_cache.index.to_numpy(dtype=float)
    cross = np.interp(0, -gap[first - 1 : first + 1], tokens[first - 1 : first + 1])
    return f"from {cross:,.0f} tokens on"


def summary(results: pd.DataFrame) -> list[str]:
    """Return the lines of summary.md."""
    lengths = sorted(results["tokens"].unique())
    batches = dict.fromkeys(results["sequences"])
    shown = [lengths[len(lengths) * eighth // 8 - (eighth == 8)] for eighth in (1, 2, 4, 8)]
    rows = []
    for (batch, name), line in results.groupby(["sequences", "cache"], sort=False):
        of_length = line.set_index("tokens")["nbytes"] / MIB
        first = line.iloc[0]
        rows.append(
            [
                *(batch, f"`{name}`", f"{first['basis_bytes'] / MIB:.1f}"),
                f"{first['bytes_per_token']:.0f}",
                *(f"{of_length[length]:.1f}" for length in shown),
            ]
        )
    columns = ["sequences", "cache", "once, MiB", "bytes per token"]
    columns += [f"{length:,} tokens, MiB" for length in shown]
    return [
        f"# Memory of a cache against the context, {results['model'].iloc[0]}",
        "",
        "Everything that a cache holds, and bases and predictions, which come once for all "
        "sequences, in 16 bits. Bytes of tokens and bases are those that `studies/frontier.py` "
        f"has measured; the first {results['sinks'].max()} tokens of a sequence are held as they "
        f"are by `{BEST}`, beside their latents. The weights of the model, the same for all, are "
        "left out, and so is what a decode step holds while it runs. Nothing here depends on a "
        "seed.",
        "",
        *common.table(columns, rows),
        "",
        f"Where `{BEST}` takes the least:",
        "",
        *(f"- {_found(results, batch)}.".replace("\n", " ") for batch in batches),
    ]


if __name__ == "__main__":
    sys.exit(main())
