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

from engine.blocks import BlockKind, blocks_of

SPLITS = ("train", "disjoint", "query")
CHUNK = 4096  # columns per float32 product; products are summed in float64


@dataclass
class Kernels:
    """K (n, n) per group of modules (a module, or a layer) and width, rows in the order of `SPLITS`. A group's file is FOLDER/WIDTH/GROUP.npy."""

    folder: Path
    sizes: dict[str, int]
    groups: dict[int, dict[str, list[str]]]

    def rows(self, split: str) -> slice:
        start = sum(self.sizes[s] for s in SPLITS[: SPLITS.index(split)])
        return slice(start, start + self.sizes[split])

    def block(self, names: Sequence[str], width: int) -> NDArray[np.float64]:
        """The block's K: the sum of its groups'."""
        own = [group for group, members in self.groups[width].items() if set(members) <= set(names)]
        if sum(len(self.groups[width][group]) for group in own) != len(names):
            raise ValueError(f"at width {width} the kernels are kept per {self.groups[width]}, which does not divide this block")
        total = np.zeros((sum(self.sizes.values()),) * 2)
        for group in own:
            total += np.load(self.folder / f"{width}" / f"{group}.npy", mmap_mode="r")
        return total


def compute(gradients: Gradients, c: float, widths: dict[int, BlockKind], folder: Path) -> Kernels:
    """K at damping c for every width {coordinates per module: kept per module or per layer}. Resumes layer by layer."""
    sizes = {split: gradients.stored(split, gradients.modules[0][0]).shape[0] for split in SPLITS}
    found = Kernels(folder, sizes, {width: blocks_of(gradients.modules, kind) for width, kind in widths.items()})
    n = sum(sizes.values())
    for width in widths:
        (folder / f"{width}").mkdir(parents=True, exist_ok=True)
    for layer, names in blocks_of(gradients.modules, "layer").items():
        targets = {(width, group) for width, groups in found.groups.items() for group, members in groups.items() if set(members) <= set(names)}
        if all((folder / f"{width}" / f"{group}.npy").exists() for width, group in targets):
            continue
        totals = {target: np.zeros((n, n), np.float32) for target in targets}
        for name in names:
            running, done = np.zeros((n, n)), 0
            order = np.argsort(-gradients.lam[name], kind="stable")
            for width in sorted(widths):
                for start in range(done, min(width, order.size), CHUNK):
                    part = order[start : min(start + CHUNK, width)]
                    z = np.concatenate([gradients.coordinates(split, name, c, part) for split in SPLITS])
                    running += ssyrk(1.0, z.T, trans=1, lower=1)
                done = min(width, order.size)
                group = next(g for g, members in found.groups[width].items() if name in members)
                totals[width, group] += running
        for (width, group), total in totals.items():
            temporary = folder / f"{width}" / f"{group}.part.npy"
            np.save(temporary, np.tril(total) + np.tril(total, -1).T)
            temporary.replace(folder / f"{width}" / f"{group}.npy")
        print(f"kernels: {layer}", flush=True)
    return found
