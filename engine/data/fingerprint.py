"""What the inputs were: name, format, size and SHA-256, so that a run is only resumed on the same data and a store says what it was made of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.data.reading import Source, open_dataset
from engine.data.settings import DataSettings

_CHUNK = 1 << 20


def fingerprint_sources(sources: Sequence[Source], settings: DataSettings) -> list[dict[str, Any]]:
    """[{name, format, size, sha256}] in order; for a dataset of the hub the library's own fingerprint, and no size."""
    return [_fingerprint(source, settings) for source in sources]


def _fingerprint(source: Source, settings: DataSettings) -> dict[str, Any]:
    found: dict[str, Any] = {"name": source.name, "format": source.format, "size": None, "sha256": None}
    if source.path is None:
        return {**found, "sha256": str(open_dataset(source, settings)._fingerprint)}
    files = sorted(p for p in source.path.rglob("*") if p.is_file()) if source.path.is_dir() else [source.path]
    digest, size = hashlib.sha256(), 0
    for file in files:
        if source.path.is_dir():
            digest.update(file.relative_to(source.path).as_posix().encode() + b"\0")
        size += _add(digest, file)
    return {**found, "size": size, "sha256": digest.hexdigest()}


def _add(digest: Any, file: Path) -> int:
    size = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return size
