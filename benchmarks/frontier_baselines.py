"""What others store, at the same byte accounting, from the whitened gradients of benchmarks/frontier_gradients.py.

One sweep over the modules; every method's score matrix (queries, training texts) is a sum over modules. Bytes are per training example, fp16 unless "1 bit";
one-bit rows keep sign and one fp16 scale ||x||_1 / k per module of the half-whitened vector, the query stays in float, exactly as ours.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import numpy as np
import torch
from frontier_gradients import Floats, Gradients
from numpy.typing import NDArray

DAMPING = 0.1
SWEEP = (1.0, 0.3, 0.1, 0.03, 0.01, 0.001)
LOGRA_RANKS = (2, 4, 6, 8, 12, 16, 24, 32)
WIDTHS = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass
class Row:
    """One method at one size: its scores, bytes stored per example and shared, and where it belongs."""

    name: str
    family: str
    bytes: float
    shared: float = 0.0
    stored: bool = True
    one_bit: bool = False
    scores: NDArray[np.float64] | None = None
    info: dict[str, object] = field(default_factory=dict)


class Rows:
    """Score matrices that grow module by module."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def add(
        self, name: str, family: str, scores: NDArray[np.floating], bytes: float, shared: float = 0.0, *, stored: bool = True, one_bit: bool = False
    ) -> None:
        row = self.rows.get(name)
        if row is None:
            self.rows[name] = Row(name, family, bytes, shared, stored, one_bit, np.array(scores, np.float64))
            return
        assert row.scores is not None
        row.scores += scores
        row.bytes += bytes
        row.shared += shared

    def pair(self, family: str, label: str, stored: Floats, query: Floats, shared: float = 0.0) -> None:
        """A float row (fp16) and its one-bit twin from half-whitened vectors of one module, stored (N, k) and query (Q, k)."""
        k = stored.shape[1]
        self.add(f"{family}, {label}, fp16", family, query @ stored.astype(np.float16).astype(np.float32).T, 2 * k, shared)
        scale = (np.abs(stored).sum(1) / k).astype(np.float16).astype(np.float32)
        signs = np.where(stored >= 0, np.float32(1), np.float32(-1))
        self.add(f"{family}, {label}, 1 bit", family, (query @ signs.T) * scale, -(-k // 8) + 2, shared, one_bit=True)


def half_whiten(train: Floats, query: Floats, c: float = DAMPING) -> tuple[Floats, Floats]:
    """Both sides times (F + c mean(F) I)^(-1/2), F (k, k) the empirical Fisher of the projected training gradients: how LogIX, TRAK and GraSS precondition."""
    fisher = train.astype(np.float64).T @ train.astype(np.float64) / len(train)
    values, vectors = np.linalg.eigh(fisher)
    values = np.clip(values, 0, None)
    root = (vectors / np.sqrt(values + c * values.mean())) @ vectors.T
    scale = 1 / np.sqrt(np.square(train @ root).mean())  # one factor for all: keeps fp16 in range, changes no ranking inside a module ...
    return (train @ root * scale).astype(np.float32), (query @ root / scale).astype(np.float32)  # ... and is undone on the query's side


def sweep(g: Gradients) -> dict[str, Row]:
    """All rows that follow from gradients alone; each module's part is kept beside the gradients."""
    rows = Rows()
    train_norm, query_norm = (np.zeros(g.stored(split, g.modules[0][0]).shape[0]) for split in ("train", "query"))
    for number in range(len(g.modules)):
        path = g.folder / f"baselines-{number}.pkl"
        if not path.exists():
            part = path.with_suffix(".part")
            part.write_bytes(pickle.dumps(module_rows(g, number)))
            part.replace(path)
        found, own_train, own_query = pickle.loads(path.read_bytes())
        for row in found.values():
            rows.add(row.name, row.family, row.scores, row.bytes, row.shared, stored=row.stored, one_bit=row.one_bit)
        train_norm, query_norm = train_norm + own_train, query_norm + own_query
    dot = rows.rows["gradient dot"]
    assert dot.scores is not None
    rows.add("gradient cosine", "gradient cosine", dot.scores / np.sqrt(np.outer(query_norm, train_norm)), dot.bytes)
    return rows.rows


def module_rows(g: Gradients, number: int) -> tuple[dict[str, Row], NDArray[np.float64], NDArray[np.float64]]:
    """One module's part of every row, and the squared gradient norms of training texts and queries in it."""
    rows = Rows()
    name = g.modules[number][0]
    w_train, w_query = g.stored("train", name).astype(np.float32), g.stored("query", name).astype(np.float32)
    d_out, d_in = g.shape(name)
    size = d_out * d_in
    lam = g.lam[name]
    plain = g.factor(name, None)
    rows.add("gradient dot", "gradient dot", (w_query * plain**2) @ w_train.T, 2 * size)
    own_train, own_query = (np.square(w * plain).sum(1, dtype=np.float64) for w in (w_train, w_query))
    for c in SWEEP:
        rows.add(f"EK-FAC, damping {c:g}", "EK-FAC", (w_query * g.factor(name, c) ** 2) @ w_train.T, 2 * size, stored=False)
    module = g.curvature.modules[name]
    product = np.outer(module.lambda_s.numpy().astype(np.float64), module.lambda_a.numpy().astype(np.float64)).reshape(-1).clip(min=0)
    kfac = (plain / np.sqrt(product + DAMPING * product.mean())).astype(np.float32)
    rows.pair("K-FAC", "all coordinates", w_train * kfac, w_query * kfac)
    t_train, t_query = w_train * g.factor(name, DAMPING), w_query * g.factor(name, DAMPING)
    rows.pair("EK-FAC axes", "all coordinates", t_train, t_query)
    order = np.argsort(-lam, kind="stable")
    for k in WIDTHS:
        rows.pair("top-k coordinates", f"k={k}", t_train[:, order[:k]], t_query[:, order[:k]], 8 * k)
    w_train *= plain
    w_query *= plain  # from here on: the plain gradient in the eigenbasis
    rng = np.random.default_rng([11, number])
    logra(rows, w_train, w_query, module, rng)
    random_projection(rows, w_train, w_query, rng)
    grass(rows, g.masked("train", name), g.masked("query", name), rng)
    print(f"baselines: {name}", flush=True)
    for row in rows.rows.values():
        row.scores = row.scores.astype(np.float32) if row.scores is not None else None
    return rows.rows, own_train, own_query


def logra(rows: Rows, train: Floats, query: Floats, module: object, rng: np.random.Generator) -> None:
    """LoGra: P_o^T G P_i of rank r on both sides, random (Gaussian, as good in the eigenbasis as outside) or PCA start (leading eigenvectors)."""
    lambda_s, lambda_a = module.lambda_s.numpy(), module.lambda_a.numpy()  # type: ignore[attr-defined]  # both are kept by every fit
    d_out, d_in, r = lambda_s.size, lambda_a.size, max(LOGRA_RANKS)
    left = torch.from_numpy((rng.standard_normal((d_out, r)) / np.sqrt(r)).astype(np.float32))
    right = torch.from_numpy((rng.standard_normal((d_in, r)) / np.sqrt(r)).astype(np.float32))
    lead_o, lead_i = np.argsort(-lambda_s)[:r].copy(), np.argsort(-lambda_a)[:r].copy()

    def both(x: Floats) -> tuple[Floats, Floats]:
        e = torch.from_numpy(x).view(-1, d_out, d_in)
        return (left.T @ (e @ right)).numpy(), e[:, lead_o][:, :, lead_i].numpy()

    pairs = zip(("LoGra random", "LoGra PCA"), both(train), both(query), strict=True)
    for family, p_train, p_query in pairs:
        for rank in LOGRA_RANKS:
            stored, asked = half_whiten(p_train[:, :rank, :rank].reshape(len(train), -1), p_query[:, :rank, :rank].reshape(len(query), -1))
            rows.pair(family, f"rank {rank}", stored, asked, 2 * rank * (d_out + d_in) + 2 * rank**4)


def random_projection(rows: Rows, train: Floats, query: Floats, rng: np.random.Generator) -> None:
    """A dense Gaussian projection of the whole gradient to k numbers per module, preconditioned by their Fisher (TRAK)."""
    k = WIDTHS[-3]  # a quarter of the widest: the dense matrix is most of the whole sweep's cost
    p_train, p_query = np.zeros((len(train), k), np.float32), np.zeros((len(query), k), np.float32)
    for start in range(0, train.shape[1], 8192):
        part = slice(start, start + 8192)
        gaussian = rng.standard_normal((train[:, part].shape[1], k), dtype=np.float32)
        p_train += train[:, part] @ gaussian
        p_query += query[:, part] @ gaussian
    for width in WIDTHS[:-2]:
        rows.pair("random projection", f"k={width}", *half_whiten(p_train[:, :width], p_query[:, :width]), 8 + 2 * width**2)


def grass(rows: Rows, train: Floats, query: Floats, rng: np.random.Generator) -> None:
    """GraSS: a random mask of raw coordinates, then a sparse Johnson-Lindenstrauss map (each coordinate to one signed bucket), Fisher-preconditioned."""
    for width in WIDTHS:
        keep = rng.choice(train.shape[1], min(4 * width, train.shape[1]), replace=False)
        matrix = np.zeros((keep.size, width), np.float32)
        matrix[np.arange(keep.size), rng.integers(0, width, keep.size)] = rng.choice(np.array([-1, 1], np.float32), keep.size)
        rows.pair("GraSS", f"k={width}", *half_whiten(train[:, keep] @ matrix, query[:, keep] @ matrix), 9 * keep.size + 2 * width**2)
