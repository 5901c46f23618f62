"""Possible transforms of every site of a model, from joint moments of neighbouring layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from manifoldkv.activations.moments import LayerMoments
from manifoldkv.basis import SITES, Site
from manifoldkv.coding.predictor import Input, PredictorContext, all_inputs, layers_below
from manifoldkv.coding.regression import centred_inputs, leading_directions, ridge
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
"""Lengths of chains within a limit of work. A chain is a run of layers; all sites of its layers
below predict a site. It ends where another begins, so that a decode step depends on few layers."""
ONE_CHAIN = (inf,)
"""Length of the chain without a limit of work: all layers."""
INPUTS_BELOW = 5
"""Largest number of layers below that a site of a chain is predicted from. In a longer chain its
reconstruction depends on further layers through these."""
SCALE = 1.0
"""Multiplications of a latent of a key by its scale."""


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
    chains : tuple of float
        Lengths of chains that are tried, in which keys are predicted too.
    """

    bands: tuple[int | None, ...]
    depth: int | None
    chains: tuple[float, ...]

    @property
    def reach(self) -> int:
        """Return how many layers below are inputs at most."""
        in_chains = (int(min(length - 1, INPUTS_BELOW)) for length in self.chains)
        return max(self.depth or 0, *in_chains, 0)


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
        self._space = space
        self._shape = _Shape.of(decoder, space)
        self._context = PredictorContext(space.reach, run.windows)
        lengths = (None, *space.chains)
        self._sites: dict[float | None, list[list[Choice]]] = {length: [] for length in lengths}

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
        below = layers_below(self._run.windows, index)
        few = [sampled(x, SAMPLES) for x in exact]
        joint = _Joint.of(few, self._context, min(self._space.reach, below), len(exact[0]))
        choices = _Choices(self._shape, self._space, joint, self._moments[index])
        for length, sites in self._sites.items():
            if length is None:
                sites += choices.without_chains()
            else:
                most = int(min(index % length, below, INPUTS_BELOW))
                sites += choices.in_chain(range(1, most + 1) if length == inf else (most,))

    def menus(self, distortion: dict[float, float]) -> list[Menu]:
        """Return a menu without chains, then one for each length of chains.

        `distortion` is as in `Menu`.
        """
        cached = [cached_tokens(self._run.context, window) for window in self._run.windows]
        by_site = [tokens for tokens in cached for _ in SITES]
        return [Menu(sites, by_site, distortion) for sites in self._sites.values()]


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
    fitted : int
        Number of tokens that predictors will be fitted to.
    """

    exact: dict[Site, Tensor]
    gram: Tensor
    crossed: dict[Site, Tensor]
    names: list[Input]
    tokens: int
    fitted: int

    @classmethod
    def of(
        cls, exact: Sequence[Tensor], context: PredictorContext, below: int, fitted: int
    ) -> _Joint:
        """Return the moments of keys and values, and of the inputs that a context holds."""
        names = list(all_inputs("value", below))
        inputs = centred_inputs(torch.cat(context.of(names), dim=1))
        tokens = len(inputs)
        centred = {site: x - x.mean(dim=0) for site, x in zip(SITES, exact, strict=True)}
        return cls(
            {site: (x.mT @ x).double() / tokens for site, x in centred.items()},
            (inputs.mT @ inputs).double() / tokens,
            {site: (inputs.mT @ x).double() / tokens for site, x in centred.items()},
            names,
            tokens,
            fitted,
        )

    @property
    def below(self) -> int:
        """Return how many layers below are possible inputs."""
        return max(below for below, _ in self.names)

    def residuals(
        self, site: Site, inputs: tuple[Input, ...], fisher: Tensor, ranks: Sequence[int | None]
    ) -> list[Tensor]:
        """Return the second moments of the residuals of predictions of some ranks, (D, D).

        They are those expected on other text. A regression with k parameters per feature leaves
        too little of the n tokens that it is fitted to, by a factor of ``1 - k / n``, and too much
        of others, by ``1 + k / N`` if it will be fitted to N tokens. None are returned if there are
        too few tokens.
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
            on_other_text = (1 + parameters / self.fitted) / (1 - parameters / self.tokens)
            found.append(residual * on_other_text)
        return found


@dataclass(frozen=True)
class _Shape:
    """Quantities that the choices of all layers share.

    Parameters
    ----------
    query_heads : int
        Number of query heads, H_q.
    of_keys : float
        Multiplications of a cached token to rotate and to score its key.
    bands : list of tuple of Tensor
        Blocks of a key transform, of every band.
    ranks : list of (int or None)
        Ranks of key predictors.
    """

    query_heads: int
    of_keys: float
    bands: list[tuple[Tensor, ...]]
    ranks: list[int | None]

    @classmethod
    def of(cls, decoder: Decoder, space: Space) -> _Shape:
        heads, frequencies = decoder.kv_heads, decoder.frequencies()
        blocks = [blocks_of(frequencies, heads, band) for band in space.bands]
        rotated = 2 * decoder.rotary_dim * heads
        return cls(
            decoder.query_heads,
            float(rotated + decoder.query_heads * decoder.head_dim),
            list({len(one): one for one in blocks}.values()),
            [rank for rank in RANKS if rank is None or 2 * rank <= decoder.features],
        )


class _Choices:
    """Choices of the sites of a layer, those of the same inputs computed once."""

    def __init__(self, shape: _Shape, space: Space, joint: _Joint, moments: LayerMoments) -> None:
        self._shape = shape
        self._depth = space.depth
        self._joint = joint
        self._fisher = {site: moments.of(site).fisher for site in SITES}
        self._found: dict[tuple[Site, tuple[Input, ...]], list[Choice]] = {}

    def without_chains(self) -> list[list[Choice]]:
        """Return choices of keys that are not predicted, and of values from keys."""
        keys: list[Input] = [(below, "key") for below in range(self._joint.below + 1)]
        count = 0 if self._depth is None else min(self._depth, self._joint.below) + 1
        values = [self._of("value", tuple(keys[:n])) for n in range(count + 1)]
        return [self._of("key", ()), [choice for of_inputs in values for choice in of_inputs]]

    def in_chain(self, depths: Iterable[int]) -> list[list[Choice]]:
        """Return choices of keys and of values in a chain.

        Parameters
        ----------
        depths : iterable of int
            Of how many layers below all sites may be inputs, beside none.
        """
        depths = (0, *depths)
        by_site = []
        for site in SITES:
            possible = dict.fromkeys(((), *(all_inputs(site, depth) for depth in depths)))
            by_site.append([choice for inputs in possible for choice in self._of(site, inputs)])
        return by_site

    def _of(self, site: Site, inputs: tuple[Input, ...]) -> list[Choice]:
        """Return the choices of a site with some inputs."""
        if (site, inputs) not in self._found:
            of_site = self._keys if site == "key" else self._values
            self._found[site, inputs] = of_site(inputs)
        return self._found[site, inputs]

    def _keys(self, inputs: tuple[Input, ...]) -> list[Choice]:
        fisher = self._fisher["key"]
        ranks = self._shape.ranks if inputs else [None]
        seconds = [*zip(ranks, self._joint.residuals("key", inputs, fisher, ranks), strict=False)]
        choices = []
        for blocks in self._shape.bands:
            for rank, second in seconds:
                variances, rows = spectrum(fisher, second, blocks)
                design = SiteDesign(inputs, blocks, rank)
                outputs = len(fisher) if rank is None else rank
                fixed = self._shape.of_keys + (len(fisher) * outputs if inputs else 0)
                mixed = SCALE + outputs
                choices.append(Choice(design, variances, rows, SCALE, fixed, mixed=mixed))
        return choices

    def _values(self, inputs: tuple[Input, ...]) -> list[Choice]:
        heads = float(self._shape.query_heads)
        fisher = self._fisher["value"]
        choices = []
        for second in self._joint.residuals("value", inputs, fisher, [None]):
            variances, _ = spectrum(fisher, second, ())
            choices.append(
                Choice(
                    SiteDesign(inputs),
                    variances,
                    torch.zeros_like(variances),
                    heads,
                    heads,  # scales, multiplied by weights
                    of_source=heads,  # of its scales
                    mixed=heads,
                )
            )
        return choices
