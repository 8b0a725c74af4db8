"""The figures of an evaluation, from score matrices (Q, N) and measured outcomes. No model here.

Sign: a positive score means that training on the example lowers the query's loss; an outcome is MINUS the query's loss. Undefined values (a constant
row has no rank correlation) are NaN and stay out of the means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ranks(x: NDArray[np.floating], axis: int = -1) -> Floats:
    """Ranks from 1 along `axis`, ties averaged."""
    from scipy.stats import rankdata

    return np.asarray(rankdata(x, axis=axis), np.float64)


def correlation(a: Floats, b: Floats) -> Floats:
    """Pearson correlation of corresponding rows, (Q,); NaN where a row is constant."""
    a = a - a.mean(axis=-1, keepdims=True)
    b = b - b.mean(axis=-1, keepdims=True)
    norm = np.sqrt(np.square(a).sum(-1) * np.square(b).sum(-1))
    return np.divide((a * b).sum(-1), norm, out=np.full(norm.shape, np.nan), where=norm > 0)


def spearman(a: NDArray[np.floating], b: NDArray[np.floating]) -> Floats:
    """Rank correlation of corresponding rows, (Q,)."""
    return correlation(ranks(a), ranks(b))


def top(scores: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """(Q, k): positions of the k largest scores of each row, best first; the lowest position wins among equals."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k].astype(np.int64)


def ndcg(scores: NDArray[np.floating], reference: NDArray[np.floating], k: int = 20) -> Floats:
    """(Q,): NDCG@k with binary relevance, membership in the reference's top k."""
    k = min(k, scores.shape[1])
    relevant = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(relevant, top(reference, k), True, axis=1)
    discount = 1 / np.log2(np.arange(2, k + 2))
    gains = np.take_along_axis(relevant, top(scores, k), axis=1)
    return np.asarray((gains * discount).sum(axis=1) / discount.sum())


def recall(scores: NDArray[np.floating], reference: NDArray[np.floating], k: int = 10) -> Floats:
    """(Q,): share of the reference's top k that is in the top k of the scores."""
    k = min(k, scores.shape[1])
    mine, theirs = top(scores, k), top(reference, k)
    return np.array([np.isin(a, b).mean() for a, b in zip(mine, theirs, strict=True)])


def predictions(scores: NDArray[np.floating], masks: NDArray[np.bool_]) -> Floats:
    """(Q, S): the predicted outcome of each subset, the sum of its members' scores."""
    return np.asarray(scores, np.float64) @ masks.T.astype(np.float64)


def lds(scores: NDArray[np.floating], masks: NDArray[np.bool_], outcomes: NDArray[np.floating]) -> Floats:
    """(Q,): linear datamodelling score. masks (S, N): the subsets; outcomes (S, Q): minus each query's loss after training on the subset."""
    return spearman(predictions(scores, masks), np.asarray(outcomes, np.float64).T)


def ceiling(first: NDArray[np.floating], second: NDArray[np.floating]) -> Floats:
    """(Q,): rank correlation over subsets of the outcomes (S, Q) of two training seeds, what no attribution of ONE seed can be expected to pass by much."""
    return spearman(np.asarray(first).T, np.asarray(second).T)


def resamples(n: int, count: int, seed: int = 0) -> NDArray[np.int64]:
    """(count, n) positions drawn with replacement; the same draws for every method, so that differences are paired."""
    return np.random.default_rng([seed, n]).integers(0, n, (count, n))


def mean(values: Floats, axis: int | None = None) -> Any:
    """Mean without the NaN; NaN where nothing else is left."""
    defined = ~np.isnan(values)
    count = defined.sum(axis=axis)
    total = np.where(defined, values, 0.0).sum(axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)[()]


def bootstrap_mean(values: Floats, draws: NDArray[np.int64]) -> Floats:
    """(count,): means of values (n,) over the draws, NaN left out."""
    return np.asarray(mean(values[draws], axis=1))


def bootstrap_lds(
    scores: Sequence[NDArray[np.floating]], masks: NDArray[np.bool_], outcomes: NDArray[np.floating], draws: NDArray[np.int64]
) -> NDArray[np.float64]:
    """(methods, count): mean LDS of each method over resampled SUBSETS. Outcomes are ranked once per draw for all methods."""
    predicted = [predictions(s, masks) for s in scores]
    measured = np.asarray(outcomes, np.float64).T
    found = np.empty((len(scores), len(draws)))
    for b, chosen in enumerate(draws):
        target = ranks(measured[:, chosen])
        for i, p in enumerate(predicted):
            found[i, b] = mean(correlation(ranks(p[:, chosen]), target))
    return found


def interval(value: float, sample: Floats) -> Interval:
    """The value with the 2.5 and 97.5 percentiles of its bootstrap sample."""
    defined = sample[~np.isnan(sample)]
    low, high = np.percentile(defined, [2.5, 97.5]) if defined.size else (np.nan, np.nan)
    return Interval(float(value), float(low), float(high))


def mean_interval(values: Floats, draws: NDArray[np.int64]) -> Interval:
    """Mean of values (n,) with an interval from resampling them."""
    return interval(float(mean(values)), bootstrap_mean(values, draws))


def fact_ranks(scores: NDArray[np.floating], is_proof: Callable[[int, int], bool]) -> NDArray[np.int64]:
    """(Q,): rank, from 1, of the first example that states the query's fact; 0 where no example does. is_proof(query, example)."""
    found = np.zeros(len(scores), np.int64)
    for q, order in enumerate(top(scores, scores.shape[1])):
        found[q] = next((r for r, i in enumerate(order, 1) if is_proof(q, int(i))), 0)
    return found


def recall_at(first: NDArray[np.int64], k: int) -> float:
    """Share of queries whose first proof is in the top k; queries without any proof left out."""
    known = first[first > 0]
    return float((known <= k).mean()) if known.size else float("nan")


def reciprocal_rank(first: NDArray[np.int64]) -> float:
    """Mean reciprocal rank of the first proof; queries without any proof left out."""
    known = first[first > 0]
    return float((1 / known).mean()) if known.size else float("nan")
