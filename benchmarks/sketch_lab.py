"""What goes further at equal bytes: stage-2 variants compared on one small model, from Gram matrices alone.

    python benchmarks/frontier.py --help                        # makes GRADIENTS, the task's whitened gradients
    python benchmarks/sketch_lab.py prepare --work GRADIENTS --lab LAB
    python benchmarks/sketch_lab.py run --lab LAB               # results/sketch_lab.json; goes on where it was stopped

Everything a PCA sketch does to examples is a function of dot products between stage-1 coordinates: x = P^T z = L^T (Z_fit z). So `prepare` keeps, for
every way of choosing stage-1 coordinates, the Gram matrix of all examples (stored, disjoint, queries), and `run` tries hundreds of stage-2 variants on
those. The reference is uncompressed EK-FAC with the same damping: the Gram matrix of all coordinates.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from frontier_gradients import Gradients
from numpy.typing import NDArray
from scipy.sparse import csr_array

from engine.pca import random_frame, spectrum
from engine.quantised import QuantisedMatrix
from engine.refine import refine_signs

WIDTHS = (512, 2048, 8192, 16384)  # stage-1 coordinates per module
DAMPING = 0.1
PARTS = ("train", "disjoint", "query")


def prepare(gradients: Gradients, lab: Path) -> None:
    """Write LAB/gram-*.npy (n, n) float32 per way of choosing and layer, LAB/z.npy (n, sum of 2,048 per module), LAB/reference.npy, LAB/lab.json."""
    torch.set_num_threads(1)
    lab.mkdir(parents=True, exist_ok=True)
    names = [name for name, _ in gradients.modules]
    layers = sorted({layer for _, layer in gradients.modules})
    lengths = {part: gradients.stored(part, names[0]).shape[0] for part in PARTS}
    stops = np.cumsum([lengths[part] for part in PARTS])
    where = {part: slice(int(stop - lengths[part]), int(stop)) for part, stop in zip(PARTS, stops, strict=True)}
    n = int(stops[-1])
    ratio = {name: gradients.lam[name] / (gradients.lam[name] + DAMPING * gradients.mean[name]) for name in names}
    pooled = np.sort(np.concatenate(list(ratio.values())))[::-1]
    z_small = np.lib.format.open_memmap(lab / "z.npy", mode="w+", dtype=np.float32, shape=(n, sum(min(2048, v.size) for v in ratio.values())))
    reference = np.zeros((lengths["query"], lengths["train"]), np.float32)
    column, kept, start = 0, {}, time.perf_counter()
    for layer in layers:
        totals: dict[str, NDArray[np.float32]] = {}
        for name in [name for name, own in gradients.modules if own == layer]:
            order = np.argsort(-gradients.lam[name], kind="stable")
            cuts = {f"top-{m}": min(m, order.size) for m in WIDTHS}
            cuts |= {f"joint-{m}": int((ratio[name] > pooled[m * len(names) - 1]).sum()) for m in WIDTHS[:-1]}
            kept |= {f"{key}/{name}": (cut, float(ratio[name][order[:cut]].sum()), float(ratio[name].sum())) for key, cut in cuts.items()}
            running, done = np.zeros((n, n), np.float32), 0
            for cut in sorted(set(cuts.values())):
                for low in range(done, cut, 4096):
                    chosen = order[low : min(low + 4096, cut)]
                    part = np.concatenate([gradients.coordinates(split, name, DAMPING, chosen) for split in PARTS])
                    if low < 2048:
                        width = min(chosen.size, 2048 - low)
                        z_small[:, column : column + width] = part[:, :width]
                        column += width
                    for own in where.values():  # the upper triangle of parts is enough
                        running[own, own.start :] += part[own] @ part[own.start :].T
                done = cut
                for key in [key for key, value in cuts.items() if value == cut]:
                    totals[key] = totals[key] + running if key in totals else running.copy()
                    if key == "top-8192":
                        np.save(lab / f"gram-{key}-{name}.npy", mirrored(running.copy(), where))
            for low in range(0, order.size, 8192):
                part = [gradients.coordinates(split, name, DAMPING, np.arange(low, min(low + 8192, order.size))) for split in ("query", "train")]
                reference += part[0] @ part[1].T
            print(f"{name} {time.perf_counter() - start:.0f} s", flush=True)
        for key, total in totals.items():
            np.save(lab / f"gram-{key}-layer{layer}.npy", mirrored(total, where))
    z_small.flush()
    np.save(lab / "reference.npy", reference)
    summary = {
        "modules": names,
        "layers": layers,
        "sizes": {name: int(v.size) for name, v in ratio.items()},
        "parts": {part: [s.start, s.stop] for part, s in where.items()},
        "kept": kept,
    }
    (lab / "lab.json").write_text(json.dumps(summary), encoding="utf-8")


def mirrored(upper: NDArray[np.float32], where: dict[str, slice]) -> NDArray[np.float32]:
    """A Gram matrix whose blocks below the diagonal of parts are filled in."""
    for own in where.values():
        upper[own.stop :, own] = upper[own, own.stop :].T
    return upper


@dataclass
class Basis:
    """PCA fitted on one part: x (n, r) coordinates of every example, loading L (n_fit, r) with P = Z_fit^T L, values lambda (r,)."""

    x: NDArray[np.float32]
    loading: NDArray[np.float32]
    values: NDArray[np.float64]


def pca(gram: NDArray[np.float32], fit: slice, *, normalise: bool = True) -> Basis:
    weights = 1 / np.sqrt(np.diagonal(gram)[fit].astype(np.float64)) if normalise else np.ones(fit.stop - fit.start)
    found = spectrum(torch.from_numpy(gram[fit, fit] * weights[:, None] * weights), drop=1e-3)  # the Gram matrices are sums of float32 products
    left = (weights[:, None] * found.vectors.numpy() / found.singular).astype(np.float32)
    return Basis(gram[:, fit] @ left, left, np.square(found.singular))


def fidelity(scores: NDArray[np.float32], reference: NDArray[np.float32]) -> dict[str, float]:
    """NDCG@20 (relevant: the reference's top 20) and Spearman, means over queries."""
    top = np.argsort(-reference, axis=1)[:, :20]
    relevant = np.zeros(reference.shape, np.bool_)
    np.put_along_axis(relevant, top, True, 1)
    discount = 1 / np.log2(np.arange(2, 22))
    gain = np.take_along_axis(relevant, np.argsort(-scores, axis=1, kind="stable")[:, :20], 1) @ discount / discount.sum()
    ranks = [np.argsort(np.argsort(v, axis=1, kind="stable"), axis=1) - (v.shape[1] - 1) / 2 for v in (scores, reference)]
    spearman = (ranks[0] * ranks[1]).sum(1) / np.sqrt(np.square(ranks[0]).sum(1) * np.square(ranks[1]).sum(1))
    return {"ndcg": round(float(gain.mean()), 4), "spearman": round(float(spearman.mean()), 4)}


class Runs:
    """Results by name, written after each, so that a stopped run goes on where it was."""

    def __init__(self, path: Path, reference: NDArray[np.float32], where: dict[str, slice]) -> None:
        self.path, self.reference, self.where = path, reference, where
        self.rows: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def add(self, name: str, scores: Callable[[], NDArray[np.float32]]) -> None:
        if name not in self.rows:
            start = time.perf_counter()
            self.rows[name] = fidelity(scores(), self.reference)
            print(f"{name}: {self.rows[name]} {time.perf_counter() - start:.1f} s", flush=True)
            self.path.write_text(json.dumps(self.rows, indent=1), encoding="utf-8")

    def split(self, x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(stored, query) rows."""
        return x[self.where["train"]], x[self.where["query"]]


def one_bit(
    runs: Runs, x: NDArray[np.float32], k: int, d: int, *, sweeps: int = 0, power: float = 0.0, values: NDArray[np.float64] | None = None
) -> NDArray[np.float32]:
    """Scores with d directions spread over k bits; power: the signs minimise an error weighted by values^power."""
    frame = random_frame(d, k, np.random.default_rng(0)).float().numpy()
    stored, asked = runs.split(x[:, :d])
    u = stored @ frame
    signs = np.where(u >= 0, np.float32(1), np.float32(-1))
    if sweeps:
        weight = np.ones(d, np.float32) if values is None else ((values[:d] / values[:d].mean()) ** power).astype(np.float32)
        signs = refine_signs((stored * weight) @ frame, (frame.T * weight) @ frame, sweeps)
    scale = np.square(u).sum(1) / (u * signs).sum(1)
    return (asked @ frame) @ (signs * scale[:, None]).T


def axes(runs: Runs, x: NDArray[np.float32], k: int, *, weighted: bool = False, two_bits: int = 0) -> NDArray[np.float32]:
    """Signs along the principal axes themselves: scale (13), or a decoder weight per axis; two_bits: leading axes that get a second bit."""
    stored, asked = runs.split(x[:, : k - two_bits])
    size = np.abs(stored).mean(0)
    scale = (np.abs(stored) / size).mean(1, keepdims=True)
    kept = np.sign(stored) * (size if weighted else size.mean()) * scale
    if two_bits:
        lead = stored[:, :two_bits]
        deviation = np.sqrt(np.square(lead / scale).mean(0))
        inner = np.abs(lead) < 0.9816 * deviation * scale
        kept[:, :two_bits] = np.sign(lead) * np.where(inner, 0.4528, 1.510) * deviation * scale
    return asked @ kept.T


def stage_2(runs: Runs, lab: Path, layers: Sequence[int]) -> None:
    """One block, m = 8,192 per module: what the bits are made of."""
    gram = sum(np.load(lab / f"gram-top-8192-layer{layer}.npy") for layer in layers)
    runs.add("stage 1 m=8192 floats", lambda: gram[runs.where["query"], runs.where["train"]])
    for part in ("train", "disjoint"):
        plain = pca(gram, runs.where[part], normalise=False)
        for k in (128, 512, 2032):
            runs.add(f"{part} k={k} axes", lambda b=plain, k=k: axes(runs, b.x, k))
            runs.add(f"{part} k={k} axes, weight per axis", lambda b=plain, k=k: axes(runs, b.x, k, weighted=True))
            runs.add(f"{part} k={k} axes, weight per axis, k/8 with two bits", lambda b=plain, k=k: axes(runs, b.x, k, weighted=True, two_bits=k // 8))
            runs.add(f"{part} k={k} rotated", lambda b=plain, k=k: one_bit(runs, b.x, k, min(k, b.x.shape[1])))
        basis = pca(gram, runs.where[part])
        for k in (128, 512, 2032):
            runs.add(f"{part} k={k} normalised, rotated", lambda b=basis, k=k: one_bit(runs, b.x, k, min(k, b.x.shape[1])))
            runs.add(f"{part} k={k} normalised, frame .65", lambda b=basis, k=k: one_bit(runs, b.x, k, round(0.65 * k)))
            for share in (0.8, 0.65, 0.5):
                runs.add(f"{part} k={k} normalised, frame {share:g}, refined", lambda b=basis, k=k, c=share: one_bit(runs, b.x, k, round(c * k), sweeps=2))
        for power in (0.5, 1.0):
            name = f"{part} k=512 normalised, frame 0.65, refined, error weighted by lambda^{power:g}"
            runs.add(name, lambda b=basis, p=power: one_bit(runs, b.x, 512, 333, sweeps=2, power=p, values=b.values))


def stored_forms(runs: Runs, lab: Path) -> None:
    """P at fewer bits, k = 512 over 333 directions, m = 2,048 per module."""
    z = np.load(lab / "z.npy")
    gram = z @ z.T
    for part in ("train", "disjoint"):
        basis = pca(gram, runs.where[part])
        p = torch.from_numpy(z[runs.where[part]].T @ basis.loading[:, :333])
        for name, stored in (
            ("fp16", lambda p=p: p.half().float()),
            ("2 bits", lambda p=p: two_bit(p)),
            ("1 bit", lambda p=p: p.sign() * p.abs().mean(1, keepdim=True)),
        ):
            runs.add(f"{part} k=512 m=2048, P at {name}", lambda s=stored: one_bit(runs, z @ s().numpy(), 512, 333, sweeps=2))


def two_bit(p: torch.Tensor) -> torch.Tensor:
    return QuantisedMatrix.quantise(p).transposed(torch.eye(p.shape[1])).T


def first_stages(runs: Runs, lab: Path, modules: int) -> None:
    """Floats, no PCA: coordinates kept against coordinates sketched at the same width, out of 2,048 per module."""
    z = np.load(lab / "z.npy").reshape(-1, modules, 2048)
    rng = np.random.default_rng(0)
    whole = [z[runs.where[part]].reshape(-1, modules * 2048) for part in ("query", "train")]
    runs.add("stage 1 m=2048 floats", lambda: whole[0] @ whole[1].T)
    runs.add("stage 1 m=1024 floats", lambda: np.einsum("qmc,smc->qs", z[runs.where["query"], :, :1024], z[runs.where["train"], :, :1024], optimize=True))
    rest = modules * 1536
    bucket, sign = rng.integers(0, modules * 512, rest), 1 - 2.0 * rng.integers(0, 2, rest)
    table = csr_array((sign.astype(np.float32), (np.arange(rest), bucket)), shape=(rest, modules * 512))

    def hybrid() -> NDArray[np.float32]:
        kept = [
            np.concatenate([z[runs.where[p], :, :512].reshape(-1, modules * 512), z[runs.where[p], :, 512:].reshape(-1, rest) @ table], axis=1)
            for p in ("query", "train")
        ]
        return np.asarray(kept[0] @ kept[1].T, np.float32)

    runs.add("stage 1: top 512 per module + CountSketch of the next 1,536 to 512, floats", hybrid)
    for key in ("top", "joint"):
        for m in (512, 2048, 8192):
            grams = (np.load(lab / f"gram-{key}-{m}-layer{layer}.npy", mmap_mode="r") for layer in range(modules // 4))
            runs.add(f"stage 1 {key} m={m} floats", lambda g=grams: sum(np.array(part[runs.where["query"], runs.where["train"]]) for part in g))


def run(lab: Path, path: Path) -> None:
    torch.set_num_threads(1)
    lab_json = json.loads((lab / "lab.json").read_text(encoding="utf-8"))
    runs = Runs(path, np.load(lab / "reference.npy"), {part: slice(*ends) for part, ends in lab_json["parts"].items()})
    first_stages(runs, lab, len(lab_json["modules"]))
    stage_2(runs, lab, lab_json["layers"])
    stored_forms(runs, lab)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["prepare", "run"])
    parser.add_argument("--work", type=Path, help="folder of whitened gradients (benchmarks/frontier_gradients.py)")
    parser.add_argument("--lab", type=Path, required=True)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "sketch_lab.json")
    arguments = parser.parse_args()
    if arguments.step == "prepare":
        prepare(Gradients(arguments.work), arguments.lab)
    else:
        run(arguments.lab, arguments.json)
