"""How much healing does a plain checkpoint with a smaller cache need?

    python studies/healing.py
    python studies/healing.py --model smollm2 --plan plan --text c4-validation.jsonl \\
        --held-out-texts c4-validation.jsonl wikitext2-test.txt --steps 800 200 50

A plan of recipe `commuting` is multiplied into the weights of its model, and the projections of
attention are trained to predict what the original predicts, once for every number of steps: each
from the beginning, as the learning rate falls to nothing at the last one. Written into --out:
results.csv, a figure and summary.md. What is measured is stored in --out/steps: an interrupted run
goes on where it was, a repeated one draws at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from manifoldkv import (
    CompressionConfig,
    CompressionPlan,
    ManifoldKVError,
    Perplexity,
    compress,
    open_text,
    perplexity,
    sample_tokens,
)
from manifoldkv.evaluation.perplexity import Comparison
from manifoldkv.export.fold import check_foldable, check_foldable_model, folded
from manifoldkv.export.heal import heal
from manifoldkv.figures import legend_below
from manifoldkv.figures.palette import colour_at
from manifoldkv.figures.style import label_axes, logarithmic, title_above
from manifoldkv.runs.checkpoints import digest_of_model, digest_of_tokens

PRECISIONS = ("highest", "high", "medium")


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_model()
    parser.add_text()
    add = parser.add_argument
    add("--held-out-texts", nargs="+", help="measured on; that of --text if omitted")
    add("--plan", type=Path, help="of recipe commuting; one of half the cache is made if omitted")
    add("--steps", type=int, nargs="+", default=[25, 100, 400], help="of healing (25 100 400)")
    add("--sequences", type=int, default=256, help="of --text to heal on (%(default)s)")
    add("--sequences-per-step", type=int, default=4, help="(%(default)s)")
    add("--length", type=int, default=512, help="of sequences and windows (%(default)s)")
    add("--windows", type=int, default=32, help="held out, of each text (%(default)s)")
    add(
        "--precision",
        choices=PRECISIONS,
        default="highest",
        help="torch's float32 matmul precision while healing: with medium, processors that can "
        "multiply in bfloat16; what is measured is measured in the highest (%(default)s)",
    )
    add("--seed", type=int, default=0, help="of the order of the sequences (%(default)s)")
    parser.add_threads()
    parser.add_out("figures/healing/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    if min(given.steps) < 1:
        raise ManifoldKVError(f"--steps is {min(given.steps)}, must be at least 1")
    out = common.output_folder(given, "healing", Path(given.model).name)
    if given.redraw:
        common.draw(out, draw)
        return
    results = Healing(given, out).measure()
    results.to_csv(out / "results.csv", index=False)
    common.draw(out, draw)
    common.write_summary(out, summary(results))


class Healing:
    """One plan, and what the checkpoints made of it add to the loss."""

    def __init__(self, given: argparse.Namespace, out: Path) -> None:
        self.given = given
        self.model, tokenizer = common.load(given.model)
        check_foldable_model(self.model)
        self.tokens = sample_tokens(
            open_text(given.text),
            tokenizer,
            sequences=given.sequences,
            length=given.length,
            split="calibration",
        )
        self.held_out = common.held_out_windows(given, tokenizer)
        self.stored = common.stored_in(out, given).keyed(
            model=digest_of_model(self.model), threads=given.threads
        )
        self.plan = self.found()
        check_foldable(self.model, self.plan)

    def found(self) -> CompressionPlan:
        """Return the plan that was given, or one that halves the cache."""
        if self.given.plan is not None:
            return CompressionPlan.load(self.given.plan)
        config = CompressionConfig(ratio=0.5, recipe="commuting", seed=self.given.seed)
        return compress(self.model, self.tokens, config)

    def measure(self) -> pd.DataFrame:
        """Return a row for every number of steps and text, none first."""
        rows = self.rows(0, partial(perplexity, self.model, plan=self.plan))
        for steps in self.given.steps:  # in the order given: the longest may come first
            rows += self.rows(steps, partial(self.healed, steps))
        return pd.DataFrame(rows).sort_values("steps", kind="stable", ignore_index=True)

    def healed(self, steps: int, tokens: Tensor) -> Perplexity:
        """Return how well the checkpoint predicts tokens after so many steps."""
        made = folded(self.model, self.plan)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.given.precision)
        try:
            heal(
                self.model,
                made,
                self.tokens,
                steps=steps,
                sequences_per_step=self.given.sequences_per_step,
                seed=self.given.seed,
                checkpoints=self.stored.keyed(
                    plan=self.plan.digest(),
                    healing_on=digest_of_tokens(self.tokens),
                    precision=self.given.precision,
                ),
            )
        finally:
            torch.set_float32_matmul_precision(before)
        return perplexity(made, tokens)

    def rows(self, steps: int, measured: Callable[[Tensor], Perplexity]) -> list[dict[str, object]]:
        """Return a row of a checkpoint for every text."""
        given, found = self.given, []
        at_once = min(given.sequences_per_step, len(self.tokens))
        for text, tokens in self.held_out.items():
            stock = self.losses(tokens, None, partial(perplexity, self.model))
            own = [self.plan.digest(), steps]
            if steps:
                own += [at_once, given.seed, given.precision, digest_of_tokens(self.tokens)]
            compared = Comparison(stock, self.losses(tokens, own, measured))
            found.append(
                {"model": Path(given.model).name, "text": text, "steps": steps}
                | {"tokens": steps * at_once * given.length, "added_nll": compared.added_nll}
                | {"standard_error": compared.standard_error, "uncompressed_nll": stock.nll}
                | {"ratio": self.plan.ratio, "bytes_per_token": self.plan.bytes_per_token()}
                | {"tuning_steps": self.plan.provenance.tuning_steps}
                | {"sequences": len(self.tokens), "sequences_per_step": at_once}
                | {"windows": len(tokens), "length": tokens.shape[1], "seed": given.seed}
                | {"precision": given.precision, "threads": given.threads}
            )
        return found

    def losses(
        self, tokens: Tensor, cache: object, measured: Callable[[Tensor], Perplexity]
    ) -> Perplexity:
        """Return what was measured on tokens, from the store if it is there."""
        stored = self.stored.made_by(perplexity, folded, heal).keyed(cache=cache)
        return common.stored_perplexity(stored, tokens, measured)


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    """Return added nats against the tokens healed on, a line for each text."""
    figure = Figure(figsize=(5.0, 3.6), layout="constrained")
    axes = figure.subplots()
    for place, (text, part) in enumerate(results.groupby("text", sort=False)):
        healed = part[part["steps"] > 0]
        colour = colour_at(place)
        axes.errorbar(
            healed["tokens"],
            healed["added_nll"],
            healed["standard_error"],
            color=colour,
            marker="os^v"[place % 4],
            ms=4,
            lw=1.2,
            capsize=2,
            label=text,
        )
        axes.axhline(
            part["added_nll"].iloc[0], color=colour, ls=":", lw=1, label=f"{text}, not healed"
        )
    lowest = (results["added_nll"] - results["standard_error"]).min()
    axes.set_ylim(bottom=min(0.0, lowest))
    label_axes(axes, "tokens healed on", "added nats per token, held out")
    logarithmic(axes, x=True)
    legend_below(figure)
    first = results.iloc[0]
    shown = results[results["text"] == first["text"]].set_index("steps")["added_nll"]
    title_above(
        figure,
        f"{first['model']}, a plain checkpoint with {first['ratio']:.3g} of the cache: "
        f"{shown.iloc[0]:.3f} nats added on {first['text']} before healing, "
        f"{shown.iloc[-1]:.3f} after {shown.index[-1]} steps",
    )
    return {"added_nats": figure}


def summary(results: pd.DataFrame) -> list[str]:
    """Return the table of all checkpoints, and what was used."""
    first = results.iloc[0]
    texts = list(dict.fromkeys(results["text"]))
    rows = []
    for steps, part in results.groupby("steps"):
        by_text = part.set_index("text").loc[texts]
        cells = [
            f"{row['added_nll']:.3f} ± {row['standard_error']:.3f}" for _, row in by_text.iterrows()
        ]
        rows.append([steps, f"{part['tokens'].iloc[0]:,}", *cells])
    return [
        f"# Healing a plain checkpoint, {first['model']}",
        "",
        f"Added nats per token on held-out text, {first['windows']} windows of {first['length']} "
        f"tokens of each text, ± the standard error over windows. The plan, of recipe `commuting`, "
        f"takes {first['ratio']:.3g} of the uncompressed cache, {first['bytes_per_token']:.0f} "
        f"bytes per token, and was tuned in {common.counted(first['tuning_steps'], 'step')}. "
        f"Healing on {first['sequences']} × {first['length']} tokens, "
        f"{first['sequences_per_step']} sequences in a step, every checkpoint from the beginning; "
        f"seed {first['seed']}, {common.counted(first['threads'], 'thread')}, float32 matmul "
        f"precision `{first['precision']}` while healing.",
        "",
        *common.table(["steps", "tokens", *texts], rows),
        "",
        "After no step, through the compressed cache; after others, on the stock cache of the "
        "model that the plan became.",
    ]


if __name__ == "__main__":
    sys.exit(main())
