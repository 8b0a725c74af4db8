"""Writing a store: segments, then a generation that names them, then CURRENT."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from engine.blocks import BlockLayout
from engine.signs import Sketch
from engine.store.files import TEMPORARY, disk_errors, fsync, new_folder, sha256_of, write_file
from engine.store.lock import WriterLock
from engine.store.manifest import CURRENT, DELETED, MANIFEST, MANIFEST_HASH, FileEntry, Manifest, current_generation
from engine.store.segment import SEGMENT_FILES, write_segment


def segment_name(number: int) -> str:
    """Folder name of a segment's running number."""
    return f"{number:06d}"


class StoreWriter:
    """The one writer of a store, from construction to `close`. Raises StoreError (code store-locked) where another process writes it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with disk_errors(self.path):
            for folder in ("segments", "generations", "shared"):
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(self.path)

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def segment_path(self, number: int) -> Path:
        return self.path / "segments" / segment_name(number)

    def has_segment(self, number: int) -> bool:
        """Whether the segment is there; one that is, is whole."""
        return self.segment_path(number).is_dir()

    def write_segment(self, number: int, table: pa.Table, sketch: Sketch, layout: BlockLayout) -> None:
        """Write one segment durably: after this returns it is whole, before it is not there."""
        with disk_errors(self.path), new_folder(self.segment_path(number)) as folder:
            write_segment(folder, table, sketch, layout)

    def entries(self, names: Iterable[str]) -> dict[str, FileEntry]:
        """Size and hash of files and of all files inside folders, by path under the store."""
        found: dict[str, FileEntry] = {}
        for name in names:
            path = self.path / name
            for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
                found[file.relative_to(self.path).as_posix()] = FileEntry(size=file.stat().st_size, sha256=sha256_of(file))
        return found

    def segment_entries(self, numbers: Iterable[int]) -> dict[str, FileEntry]:
        """As `entries`, of the files of some segments."""
        return self.entries(f"segments/{segment_name(n)}/{file}" for n in numbers for file in SEGMENT_FILES)

    def commit(self, manifest: Manifest, deleted: NDArray[np.int64] | None = None) -> str:
        """Publish a generation: its manifest with the tombstones (ascending positions), then CURRENT. Returns its name.

        It is numbered after the live one, so that a commit repeated after an interruption makes the same store.
        """
        name = f"{int(current_generation(self.path)) + 1 if (self.path / CURRENT).is_file() else 1:06d}"
        folder = self.path / "generations" / name
        files = {n: e for n, e in manifest.files.items() if not n.startswith("generations/")}
        with disk_errors(self.path):
            with new_folder(folder) as temporary:
                if deleted is not None and len(deleted):
                    np.save(temporary / DELETED, deleted.astype(np.int64), allow_pickle=False)
                    content = (temporary / DELETED).read_bytes()
                    files[f"generations/{name}/{DELETED}"] = FileEntry(size=len(content), sha256=hashlib.sha256(content).hexdigest())
                count = 0 if deleted is None else len(deleted)
                data = manifest.model_copy(update={"deleted": count, "files": dict(sorted(files.items()))}).to_bytes()
                (temporary / MANIFEST).write_bytes(data)
                (temporary / MANIFEST_HASH).write_text(hashlib.sha256(data).hexdigest() + "\n", encoding="ascii")
            write_file(self.path / CURRENT, name + "\n")
        return name

    def sweep(self, keep: Manifest, *, also: Sequence[int] = (), generations: bool = False) -> None:
        """Remove segments that neither `keep` nor `also` names, left-overs of interrupted writes, and with `generations` all but the live generation."""
        kept = {s.name for s in keep.segments} | {segment_name(n) for n in also}
        self._remove(p for p in (self.path / "segments").iterdir() if p.name not in kept)
        self._remove(p for p in self.path.rglob(f"*{TEMPORARY}"))
        if generations:
            live = (self.path / CURRENT).read_text(encoding="utf-8").strip()
            self._remove(p for p in (self.path / "generations").iterdir() if p.name != live)
        fsync(self.path / "segments")

    @staticmethod
    def _remove(paths: Iterable[Path]) -> None:
        for path in list(paths):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
