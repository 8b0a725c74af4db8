"""A backend without a model: answers are a function of the query alone, so a mixed or lost answer shows."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from engine.errors import DataError, EogpError
from service import schemas
from service.app import create_app
from service.security import Keys
from service.settings import ServeSettings


@dataclass
class Item:
    request: schemas.InfluenceRequest
    n_tokens: int
    text: str


def said(query: schemas.Query) -> str:
    if query.text is not None:
        return query.text
    if query.prompt is not None:
        return query.prompt + (query.completion or " generated")
    if query.messages is not None:
        return " ".join(m.content for m in query.messages)
    return " ".join(map(str, query.input_ids or ()))


@dataclass
class FakeBackend:
    """Proponents' ids are made from the query's text; `seconds` is a batch's time, `fail` is called with each batch's items first."""

    generation: str = "g1"
    rows: int = 100
    seconds: float = 0.0
    rescore: bool = False
    task: str = "causal-lm"
    fail: Callable[[Sequence[Item]], None] | None = None
    next: Any = None
    damaged: list[tuple[str, str]] = field(default_factory=list)
    checks: int = 0
    batches: list[int] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    @property
    def model(self) -> schemas.ModelInfo:
        return schemas.ModelInfo(name="fake", task=self.task, parameters=1, device="cpu", dtype="float32", context=512, chat=True)

    @property
    def store(self) -> schemas.StoreInfo:
        return schemas.StoreInfo(
            generation=self.generation,
            rows=self.rows,
            excluded=1,
            bytes_per_example=34,
            bits=256,
            blocks=1,
            method="pca",
            coverage_threshold=0.2,
            metadata=["kind"],
        )

    def prepare(self, request: schemas.InfluenceRequest) -> Item:
        texts = [said(q) for q in request.queries]
        if any(not t.strip() for t in texts):
            raise DataError("queries.0: no target token is left")
        return Item(request, sum(len(t.split()) for t in texts), "|".join(texts))

    def answer(self, items: Sequence[Item]) -> list[schemas.InfluenceResponse | EogpError]:
        self.batches.append(len(items))
        self.threads.add(threading.current_thread().name)
        if self.fail is not None:
            self.fail(items)
        if self.seconds:
            time.sleep(self.seconds)
        return [self._one(i) for i in items]

    def damage(self, told: Callable[[int], None]) -> list[tuple[str, str]]:
        for _ in range(3):
            told(1000)
        self.checks += 1
        return self.damaged

    def _one(self, item: Item) -> schemas.InfluenceResponse:
        def hit(rank: int, text: str, sign: float) -> schemas.Hit:
            return schemas.Hit(
                rank=rank, id=f"{rank}:{text}", score=sign / rank, text=f"example {rank} of {text}", metadata={"kind": "fake", "year": 1900 + rank}
            )

        request = item.request
        results = [
            schemas.QueryResult(
                query=i,
                n_tokens=len(said(q).split()),
                truncated=False,
                coverage=0.5,
                warnings=[],
                inputs=[schemas.QueryInput(text=said(q), sign=1, n_tokens=len(said(q).split()), n_targets=1, truncated=False, loss=1.5, coverage=0.5)],
                proponents=[hit(r + 1, said(q), 1) for r in range(request.top_k)] if request.direction != "opponents" else None,
                opponents=[hit(r + 1, said(q), -1) for r in range(request.top_k)] if request.direction != "proponents" else None,
            )
            for i, q in enumerate(request.queries)
        ]
        return schemas.InfluenceResponse(
            generation=self.generation,
            method="exhaustive",
            score=request.score,
            direction=request.direction,
            n_rows=self.rows,
            n_allowed=self.rows - 1,
            n_candidates=0,
            results=results,
            timing_ms={"sketch": 1.0, "search": 0.5},
        )

    def _stored(self, position: int) -> schemas.StoredExample:
        return schemas.StoredExample(
            id=f"r{position}", position=position, text=f"row {position}", kind="text", metadata={}, n_tokens=3, loss=2.0, self_influence=float(position)
        )

    def example(self, id: str, neighbours: int) -> schemas.StoredExample | None:
        return self._stored(int(id[1:])) if id[:1] == "r" and id[1:].isdecimal() and id[1:].isascii() and int(id[1:6]) < self.rows else None

    def examples(self, order: schemas.Order, offset: int, limit: int) -> schemas.ExampleList:
        positions = list(range(self.rows)) if order == "position" else list(range(self.rows))[::-1]
        return schemas.ExampleList(
            generation=self.generation, total=self.rows, order=order, offset=offset, examples=[self._stored(p) for p in positions[offset : offset + limit]]
        )

    def reload(self) -> Any:
        if isinstance(self.next, Exception):
            raise self.next
        return self.next


class Client(httpx.AsyncClient):
    """Speaks to an app in this process, whose lifespan runs."""

    app: Any
    backend: FakeBackend


@pytest.fixture
def serve() -> Callable[..., Any]:
    """`async with serve(backend, **settings) as client`."""
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def run(backend: FakeBackend | None = None, keys: Keys | None = None, **settings: Any) -> AsyncIterator[Client]:
        backend = backend or FakeBackend()
        settings.setdefault("reload_seconds", 0)
        app = create_app(backend, ServeSettings(**settings), keys)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with Client(transport=transport, base_url="http://testserver") as client:
                client.app, client.backend = app, backend
                yield client

    return run


@pytest.fixture(scope="session")
def fake() -> type[FakeBackend]:
    return FakeBackend


@pytest.fixture
def ask() -> Callable[..., dict[str, Any]]:
    """The body of a request with one text query."""

    def body(text: str = "a b c", **fields: Any) -> dict[str, Any]:
        return {"queries": [{"text": text}], "top_k": 3, **fields}

    return body
