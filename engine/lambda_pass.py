"""Second pass of EK-FAC: corrected eigenvalues Lambda[o, i] = E_examples[(Q_S^T G Q_A)[o, i]^2], G = sum_t delta_t a_t^T over the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.covariance import all_finite, input_key, working_dtype
from engine.modules import TrackedModule
from engine.placement import device_of

TILE = 1 << 18  # entries of G formed at once on a CPU: squared and added while they are in its cache
CHUNK = 1 << 25  # entries of G formed at once on a GPU, over several examples


@dataclass(frozen=True, slots=True)
class Basis:
    """One module's eigenvectors q_s (d_out, d_out) and q_a (d_in, d_in), and the sorted flat positions kept (None: the whole grid)."""

    q_s: Tensor
    q_a: Tensor
    positions: Tensor | None = None


class LambdaSums:
    """Running sums of squared eigenbasis gradients of one module group.

    `squares` {module: (d_out, d_in), or (n_positions,) on a candidate set}; `norms` {module: sum over examples of ||G||_F^2, a float64 scalar}: for any
    orthogonal Q mean(Lambda) = E||G||_F^2 / (d_out d_in), which keeps the damping exact on a candidate set.
    """

    def __init__(self, modules: Sequence[TrackedModule], bases: Mapping[str, Basis], dtype: torch.dtype) -> None:
        self.dtype = working_dtype(dtype)
        self.bases = bases
        self.squares: dict[str, Tensor] = {}
        self.norms: dict[str, Tensor] = {}
        self.examples = 0
        self._rotated: dict[str, Tensor] = {}  # Q_A^T a of the current batch, shared inside an input group
        self._waiting: dict[str, int] = {}
        self._sharers: dict[str, int] = {}
        self._scratch: Tensor | None = None
        for module in modules:
            self._sharers[input_key(module)] = self._sharers.get(input_key(module), 0) + 1
            positions, device = bases[module.name].positions, device_of(module.module)
            shape = (module.d_out, module.d_in) if positions is None else tuple(positions.shape)
            self.squares[module.name] = torch.zeros(shape, dtype=self.dtype, device=device)
            self.norms[module.name] = torch.zeros((), dtype=torch.float64, device=device)

    def start(self, n_examples: int) -> None:
        """Begin a batch of `n_examples`."""
        self.examples += n_examples
        self._rotated.clear()
        self._waiting = dict(self._sharers)

    def consume(self, module: TrackedModule, a: Tensor, delta: Tensor) -> None:
        """Add one module's a (B, T, d_in) and delta (B, T, d_out), both zero at padding."""
        basis, length = self.bases[module.name], a.shape[1]
        delta = delta.to(self.dtype)
        self._waiting[input_key(module)] -= 1
        if basis.positions is not None:
            a = a.to(self.dtype)
            self.norms[module.name].add_(frobenius_squared(a, delta).sum())
            self._add_candidates(module, basis.positions, delta @ basis.q_s, self._rotate(module, a))
            return
        # each side is rotated before the product over t, or after it, whichever multiplies less
        s_first, a_first = length < module.d_in, length < module.d_out
        left = delta @ basis.q_s if s_first else delta
        right = self._rotate(module, a) if a_first else a.to(self.dtype)
        total = self.squares[module.name]
        if s_first and a_first and total.device.type == "cpu":
            self._add_tiles(total, left, right)
            return
        for part in _example_chunks(total, left.shape[0]):
            g = left[part].transpose(1, 2) @ right[part]
            if not s_first:
                g = basis.q_s.T @ g
            if not a_first:
                g = g @ basis.q_a
            total.add_(g.square_().sum(0))

    def _rotate(self, module: TrackedModule, a: Tensor) -> Tensor:
        """Q_A^T a, computed once per batch for modules that share their input, and let go with the last of them."""
        key = input_key(module)
        rotated = self._rotated.pop(key, None)
        if rotated is None:
            rotated = a.to(self.dtype) @ self.bases[module.name].q_a
        if self._waiting[key] > 0:
            self._rotated[key] = rotated
        return rotated

    def _buffer(self, rows: int, columns: int, like: Tensor) -> Tensor:
        if self._scratch is None or self._scratch.numel() < rows * columns:
            self._scratch = like.new_empty(rows * columns)
        return self._scratch[: rows * columns].view(rows, columns)

    def _add_tiles(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """total += sum_b (left_b^T right_b)^2, a cache-sized band of rows at a time."""
        d_out, d_in = total.shape
        rows = max(1, min(d_out, TILE // d_in))
        for start in range(0, d_out, rows):
            band = total[start : start + rows]
            g = self._buffer(band.shape[0], d_in, total)
            for b in range(left.shape[0]):
                torch.mm(left[b, :, start : start + rows].T, right[b], out=g)
                band.addcmul_(g, g)

    def _add_candidates(self, module: TrackedModule, positions: Tensor, left: Tensor, right: Tensor) -> None:
        """The same at `positions` only: bands of rows are formed, read at the positions that lie in them, and forgotten."""
        total = self.squares[module.name]
        d_out, d_in = module.d_out, module.d_in
        rows = max(1, min(d_out, (TILE if total.device.type == "cpu" else CHUNK) // d_in))
        edges = torch.searchsorted(positions, torch.arange(0, d_out + rows, rows, device=positions.device) * d_in).tolist()
        for band, start in enumerate(range(0, d_out, rows)):
            low, high = edges[band], edges[band + 1]
            if low == high:
                continue
            inside = positions[low:high] - start * d_in
            for b in range(left.shape[0]):
                g = (left[b, :, start : start + rows].T @ right[b]).reshape(-1)[inside]
                total[low:high].addcmul_(g, g)

    def finite(self) -> bool:
        """Whether all sums are finite."""
        return all_finite(self.squares.values())

    def finish(self) -> dict[str, float]:
        """Divide by the number of examples; {module: mean(Lambda) over the whole grid}, from ||G||_F^2 on a candidate set."""
        means: dict[str, float] = {}
        for name, total in self.squares.items():
            total.div_(self.examples)
            basis = self.bases[name]
            if basis.positions is None:
                means[name] = float(total.mean(dtype=torch.float64))
            else:
                means[name] = float(self.norms[name]) / self.examples / (basis.q_s.shape[0] * basis.q_a.shape[0])
        return means


def frobenius_squared(a: Tensor, delta: Tensor) -> Tensor:
    """||sum_t delta_t a_t^T||_F^2 per example, (B,) float64, from the T x T products alone."""
    return ((a @ a.transpose(1, 2)).double() * (delta @ delta.transpose(1, 2)).double()).sum((1, 2))


def _example_chunks(total: Tensor, n: int) -> Iterator[slice]:
    step = max(1, (TILE if total.device.type == "cpu" else CHUNK) // total.numel())
    for start in range(0, n, step):
        yield slice(start, start + step)


def candidate_positions(lambda_s: Tensor, lambda_a: Tensor, count: int) -> Tensor:
    """Sorted flat positions o * d_in + i (int64) of the `count` largest lambda_S[o] * lambda_A[i], without forming the grid at once."""
    d_out, d_in = lambda_s.numel(), lambda_a.numel()
    count = min(count, d_out * d_in)
    best_values, best = lambda_s.new_empty(0), torch.empty(0, dtype=torch.int64, device=lambda_s.device)
    rows = max(1, (1 << 24) // d_in)
    for start in range(0, d_out, rows):
        values = torch.outer(lambda_s[start : start + rows], lambda_a).reshape(-1)
        flat = torch.arange(values.numel(), device=values.device) + start * d_in
        values, flat = torch.cat([best_values, values]), torch.cat([best, flat])
        best_values, chosen = torch.topk(values, min(count, values.numel()), sorted=False)
        best = flat[chosen]
    return best.sort().values
