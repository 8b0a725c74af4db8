"""uvicorn with our signals: readiness drops before the socket closes, running requests finish, and the process ends with 0."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import structlog
import uvicorn

from service.app import create_app
from service.backend import Backend
from service.core import Service
from service.security import Keys
from service.settings import ServeSettings

log = structlog.get_logger("eogp.server")


class Server(uvicorn.Server):
    """Drains on the first SIGTERM or SIGINT, ends at once on the second."""

    service: Service
    drain_seconds: float = 0.0

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle both signals on the event loop's thread, and put the old handlers back."""
        old = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First: say not ready, wait, then stop accepting. Second: do not wait for anyone."""
        if self.service.draining:
            self.should_exit = self.force_exit = True
            return
        self.service.draining = True
        log.info("draining", signal=signal.Signals(sig).name, seconds=self.drain_seconds)
        if self.drain_seconds <= 0:
            self.should_exit = True
            return
        asyncio.get_running_loop().call_later(self.drain_seconds, setattr, self, "should_exit", True)


def run(backend: Backend, settings: ServeSettings, keys: Keys, listening: socket.socket) -> None:
    """Serve until a signal."""
    app = create_app(backend, settings, keys)
    config = uvicorn.Config(
        app,
        http="h11",  # whatever else is installed: its limits are those that are tested
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(max(settings.grace_seconds, 1)),
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = Server(config)
    server.service, server.drain_seconds = app.state.service, settings.drain_seconds
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log.info("serving", url=f"http://{shown}:{port}", generation=backend.generation, rows=backend.store.rows, keys=len(keys.keys))
    if not keys and host not in ("127.0.0.1", "::1"):
        log.warning("no-api-keys", hint="everyone who reaches this address may query; see --api-keys")
    print(f"serving {backend.store.rows:,} examples at http://{shown}:{port} (description of the API: /docs); Ctrl-C ends it", flush=True)
    server.run(sockets=[listening])
