import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from manifoldkv import CompressionPlan, Quantization
from manifoldkv.basis import Basis, HeadGrouping
from manifoldkv.coding.integers import StaticIntegers
from manifoldkv.errors import PlanError, RunError
from manifoldkv.models.decoder import Decoder
from manifoldkv.plan.files import signed
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.model import config_hash
from manifoldkv.plan.site import SitePlan
from tests.families import tiny_model
from tests.plan.test_hardening import places, replaced
from tests.plans import any_basis, random_plan

PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "oblique": {"oblique": True, "key_grouping": "all", "rotary": "post"},
    "windows": {"value_grouping": "shared"},
    "sinks": {"sinks": 2},
    "static": {"quantization": Quantization(3, "static", group_size=2)},
    "token": {"quantization": Quantization(3, "token", group_size=2)},
    "kivi": {"quantization": Quantization(2, "kivi")},
}


KEY = {
    "grouping": "shared",
    "rank": 5,
    "orthonormal": True,
    "quantizer": {"name": "unquantized"},
}
NONSENSE_QUANTIZERS: list[Any] = [
    None,
    {},
    {"name": "static-integers", "bits": 4, "group_size": 2},  # without ranges
    {"name": "token-integers", "bits": 5, "group_size": 2, "residual": None},
    {"name": "token-integers", "bits": 4.0, "group_size": 2, "residual": None},
    {"name": "token-integers", "bits": 4, "group_size": 0, "residual": None},
    {"name": "token-integers", "bits": 4, "group_size": 2, "residual": -1},
    {"name": "token-integers", "bits": 4, "group_size": 2, "more": 2},
    {"name": "token-integers", "bits": 4},
    {"name": "other", "bits": 4, "group_size": 2},
]


def plan_named(name: str) -> CompressionPlan:
    return random_plan(tiny_model("gemma2" if name == "windows" else "llama"), **PLANS[name])


@pytest.mark.parametrize("name", PLANS)
class TestSaveAndLoad:
    def test_a_loaded_plan_is_the_saved_one(self, name: str, tmp_path: Path) -> None:
        plan = plan_named(name)
        plan.save(tmp_path)
        loaded = CompressionPlan.load(tmp_path)
        assert loaded.rotary == plan.rotary
        assert loaded.sinks == plan.sinks
        assert loaded.provenance == plan.provenance
        assert loaded.config_hash == plan.config_hash
        for found, expected in zip(loaded.layers, plan.layers, strict=True):
            assert found.window == expected.window
            assert found.key == expected.key
            assert found.value == expected.value

    def test_saving_again_gives_the_same_bytes(self, name: str, tmp_path: Path) -> None:
        plan_named(name).save(tmp_path / "first")
        CompressionPlan.load(tmp_path / "first").save(tmp_path / "second")
        for file in ("plan.json", "plan.safetensors"):
            assert (tmp_path / "first" / file).read_bytes() == (
                tmp_path / "second" / file
            ).read_bytes()


class TestDamagedFiles:
    def saved(self, folder: Path, name: str = "plain") -> Path:
        plan_named(name).save(folder)
        return folder

    def rewritten(self, folder: Path, **changes: Any) -> Path:
        self.saved(folder, "static")
        path = folder / "plan.json"
        path.write_text(json.dumps(signed(json.loads(path.read_text()) | changes)))
        return folder

    def with_tensors(self, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
        save_file(tensors, folder / "plan.safetensors")
        digest = hashlib.sha256((folder / "plan.safetensors").read_bytes()).hexdigest()
        path = folder / "plan.json"
        changed = json.loads(path.read_text()) | {"tensors_sha256": digest}
        path.write_text(json.dumps(signed(changed)))
        return folder

    def test_a_missing_folder_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(
            PlanError, match=r"cannot read .*nowhere/plan.safetensors: No such file"
        ):
            CompressionPlan.load(tmp_path / "nowhere")

    @pytest.mark.parametrize("file", ["plan.json", "plan.safetensors"])
    @pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
    def test_a_truncated_file_is_refused(self, file: str, share: float, tmp_path: Path) -> None:
        path = self.saved(tmp_path) / file
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(PlanError, match=f"{file} is damaged"):
            CompressionPlan.load(tmp_path)

    def test_a_flipped_bit_is_refused(self, tmp_path: Path) -> None:
        path = self.saved(tmp_path) / "plan.safetensors"
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        with pytest.raises(PlanError, match="not the file that plan"):
            CompressionPlan.load(tmp_path)

    def test_tensors_of_another_plan_are_refused(self, tmp_path: Path) -> None:
        self.saved(tmp_path / "a")
        self.saved(tmp_path / "b", "oblique")
        (tmp_path / "a" / "plan.safetensors").write_bytes(
            (tmp_path / "b" / "plan.safetensors").read_bytes()
        )
        with pytest.raises(PlanError, match="not the file"):
            CompressionPlan.load(tmp_path / "a")

    @pytest.mark.parametrize(
        "changes",
        [
            {"format": 3},
            {"sinks": "4"},
            {"sinks": -1},
            {"sinks": 4.0},
            {"sinks": None},
            {"rotary": "sideways"},
            {"rotary": []},
            {"config_hash": 7},
            {"layers": []},
            {"layers": {}},
            {"layers": [1, 2, 3]},
            {"layers": None},
            {"provenance": {}},
            {"provenance": None},
        ],
    )
    def test_nonsense_is_refused(self, changes: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(PlanError):
            CompressionPlan.load(self.rewritten(tmp_path, **changes))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("kv_heads", 10**18),
            ("kv_heads", 3),
            ("kv_heads", "2"),
            ("kv_heads", True),
            ("head_dim", 9),
            ("window", 1),
            ("window", -4),
            ("window", "5"),
            ("window", 2.5),
            ("key", KEY | {"grouping": 7}),
            ("key", KEY | {"rank": 4}),
            ("key", KEY | {"orthonormal": False}),
            ("key", KEY | {"grouping": ["shared"]}),
            ("key", {}),
            *(("key", KEY | {"quantizer": quantizer}) for quantizer in NONSENSE_QUANTIZERS),
        ],
    )
    def test_nonsense_in_a_layer_is_refused(self, name: str, value: Any, tmp_path: Path) -> None:
        layers = json.loads((self.saved(tmp_path) / "plan.json").read_text())["layers"]
        layers[1][name] = value
        with pytest.raises(PlanError):
            CompressionPlan.load(self.rewritten(tmp_path, layers=layers))

    @pytest.mark.parametrize("predicted", ["0.1", 1, float("nan"), float("inf"), [0.1], {}])
    def test_a_prediction_that_is_no_number_is_refused(
        self, predicted: Any, tmp_path: Path
    ) -> None:
        provenance = json.loads((self.saved(tmp_path) / "plan.json").read_text())["provenance"]
        provenance["predicted_nats"] = predicted
        with pytest.raises(PlanError, match="is no number"):
            CompressionPlan.load(self.rewritten(tmp_path, provenance=provenance))

    def test_extra_tensors_are_refused(self, tmp_path: Path) -> None:
        tensors = load_file(self.saved(tmp_path) / "plan.safetensors")
        self.with_tensors(tmp_path, tensors | {"more": torch.zeros(1)})
        with pytest.raises(PlanError, match="holds more, which nothing refers to"):
            CompressionPlan.load(tmp_path)

    @pytest.mark.parametrize(
        "fingerprint",
        [
            None,
            torch.zeros(64),
            torch.zeros(0, 64),
            torch.zeros(2, 64).half(),
            torch.ones(2, 1) / 0,
        ],
    )
    def test_a_fingerprint_that_is_none_is_refused(
        self, fingerprint: torch.Tensor | None, tmp_path: Path
    ) -> None:
        tensors = load_file(self.saved(tmp_path) / "plan.safetensors")
        del tensors["fingerprint"]
        given = {} if fingerprint is None else {"fingerprint": fingerprint}
        self.with_tensors(tmp_path, tensors | given)
        with pytest.raises(PlanError, match="fingerprint"):
            CompressionPlan.load(tmp_path)

    def test_the_checksum_is_that_of_all_else_in_canonical_json(self, tmp_path: Path) -> None:
        self.saved(tmp_path)
        description = json.loads((tmp_path / "plan.json").read_text())
        stated = description.pop("sha256")
        canonical = json.dumps(description, sort_keys=True, separators=(",", ":"))
        assert stated == hashlib.sha256(canonical.encode()).hexdigest()
        tensors = (tmp_path / "plan.safetensors").read_bytes()
        assert description["tensors_sha256"] == hashlib.sha256(tensors).hexdigest()

    @pytest.mark.parametrize("name", ["windows", "static"])
    def test_no_edit_of_a_description_passes(self, name: str, tmp_path: Path) -> None:
        path = self.saved(tmp_path, name) / "plan.json"
        description = json.loads(path.read_text())
        edits = [place for place in places(description) if place != ("format",)]
        assert len(edits) > 50
        for place in edits:
            path.write_text(json.dumps(replaced(description, place, 12345)))
            with pytest.raises(PlanError, match=r"plan\.json was changed after it was saved"):
                CompressionPlan.load(tmp_path)

    def test_another_layout_of_the_same_description_passes(self, tmp_path: Path) -> None:
        path = self.saved(tmp_path) / "plan.json"
        description = json.loads(path.read_text())
        path.write_bytes(json.dumps(dict(reversed(description.items()))).encode() + b"\r\n")
        assert CompressionPlan.load(tmp_path) == plan_named("plain")

    @pytest.mark.parametrize("line", ['"sinks": 0,', '"window": null'])
    def test_a_key_that_stands_twice_is_refused(self, line: str, tmp_path: Path) -> None:
        path = self.saved(tmp_path) / "plan.json"
        content = path.read_text()
        assert line in content
        path.write_text(content.replace(line, f"{line.rstrip(',')}, {line}", 1))
        key = line.split('"')[1]
        with pytest.raises(PlanError, match=f"plan.json is damaged: key '{key}' appears twice"):
            CompressionPlan.load(tmp_path)

    def test_the_format_of_an_earlier_version_is_refused(self, tmp_path: Path) -> None:
        path = self.saved(tmp_path) / "plan.json"
        path.write_text(path.read_text().replace('"format": 7', '"format": 6'))
        with pytest.raises(
            PlanError,
            match=r"plan\.json has format 6, this version of manifoldkv reads format 7: make the "
            "plan again",
        ):
            CompressionPlan.load(tmp_path)

    @pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5_000, '{"format": ' + "1" * 5_000])
    def test_what_json_cannot_hold_is_refused(self, text: str, tmp_path: Path) -> None:
        (self.saved(tmp_path) / "plan.json").write_text(text)
        with pytest.raises(PlanError, match="is damaged"):
            CompressionPlan.load(tmp_path)


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


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write plan to"):
        plan_named("plain").save(tmp_path / "file")


def test_an_empty_name_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_named("plain")
    plan.save(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="the name of the plan's folder is empty"):
        plan.save("")
    for load in (CompressionPlan.load, CompressionPlan.from_pretrained):
        with pytest.raises(PlanError, match="the name of the plan's folder is empty"):
            load("")
        assert load(".") == plan


def test_layers_keep_what_their_window_allows() -> None:
    layer = plan_named("windows").layers[0]
    assert isinstance(layer, LayerPlan)
    assert [layer.cached_tokens(n) for n in (0, 3, 4, 5, 50)] == [0, 3, 4, 4, 4]
