"""Decoder-layer output error, the paper's objective (Eq. dkv_delta)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manifoldkv.core.basis import Basis, Site
from manifoldkv.core.errors import ArgumentError
from manifoldkv.learn.objectives.base import Objective, Problem, register_objective
from manifoldkv.learn.objectives.eigen_attention import EigenAttention
from manifoldkv.statistics.layer import Batch
from manifoldkv.statistics.outputs import (
    attention_output,
    every_sequence,
    layer_output,
    mixed_values,
    project_mixed_values,
    select_head_rows,
)
from manifoldkv.statistics.placement import Placement
from manifoldkv.statistics.statistics import Statistics


@register_objective("layer-output")
@dataclass(frozen=True)
class LayerOutput(Objective):
    """Error at the output of the decoder layer; iterative solvers only.

    Minimises Δ, the mean over sequences of ||f(x) - f̃(x)||_F / ||f(x)||_F, for keys with
    uncompressed values and vice versa. The error of sampled query rows is scaled to the sequence
    and divided by the norm of the whole output. The start is EigenAttention's basis.

    The metric is that of Δ² to second order: the Gauss-Newton matrix JᵀJ of the layer's output,
    relative to its squared norm. It is estimated from products of J with random signs.
    """

    has_metric: ClassVar[bool] = True
    needs_jacobian: ClassVar[bool] = True

    def metric(self, statistics: Statistics, layer: int, site: Site) -> Tensor:
        jacobian = statistics.layers[layer].of(site).jacobian
        if jacobian is None:
            raise ArgumentError(
                "layer-output needs statistics with Jacobians: calibrate(…, jacobian=True)"
            )
        return jacobian

    def loss(self, problem: Problem, basis: Basis, batch: Batch | None = None) -> Tensor:
        activations = problem.activations
        batch = batch or every_sequence(activations)
        if problem.site == "key":
            attention = attention_output(
                activations, key_basis=basis, rotary=problem.rotary, batch=batch
            )
        else:
            mixed = select_head_rows(problem.once(_mixed_values), batch).to(activations.device)
            attention = project_mixed_values(mixed, basis)
        output = layer_output(activations, attention, batch)
        exact = activations.outputs_of(batch)
        error = torch.linalg.vector_norm(output - exact, dim=(1, 2))  # (b,)
        length = activations.length
        rows = length if batch.rows is None else len(batch.rows)
        scale = (length / rows) ** 0.5
        return (scale * error / problem.once(_output_norms)[batch.sequences]).mean()

    def has_closed_form(self, site: Site, grouping: str | int) -> tuple[bool, str]:
        return False, "layer-output has no closed form: the layer is not linear in its bases"

    def initial(self, problem: Problem, rank: int) -> Basis:
        return problem.once(_eigen_problem).initial(rank)


def _eigen_problem(problem: Problem) -> Problem:
    return EigenAttention().problem(
        problem.activations, problem.site, problem.grouping, problem.rotary
    )


def _output_norms(problem: Problem) -> Tensor:
    """Return the norm of the layer's output by sequence, (S,)."""
    activations = problem.activations
    one_by_one = every_sequence(activations).sequences.split(1)
    norms = [torch.linalg.vector_norm(activations.outputs_of(Batch(one))) for one in one_by_one]
    return torch.stack(norms)


def _mixed_values(problem: Problem) -> Tensor:
    """Return attention-weighted values (S, H_q, n, width·d), constant for uncompressed keys."""
    activations, dtype = problem.activations, problem.activations.dtype
    features = problem.grouping.width * activations.head_dim
    shape = (activations.sequences, activations.query_heads, activations.length, features)
    nbytes = math.prod(shape) * dtype.itemsize
    mixed = Placement(nbytes, activations.device, activations.folder).empty(shape, dtype)
    with torch.no_grad():
        for sequence in every_sequence(activations).sequences.split(1):
            mixed[sequence] = mixed_values(activations, problem.grouping, Batch(sequence)).to(mixed)
    return mixed
