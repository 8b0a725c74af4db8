"""Fitting stage 2: PCA of each block (or a drawn SRHT), rotation or frame, and the scale constant c_b."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.blocks import BlockLayout
from engine.errors import SettingError
from engine.pca import (
    DROP,
    DROP_FAST,
    EIGH,
    Coordinates,
    Spectrum,
    Tell,
    chunks,
    flattening,
    gram,
    gram_operations,
    loading,
    random_frame,
    random_rotation,
    spectrum,
    squared_norms,
)
from engine.projection import Method, Projection
from engine.quantised import DenseMatrix, Matrix, QuantisedMatrix
from engine.signs import ScaleKind, geometric_mean_scale
from engine.srht import SRHT

BITS_PER_DIRECTION = 4  # beyond this, more bits would describe the same few directions
QUANTISE = 500.0  # operations that quantising an entry of P takes, counted as float32 products
HADAMARD = 200.0  # the same for one coordinate of one example in the SRHT
_ROWS = 1024
Progress = Callable[[float, float], None]


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
    progress: Progress = lambda done, total: None,
    checkpoint: Path | None = None,
) -> Projection:
    """Fit every block's projection on z {module: (n, m_u) float32, may be memory-mapped}.

    k: bits of each block, one number or one per block. A k above the block's rank is refused with SettingError naming the rank when `explicit_k`; else it is
    reduced to the rank (times BITS_PER_DIRECTION with `directions`), with a notice in `info["notices"]`.
    rotate: fold a random rotation of the k coordinates into P. directions: factor P instead, into the leading directions * k principal directions and a
    random tight frame of k columns; refine: passes over the signs inside that frame. normalise: PCA of z / ||z||, so that examples with long gradients do
    not own the span. flatten (with directions): each direction is weighted by sigma^-flatten on both sides, which evens out what EK-FAC left unwhitened
    between modules. quantise: P at two bits per entry, else `dtype`. The fit holds one n x n float64 Gram matrix, some columns of z and P, and reads z
    three times: for its norms, for the Gram matrix and for P.
    progress: called with (operations done, operations in all), often enough to stop within seconds by raising. checkpoint: folder for the spectra of
    finished blocks, from which a stopped fit of the same z goes on.
    """
    wanted = {block: k if isinstance(k, int) else k[block] for block in blocks}
    names = [name for members in blocks.values() for name in members]
    n = z[names[0]].shape[0]
    if flatten and directions is None:
        raise ValueError("flatten needs directions: only a factored P carries weights")
    if n < 1:
        raise SettingError("the projection needs at least one fitting example")
    widths = {block: [z[name].shape[1] for name in members] for block, members in blocks.items()}
    most = {block: bits if directions is None else round(directions * bits) for block, bits in wanted.items()}
    tell = _counter(operations(n, {block: sum(w) for block, w in widths.items()}, most, method, quantise=quantise), progress)
    norms = squared_norms(z, names, tell)
    weights = np.divide(1.0, np.sqrt(norms), out=np.zeros_like(norms), where=norms > 0) if normalise else None
    product = torch.float32 if quantise else torch.float64  # two bits per entry need no more
    fit = _Fit(n, explicit_k, directions)
    matrices: dict[str, Matrix] = {}
    frames: list[torch.Tensor] = []
    weighting: list[NDArray[np.float32]] = []
    hadamard: list[SRHT] = []
    fitted: list[torch.Tensor] = []
    for b, (block, members) in enumerate(blocks.items()):
        rng = np.random.default_rng([seed, b])
        if method == "srht":
            hadamard.append(SRHT.draw(widths[block], fit.transform(block, wanted[block], sum(widths[block])), rng))
            fit.gain.append(hadamard[-1].gain)
            continue
        kept = None if checkpoint is None else checkpoint / f"spectrum-{b}.npz"
        found = _block_spectrum(z, members, weights, product, most[block], device, tell, kept)
        bits, d = fit.components(block, wanted[block], found)
        fit.gain.append(2.0 ** -round(np.log2(sum(widths[block])) / 2))
        if directions is not None:
            bend = flattening(found.singular, d, flatten) if flatten and found.rank else np.ones(d)
            frames.append((torch.from_numpy(bend)[:, None] * random_frame(d, bits, rng)).to(torch.float16))
            if flatten:
                weighting.append(bend.astype(np.float32))
        rotation = random_rotation(bits, rng) if rotate and directions is None else None
        left, own = loading(found, d, rotation, weights, fit.gain[-1])
        fitted.append(own)
        left = left.to(product)
        for name in members:
            matrices[name] = _slice_of_p(z[name], left, quantise=quantise, dtype=dtype, tell=tell)
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
    # the fitting examples' x = Z V comes out of the PCA as U Sigma; an SRHT has to be applied
    x = projection.finish(torch.cat(fitted, dim=1)).numpy() if fitted else project_rows(projection, z, tell=tell)
    scales = []
    for start in range(0, n, _ROWS):
        scales.append(projection.scales(x[start : start + _ROWS]))
        tell(0)
    projection.c = geometric_mean_scale(np.concatenate(scales))
    return projection


def project_rows(projection: Projection, z: Coordinates, rows: int = 1024, tell: Tell = lambda operations: None) -> NDArray[np.float32]:
    """(n, total_k) float32: the block coordinates of spilled stage-1 coordinates, one module slice of `rows` examples at a time."""
    n = z[projection.modules[0]].shape[0]
    x = projection.start((n,))
    for name in projection.modules:
        for start in range(0, n, rows):
            part = np.array(z[name][start : start + rows], np.float32)
            projection.add(x[start : start + rows], name, torch.from_numpy(part))
            tell(HADAMARD * part.size)
    return projection.finish(x).numpy()


def operations(n: int, widths: Mapping[str, int], directions: Mapping[str, int], method: Method, *, quantise: bool) -> float:
    """Floating-point operations of a fit on n examples, counted as float32 products: widths: coordinates, directions: columns of P, of each block."""
    if method == "srht":
        return HADAMARD * n * sum(widths.values())
    product = torch.float32 if quantise else torch.float64
    return sum(gram_operations(n, w, product) + EIGH * n**3 + w * _entry(n, quantise=quantise) * min(directions[block], n) for block, w in widths.items())


def _entry(n: int, *, quantise: bool) -> float:
    """Operations per entry of P."""
    return 2.0 * n + QUANTISE if quantise else 4.0 * n


def _counter(total: float, progress: Progress) -> Tell:
    done = 0.0

    def tell(more: float) -> None:
        nonlocal done
        done += more
        progress(min(done, total), total)

    return tell


def _block_spectrum(
    z: Coordinates,
    members: Sequence[str],
    weights: NDArray[np.float64] | None,
    product: torch.dtype,
    columns: int,
    device: torch.device | str,
    tell: Tell,
    kept: Path | None,
) -> Spectrum:
    """Spectrum of the block's weighted Gram matrix with its leading `columns` vectors, read from `kept` where an earlier run has left it there."""
    n = z[members[0]].shape[0]
    if kept is not None and kept.is_file():
        with np.load(kept) as stored:
            tell(sum(gram_operations(n, z[name].shape[1], product) for name in members) + EIGH * n**3)
            return Spectrum(stored["singular"], torch.from_numpy(stored["vectors"]).to(device), stored["norms"])
    matrix = gram(z, members, device, product=product, tell=tell)
    if weights is not None:
        w = torch.from_numpy(weights).to(matrix.device)
        matrix.mul_(w[:, None]).mul_(w)
    found = spectrum(matrix, drop=DROP_FAST if product == torch.float32 else DROP, tell=tell)
    found = Spectrum(found.singular, found.vectors[:, : max(columns, 1)].contiguous(), found.norms)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_name(kept.name + ".tmp")
        with temporary.open("wb") as file:
            np.savez(file, singular=found.singular, vectors=found.vectors.cpu().numpy(), norms=found.norms)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(kept)
    return found


def _slice_of_p(z: NDArray[np.float32], left: torch.Tensor, *, quantise: bool, dtype: torch.dtype, tell: Tell) -> Matrix:
    """P_u = Z_u^T L as stored, some of its rows at a time."""
    n, d = left.shape
    quantised: list[QuantisedMatrix] = []
    dense: list[DenseMatrix] = []
    for part, block in chunks(z, left.device, left.dtype):
        p = block.T @ left
        if quantise:
            quantised.append(QuantisedMatrix.quantise(p))
        else:
            dense.append(DenseMatrix(p.to("cpu", dtype)))
        tell((part.stop - part.start) * _entry(n, quantise=quantise) * d)
    return QuantisedMatrix.joined(quantised) if quantise else DenseMatrix.joined(dense)


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
