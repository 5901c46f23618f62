"""The attention of one layer with the shapes of an 8B model, on random data, and its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from manifoldkv import CompressionPlan
from manifoldkv.evaluate.speed import elapsed
from manifoldkv.models.interface import AttentionSettings, weights_from_scores
from manifoldkv.models.rotary import Angles, rotate_halves
from manifoldkv.models.rotation import Rotation
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.plan.formats.quantizer import Quantizer
from manifoldkv.plan.predictor import PredictorContext
from manifoldkv.serve.cache.backend import Seen
from manifoldkv.serve.cache.layers import CompressedLayer
from manifoldkv.serve.cache.numba_backend import NumbaBackend
from manifoldkv.serve.cache.running import running_attention
from manifoldkv.serve.cache.storage import can_compile
from manifoldkv.serve.kernels.decode import mix, runs_triton, scores
from manifoldkv.serve.kernels.tables import KeyTables, LatentTables
from manifoldkv.serve.kernels.views import Packed
from measurements import random_model

TOKENS_AT_A_TIME = 2048
COPIED, MULTIPLIED = 1 << 25, 2048
"""Elements of the copy and rows of the product that floors are computed from."""
STOCK = {"stock bfloat16": torch.bfloat16, "stock float32": torch.float32}
Steps = dict[str, Callable[[], object]]


def random_tokens(count: int, batch: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random keys and values, (B, H_kv, t, d), the same of all sequences."""
    generator = torch.Generator().manual_seed(2)
    for start in range(0, count, TOKENS_AT_A_TIME):
        shape = (
            2,
            1,
            random_model.KV_HEADS,
            min(TOKENS_AT_A_TIME, count - start),
            random_model.HEAD_DIM,
        )
        keys, values = torch.randn(shape, generator=generator).to(
            device, random_model.dtype_on(device)
        )
        yield keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1)


def angles_of(tokens: int, device: torch.device) -> Angles:
    """Return the angles of the first tokens of a text."""
    frequencies = random_model.ROTATION_BASE ** (
        -torch.arange(0, random_model.HEAD_DIM, 2) / random_model.HEAD_DIM
    )
    angles = torch.arange(tokens).unsqueeze(1) * frequencies
    # Tokens are last in memory, as in a cache.
    angles = angles.repeat(1, 2).unsqueeze(0).to(device).mT.contiguous().mT
    return Angles(angles.cos(), angles.sin(), rotate_halves)


@dataclass(frozen=True)
class Query:
    """Queries of one token, (B, H_q, 1, d), its keys and values, and the angles of all tokens."""

    queries: Tensor
    of_token: tuple[Tensor, Tensor]
    angles: Angles

    @classmethod
    def after(cls, tokens: int, batch: int, device: torch.device) -> Query:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(
            batch,
            random_model.QUERY_HEADS + 2 * random_model.KV_HEADS,
            1,
            random_model.HEAD_DIM,
            generator=generator,
        )
        x = x.to(device, random_model.dtype_on(device))
        queries, keys, values = x.split(
            [random_model.QUERY_HEADS, random_model.KV_HEADS, random_model.KV_HEADS], dim=1
        )
        return cls(queries, (keys, values), angles_of(tokens + 1, device))

    @property
    def by_head(self) -> Tensor:
        """Return scaled queries by KV head, (B, H_kv, R, d)."""
        return (
            self.queries.reshape(
                len(self.queries), random_model.KV_HEADS, -1, random_model.HEAD_DIM
            )
            * random_model.HEAD_DIM**-0.5
        )


class CompressedStep:
    """Decode steps of one layer on a compressed cache of random tokens.

    Parameters
    ----------
    plan : CompressionPlan
        From `random_model.layer_plan`.
    query : Query
        The last token.
    """

    def __init__(self, plan: CompressionPlan, query: Query) -> None:
        self.plan, self.tokens = plan, query.angles.cos.shape[1] - 1
        device = query.queries.device
        dtype, batch = random_model.dtype_on(device), len(query.queries)
        self._query, self._settings = query, AttentionSettings(random_model.HEAD_DIM**-0.5)
        self._layer = CompressedLayer(self.plan.layers[0], dtype, device, random_model.SINKS)
        self._attention = running_attention(self.plan, 0, dtype, device, Composer(self.plan.layers))
        for keys, values in random_tokens(self.tokens, batch, device):
            past = self._layer.tokens_seen
            self._attention.store(self._layer, keys, values, self._context())
            self._layer.sinks.take(keys, values, past, None, query.angles)
        self.steps: Steps = {"step": self._attend, "new token": self._store}
        if can_compile(dtype, device):
            self.steps |= self._parts()
        elif runs_triton(device):
            self.steps |= self._parts_on_gpu()

    def _context(self) -> PredictorContext:
        context = self.plan.predictor_context()
        context.begin(0)
        return context

    def _attend(self) -> None:
        query, layers = self._query, [self._layer]
        new = query.queries, *query.of_token
        self._attention.attend(layers, *new, None, self._settings, query.angles, self._context())

    def _store(self) -> None:
        self._attention.store(self._layer, *self._query.of_token, self._context())

    def crop(self) -> None:
        """Remove the token of a step."""
        self._layer.crop(self.tokens - self._layer.tokens_seen)

    def _parts(self) -> Steps:
        """Return parts of a step by name, on the compiled kernels.

        Those that end in "only" omit the rest: tables without segments and pairs rebuild keys and
        neither rotate nor score them; blocks without features, and mixtures without rows, only
        unpack latents.
        """
        plan, query, n = self.plan.layers[0], self._query, self.tokens
        backend = NumbaBackend.of(
            Composer(self.plan.layers), 0, torch.float32, query.queries.device
        )
        angles = Angles(query.angles.cos[:, :n], query.angles.sin[:, :n], rotate_halves)
        seen = Seen([self._layer], angles, n, n, [], None)
        rotation = Rotation.of(rotate_halves, random_model.HEAD_DIM, random_model.HEAD_DIM)
        assert rotation is not None
        latents = [_latents(plan.key.quantizer), _latents(plan.value.quantizer)]
        up = plan.key.basis.up[0][:, : plan.key.latents]
        tables = KeyTables.of(
            latents[0], up, torch.zeros(random_model.FEATURES), random_model.KV_HEADS, rotation
        )
        rebuilt = _without(tables, groups=(2, 3), segments=(), pairs=())
        unpacked = _without(rebuilt, blocks=(1,))
        codes = self._packed()
        (by_head,) = backend.scores(seen, query.by_head)
        by_row = by_head.unflatten(2, (-1, 1))
        weights = by_head.softmax(dim=-1)

        out = by_head.flatten(1, 2)

        def rebuild(of: KeyTables) -> None:
            scores(query.by_head, codes[0], of, angles.cos, angles.sin, None, out)

        def unpack_for_mixing() -> None:
            nothing = weights.flatten(1, 2)[:, :0]
            for packed, of in reversed([*zip(codes, latents, strict=True)]):
                if of is latents[1] or plan.value.predictor is not None:
                    mix(nothing, packed, of, nothing.new_zeros(1, 0, len(of.fields)))

        return {
            "scores": lambda: list(backend.scores(seen, query.by_head)),
            "keys only": partial(rebuild, rebuilt),
            "key latents only": partial(rebuild, unpacked),
            "softmax": lambda: weights_from_scores(by_row, None, self._settings),
            "mixture": lambda: backend.mix(seen, weights),
            "mixed latents only": unpack_for_mixing,
        }

    def _parts_on_gpu(self) -> Steps:
        """Return parts of a step by name, on the Triton kernels."""
        from manifoldkv.serve.cache.triton_backend import TritonBackend

        device, n, query = self._query.queries.device, self.tokens, self._query
        dtype = random_model.dtype_on(device)
        backend = TritonBackend.of(Composer(self.plan.layers), 0, dtype, device)
        angles = Angles(query.angles.cos[:, :n], query.angles.sin[:, :n], rotate_halves)
        seen = Seen([self._layer], angles, n, n, [], None)
        (by_head,) = backend.scores(seen, query.by_head)
        by_row, weights = by_head.unflatten(2, (-1, 1)), by_head.softmax(dim=-1)
        return {
            "scores": lambda: list(backend.scores(seen, query.by_head)),
            "softmax": lambda: weights_from_scores(by_row, None, self._settings),
            "mixture": lambda: backend.mix(seen, weights),
        }

    def _packed(self) -> list[Packed]:
        """Return the latents of both sites."""
        stores: Any = self._layer.key_store, self._layer.value_store
        return [store.packed(0, self.tokens) for store in stores]


def _latents(quantizer: Quantizer) -> LatentTables:
    assert isinstance(quantizer, MixedWidths)
    return LatentTables.of_quantizer(quantizer)


def _without(tables: KeyTables, **left_out: tuple[int, ...]) -> KeyTables:
    """Return tables with columns of zeros, or with no rows where no columns are named."""
    changed = {}
    for name, columns in left_out.items():
        table = getattr(tables, name).clone()
        table[:, list(columns)] = 0
        changed[name] = table if columns else table[:0]
    return replace(tables, **changed)


def parts_of(seconds: dict[str, float]) -> dict[str, float]:
    """Return what the time of a step is made of, by subtraction of medians."""
    if "scores" not in seconds:
        return {"attention": seconds["step"]}
    if "keys only" not in seconds:
        parts = {
            "scores of keys": seconds["scores"],
            "softmax": seconds["softmax"],
            "mixing": seconds["mixture"],
            "new token": seconds["new token"],
        }
        return parts | {"rest": seconds["step"] - sum(parts.values())}
    rebuilt, unpacked = seconds["keys only"], seconds["key latents only"]
    of_mixture = seconds["mixed latents only"]
    parts = {
        "unpacking": unpacked + of_mixture,
        "rebuilding keys": rebuilt - unpacked,
        "rotating and scoring": seconds["scores"] - rebuilt,
        "softmax": seconds["softmax"],
        "mixing": seconds["mixture"] - of_mixture,
        "new token": seconds["new token"],
    }
    parts["rest"] = seconds["step"] - sum(parts.values())
    return parts


def stock_steps(tokens: int, batch: int, device: torch.device) -> dict[str, Steps]:
    """Return steps of torch's kernel on stock caches, by cache and by the way to share heads.

    A step of one query may also attend as rows of queries of every KV head, which models do not do
    and is faster.
    """
    pieces = list(random_tokens(tokens, batch, device))
    both = [torch.cat(x, dim=2) for x in zip(*pieces, strict=True)]
    stock: dict[str, Steps] = {}
    for name, dtype in STOCK.items():
        keys, values = both[0].to(dtype), both[1].to(dtype)
        queries = Query.after(1, batch, device).queries.to(dtype)
        shared = random_model.QUERY_HEADS // random_model.KV_HEADS
        repeated = [x.repeat_interleave(shared, dim=1) for x in (keys, values)]
        rows = queries.reshape(batch, random_model.KV_HEADS, shared, random_model.HEAD_DIM)
        attend = scaled_dot_product_attention
        stock[name] = {
            "enable_gqa": partial(attend, queries, keys, values, enable_gqa=True),
            "repeated heads": partial(attend, queries, repeated[0], repeated[1]),
        }
        stock[f"{name}, grouped"] = {"rows of queries": partial(attend, rows, keys, values)}
    return stock


def floors(rounds: int, device: torch.device) -> tuple[float, float]:
    """Return bytes and multiplications per second, of a copy and of a product of matrices."""
    x, y = (torch.ones(COPIED, device=device) for _ in range(2))
    a = torch.randn(MULTIPLIED, MULTIPLIED, device=device).to(random_model.dtype_on(device))
    copies = [elapsed(lambda: y.copy_(x), device) for _ in range(rounds + 1)]
    products = [elapsed(lambda: a @ a, device) for _ in range(rounds + 1)]
    return 2 * x.nbytes / median(copies[1:]), MULTIPLIED**3 / median(products[1:])


@torch.no_grad()
def measure(tokens: int, batch: int, rounds: int, device: torch.device) -> pd.DataFrame:
    """Return the parts of a decode step of every cache in seconds, all timed in turns.

    Parameters
    ----------
    tokens : int
        Cached tokens of every sequence.
    batch : int
        Number of sequences.
    rounds : int
        Number of rounds, after one that warms up.
    device : torch.device
        Of the layer.
    """
    query = Query.after(tokens, batch, device)
    compressed = {
        name: CompressedStep(random_model.layer_plan(*settings, tokens), query)
        for name, settings in random_model.PLANS.items()
    }
    steps = stock_steps(tokens, batch, device)
    steps |= {name: one.steps for name, one in compressed.items()}
    taken: dict[str, dict[str, list[float]]] = {
        name: {part: [] for part in of_cache} for name, of_cache in steps.items()
    }
    for _ in tqdm(range(rounds + 1), desc="rounds", disable=None):
        for name, of_cache in steps.items():
            for part, step in of_cache.items():
                taken[name][part].append(elapsed(step, device))
                if name in compressed:
                    compressed[name].crop()
    bandwidth, peak = floors(rounds, device)
    rows = []
    for name, times in taken.items():
        seconds = {part: median(of_part[1:]) for part, of_part in times.items()}
        plan = compressed[name].plan if name in compressed else None
        parts, facts = _of_compressed(plan, seconds) if plan else _of_stock(name, tokens, seconds)
        facts["nbytes"] *= batch
        multiplied = (
            facts["work"] * batch * tokens * 2 * random_model.QUERY_HEADS * random_model.HEAD_DIM
        )
        parts |= {
            "bytes over bandwidth": facts["nbytes"] / bandwidth,
            "multiplications over peak": multiplied / peak,
        }
        rows += [
            {"cache": name, **facts, "part": part, "seconds": part_seconds}
            for part, part_seconds in parts.items()
        ]
    facts = {"tokens": tokens, "batch": batch, "bandwidth": bandwidth, "peak": peak}
    return pd.DataFrame(rows).assign(**facts)


def _of_compressed(
    plan: CompressionPlan, seconds: dict[str, float]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the parts of a step on a compressed cache, and facts of the cache."""
    nbytes = plan.nbytes(plan.provenance.context)
    return parts_of(seconds), {"way": "", "work": plan.compute, "nbytes": nbytes}


def _of_stock(
    name: str, tokens: int, seconds: dict[str, float]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the fastest way of torch's kernel, and facts of the stock cache."""
    fastest = min(seconds, key=lambda way: seconds[way])
    nbytes = 2 * tokens * random_model.FEATURES * STOCK[name.partition(",")[0]].itemsize
    return {"attention": seconds[fastest]}, {"way": fastest, "work": 1.0, "nbytes": nbytes}
