import pytest
import torch

from manifoldkv import CompressionPlan, HeadGrouping, LayerPlan, compressed
from manifoldkv.fingerprint import fingerprint
from manifoldkv.plan import config_hash
from manifoldkv.projection import divergence
from manifoldkv.surfaces import LayerBases, divergences
from tests.families import tiny_model, tiny_tokens
from tests.plans import PROVENANCE, any_basis

RANKS = (3, 6, 8)


def random_table(layers: int = 3) -> list[LayerBases]:
    def of_site(grouping: str | int, seed: int) -> dict:
        kind = HeadGrouping(grouping, 2)
        return {r: any_basis(8, r, kind, oblique=False, seed=seed + r) for r in RANKS}

    return [LayerBases(of_site("shared", 20 * i), of_site(1, 20 * i + 10)) for i in range(layers)]


@pytest.mark.parametrize("rotary", ["pre", "post"])
def test_divergences_are_those_through_the_cache(rotary: str) -> None:
    model, tokens, table = tiny_model("qwen3"), tiny_tokens(), random_table()
    surfaces = divergences(model, tokens, table, rotary=rotary)
    with torch.no_grad():
        exact = model(input_ids=tokens).logits.log_softmax(-1)

    def of(ranks: list[tuple[int, int]]) -> float:
        layers = [
            LayerPlan(bases.keys[key], bases.values[value])
            for bases, (key, value) in zip(table, ranks, strict=True)
        ]
        weights = fingerprint(model)
        plan = CompressionPlan(
            tuple(layers), rotary, config_hash(model.config), weights, PROVENANCE
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
