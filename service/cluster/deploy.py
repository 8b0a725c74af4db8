"""`eogp serve --ray`: shards of the index and replicas of the server as Ray Serve deployments, until a signal."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
from ray import serve
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine import errors
from engine.cluster import joined
from engine.errors import EogpError, ModelError, SettingError
from engine.store import Store
from service.app import create_app
from service.cluster.searching import Searching
from service.cluster.shard import Shard
from service.engine_backend import EngineBackend
from service.logs import configure
from service.security import Keys
from service.settings import ServeSettings

APP = "eogp"
log = structlog.get_logger("eogp.server")
_RAISED = re.compile(r"(?:engine|service)\.errors\.(\w+): (.+)")


@serve.ingress()
class Replica:
    """The same application as a server of its own, over a searcher that asks the shards."""

    async def __init__(self, path: Path, settings: ServeSettings, *shards: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.made = await asyncio.to_thread(_application, path, settings, shards)  # the shards are waited for, which the event loop must not do

    def __serve_build_asgi_app__(self) -> Any:
        return self.made


def _application(path: Path, settings: ServeSettings, shards: Sequence[Any]) -> Any:
    configure(settings)
    backend = EngineBackend.open(path, settings, Searching(shards, settings.shard_seconds))
    return _Behind(create_app(backend, settings, Keys.read(settings.api_keys)))


class _Behind:
    """The application behind Serve's proxy, which hands it the request's id and puts that into the answer itself."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["X-Request-Id"]
            await send(message)

        await self.app(scope, receive, answer)


def application(path: Path, settings: ServeSettings, resources: dict[str, float]) -> Any:
    """The Serve application. resources: what the cluster has, by Ray's names."""
    threads = max(settings.threads, 1)
    on_gpu = resources.get("GPU", 0) > 0 and settings.device in ("auto", "cuda")
    shards = [
        serve.deployment(Shard).options(name=f"shard-{i}", ray_actor_options={"num_cpus": 1}, max_ongoing_requests=64).bind(path, i, settings.ray_shards)
        for i in range(settings.ray_shards)
    ]
    server = serve.deployment(Replica).options(
        name="server",
        num_replicas=settings.ray_replicas,
        ray_actor_options={"num_cpus": threads, "num_gpus": 1 if on_gpu else 0},
        max_ongoing_requests=4 * settings.max_queue,  # the application's own queue is the bound that clients see
        graceful_shutdown_timeout_s=settings.grace_seconds,
    )
    return server.bind(path, settings, *shards)


def run(store: Path, settings: ServeSettings) -> None:
    """Serve until a signal. Raises StoreError, ModelError or SettingError in one sentence."""
    assert settings.ray is not None
    rows = Store.open(store).n_rows
    with joined(settings.ray) as ray:
        resources = ray.cluster_resources()
        needed = settings.ray_shards + settings.ray_replicas * max(settings.threads, 1)
        if resources.get("CPU", 0) < needed:
            raise SettingError(
                f"--ray-shards and --ray-replicas need {needed} CPUs together, and the cluster has {resources.get('CPU', 0):g}", field="ray_shards"
            )
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        serve.start(http_options={"host": settings.host, "port": settings.port, "location": "EveryNode"}, logging_config={"log_level": "ERROR"})
        try:
            deploy(store.resolve(), settings, resources)
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            print(f"serving {rows:,} examples at http://{host}:{settings.port} (description of the API: /docs); Ctrl-C ends it", flush=True)
            ended.wait()
            log.info("draining")
        finally:
            serve.delete(APP)
            if not serve.status().applications:
                serve.shutdown()


def deploy(store: Path, settings: ServeSettings, resources: dict[str, float]) -> None:
    """Start the application and wait until it answers. Raises the error of a replica that cannot start."""
    try:
        serve.run(application(store, settings, resources), name=APP, route_prefix="/")
    except RuntimeError as e:
        raise _failure() or e from None


def _failure() -> EogpError | None:
    """Why the deployment failed, where a replica raised one of our own errors: Serve keeps its traceback as text."""
    found = serve.status().applications.get(APP)
    for deployment in found.deployments.values() if found is not None else ():
        for name, sentence in reversed(_RAISED.findall(deployment.message)):
            kind = getattr(errors, name, ModelError)
            return kind(sentence) if issubclass(kind, EogpError) else ModelError(sentence)
    return None
