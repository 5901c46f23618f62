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
from manifoldkv.figures import save_figure
from manifoldkv.pipeline.rounding import ROTATIONS
from manifoldkv.plan.quantization import Layout
from manifoldkv.runs.checkpoints import digest_of_model, digest_of_tokens

BITS = (8, 4, 3, 2)
LAYOUTS: tuple[Layout, ...] = ("static", "kivi")
COLOURS = {"none": "#999999", "pca": "#E69F00", "hadamard": "#0072B2"}


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
    results = pd.concat([measure(given, recipe, out) for recipe in given.recipes])
    results.to_csv(out / "results.csv", index=False)
    save_figure(draw(results), out / "nll_against_bits")
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


def draw(results: pd.DataFrame) -> Figure:
    recipes = list(dict.fromkeys(results["recipe"]))
    figure = Figure(figsize=(7.0, 2.9 * len(recipes) + 0.5), layout="constrained")
    panels = figure.subplots(len(recipes), len(LAYOUTS), sharex=True, sharey=True, squeeze=False)
    for row, recipe in zip(panels, recipes, strict=True):
        for axes, layout in zip(row, LAYOUTS, strict=True):
            part = results[(results["recipe"] == recipe) & (results["layout"] == layout)]
            for rotation in ROTATIONS:
                line = part[part["rotation"] == rotation]
                axes.plot(
                    line["bytes_ratio"],
                    line["added_nll"],
                    "o-",
                    ms=4,
                    color=COLOURS[rotation],
                    label=rotation,
                )
            for _, point in part[part["rotation"] == "none"].iterrows():
                place = (point["bytes_ratio"], point["added_nll"])
                axes.annotate(
                    f"{point['bits']} bit",
                    place,
                    fontsize=7,
                    xytext=(3, 3),
                    textcoords="offset points",
                )
            axes.set_yscale("symlog", linthresh=0.01)
            axes.set_title(f"{recipe}, layout {layout}", fontsize=9)
            axes.tick_params(labelsize=7)
            axes.grid(visible=True, alpha=0.2)
    for axes in panels[-1]:
        tokens = results["tokens"].iloc[0]
        axes.set_xlabel(f"bytes / uncompressed 16-bit cache, {tokens} tokens", fontsize=8)
    for axes in panels[:, 0]:
        axes.set_ylabel("NLL added by rounding, nats per token", fontsize=8)
    panels[0][0].legend(title="rotation", fontsize=8, title_fontsize=8)
    first = results.iloc[0]
    figure.suptitle(
        f"{first['model']} at ratio {first['ratio']:.3g} before rounding, held out, linear below "
        "0.01",
        fontsize=10,
    )
    return figure


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
