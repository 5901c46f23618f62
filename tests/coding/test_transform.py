"""Predictions of a site: least squares, and what they leave of tokens they have not seen."""

import numpy as np
import pytest
import torch
from torch import Tensor

from manifoldkv.coding.regression import PREDICTION_RIDGE
from manifoldkv.coding.transform import TransformConfig, WeightedKLT, spectrum, weighted_klt
from manifoldkv.statistics.statistics import TensorStatistics

TOKENS, INPUTS, FEATURES = 120, 40, 6
METRIC = torch.eye(FEATURES, dtype=torch.float64)


def statistics_of(mean: Tensor, covariance: Tensor) -> TensorStatistics:
    """Statistics of which a transform reads mean and covariance."""
    samples = torch.empty(0, 0, FEATURES)
    return TensorStatistics(mean, covariance, METRIC, METRIC[None], None, samples, TOKENS)


def some_site(tokens: int = TOKENS) -> tuple[TensorStatistics, Tensor, Tensor, Tensor]:
    """Moments, x, what it is predicted from, and the weights by which it truly is."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(INPUTS, FEATURES, generator=generator)
    given = torch.randn(tokens, INPUTS, generator=generator) + 2
    x = given @ weights + 3 + torch.randn(tokens, FEATURES, generator=generator)
    identity = torch.eye(FEATURES, dtype=torch.float64)
    moments = statistics_of(x.mean(dim=0).double(), identity)
    return moments, x, given, weights


def left_of(site: WeightedKLT) -> np.ndarray:
    """What is left of the tokens of which the site has latents."""
    return (site.latents @ site.up.mT).numpy()


def ridge(x: np.ndarray, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same as a least-squares problem with more rows: weights and mean."""
    centred_x, centred = x - x.mean(axis=0), given - given.mean(axis=0)
    powers = np.sqrt((centred**2).sum(axis=0))
    rows = np.vstack([centred / powers, np.sqrt(PREDICTION_RIDGE) * np.eye(INPUTS)])
    wanted = np.vstack([centred_x, np.zeros((INPUTS, FEATURES))])
    weights = np.linalg.lstsq(rows, wanted, rcond=None)[0] / powers[:, None]
    return weights, x.mean(axis=0) - given.mean(axis=0) @ weights


def test_a_prediction_is_ridge_regression() -> None:
    moments, x, given, _ = some_site()
    weights, mean = ridge(x.double().numpy(), given.double().numpy())
    for folds in (1, 3):
        site = weighted_klt(moments, METRIC, x, given, folds=folds)
        assert site.weights is not None
        assert site.mean is not None
        np.testing.assert_allclose(site.weights.numpy(), weights, atol=1e-4)
        np.testing.assert_allclose(site.mean.numpy(), mean, atol=1e-3)
    left = x.double().numpy() - mean - given.double().numpy() @ weights
    np.testing.assert_allclose(left_of(weighted_klt(moments, METRIC, x, given)), left, atol=1e-3)


def test_every_fold_is_predicted_by_all_others() -> None:
    moments, x, given, _ = some_site()
    found = left_of(weighted_klt(moments, METRIC, x, given, folds=4))
    for fold in np.array_split(np.arange(TOKENS), 4):
        others = np.setdiff1d(np.arange(TOKENS), fold)
        all_x, all_given = x.double().numpy(), given.double().numpy()
        weights, mean = ridge(all_x[others], all_given[others])
        left = all_x[fold] - mean - all_given[fold] @ weights
        np.testing.assert_allclose(found[fold], left, atol=1e-3)


def test_folds_promise_what_other_text_leaves() -> None:
    """Of the noise, of variance 1, a regression on as few tokens hides a third."""
    moments, x, given, _ = some_site(2 * TOKENS)
    seen, unseen = slice(0, TOKENS), slice(TOKENS, None)
    sites = [weighted_klt(moments, METRIC, x[seen], given[seen], folds=folds) for folds in (1, 10)]
    once, crossed = (float((left_of(site) ** 2).mean()) for site in sites)
    site = sites[0]
    assert site.weights is not None
    assert site.mean is not None
    left = x[unseen].double() - site.mean - given[unseen].double() @ site.weights
    truth = float(left.square().mean())
    assert once < 0.75 < 1.2 < truth
    assert 0.85 * truth < crossed < 1.2 * truth


def coloured_site() -> tuple[TensorStatistics, Tensor, Tensor]:
    """A site whose features are correlated, and cost errors differently."""
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(FEATURES, FEATURES, generator=generator, dtype=torch.float64)
    x = torch.randn(TOKENS, FEATURES, generator=generator, dtype=torch.float64) @ mixing + 2
    costs = torch.randn(FEATURES, 2 * FEATURES, generator=generator, dtype=torch.float64)
    mean = x.mean(dim=0)
    covariance = (x - mean).mT @ (x - mean) / TOKENS
    return statistics_of(mean, covariance), costs @ costs.mT, x


BLOCKS = (torch.tensor([0, 3]), torch.tensor([5, 1]), torch.tensor([2, 4]))
ONE_BLOCK = (torch.arange(FEATURES),)


def test_one_block_of_all_features_is_no_block() -> None:
    moments, metric, x = coloured_site()
    whole, one = (
        weighted_klt(moments, metric, x, config=TransformConfig(blocks=blocks))
        for blocks in ((), ONE_BLOCK)
    )
    for part in ("down", "up", "mean", "latents"):
        assert torch.equal(getattr(whole, part), getattr(one, part))


@pytest.mark.parametrize("blocks", [(), ONE_BLOCK, BLOCKS])
def test_blocks_are_transforms_of_their_own(blocks: tuple[Tensor, ...]) -> None:
    """Inverse to each other, 0 elsewhere, with latents of the variances that were promised."""
    moments, metric, x = coloured_site()
    site = weighted_klt(moments, metric, x, config=TransformConfig(blocks=blocks))
    identity = torch.eye(FEATURES, dtype=torch.float64)
    torch.testing.assert_close(site.up.mT @ site.down, identity)
    variances, rows = spectrum(metric, moments.covariance, blocks)
    torch.testing.assert_close(site.latents.square().mean(dim=0), variances)
    assert (variances.diff() <= 0).all()
    assert torch.equal(rows, site.rows)
    block_of = torch.empty(FEATURES, dtype=torch.int64)
    for index, block in enumerate(blocks or ONE_BLOCK):
        block_of[block] = index
    for part in (site.down, site.up):
        of_latent = block_of[part.abs().argmax(dim=0)]
        assert (part[block_of.unsqueeze(1) != of_latent] == 0).all()
    second = site.latents.mT @ site.latents / TOKENS
    same = of_latent.unsqueeze(1) == of_latent
    torch.testing.assert_close(second[same], second.diagonal().diag()[same])


def test_a_prediction_of_low_rank_leaves_what_its_factors_leave() -> None:
    moments, x, inputs, _ = some_site()
    full = weighted_klt(moments, METRIC, x, inputs)
    for rank in (1, FEATURES):
        site = weighted_klt(moments, METRIC, x, inputs, config=TransformConfig(rank=rank))
        assert site.weights is not None
        assert site.expansion is not None
        assert full.weights is not None
        assert site.weights.shape == (INPUTS, rank)
        weights = site.weights @ site.expansion
        residuals = x.double() - site.mean - inputs.double() @ weights
        np.testing.assert_allclose(left_of(site), residuals.numpy(), atol=1e-4)
        torch.testing.assert_close(
            residuals.mean(dim=0), torch.zeros(FEATURES).double(), atol=1e-4, rtol=0
        )
    torch.testing.assert_close(weights, full.weights)
