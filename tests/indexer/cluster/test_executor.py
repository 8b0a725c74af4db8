"""The same store from a cluster, to the bit; and what it refuses."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from engine.cluster import joined
from engine.errors import DataError, LimitError, SettingError
from engine.modules import TrackedModule
from indexer.append import append
from indexer.index import index
from indexer.reporter import Reporter
from indexer.settings import AppendSettings, IndexSettings

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray", "ignore::ResourceWarning")  # Ray uses deprecated settings of its own

Make = Callable[..., IndexSettings]
Content = Callable[[Path], dict[str, bytes]]
SUBJECTS = ("carbon", "Peru", "France", "yen", "Tungsten", "Mongolia", "citizens", "revenue")


def write_corpus(path: Path, n: int) -> Path:
    """Rows of several lengths, bad ones in between, the first two among them."""
    lines = ["[1, 2]\n", '{"other": 1}\n']
    for i in range(n):
        lines.append(
            json.dumps({"text": f"The {SUBJECTS[i % 8]} of number {i * 37 % 101} is {SUBJECTS[i * 5 % 7]}" + " indeed" * (i % 5), "kind": "ab"[i % 2]}) + "\n"
        )
        if i % 11 == 3:
            lines.append('{"text": ""}\n' if i % 2 else "not JSON\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_the_store_is_that_of_one_process(two_nodes: Any, index_settings: Make, store_content: Content, tmp_path: Path) -> None:
    data = [str(write_corpus(tmp_path / "a.jsonl", 70)), str(write_corpus(tmp_path / "b.jsonl", 50))]
    here = index(tmp_path / "here", index_settings(data), Reporter(log_json=True))
    there = index(tmp_path / "there", index_settings(data, ray=two_nodes.address, ray_workers=2), Reporter(log_json=True))
    assert here["counts"] == there["counts"] and here["bad"] == there["bad"] and here["counts"]["rows"] == 120 and here["counts"]["bad"] == 16
    wanted, found = store_content(tmp_path / "here"), store_content(tmp_path / "there")
    assert sorted(wanted) == sorted(found)
    assert [name for name in wanted if wanted[name] != found[name]] == []


def workers(cluster: Any) -> list[int]:
    """Process ids of the job's workers: children of this cluster's nodes that Ray has named after the class."""
    nodes = {str(info.process.pid) for node in cluster.list_all_nodes() for name, found in node.all_processes.items() if name == "raylet" for info in found}
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and b"ray::Worker" in (path / "cmdline").read_bytes() and (path / "stat").read_text().rsplit(")", 1)[1].split()[1] in nodes:
                found.append(int(path.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


class When(threading.Thread):
    """Does something once, as soon as a condition holds."""

    def __init__(self, condition: Callable[[], bool], action: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.condition, self.action, self.done, self.ended = condition, action, False, threading.Event()

    def run(self) -> None:
        while not self.done and not self.ended.wait(0.005):
            if self.condition():
                self.action()
                self.done = True

    def __enter__(self) -> When:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.join()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, index_settings: Make, store_content: Content) -> tuple[str, dict[str, bytes]]:
    """2,000 rows, and their store from one process."""
    folder = tmp_path_factory.mktemp("expected")
    data = str(write_corpus(folder / "data.jsonl", 2000))
    index(folder / "store", index_settings(data, shard_rows=100), Reporter(log_json=True))
    return data, store_content(folder / "store")


def segments(store: Path) -> int:
    return sum(p.name.isdigit() for p in (store / "segments").iterdir()) if (store / "segments").is_dir() else 0


@pytest.mark.slow
@pytest.mark.parametrize("point", [0, 1, 2])
def test_a_killed_worker_costs_its_shard(
    point: int, expected: tuple[str, dict[str, bytes]], two_nodes: Any, index_settings: Make, store_content: Content, tmp_path: Path
) -> None:
    data, wanted = expected
    rng, store, said = random.Random(point), tmp_path / "store", []
    after = (0, rng.randrange(1, 8), rng.randrange(8, 18))[point]  # segments; the first point lies in the curvature fit

    def reached() -> bool:
        started = segments(store) >= after if after else (store / "work" / "curvature").is_dir()
        return started and bool(workers(two_nodes))

    reporter = Reporter(log_json=True)
    reporter.say = lambda text, **fields: said.append(text)  # type: ignore[method-assign]  # what it says is all that matters here
    with When(reached, lambda: os.kill(rng.choice(workers(two_nodes)), signal.SIGKILL)) as killing:
        index(store, index_settings(data, shard_rows=100, ray=two_nodes.address, ray_workers=2), reporter)
    assert killing.done and sum("a worker was lost" in text for text in said) <= 1
    found = store_content(store)
    assert [name for name in wanted if wanted[name] != found.get(name)] == [] and len(found) == len(wanted)


@pytest.mark.slow
def test_a_lost_node_costs_its_shards(
    expected: tuple[str, dict[str, bytes]], two_nodes: Any, index_settings: Make, store_content: Content, tmp_path: Path
) -> None:
    data, wanted = expected
    store = tmp_path / "store"
    doomed = next(n for n in two_nodes.list_all_nodes() if n != two_nodes.head_node)
    with When(lambda: segments(store) >= 3, lambda: two_nodes.remove_node(doomed, allow_graceful=False)) as killing:
        index(store, index_settings(data, shard_rows=100, ray=two_nodes.address, ray_workers=2), Reporter(log_json=True))
    two_nodes.add_node(num_cpus=1, object_store_memory=100 * 10**6)
    assert killing.done
    found = store_content(store)
    assert [name for name in wanted if wanted[name] != found.get(name)] == [] and len(found) == len(wanted)


@pytest.mark.slow
def test_more_rows_are_appended_alike(built: Path, two_nodes: Any, tiny_model_folder: Path, store_content: Content, tmp_path: Path) -> None:
    more = str(write_corpus(tmp_path / "more.jsonl", 60))
    for name, cluster in (("here", {}), ("there", {"ray": two_nodes.address, "ray_workers": 2})):
        shutil.copytree(built, tmp_path / name)
        append(tmp_path / name, AppendSettings(data=[more], shard_rows=16, log_json=True, **cluster))
    wanted, found = store_content(tmp_path / "here"), store_content(tmp_path / "there")
    assert [name for name in wanted if wanted[name] != found.get(name)] == [] and len(found) == len(wanted)


@pytest.mark.slow
def test_what_a_worker_refuses_is_said_in_one_sentence(two_nodes: Any, index_settings: Make, tmp_path: Path) -> None:
    data = str(write_corpus(tmp_path / "data.jsonl", 40))
    with pytest.raises(SettingError, match=r"--ray-workers 3: the cluster has 2 CPUs, and a worker takes 1; ask for at most 2"):
        index(tmp_path / "a", index_settings(data, ray=two_nodes.address, ray_workers=3))
    with pytest.raises(DataError, match=r"data\.jsonl:1: not an object but a list"):
        index(tmp_path / "b", index_settings(data, ray=two_nodes.address, on_error="fail"))
    with pytest.raises(LimitError, match=r"raise --fit-memory"):
        index(tmp_path / "c", index_settings(data, ray=two_nodes.address, fit_memory=100))
    assert not any((tmp_path / name).exists() for name in "abc")


def modules(*shapes: tuple[str, int, int, str]) -> list[TrackedModule]:
    return [TrackedModule(name, nn.Linear(1, 1), d_out, d_in, False, 0, group) for name, d_out, d_in, group in shapes]


def test_shares_keep_common_inputs_together_and_are_balanced() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'eogp[ray]'")
    from indexer.cluster.executor import shares

    each = [(f"{i}.{part}", 8, 8, f"{i}.q") for i in range(12) for part in "qkv"]
    parts = shares(modules(*each), 4)
    assert [len(p) for p in parts] == [9, 9, 9, 9] and parts[0][:3] == ["11.q", "11.k", "11.v"]
    assert sorted(name for part in parts for name in part) == sorted(name for name, *_ in each)
    lopsided = modules(("small", 2, 2, "small"), ("large", 64, 64, "large"))
    assert shares(lopsided, 4) == [["large"], ["small"]] and shares([], 3) == []


@pytest.mark.parametrize("address", ["here", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "ray://127.0.0.1:10001", "./store"])
def test_an_address_is_refused_before_any_work(address: str, index_settings: Make, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--ray"):
        index(tmp_path / "store", index_settings(str(tmp_path / "missing.jsonl"), ray=address))
    assert not (tmp_path / "store").exists()


def test_an_address_where_nothing_listens_is_refused_at_once(index_settings: Make, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'eogp[ray]'")
    started = time.monotonic()
    with socket.socket() as taken:  # bound and not listening: nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(SettingError, match="nothing listens there"):
            index(tmp_path / "store", index_settings(str(tmp_path / "missing.jsonl"), ray=f"127.0.0.1:{taken.getsockname()[1]}"))
    assert time.monotonic() - started < 10


def test_without_ray_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("engine.cluster.version", missing)
    with pytest.raises(SettingError, match=r"pip install 'eogp\[ray\]'"), joined("local"):
        pass


def test_nothing_imports_ray_unless_it_is_asked_for() -> None:
    script = "import sys, indexer.index, indexer.append, indexer.cli, service.cli, service.engine_backend, service.server; print('ray' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == "False"
