"""Possible transforms of every site of a model, from joint moments of neighbouring layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldkv.activations.capture import capture
from manifoldkv.activations.moments import LayerMoments
from manifoldkv.basis import SITES, Site
from manifoldkv.coding.predictor import Input, all_inputs, layers_below
from manifoldkv.coding.regression import reduced_rank, ridge
from manifoldkv.coding.transform import SiteDesign, by_token, sampled, spectrum
from manifoldkv.models.decoder import Decoder
from manifoldkv.recipes.coded_run import CodedRun
from manifoldkv.recipes.menu import Choice, Menu, blocks_of
from manifoldkv.runs.progress import follow
from manifoldkv.windows import cached_tokens

SAMPLES = 8192
"""Tokens of joint moments."""
RANKS = (16, 64, None)
"""Ranks of key predictors; None for full rank."""
CHAINS = (3, 4)
"""Lengths of chains. A chain is a run of layers; all sites of its layers below predict a site. It
ends where another begins, so that a decode step depends on few layers."""


@dataclass(frozen=True)
class Space:
    """Transforms to choose from.

    Parameters
    ----------
    bands : tuple of (int or None)
        Frequencies per block of a key transform; None for one block of all.
    depth : int or None
        Largest number of layers below whose keys predict values; 0 for the keys of the same layer
        only, None for no predictors.
    chains : tuple of int
        Lengths of chains that are tried, in which keys are predicted too.
    """

    bands: tuple[int | None, ...]
    depth: int | None
    chains: tuple[int, ...]

    @property
    def reach(self) -> int:
        """Return how many layers below are inputs at most."""
        return max(self.depth or 0, *(length - 1 for length in self.chains), 0)


def menus(
    decoder: Decoder, run: CodedRun, moments: Sequence[LayerMoments], space: Space
) -> list[Menu]:
    """Return a menu without chains, then one for each length of chains.

    Parameters
    ----------
    decoder : Decoder
        View of the model.
    run : CodedRun
        Of the recipe.
    moments : sequence of LayerMoments
        Fisher moments of all layers.
    space : Space
        Transforms to choose from.
    """
    cached = [cached_tokens(run.context, window) for window in run.windows for _ in SITES]
    builder = _Builder(decoder, space)
    lengths = (None, *(space.chains if space.depth is not None else ()))
    sites: list[list[list[Choice]]] = [[] for _ in lengths]
    for index, joint in _joint_moments(decoder, run, space.reach):
        for length, of_menu in zip(lengths, sites, strict=True):
            of_menu += builder.choices(index, joint, moments[index], length)
    return [Menu(of_menu, cached) for of_menu in sites]


@dataclass(frozen=True)
class _Joint:
    """Second moments of the keys and values of a layer and of those below.

    Parameters
    ----------
    gram : Tensor
        Covariance of all sites, (sites · D, sites · D), float64.
    features : int
        D.
    below : int
        Number of layers below.
    tokens : int
        Number of tokens.
    """

    gram: Tensor
    features: int
    below: int
    tokens: int

    def residual(
        self, site: Site, inputs: tuple[Input, ...], fisher: Tensor, rank: int | None = None
    ) -> Tensor | None:
        """Return the second moment of the residuals of a prediction on other text, (D, D).

        On other text it is larger by a factor of ``(n + k) / (n - k)`` for n tokens and k inputs.
        None if there are too few tokens.
        """
        target = self._columns([(0, site)])
        covariance = self.gram[target][:, target]
        if not inputs:
            return covariance
        columns = self._columns(inputs)
        if 2 * len(columns) > self.tokens:
            return None
        gram, crossed = self.gram[columns][:, columns], self.gram[columns][:, target]
        weights = ridge(gram, crossed)
        if rank is not None:
            first, second = reduced_rank(weights, gram, fisher, rank)
            weights = first @ second
        part = weights.mT @ crossed
        residual = covariance - part - part.mT + weights.mT @ gram @ weights
        count = len(columns) if rank is None else rank + len(columns) * rank / self.features
        return residual * (self.tokens + count) / (self.tokens - count)

    def _columns(self, inputs: Sequence[Input]) -> Tensor:
        starts = [(2 * below + SITES.index(site)) * self.features for below, site in inputs]
        return torch.cat([torch.arange(start, start + self.features) for start in starts])


def _joint_moments(decoder: Decoder, run: CodedRun, reach: int) -> Iterator[tuple[int, _Joint]]:
    """Yield the joint moments of every layer and of at most `reach` layers below."""
    held: list[Tensor] = []
    for activations in follow(capture(decoder.model, run.fitted), len(decoder.layers)):
        index = activations.layer
        below = min(reach, layers_below(run.windows, index))
        pair = (activations.keys_in("pre"), activations.values_of())
        new = [by_token(x[:, :, run.first :]) for x in pair]
        new = [sampled(x, SAMPLES) for x in new]
        held = [*(x - x.mean(dim=0) for x in new), *held][: 2 * (below + 1)]
        joined = torch.cat(held, dim=1)
        tokens = len(joined)
        yield index, _Joint((joined.mT @ joined).double() / tokens, decoder.features, below, tokens)


class _Builder:
    """Choices of the sites of a layer."""

    def __init__(self, decoder: Decoder, space: Space) -> None:
        self._space = space
        self._decoder = decoder
        heads, frequencies = decoder.kv_heads, decoder.frequencies()
        blocks = [blocks_of(frequencies, heads, band) for band in space.bands]
        self._bands = list({len(one): one for one in blocks}.values())
        self._query_heads = decoder.query_heads
        rotated = 2 * decoder.rotary_dim * heads
        self._of_keys = float(rotated + self._query_heads * decoder.head_dim)

    def choices(
        self, index: int, joint: _Joint, moments: LayerMoments, chain: int | None
    ) -> list[list[Choice]]:
        """Return the choices of keys and of values of a layer."""
        if chain is None:
            return [
                [one for blocks in self._bands for one in self._keys(joint, moments, blocks)],
                self._values_from_keys(joint, moments),
            ]
        place = min(index % chain, joint.below)
        keys = [
            one
            for blocks in self._bands
            for rank in (RANKS if place else (None,))
            for one in self._keys(joint, moments, blocks, all_inputs("key", place), rank)
        ]
        inputs = all_inputs("value", place)
        return [keys, self._values(joint, moments, [(), inputs])]

    def _keys(
        self,
        joint: _Joint,
        moments: LayerMoments,
        blocks: tuple[Tensor, ...],
        inputs: tuple[Input, ...] = (),
        rank: int | None = None,
    ) -> list[Choice]:
        features = joint.features
        second = joint.residual("key", inputs, moments.key.fisher, rank)
        if second is None:
            return []
        variances, rows = spectrum(moments.key.fisher, second, blocks)
        outputs = features if rank is None else rank
        expansion = 0 if rank is None else features * rank
        return [
            Choice(
                SiteDesign(inputs, blocks, rank),
                variances,
                rows,
                1.0,  # its scale
                self._of_keys + (expansion if inputs else 0),
                tuple((one, 1.0 + outputs) for one in inputs),
            )
        ]

    def _values_from_keys(self, joint: _Joint, moments: LayerMoments) -> list[Choice]:
        keys: list[Input] = [(below, "key") for below in range(joint.below + 1)]
        count = 0 if self._space.depth is None else min(self._space.depth, joint.below) + 1
        return self._values(joint, moments, [tuple(keys[:n]) for n in range(count + 1)])

    def _values(
        self, joint: _Joint, moments: LayerMoments, possible: list[tuple[Input, ...]]
    ) -> list[Choice]:
        per_latent = 1.0 + self._query_heads
        choices = []
        for inputs in possible:
            second = joint.residual("value", inputs, moments.value.fisher)
            if second is not None:
                variances, _ = spectrum(moments.value.fisher, second, ())
                choices.append(
                    Choice(
                        SiteDesign(inputs),
                        variances,
                        torch.zeros_like(variances),
                        per_latent,
                        0.0,
                        tuple((one, per_latent) for one in inputs),
                    )
                )
        return choices
