"""Statistics of the keys and values of a model on a text, from which plans are fitted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from manifoldkv.core.basis import SITES, Site
from manifoldkv.core.description import ModelDescription
from manifoldkv.core.errors import ArgumentError, RunError
from manifoldkv.core.files import write_whole

SAMPLED_TOKENS = 32768
"""Largest number of tokens whose keys and values are kept."""
FINGERPRINT, HELD_OUT = "fingerprint", "held_out."
"""Name of the fingerprint, and prefix of the tensors of held-out sequences."""


@dataclass(frozen=True, eq=False, repr=False)
class TensorStatistics:
    """Statistics of the keys or the values of a layer, keys before rotation.

    Features are those of all KV heads of a token, D = H_kv · d. Tensors are on the CPU, in float64
    if no other dtype is given.

    Parameters
    ----------
    mean : Tensor
        Mean of the features, (D,).
    covariance : Tensor
        Covariance of the features, (D, D).
    fisher : Tensor
        Fisher information E[g gᵀ], (D, D); see `collect`.
    readers : Tensor
        Second moment, by KV head, of the vectors that multiply the features, (H_kv, d, d): queries
        before rotation of keys, rows of the output projection of values, summed over query heads.
    jacobian : Tensor or None
        Gauss-Newton matrix of the relative squared error of the layer's output, (D, D); None if it
        was not asked for.
    samples : Tensor
        Features of all tokens of some sequences but the first ones, (sequences, tokens, D), in the
        dtype of the model.
    tokens : int
        Number of tokens of the averages.
    """

    mean: Tensor
    covariance: Tensor
    fisher: Tensor
    readers: Tensor
    jacobian: Tensor | None
    samples: Tensor
    tokens: int

    @property
    def second(self) -> Tensor:
        """Return the second moment E[x xᵀ], (D, D)."""
        return self.covariance + torch.outer(self.mean, self.mean)

    def __repr__(self) -> str:
        return f"TensorStatistics({len(self.mean)} features, {self.tokens} tokens)"

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields by name, the number of tokens as a scalar, int64."""
        named = {
            "mean": self.mean,
            "covariance": self.covariance,
            "fisher": self.fisher,
            "readers": self.readers,
            "samples": self.samples,
            "tokens": torch.tensor(self.tokens),
        }
        return named if self.jacobian is None else named | {"jacobian": self.jacobian}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> TensorStatistics:
        """Return the statistics of `tensors`."""
        rest = {name: x for name, x in tensors.items() if name != "tokens"}
        return cls(**({"jacobian": None} | rest), tokens=int(tensors["tokens"]))  # type: ignore[arg-type]

    @classmethod
    def merged(cls, parts: Sequence[TensorStatistics]) -> TensorStatistics:
        """Return the statistics of the texts of all parts together, in their order."""
        counts = torch.tensor([part.tokens for part in parts], dtype=torch.float64)
        weights = counts / counts.sum()

        def mean(of: Sequence[Tensor | None]) -> Tensor | None:
            found = [x for x in of if x is not None]
            if len(found) < len(parts):
                return None
            total = torch.zeros_like(found[0])
            for weight, x in zip(weights, found, strict=True):
                total += weight * x
            return total

        centre = mean([part.mean for part in parts])
        readers = mean([part.readers for part in parts])
        fisher = mean([part.fisher for part in parts])
        assert centre is not None
        assert readers is not None
        assert fisher is not None
        # Covariances around the common mean: second moments would cancel where a mean is large.
        covariance = torch.zeros_like(fisher)
        for weight, part in zip(weights, parts, strict=True):
            offset = part.mean - centre
            covariance += weight * (part.covariance + torch.outer(offset, offset))
        return cls(
            centre,
            covariance,
            fisher,
            readers,
            mean([part.jacobian for part in parts]),
            torch.cat([part.samples for part in parts]),
            int(counts.sum()),
        )


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of the keys and of the values of a layer."""

    key: TensorStatistics
    value: TensorStatistics

    def of(self, site: Site) -> TensorStatistics:
        """Return the statistics of the keys or of the values."""
        return self.key if site == "key" else self.value


@dataclass(frozen=True, eq=False, repr=False)
class Statistics:
    """Statistics of a model on a text: all that a plan is fitted to.

    They are averages over sequences. Those of two halves of a text `merge` to those of the whole.

    Parameters
    ----------
    model : ModelDescription
        The model.
    layers : tuple of LayerStatistics
        By decoder layer.
    text : str
        Name of the text.
    sequences, length : int
        Number of sequences, and of tokens of each.
    first : int
        Number of first tokens of every sequence that are left out.
    prompt : int or None
        Number of first tokens that form a prompt, as in `collect`.
    seed : int
        Seed of the sampled next tokens.
    held_out : Statistics or None
        Statistics of further sequences of the text, on which the loss of a plan is estimated.
    """

    model: ModelDescription
    layers: tuple[LayerStatistics, ...]
    text: str
    sequences: int
    length: int
    first: int
    prompt: int | None
    seed: int
    held_out: Statistics | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Statistics):
            return NotImplemented
        mine, its = self.tensors(), other.tensors()
        return (self.describe(), mine.keys()) == (other.describe(), its.keys()) and all(
            torch.equal(x, its[name]) for name, x in mine.items()
        )

    def __hash__(self) -> int:
        return hash(self._description())

    def __repr__(self) -> str:
        held_out = 0 if self.held_out is None else self.held_out.sequences
        return (
            f"Statistics(of {self.model.name} on {self.sequences} + {held_out} × {self.length} "
            f"tokens of {self.text})"
        )

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of both texts together.

        Raises
        ------
        ArgumentError
            If they are of different models or settings.
        """
        return merged([self, other])

    def save(self, path: str | Path) -> None:
        """Write the statistics to a safetensors file.

        Raises
        ------
        RunError
            If the file cannot be written.
        """
        write_whole(Path(path), save(self.tensors(), metadata={"statistics": self._description()}))

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """Return the statistics of a file that `save` wrote.

        Raises
        ------
        RunError
            If the file is missing or damaged.
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                description = json.loads(file.metadata()["statistics"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return cls.from_tensors(description, tensors)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"{path} holds no statistics, or is damaged: {error}") from error

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, ``"3.key.mean"``, say."""
        named = {FINGERPRINT: self.model.fingerprint}
        for index, layer in enumerate(self.layers):
            for site in SITES:
                of_site = layer.of(site).tensors()
                named |= {f"{index}.{site}.{name}": x.contiguous() for name, x in of_site.items()}
        if self.held_out is None:
            return named
        of_held_out = self.held_out.tensors()
        del of_held_out[FINGERPRINT]  # the model is the same
        return named | {HELD_OUT + name: x for name, x in of_held_out.items()}

    def describe(self) -> dict[str, Any]:
        """Return all fields that are no tensors, of JSON's types."""
        return {
            "model": self.model.fields(),
            "text": self.text,
            "sequences": self.sequences,
            "length": self.length,
            "first": self.first,
            "prompt": self.prompt,
            "seed": self.seed,
            "held_out": None if self.held_out is None else self.held_out.describe(),
        }

    def _description(self) -> str:
        return json.dumps(self.describe(), sort_keys=True)

    @classmethod
    def from_tensors(cls, description: dict[str, Any], tensors: Mapping[str, Tensor]) -> Statistics:
        """Return the statistics of `describe` and `tensors`.

        Raises
        ------
        KeyError, TypeError, ValueError
            If something is missing or does not fit.
        """
        of_model = dict(description["model"])
        of_model |= {name: tuple(of_model[name]) for name in ("windows", "frequencies")}
        model = ModelDescription(**of_model, fingerprint=tensors[FINGERPRINT])
        layers = []
        for index in range(model.layers):
            both = []
            for site in SITES:
                prefix = f"{index}.{site}."
                named = {n[len(prefix) :]: x for n, x in tensors.items() if n.startswith(prefix)}
                both.append(TensorStatistics.from_tensors(named))
            layers.append(LayerStatistics(*both))
        rest = {name: x for name, x in description.items() if name not in ("model", "held_out")}
        held_out = None
        if description["held_out"] is not None:
            of_held_out = {
                name[len(HELD_OUT) :]: x for name, x in tensors.items() if name.startswith(HELD_OUT)
            }
            of_held_out[FINGERPRINT] = model.fingerprint
            held_out = cls.from_tensors(description["held_out"], of_held_out)
        return cls(model, tuple(layers), **rest, held_out=held_out)


def merged(parts: Sequence[Statistics]) -> Statistics:
    """Return the statistics of the texts of all parts together, in their order.

    Samples beyond `SAMPLED_TOKENS` are thinned by whole sequences, evenly.

    Raises
    ------
    ArgumentError
        If the parts are of different models or settings.
    """
    first = parts[0]
    for part in parts[1:]:
        for name in ("length", "first", "prompt"):
            if getattr(part, name) != getattr(first, name):
                raise ArgumentError(
                    f"statistics to merge must have one {name}, got {getattr(first, name)} and "
                    f"{getattr(part, name)}"
                )
        if part.model.fields() != first.model.fields() or not torch.equal(
            part.model.fingerprint, first.model.fingerprint
        ):
            raise ArgumentError(
                f"statistics to merge must be of one model, got {first.model.name} and "
                f"{part.model.name}"
            )
    if len(parts) == 1:
        return first
    layers = []
    for of_layer in zip(*(part.layers for part in parts), strict=True):
        both = [TensorStatistics.merged([one.of(site) for one in of_layer]) for site in SITES]
        layers.append(LayerStatistics(*[_thinned(of_site, first.length) for of_site in both]))
    held_out = [part.held_out for part in parts if part.held_out is not None]
    return replace(
        first,
        layers=tuple(layers),
        text=" + ".join(dict.fromkeys(part.text for part in parts)),
        sequences=sum(part.sequences for part in parts),
        held_out=merged(held_out) if held_out else None,
    )


def _thinned(statistics: TensorStatistics, length: int) -> TensorStatistics:
    kept = sampled_sequences(len(statistics.samples), length)
    if len(kept) == len(statistics.samples):
        return statistics
    return replace(statistics, samples=statistics.samples[kept])


def sampled_sequences(sequences: int, length: int) -> Tensor:
    """Return the indices of the sequences whose tokens are kept as samples, int64, ascending."""
    count = min(sequences, max(1, SAMPLED_TOKENS // length))
    return torch.linspace(0, sequences - 1, count, dtype=torch.float64).round().long()
