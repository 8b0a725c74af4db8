"""The background check of the store: what it finds, what the server does then, and that it stays in the background."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from engine.errors import StoreError
from service.integrity import Integrity
from service.metrics import Metrics

FAULT = [("segments/000001/codes.faiss", "its content differs from its hash in the manifest"), ("shared/sketch/projection.npy", "is missing")]


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def check() -> Any:
    made: list[Integrity] = []

    def make(rate: int = 10**9, rest: float = 60) -> Integrity:
        made.append(Integrity(rate, rest, Metrics()))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def value(check: Integrity, name: str) -> float:
    return float(check.metrics.registry.get_sample_value(name) or 0)


def test_damage_is_named_logged_counted_and_ends_readiness(serve: Any, ask: Any, fake: Any) -> None:
    async def main() -> None:
        with structlog.testing.capture_logs() as logs:
            async with serve(fake(damaged=FAULT), check_rate=10**9) as client:
                await asyncio.to_thread(wait_for, lambda: client.app.state.service.integrity.damage is not None)
                ready = await client.get("/readyz")
                assert ready.status_code == 503 and ready.json()["code"] == "not-ready"
                assert "segments/000001/codes.faiss its content differs from its hash in the manifest (and 1 more)" in ready.json()["detail"]
                assert (await client.get("/healthz")).status_code == 200
                assert (await client.post("/v1/influence", json=ask())).status_code == 200  # most of the store is whole
                metrics = (await client.get("/metrics")).text
                assert "eogp_store_damaged_files 2.0" in metrics and "eogp_ready 0.0" in metrics and "eogp_store_checked_bytes_total 3000.0" in metrics
                client.backend.next = fake("g2")
                assert (await client.post("/v1/reload")).json()["changed"]
                assert (await client.get("/readyz")).status_code == 200  # another generation is another matter
        errors = [(e["file"], e["fault"]) for e in logs if e["event"] == "store-damaged"]
        assert errors == FAULT

    asyncio.run(main())


def test_a_whole_store_is_checked_again_after_a_rest(check: Any, fake: Any) -> None:
    backend, integrity = fake(), check(rest=0.01)
    integrity.watch(backend)
    wait_for(lambda: backend.checks >= 3)
    assert integrity.damage is None and value(integrity, "eogp_store_checked_bytes_total") >= 9000
    backend.damaged = FAULT[:1]
    wait_for(lambda: integrity.damage is not None)
    assert "and" not in (integrity.damage or "").split(";")[0]
    checks = backend.checks
    time.sleep(0.05)
    assert backend.checks == checks  # it takes a restart


def test_the_rate_is_kept_and_a_stop_waits_for_nothing(check: Any, fake: Any) -> None:
    backend, integrity = fake(), check(rate=20_000)
    started = time.monotonic()
    integrity.watch(backend)
    wait_for(lambda: backend.checks == 1)
    assert time.monotonic() - started >= 0.15  # 3,000 bytes
    slow = check(rate=1)
    slow.watch(fake())
    (thread,) = [t for t in threading.enumerate() if t.name == "integrity" and t.is_alive()][-1:]
    slow.stop()
    thread.join(5)
    assert not thread.is_alive()


def test_rate_0_checks_nothing(check: Any, fake: Any) -> None:
    before = threading.active_count()
    check(rate=0).watch(fake(damaged=FAULT))
    assert threading.active_count() == before


def test_a_check_that_fails_is_tried_again(check: Any, fake: Any) -> None:
    class Failing(fake):  # type: ignore[misc]  # the fixture's class
        def damage(self, told: Callable[[int], None]) -> list[tuple[str, str]]:
            found: list[tuple[str, str]] = super().damage(told)
            if self.checks == 1:
                raise StoreError("the disk is away")
            return found

    backend, integrity = Failing(), check(rest=0.01)
    with structlog.testing.capture_logs() as logs:
        integrity.watch(backend)
        wait_for(lambda: backend.checks >= 3)
    assert {"event": "store-check-failed", "generation": "g1", "error": "the disk is away", "log_level": "error"} in logs and integrity.damage is None
