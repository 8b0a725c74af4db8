"""Fitting stage 2: PCA of each block (or a drawn SRHT), rotation or frame, and the scale constant c_b."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.blocks import BlockLayout
from engine.errors import SettingError
from engine.pca import DROP, DROP_FAST, Coordinates, Spectrum, flattening, gram, loading, random_frame, random_rotation, spectrum, squared_norms
from engine.projection import Method, Projection
from engine.quantised import DenseMatrix, Matrix, QuantisedMatrix
from engine.signs import ScaleKind, geometric_mean_scale
from engine.srht import SRHT

BITS_PER_DIRECTION = 4  # beyond this, more bits would describe the same few directions


def fit_projection(
    z: Coordinates,
    blocks: Mapping[str, Sequence[str]],
    k: int | Mapping[str, int],
    *,
    rotate: bool = True,
    scale: ScaleKind = "unbiased",
    seed: int = 0,
    explicit_k: bool = False,
    method: Method = "pca",
    normalise: bool = False,
    directions: float | None = None,
    refine: int = 0,
    flatten: float = 0.0,
    quantise: bool = False,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
) -> Projection:
    """Fit every block's projection on z {module: (n, m_u) float32, may be memory-mapped}.

    k: bits of each block, one number or one per block. A k above the block's rank is refused with SettingError naming the rank when `explicit_k`; else it is
    reduced to the rank (times BITS_PER_DIRECTION with `directions`), with a notice in `info["notices"]`.
    rotate: fold a random rotation of the k coordinates into P. directions: factor P instead, into the leading directions * k principal directions and a
    random tight frame of k columns; refine: passes over the signs inside that frame. normalise: PCA of z / ||z||, so that examples with long gradients do
    not own the span. flatten (with directions): each direction is weighted by sigma^-flatten on both sides, which acts as less damping. quantise: P at two bits per entry, else `dtype`. The fit holds one n x n float64 Gram matrix, one module's slice and P.
    """
    wanted = {block: k if isinstance(k, int) else k[block] for block in blocks}
    names = [name for members in blocks.values() for name in members]
    n = z[names[0]].shape[0]
    if flatten and directions is None:
        raise ValueError("flatten needs directions: only a factored P carries weights")
    if n < 1:
        raise SettingError("the projection needs at least one fitting example")
    norms = squared_norms(z, names)
    weights = np.divide(1.0, np.sqrt(norms), out=np.zeros_like(norms), where=norms > 0) if normalise else None
    product = torch.float32 if quantise else torch.float64  # two bits per entry need no more
    fit = _Fit(n, explicit_k, directions)
    matrices: dict[str, Matrix] = {}
    frames: list[torch.Tensor] = []
    weighting: list[NDArray[np.float32]] = []
    hadamard: list[SRHT] = []
    for b, (block, members) in enumerate(blocks.items()):
        rng = np.random.default_rng([seed, b])
        widths = [z[name].shape[1] for name in members]
        if method == "srht":
            hadamard.append(SRHT.draw(widths, fit.transform(block, wanted[block], sum(widths)), rng))
            fit.gain.append(hadamard[-1].gain)
            continue
        found = spectrum(_weighted_gram(z, members, weights, device, product), drop=DROP_FAST if quantise else DROP)
        bits, d = fit.components(block, wanted[block], found)
        fit.gain.append(2.0 ** -round(np.log2(sum(widths)) / 2))
        if directions is not None:
            frames.append(random_frame(d, bits, rng).to(torch.float16))
        if found.rank == 0:
            left = torch.zeros(n, d, dtype=torch.float64, device=device)
        else:
            left = loading(found, d, random_rotation(bits, rng) if rotate and directions is None else None, weights) / fit.gain[-1]
            if flatten:
                left *= torch.from_numpy(flattening(found, d, flatten)).to(left.device)
        if flatten:
            weighting.append(flattening(found, d, flatten).astype(np.float32) if found.rank else np.ones(d, np.float32))
        for name in members:
            p = torch.from_numpy(np.array(z[name], np.float32)).to(left.device, product).T @ left.to(product)
            matrices[name] = QuantisedMatrix.quantise(p) if quantise else DenseMatrix(p.to("cpu", dtype))
    layout = BlockLayout(tuple(blocks), tuple(fit.k))
    projection = Projection(
        layout,
        {block: list(members) for block, members in blocks.items()},
        {name: z[name].shape[1] for name in names},
        scale,
        np.ones(layout.n_blocks, np.float32),
        method,
        np.array(fit.gain, np.float32),
        tuple(fit.directions),
        matrices,
        frames,
        weighting,
        refine,
        hadamard,
        {"n_fit": n, "rotate": rotate and method == "pca", "normalise": normalise, "seed": seed, **fit.info},
    )
    projection.c = geometric_mean_scale(projection.scales(project_rows(projection, z)))
    return projection


def project_rows(projection: Projection, z: Coordinates, rows: int = 1024) -> NDArray[np.float32]:
    """(n, total_k) float32: the block coordinates of spilled stage-1 coordinates, one module slice of `rows` examples at a time."""
    n = z[projection.modules[0]].shape[0]
    x = projection.start((n,))
    for name in projection.modules:
        for start in range(0, n, rows):
            projection.add(x[start : start + rows], name, torch.from_numpy(np.array(z[name][start : start + rows], np.float32)))
    return projection.finish(x).numpy()


def _weighted_gram(
    z: Coordinates, members: Sequence[str], weights: NDArray[np.float64] | None, device: torch.device | str, product: torch.dtype
) -> torch.Tensor:
    matrix = gram(z, members, device, product=product)
    if weights is not None:
        w = torch.from_numpy(weights).to(matrix.device)
        matrix.mul_(w[:, None]).mul_(w)
    return matrix


class _Fit:
    """Bits, directions, gains, ranks, energies and notices, block by block."""

    def __init__(self, n: int, explicit: bool, share: float | None) -> None:
        self.n = n
        self.explicit = explicit
        self.share = share
        self.k: list[int] = []
        self.directions: list[int] = []
        self.gain: list[float] = []
        self.info: dict[str, Any] = {"rank": {}, "energy_kept": {}, "notices": []}

    def components(self, block: str, wanted: int, found: Spectrum) -> tuple[int, int]:
        """(bits, directions) of a PCA block. One without any energy keeps one bit, which no data sets."""
        of = f"independent gradients among its {self.n} fitting examples"
        self._refuse(block, wanted, found.rank, of)
        bits = self._reduce(block, wanted, found.rank * (1 if self.share is None else BITS_PER_DIRECTION), found.rank, of)
        d = bits if self.share is None else max(min(round(self.share * bits), found.rank), 1)
        self.directions.append(d)
        kept = float(np.square(found.singular[:d]).sum())
        self.info["energy_kept"][block] = kept / found.energy if found.energy > 0 else 0.0
        return bits, d

    def transform(self, block: str, wanted: int, width: int) -> int:
        """Rows of an SRHT block."""
        self._refuse(block, wanted, width, "coordinates")
        self.directions.append(self._reduce(block, wanted, width, width, "coordinates"))
        return self.directions[-1]

    def _refuse(self, block: str, wanted: int, limit: int, of: str) -> None:
        if self.explicit and wanted > limit:
            raise SettingError(
                f"block {block} has only {limit} {of}, so k = {wanted} is too large; use --k {max(limit, 1)} or less, or more fitting examples", field="k"
            )

    def _reduce(self, block: str, wanted: int, limit: int, rank: int, of: str) -> int:
        self.info["rank"][block] = rank
        bits = max(min(wanted, limit), 1)
        if bits < wanted:
            self.info["notices"].append(f"block {block}: k reduced from {wanted} to {bits}, as it has {rank} {of}")
        self.k.append(bits)
        return bits
