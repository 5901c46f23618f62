"""Keys and values of a layer as linear maps of latents, those of the layers below included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

import torch
from torch import Tensor

from manifoldkv.core.basis import SITES, Site
from manifoldkv.models.interface import Rotate
from manifoldkv.models.rotary import Angles
from manifoldkv.models.rotation import Rotation
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.predictor import Input, PredictorContext
from manifoldkv.serve.cache.encoding import TokenEncoder
from manifoldkv.serve.cache.layers import CompressedLayer
from manifoldkv.serve.cache.storage import constant_dtype, working_dtype
from manifoldkv.serve.kernels.tables import LatentTables

Maps = dict[Input, Tensor]
"""Map of the latents of every tensor of keys or values, (features, latents); layers are counted
downwards."""
Tables = TypeVar("Tables")


class LayerMaps:
    """Maps of latents to the keys before rotation and the values of a layer, as a backend holds it.

    Parameters
    ----------
    composer : Composer
        Of all layers of a plan with bases of all heads.
    index : int
        Of the layer.
    dtype : torch.dtype
        Of the model.
    device : torch.device
        Of the layer.
    held : torch.dtype
        In which matrices are held.
    packed : bool
        Whether predictions of keys are maps of the numbers that kernels unpack, not of latents.
    few_tokens : int
        Most new tokens that a kernel encodes.
    """

    def __init__(
        self,
        composer: Composer,
        index: int,
        dtype: torch.dtype,
        device: torch.device,
        held: torch.dtype,
        *,
        packed: bool,
        few_tokens: int = 0,
    ) -> None:
        layers, plan = composer.layers, composer.layers[index]
        self.grouping = plan.key.grouping
        self.heads = self.grouping.heads
        self.working = working_dtype(dtype, device)

        def constant(x: Tensor) -> Tensor:
            return x.to(device, constant_dtype(dtype)).to(held).contiguous()

        def stored(one: Input, part: Tensor) -> Tensor:
            below, site = one
            return part[:, : layers[index - below].of(site).latents]

        key, value = composer.key_map(index), composer.linear_map(index, "value")
        self.key_predicted = {
            one: constant(stored(one, part)) for one, part in key.predicted.items()
        }
        self.key_mean = key.mean.to(device, self.working)
        by_source = {one: constant(stored(one, part)) for one, part in value.maps.items()}
        self.columns = _columns({one: part.shape[1] for one, part in by_source.items()})
        """Columns of the latents of every source of the values, in mixtures."""
        mean = value.mean.to(device, held).unsqueeze(1)
        values = torch.cat([mean, *by_source.values()], dim=1)  # (D, 1 + r)
        self.values = values.unflatten(0, (self.heads, -1)).mT.contiguous()
        """Mean and maps of the values by head, (H_kv, 1 + r, d)."""
        self.key_up = constant(stored((0, "key"), key.up).mT)  # (r, D)
        ups = {"key": self.key_up, "value": self.values[:, self.columns[0, "value"]]}
        encoders = [
            TokenEncoder(
                planned,
                ups[site],
                constant,
                self.working,
                is_input=_is_input(layers, index, site),
                few_tokens=few_tokens,
            )
            for site, planned in plan.sites
        ]
        self._encoders = encoders
        expansion = encoders[0].expansion
        self.key_expansion = None if expansion is None else expansion.mT  # (D, rank)
        self.factors: dict[Input, Tensor] = {}
        """Latents over the numbers that kernels unpack, stored integers less their centres or
        codewords, (r,), float32; none without kernels."""
        if packed:
            self._scale(composer, index, device)

    def _scale(self, composer: Composer, index: int, device: torch.device) -> None:
        """Make predictions maps of the numbers that kernels unpack."""
        for one in self.sources | {(0, SITES[0]): None}:
            quantizer = packed_quantizer(composer.layers, index, one)
            of_stored = (quantizer.step * quantizer.gain)[: quantizer.stored]
            self.factors[one] = of_stored.to(device)
        self.key_predicted = {
            one: part.float() * self.factors[one] for one, part in self.key_predicted.items()
        }

    @property
    def sources(self) -> dict[Input, None]:
        """Return the latents of values and of predictions of keys, in the order of `columns`."""
        return dict.fromkeys([*self.columns, *self.key_predicted])

    @property
    def mixed_factors(self) -> Tensor:
        """Return 1 and `factors` in the order of `columns`, (1 + r,)."""
        of_values = [self.factors[one] for one in self.columns]
        return torch.cat([of_values[0].new_ones(1), *of_values])

    @property
    def packed_up(self) -> Tensor:
        """Return the up-projection of the numbers that kernels unpack of keys, (D, r), float32."""
        return self.key_up.float().mT * self.factors[0, "key"]

    @property
    def prediction(self) -> Tensor | None:
        """Return the matrix of the prediction of keys, (D, p); None without one."""
        if self.key_expansion is None and self.key_predicted:
            return torch.eye(len(self.key_mean), device=self.key_up.device)
        return self.key_expansion

    @property
    def predicted(self) -> Maps:
        """Return the maps of latents of other tensors to the prediction of keys, (rank, r) each."""
        if not self.factors:
            return self.key_predicted
        # Latents of factor 0 are 0.
        return {
            one: torch.where(self.factors[one] == 0, 0, part / self.factors[one])
            for one, part in self.key_predicted.items()
        }

    def store(
        self, layer: CompressedLayer, keys: Tensor, values: Tensor, context: PredictorContext
    ) -> None:
        """Store new tokens; parameters as in `AttentionBackend.store`."""
        layer.advance(keys.shape[2])
        key, value = self._encoders
        context.add(key.store(layer.key_store, self.grouping.split(keys)[:, 0], context))
        context.add(value.store(layer.value_store, self.grouping.split(values)[:, 0], context))

    def by_rotation(self, make: Callable[[Rotation], Tables]) -> ByRotation[Tables]:
        """Return the tables that `make` returns for the rotation of keys."""
        return ByRotation(make, len(self.key_mean) // self.heads)


class ByRotation(Generic[Tables]):
    """Tables of a layer for the rotation of its keys, which the first step tells.

    Parameters
    ----------
    make : callable
        Returns the tables for a rotation in pairs of features.
    head_dim : int
        Features of a head.
    """

    def __init__(self, make: Callable[[Rotation], Tables], head_dim: int) -> None:
        self._make, self._head_dim = make, head_dim
        self._rotate: Rotate | None = None
        self._tables: Tables | None = None

    def under(self, angles: Angles | None) -> Tables | None:
        """Return the tables; None for a rotation that is not in pairs."""
        assert angles is not None  # keys are stored before rotation
        if angles.rotate is not self._rotate:
            rotation = Rotation.of(angles.rotate, self._head_dim, angles.cos.shape[2])
            self._tables = None if rotation is None else self._make(rotation)
            self._rotate = angles.rotate
        return self._tables


def packed_quantizer(layers: Sequence[LayerPlan], index: int, one: Input) -> MixedWidths:
    """Return the quantizer of keys or values of a layer or of one below, which kernels read."""
    below, site = one
    quantizer = layers[index - below].of(site).packed
    assert quantizer is not None
    return quantizer


def latent_tables(
    layers: Sequence[LayerPlan], index: int, inputs: Iterable[Input]
) -> dict[Input, LatentTables]:
    """Return the tables of latents that kernels of a layer read."""
    return {one: LatentTables.of_quantizer(packed_quantizer(layers, index, one)) for one in inputs}


def _columns(latents: dict[Input, int]) -> dict[Input, slice]:
    """Return the columns of every source's latents after a first one."""
    stops = list(accumulate(latents.values(), initial=1))
    return {one: slice(*ends) for one, ends in zip(latents, pairwise(stops), strict=True)}


def _is_input(layers: Sequence[LayerPlan], index: int, site: Site) -> bool:
    """Return whether a predictor of this layer or of one above has a tensor as an input."""
    return any(
        planned.predictor is not None and (above, site) in planned.predictor.inputs
        for above, layer in enumerate(layers[index:])
        for _, planned in layer.sites
    )
