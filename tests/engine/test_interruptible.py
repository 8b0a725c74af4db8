"""Work on another thread: its result, its failure, and what becomes of it when it is given up."""

from __future__ import annotations

import threading
import time

import pytest

from engine.interruptible import NAME, interruptible, leave


class GivenUpError(Exception):
    pass


def test_results_and_failures_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.interruptible.LOOK", 0.01)
    looks: list[str] = []

    def work() -> int:
        time.sleep(0.05)
        return 7

    assert interruptible(work, lambda: looks.append(threading.current_thread().name)) == 7
    assert len(looks) >= 2 and set(looks) == {threading.current_thread().name}
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0, lambda: None)


def test_what_is_given_up_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(code: int) -> None:
        raise SystemExit(f"at once with {code}")

    def look() -> None:
        raise GivenUpError

    monkeypatch.setattr("engine.interruptible.LOOK", 0.01)
    monkeypatch.setattr("os._exit", at_once)
    release = threading.Event()
    with pytest.raises(GivenUpError):
        interruptible(lambda: release.wait(60), look)
    with pytest.raises(SystemExit, match="at once with 143"):
        leave(143)
    release.set()
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(10)
    with pytest.raises(SystemExit, match=r"^143$"):
        leave(143)
