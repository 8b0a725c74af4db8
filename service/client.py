"""Python client: typed answers, retries that honour Retry-After, synchronous and asynchronous.

    from service.client import InfluenceClient

    with InfluenceClient("http://localhost:8000") as client:
        answer = client.influence(prompt="The capital of Mongolia is", completion=" Ulaanbaatar", top_k=5)
        print(to_pandas(answer))

Imports neither torch nor the engine's models.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from service.errors import CODES, Problem
from service.schemas import ExampleList, InfluenceRequest, InfluenceResponse, Info, Order, Query, Reloaded, StoredExample

if TYPE_CHECKING:
    import pandas

RETRIED = (429, 503)  # the request was not answered and may be sent again
LONGEST_WAIT = 60.0  # seconds; a longer Retry-After is not waited for
_QUERY = frozenset(Query.model_fields)
M = TypeVar("M", bound=BaseModel)


class InfluenceError(Exception):
    """The server refused; `problem` is its problem document, `code` its stable code."""

    def __init__(self, problem: Problem, retry_after: float | None = None) -> None:
        super().__init__(f"{problem.detail} [{problem.code}, request {problem.request_id}]" if problem.request_id else problem.detail)
        self.problem, self.retry_after = problem, retry_after

    @property
    def code(self) -> str:
        return self.problem.code

    @property
    def status(self) -> int:
        return self.problem.status


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and how long to try again: after 429 and 503, and when no connection could be made.

    Waits as long as Retry-After says, else `backoff` seconds, doubled each time.
    """

    attempts: int = 4
    backoff: float = 0.25

    def wait(self, attempt: int, error: InfluenceError | httpx.TransportError) -> float | None:
        """Seconds before attempt number `attempt` + 1; None to give up."""
        if attempt >= self.attempts:
            return None
        pause = self.backoff * 2 ** (attempt - 1)
        if isinstance(error, InfluenceError):
            if error.status not in RETRIED:
                return None
            pause = error.retry_after if error.retry_after is not None else pause
        elif not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return None  # the request may have been taken: the caller decides
        return pause if pause <= LONGEST_WAIT else None


@dataclass(slots=True)
class _Calls:
    """What both clients share: requests out, answers in."""

    url: str
    api_key: str | None = None
    timeout: float = 60.0
    retries: Retries = field(default_factory=Retries)

    def options(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"base_url": self.url, "timeout": self.timeout, "headers": headers}


def build(queries: Sequence[Query | dict[str, Any]] | None, fields: dict[str, Any]) -> bytes:
    """The request's body. Fields of a single query (prompt=..., text=...) may be given directly. Raises pydantic.ValidationError."""
    single = {k: fields.pop(k) for k in list(fields) if k in _QUERY}
    if (queries is None) == (not single):
        raise TypeError("give either queries=[...] or the fields of one query, such as prompt= and completion=")
    listed = [single] if queries is None else [q.model_dump(exclude_none=True) if isinstance(q, Query) else q for q in queries]
    request = InfluenceRequest.model_validate({"queries": listed, **fields})
    return request.model_dump_json(by_alias=True, exclude_none=True).encode()


def parse(response: httpx.Response, model: type[M]) -> M:
    """The typed answer. Raises InfluenceError for a problem document, or for anything that is neither."""
    if response.is_success:
        try:
            return model.model_validate_json(response.content)
        except ValidationError:
            detail = f"{response.url} answered with something else than {model.__name__}; is it an eogp server?"
            raise InfluenceError(Problem(type="about:blank", title="Not an answer", status=response.status_code, code="not-an-answer", detail=detail)) from None
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        code = next((c for c, known in CODES.items() if known.status == response.status_code), "unknown")
        detail = f"{response.url} answered with status {response.status_code}"
        problem = Problem(type="about:blank", title=response.reason_phrase, status=response.status_code, code=code, detail=detail)
    after = response.headers.get("retry-after", "")
    raise InfluenceError(problem, float(after) if after.isdigit() else None)


class InfluenceClient:
    """Asks one server. Safe to share between threads."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout: float = 60.0, retries: Retries | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._calls = _Calls(url, api_key, timeout, retries or Retries())
        self._http = httpx.Client(**self._calls.options(), transport=transport)

    def influence(self, queries: Sequence[Query | dict[str, Any]] | None = None, **fields: Any) -> InfluenceResponse:
        """Rank training examples. Either queries=[...], or one query's fields; then top_k, score, direction, filter, ... as in the HTTP schema.

        Raises pydantic.ValidationError before anything is sent, or InfluenceError with the server's problem.
        """
        return self._post("/v1/influence", InfluenceResponse, build(queries, fields))

    def example(self, id: str, *, neighbours: int = 0) -> StoredExample:
        """One training example. Raises InfluenceError (example-not-found)."""
        return self._get(f"/v1/examples/{quote(id, safe='')}", StoredExample, neighbours=neighbours)

    def examples(self, order: Order = "position", *, offset: int = 0, limit: int = 20) -> ExampleList:
        """A page of examples; self_influence and loss list the highest first."""
        return self._get("/v1/examples", ExampleList, order=order, offset=offset, limit=limit)

    def all_examples(self, order: Order = "position", *, page: int = 200) -> Iterator[StoredExample]:
        """Every example, page by page."""
        offset = 0
        while True:
            found = self.examples(order, offset=offset, limit=page)
            yield from found.examples
            offset += len(found.examples)
            if not found.examples or offset >= found.total:
                return

    def info(self) -> Info:
        """Model, store, limits."""
        return self._get("/v1/info", Info)

    def reload(self) -> Reloaded:
        """Serve the store's current generation; needs an admin key where keys are set."""
        return self._post("/v1/reload", Reloaded, None)

    def ready(self) -> bool:
        """Whether the server can answer now."""
        try:
            return self._http.get("/readyz").is_success
        except httpx.TransportError:
            return False

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _get(self, path: str, model: type[M], **params: Any) -> M:
        return self._retried(model, "GET", path, params=params)

    def _post(self, path: str, model: type[M], content: bytes | None) -> M:
        return self._retried(model, "POST", path, content=content, headers={"Content-Type": "application/json"} if content else {})

    def _retried(self, model: type[M], method: str, path: str, **options: Any) -> M:
        attempt = 1
        while True:
            try:
                return parse(self._http.request(method, path, **options), model)
            except (InfluenceError, httpx.TransportError) as e:
                pause = self._calls.retries.wait(attempt, e)
                if pause is None:
                    raise
            time.sleep(pause)
            attempt += 1


class AsyncInfluenceClient:
    """The same with async methods."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout: float = 60.0, retries: Retries | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._calls = _Calls(url, api_key, timeout, retries or Retries())
        self._http = httpx.AsyncClient(**self._calls.options(), transport=transport)

    async def influence(self, queries: Sequence[Query | dict[str, Any]] | None = None, **fields: Any) -> InfluenceResponse:
        """As InfluenceClient.influence."""
        content = build(queries, fields)
        return await self._retried(InfluenceResponse, "POST", "/v1/influence", content=content, headers={"Content-Type": "application/json"})

    async def example(self, id: str, *, neighbours: int = 0) -> StoredExample:
        """As InfluenceClient.example."""
        return await self._retried(StoredExample, "GET", f"/v1/examples/{quote(id, safe='')}", params={"neighbours": neighbours})

    async def examples(self, order: Order = "position", *, offset: int = 0, limit: int = 20) -> ExampleList:
        """As InfluenceClient.examples."""
        return await self._retried(ExampleList, "GET", "/v1/examples", params={"order": order, "offset": offset, "limit": limit})

    async def info(self) -> Info:
        """As InfluenceClient.info."""
        return await self._retried(Info, "GET", "/v1/info")

    async def reload(self) -> Reloaded:
        """As InfluenceClient.reload."""
        return await self._retried(Reloaded, "POST", "/v1/reload")

    async def ready(self) -> bool:
        """As InfluenceClient.ready."""
        try:
            return (await self._http.get("/readyz")).is_success
        except httpx.TransportError:
            return False

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.close()

    async def _retried(self, model: type[M], method: str, path: str, **options: Any) -> M:
        attempt = 1
        while True:
            try:
                return parse(await self._http.request(method, path, **options), model)
            except (InfluenceError, httpx.TransportError) as e:
                pause = self._calls.retries.wait(attempt, e)
                if pause is None:
                    raise
            await asyncio.sleep(pause)
            attempt += 1


def to_pandas(answer: InfluenceResponse) -> pandas.DataFrame:
    """One row per result: query, direction, rank, id, score, rescored, text, and each metadata field as a column `meta.NAME`. Needs pandas."""
    import pandas

    rows = [
        {
            "query": result.query,
            "direction": direction,
            "rank": h.rank,
            "id": h.id,
            "score": h.score,
            "rescored": h.rescored,
            "text": h.text,
            **{f"meta.{name}": value for name, value in h.metadata.items()},
        }
        for result in answer.results
        for direction, hits in (("proponents", result.proponents), ("opponents", result.opponents))
        for h in hits or ()
    ]
    return pandas.DataFrame(rows, columns=None if rows else ["query", "direction", "rank", "id", "score", "rescored", "text"])
