"""Selections under two budgets: against all there are."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldkv.coding.candidates import Candidate, Candidates, Selection, StepCompute
from manifoldkv.coding.costs import gaussian_costs
from manifoldkv.coding.transform import TransformConfig
from manifoldkv.plan.formats.uniform import GAUSSIAN_DISTORTION
from manifoldkv.plan.predictor import Input

LATENTS, WIDTHS = 2, 9
CACHED = 3


def choice(variances: list[float], rows: int, fixed: float, inputs: tuple[Input, ...]) -> Candidate:
    return Candidate(
        TransformConfig(inputs),
        torch.tensor(sorted(variances, reverse=True), dtype=torch.float64),
        torch.full((LATENTS,), rows),
        1.0,
        fixed,
        mixed=2.0,
    )


@st.composite
def some_candidates(draw: st.DrawFn, layers: int = 1, *, linked: bool = True) -> Candidates:
    """Two candidates for keys and for values, which may multiply the latents of keys below."""
    variances = st.lists(st.floats(0.01, 10), min_size=LATENTS, max_size=LATENTS)
    sites = []
    for layer in range(layers):
        keys = [choice(draw(variances), draw(st.integers(1, 16)), 1.0, ()) for _ in range(2)]
        inputs = tuple((below, "key") for below in range(layer + 1)) if linked else ()
        values = [choice(draw(variances), 0, 0.0, one) for one in ((), inputs)]
        sites += [keys, values]
    return Candidates(sites, [CACHED] * len(sites), GAUSSIAN_DISTORTION)


def free(candidates: Candidates) -> Selection:
    return candidates.best(np.inf, np.inf)


def brute_force(candidates: Candidates) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cost, bits and multiplications of all choices and widths of a candidates of one layer."""
    found = []
    for keys, values in itertools.product(*candidates.tensors):
        costs = [
            gaussian_costs(one.variances, GAUSSIAN_DISTORTION).numpy() for one in (keys, values)
        ]
        widths = np.indices([WIDTHS] * 2 * LATENTS).reshape(2 * LATENTS, -1)  # (latents, all)
        nats = sum(costs[i // LATENTS][i % LATENTS, w] for i, w in enumerate(widths))
        stored = widths > 0
        compute = keys.fixed + values.fixed + (stored[:LATENTS] * (keys.rows[0].item() + 1)).sum(0)
        compute = compute + stored[LATENTS:].sum(0)
        assert values.config.inputs in ((), ((0, "key"),))
        compute = compute + len(values.config.inputs) * values.mixed * stored[:LATENTS].sum(0)
        found.append((nats, widths.sum(0) * CACHED, compute * CACHED))
    nats, bits, compute = (np.concatenate(part) for part in zip(*found, strict=True))
    return nats, bits, compute


def taken(candidates: Candidates, chosen: Selection) -> tuple[float, float]:
    """Bits and multiplications of what was chosen, by the widths that its prices allow."""
    stored, bits = [], 0
    for site, index in zip(candidates.tensors, chosen.indices, strict=True):
        one = site[index]
        costs = gaussian_costs(one.variances, GAUSSIAN_DISTORTION)
        prices = costs + chosen.bit_price * CACHED * torch.arange(WIDTHS)
        per_latent = one.rows.double() + one.mixing
        prices[:, 1:] += chosen.compute_price * CACHED * per_latent.unsqueeze(1)
        widths = prices.argmin(dim=1)
        stored.append(widths > 0)
        bits += int(widths.sum()) * CACHED
    choices = [site[index] for site, index in zip(candidates.tensors, chosen.indices, strict=True)]
    step = StepCompute(choices, candidates.cached, 0.0)
    return bits, step.total(stored, [one.rows for one in choices])


SHARES = st.floats(0.05, 1.2)


@given(linked=st.booleans(), data=st.data(), bits=SHARES, compute=SHARES)
def test_choices_are_within_both_budgets_and_no_others_are_better(
    linked: bool, data: st.DataObject, bits: float, compute: float
) -> None:
    """Everett's theorem: nothing that takes as much or less of both costs less.

    It holds for sites that are apart. The latents of keys are chosen before the values that
    multiply them, so that linked ones are only within the budgets.
    """
    candidates = data.draw(some_candidates(linked=linked))
    most_bits, most_compute = taken(candidates, free(candidates))
    most_bits, most_compute = bits * most_bits, 2 * CACHED + compute * most_compute
    chosen = candidates.best(most_bits, most_compute)
    used_bits, used_compute = taken(candidates, chosen)
    assert used_bits <= most_bits
    assert used_compute <= most_compute
    assert chosen.compute == pytest.approx(used_compute)
    nats, all_bits, all_compute = brute_force(candidates)
    assert chosen.nats >= nats[(all_bits <= most_bits) & (all_compute <= most_compute)].min() - 1e-9
    if not linked:
        as_much = (all_bits <= used_bits) & (all_compute <= used_compute + 1e-9)
        assert chosen.nats <= nats[as_much].min() + 1e-9


@settings(max_examples=10)
@given(
    candidates=some_candidates(layers=2, linked=False),
    bits=SHARES,
    compute=st.tuples(SHARES, SHARES),
)
def test_more_compute_never_loses_more(
    candidates: Candidates, bits: float, compute: tuple[float, float]
) -> None:
    most_bits, most_compute = taken(candidates, free(candidates))
    limits = [2 * CACHED + share * most_compute for share in sorted(compute)]
    less, more = (candidates.best(bits * most_bits, limit) for limit in limits)
    assert more.nats <= less.nats + 1e-9
