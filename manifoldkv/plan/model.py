"""Identity of a plan's model: hash of the configuration and fingerprint of the weights."""

from __future__ import annotations

import hashlib
import json
from typing import Protocol, runtime_checkable

from torch import Tensor
from transformers import PretrainedConfig

from manifoldkv.errors import PlanError

ARCHITECTURE = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rope_parameters", "layer_types", "sliding_window"),
)
"""Fields of a configuration that must be equal: shapes of layers, windows and rotation.

Keys and values depend on no others: not on the size of the vocabulary, which added tokens change,
nor on names, special tokens, the head, dtypes or generation settings.
"""
RELATIVE_TOLERANCE = 2**-7
"""Share of an element by which it may differ; rounding to bfloat16 changes it by a 2^-9th."""
ABSOLUTE_TOLERANCE = 2**-12
"""Share of the root mean square of a matrix, for elements small for float16, or that cancel."""


@runtime_checkable
class ModelView(Protocol):
    """View of a model that a plan is checked against: `manifoldkv.models.decoder.Decoder`."""

    @property
    def config(self) -> PretrainedConfig:
        """Return the configuration of the language model."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the sliding windows of the layers, in tokens."""

    @property
    def kv_heads(self) -> int:
        """Return the KV heads of a layer."""

    @property
    def head_dim(self) -> int:
        """Return the features of a head."""

    @property
    def query_heads(self) -> int:
        """Return the query heads of a layer."""

    @property
    def rotary_dim(self) -> int:
        """Return the number of features of a head that are rotated."""

    def fingerprint(self) -> Tensor:
        """Return a few elements of the weights, (matrices, elements), float32."""


def check_view(model: object) -> None:
    """Raise `PlanError` unless the argument is a view of a model."""
    if not isinstance(model, ModelView):
        raise PlanError(
            f"a plan is checked against manifoldkv.models.decoder.Decoder.of(model), got "
            f"{type(model).__name__}"
        )


def config_hash(config: PretrainedConfig) -> str:
    """Return the SHA-256 of the shapes, kinds of layers and rotation of a configuration."""
    text_config = config.get_text_config()
    architecture = {name: getattr(text_config, name, None) for name in ARCHITECTURE}
    # Files write one base of the angles as 10000 and as 10000.0.
    equal = json.loads(json.dumps(architecture), parse_int=float)
    return hashlib.sha256(json.dumps(equal, sort_keys=True).encode()).hexdigest()


def agree(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two fingerprints are of the same weights, up to their dtypes."""
    if actual.shape != expected.shape:
        return False
    actual, expected = actual.double(), expected.double()
    size = expected.square().mean(dim=1, keepdim=True).sqrt()
    tolerance = RELATIVE_TOLERANCE * expected.abs() + ABSOLUTE_TOLERANCE * size
    return bool(((actual - expected).abs() <= tolerance).all())
