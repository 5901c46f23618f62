"""Candidate transforms of the keys and values of a model, from moments of neighbouring layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from manifoldkv.coding.candidates import Candidate, Candidates, blocks_of
from manifoldkv.coding.regression import centred_inputs, leading_directions, ridge
from manifoldkv.coding.transform import TransformConfig, sampled, spectrum
from manifoldkv.core.basis import SITES, Site
from manifoldkv.core.description import ModelDescription
from manifoldkv.core.progress import follow
from manifoldkv.core.windows import cached_tokens
from manifoldkv.plan.predictor import Input, PredictorContext, all_inputs, layers_below
from manifoldkv.statistics.statistics import Statistics

SAMPLES = 8192
"""Tokens of joint moments."""
RANKS = (8, 16, 32, 64, 128, None)
"""Ranks of key predictors; None for full rank."""
GROUP_LENGTHS = (2, 3, 4, 6)
"""Lengths of cross-layer groups within a limit of compute. A group is a run of layers; all tensors
of its layers below predict a tensor. It ends where another begins, so that a decode step depends on
few layers."""
ONE_GROUP = (inf,)
"""Length of the group without a limit of compute: all layers."""
INPUTS_BELOW = 5
"""Largest number of layers below that a tensor of a group is predicted from. In a longer group its
reconstruction depends on further layers through these."""
SCALE = 1.0
"""Multiplications of a latent of a key by its scale."""

LayerTensors = Sequence[Tensor]
"""Keys and values of a layer, (tokens, D) each."""


@dataclass(frozen=True)
class SearchSpace:
    """Transforms to choose from.

    Parameters
    ----------
    bands : tuple of (int or None)
        Frequencies per block of a key transform; None for one block of all.
    depth : int or None
        Largest number of layers below whose keys predict values; 0 for the keys of the same layer
        only, None for no predictors.
    groups : tuple of float
        Lengths of cross-layer groups that are tried, in which keys are predicted too.
    """

    bands: tuple[int | None, ...]
    depth: int | None
    groups: tuple[float, ...]

    @property
    def reach(self) -> int:
        """Return how many layers below are inputs at most."""
        in_groups = (int(min(length - 1, INPUTS_BELOW)) for length in self.groups)
        return max(self.depth or 0, *in_groups, 0)


def candidates(
    statistics: Statistics,
    metrics: Sequence[Tensor],
    inputs: Iterable[LayerTensors],
    space: SearchSpace,
    distortion: dict[float, float],
    context: int,
) -> list[Candidates]:
    """Return candidates without cross-layer groups, then those of each length of groups.

    Parameters
    ----------
    statistics : Statistics
        Of the model.
    metrics : sequence of Tensor
        Weights of errors in keys and in values of all layers, (D, D), one after the other.
    inputs : iterable of LayerTensors
        Reconstructions of the samples, or the samples themselves, that tensors are predicted from,
        by layer.
    space : SearchSpace
        Transforms to choose from.
    distortion : dict of float to float
        As in `Candidates`.
    context : int
        Tokens of the text that compute and bytes are counted for.
    """
    windows = statistics.model.windows
    shape = _Shape.of(statistics.model, space)
    predictors = PredictorContext(space.reach, windows)
    tensors: dict[float | None, list[list[Candidate]]] = {x: [] for x in (None, *space.groups)}
    for index, of_layer in enumerate(follow(inputs, len(windows), "candidates")):
        predictors.begin(index)
        for x in of_layer:
            predictors.add(sampled(x, SAMPLES))
        below = layers_below(windows, index)
        exact = exact_tensors(statistics, index)
        few = [sampled(x, SAMPLES) for x in exact]
        joint = _Joint.of(few, predictors, min(space.reach, below), len(exact[0]))
        found = _LayerCandidates(shape, space, joint, metrics[2 * index : 2 * index + 2])
        for length, so_far in tensors.items():
            if length is None:
                so_far += found.without_groups()
            else:
                most = int(min(index % length, below, INPUTS_BELOW))
                so_far += found.in_group(range(1, most + 1) if length == inf else (most,))
    cached = [cached_tokens(context, window) for window in windows for _ in SITES]
    return [Candidates(each, cached, distortion) for each in tensors.values()]


def exact_tensors(statistics: Statistics, index: int) -> tuple[Tensor, Tensor]:
    """Return the samples of keys and values of a layer, (tokens, D), float32 or float64."""
    layer = statistics.layers[index]
    keys, values = layer.key.samples.flatten(0, 1), layer.value.samples.flatten(0, 1)
    dtype = torch.promote_types(keys.dtype, torch.float32)
    return keys.to(dtype), values.to(dtype)


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
        self, site: Site, inputs: tuple[Input, ...], metric: Tensor, ranks: Sequence[int | None]
    ) -> list[Tensor]:
        """Return the second moments of the residuals of predictions of some ranks, (D, D).

        They are those expected on other text. A regression with k parameters per feature leaves
        too little of the n tokens that it is fitted to, by a factor of ``1 - k / n``, and too much
        of others, by ``1 + k / N`` if it will be fitted to N tokens. None are returned if there are
        too few tokens.
        """
        covariance, features = self.exact[site], len(metric)
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
                first, second = leading_directions(predicted, metric, rank)
                kept = first @ second
                part = kept.mT @ shared
                residual = covariance - part - part.mT + kept.mT @ predicted @ kept
                parameters = parameters * rank // features
            on_other_text = (1 + parameters / self.fitted) / (1 - parameters / self.tokens)
            found.append(residual * on_other_text)
        return found


@dataclass(frozen=True)
class _Shape:
    """Quantities that the candidates of all layers share.

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
    def of(cls, model: ModelDescription, space: SearchSpace) -> _Shape:
        heads, frequencies = model.kv_heads, model.frequencies
        blocks = [blocks_of(frequencies, heads, band) for band in space.bands]
        rotated = 2 * model.rotary_dim * heads
        return cls(
            model.query_heads,
            float(rotated + model.query_heads * model.head_dim),
            list({len(one): one for one in blocks}.values()),
            [rank for rank in RANKS if rank is None or 2 * rank <= model.features],
        )


class _LayerCandidates:
    """Candidates of the keys and values of a layer, those of the same inputs computed once."""

    def __init__(
        self, shape: _Shape, space: SearchSpace, joint: _Joint, metrics: Sequence[Tensor]
    ) -> None:
        self._shape = shape
        self._depth = space.depth
        self._joint = joint
        self._metrics = dict(zip(SITES, metrics, strict=True))
        self._found: dict[tuple[Site, tuple[Input, ...]], list[Candidate]] = {}

    def without_groups(self) -> list[list[Candidate]]:
        """Return candidates of keys that are not predicted, and of values from keys."""
        keys: list[Input] = [(below, "key") for below in range(self._joint.below + 1)]
        count = 0 if self._depth is None else min(self._depth, self._joint.below) + 1
        values = [self._of("value", tuple(keys[:n])) for n in range(count + 1)]
        return [self._of("key", ()), [one for of_inputs in values for one in of_inputs]]

    def in_group(self, depths: Iterable[int]) -> list[list[Candidate]]:
        """Return candidates of keys and of values in a cross-layer group.

        Parameters
        ----------
        depths : iterable of int
            Of how many layers below all tensors may be inputs, beside none.
        """
        depths = (0, *depths)
        by_site = []
        for site in SITES:
            possible = dict.fromkeys(((), *(all_inputs(site, depth) for depth in depths)))
            by_site.append([one for inputs in possible for one in self._of(site, inputs)])
        return by_site

    def _of(self, site: Site, inputs: tuple[Input, ...]) -> list[Candidate]:
        """Return the candidates of a tensor with some inputs."""
        if (site, inputs) not in self._found:
            of_site = self._keys if site == "key" else self._values
            self._found[site, inputs] = of_site(inputs)
        return self._found[site, inputs]

    def _keys(self, inputs: tuple[Input, ...]) -> list[Candidate]:
        metric = self._metrics["key"]
        ranks = self._shape.ranks if inputs else [None]
        seconds = [*zip(ranks, self._joint.residuals("key", inputs, metric, ranks), strict=False)]
        found = []
        for blocks in self._shape.bands:
            for rank, second in seconds:
                variances, rows = spectrum(metric, second, blocks)
                config = TransformConfig(inputs, blocks, rank)
                outputs = len(metric) if rank is None else rank
                fixed = self._shape.of_keys + (len(metric) * outputs if inputs else 0)
                mixed = SCALE + outputs
                found.append(Candidate(config, variances, rows, SCALE, fixed, mixed=mixed))
        return found

    def _values(self, inputs: tuple[Input, ...]) -> list[Candidate]:
        heads = float(self._shape.query_heads)
        metric = self._metrics["value"]
        found = []
        for second in self._joint.residuals("value", inputs, metric, [None]):
            variances, _ = spectrum(metric, second, ())
            found.append(
                Candidate(
                    TransformConfig(inputs),
                    variances,
                    torch.zeros_like(variances),
                    heads,
                    heads,  # scales, multiplied by weights
                    of_source=heads,  # of its scales
                    mixed=heads,
                )
            )
        return found
