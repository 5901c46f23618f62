"""Which models work: the tables in docs/models.md, row by row."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv import compress, compressed
from manifoldkv.core.errors import ModelError
from manifoldkv.models.decoder import Decoder
from manifoldkv.recipes.full_rank import full_rank_plan
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.layer import LayerActivations
from tests.families import FAMILIES, MORE_FAMILIES, REFUSED, tiny_model, tiny_tokens
from tests.plans import projected_by_hooks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (?P<said>.*`(?P<name>.+?)`.*) \| (?P<what>.+) \| `(?P<test>.+)` \|$", re.M)
ROWS = {row["name"]: row for row in ROW.finditer(SECTION)}
WORKING = FAMILIES | MORE_FAMILIES
LENGTH = 14  # beyond every window


@pytest.mark.parametrize("family", WORKING)
@pytest.mark.parametrize("rotary", ["pre", "post"])
def test_it_works(family: str, rotary: str) -> None:
    """A plan is found, and cached steps are one pass with projected keys and values."""
    model, tokens = tiny_model(family), tiny_tokens(2, LENGTH)
    plan = compress(model, tokens, ratio=0.6, recipe="eigen-attention", rotary=rotary)
    with projected_by_hooks(model, plan), torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
    with compressed(model, plan) as new_cache, torch.no_grad():
        cache = new_cache()
        pieces = tokens.split([6, 1, 4, 1, 2], dim=1)
        found = [model(input_ids=piece, past_key_values=cache).logits for piece in pieces]
        stored = cache.nbytes()
    lost = model(input_ids=tokens).logits - expected
    scale = float(expected.abs().max())
    assert float((torch.cat(found, dim=1) - expected).abs().max()) < 1e-5 * scale
    assert float(lost.abs().max()) > 1e-3 * scale  # the test is not vacuous
    assert stored == plan.nbytes(LENGTH, batch=2, dtype=model.dtype)
    assert plan.ratio <= 0.6


NOTICED = (
    *("its layer does not hand", "rotated outside", "2 times at once", "its values"),
    *("does not receive the angles", "replaces the attention mask"),
)
"""Obstacles that a forward pass shows."""


@pytest.mark.parametrize("family", REFUSED)
def test_it_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reason = tiny_model(family), REFUSED[family][2]
    if not any(obstacle in reason for obstacle in NOTICED):
        monkeypatch.setattr(type(model), "forward", None)  # before any forward pass
        with pytest.raises(ModelError, match=re.escape(reason)):
            capture(model, tiny_tokens(2, LENGTH))  # before its first layer is asked for
    for make in (lambda: compress(model, tiny_tokens(2, LENGTH)), lambda: full_rank_plan(model)):
        with pytest.raises(ModelError, match=re.escape(reason)) as caught:
            make()
        assert re.fullmatch(r"\w+ .*is not supported: .*", str(caught.value))


class TestTable:
    def test_every_family_has_a_row(self) -> None:
        assert set(ROWS) == WORKING.keys() | REFUSED.keys()
        assert len(ROW.findall(SECTION)) == len(ROWS)

    def test_the_readme_counts_them(self) -> None:
        assert f"[{len(WORKING)} families of decoders]" in README

    def test_every_row_names_its_test(self) -> None:
        for name, row in ROWS.items():
            test = test_it_works if name in WORKING else test_it_is_refused
            assert row["test"] == f"{test.__name__}[{name}]"

    @pytest.mark.parametrize("family", REFUSED)
    def test_a_refusal_gives_its_reason(self, family: str) -> None:
        reason = REFUSED[family][2]
        assert reason in ROWS[family]["what"]

    @pytest.mark.parametrize("family", WORKING)
    def test_its_features_are_those_of_the_model(self, family: str) -> None:
        """What is named is there, and what is there is named."""
        model = tiny_model(family)
        layers = list(capture(model, tiny_tokens(1, 6)))
        found = {name for name, has in FEATURES.items() if has(model, layers)}
        assert set(ROWS[family]["what"].split(", ")) == found


def rotated_unit(layer: LayerActivations) -> Tensor:
    """What becomes of the first feature, (d,), at the last position."""
    x = torch.zeros(1, 1, layer.length, layer.head_dim, dtype=layer.dtype)
    x[..., 0] = 1
    return layer.rotate(x)[0, 0, -1]


def leaves_features(layer: LayerActivations) -> bool:
    x = torch.ones(1, 1, layer.length, layer.head_dim, dtype=layer.dtype)
    return bool((layer.rotate(x) == x).all(dim=2).any())


def rotates_twice(layers: list[LayerActivations]) -> bool:
    return any(not torch.equal(layer.cos, layers[0].cos) for layer in layers)


FEATURES: dict[str, Callable[[PreTrainedModel, list[LayerActivations]], bool]] = {
    "GQA": lambda model, layers: layers[0].query_heads > layers[0].kv_heads,
    "sliding window": lambda model, layers: any(Decoder.of(model).windows),
    "soft cap": lambda model, layers: layers[0].settings.softcap is not None,
    "sinks": lambda model, layers: layers[0].settings.sinks is not None,
    "key norms": lambda model, layers: hasattr(layers[0].call.attention, "k_norm"),
    "key biases": lambda model, layers: (
        getattr(getattr(layers[0].call.attention, "k_proj", None), "bias", None) is not None
    ),
    "one projection for all three": lambda model, layers: hasattr(
        layers[0].call.attention, "qkv_proj"
    ),
    "partial rotation": lambda model, layers: leaves_features(layers[0]),
    "interleaved rotation": lambda model, layers: float(rotated_unit(layers[0])[1]) != 0,
    "a rotation per kind of layer": lambda model, layers: rotates_twice(layers),
    "YaRN": lambda model, layers: model.config.rope_parameters.get("rope_type") == "yarn",
    "experts": lambda model, layers: any("experts" in name for name, _ in model.named_modules()),
}
