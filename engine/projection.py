"""Stage 2: block coordinates x = P^T z, by PCA (EOGP) or a subsampled randomised Hadamard transform (EOGP-R).

P is used as it is stored (fp16) on both sides, stored examples and queries. It is applied module by module, so that one slice is alive at a time:

    x = projection.start((batch,)); projection.add(x, name, z) for every module; x = projection.finish(x)
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from engine.blocks import BlockLayout
from engine.errors import SettingError, StoreError
from engine.pca import Coordinates, Spectrum, gram, loading, random_rotation, spectrum, squared_norms
from engine.signs import ScaleKind, block_scales, geometric_mean_scale
from engine.srht import SRHT

Method = Literal["pca", "srht"]
MATRIX, HEADER, HADAMARD = "projection.npy", "projection.json", "srht.safetensors"
_CONVERT = 1 << 24  # entries of P converted to float32 at a time


@dataclass(slots=True)
class Projection:
    """Stage 2 of every block.

    layout; block_modules {block: module names}; widths {module: m_u}; scale: how `encode` scales the bits; c (n_blocks,) float32; method;
    gain (n_blocks,): x of a block is gain * sum_u z_u P_u as stored (a power of two that keeps P's entries near 1, or 1/sqrt(k) for the SRHT);
    matrices {module: (m_u, k_b) fp16 or float32} for PCA; hadamard: one SRHT per block otherwise; info: ranks, energies, notices of the fit.
    """

    layout: BlockLayout
    block_modules: dict[str, list[str]]
    widths: dict[str, int]
    scale: ScaleKind
    c: NDArray[np.float32]
    method: Method
    gain: NDArray[np.float32]
    matrices: dict[str, torch.Tensor] = field(default_factory=dict)
    hadamard: list[SRHT] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    _place: dict[str, tuple[int, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._place = {name: (b, i) for b, block in enumerate(self.layout.names) for i, name in enumerate(self.block_modules[block])}

    @property
    def modules(self) -> list[str]:
        """Module names, block by block."""
        return list(self._place)

    @property
    def projection_bytes(self) -> int:
        """Size of P as stored; 0 for the SRHT."""
        return sum(p.numel() * p.element_size() for p in self.matrices.values())

    def start(self, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """A zero accumulator (*shape, total_k) float32."""
        return torch.zeros(*shape, self.layout.total_k, dtype=torch.float32, device=device)

    def add(self, x: torch.Tensor, name: str, z: torch.Tensor) -> torch.Tensor:
        """Add module `name`'s coordinates z (*shape, m_u) to the accumulator x, in place."""
        block, index = self._place[name]
        if z.shape[-1] != self.widths[name]:
            raise ValueError(f"module {name} has {self.widths[name]} coordinates, got {z.shape[-1]}")
        target = x[..., self.layout.slice(block)]
        z = z.to(x.device, torch.float32)
        if self.method == "srht":
            target += self.hadamard[block].contribution(index, z)
            return x
        p = self.matrices[name]
        step = max(_CONVERT // p.shape[1], 1)
        for start in range(0, p.shape[0], step):
            target += z[..., start : start + step] @ p[start : start + step].to(x.device, torch.float32)
        return x

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """Apply each block's gain, in place; x is then P^T z."""
        return x.mul_(torch.from_numpy(self.gain[self.layout.block_of_coordinate]).to(x))

    def project(self, z: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(B, total_k) float32 from {module: (B, m_u)}."""
        first = next(iter(z.values()))
        x = self.start(first.shape[:-1], first.device)
        for name in self.modules:
            self.add(x, name, z[name])
        return self.finish(x)

    def back(self, name: str, w: torch.Tensor) -> torch.Tensor:
        """(..., m_u) float32: the module's slice of P w for w (..., total_k), so that <z_u, back(w)> sums over modules to <P^T z, w>."""
        block, index = self._place[name]
        own = w[..., self.layout.slice(block)].to(torch.float32) * float(self.gain[block])
        if self.method == "srht":
            return self.hadamard[block].back(index, own)
        return own @ self.matrices[name].to(own.device, torch.float32).T

    def save(self, folder: Path) -> None:
        """Write projection.json and projection.npy (PCA: one flat array, mapped when read) or srht.safetensors (signs and rows)."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.method == "pca":
            first = next(iter(self.matrices.values()))
            kind = np.float16 if first.dtype == torch.float16 else np.float32
            flat = np.lib.format.open_memmap(folder / MATRIX, mode="w+", dtype=kind, shape=(sum(p.numel() for p in self.matrices.values()),))
            start = 0
            for name in self.modules:
                p = self.matrices[name]
                flat[start : start + p.numel()] = p.reshape(-1).cpu().numpy()
                start += p.numel()
            flat.flush()
        else:
            tensors: dict[str, NDArray[Any]] = {f"rows.{b}": h.rows for b, h in enumerate(self.hadamard)}
            tensors |= {f"signs.{name}": np.packbits(self.hadamard[b].signs[i] > 0, bitorder="little") for name, (b, i) in self._place.items()}
            save_file(tensors, folder / HADAMARD)
        header = {
            "layout": self.layout.to_json(),
            "block_modules": self.block_modules,
            "widths": self.widths,
            "scale": self.scale,
            "c": [float(v) for v in self.c],
            "method": self.method,
            "gain": [float(v) for v in self.gain],
            "info": self.info,
        }
        (folder / HEADER).write_text(json.dumps(header, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> Projection:
        """Inverse of `save`. On the CPU P stays on disk, mapped read-only; on a GPU it is copied there. Raises StoreError where files are missing or cut."""
        try:
            header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
            found = cls(
                BlockLayout.from_json(header["layout"]),
                header["block_modules"],
                {name: int(width) for name, width in header["widths"].items()},
                header["scale"],
                np.array(header["c"], np.float32),
                header["method"],
                np.array(header["gain"], np.float32),
                info=header["info"],
            )
            found._read(folder, torch.device(device))
        except (OSError, ValueError, KeyError) as e:
            raise StoreError(f"the projection in {folder} cannot be read: {e}; restore the store from a copy or index again") from None
        return found

    def _read(self, folder: Path, device: torch.device) -> None:
        if self.method == "srht":
            tensors = load_file(folder / HADAMARD)
            for b, block in enumerate(self.layout.names):
                widths = [self.widths[name] for name in self.block_modules[block]]
                packed = [tensors[f"signs.{name}"] for name in self.block_modules[block]]
                signs = [2 * np.unpackbits(bits, count=w, bitorder="little").astype(np.float32) - 1 for bits, w in zip(packed, widths, strict=True)]
                self.hadamard.append(SRHT(widths, tensors[f"rows.{b}"], signs))
            return
        flat = np.load(folder / MATRIX, mmap_mode="r")
        shapes = {name: (self.widths[name], self.layout.k[b]) for name, (b, _) in self._place.items()}
        ends = list(accumulate(rows * columns for rows, columns in shapes.values()))
        if flat.size != ends[-1]:
            raise ValueError(f"{MATRIX} has {flat.size} entries, the layout needs {ends[-1]}")
        for (name, shape), end in zip(shapes.items(), ends, strict=True):
            with warnings.catch_warnings():  # the mapping is read-only on purpose: several processes share it
                warnings.simplefilter("ignore", UserWarning)
                p = torch.from_numpy(flat[end - shape[0] * shape[1] : end].reshape(shape))
            self.matrices[name] = p if device.type == "cpu" else p.to(device)


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
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
) -> Projection:
    """Fit every block's projection on z {module: (n, m_u) float32, may be memory-mapped}.

    k: bits of each block, one number or one per block. A k above the block's rank is reduced with a notice in `info["notices"]`, or refused with
    SettingError naming the rank when `explicit_k`. normalise: PCA of z / ||z||, so that examples with long gradients do not own the span.
    dtype: of P as stored. The fit holds one n x n float64 Gram matrix, one module's slice and P.
    """
    wanted = {block: k if isinstance(k, int) else k[block] for block in blocks}
    names = [name for members in blocks.values() for name in members]
    n = z[names[0]].shape[0]
    if n < 1:
        raise SettingError("the projection needs at least one fitting example")
    norms = squared_norms(z, names)
    weights = None
    if normalise:
        weights = np.divide(1.0, np.sqrt(norms), out=np.zeros_like(norms), where=norms > 0)
    fit = _Fit(n, explicit_k)
    matrices: dict[str, torch.Tensor] = {}
    hadamard: list[SRHT] = []
    gains: list[float] = []
    for b, (block, members) in enumerate(blocks.items()):
        rng = np.random.default_rng([seed, b])
        widths = [z[name].shape[1] for name in members]
        if method == "srht":
            bits = fit.bits(block, wanted[block], sum(widths), "coordinates")
            hadamard.append(SRHT.draw(widths, bits, rng))
            gains.append(hadamard[-1].gain)
            continue
        matrix = gram(z, members, device)
        if weights is not None:
            w = torch.from_numpy(weights).to(matrix.device)
            matrix.mul_(w[:, None]).mul_(w)
        found = spectrum(matrix)
        del matrix
        bits = fit.bits(block, wanted[block], found.rank, f"independent gradients among its {n} fitting examples")
        fit.energy(block, found, bits)
        gain = 2.0 ** -round(np.log2(sum(widths)) / 2)
        gains.append(gain)
        if found.rank == 0:
            matrices |= {name: torch.zeros(z[name].shape[1], bits, dtype=dtype) for name in members}
            continue
        left = loading(found, bits, random_rotation(bits, rng) if rotate else None, weights) / gain
        for name in members:
            p = torch.from_numpy(z[name].astype(np.float64)).to(left.device).T @ left
            matrices[name] = p.to("cpu", dtype)
    layout = BlockLayout(tuple(blocks), tuple(fit.k))
    info: dict[str, Any] = {"n_fit": n, "rotate": rotate and method == "pca", "normalise": normalise, "seed": seed, **fit.info}
    projection = Projection(
        layout,
        {block: list(members) for block, members in blocks.items()},
        {name: z[name].shape[1] for name in names},
        scale,
        np.ones(layout.n_blocks, np.float32),
        method,
        np.array(gains, np.float32),
        matrices,
        hadamard,
        info,
    )
    projection.c = geometric_mean_scale(block_scales(project_rows(projection, z), layout, scale))
    return projection


def project_rows(projection: Projection, z: Coordinates, rows: int = 1024) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(n, total_k) float32: the block coordinates of spilled stage-1 coordinates, one module slice of `rows` examples at a time."""
    n = z[projection.modules[0]].shape[0]
    x = projection.start((n,))
    for name in projection.modules:
        for start in range(0, n, rows):
            projection.add(x[start : start + rows], name, torch.from_numpy(np.array(z[name][start : start + rows], np.float32)))
    return projection.finish(x).numpy()


class _Fit:
    """Bits, ranks, energies and notices, block by block."""

    def __init__(self, n: int, explicit: bool) -> None:
        self.n = n
        self.explicit = explicit
        self.k: list[int] = []
        self.info: dict[str, Any] = {"rank": {}, "energy_kept": {}, "notices": []}

    def bits(self, block: str, wanted: int, limit: int, of: str) -> int:
        """k of one block, at most `limit`; a block without any energy keeps one bit, which is never set by data."""
        self.info["rank"][block] = limit
        if wanted > limit and self.explicit:
            raise SettingError(
                f"block {block} has only {limit} {of}, so k = {wanted} is too large; use --k {max(limit, 1)} or less, or more fitting examples", field="k"
            )
        if wanted > limit:
            self.info["notices"].append(f"block {block}: k reduced from {wanted} to {max(limit, 1)}, as it has {limit} {of}")
        self.k.append(max(min(wanted, limit), 1))
        return self.k[-1]

    def energy(self, block: str, found: Spectrum, bits: int) -> None:
        kept = float(np.square(found.singular[:bits]).sum())
        self.info["energy_kept"][block] = kept / found.energy if found.energy > 0 else 0.0
