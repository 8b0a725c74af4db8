"""The layout of blocks against naive loops, and the paper's payloads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.blocks import BlockLayout, blocks_of


@pytest.mark.parametrize(("layers", "kilobytes"), [(16, 28.896), (32, 57.792), (40, 72.240), (64, 115.584)])
def test_payload_reproduces_table_2(layers: int, kilobytes: float) -> None:
    """OLMo-2 1B, 7B, 13B and 32B at k_u = 2,048, seven linear modules per layer."""
    modules = [(f"layers.{layer}.{part}", layer) for layer in range(layers) for part in "qkvogud"]
    blocks = blocks_of(modules, "module")
    layout = BlockLayout(tuple(blocks), (2048,) * len(blocks))
    assert layout.payload_bytes == round(kilobytes * 1000)


def test_blocks_of_groups_in_order_of_appearance() -> None:
    modules = [("h.0.a", 0), ("h.0.b", 0), ("h.1.a", 1), ("score", -1)]
    assert blocks_of(modules, "module") == {name: [name] for name, _ in modules}
    assert blocks_of(modules, "layer") == {"layer.0": ["h.0.a", "h.0.b"], "layer.1": ["h.1.a"], "outside": ["score"]}
    assert blocks_of(modules, "model") == {"model": [name for name, _ in modules]}


@given(st.lists(st.integers(1, 70), min_size=1, max_size=6))
def test_layout_equals_a_loop(k: list[int]) -> None:
    layout = BlockLayout(tuple(f"b{i}" for i in range(len(k))), tuple(k))
    byte, coordinate, columns, owner = 0, 0, [], []
    for b, bits in enumerate(k):
        assert (layout.byte_offsets[b], layout.offsets[b]) == (byte, coordinate)
        assert layout.slice(b) == slice(coordinate, coordinate + bits)
        columns += [8 * byte + j for j in range(bits)]
        owner += [b] * bits
        byte += (bits + 7) // 8
        coordinate += bits
    assert (layout.code_bytes, layout.total_k, layout.payload_bytes) == (byte, coordinate, byte + 2 * len(k))
    np.testing.assert_array_equal(layout.bit_columns, columns)
    np.testing.assert_array_equal(layout.block_of_coordinate, owner)
    assert BlockLayout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(("names", "k"), [((), ()), (("a",), (0,)), (("a", "a"), (1, 1)), (("a",), (1, 2))])
def test_impossible_layouts_are_refused(names: tuple[str, ...], k: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="block"):
        BlockLayout(names, k)
