from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from manifoldkv import CompressionPlan, Quantization
from manifoldkv.basis import Basis, HeadGrouping
from manifoldkv.coding.integers import StaticIntegers
from manifoldkv.errors import PlanError
from manifoldkv.models.decoder import Decoder
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.model import config_hash
from manifoldkv.plan.site import SitePlan
from tests.families import tiny_model, tiny_tokens
from tests.plans import any_basis, designed_plan, random_plan
from tests.stored import stored_plan

PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "oblique": {"oblique": True, "key_grouping": "all", "rotary": "post"},
    "windows": {"value_grouping": "shared"},
    "sinks": {"sinks": 2},
    "static": {"quantization": Quantization(3, "static", group_size=2)},
    "token": {"quantization": Quantization(3, "token", group_size=2)},
    "kivi": {"quantization": Quantization(2, "kivi")},
}


@cache
def plan_named(name: str) -> CompressionPlan:
    if name == "coded":
        return designed_plan(tiny_model("llama"), "low-rank chain", tiny_tokens(3, 24))
    if name == "stored":
        return stored_plan()
    return random_plan(tiny_model("gemma2" if name == "windows" else "llama"), **PLANS[name])


class TestPlansThatDoNotFitTheModel:
    """Whose configuration and weights are the right ones."""

    def refused(self, said: str, family: str = "llama", **changes: Any) -> None:
        model = tiny_model(family)
        plan = replace(random_plan(model), **changes)
        for check in (plan.check_model, plan.transferred_to):
            with pytest.raises(PlanError, match=said):
                check(Decoder.of(model))

    def with_layer(self, family: str, index: int, **changes: Any) -> tuple[LayerPlan, ...]:
        layers = list(random_plan(tiny_model(family)).layers)
        layers[index] = replace(layers[index], **changes)
        return tuple(layers)

    @pytest.mark.parametrize(
        ("family", "index", "window", "said"),
        [
            ("llama", 1, 3, "layer 1 has a window of 3 tokens in the plan, None in the model"),
            ("gemma2", 0, 6, "layer 0 has a window of 6 tokens in the plan, 5 in the model"),
            ("gemma2", 0, None, "layer 0 has a window of None tokens in the plan, 5 in the model"),
            ("mistral", 2, 4, "layer 2 has a window of 4 tokens in the plan, 5 in the model"),
        ],
    )
    def test_another_window(self, family: str, index: int, window: int | None, said: str) -> None:
        self.refused(said, family, layers=self.with_layer(family, index, window=window))

    @pytest.mark.parametrize(
        ("heads", "head_dim", "said"), [(4, 8, "4 KV heads of 8"), (2, 16, "2 KV heads of 16")]
    )
    def test_other_sizes(self, heads: int, head_dim: int, said: str) -> None:
        """A shared basis fits any number of heads."""
        grouping = HeadGrouping("shared", heads)
        key = SitePlan(any_basis(head_dim, 4, grouping, oblique=False, seed=0))
        layers = self.with_layer("llama", 2, key=key, value=key)
        self.refused(f"layer 2 has {said} in the plan, 2 of 8 in the model", layers=layers)

    def test_more_sinks_than_positions(self) -> None:
        self.refused(
            "sinks must be at most 64, the positions of the model, got 1048576", sinks=1 << 20
        )
        model = tiny_model("llama")
        random_plan(model, sinks=64).check_model(Decoder.of(model))


class TestImpossiblePlans:
    def changed(self, **changes: Any) -> CompressionPlan:
        plan = plan_named("plain")
        return replace(plan, layers=(replace(plan.layers[0], **changes), *plan.layers[1:]))

    def with_key(self, down: torch.Tensor, up: torch.Tensor | None = None) -> CompressionPlan:
        grouping = plan_named("plain").layers[0].key.grouping
        return self.changed(key=SitePlan(Basis(down, down if up is None else up, grouping)))

    def test_not_orthonormal(self) -> None:
        down = plan_named("plain").layers[0].key.basis.down
        with pytest.raises(PlanError, match="layer 0 key: PᵀP is not the identity"):
            self.with_key(1.01 * down)
        with pytest.raises(PlanError, match="layer 0 key: upᵀ down is not the identity"):
            self.with_key(down, 1.01 * down)

    def test_elements_and_shapes(self) -> None:
        down = plan_named("plain").layers[0].key.basis.down
        unknown = down.clone()
        unknown[0, 0, 0] = float("nan")
        with pytest.raises(PlanError, match="layer 0 key: some elements are not finite"):
            self.with_key(unknown)
        with pytest.raises(PlanError, match="neither float32 nor float64"):
            self.with_key(down.half())
        with pytest.raises(PlanError, match="does not fit grouping 'shared'"):
            self.with_key(down.repeat(2, 1, 1))

    def test_ranges_of_other_groups(self) -> None:
        key = plan_named("plain").layers[0].key
        quantizer = StaticIntegers(4, 2, torch.zeros(2, 1, 2))
        with pytest.raises(PlanError, match=r"key: ranges are \(2, 1, 2\), must be \(2, 3, 2\)"):
            self.changed(key=replace(key, quantizer=quantizer))

    def test_kivi_with_a_window(self) -> None:
        layer = plan_named("windows").layers[0]
        rounded = replace(layer.value, quantizer=Quantization(4, "kivi").values())
        with pytest.raises(PlanError, match="layer 0 value has a sliding window of 5 tokens"):
            replace(plan_named("windows"), layers=(replace(layer, value=rounded),))

    def test_no_layers(self) -> None:
        with pytest.raises(PlanError, match="at least one layer"):
            replace(plan_named("plain"), layers=())


class TestNumbers:
    def test_ratio_and_bytes_by_hand(self) -> None:
        plan = plan_named("plain")  # ranks 5 and 4 of 8, 2 heads, 3 layers
        assert plan.ratio == pytest.approx(9 / 16)
        assert plan.bytes_per_token(torch.bfloat16) == 3 * 2 * (5 + 4) * 2
        assert plan.nbytes(100, batch=2, dtype=torch.float32) == 2 * 100 * 3 * 2 * 9 * 4
        assert plan.basis_nbytes(torch.bfloat16) == 3 * (8 * 5 + 2 * 8 * 4) * 2

    def test_quantized_bytes_by_hand(self) -> None:
        # 3-bit keys of 5: 3 bytes; values of 4: 3 bytes and two groups of 4 bytes.
        assert plan_named("static").bytes_per_token() == 3 * 2 * (3 + 3 + 2 * 4)
        # The same, and keys have three groups of 4 bytes.
        assert plan_named("token").bytes_per_token() == 3 * 2 * (3 + 3 * 4 + 3 + 2 * 4)
        # 2 bit keys of 5: 2 bytes and 4 bytes per feature and 64 tokens; values 1 + 4 bytes.
        expected = 3 * 2 * (2 + 5 * 4 / 64 + 1 + 4)
        assert plan_named("kivi").bytes_per_token() == pytest.approx(expected)

    def test_sink_tokens_by_hand(self) -> None:
        # 2 first tokens of 16 elements beside the 9 of every token, in 3 layers of 2 heads.
        plan = plan_named("sinks")
        of_head = [9 + 16, 2 * 9 + 2 * 16, 3 * 9 + 2 * 16, 10 * 9 + 2 * 16]
        for tokens, elements in zip((1, 2, 3, 10), of_head, strict=True):
            assert plan.nbytes(tokens, batch=2, dtype=torch.float32) == 2 * 3 * 2 * elements * 4
            assert plan.ratio_at(tokens) == pytest.approx(elements / (16 * tokens))
        assert plan.bytes_per_token() == plan_named("plain").bytes_per_token()

    def test_windows_keep_no_first_tokens(self) -> None:
        plan = plan_named("windows")  # one of three layers has none
        kept, without = (replace(plan, sinks=sinks).nbytes(1000) for sinks in (4, 0))
        assert kept - without == 4 * 2 * 16 * 2
        full = (1000 + 4 + 4) * 2 * 16
        assert replace(plan, sinks=4).ratio_at(1000) == pytest.approx(
            plan.ratio_at(1000) + 4 * 2 * 16 / full
        )

    def test_windows_bound_the_bytes(self) -> None:
        plan = plan_named("windows")
        assert plan.nbytes(1000) == (1000 + 4 + 4) * plan.nbytes(1) // 3


def test_config_hash_ignores_names_and_dtypes(tmp_path: Path) -> None:
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert config_hash(loaded.config) == config_hash(model.config)
    other = tiny_model("qwen3", intermediate_size=64)
    assert config_hash(other.config) != config_hash(model.config)


OTHERS = {
    **{"vocab_size": 70, "pad_token_id": 3, "bos_token_id": 4, "eos_token_id": [5, 6]},
    **{"tie_word_embeddings": True, "use_cache": False, "problem_type": "regression"},
    **{"num_labels": 7, "_name_or_path": "elsewhere", "output_hidden_states": True},
    **{"dtype": "float16", "architectures": ["Other"], "initializer_range": 1.0},
    **{"rope_parameters": {"rope_type": "default", "rope_theta": 10000}},  # 10000.0 in the other
}


@pytest.mark.parametrize("name", OTHERS)
def test_config_hash_is_of_what_keys_and_values_depend_on(name: str) -> None:
    config = tiny_model("llama").config
    before = config_hash(config)
    setattr(config, name, OTHERS[name])
    assert config_hash(config) == before


def test_layers_keep_what_their_window_allows() -> None:
    layer = plan_named("windows").layers[0]
    assert isinstance(layer, LayerPlan)
    assert [layer.cached_tokens(n) for n in (0, 3, 4, 5, 50)] == [0, 3, 4, 4, 4]
