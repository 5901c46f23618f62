"""The laws of the products of a decode step, in Triton.

Without a CUDA device they hold under Triton's interpreter; `pytest -m gpu` runs them on a device.
"""

from dataclasses import dataclass
from math import ceil

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from manifoldkv.plan.formats.planes import BitPlanes
from manifoldkv.plan.formats.scales import (
    INFINITY_CODE,
    NAN_CODE,
    NAN_SHORT,
    scale_codes,
    scales_of,
    short_scales,
)
from manifoldkv.plan.formats.trellis import codebooks, stream_layout

triton = pytest.importorskip("triton")
# The interpreter computes with what lies in memory beyond the last token, and stores none of it.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
from manifoldkv.serve.kernels.tables import LatentTables  # noqa: E402
from manifoldkv.serve.kernels.triton import products as gpu  # noqa: E402
from manifoldkv.serve.kernels.triton.latents import in_words, zeros_beside  # noqa: E402
from manifoldkv.serve.kernels.triton.tables import tabulate_keys, tabulate_latents  # noqa: E402

BEYOND = 10
"""Fewest tokens allocated beyond those of a view."""


@pytest.fixture(autouse=True, params=[1, gpu.PROGRAMS])
def _programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in one part and in many."""
    monkeypatch.setattr(gpu, "PROGRAMS", request.param)


@dataclass(frozen=True)
class Case:
    """A layer and a step: widths, bands and rotation, sizes, and tokens before those of views."""

    trellis: bool = False
    widths: tuple[int, ...] = (8, 7, 6, 5, 4, 3, 3, 2, 2, 2, 1, 1, 1, 1)
    bands: int = 1
    rotation: str = "halves"
    heads: int = 2
    head_dim: int = 8
    rotary_dim: int = 8
    inputs: int = 0
    batch: int = 1
    rows: int = 1
    tokens: int = 37
    before: int = 3

    @property
    def features(self) -> int:
        return self.heads * self.head_dim


# Of several tiles in every dimension, and of less than one.
CASES = [
    Case(),
    Case(bands=4, batch=2, rows=3, inputs=3),
    Case(bands=2, rotation="neighbours", heads=3, rows=4, tokens=1),
    Case(bands=2, rotary_dim=4, head_dim=7, inputs=40, tokens=64),
    Case(widths=(1,) * 9, rotation="neighbours", rotary_dim=6, batch=2, rows=2, tokens=131),
    Case(widths=(4,) * 70, heads=3, head_dim=64, rotary_dim=64, batch=2, rows=2),
    Case(widths=(3,) * 6, bands=3, head_dim=6, rotary_dim=0, heads=1, inputs=1, tokens=65),
    Case(widths=(2,), heads=9, head_dim=2, rotary_dim=2, rows=8),
    Case(trellis=True, bands=2, batch=2, rows=2, inputs=3, tokens=65),
    Case(bands=4, batch=2, rows=3, inputs=3, before=4, tokens=300),
    Case(trellis=True, batch=2, rows=2, before=16, tokens=290),
    Case(rows=2, before=0, tokens=256),
    Case(trellis=True, widths=(2, 1, 2, 0, 1, 0, 0, 0, 0, 1) * 4),
]


class Step:
    """Random tensors of a case, in views with a stride, and float64 latents for the reference."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(0)
        tables, unscaled, packed = self._trellis() if case.trellis else self._integers()
        self.codes = self.view(packed.to(device)).unsqueeze(1)
        self.latents = tabulate_latents(tables, device)
        last = packed[:, -1:]
        scales = short_scales()[(last & 15).long()] if case.trellis else scales_of(last)
        self.z = (unscaled.double() * scales.double()).to(device)

    def _integers(self) -> tuple[LatentTables, Tensor, Tensor]:
        """Tables, latents before their scales, and bytes of random integers."""
        case, widths = self.case, torch.tensor(self.case.widths)
        codes = (self.random(case.batch, len(widths), case.tokens).abs() * 1000).long().cpu()
        codes %= (2**widths).unsqueeze(1)
        centres = 2.0 ** (widths - 1) - 0.5
        packed = BitPlanes(case.widths, torch.device("cpu")).pack(codes.to(torch.uint8))
        scales = scale_codes(self.random(case.batch, 1, case.tokens).abs()).cpu()
        packed = torch.cat([packed, scales], dim=1)
        return LatentTables(fields(case.widths), centres), codes - centres.unsqueeze(1), packed

    def _trellis(self) -> tuple[LatentTables, Tensor, Tensor]:
        """The same of trellis-coded latents: codewords of ten bits of random streams."""
        case, widths = self.case, torch.tensor(self.case.widths)
        count = int(widths.sum())
        bits = torch.randint(2, (case.batch, count, case.tokens), generator=self.generator)
        whole = functional.pad(bits, (0, 0, 0, 4 + -(count + 4) % 8)).unflatten(1, (-1, 8))
        packed = (whole << torch.arange(7, -1, -1).view(8, 1)).sum(dim=2).to(torch.uint8)
        shape = case.batch, case.tokens
        packed[:, -1] |= torch.randint(NAN_SHORT, shape, generator=self.generator).to(torch.uint8)
        followed = functional.pad(bits, (0, 0, 0, 10))
        z = torch.empty(case.batch, len(widths), case.tokens)
        for latent, first in enumerate((widths.cumsum(0) - widths).tolist()):
            state = (followed[:, first : first + 10] << torch.arange(9, -1, -1).view(10, 1)).sum(1)
            z[:, latent] = codebooks()[case.widths[latent]][state]
        return LatentTables(*stream_layout(widths)), z, packed

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def view(self, x: Tensor) -> Tensor:
        """Return tokens of a larger tensor."""
        first = self.case.before
        capacity = ceil((first + x.shape[-1] + BEYOND) / 16) * 16
        wide = x.new_full((*x.shape[:-1], capacity), 77)  # finite, and no latent
        wide[..., first : first + x.shape[-1]] = x
        return wide[..., first : first + x.shape[-1]]


def fields(widths: tuple[int, ...]) -> Tensor:
    """Byte, right shift, mask and left shift of bit fields, from single bits that are packed."""
    planes = BitPlanes(widths, torch.device("cpu"))
    table = torch.zeros(len(widths), 4, 4, dtype=torch.int64)
    for latent, width in enumerate(widths):
        found: dict[tuple[int, int], int] = {}
        for bit in range(width):
            one = torch.zeros(len(widths), 1, dtype=torch.uint8)
            one[latent] = 1 << bit
            packed = planes.pack(one)[:, 0]
            byte = int(packed.argmax())
            shift = int(packed[byte]).bit_length() - 1
            found[byte, bit - shift] = found.get((byte, bit - shift), 0) | 1 << bit
        for row, ((byte, offset), mask) in enumerate(found.items()):
            left = (mask & -mask).bit_length() - 1
            table[latent, row] = torch.tensor([byte, left - offset, mask >> left, left])
    return table


def rotation(case: Case) -> tuple[Tensor, Tensor]:
    """Partners and signs of the rotated features of a head."""
    feature = torch.arange(case.rotary_dim)
    if case.rotation == "neighbours":
        return feature ^ 1, feature % 2 * 2.0 - 1
    half = case.rotary_dim // 2
    return feature.roll(half), torch.where(feature < half, -1.0, 1.0)


def banded(case: Case, step: Step, partner: Tensor) -> Tensor:
    """An up-projection (D, r) of bands of frequencies; latents of a band are not neighbours."""
    frequency = torch.arange(case.head_dim)
    frequency[: case.rotary_dim] = torch.minimum(frequency[: case.rotary_dim], partner)
    rows = frequency.repeat(case.heads) % case.bands
    columns = torch.arange(len(case.widths)) % case.bands
    up = step.random(case.features, len(case.widths))
    return up * (rows.unsqueeze(1) == columns).to(step.device)


def assert_close(x: Tensor, reference: Tensor) -> None:
    assert x.dtype == torch.float32
    assert x.shape == reference.shape
    assert (x - reference).abs().max() <= 1e-5 * reference.abs().max()


def scores_of(
    step: Step, case: Case, dtype: triton.language.dtype = triton.language.float32
) -> tuple[Tensor, Tensor]:
    """Scores of the kernel and of a plain reference."""
    partner, sign = rotation(case)
    up, mean = banded(case, step, partner), step.random(case.features)
    prediction = step.random(case.features, case.inputs) if case.inputs else None
    inputs = step.view(step.random(case.batch, case.inputs, case.tokens)) if case.inputs else None
    queries = step.random(case.batch, case.heads, case.rows, case.head_dim)
    angles = step.random(1 if case.rows == 2 else case.batch, case.tokens, case.rotary_dim)
    cos, sin = angles.cos(), angles.mT.contiguous().mT.sin()
    if case.before % 4 == 0:
        cos, sin = (step.view(x.mT).mT for x in (cos, sin))
    still = torch.arange(case.rotary_dim, case.head_dim)
    keys = tabulate_keys(
        step.latents,
        up,
        mean,
        torch.cat([partner, still]),
        torch.cat([sign, 0.0 * still]),
        torch.cat([torch.arange(case.rotary_dim), 0 * still]),
        prediction,
    )
    out = gpu.scores(queries, step.codes, keys, cos, sin, inputs, scaling=0.5, dtype=dtype)

    k = up.double() @ step.z + mean.double().unsqueeze(1)
    if prediction is not None and inputs is not None:
        k += prediction.double() @ inputs.double()
    k = k.unflatten(1, (case.heads, case.head_dim)).mT  # (B, H, n, d)
    turned = k.clone()
    rotary = k[..., : case.rotary_dim]
    turned[..., : case.rotary_dim] = rotary * cos.double().unsqueeze(1)
    sines = sin.double().unsqueeze(1) * sign.to(step.device)
    turned[..., : case.rotary_dim] += rotary[..., partner] * sines
    return out, 0.5 * queries.double() @ turned.mT


@pytest.mark.parametrize("case", CASES)
def test_scores_are_products_with_rotated_keys(case: Case, device: torch.device) -> None:
    assert_close(*scores_of(Step(case, device), case))


@pytest.mark.parametrize("case", CASES)
def test_a_mix_is_the_weighted_sum_of_latents(case: Case, device: torch.device) -> None:
    step = Step(case, device)
    weights = step.view(step.random(case.batch, case.heads * case.rows, case.tokens))
    source = step.codes, step.latents
    out = gpu.mix(weights, case.tokens, [source, source])
    mixed = weights.double() @ step.z.mT
    assert_close(out, torch.cat([weights.double().sum(-1, keepdim=True), mixed, mixed], dim=-1))


@pytest.mark.parametrize("case", CASES)
def test_a_projection_is_added(case: Case, device: torch.device) -> None:
    step = Step(case, device)
    matrix = step.random(case.features, len(case.widths))
    out = step.view(step.random(case.batch, case.features, case.tokens))
    reference = out.double() + matrix.double() @ step.z
    buffer = out._base
    assert buffer is not None
    before = buffer.clone()
    gpu.project(matrix, step.codes, step.latents, out)
    assert_close(out, reference)
    beyond = torch.ones_like(buffer, dtype=torch.bool)
    beyond[..., case.before : case.before + case.tokens] = False
    assert torch.equal(buffer[beyond], before[beyond])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16 is for tensor cores")
@pytest.mark.parametrize("case", CASES)
def test_products_of_bfloat16_are_near_those_of_float32(case: Case) -> None:
    step = Step(case, torch.device("cuda"))
    dtype = triton.language.bfloat16
    weights = step.random(case.batch, case.heads * case.rows, case.tokens)
    source = step.codes, step.latents
    mixed = gpu.mix(weights, case.tokens, [source], dtype)[..., 1:]
    out = torch.zeros(case.batch, case.features, case.tokens, device="cuda")
    matrix = step.random(case.features, len(case.widths))
    gpu.project(matrix, step.codes, step.latents, out, dtype)
    references = weights.double() @ step.z.mT, matrix.double() @ step.z
    for found, reference in [
        scores_of(step, case, dtype),
        *zip((mixed, out), references, strict=True),
    ]:
        assert (found - reference).norm() <= 0.01 * reference.norm()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [INFINITY_CODE, NAN_CODE], ids=["inf", "nan"])
def test_a_scale_that_is_not_finite_stays_with_its_token(bad: int, device: torch.device) -> None:
    case = Case(bands=4, batch=2, rows=2, tokens=9)
    step = Step(case, device)
    step.codes[1, :, -1, 4] = bad
    finite = torch.ones(2, 9, dtype=torch.bool, device=device)
    finite[1, 4] = False
    scores, _ = scores_of(step, case)
    assert torch.equal(scores.isfinite(), finite[:, None, None].expand_as(scores))

    weights = step.random(2, 4, 9)
    weights[:, 0, 4] = 0  # times infinity is NaN, as in torch
    mixed = gpu.mix(weights, 9, [(step.codes, step.latents)])[..., 1:]
    assert mixed[0].isfinite().all()
    assert not mixed[1].isfinite().any()

    out = torch.zeros(2, 5, 9, device=device)
    gpu.project(step.random(5, len(case.widths)), step.codes, step.latents, out)
    assert torch.equal(out.isfinite(), finite[:, None].expand_as(out))


@pytest.mark.parametrize("first", range(4))
def test_words_hold_the_bytes_of_a_view(first: int) -> None:
    memory = torch.randint(0, 256, (2, 1, 5, 16), dtype=torch.uint8)
    codes = memory[..., first : first + 9]
    words = in_words(codes)
    held = words.codes.view(torch.uint8)
    for batch, row in ((0, 0), (1, 3)):
        start = 4 * (words.first + batch * words.batch + row * words.row) + words.before
        assert torch.equal(held[start : start + 9], codes[batch, 0, row])
    last = words.scale_first + words.scale_batch + words.before
    assert torch.equal(words.scales[last : last + 9], codes[1, 0, -1])
    assert zeros_beside(codes, 3).storage_offset() % 4 == words.before
    assert zeros_beside(codes, 3).shape == (2, 3, 9)
