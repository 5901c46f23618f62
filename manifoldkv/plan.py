"""What a user keeps: the bases of every layer, and all that is needed to use them again."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from huggingface_hub import ModelCardData
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from manifoldkv.activations import Rotary, Site
from manifoldkv.basis import (
    ORTHONORMAL_TOLERANCE,
    Basis,
    HeadGrouping,
    equal,
    orthonormality_error,
)
from manifoldkv.errors import ManifoldKVError, OutputError, PlanError
from manifoldkv.fingerprint import agree, fingerprint
from manifoldkv.hub import OnHub
from manifoldkv.models import cached_tokens, unwrapped
from manifoldkv.output import write_whole

FORMAT = 3
TENSORS = "plan.safetensors"
DESCRIPTION = "plan.json"
BITS = (2, 3, 4, 8)
Layout = Literal["static", "kivi"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
SCALE_BYTES = 2
"""Scales and offsets that are computed while decoding are stored in float16."""
LARGEST_INTEGER = 1 << 20
"""No number of heads, of tokens or of features in a plan's description is larger."""

_ARCHITECTURE = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rope_parameters", "layer_types", "sliding_window"),
)


REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
"""What a model on the Hub is called; a folder of one's own is not named on a card."""
CARD = Path(__file__).with_name("templates") / "card.md"


@dataclass(frozen=True)
class Quantization:
    """How latents are rounded to integers.

    Parameters
    ----------
    bits : {8, 4, 3, 2}
        Of every stored number.
    layout : {"static", "kivi"}
        ``"static"``, the paper's: keys in ranges calibrated per head and group of features, values
        in a range per token and group of features. ``"kivi"``: keys in a range per feature and run
        of `group_size` tokens, values as above; the newest tokens stay exact until a whole run has
        left a window of `residual` tokens. Such a cache takes no padded batch, cannot be cropped
        (no assisted decoding) and does not fit sliding windows.
    group_size : int
        Features (or, for KIVI's keys, tokens) that share a range. A last group may be shorter.
    residual : int
        Tokens that KIVI's layout never rounds; no meaning otherwise.
    """

    bits: int = 4
    layout: Layout = "static"
    group_size: int = 64
    residual: int = 64

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise PlanError(f"latents of {self.bits} bits are not supported; possible: 2, 3, 4, 8")
        if self.layout not in LAYOUTS:
            raise PlanError(f"unknown layout {self.layout!r}; known: {', '.join(LAYOUTS)}")
        if self.group_size < 1 or self.residual < 0:
            raise PlanError("group_size must be at least 1 and residual at least 0")

    def code_bytes(self, features: int) -> int:
        """Bytes of `features` packed numbers; three-bit numbers are packed in eights."""
        return ceil(features / 8) * 3 if self.bits == 3 else ceil(features * self.bits / 8)

    def groups(self, features: int) -> int:
        """Ranges of `features` neighbouring features."""
        return ceil(features / self.group_size)

    def exact_tokens(self, tokens: int) -> int:
        """How many of the newest of `tokens` tokens are not rounded."""
        if self.layout == "static":
            return 0
        return tokens - max(0, tokens - self.residual) // self.group_size * self.group_size


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """Bases of one layer.

    Parameters
    ----------
    key, value : Basis
        float32 or float64, on the CPU.
    window : int or None
        Sliding window of the layer, in tokens; it caches ``window - 1`` of them.
    key_range : Tensor or None
        Smallest and largest key latent per run of heads and group of features,
        (runs, groups, 2); only for a plan with static quantisation.
    """

    key: Basis
    value: Basis
    window: int | None = None
    key_range: Tensor | None = field(default=None, repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerPlan):
            return NotImplemented
        same_bases = self.key == other.key and self.value == other.value
        return same_bases and self.window == other.window and equal(self.key_range, other.key_range)

    def __hash__(self) -> int:
        return hash((self.key, self.value, self.window))

    @property
    def sites(self) -> tuple[tuple[Site, Basis], tuple[Site, Basis]]:
        """Both sites with their bases."""
        return ("key", self.key), ("value", self.value)

    def cached_tokens(self, tokens: int) -> int:
        """How many of `tokens` tokens seen the layer keeps."""
        return cached_tokens(tokens, self.window)

    def exact_tokens(self, tokens: int, recent: int) -> int:
        """How many of these are among the `recent` newest, which are not projected."""
        return min(self.cached_tokens(tokens), recent)

    def numbers(self, tokens: int, recent: int) -> int:
        """Numbers cached of `tokens` tokens of one sequence."""
        exact = self.exact_tokens(tokens, recent)
        projected = (self.cached_tokens(tokens) - exact) * (self.key.rank + self.value.rank)
        return self.key.grouping.heads * (exact * 2 * self.key.head_dim + projected)


@dataclass(frozen=True)
class Provenance:
    """Where the bases come from.

    Parameters
    ----------
    model : str
        Name or folder of the model, as it was loaded.
    text : str
        Calibration text.
    sequences, length : int
        Its size.
    context : int
        Tokens of the text that the requested ratio is kept for.
    recipe : dict
        All fields of the recipe; objective, solver and rank rule by their names and fields
        (`Recipe.describe`).
    seed : int
        Of everything random.
    requested_ratio : float
        What was asked for; `CompressionPlan.ratio` is what came out.
    versions : dict
        Of the packages the numbers depend on.
    threads : int
        On which torch computed: the same seed gives the same bytes on as many threads.
    tuning_steps : int
        Taken by `tune` since.
    """

    model: str
    text: str
    sequences: int
    length: int
    context: int
    recipe: dict[str, Any] = field(hash=False)
    seed: int
    requested_ratio: float
    versions: dict[str, str] = field(hash=False)
    threads: int
    tuning_steps: int = 0

    def method(self, part: Literal["objective", "solver", "ranks"]) -> str:
        """Return the name of a part of the recipe."""
        return str(self.recipe[part]["name"])


@dataclass(frozen=True, eq=False, repr=False)
class CompressionPlan(OnHub):
    """Bases for every layer of a model.

    Parameters
    ----------
    layers : tuple of LayerPlan
        In the order of the model.
    rotary : {"pre", "post"}
        Whether keys are stored before or after rotation.
    config_hash : str
        `config_hash` of the model the plan is for.
    fingerprint : Tensor
        `fingerprint` of its weights, (matrices, elements), float32.
    provenance : Provenance
        Where the bases come from.
    quantization : Quantization or None
        How latents are rounded; None stores them in the dtype of the model.
    recent : int
        The newest tokens, whose keys and values are kept as they are. A token is projected when it
        is no longer one of them: a query sees itself and the ``recent - 1`` tokens before it
        exactly. Does not go together with KIVI's layout, which has a window of its own.

    Two plans are equal if their `digest` is: if caches made of them hold the same. Where they come
    from (`provenance`) plays no part, so that a plan found again on another day equals the first.

    Raises
    ------
    PlanError
        If a tensor has the wrong shape or dtype or holds a number that is not finite, if
        ``upᵀ down`` is not the identity, if quantisation lacks its ranges, or if `recent` is
        negative or does not fit the layout.
    """

    FILES = (TENSORS, DESCRIPTION)

    layers: tuple[LayerPlan, ...]
    rotary: Rotary
    config_hash: str
    fingerprint: Tensor
    provenance: Provenance
    quantization: Quantization | None = None
    recent: int = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompressionPlan):
            return NotImplemented
        return self is other or self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        provenance = self.provenance
        keys = [layer.key.rank for layer in self.layers]
        values = [layer.value.rank for layer in self.layers]
        ranks = (
            f"key ranks {min(keys)} to {max(keys)} and value ranks {min(values)} to {max(values)}"
        )
        rounded = "" if self.quantization is None else f", {self.quantization}"
        return (
            f"CompressionPlan(for {provenance.model}: ratio {self.ratio:.4g} at "
            f"{provenance.context} tokens,\n"
            f"  {len(self.layers)} layers, {ranks} of {self.layers[0].key.head_dim},\n"
            f"  keys {self.rotary}-rotation, newest {self.recent} tokens exact{rounded},\n"
            f"  {provenance.method('objective')} by {provenance.method('solver')} on "
            f"{provenance.sequences} × {provenance.length} tokens of {provenance.text}, "
            f"seed {provenance.seed})"
        )

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("a plan needs at least one layer")
        if self.recent < 0:
            raise PlanError(f"a plan cannot keep the newest {self.recent} tokens")
        if min(self.provenance.length, self.provenance.context) < 1:
            raise PlanError("calibration sequences and the context have one token at least")
        _check_fingerprint(self.fingerprint)
        if self.rotary not in ("pre", "post"):
            raise PlanError(f"unknown rotary space {self.rotary!r}; known: pre, post")
        for index, layer in enumerate(self.layers):
            for site, basis in layer.sites:
                _check_basis(f"layer {index} {site}", basis)
            if layer.key.head_dim != layer.value.head_dim:
                raise PlanError(f"layer {index}: keys and values differ in head_dim")
            if layer.key.grouping.heads != layer.value.grouping.heads:
                raise PlanError(f"layer {index}: keys and values differ in KV heads")
            if layer.window is not None and layer.window < 2:
                raise PlanError(f"layer {index}: a window of {layer.window} tokens keeps nothing")
            self._check_quantization(index, layer)

    def _check_quantization(self, index: int, layer: LayerPlan) -> None:
        quantization = self.quantization
        check_layout(quantization, index, layer.window, recent=self.recent > 0)
        if quantization is None or quantization.layout != "static":
            expected = None
        else:
            basis = layer.key
            runs = basis.grouping.heads // basis.grouping.width
            expected = (runs, quantization.groups(basis.rank * basis.grouping.width), 2)
        found = None if layer.key_range is None else tuple(layer.key_range.shape)
        if found != expected:
            raise PlanError(f"layer {index}: key ranges are {found}, must be {expected}")
        if layer.key_range is not None:
            _check_numbers(f"layer {index} key ranges", layer.key_range)
            if not bool((layer.key_range[..., 0] <= layer.key_range[..., 1]).all()):
                raise PlanError(f"layer {index}: a key range ends before it begins")

    @property
    def ratio(self) -> float:
        """Cached elements over those of the uncompressed model (Eq. cache ratio).

        At the context length that the ratio was asked for. With tokens that stay exact, or with
        sliding windows, another length has another ratio (`ratio_at`).
        """
        return self.ratio_at(self.provenance.context)

    def ratio_at(self, tokens: int) -> float:
        """Return the cached elements of a text of some tokens over the uncompressed model's."""
        cached = sum(layer.numbers(tokens, self.recent) for layer in self.layers)
        return cached / sum(layer.numbers(tokens, recent=tokens) for layer in self.layers)

    def nbytes(self, tokens: int, *, batch: int = 1, dtype: torch.dtype = torch.bfloat16) -> int:
        """What `CompressedCache.nbytes` is after `tokens` tokens of `batch` sequences.

        Latents as stored, with scales and offsets and tokens kept exact; `dtype` is the model's.
        """
        return batch * sum(self._layer_nbytes(layer, tokens, dtype) for layer in self.layers)

    def _layer_nbytes(self, layer: LayerPlan, tokens: int, dtype: torch.dtype) -> int:
        exact = layer.exact_tokens(tokens, self.recent)
        latents = self._latent_nbytes(layer, layer.cached_tokens(tokens) - exact, dtype)
        return latents + exact * 2 * layer.key.grouping.heads * layer.key.head_dim * dtype.itemsize

    def _latent_nbytes(self, layer: LayerPlan, tokens: int, dtype: torch.dtype) -> int:
        return sum(
            site_nbytes(basis, site, tokens, dtype, self.quantization)
            for site, basis in layer.sites
        )

    def bytes_per_token(self, dtype: torch.dtype = torch.bfloat16) -> float:
        """Bytes that one more token costs in the long run, no window having closed yet."""

        def latents(tokens: int) -> int:
            return sum(self._latent_nbytes(layer, tokens, dtype) for layer in self.layers)

        if self.quantization is None or self.quantization.layout == "static":
            return latents(1)
        run, start = self.quantization.group_size, self.quantization.residual
        return (latents(start + run) - latents(start)) / run

    def basis_nbytes(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """Constant bytes of the bases (and static ranges) while a model runs in `dtype`."""
        tensors = [t for layer in self.layers for _, b in layer.sites for t in _parts(b)]
        ranges = [layer.key_range for layer in self.layers if layer.key_range is not None]
        return dtype.itemsize * sum(t.numel() for t in tensors) + sum(r.nbytes for r in ranges)

    def digest(self) -> str:
        """SHA-256 of all that decides what a cache holds: bases, windows, rounding.

        Not of the provenance: the same bases found elsewhere or later have the same digest.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        payload = save_tensors(_tensors(self))
        windows = [layer.window for layer in self.layers]
        rest = [self.rotary, repr(self.quantization), windows, self.config_hash, self.recent]
        return hashlib.sha256(payload + json.dumps(rest).encode()).hexdigest()

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise `PlanError` unless the plan was made for this model, in whatever dtype it is."""
        model = unwrapped(model)
        self._check_architecture(model.config)
        if not agree(fingerprint(model), self.fingerprint):
            raise PlanError(
                f"the plan was made for other weights ({self.provenance.model}): if these are a "
                "fine-tuned version of them, use plan.transferred_to(model), or --other-weights on "
                "the command line"
            )

    def transferred_to(self, model: PreTrainedModel) -> CompressionPlan:
        """The same bases for a model of the same shape with other weights, a fine-tuned one, say.

        Raises
        ------
        PlanError
            If the model has another shape.
        """
        model = unwrapped(model)
        self._check_architecture(model.config)
        return replace(self, fingerprint=fingerprint(model))

    def _check_architecture(self, config: PretrainedConfig) -> None:
        text_config = config.get_text_config()
        if text_config.num_hidden_layers != len(self.layers):
            raise PlanError(
                f"the plan has {len(self.layers)} layers, the model {text_config.num_hidden_layers}"
            )
        if config_hash(config) != self.config_hash:
            raise PlanError(
                f"the plan was made for another model ({self.provenance.model}): its configuration "
                f"has hash {self.config_hash[:12]}, this one {config_hash(config)[:12]}"
            )

    def save(self, folder: str | Path) -> None:
        """Write ``plan.safetensors`` and ``plan.json`` into a folder, made if need be.

        Raises
        ------
        OutputError
            If the folder cannot be written to.
        """
        if not str(folder):
            raise OutputError("the name of the plan's folder is empty")
        payload = save_tensors(_tensors(self))
        description = json.dumps(_description(self, payload), indent=2, sort_keys=True) + "\n"
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / TENSORS, payload)
            write_whole(folder / DESCRIPTION, description.encode())
        except OSError as error:
            raise OutputError(f"cannot write plan to {folder}: {error.strerror}") from error

    @classmethod
    def load(cls, folder: str | Path) -> CompressionPlan:
        """Read what `save` wrote. Nothing in the files is executed.

        Raises
        ------
        PlanError
            If a file is missing, truncated or damaged, or says something impossible.
        """
        if not str(folder):
            raise PlanError("the name of the plan's folder is empty")
        folder = Path(folder)
        payload = _read(folder / TENSORS)
        try:
            description = json.loads(_read(folder / DESCRIPTION))
            tensors = load_tensors(payload)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise PlanError(f"{folder / DESCRIPTION} is damaged: {error}") from error
        except SafetensorError as error:
            raise PlanError(f"{folder / TENSORS} is damaged: {error}") from error
        try:
            return _plan(description, tensors, payload)
        except PlanError as error:
            raise PlanError(f"plan {folder}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, ManifoldKVError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise PlanError(f"{folder / DESCRIPTION} is damaged: {reason}") from error

    def card(self, repo_id: str) -> str:
        said = self.provenance
        metadata = ModelCardData(
            library_name="manifoldkv",
            base_model=said.model if REPOSITORY.fullmatch(said.model) else None,
            tags=["kv-cache", "compression", "low-rank"],
        )
        bits = "" if self.quantization is None else f", {self.quantization.bits}-bit latents"
        recent = f", the newest {self.recent} tokens exact" if self.recent else ""
        return CARD.read_text(encoding="utf-8").format(
            metadata=metadata.to_yaml(),
            name=repo_id.split("/")[-1],
            repository=json.dumps(repo_id),
            model=json.dumps(said.model),
            ratio=self.ratio,
            length=said.context,
            objective=said.method("objective"),
            solver=said.method("solver"),
            rest=f"{bits}{recent}",
            per_token=self.bytes_per_token(),
            rotary=self.rotary,
            said=said,
            ranks="\n".join(
                f"| {index} | {layer.key.rank} | {layer.value.rank} | {layer.key.head_dim} |"
                for index, layer in enumerate(self.layers)
            ),
        )


def check_layout(
    quantization: Quantization | None, index: int, window: int | None, *, recent: bool
) -> None:
    """Raise `PlanError` if a layer cannot hold latents in this layout."""
    if quantization is None or quantization.layout == "static":
        return
    if window is not None:
        raise PlanError(
            f"layer {index} has a sliding window, where KIVI's runs of tokens do not fit; use the "
            "static layout"
        )
    if recent:
        raise PlanError(
            "KIVI's layout keeps its own newest tokens exact and does not go together with a plan "
            "that does; use the static layout"
        )


def site_nbytes(
    basis: Basis, site: Site, tokens: int, dtype: torch.dtype, quantization: Quantization | None
) -> int:
    """Bytes of the latents of `tokens` cached tokens of one sequence at one site."""
    if quantization is None:
        return tokens * _numbers(basis) * dtype.itemsize
    runs = basis.grouping.heads // basis.grouping.width
    features = basis.rank * basis.grouping.width
    exact = quantization.exact_tokens(tokens)
    rounded = tokens - exact
    codes = rounded * quantization.code_bytes(features)
    if site == "value":
        ranges = rounded * quantization.groups(features)
    elif quantization.layout == "kivi":
        ranges = rounded // quantization.group_size * features
    else:
        ranges = 0  # static: constant bytes, part of the plan
    return runs * (codes + ranges * 2 * SCALE_BYTES + exact * features * dtype.itemsize)


def config_hash(config: PretrainedConfig) -> str:
    """SHA-256 of the shapes, kinds of layers and rotation that a configuration describes."""
    text_config = config.get_text_config()
    architecture = {name: getattr(text_config, name, None) for name in _ARCHITECTURE}
    return hashlib.sha256(json.dumps(architecture, sort_keys=True).encode()).hexdigest()


def plain(tensor: Tensor) -> Tensor:
    """As a plan keeps it."""
    return tensor.detach().cpu().contiguous()


def _numbers(basis: Basis) -> int:
    """Numbers cached per token."""
    return basis.rank * basis.grouping.heads


def _parts(basis: Basis) -> list[Tensor]:
    return [basis.down] if basis.orthonormal else [basis.down, basis.up]


def _check_numbers(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.float32, torch.float64):
        raise PlanError(f"{name}: dtype {tensor.dtype} is neither float32 nor float64")
    if not bool(tensor.isfinite().all()):
        raise PlanError(f"{name}: some numbers are not finite")


def _check_fingerprint(fingerprint: Tensor) -> None:
    shape, dtype = tuple(fingerprint.shape), fingerprint.dtype
    if fingerprint.ndim != 2 or 0 in shape or dtype != torch.float32:
        raise PlanError(f"a fingerprint is a matrix in float32, not {shape} in {dtype}")
    _check_numbers("fingerprint", fingerprint)


def _check_basis(name: str, basis: Basis) -> None:
    width, groups = basis.grouping.width, basis.grouping.groups
    for part in (basis.down, basis.up):
        _check_numbers(name, part)
        if part.ndim != 3 or part.shape != basis.down.shape:
            raise PlanError(f"{name}: a basis of shape {tuple(part.shape)}")
        size, columns = part.shape[1:]
        if part.shape[0] != groups or size % width or columns % width or not 0 < columns <= size:
            raise PlanError(
                f"{name}: shape {tuple(part.shape)} does not fit grouping {basis.grouping.name!r} "
                f"of {basis.grouping.heads} heads"
            )
    error = orthonormality_error(basis)
    if not error <= ORTHONORMAL_TOLERANCE:
        law = "PᵀP" if basis.orthonormal else "upᵀ down"
        raise PlanError(f"{name}: {law} is not the identity, largest difference {error:.1e}")


def _tensors(plan: CompressionPlan) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {"fingerprint": plan.fingerprint.contiguous()}
    for index, layer in enumerate(plan.layers):
        for site, basis in layer.sites:
            for part, tensor in zip(("down", "up"), _parts(basis), strict=False):
                tensors[f"layers.{index}.{site}.{part}"] = tensor.contiguous()
        if layer.key_range is not None:
            tensors[f"layers.{index}.key.range"] = layer.key_range.contiguous()
    return tensors


def _description(plan: CompressionPlan, payload: bytes) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "sha256": hashlib.sha256(payload).hexdigest(),
        "config_hash": plan.config_hash,
        "rotary": plan.rotary,
        "ratio": plan.ratio,
        "bytes_per_token": plan.bytes_per_token(),
        "recent": plan.recent,
        "provenance": asdict(plan.provenance),
        "quantization": None if plan.quantization is None else asdict(plan.quantization),
        "layers": [
            {
                "kv_heads": layer.key.grouping.heads,
                "head_dim": layer.key.head_dim,
                "window": layer.window,
                "key": _site_description(layer.key),
                "value": _site_description(layer.value),
            }
            for layer in plan.layers
        ],
    }


def _site_description(basis: Basis) -> dict[str, Any]:
    return {
        "grouping": basis.grouping.name,
        "rank": basis.rank,
        "orthonormal": basis.orthonormal,
    }


def _plan(
    description: dict[str, Any], tensors: dict[str, Tensor], payload: bytes
) -> CompressionPlan:
    if description["format"] != FORMAT:
        raise PlanError(
            f"format {description['format']!r} is not known; this version reads {FORMAT}"
        )
    if hashlib.sha256(payload).hexdigest() != description["sha256"]:
        raise PlanError(f"{TENSORS} is not the file that {DESCRIPTION} describes")
    if not isinstance(description["config_hash"], str):
        raise PlanError("config_hash is not a string")
    of_weights = tensors.pop("fingerprint")
    layers = tuple(
        LayerPlan(
            _basis(layer, "key", tensors, index),
            _basis(layer, "value", tensors, index),
            None if layer["window"] is None else _integer(layer, "window"),
            tensors.pop(f"layers.{index}.key.range", None),
        )
        for index, layer in enumerate(description["layers"])
    )
    if tensors:
        raise PlanError(f"{TENSORS} holds {sorted(tensors)[0]}, which nothing refers to")
    return CompressionPlan(
        layers,
        description["rotary"],
        description["config_hash"],
        of_weights,
        _provenance(description["provenance"]),
        _quantization(description["quantization"]),
        _integer(description, "recent"),
    )


def _provenance(said: dict[str, Any]) -> Provenance:
    numbers = ("sequences", "length", "context", "threads", "tuning_steps")
    found = Provenance(**said | {name: _integer(said, name) for name in numbers})
    for part in ("objective", "solver", "ranks"):
        found.method(part)
    return found


def _quantization(said: dict[str, Any] | None) -> Quantization | None:
    if said is None:
        return None
    numbers = {name: _integer(said, name) for name in ("bits", "group_size", "residual")}
    return Quantization(**said | numbers)


def _integer(said: dict[str, Any], name: str) -> int:
    value = said[name]
    if type(value) is not int or not 0 <= value <= LARGEST_INTEGER:
        raise PlanError(f"{name} {value!r} is not an integer between 0 and {LARGEST_INTEGER}")
    return value


def _basis(layer: dict[str, Any], site: Site, tensors: dict[str, Tensor], index: int) -> Basis:
    said = layer[site]
    down = tensors.pop(f"layers.{index}.{site}.down")
    up = down if said["orthonormal"] else tensors.pop(f"layers.{index}.{site}.up")
    basis = Basis(down, up, HeadGrouping(said["grouping"], _integer(layer, "kv_heads")))
    _check_basis(f"layer {index} {site}", basis)
    if (basis.rank, basis.head_dim) != (said["rank"], layer["head_dim"]):
        raise PlanError(
            f"layer {index} {site}: rank {basis.rank} of {basis.head_dim} is stored, rank "
            f"{said['rank']} of {layer['head_dim']} is described"
        )
    return basis


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}") from error
