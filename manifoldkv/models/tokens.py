"""Token ids that a model takes."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.core.errors import ArgumentError

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def positions(model: PreTrainedModel) -> int:
    """Return the largest number of tokens of a sequence of a model."""
    return model.config.get_text_config().max_position_embeddings


def check_length(model: PreTrainedModel, length: int) -> None:
    """Raise `ArgumentError` if `length` exceeds the positions of the model."""
    if length > positions(model):
        raise ArgumentError(
            f"sequences of {length:,} tokens are longer than the {positions(model):,} positions of "
            "the model: ask for shorter ones"
        )


def checked_tokens(model: PreTrainedModel, tokens: Tensor, *, shortest: int = 1) -> Tensor:
    """Return token ids as int64.

    Parameters
    ----------
    model : PreTrainedModel
        Model with a vocabulary and positions.
    tokens : Tensor
        Token ids, (sequences, length), of any integer dtype.
    shortest : int
        Smallest length.

    Raises
    ------
    ArgumentError
        If they are not such a tensor, or an id or the length exceeds those of the model.
    """
    shape = f"(sequences, length{f' > {shortest - 1}' if shortest > 1 else ''})"
    if not isinstance(tokens, Tensor):
        raise ArgumentError(
            f"tokens must be a tensor of shape {shape}, not {type(tokens).__name__}: "
            "torch.tensor makes one of a list"
        )
    shaped = tokens.ndim == 2 and tokens.numel() > 0 and tokens.shape[1] >= shortest
    if tokens.dtype not in INTEGERS or not shaped:
        raise ArgumentError(
            f"tokens must be integers of shape {shape}, not {tokens.dtype} {tuple(tokens.shape)}"
        )
    check_length(model, tokens.shape[1])
    tokens = tokens.long()
    vocabulary = model.get_input_embeddings().num_embeddings
    smallest, largest = int(tokens.min()), int(tokens.max())
    if smallest < 0 or largest >= vocabulary:
        outside = smallest if smallest < 0 else largest
        raise ArgumentError(
            f"token id {outside} is not one of the model's, which are 0 to {vocabulary - 1}: read "
            "the text with the tokenizer of this model"
        )
    return tokens
