"""Score matrices (queries, examples) of the methods that an evaluation compares, and what each stores per example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.capture import Capture
from engine.errors import DataError, SettingError
from engine.example import Example, collate, plan_batches
from engine.model import LoadedModel
from engine.modules import TrackedModule, track
from engine.uncompressed import UncompressedInfluence
from indexer.evaluate.case import Case
from indexer.evaluate.settings import Method

_PAIRS_BYTES = 1 << 27


@dataclass(frozen=True, slots=True)
class MethodScores:
    """scores (Q, N) float64, positive: proponent; bytes: stored per training example."""

    scores: NDArray[np.float64]
    bytes: float


def compute_scores(case: Case, methods: Sequence[Method], *, batch_tokens: int = 4096, seed: int = 0) -> dict[Method, MethodScores]:
    """Every method's scores of every example for every query."""
    made: dict[Method, MethodScores] = {}
    n, q = len(case.examples), len(case.queries)
    uncompressed = 2.0 * sum(m.n_parameters for m in track(case.engine.loaded).tracked)
    if "random" in methods:
        made["random"] = MethodScores(np.random.default_rng([seed, 0xDA]).standard_normal((q, n)), 0)
    if "bm25" in methods:
        size = float(np.mean([len(e.text.encode()) for e in case.examples]))
        made["bm25"] = MethodScores(bm25([e.text for e in case.examples], [e.text for e in case.queries]), size)
    plain = {"gradient-dot", "gradient-cosine"} & set(methods)
    if plain or "ek-fac" in methods:
        curvature = case.curvature()
    if plain:
        dot = (
            UncompressedInfluence(case.engine.loaded, curvature, precondition=False, batch_tokens=batch_tokens)
            .scores(case.queries, case.examples)
            .astype(np.float64)
        )
        made["gradient-dot"] = MethodScores(dot, uncompressed)
        if "gradient-cosine" in methods:
            tracked = [m for m in track(case.engine.loaded).tracked if m.name in curvature.modules]
            norms = [gradient_norms(case.engine.loaded, tracked, part, batch_tokens) for part in (case.queries, case.examples)]
            outer = np.outer(*norms)
            made["gradient-cosine"] = MethodScores(np.divide(dot, outer, out=np.zeros_like(dot), where=outer > 0), uncompressed)
    if "ek-fac" in methods:
        influence = UncompressedInfluence(case.engine.loaded, curvature, batch_tokens=batch_tokens)
        made["ek-fac"] = MethodScores(influence.scores(case.queries, case.examples).astype(np.float64), uncompressed)
    if {"store", "store-cosine"} & set(methods):
        sketch = case.engine.sketcher.query(case.queries)
        if sketch.flags.any():
            raise DataError(f"query {case.queries[int(np.flatnonzero(sketch.flags)[0])].id!r} has no target token or no usable gradient", field="queries")
        payload = float(case.engine.store.layout.payload_bytes)
        made["store"] = MethodScores(case.engine.searcher.score(sketch.y, case.positions), payload)
        made["store-cosine"] = MethodScores(case.engine.searcher.score(sketch.y, case.positions, "cosine"), payload)
    return {name: made[name] for name in methods}


def bm25(texts: Sequence[str], queries: Sequence[str]) -> NDArray[np.float64]:
    """Okapi BM25 of the texts for each query, lower-cased words (Lucene's variant, k1 = 1.5, b = 0.75)."""
    try:
        import bm25s
    except ImportError:
        raise SettingError("the bm25 row needs the package bm25s; install eogp[evaluate], or leave bm25 out of --methods", field="methods") from None
    words, asked = (bm25s.tokenize(list(part), stopwords=None, show_progress=False, return_ids=False) for part in (texts, queries))
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    known = set().union(*words)
    found = np.zeros((len(queries), len(texts)))
    for i, own in enumerate(asked):
        usable = [w for w in own if w in known]
        if usable:
            found[i] = index.get_scores(usable)
    return found


def gradient_norms(loaded: LoadedModel, tracked: Sequence[TrackedModule], examples: Sequence[Example], batch_tokens: int) -> NDArray[np.float64]:
    """(N,): norm of each example's gradient over the tracked modules, ||sum_t delta_t a_t^T||^2 = sum_{s,t} <delta_s, delta_t> <a_s, a_t>."""
    total = np.zeros(len(examples))
    for chosen in plan_batches([len(e) for e in examples], batch_tokens):

        def consume(m: TrackedModule, a: Tensor, delta: Tensor, chosen: list[int] = chosen) -> None:
            step = max(1, _PAIRS_BYTES // (8 * a.shape[1] ** 2))
            for start in range(0, len(chosen), step):
                part = slice(start, start + step)
                x, d = a[part].float(), delta[part].float()
                pairs = (x @ x.transpose(1, 2)) * (d @ d.transpose(1, 2))
                total[chosen[part]] += pairs.sum((1, 2), dtype=torch.float64).clamp(min=0).cpu().numpy()

        Capture(loaded, tracked).run(collate([examples[i] for i in chosen], chosen, loaded.pad_id, loaded.device), consume)
    return np.sqrt(total)


def proof_of(case: Case, field: str) -> Callable[[int, int], bool]:
    """is_proof(query, example): both have the same value in the metadata field `field`. Raises SettingError where no query has it."""
    queries = [e.metadata.get(field) for e in case.queries]
    examples = [e.metadata.get(field) for e in case.examples]
    if all(v is None for v in queries):
        raise SettingError(f"no query has the metadata field {field!r}", field="fact_field")
    return lambda q, i: queries[q] is not None and queries[q] == examples[i]
