"""Working folder, lock, duplicates, numbers for people."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from engine.errors import DataError, LimitError, StoreError
from indexer.duplicates import KnownIds
from indexer.interruption import InterruptedRunError, stop_on_signals
from indexer.job import Job, first_difference, interrupted
from indexer.plan import Estimate, require_disk
from indexer.reporter import clock, size
from indexer.versions import versions


def test_a_job_is_resumed_only_by_itself(tmp_path: Path) -> None:
    assert not Job(tmp_path, {"command": "index", "settings": {"k": 1}}, restart=False).resumed
    (tmp_path / "work" / "prepared").mkdir()
    again = Job(tmp_path, {"command": "index", "settings": {"k": 1}}, restart=False)
    assert again.resumed and (tmp_path / "work" / "prepared").is_dir()
    with pytest.raises(StoreError, match=r"\(index\) differs from this one in settings\.k \(1 then, 2 now\)"):
        Job(tmp_path, {"command": "index", "settings": {"k": 2}}, restart=False)
    assert not Job(tmp_path, {"command": "index", "settings": {"k": 2}}, restart=True).resumed
    assert not (tmp_path / "work" / "prepared").exists() and interrupted(tmp_path) == {"command": "index", "settings": {"k": 2}, "versions": versions()}
    again.finish()
    assert interrupted(tmp_path) is None and not (tmp_path / "work").exists()


def test_a_job_is_not_resumed_by_other_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Job(tmp_path, {"command": "index"}, restart=False)
    monkeypatch.setattr("indexer.job.versions", lambda: {**versions(), "torch": "0.1"})
    with pytest.raises(StoreError, match=r"differs from this one in versions\.torch \(.* then, '0\.1' now\)"):
        Job(tmp_path, {"command": "index"}, restart=False)
    assert not Job(tmp_path, {"command": "index"}, restart=True).resumed


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ({"x": 1, "y": {"z": 2}}, {"x": 1, "y": {"z": 2}}, None),
        ({"x": 1, "y": {"z": 2}}, {"x": 1, "y": {"z": 3}}, "y.z (2 then, 3 now)"),
        ({"x": 1}, {"x": 1, "w": "a"}, "w (None then, 'a' now)"),
        ({"x": ["a" * 99]}, {"x": ["b" * 99]}, "x"),
    ],
)
def test_differences_are_named(a: Any, b: Any, found: str | None) -> None:
    assert first_difference(a, b) == found


def test_duplicate_ids_name_the_first_row() -> None:
    known = KnownIds()
    known.add("a", 3, 17)
    known.add_all(["b", "c"], [3, 4], [18, 2])
    known.check("d", ["x", "y"], 3)
    with pytest.raises(DataError, match="its id is that of x:17"):
        known.check("a", ["x", "y"], 3)
    with pytest.raises(DataError, match="its id is that of y:2"):
        known.check("c", ["x", "y"], 3)


def test_the_first_signal_asks_the_second_insists() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        stop.check("early")
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(InterruptedRunError, match="stopped after 3 shards; run the same command again") as stopped:
            stop.check("after 3 shards")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.exit_code == 143 and signal.getsignal(signal.SIGTERM) is before


def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    whole = Estimate(curvature=10**15, spill=2 * 10**15, shared=10**6, rows=10**9, memory=0, model=0, seconds=1, projection_seconds=0, keeps_curvature=True)
    assert whole.store == 10**15 + 10**6 + 10**9
    with pytest.raises(LimitError, match=r"needs about 4,000 TB of disk at its peak \(2,000 TB of it for the coordinates"):
        require_disk(tmp_path, whole)
    require_disk(tmp_path, Estimate(1, 1, 1, 1, 1, 1, 1.0, 0.5, False))


def test_numbers_for_people() -> None:
    assert [clock(s) for s in (0.25, 12, 200, 7500)] == ["0.2 s", "12 s", "3 min 20 s", "2 h 5 min"]
    assert [size(n) for n in (12, 1500, 256_000_000, 1.5e9, 4e15)] == ["12 bytes", "1.5 KB", "256 MB", "1.5 GB", "4,000 TB"]
