"""The outermost middleware: request ids, API keys, body limits, security headers, metrics and the access log, and no traceback in any answer."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import errors
from service.errors import ApiError
from service.metrics import Metrics
from service.security import SECURITY_HEADERS, Keys, authorise
from service.settings import ServeSettings

MOST_BODIES = 3  # times max_queue
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
log = structlog.get_logger("eogp.access")


class Gate:
    """What every request passes through, in pure ASGI so that disconnects reach the handlers."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, keys: Keys, metrics: Metrics) -> None:
        self.app, self.settings, self.keys, self.metrics = app, settings, keys, metrics
        self.reading = 0  # bodies that are being read, or belong to requests in flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state: dict[str, Any] = scope.setdefault("state", {})
        state.update(request_id=request_id, arrived=started, error_code=None)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(scope=message)
                out["X-Request-Id"] = request_id
                for name, value in SECURITY_HEADERS.items():
                    out.setdefault(name, value)
                out.setdefault("Cache-Control", "no-store")
            await send(message)

        self.metrics.in_flight.inc()
        posts = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        self.reading += posts
        try:
            if self.reading > MOST_BODIES * self.settings.max_queue:  # bodies in memory are bounded, not only the queue
                raise ApiError("queue-full", "Too many requests are open; retry in 1 s.", headers={"Retry-After": "1", "Connection": "close"})
            caller = authorise(self.keys, scope["path"], headers, scope["client"][0] if scope.get("client") else None)
            if caller is not None:
                structlog.contextvars.bind_contextvars(key=caller)
            await self.app(scope, await self._body(scope, headers, receive), answer)
        except Exception as e:
            if not isinstance(e, ApiError):
                log.error("unhandled", exc_info=e)
            if status:
                raise  # too late for another answer; the server closes the connection
            await errors.of_exception(Request(scope), e)(scope, receive, answer)
        finally:
            self.metrics.in_flight.dec()
            self.reading -= posts
            self._record(scope, state, status, time.monotonic() - started)

    async def _body(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """Read the whole body within the limits of size and time, then hand out the rest of the connection's messages (the disconnect)."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return receive  # no handler reads a body there
        limit = self.settings.max_body_bytes
        too_large = ApiError("body-too-large", f"The body is larger than the limit of {limit:,} bytes.", headers={"Connection": "close"})
        declared = headers.get("content-length", "0")
        if not declared.isascii() or not declared.isdigit() or int(declared[:20]) > limit:
            raise too_large
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.settings.deadline_seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        break
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size > limit:
                        raise too_large
                    chunks.append(chunk)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError("body-timeout", f"The body did not arrive within {self.settings.deadline_seconds:g} s.", headers={"Connection": "close"}) from None
        body = b"".join(chunks)
        media = headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
            raise ApiError("unsupported-media-type", "The body must be declared as JSON: Content-Type: application/json.")
        handed = False

        async def replay() -> Message:
            nonlocal handed
            if not handed:
                handed = True
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        return replay

    def _record(self, scope: Scope, state: dict[str, Any], status: int, seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", None) or ("/page" if scope["path"].startswith("/page/") else "other")
        known = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "other"
        self.metrics.requests.labels(path, known, str(status)).inc()
        self.metrics.seconds.labels(path).observe(seconds)
        if state.get("error_code"):
            self.metrics.errors.labels(state["error_code"]).inc()
        quiet = path in ("/healthz", "/readyz", "/metrics", "/page") and status < 500
        (log.debug if quiet else log.info)(
            "request",
            method=known,
            path=path,
            status=status,
            ms=round(seconds * 1000, 2),
            **({"code": state["error_code"]} if state.get("error_code") else {}),
            **state.get("log", {}),
        )
