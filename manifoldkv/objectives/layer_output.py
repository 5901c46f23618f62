"""Decoder-layer output error, the paper's own objective (Eq. dkv_delta)."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from manifoldkv.activations import Batch, LayerActivations, Rotary, Site
from manifoldkv.basis import Basis, HeadGrouping
from manifoldkv.decoder import (
    attention_output,
    layer_output,
    mixed_values,
    project_mixed_values,
    select_head_rows,
    whole,
)
from manifoldkv.objectives.base import Objective, Problem, register_objective
from manifoldkv.objectives.eigen_attention import EigenAttention
from manifoldkv.placement import Placement


class LayerOutputProblem(Problem):
    """Minimise Δ: the mean over sequences of ||f(x) - f̃(x)||_F / ||f(x)||_F.

    Keys are solved with values exact and the other way round. On some query rows only, the error
    of the rows is scaled to the whole sequence and divided by the norm of the whole output.
    """

    def loss(self, basis: Basis, batch: Batch | None = None) -> Tensor:
        batch = batch or whole(self.activations)
        if self.site == "key":
            attention = attention_output(
                self.activations, key_basis=basis, rotary=self.rotary, batch=batch
            )
        else:
            mixed = select_head_rows(self._mixed_values, batch).to(self.activations.device)
            attention = project_mixed_values(mixed, basis)
        output = layer_output(self.activations, attention, batch)
        exact = self.activations.outputs_of(batch)
        error = torch.linalg.vector_norm(output - exact, dim=(1, 2))  # (b,)
        rows = self.activations.length if batch.rows is None else len(batch.rows)
        scale = (self.activations.length / rows) ** 0.5
        return (scale * error / self._output_norms[batch.sequences]).mean()

    def initial(self, rank: int) -> Basis:
        """EigenAttention's basis."""
        return self._start.initial(rank)

    @cached_property
    def _start(self) -> Problem:
        return EigenAttention().problem(self.activations, self.site, self.grouping, self.rotary)

    @cached_property
    def _output_norms(self) -> Tensor:
        one_by_one = whole(self.activations).sequences.split(1)
        outputs = (self.activations.outputs_of(Batch(one)) for one in one_by_one)
        return torch.stack([torch.linalg.vector_norm(x) for x in outputs])  # (S,)

    @cached_property
    def _mixed_values(self) -> Tensor:
        """Constant while keys are exact: computed once, (S, H_q, n, width·d)."""
        known = self.activations
        features = self.grouping.width * known.head_dim
        shape = (known.sequences, known.query_heads, known.length, features)
        nbytes = math.prod(shape) * known.dtype.itemsize
        mixed = Placement(nbytes, known.device, known.folder).empty(shape, known.dtype)
        with torch.no_grad():
            for sequence in whole(known).sequences.split(1):
                of_one = mixed_values(known, self.grouping, Batch(sequence))
                mixed[sequence] = of_one.to(mixed.device)
        return mixed


@register_objective("layer-output")
class LayerOutput(Objective):
    """Error at the output of the decoder layer; iterative solvers only."""

    def has_closed_form(self, site: Site, grouping: str | int) -> tuple[bool, str]:
        return False, "layer-output has no closed form: the layer is not linear in its bases"

    def problem(
        self,
        activations: LayerActivations,
        site: Site,
        grouping: HeadGrouping,
        rotary: Rotary = "pre",
    ) -> LayerOutputProblem:
        return LayerOutputProblem(activations, site, grouping, rotary)
