"""A store of random codes, made without a model: for tests, and for measuring the store and its search at any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engine.blocks import BlockLayout
from engine.example import Example
from engine.signs import Sketch
from engine.store.manifest import Manifest, SegmentEntry, SketchEntry
from engine.store.rows import examples_table
from engine.store.writer import StoreWriter, segment_name

WORDS = ("capital", "carbon", "currency", "king", "river", "speech", "union", "yen", "peace", "tungsten", "revenue", "citizen")


def synthetic_examples(rng: np.random.Generator, rows: range, words: int = 12, tokens: int = 8) -> list[Example]:
    """Examples with text of `words` words, ids row-N, and metadata kind, year, score (a float, sometimes missing) and tags (a list)."""
    found = []
    text = rng.integers(0, len(WORDS), (len(rows), words))
    ids = rng.integers(1, 300, (len(rows), tokens))
    score = rng.random(len(rows))
    for i, row in enumerate(rows):
        target = np.ones(tokens, np.bool_)
        target[0] = False
        metadata: dict[str, Any] = {"kind": ("fact", "speech", "other")[row % 3], "year": 1790 + row % 230, "tags": [WORDS[row % 7]]}
        if row % 5:
            metadata["score"] = float(score[i])
        found.append(Example(f"row-{row}", ids[i], ids[i], target, " ".join(WORDS[w] for w in text[i]), metadata=metadata))
    return found


def synthetic_sketch(rng: np.random.Generator, n: int, layout: BlockLayout, flagged: float = 0.0) -> Sketch:
    """n random sketches of a layout; a share of them flagged, their codes and scales 0."""
    codes = np.frombuffer(rng.bytes(n * layout.code_bytes), np.uint8).reshape(n, layout.code_bytes).copy()
    for end, k in zip(layout.byte_offsets[1:], layout.k, strict=True):
        codes[:, end - 1] &= 0xFF >> (-k % 8)  # padding bits are 0
    scales = rng.lognormal(0, 0.5, (n, layout.n_blocks)).astype(np.float16)
    flags = (rng.random(n) < flagged).astype(np.uint8)
    codes[flags != 0], scales[flags != 0] = 0, 0
    return Sketch(
        codes, scales, rng.lognormal(0, 1, n).astype(np.float32), rng.gamma(4, 4, n).astype(np.float32), rng.integers(1, 64, n).astype(np.int32), flags
    )


def make_store(
    path: Path, n: int, *, k: tuple[int, ...] = (120, 40), shard_rows: int = 4096, seed: int = 0, flagged: float = 0.0, words: int = 12, tokens: int = 8
) -> Path:
    """Write a store of n random rows with blocks of k bits; returns its path."""
    rng = np.random.default_rng(seed)
    layout = BlockLayout(tuple(f"block.{i}" for i in range(len(k))), k)
    segments = []
    with StoreWriter(path) as writer:
        for number, start in enumerate(range(0, n, shard_rows)):
            rows = range(start, min(start + shard_rows, n))
            table = examples_table(synthetic_examples(rng, rows, words, tokens), list(rows), [0] * len(rows), [r + 1 for r in rows])
            writer.write_segment(number, table, synthetic_sketch(rng, len(rows), layout, flagged), layout)
            segments.append(SegmentEntry(name=segment_name(number), rows=len(rows)))
        (path / "shared" / "sketch").mkdir(exist_ok=True)
        c = rng.lognormal(0, 0.3, len(k)).astype(np.float32)
        manifest = Manifest(
            sketch=SketchEntry(layout=layout.to_json(), c=[float(v) for v in c], scale="l1", method="pca", bytes_per_example=layout.payload_bytes),
            next_row=n,
            next_segment=len(segments),
            segments=segments,
            files=writer.segment_entries(range(len(segments))),
        )
        writer.commit(manifest)
    return path
