"""What do integer latents cost, and how should a subspace be turned before rounding?

The bases of a plan can be rotated within their subspaces without any effect on exact latents. This
study rounds the latents of one plan to 8, 4, 3 and 2 bits, in the paper's layout ("static": key
ranges calibrated per head and group, values per token and group) and KIVI's ("kivi": keys per
feature and run of 64 tokens, a window of exact tokens), behind each rotation, and measures the
perplexity of held-out text through the quantised cache. Writes results.csv, summary.md and a figure
into --out.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import pandas as pd
from common import ends_in_one_line, folder_named
from embedded import EMBEDDED
from matplotlib.figure import Figure
from tqdm import tqdm

from manifoldkv import (
    RECIPES,
    Quantization,
    compress,
    load_model,
    open_text,
    quantize,
    sample_tokens,
)
from manifoldkv.calibration import HELP as TEXT_HELP
from manifoldkv.evaluation import perplexity
from manifoldkv.figures import save_figure
from manifoldkv.output import check_writable
from manifoldkv.plan import LAYOUTS
from manifoldkv.quantize import ROTATIONS

HERE = Path(__file__).parent
BITS = (8, 4, 3, 2)
COLOURS = {"none": "#999999", "pca": "#E69F00", "hadamard": "#0072B2"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="reference-llama", help="as in compare_objectives (%(default)s)")
    add("--text", default="docstrings", help=f"{TEXT_HELP}; a fifth is held out (%(default)s)")
    add("--recipe", choices=RECIPES, default="eigen-attention", help="(%(default)s)")
    add("--ratio", type=float, default=0.6, help="of the cache before rounding (%(default)s)")
    add("--rotary", choices=("pre", "post"), default="pre", help="(%(default)s)")
    add("--sequences", type=int, default=16, help="in each split (%(default)s)")
    add("--sequence-length", type=int, default=1024, help="(%(default)s)")
    add("--out", type=folder_named, help="output folder (figures/compare_quantization/<model>)")
    given = parser.parse_args()
    name = Path(given.model).name
    out = given.out or HERE.parent / "figures" / "compare_quantization" / name
    with ends_in_one_line("compare_quantization", resumes=False):
        check_writable(out)
        results = measure(given)
    results.to_csv(out / "results.csv", index=False)
    save_figure(draw(results), out / "nll_against_bits")
    (out / "summary.md").write_text(summary(results), encoding="utf-8")
    print((out / "summary.md").read_text(encoding="utf-8"))
    print(f"written to {out}")
    return 0


def measure(given: argparse.Namespace) -> pd.DataFrame:
    model, tokenizer = load_model(EMBEDDED.get(given.model, given.model))
    text = open_text(given.text)
    size = {"sequences": given.sequences, "length": given.sequence_length}
    calibration = sample_tokens(text, tokenizer, split="calibration", **size)
    held_out = sample_tokens(text, tokenizer, split="held-out", **size)
    plan = compress(model, calibration, ratio=given.ratio, recipe=given.recipe, rotary=given.rotary)
    uncompressed = perplexity(model, held_out).nll
    exact = perplexity(model, held_out, plan).nll
    common = {
        "model": Path(given.model).name,
        "recipe": given.recipe,
        "rotary": given.rotary,
        "ratio": plan.ratio,
        "uncompressed_nll": uncompressed,
        "exact_nll": exact,
    }
    length = held_out.shape[1]
    stock_nbytes = plan.nbytes(length) / plan.ratio_at(length)
    rows = []
    settings = list(itertools.product(LAYOUTS, BITS, ROTATIONS))
    for layout, bits, rotation in tqdm(settings, desc="settings", disable=None):
        rounded = quantize(plan, model, calibration, Quantization(bits, layout), rotation)
        found = perplexity(model, held_out, rounded)
        rows.append(
            common
            | {"layout": layout, "bits": bits, "rotation": rotation}
            | {"nll": found.nll, "standard_error": found.standard_error}
            | {"tokens": length, "bytes_ratio": rounded.nbytes(length) / stock_nbytes}
            | {"bytes_per_token": rounded.bytes_per_token()}
        )
    return pd.DataFrame(rows)


def draw(results: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(7.0, 3.4), layout="constrained")
    for axes, layout in zip(figure.subplots(1, 2, sharey=True), LAYOUTS, strict=True):
        part = results[results["layout"] == layout]
        for rotation in ROTATIONS:
            line = part[part["rotation"] == rotation]
            cost = line["nll"] - line["exact_nll"]
            axes.plot(
                line["bytes_ratio"], cost, "o-", ms=4, color=COLOURS[rotation], label=rotation
            )
            for x, y, bits in zip(line["bytes_ratio"], cost, line["bits"], strict=True):
                if rotation == "none":
                    axes.annotate(
                        f"{bits} bit", (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points"
                    )
        axes.set_yscale("symlog", linthresh=0.01)
        axes.set_title(f"layout {layout}", fontsize=9)
        tokens = part["tokens"].iloc[0]
        axes.set_xlabel(f"bytes / uncompressed 16-bit cache, {tokens} tokens", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(visible=True, alpha=0.2)
    figure.axes[0].set_ylabel("added NLL, nats per token, held out", fontsize=8)
    figure.axes[0].legend(title="rotation", fontsize=8, title_fontsize=8)
    first = results.iloc[0]
    figure.suptitle(
        f"{first['model']}, {first['recipe']} at ratio {first['ratio']:.3g}: cost of rounding",
        fontsize=10,
    )
    return figure


def summary(results: pd.DataFrame) -> str:
    first = results.iloc[0]
    lines = [
        f"# Integer latents on {first['model']}",
        "",
        f"NLL on held-out text through the cache, nats per token; {first['recipe']} at ratio "
        f"{first['ratio']:.4g}, keys {first['rotary']}-rotation. Uncompressed "
        f"{first['uncompressed_nll']:.4f}, latents exact {first['exact_nll']:.4f}. The table shows "
        f"what rounding adds; best rotation in bold. Bytes are those of {first['tokens']} tokens, "
        "with scales, offsets and the newest tokens, which KIVI's layout keeps exact; and of one "
        "more token of a long text.",
        "",
        "| layout | bits | bytes / 16-bit cache | bytes per token | "
        + " | ".join(ROTATIONS)
        + " |",
        "|---|---|---|---|" + "---|" * len(ROTATIONS),
    ]
    for (layout, bits), part in results.groupby(["layout", "bits"], sort=False):
        costs = [
            float((part["nll"] - part["exact_nll"])[part["rotation"] == rotation].iloc[0])
            for rotation in ROTATIONS
        ]
        cells = [f"**{c:+.4f}**" if c == min(costs) else f"{c:+.4f}" for c in costs]
        share, more = part["bytes_ratio"].iloc[0], part["bytes_per_token"].iloc[0]
        lines.append(
            f"| {layout} | {bits} | {share:.3f} | {more:.0f} | " + " | ".join(cells) + " |"
        )
    command = " ".join(["python studies/compare_quantization.py", *sys.argv[1:]])
    return "\n".join([*lines, "", f"Command: `{command}`", ""])


if __name__ == "__main__":
    sys.exit(main())
