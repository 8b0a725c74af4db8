"""The store at a million rows, and an indexing job's memory; measured in processor time, which other jobs on the machine do not change."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import indexing, store


def test_twenty_thousand_rows(tmp_path: Path) -> None:
    """The short form: same answers after compaction, nothing damaged, the deleted rows gone."""
    found = store.measure(20_000, tmp_path, lambda text: None)
    assert found["same_answers"] and found["faults"] == 0 and found["segments"] == 1
    assert found["removed"] == found["deleted"] > 1000
    assert found["open"]["rows"] == 20_000 and found["open_compacted"]["rows"] == 21_000 - found["removed"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_rows(tmp_path: Path) -> None:
    found = store.measure(1_000_000, tmp_path)
    assert found["same_answers"] and found["faults"] == 0
    for when in ("open", "open_compacted"):
        assert found[when]["cpu_seconds"] < 1 and found[when]["anonymous_open"] < 300e6
    assert found["append"]["cpu_seconds"] < 2 and found["delete"]["cpu_seconds"] < 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_does_not_grow_with_the_examples_and_the_model_is_kept_busy(tmp_path: Path) -> None:
    found = indexing.measure(tmp_path, rows=3000, width=128, layers=2)
    assert abs(found["memory_growth"]) < 0.10
    assert found["busy_share"] >= 0.90
