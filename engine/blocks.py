"""Blocks: sets of modules that share one PCA, one bit string and one scale, and the layout of their bits.

The paper (arXiv 2609.37842) projects each module on its own; a block may also be a layer or the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

BlockKind = Literal["module", "layer", "model"]
SCALE_BYTES = 2  # one fp16 scale per block


def blocks_of(modules: Sequence[tuple[str, int]], kind: BlockKind) -> dict[str, list[str]]:
    """{block name: [module names]} in order of first appearance, from (module name, layer index) pairs; layer -1 is outside the layers."""
    blocks: dict[str, list[str]] = {}
    for name, layer in modules:
        block = name if kind == "module" else "model" if kind == "model" else f"layer.{layer}" if layer >= 0 else "outside"
        blocks.setdefault(block, []).append(name)
    return blocks


@dataclass(frozen=True)
class BlockLayout:
    """Where each block's coordinates, bits and bytes lie.

    names: blocks in order; k: bits of each. Coordinates are concatenated without gaps, (N, total_k); codes are concatenated with every block
    starting on a byte, (N, code_bytes) uint8, bit j of a block in byte j // 8 at weight 2^(j % 8); the padding bits of a block are 0.
    """

    names: tuple[str, ...]
    k: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.k) or len(set(self.names)) != len(self.names) or not self.names:
            raise ValueError("a layout needs at least one block, distinct names, and one k for each")
        if min(self.k) < 1:
            raise ValueError(f"block {self.names[int(np.argmin(self.k))]} has {min(self.k)} bits; at least 1 is needed")

    @property
    def n_blocks(self) -> int:
        return len(self.k)

    @property
    def total_k(self) -> int:
        return sum(self.k)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Bytes of each block's bit string, ceil(k / 8)."""
        return tuple(-(-k // 8) for k in self.k)

    @property
    def code_bytes(self) -> int:
        return sum(self.widths)

    @property
    def payload_bytes(self) -> int:
        """Stored bytes per example: sum over blocks of ceil(k / 8) + 2."""
        return self.code_bytes + SCALE_BYTES * self.n_blocks

    @cached_property
    def byte_offsets(self) -> tuple[int, ...]:
        """First byte of each block, and code_bytes at the end (n_blocks + 1 numbers)."""
        return (0, *accumulate(self.widths))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First coordinate of each block, and total_k at the end (n_blocks + 1 numbers)."""
        return (0, *accumulate(self.k))

    @cached_property
    def bit_columns(self) -> NDArray[np.int64]:
        """(total_k,) int64: the bit of the byte-aligned code, 0 .. 8 * code_bytes - 1, that holds each coordinate."""
        return np.concatenate([8 * start + np.arange(k, dtype=np.int64) for start, k in zip(self.byte_offsets, self.k, strict=False)])

    @cached_property
    def block_of_coordinate(self) -> NDArray[np.int64]:
        """(total_k,) int64: the block index of each coordinate."""
        return np.repeat(np.arange(self.n_blocks, dtype=np.int64), self.k)

    def slice(self, block: int) -> slice:
        """The block's coordinates within (N, total_k)."""
        return slice(self.offsets[block], self.offsets[block + 1])

    def to_json(self) -> dict[str, Any]:
        return {"names": list(self.names), "k": list(self.k)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BlockLayout:
        return cls(tuple(data["names"]), tuple(int(k) for k in data["k"]))
