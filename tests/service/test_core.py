"""The life of a request: overload, deadlines, disconnects, readiness, reload."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from typing import Any

import pytest

from engine.errors import NumericalError, StoreError
from service.errors import ApiError
from service.schemas import InfluenceRequest


def test_one_inference_thread_batches_and_mixes_nothing_up(serve: Any, ask: Any, fake: Any) -> None:
    async def main() -> None:
        async with serve(fake(seconds=0.01)) as client:

            async def one(i: int) -> None:
                r = await client.post("/v1/influence", json=ask(" ".join([f"q{i}"] * (1 + i % 7)), top_k=1 + i % 3))
                body = r.json()
                assert r.status_code == 200
                assert [h["id"].split(":")[1].split()[0] for h in body["results"][0]["proponents"]] == [f"q{i}"] * (1 + i % 3)

            await asyncio.gather(*(one(i) for i in range(100)))
            assert len(client.backend.batches) < 60 and sum(client.backend.batches) == 100
            assert client.backend.threads == {"inference"}

    asyncio.run(main())


def test_overload_answers_only_200_429_504_and_recovers(serve: Any, ask: Any, fake: Any) -> None:
    async def main() -> None:
        async with serve(fake(seconds=0.05), max_queue=8, batch_tokens=4, deadline_seconds=20) as client:
            responses = await asyncio.gather(*(client.post("/v1/influence", json=ask(f"a{i} b c d")) for i in range(80)))
            seen = Counter(r.status_code for r in responses)
            assert set(seen) <= {200, 429, 504} and seen[200] >= 4 and seen[429] > 0
            for r in responses:
                if r.status_code == 429:
                    assert int(r.headers["retry-after"]) >= 1 and r.json()["code"] == "queue-full"
            await asyncio.sleep(0.1)
            assert (await client.post("/v1/influence", json=ask())).status_code == 200
            assert client.app.state.service.batcher.waiting == (0, 0) and client.app.state.service.preparing == 0

    asyncio.run(main())


def test_open_requests_are_bounded_before_their_bodies_are_read(serve: Any, ask: Any) -> None:
    async def main() -> None:
        async with serve(max_queue=2) as client:
            hold = asyncio.Event()

            async def body() -> Any:
                yield b'{"queries": '
                await hold.wait()
                yield b'[{"text": "a"}]}'

            headers = {"Content-Type": "application/json"}
            open_ones = [asyncio.create_task(client.post("/v1/influence", content=body(), headers=headers)) for _ in range(6)]
            await asyncio.sleep(0.1)
            r = await client.post("/v1/influence", json=ask())
            assert (r.status_code, r.json()["code"]) == (429, "queue-full") and r.headers["retry-after"] == "1"
            assert (await client.get("/healthz")).status_code == 200
            hold.set()
            assert {(await t).status_code for t in open_ones} <= {200, 429}
            assert (await client.post("/v1/influence", json=ask())).status_code == 200

    asyncio.run(main())


def test_slow_kinds_run_alone(serve: Any, ask: Any, fake: Any) -> None:
    async def main() -> None:
        async with serve(fake(seconds=0.05)) as client:
            first = asyncio.create_task(client.post("/v1/influence", json=ask("first")))
            await asyncio.sleep(0.02)
            generate = {"queries": [{"prompt": "a", "generate": {}}]}
            bodies = [ask("quick"), ask("quicker"), generate, ask(rescore="gradients"), ask("last")]
            rest = []
            for body in bodies:
                rest.append(asyncio.create_task(client.post("/v1/influence", json=body)))
                await asyncio.sleep(0)
            assert {(await t).status_code for t in [first, *rest]} == {200}
            assert client.backend.batches[0] == 1 and max(client.backend.batches[1:]) <= 3 and sum(client.backend.batches) == 6
            assert client.backend.batches.count(1) >= 3

    asyncio.run(main())


def test_deadline_is_504(serve: Any, ask: Any, fake: Any) -> None:
    async def main() -> None:
        async with serve(fake(seconds=0.3), deadline_seconds=0.1) as client:
            r = await client.post("/v1/influence", json=ask())
            assert (r.status_code, r.json()["code"]) == (504, "deadline")

    asyncio.run(main())


def test_disconnect_drops_queued_work(serve: Any, ask: Any, fake: Any) -> None:
    async def main() -> None:
        async with serve(fake(seconds=0.2)) as client:
            first = asyncio.create_task(client.post("/v1/influence", json=ask("first")))
            await asyncio.sleep(0.05)
            service = client.app.state.service
            left: asyncio.Event = asyncio.Event()

            async def receive() -> dict[str, Any]:
                if not handed:
                    handed.append(True)
                    return {"type": "http.request", "body": b'{"queries": [{"text": "gone"}]}', "more_body": False}
                await left.wait()
                return {"type": "http.disconnect"}

            handed: list[bool] = []
            sent: list[dict[str, Any]] = []

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {
                "type": "http",
                "method": "POST",
                "path": "/v1/influence",
                "raw_path": b"/v1/influence",
                "query_string": b"",
                "headers": [(b"content-type", b"application/json"), (b"content-length", b"31")],
                "client": ("127.0.0.1", 1),
                "server": ("x", 80),
                "scheme": "http",
                "http_version": "1.1",
                "root_path": "",
                "app": client.app,
            }
            second = asyncio.create_task(client.app(scope, receive, send))
            while service.batcher.waiting[0] != 1:
                await asyncio.sleep(0.005)
            left.set()
            await second
            assert service.batcher.waiting == (0, 0) and sent[0]["status"] == 499
            assert (await first).status_code == 200
            assert client.backend.batches == [1]
            assert 'eogp_dropped_total{reason="disconnected"} 1.0' in (await client.get("/metrics")).text

    asyncio.run(main())


def test_readiness_drops_while_draining_and_when_stuck(serve: Any, ask: Any, fake: Any) -> None:
    async def main() -> None:
        async with serve(fake(seconds=0.3), stuck_seconds=0.1) as client:
            task = asyncio.create_task(client.post("/v1/influence", json=ask()))
            await asyncio.sleep(0.2)
            r = await client.get("/readyz")
            assert r.status_code == 503 and "has been running" in r.json()["detail"] and r.headers["retry-after"]
            assert (await client.get("/healthz")).status_code == 200
            assert (await task).status_code == 200
            for _ in range(100):  # ready again with the thread's next heartbeat
                if (r := await client.get("/readyz")).status_code == 200:
                    break
                await asyncio.sleep(0.02)
            assert r.status_code == 200
            client.app.state.service.draining = True
            assert "draining" in (await client.get("/readyz")).json()["detail"]
            assert (await client.post("/v1/influence", json=ask())).status_code == 200  # still answered

    asyncio.run(main())


def test_an_error_of_the_engine_keeps_its_code(serve: Any, ask: Any, fake: Any) -> None:
    def fail(items: Any) -> None:
        raise {"overflow": NumericalError("queries.0: the gradient is not finite"), "files": StoreError("/secret/segment: damaged")}[items[0].text]

    async def main() -> None:
        async with serve(fake(fail=fail)) as client:
            r = await client.post("/v1/influence", json=ask("overflow"))
            assert (r.status_code, r.json()["code"]) == (422, "non-finite") and "not finite" in r.json()["detail"]
            r = await client.post("/v1/influence", json=ask("files"))
            assert (r.status_code, r.json()["code"]) == (503, "bad-store") and "secret" not in r.text

    asyncio.run(main())


def test_reload_under_load_mixes_no_generation(serve: Any, ask: Any, fake: Any) -> None:
    backends = [fake(generation=f"g{i}", rows=100 + i, seconds=0.005) for i in range(1, 6)]
    for old, new in itertools.pairwise(backends):
        old.next = new

    async def main() -> None:
        async with serve(backends[0]) as client:
            seen: Counter[str] = Counter()
            stop = asyncio.Event()

            async def worker(w: int) -> None:
                while not stop.is_set():
                    r = await client.post("/v1/influence", json=ask(f"w{w}"))
                    body = r.json()
                    assert r.status_code == 200 and body["n_rows"] == 100 + int(body["generation"][1:])
                    seen[body["generation"]] += 1

            workers = [asyncio.create_task(worker(w)) for w in range(8)]
            for i in range(2, 6):
                await asyncio.sleep(0.1)
                assert (await client.post("/v1/reload")).json() == {"generation": f"g{i}", "changed": True}
            await asyncio.sleep(0.1)
            stop.set()
            await asyncio.gather(*workers)
            assert set(seen) == {"g1", "g2", "g3", "g4", "g5"}
            assert (await client.get("/v1/info")).json()["store"]["generation"] == "g5"
            assert 'eogp_generation_info{generation="g5"} 1.0' in (await client.get("/metrics")).text

    asyncio.run(main())


@pytest.mark.parametrize("error", [StoreError("/srv/store/CURRENT: damaged"), RuntimeError("odd")])
def test_a_reload_that_fails_keeps_serving(serve: Any, ask: Any, fake: Any, error: Exception) -> None:
    async def main() -> None:
        async with serve(fake(next=error)) as client:
            r = await client.post("/v1/reload")
            assert r.status_code == (409 if isinstance(error, StoreError) else 500) and "/srv" not in r.text
            assert (await client.post("/v1/influence", json=ask())).json()["generation"] == "g1"

    asyncio.run(main())


def test_a_new_generation_is_noticed(serve: Any, ask: Any, fake: Any) -> None:
    async def main() -> None:
        async with serve(fake(), reload_seconds=0.02) as client:
            client.backend.next = StoreError("half copied")
            await asyncio.sleep(0.1)
            assert (await client.post("/v1/influence", json=ask())).json()["generation"] == "g1"
            client.backend.next = fake(generation="g2")
            for _ in range(200):
                if (await client.post("/v1/influence", json=ask())).json()["generation"] == "g2":
                    break
                await asyncio.sleep(0.01)
            else:
                raise AssertionError("the new generation was never served")

    asyncio.run(main())


def test_tokenising_counts_against_the_queue(serve: Any, ask: Any, fake: Any) -> None:
    held = threading.Event()

    class Slow(fake):  # type: ignore[misc]  # the fixture's class
        def prepare(self, request: InfluenceRequest) -> Any:
            assert held.wait(10)
            return super().prepare(request)

    async def main() -> None:
        async with serve(Slow(), max_queue=3) as client:
            tasks = [asyncio.create_task(client.post("/v1/influence", json=ask(f"t{i}"))) for i in range(3)]
            await asyncio.sleep(0.05)
            r = await client.post("/v1/influence", json=ask("late"))
            assert r.status_code == 429
            held.set()
            assert [(await t).status_code for t in tasks] == [200] * 3

    asyncio.run(main())


def test_limits_name_field_and_number() -> None:
    from service.limits import check_limits, check_tokens
    from service.settings import ServeSettings

    settings = ServeSettings(max_results=50, max_request_tokens=10)
    request = InfluenceRequest.model_validate({"queries": [{"text": "a"}] * 3, "top_k": 10})
    with pytest.raises(Exception, match=r"top_k: 60 is more than the limit of 50 results"):
        check_limits(request, settings)
    check_limits(request.model_copy(update={"aggregate": "sum"}), settings)
    check_limits(request.model_copy(update={"direction": "proponents"}), settings)
    with pytest.raises(Exception, match="11 is more than the limit of 10 tokens"):
        check_tokens(11, settings)
    assert ApiError("queue-full", "x").status == 429
