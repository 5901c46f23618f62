"""What do bytes buy? Added loss against the bytes of the cache, for every recipe and its parts.

    python studies/frontier.py
    python studies/frontier.py --model ../models/Llama --text wikitext:wikitext-2-raw-v1
    python studies/frontier.py --compositions best eigen-attention --ratios 0.25 0.5

Every composition (a recipe, or a recipe with a part taken out or put in) makes a plan for every
ratio from the same calibration text; the perplexity of held-out text is measured through the
compressed cache. Written into --out: results.csv (a row per plan), summary.md and a figure. What is
measured is stored in --out/steps: an interrupted run goes on where it was, a repeated one draws at
once.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any

import common
import pandas as pd
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel

from manifoldkv import (
    RECIPES,
    CompressionPlan,
    Optimal,
    RankError,
    Recipe,
    Uniform,
    UnknownNameError,
    compress,
)
from manifoldkv.evaluation import Comparison, Perplexity, perplexity
from manifoldkv.figures import save_figure
from manifoldkv.models.support import attention_of, decoder_layers
from manifoldkv.runs.checkpoints import digest_of_model, digest_of_tokens
from manifoldkv.solvers.base import check_seed

BEST = RECIPES["best"]
FAST_UNIFORM = replace(RECIPES["fast"], ranks=Uniform())
GROUPED = replace(BEST, ranks=Uniform(), recent_share=0.0, tuning_steps=0)
COMPOSITIONS: dict[str, tuple[Recipe, str]] = {
    "eigen-attention": (RECIPES["eigen-attention"], "the recipe"),
    "paper": (RECIPES["paper"], "the recipe, with the paper's solver"),
    "fast": (RECIPES["fast"], "the recipe: the paper's objective, Riemannian Adam"),
    "fast-uniform": (FAST_UNIFORM, "fast, the same ranks in every layer"),
    "best": (BEST, "the recipe"),
    "best-latents-only": (replace(BEST, recent_share=0.0), "best, no token kept exact"),
    "grouped-orthonormal": (
        replace(RECIPES["eigen-attention"], key_grouping="all", value_grouping="all"),
        "eigen-attention, all heads in one basis",
    ),
    "grouped": (GROUPED, "kq-svd (oblique), all heads in one basis"),
    "grouped-optimal": (replace(GROUPED, ranks=Optimal()), "and optimal ranks"),
    "grouped-optimal-recent": (
        replace(BEST, tuning_steps=0),
        "and the newest tokens exact: best without tuning",
    ),
    "grouped-layer-output": (
        replace(FAST_UNIFORM, key_grouping="all", value_grouping="all"),
        "fast (layer-output, orthonormal), all heads in one basis",
    ),
    "fast-optimal-tuned": (
        replace(RECIPES["fast"], ranks=Optimal(), tuning_steps=BEST.tuning_steps),
        "fast in the paper's head sharing, optimal ranks, tuned",
    ),
    "eigen-attention-recent": (
        replace(RECIPES["eigen-attention"], recent_share=BEST.recent_share),
        "eigen-attention, the newest tokens exact",
    ),
}
FORGET = "forget-older"
FORGETTING = "no plan: only the newest tokens are kept, older ones are forgotten"
NAMES = (*COMPOSITIONS, FORGET)
SLOW = ("paper", "fast-optimal-tuned", "best-latents-only")
PALETTE = [colormaps["tab20"](i) for i in (*range(0, 20, 2), *range(1, 20, 2))]
SLOW_RATIOS = (0.5,)
"""Where compositions that take longest are measured."""


def main() -> int:
    parser = common.Parser(__doc__ + "\ncompositions:\n" + "\n".join(_described()))
    parser.add_model()
    parser.add_text()
    add = parser.add_argument
    add("--compositions", nargs="+", default=NAMES, metavar="NAME", help="(all)")
    add("--ratios", type=float, nargs="+", default=[0.25, 0.5], help="(%(default)s)")
    add("--sequences", type=int, default=64, help="for calibration (%(default)s)")
    add("--held-out", type=int, default=60, help="sequences to measure on (%(default)s)")
    add("--sequence-length", type=int, default=512, help="(%(default)s)")
    add("--rotary", choices=("pre", "post"), default="pre", help="(%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_threads()
    parser.add_out("figures/frontier/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    unknown = [c for c in given.compositions if c not in NAMES]
    if unknown:
        known = ", ".join(NAMES)
        raise UnknownNameError(f"unknown composition {unknown[0]!r}; known: {known}")
    for ratio in given.ratios:
        if not 0 < ratio <= 1:
            raise RankError(f"--ratios {ratio:g} is not in (0, 1]")
    check_seed(given.seed)
    name = Path(given.model).name
    out = common.output_folder(given, "frontier", name)
    results = Frontier(given, out).measure()
    results.to_csv(out / "results.csv", index=False)
    save_figure(draw(results, name), out / "loss_against_bytes")
    common.write_summary(out, summary(results, name))


def _described() -> list[str]:
    width = max(map(len, COMPOSITIONS))
    described = [f"  {name:{width}}  {said}" for name, (_, said) in COMPOSITIONS.items()]
    return [*described, f"  {FORGET:{width}}  {FORGETTING}"]


class Frontier:
    """Plans of a model and what they lose."""

    def __init__(self, given: argparse.Namespace, out: Path) -> None:
        self.given = given
        self.model, tokenizer = common.load(given.model)
        self.calibration, self.held_out = common.calibration_and_held_out(
            given.text,
            tokenizer,
            sequences=given.sequences,
            held_out=given.held_out,
            length=given.sequence_length,
        )
        self.common = {
            "model": Path(given.model).name,
            "text": given.text,
            "rotary": given.rotary,
            "seed": given.seed,
            "sequences": given.sequences,
            "length": given.sequence_length,
        }
        self.plans_folder = out / "steps" / "plans"
        self.checkpoints = common.stored_in(out, given).keyed(
            **self.common,
            weights=digest_of_model(self.model),
            calibration=digest_of_tokens(self.calibration),
            held_out=digest_of_tokens(self.held_out),
        )

    def measure(self) -> pd.DataFrame:
        uncompressed = self.uncompressed()
        pairs = [
            (name, ratio)
            for name in self.given.compositions
            for ratio in (SLOW_RATIOS if name in SLOW else self.given.ratios)
        ]
        frames = []
        for name, ratio in tqdm(pairs, desc="plans", disable=None):
            stored = self.checkpoints.keyed(asked=ratio)
            if name == FORGET:
                stored = stored.keyed(composition=FORGET)
                compute = partial(self.forgetting, ratio, uncompressed)
            else:
                stored = stored.keyed(recipe=COMPOSITIONS[name][0].describe())
                compute = partial(self.row, name, ratio, uncompressed)
            try:
                frame = stored.frame("plan", compute)
            except RankError as error:  # a rule may not reach a ratio: the others go on
                tqdm.write(f"frontier: {name} at {ratio:g} left out: {error}", file=sys.stderr)
                continue
            frames.append(frame.assign(composition=name))
        if not frames:
            raise RankError("no composition reaches a ratio that was asked for")
        return pd.concat(frames, ignore_index=True)

    def uncompressed(self) -> Perplexity:
        def compute() -> pd.DataFrame:
            return pd.DataFrame({"nll": perplexity(self.model, self.held_out).by_sequence})

        frame = self.checkpoints.frame("uncompressed", compute)
        predicted = self.held_out.shape[0] * (self.held_out.shape[1] - 1)
        return Perplexity(tuple(frame["nll"]), predicted)

    def row(self, name: str, ratio: float, uncompressed: Perplexity) -> pd.DataFrame:
        recipe = COMPOSITIONS[name][0]
        start = time.perf_counter()
        plan = compress(
            self.model,
            self.calibration,
            ratio=ratio,
            recipe=recipe,
            rotary=self.given.rotary,
            seed=self.given.seed,
            folder=self.plans_folder,
        )
        seconds = time.perf_counter() - start
        found = perplexity(self.model, self.held_out, plan)
        length = self.held_out.shape[1]
        row = {
            "requested_ratio": ratio,
            "ratio": plan.ratio_at(length),
            "long_run_ratio": replace(plan, recent=0).ratio,
            "bytes_per_token": plan.nbytes(length) / length,
            "basis_bytes": plan.basis_nbytes(),
            "recent": plan.recent,
            "attention_work": attention_work(plan, self.query_heads()),
            "seconds": seconds,
        }
        return self.described(row, uncompressed, found)

    def forgetting(self, ratio: float, uncompressed: Perplexity) -> pd.DataFrame:
        """A window of the newest tokens, whose size is the ratio of the text, and nothing else."""
        length = self.held_out.shape[1]
        recent = int(ratio * length)
        found = windowed_perplexity(self.model, self.held_out, recent)
        attention = attention_of(decoder_layers(self.model)[0])
        heads = self.model.config.get_text_config().num_key_value_heads
        full = 2 * len(decoder_layers(self.model)) * heads * attention.head_dim * 2
        row = {
            "requested_ratio": ratio,
            "ratio": recent / length,
            "long_run_ratio": 0.0,
            "bytes_per_token": full * recent / length,
            "basis_bytes": 0,
            "recent": recent,
            "attention_work": recent / length,
            "seconds": 0.0,
        }
        return self.described(row, uncompressed, found)

    def described(
        self, row: dict[str, Any], uncompressed: Perplexity, found: Perplexity
    ) -> pd.DataFrame:
        compared = Comparison(uncompressed, found)
        row |= {
            "uncompressed_nll": uncompressed.nll,
            "added_nll": compared.added_nll,
            "standard_error": compared.standard_error,
            "threads": self.given.threads,
        }
        return pd.DataFrame([self.common | row])

    def query_heads(self) -> int:
        attention = attention_of(decoder_layers(self.model)[0])
        return int(attention.o_proj.weight.shape[1]) // int(attention.head_dim)


@torch.no_grad()
def windowed_perplexity(model: PreTrainedModel, tokens: Tensor, recent: int) -> Perplexity:
    """With every query seeing the newest `recent` tokens only, its own among them."""
    slots = torch.arange(tokens.shape[1], device=model.device)
    distance = slots.unsqueeze(1) - slots
    seen = ((distance >= 0) & (distance < recent)).view(1, 1, *distance.shape)
    losses = []
    for sequence in tokens.to(model.device).split(1):
        logits = model(input_ids=sequence, attention_mask=seen, use_cache=False).logits[0, :-1]
        losses.append(cross_entropy(logits.float(), sequence[0, 1:]).item())
    return Perplexity(tuple(losses), tokens.shape[0] * (tokens.shape[1] - 1))


def attention_work(plan: CompressionPlan, query_heads: int) -> float:
    """Multiplications per cached token of a decode step, against the uncompressed cache.

    Scores and mixtures on latents of g concatenated heads are g·r long. Keys stored before rotation
    are expanded instead, every KV head of every token once a step, and scored at head_dim.
    """
    work = full = 0
    for layer in plan.layers:
        d, heads = layer.key.head_dim, layer.key.grouping.heads
        full += 2 * query_heads * d
        work += query_heads * layer.value.rank * layer.value.grouping.width
        if plan.rotary == "post":
            work += query_heads * layer.key.rank * layer.key.grouping.width
        else:
            work += query_heads * d + heads * d * layer.key.rank * layer.key.grouping.width
    return work / full


# Report


def draw(results: pd.DataFrame, name: str) -> Figure:
    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    axes = figure.subplots()
    names = [c for c in NAMES if c in set(results["composition"])]
    for index, composition in enumerate(names):
        line = results[results["composition"] == composition].sort_values("bytes_per_token")
        recipe = composition in RECIPES
        axes.errorbar(
            line["bytes_per_token"],
            line["added_nll"],
            line["standard_error"],
            fmt="o-" if recipe else "s--",
            ms=5 if recipe else 3,
            lw=1.8 if recipe else 0.9,
            color=PALETTE[index % len(PALETTE)],
            alpha=1.0 if recipe else 0.7,
            label=composition,
        )
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_xlim(0, 1.05 * results["bytes_per_token"].max())
    axes.set_xlabel(f"bytes per token of {results['length'].iloc[0]}, 16-bit numbers", fontsize=9)
    axes.set_ylabel("added NLL, nats per token, held out", fontsize=9)
    axes.grid(visible=True, alpha=0.2)
    axes.tick_params(labelsize=8)
    full = float((results["bytes_per_token"] / results["ratio"]).mean())
    above = axes.secondary_xaxis("top", functions=(partial(mul, 1 / full), partial(mul, full)))
    above.set_xlabel("achieved ratio", fontsize=9)
    above.tick_params(labelsize=8)
    figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    figure.suptitle(f"{name}: added NLL against cache size", fontsize=10)
    return figure


def summary(results: pd.DataFrame, name: str) -> list[str]:
    first = results.iloc[0]
    ratios = sorted(results["requested_ratio"].unique())
    lines = [
        f"# Added NLL against cache size on {name}",
        "",
        f"Added NLL, nats per token (standard error), on held-out text through the cache; "
        f"uncompressed {first['uncompressed_nll']:.4f}. {first['sequences']} calibration sequences "
        f"of {first['length']} tokens, keys {first['rotary']}-rotation, seed {first['seed']}. "
        "Ratios are achieved at this length, the newest tokens that are kept exact counted at full "
        "size; a longer text takes less.",
        "",
        "| composition | " + " | ".join(f"ratio {ratio:g}" for ratio in ratios) + " |",
        "|---|" + "---|" * len(ratios),
    ]
    for composition, part in results.groupby("composition", sort=False):
        cells = []
        for ratio in ratios:
            at = part[part["requested_ratio"] == ratio]
            cells.append(
                f"{at['added_nll'].iloc[0]:.3f} ({at['standard_error'].iloc[0]:.3f})"
                if len(at)
                else "-"
            )
        lines.append(f"| {composition} | " + " | ".join(cells) + " |")
    at = results[results["requested_ratio"] == 0.5]
    lines += [
        "",
        "At ratio 0.5: what is achieved, the newest tokens kept exact, multiplications of a decode "
        "step per cached token against the uncompressed cache, bytes of the bases (once, 16-bit), "
        f"and seconds of calibration ({common.counted(first['threads'], 'thread')}):",
        "",
        "| composition | ratio | long-run ratio | recent | attention work | bases, KiB | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for _, row in at.iterrows():
        lines.append(
            f"| {row['composition']} | {row['ratio']:.3f} | {row['long_run_ratio']:.3f} | "
            f"{row['recent']} | {row['attention_work']:.2f} | {row['basis_bytes'] / 1024:.0f} | "
            f"{row['seconds']:.0f} |"
        )
    lines += [
        "",
        "Compositions:",
        "",
        *(f"- `{n}`: {said}" for n, (_, said) in COMPOSITIONS.items()),
        f"- `{FORGET}`: {FORGETTING}",
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
