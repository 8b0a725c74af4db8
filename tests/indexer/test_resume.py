"""Killed, stopped and resumed runs end bit-identical to uninterrupted ones."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import StoreError
from engine.store import Store, StoreWriter
from indexer.index import index
from indexer.interruption import InterruptedRunError
from indexer.reporter import Reporter, Stage
from indexer.settings import IndexSettings

from .conftest import corpus, write_jsonl  # type: ignore[import-not-found]  # a fixture module, resolved by pytest

Run = Callable[..., dict[str, Any]]
Content = Callable[[Path], dict[str, bytes]]
ROWS = 160


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, index_settings: Callable[..., IndexSettings]) -> dict[str, Any]:
    """The settings of a job of 160 rows, some of them bad, in 10 shards."""
    rows: list[Any] = corpus(ROWS)
    rows[7], rows[90] = {"text": None}, []
    data = write_jsonl(tmp_path_factory.mktemp("job") / "data.jsonl", rows)
    return index_settings(data).model_dump(mode="json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, job: dict[str, Any], run_forked: Run, store_content: Content) -> tuple[dict[str, bytes], float]:
    """What an uninterrupted run leaves, and how long it takes."""
    store = tmp_path_factory.mktemp("whole") / "store"
    ran = run_forked("index", store, job)
    assert ran["code"] == 0, ran["log"]
    assert Store.open(store, verify=True).n_rows == ROWS - 2
    return store_content(store), ran["seconds"]


def stage_of(store: Path) -> str:
    """How far a killed run had come."""
    work = store / "work"
    if not (work / "prepared" / "done.json").exists():
        return "prepare"
    if (work / "sketch").exists():
        return "sketch"
    return "projection" if (work / "coordinates").exists() or (work / "full").exists() else "curvature"


def kill_and_resume(store: Path, job: dict[str, Any], run: Run, duration: float, rng: random.Random, kills: int) -> list[str]:
    """Kill the job `kills` times at random moments (fewer if it gets done between two), then let it finish."""
    stages = []
    for _ in range(kills):
        ran = run("index", store, job, signal=signal.SIGKILL, after=rng.uniform(0.02, 1.0) * duration)
        if ran["code"] != -signal.SIGKILL:
            assert ran["code"] == 0, ran["log"]
            break
        if store.exists():
            stages.append(stage_of(store))
    ran = run("index", store, job)
    assert ran["code"] == 0, ran["log"]
    return stages


def test_two_kills_leave_no_trace(tmp_path: Path, job: dict[str, Any], whole: tuple[dict[str, bytes], float], run_forked: Run, store_content: Content) -> None:
    expected, duration = whole
    kill_and_resume(tmp_path / "store", job, run_forked, duration, random.Random(0), 2)
    assert store_content(tmp_path / "store") == expected


STAGES = ("work/prepared/000003", "work/coordinates", "work/sketch", "generations/000001")


@pytest.mark.parametrize("when", ["work/curvature/fit.json", "segments/000004", "CURRENT", *(pytest.param(w, marks=pytest.mark.slow) for w in STAGES)])
def test_a_kill_in_each_stage(
    tmp_path: Path, job: dict[str, Any], whole: tuple[dict[str, bytes], float], run_forked: Run, store_content: Content, when: str
) -> None:
    store = tmp_path / "store"
    ran = run_forked("index", store, job, signal=signal.SIGKILL, when=str(store / when))
    assert ran["code"] in (-signal.SIGKILL, 0), ran["log"]
    again = run_forked("index", store, job)
    assert again["code"] == 0, again["log"]
    assert store_content(store) == whole[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_kills_across_all_stages(
    tmp_path: Path, job: dict[str, Any], whole: tuple[dict[str, bytes], float], run_forked: Run, store_content: Content
) -> None:
    expected, duration = whole
    rng = random.Random(20)
    stages: list[str] = []
    attempt = 0
    while len(stages) < 24:
        attempt += 1
        store = tmp_path / f"store-{attempt}"
        stages += kill_and_resume(store, job, run_forked, duration, rng, 4)
        assert store_content(store) == expected, f"attempt {attempt}"
    assert {"prepare", "curvature", "sketch"} <= set(stages), stages


def test_sigterm_finishes_the_shard_and_the_same_command_goes_on(
    tmp_path: Path, job: dict[str, Any], whole: tuple[dict[str, bytes], float], run_forked: Run, store_content: Content
) -> None:
    store = tmp_path / "store"
    ran = run_forked("index", store, job, signal=signal.SIGTERM, when=str(store / "segments" / "000001"))
    assert ran["code"] == 143, ran["log"]
    assert "run the same command again" in ran["log"] and "Traceback" not in ran["log"]
    finished = sorted(p.name for p in (store / "segments").iterdir())
    assert 2 <= len(finished) < 10 and not any(name.endswith(".tmp") for name in finished)
    kept = (store / "segments" / "000001" / "codes.faiss").stat().st_mtime_ns
    with pytest.raises(StoreError, match=r"interrupted: run the same `eogp index` again"):
        Store.open(store)
    assert run_forked("index", store, job)["code"] == 0
    assert (store / "segments" / "000001" / "codes.faiss").stat().st_mtime_ns == kept
    assert store_content(store) == whole[0]


def test_another_run_does_not_continue_this_one(tmp_path: Path, job: dict[str, Any], run_forked: Run) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", corpus(60))
    job = {**job, "data": [str(data)]}
    store = tmp_path / "store"
    run_forked("index", store, job, signal=signal.SIGTERM, when=str(store / "work" / "prepared" / "000002"))
    with pytest.raises(StoreError, match=r"differs from this one in settings\.seed \(0 then, 3 now\).*--restart"):
        index(store, IndexSettings(**{**job, "seed": 3}))
    write_jsonl(data, corpus(60, first=1))
    with pytest.raises(StoreError, match="differs from this one in data"):
        index(store, IndexSettings(**job))
    assert index(store, IndexSettings(**{**job, "seed": 3, "restart": True}))["counts"]["rows"] == 60


def test_a_second_writer_is_refused_while_the_first_works(tmp_path: Path, job: dict[str, Any], run_forked: Run) -> None:
    store = tmp_path / "store"
    with StoreWriter(store):
        ran = run_forked("index", store, job)
    assert ran["code"] == 2 and "is writing this store" in ran["log"]


def test_a_stop_inside_the_pca_keeps_what_is_done(tmp_path: Path, job: dict[str, Any], whole: tuple[dict[str, bytes], float], store_content: Content) -> None:
    class Signals(Reporter):
        """SIGTERM once the PCA is at work."""

        def show(self, stage: Stage) -> None:
            if stage.name == "projection":
                os.kill(os.getpid(), signal.SIGTERM)

    store = tmp_path / "store"
    with pytest.raises(InterruptedRunError, match="stopped while fitting the projection; run the same command again"):
        index(store, IndexSettings(**job), Signals(log_json=True))
    spilled = {p.name: p.stat().st_mtime_ns for p in (store / "work" / "coordinates").iterdir()}
    assert "complete" in spilled and not (store / "work" / "sketch").exists()
    again = Reporter(log_json=True)
    index(store, IndexSettings(**job), again)
    assert "coordinates" not in again.seconds and "projection" in again.seconds
    assert store_content(store) == whole[0]
