"""Frozen views of causal language models, made once at each public function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from manifoldkv.errors import ModelError
from manifoldkv.models.fingerprint import fingerprint
from manifoldkv.models.interface import rotation_of
from manifoldkv.models.offloading import check_weights_held, device_of
from manifoldkv.models.rotary import angles_at, rotary_embedding_of
from manifoldkv.models.rotation import Rotation
from manifoldkv.models.support import attention_of, check_supported, decoder_layers, unwrapped
from manifoldkv.modes import in_own_modes


@dataclass(frozen=True, eq=False, repr=False)
class Decoder:
    """A supported model and the shape of its KV cache.

    Fields are read once, by `of`. Dtype, devices and weights may change during the use of a view
    (``model.to(…)``, offloading): properties and methods read them from the model at every call.

    Parameters
    ----------
    model : PreTrainedModel
        Model without wrappers of `torch.compile` or PEFT.
    layers : tuple of nn.Module
        Decoder layers, in order.
    kinds : tuple of str
        Kind of every layer, ``"full_attention"`` or ``"sliding_attention"``.
    windows : tuple of (int or None)
        Sliding window of every layer in tokens; None for full attention.
    kv_heads : int
        Number of KV heads of a layer, H_kv.
    head_dim : int
        Number of features of a head, d.
    """

    model: PreTrainedModel
    layers: tuple[nn.Module, ...]
    kinds: tuple[str, ...]
    windows: tuple[int | None, ...]
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: Any) -> Decoder:
        """Return the view of a model, with or without wrappers of `torch.compile` or PEFT.

        Raises
        ------
        ModelError
            If it is not a transformers model, or its cache is not one key and one value per KV
            head and token (see `check_supported`), or offloaded by accelerate's hooks.
        """
        model = unwrapped(model)
        check_supported(model)
        check_weights_held(model)
        config = model.config.get_text_config()
        layers = tuple(decoder_layers(model))
        kinds, keywords = get_layer_types_and_kwargs(config)
        return cls(
            model=model,
            layers=layers,
            kinds=tuple(kinds),
            windows=tuple(layer.get("sliding_window") for layer in keywords),
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=attention_of(layers[0]).head_dim,
        )

    def __repr__(self) -> str:
        return (
            f"Decoder({type(self.model).__name__}, {len(self.layers)} layers, {self.kv_heads} KV "
            f"heads of {self.head_dim})"
        )

    @property
    def config(self) -> PretrainedConfig:
        """Return the configuration of the language model, one of several in multimodal models."""
        return self.model.config.get_text_config()

    @property
    def features(self) -> int:
        """Return the number of features of the keys of a token in a layer, H_kv · d."""
        return self.kv_heads * self.head_dim

    @property
    def query_heads(self) -> int:
        """Return the number of query heads of a layer, H_q."""
        return int(self.config.num_attention_heads)

    @property
    def rotary_dim(self) -> int:
        """Return the number of features of a head that are rotated; 0 without a known rotation."""
        try:
            return self._rotation().rotary_dim
        except ModelError:
            return 0

    def frequencies(self) -> list[int]:
        """Return the index of the frequency of every feature of a head, (d,).

        Features that are not rotated follow as frequencies of two features each.

        Raises
        ------
        ModelError
            If the model has no `rotary_embedding`, or rotates other than pairs of features.
        """
        return self._rotation().frequencies()

    @in_own_modes
    def _rotation(self) -> Rotation:
        """Return the rotation of the first layer."""
        like = torch.zeros((), device=self.devices[0])
        positions = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
        angles = self.angles(0, positions, like)[0].shape[-1]
        rotation = Rotation.of(rotation_of(self.layers[0]), self.head_dim, angles)
        if rotation is None:
            raise ModelError("the model rotates keys other than in pairs of features")
        return rotation

    @property
    def attentions(self) -> tuple[Any, ...]:
        """Return the attention modules, by layer."""
        return tuple(attention_of(layer) for layer in self.layers)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of token ids."""
        return self.model.device

    @property
    def devices(self) -> list[torch.device]:
        """Return the devices where the layers run."""
        return [device_of(layer) for layer in self.layers]

    @property
    def rotary_embedding(self) -> nn.Module:
        """Return the module that computes the angles of all layers.

        Raises
        ------
        ModelError
            If the model has none.
        """
        return rotary_embedding_of(self.model.get_decoder())

    def angles(self, layer: int, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of a layer, (B or 1, n, rotary dimension).

        Parameters
        ----------
        layer : int
            Index of the layer.
        positions : Tensor
            Positions of tokens, (B or 1, n), int64.
        like : Tensor
            Tensor of the dtype and the device of the angles.

        Raises
        ------
        ModelError
            If the model has no `rotary_embedding`.
        """
        return angles_at(self.rotary_embedding, positions, self.kinds[layer], like)

    def fingerprint(self) -> Tensor:
        """Return a few elements of the weights, (matrices, elements), float32, on the CPU.

        They identify the weights that a plan was fitted to among others of the same shape.

        Raises
        ------
        ModelError
            If the model is on the meta device.
        """
        return fingerprint(self.model)
