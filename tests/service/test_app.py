"""Addresses, answers and documentation of the application."""

from __future__ import annotations

import asyncio
from typing import Any


def test_answers_one_query(serve: Any, ask: Any) -> None:
    async def main() -> None:
        async with serve() as client:
            for path in ("/v1/influence", "/influence"):
                r = await client.post(path, json=ask("a b c"), headers={"X-Request-Id": "mine-1"})
                assert r.status_code == 200, r.text
                body = r.json()
                assert body["request_id"] == r.headers["x-request-id"] == "mine-1"
                assert body["generation"] == "g1"
                assert [h["id"] for h in body["results"][0]["proponents"]] == ["1:a b c", "2:a b c", "3:a b c"]
                assert [h["score"] for h in body["results"][0]["opponents"]] == [-1, -0.5, -1 / 3]
                assert set(body["timing_ms"]) == {"prepare", "queue", "sketch", "search", "total"}
                assert r.headers["cache-control"] == "no-store"

    asyncio.run(main())


def test_health_info_examples_metrics(serve: Any, ask: Any) -> None:
    async def main() -> None:
        async with serve() as client:
            assert (await client.get("/healthz")).json() == {"status": "ok"}
            assert (await client.get("/readyz")).json() == {"status": "ready"}
            info = (await client.get("/v1/info")).json()
            assert info["store"]["rows"] == 100 and info["limits"]["max_queries"] == 32 and info["authentication"] is False
            assert (await client.get("/v1/examples/r7?neighbours=2")).json()["position"] == 7
            listed = (await client.get("/v1/examples?order=self_influence&limit=2")).json()
            assert [e["id"] for e in listed["examples"]] == ["r99", "r98"] and listed["total"] == 100
            await client.post("/v1/influence", json=ask("a b c"))
            await client.get("/nowhere")
            text = (await client.get("/metrics")).text
            assert 'eogp_requests_total{method="POST",path="/v1/influence",status="200"} 1.0' in text
            assert 'eogp_requests_total{method="GET",path="other",status="404"} 1.0' in text
            assert "eogp_tokens_total 3.0" in text and "eogp_store_rows 100.0" in text
            assert 'eogp_errors_total{code="not-found"} 1.0' in text and 'eogp_generation_info{generation="g1"} 1.0' in text
            assert "eogp_ready 1.0" in text and "process_resident_memory_bytes" in text

    asyncio.run(main())


def test_problem_documents(serve: Any, ask: Any) -> None:
    async def main() -> None:
        async with serve() as client:
            for response, status, code in (
                (await client.get("/nowhere"), 404, "not-found"),
                (await client.put("/v1/influence", json={}), 405, "method-not-allowed"),
                (await client.get("/v1/examples/none/such"), 404, "example-not-found"),
                (await client.post("/v1/influence", json={}), 422, "bad-input"),
                (await client.post("/v1/influence", json=ask(" ")), 422, "bad-data"),
                (await client.post("/v1/influence", json=ask(top_k=1001)), 422, "limit-exceeded"),
                (await client.post("/v1/influence", content=b"{", headers={"Content-Type": "application/json"}), 400, "bad-json"),
                (await client.post("/v1/influence", content=b"{}", headers={"Content-Type": "text/plain"}), 415, "unsupported-media-type"),
                (await client.get("/page/../app.py"), 404, "not-found"),
            ):
                body = response.json()
                assert (response.status_code, body["code"]) == (status, code), body
                assert response.headers["content-type"] == "application/problem+json"
                assert body["status"] == status and body["detail"] and body["title"] and body["request_id"] == response.headers["x-request-id"]
                assert body["type"] == f"/docs#error-{code}"
            r = await client.post("/v1/influence", json={"queries": [{"text": "a", "prompt": "b"}], "nonsense": 1, "top_k": "3"})
            assert {e["field"] for e in r.json()["errors"]} == {"queries.0", "nonsense", "top_k"}
            assert (await client.put("/v1/influence")).headers["allow"] == "POST"

    asyncio.run(main())


def test_a_fault_is_a_plain_500(serve: Any, ask: Any, fake: Any) -> None:
    def fail(items: Any) -> None:
        raise RuntimeError("/secret/path " + items[0].text)

    async def main() -> None:
        async with serve(fake(fail=fail)) as client:
            r = await client.post("/v1/influence", json=ask())
            assert r.status_code == 500 and r.json()["code"] == "internal"
            assert "secret" not in r.text and "Traceback" not in r.text
            client.backend.fail = None
            assert (await client.post("/v1/influence", json=ask())).status_code == 200

    asyncio.run(main())


def test_openapi_documents_every_field_and_status(serve: Any) -> None:
    async def main() -> None:
        async with serve() as client:
            schema = (await client.get("/openapi.json")).json()
            assert {"/v1/influence", "/influence", "/v1/examples", "/v1/examples/{id}", "/v1/info", "/v1/reload", "/healthz", "/readyz", "/metrics"} == set(
                schema["paths"]
            )
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    assert operation["summary"], path
                    assert "500" in operation["responses"]
                    for parameter in operation.get("parameters", ()):
                        assert parameter.get("description") or parameter["in"] == "path", (path, parameter["name"])
            for name in ("InfluenceRequest", "Query", "Filter", "Message", "Generate"):
                for field, spec in schema["components"]["schemas"][name]["properties"].items():
                    assert spec.get("description"), f"{name}.{field} has no description"
            assert "LOWERS" in schema["components"]["schemas"]["Hit"]["properties"]["score"]["description"]

    asyncio.run(main())


def test_page_and_docs_are_served(serve: Any) -> None:
    async def main() -> None:
        async with serve() as client:
            for path in ("/", "/docs"):
                r = await client.get(path)
                assert r.status_code == 200 and r.headers["content-type"].startswith("text/html")
                assert "default-src 'none'" in r.headers["content-security-policy"] and r.headers["x-frame-options"] == "DENY"

    asyncio.run(main())
