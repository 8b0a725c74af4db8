"""One function per metric: score matrices in, {method: {figure: value}} out. Intervals are [value, low, high] at 95 %."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.model import LoadedModel
from indexer.evaluate import metrics
from indexer.evaluate.case import Case
from indexer.evaluate.retrain import Retrainer, tail_patch
from indexer.evaluate.scores import MethodScores, proof_of
from indexer.evaluate.settings import EvaluateSettings

Figures = dict[str, dict[str, Any]]
SECOND_SEED = 5000  # added to a subset's training seed


def as_list(found: metrics.Interval) -> list[float]:
    return [found.value, found.low, found.high]


def fidelity(scores: Mapping[str, MethodScores], reference: NDArray[np.float64], draws: NDArray[np.int64]) -> Figures:
    """NDCG@20, Spearman and recall@10 of each method against uncompressed EK-FAC, means over queries, intervals over queries."""
    found: Figures = {}
    for name, method in scores.items():
        parts = {
            "ndcg@20": metrics.ndcg(method.scores, reference, 20),
            "spearman": metrics.spearman(method.scores, reference),
            "recall@10": metrics.recall(method.scores, reference, 10),
        }
        found[name] = {label: as_list(metrics.mean_interval(values, draws)) for label, values in parts.items()}
    return found


def subset_masks(n: int, count: int, seed: int) -> NDArray[np.bool_]:
    """(count, n): each row holds half of the examples."""
    rng = np.random.default_rng([seed, 0x1D5])
    masks = np.zeros((count, n), np.bool_)
    for row in masks:
        row[rng.permutation(n)[: n // 2]] = True
    return masks


def lds(scores: Mapping[str, MethodScores], retrainer: Retrainer, settings: EvaluateSettings) -> tuple[Figures, dict[str, Any]]:
    """LDS of each method with an interval over subsets, and the facts of the task: subsets, ceiling between two training seeds."""
    n = len(retrainer.examples)
    masks = subset_masks(n, settings.subsets, settings.evaluation_seed)
    seconds = min(settings.second_seed_subsets, settings.subsets)
    first = np.stack([retrainer.losses(np.flatnonzero(m), s) for s, m in enumerate(masks)]).astype(np.float64)
    second = [retrainer.losses(np.flatnonzero(m), s + SECOND_SEED) for s, m in enumerate(masks[:seconds])]
    outcomes = -first
    about: dict[str, Any] = {"subsets": len(masks), "second_seed_subsets": seconds}
    if seconds >= 2:
        again = -np.stack(second).astype(np.float64)
        agreement = metrics.ceiling(outcomes[:seconds], again)
        about["ceiling"] = float(metrics.mean(agreement))
        outcomes[:seconds] = (outcomes[:seconds] + again) / 2
    draws = metrics.resamples(len(masks), settings.bootstrap, settings.evaluation_seed)
    sample = metrics.bootstrap_lds([m.scores for m in scores.values()], masks, outcomes, draws)
    found = {}
    for row, (name, method) in zip(sample, scores.items(), strict=True):
        found[name] = {"lds": as_list(metrics.interval(float(metrics.mean(metrics.lds(method.scores, masks, outcomes))), row))}
    return found, about


def removal(scores: Mapping[str, MethodScores], retrainer: Retrainer, settings: EvaluateSettings, draws: NDArray[np.int64]) -> Figures:
    """QLD: rise of a query's loss, in nats per query, when a method's top share is removed before training; same training seed with and without.

    `random` here removes random rows: the control. draws: resampled queries.
    """
    everything = np.arange(len(retrainer.examples))
    n_queries = draws.shape[1]
    whole = retrainer.losses(everything, 0)
    found: Figures = {name: {} for name in scores}
    for share in settings.removal_shares:
        count = max(1, round(share * len(everything)))
        for name, method in scores.items():
            best = metrics.top(method.scores, count)
            rise = [float(retrainer.losses(np.setdiff1d(everything, best[q]), 0)[q] - whole[q]) for q in range(n_queries)]
            found[name][f"qld {share:.0%}" if share >= 0.01 else f"qld {share:.2%}"] = as_list(metrics.mean_interval(np.array(rise), draws))
    return found


def patch(scores: Mapping[str, MethodScores], case: Case, loaded: LoadedModel, learning_rate: float, count: int, draws: NDArray[np.int64]) -> Figures:
    """Tail patch: fall of a query's loss, in nats, after one step on its `count` proponents."""
    found: Figures = {}
    for name, method in scores.items():
        best = metrics.top(method.scores, count)
        falls = [tail_patch(loaded, [case.examples[i] for i in own], query, learning_rate) for own, query in zip(best, case.queries, strict=True)]
        found[name] = {"tail-patch": as_list(metrics.mean_interval(np.array(falls), draws))}
    return found


def facts(scores: Mapping[str, MethodScores], case: Case, field: str) -> tuple[Figures, dict[str, Any]]:
    """Fact tracing: is an example that states the query's fact found, and at which rank?"""
    proof = proof_of(case, field)
    found: Figures = {}
    provable = 0
    for name, method in scores.items():
        first = metrics.fact_ranks(method.scores, proof)
        provable = int((first > 0).sum())
        found[name] = {
            "fact recall@1": metrics.recall_at(first, 1),
            "fact recall@10": metrics.recall_at(first, 10),
            "fact MRR": metrics.reciprocal_rank(first),
        }
    return found, {"queries_with_a_proof": provable}


def merge(parts: Sequence[Figures]) -> Figures:
    """All figures of a method side by side."""
    merged: Figures = {}
    for part in parts:
        for name, figures in part.items():
            merged.setdefault(name, {}).update(figures)
    return merged
