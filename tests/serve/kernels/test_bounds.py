"""Kernels refuse operands that do not fit each other, since they would read beyond memory."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from manifoldkv.core.errors import CacheError
from manifoldkv.models.rotary import rotate_halves
from manifoldkv.models.rotation import Rotation
from manifoldkv.plan.formats.trellis import TrellisCoded
from manifoldkv.serve.kernels.decode import held_scratch, mix, project, scores, unpack
from manifoldkv.serve.kernels.entropy import SymbolReader
from manifoldkv.serve.kernels.entropy import encode as encode_symbols
from manifoldkv.serve.kernels.numba import products as cpu
from manifoldkv.serve.kernels.quantize import QuantizerTables, encode, quantize
from manifoldkv.serve.kernels.step import Source, StepTables, attend
from manifoldkv.serve.kernels.tables import KeyTables
from manifoldkv.serve.kernels.views import Packed, flat_view
from tests.serve.kernels.test_decode import (
    HEAD_DIM,
    HEADS,
    drawn_angles,
    drawn_site,
    drawn_trellis_site,
    drawn_up,
    normal,
)
from tests.serve.kernels.test_entropy import tables_of

WIDTHS = [4, 3, 2]
BATCH, TOKENS, ROWS, PREDICTED = 2, 9, 2, 3
D, LATENTS = HEADS * HEAD_DIM, len(WIDTHS)
Call = Callable[..., Any]


def with_codes(codes: Tensor) -> dict[str, Packed]:
    return {"packed": Packed.of(codes)}


def check(call: Call, given: dict[str, Any], wrong: list[dict[str, Any]]) -> None:
    """The operands are taken, but not with any of the wrong ones."""
    call(**given)
    for operands in wrong:
        with pytest.raises(CacheError):
            call(**given | operands)


@pytest.mark.parametrize("draw", [drawn_site, drawn_trellis_site])
class TestCompiledKernels:
    def test_packed_latents(self, draw: Call) -> None:
        site = draw(WIDTHS, BATCH, TOKENS, 0)
        wrong = [
            with_codes(site.codes[:1]),
            with_codes(site.codes.repeat(2, 1, 1)),
            with_codes(site.codes[..., 1:]),
            with_codes(site.codes[:, : site.tables.nbytes - 1]),
        ]
        weights, out = normal(BATCH, ROWS, TOKENS), torch.zeros(BATCH, ROWS, LATENTS)
        given = {"packed": site.packed, "tables": site.tables, "out": out}
        further = [{"weights": weights[..., 1:]}, {"weights": weights[:1]}, {"column": 1}]
        check(mix, given | {"weights": weights}, [*wrong, *further, {"column": -1}])
        given |= {"out": torch.zeros(BATCH, ROWS, TOKENS), "matrix": normal(ROWS, LATENTS)}
        further = [{"matrix": normal(ROWS, LATENTS + 1)}, {"matrix": normal(ROWS + 1, LATENTS)}]
        check(project, given, [*wrong, *further, {"out": torch.zeros(BATCH, ROWS, TOKENS - 1)}])
        given = given | {"out": torch.zeros(BATCH, LATENTS, TOKENS), "factors": normal(LATENTS)}
        del given["matrix"]
        further = [{"factors": normal(LATENTS + 1)}, {"out": torch.zeros(BATCH, 1, TOKENS)}]
        check(unpack, given, [*wrong, *further])

    def test_attention(self, draw: Call) -> None:
        site, rotation = draw(WIDTHS, BATCH, TOKENS, 0), Rotation.of(rotate_halves, 8, 8)
        assert rotation is not None
        up, mean, predictor = drawn_up("dense", LATENTS), normal(D), normal(D, PREDICTED)
        keys = KeyTables.of(site.tables, up, mean, HEADS, rotation, predictor)
        cos, sin = drawn_angles(BATCH, TOKENS, HEAD_DIM)
        queries = normal(BATCH, HEADS, ROWS, HEAD_DIM)
        given = {"queries": queries, "packed": site.packed, "cos": cos, "sin": sin}
        wrong = [
            {"queries": queries.repeat(2, 1, 1, 1)},
            {"queries": queries[:1]},
            {"queries": queries[..., 1:].contiguous()},
            {"queries": queries[:, 1:].contiguous()},
            with_codes(site.codes[:1]),
            with_codes(site.codes[..., 1:]),
            with_codes(site.codes[:, : site.tables.nbytes - 1]),
            {"cos": cos[:, 1:], "sin": sin[:, 1:]},
            {"cos": cos[..., 5:], "sin": sin[..., 5:]},
            {"sin": sin[:1]},
            {"cos": cos.repeat(2, 1, 1), "sin": sin.repeat(2, 1, 1)},
        ]
        inputs = normal(BATCH, PREDICTED, TOKENS)
        out = torch.empty(BATCH, HEADS * ROWS, TOKENS)
        of_scores = given | {"tables": keys, "predicted": inputs, "out": out}
        further = [{"predicted": x} for x in (None, inputs[:1], inputs[:, 1:], inputs[..., 1:])]
        further += [{"out": x} for x in (out[:1], out[:, 1:], torch.empty(BATCH, 4, TOKENS + 1))]
        check(scores, of_scores, [*wrong, *further])
        source = Source(site.tables, normal(PREDICTED, LATENTS), is_mixed=True)
        step = StepTables(
            keys, (source,), normal(HEADS, 1 + LATENTS, HEAD_DIM), torch.ones(1 + LATENTS)
        )
        none = normal(BATCH, HEADS, 0, HEAD_DIM)
        given |= {"sources": [site.packed], "tables": step, "sinks": (none, none)}
        one = normal(BATCH, HEADS, 1, HEAD_DIM)
        tiles = np.array([[0, 0, 0, 9, 0], [1, 1, 0, 4, 0]])
        wrong += [{"sinks": (one, none)}, {"sinks": (one[:1], one[:1])}, {"sources": []}]
        wrong += [{"sources": [Packed.of(x)]} for x in (site.codes[:1], site.codes[..., 1:])]
        for column, number in ((0, 2), (1, 2), (2, 6), (3, 10), (4, 6), (4, -1)):
            beyond = tiles.copy()
            beyond[1, column] = number
            wrong.append({"tiles": beyond})
        check(attend, given, wrong)
        attend(**given, tiles=tiles)


def test_quantization() -> None:
    site, ones = drawn_site(WIDTHS, 1, 1, 0), torch.ones(LATENTS)
    size = site.codes.shape[1]
    tables = QuantizerTables(site.tables, ones, ones, ones, size)
    x, codes = normal(BATCH, TOKENS, LATENTS), torch.empty(BATCH, size, TOKENS, dtype=torch.uint8)
    views = [codes[:1], codes[:, 1:], codes[..., 1:].contiguous()]
    wrong: list[dict[str, Any]] = [{"codes": flat_view(view)} for view in views]
    given = {"tables": tables, "codes": flat_view(codes)}
    more = [{"latents": x[..., 1:]}, {"latents": x.repeat(2, 1, 1)}]
    check(quantize, given | {"latents": x}, [*wrong, *more])
    inputs, expected = normal(BATCH, TOKENS, D), normal(BATCH, TOKENS, D)
    given |= {"x": inputs, "expected": expected, "down": normal(LATENTS, D)}
    wrong += [{"expected": expected[:1]}, {"expected": expected[..., 1:]}, {"x": inputs[..., 1:]}]
    check(encode, given, [*wrong, {"down": normal(LATENTS + 1, D)}, {"x": inputs[:1]}])
    trellis = TrellisCoded(torch.tensor([2.0, 1.0, 0.5]), ones, ones, ones)
    size = trellis.stream_bytes
    codes = torch.empty(BATCH, size, TOKENS, dtype=torch.uint8)
    views = [codes[:1], codes[:, 1:], codes[..., 1:].contiguous()]
    wrong = [{"codes": flat_view(view)} for view in views] + [{"latents": x[..., 1:]}]
    check(trellis.encode, {"latents": x, "codes": flat_view(codes)}, wrong)


def test_symbols() -> None:
    tables = tables_of([1.0, 2.0])
    symbols = torch.zeros(2, 5, dtype=torch.int32)
    coded = encode_symbols(symbols, tables)
    with pytest.raises(CacheError, match="symbols"):
        encode_symbols(symbols[:1], tables)
    reader = SymbolReader(tables, *coded)
    reader.read(1)
    with pytest.raises(CacheError, match="2 latents are asked for, of which 1 are left"):
        reader.read(2)


def test_packed_latents_end_with_their_memory() -> None:
    codes = flat_view(torch.zeros(2, 3, 4, dtype=torch.uint8))
    Packed.of_view(codes, 2, 3, 4)
    for shape in ((3, 3, 4), (2, 4, 4), (2, 3, 5)):
        with pytest.raises(CacheError, match="too few"):
            Packed.of_view(codes, *shape)


@pytest.mark.skipif(not numba.config.BOUNDSCHECK, reason="with NUMBA_BOUNDSCHECK=1 only")
def test_compiled_code_checks_bounds() -> None:
    site = drawn_site([4], 1, 9, 0)
    views, short = site.packed[:2], np.empty((1, 1, 0), np.float32)
    operands = flat_view(normal(1, 2, 9)), (*views, *site.tables.arrays), held_scratch(7), short
    with pytest.raises(IndexError):
        cpu.mix(*operands, 0, 0, 9)


class TestTritonKernels:
    pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")

    def test_packed_latents(self, device: torch.device) -> None:
        from tests.serve.kernels.test_gpu import Case, Step, gpu, tabulate_keys

        case = Case(batch=2, inputs=3, tokens=20)
        step = Step(case, device)
        widths, n = len(case.widths), case.tokens
        wrong = [
            {"codes": step.codes[:1]},
            {"codes": step.codes[..., :-4]},
            {"codes": step.codes[:, :, : step.latents.nbytes - 1]},
        ]
        out, matrix = step.random(2, 5, n), step.random(5, widths)
        given = {"codes": step.codes, "latents": step.latents, "out": out, "dtype": gpu.tl.float32}
        more = [{"out": out[:1]}, {"out": out[:, :, 1:]}]
        bad = [{"matrix": matrix[1:]}, {"matrix": matrix[:, 1:]}]

        def projected(matrix: Tensor, **operands: Any) -> None:
            gpu.project(matrix, **operands)

        check(projected, given | {"matrix": matrix}, [*wrong, *more, *bad])

        def mixed(weights: Tensor, codes: Tensor) -> None:
            gpu.mix(weights, n, [(codes, step.latents)])

        weights = step.random(2, 4, n)
        more = [{"weights": weights[:1]}, {"weights": weights[..., 1:]}]
        check(mixed, {"weights": weights, "codes": step.codes}, [*wrong, *more])

        feature = torch.arange(8)
        prediction = step.random(16, 3)
        sign = torch.ones(8)
        tables = (step.random(16, widths), step.random(16), feature, sign, feature, prediction)
        keys = tabulate_keys(step.latents, *tables)
        queries, angles = step.random(2, 2, 1, 8), step.random(2, n, 8)
        inputs = step.random(2, 3, n)

        def scored(queries: Tensor, **operands: Any) -> None:
            gpu.scores(queries, keys=keys, **operands)

        given = {"codes": step.codes, "cos": angles, "sin": angles, "predicted": inputs}
        more = [{"queries": queries[:1]}, {"queries": queries.repeat(2, 1, 1, 1)}]
        more += [{"queries": queries[..., 1:]}, {"queries": queries[:, 1:]}]
        more += [{name: angles[:, 1:]} for name in ("cos", "sin")]
        more += [{name: angles[..., 1:]} for name in ("cos", "sin")]
        more += [{name: angles.repeat(2, 1, 1)} for name in ("cos", "sin")]
        more += [{"predicted": x} for x in (None, inputs[:1], inputs[:, 1:], inputs[..., 1:])]
        check(scored, given | {"queries": queries}, [*wrong, *more])

    def test_streams(self, device: torch.device) -> None:
        pytest.importorskip("triton")
        from manifoldkv.serve.kernels.triton import encode as gpu_encode

        ones = torch.ones(3)
        quantizer = TrellisCoded(torch.tensor([2.0, 1.0, 0.5]), ones, ones, ones)
        tables = gpu_encode.EncoderTables.of(quantizer, device)
        x = normal(2, 2, 3).to(device)
        codes = torch.zeros(2, 1, quantizer.stream_bytes, 16, dtype=torch.uint8, device=device)

        def encoded(latents: Tensor, codes: Tensor) -> None:
            gpu_encode.encode(latents, tables, codes)

        few = codes[:, 0, :, :2]
        wrong = [{"latents": x[:1]}, {"latents": x[..., 1:]}, {"latents": x[:, 1:]}]
        wrong += [{"codes": few[:1]}, {"codes": few[:, : tables.latents.nbytes - 1]}]
        check(encoded, {"latents": x, "codes": few}, wrong)

        def read(codes: Tensor, factor: Tensor) -> None:
            gpu_encode.read(codes, tables.latents, factor, torch.float32)

        wrong = [
            {"factor": ones[1:].to(device)},
            {"codes": codes[:, :, : tables.latents.nbytes - 1]},
        ]
        check(read, {"codes": codes, "factor": ones.to(device)}, wrong)
