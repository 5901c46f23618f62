"""One thread, no network: tests give the same results everywhere."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

torch.set_num_threads(1)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word: ``<eos>`` is 0, anything unknown 1, the number n in a text is n + 2."""
    words = ["<eos>", "<unk>", *map(str, range(62))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
