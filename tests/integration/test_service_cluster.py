"""The service on Ray Serve: answers of all parts or none, parts that come back, generations that roll over, and its command."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine.query import QueryEngine, QueryInput, QuerySpec
from indexer.append import append
from indexer.settings import AppendSettings
from service.schemas import InfluenceResponse
from service.settings import ServeSettings
from tests.integration.conftest import EOGP, free_port, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:::ray"), pytest.mark.filterwarnings("ignore::ResourceWarning")]
MONGOLIA = {"prompt": "The capital of Mongolia is", "completion": " Ulaanbaatar."}


@contextmanager
def deployed(store: Path, **options: Any) -> Iterator[httpx.Client]:
    """The store on the cluster that this process is connected to, by itself."""
    import ray
    from ray import serve

    from service.cluster.deploy import deploy

    serve.shutdown()
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
    try:
        deploy(store, ServeSettings(**{"reload_seconds": 0, "ray": "auto", "ray_shards": 3, **options}), ray.cluster_resources())
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
    finally:
        serve.shutdown()


def ask(client: httpx.Client, top_k: int = 200) -> tuple[int, InfluenceResponse | None, dict[str, Any]]:
    r = client.post("/v1/influence", json={"queries": [MONGOLIA], "top_k": top_k})
    return r.status_code, InfluenceResponse.model_validate_json(r.content) if r.status_code == 200 else None, {**r.json(), "headers": r.headers}


def scores(answer: InfluenceResponse) -> dict[str, float]:
    """Every row's score: with top_k above their number, both directions list all."""
    found = answer.results[0].proponents
    assert found is not None
    return {h.id: h.score for h in found}


def processes(name: str) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and f"ray::ServeReplica:eogp:{name}".encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def test_answers_are_the_single_servers_to_five_digits(serve_cluster: str, pristine_store: Path) -> None:
    (wanted,) = QueryEngine.open(pristine_store).answer([QuerySpec((QueryInput(**MONGOLIA),), top_k=200)])
    with deployed(pristine_store) as client:
        status, answer, _ = ask(client)
        assert status == 200 and answer is not None and (answer.n_rows, answer.n_allowed) == (120, 120)
        for found, expected in ((answer.results[0].proponents, wanted.answers[0].proponents), (answer.results[0].opponents, wanted.answers[0].opponents)):
            assert found and expected and len(found) == len(expected) == 120
            by_id = {h.id: h.score for h in expected}
            np.testing.assert_allclose([h.score for h in found], [by_id[h.id] for h in found], rtol=1e-5)
            assert [h.score for h in found] == sorted((h.score for h in found), reverse=found is answer.results[0].proponents)


def test_a_killed_part_gives_503_until_it_is_back_and_never_part_of_an_answer(serve_cluster: str, pristine_store: Path) -> None:
    with deployed(pristine_store, shard_seconds=2.0) as client:
        before, tries = None, 0
        while before is None and tries < 10:  # the very first calls connect, which a busy machine takes its time for
            tries += 1
            _, before, said = ask(client)
        assert before is not None and len(scores(before)) == 120, said
        (doomed,) = processes("shard-1")
        os.kill(doomed, signal.SIGKILL)
        seen: Counter[int] = Counter()
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            status, answer, body = ask(client)
            seen[status] += 1
            if answer is not None:
                assert scores(answer) == scores(before)
                break
            assert status == 503 and body["code"] == "shard-unavailable" and int(body["headers"]["retry-after"]) > 0
            assert client.get("/healthz").status_code == 200  # the replica itself is well
            time.sleep(0.1)
        assert seen[200] == 1 and seen[503] >= 1 and set(seen) == {200, 503}
        assert processes("shard-1") != [doomed]


def test_a_new_generation_rolls_over_two_replicas_without_a_failure(serve_cluster: str, pristine_store: Path, texts: tuple[str, ...], tmp_path: Path) -> None:
    store = Path(shutil.copytree(pristine_store, tmp_path / "store"))
    data = write_rows(tmp_path / "more.jsonl", texts, range(500, 520))
    failures: list[Any] = []
    generations: Counter[tuple[str, int, int]] = Counter()
    ended = threading.Event()
    with deployed(store, ray_replicas=2, reload_seconds=0.3) as client:

        def load() -> None:
            with httpx.Client(base_url=client.base_url, timeout=60) as own:
                while not ended.is_set():
                    status, answer, body = ask(own)
                    if answer is None:
                        failures.append((status, body))
                    else:
                        generations[answer.generation, answer.n_rows, len(scores(answer))] += 1

        threads = [threading.Thread(target=load) for _ in range(2)]
        for t in threads:
            t.start()
        time.sleep(1)
        append(store, AppendSettings(data=[str(data)]))
        deadline, last = time.monotonic() + 60, 0
        while time.monotonic() < deadline and last < 20:  # twenty answers in a row from the new generation: both replicas have it
            _, answer, _ = ask(client)
            last = last + 1 if answer is not None and answer.generation == "000002" else 0
        ended.set()
        for t in threads:
            t.join()
    assert failures == [] and last == 20
    assert set(generations) == {("000001", 120, 120), ("000002", 140, 140)}  # each answer whole, of one generation


def test_the_command_serves_until_a_signal_and_refuses_in_one_sentence(serve_cluster: str, pristine_store: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "RAY_USAGE_STATS_ENABLED": "0"}

    def start(*flags: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*EOGP, "serve", str(pristine_store), "--ray", serve_cluster, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    port = free_port()
    with start("--port", str(port), "--ray-shards", "2") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"serving 120 examples at http://127.0.0.1:{port}")
        r = httpx.post(f"http://127.0.0.1:{port}/v1/influence", json={"queries": [MONGOLIA], "top_k": 1}, timeout=60, headers={"X-Request-Id": "mine"})
        assert r.status_code == 200 and r.headers.get_list("x-request-id") == ["mine"] and r.json()["request_id"] == "mine"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0 and processes("server") == processes("shard-0") == []
    with start("--port", str(port), "--ray-shards", "9") as process:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2 and "--ray-shards and --ray-replicas need 10 CPUs together, and the cluster has 8" in err
    with start("--port", str(port), "--model", str(tmp_path / "nowhere")) as process:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2 and "cannot load a model from" in err.strip().splitlines()[-1] and "Traceback" not in err.strip().splitlines()[-1]


@pytest.mark.parametrize("flags", [("--ray", "./store"), ("--ray", "ray://127.0.0.1:10001")])
def test_addresses_are_refused_before_anything_is_loaded(flags: tuple[str, ...], pristine_store: Path) -> None:
    ran = subprocess.run([*EOGP, "serve", str(pristine_store), "--port", "0", *flags], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2 and ran.stderr.startswith("eogp: --ray") and len(ran.stderr.splitlines()) == 1
