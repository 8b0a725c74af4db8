"""Metrics against naive loops and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from indexer.evaluate import metrics


@pytest.fixture
def pair() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((7, 60))
    return reference + 0.7 * rng.standard_normal((7, 60)), reference


def naive_ndcg(scores: list[float], reference: list[float], k: int) -> float:
    best = sorted(range(len(reference)), key=lambda i: -reference[i])[:k]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[:k]
    gain = sum(1 / math.log2(rank + 2) for rank, i in enumerate(order) if i in best)
    return gain / sum(1 / math.log2(rank + 2) for rank in range(k))


def test_ndcg_equals_a_loop(pair: tuple[np.ndarray, np.ndarray]) -> None:
    scores, reference = pair
    expected = [naive_ndcg(list(s), list(r), 20) for s, r in zip(scores, reference, strict=True)]
    np.testing.assert_allclose(metrics.ndcg(scores, reference, 20), expected, rtol=1e-12)
    np.testing.assert_allclose(metrics.ndcg(reference * 3 + 1, reference, 20), 1.0)


def test_ndcg_counts_position() -> None:
    """One relevant of two: at rank 1 worth 1, at rank 2 worth 1/log2(3)."""
    reference = np.array([[3.0, 2.0, 1.0, 0.0]])
    late = np.array([[0.0, 2.0, 3.0, -1.0]])  # order: 2, 1 -> only position 1 relevant
    assert metrics.ndcg(late, reference, 2)[0] == pytest.approx((1 / math.log2(3)) / (1 + 1 / math.log2(3)))


def test_spearman_equals_scipy_with_ties(pair: tuple[np.ndarray, np.ndarray]) -> None:
    scores, reference = np.round(pair[0], 1), np.round(pair[1], 1)
    expected = [stats.spearmanr(s, r).statistic for s, r in zip(scores, reference, strict=True)]
    np.testing.assert_allclose(metrics.spearman(scores, reference), expected, rtol=1e-12)


def test_a_constant_row_has_no_rank_correlation(pair: tuple[np.ndarray, np.ndarray]) -> None:
    scores, reference = pair[0].copy(), pair[1]
    scores[2] = 5.0
    found = metrics.spearman(scores, reference)
    assert np.isnan(found[2])
    assert np.isfinite(np.delete(found, 2)).all()


def test_recall_equals_sets(pair: tuple[np.ndarray, np.ndarray]) -> None:
    scores, reference = pair
    expected = [len(set(np.argsort(-s)[:10]) & set(np.argsort(-r)[:10])) / 10 for s, r in zip(scores, reference, strict=True)]
    np.testing.assert_allclose(metrics.recall(scores, reference, 10), expected)


def test_lds_equals_a_loop(pair: tuple[np.ndarray, np.ndarray]) -> None:
    scores, _ = pair
    rng = np.random.default_rng(1)
    masks = rng.random((12, 60)) < 0.5
    outcomes = rng.standard_normal((12, 7))
    expected = []
    for q in range(7):
        predicted = [sum(scores[q, i] for i in range(60) if masks[s, i]) for s in range(12)]
        expected.append(stats.spearmanr(predicted, outcomes[:, q]).statistic)
    np.testing.assert_allclose(metrics.lds(scores, masks, outcomes), expected, rtol=1e-10)


def test_lds_of_an_additive_outcome_is_one_and_its_sign_counts() -> None:
    rng = np.random.default_rng(2)
    effect = rng.standard_normal((3, 40))
    masks = rng.random((15, 40)) < 0.5
    outcomes = masks.astype(float) @ effect.T
    np.testing.assert_allclose(metrics.lds(effect, masks, outcomes), 1.0)
    np.testing.assert_allclose(metrics.lds(-effect, masks, outcomes), -1.0)


def test_bootstrap_is_paired_and_its_identity_draw_is_the_value(pair: tuple[np.ndarray, np.ndarray]) -> None:
    scores, reference = pair
    rng = np.random.default_rng(3)
    masks = rng.random((20, 60)) < 0.5
    outcomes = metrics.predictions(reference, masks).T + rng.standard_normal((20, 7))
    draws = np.concatenate([np.arange(20)[None], metrics.resamples(20, 50)])
    sample = metrics.bootstrap_lds([scores, reference, scores], masks, outcomes, draws)
    assert sample[0, 0] == pytest.approx(metrics.lds(scores, masks, outcomes).mean(), rel=1e-12)
    np.testing.assert_array_equal(sample[0], sample[2])
    expected = np.mean([stats.spearmanr(metrics.predictions(scores, masks)[q][draws[5]], outcomes[draws[5], q]).statistic for q in range(7)])
    assert sample[0, 5] == pytest.approx(expected, rel=1e-12)
    found = metrics.interval(float(sample[0, 0]), sample[0])
    assert found.low < found.value < found.high


def test_resamples_are_reproducible_and_cover() -> None:
    draws = metrics.resamples(10, 200, seed=4)
    np.testing.assert_array_equal(draws, metrics.resamples(10, 200, seed=4))
    assert set(draws.ravel()) == set(range(10))
    assert metrics.mean_interval(np.arange(10.0), draws).low < 4.5 < metrics.mean_interval(np.arange(10.0), draws).high


def test_ceiling_of_equal_seeds_is_one() -> None:
    outcomes = np.random.default_rng(5).standard_normal((9, 4))
    np.testing.assert_allclose(metrics.ceiling(outcomes, outcomes), 1.0)
    np.testing.assert_allclose(
        metrics.ceiling(outcomes, outcomes[::-1]), [stats.spearmanr(outcomes[:, q], outcomes[::-1, q]).statistic for q in range(4)], rtol=1e-12
    )


def test_fact_ranks() -> None:
    scores = np.array([[0.1, 0.9, 0.5], [0.3, 0.2, 0.1], [1.0, 2.0, 3.0]])
    proofs = [{0}, {0, 2}, set()]
    first = metrics.fact_ranks(scores, lambda q, i: i in proofs[q])
    assert first.tolist() == [3, 1, 0]
    assert metrics.recall_at(first, 1) == 0.5
    assert metrics.recall_at(first, 3) == 1.0
    assert metrics.reciprocal_rank(first) == pytest.approx((1 / 3 + 1) / 2)
    assert math.isnan(metrics.reciprocal_rank(np.zeros(2, np.int64)))


def test_undefined_values_stay_out_of_means_without_a_warning() -> None:
    values = np.array([[1.0, np.nan, 3.0], [np.nan, np.nan, np.nan]])
    np.testing.assert_array_equal(metrics.mean(values, axis=1), [2.0, np.nan])
    assert metrics.mean(values) == 2.0
    assert math.isnan(metrics.interval(1.0, np.full(3, np.nan)).low)
