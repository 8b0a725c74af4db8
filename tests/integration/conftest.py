"""A real store of a tiny GPT-2, made once per session through the indexer, and ways to serve it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from indexer.index import index
from indexer.settings import IndexSettings
from service.app import create_app
from service.client import InfluenceClient
from service.engine_backend import EngineBackend
from service.settings import ServeSettings
from tests.service.hostile_cases import cases


def write_rows(path: Path, texts: tuple[str, ...], numbers: range) -> Path:
    """Numbered variations of the texts with an id, a kind and a year."""
    rows = [{"id": f"row-{i}", "text": f"{texts[i % len(texts)]} ({i})", "kind": ("fact", "speech", "other")[i % 3], "year": 1900 + i} for i in numbers]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture(scope="session")
def pristine_store(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path, texts: tuple[str, ...]) -> Path:
    """120 rows at 32 bytes; not to be written to."""
    folder = tmp_path_factory.mktemp("served")
    data = write_rows(folder / "data.jsonl", texts, range(120))
    settings = IndexSettings(model=str(tiny_model_folder), data=[str(data)], bytes_per_example=32, chat_fallback="roles", shard_rows=50)
    index(folder / "store", settings)
    return folder / "store"


@pytest.fixture
def own_store(pristine_store: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return Path(shutil.copytree(pristine_store, tmp_path / "store"))


Serving = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture(
    params=[
        "one process",
        pytest.param("cluster", marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore:::ray"), pytest.mark.filterwarnings("ignore::ResourceWarning")]),
    ]
)
def serving(request: pytest.FixtureRequest) -> Serving:
    """`async with serving(store, **settings) as client`: the application in this process, or on Ray Serve with three shards."""
    if request.param == "cluster":
        on_cluster: Serving = request.getfixturevalue("on_cluster")
        return on_cluster
    return in_process


@asynccontextmanager
async def in_process(store: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    settings = ServeSettings(**{"reload_seconds": 0, **options})
    app = create_app(EngineBackend.open(store, settings), settings)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver", timeout=60) as client:
            yield client


@pytest.fixture(scope="session")
def serve_cluster() -> Iterator[str]:
    """Address of a cluster of one node that says it has eight CPUs, with this process connected to it."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'eogp[ray]'")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "object_store_memory": 100 * 10**6, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def on_cluster(serve_cluster: str) -> Iterator[Serving]:
    """The same application on Ray Serve; what is asked for twice in a row with the same settings is started once."""
    import ray
    from ray import serve

    from service.cluster.deploy import deploy

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
    running: list[tuple[Path, dict[str, Any]]] = []

    @asynccontextmanager
    async def run(store: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
        options = {"reload_seconds": 0, "ray": "auto", "ray_shards": 3, **options}
        if running != [(store, options)]:
            deploy(store, ServeSettings(**options), ray.cluster_resources())
            running[:] = [(store, options)]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client

    yield run
    serve.shutdown()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Served:
    """A server process: `url`, and `client()` to ask it."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def client(self, **options: object) -> InfluenceClient:
        return InfluenceClient(self.url, **options)  # type: ignore[arg-type]  # the options are the caller's

    def stop(self, number: int = signal.SIGTERM, seconds: float = 20) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)

    def rss(self) -> int:
        """Resident bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session")
def hostile_cases() -> list[tuple[str, bytes, dict[str, str]]]:
    return cases()


EOGP = [sys.executable, "-c", "from engine.cli import main; main()"]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """launch(store, "--flag", ...): `eogp serve` on a free port, ready to answer; ended with the test."""
    running: list[Served] = []

    def start(store: Path, *flags: str, port: int = 0, wait: float = 60) -> Served:
        log = tmp_path / f"serve-{len(running)}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("w") as err:
            process = subprocess.Popen(
                [*EOGP, "serve", str(store), "--port", str(port), *flags], stdout=subprocess.PIPE, stderr=err, text=True, env=environment
            )
        served = Served(process, "", log)
        running.append(served)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, f"{line}{log.read_text()}"
        served.url = "http://" + line.split("http://")[1].split()[0]
        with served.client() as client:
            deadline = time.monotonic() + wait
            while not client.ready():
                assert time.monotonic() < deadline and process.poll() is None, log.read_text()
                time.sleep(0.05)
        return served

    yield start
    for served in running:
        served.stop(signal.SIGKILL)
        if served.process.stdout is not None:
            served.process.stdout.close()
