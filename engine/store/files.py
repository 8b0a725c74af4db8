"""Files that are either whole or not there: write to a temporary name, fsync, rename."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import StoreError

TEMPORARY = ".tmp"
_CHUNK = 1 << 20


def sha256_of(path: Path, progress: Callable[[int], None] = lambda n: None) -> str:
    """Hex SHA-256 of a file, read in chunks; `progress` is told the bytes of each, and what it raises ends the reading."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()


def fsync(path: Path) -> None:
    """Flush a file or a folder's entries to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes | str) -> None:
    """Replace a file's content atomically and durably."""
    temporary = path.with_name(path.name + TEMPORARY)
    data = content.encode("utf-8") if isinstance(content, str) else content
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that appears under its name, whole and durable, when the block ends without an error; else nothing of it stays."""
    temporary = path.with_name(path.name + TEMPORARY)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in sorted(temporary.rglob("*")):
            fsync(file)
        fsync(temporary)
        if path.exists():  # an earlier attempt that no generation names
            shutil.rmtree(path)
        temporary.rename(path)
        fsync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def disk_errors(store: Path) -> Iterator[None]:
    """Turn a full disk or a folder that cannot be written into one clear sentence."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(store if store.exists() else store.parent).free
            raise StoreError(
                f"{store}: the disk is full ({free / 1e6:,.0f} MB free); the store still holds its last generation. Free some space and run the same command again",
                code="disk-full",
            ) from None
        if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreError(f"{e.filename or store}: cannot be written ({e.strerror})", code="not-writable") from None
        raise
