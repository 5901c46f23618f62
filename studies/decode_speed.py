"""How fast is a decode step on latents?

One step of one layer's attention, and of a whole model (4 layers, hidden 1024, MLP 2816, 32 query
heads, 8 KV heads of 128), over caches filled with random numbers:

    stock       transformers' DynamicCache with its SDPA attention
    full        our attention over unprojected keys and values: the honest baseline
    post-R      keys stored after rotation at rank ratio R: nothing is reconstructed
    pre-R       keys stored before rotation: expanded and rotated tile by tile
    post-0.5-4bit   the same as post-0.5 with latents packed into 4 bits
    …-gN, …-all     N heads, or all, in one basis: the same bytes, N times the arithmetic;
                    bases that commute with the rotation are stored and read as post-…-all
    …-recent        and the newest 64 tokens as they are

All of them take turns within every round, and a ratio is formed within a round, so that other load
on the machine hits all alike. Seconds are medians over rounds, ratios medians of ratios. Writes
results.csv, summary.md and two figures into --out; the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import common
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from torch import Tensor
from tqdm import tqdm
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM

from manifoldkv import (
    Basis,
    CompressedCache,
    CompressionPlan,
    HeadGrouping,
    LayerPlan,
    Provenance,
    Quantization,
    compressed,
)
from manifoldkv.basis import Rotary
from manifoldkv.cache.attention import CachedAttention
from manifoldkv.cache.latents import RunningBasis
from manifoldkv.cache.rotation import Angles, rotate_halves, tokens_last
from manifoldkv.cache.storage import working_dtype
from manifoldkv.errors import ManifoldKVError
from manifoldkv.figures import Mark, legend_below
from manifoldkv.figures.palette import BLACK, GREEN, GREY, PURPLE, VERMILLION
from manifoldkv.figures.style import label_axes, logarithmic, title_above
from manifoldkv.models.fingerprint import fingerprint
from manifoldkv.models.interface import AttentionSettings
from manifoldkv.plan.plan import config_hash

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LAYERS, HIDDEN, MLP, VOCABULARY = 4, 1024, 2816, 4096
RATIOS = (0.5, 0.625, 0.75)
LONG = 16384
"""Bounds are geometric means over cells of at least this many tokens."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOKENS_BELOW = 64
"""In the cache of the layer whose step comes before the one that is timed."""
LARGEST_BYTES = {"attention": 5 << 28, "model": 3 << 30}
"""Cells whose uncompressed cache is larger are left out: nine caches are held at a time."""
Random = partial[Tensor]
"""A function of a shape, with everything else about random numbers settled."""
WHAT = {"attention": "Time of one layer's attention", "model": "Time of a decode step"}
RATIO = "time / that of full rank"


@dataclass(frozen=True)
class Variant:
    """One way to store and use a cache; the stock one has no rotary space."""

    name: str
    rotary: Rotary | None = None
    rank: int = HEAD_DIM
    bits: int | None = None
    grouping: int = 1
    recent: int = 0


VARIANTS = [
    Variant("stock"),
    Variant("full", "post"),
    *(Variant(f"post-{ratio:g}", "post", int(ratio * HEAD_DIM)) for ratio in RATIOS),
    *(Variant(f"pre-{ratio:g}", "pre", int(ratio * HEAD_DIM)) for ratio in RATIOS),
    Variant("post-0.5-4bit", "post", HEAD_DIM // 2, 4),
]
MORE_VARIANTS = [
    Variant("post-0.5-g2", "post", HEAD_DIM // 2, grouping=2),
    Variant("post-0.5-g4", "post", HEAD_DIM // 2, grouping=4),
    Variant("post-0.5-all", "post", HEAD_DIM // 2, grouping=KV_HEADS),
    Variant("post-0.5-recent", "post", HEAD_DIM // 2, recent=64),
    Variant("pre-0.5-all", "pre", HEAD_DIM // 2, grouping=KV_HEADS),
    Variant("pre-0.5-recent", "pre", HEAD_DIM // 2, recent=64),
    Variant("pre-0.5-all-recent", "pre", HEAD_DIM // 2, grouping=KV_HEADS, recent=64),
]
KNOWN = {variant.name: variant for variant in (*VARIANTS, *MORE_VARIANTS)}


def main() -> int:
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("--tokens", nargs="+", type=int, metavar="N", help="context lengths (1k 4k 16k 64k)")
    add("--batches", nargs="+", type=int, metavar="B", help="batch sizes (1 4)")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="(all)")
    add(
        "--variants",
        nargs="+",
        choices=KNOWN,
        default=[variant.name for variant in VARIANTS],
        help="beside stock and full (all without heads in common and newest tokens)",
    )
    add("--rounds", type=int, help="rounds, in each of which every variant takes a turn (7)")
    add("--quick", action="store_true", help="two short contexts, two rounds")
    parser.add_device()
    parser.add_threads()
    parser.add_out("figures/decode_speed")
    return common.run_study(parser, study)


@torch.no_grad()
def study(given: argparse.Namespace) -> None:
    tokens = given.tokens or ([64, 256] if given.quick else [1024, 4096, 16384, 65536])
    batches = given.batches or ([1] if given.quick else [1, 4])
    rounds = given.rounds or (2 if given.quick else 7)
    if min(*tokens, *batches, rounds) < 1:
        raise ManifoldKVError("tokens, batches and rounds must be at least 1")
    out = common.output_folder(given, "decode_speed_quick" if given.quick else "decode_speed")
    if given.redraw:
        common.draw(out, draw)
        return
    variants = [KNOWN[name] for name in dict.fromkeys(["stock", "full", *given.variants])]
    stored = common.stored_in(out, given).made_by(CachedAttention)
    stored = stored.keyed(
        variants=[variant.name for variant in variants], rounds=rounds, threads=given.threads
    )
    frames = []
    cells = list(itertools.product(given.dtypes, batches, tokens, LARGEST_BYTES))
    for dtype, batch, length, what in tqdm(cells, desc="cells", disable=None):
        layers = 1 if what == "attention" else LAYERS
        nbytes = 2 * layers * batch * KV_HEADS * HEAD_DIM * length * DTYPES[dtype].itemsize
        if nbytes > LARGEST_BYTES[what]:
            continue
        cell = {"dtype": dtype, "batch": batch, "tokens": length, "what": what}
        compute = partial(measure_cell, variants, rounds, given.device, **cell)
        frames.append(stored.keyed(device=given.device, **cell).frame("cell", compute))
    report(pd.concat(frames, ignore_index=True), variants, out)


def measure_cell(
    variants: list[Variant],
    rounds: int,
    device: str,
    *,
    dtype: str,
    batch: int,
    tokens: int,
    what: str,
) -> pd.DataFrame:
    """Return a row for every variant at one context length."""
    steps = attention_steps if what == "attention" else model_steps
    cell = {"dtype": dtype, "batch": batch, "tokens": tokens, "what": what}
    with ExitStack() as stack:
        timed = steps(stack, variants, DTYPES[dtype], batch, tokens, device)
        rows = [cell | row for row in measure(timed, rounds, batch)]
    gc.collect()
    return pd.DataFrame(rows)


# One decode step of one layer's attention


@dataclass
class Step:
    """A variant ready to be timed: `run` does the step, `undo` takes the new token out again.

    `below` is the same step of another layer, with a small cache of its own.
    """

    variant: Variant
    run: Callable[[], object]
    undo: Callable[[], object]
    nbytes: int
    append: Callable[[], object] | None = None
    below: Step | None = None

    def timed(self, what: str) -> float:
        """Seconds of `run` or `append`; not a number if there is no such thing."""
        call = {"run": self.run, "append": self.append}[what]
        if call is None:
            return math.nan
        if self.below is not None:
            self.below.timed(what)
        seconds = timed(call)
        self.undo()
        return seconds


def attention_steps(
    stack: ExitStack,
    variants: list[Variant],
    dtype: torch.dtype,
    batch: int,
    length: int,
    device: str,
) -> list[Step]:
    steps = layer_steps(variants, dtype, batch, length, device)
    others = layer_steps(variants, dtype, batch, TOKENS_BELOW, device)
    for step, below in zip(steps, others, strict=True):
        step.below = below
    return steps


def layer_steps(
    variants: list[Variant], dtype: torch.dtype, batch: int, length: int, device: str
) -> list[Step]:
    generator = torch.Generator(device).manual_seed(0)
    random = partial(torch.randn, generator=generator, dtype=dtype, device=device)
    queries = random(batch, QUERY_HEADS, 1, HEAD_DIM)
    keys, values = random(2, batch, KV_HEADS, 1, HEAD_DIM)
    model = small_model(dtype, device, layers=1)
    positions = torch.arange(length + 1, device=device).unsqueeze(0)
    cos, sin = model.model.rotary_emb(keys, positions)
    working = working_dtype(dtype, keys.device)
    cos, sin = (tokens_last(x.to(working)) for x in (cos, sin))
    angles = Angles(cos, sin, rotate_halves)
    steps = []
    for variant in variants:
        if variant.rotary is None:
            steps.append(stock_attention_step(model, queries, keys, values, length, random))
            continue
        plan = random_plan(variant, model)
        cache = CompressedCache(plan, dtype, [torch.device(device)])
        fill(cache, plan, batch, length, random)
        layer, bases = cache.layers[0], plan.layers[0]
        attention = CachedAttention(
            RunningBasis(bases.key, dtype, keys.device),
            RunningBasis(bases.value, dtype, keys.device),
            exact_prefill=False,
            up_project_values=True,
        )
        arguments = (None, AttentionSettings(HEAD_DIM**-0.5))
        of_all = (angles if variant.rotary == "pre" else None,)
        steps.append(
            Step(
                variant,
                partial(attention.attend, layer, queries, keys, values, *arguments, *of_all, []),
                partial(layer.crop, -1),
                cache.nbytes(),
                partial(attention.store, layer, keys, values, []),
            )
        )
    return steps


def stock_attention_step(
    model: LlamaForCausalLM,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int,
    random: Random,
) -> Step:
    cache = DynamicCache(config=model.config)
    shape = (keys.shape[0], KV_HEADS, length, HEAD_DIM)
    cache.update(random(*shape), random(*shape), 0)
    layer = cache.layers[0]
    before = (layer.keys, layer.values)  # noqa: PD011
    attend = AttentionInterface()["sdpa"]
    module = model.model.layers[0].self_attn

    def step() -> None:
        all_keys, all_values = cache.update(keys, values, 0)
        attend(module, queries, all_keys, all_values, None, scaling=HEAD_DIM**-0.5)

    def undo() -> None:
        layer.keys, layer.values = before

    return Step(VARIANTS[0], step, undo, sum(x.nbytes for x in before))


# One decode step of a whole model


def model_steps(
    stack: ExitStack,
    variants: list[Variant],
    dtype: torch.dtype,
    batch: int,
    length: int,
    device: str,
) -> list[Step]:
    generator = torch.Generator(device).manual_seed(0)
    random = partial(torch.randn, generator=generator, dtype=dtype, device=device)
    token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    steps = []
    for variant in variants:
        model = small_model(dtype, device, LAYERS)
        if variant.rotary is None:
            steps.append(stock_model_step(model, token, length, random))
            continue
        plan = random_plan(variant, model)
        new_cache = stack.enter_context(compressed(model, plan))
        cache = new_cache()
        fill(cache, plan, batch, length, random)
        steps.append(
            Step(
                variant,
                partial(model, input_ids=token, past_key_values=cache),
                partial(cache.crop, -1),
                cache.nbytes(),
            )
        )
    return steps


def stock_model_step(model: LlamaForCausalLM, token: Tensor, length: int, random: Random) -> Step:
    cache = DynamicCache(config=model.config)
    shape = (token.shape[0], KV_HEADS, length, HEAD_DIM)
    for index in range(LAYERS):
        cache.update(random(*shape), random(*shape), index)
    before = [(layer.keys, layer.values) for layer in cache.layers]  # noqa: PD011

    def undo() -> None:
        for layer, (keys, values) in zip(cache.layers, before, strict=True):
            layer.keys, layer.values = keys, values

    nbytes = sum(x.nbytes for pair in before for x in pair)
    return Step(VARIANTS[0], partial(model, input_ids=token, past_key_values=cache), undo, nbytes)


def small_model(dtype: torch.dtype, device: str, layers: int) -> LlamaForCausalLM:
    """A model of its own with weights that all models of its kind share."""
    model = first_model(dtype, device, layers)
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


@lru_cache(maxsize=1)
def first_model(dtype: torch.dtype, device: str, layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=layers,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCABULARY,
        max_position_embeddings=1 << 17,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, dtype).eval()


def random_plan(variant: Variant, model: LlamaForCausalLM) -> CompressionPlan:
    generator = torch.Generator().manual_seed(0)

    def basis(name: str | int) -> Basis:
        grouping = HeadGrouping(name, KV_HEADS)
        width = grouping.width
        columns = torch.eye(HEAD_DIM * width).repeat(grouping.groups, 1, 1)
        if variant.rank < HEAD_DIM:
            normal = torch.randn(columns.shape, generator=generator)
            columns = torch.linalg.qr(normal).Q[..., : variant.rank * width].contiguous()
        return Basis(columns, columns, grouping)

    quantization = None if variant.bits is None else Quantization(variant.bits)
    ranges = None if variant.bits is None else torch.tensor([-4.0, 4.0]).expand(KV_HEADS, 1, 2)
    of_keys = "shared" if variant.grouping == 1 else variant.grouping
    layers = [
        LayerPlan(basis(of_keys), basis(variant.grouping), key_range=ranges)
        for _ in range(model.config.num_hidden_layers)
    ]
    recipe = {part: {"name": "random"} for part in ("objective", "solver", "ranks")}
    provenance = Provenance("random", "none", 1, 1, 1, recipe, 0, 1.0, {}, 1)
    assert variant.rotary is not None
    return CompressionPlan(
        tuple(layers),
        variant.rotary,
        config_hash(model.config),
        fingerprint(model),
        provenance,
        quantization,
        variant.recent,
    )


def fill(
    cache: CompressedCache, plan: CompressionPlan, batch: int, length: int, random: Random
) -> None:
    """Random latents of `length` tokens, in pieces so that nothing large is held twice.

    The newest tokens are random keys and values, if the plan keeps them so.
    """
    cache.activate_past_recording()  # or a step with newest tokens could not be undone
    latents = length - plan.recent
    pieces = [(start, min(LONG, latents - start)) for start in range(0, latents, LONG)]
    for start, count in [*pieces, (latents, plan.recent)]:
        if plan.rotary == "pre" and count:
            positions = torch.arange(start, start + count).unsqueeze(0)
            cache.append_positions(positions.to(random.keywords["device"]))
        for layer, planned in zip(cache.layers, plan.layers, strict=True):
            if start == latents:
                layer.admit(*random(2, batch, KV_HEADS, count, HEAD_DIM))
                continue
            layer.append(
                *(
                    random(batch, KV_HEADS // w, count, basis.rank * w)
                    for _, basis in planned.sites
                    for w in (basis.grouping.width,)
                )
            )
            layer.tokens_seen += count


# Timing


def measure(steps: list[Step], rounds: int, batch: int) -> Iterator[dict[str, Any]]:
    """Every variant takes a turn in every round, after one round that does not count.

    As in a model, a layer's step comes right after that of another layer: the code is warm, the
    cache is not.
    """
    runs: dict[str, list[float]] = {step.variant.name: [] for step in steps}
    appends: dict[str, list[float]] = {step.variant.name: [] for step in steps}
    for number in range(rounds + 1):
        for step in steps:
            seconds = step.timed("run")
            append = step.timed("append")
            if number:
                runs[step.variant.name].append(seconds)
                appends[step.variant.name].append(append)
    table, append_table = pd.DataFrame(runs), pd.DataFrame(appends)
    for step in steps:
        name = step.variant.name
        yield {
            "variant": name,
            "rank_ratio": step.variant.rank / HEAD_DIM,
            "ratio_to_full": float((table[name] / table["full"]).median()),
            "ratio_to_stock": float((table[name] / table["stock"]).median()),
            "append_share": float((append_table[name] / table[name]).median()),
            "seconds": float(table[name].median()),
            "tokens_per_second": batch / float(table[name].median()),
            "nbytes": step.nbytes,
            "rounds": len(table),
            "threads": torch.get_num_threads(),
        }


def timed(call: Callable[[], object]) -> float:
    """Seconds, waiting for the device if it works on its own."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


# Report


def report(results: pd.DataFrame, variants: list[Variant], out: Path) -> None:
    results.to_csv(out / "results.csv", index=False)
    common.draw(out, draw)
    common.write_summary(out, summary(results, variants))


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    """Return lines against the context, or bars where there is one context only."""
    figures = {}
    for what, title in WHAT.items():
        part = results[results["what"] == what]
        if len(part):
            chosen = _lines if len(set(part["tokens"])) > 1 else _bars
            figure = chosen(part)
            legend_below(figure)
            title_above(figure, f"{title}, {_finding(part)}")
            figures[f"{what}_against_context"] = figure
    return figures


def _lines(results: pd.DataFrame) -> Figure:
    figure, cells = _panels(results, 3.1)
    for axes, cell in cells:
        for name in dict.fromkeys(cell["variant"]):
            line = cell[cell["variant"] == name]
            variant = KNOWN[name]
            axes.plot(
                line["tokens"],
                line["ratio_to_full"],
                label=said(variant),
                markersize=4.5,
                **style_of(variant),
            )
        label_axes(axes, "cached tokens", RATIO, axes.get_title())
    for axes, _ in cells:
        logarithmic(axes)
        logarithmic(axes, x=True)
        axes.set_xticks(sorted(set(results["tokens"])))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
        axes.label_outer()
    return figure


def _bars(results: pd.DataFrame) -> Figure:
    names = [name for name in dict.fromkeys(results["variant"]) if name != "full"]
    figure, cells = _panels(results, 0.26 * len(names) + 1.2)
    for axes, cell in cells:
        chosen = cell.set_index("variant")["ratio_to_full"].loc[names]
        colours = [style_of(KNOWN[name])["color"] for name in names]
        bars = axes.barh([said(KNOWN[name]) for name in names], chosen, color=colours)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
        label_axes(axes, RATIO, "", axes.get_title())
        axes.margins(x=0.12)
        axes.axvline(1, color=BLACK, ls=":", lw=1, label=said(KNOWN["full"]))
    cells[0][0].invert_yaxis()  # of all: they share it
    return figure


def _panels(results: pd.DataFrame, height: float) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """Return a figure with a titled panel for every dtype and batch size, and what it shows."""
    groups = list(results.groupby(["dtype", "batch"], sort=False))
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(4.4 * columns + 0.8, height * rows + 1.2), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for unused in panels[len(groups) :]:
        unused.remove()
    cells = []
    for axes, ((dtype, batch), cell) in zip(panels, groups, strict=False):
        axes.set_title(f"{dtype}, batch {batch}")
        cells.append((axes, cell))
    return figure, cells


def _finding(part: pd.DataFrame) -> str:
    """Return what keys cost that are stored after rotation, and before it."""
    long = part[part["tokens"] >= LONG]
    chosen = long if len(long) else part
    threads = common.counted(int(part["threads"].iloc[0]), "thread")
    said = [
        f"{geometric_mean(rows['ratio_to_full']):.2f} with keys stored {place} rotation"
        for name, place in (("post-0.5", "after"), ("pre-0.5", "before"))
        if len(rows := chosen[chosen["variant"] == name])
    ]
    found = f"half the rank takes {' and '.join(said)}; " if said else ""
    return f"against that of full rank: {found}{threads}, cells of {_lengths(chosen)} tokens"


def _lengths(part: pd.DataFrame) -> str:
    return " and ".join(f"{tokens:,}" for tokens in sorted(set(part["tokens"])))


def said(variant: Variant) -> str:
    """Return what a variant is called in figures."""
    if variant.rotary is None:
        return "stock cache (DynamicCache)"
    if variant.rank == HEAD_DIM:
        return "full rank"
    words = [f"rank {variant.rank / HEAD_DIM:g}"]
    words.append("after rotation" if variant.rotary == "post" else "before rotation")
    if variant.bits:
        words.append(f"{variant.bits} bits")
    if variant.grouping > 1:
        words.append(f"{variant.grouping} heads in a basis")
    if variant.recent:
        words.append(f"newest {variant.recent} exact")
    return ", ".join(words)


def style_of(variant: Variant) -> dict[str, Any]:
    """Return the look of a variant: its colour is how it is stored, its marker the rank."""
    if variant.rotary is None:
        return Mark(GREY, "x", "--").style
    if variant.rank == HEAD_DIM:
        return Mark(BLACK, "", ":").style
    marker = {0.5: "o", 0.625: "s", 0.75: "^"}.get(variant.rank / HEAD_DIM, "D")
    if variant.bits:
        return Mark(PURPLE, marker).style
    return Mark(GREEN if variant.rotary == "post" else VERMILLION, marker).style


def summary(results: pd.DataFrame, variants: list[Variant]) -> list[str]:
    longest = results[results["tokens"] >= LONG]
    reported = longest if len(longest) else results
    bound = f"at least {LONG:,} tokens" if len(longest) else "all lengths (none is long)"
    lines = [
        "# Decode speed",
        "",
        f"Geometric means over cells with {bound}; below 1 is faster. Ratios are formed within a "
        f"round of interleaved turns; {common.counted(int(results['threads'].iloc[0]), 'thread')}, "
        f"{int(results['rounds'].iloc[0])} rounds, torch {torch.__version__}. Cells are "
        "left out whose uncompressed cache is above "
        f"{LARGEST_BYTES['attention'] / 2**30:g} GiB for one layer or "
        f"{LARGEST_BYTES['model'] / 2**30:g} GiB for the model.",
        "",
    ]
    titles = {"attention": "Attention of one layer", "model": "Whole decode step, 4 layers"}
    for what, title in titles.items():
        part = reported[reported["what"] == what]
        if not len(part):
            continue
        lines += [f"## {title}", ""]
        lines += ["| dtype | variant | time / full rank | time / DynamicCache | bytes / stock |"]
        lines += ["|---|---|---|---|---|"]
        for dtype in dict.fromkeys(part["dtype"]):
            for variant in variants:
                chosen = part[(part["dtype"] == dtype) & (part["variant"] == variant.name)]
                stock = part[(part["dtype"] == dtype) & (part["variant"] == "stock")]
                share = chosen["nbytes"].sum() / stock["nbytes"].sum()
                means = [geometric_mean(chosen[c]) for c in ("ratio_to_full", "ratio_to_stock")]
                lines.append(
                    f"| {dtype} | {variant.name} | {means[0]:.2f} | {means[1]:.2f} | {share:.3f} |"
                )
        lines.append("")
    attention = reported[reported["what"] == "attention"]
    lines += ["## Appending a token, share of the attention's time", ""]
    for variant in variants[1:]:
        share = attention[attention["variant"] == variant.name]["append_share"]
        lines.append(
            f"- {variant.name}: {100 * share.mean():.2f} % (largest {100 * share.max():.2f} %)"
        )
    return lines


def geometric_mean(column: pd.Series) -> float:
    return math.exp(sum(math.log(x) for x in column) / len(column))


if __name__ == "__main__":
    sys.exit(main())
