"""Stage 2: block coordinates x = P^T z, by PCA (EOGP) or a subsampled randomised Hadamard transform (EOGP-R), and their signs.

P is used as it is stored on both sides, stored examples and queries. It is applied module by module, so that one slice is alive at a time:

    x = projection.start((batch,)); projection.add(x, name, z) for every module; x = projection.finish(x)

P of a block may be factored, P = V F: V the leading d principal directions, F (d, k) a random tight frame (F F^T = I) that spreads them over k bits.
Dot products do not see F; the signs do: they are chosen together (engine/refine.py), so that k bits describe d < k directions more finely.
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
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from engine.blocks import BlockLayout
from engine.errors import StoreError
from engine.quantised import PER_BYTE, DenseMatrix, Matrix, QuantisedMatrix
from engine.readahead import ReadAhead
from engine.refine import refine_signs
from engine.signs import ScaleKind, block_scales, encode
from engine.srht import SRHT

Method = Literal["pca", "srht"]
MATRIX, HEADER, SMALL = "projection.npy", "projection.json", "projection.safetensors"


@dataclass(slots=True)
class Projection:
    """Stage 2 of every block.

    layout; block_modules {block: module names}; widths {module: m_u}; scale: how `encode` scales the bits; c (n_blocks,) float32; method;
    gain (n_blocks,): x of a block is gain * sum_u z_u P_u as stored (a power of two that keeps P's entries near 1, or 1/sqrt(k) for the SRHT);
    directions (n_blocks,): d of each block, k where P is not factored; matrices {module: (m_u, d_b)} for PCA; frames: F (d_b, k_b) fp16 of each block, none
    where P is not factored; flattening: weights (d_b,) that F of each block carries per direction (not V, whose two bits the weak ones would take), none where all are 1; refine: passes over the signs; hadamard: one SRHT per block otherwise; info: ranks, energies, notices of the fit.
    """

    layout: BlockLayout
    block_modules: dict[str, list[str]]
    widths: dict[str, int]
    scale: ScaleKind
    c: NDArray[np.float32]
    method: Method
    gain: NDArray[np.float32]
    directions: tuple[int, ...]
    matrices: dict[str, Matrix] = field(default_factory=dict)
    frames: list[torch.Tensor] = field(default_factory=list)
    flattening: list[NDArray[np.float32]] = field(default_factory=list)
    refine: int = 0
    hadamard: list[SRHT] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    ahead: ReadAhead | None = None
    _place: dict[str, tuple[int, int]] = field(init=False, repr=False)
    _starts: list[int] = field(init=False, repr=False)
    _grams: list[NDArray[np.float32]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._place = {name: (b, i) for b, block in enumerate(self.layout.names) for i, name in enumerate(self.block_modules[block])}
        self._starts = [0, *accumulate(self.directions)]
        self._grams = []

    @property
    def modules(self) -> list[str]:
        """Module names, block by block."""
        return list(self._place)

    @property
    def projection_bytes(self) -> int:
        """Size of P as stored, frames included; 0 for the SRHT."""
        return sum(p.n_bytes for p in self.matrices.values()) + sum(f.numel() * f.element_size() for f in self.frames)

    def start(self, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """A zero accumulator (*shape, sum of directions) float32."""
        return torch.zeros(*shape, self._starts[-1], dtype=torch.float32, device=device)

    def add(self, x: torch.Tensor, name: str, z: torch.Tensor) -> torch.Tensor:
        """Add module `name`'s coordinates z (*shape, m_u) to the accumulator x, in place."""
        block, index = self._place[name]
        if z.shape[-1] != self.widths[name]:
            raise ValueError(f"module {name} has {self.widths[name]} coordinates, got {z.shape[-1]}")
        target = x[..., self._starts[block] : self._starts[block + 1]]
        z = z.to(x.device, torch.float32)
        if self.method == "srht":
            target += self.hadamard[block].contribution(index, z)
        else:
            self.matrices[name].apply(z, target)
        return x

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """(*shape, total_k) float32: the accumulator with each block's gain and frame applied, x = P^T z."""
        scaled = x * torch.from_numpy(np.repeat(self.gain, self.directions)).to(x)
        if not self.frames:
            return scaled
        parts = [scaled[..., self._starts[b] : self._starts[b + 1]] @ f.to(x.device, torch.float32) for b, f in enumerate(self.frames)]
        return torch.cat(parts, dim=-1)

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
        if self.frames:
            own = own @ self.frames[block].to(own.device, torch.float32).T
        return self.hadamard[block].back(index, own) if self.method == "srht" else self.matrices[name].transposed(own)

    def captured(self, x: NDArray[np.float32]) -> NDArray[np.float64]:
        """(N,) float64: ||V^T z||^2 over all blocks, what the principal directions hold of ||z||^2, from coordinates x (N, total_k)."""
        if not self.flattening:
            return np.square(x, dtype=np.float64).sum(axis=1)
        total = np.zeros(len(x))
        for b, (frame, weights) in enumerate(zip(self.frames, self.flattening, strict=True)):
            v = x[:, self.layout.slice(b)] @ frame.float().cpu().numpy().T
            total += np.square(v / weights**2, dtype=np.float64).sum(axis=1)
        return total

    def signs(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """(N, total_k) float32 of +1 and -1 for coordinates x: their signs, refined inside each block's frame."""
        signs = np.where(x >= 0, np.float32(1), np.float32(-1))
        if self.frames and self.refine:
            if not self._grams:
                for b, frame in enumerate(self.frames):
                    tight = frame.cpu().float()
                    if self.flattening:
                        tight = tight / torch.from_numpy(self.flattening[b])[:, None]
                    self._grams.append((tight.T @ tight).numpy())
            for b, gram in enumerate(self._grams):
                own = self.layout.slice(b)
                signs[:, own] = refine_signs(np.ascontiguousarray(x[:, own]), gram, self.refine)
        return signs

    def encode(self, x: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
        """(codes, scales) of coordinates x (N, total_k), as a store keeps them."""
        return encode(x, self.layout, self.c, self.scale, self.signs(x))

    def scales(self, x: NDArray[np.float32]) -> NDArray[np.float64]:
        """(N, n_blocks) float64 scales of coordinates x, not yet divided by c."""
        return block_scales(x, self.layout, self.scale, self.signs(x))

    def save(self, folder: Path) -> None:
        """Write projection.json, projection.npy (PCA: one flat array, mapped when read) and projection.safetensors (what else there is)."""
        folder.mkdir(parents=True, exist_ok=True)
        small: dict[str, NDArray[Any]] = {f"frame.{b}": f.cpu().numpy() for b, f in enumerate(self.frames)}
        small |= {f"flattening.{b}": w for b, w in enumerate(self.flattening)}
        small |= {f"rows.{b}": h.rows for b, h in enumerate(self.hadamard)}
        stored = "none"
        if self.method == "srht":
            small |= {f"signs.{name}": np.packbits(self.hadamard[b].signs[i] > 0, bitorder="little") for name, (b, i) in self._place.items()}
        else:
            matrices = [self.matrices[name] for name in self.modules]
            tensors = [p.codes if isinstance(p, QuantisedMatrix) else p.entries for p in matrices]
            small |= {f"scales.{name}": p.scales.numpy() for name, p in self.matrices.items() if isinstance(p, QuantisedMatrix)}
            stored = str(tensors[0].numpy().dtype)
            flat = np.lib.format.open_memmap(folder / MATRIX, mode="w+", dtype=tensors[0].numpy().dtype, shape=(sum(t.numel() for t in tensors),))
            start = 0
            for tensor in tensors:
                flat[start : start + tensor.numel()] = tensor.reshape(-1).cpu().numpy()
                start += tensor.numel()
            flat.flush()
        if small:
            save_file(small, folder / SMALL)
        header = {
            "layout": self.layout.to_json(),
            "block_modules": self.block_modules,
            "widths": self.widths,
            "scale": self.scale,
            "c": [float(v) for v in self.c],
            "method": self.method,
            "gain": [float(v) for v in self.gain],
            "directions": list(self.directions),
            "refine": self.refine,
            "stored": stored,
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
                tuple(header["directions"]),
                refine=header["refine"],
                info=header["info"],
            )
            small = load_file(folder / SMALL) if (folder / SMALL).exists() else {}
            found.frames = [torch.from_numpy(small[f"frame.{b}"]) for b in range(found.layout.n_blocks) if f"frame.{b}" in small]
            found.flattening = [small[f"flattening.{b}"] for b in range(found.layout.n_blocks) if f"flattening.{b}" in small]
            if found.method == "srht":
                found._read_hadamard(small)
            else:
                found._read_matrices(folder, small, torch.device(device), quantised=header["stored"] == "uint8")
        except (OSError, ValueError, KeyError, SafetensorError) as e:
            raise StoreError(f"the projection in {folder} cannot be read: {e}; restore the store from a copy or index again") from None
        return found

    def _read_hadamard(self, small: Mapping[str, NDArray[Any]]) -> None:
        for b, block in enumerate(self.layout.names):
            widths = [self.widths[name] for name in self.block_modules[block]]
            packed = [small[f"signs.{name}"] for name in self.block_modules[block]]
            signs = [2 * np.unpackbits(bits, count=w, bitorder="little").astype(np.float32) - 1 for bits, w in zip(packed, widths, strict=True)]
            self.hadamard.append(SRHT(widths, small[f"rows.{b}"], signs))

    def _read_matrices(self, folder: Path, small: Mapping[str, NDArray[Any]], device: torch.device, *, quantised: bool) -> None:
        flat = np.load(folder / MATRIX, mmap_mode="r")
        columns = {name: self.directions[b] for name, (b, _) in self._place.items()}
        shapes = {name: (self.widths[name], -(-columns[name] // PER_BYTE) if quantised else columns[name]) for name in self._place}
        ends = list(accumulate(rows * width for rows, width in shapes.values()))
        if flat.size != ends[-1]:
            raise ValueError(f"{MATRIX} has {flat.size} entries, the layout needs {ends[-1]}")
        item, start = flat.dtype.itemsize, flat.offset
        self.ahead = ReadAhead(
            folder / MATRIX, {name: [(start + item * (end - s[0] * s[1]), item * s[0] * s[1])] for (name, s), end in zip(shapes.items(), ends, strict=True)}
        )
        for (name, shape), end in zip(shapes.items(), ends, strict=True):
            with warnings.catch_warnings():  # the mapping is read-only on purpose: several processes share it
                warnings.simplefilter("ignore", UserWarning)
                stored = torch.from_numpy(flat[end - shape[0] * shape[1] : end].reshape(shape))
            stored = stored if device.type == "cpu" else stored.to(device)
            self.matrices[name] = QuantisedMatrix(stored, torch.from_numpy(small[f"scales.{name}"]), columns[name]) if quantised else DenseMatrix(stored)
