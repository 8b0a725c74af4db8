"""Corrected eigenvalues: every order of multiplication, band and candidate set against one formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engine.lambda_pass as lambda_pass
from engine.modules import TrackedModule


def orthogonal(d: int, seed: int) -> Tensor:
    return torch.linalg.qr(torch.from_numpy(np.random.default_rng(seed).standard_normal((d, d))))[0].contiguous()


def shaped(name: str, d_out: int, d_in: int, group: str) -> TrackedModule:
    return TrackedModule(name, nn.Linear(d_in, d_out, dtype=torch.float64), d_out, d_in, False, 0, group)


@pytest.mark.parametrize(("d_out", "d_in"), [(7, 5), (5, 7), (6, 6), (40, 3)])
@pytest.mark.parametrize("length", [1, 4, 6, 30])  # shorter and longer than either side: each chooses another order
@pytest.mark.parametrize("tile", [1, 20, 1 << 18])
def test_every_order_of_multiplication_gives_the_same(d_out: int, d_in: int, length: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lambda_pass, "TILE", tile)
    module = shaped("m", d_out, d_in, "m")
    q_s, q_a = orthogonal(d_out, 1), orthogonal(d_in, 2)
    grid = torch.arange(d_out * d_in)
    some = grid[torch.randperm(len(grid), generator=torch.Generator().manual_seed(0))[: max(1, len(grid) // 3)]].sort().values
    for positions in (None, some):
        sums = lambda_pass.LambdaSums([module], {"m": lambda_pass.Basis(q_s, q_a, positions)}, torch.float64)
        expected = torch.zeros(d_out, d_in, dtype=torch.float64)
        rng = np.random.default_rng(3)
        for n in (3, 2):
            a, delta = (torch.from_numpy(rng.standard_normal((n, length, d))) for d in (d_in, d_out))
            sums.start(n)
            sums.consume(module, a, delta)
            for b in range(n):
                expected += (q_s.T @ (delta[b].T @ a[b]) @ q_a) ** 2 / 5
        assert sums.finite()
        means = sums.finish()
        found = sums.squares["m"]
        torch.testing.assert_close(found, expected if positions is None else expected.reshape(-1)[positions])
        assert means["m"] == pytest.approx(float(expected.mean()), rel=1e-10)


def test_modules_that_share_an_input_share_its_rotation() -> None:
    modules = [shaped("q", 6, 4, "q"), shaped("k", 2, 4, "q")]
    q_a = orthogonal(4, 0)
    bases = {m.name: lambda_pass.Basis(orthogonal(m.d_out, 1), q_a) for m in modules}
    sums = lambda_pass.LambdaSums(modules, bases, torch.float64)
    torch.manual_seed(0)
    sums.start(2)
    a = torch.randn(2, 3, 4, dtype=torch.float64)
    deltas = {m.name: torch.randn(2, 3, m.d_out, dtype=torch.float64) for m in modules}
    for m in reversed(modules):
        sums.consume(m, a, deltas[m.name])
    assert not sums._rotated  # nothing outlives the last of them
    for m in modules:
        g = deltas[m.name].transpose(1, 2) @ a
        torch.testing.assert_close(sums.squares[m.name], ((bases[m.name].q_s.T @ g @ q_a) ** 2).sum(0))


def test_frobenius_norms_from_inner_products() -> None:
    torch.manual_seed(0)
    a, delta = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(3, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(lambda_pass.frobenius_squared(a, delta), (delta.transpose(1, 2) @ a).square().sum((1, 2)))


@pytest.mark.parametrize("count", [1, 7, 24, 100])
def test_candidates_are_the_largest_products(count: int) -> None:
    torch.manual_seed(0)
    lambda_s, lambda_a = torch.rand(4), torch.rand(6)
    found = lambda_pass.candidate_positions(lambda_s, lambda_a, count)
    expected = torch.outer(lambda_s, lambda_a).reshape(-1).topk(min(count, 24)).indices.sort().values
    assert torch.equal(found, expected)
