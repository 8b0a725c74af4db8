"""P as it is stored: fp16 (or float32) entries, or two bits per entry and one scale per stage-1 coordinate.

With two bits an entry's error is independent of the others' and is averaged over all coordinates of the block, so that a coarse P costs almost nothing,
while at equal bytes eight times as many coordinates are kept as in fp16 (docs/sketch-design.md has the measurement).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

LEVELS = (-1.510, -0.4528, 0.4528, 1.510)  # of a standard normal entry, least squared error at two bits (Max 1960)
THRESHOLD = 0.9816
PER_BYTE = 4
_COMPILED = 1 << 20  # bytes of codes from which compiling pays
_CONVERT = 1 << 20  # entries expanded to float32 at a time: on a CPU the buffer stays in its cache
_CONVERT_GPU = 1 << 26
_TABLES: dict[torch.device, torch.Tensor] = {}


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """(m, d) fp16 or float32 entries."""

    entries: torch.Tensor

    @classmethod
    def joined(cls, parts: Sequence[DenseMatrix]) -> DenseMatrix:
        """The rows of all parts, one after the other."""
        return cls(torch.cat([p.entries for p in parts]))

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.entries.shape[0]), int(self.entries.shape[1])

    @property
    def n_bytes(self) -> int:
        return self.entries.numel() * self.entries.element_size()

    def apply(self, z: torch.Tensor, into: torch.Tensor) -> None:
        """into (..., d) += z (..., m) @ matrix."""
        for part in _parts(self.shape, z.device):
            into += z[..., part] @ self.entries[part].to(z.device, torch.float32)

    def transposed(self, v: torch.Tensor) -> torch.Tensor:
        """(..., m) = v (..., d) @ matrix^T."""
        return torch.cat([v @ self.entries[part].to(v.device, torch.float32).T for part in _parts(self.shape, v.device)], dim=-1)


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """(m, d) matrix. codes (m, ceil(d / 4)) uint8: entry j in byte j // 4 at weight 4^(j % 4); scales (m,) float16; columns: d."""

    codes: torch.Tensor
    scales: torch.Tensor
    columns: int

    @classmethod
    def quantise(cls, matrix: torch.Tensor) -> QuantisedMatrix:
        """Nearest levels of each row relative to its root mean square; the scale makes <row, quantised row> = ||row||^2, so that no energy is lost."""
        m, d = matrix.shape
        codes = torch.empty(m, -(-d // PER_BYTE), dtype=torch.uint8, device=matrix.device)
        scales = torch.empty(m, dtype=matrix.dtype, device=matrix.device)
        for part in _parts((m, d), matrix.device):
            entries = matrix[part].contiguous()
            size = entries.abs()
            energy = entries.square().sum(1)
            far = size > (energy / d).sqrt_().mul_(THRESHOLD)[:, None]
            product = LEVELS[2] * size.sum(1) + (LEVELS[3] - LEVELS[2]) * (size * far).sum(1)
            scales[part] = energy / torch.where(product > 0, product, 1)
            negative = entries < 0
            pair = (~negative).view(torch.uint8) << 1 | (far ^ negative).view(torch.uint8)  # 0 1 2 3 for the levels in ascending order
            four = torch.nn.functional.pad(pair, (0, -d % PER_BYTE)).view(torch.int32)
            codes[part] = (four | four >> 6 | four >> 12 | four >> 18).to(torch.uint8)
        return cls(codes.cpu(), scales.to("cpu", torch.float16), d)

    @classmethod
    def joined(cls, parts: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
        """The rows of all parts, one after the other."""
        return cls(torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]), parts[0].columns)

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.codes.shape[0]), self.columns

    @property
    def n_bytes(self) -> int:
        return self.codes.numel() + self.scales.numel() * self.scales.element_size()

    def apply(self, z: torch.Tensor, into: torch.Tensor) -> None:
        """into (..., d) += z (..., m) @ matrix."""
        z = z * self.scales.to(z.device, torch.float32)
        for part, levels in self._levels(z.device):
            into += z[..., part] @ levels

    def transposed(self, v: torch.Tensor) -> torch.Tensor:
        """(..., m) = v (..., d) @ matrix^T."""
        return torch.cat([v @ levels.T for _, levels in self._levels(v.device)], dim=-1) * self.scales.to(v.device, torch.float32)

    def _levels(self, device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
        """(rows, their levels (rows, d) float32 without the rows' scales), part by part; each is overwritten by the next."""
        table = _table(device)
        if device.type != "cpu" or self.codes.numel() < _COMPILED:
            for part in _parts(self.shape, device):
                codes = self.codes[part].to(device)
                yield part, torch.index_select(table, 0, codes.reshape(-1).to(torch.int32)).view(codes.shape[0], -1)[:, : self.columns]
            return
        expand = _expand()
        buffer = torch.empty(0)
        for part in _parts(self.shape, device):
            codes = self.codes[part]
            if codes.shape[0] * codes.shape[1] * PER_BYTE > buffer.numel():
                buffer = torch.empty(codes.shape[0] * codes.shape[1] * PER_BYTE)
            levels = buffer[: codes.numel() * PER_BYTE]
            expand(codes.numpy(), table.numpy().view(np.complex128), levels.numpy().view(np.complex128))
            yield part, levels.view(codes.shape[0], -1)[:, : self.columns]


Matrix = DenseMatrix | QuantisedMatrix


def _parts(shape: tuple[int, int], device: torch.device) -> Iterator[slice]:
    step = max((_CONVERT if device.type == "cpu" else _CONVERT_GPU) // max(shape[1], 1), 1)
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


@cache
def _expand() -> Callable[[NDArray[np.uint8], NDArray[np.complex128], NDArray[np.complex128]], None]:
    """Compiled on first use: four levels, 16 bytes, copied for each byte of codes. Complex numbers are the 16-byte words that numba knows."""
    import numba

    def expand(codes: Any, table: Any, into: Any) -> None:
        at = 0
        for row in range(codes.shape[0]):
            for column in range(codes.shape[1]):
                into[at] = table[codes[row, column], 0]
                at += 1

    signature = numba.void(numba.uint8[:, ::1], numba.complex128[:, ::1], numba.complex128[::1])
    return cast(Callable[..., None], numba.njit(signature, nogil=True)(expand))


def _table(device: torch.device) -> torch.Tensor:
    """(256, 4) float32: the levels that each byte stands for."""
    if device not in _TABLES:
        byte = torch.arange(256)[:, None] >> torch.tensor([0, 2, 4, 6])
        _TABLES[device] = torch.tensor(LEVELS, dtype=torch.float32)[byte & 3].to(device)
    return _TABLES[device]
