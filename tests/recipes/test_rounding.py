"""Plans whose latents are rounded to integers."""

from functools import cache

import pytest
import torch

from manifoldkv import CompressionPlan, Quantization, RankRecipe, Recipe, compress, quantize
from manifoldkv.core.basis import projector_distance
from manifoldkv.core.errors import ArgumentError, PlanError
from manifoldkv.statistics.capture import capture
from tests.families import tiny_model, tiny_tokens


@cache
def plan_by(recipe: str | Recipe, ratio: float = 0.5) -> CompressionPlan:
    """Of `tiny_model("llama")` and `tiny_tokens()`, found once: plans are frozen."""
    return compress(tiny_model("llama"), tiny_tokens(), recipe=recipe, ratio=ratio)


@pytest.mark.parametrize(
    ("rotation", "recipe", "ratio"),
    [
        ("none", "eigen-attention", 0.5),
        ("pca", "eigen-attention", 0.75),
        ("pca", RankRecipe("kq-svd", "closed-form", 1, 1), 0.5),
        ("hadamard", RankRecipe("kq-svd", "closed-form", 1, 1), 0.75),
    ],
)
def test_a_rotation_leaves_the_projector_as_it_is(
    rotation: str, recipe: str | Recipe, ratio: float
) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    plan = plan_by(recipe, ratio)
    rounded = quantize(plan, model, tokens, Quantization(8), rotation)
    for before, after in zip(plan.layers, rounded.layers, strict=True):
        assert projector_distance(before.key.basis, after.key.basis) < 1e-5
        assert projector_distance(before.value.basis, after.value.basis) < 1e-5


def test_pca_sorts_by_variance() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    plan = quantize(plan_by("eigen-attention"), model, tokens, Quantization(8), "pca")
    for activations, layer in zip(capture(model, tokens), plan.layers, strict=True):
        latents = activations.values @ layer.value.basis.down.to(activations.values)
        covariance = torch.cov(latents[:, 0].flatten(0, 1).T)
        assert bool((covariance.diagonal().diff() <= 1e-9).all())
        assert float((covariance - covariance.diagonal().diag()).abs().max()) < 1e-9


def test_static_ranges_hold_the_calibration_data() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    plan = compress(
        model, tokens, recipe="eigen-attention", quantization=Quantization(4, group_size=3)
    )
    for activations, layer in zip(capture(model, tokens), plan.layers, strict=True):
        latents = activations.keys @ layer.key.basis.down.to(activations.keys)
        low, high = layer.key.quantizer.ranges.to(latents).unbind(-1)  # (runs, groups)
        for group in range(2):
            x = latents[..., 3 * group : 3 * group + 3]
            assert torch.allclose(x.amin(dim=(0, 2, 3)), low[:, group])
            assert torch.allclose(x.amax(dim=(0, 2, 3)), high[:, group])


def test_twice_is_refused() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    plan = compress(model, tokens, recipe="eigen-attention", quantization=Quantization(4, "token"))
    with pytest.raises(PlanError, match="quantised already"):
        quantize(plan, model, tokens, Quantization(4))


def test_an_unknown_rotation_is_refused() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    with pytest.raises(ArgumentError, match="unknown rotation"):
        quantize(plan_by("eigen-attention"), model, tokens, Quantization(4), "spin")
