"""Every order of multiplications gives the dense result; the order chosen is the cheapest."""

from __future__ import annotations

import itertools

import pytest
import torch

import engine.rotated
from engine.rotated import Sides, by_position, cheapest, cost, rotate, selected


def sides(bias: bool, t: int = 5, d_out: int = 7, d_in: int = 4, r_s: int = 3, r_a: int = 2) -> Sides:
    g = torch.Generator().manual_seed(0)
    a, delta = (torch.randn(3, t, d, generator=g, dtype=torch.float64) for d in (d_in, d_out))
    q_a, q_s = (torch.randn(d, r, generator=g, dtype=torch.float64) for d, r in ((d_in + bias, r_a), (d_out, r_s)))
    return Sides(a, delta, q_a, q_s, bias, lambda: rotate(a, q_a, bias))


def dense(s: Sides) -> torch.Tensor:
    a = torch.cat([s.a, torch.ones(3, s.a.shape[1], 1, dtype=torch.float64)], dim=-1) if s.bias else s.a
    return torch.stack([s.q_s.T @ sum(torch.outer(s.delta[b, t], a[b, t]) for t in range(a.shape[1])) @ s.q_a for b in range(3)])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", list(itertools.product([True, False], repeat=2)))
def test_every_order_gives_the_dense_result(order: tuple[bool, bool], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.rotated, "cheapest", lambda *_: order)
    for shape in ({}, {"d_out": 4, "d_in": 9, "r_s": 4, "r_a": 1}):
        s = sides(bias, **shape)
        flat = torch.tensor([0, 1, s.q_s.shape[1] * s.q_a.shape[1] - 1])
        torch.testing.assert_close(selected(s, flat), dense(s).flatten(1)[:, flat], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_positions_sum_to_the_whole(bias: bool) -> None:
    s = sides(bias)
    rows, columns = torch.tensor([0, 2, 2]), torch.tensor([1, 0, 1])
    each = by_position(s, rows, columns)
    assert each.shape == (3, 5, 3)
    torch.testing.assert_close(each.sum(1), dense(s)[:, rows, columns], rtol=1e-12, atol=1e-12)


def test_short_texts_are_rotated_by_token_and_long_ones_after_the_sum() -> None:
    assert cheapest(16, (512, 512), (128, 128)) == (True, True)
    assert cheapest(10_000, (512, 512), (128, 128)) == (False, False)
    assert cheapest(300, (512, 512), (128, 128)) == (False, True)  # the wide side goes first
    assert cheapest(300, (128, 128), (512, 512)) == (True, False)


def test_costs_are_counts_of_multiplications() -> None:
    t, d_out, r_s, d_in, r_a = 3, 5, 2, 7, 4
    q_s, q_a = (d_out, r_s), (d_in, r_a)
    assert cost(t, q_s, q_a, True, True) == t * d_out * r_s + t * d_in * r_a + t * r_s * r_a
    assert cost(t, q_s, q_a, True, True, sharers=2) == t * d_out * r_s + t * d_in * r_a / 2 + t * r_s * r_a
    assert cost(t, q_s, q_a, False, True) == t * d_in * r_a + t * d_out * r_a + r_s * d_out * r_a
    assert cost(t, q_s, q_a, True, False) == t * d_out * r_s + t * r_s * d_in + r_s * d_in * r_a
    assert cost(t, q_s, q_a, False, False) == t * d_out * d_in + r_s * d_out * d_in + r_s * d_in * r_a
