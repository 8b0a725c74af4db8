"""Selected entries of Q_S^T (sum_t delta_t a_t^T) Q_A, by the cheapest order of multiplications.

Each side can be rotated token by token, before the sum over tokens, or once, after it. Short texts favour the first, texts longer than a module is wide
the second; the shapes decide, side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_GPU_OUTER_BYTES = 256 * 10**6


@dataclass
class Sides:
    """One module's part of a batch: a (B, T, d_in) without a bias's constant, delta (B, T, d_out) in the projection's dtype, and the used columns
    q_a (d_in, r_a), q_s (d_out, r_s), the bias's row included in q_a. `rotated_a` gives a Q_A (B, T, r_a), shared between modules with the same input."""

    a: Tensor
    delta: Tensor
    q_a: Tensor
    q_s: Tensor
    bias: bool
    rotated_a: Callable[[], Tensor]
    sharers: int = 1

    @cached_property
    def rotated_delta(self) -> Tensor:
        return self.delta @ self.q_s

    def whole_a(self) -> Tensor:
        """a in the projection's dtype, with the constant 1 of a bias (at padding too, where delta is 0)."""
        a = self.a.to(self.q_a.dtype)
        return torch.cat([a, a.new_ones((*a.shape[:2], 1))], dim=-1) if self.bias else a


def rotate(a: Tensor, q_a: Tensor, bias: bool) -> Tensor:
    """(B, T, d) -> (B, T, r): a Q_A, with the row of the bias's constant 1 added rather than multiplied."""
    a = a.to(q_a.dtype)
    if not bias:
        return a @ q_a
    b, t, d = a.shape
    return torch.addmm(q_a[-1], a.reshape(b * t, d), q_a[:-1]).view(b, t, -1)


def cheapest(t: int, q_s: tuple[int, int], q_a: tuple[int, int], sharers: int = 1) -> tuple[bool, bool]:
    """(rotate delta by token?, rotate a by token?) with the fewest multiplications per example of t tokens; q_s = (d_out, r_s), q_a = (d_in, r_a)."""
    return min(((s, a) for s in (True, False) for a in (True, False)), key=lambda order: cost(t, q_s, q_a, *order, sharers=sharers))


def cost(t: int, q_s: tuple[int, int], q_a: tuple[int, int], s_by_token: bool, a_by_token: bool, *, sharers: int = 1) -> float:
    """Multiplications per example; a rotation of a by token is shared by `sharers` modules."""
    (d_out, r_s), (d_in, r_a) = q_s, q_a
    rows, columns = r_s if s_by_token else d_out, r_a if a_by_token else d_in
    before = (t * d_out * r_s if s_by_token else 0) + (t * d_in * r_a / sharers if a_by_token else 0)
    after = 0
    if not s_by_token and not a_by_token:
        after = min(r_s * d_out * d_in + r_s * d_in * r_a, d_out * d_in * r_a + d_out * r_s * r_a)
    elif not s_by_token:
        after = r_s * d_out * r_a
    elif not a_by_token:
        after = r_s * d_in * r_a
    return before + t * rows * columns + after


def selected(sides: Sides, flat: Tensor) -> Tensor:
    """(B, m): the entries `flat` (row * r_a + column) of each example's (r_s, r_a) matrix."""
    b, t = sides.delta.shape[:2]
    s_by_token, a_by_token = cheapest(t, shape(sides.q_s), shape(sides.q_a), sides.sharers)
    left = sides.rotated_delta if s_by_token else sides.delta
    right = sides.rotated_a() if a_by_token else sides.whole_a()
    largest = max(left.shape[2], sides.q_s.shape[1]) * max(right.shape[2], sides.q_a.shape[1]) * left.element_size()
    step = 1 if left.device.type == "cpu" else max(1, _GPU_OUTER_BYTES // largest)
    z = left.new_empty((b, len(flat)))
    for start in range(0, b, step):
        part = slice(start, start + step)
        g = left[part].transpose(1, 2) @ right[part]
        if not s_by_token and not a_by_token:
            g = sides.q_s.T @ g @ sides.q_a if _s_first(sides) else sides.q_s.T @ (g @ sides.q_a)
        elif not s_by_token:
            g = sides.q_s.T @ g
        elif not a_by_token:
            g = g @ sides.q_a
        torch.index_select(g.flatten(1), 1, flat, out=z[part])
    return z


def by_position(sides: Sides, rows: Tensor, columns: Tensor) -> Tensor:
    """(B, T, m): the same entries of each position's outer product alone."""
    return sides.rotated_delta[..., rows] * sides.rotated_a()[..., columns]


def shape(q: Tensor) -> tuple[int, int]:
    return q.shape[0], q.shape[1]


def _s_first(sides: Sides) -> bool:
    (d_out, r_s), (d_in, r_a) = shape(sides.q_s), shape(sides.q_a)
    return r_s * d_out * d_in + r_s * d_in * r_a <= d_out * d_in * r_a + d_out * r_s * r_a
