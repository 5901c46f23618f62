"""Plans of recipe stored for tiny models, and the caches that they store."""

from functools import cache

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from manifoldkv import CompressionPlan, compress
from manifoldkv.recipes.stored import StoredRecipe
from tests.families import COMMON, tiny_model

CONTEXT = 600


@cache
def stored_model(family: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny_model(family, dtype, max_position_embeddings=1024)


@cache
def stored_plan(
    family: str = "llama",
    ratio: float = 0.4,
    recipe: str | StoredRecipe = "stored",
) -> CompressionPlan:
    """A plan made on random tokens."""
    tokens, settings = some_tokens(16, 64, seed=1), {"context": CONTEXT, "ratio": ratio}
    return compress(stored_model(family), tokens, recipe=recipe, **settings)


def some_tokens(sequences: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, COMMON["vocab_size"], (sequences, length), generator=generator)


@torch.no_grad()
def filled(
    model: PreTrainedModel, tokens: Tensor, held: DynamicCache | None = None
) -> DynamicCache:
    """The stock cache of some tokens, or one that goes on with them."""
    held = DynamicCache(config=model.config) if held is None else held
    model(input_ids=tokens, past_key_values=held)
    return held


def tensors(cache: DynamicCache, tokens: int | None = None) -> list[Tensor]:
    """Keys and values of all layers, of the first tokens."""
    return [x[:, :, :tokens] for layer in cache.layers for x in (layer.keys, layer.values)]


TOKENS = some_tokens(2, 300)
