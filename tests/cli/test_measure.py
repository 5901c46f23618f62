"""``manifoldkv evaluate``, ``compare`` and ``bench``."""

import math
import sys
from pathlib import Path

import pytest
import torch

from manifoldkv.cli import inputs, measuring
from manifoldkv.evaluation import Comparison, Perplexity
from tests.cli.running import FEW, MODEL, facts, lines, run

ONE = ("--sequences", 1, "--length", 32)


class TestEvaluate:
    def test_both_caches_are_measured(self, plan: Path) -> None:
        ask = ("evaluate", MODEL, "--plan", plan, *FEW)
        measured = facts(*ask)
        assert 10 < measured["uncompressed_perplexity"] < measured["compressed_perplexity"] < 1000
        assert measured["ratio"] == 0.5
        assert f"{measured['compressed_perplexity']:.3f}" in lines(*ask)

    def test_one_sequence_has_no_standard_error(self, plan: Path) -> None:
        ask = ("evaluate", MODEL, "--plan", plan, *ONE)
        measured = facts(*ask)
        assert measured["standard_error"] is None
        assert f"added         {measured['added_nll']:.4f} nats per token" in lines(*ask)

    def test_numbers_that_json_does_not_have_are_null(
        self, plan: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = Comparison(Perplexity((math.nan, 1.0), 2), Perplexity((math.inf, 800.0), 2))
        monkeypatch.setattr(measuring, "compare", lambda *ignored: broken)
        measured = facts("evaluate", MODEL, "--plan", plan, *ONE)
        assert measured["uncompressed_perplexity"] is measured["compressed_perplexity"] is None
        assert measured["ratio"] == 0.5

    def test_questions_are_asked_with_both_caches(self, plan: Path) -> None:
        ask = ("evaluate", MODEL, "--plan", plan, "--length", 100, "--tasks")
        both = ("passkey,key-value", "--items", 4)
        asked = facts(*ask, *both)
        assert [row["task"] for row in asked["tasks"]] == ["passkey", "key-value"]
        assert all(row["items"] == 4 and not row["counted"] for row in asked["tasks"])
        assert (asked["length"], asked["prefill"], asked["ratio"]) == (100, "exact", 0.5)
        first = asked["tasks"][0]
        through = facts(*ask, "passkey", "--items", 4, "--prefill", "compressed")["tasks"][0]
        assert through["stock_nll"] == first["stock_nll"]
        assert through["added_nll"] != first["added_nll"]
        out = lines(*ask, "passkey", "--items", 4)
        assert f"{first['added_nll']:.3f} ± " in out
        assert "(the uncompressed model fails it)" in out
        lines(*ask, "passkey", "--items", 1)

    def test_a_row_per_layer_of_every_kind_of_plan(
        self, plan: Path, best: tuple, stored: Path
    ) -> None:
        """Of ranks, of bits in a cache, and of symbols in a file."""
        for folder in (plan, best[0], stored):
            rows = facts("evaluate", MODEL, "--plan", folder, "--layers", *FEW)["layers"]
            assert [row["layer"] for row in rows] == list(range(6))
            assert all(1e-3 < row["layer_output_error"] < 1 for row in rows)


class TestCompare:
    def test_two_plans_side_by_side(self, plan: Path, tmp_path: Path) -> None:
        few = ("--recipe", "eigen-attention", *FEW, "--ratio", 0.25, "--out", tmp_path)
        lines("compress", MODEL, *few)
        ask = ("compare", MODEL, plan, tmp_path, *FEW, "--max-new-tokens", 5)
        compared = facts(*ask)
        half, quarter = compared["plans"]
        for folder, measured in ((plan, half), (tmp_path, quarter)):
            alone = facts("evaluate", MODEL, "--plan", folder, *FEW)
            assert measured["plan"] == str(folder)
            assert measured["added_nll"] == alone["added_nll"]
            assert measured["cache_bytes"] == alone["cache_bytes"]
            assert compared["uncompressed_perplexity"] == alone["uncompressed_perplexity"]
        assert 0 < half["added_nll"] < quarter["added_nll"]
        assert (half["ratio"], quarter["ratio"]) == (0.5, 0.25)
        out = lines(*ask)
        assert f"{half['added_nll']:.4f} ± {half['standard_error']:.4f}" in out
        assert "continued by the uncompressed model:" in out

    def test_texts_are_those_of_each_cache(self, plan: Path) -> None:
        prompt = ("--prompt", "Return the sum of", "--max-new-tokens", 5)
        compared = facts("compare", MODEL, plan, plan, *ONE, *prompt)
        texts = {(): compared["uncompressed_text"], ("--plan", plan): compared["plans"][1]["text"]}
        for more, text in texts.items():
            assert lines("generate", MODEL, *prompt, *more) == f"{compared['prompt']}{text}\n"


class TestBench:
    ASK = ("bench", MODEL, "--rounds", 1, "--plan")

    def test_bytes_and_times_of_both_caches(self, plan: Path) -> None:
        speed = facts(*self.ASK, plan, "--tokens", 40, "--new-tokens", 2)
        assert speed["compressed_bytes"] == speed["stock_bytes"] / 2 == 42 * 768 * 2
        assert speed["time_ratio"] == speed["compressed_seconds"] / speed["stock_seconds"]

    def test_auto_is_a_device_of_the_machine(
        self, plan: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ask = (*self.ASK, plan, "--tokens", 8, "--new-tokens", 1, "--device", "auto")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        lines(*ask)
        devices = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(
            inputs,
            "load_model",
            lambda *name, device, **others: devices.append(device) or sys.exit(7),
        )
        assert run(*ask).code == 7
        assert devices == ["cuda"]


def test_defaults_fit_a_model_of_few_positions(plan: Path, short_model: Path) -> None:
    known = (short_model, "--plan", plan)
    speed = facts("bench", *known, "--new-tokens", 2, "--rounds", 1)
    assert speed["tokens"] == 38
    text = ("--text", "docstrings", "--sequences", 2)
    for options in ((), ("--layers",)):
        done = run("evaluate", *known, *options, *text)
        assert done.code == 0, done.err
        assert "2 × 40" in done.err
    assert facts("generate", *known, "--prompt", "Return the sum of")["tokens"] <= 40
