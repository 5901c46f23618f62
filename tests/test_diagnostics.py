"""Errors of compressed layers."""

import numpy as np
import pytest
import torch

from manifoldkv.basis import HeadGrouping
from manifoldkv.diagnostics import diagnose, layer_errors
from manifoldkv.layers.decoder import attention_output, layer_output
from manifoldkv.testing import HEAD_DIM, random_basis, tiny_activations


def test_exact_layer_has_no_error():
    errors = layer_errors(tiny_activations())
    assert errors.attention_output_error == 0
    assert errors.layer_output_error < 1e-6
    assert errors.cosine_similarity == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("rotary", ["pre", "post"])
def test_full_rank_has_no_error(rotary):
    key = random_basis(HEAD_DIM, HeadGrouping("shared", 2), 0)
    value = random_basis(HEAD_DIM, HeadGrouping(1, 2), 1)
    errors = layer_errors(tiny_activations(), key, value, rotary=rotary)
    assert errors.attention_output_error < 1e-10
    assert errors.layer_output_error < 1e-6


def test_errors_are_means_of_ratios_per_sequence():
    activations = tiny_activations()
    key = random_basis(3, HeadGrouping("shared", 2), 0)
    value = random_basis(5, HeadGrouping(1, 2), 1)
    errors = layer_errors(activations, key, value)

    attention = attention_output(activations, key, value).numpy()
    exact = attention_output(activations).numpy()
    output = layer_output(activations, torch.from_numpy(attention)).numpy()
    expected = activations.outputs.numpy()

    def mean_ratio(approximate, true):
        pairs = zip(approximate, true, strict=True)
        return np.mean([np.linalg.norm((a - t).ravel()) / np.linalg.norm(t) for a, t in pairs])

    cosines = (output * expected).sum(-1)
    cosines /= np.linalg.norm(output, axis=-1) * np.linalg.norm(expected, axis=-1)
    assert errors.attention_output_error == pytest.approx(mean_ratio(attention, exact))
    assert errors.layer_output_error == pytest.approx(mean_ratio(output, expected), rel=1e-6)
    assert errors.cosine_similarity == pytest.approx(cosines.mean(), rel=1e-6)


def test_diagnose_has_a_row_per_layer_with_bases():
    activations = tiny_activations()
    key = random_basis(3, HeadGrouping("shared", 2), 0)
    frame = diagnose([activations], {1: (key, None), 5: (None, None)})
    assert list(frame.columns) == [
        "layer",
        "attention_output_error",
        "layer_output_error",
        "cosine_similarity",
    ]
    assert frame["layer"].tolist() == [1]
    assert frame["layer_output_error"][0] == layer_errors(activations, key).layer_output_error
