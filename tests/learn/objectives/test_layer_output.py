"""The layer-output error: its batches, and what it measures."""

import pytest
import torch

from manifoldkv.core.basis import HeadGrouping
from manifoldkv.evaluate.diagnostics import layer_errors
from manifoldkv.learn.objectives.layer_output import LayerOutput
from manifoldkv.statistics.layer import Batch
from manifoldkv.testing import random_basis, tiny_activations

SITES = [("key", "shared"), ("key", "all"), ("value", 1), ("value", "all"), ("value", "shared")]


@pytest.mark.parametrize(("site", "grouping"), SITES)
def test_loss_is_the_error_the_diagnostics_measure(site, grouping):
    activations = tiny_activations()
    basis = random_basis(3, HeadGrouping(grouping, 2), 0)
    problem = LayerOutput().problem(activations, site, basis.grouping)
    errors = layer_errors(
        activations, basis if site == "key" else None, basis if site == "value" else None
    )
    assert problem.loss(basis).item() == pytest.approx(errors.layer_output_error, rel=1e-5)


@pytest.mark.parametrize(("site", "grouping"), SITES)
def test_batch_of_sequences_is_the_mean_over_them(site, grouping):
    basis = random_basis(3, HeadGrouping(grouping, 2), 0)
    problem = LayerOutput().problem(tiny_activations(), site, basis.grouping)
    apart = [problem.loss(basis, Batch(torch.tensor([i]))).item() for i in (1, 4)]
    together = problem.loss(basis, Batch(torch.tensor([1, 4]))).item()
    assert together == pytest.approx(sum(apart) / 2, rel=1e-6)


@pytest.mark.parametrize(("site", "grouping"), SITES)
def test_squared_errors_of_disjoint_rows_add_up(site, grouping):
    """Rows are scaled to the sequence: the mean square over a partition is the whole square."""
    activations = tiny_activations()
    basis = random_basis(3, HeadGrouping(grouping, 2), 0)
    problem = LayerOutput().problem(activations, site, basis.grouping)
    sequence = torch.tensor([2])
    parts = torch.arange(activations.length).view(4, -1)
    squares = [problem.loss(basis, Batch(sequence, rows)).item() ** 2 for rows in parts]
    whole = problem.loss(basis, Batch(sequence)).item()
    assert whole**2 == pytest.approx(sum(squares) / 4, rel=1e-5)
