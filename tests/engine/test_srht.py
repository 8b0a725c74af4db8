"""The module-by-module SRHT against a dense Hadamard matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard

from engine.srht import SRHT, fwht, parity, place, power_of_two


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_fwht_equals_the_dense_matrix(size: int) -> None:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, size)))
    np.testing.assert_allclose(fwht(x).numpy(), x.numpy() @ hadamard(size), atol=1e-12)


def test_fwht_refuses_other_sizes() -> None:
    with pytest.raises(ValueError, match="power of two"):
        fwht(torch.zeros(2, 3))


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=9))
def test_parity_counts_bits(values: list[int]) -> None:
    np.testing.assert_array_equal(parity(np.array(values, np.int64)), [(-1) ** v.bit_count() for v in values])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_placed_slices_are_aligned_and_do_not_overlap(widths: list[int]) -> None:
    offsets, p = place(widths)
    taken = np.zeros(p, int)
    for offset, width in zip(offsets, widths, strict=True):
        assert offset % power_of_two(width) == 0
        taken[offset : offset + width] += 1
    assert taken.max() == 1
    assert taken.sum() == sum(widths)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(0, 20))
def test_contributions_sum_to_the_dense_transform(widths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    offsets, p = place(widths)
    k = int(rng.integers(1, p + 1))
    srht = SRHT.draw(widths, k, rng)
    z = [rng.standard_normal((2, width)) for width in widths]
    padded = np.zeros((2, p))
    for part, sign, offset in zip(z, srht.signs, offsets, strict=True):
        padded[:, offset : offset + part.shape[1]] = part * sign
    expected = np.sqrt(p / k) * (padded @ (hadamard(p) / np.sqrt(p)))[:, srht.rows]
    found = srht.gain * sum(srht.contribution(u, torch.from_numpy(part)).numpy() for u, part in enumerate(z))
    np.testing.assert_allclose(found, expected, atol=1e-10)
    w = rng.standard_normal((2, k))
    forward = (w / srht.gain * found).sum()
    back = sum((srht.back(u, torch.from_numpy(w)).numpy() * part).sum() for u, part in enumerate(z))
    assert back == pytest.approx(forward, abs=1e-9)


def test_all_rows_preserve_products_exactly() -> None:
    rng = np.random.default_rng(3)
    srht = SRHT.draw([16, 8, 8], 32, rng)
    z = [rng.standard_normal((4, width)) for width in srht.widths]
    x = srht.gain * sum(srht.contribution(u, torch.from_numpy(part)).numpy() for u, part in enumerate(z))
    flat = np.concatenate(z, axis=1)
    np.testing.assert_allclose(x @ x.T, flat @ flat.T, atol=1e-10)


def test_more_rows_than_the_padded_width_are_refused() -> None:
    with pytest.raises(ValueError, match="size 16"):
        SRHT.draw([9], 17, np.random.default_rng(0))
