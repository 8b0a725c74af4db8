"""The background check of the store: its files are read again and again at low speed and compared with the hashes in the manifest.

A disk that flips a bit changes answers without any error. What the check finds is logged with the file's name, counted in the metrics, and ends readiness;
requests that still arrive are answered, since most of the store is whole. It takes a restored file and a restart to serve on.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

import structlog

from engine.errors import EogpError
from service.backend import Backend
from service.metrics import Metrics

LEAST_URGENT = 19  # nice
log = structlog.get_logger("eogp.integrity")


class _EndedError(Exception):
    """The check is no longer wanted."""


class Integrity:
    """rate: bytes per second, 0 for no check at all; rest: seconds between the end of one check and the beginning of the next."""

    def __init__(self, rate: int, rest: float, metrics: Metrics) -> None:
        self.rate, self.rest, self.metrics = rate, rest, metrics
        self.damage: str | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()  # between a finding and a change of generation

    def watch(self, backend: Backend) -> None:
        """Check this generation from now on, instead of the one before."""
        with self._lock:
            self._ended.set()
            self._ended, self.damage = threading.Event(), None
            self.metrics.damaged.set(0)
        if self.rate:
            threading.Thread(target=self._run, args=(backend, self._ended), name="integrity", daemon=True).start()

    def stop(self) -> None:
        """End the check; the thread sees it with its next slice."""
        self._ended.set()

    def _run(self, backend: Backend, ended: threading.Event) -> None:
        with suppress(OSError, AttributeError):  # of this thread alone, where the system knows of that
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_URGENT)

        def told(n: int) -> None:
            self.metrics.checked.inc(n)
            if ended.wait(n / self.rate):
                raise _EndedError

        while not ended.is_set():
            started = time.monotonic()
            try:
                found = backend.damage(told)
            except _EndedError:
                return
            except (EogpError, OSError) as e:
                log.error("store-check-failed", generation=backend.generation, error=str(e))
                found = []
            else:
                log.info("store-checked", generation=backend.generation, damaged=len(found), seconds=round(time.monotonic() - started, 1))
            with self._lock:
                if found and not ended.is_set():
                    self._report(backend, found)
                    return
            ended.wait(self.rest)

    def _report(self, backend: Backend, found: list[tuple[str, str]]) -> None:
        for name, fault in found:
            log.error("store-damaged", generation=backend.generation, file=name, fault=fault)
        self.metrics.damaged.set(len(found))
        name, fault = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        self.damage = f"the store is damaged: {name} {fault}{more}; restore it from a copy and restart"
