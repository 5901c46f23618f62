"""Possible transforms of every site of a model, from joint moments of neighbouring layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldkv.activations.moments import LayerMoments
from manifoldkv.basis import SITES, Site
from manifoldkv.coding.predictor import Input, PredictorContext, all_inputs, layers_below
from manifoldkv.coding.regression import leading_directions, ridge
from manifoldkv.coding.transform import SiteDesign, sampled, spectrum
from manifoldkv.models.decoder import Decoder
from manifoldkv.recipes.coded_run import CodedRun
from manifoldkv.recipes.menu import Choice, Menu, blocks_of
from manifoldkv.windows import cached_tokens

SAMPLES = 8192
"""Tokens of joint moments."""
RANKS = (8, 16, 32, 64, 128, None)
"""Ranks of key predictors; None for full rank."""
CHAINS = (2, 3, 4, 6)
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


class MenuBuilder:
    """Menus of all layers, which are added from the first to the last.

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

    def __init__(
        self, decoder: Decoder, run: CodedRun, moments: Sequence[LayerMoments], space: Space
    ) -> None:
        self._run = run
        self._moments = moments
        self._choices = _Choices(decoder, space)
        self._context = PredictorContext(space.reach, run.windows)
        lengths = (None, *space.chains)
        self._sites: dict[int | None, list[list[Choice]]] = {length: [] for length in lengths}
        self._reach = space.reach

    def add(self, index: int, exact: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Add a layer.

        Parameters
        ----------
        index : int
            Of the layer.
        exact : sequence of Tensor
            Keys and values, (tokens, D) each.
        inputs : sequence of Tensor
            Reconstructions of them, or themselves, from which sites are predicted.
        """
        self._context.begin(index)
        for x in inputs:
            self._context.add(sampled(x, SAMPLES))
        below = min(self._reach, layers_below(self._run.windows, index))
        joint = _Joint.of([sampled(x, SAMPLES) for x in exact], self._context, below)
        for length, sites in self._sites.items():
            sites += self._choices.of(index, joint, self._moments[index], length)

    def menus(self) -> list[Menu]:
        """Return a menu without chains, then one for each length of chains."""
        cached = [cached_tokens(self._run.context, window) for window in self._run.windows]
        by_site = [tokens for tokens in cached for _ in SITES]
        return [Menu(sites, by_site) for sites in self._sites.values()]


@dataclass(frozen=True)
class _Joint:
    """Second moments of the keys and values of a layer with the inputs of their predictors.

    Parameters
    ----------
    exact : dict of Site to Tensor
        Covariances of keys and of values, (D, D), float64.
    gram : Tensor
        Covariance of all possible inputs, (inputs · D, inputs · D), float64.
    crossed : dict of Site to Tensor
        Covariance of inputs with keys and with values, (inputs · D, D), float64.
    names : list of Input
        Possible inputs.
    tokens : int
        Number of tokens.
    """

    exact: dict[Site, Tensor]
    gram: Tensor
    crossed: dict[Site, Tensor]
    names: list[Input]
    tokens: int

    @classmethod
    def of(cls, exact: Sequence[Tensor], context: PredictorContext, below: int) -> _Joint:
        """Return the moments of keys and values, and of the inputs that a context holds."""
        names = list(all_inputs("value", below))
        inputs = torch.cat(context.of(names), dim=1)
        inputs = inputs - inputs.mean(dim=0)
        tokens = len(inputs)
        centred = {site: x - x.mean(dim=0) for site, x in zip(SITES, exact, strict=True)}
        return cls(
            {site: (x.mT @ x).double() / tokens for site, x in centred.items()},
            (inputs.mT @ inputs).double() / tokens,
            {site: (inputs.mT @ x).double() / tokens for site, x in centred.items()},
            names,
            tokens,
        )

    @property
    def below(self) -> int:
        """Return how many layers below are possible inputs."""
        return max(below for below, _ in self.names)

    def residuals(
        self, site: Site, inputs: tuple[Input, ...], fisher: Tensor, ranks: Sequence[int | None]
    ) -> list[Tensor]:
        """Return the second moments of the residuals of predictions of some ranks, (D, D).

        On other text they are larger by a factor of ``(n + k) / (n - k)`` for n tokens and k
        parameters of a feature. None are returned if there are too few tokens.
        """
        covariance, features = self.exact[site], len(fisher)
        if not inputs:
            return [covariance]
        columns = torch.cat(
            [torch.arange(features) + self.names.index(one) * features for one in inputs]
        )
        if 2 * len(columns) > self.tokens:
            return []
        gram, crossed = self.gram[columns][:, columns], self.crossed[site][columns]
        weights = ridge(gram, crossed)
        shared, predicted = weights.mT @ crossed, weights.mT @ gram @ weights  # (D, D) each
        found = []
        for rank in ranks:
            residual, parameters = covariance - shared - shared.mT + predicted, len(columns)
            if rank is not None and rank < features:
                first, second = leading_directions(predicted, fisher, rank)
                kept = first @ second
                part = kept.mT @ shared
                residual = covariance - part - part.mT + kept.mT @ predicted @ kept
                parameters = parameters * rank // features
            found.append(residual * (self.tokens + parameters) / (self.tokens - parameters))
        return found


class _Choices:
    """Choices of the sites of a layer."""

    def __init__(self, decoder: Decoder, space: Space) -> None:
        self._space = space
        self._features = decoder.features
        heads, frequencies = decoder.kv_heads, decoder.frequencies()
        blocks = [blocks_of(frequencies, heads, band) for band in space.bands]
        self._bands = list({len(one): one for one in blocks}.values())
        self._ranks = [rank for rank in RANKS if rank is None or 2 * rank <= self._features]
        self._query_heads = decoder.query_heads
        rotated = 2 * decoder.rotary_dim * heads
        self._of_keys = float(rotated + self._query_heads * decoder.head_dim)

    def of(
        self, index: int, joint: _Joint, moments: LayerMoments, chain: int | None
    ) -> list[list[Choice]]:
        """Return the choices of keys and of values of a layer."""
        if chain is None:
            keys: list[Input] = [(below, "key") for below in range(joint.below + 1)]
            depth = self._space.depth
            count = 0 if depth is None else min(depth, joint.below) + 1
            possible = [tuple(keys[:n]) for n in range(count + 1)]
            return [self._keys(joint, moments, ()), self._values(joint, moments, possible)]
        place = min(index % chain, joint.below)
        possible = [(), ((0, "key"),), all_inputs("value", place)]
        return [
            self._keys(joint, moments, all_inputs("key", place)),
            self._values(joint, moments, list(dict.fromkeys(possible))),
        ]

    def _keys(
        self, joint: _Joint, moments: LayerMoments, inputs: tuple[Input, ...]
    ) -> list[Choice]:
        fisher = moments.key.fisher
        ranks = self._ranks if inputs else [None]
        seconds = [*zip(ranks, joint.residuals("key", inputs, fisher, ranks), strict=False)]
        choices = []
        for blocks in self._bands:
            for rank, second in seconds:
                variances, rows = spectrum(fisher, second, blocks)
                outputs = self._features if rank is None else rank
                expansion = self._features * outputs
                choices.append(
                    Choice(
                        SiteDesign(inputs, blocks, rank),
                        variances,
                        rows,
                        1.0,  # its scale
                        self._of_keys + (expansion if inputs else 0),
                        tuple((one, 1.0 + outputs) for one in inputs),
                    )
                )
        if inputs:
            choices += self._keys(joint, moments, ())
        return choices

    def _values(
        self, joint: _Joint, moments: LayerMoments, possible: list[tuple[Input, ...]]
    ) -> list[Choice]:
        heads = float(self._query_heads)
        fisher = moments.value.fisher
        choices = []
        for inputs in possible:
            for second in joint.residuals("value", inputs, fisher, [None]):
                variances, _ = spectrum(fisher, second, ())
                choices.append(
                    Choice(
                        SiteDesign(inputs),
                        variances,
                        torch.zeros_like(variances),
                        heads,
                        heads * (1 + len(inputs)),  # scales, multiplied by weights
                        tuple((one, heads) for one in inputs),
                    )
                )
        return choices
