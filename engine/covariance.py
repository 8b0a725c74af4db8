"""First pass of EK-FAC: A = E[a a^T] and S = E[delta delta^T] over every non-padding position, labels sampled from the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from engine.example import Batch
from engine.modules import TrackedModule
from engine.placement import device_of

BLOCK = 192  # edge of the blocks in which a symmetric product is formed on a CPU; only those on and above the diagonal are
GPU_BLOCK = 2048


def input_key(module: TrackedModule) -> str:
    """Name of the activation covariance that a module shares with the others fed by the same tensor (with the constant 1 of a bias, or without)."""
    return f"{module.input_group}:{module.d_in}"


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of sums: float32, or float64 where the model itself runs in float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_second_moment(total: Tensor, x: Tensor) -> None:
    """total (d, d) += x^T x for x (n, d) of the same dtype; blocks below the diagonal are left for `mirror`, which saves up to half of the work."""
    for start, stop in _bands(total):
        total[start:stop, start:].addmm_(x[:, start:stop].T, x[:, start:])


def mirror(total: Tensor) -> None:
    """Copy the blocks above the diagonal to below it, in place: the matrix becomes exactly symmetric."""
    for start, stop in _bands(total):
        total[stop:, start:stop] = total[start:stop, stop:].T
        square = total[start:stop, start:stop]
        square.copy_((square + square.T) / 2)


def _bands(total: Tensor) -> Iterator[tuple[int, int]]:
    step, d = BLOCK if total.device.type == "cpu" else GPU_BLOCK, total.shape[0]
    return ((start, min(start + step, d)) for start in range(0, d, step))


class CovarianceSums:
    """Running sums of one module group: `inputs` {input key: (d_in, d_in)}, `outputs` {module: (d_out, d_out)}, in float32 or float64."""

    def __init__(self, modules: Sequence[TrackedModule], dtype: torch.dtype) -> None:
        self.dtype = working_dtype(dtype)
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.tokens = 0
        self._fed: set[str] = set()
        for module in modules:
            device = device_of(module.module)
            if input_key(module) not in self.inputs:
                self.inputs[input_key(module)] = torch.zeros(module.d_in, module.d_in, dtype=self.dtype, device=device)
            self.outputs[module.name] = torch.zeros(module.d_out, module.d_out, dtype=self.dtype, device=device)

    def start(self, batch: Batch) -> None:
        """Count a batch's non-padding positions; each shared input is then added once."""
        self.tokens += int(batch.attention_mask.sum())
        self._fed.clear()

    def consume(self, module: TrackedModule, a: Tensor, delta: Tensor) -> None:
        """Add one module's a (B, T, d_in) and delta (B, T, d_out), both zero at padding."""
        key = input_key(module)
        if key not in self._fed:
            self._fed.add(key)
            add_second_moment(self.inputs[key], a.reshape(-1, a.shape[-1]).to(self.dtype))
        add_second_moment(self.outputs[module.name], delta.reshape(-1, delta.shape[-1]).to(self.dtype))

    def finite(self) -> bool:
        """Whether every sum is finite. A non-finite entry of a or delta is on the diagonal at once, so reading diagonals is enough."""
        return all_finite([m.diagonal() for m in (*self.inputs.values(), *self.outputs.values())])

    def finish(self) -> None:
        """Divide by the number of positions and fill in below the diagonals."""
        for matrix in (*self.inputs.values(), *self.outputs.values()):
            matrix.div_(self.tokens)
            mirror(matrix)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """One transfer from the device, however many tensors."""
    sums = [torch.isfinite(t).all() for t in tensors]
    return bool(torch.stack([s.to(sums[0].device) for s in sums]).all()) if sums else True
