"""What do keys lose that commute with their rotation, and what do tuning and healing give back?

    python studies/commuting.py
    python studies/commuting.py --model reference-qwen3
    python studies/commuting.py --model smollm2 --text c4-validation.jsonl \\
        --held-out-texts c4-validation.jsonl wikitext2-test.txt --sequences 16 --windows 4

All caches take the same bytes. In the first ones only the keys differ, the values are in one
oblique basis over all heads: free bases before rotation, which must be rebuilt at every step;
commuting ones with complex directions within each frequency, weighed by Fisher information or by
the queries; real ones, unweighted as in TransMLA and weighted; and whole frequencies of each head,
kept or dropped, as in RAP (here the same ones in all heads and layers, as a plain checkpoint needs
it). The recipe's bases are then tuned, multiplied into the weights, and these are healed; so are
those that are moved, values too, to the least error at the output of the decoder layer. Written
into --out: results.csv, a figure and summary.md. What is measured is stored in --out/steps: an
interrupted run goes on where it was, a repeated one draws at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import common
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv import (
    Basis,
    CommutingRecipe,
    CompressionConfig,
    CompressionPlan,
    HeadGrouping,
    ManifoldKVError,
    Perplexity,
    open_text,
    perplexity,
    sample_tokens,
    tune,
)
from manifoldkv.evaluation.perplexity import Comparison
from manifoldkv.export.fold import check_foldable, folded
from manifoldkv.export.heal import heal
from manifoldkv.figures import legend_below
from manifoldkv.figures.palette import colour_at
from manifoldkv.figures.style import label_axes, title_above
from manifoldkv.objectives.linear_algebra import weighted_closed_form
from manifoldkv.pipeline.commuting import (
    Forms,
    PreparedCommuting,
    closed_form,
    of_groups,
    plan_of,
    prepare_commuting,
    quadratic_forms,
)
from manifoldkv.pipeline.commuting_descent import descended
from manifoldkv.plan.layer import detached
from manifoldkv.ranks.fisher import fisher_moments
from manifoldkv.runs.checkpoints import digest_of_model, digest_of_tokens

FREE, FISHER, QUERIES = "free, before rotation", "commuting", "commuting, query weights"
REAL, TRANSMLA, PAIRS = "real", "real, unweighted (TransMLA)", "whole frequencies (RAP)"
TUNED, HEALED = "commuting, tuned", "commuting, tuned and healed"
UNTUNED = "commuting, healed"
LAYER, LAYER_TUNED = "layer output", "layer output, tuned"
LAYER_HEALED = "layer output, tuned and healed"


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_model()
    parser.add_text()
    add = parser.add_argument
    add("--held-out-texts", nargs="+", help="measured on; that of --text if omitted")
    add("--ratio", type=float, default=0.5, help="of the cache (%(default)s)")
    add("--sequences", type=int, default=64, help="for calibration and tuning (%(default)s)")
    add("--length", type=int, default=512, help="of their tokens, and of windows (%(default)s)")
    add("--windows", type=int, default=32, help="held out, of each text (%(default)s)")
    add("--tuning-steps", type=int, default=200, help="(%(default)s)")
    add("--healing-steps", type=int, default=200, help="(%(default)s)")
    add("--healing-sequences", type=int, default=256, help="of --text (%(default)s)")
    add("--sequences-per-step", type=int, default=4, help="of both (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_threads()
    parser.add_out("figures/commuting/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    name = Path(given.model).name
    out = common.output_folder(given, "commuting", name)
    if given.redraw:
        common.draw(out, draw)
        return
    results = Commuting(given, out).measure()
    results.to_csv(out / "results.csv", index=False)
    common.draw(out, draw)
    common.write_summary(out, summary(results))


class Commuting:
    """Caches of one model at the same bytes, and what each of them adds to the loss."""

    def __init__(self, given: argparse.Namespace, out: Path) -> None:
        self.given, self.out = given, out
        self.model, tokenizer = common.load(given.model)
        text = open_text(given.text)

        def tokens(count: int) -> Tensor:
            return sample_tokens(
                text, tokenizer, sequences=count, length=given.length, split="calibration"
            )

        self.calibration = tokens(given.sequences)
        self.healing = self.calibration
        if given.healing_steps:
            self.healing = tokens(given.healing_sequences)
        self.held_out = common.held_out_windows(given, tokenizer)
        self.stored = common.stored_in(out, given).keyed(
            model=digest_of_model(self.model),
            calibration=digest_of_tokens(self.calibration),
            threads=given.threads,
        )
        self.run = self.prepared(CommutingRecipe())

    def prepared(self, recipe: CommutingRecipe) -> PreparedCommuting:
        """Return a run of the recipe on the calibration data."""
        config = CompressionConfig(ratio=self.given.ratio, recipe=recipe, seed=self.given.seed)
        return prepare_commuting(self.model, self.calibration, config, recipe)

    def measure(self) -> pd.DataFrame:
        """Return a row for every cache and text."""
        plans = self.plans()
        rows = []
        for name, plan in plans.items():
            rows += self.rows(name, plan, partial(perplexity, self.model, plan=plan))
        if foldable(self.model, plans[FISHER]) and self.given.healing_steps:
            for name, start in ((UNTUNED, FISHER), (HEALED, TUNED), (LAYER_HEALED, LAYER_TUNED)):
                if start in plans:
                    healed = Healed(self, plans[start])
                    rows += self.rows(name, plans[start], healed.perplexity)
        return pd.DataFrame(rows)

    def plans(self) -> dict[str, CompressionPlan]:
        """Return the plans of all caches, by name."""
        fisher = self.bases(CommutingRecipe("fisher"))
        queries = self.bases(CommutingRecipe("kq-svd"))
        keys, values = [form for form, _ in fisher], self.values(fisher)
        grouping, pairs = self.run.grouping, self.run.latents // 2
        alone = HeadGrouping(1, grouping.heads)
        of_heads = [
            (of_groups(gram[0], alone), of_groups(weight[0], alone)) for gram, weight in keys
        ]
        made = {
            FREE: [_free(*forms, self.run.latents, grouping) for forms in keys],
            FISHER: closed_form(keys, pairs, grouping),
            QUERIES: closed_form([form for form, _ in queries], pairs, grouping),
            REAL: closed_form(keys, pairs, grouping, real=True),
            TRANSMLA: closed_form(
                [(gram, torch.eye(gram.shape[-1]).to(gram).expand_as(gram)) for gram, _ in keys],
                pairs,
                grouping,
                real=True,
            ),
        }
        if pairs % grouping.width == 0:
            made[PAIRS] = closed_form(of_heads, pairs // grouping.width, alone)
        found = {
            name: plan_of(self.model, self.run, [*zip(bases, values, strict=True)])
            for name, bases in made.items()
        }
        found[FREE] = replace(found[FREE], rotary="pre")
        if self.given.tuning_steps:
            found[TUNED] = self.tuned(found[FISHER])
        found[LAYER] = self.moved(found[QUERIES], queries)
        if self.given.tuning_steps:
            found[LAYER_TUNED] = self.tuned(found[LAYER])
        return found

    def tuned(self, plan: CompressionPlan) -> CompressionPlan:
        """Return a plan tuned end to end."""
        return tune(
            self.model,
            plan,
            self.calibration,
            steps=self.given.tuning_steps,
            sequences_per_step=self.given.sequences_per_step,
            seed=self.given.seed,
            checkpoints=self.stored,
        )

    def moved(self, plan: CompressionPlan, queries: list[tuple[Forms, Forms]]) -> CompressionPlan:
        """Return the plan of objective layer-output, stored: it starts from query weights."""
        run = self.prepared(CommutingRecipe("layer-output"))
        values = self.values(queries)
        start = [(layer.key, value) for layer, value in zip(plan.layers, values, strict=True)]
        stored = self.stored.made_by(descended).keyed(start=plan.digest(), seed=self.given.seed)

        def compute() -> dict[str, Tensor]:
            layers = enumerate(descended(self.model, run, start))
            return {
                f"{layer}.{site}.{part}": matrix.contiguous()
                for layer, bases in layers
                for site, basis in enumerate(bases)
                for part, matrix in enumerate((basis.down, basis.up))
            }

        known = stored.tensors("moved", compute)

        def basis(of: Basis, layer: int, site: int) -> Basis:
            down, up = (known[f"{layer}.{site}.{part}"] for part in range(2))
            return replace(of, down=down, up=up)

        bases = [
            (basis(key, layer, 0), basis(value, layer, 1))
            for layer, (key, value) in enumerate(start)
        ]
        return plan_of(self.model, run, bases)

    def bases(self, recipe: CommutingRecipe) -> list[tuple[Forms, Forms]]:
        """Return the quadratic forms of an objective, stored."""
        run = self.prepared(recipe)
        stored = self.stored.made_by(quadratic_forms, fisher_moments).keyed(
            objective=recipe.objective, seed=self.given.seed
        )

        def compute() -> dict[str, Tensor]:
            moments = self.out / "steps" / "fisher"
            layers = list(quadratic_forms(self.model, run, moments))
            return {
                f"{layer}.{site}.{part}": form.contiguous()
                for layer, sites in enumerate(layers)
                for site, forms in enumerate(sites)
                for part, form in enumerate(forms)
            }

        known = stored.tensors("forms", compute)

        def forms(layer: int, site: int) -> Forms:
            return known[f"{layer}.{site}.0"], known[f"{layer}.{site}.1"]

        return [(forms(layer, 0), forms(layer, 1)) for layer in range(len(known) // 4)]

    def values(self, forms: list[tuple[Forms, Forms]]) -> list[Basis]:
        """Return the bases of values that all caches share."""
        return [_free(*value, self.run.latents, self.run.grouping) for _, value in forms]

    def rows(
        self, name: str, plan: CompressionPlan, measured: Callable[[Tensor], Perplexity]
    ) -> list[dict[str, object]]:
        """Return a row of a cache for every text."""
        found = []
        steps = plan.provenance.tuning_steps
        healed = self.given.healing_steps if "healed" in name else 0
        for text, tokens in self.held_out.items():
            stock = self.losses(tokens, None, partial(perplexity, self.model))
            own = [plan.digest(), *([self.healing_settings] if healed else [])]
            compared = Comparison(stock, self.losses(tokens, own, measured))
            found.append(
                {"model": Path(self.given.model).name, "cache": name, "text": text}
                | {"ratio": plan.ratio, "bytes_per_token": plan.bytes_per_token()}
                | {"added_nll": compared.added_nll, "standard_error": compared.standard_error}
                | {"uncompressed_nll": stock.nll, "tuning_steps": steps}
                | {"healing_steps": healed, "sequences_per_step": self.given.sequences_per_step}
                | {"calibration": len(self.calibration), "healing": len(self.healing)}
                | {"windows": len(tokens), "length": tokens.shape[1], "seed": self.given.seed}
                | {"threads": self.given.threads}
            )
        return found

    @property
    def healing_settings(self) -> list[object]:
        """Return what a healed model depends on beside its plan."""
        given = self.given
        tokens = digest_of_tokens(self.healing)
        return [given.healing_steps, given.sequences_per_step, given.seed, tokens]

    def losses(
        self, tokens: Tensor, cache: object, measured: Callable[[Tensor], Perplexity]
    ) -> Perplexity:
        """Return what was measured on tokens, from the store if it is there."""
        stored = self.stored.made_by(perplexity, folded, heal).keyed(cache=cache)
        return common.stored_perplexity(stored, tokens, measured)


class Healed:
    """A folded model that is healed when it is first measured."""

    def __init__(self, contest: Commuting, plan: CompressionPlan) -> None:
        self.contest, self.plan = contest, plan
        self.model: PreTrainedModel | None = None

    def perplexity(self, tokens: Tensor) -> Perplexity:
        """Return how well it predicts tokens, on the stock cache that it has."""
        if self.model is None:
            contest = self.contest
            self.model = folded(contest.model, self.plan)
            heal(
                contest.model,
                self.model,
                contest.healing,
                steps=contest.given.healing_steps,
                sequences_per_step=contest.given.sequences_per_step,
                seed=contest.given.seed,
                checkpoints=contest.stored.keyed(
                    plan=self.plan.digest(), healing_on=digest_of_tokens(contest.healing)
                ),
            )
        return perplexity(self.model, tokens)


def foldable(model: PreTrainedModel, plan: CompressionPlan) -> bool:
    """Return whether a plan can be multiplied into the weights of its model."""
    try:
        check_foldable(model, plan)
    except ManifoldKVError:
        return False
    return True


def _free(gram: Tensor, weight: Tensor, latents: int, grouping: HeadGrouping) -> Basis:
    """Return an oblique basis that need not commute."""
    down, up = (detached(x.float()) for x in weighted_closed_form(gram, weight, latents))
    return Basis(down, up, grouping)


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    """Return bars of added nats, a colour for each text."""
    caches, texts = (list(dict.fromkeys(results[name])) for name in ("cache", "text"))
    height = 0.8 / len(texts)
    tall = (0.2 + 0.2 * len(texts)) * len(caches) + 1.5
    figure = Figure(figsize=(7.0, tall), layout="constrained")
    axes = figure.subplots()
    for place, text in enumerate(texts):
        part = results[results["text"] == text].set_index("cache").loc[caches]
        bars = axes.barh(
            [row + (place - (len(texts) - 1) / 2) * height for row in range(len(caches))],
            part["added_nll"],
            height,
            xerr=part["standard_error"],
            color=colour_at(place),
            error_kw={"lw": 0.8},
            label=text,
        )
        axes.bar_label(bars, fmt="%.3f", fontsize=7, padding=3)
    label_axes(axes, "added nats per token, held out", "")
    axes.set_yticks(range(len(caches)), caches, fontsize=8)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.1)
    legend_below(figure)
    first = results.iloc[0]
    shown = results[results["text"] == texts[0]].set_index("cache")["added_nll"]
    found = [
        f"{name} {shown[name]:.3f}"
        for name in (FREE, FISHER, LAYER, TUNED, HEALED)
        if name in shown
    ]
    title_above(
        figure,
        f"{first['model']}, keys and values at {first['ratio']:.3g} of their bytes each, nats "
        f"added on {texts[0]}: {'; '.join(found)}",
    )
    return {"added_nats": figure}


def summary(results: pd.DataFrame) -> list[str]:
    """Return the table of all caches, and what was used."""
    first, last = results.iloc[0], results.iloc[-1]
    texts = list(dict.fromkeys(results["text"]))
    by_text = [results[results["text"] == text].set_index("cache") for text in texts]
    rows = []
    for cache, part in results.groupby("cache", sort=False):
        losses = (table.loc[cache] for table in by_text)
        cells = [f"{row['added_nll']:.3f} ± {row['standard_error']:.3f}" for row in losses]
        steps = part[["tuning_steps", "healing_steps"]].iloc[0].tolist()
        rows.append([cache, f"{part['bytes_per_token'].iloc[0]:.0f}", *steps, *cells])
    columns = ["cache", "bytes per token", "tuning steps", "healing steps", *texts]
    return [
        f"# Keys that commute with their rotation, {first['model']}",
        "",
        f"Added nats per token on held-out text, {first['windows']} windows of {first['length']} "
        f"tokens of each text, ± the standard error over windows; every cache at "
        f"{first['ratio']:.3g} of the uncompressed one, in 16-bit numbers. Calibration and tuning "
        f"on {first['calibration']} × {first['length']} tokens, healing on {last['healing']}, "
        f"{first['sequences_per_step']} sequences in a step; seed {first['seed']}, "
        f"{first['threads']} threads.",
        "",
        *common.table(columns, rows),
        "",
        "All but the healed ones are measured through the compressed cache, these on the stock "
        "cache of the model they became. A model whose keys pass through norms cannot be folded, "
        "and is not healed.",
    ]


if __name__ == "__main__":
    sys.exit(main())
