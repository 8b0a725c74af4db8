"""The Python client: typed answers, problems as exceptions, retries."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from service.client import AsyncInfluenceClient, InfluenceClient, InfluenceError, Retries, build, to_pandas
from service.schemas import InfluenceResponse, Query


def test_against_the_application(serve: Any) -> None:
    async def main() -> None:
        async with serve() as inner, AsyncInfluenceClient("http://testserver", transport=httpx.ASGITransport(app=inner.app)) as client:
            answer = await client.influence(prompt="a b", completion=" c", top_k=2, filter={"field": "kind", "in": ["x"]})
            assert answer.results[0].proponents and [h.id for h in answer.results[0].proponents] == ["1:a b c", "2:a b c"]
            many = await client.influence([Query(text="one"), {"text": "two"}], top_k=1, direction="opponents")
            assert [r.query for r in many.results] == [0, 1] and many.results[0].proponents is None
            assert (await client.info()).store.rows == 100 and await client.ready()
            assert (await client.example("r3", neighbours=1)).position == 3
            assert (await client.examples("self_influence", limit=1)).examples[0].id == "r99"
            assert not (await client.reload()).changed
            with pytest.raises(InfluenceError, match="No training example") as e:
                await client.example("a/b?c")
            assert (e.value.code, e.value.status) == ("example-not-found", 404) and e.value.problem.request_id
            with pytest.raises(ValidationError, match="completion or generate"):
                await client.influence(prompt="a")
            frame = to_pandas(many)
            assert list(frame["id"]) == ["1:one", "1:two"] and list(frame["meta.year"]) == [1901, 1901] and list(frame["score"]) == [-1, -1]

    asyncio.run(main())


class Script(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Answers with a list of responses or exceptions, in order."""

    def __init__(self, *steps: httpx.Response | Exception) -> None:
        self.steps = list(steps)
        self.seen: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        step.request = request
        return step

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)


def problem(status: int, code: str, after: str | None = None) -> httpx.Response:
    body = {"type": "/docs", "title": "t", "status": status, "code": code, "detail": "d"}
    return httpx.Response(status, json=body, headers={"Retry-After": after} if after else {})


def fine() -> httpx.Response:
    return httpx.Response(200, json={"generation": "g", "changed": True})


def both(script: Script, retries: Retries) -> Any:
    """The outcome of reload() by the synchronous client."""
    with InfluenceClient("http://x", transport=script, retries=retries, api_key="k" * 16) as client:
        return client.reload()


@pytest.mark.parametrize("steps", [[problem(429, "queue-full", "0"), fine()], [problem(503, "not-ready"), fine()], [httpx.ConnectError("no"), fine()]])
def test_what_was_not_answered_is_retried(steps: list[Any]) -> None:
    script = Script(*steps)
    assert both(script, Retries(backoff=0.001)).changed
    assert len(script.seen) == 2 and script.seen[1].headers["authorization"] == "Bearer " + "k" * 16


@pytest.mark.parametrize(
    ("steps", "calls", "error"),
    [
        ([problem(422, "bad-input")], 1, InfluenceError),
        ([problem(504, "deadline")], 1, InfluenceError),
        ([problem(429, "queue-full", "3600")], 1, InfluenceError),
        ([httpx.ReadTimeout("slow")], 1, httpx.ReadTimeout),
        ([problem(429, "queue-full", "0")] * 3, 3, InfluenceError),
        ([httpx.Response(502, text="<html>proxy</html>")], 1, InfluenceError),
        ([httpx.Response(200, text="<html>other</html>")], 1, InfluenceError),
    ],
)
def test_what_is_not_retried(steps: list[Any], calls: int, error: type[Exception]) -> None:
    script = Script(*steps)
    with pytest.raises(error):
        both(script, Retries(attempts=3, backoff=0.001))
    assert len(script.seen) == calls


def test_retry_after_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("service.client.time.sleep", waited.append)
    script = Script(problem(429, "queue-full", "7"), problem(503, "not-ready"), problem(503, "not-ready"), fine())
    assert both(script, Retries(backoff=0.5)).changed
    assert waited == [7, 1.0, 2.0]


def test_async_retries() -> None:
    async def main() -> None:
        script = Script(problem(429, "queue-full", "0"), fine())
        async with AsyncInfluenceClient("http://x", transport=script, retries=Retries(backoff=0.001)) as client:
            assert (await client.reload()).changed and len(script.seen) == 2
        async with AsyncInfluenceClient("http://x", transport=Script(httpx.ConnectError("no"))) as client:
            assert not await client.ready()

    asyncio.run(main())


def test_queries_or_fields_but_not_both() -> None:
    with pytest.raises(TypeError, match="either"):
        build([{"text": "a"}], {"prompt": "b"})
    with pytest.raises(TypeError, match="either"):
        build(None, {"top_k": 3})
    assert b'"in":["x"]' in build([{"text": "a"}], {"filter": {"field": "kind", "in": ["x"]}})


def test_pages_are_walked_to_the_end() -> None:
    def page(ids: list[str], offset: int) -> httpx.Response:
        examples = [{"id": i, "position": 0, "text": "", "kind": "text", "metadata": {}, "n_tokens": 1, "loss": 1.0, "self_influence": 1.0} for i in ids]
        return httpx.Response(200, json={"generation": "g", "total": 3, "order": "position", "offset": offset, "examples": examples})

    with InfluenceClient("http://x", transport=Script(page(["a", "b"], 0), page(["c"], 2))) as client:
        assert [e.id for e in client.all_examples(page=2)] == ["a", "b", "c"]


def test_no_results_make_an_empty_frame() -> None:
    answer = InfluenceResponse(
        generation="g", method="exhaustive", score="cosine", direction="both", n_rows=0, n_allowed=0, n_candidates=0, results=[], timing_ms={}
    )
    assert list(to_pandas(answer).columns)[:4] == ["query", "direction", "rank", "id"]


def test_importing_the_client_loads_no_model_library() -> None:
    code = "import sys, service.client; sys.exit(sum(m in sys.modules for m in ('torch', 'transformers', 'faiss', 'pyarrow')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
