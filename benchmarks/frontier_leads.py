"""Leads tried beyond the default's form, in both tables of benchmarks/frontier.py: other decoders, hybrids, Kronecker-structured sketches, less damping.

    python benchmarks/frontier_leads.py --work DIR [--only decoder ...] [--out benchmarks/results]

After frontier.py, whose gradients, kernels and outcomes it takes. Every row is compared with the default's form at the same bits (one block, 16,384 coordinates per
module, frame, directions flattened): paired 95 % intervals. Scores are kept in DIR/leads-*, so that a stopped run goes on. Writes frontier_leads.json and .md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import frontier
import frontier_kernels as kernels
import numpy as np
import outcomes
import torch
from frontier_baselines import Row, half_whiten
from frontier_gradients import Floats, Gradients
from frontier_sketches import Fit, Lab, Plan

from engine.budget import DIRECTIONS, FLATTEN, REFINE
from engine.pca import random_frame
from engine.refine import refine_signs

WIDTH = 16384
BITS = (496, 2032)
RANKS = (4, 8, 11, 16)
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
SMALL_DAMPING = 0.01
Scores = Callable[[], Floats]


def signs_of(x: Floats) -> Floats:
    return np.where(x >= 0, np.float32(1), np.float32(-1))


class Framed:
    """k bits over the leading directions of x (n, r): frame, refined bits and unbiased scales, as engine.projection makes them."""

    def __init__(self, x: Floats, k: int) -> None:
        self.d = min(round(DIRECTIONS * k), x.shape[1])
        self.x = np.ascontiguousarray(x[:, : self.d])
        self.frame = random_frame(self.d, k, np.random.default_rng([0, 0])).float().numpy()
        self.u = self.x @ self.frame

    def bits(self, rows: slice) -> Floats:
        return refine_signs(np.ascontiguousarray(self.u[rows]), self.frame.T @ self.frame, REFINE)

    def scores(self, train: slice, query: slice) -> Floats:
        b, u = self.bits(train), self.u[train]
        return (self.u[query] @ b.T) * (np.square(u).sum(1) / (u * b).sum(1))


def ridge_decoder(x: Floats, k: int, train: slice, query: slice, fitted: slice, ridge: float) -> Floats:
    """The frame as encoder; the decoder (k, d) is the ridge regression of the fitting rows' unit vectors on their bits. Costs k x d shared numbers."""
    framed = Framed(x, k)
    stored, learnt = framed.bits(train), framed.bits(fitted)
    v = framed.x[fitted] / np.linalg.norm(framed.x[fitted], axis=1, keepdims=True)
    gram = learnt.T @ learnt / len(learnt) + ridge * np.eye(k, dtype=np.float32)
    decoded = stored @ np.linalg.solve(gram, learnt.T @ v / len(learnt))
    own = framed.x[train]
    return (framed.x[query] @ decoded.T) * (np.square(own).sum(1) / np.maximum((decoded * own).sum(1), 1e-9))


def bit_weights(x: Floats, k: int, train: slice, query: slice, fitted: slice) -> Floats:
    """A weight per bit on the query's side: the bit's mean magnitude along the fitting rows. Free in bytes."""
    framed = Framed(x, k)
    weight = (framed.u[fitted] * framed.bits(fitted)).mean(0)
    u, b = framed.u[train], framed.bits(train)
    return ((framed.u[query] * (weight / weight.mean())) @ b.T) * (np.square(u).sum(1) / (u * b).sum(1))


def axis_weights(x: Floats, k: int, train: slice, query: slice, fitted: slice, power: float) -> Floats:
    """Signs along the principal axes, each weighted by a power of its mean magnitude over the fitting rows (0: equation (13)). Free in bytes."""
    own = x[:, :k]
    size = np.abs(own[fitted]).mean(0)
    relative = (np.abs(own[train]) / size).mean(1)
    return (own[query] * size**power) @ signs_of(own[train]).T * relative


def hybrid(x: Floats, k: int, train: slice, query: slice, axes: int) -> Floats:
    """The leading `axes` directions as one sign each with a scale of their own, the rest in a frame; two bytes of the second scale are taken from the bits."""
    lead = x[:, :axes]
    size = np.abs(lead[train]).mean(1)
    return (lead[query] @ signs_of(lead[train]).T) * size + Framed(x[:, axes:], k - axes - 16).scores(train, query)


def compress(g: Gradients, folder: Path) -> None:
    """Per module: R_S^T T R_A (n, r, r) of all texts at the largest rank, T the half-whitened gradient; R Gaussian, or the rows and columns that keep most."""
    r = max(RANKS)
    for number, (name, _) in enumerate(g.modules):
        path = folder / f"kronecker-{number}.npz"
        if path.exists():
            continue
        rng = np.random.default_rng([5, number])
        d_out, d_in = g.shape(name)
        left, right = (((rng.standard_normal((d, r))) / np.sqrt(d)).astype(np.float32) for d in (d_out, d_in))
        kept = (g.lam[name] / (g.lam[name] + frontier.DAMPING * g.mean[name])).reshape(d_out, d_in)
        rows, columns = np.argsort(-kept.sum(1))[:r].copy(), np.argsort(-kept.sum(0))[:r].copy()
        found: dict[str, list[Floats]] = {"random": [], "leading": []}
        factor = g.factor(name, frontier.DAMPING)
        for split in kernels.SPLITS:
            stored = g.stored(split, name)
            for start in range(0, len(stored), 256):
                t = (stored[start : start + 256].astype(np.float32) * factor).reshape(-1, d_out, d_in)
                found["random"].append(np.einsum("nda,ds->nsa", t @ right, left, optimize=True))
                found["leading"].append(t[:, rows][:, :, columns])
        np.savez(path, random=np.concatenate(found["random"]), leading=np.concatenate(found["leading"]))


def kronecker(g: Gradients, folder: Path, kind: str, r: int, fisher: bool, lab: Lab, fit: Fit) -> Floats:
    """One bit per number of every module's r x r sketch, one scale, a weight per number (its mean magnitude over the fitting rows) on the query's side.

    fisher: preconditioned by the Fisher of the fitting rows' sketches, module by module: r^4 shared numbers each."""
    compress(g, folder)
    train, query, fitted = (lab.kernels.rows(split) for split in ("train", "query", fit))
    stored, asked, learnt = [], [], []
    for number in range(len(g.modules)):
        x = np.load(folder / f"kronecker-{number}.npz")[kind][:, :r, :r].reshape(-1, r * r)
        if fisher:
            _, x = half_whiten(x[fitted], x)
        stored.append(x[train])
        asked.append(x[query])
        learnt.append(np.abs(x[fitted]).mean(0))
    x, y, size = np.concatenate(stored, 1), np.concatenate(asked, 1), np.concatenate(learnt)
    return np.asarray((y * size) @ signs_of(x).T * (np.abs(x) / size).mean(1), np.float32)


def weighted(lab: Lab, fit: Fit, power: float) -> Floats:
    """Coordinates of all texts in the default's PCA, directions weighted by sigma^-power."""
    found = lab.coordinates("model", WIDTH, fit, normalise=True)
    weight = found.singular[0] ** -power
    return np.asarray(found.x[0] * (weight / weight.mean()), np.float32)


def leads(lab: Lab, g: Gradients, fit: Fit, folder: Path, only: Sequence[str]) -> Iterator[tuple[str, float, int | None, Scores]]:
    """(name, bytes, bits of the default's row it is compared with, its scores)."""
    train, query, fitted = (lab.kernels.rows(split) for split in ("train", "query", fit))

    def on(form: Callable[..., Floats], power: float, *arguments: object) -> Scores:
        return lambda: form(weighted(lab, fit, power), *arguments)

    if "floats" in only:
        for power in POWERS:
            yield f"floats, flattened {power:g}", 2.0 * (fitted.stop - fitted.start), None, on(floats, power, train, query)
    for k in BITS:
        size = k / 8 + 2
        yield f"default's form, k={k}", size, None, on(framed, FLATTEN, k, train, query)
        if "axes" in only:
            for power in (0.0, 0.5, 1.0):
                yield f"signs along the axes, weights of power {power:g}, k={k}", size, k, on(axis_weights, 0.0, k, train, query, fitted, power)
        if "damped" in only:
            for c in (1.0, 0.3, 0.1):
                yield f"weights damped by {c:g}, k={k}", size, k, partial(damped, lab, fit, c, k, train, query)
        if "hybrid" in only:
            for share in (16, 8):
                yield f"hybrid, 1/{share} of the bits on axes, k={k}", size, k, on(hybrid, FLATTEN, k, train, query, k // share)
        if "decoder" in only:
            yield f"weight per bit, k={k}", size, k, on(bit_weights, FLATTEN, k, train, query, fitted)
            for ridge in (0.3, 1.0, 3.0):
                yield f"linear decoder, ridge {ridge:g}, k={k}", size, k, on(ridge_decoder, FLATTEN, k, train, query, fitted, ridge)
    if "kronecker" in only:
        for kind in ("random", "leading"):
            for r in RANKS:
                k = r * r * len(g.modules)
                nearest = min(BITS, key=partial(distance, k))
                for fisher in (False, True):
                    name = f"Kronecker, {kind} rank {r}{', Fisher' if fisher else ''}, k={k}"
                    yield name, k / 8 + 2, nearest, partial(kronecker, g, folder.parent, kind, r, fisher, lab, fit)
    if "damping" in only:
        held = kernels.compute(g, SMALL_DAMPING, {WIDTH: "layer"}, folder.parents[1] / f"kernels-{SMALL_DAMPING}")
        small = Lab(held, lab.modules, lab.sizes)
        for k in BITS:
            for power in (0.0, FLATTEN):
                plan = Plan("model", k, WIDTH, scale="unbiased", directions=DIRECTIONS, refine=REFINE, normalise=True, flatten=power)
                yield f"sketched at damping {SMALL_DAMPING:g}, flattened {power:g}, k={k}", k / 8 + 2, k, partial(planned, small, plan, fit)


def distance(a: int, b: int) -> int:
    return abs(a - b)


def floats(x: Floats, train: slice, query: slice) -> Floats:
    return x[query] @ x[train].T


def damped(lab: Lab, fit: Fit, c: float, k: int, train: slice, query: slice) -> Floats:
    """Directions weighted by (sigma^2 + c sigma_1^2)^-1/2 on both sides instead of a power of sigma."""
    found = lab.coordinates("model", WIDTH, fit, normalise=True)
    weight = 1 / np.sqrt(np.square(found.singular[0] / found.singular[0][0]) + c)
    return framed(np.asarray(found.x[0] * (weight / weight.mean()), np.float32), k, train, query)


def framed(x: Floats, k: int, train: slice, query: slice) -> Floats:
    return Framed(x, k).scores(train, query)


def planned(lab: Lab, plan: Plan, fit: Fit) -> Floats:
    scores = lab.scores(plan, fit).scores
    assert scores is not None
    return scores.astype(np.float32)


def kept(path: Path, make: Scores) -> Floats:
    if not path.exists():
        np.save(path, make().astype(np.float32))
    return np.load(path)


def table(lab: Lab, g: Gradients, evidence: frontier.Evidence, fit: Fit, folder: Path, only: Sequence[str]) -> list[dict[str, Any]]:
    """Figures of all leads, each with its paired difference from the default's form."""
    rows, base = [], []
    for name, size, bits, make in leads(lab, g, fit, folder, only):
        scores = kept(folder / f"{name.replace(' ', '_').replace('/', '-')}.npy", make)
        rows.append(Row(name, "lead", size, one_bit=True, scores=scores.astype(np.float64)))
        base.append(bits)
        print(fit, name, flush=True)
    found = evidence.figures(rows)
    by_name = {f["name"]: f for f in found}
    for own, bits in zip(found, base, strict=True):
        if bits is not None:
            compared = frontier.compare(own, [by_name[f"default's form, k={bits}"]])
            assert compared is not None
            own["difference"] = {key: compared[key]["difference"] for key in ("lds", "ndcg")} | {"its_bytes": compared["lds"]["its_bytes"]}
    return [{key: value for key, value in f.items() if not key.startswith("_")} for f in found]


def markdown(tables: dict[str, list[dict[str, Any]]]) -> str:
    def cell(value: Sequence[float]) -> str:
        return f"{value[0]:.3f} [{value[1]:.3f}, {value[2]:.3f}]"

    lines = []
    for title, rows in tables.items():
        lines += [
            f"## PCA {title}",
            "",
            "| lead | bytes | LDS | NDCG@20 | LDS minus the default's form | NDCG@20 minus | at its bytes |",
            "|---|---|---|---|---|---|---|",
        ]
        for r in rows:
            lead = f"| {r['name']} | {r['bytes']:,.0f} | {cell(r['lds'])} | {cell(r['ndcg'])} |"
            d = r.get("difference")
            lines.append(f"{lead} {cell(d['lds'])} | {cell(d['ndcg'])} | {d['its_bytes']:,.0f} |" if d else f"{lead} | | |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=outcomes.RESULTS)
    every = ("floats", "damped", "axes", "hybrid", "decoder", "kronecker", "damping")
    parser.add_argument("--only", nargs="*", choices=every, default=list(every))
    args = parser.parse_args()
    torch.set_num_threads(1)
    task, g = frontier.prepare(args.work)
    held = kernels.compute(g, frontier.DAMPING, frontier.WIDTHS, args.work / f"kernels-{frontier.DAMPING}")
    lab = Lab(held, g.modules, {name: g.lam[name].size for name, _ in g.modules})
    reference = frontier.common_rows(args.work, g, made_only=True)[frontier.REFERENCE].scores
    assert reference is not None
    evidence = frontier.Evidence(task, outcomes.RESULTS / "outcomes.npz", reference)
    folder = args.work / "leads"
    tables = {}
    for title, fit in frontier.TABLES.items():
        own = folder / fit
        own.mkdir(parents=True, exist_ok=True)
        tables[title] = table(lab, g, evidence, fit, own, args.only)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "frontier_leads.json").write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
    (args.out / "frontier_leads.md").write_text(markdown(tables), encoding="utf-8")
    print(markdown(tables))


if __name__ == "__main__":
    main()
