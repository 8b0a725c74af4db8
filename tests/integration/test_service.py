"""The server on a real store and model: answers, errors, signals, new generations."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine import cli
from engine.query import QueryEngine, QueryInput, QuerySpec
from engine.store import Store
from indexer.append import append
from indexer.compact import compact
from indexer.delete import delete
from indexer.settings import AppendSettings
from service.engine_backend import EngineBackend
from service.schemas import InfluenceResponse
from service.settings import ServeSettings

Serving = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]
MONGOLIA = {"prompt": "The capital of Mongolia is", "completion": " Ulaanbaatar."}


async def ask(client: httpx.AsyncClient, *queries: dict[str, Any], **fields: Any) -> InfluenceResponse:
    r = await client.post("/v1/influence", json={"queries": list(queries), **fields})
    assert r.status_code == 200, r.text
    return InfluenceResponse.model_validate_json(r.content)


def ranked(hits: Any) -> dict[str, float]:
    return {h.id: h.score for h in hits}


def agree(a: dict[str, float], b: dict[str, float], rtol: float = 1e-3) -> None:
    """The same examples with the same scores; where two scores are closer than the tolerance, either may come first or last."""
    scale = max(abs(v) for v in b.values())
    for i in set(a) & set(b):
        assert abs(a[i] - b[i]) <= rtol * scale, i
    edge = min(abs(v) for v in b.values())
    for i in set(a) ^ set(b):
        assert abs(abs((a | b)[i]) - edge) <= 2 * rtol * scale, i


def test_http_answers_are_the_engines(serving: Serving, pristine_store: Path) -> None:
    engine = QueryEngine.open(pristine_store)
    (alone,) = engine.answer([QuerySpec((QueryInput(**MONGOLIA),), top_k=5, tokens=True)])

    async def main() -> None:
        async with serving(pristine_store) as client:
            answer = await ask(client, MONGOLIA, top_k=5, tokens=True)
            result, expected = answer.results[0], alone.answers[0]
            assert answer.method == "exhaustive" and answer.n_rows == answer.n_allowed == 120 and answer.generation == alone.generation
            for got, wanted in ((result.proponents, expected.proponents), (result.opponents, expected.opponents)):
                assert got and wanted and [h.id for h in got] == [h.id for h in wanted]
                np.testing.assert_allclose([h.score for h in got], [h.score for h in wanted], rtol=1e-4)
                for h in got:
                    assert h.query_tokens and sum(h.query_tokens[0]) == pytest.approx(h.score, rel=1e-4) and len(h.query_tokens[0]) == result.n_tokens
                    assert h.text.endswith(f"({h.id.removeprefix('row-')})") and h.metadata["year"] == 1900 + int(h.id.removeprefix("row-"))
            assert result.inputs[0].loss == pytest.approx(expected.inputs[0].loss, rel=1e-4) and 0 < (result.coverage or 0) <= 1
            assert (
                result.inputs[0].tokens
                and "".join(t.text for t in result.inputs[0].tokens) == result.inputs[0].text == "The capital of Mongolia is Ulaanbaatar."
            )
            assert {"prepare", "queue", "sketch", "search", "total"} <= set(answer.timing_ms)

    asyncio.run(main())


def test_every_kind_of_query_and_option(serving: Serving, pristine_store: Path) -> None:
    async def main() -> None:
        async with serving(pristine_store) as client:
            text = await ask(client, {"text": "Paris is the capital city of France."}, top_k=3, score="cosine", direction="proponents")
            assert text.results[0].opponents is None and text.results[0].proponents and all(-1 <= h.score <= 1 for h in text.results[0].proponents)
            chat = await ask(client, {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Paris"}]})
            assert 0 < chat.results[0].inputs[0].n_targets < chat.results[0].n_tokens
            ids = await ask(client, {"input_ids": [5, 6, 7, 8]}, {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]})
            assert [r.inputs[0].n_targets for r in ids.results] == [3, 2]
            written = await ask(client, {"prompt": "The capital of", "generate": {"max_new_tokens": 4}})
            assert written.results[0].inputs[0].generated is not None
            one, two, both = [
                await ask(client, *q, top_k=120, aggregate="sum", direction="proponents")
                for q in ([MONGOLIA], [{"text": "a fact"}], [MONGOLIA, {"text": "a fact"}])
            ]
            a, b, total = (ranked(x.results[0].proponents) for x in (one, two, both))
            assert len(both.results) == 1 and both.results[0].query is None and len(both.results[0].inputs) == 2
            for i, score in total.items():
                assert score == pytest.approx(a[i] + b[i], abs=1e-3 * max(map(abs, a.values())))
            against = await ask(client, MONGOLIA, contrast=[{"text": "a fact"}], top_k=120, direction="proponents")
            for i, score in ranked(against.results[0].proponents).items():
                assert score == pytest.approx(a[i] - b[i], abs=1e-3 * max(map(abs, a.values())))
            only = await ask(
                client, MONGOLIA, top_k=120, direction="proponents", filter={"and": [{"field": "kind", "in": ["fact"]}, {"field": "year", "gte": 1950}]}
            )
            assert only.n_allowed == len([i for i in range(50, 120) if i % 3 == 0]) == len(only.results[0].proponents or [])
            assert all(h.metadata["kind"] == "fact" and h.metadata["year"] >= 1950 for h in only.results[0].proponents or [])
            by_id = await ask(client, MONGOLIA, filter={"field": "id", "eq": "row-7"}, direction="proponents")
            assert [h.id for h in by_id.results[0].proponents or []] == ["row-7"]
            few = await ask(client, MONGOLIA, candidates=120, top_k=5)
            assert few.method == "candidates"
            agree(ranked(few.results[0].proponents), ranked((await ask(client, MONGOLIA, top_k=5)).results[0].proponents))

    asyncio.run(main())


def test_rescoring_over_http(serving: Serving, pristine_store: Path) -> None:
    async def main() -> None:
        async with serving(pristine_store) as client:
            assert (await client.get("/v1/info")).json()["rescore"] is True
            result = (await ask(client, MONGOLIA, rescore="gradients", rescore_n=6, top_k=4)).results[0]
            for hits, sign in ((result.proponents, 1), (result.opponents, -1)):
                assert hits and len(hits) == 4 and [h.rank for h in hits] == [1, 2, 3, 4]
                values = [sign * (h.rescored or 0.0) for h in hits]
                assert values == sorted(values, reverse=True)
                for h in hits:
                    assert h.tokens and sum(t.weight for t in h.tokens) == pytest.approx(h.rescored, rel=1e-3, abs=1e-3 * abs(values[0]))
                    assert "".join(t.text for t in h.tokens).startswith(h.text[:10])

    asyncio.run(main())


def test_refusals_name_what_is_wrong(serving: Serving, pristine_store: Path) -> None:
    async def main() -> None:
        async with serving(pristine_store, max_query_tokens=30) as client:
            for body, field, words in (
                ({"queries": [{"text": "word " * 60}]}, "queries.0", "at most 30"),
                ({"queries": [{"input_ids": [1, 2, 320]}]}, "queries.0", "outside 0 to 319"),
                ({"queries": [{"text": "a"}]}, "queries.0", "target"),
                ({"queries": [MONGOLIA], "filter": {"field": "colour", "eq": 1}}, "filter", "colour"),
                ({"queries": [{"prompt": "a", "completion": "b"}, {"text": "a b c", "label": 1}]}, "queries.1", "label"),
            ):
                r = await client.post("/v1/influence", json=body)
                problem = r.json()
                assert r.status_code == 422 and words in problem["detail"], problem
                assert str(problem.get("field", "")).startswith(field), problem
            cut = await ask(client, {"text": "word " * 60}, truncation="left")
            assert cut.results[0].truncated and cut.results[0].n_tokens == 30 and any("truncated" in w for w in cut.results[0].warnings)

    asyncio.run(main())


def test_examples_and_neighbours(serving: Serving, pristine_store: Path) -> None:
    async def main() -> None:
        async with serving(pristine_store) as client:
            found = (await client.get("/v1/examples/row-30?neighbours=5")).json()
            assert found["text"].endswith("(30)") and found["metadata"] == {"kind": "fact", "year": 1930} and found["excluded"] is None
            scores = [n["score"] for n in found["neighbours"]]
            assert len(scores) == 5 and scores == sorted(scores, reverse=True) and all(-1 <= s <= 1 for s in scores)
            assert "row-30" not in {n["id"] for n in found["neighbours"]}
            listed = (await client.get("/v1/examples?order=self_influence&limit=120")).json()["examples"]
            values = [e["self_influence"] for e in listed]
            assert len(values) == 120 and values == sorted(values, reverse=True) and values[-1] > 0
            norms = Store.open(pristine_store).column("norm_sq")
            assert values[0] == pytest.approx(float(norms.max()))
            assert (await client.get("/v1/examples/row-999")).status_code == 404

    asyncio.run(main())


def test_concurrent_answers_equal_those_computed_alone(serving: Serving, pristine_store: Path, texts: tuple[str, ...]) -> None:
    queries = [{"text": " ".join(t.split()[: 2 + (i * 3) % 7])} for i, t in enumerate(texts * 4)]
    engine = QueryEngine.open(pristine_store)
    alone = [engine.answer([QuerySpec((QueryInput(**q),), top_k=10)])[0].answers[0] for q in queries]

    async def main() -> None:
        async with serving(pristine_store) as client:
            answers = await asyncio.gather(*(ask(client, q) for q in queries))
            for q, answer, expected in zip(queries, answers, alone, strict=True):
                assert answer.results[0].inputs[0].text == q["text"]
                agree(ranked(answer.results[0].proponents), ranked(expected.proponents))
                agree(ranked(answer.results[0].opponents), ranked(expected.opponents))
            metrics = (await client.get("/metrics")).text
            batches = float(next(line.split()[1] for line in metrics.splitlines() if line.startswith("eogp_batch_requests_count")))
            assert batches < len(queries), "nothing was batched"

    asyncio.run(main())


def test_a_new_generation_is_served_whole(serving: Serving, own_store: Path, tiny_model_folder: Path, texts: tuple[str, ...], tmp_path: Path) -> None:
    data = tmp_path / "more.jsonl"
    data.write_text("".join(json.dumps({"id": f"new-{i}", "text": f"{t} again", "kind": "fact", "year": 2000}) + "\n" for i, t in enumerate(texts)))

    async def main() -> None:
        async with serving(own_store) as client:
            before = await ask(client, MONGOLIA, top_k=200)
            append(own_store, AppendSettings(data=[str(data)]))
            assert (await ask(client, MONGOLIA)).generation == before.generation  # not before it is told
            reloaded = (await client.post("/v1/reload")).json()
            assert reloaded["changed"] and reloaded["generation"] != before.generation
            after = await ask(client, MONGOLIA, top_k=200)
            assert after.generation == reloaded["generation"] and after.n_rows == 130
            assert len([i for i in ranked(after.results[0].proponents) if i.startswith("new-")]) == 10
            delete(own_store, ids=["new-1"])
            assert (await client.post("/v1/reload")).json()["changed"]
            last = await ask(client, MONGOLIA, top_k=200)
            assert last.n_allowed == 129 and "new-1" not in ranked(last.results[0].proponents)
            assert (await client.get("/v1/examples/new-1")).status_code == 404
            (own_store / "CURRENT").write_text("garbage")
            r = await client.post("/v1/reload")
            assert r.status_code == 409 and str(own_store) not in r.text
            assert (await ask(client, MONGOLIA)).generation == last.generation

    asyncio.run(main())


def test_memory_mapped_files_survive_the_stores_removal(serving: Serving, own_store: Path) -> None:
    async def main() -> None:
        async with serving(own_store) as client:
            before = await ask(client, MONGOLIA, top_k=5)
            shutil.rmtree(own_store)
            after = await ask(client, MONGOLIA, top_k=5)
            assert ranked(before.results[0].proponents) == ranked(after.results[0].proponents)
            assert (await client.post("/v1/reload")).status_code == 409

    asyncio.run(main())


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["eogp", *arguments])
    with pytest.raises(SystemExit) as e:
        cli.main()
    out = capsys.readouterr()
    return int(e.value.code or 0), out.out, out.err


def damage(store: Path, how: str) -> None:
    if how == "half-copied":
        next(store.glob("segments/*/codes.faiss")).write_bytes(b"")
    elif how == "segment missing":
        shutil.rmtree(next(store.glob("segments/*")))
    elif how == "no CURRENT":
        (store / "CURRENT").unlink()
    elif how == "manifest cut":
        path = next(store.glob("generations/*/manifest.json"))
        path.write_bytes(path.read_bytes()[:100])
    elif how == "empty folder":
        shutil.rmtree(store)
        store.mkdir()
    elif how == "a file":
        shutil.rmtree(store)
        store.write_text("hello")
    elif how == "missing":
        shutil.rmtree(store)


@pytest.mark.parametrize("how", ["half-copied", "segment missing", "no CURRENT", "manifest cut", "empty folder", "a file", "missing"])
@pytest.mark.parametrize("command", ["serve", "query"])
def test_a_broken_store_is_refused_in_one_sentence(
    own_store: Path, how: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(own_store, how)
    flags = ["--port", "0"] if command == "serve" else ["--text", "a b c"]
    code, _, err = run(monkeypatch, capsys, command, str(own_store), *flags)
    lines = [line for line in err.strip().splitlines() if line.startswith("eogp:")]
    assert code == 2 and len(lines) == 1 and "Traceback" not in err, err


def test_another_model_is_refused(
    own_store: Path, tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    GPT2LMHeadModel(GPT2Config(vocab_size=320, n_positions=64, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)).save_pretrained(
        tmp_path / "other"
    )
    for name in tiny_model_folder.glob("tokenizer*"):
        shutil.copy(name, tmp_path / "other")
    code, _, err = run(monkeypatch, capsys, "serve", str(own_store), "--model", str(tmp_path / "other"), "--port", "0")
    assert code == 2 and "other" in err and str(own_store) in err and "Traceback" not in err


def test_query_prints_tables_or_json(pristine_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "The capital of Mongolia is", "--completion", " Ulaanbaatar.", "--top-k", "3"]
    code, out, _ = run(monkeypatch, capsys, "query", str(pristine_store), *flags)
    assert code == 0 and "proponents" in out and "opponents" in out and "row-" in out and "kind=" in out
    code, out, _ = run(monkeypatch, capsys, "query", str(pristine_store), *flags, "--output", "json", "--filter", '{"field": "kind", "eq": "fact"}')
    answer = InfluenceResponse.model_validate_json(out)
    assert code == 0 and {h.metadata["kind"] for h in answer.results[0].proponents or []} == {"fact"}
    for wrong, sentence in (
        (["--filter", "{"], "--filter: not JSON"),
        (["--messages", "[]"], "--messages: "),
        (["--filter", '{"field": "colour", "eq": 1}'], "colour"),
    ):
        code, _, err = run(monkeypatch, capsys, "query", str(pristine_store), *flags, *wrong)
        assert code == 2 and sentence in err and "Traceback" not in err
    code, _, err = run(monkeypatch, capsys, "query", str(pristine_store))
    assert code == 2 and "ask something" in err


def test_a_process_serves_drains_and_ends_with_0(
    pristine_store: Path, launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = launch(pristine_store, "--drain-seconds", "0.5")
    port = served.url.rsplit(":", 1)[1]
    code, _, err = run(monkeypatch, capsys, "serve", str(pristine_store), "--port", port)
    assert code == 2 and "address already in use" in err and "Traceback" not in err

    statuses: list[int] = []
    stop = threading.Event()

    def load() -> None:
        with httpx.Client(base_url=served.url, timeout=30) as client:
            while not stop.is_set():
                try:
                    statuses.append(client.post("/v1/influence", json={"queries": [MONGOLIA]}).status_code)
                except httpx.ConnectError:
                    return

    with ThreadPoolExecutor(4) as pool, httpx.Client(base_url=served.url) as probe:
        futures = [pool.submit(load) for _ in range(4)]
        time.sleep(0.5)
        served.process.terminate()
        time.sleep(0.2)
        assert probe.get("/readyz").status_code == 503  # dropped first, while requests are still answered
        assert probe.get("/healthz").status_code == 200
        assert served.process.wait(90) == 0
        stop.set()
        for f in futures:
            try:
                f.result()
            except (httpx.RemoteProtocolError, httpx.ReadError) as e:  # an idle connection that was closed between two requests, or just as one was sent
                assert "without sending" in str(e) or "reset by peer" in str(e)
    assert len(statuses) >= 4 and set(statuses) == {200}
    log = [json.loads(line) for line in served.log.read_text().splitlines() if line.startswith("{")]
    assert any(line["event"] == "draining" for line in log) and not any(line["level"] == "error" for line in log)


@pytest.mark.parametrize("name", ["codes.faiss", "scales.npy", "rows.arrow"])
def test_a_flipped_bit_is_found_while_serving(own_store: Path, name: str) -> None:
    path = own_store / "segments" / "000001" / name
    settings = ServeSettings(reload_seconds=0)
    backend = EngineBackend.open(own_store, settings)
    slices: list[int] = []
    assert backend.damage(slices.append) == [] and sum(slices) == sum(e.size for e in backend.engine.store.manifest.files.values())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").replace(path)
    assert backend.damage(slices.append) == [(f"segments/000001/{name}", "its content differs from its hash in the manifest")]


def test_a_generation_that_was_compacted_away_is_not_damaged(own_store: Path) -> None:
    backend = EngineBackend.open(own_store, ServeSettings(reload_seconds=0))
    delete(own_store, ids=["row-3"])
    compact(own_store)
    assert backend.damage(lambda n: None) == []
