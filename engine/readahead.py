"""Reading ahead in files that are mapped: the kernel fetches the next module's pages while this one's are multiplied."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Range = tuple[int, int]  # offset and length in bytes


class ReadAhead:
    """`will_need(name)` starts reading what belongs to a name and returns at once. A system without posix_fadvise reads when the pages are touched."""

    def __init__(self, path: Path, ranges: Mapping[str, Sequence[Range]]) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, self._file)
        self.ranges = dict(ranges)

    def close(self) -> None:
        """Let go of the file; done by itself when nothing refers to this any more."""
        self._close()

    def will_need(self, name: str | None) -> None:
        """Nothing for a name that is None or unknown."""
        if hasattr(os, "posix_fadvise"):
            for offset, length in self.ranges.get(name or "", ()):
                os.posix_fadvise(self._file, offset, length, os.POSIX_FADV_WILLNEED)


def tensor_ranges(path: Path, wanted: Mapping[str, Iterable[str]]) -> dict[str, list[Range]]:
    """Where tensors lie in a safetensors file: {name: ranges of its tensors} for {name: keys of its tensors}."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    found = {}
    for name, keys in wanted.items():
        spans = [header[key]["data_offsets"] for key in keys]
        found[name] = [(8 + size + start, end - start) for start, end in spans]
    return found
