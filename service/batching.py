"""Dynamic micro-batching: one supervised inference thread behind a bounded queue.

Requests arrive on the event loop, wait in order of arrival, and are answered together as far as their tokens fit into one pass of the model. The
thread never waits for a batch to fill: what has come while the last batch ran is the next batch. A failing batch is halved until only the guilty
request fails; whoever left or ran out of time is dropped before any work is done for them.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import structlog

from engine.errors import EogpError
from service.errors import ApiError

W = TypeVar("W")
R = TypeVar("R")
W_contra = TypeVar("W_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
IDLE_BEAT = 0.5  # seconds between two signs of life of an idle thread
DEAD_AFTER = 5.0  # seconds without a sign of life from an idle thread
RETRY_AFTER = (1, 30)  # shortest and longest Retry-After, in seconds
log = structlog.get_logger("eogp.batching")


class Runner(Protocol[W_contra, R_co]):
    """What the thread calls with a whole batch. It must return as many answers as there were items, in their order; an EogpError among them
    fails its own request only."""

    def __call__(self, items: Sequence[W_contra]) -> Sequence[R_co | EogpError]: ...


@dataclass(eq=False, slots=True)
class Job(Generic[W, R]):
    """One request in the queue. `runner` is what it was prepared for: two requests of different generations never share a batch."""

    item: W
    tokens: int
    deadline: float  # time.monotonic()
    runner: Runner[W, R]
    future: asyncio.Future[R]
    loop: asyncio.AbstractEventLoop
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    gone: bool = False

    def settle(self, result: R | None, error: BaseException | None) -> None:
        """Hand the outcome to the event loop; harmless when the caller has left or the loop is closed."""

        def deliver() -> None:
            if self.future.done():
                return
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)  # type: ignore[arg-type]  # without an error there is a result

        try:
            self.loop.call_soon_threadsafe(deliver)
        except RuntimeError:
            log.debug("loop-closed")


@dataclass(slots=True)
class Observer:
    """What the batcher tells the metrics; each is called on the inference thread."""

    batch: Callable[[int, int, float], None] = lambda jobs, tokens, seconds: None
    dropped: Callable[[str], None] = lambda reason: None
    restarted: Callable[[], None] = lambda: None


class Batcher(Generic[W, R]):
    """The queue and its thread.

    batch_tokens: tokens that share one pass (a longer request runs alone). max_queue: requests that may wait. stuck_seconds: a batch that takes
    longer makes `ready` false, though it may still end well.
    """

    def __init__(self, *, batch_tokens: int, max_queue: int, stuck_seconds: float, observer: Observer | None = None) -> None:
        self.batch_tokens, self.max_queue, self.stuck_seconds = batch_tokens, max_queue, stuck_seconds
        self.observer = observer or Observer()
        self._queue: deque[Job[W, R]] = deque()
        self._running: list[Job[W, R]] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._beat = time.monotonic()
        self._busy_since: float | None = None
        self._tokens_per_second = 0.0
        self.restarts = 0

    # --- the event loop's side

    def start(self) -> None:
        """Start the inference thread."""
        self._stopping = False
        self._spawn()

    def submit(self, item: W, tokens: int, deadline: float, runner: Runner[W, R]) -> Job[W, R]:
        """Queue one request; its `future` belongs to the running event loop. Raises ApiError queue-full or not-ready."""
        loop = asyncio.get_running_loop()
        job = Job(item, max(tokens, 1), deadline, runner, loop.create_future(), loop)
        with self._changed:
            if self._stopping or self._thread is None:
                raise ApiError("not-ready", "The server is shutting down.", headers={"Retry-After": "5"})
            if len(self._queue) >= self.max_queue:
                self._queue = deque(j for j in self._queue if not j.gone)
            if len(self._queue) >= self.max_queue:
                wait = self.retry_after()
                raise ApiError("queue-full", f"{self.max_queue} requests are waiting already; retry in {wait} s.", headers={"Retry-After": str(wait)})
            self._queue.append(job)
            self._changed.notify()
        return job

    def leave(self, job: Job[W, R]) -> None:
        """The caller no longer wants the answer; a job that has not started is never run."""
        with self._changed:
            job.gone = True
            if job.started is None and job in self._queue:
                self._queue.remove(job)
        job.future.cancel()

    async def wait(self, job: Job[W, R], gone: Callable[[], asyncio.Future[None]] | None = None) -> R:
        """The answer, or ApiError deadline past the job's deadline, or asyncio.CancelledError when `gone()` completes first."""
        left = gone() if gone else None
        try:
            watched: set[asyncio.Future[object]] = {job.future, left} if left else {job.future}  # type: ignore[arg-type]  # futures are invariant; only done() is asked
            done, _ = await asyncio.wait(watched, timeout=max(job.deadline - time.monotonic(), 0), return_when=asyncio.FIRST_COMPLETED)
            if job.future in done:
                return job.future.result()
            if done:
                self.observer.dropped("disconnected")
                raise ClientGoneError
            raise ApiError(
                "deadline",
                f"No answer within {job.deadline - job.arrived:.3g} s; retry when the load is lower.",
                headers={"Retry-After": str(self.retry_after())},
            )
        finally:
            if not job.future.done():
                self.leave(job)
            if left is not None:
                left.cancel()

    def retry_after(self) -> int:
        """Seconds after which half of what waits now should be done, by the recent rate."""
        waiting = sum(j.tokens for j in self._queue) / 2
        estimate = waiting / self._tokens_per_second if self._tokens_per_second else 1
        return int(min(max(estimate, RETRY_AFTER[0]), RETRY_AFTER[1]))

    @property
    def waiting(self) -> tuple[int, int]:
        """(requests, tokens) in the queue."""
        with self._changed:
            return len(self._queue), sum(j.tokens for j in self._queue)

    @property
    def running(self) -> int:
        """Requests that the thread is answering now."""
        return len(self._running)

    def ready(self) -> str | None:
        """None when the thread lives and makes progress, else the reason why not. A long batch is not a dead thread."""
        now = time.monotonic()
        if self._stopping:
            return "the server is shutting down"
        if self._thread is None or not self._thread.is_alive():
            return "the inference thread is not running"
        busy = self._busy_since
        if busy is not None:
            return f"a batch has been running for {now - busy:.0f} s" if now - busy > self.stuck_seconds else None
        return f"the inference thread gave no sign of life for {now - self._beat:.0f} s" if now - self._beat > DEAD_AFTER else None

    def stop(self, timeout: float = 10.0) -> None:
        """Refuse new requests, fail those that still wait, and end the thread after its present batch."""
        with self._changed:
            self._stopping = True
            waiting, self._queue = list(self._queue), deque()
            self._changed.notify_all()
        for job in waiting:
            job.settle(None, ApiError("not-ready", "The server is shutting down.", headers={"Retry-After": "5"}))
        if self._thread is not None:
            self._thread.join(timeout)

    # --- the thread's side

    def _spawn(self) -> None:
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._supervise, name="inference", daemon=True)
        self._thread.start()

    def _supervise(self) -> None:
        """Run the loop; whatever ends it fails only the jobs at hand, and the loop starts again."""
        while not self._stopping:
            try:
                self._loop()
            except BaseException as e:
                self.restarts += 1
                log.error("inference-thread-restarted", error=type(e).__name__, exc_info=e)
                self.observer.restarted()
            finally:
                failed, self._running, self._busy_since = self._running, [], None
                for job in failed:
                    job.settle(None, ApiError("worker-restarted", "The inference thread was restarted; retry.", headers={"Retry-After": "1"}))

    def _loop(self) -> None:
        while True:
            batch = self._next()
            if batch is None:
                return
            started = self._busy_since = self._beat = time.monotonic()
            tokens = sum(j.tokens for j in batch)
            self._answer(batch)
            self._beat, self._busy_since, self._running = time.monotonic(), None, []
            seconds = max(self._beat - started, 1e-6)
            self._tokens_per_second = 0.8 * self._tokens_per_second + 0.2 * tokens / seconds if self._tokens_per_second else tokens / seconds
            self.observer.batch(len(batch), tokens, seconds)

    def _next(self) -> list[Job[W, R]] | None:
        """The next batch, in order of arrival: as many jobs of one runner as fit into batch_tokens; None at the end."""
        batch: list[Job[W, R]] = []
        tokens = 0
        with self._changed:
            while not batch:
                while not self._queue:
                    if self._stopping:
                        return None
                    self._beat = time.monotonic()
                    self._changed.wait(IDLE_BEAT)
                now = time.monotonic()
                while self._queue:
                    job = self._queue[0]
                    if job.gone or job.deadline <= now:
                        self._queue.popleft()
                        if not job.gone:
                            self.observer.dropped("deadline")
                        continue
                    if batch and (tokens + job.tokens > self.batch_tokens or job.runner != batch[0].runner):
                        break
                    self._queue.popleft()
                    batch.append(job)
                    tokens += job.tokens
            for job in batch:
                job.started = now
            self._running = list(batch)
        return batch

    def _answer(self, jobs: list[Job[W, R]]) -> None:
        """Answer a batch; where it fails, answer its halves, down to the one request that is to blame."""
        jobs = [j for j in jobs if not j.gone]
        if not jobs:
            return
        error: BaseException
        try:
            results = jobs[0].runner([j.item for j in jobs])
            if len(results) != len(jobs):
                raise RuntimeError(f"{len(results)} answers to {len(jobs)} requests")
            for job, result in zip(jobs, results, strict=True):
                if isinstance(result, EogpError):
                    job.settle(None, result)
                else:
                    job.settle(result, None)
            return
        except EogpError as e:
            error = e
        except Exception as e:
            if out_of_memory(e):
                release_memory()
                log.warning("out-of-memory", jobs=len(jobs), tokens=sum(j.tokens for j in jobs))
                error = ApiError("out-of-memory", "There is not enough memory for this request, even on its own.", headers={"Retry-After": "5"})
            else:
                log.error("batch-failed", jobs=len(jobs), exc_info=e)
                error = e
        if len(jobs) == 1:
            jobs[0].settle(None, error)
            return
        del error  # with its traceback, which keeps the batch's tensors alive
        half = len(jobs) // 2
        self._answer(jobs[:half])
        self._answer(jobs[half:])


class ClientGoneError(Exception):
    """The client closed the connection before it was answered."""


def out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python ran out of memory; torch on CPU says so in a plain RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text or "cannot allocate memory" in text)


def release_memory() -> None:
    """Drop what reference cycles and torch's cache still hold."""
    gc.collect()
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
