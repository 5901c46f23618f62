"""Kernels of packed latents against plain torch, and against their number of multiplications."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec, module_from_spec
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as interleaved_partial
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as halves
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as partial_halves

from manifoldkv.models.rotary import rotate_halves
from manifoldkv.models.rotation import Rotation
from manifoldkv.plan.formats.planes import BitPlanes
from manifoldkv.plan.formats.scales import NAN_CODE, NAN_SHORT, scale_codes, scales_of, short_scales
from manifoldkv.plan.formats.trellis import STATES, codebooks, stream_layout
from manifoldkv.serve.kernels import decode
from manifoldkv.serve.kernels.decode import mix, project, scores, unpack
from manifoldkv.serve.kernels.numba import products as cpu
from manifoldkv.serve.kernels.numba import tiles as cpu_tiles
from manifoldkv.serve.kernels.step import Source, StepTables, attend
from manifoldkv.serve.kernels.tables import KeyTables, LatentTables
from manifoldkv.serve.kernels.views import Packed

Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS, HEAD_DIM = 2, 8
CPU = torch.device("cpu")


def of_keys(apply: Callable[..., tuple[Tensor, Tensor]]) -> Rotate:
    return lambda x, cos, sin: apply(x, x[:, :0], cos, sin)[0]


ROTATIONS: list[tuple[Rotate, int]] = [
    (rotate_halves, HEAD_DIM),
    (of_keys(halves), HEAD_DIM),
    (of_keys(partial_halves), HEAD_DIM // 2),
    (of_keys(interleaved_partial), HEAD_DIM // 2),
]
WIDTHS = st.lists(st.integers(1, 8), min_size=1, max_size=20).map(lambda x: sorted(x, reverse=True))


@dataclass(frozen=True)
class Site:
    """Packed latents of some tokens, and the same unpacked."""

    codes: Tensor
    latents: Tensor
    tables: LatentTables

    @property
    def packed(self) -> Packed:
        return Packed.of(self.codes)

    def spoil(self, token: int) -> None:
        """Make a token not a number."""
        self.codes[0, -1, token], self.latents[0, :, token] = NAN_CODE | NAN_SHORT, torch.nan


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def drawn_site(widths: list[int], batch: int, tokens: int, seed: int) -> Site:
    """A view that begins inside of a larger store."""
    generator = torch.Generator().manual_seed(seed)
    bits, planes = torch.tensor(widths, dtype=torch.uint8), BitPlanes(widths, CPU)
    shape = batch, len(widths), tokens + 5
    integers = torch.randint(0, 256, shape, generator=generator) % (2 ** bits.long()).view(-1, 1)
    scales = scale_codes(torch.rand(batch, 1, tokens + 5, generator=generator) + 0.1)
    codes = torch.cat([planes.pack(integers.to(torch.uint8)), scales], dim=1)[..., 2 : 2 + tokens]
    unpacked = torch.empty(batch, len(widths), tokens, dtype=torch.uint8)
    planes.unpack(codes, unpacked)
    half = 2.0 ** (bits.float() - 1).view(-1, 1)
    latents = scales_of(codes[:, -1:]) * (unpacked.float() + 0.5 - half)
    return Site(codes, latents, LatentTables(planes.fields(), 2.0 ** (bits.float() - 1) - 0.5))


def drawn_trellis_site(widths: list[int], batch: int, tokens: int, seed: int) -> Site:
    """Streams of random bits."""
    generator = torch.Generator().manual_seed(seed)
    bits, length = torch.tensor(widths), STATES.bit_length() - 1
    size = ceil((sum(widths) + 4) / 8), batch, tokens
    codes = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    short = torch.randint(0, NAN_SHORT, (batch, tokens), generator=generator)
    codes[-1] = codes[-1] & 240 | short.to(torch.uint8)
    stream = np.unpackbits(codes.numpy(), axis=0)  # (bits, batch, tokens)
    stream = stream[: sum(widths)]
    stream = np.concatenate([stream, np.zeros((length, batch, tokens), np.uint8)])
    latents = []
    for width, start in zip(widths, np.cumsum(widths) - widths, strict=True):
        state = stream[start : start + length]
        index = sum(bit.astype(np.int64) << (length - 1 - i) for i, bit in enumerate(state))
        latents.append(codebooks()[width][torch.as_tensor(index)] * short_scales()[short])
    tables = LatentTables(*stream_layout(bits))
    return Site(codes.transpose(0, 1).clone(), torch.stack(latents, dim=1), tables)


def drawn_angles(batch: int, tokens: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    angles = normal(batch, tokens, rotary_dim // 2).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


def drawn_up(kind: str, latents: int) -> Tensor:
    """An up-projection: dense, in bands of features j and j + d/2 of all heads, or with gaps."""
    up = normal(HEADS * HEAD_DIM, latents)
    features = torch.arange(HEADS * HEAD_DIM).view(-1, 1) % HEAD_DIM
    if kind == "dense":
        return up
    band, of_latents = features % (HEAD_DIM // 2), torch.arange(latents) * 7
    if kind == "gaps":
        return up * (features % 3 == of_latents % 4)
    return up * (band == of_latents % (HEAD_DIM // 2))


def assert_close(found: Tensor, expected: Tensor) -> None:
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if len(finite) else 1.0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * scale, equal_nan=True)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("manifoldkv.serve.kernels.decode.TOKENS_PER_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


DRAWN = WIDTHS, st.sampled_from([1, 3]), st.integers(1, 300), st.integers(0, 9)
SITES = st.builds(drawn_site, *DRAWN) | st.builds(drawn_trellis_site, *DRAWN)


@pytest.mark.usefixtures("threads")
@given(
    site=SITES,
    rotation=st.sampled_from(ROTATIONS),
    up=st.sampled_from(["dense", "bands", "gaps"]),
    predicted=st.integers(0, 6),
    rows=st.integers(1, 8),
    nan=st.booleans(),
)
def test_scores_are_those_of_rebuilt_rotated_keys(
    site: Site, rotation: tuple[Rotate, int], up: str, predicted: int, rows: int, nan: bool
) -> None:
    batch, latents, tokens = site.latents.shape
    matrix, mean = drawn_up(up, latents), normal(HEADS * HEAD_DIM)
    if nan and up == "dense":
        site.spoil(0)
    rotate, rotary_dim = rotation
    cos, sin = drawn_angles(batch if rows % 2 else 1, tokens, rotary_dim)
    found = Rotation.of(rotate, HEAD_DIM, rotary_dim)
    assert found is not None
    predictor, given_tokens = normal(len(mean), predicted), normal(batch, predicted, tokens)
    tables = KeyTables.of(site.tables, matrix, mean, HEADS, found, predictor)
    queries = normal(batch, HEADS, rows, HEAD_DIM)
    keys = matrix @ site.latents + mean.view(-1, 1) + predictor @ given_tokens
    keys = rotate(keys.unflatten(1, (HEADS, HEAD_DIM)).mT, cos, sin)
    more = given_tokens if predicted else None
    out = torch.empty(batch, HEADS * rows, tokens + 2)[..., 1:-1]
    scores(queries, site.packed, tables, cos, sin, more, out)
    assert_close(out, (queries @ keys.mT).flatten(1, 2))


@pytest.mark.usefixtures("threads")
@given(site=SITES, rows=st.integers(1, 9), nan=st.booleans())
def test_mixtures_and_products_are_those_of_unpacked_latents(
    site: Site, rows: int, nan: bool
) -> None:
    batch, latents, tokens = site.latents.shape
    if nan:
        site.spoil(0)
    weights, matrix = normal(batch, rows, tokens), normal(rows, latents)
    mixed = torch.ones(batch, rows, latents + 3)
    mix(weights, site.packed, site.tables, mixed, 2)
    assert_close(mixed[..., 2:-1], 1 + weights @ site.latents.mT)
    assert (mixed[..., :2] == 1).all()
    assert (mixed[..., -1] == 1).all()
    out = normal(batch, rows, tokens + 3)
    expected = out[..., 1:-2] + matrix @ site.latents
    project(site.packed, site.tables, matrix, out[..., 1:-2])
    assert_close(out[..., 1:-2], expected)
    factors, unpacked = normal(latents), torch.ones(batch, latents + 1, tokens + 3)
    unpack(site.packed, site.tables, factors, unpacked[..., 1:-2])
    assert_close(unpacked[:, :-1, 1:-2], factors.unsqueeze(1) * site.latents)
    unpacked[:, :-1, 1:-2] = 1
    assert (unpacked == 1).all()


@pytest.mark.usefixtures("threads")
@given(
    sites=st.lists(WIDTHS, min_size=1, max_size=3),
    tokens=st.integers(1, 1200),
    batch=st.sampled_from([1, 2]),
    rows=st.integers(1, 5),
    predicted=st.integers(0, 5),
    sinks=st.integers(0, 2),
    seed=st.integers(0, 9),
)
def test_attention_is_that_to_rebuilt_keys_and_values(
    sites: list[list[int]],
    tokens: int,
    batch: int,
    rows: int,
    predicted: int,
    sinks: int,
    seed: int,
) -> None:
    """The first site has the keys; all are mixed into values, and all but the first predict."""
    rotate, rotary_dim = ROTATIONS[seed % len(ROTATIONS)]
    drawn = [drawn_site(widths, batch, tokens, seed) for widths in sites]
    own, features = drawn[0], HEADS * HEAD_DIM
    up, mean = drawn_up("dense", len(sites[0])) / 4, normal(features)
    predictor = normal(features, predicted) / 4
    matrices = [normal(predicted, len(widths)) / 4 for widths in sites]
    found = Rotation.of(rotate, HEAD_DIM, rotary_dim)
    assert found is not None
    cos, sin = drawn_angles(batch if rows % 2 else 1, tokens, rotary_dim)
    keys = up @ own.latents + mean.view(-1, 1)
    for matrix, site in zip(matrices[1:], drawn[1:], strict=True):
        keys = keys + predictor @ (matrix @ site.latents)
    by_head = rotate(keys.unflatten(1, (HEADS, HEAD_DIM)).mT, cos, sin)
    maps = normal(HEADS, 1 + sum(map(len, sites)), HEAD_DIM)
    ones = torch.ones(batch, 1, tokens)
    mixed = torch.cat([ones, *(site.latents for site in drawn)], dim=1)  # (B, 1 + r, n)
    factors = torch.cat([torch.ones(1), normal(maps.shape[1] - 1)])
    values = (mixed.mT * factors).unsqueeze(1) @ maps
    queries, sink = normal(batch, HEADS, rows, HEAD_DIM), normal(batch, HEADS, sinks, HEAD_DIM)
    by_head, values = torch.cat([by_head, sink], dim=2), torch.cat([values, -sink], dim=2)
    expected = (queries @ by_head.mT).softmax(dim=-1) @ values
    sources = [
        Source(site.tables, matrix if index and predicted else None, is_mixed=True)
        for index, (site, matrix) in enumerate(zip(drawn, matrices, strict=True))
    ]
    of_keys = KeyTables.of(own.tables, up, mean, HEADS, found, predictor)
    packed = [site.packed for site in drawn]
    tables = StepTables(of_keys, tuple(sources), maps, factors)
    output = attend(queries, packed[0], packed, tables, cos, sin, (sink, -sink))
    # Scores of some tens have errors that their exponentials enlarge.
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-5 * float(values.abs().max()))


def test_attention_to_what_is_not_finite_is_not_finite() -> None:
    site = drawn_site([4, 4], 1, 9, 0)
    site.spoil(3)
    found = Rotation.of(rotate_halves, HEAD_DIM, HEAD_DIM)
    assert found is not None
    keys = KeyTables.of(site.tables, drawn_up("dense", 2), normal(16), HEADS, found)
    sources = (Source(site.tables, None, is_mixed=True),)
    tables = StepTables(keys, sources, normal(HEADS, 3, 8), torch.ones(3))
    queries, none = normal(1, HEADS, 2, HEAD_DIM), normal(1, HEADS, 0, HEAD_DIM)
    angles = drawn_angles(1, 9, HEAD_DIM)
    output = attend(queries, site.packed, [site.packed], tables, *angles, (none, none))
    assert bool(output.isnan().all())


def test_a_missing_numba_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decode, "find_spec", lambda name: None)
    decode.is_available.cache_clear()
    assert not decode.is_available()
    assert not decode.is_available()
    decode.is_available.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_a_rotation_is_derived_from_its_function(rotation: tuple[Rotate, int]) -> None:
    rotate, rotary_dim = rotation
    found = Rotation.of(rotate, HEAD_DIM, rotary_dim)
    assert found is not None
    cos, sin = drawn_angles(1, 1, rotary_dim)
    x = normal(1, 1, 1, HEAD_DIM)
    torch.testing.assert_close(rotate(x, cos, sin), x @ found.matrix(cos[0, 0], sin[0, 0]).T)


def test_other_functions_are_no_rotations() -> None:
    def mixes_three(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate_halves(x, cos, sin) + x.roll(1, -1)

    def mirrors(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + x.roll(HEAD_DIM // 2, -1) * sin

    for function in (mixes_three, mirrors):
        assert Rotation.of(function, HEAD_DIM, HEAD_DIM) is None


class Counted:
    """A number that counts the multiplications of all of its kind."""

    __array_ufunc__ = None
    multiplications = 0

    def __add__(self, other: object) -> Counted:
        return self

    __radd__ = __sub__ = __rsub__ = __add__

    def __mul__(self, other: object) -> Counted:
        Counted.multiplications += 1
        return self

    __rmul__ = __mul__


def counted(*shape: int) -> np.ndarray[Any, Any]:
    return np.full(shape, Counted(), dtype=object)


def test_kernels_are_compiled_again_after_a_change_of_their_parts() -> None:
    """Numba's cache knows the file that defines a kernel alone."""
    found = sha256(Path(cpu_tiles.__file__).read_bytes()).hexdigest()[:16]
    assert found == cpu.CHECKSUM_OF_TILES, "write this checksum into products.py"


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels as plain Python."""
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    for name in ("tiles", "products"):
        spec = find_spec(f"manifoldkv.serve.kernels.numba.{name}")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        # Neither unpacking nor a softmax is counted, in torch as here.
        for uncounted in ("unpack_scales", "_softmax_tile"):
            if hasattr(module, uncounted):
                monkeypatch.setattr(module, uncounted, lambda *arguments: None)
        if hasattr(module, "_field"):  # which is no Python
            monkeypatch.setattr(module, "_field", lambda x, right, mask, left: x >> right & mask)
    return module


def rows_of(x: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], int, int]:
    """A view of an array (1, rows, n), as kernels take it."""
    return x.reshape(-1), 0, x.shape[-1]


@pytest.mark.parametrize("up", ["dense", "bands", "gaps"])
@pytest.mark.parametrize("rows", [1, 3])
def test_kernels_multiply_no_more_than_tables_say(
    interpreted: ModuleType, up: str, rows: int
) -> None:
    tokens, predicted, (rotate, rotary_dim) = 3, 5, ROTATIONS[2]
    site = drawn_site([8, 7, 6, 5, 3, 3, 2, 1, 1], 1, tokens, 0)
    fields = site.tables.fields.numpy()
    latents = len(fields)
    rotation = Rotation.of(rotate, HEAD_DIM, rotary_dim)
    assert rotation is not None
    matrix, mean = drawn_up(up, latents), normal(HEADS * HEAD_DIM)
    predictor = normal(len(mean), predicted)
    keys = KeyTables.of(site.tables, matrix, mean, HEADS, rotation, predictor)
    codes = rows_of(site.codes.contiguous().numpy())
    scratch = counted(100 * interpreted.TILE), np.empty(interpreted.TILE, np.uint8)
    part = scratch, counted(1, rows, latents), 0, 0, tokens
    numbers, p = np.arange(len(mean)), rows_of(counted(1, rotary_dim, tokens))

    def count(kernel: Callable[..., None], *arguments: object) -> float:
        Counted.multiplications = 0
        kernel(*arguments)
        return Counted.multiplications / tokens

    packed = codes, rows_of(counted(1, 1, tokens)), fields, counted(latents)
    used = keys.latents.fields.numpy()
    tables = [counted(*x.shape) if x.dtype == np.float32 else x for x in keys.arrays]
    found = count(
        interpreted.scores,
        counted(1, HEADS, rows, HEAD_DIM),
        (*packed[:2], used, counted(len(used))),
        tables,
        rows_of(counted(1, predicted, tokens)),
        p,
        p,
        numbers,
        scratch,
        rows_of(counted(1, HEADS * rows, tokens)),
        0,
        tokens,
    )
    assert found == keys.multiplications(rows)
    found = count(interpreted.mix, rows_of(counted(1, rows, tokens)), packed, *part)
    assert found == site.tables.multiplications(rows)
    out = rows_of(counted(1, rows, tokens))
    by_row = counted(rows, latents), np.arange(rows)
    found = count(interpreted.project, packed, *by_row, scratch, out, 1, 0, tokens)
    assert found == site.tables.projection_multiplications(rows)
    sources = (
        Source(site.tables, normal(predicted, latents), is_mixed=True),
        Source(site.tables, normal(predicted, latents), is_mixed=False),
        Source(site.tables, None, is_mixed=True),
    )
    columns = 1 + 2 * latents
    step = StepTables(keys, sources, normal(HEADS, columns, HEAD_DIM), torch.ones(columns))
    uses = [counted(*x.shape) if x.dtype == np.float32 else x for x in step.uses]
    found = count(
        interpreted.attend,
        counted(1, HEADS, rows, HEAD_DIM),
        (*packed[:2], used, counted(len(used))),
        tables,
        (packed[:2],) * interpreted.SOURCES,
        uses,
        p,
        p,
        numbers,
        np.array([[0, 0, 0, tokens, 0]]),
        scratch,
        counted(1, HEADS * rows, 1 + 2 * latents),
        counted(1, HEADS * rows),
        0,
        1,
    )
    assert found == step.multiplications(rows)
