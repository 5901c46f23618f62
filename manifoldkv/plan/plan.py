"""The compression plan: bases of every layer, and all that is needed to use them again."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from huggingface_hub import ModelCardData
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from manifoldkv.basis import Rotary, Site, check_rotary
from manifoldkv.coding.entropy import TOKEN_ID_BYTES, frame_bytes
from manifoldkv.coding.integers import Quantization, check_layout
from manifoldkv.errors import PlanError
from manifoldkv.models.fingerprint import agree, fingerprint
from manifoldkv.models.support import unwrapped
from manifoldkv.plan import files
from manifoldkv.plan.files import PlanContents
from manifoldkv.plan.hub import OnHub
from manifoldkv.plan.layer import (
    LayerPlan,
    check_basis,
    check_coding,
    check_elements,
    check_layers,
    parts,
    site_nbytes,
)
from manifoldkv.plan.provenance import Provenance
from manifoldkv.text.tokens import positions

_ARCHITECTURE = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rope_parameters", "layer_types", "sliding_window"),
)


REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
"""What a model on the Hub is called; a folder of one's own is not named on a card."""
CARD = Path(__file__).with_name("card.md")


@dataclass(frozen=True, eq=False, repr=False)
class CompressionPlan(OnHub):
    """Bases for every layer of a model.

    Two plans are equal if their `digest` is: if caches made of them hold the same. Where they come
    from (`provenance`) plays no part, so that a plan found again on another day equals the first.

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
    sinks : int
        The first tokens of every sequence, whose keys and values are cached as they are beside
        their latents, in layers without a sliding window. Many models attend to them whatever they
        are, and their keys, far larger than others, suffer most from rounding. Set it before
        `quantize`, whose ranges then leave these tokens out.

    Raises
    ------
    PlanError
        If a tensor has the wrong shape or dtype or an element that is not finite, if
        ``upᵀ down`` is not the identity, if quantisation lacks its ranges, or if `sinks` is
        negative.
    """

    FILES = (files.TENSORS, files.DESCRIPTION)

    layers: tuple[LayerPlan, ...]
    rotary: Rotary
    config_hash: str
    fingerprint: Tensor
    provenance: Provenance
    quantization: Quantization | None = None
    sinks: int = 0

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
            f"  keys {self.rotary}-rotation, first {self.sinks} tokens uncompressed{rounded},\n"
            f"  {provenance.origin})"
        )

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("a plan needs at least one layer")
        if self.sinks < 0:
            raise PlanError(f"sinks must be >= 0, got {self.sinks}")
        provenance = self.provenance
        if provenance.context < 1 or (provenance.sequences and provenance.length < 1):
            raise PlanError("calibration sequences and the context have one token at least")
        _check_fingerprint(self.fingerprint)
        check_rotary(self.rotary)
        for index, layer in enumerate(self.layers):
            for site, basis in layer.sites:
                check_basis(f"layer {index} {site}", basis)
            if layer.key.head_dim != layer.value.head_dim:
                raise PlanError(f"layer {index}: keys and values differ in head_dim")
            if layer.key.grouping.heads != layer.value.grouping.heads:
                raise PlanError(f"layer {index}: keys and values differ in KV heads")
            if layer.window is not None and layer.window < 2:
                raise PlanError(f"layer {index}: a window of {layer.window} tokens keeps nothing")
            self._check_quantization(index, layer)
            self._check_codings(index, layer)

    def _check_codings(self, index: int, layer: LayerPlan) -> None:
        for site, basis in layer.sites:
            coding, name = layer.coding(site), f"layer {index} {site}"
            if coding is None:
                continue
            if self.quantization is not None:
                raise PlanError(f"{name}: coded latents cannot be quantised again")
            if self.rotary == "post":
                raise PlanError(f"{name}: coded latents need keys that are stored before rotation")
            check_coding(name, basis, coding)
            if coding.prediction is not None:
                self._check_prediction(name, index, site, coding.prediction)
        if self.stored and (len(layer.entropy_codings) < 2 or layer.window is not None):
            raise PlanError(
                f"layer {index}: keys and values of all layers, none with a sliding window, are "
                "stored as symbols, or none"
            )

    def _check_prediction(self, name: str, index: int, site: Site, prediction: Tensor) -> None:
        features = _features(self.layers[index])
        own = features if site == "value" else 0
        possible = [own + 2 * features * n for n in range(self.layers_below(index) + 1)]
        if not len(prediction) or len(prediction) not in possible:
            raise PlanError(
                f"{name}: {len(prediction)} numbers predict, which are not whole layers below"
            )

    def layers_below(self, index: int) -> int:
        """Return how many layers right below a layer hold the same tokens, of as many features."""
        layer, count = self.layers[index], 0
        for below in reversed(self.layers[:index]):
            if (below.window, _features(below)) != (layer.window, _features(layer)):
                break
            count += 1
        return count

    @property
    def predicted(self) -> bool:
        """Return whether latents are those of the residuals of a prediction."""
        return any(True for _ in self._predictions())

    @property
    def prediction_depth(self) -> int:
        """Return from how many layers below tokens are predicted, at most."""
        features = _features(self.layers[0])
        return max((len(p) // (2 * features) for p in self._predictions()), default=0)

    def _predictions(self) -> Iterator[Tensor]:
        for layer in self.layers:
            for site, _ in layer.sites:
                coding = layer.coding(site)
                if coding is not None and coding.prediction is not None:
                    yield coding.prediction

    def _check_quantization(self, index: int, layer: LayerPlan) -> None:
        quantization = self.quantization
        check_layout(quantization, index, layer.window)
        if quantization is None or quantization.layout != "static":
            expected = None
        else:
            basis = layer.key
            groups = basis.grouping.heads // basis.grouping.width
            expected = (groups, quantization.groups(basis.rank * basis.grouping.width), 2)
        found = None if layer.key_range is None else tuple(layer.key_range.shape)
        if found != expected:
            raise PlanError(f"layer {index}: key ranges are {found}, must be {expected}")
        if layer.key_range is not None:
            check_elements(f"layer {index} key ranges", layer.key_range)
            if not bool((layer.key_range[..., 0] <= layer.key_range[..., 1]).all()):
                raise PlanError(f"layer {index}: a key range ends before it begins")

    @property
    def ratio(self) -> float:
        """Return the cached elements over those of the uncompressed model (Eq. cache ratio).

        At the context length that the ratio was asked for. With tokens that stay exact, or with
        sliding windows, another length has another ratio (`ratio_at`).
        """
        return self.ratio_at(self.provenance.context)

    @property
    def coded(self) -> bool:
        """Return whether latents have bits of their own."""
        return any(layer.codings for layer in self.layers)

    @property
    def stored(self) -> bool:
        """Return whether latents become symbols of a `Codec`, which no attention reads."""
        return any(layer.entropy_codings for layer in self.layers)

    def check_attended(self) -> None:
        """Raise `PlanError` if no model can run on the latents."""
        if self.stored:
            raise PlanError(
                "the plan was made by recipe stored, for caches that are stored and not attended "
                "to: give it to manifoldkv.Codec"
            )

    def ratio_at(self, tokens: int) -> float:
        """Return the cached elements of a text of some tokens over the uncompressed model's.

        Where latents have bits of their own, or are stored as symbols, it is bytes that are
        compared, in 16-bit numbers.
        """
        full = sum(layer.full_elements(tokens) for layer in self.layers)
        if self.coded or self.stored:
            return self.nbytes(tokens) / (2 * full)
        return sum(layer.elements(tokens, self.sinks) for layer in self.layers) / full

    def nbytes(self, tokens: int, *, batch: int = 1, dtype: torch.dtype = torch.bfloat16) -> int:
        """Return what `CompressedCache.nbytes` is after `tokens` tokens of `batch` sequences.

        It counts latents as stored, their scales and offsets, and the tokens that stay exact;
        `dtype` is the model's. Of a plan of recipe stored it is what the blob of a `Codec` takes
        with everything in it, if the symbols are as frequent as on the calibration text.
        """
        layers = sum(self._layer_nbytes(layer, tokens, dtype) for layer in self.layers)
        if not self.stored:
            return batch * layers
        return batch * (layers + TOKEN_ID_BYTES * tokens) + frame_bytes(tokens, len(self.layers))

    def _layer_nbytes(self, layer: LayerPlan, tokens: int, dtype: torch.dtype) -> int:
        sinks = min(tokens, layer.sink_tokens(self.sinks))
        coded = layer.cached_tokens(tokens) - (sinks if self.stored else 0)
        return self._latent_nbytes(layer, coded, dtype) + sinks * 2 * _features(layer) * (
            dtype.itemsize
        )

    def _latent_nbytes(self, layer: LayerPlan, tokens: int, dtype: torch.dtype) -> int:
        return sum(
            site_nbytes(basis, site, tokens, dtype, self.quantization, layer.coding(site))
            for site, basis in layer.sites
        )

    def bytes_per_token(self, dtype: torch.dtype = torch.bfloat16) -> float:
        """Return the bytes that one more token takes in the long run, before a window closes."""

        def latents(tokens: int) -> int:
            return sum(self._latent_nbytes(layer, tokens, dtype) for layer in self.layers)

        if self.stored:
            return latents(1 << 10) / (1 << 10) + TOKEN_ID_BYTES
        if self.quantization is None or self.quantization.layout != "kivi":
            return latents(1)
        run, start = self.quantization.group_size, self.quantization.residual
        return (latents(start + run) - latents(start)) / run

    def basis_nbytes(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """Return the constant bytes of all that is not tokens, while a model runs in `dtype`.

        Bases and predictions are in this dtype; ranges, steps, means and gains in their own.
        """
        tensors = [t for layer in self.layers for _, b in layer.sites for t in parts(b)]
        tensors += self._predictions()
        constants = [layer.key_range for layer in self.layers if layer.key_range is not None]
        for coding in (layer.coding(site) for layer in self.layers for site, _ in layer.sites):
            held = {} if coding is None else coding.tensors()
            constants += [t for name, t in held.items() if name != "prediction"]
        numbers = sum(tensor.numel() for tensor in tensors)
        return dtype.itemsize * numbers + sum(tensor.nbytes for tensor in constants)

    def digest(self) -> str:
        """Return the SHA-256 of all that decides what a cache holds: bases, windows, rounding.

        The provenance plays no part: the same bases found elsewhere or later have the same digest.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        payload = files.payload_of(self._contents)
        windows = [layer.window for layer in self.layers]
        rest = [self.rotary, repr(self.quantization), windows, self.config_hash, self.sinks]
        return hashlib.sha256(payload + json.dumps(rest).encode()).hexdigest()

    def model_digest(self) -> bytes:
        """Return 32 bytes that tell the model that the plan is for from others."""
        weights = self.fingerprint.contiguous().numpy().tobytes()
        return hashlib.sha256(self.config_hash.encode() + weights).digest()

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise `PlanError` unless the plan was made for this model, in whatever dtype it is.

        Windows, KV heads and head sizes are compared layer by layer; sinks are at most the
        positions of the model.
        """
        model = unwrapped(model)
        self._check_architecture(model)
        if not agree(fingerprint(model), self.fingerprint):
            raise PlanError(
                f"the plan was made for other weights ({self.provenance.model}): if these are a "
                "fine-tuned version of them, use plan.transferred_to(model), or --other-weights on "
                "the command line"
            )

    def transferred_to(self, model: PreTrainedModel) -> CompressionPlan:
        """Return the plan for a model of the same shape with other weights, a fine-tuned one, say.

        Raises
        ------
        PlanError
            If the model has another shape.
        """
        model = unwrapped(model)
        self._check_architecture(model)
        return replace(self, fingerprint=fingerprint(model))

    def _check_architecture(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        if config.num_hidden_layers != len(self.layers):
            raise PlanError(
                f"the plan has {len(self.layers)} layers, the model {config.num_hidden_layers}"
            )
        if config_hash(config) != self.config_hash:
            raise PlanError(
                f"the plan was made for another model ({self.provenance.model}): its configuration "
                f"has hash {self.config_hash[:12]}, this one {config_hash(config)[:12]}"
            )
        check_layers(self.layers, model)
        if self.sinks > positions(model):
            raise PlanError(
                f"sinks must be at most {positions(model)}, the positions of the model, got "
                f"{self.sinks}"
            )

    def save(self, folder: str | Path) -> None:
        """Write ``plan.safetensors`` and ``plan.json`` into a folder, made if need be.

        Both have a SHA-256 in ``plan.json``. To change a field, use `dataclasses.replace` and save
        again: `load` refuses files that were edited.

        Raises
        ------
        RunError
            If the folder cannot be written to.
        """
        summary = {"ratio": self.ratio, "bytes_per_token": self.bytes_per_token()}
        files.write(folder, self._contents, summary)

    @classmethod
    def load(cls, folder: str | Path) -> CompressionPlan:
        """Return the plan that `save` wrote. Nothing in the files is executed.

        Raises
        ------
        PlanError
            If a file is missing, truncated, damaged or edited, has the format of another version,
            or describes something impossible.
        """
        contents = files.read(folder)
        with files.named(folder):
            return cls(*contents)

    @property
    def _contents(self) -> PlanContents:
        return PlanContents(*(getattr(self, name) for name in PlanContents._fields))

    def card(self, repo_id: str) -> str:
        provenance = self.provenance
        metadata = ModelCardData(
            library_name="manifoldkv",
            base_model=provenance.model if REPOSITORY.fullmatch(provenance.model) else None,
            tags=["kv-cache", "compression", "low-rank"],
        )
        bits = "" if self.quantization is None else f", {self.quantization.bits}-bit latents"
        sinks = f", the first {self.sinks} tokens uncompressed" if self.sinks else ""
        return CARD.read_text(encoding="utf-8").format(
            metadata=metadata.to_yaml(),
            name=repo_id.split("/")[-1],
            repository=json.dumps(repo_id),
            model=json.dumps(provenance.model),
            ratio=self.ratio,
            length=provenance.context,
            rest=f"{bits}{sinks}",
            per_token=self.bytes_per_token(),
            rotary=self.rotary,
            provenance=provenance,
            ranks="\n".join(
                f"| {index} | {layer.key.rank} | {layer.value.rank} | {layer.key.head_dim} |"
                for index, layer in enumerate(self.layers)
            ),
        )


def config_hash(config: PretrainedConfig) -> str:
    """Return the SHA-256 of the shapes, kinds of layers and rotation of a configuration."""
    text_config = config.get_text_config()
    architecture = {name: getattr(text_config, name, None) for name in _ARCHITECTURE}
    return hashlib.sha256(json.dumps(architecture, sort_keys=True).encode()).hexdigest()


def _features(layer: LayerPlan) -> int:
    """Return the elements of the keys of a token, all heads of a layer together."""
    return layer.key.grouping.heads * layer.key.head_dim


def _check_fingerprint(fingerprint: Tensor) -> None:
    shape, dtype = tuple(fingerprint.shape), fingerprint.dtype
    if fingerprint.ndim != 2 or 0 in shape or dtype != torch.float32:
        raise PlanError(f"a fingerprint is a matrix in float32, not {shape} in {dtype}")
    check_elements("fingerprint", fingerprint)
