"""What do integer latents cost, and how should a subspace be turned before rounding?

The bases of a plan can be rotated within their subspaces without any effect on exact latents. This
study rounds the latents of one plan of every recipe to 8, 4, 3 and 2 bits, in the paper's layout
("static": key ranges calibrated per head and group, values per token and group) and KIVI's ("kivi":
keys per feature and run of 64 tokens, a window of exact tokens), behind each rotation, and measures
the perplexity of held-out text through the quantised cache. Writes results.csv, summary.md and a
figure into --out; what is measured is stored in --out/steps, and an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import common
import pandas as pd
from matplotlib.figure import Figure
from tqdm import tqdm

from manifoldkv import RECIPES, Quantization, Recipe, Uniform, compress, quantize
from manifoldkv.evaluation import Comparison, Perplexity, perplexity
from manifoldkv.figures import legend_below, mark_of
from manifoldkv.figures.paper import bits_above
from manifoldkv.figures.style import label_axes, linear_near_zero, title_above
from manifoldkv.pipeline.rounding import ROTATIONS
from manifoldkv.plan.quantization import Layout
from manifoldkv.runs.checkpoints import digest_of_model, digest_of_tokens

BITS = (8, 4, 3, 2)
LAYOUTS: tuple[Layout, ...] = ("static", "kivi")


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_model()
    parser.add_text()
    add = parser.add_argument
    add(
        "--recipes",
        nargs="+",
        choices=[name for name, recipe in RECIPES.items() if isinstance(recipe, Recipe)],
        default=["eigen-attention", "fast"],
        help="whose bases, with the same ranks in every layer (%(default)s)",
    )
    add("--ratio", type=float, default=0.6, help="of the cache before rounding (%(default)s)")
    add("--rotary", choices=("pre", "post"), default="pre", help="(%(default)s)")
    add("--sequences", type=int, default=16, help="in each split (%(default)s)")
    add("--sequence-length", type=int, default=1024, help="(%(default)s)")
    parser.add_threads()
    parser.add_out("figures/compare_quantization/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    out = common.output_folder(given, "compare_quantization", Path(given.model).name)
    if given.redraw:
        common.draw(out, draw)
        return
    results = pd.concat([measure(given, recipe, out) for recipe in given.recipes])
    results.to_csv(out / "results.csv", index=False)
    common.draw(out, draw)
    common.write_summary(out, summary(results))


def measure(given: argparse.Namespace, recipe: str, out: Path) -> pd.DataFrame:
    """Return a row for every layout, width and rotation of a recipe's latents."""
    model, tokenizer = common.load(given.model)
    calibration, held_out = common.calibration_and_held_out(
        given.text,
        tokenizer,
        sequences=given.sequences,
        held_out=given.sequences,
        length=given.sequence_length,
    )
    plan = compress(
        model,
        calibration,
        ratio=given.ratio,
        recipe=recipe,
        ranks=Uniform(),  # ranks that depend on bases would be compared too
        rotary=given.rotary,
        folder=out / "steps" / "plan",
    )
    checkpoints = common.stored_in(out, given).made_by(quantize, Perplexity)
    checkpoints = checkpoints.keyed(
        weights=digest_of_model(model),
        held_out=digest_of_tokens(held_out),
        calibration=digest_of_tokens(calibration),
    )

    def measured(settings: tuple[str, int, str] | None, plan: object) -> Perplexity:
        def compute() -> pd.DataFrame:
            rounded = plan
            if settings is not None:
                layout, bits, rotation = settings
                rounding = Quantization(bits, layout)  # type: ignore[arg-type]
                rounded = quantize(plan, model, calibration, rounding, rotation)  # type: ignore[arg-type]
            return pd.DataFrame({"nll": perplexity(model, held_out, rounded).by_sequence})  # type: ignore[arg-type]

        digest = None if plan is None else plan.digest()  # type: ignore[attr-defined]
        frame = checkpoints.keyed(plan=digest, settings=settings).frame("nll", compute)
        return Perplexity(tuple(frame["nll"]), held_out.numel() - len(held_out))

    uncompressed, exact = measured(None, None), measured(None, plan)
    length = held_out.shape[1]
    stock_nbytes = plan.nbytes(length) / plan.ratio_at(length)
    rows = []
    all_settings = list(itertools.product(LAYOUTS, BITS, ROTATIONS))
    for layout, bits, rotation in tqdm(all_settings, desc=recipe, disable=None):
        found = measured((layout, bits, rotation), plan)
        compared = Comparison(exact, found)
        rounded = quantize(plan, model, calibration[:1], Quantization(bits, layout))
        rows.append(
            {"model": Path(given.model).name, "recipe": recipe, "rotary": given.rotary}
            | {"ratio": plan.ratio, "tokens": length, "sequences": given.sequences}
            | {"layout": layout, "bits": bits, "rotation": rotation}
            | {"uncompressed_nll": uncompressed.nll, "exact_nll": exact.nll, "nll": found.nll}
            | {"added_nll": compared.added_nll, "standard_error": compared.standard_error}
            | {"bytes_ratio": rounded.nbytes(length) / stock_nbytes}
            | {"bytes_per_token": rounded.bytes_per_token()}
        )
    return pd.DataFrame(rows)


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    recipes = list(dict.fromkeys(results["recipe"]))
    figure = Figure(figsize=(7.6, 3.1 * len(recipes) + 0.9), layout="constrained")
    panels = figure.subplots(len(recipes), len(LAYOUTS), sharex=True, sharey=True, squeeze=False)
    lowest, highest = results["added_nll"].min(), results["added_nll"].max()
    for row, recipe in zip(panels, recipes, strict=True):
        for axes, layout in zip(row, LAYOUTS, strict=True):
            part = results[(results["recipe"] == recipe) & (results["layout"] == layout)]
            for rotation in ROTATIONS:
                line = part[part["rotation"] == rotation]
                style = mark_of(rotation).style
                label = f"rotation: {rotation}"
                axes.plot(line["bytes_ratio"], line["added_nll"], ms=4.5, label=label, **style)
            x = "bytes / uncompressed 16-bit cache" if recipe == recipes[-1] else ""
            y = "added by rounding, nats per token" if axes is row[0] else ""
            label_axes(axes, x, y, f"{recipe}, layout {layout}")
            bits_above(axes, part)
    for axes in panels.flat:
        linear_near_zero(axes, lowest, highest)
    legend_below(figure)
    first = results.iloc[0]
    title_above(
        figure,
        f"{first['model']}, ratio {first['ratio']:.3g} before rounding, {first['tokens']} tokens: "
        f"{_finding(results)}",
    )
    return {"nll_against_bits": figure}


def _finding(results: pd.DataFrame) -> str:
    """Return how often each rotation adds least."""
    cases = results.groupby(["recipe", "layout", "bits"])["added_nll"]
    best = results.loc[cases.idxmin(), "rotation"].value_counts()
    counts = [f"{rotation} in {best.get(rotation, 0)}" for rotation in ROTATIONS]
    return f"of {cases.ngroups} cases, the rotation that adds least is {', '.join(counts)}"


def summary(results: pd.DataFrame) -> list[str]:
    first = results.iloc[0]
    lines = [
        f"# Integer latents on {first['model']}",
        "",
        f"NLL that rounding adds to exact latents at ratio {first['ratio']:.4g} (the same ranks in "
        "every layer), on held-out text through the cache, nats per token; keys "
        f"{first['rotary']}-rotation; {first['sequences']} sequences of {first['tokens']} tokens "
        "for calibration and as many held out, one seed. Best rotation in bold. Bytes are those of "
        f"{first['tokens']} tokens, with scales, offsets and the newest tokens, which KIVI's "
        "layout keeps exact; and of one more token of a long text.",
    ]
    for recipe, of_recipe in results.groupby("recipe", sort=False):
        nll = of_recipe[["uncompressed_nll", "exact_nll"]].iloc[0]
        lines += [
            "",
            f"## {recipe}: uncompressed {nll.iloc[0]:.4f}, latents exact {nll.iloc[1]:.4f}",
            "",
        ]
        rows = []
        for (layout, bits), part in of_recipe.groupby(["layout", "bits"], sort=False):
            costs = part.set_index("rotation")["added_nll"]
            cells = [
                f"**{costs[r]:+.4f}**" if costs[r] == costs.min() else f"{costs[r]:+.4f}"
                for r in ROTATIONS
            ]
            share, more = part["bytes_ratio"].iloc[0], part["bytes_per_token"].iloc[0]
            error = part["standard_error"].max()
            rows.append([layout, bits, f"{share:.3f}", f"{more:.0f}", *cells, f"{error:.4f}"])
        columns = ["layout", "bits", "bytes / 16-bit cache", "bytes per token", *ROTATIONS]
        lines += common.table([*columns, "standard error, at most"], rows)
    return lines


if __name__ == "__main__":
    sys.exit(main())
