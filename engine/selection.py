"""Stage 1: which coordinates of the eigenbasis are kept, by corrected eigenvalue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from engine.curvature import Curvature, ModuleCurvature

Selection = dict[str, NDArray[np.int64]]
POOL = 16  # candidates per module and kept coordinate when a block chooses jointly; also what curvature keeps where the grid is too large


@dataclass(frozen=True, slots=True)
class Selected:
    """positions {module: (m_u,) sorted flat positions o * d_in + i}; kept: {module: (kept, all) sums of Lambda / (Lambda + lambda)}."""

    positions: Selection
    kept: dict[str, tuple[float, float]]

    @property
    def kept_share(self) -> float:
        """Share of the expected half-whitened energy that stage 1 keeps, over all modules."""
        total = sum(whole for _, whole in self.kept.values())
        return sum(part for part, _ in self.kept.values()) / total if total > 0 else 0.0


def top_positions(values: NDArray[np.float32], m: int) -> NDArray[np.int64]:
    """Indices of the m largest of `values` (1-D), sorted; among equals the lowest index wins."""
    if m >= values.size:
        return np.arange(values.size, dtype=np.int64)
    if m <= 0:
        return np.empty(0, np.int64)
    threshold = np.partition(values, values.size - m)[values.size - m]
    above = np.flatnonzero(values > threshold)
    level = np.flatnonzero(values == threshold)[: m - above.size]
    return np.sort(np.concatenate([above, level])).astype(np.int64)


def select_coordinates(curvature: Curvature, blocks: Mapping[str, Sequence[str]], m: Mapping[str, int], *, joint: bool = False) -> Selected:
    """Keep the coordinates with the largest corrected eigenvalues.

    m: coordinates per module, capped by the module's grid. joint: the sum of m over each block is spent where Lambda / (Lambda + lambda_u) is largest, so
    that a module may keep more or fewer than its m (at least one).
    """
    positions: Selection = {}
    kept: dict[str, tuple[float, float]] = {}
    for names in blocks.values():
        widths = _joint_widths(curvature, names, m) if joint and len(names) > 1 else {name: m[name] for name in names}
        for name in names:
            module = curvature.modules[name]
            grid, values = _candidates(module)
            chosen = top_positions(values, widths[name])
            positions[name] = chosen if grid is None else np.sort(grid[chosen])
            kept[name] = (_energy(values[chosen], module), _whole(values, module))
    return Selected(positions, kept)


def _joint_widths(curvature: Curvature, names: Sequence[str], m: Mapping[str, int]) -> dict[str, int]:
    """How many coordinates each module keeps when the block's sum of m goes to the largest Lambda / (Lambda + lambda)."""
    pools: list[NDArray[np.float64]] = []
    for name in names:
        module = curvature.modules[name]
        _, values = _candidates(module)
        best = np.sort(values[top_positions(values, POOL * m[name])])[::-1].astype(np.float64)
        pools.append(best / (best + module.damping))
    owner = np.concatenate([np.full(pool.size, i) for i, pool in enumerate(pools)])
    chosen = top_positions(np.concatenate(pools), sum(m[name] for name in names))
    counts = np.bincount(owner[chosen], minlength=len(names))
    return {name: max(int(count), 1) for name, count in zip(names, counts, strict=True)}


def _candidates(module: ModuleCurvature) -> tuple[NDArray[np.int64] | None, NDArray[np.float32]]:
    """(grid positions or None for the whole grid, corrected eigenvalues there), both 1-D."""
    grid: Any = getattr(module, "positions", None)
    values = np.asarray(module.lam, np.float32).reshape(-1)
    return (None if grid is None else np.asarray(grid, np.int64)), values


def _energy(values: NDArray[np.float32], module: ModuleCurvature) -> float:
    if module.damping <= 0:
        return float(values.size)
    return float(sum(np.sum(part / (part + module.damping)) for part in _parts(values)))


def _whole(values: NDArray[np.float32], module: ModuleCurvature) -> float:
    """Sum over the whole grid; where only candidates are known, the rest is bounded from above (Jensen), which makes the kept share a lower bound."""
    rest = module.d_out * module.d_in - values.size
    known = _energy(values, module)
    if rest <= 0:
        return known
    mean = max(module.mean_lambda * module.d_out * module.d_in - float(values.sum(dtype=np.float64)), 0.0) / rest
    return known + rest * mean / (mean + module.damping)


def _parts(values: NDArray[np.float32], size: int = 1 << 22) -> Iterator[NDArray[np.float64]]:
    for start in range(0, values.size, size):
        yield values[start : start + size].astype(np.float64)
