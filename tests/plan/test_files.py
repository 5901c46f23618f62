"""Plans as files, whole and damaged."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from manifoldkv import CompressionPlan
from manifoldkv.core.errors import PlanError, RunError
from manifoldkv.plan.files import signed
from tests.plan.test_hardening import places, replaced
from tests.plan.test_plan import PLANS, plan_named

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
    {"name": "token-integers", "bits": 5, "group_size": 2},
    {"name": "token-integers", "bits": 4.0, "group_size": 2},
    {"name": "token-integers", "bits": 4, "group_size": 0},
    {"name": "token-integers", "bits": 4, "group_size": 10**18},  # memory
    {"name": "token-integers", "bits": 4, "group_size": 2, "more": 2},
    {"name": "token-integers", "bits": 4},
    {"name": "other", "bits": 4, "group_size": 2},
]


@pytest.mark.parametrize("name", [*PLANS, "coded", "stored"])
class TestSaveAndLoad:
    def test_a_loaded_plan_is_the_saved_one(self, name: str, tmp_path: Path) -> None:
        plan = plan_named(name)
        plan.save(tmp_path)
        loaded = CompressionPlan.load(tmp_path)
        assert loaded == plan
        assert loaded.provenance == plan.provenance
        assert loaded.config_hash == plan.config_hash
        assert loaded.nbytes(50) == plan.nbytes(50)
        assert (loaded.shape, loaded.compute) == (plan.shape, plan.compute)
        for found, expected in zip(loaded.layers, plan.layers, strict=True):
            assert found == expected
            assert hash(found) == hash(expected)

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

    @pytest.mark.parametrize(
        ("inputs", "said"),
        [
            ([[-1, "key"], [1, "value"]], r"predictor has the impossible input \(-1, 'key'\)"),
            ([[10**30, "key"], [1, "value"]], "predictor has the impossible input"),
            ([[1.0, "key"], [1, "value"]], "predictor has the impossible input"),
            ([[True, "key"], [1, "value"]], "predictor has the impossible input"),
            ([[1, "query"], [1, "value"]], "predictor has the impossible input"),
            ([[1, ["key"]], [1, "value"]], "predictor has the impossible input|is damaged"),
            ([[1, "key"], [1, "key"]], "predictor must have different inputs"),
            ([[0, "key"], [1, "value"]], "layer 1 key: predicted from the keys 0 layers below"),
            ([[0, "value"], [1, "value"]], "layer 1 key: predicted from the values 0 layers below"),
            ([[2, "key"], [1, "value"]], "must be from at most 1 layers below"),
            ([[1, "key"]], "of 16 features from 1 sites must have 16 rows, got 32"),
            ([], "predictor must have different inputs"),
            ([[1], [1, "value"]], "is damaged"),
            (None, "is damaged"),
            ("ab", "is damaged"),
        ],
    )
    def test_impossible_inputs_of_a_predictor(self, inputs: Any, said: str, tmp_path: Path) -> None:
        self.refused_with(
            tmp_path, said, lambda found: found["layers"][1]["key"].update(predictor=inputs)
        )

    @pytest.mark.parametrize(
        ("shape", "said"),
        [
            ({"query_heads": 0}, "query heads must be a multiple of 2 KV heads, got 0"),
            ({"query_heads": 5}, "query heads must be a multiple of 2 KV heads, got 5"),
            ({"query_heads": -2}, "query_heads -2 is not an integer between 0 and"),
            ({"query_heads": 4.0}, "query_heads 4.0 is not an integer between 0 and"),
            ({"query_heads": 10**30}, "query_heads 10+ is not an integer between 0 and"),
            ({"rotary_dim": 9}, "rotary_dim must be between 0 and head_dim 8, got 9"),
            ({"rotary_dim": None}, "rotary_dim None is not an integer between 0 and"),
        ],
    )
    def test_impossible_shapes_of_attention(
        self, shape: dict[str, Any], said: str, tmp_path: Path
    ) -> None:
        self.refused_with(tmp_path, said, lambda found: found["attention"].update(shape))

    def refused_with(
        self, folder: Path, said: str, change: Callable[[dict[str, Any]], None]
    ) -> None:
        path = self.saved(folder, "coded") / "plan.json"
        description = json.loads(path.read_text())
        change(description)
        path.write_text(json.dumps(signed(description)))
        with pytest.raises(PlanError, match=said):
            CompressionPlan.load(folder)

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
        path.write_text(path.read_text().replace('"format": 10', '"format": 9'))
        with pytest.raises(
            PlanError,
            match=r"plan\.json has format 9, this version of manifoldkv reads format 10: make the "
            "plan again",
        ):
            CompressionPlan.load(tmp_path)

    @pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5_000, '{"format": ' + "1" * 5_000])
    def test_what_json_cannot_hold_is_refused(self, text: str, tmp_path: Path) -> None:
        (self.saved(tmp_path) / "plan.json").write_text(text)
        with pytest.raises(PlanError, match="is damaged"):
            CompressionPlan.load(tmp_path)


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
