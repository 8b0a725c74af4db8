"""One writer per store: an advisory lock that the kernel releases when the writer dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import IO

from engine.errors import StoreError

LOCK = "LOCK"


class WriterLock:
    """Held from construction to `release`. Raises StoreError naming the process that holds it."""

    def __init__(self, store: Path) -> None:
        self._file: IO[str] = (store / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise StoreError(f"{store}: another process (pid {holder}) is writing this store; wait for it to end", code="store-locked") from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        """Let the next writer in."""
        self._file.truncate(0)
        self._file.close()

    def __enter__(self) -> WriterLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
