"""The queue and its thread: order, budget, failure, memory, deadlines, departures, restarts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine.errors import DataError
from service.batching import Batcher, ClientGoneError, Observer, out_of_memory
from service.errors import ApiError


class Recorder:
    """A runner that doubles numbers; `before` sees each batch first."""

    def __init__(self, before: Callable[[Sequence[int]], None] | None = None) -> None:
        self.before = before
        self.batches: list[list[int]] = []

    def __call__(self, items: Sequence[int]) -> list[Any]:
        self.batches.append(list(items))
        if self.before:
            self.before(items)
        return [2 * i for i in items]


class Blocker:
    """Holds the thread in its first batch until `open` is set."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, items: Sequence[int]) -> None:
        self.entered.set()
        assert self.open.wait(10)


def run(main: Any, **options: Any) -> None:
    settings = {"batch_tokens": 100, "max_queue": 50, "stuck_seconds": 60.0, **options}

    async def scope() -> None:
        batcher: Batcher[int, int] = Batcher(**settings)
        batcher.start()
        try:
            await main(batcher)
        finally:
            await asyncio.to_thread(batcher.stop)

    asyncio.run(scope())


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


async def blocked(batcher: Any) -> tuple[Blocker, Any]:
    blocker = Blocker()
    job = batcher.submit(0, 1, soon(), Recorder(blocker))
    assert await asyncio.to_thread(blocker.entered.wait, 5)
    return blocker, job


def test_what_waits_is_batched_in_order_within_the_budget() -> None:
    async def main(batcher: Any) -> None:
        blocker, _ = await blocked(batcher)
        runner = Recorder()
        jobs = [batcher.submit(i, tokens, soon(), runner) for i, tokens in enumerate([40, 40, 30, 500, 10])]
        blocker.open.set()
        assert [await batcher.wait(j) for j in jobs] == [0, 2, 4, 6, 8]
        assert runner.batches == [[0, 1], [2], [3], [4]]  # 500 tokens run alone, nobody overtakes

    run(main)


def test_two_generations_never_share_a_batch() -> None:
    async def main(batcher: Any) -> None:
        blocker, _ = await blocked(batcher)
        old, new = Recorder(), Recorder()
        jobs = [batcher.submit(i, 1, soon(), runner) for i, runner in enumerate([old, old, new, old])]
        blocker.open.set()
        await asyncio.gather(*(batcher.wait(j) for j in jobs))
        assert old.batches == [[0, 1], [3]] and new.batches == [[2]]

    run(main)


def test_only_the_guilty_request_fails() -> None:
    def before(items: Sequence[int]) -> None:
        if 5 in items:
            raise RuntimeError("five")

    async def main(batcher: Any) -> None:
        blocker, _ = await blocked(batcher)
        runner = Recorder(before)
        jobs = [batcher.submit(i, 1, soon(), runner) for i in range(8)]
        blocker.open.set()
        results = await asyncio.gather(*(batcher.wait(j) for j in jobs), return_exceptions=True)
        assert [r for r in results if isinstance(r, int)] == [0, 2, 4, 6, 8, 12, 14]
        assert isinstance(results[5], RuntimeError)
        assert batcher.ready() is None and batcher.restarts == 0

    run(main)


def test_a_request_may_carry_its_own_error() -> None:
    def runner(items: Sequence[int]) -> list[Any]:
        return [DataError("odd") if i % 2 else i for i in items]

    async def main(batcher: Any) -> None:
        results = await asyncio.gather(*(batcher.wait(batcher.submit(i, 1, soon(), runner)) for i in range(4)), return_exceptions=True)
        assert [r if isinstance(r, int) else getattr(r, "code", r) for r in results] == [0, "bad-data", 2, "bad-data"]

    run(main)


@pytest.mark.parametrize(
    ("error", "so"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, so: bool) -> None:
    assert out_of_memory(error) is so


def test_out_of_memory_halves_then_503(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr("service.batching.release_memory", lambda: released.append(1))

    def before(items: Sequence[int]) -> None:
        if len(items) > 2 or 7 in items:
            raise MemoryError

    async def main(batcher: Any) -> None:
        blocker, _ = await blocked(batcher)
        runner = Recorder(before)
        jobs = [batcher.submit(i, 1, soon(), runner) for i in range(8)]
        blocker.open.set()
        results = await asyncio.gather(*(batcher.wait(j) for j in jobs), return_exceptions=True)
        assert results[:7] == [0, 2, 4, 6, 8, 10, 12]
        assert isinstance(results[7], ApiError) and (results[7].status, results[7].code) == (503, "out-of-memory")
        assert [len(b) for b in runner.batches] == [8, 4, 2, 2, 4, 2, 2, 1, 1] and len(released) == 5
        assert await batcher.wait(batcher.submit(1, 1, soon(), Recorder())) == 2

    run(main)


def test_a_full_queue_refuses_and_says_when_to_retry() -> None:
    async def main(batcher: Any) -> None:
        blocker, first = await blocked(batcher)
        jobs = [batcher.submit(i, 1, soon(), Recorder()) for i in range(3)]
        with pytest.raises(ApiError) as e:
            batcher.submit(9, 1, soon(), Recorder())
        assert (e.value.status, e.value.code) == (429, "queue-full") and 1 <= int(e.value.headers["Retry-After"]) <= 30
        batcher.leave(jobs[0])
        late = batcher.submit(4, 1, soon(), Recorder())  # a place is free again
        blocker.open.set()
        assert await batcher.wait(late) == 8 and await batcher.wait(first) == 0

    run(main, max_queue=3)


def test_past_the_deadline_504_and_never_run() -> None:
    dropped: list[str] = []

    async def main(batcher: Any) -> None:
        blocker, _ = await blocked(batcher)
        runner = Recorder()
        job = batcher.submit(1, 1, soon(0.05), runner)
        with pytest.raises(ApiError) as e:
            await batcher.wait(job)
        assert (e.value.status, e.value.code) == (504, "deadline")
        unwatched = batcher.submit(2, 1, soon(0.01), runner)
        await asyncio.sleep(0.05)
        blocker.open.set()
        assert await batcher.wait(batcher.submit(3, 1, soon(), runner)) == 6
        assert runner.batches == [[3]] and not unwatched.future.done() and batcher.waiting == (0, 0)
        while batcher.running:  # the thread clears its table just after the answers left
            await asyncio.sleep(0.01)

    run(main, observer=Observer(dropped=dropped.append))
    assert dropped == ["deadline"]


def test_whoever_left_is_not_worked_for() -> None:
    dropped: list[str] = []

    async def main(batcher: Any) -> None:
        blocker, _ = await blocked(batcher)
        runner = Recorder()
        job = batcher.submit(1, 1, soon(), runner)

        def gone() -> asyncio.Future[None]:
            return asyncio.ensure_future(asyncio.sleep(0.01))

        with pytest.raises(ClientGoneError):
            await batcher.wait(job, gone)
        assert batcher.waiting == (0, 0)
        blocker.open.set()
        assert await batcher.wait(batcher.submit(3, 1, soon(), runner), lambda: asyncio.ensure_future(asyncio.sleep(60))) == 6
        assert runner.batches == [[3]]

    run(main, observer=Observer(dropped=dropped.append))
    assert dropped == ["disconnected"]


def test_the_loop_survives_whatever_ends_it() -> None:
    restarted: list[int] = []

    class Fatal(BaseException):
        pass

    def before(items: Sequence[int]) -> None:
        raise Fatal

    async def main(batcher: Any) -> None:
        with pytest.raises(ApiError) as e:
            await batcher.wait(batcher.submit(1, 1, soon(), Recorder(before)))
        assert (e.value.status, e.value.code) == (503, "worker-restarted")
        assert await batcher.wait(batcher.submit(2, 1, soon(), Recorder())) == 4
        assert batcher.restarts == 1 and batcher.ready() is None

    run(main, observer=Observer(restarted=lambda: restarted.append(1)))
    assert restarted == [1]


def test_a_failing_observer_does_not_lose_answers() -> None:
    def batch(jobs: int, tokens: int, seconds: float) -> None:
        raise ValueError("metrics")

    async def main(batcher: Any) -> None:
        for i in range(3):
            assert await batcher.wait(batcher.submit(i, 1, soon(), Recorder())) == 2 * i
        await asyncio.sleep(0.05)
        assert batcher.ready() is None

    run(main, observer=Observer(batch=batch))


def test_wrong_number_of_answers_fails_the_request() -> None:
    async def main(batcher: Any) -> None:
        with pytest.raises(RuntimeError, match="0 answers to 1 requests"):
            await batcher.wait(batcher.submit(1, 1, soon(), lambda items: []))

    run(main)


def test_readiness_tells_busy_from_stuck_from_stopped() -> None:
    async def main(batcher: Any) -> None:
        blocker, job = await blocked(batcher)
        assert batcher.ready() is None  # busy is not dead
        await asyncio.sleep(0.15)
        assert "has been running" in batcher.ready()
        blocker.open.set()
        await batcher.wait(job)
        await asyncio.sleep(0.05)
        assert batcher.ready() is None

    run(main, stuck_seconds=0.1)


def test_an_idle_thread_without_a_sign_of_life_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(batcher: Any) -> None:
        monkeypatch.setattr("service.batching.DEAD_AFTER", -1.0)
        assert "no sign of life" in batcher.ready()

    run(main)


def test_stop_answers_everyone() -> None:
    async def main(batcher: Any) -> None:
        blocker, running = await blocked(batcher)
        waiting = batcher.submit(1, 1, soon(), Recorder())
        stopping = asyncio.create_task(asyncio.to_thread(batcher.stop))
        with pytest.raises(ApiError, match="shutting down"):
            await batcher.wait(waiting)
        blocker.open.set()
        assert await batcher.wait(running) == 0
        await stopping
        with pytest.raises(ApiError) as e:
            batcher.submit(1, 1, soon(), Recorder())
        assert e.value.code == "not-ready" and batcher.ready() == "the server is shutting down"

    run(main)
