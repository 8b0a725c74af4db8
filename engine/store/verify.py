"""Checking a store's files against its manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.errors import StoreError
from engine.store.files import sha256_of
from engine.store.manifest import FileEntry, Manifest


def check_files(store: Path, manifest: Manifest, *, hashes: bool) -> None:
    """Raises StoreError naming the first file that is missing, has another size, or (with `hashes`) other content."""
    for name, entry in manifest.files.items():
        fault = fault_of(store, name, entry, hashes=hashes)
        if fault:
            raise StoreError(f"{store / name}: {fault}; the store is damaged", code="damaged-store")


def faults(store: Path, manifest: Manifest, progress: Callable[[int], None] = lambda n: None) -> list[tuple[str, str]]:
    """(file, what is wrong) of every damaged file, hashes included; `progress` is told the bytes of each slice that was read."""
    found = []
    for name, entry in manifest.files.items():
        fault = fault_of(store, name, entry, hashes=True, progress=progress)
        if fault:
            found.append((name, fault))
    return found


def fault_of(store: Path, name: str, entry: FileEntry, *, hashes: bool, progress: Callable[[int], None] = lambda n: None) -> str | None:
    """What is wrong with one file, or None."""
    path = store / name
    try:
        size = path.stat().st_size
        if size != entry.size:
            return f"has {size:,} bytes, the manifest says {entry.size:,}"
        if hashes and sha256_of(path, progress) != entry.sha256:
            return "its content differs from its hash in the manifest"
    except FileNotFoundError:
        return "is missing"
    except OSError as e:
        return f"cannot be read ({e.strerror})"
    return None
