"""Stopping where it does no harm: the first SIGTERM or Ctrl-C ends the job after the step in flight, the second at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from engine.errors import EogpError


class InterruptedRunError(EogpError):
    """The job was asked to stop; what is finished is on disk, and the same command goes on from there."""

    code = "interrupted"
    exit_code = 143


class StopRequest:
    """Set by a signal, read between steps."""

    def __init__(self) -> None:
        self.set = False

    def check(self, where: str) -> None:
        """Raise InterruptedRunError if a stop was asked for."""
        if self.set:
            raise InterruptedRunError(f"stopped {where}; run the same command again to go on from there")


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """SIGTERM and SIGINT set the request; outside the main thread nothing is installed."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if request.set:
            raise KeyboardInterrupt
        request.set = True

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
