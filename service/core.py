"""The server's state and the life of one influence request: limits, tokens, queue, answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import anyio
import structlog
from anyio import to_thread

from engine.errors import EogpError
from service.backend import Backend
from service.batching import Batcher, Observer
from service.errors import ApiError
from service.integrity import Integrity
from service.limits import check_limits, check_tokens, limits_of
from service.metrics import Metrics
from service.schemas import InfluenceRequest, InfluenceResponse, Info, Reloaded
from service.security import Keys
from service.settings import ServeSettings

PREPARERS = 2  # threads that tokenise; more would only contend with the inference thread
VERSION = "0.1.0"
log = structlog.get_logger("eogp.service")


class Service:
    """One server: its present backend, its inference thread, its metrics."""

    def __init__(self, backend: Backend, settings: ServeSettings, keys: Keys) -> None:
        self.backend, self.settings, self.keys = backend, settings, keys
        self.metrics = Metrics()
        self.draining = False
        self.preparing = 0
        self.batcher: Batcher[Any, InfluenceResponse] = Batcher(
            batch_tokens=settings.batch_tokens,
            max_queue=settings.max_queue,
            stuck_seconds=settings.stuck_seconds,
            observer=Observer(self.metrics.batch, lambda reason: self.metrics.dropped.labels(reason).inc(), self.metrics.restarts.inc),
        )
        self.integrity = Integrity(settings.check_rate, 3600 * settings.check_hours, self.metrics)
        self._reloading = asyncio.Lock()
        self._limiter = anyio.CapacityLimiter(PREPARERS)
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the inference thread, the background check, and the watch for new generations."""
        self.batcher.start()
        self._show(self.backend)
        if self.settings.reload_seconds:
            self._watcher = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """End all three; what still waits in the queue is answered with 503."""
        self.draining = True
        if self._watcher is not None:
            self._watcher.cancel()
        self.integrity.stop()
        await asyncio.to_thread(self.batcher.stop)

    def not_ready(self) -> str | None:
        """Why no request should be sent here now; None when ready."""
        return "the server is draining" if self.draining else self.batcher.ready() or self.integrity.damage

    async def influence(self, request: InfluenceRequest, arrived: float, gone: Any = None) -> InfluenceResponse:
        """Answer one request. Raises EogpError with a code of service.errors.CODES, or ClientGoneError."""
        settings = self.settings
        check_limits(request, settings)
        if self.preparing + self.batcher.waiting[0] >= settings.max_queue:
            wait = self.batcher.retry_after()
            raise ApiError("queue-full", f"{settings.max_queue} requests are waiting already; retry in {wait} s.", headers={"Retry-After": str(wait)})
        backend, deadline = self.backend, arrived + settings.deadline_seconds
        self.preparing += 1
        try:
            with anyio.fail_after(max(deadline - time.monotonic(), 0)):
                item = await to_thread.run_sync(backend.prepare, request, limiter=self._limiter, abandon_on_cancel=True)
        except TimeoutError:
            raise ApiError("deadline", f"No answer within {settings.deadline_seconds:.3g} s; retry when the load is lower.") from None
        finally:
            self.preparing -= 1
        check_tokens(item.n_tokens, settings)
        prepared = time.monotonic()
        # what generates or re-scores takes long: it runs alone, so that nobody quick waits for it in the same batch
        slow = request.rescore is not None or any(q.generate for q in request.queries)
        job = self.batcher.submit(item, max(item.n_tokens, settings.batch_tokens) if slow else item.n_tokens, deadline, backend.answer)
        response = await self.batcher.wait(job, gone)
        now = time.monotonic()
        started = job.started or prepared
        response.timing_ms.update({"prepare": (prepared - arrived) * 1000, "queue": (started - prepared) * 1000, "total": (now - arrived) * 1000})
        response.timing_ms = {phase: round(ms, 3) for phase, ms in response.timing_ms.items()}
        for phase, ms in response.timing_ms.items():
            self.metrics.phase.labels(phase).observe(ms / 1000)
        return response

    async def lookup(self, function: Any, *args: Any) -> Any:
        """Run a read of the store off the event loop."""
        return await to_thread.run_sync(function, *args, limiter=self._limiter)

    async def reload(self) -> Reloaded:
        """Serve the store's current generation from the next request on. Requests in flight keep the one they began with."""
        async with self._reloading:
            old = self.backend
            try:
                new = await asyncio.to_thread(old.reload)
            except EogpError as e:
                self.metrics.reloads.labels("failed").inc()
                log.error("reload-failed", generation=old.generation, error=e.message)
                raise ApiError("reload-failed", f"The store's current generation cannot be served; still serving {old.generation}.") from e
            if new is None:
                return Reloaded(generation=old.generation, changed=False)
            self.backend = new
            self._show(new)
            self.metrics.reloads.labels("done").inc()
            log.info("reloaded", old=old.generation, generation=new.generation, rows=new.store.rows)
            return Reloaded(generation=new.generation, changed=True)

    def info(self) -> Info:
        """What GET /v1/info answers."""
        backend = self.backend
        return Info(
            version=VERSION,
            model=backend.model,
            store=backend.store,
            limits=limits_of(self.settings),
            rescore=backend.rescore,
            authentication=bool(self.keys),
        )

    def render_metrics(self) -> bytes:
        """The Prometheus text."""

        def refresh() -> None:
            jobs, tokens = self.batcher.waiting
            self.metrics.queue_jobs.set(jobs)
            self.metrics.queue_tokens.set(tokens)
            self.metrics.ready.set(self.not_ready() is None)

        return self.metrics.render(refresh)

    def _show(self, backend: Backend) -> None:
        self.metrics.serve(backend.generation, backend.store.rows, backend.store.excluded)
        self.integrity.watch(backend)

    async def _watch(self) -> None:
        failed: str | None = None
        while True:
            await asyncio.sleep(self.settings.reload_seconds)
            try:
                await self.reload()
                failed = None
            except asyncio.CancelledError:
                raise
            except Exception as e:  # keeps serving the old generation, says so once
                if failed != str(e):
                    failed = str(e)
                    log.error("watch-failed", error=failed)
