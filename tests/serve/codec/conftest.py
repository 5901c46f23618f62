import pytest
from transformers import DynamicCache

from manifoldkv import Codec
from tests.stored import TOKENS, filled, stored_model, stored_plan


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(stored_model(), stored_plan())


@pytest.fixture(scope="module")
def stock() -> DynamicCache:
    return filled(stored_model(), TOKENS)


@pytest.fixture(scope="module")
def blob(codec: Codec, stock: DynamicCache) -> bytes:
    return codec.encode(stock, TOKENS)
