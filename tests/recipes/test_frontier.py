"""Losses by limit of work, which are estimated before a run."""

import pytest
import torch
from torch import nn

from manifoldkv import compress
from manifoldkv.core.errors import ArgumentError
from manifoldkv.recipes.bits import FRONTIER
from manifoldkv.recipes.compress import FRONTIER_SEQUENCES, frontier
from tests.families import tiny_model, tiny_tokens


def test_losses_fall_with_work_and_are_those_of_the_first_sequences() -> None:
    model, tokens = tiny_model("llama").float(), tiny_tokens(6, 24)
    losses = frontier(model, tokens, ratio=0.2)
    limits = [float(work) for work in losses if work != "unlimited"]
    assert limits == [work for work in FRONTIER[:-1] if work >= limits[0]]
    assert sorted(losses.values(), reverse=True) == [*losses.values()]
    assert min(losses.values()) > 0
    assert frontier(model, tokens[:FRONTIER_SEQUENCES], ratio=0.2) == losses
    assert frontier(model, tokens, ratio=0.4)["unlimited"] < losses["unlimited"]


def test_the_model_reads_a_small_part_of_the_text() -> None:
    model, tokens = tiny_model("llama").float(), tiny_tokens(40, 24)
    read: list[int] = []

    def count(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        read.append(given[0].numel())

    hook = model.get_input_embeddings().register_forward_pre_hook(count)
    frontier(model, tokens, ratio=0.2)
    estimated = sum(read)
    read.clear()
    compress(model, tokens, ratio=0.2)
    hook.remove()
    assert 0 < 9 * estimated <= sum(read)


@pytest.mark.parametrize("recipe", ["eigen-attention", "stored"])
def test_recipes_without_a_limit_of_work_have_none(recipe: str) -> None:
    model, tokens = tiny_model("llama").float(), tiny_tokens(2, 16)
    assert frontier(model, tokens, recipe=recipe, context=200) == {}


def test_what_compress_refuses_is_refused() -> None:
    model, tokens = tiny_model("llama").float(), tiny_tokens(2, 16)
    for settings, message in (
        ({"ratio": 1.5}, "not in"),
        ({"ratio": 0.01}, "too small"),
        ({"recipe": "nothing"}, "unknown recipe"),
        ({"compute": 0.5}, "compute must be >="),
    ):
        with pytest.raises(ArgumentError, match=message):
            frontier(model, tokens, **settings)
