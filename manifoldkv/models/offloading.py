"""Offloading: weights on disk, in safetensors shards, until their decoder layer runs."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, update_wrapper
from tempfile import mkdtemp
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from manifoldkv.errors import ModelError
from manifoldkv.models.support import decoder_layers

_ATTRIBUTE = "manifoldkv_weights"


class LayerWeights:
    """Weights of a decoder layer, loaded while they are held at least once.

    A layer holds its weights while it runs, and `resident` for longer.

    Parameters
    ----------
    layer : nn.Module
        Decoder layer with parameters on the meta device.
    prefix : str
        Prefix of the layer's parameters in the model.
    weights : mapping
        Tensors by parameter name in the model, read from disk at each access.
    device : torch.device
        Device where the layer runs.
    """

    def __init__(
        self, layer: nn.Module, prefix: str, weights: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self.device = device
        self._layer = layer
        self.prefix = prefix
        self._weights = weights
        self._names = [n for n, p in layer.named_parameters() if p.is_meta]
        self._holders = 0

    def named(self) -> dict[str, Tensor]:
        """Return all weights by parameter name in the model, read from disk."""
        return {self.prefix + name: self.read(name) for name in self._names}

    def read(self, name: str) -> Tensor:
        """Return a weight by parameter name in the layer, read from disk."""
        return self._weights[self.prefix + name]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Load the weights, unless they are held, and free them after the last block."""
        self._holders += 1
        if self._holders == 1:
            for name in self._names:
                set_module_tensor_to_device(self._layer, name, self.device, value=self.read(name))
            self._layer.requires_grad_(False)
        try:
            yield
        finally:
            self._holders -= 1
            if self._holders == 0:
                for name in self._names:
                    set_module_tensor_to_device(self._layer, name, "meta")

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the layer's own forward with its weights."""
        with self.held():
            return forward(*args, **kwargs)


def resident(layer: nn.Module) -> AbstractContextManager[None]:
    """Keep the weights of a layer loaded inside the block."""
    weights = _weights_of(layer)
    return nullcontext() if weights is None else weights.held()


def weight_of(layer: nn.Module, name: str) -> Tensor:
    """Return a parameter of a decoder layer by name, read from disk if offloaded."""
    parameter = layer.get_parameter(name)
    weights = _weights_of(layer)
    return parameter if weights is None or not parameter.is_meta else weights.read(name)


def check_weights_held(model: PreTrainedModel) -> None:
    """Refuse a model whose weights are held by hooks of accelerate, outside of which they are read.

    Raises
    ------
    ModelError
        If a model is offloaded by hooks.
    """
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    if hooked and any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(
            f"{type(model).__name__} is offloaded by accelerate, whose hooks hold its weights: "
            "load it without, or with load_model(…, offload=True), which reads them layer by layer"
        )


def is_offloaded(model: PreTrainedModel) -> bool:
    """Return whether weights of decoder layers are read from disk when they run."""
    return any(_weights_of(module) is not None for module in model.modules())


def device_of(layer: nn.Module) -> torch.device:
    """Return the device where a decoder layer runs."""
    weights = _weights_of(layer)
    return next(layer.parameters()).device if weights is None else weights.device


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield names and weights, sorted by name; offloaded ones are read layer by layer."""
    offloaded = [w for w in map(_weights_of, model.modules()) if w is not None]
    read: dict[str, Tensor] = {}
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.is_meta and name not in read:
            read = next(w for w in offloaded if name.startswith(w.prefix)).named()
        yield name, read.get(name, tensor)


def _weights_of(layer: nn.Module) -> LayerWeights | None:
    return getattr(layer, _ATTRIBUTE, None)


def load_offloaded(
    name: str, dtype: torch.dtype, device: str
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model with decoder layers on disk, and its loading info.

    Parameters that transformers has to rebuild (experts, say) are written into a temporary folder,
    deleted with the model.
    """
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    layers = [id(layer) for layer in decoder_layers(skeleton)]
    folder = mkdtemp(prefix="manifoldkv-")
    model, loaded = AutoModelForCausalLM.from_pretrained(
        name,
        dtype=dtype,
        device_map=dict(_device_map(skeleton, "", set(layers), device)),
        offload_folder=folder,
        output_loading_info=True,
    )
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    weights = _all_weights(model)
    remove_hook_from_module(model, recurse=True)
    names = {id(module): name for name, module in model.named_modules()}
    for layer in decoder_layers(model):
        of_layer = LayerWeights(layer, names[id(layer)] + ".", weights, torch.device(device))
        setattr(layer, _ATTRIBUTE, of_layer)
        # Not by hooks, which a recomputed forward of gradient checkpointing does not call.
        layer.forward = update_wrapper(partial(of_layer.run, layer.forward), layer.forward)
    return model, loaded


def _device_map(
    module: nn.Module, name: str, layers: set[int], device: str
) -> Iterator[tuple[str, str]]:
    """Yield names and devices of modules: decoder layers on disk, all others on the device."""
    if id(module) in layers:
        yield name, "disk"
    elif not any(id(inner) in layers for inner in module.modules()):
        yield name, device
    else:
        for child_name, child in module.named_children():
            yield from _device_map(child, f"{name}.{child_name}".lstrip("."), layers, device)


def _all_weights(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Return accelerate's mapping of offloaded weights, by parameter name in the model."""
    for module in model.modules():
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        if weights is not None:
            return weights.dataset
    raise AssertionError("no decoder layer was offloaded")
