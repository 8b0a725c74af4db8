"""Inner products of stage-1 coordinates between all texts of a task: what every PCA sketch of them is made of.

PCA of the fitting rows F is P = Z_F^T L with L (n, k) from the Gram matrix K_FF (engine.pca), so the block coordinates of any row are x = Z P = K_{.F} L.
One pass over the whole whitened gradient, coordinates in order of corrected eigenvalue, gives K at every stage-1 width (prefixes of that order) at once; a block's K is
the sum of its modules'. Sketches of any block, width, k, rotation and scale are then n x n work. tests/benchmarks compare this with engine.projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from frontier_gradients import Gradients
from numpy.typing import NDArray
from scipy.linalg.blas import ssyrk

SPLITS = ("train", "disjoint", "query")
CHUNK = 4096  # columns per float32 product; products are summed in float64
ALL = 1 << 30


@dataclass
class Kernels:
    """K (n, n) per module and width, rows in the order of `SPLITS`."""

    folder: Path
    sizes: dict[str, int]

    def rows(self, split: str) -> slice:
        start = sum(self.sizes[s] for s in SPLITS[: SPLITS.index(split)])
        return slice(start, start + self.sizes[split])

    def module(self, name: str, width: int) -> NDArray[np.float32]:
        return np.load(self.folder / f"{width}" / f"{name}.npy", mmap_mode="r")

    def block(self, names: Sequence[str], width: int) -> NDArray[np.float64]:
        """The block's K: the sum of its modules'."""
        total = self.module(names[0], width).astype(np.float64)
        for name in names[1:]:
            total += self.module(name, width)
        return total


def compute(gradients: Gradients, c: float, widths: Sequence[int], folder: Path) -> Kernels:
    """K at damping c for every width (coordinates per module; ALL for no truncation). Resumes module by module."""
    sizes = {split: gradients.stored(split, gradients.modules[0][0]).shape[0] for split in SPLITS}
    found = Kernels(folder, sizes)
    widths = sorted(widths)
    n = sum(sizes.values())
    for width in widths:
        (folder / f"{width}").mkdir(parents=True, exist_ok=True)
    for name, _ in gradients.modules:
        if (folder / f"{widths[-1]}" / f"{name}.npy").exists():
            continue
        lam = gradients.lam[name]
        order = np.argsort(-lam, kind="stable")
        factor = gradients.factor(name, c)
        w = np.concatenate([gradients.stored(split, name) for split in SPLITS])
        lower = np.zeros((n, n))
        done = 0
        for width in widths:
            end = min(width, lam.size)
            while done < end:
                part = order[done : min(done + CHUNK, end)]
                z = w[:, part].astype(np.float32) * factor[part]
                lower += ssyrk(1.0, z.T, trans=1, lower=1)
                done += len(part)
            temporary = folder / f"{width}" / f"{name}.part.npy"
            np.save(temporary, (np.tril(lower) + np.tril(lower, -1).T).astype(np.float32))
            temporary.replace(folder / f"{width}" / f"{name}.npy")
        print(f"{name}: {lam.size} coordinates", flush=True)
    return found
