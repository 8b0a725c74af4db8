"""API keys, roles, headers, request ids, body limits, logs without query text."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from engine.errors import SettingError
from service import logs
from service.errors import ApiError
from service.security import Keys, authorise
from service.settings import ServeSettings

READ, ADMIN = "read-key-0123456789", "admin-key-0123456789"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    path = tmp_path / "keys"
    path.write_text(f"# team\n{READ} read alice\n\n{ADMIN} admin  # ops\n")
    return Keys.read(path)


def test_key_file_is_read_without_keeping_keys(keys: Keys) -> None:
    assert [(k.role, k.name) for k in keys.keys] == [("read", "alice"), ("admin", "line 4")]
    assert READ not in repr(keys.keys) and keys.find(READ) is keys.keys[0] and keys.find(ADMIN) is keys.keys[1]
    assert keys.find(READ + "x") is None and keys.find("") is None and keys.find("\ud800") is None


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("short read\n", "line 1: a key has at least 16"),
        (f"{READ}\n", "line 1: write"),
        (f"{READ} root\n", "line 1: write"),
        ("# nothing\n", "holds no key"),
        (f"{READ} read\n{READ} admin\n", "listed twice"),
    ],
)
def test_a_bad_key_file_is_refused_without_showing_a_key(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(SettingError, match=sentence) as e:
        Keys.read(path)
    assert READ not in e.value.message
    with pytest.raises(SettingError, match="cannot be read"):
        Keys.read(tmp_path / "none")


def test_every_key_is_compared(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return a == b

    monkeypatch.setattr("service.security.hmac.compare_digest", compare)
    keys.find(READ)
    keys.find("unknown")
    assert len(compared) == 4


def test_roles(keys: Keys) -> None:
    def may(path: str, **headers: str) -> str | None:
        return authorise(keys, path, Headers({k.replace("_", "-"): v for k, v in headers.items()}), "10.0.0.9")

    assert may("/v1/influence", authorization=f"Bearer {READ}") == "alice"
    assert may("/v1/influence", authorization=f"bearer  {READ} ") == "alice"
    assert may("/v1/reload", x_api_key=ADMIN) == "line 4"
    assert may("/healthz") is None and may("/page/app.js") is None
    for path, headers, code in (
        ("/v1/influence", {}, "unauthorised"),
        ("/v1/influence", {"authorization": "Bearer nonsense"}, "unauthorised"),
        ("/v1/influence", {"authorization": f"Basic {READ}"}, "unauthorised"),
        ("/metrics", {}, "unauthorised"),
        ("/v1/nothing", {}, "unauthorised"),
        ("/v1/reload", {"x_api_key": READ}, "forbidden"),
    ):
        with pytest.raises(ApiError) as e:
            may(path, **headers)
        assert e.value.code == code, path
    with pytest.raises(ApiError, match="server's own machine"):
        authorise(Keys(), "/v1/reload", Headers({}), "10.0.0.9")
    assert authorise(Keys(), "/v1/reload", Headers({}), "127.0.0.1") is None


def test_over_http(serve: Any, ask: Any, keys: Keys) -> None:
    async def main() -> None:
        async with serve(keys=keys) as client:
            r = await client.post("/v1/influence", json=ask())
            assert r.status_code == 401 and r.json()["code"] == "unauthorised" and r.headers["www-authenticate"] == "Bearer"
            assert (await client.post("/v1/influence", json=ask(), headers={"Authorization": f"Bearer {READ}"})).status_code == 200
            assert (await client.post("/v1/reload", headers={"X-API-Key": READ})).status_code == 403
            assert (await client.post("/v1/reload", headers={"X-API-Key": ADMIN})).json() == {"generation": "g1", "changed": False}
            assert (await client.get("/")).status_code == (await client.get("/readyz")).status_code == 200
            schema = (await client.get("/openapi.json")).json()
            assert "401" in schema["paths"]["/v1/influence"]["post"]["responses"] and schema["paths"]["/v1/reload"]["post"]["security"]
            assert "security" not in schema["paths"]["/healthz"]["get"]

    asyncio.run(main())


def test_headers_and_request_ids(serve: Any) -> None:
    async def main() -> None:
        async with serve() as client:
            for path in ("/", "/v1/info", "/nowhere"):
                r = await client.get(path, headers={"X-Request-Id": 'bad id\t"; drop'})
                for name in ("content-security-policy", "x-content-type-options", "x-frame-options", "referrer-policy", "cross-origin-resource-policy"):
                    assert name in r.headers, (path, name)
                assert len(r.headers["x-request-id"]) == 32 and r.headers["x-request-id"].isalnum()
                assert "access-control-allow-origin" not in r.headers
            r = await client.options("/v1/influence", headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"})
            assert r.status_code == 405

    asyncio.run(main())


def test_cors_only_for_named_origins(serve: Any) -> None:
    async def main() -> None:
        async with serve(cors_origins=["https://lab.example"]) as client:
            preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
            r = await client.options("/v1/influence", headers={"Origin": "https://lab.example", **preflight})
            assert r.status_code == 200 and r.headers["access-control-allow-origin"] == "https://lab.example"
            r = await client.options("/v1/influence", headers={"Origin": "https://evil.example", **preflight})
            assert "access-control-allow-origin" not in r.headers

    asyncio.run(main())


def test_bodies_are_bounded_in_size_and_time(serve: Any) -> None:
    async def main() -> None:
        async with serve(max_body_bytes=1000, deadline_seconds=0.2) as client:
            json_type = {"Content-Type": "application/json"}

            async def chunks(n: int) -> Any:
                for _ in range(n):
                    yield b"x" * 100

            for content in (b"x" * 1001, chunks(11)):
                r = await client.post("/v1/influence", content=content, headers=json_type)
                assert (r.status_code, r.json()["code"]) == (413, "body-too-large")
            r = await client.post("/v1/influence", content=chunks(10), headers=json_type)
            assert r.status_code == 400
            for length in ("1001", "-1", "1e3", "9" * 400):
                r = await client.post("/v1/influence", content=b"{}", headers={**json_type, "Content-Length": length})
                assert r.status_code == 413, length

            async def slow() -> Any:
                yield b"{"
                await asyncio.sleep(0.6)
                yield b"}"

            r = await client.post("/v1/influence", content=slow(), headers=json_type)
            assert (r.status_code, r.json()["code"]) == (408, "body-timeout")

    asyncio.run(main())


@pytest.mark.parametrize("shown", [False, True])
def test_logs_are_json_and_keep_queries_to_themselves(serve: Any, fake: Any, ask: Any, capsys: pytest.CaptureFixture[str], shown: bool) -> None:
    def fail(items: Any) -> None:
        if "explode" in items[0].text:
            raise RuntimeError("inside")

    root, level = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        logs.configure(ServeSettings(log_queries=shown))

        async def main() -> None:
            async with serve(fake(fail=fail), log_queries=shown) as client:
                await client.post("/v1/influence", json=ask("private words"), headers={"X-Request-Id": "r-1"})
                await client.post("/v1/influence", json=ask("explode"), headers={"X-Request-Id": "r-2"})
                await client.get("/healthz")

        asyncio.run(main())
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    finally:
        logging.getLogger().handlers[:] = root
        logging.getLogger().setLevel(level)
        import structlog

        structlog.reset_defaults()
    requests = {line["request_id"]: line for line in lines if line["event"] == "request"}
    assert requests["r-1"]["status"] == 200 and requests["r-1"]["tokens"] == 2 and requests["r-1"]["generation"] == "g1"
    assert requests["r-2"]["status"] == 500 and requests["r-2"]["code"] == "internal" and set(requests) == {"r-1", "r-2"}
    failure = next(line for line in lines if line["event"] == "batch-failed")
    assert failure["exception"][0]["exc_value"] == "inside"
    assert ("private words" in json.dumps(lines)) is ("explode" in json.dumps(lines)) is shown  # a traceback shows no local variables
