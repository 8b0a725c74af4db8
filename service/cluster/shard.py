"""One part of the index in a process of its own: it maps its segments of a generation when it is first asked about it."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import StoreError
from engine.search.sharded import Part, divide
from engine.store.manifest import DELETED, MANIFEST_HASH, read_manifest
from engine.store.segment import Segment

KEPT = 2  # generations: the live one, and the one that other replicas may still be serving


class Shard:
    """Part `index` of `parts` of the store at `path`; which rows those are depends on the generation alone."""

    def __init__(self, path: Path, index: int, parts: int) -> None:
        self.path, self.index, self.parts = path, index, parts
        self._held: OrderedDict[tuple[str, bytes], Part] = OrderedDict()

    def ask(self, generation: str, version: bytes, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of this shard's `Part` of a generation. Raises StoreError where the generation is gone."""
        return getattr(self._part(generation, version), method)(*arguments)

    def _part(self, generation: str, version: bytes) -> Part:
        key = (generation, version)
        if key not in self._held:
            self._held[key] = self._open(generation, version)
            while len(self._held) > KEPT:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        return self._held[key]

    def _open(self, generation: str, version: bytes) -> Part:
        folder = self.path / "generations" / generation
        manifest = read_manifest(self.path, generation)
        if (folder / MANIFEST_HASH).read_bytes() != version:
            raise StoreError(f"{self.path}: generation {generation} was built anew meanwhile", code="bad-store")
        rows = [s.rows for s in manifest.segments]
        begin, end = divide(rows, self.parts)[self.index]
        first = sum(rows[:begin])
        segments, base = [], 0
        for entry in manifest.segments[begin:end]:
            segments.append(Segment(self.path / "segments" / entry.name, base, entry.rows, manifest.layout))
            base += entry.rows
        excluded = np.concatenate([s.column("flags") for s in segments]) != 0 if segments else np.zeros(0, np.bool_)
        if manifest.deleted:
            deleted = np.load(folder / DELETED, allow_pickle=False, mmap_mode="r")
            excluded[deleted[(deleted >= first) & (deleted < first + base)] - first] = True
        part = Part(segments, manifest.layout, np.array(manifest.sketch.c, np.float32), excluded=excluded, first=first)
        part.warm_up()
        return part
