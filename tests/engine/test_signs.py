"""Bits and scales against naive float64 loops of equations (13) and (14)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.blocks import BlockLayout
from engine.signs import SCALE_MAX, SCALE_MIN, ScaleKind, Sketch, block_scales, decode, decode_signs, encode, geometric_mean_scale, pack_signs


def layout_of(k: list[int]) -> BlockLayout:
    return BlockLayout(tuple(f"b{i}" for i in range(len(k))), tuple(k))


def rows(n: int, width: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 6), st.integers(0, 99))
def test_codes_equal_a_loop_and_decode(k: list[int], n: int, seed: int) -> None:
    layout = layout_of(k)
    x = rows(n, layout.total_k, seed)
    codes = pack_signs(x, layout)
    expected = np.zeros((n, layout.code_bytes), np.uint8)
    for i in range(n):
        start = byte = 0
        for bits in k:
            for j in range(bits):
                if x[i, start + j] >= 0:
                    expected[i, byte + j // 8] |= 1 << (j % 8)
            start, byte = start + bits, byte + (bits + 7) // 8
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(decode_signs(codes, layout), np.where(x >= 0, 1, -1))


def test_sign_of_zero_is_positive() -> None:
    assert pack_signs(np.array([[0.0, -0.0, -1.0]]), layout_of([3])).tolist() == [[0b011]]


@pytest.mark.parametrize("kind", ["l1", "unbiased"])
@given(k=st.lists(st.integers(1, 20), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_scales_equal_a_loop(kind: ScaleKind, k: list[int], seed: int) -> None:
    layout = layout_of(k)
    x = rows(3, layout.total_k, seed)
    s = block_scales(x, layout, kind)
    for i in range(3):
        for b in range(layout.n_blocks):
            part = x[i, layout.slice(b)].astype(np.float64)
            expected = np.abs(part).sum() / len(part) if kind == "l1" else (part**2).sum() / np.abs(part).sum()
            assert s[i, b] == pytest.approx(expected, rel=1e-12)


def test_the_unbiased_scale_keeps_the_product_with_itself() -> None:
    layout, x = layout_of([32, 7]), rows(4, 39, 0).astype(np.float64)
    s = block_scales(x, layout, "unbiased")
    signs = np.where(x >= 0, 1, -1)
    for b in range(2):
        own = layout.slice(b)
        np.testing.assert_allclose((s[:, [b]] * signs[:, own] * x[:, own]).sum(1), np.square(x[:, own]).sum(1), rtol=1e-12)


@pytest.mark.parametrize("kind", ["l1", "unbiased"])
def test_stored_scales_are_relative_clamped_and_zero_only_for_zero_blocks(kind: ScaleKind) -> None:
    layout = layout_of([4, 4])
    x = np.array([[1, -1, 1, 1, 0, 0, 0, 0], [1e-30] * 4 + [1e30] * 4, [-2] * 4 + [3] * 4], np.float32)
    _, scales = encode(x, layout, np.array([2.0, 3.0], np.float32), kind)
    assert scales.dtype == np.float16
    assert scales.tolist() == [[0.5, 0.0], [SCALE_MIN, SCALE_MAX], [1.0, 1.0]]


def test_subnormal_coordinates_do_not_become_a_zero_block() -> None:
    _, scales = encode(np.full((1, 4), 1e-44, np.float32), layout_of([4]), np.ones(1, np.float32), "unbiased")
    assert scales[0, 0] == SCALE_MIN


def test_decoded_rows_score_as_a_loop_of_equation_14() -> None:
    layout, c = layout_of([5, 11]), np.array([0.25, 4.0], np.float32)
    x, y = rows(6, 16, 1), rows(2, 16, 2)
    codes, scales = encode(x, layout, c, "l1")
    found = y.astype(np.float64) @ decode(codes, scales, layout, c).astype(np.float64).T
    for q in range(2):
        for i in range(6):
            expected = 0.0
            for b in range(2):
                s = float(c[b]) * float(scales[i, b])
                for j in range(layout.offsets[b], layout.offsets[b + 1]):
                    bit = codes[i, layout.byte_offsets[b] + (j - layout.offsets[b]) // 8] >> ((j - layout.offsets[b]) % 8) & 1
                    expected += s * float(y[q, j]) * (1 if bit else -1)
            assert found[q, i] == pytest.approx(expected, rel=1e-5)


def test_geometric_mean_ignores_zeros() -> None:
    s = np.array([[1.0, 0.0, 5.0], [4.0, 0.0, 0.0]])
    np.testing.assert_allclose(geometric_mean_scale(s), [2.0, 1.0, 5.0], rtol=1e-6)


def test_coordinates_of_another_layout_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(N, 3\)"):
        encode(np.zeros((2, 4), np.float32), layout_of([3]), np.ones(1, np.float32), "l1")


def test_concat_keeps_rows_in_order() -> None:
    layout, parts = layout_of([9]), []
    for seed in range(3):
        codes, scales = encode(rows(2, 9, seed), layout, np.ones(1, np.float32), "l1")
        parts.append(Sketch(codes, scales, np.full(2, seed, np.float32), np.zeros(2, np.float32), np.ones(2, np.int32), np.zeros(2, np.uint8)))
    whole = Sketch.concat(parts)
    assert len(whole) == 6
    assert whole.norm_sq.tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_array_equal(whole.codes[2:4], parts[1].codes)
    assert whole.scales.dtype == np.float16
