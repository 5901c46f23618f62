"""What ranks cost: error surfaces and divergences."""

import logging

import pytest
import torch

from manifoldkv import CompressionPlan, compressed
from manifoldkv.core.basis import HeadGrouping
from manifoldkv.evaluate.diagnostics import layer_errors
from manifoldkv.learn.ranks import Budget, LayerBases, RankProblem
from manifoldkv.learn.ranks.divergences import divergences
from manifoldkv.learn.ranks.sequential import sequential_ranks
from manifoldkv.learn.ranks.surfaces import ErrorSurface, error_surface
from manifoldkv.models.fingerprint import config_hash, fingerprint
from manifoldkv.models.support import sliding_windows
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.site import SitePlan
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.outputs import compressed_output
from manifoldkv.statistics.projected import divergence
from tests.families import activations_of, tiny_model, tiny_tokens
from tests.plans import PROVENANCE, any_basis, shape_of

RANKS = (3, 6, 8)


def random_table(layers: int = 3) -> list[LayerBases]:
    def of_site(grouping: str | int, seed: int) -> dict:
        kind = HeadGrouping(grouping, 2)
        return {r: any_basis(8, r, kind, oblique=False, seed=seed + r) for r in RANKS}

    return [LayerBases(of_site("shared", 20 * i), of_site(1, 20 * i + 10)) for i in range(layers)]


@pytest.mark.parametrize("rotary", ["pre", "post"])
def test_divergences_are_those_through_the_cache(rotary: str) -> None:
    model, tokens, table = tiny_model("qwen3"), tiny_tokens(), random_table()
    budget = Budget(1.0, 8, sliding_windows(model.config), 12)
    surfaces = divergences(RankProblem(model, tokens, table, budget, rotary), len(tokens))
    with torch.no_grad():
        exact = model(input_ids=tokens).logits.log_softmax(-1)

    def of(ranks: list[tuple[int, int]]) -> float:
        layers = [
            LayerPlan(SitePlan(bases.keys[key]), SitePlan(bases.values[value]))
            for bases, (key, value) in zip(table, ranks, strict=True)
        ]
        weights = fingerprint(model)
        plan = CompressionPlan(
            tuple(layers), rotary, config_hash(model.config), weights, shape_of(model), PROVENANCE
        )
        with compressed(model, plan), torch.no_grad():
            return float(divergence(exact, model(input_ids=tokens).logits.log_softmax(-1)))

    for index, surface in enumerate(surfaces):
        assert surface.key_ranks == surface.value_ranks == RANKS
        exact_ranks = [(8, 8)] * 3
        for i, j in ((0, 0), (1, 0), (2, 1), (0, 2)):
            by_site = []
            for pair in ((RANKS[i], 8), (8, RANKS[j])):
                ranks = [*exact_ranks]
                ranks[index] = pair
                by_site.append(of(ranks))
            assert float(surface.errors[i, j]) == pytest.approx(sum(by_site), abs=1e-7)
        assert surface.errors[-1, -1] == 0


class TestErrorSurface:
    def test_entries_are_layer_output_errors(self) -> None:
        activations = activations_of("qwen3")
        keys = {r: any_basis(8, r, HeadGrouping("shared", 2), oblique=True, seed=r) for r in (3, 5)}
        for name in (1, "all", "shared"):
            values = {
                r: any_basis(8, r, HeadGrouping(name, 2), oblique=False, seed=r) for r in (2, 6)
            }
            surface = error_surface(activations, keys | {8: None}, values | {8: None})
            assert (surface.key_ranks, surface.value_ranks) == ((3, 5, 8), (2, 6, 8))
            for i, key in enumerate((*keys.values(), None)):
                for j, value in enumerate((*values.values(), None)):
                    expected = layer_errors(activations, key, value).layer_output_error
                    assert float(surface.errors[i, j]) == pytest.approx(expected, abs=1e-9)
        assert surface.errors[-1, -1] == 0

    def test_rows_are_a_part_of_the_whole(self) -> None:
        activations = activations_of("llama")
        basis = any_basis(8, 3, HeadGrouping("shared", 2), oblique=False, seed=0)
        whole = error_surface(activations, {3: basis}, {8: None})
        all_rows = error_surface(activations, {3: basis}, {8: None}, rows=torch.arange(12))
        some = error_surface(activations, {3: basis}, {8: None}, rows=torch.tensor([3, 7]))
        assert torch.allclose(whole.errors, all_rows.errors)
        assert not torch.allclose(whole.errors, some.errors)


def test_inputs_can_pass_compressed_layers() -> None:
    """Propagated through one compressed layer, the next sees what a compressed model shows it."""
    model, tokens = tiny_model("llama"), tiny_tokens()
    basis = any_basis(8, 3, HeadGrouping("shared", 2), oblique=False, seed=0)
    clean = list(capture(model, tokens))
    seen = list(capture(model, tokens, propagate=lambda a: compressed_output(a, basis, None)))
    assert torch.equal(clean[0].inputs, seen[0].inputs)
    expected = compressed_output(clean[0], basis, None)
    assert torch.allclose(seen[1].inputs, expected)
    assert not torch.allclose(seen[1].inputs, clean[1].inputs)


def test_a_larger_rank_with_a_larger_error_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Bases that know nothing of each other need not improve with rank."""
    rising = ErrorSurface((3, 6), (3, 6), torch.tensor([[0.5, 0.6], [0.4, 0.3]]))
    assert rising.rising_steps() == 1
    model, tokens = tiny_model("llama"), tiny_tokens()
    budget = Budget(1.0, 8, (None,) * 3, 12)
    with caplog.at_level(logging.WARNING):
        _, surfaces = sequential_ranks(RankProblem(model, tokens, random_table(), budget))
    expected = [(i, s.rising_steps()) for i, s in enumerate(surfaces) if s.rising_steps()]
    assert expected  # random bases: some rank is worse than a smaller one
    assert [tuple(record.args) for record in caplog.records] == expected
