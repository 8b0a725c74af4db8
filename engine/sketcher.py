"""Examples to sketches and queries to coordinates: stage 1 streamed into stage 2, then signs.

The composition of the walk (method: coordinates -> PCA/SRHT -> signs and scales); one module's slice is alive at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from engine.coordinates import CoordinateMap
from engine.example import Batch, Example, collate, plan_batches
from engine.model import LoadedModel
from engine.projection import Projection
from engine.signs import FLAG_NO_TARGET, FLAG_NONFINITE, FLAG_ZERO, Sketch

CACHED_BYTES = 10**9  # coordinates of a model that is kept elsewhere, held in main memory between its passes and P


@dataclass(frozen=True, slots=True)
class QuerySketch:
    """The float side of equation (14), one row per query.

    y (B, K) float32: block coordinates; z_norm_sq (B,): ||z||^2; coverage (B,): sum_b ||P_b^T z_b||^2 / sum_b ||z_b||^2, None for the SRHT;
    loss (B,): summed over target tokens, in nats; n_tokens (B,): target tokens; flags (B,) uint8: 0, or why the query cannot be scored.
    """

    y: NDArray[np.float32]
    z_norm_sq: NDArray[np.float32]
    coverage: NDArray[np.float32] | None
    loss: NDArray[np.float32]
    n_tokens: NDArray[np.int32]
    flags: NDArray[np.uint8]


class Sketcher:
    """Model, stage 1 and stage 2 together; what a store keeps in shared/sketch, made to run."""

    def __init__(self, loaded: LoadedModel, coordinates: CoordinateMap, projection: Projection, *, batch_tokens: int = 4096) -> None:
        missing = set(coordinates.widths) ^ set(projection.modules)
        if missing:
            raise ValueError(f"coordinates and projection disagree on module {sorted(missing)[0]}")
        self.loaded = loaded
        self.coordinates = coordinates
        self.projection = projection
        self.batch_tokens = batch_tokens

    def sketch(self, examples: Sequence[Example], rows: Sequence[int], progress: Callable[[int], None] | None = None) -> Sketch:
        """One-bit sketches of training examples, in the order given. `rows`: store-wide row numbers; `progress` is told the examples of each batch."""
        found = self._run(examples, rows, progress)
        codes, scales = self.projection.encode(found.y)
        bad = found.flags != 0
        codes[bad], scales[bad] = 0, 0
        return Sketch(codes, scales, np.where(bad, 0, found.z_norm_sq).astype(np.float32), found.loss, found.n_tokens, found.flags)

    def query(self, examples: Sequence[Example]) -> QuerySketch:
        """Float coordinates of queries; a query without target tokens or with a zero or non-finite gradient is flagged, not raised."""
        return self._run(examples, range(len(examples)))

    def token_coordinates(self, example: Example) -> NDArray[np.float32]:
        """(T, K) float32: the coordinates of each position's outer product alone; they sum to the query's y exactly ("through this position")."""
        batch = collate([example], [0], self.loaded.pad_id, self.loaded.device)
        y = self.projection.start((1, len(example)), self.loaded.device)

        def consume(name: str, z: torch.Tensor) -> None:
            self.projection.add(y, name, z)

        self.coordinates.stream(batch, consume, per_position=True)
        return self.projection.finish(y)[0].cpu().numpy()

    def _run(self, examples: Sequence[Example], rows: Sequence[int], progress: Callable[[int], None] | None = None) -> QuerySketch:
        n, layout = len(examples), self.projection.layout
        y = np.zeros((n, layout.total_k), np.float32)
        norm_sq, loss = np.zeros(n, np.float32), np.zeros(n, np.float32)
        n_tokens, flags = np.array([e.n_targets for e in examples], np.int32), np.zeros(n, np.uint8)
        flags[n_tokens == 0] = FLAG_NO_TARGET
        usable = [i for i in range(n) if flags[i] == 0]
        plans = [[usable[j] for j in plan] for plan in plan_batches([len(examples[i]) for i in usable], self.batch_tokens)]
        for together in self._together(plans):
            chosen = [i for plan in together for i in plan]
            batches = [collate([examples[i] for i in plan], [rows[i] for i in plan], self.loaded.pad_id, self.loaded.device) for plan in together]
            y[chosen], norm_sq[chosen], loss[chosen] = self._cached(batches) if self.loaded.kept_elsewhere else self._batch(batches[0])
            if progress:
                progress(len(chosen))
        finite = np.isfinite(norm_sq) & np.isfinite(loss) & np.isfinite(y).all(axis=1)
        flags[~finite] |= FLAG_NONFINITE
        flags[(norm_sq == 0) & (flags == 0)] = FLAG_ZERO
        y[flags != 0] = 0
        coverage = None
        if self.projection.method == "pca":
            coverage = (self.projection.captured(y) / np.where(norm_sq > 0, norm_sq, 1)).astype(np.float32)
        return QuerySketch(y, norm_sq, coverage, loss, n_tokens, flags)

    def _batch(self, batch: Batch) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        y = self.projection.start((len(batch.ids),), self.loaded.device)
        norm_sq = torch.zeros(len(batch.ids), dtype=torch.float64, device=self.loaded.device)

        def consume(name: str, z: torch.Tensor) -> None:
            norm_sq.add_(z.double().square().sum(-1).to(norm_sq.device))
            self.projection.add(y, name, z)

        stats = self.coordinates.stream(batch, consume)
        return self.projection.finish(y).cpu().numpy(), norm_sq.float().cpu().numpy(), stats.loss.float().cpu().numpy()

    def _together(self, plans: list[list[int]]) -> Iterator[list[list[int]]]:
        """Batches whose coordinates are held until P is applied to all of them: one, or, for a model that is kept elsewhere, as many as CACHED_BYTES hold."""
        most = CACHED_BYTES // (4 * sum(self.coordinates.widths.values())) if self.loaded.kept_elsewhere else 0
        together: list[list[int]] = []
        for plan in plans:
            if together and sum(map(len, together)) + len(plan) > most:
                yield together
                together = []
            together.append(plan)
        if together:
            yield together

    def _cached(self, batches: Sequence[Batch]) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """As `_batch`, of several batches: each module's slice of P is read once for all of them, and the next one meanwhile."""
        held: dict[str, list[torch.Tensor]] = {name: [] for name in self.projection.modules}
        losses = [self.coordinates.stream(batch, lambda name, z: held[name].append(z.cpu())).loss.float().cpu() for batch in batches]
        n = sum(len(batch.ids) for batch in batches)
        y, norm_sq = self.projection.start((n,), self.loaded.device), torch.zeros(n, dtype=torch.float64)
        names = self.projection.modules
        for name, following in zip(names, [*names[1:], None], strict=True):
            if self.projection.ahead is not None:
                self.projection.ahead.will_need(following)
            z = torch.cat(held.pop(name))
            norm_sq += z.double().square().sum(-1)
            self.projection.add(y, name, z)
        return self.projection.finish(y).cpu().numpy(), norm_sq.float().numpy(), torch.cat(losses).numpy()

    def save(self, folder: Path) -> None:
        """Write what sketching a query needs: positions, used rows and columns of Q, corrected eigenvalues there, P and c_b."""
        self.coordinates.save(folder)
        self.projection.save(folder)

    @classmethod
    def load(cls, folder: Path, loaded: LoadedModel, *, batch_tokens: int = 4096) -> Sketcher:
        """Inverse of `save`, on the model's device; for a model that is kept elsewhere P stays in its mapped file, read module by module."""
        projection = Projection.load(folder, "cpu" if loaded.kept_elsewhere else loaded.device)
        return cls(loaded, CoordinateMap.load(folder, loaded), projection, batch_tokens=batch_tokens)


def spill_coordinates(
    coordinates: CoordinateMap,
    examples: Sequence[Example],
    rows: Sequence[int],
    folder: Path,
    batch_tokens: int,
    progress: Callable[[int], None] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Stage-1 coordinates of the PCA fitting set on disk: {module: (n, m_u) float32, memory-mapped}, rows in the order of `examples`."""
    z = spill_files(coordinates, len(examples), folder)
    for plan in plan_batches([len(e) for e in examples], batch_tokens):
        batch = collate([examples[i] for i in plan], [rows[i] for i in plan], coordinates.loaded.pad_id, coordinates.loaded.device)

        def consume(name: str, values: torch.Tensor, plan: list[int] = plan) -> None:
            z[name][plan] = values.cpu().numpy()

        coordinates.stream(batch, consume)
        if progress:
            progress(len(plan))
    return z


def spill_files(coordinates: CoordinateMap, n: int, folder: Path, mode: Literal["r", "w+"] = "w+") -> dict[str, NDArray[np.float32]]:
    """Arrays for the coordinates of n examples, new ones or those of an earlier run ("r"): {module: (n, m_u) float32, memory-mapped}."""
    folder.mkdir(parents=True, exist_ok=True)
    return {
        name: np.lib.format.open_memmap(folder / f"{i}.npy", mode=mode, dtype=np.float32, shape=(n, width))
        for i, (name, width) in enumerate(coordinates.widths.items())
    }
