"""Long calls into libraries, which no signal reaches: done on another thread, so that the work can be given up meanwhile."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")
NAME = "eogp-interruptible"
LOOK = 0.2  # seconds between two calls of `look`


def interruptible(work: Callable[[], T], look: Callable[[], None]) -> T:
    """The result of `work`. `look` is called all the while; what it raises leaves the thread to finish what nobody waits for."""
    done: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(work())
        except Exception as e:  # handed to the caller
            failed.append(e)

    thread = threading.Thread(target=run, name=NAME, daemon=True)
    thread.start()
    thread.join(LOOK)
    while thread.is_alive():
        look()
        thread.join(LOOK)
    if failed:
        raise failed[0]
    return done[0]


def leave(code: int) -> NoReturn:
    """End the process; at once where work was left behind, for which an ordinary exit would wait."""
    if any(t.name == NAME for t in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
