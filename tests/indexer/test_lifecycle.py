"""A store after it was built: append, delete, compact, verify, inspect, export."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from engine.cli import build
from engine.errors import DataError, ModelError, SettingError, StoreError
from engine.search import Searcher, SearchRequest
from engine.store import Store
from indexer.append import append
from indexer.compact import compact
from indexer.delete import delete
from indexer.export import export
from indexer.index import index
from indexer.inspect_store import inspect_store
from indexer.settings import AppendSettings, IndexSettings
from indexer.verify import require_whole, verify

from .conftest import corpus, write_jsonl  # type: ignore[import-not-found]  # a fixture module, resolved by pytest

Make = Callable[..., IndexSettings]
MakeStore = Callable[..., Path]
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "store"))


def append_settings(data: Path, **changes: Any) -> AppendSettings:
    return AppendSettings(**{"data": [str(data)], "shard_rows": 16, "log_json": True, "threads": 1, **changes})


def answers(path: Path, seed: int = 0) -> list[tuple[str, float]]:
    """Ids and scores of the best and worst rows for some random queries."""
    store = Store.open(path)
    y = np.random.default_rng(seed).standard_normal((4, store.layout.total_k)).astype(np.float32)
    searcher = Searcher(store.segments, store.layout, store.c, excluded=store.excluded)
    found: list[tuple[str, float]] = []
    for score in ("influence", "cosine"):
        result = searcher.search(SearchRequest(y, 20, score))
        for ranking in (result.proponents, result.opponents):
            assert ranking is not None
            found += [(r.id, float(s)) for q in range(4) for r, s in zip(store.rows(ranking.positions[q]), ranking.scores[q], strict=True)]
    return found


# --- append


def test_appended_rows_equal_rows_indexed_at_once(built: Path, store: Path, tmp_path: Path, tiny_model_folder: Path) -> None:
    data = write_jsonl(tmp_path / "more.jsonl", corpus(40))
    report = append(store, append_settings(data))
    new = Store.open(store, verify=True)
    assert (new.generation, new.n_rows, report["added"], new.manifest.counts["rows"]) == ("000002", 120, 40, 120)
    old = Store.open(built)
    for segment, again in zip(old.segments[:2], new.segments[5:7], strict=True):  # the same 32 rows under the same projection
        np.testing.assert_array_equal(segment.codes, again.codes)
        np.testing.assert_array_equal(segment.scales, again.scales)
    rows = new.rows(range(80, 120))
    assert [r.id for r in rows] == [str(i) for i in range(80, 120)]
    assert rows[0].source == str(data) and rows[39].line == 40
    assert report["drift"]["rows"] == 40 and 0 < report["drift"]["median_new"] < 1


def test_append_warns_of_rows_that_the_projection_does_not_span(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": chr(33 + i % 90) * (3 + i % 7) + "#%&" * 9} for i in range(30)]
    report = append(store, append_settings(write_jsonl(tmp_path / "odd.jsonl", rows)))
    assert report["drift"]["below_threshold"] > 0.5 and report["drift"]["median_new"] < report["drift"]["median_old"]
    assert "warning: drift" in capfd.readouterr().err


def test_append_refuses_another_model(store: Path, tmp_path: Path, tiny_model_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    other = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    with torch.no_grad():
        other.transformer.h[1].mlp.c_fc.weight.add_(1)
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny_model_folder).save_pretrained(tmp_path / "other")
    data = write_jsonl(tmp_path / "more.jsonl", corpus(4))
    with pytest.raises(ModelError, match=r"is not the model that .* was built with: tensor transformer\.h\.1\.mlp\.c_fc\.weight"):
        append(store, append_settings(data, model=str(tmp_path / "other")))


def test_ids_are_unique_over_appends(tmp_path: Path, index_settings: Make) -> None:
    rows = [{**r, "id": f"r{i}"} for i, r in enumerate(corpus(40))]
    index(tmp_path / "store", index_settings(write_jsonl(tmp_path / "d.jsonl", rows)))
    more = [{"id": "r40", "text": "The yen is"}, {"id": "r7", "text": "The yen is"}, {"id": "r40", "text": "The yen is"}]
    data = write_jsonl(tmp_path / "more.jsonl", more)
    with pytest.raises(DataError, match=r"more\.jsonl:2: its id is that of .*d\.jsonl:8 in the store"):
        append(tmp_path / "store", append_settings(data, on_error="fail"))
    report = append(tmp_path / "store", append_settings(data, restart=True))
    assert report["added"] == 1 and [b["line"] for b in report["first_bad_rows"]] == [2, 3]
    assert report["first_bad_rows"][1]["reason"].endswith("more.jsonl:1")
    delete(tmp_path / "store", ids=["r7"])
    assert append(tmp_path / "store", append_settings(write_jsonl(tmp_path / "again.jsonl", more[1:2])))["added"] == 1


APPENDED = {"shard_rows": 16, "log_json": True, "threads": 1}


@pytest.mark.parametrize("when", ["segments/000006", "generations/000002/manifest.json"])
def test_a_killed_append_goes_on(store: Path, tmp_path: Path, run_forked: Run, store_content: Callable[[Path], dict[str, bytes]], when: str) -> None:
    settings = {**APPENDED, "data": [str(write_jsonl(tmp_path / "more.jsonl", corpus(64, first=200)))]}
    whole = Path(shutil.copytree(store, tmp_path / "whole"))
    assert run_forked("append", whole, settings)["code"] == 0
    ran = run_forked("append", store, settings, signal=signal.SIGKILL, when=str(store / when))
    assert ran["code"] in (-signal.SIGKILL, 0), ran["log"]
    Store.open(store, verify=True)  # never half a generation
    if (store / "work").exists():
        ran = run_forked("append", store, settings)
        assert ran["code"] == 0, ran["log"]
    assert Store.open(store, verify=True).n_rows == 144
    assert store_content(store) == store_content(whole)


def test_other_writers_wait_for_an_unfinished_append(store: Path, tmp_path: Path, run_forked: Run) -> None:
    settings = {**APPENDED, "data": [str(write_jsonl(tmp_path / "more.jsonl", corpus(64, first=200)))]}
    ran = run_forked("append", store, settings, signal=signal.SIGTERM, when=str(store / "segments/000005"))
    assert ran["code"] == 143 and "run the same command again" in ran["log"]
    for other in (lambda: delete(store, ids=["1"]), lambda: compact(store)):
        with pytest.raises(StoreError, match="an interrupted `eogp append` is not finished"):
            other()
    assert Store.open(store).n_rows == 80
    ran = run_forked("append", store, settings)
    assert ran["code"] == 0, ran["log"]
    assert delete(store, ids=["1"])[1] == 1


# --- delete and compact


def test_deleted_rows_leave_answers_at_once_and_files_on_compaction(store: Path) -> None:
    before = Store.open(store)
    secret = before.rows([33])[0].text
    generation, n = delete(store, ids=["33", "2"], where={"field": "number", "gte": 70})
    assert (generation, n) == ("000002", 12)
    now = Store.open(store, verify=True)
    assert np.flatnonzero(now.excluded).tolist() == [2, 33, *range(70, 80)]
    assert delete(store, ids=[], where={"field": "number", "gte": 75}) == ("000002", 0)
    gone = {"2", "33", *map(str, range(70, 80))}
    expected = answers(store)
    assert not gone & {id for id, _ in expected}
    assert compact(store) == ("000003", 12, 1)
    after = Store.open(store, verify=True)
    assert after.n_rows == 68 and not after.excluded.any() and after.manifest.counts["rows"] == 68
    assert answers(store) == expected
    assert after.manifest.counts["tokens"] == sum(len(r.input_ids) for r in after.rows(range(68)))
    assert after.manifest.counts["targets"] == after.column("n_tokens").sum()
    unique = secret.encode()
    assert sum(r.text == secret for r in before.rows(range(80))) == 1
    assert not [p for p in store.rglob("*") if p.is_file() and unique in p.read_bytes()]
    assert [p.name for p in (store / "generations").iterdir()] == ["000003"] and len(list((store / "segments").iterdir())) == 1


def test_a_running_number_is_never_used_twice(store: Path, tmp_path: Path) -> None:
    delete(store, ids=["79"])
    compact(store)
    append(store, append_settings(write_jsonl(tmp_path / "more.jsonl", corpus(2))))
    assert [r.id for r in Store.open(store).rows([78, 79, 80])] == ["78", "80", "81"]


def test_compaction_merges_without_deletions_too(make_store: MakeStore) -> None:
    path = make_store(300, shard_rows=32, flagged=0.1)
    expected, flagged = answers(path), Store.open(path).excluded.copy()
    metadata = Store.open(path).metadata.to_pydict()
    assert compact(path, segment_rows=100)[1:] == (0, 4)
    now = Store.open(path, verify=True)
    assert answers(path) == expected and now.metadata.to_pydict() == metadata
    np.testing.assert_array_equal(now.excluded, flagged)
    assert compact(path, segment_rows=100)[1:] == (0, 4)


def test_a_reader_keeps_its_generation(store: Path) -> None:
    reader = Store.open(store)
    rows, codes = reader.rows(range(80)), [s.codes.copy() for s in reader.segments]
    delete(store, where={"field": "kind", "eq": "a"})
    compact(store)
    assert [r.text for r in reader.rows(range(80))] == [r.text for r in rows]
    for segment, expected in zip(reader.segments, codes, strict=True):
        np.testing.assert_array_equal(segment.codes, expected)
    assert Store.open(store).n_rows == 40


def test_readers_never_see_half_a_generation(make_store: MakeStore) -> None:
    path = make_store(240, shard_rows=40)
    done = threading.Event()
    seen: set[int] = set()
    faults: list[BaseException] = []

    def read() -> None:
        while not done.is_set():
            try:
                store = Store.open(path)
                rows = store.rows(range(store.n_rows))
                assert len({r.id for r in rows}) == store.n_rows == sum(s.n for s in store.segments)
                seen.add(store.n_rows - len(store.deleted))
            except BaseException as e:
                faults.append(e)
                return

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for year in range(1790, 1798):
        delete(path, where={"field": "year", "eq": year})
        compact(path, segment_rows=60)
    done.set()
    for reader in readers:
        reader.join()
    assert not faults, faults
    assert seen and Store.open(path, verify=True).n_rows == 240 - 8 - 8  # years repeat after 230 rows


def test_delete_names_what_is_wrong(store: Path) -> None:
    with pytest.raises(DataError, match="no row has the id 'nobody'"):
        delete(store, ids=["1", "nobody"])
    with pytest.raises(SettingError, match="nothing to delete"):
        delete(store)
    ran = CliRunner().invoke(build(), ["delete", str(store), "--where", "{"])
    assert isinstance(ran.exception, SettingError) and "not JSON" in str(ran.exception)
    ran = CliRunner().invoke(build(), ["delete", str(store), "--where", '{"field": "kind", "eq": "a"}'])
    assert ran.exit_code == 0 and "40 rows deleted" in ran.output
    ran = CliRunner().invoke(build(), ["compact", str(store)])
    assert ran.exit_code == 0 and "40 rows removed, 1 segments" in ran.output
    assert Store.open(store).n_rows == 40


def test_mixed_metadata_survives_compaction(tmp_path: Path, index_settings: Make) -> None:
    values = [1, 2.5, "x", True, [1, {"a": None}], {"deep": {"er": 1}}, 2**70, None]
    rows = [{**r, "v": values[i // 16 % 8] if i < 48 else values[i % 8], "w": i if i < 32 else float(i)} for i, r in enumerate(corpus(80))]
    path = tmp_path / "store"
    index(path, index_settings(write_jsonl(tmp_path / "d.jsonl", rows)))
    before = Store.open(path)
    kept, table = [r.metadata for r in before.rows(range(80))], before.metadata.to_pydict()
    for got, given in zip(kept, rows, strict=True):
        assert got == {k: v for k, v in given.items() if k != "text" and v is not None}
        assert type(got.get("v")) is type(given["v"])
    assert table["w"] == [float(i) for i in range(80)]
    compact(path)
    assert [r.metadata for r in Store.open(path).rows(range(80))] == kept
    assert Store.open(path).metadata.to_pydict() == table


# --- verify, inspect, export


def test_a_flipped_bit_in_every_kind_of_file_is_found_by_name(store: Path, tmp_path: Path) -> None:
    delete(store, ids=["1"])
    assert verify(store) == []
    manifest = Store.open(store).manifest
    kinds = {Path(name).name if not name.startswith("shared/full") else "full" + Path(name).suffix: name for name in manifest.files}
    assert {"codes.faiss", "scales.npy", "rows.arrow", "deleted.npy", "projection.npy", "projection.json", "full.safetensors"} <= set(kinds)
    rng = np.random.default_rng(0)
    for name in kinds.values():
        file = store / name
        whole = file.read_bytes()
        data = bytearray(whole)
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        file.write_bytes(data)
        assert [n for n, _ in verify(store)] == [name]
        file.write_bytes(whole)
    for name in ("CURRENT", "generations/000002/manifest.json", "generations/000002/manifest.sha256"):
        file = store / name
        whole = file.read_bytes()
        for at in range(min(len(whole), 20)):
            data = bytearray(whole)
            data[at] ^= 1 << rng.integers(8)
            file.write_bytes(data)
            if data.strip() != whole.strip():
                with pytest.raises(StoreError, match=r"CURRENT|manifest\.json"):
                    require_whole(store)
        file.write_bytes(whole)
    assert verify(store) == []


def test_verify_hashes_the_whole_model(store: Path, tmp_path: Path, tiny_model_folder: Path) -> None:
    ran = CliRunner().invoke(build(), ["verify", str(store), "--model", str(tiny_model_folder)])
    assert ran.exit_code == 0 and "the model is the one" in ran.output
    (store / "segments/000002/scales.npy").unlink()
    broken = CliRunner().invoke(build(), ["verify", str(store)])
    assert isinstance(broken.exception, StoreError) and "segments/000002/scales.npy is missing" in str(broken.exception)


def test_inspection(store: Path) -> None:
    delete(store, ids=["1"])
    found = inspect_store(store)
    assert (found["rows"], found["usable"], found["deleted"], found["segments"]) == (80, 79, 1, 5)
    assert found["metadata"] == {"kind": "large_string", "number": "int64"}
    assert json.loads(json.dumps(found)) == found
    assert found["mean_loss_per_token"] == pytest.approx(np.log(320), rel=0.1)  # an untrained model of 320 tokens


def test_export_can_be_scored_without_us(store: Path, tmp_path: Path) -> None:
    delete(store, ids=["5"])
    assert export(store, tmp_path / "out") == 79
    codes, scales = np.load(tmp_path / "out/codes.npy"), np.load(tmp_path / "out/scales.npy")
    rows = pq.read_table(tmp_path / "out/rows.parquet")
    layout = json.loads((tmp_path / "out/layout.json").read_text())["layout"]
    opened = Store.open(store)
    y = np.random.default_rng(1).standard_normal(opened.layout.total_k)
    signs = np.unpackbits(codes, axis=1, bitorder="little")
    score, byte, bit = np.zeros(79), 0, 0
    for b, k in enumerate(layout["k"]):
        score += scales[:, b] * ((2.0 * signs[:, 8 * byte : 8 * byte + k] - 1) @ y[bit : bit + k])
        byte, bit = byte + -(-k // 8), bit + k
    live = np.flatnonzero(~opened.excluded)
    expected = Searcher(opened.segments, opened.layout, opened.c).score(y[None].astype(np.float32), live)[0]
    np.testing.assert_allclose(score, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert rows.column("id").to_pylist() == [r.id for r in opened.rows(live)]
    with pytest.raises(SettingError, match="not empty"):
        export(store, tmp_path / "out")


def test_commands_that_need_no_model_load_no_torch(store: Path, tmp_path: Path) -> None:
    code = f"""if True:
        import sys
        from typer.testing import CliRunner
        from engine.cli import build
        commands = [["verify", {str(store)!r}], ["delete", {str(store)!r}, "--ids", "0"], ["inspect", "store", {str(store)!r}],
                    ["export", {str(store)!r}, {str(tmp_path / "out")!r}], ["compact", {str(store)!r}]]
        for command in commands:
            done = CliRunner().invoke(build(), command)
            assert done.exit_code == 0, (command, done.output, done.exception)
        sys.exit(", ".join({{"torch", "transformers", "datasets", "numba", "ray"}} & sys.modules.keys()) or 0)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
