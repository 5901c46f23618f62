"""The compression plan: bases of every layer, and all that is needed to use them again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from manifoldkv.core.basis import SITES, Basis, Rotary, check_rotary
from manifoldkv.core.errors import PlanError
from manifoldkv.plan import files
from manifoldkv.plan.card import card_of
from manifoldkv.plan.composition import sources
from manifoldkv.plan.compute import AttentionShape, check_shape, relative_compute
from manifoldkv.plan.files import PlanContents
from manifoldkv.plan.formats.entropy import TOKEN_ID_BYTES, frame_bytes
from manifoldkv.plan.hub import OnHub
from manifoldkv.plan.layer import LayerPlan, check_layers
from manifoldkv.plan.model import ModelView, agree, check_view
from manifoldkv.plan.predictor import PredictorContext, layers_below
from manifoldkv.plan.provenance import Provenance
from manifoldkv.plan.site import SitePlan, check_elements
from manifoldkv.plan.truncation import truncated_layers


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
    shape : AttentionShape
        Of the model's attention.
    provenance : Provenance
        Where the bases come from.
    sinks : int
        Number of first tokens of every sequence that are kept uncompressed beside their latents,
        in layers without a sliding window. Many models attend to them at every step, and their
        keys, far larger than others, lose most by rounding. Set it before `quantize`, whose ranges
        then leave these tokens out.

    Raises
    ------
    PlanError
        If a tensor has the wrong shape or dtype or an element that is not finite, if
        ``upᵀ down`` is not the identity, if quantizers or predictors do not fit the layers, or if
        `sinks` is negative.
    """

    FILES = (files.TENSORS, files.DESCRIPTION)

    layers: tuple[LayerPlan, ...]
    rotary: Rotary
    config_hash: str
    fingerprint: Tensor
    shape: AttentionShape
    provenance: Provenance
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
        return (
            f"CompressionPlan(for {provenance.model}: ratio {self.ratio:.4g} at "
            f"{provenance.context} tokens,\n"
            f"  {len(self.layers)} layers, {ranks} of {self.layers[0].key.head_dim},\n"
            f"  keys {self.rotary}-rotation, first {self.sinks} tokens uncompressed,\n"
            f"  latents: {self.formats}, {self.compute:.3g} times the multiplications of stock "
            "attention,\n"
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
        check_shape(self.shape, self.layers)
        for index, layer in enumerate(self.layers):
            layer.check(f"layer {index}")
            self._check_sites(index, layer)
        if len({planned.quantizer.attended for planned in self._sites}) > 1:
            raise PlanError("the latents of all sites must be entropy-coded, or those of no site")
        if self.predictor_depth is not None and not all(
            planned.quantizer.variable_width for planned in self._sites
        ):
            raise PlanError("a plan with predictors needs coded latents at all sites")

    def _check_sites(self, index: int, layer: LayerPlan) -> None:
        for site, planned in layer.sites:
            name = f"layer {index} {site}"
            if self.rotary == "post" and not (planned.mean is None and planned.predictor is None):
                raise PlanError(f"{name}: means and predictors need keys stored before rotation")
            if planned.predictor is not None:
                planned.predictor.check(name, site, layers_below(self._token_kinds, index))

    @property
    def _sites(self) -> Iterator[SitePlan]:
        return (planned for layer in self.layers for _, planned in layer.sites)

    @property
    def _token_kinds(self) -> list[tuple[int | None, int]]:
        """Return window and features of every layer, those of predictors and their inputs."""
        return [(layer.window, layer.key.features) for layer in self.layers]

    @property
    def bases(self) -> dict[int, tuple[Basis, Basis]]:
        """Return the bases of keys and values by layer, as `diagnose` takes them."""
        pairs = ((layer.key.basis, layer.value.basis) for layer in self.layers)
        return dict(enumerate(pairs))

    @cached_property
    def predictor_depth(self) -> int | None:
        """Return how many layers below are inputs of predictors, at most; None without any."""
        depths = [s.predictor.depth for s in self._sites if s.predictor is not None]
        return max(depths, default=None)

    @cached_property
    def reach(self) -> int:
        """Return how many layers below hold latents that a reconstruction depends on, at most."""
        return max(
            below
            for index in range(len(self.layers))
            for site in SITES
            for below, _ in sources(self.layers, index, site)
        )

    def predictor_context(self) -> PredictorContext:
        """Return an empty context of the predictors of the plan."""
        return PredictorContext(self.predictor_depth, self._token_kinds)

    @property
    def ratio(self) -> float:
        """Return the cached elements over those of the uncompressed model (Eq. cache ratio).

        At the context length that the ratio was asked for. With tokens that stay exact, or with
        sliding windows, another length has another ratio (`ratio_at`).
        """
        return self.ratio_at(self.provenance.context)

    @cached_property
    def compute(self) -> float:
        """Return the multiplications of a decode step over those of stock attention.

        Of every cached token of a text of the provenance's context, in all layers: scales, maps of
        latents to keys, predictions, rotation, scores and mixtures. A plan of recipe stored counts
        as one that a model ran on.
        """
        return relative_compute(self.layers, self.shape, self.rotary, self.provenance.context)

    @property
    def variable_width(self) -> bool:
        """Return whether latents differ in bits."""
        return any(planned.quantizer.variable_width for planned in self._sites)

    @property
    def rank_only(self) -> bool:
        """Return whether the bases are all of the plan: latents are neither rounded nor coded."""
        return all(planned.rank_only for planned in self._sites)

    @property
    def attended(self) -> bool:
        """Return whether a model can run on the latents."""
        return all(planned.quantizer.attended for planned in self._sites)

    @property
    def formats(self) -> str:
        """Return the formats of latents in words, such as ``"mixed widths"``."""
        keys = ", ".join(dict.fromkeys(layer.key.quantizer.format for layer in self.layers))
        values = ", ".join(dict.fromkeys(layer.value.quantizer.format for layer in self.layers))
        return keys if keys == values else f"{keys} (keys), {values} (values)"

    def check_attended(self) -> None:
        """Raise `PlanError` if no model can run on the latents."""
        if not self.attended:
            raise PlanError(
                "the plan was made by recipe stored, for caches that are stored and not attended "
                "to: give it to manifoldkv.Codec"
            )

    def ratio_at(self, tokens: int) -> float:
        """Return the cached elements of a text of some tokens over the uncompressed model's.

        Where latents differ in bits it is bytes that are compared, in 16-bit numbers.
        """
        full = sum(layer.full_elements(tokens) for layer in self.layers)
        if self.variable_width:
            return self.nbytes(tokens) / (2 * full)
        return sum(layer.elements(tokens, self.sinks) for layer in self.layers) / full

    def nbytes(self, tokens: int, *, batch: int = 1, dtype: torch.dtype = torch.bfloat16) -> int:
        """Return `CompressedCache.nbytes` after `tokens` tokens of `batch` sequences.

        It counts latents as stored, their scales and offsets, and uncompressed tokens; `dtype` is
        the model's. Of a plan of recipe stored it is the size of a stored cache with everything in
        it, if the symbols are as frequent as on the calibration text.
        """
        layers = sum(self._layer_nbytes(layer, tokens, dtype) for layer in self.layers)
        if self.attended:
            return batch * layers
        return batch * (layers + TOKEN_ID_BYTES * tokens) + frame_bytes(tokens, batch)

    def _layer_nbytes(self, layer: LayerPlan, tokens: int, dtype: torch.dtype) -> int:
        sinks = min(tokens, layer.sink_tokens(self.sinks))
        # Sink tokens have latents too in a cache that is attended to.
        latents = layer.cached_tokens(tokens) - (0 if self.attended else sinks)
        of_sites = sum(planned.nbytes(latents, dtype) for _, planned in layer.sites)
        return of_sites + sinks * 2 * layer.key.features * dtype.itemsize

    def bytes_per_token(self, dtype: torch.dtype = torch.bfloat16) -> float:
        """Return the bytes that one more token takes in the long run, before a window closes."""
        latents = sum(planned.bytes_per_token(dtype) for planned in self._sites)
        return latents if self.attended else latents + TOKEN_ID_BYTES

    def basis_nbytes(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """Return the bytes of the plan's tensors, with bases and predictors in `dtype`.

        In float32 they are those of the plan in memory. What attention holds besides, while a model
        runs, depends on the dtype of the model and on the kernels: ``new_cache.constant_nbytes()``
        in a `compressed` block.
        """
        total = 0
        for planned in self._sites:
            for name, tensor in planned.tensors().items():
                in_dtype = name in ("down", "up", "predictor", "expansion")
                total += tensor.numel() * dtype.itemsize if in_dtype else tensor.nbytes
        return total

    def digest(self) -> str:
        """Return the SHA-256 of bases, quantizers, predictors and windows.

        The provenance plays no part: the same bases found elsewhere or later have the same digest.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        payload = files.payload_of(self._contents)
        layers = [files.layer_description(layer) for layer in self.layers]
        rest = [self.rotary, layers, self.config_hash, asdict(self.shape), self.sinks]
        return hashlib.sha256(payload + json.dumps(rest).encode()).hexdigest()

    def model_digest(self) -> bytes:
        """Return 32 bytes that tell the model that the plan is for from others."""
        weights = self.fingerprint.contiguous().numpy().tobytes()
        return hashlib.sha256(self.config_hash.encode() + weights).digest()

    def check_model(self, model: ModelView) -> None:
        """Raise `PlanError` unless the plan was made for this model, in any dtype.

        Windows, KV heads and head sizes are compared layer by layer; sinks are at most the
        positions of the model.

        Parameters
        ----------
        model : ModelView
            ``manifoldkv.models.decoder.Decoder.of(model)``.
        """
        self._check_architecture(model)
        if not agree(model.fingerprint(), self.fingerprint):
            raise PlanError(
                f"the plan was made for other weights ({self.provenance.model}): if these are a "
                "fine-tuned version of them, use plan.transferred_to(Decoder.of(model)), or "
                "--other-weights on the command line"
            )

    def transferred_to(self, model: ModelView) -> CompressionPlan:
        """Return the plan for other weights of the same shape, fine-tuned ones for instance.

        Parameters
        ----------
        model : ModelView
            ``manifoldkv.models.decoder.Decoder.of(model)``.

        Raises
        ------
        PlanError
            If the model has another shape.
        """
        self._check_architecture(model)
        return replace(self, fingerprint=model.fingerprint())

    def truncated(self, ratio: float) -> CompressionPlan:
        """Return a smaller plan of the leading columns of all bases; nothing is solved again.

        All ranks are scaled by one factor, and the plan's ratio is at most `ratio`. Uncompressed
        sites are kept. Nested bases of solver ``flag`` are trained for this; the columns of closed
        forms are sorted by the energy of their latents, and those of other solvers are in no order.

        Parameters
        ----------
        ratio : float
            Largest ratio, of the provenance's context length.

        Raises
        ------
        ArgumentError
            If the ratio is larger than that of the plan, or smaller than ranks of 1 allow.
        PlanError
            If latents are quantised or coded.
        """
        if not self.rank_only:
            raise PlanError(f"only plans of bases alone can be truncated, not of {self.formats}")
        layers = truncated_layers(self.layers, self.sinks, self.provenance.context, ratio)
        provenance = replace(self.provenance, requested_ratio=ratio)
        return replace(self, layers=layers, provenance=provenance)

    def _check_architecture(self, model: ModelView) -> None:
        check_view(model)
        config = model.config
        if config.num_hidden_layers != len(self.layers):
            raise PlanError(
                f"the plan has {len(self.layers)} layers, the model {config.num_hidden_layers}"
            )
        if model.config_hash != self.config_hash:
            raise PlanError(
                f"the plan was made for another model ({self.provenance.model}): its configuration "
                f"has hash {self.config_hash[:12]}, this one {model.config_hash[:12]}"
            )
        check_layers(self.layers, model)
        if self.shape != AttentionShape(model.query_heads, model.rotary_dim):
            raise PlanError(
                f"the plan was made for {self.shape}, the model has {model.query_heads} query "
                f"heads and rotates {model.rotary_dim} features of a head"
            )
        positions = config.max_position_embeddings
        if self.sinks > positions:
            raise PlanError(
                f"sinks must be at most {positions}, the positions of the model, got {self.sinks}"
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
        return card_of(self, repo_id)


def _check_fingerprint(fingerprint: Tensor) -> None:
    shape, dtype = tuple(fingerprint.shape), fingerprint.dtype
    if fingerprint.ndim != 2 or 0 in shape or dtype != torch.float32:
        raise PlanError(f"a fingerprint is a matrix in float32, not {shape} in {dtype}")
    check_elements("fingerprint", fingerprint)
