"""Neighbouring methods: the law that makes each the method of its paper, and counted bytes."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from methods import METHODS, Method, Setting
from methods.grids import lloyd_max, nearest_word, plane_codebook, randomized_hadamard
from methods.higgs import Higgs
from methods.turboquant import TurboQuant, reconstructed
from scipy.linalg import hadamard
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.coding.planes import BitPlanes
from manifoldkv.errors import ModelError
from tests.families import tiny_model, tiny_tokens

LENGTH = 24


def model_of(family: str = "llama") -> PreTrainedModel:
    return tiny_model(family, dtype=torch.float32)


def method_of(name: str, ratio: float, model: PreTrainedModel | None = None) -> Method:
    calibration = tiny_tokens(8, LENGTH)
    setting = Setting(model or model_of(), calibration, LENGTH, "pre", 0, Path())
    return METHODS.get(name)(setting, ratio)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(codes: Tensor, bits: int) -> bytes:
    """Codes of a token and block, packed as a cache would hold them."""
    planes = BitPlanes([bits] * codes.shape[-1], codes.device)
    return planes.pack(codes.unsqueeze(-1)).numpy().tobytes()


@pytest.mark.parametrize(("bits", "error"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_codebooks_are_those_of_max_and_pairs_are_better(bits: int, error: float) -> None:
    """Max, 1960, table I; a pair fills the plane better, within the rate-distortion bound."""
    x = gaussian(1 << 17, 2)
    words = lloyd_max(bits)
    scalar = words[nearest_word(x.view(-1, 1), words.unsqueeze(1))].view_as(x)
    assert float((scalar - x).square().mean()) == pytest.approx(error, rel=0.02)
    if bits > 1:
        pairs = plane_codebook(bits)[nearest_word(x, plane_codebook(bits))]
        assert 4.0**-bits < float((pairs - x).square().mean()) < 0.96 * error


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_higgs_has_one_error_whatever_the_features_are(bits: int) -> None:
    """A rotated block is Gaussian, even where a single feature has all the power."""
    form = Higgs(features=192, bits=bits, seed=0)
    assert form.block == 64
    rotation = randomized_hadamard(64, 0)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(64))
    spread = gaussian(512, 192)
    heavy = spread.sign() * spread.abs() ** 6
    errors = [
        float((form.reconstruct(x) - x).square().sum() / x.square().sum())
        for x in (spread, heavy, 1000 * spread, spread * torch.logspace(-1, 1, 192))
    ]
    best = float(
        (
            plane_codebook(bits)[nearest_word(spread.view(-1, 2), plane_codebook(bits))].view_as(
                spread
            )
            - spread
        )
        .square()
        .mean()
    )
    assert errors == pytest.approx([best] * 4, rel=0.2)
    assert torch.equal(form.reconstruct(torch.zeros(2, 192)), torch.zeros(2, 192))


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_higgs_counts_the_bytes_of_packed_codes_and_scales(bits: int) -> None:
    form, x = Higgs(features=192, bits=bits, seed=0), gaussian(5, 192)
    codes, scales = form.encode(x)
    by_block = codes.unflatten(-1, (-1, form.block // 2))
    held = sum(len(packed(block, 2 * bits)) for token in by_block for block in token)
    assert held + scales.nbytes == 5 * form.nbytes
    assert torch.equal(form.decode(codes, scales), form.reconstruct(x))
    method = method_of("higgs", bits / 16)
    assert method.nbytes(7) == 3 * 2 * 7 * Higgs(16, bits, 0).nbytes


def test_turboquant_keeps_norms_and_is_vllms_arithmetic() -> None:
    """One key after the other in NumPy, as vLLM's kernels store and read it."""
    keys = gaussian(20, 8) * torch.logspace(-2, 2, 20).unsqueeze(1)
    held = reconstructed(keys, 3)
    turn = hadamard(8) / 8**0.5
    words = lloyd_max(3).numpy() / 8**0.5
    for key, of_key in zip(keys.numpy(), held.numpy(), strict=True):
        norm = np.linalg.norm(key)
        codes = [np.abs(words - y).argmin() for y in key / norm @ turn]
        direction = words[codes] / np.linalg.norm(words[codes])
        assert of_key == pytest.approx(np.float16(norm) * (direction @ turn.T), rel=1e-4, abs=1e-6)
    torch.testing.assert_close(held.norm(dim=1), keys.norm(dim=1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", [4, 3])
def test_turboquant_holds_its_first_and_last_layers_in_16_bits(bits: int) -> None:
    """The middle one of three: d 8 in whole bytes, a norm, and scale and zero of a value."""
    method = method_of("turboquant", bits / 16)
    assert isinstance(method, TurboQuant)
    assert method.nbytes(10) == 10 * 2 * (2 * 2 * 8 * 2 + (bits + 2) + (bits + 4))
    cache, x = method.new_cache(), gaussian(2, 2, 5, 8)
    exact = [all(map(partial(torch.equal, x), cache.update(x, x, layer))) for layer in range(3)]
    assert exact == [True, False, True]


def test_turboquant_refuses_heads_that_no_hadamard_matrix_fits() -> None:
    model = tiny_model("llama", head_dim=12)
    with pytest.raises(ModelError, match="have 12 features"):
        method_of("turboquant", 0.25, model)


@pytest.mark.parametrize("name", ["higgs", "turboquant"])
def test_most_bits_lose_little_and_fewest_more(name: str) -> None:
    model, tokens = model_of(), tiny_tokens(4, LENGTH)
    exact = method_of("sinks-recent", 1.0, model).perplexity(tokens)
    assert exact is not None
    lost = []
    for ratio in METHODS.get(name).ratios([]):
        measured = method_of(name, ratio, model).perplexity(tokens)
        assert measured is not None
        pairs = zip(measured.by_sequence, exact.by_sequence, strict=True)
        lost.append(sum((mine - other) ** 2 for mine, other in pairs) ** 0.5)
    assert 0 < lost[0] < min(0.2, lost[-1])
