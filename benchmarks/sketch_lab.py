"""What goes further at equal bytes: stage-2 variants compared on one small model, from Gram matrices alone.

    python benchmarks/outcomes.py --work DIR --only model     # the model under study and its texts
    python benchmarks/sketch_lab.py prepare --work DIR --lab LAB
    python benchmarks/sketch_lab.py run --lab LAB

Everything a PCA sketch does to examples is a function of dot products between stage-1 coordinates: x = P^T z = L^T (Z_fit z). So `prepare` keeps, for
every way of choosing stage-1 coordinates, the Gram matrix of all examples (stored, disjoint, queries), and `run` tries hundreds of stage-2 variants on
those. The reference is uncompressed EK-FAC with the same damping: the Gram matrix of all coordinates.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from frontier_gradients import Gradients
from numpy.typing import NDArray

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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["prepare", "run"])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--lab", type=Path, required=True)
    arguments = parser.parse_args()
    prepare(Gradients(arguments.work), arguments.lab)
