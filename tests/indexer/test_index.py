"""`eogp index` end to end on a tiny model: what a store holds, that it reproduces, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from engine.cli import build
from engine.data.reading import Row
from engine.data.settings import DataSettings
from engine.data.tokens import to_example
from engine.errors import DataError, LimitError, SettingError, StoreError
from engine.model import load_model
from engine.settings import ModelSettings
from engine.sketcher import Sketcher
from engine.store import Store
from indexer.index import index
from indexer.inspect_store import settings_yaml
from indexer.reporter import Reporter
from indexer.settings import OPERATIONAL, IndexSettings

from .conftest import corpus, write_jsonl  # type: ignore[import-not-found]  # a fixture module, resolved by pytest

Make = Callable[..., IndexSettings]


def test_a_store_holds_what_was_indexed(built: Path) -> None:
    store = Store.open(built, verify=True)
    assert store.n_rows == 80 and not store.excluded.any()
    assert [s.n for s in store.segments] == [16] * 5
    assert store.manifest.counts["rows"] == 80 and store.manifest.counts["kinds"] == {"text": 80}
    for row, given in zip(store.rows(range(80)), corpus(80), strict=True):
        assert (row.text, row.id, row.line) == (given["text"], str(row.position), row.position + 1)
        assert row.metadata == {"kind": given["kind"], "number": given["number"]}
        assert row.n_tokens == row.target_mask.sum() == len(row.input_ids) - 1
        assert row.loss > 0 and row.norm_sq > 0
    assert store.manifest.sketch.bytes_per_example == store.layout.payload_bytes <= 12
    assert store.recall is not None and store.recall[-1]["recall"] == 1.0
    assert store.manifest.coverage_threshold is not None and 0 < store.manifest.coverage_threshold < 1


def test_stored_bits_are_those_of_the_stored_sketcher(built: Path, tiny_model_folder: Path) -> None:
    store = Store.open(built)
    loaded = load_model(ModelSettings(model=str(tiny_model_folder)))
    sketcher = Sketcher.load(store.sketch_dir, loaded)
    examples = [to_example(Row("", 0, {"text": r.text}), loaded, DataSettings(), training=True) for r in store.rows(range(16))]
    query = sketcher.query(examples)
    codes, scales = sketcher.projection.encode(query.y)
    far = np.abs(query.y).min(axis=1) > 1e-3 * np.abs(query.y).max()
    assert far.sum() >= 4
    np.testing.assert_array_equal(codes[far], store.segments[0].codes[far])
    np.testing.assert_allclose(scales.astype(np.float32), store.segments[0].scales.astype(np.float32), rtol=2e-3)


def test_the_manifests_settings_reproduce_the_run(built: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(settings_yaml(built), encoding="utf-8")
    settings = IndexSettings.resolve({}, config)
    index(tmp_path / "again", settings, Reporter(log_json=True))
    assert same_files(built, tmp_path / "again")


def same_files(a: Path, b: Path) -> bool:
    """Whether two stores agree byte for byte in all that a generation names, and in the manifests."""
    first, second = Store.open(a, verify=True), Store.open(b, verify=True)
    assert first.generation == second.generation
    assert first.manifest.model_dump() == second.manifest.model_dump()
    return True


def test_flags_environment_and_file_agree(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = yaml.safe_load(settings_yaml(built))
    config = tmp_path / "run.toml"
    config.write_text(f'shard_rows = 7\nseed = 5\ndata = ["{tmp_path}/x.jsonl"]\n', encoding="utf-8")
    monkeypatch.setenv("EOGP_SEED", "6")
    resolved = IndexSettings.resolve({"k": 9}, config)
    assert (resolved.shard_rows, resolved.seed, resolved.k) == (7, 6, 9)
    assert set(settings) == set(IndexSettings.model_fields) - set(OPERATIONAL)


def test_bad_rows_are_reported_with_their_lines(tmp_path: Path, index_settings: Make) -> None:
    rows = corpus(40)
    rows[3] = {"text": 5}
    rows[20] = {"text": ""}
    report = index(tmp_path / "store", index_settings(write_jsonl(tmp_path / "d.jsonl", rows)))
    assert report["counts"]["rows"] == 38 and report["counts"]["bad"] == 2
    listed = [json.loads(line) for line in (tmp_path / "store/reports/000001/bad_rows.jsonl").read_text().splitlines()]
    assert [(b["line"], b["reason"]) for b in listed] == [(4, "field 'text' is a number, not a string"), (21, "field 'text' is empty")]
    store = Store.open(tmp_path / "store")
    assert [r.id for r in store.rows([2, 3, 37])] == ["2", "3", "37"]
    assert [r.line for r in store.rows([2, 3, 37])] == [3, 5, 40]


def test_on_error_fail_names_file_and_line(tmp_path: Path, index_settings: Make) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", [*corpus(20), {"text": None}])
    with pytest.raises(DataError, match=r"d\.jsonl:21: field 'text' is null"):
        index(tmp_path / "store", index_settings(data, on_error="fail"))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(("content", "reason"), [("", "it is empty"), ('{"x": 1}\n[]\n', r"the first bad row is .*d\.jsonl:1: none of the fields")])
def test_a_file_without_a_usable_row_leaves_nothing(tmp_path: Path, index_settings: Make, content: str, reason: str) -> None:
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(DataError, match=reason):
        index(tmp_path / "store", index_settings(tmp_path / "d.jsonl"))
    assert not (tmp_path / "store").exists()


def test_a_finished_store_is_not_made_again(built: Path, tmp_path: Path, index_settings: Make) -> None:
    store = tmp_path / "store"
    shutil.copytree(built, store)
    data = built.parent / "data.jsonl"
    before = (store / "segments/000000/codes.faiss").stat().st_mtime_ns
    assert index(store, index_settings(data))["generation"] == "000001"
    assert (store / "segments/000000/codes.faiss").stat().st_mtime_ns == before
    with pytest.raises(StoreError, match="made with another seed"):
        index(store, index_settings(data, seed=1))


def test_the_command_prints_plan_and_report(tmp_path: Path, tiny_model_folder: Path) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", corpus(30))
    small = ["--shard-rows", "16", "--bytes-per-example", "8", "--m", "16"]
    ran = CliRunner().invoke(build(), ["index", str(tmp_path / "s"), "--model", str(tiny_model_folder), "--data", str(data), *small])
    assert ran.exit_code == 0, ran.output
    for word in ("30 examples", "tracked 8 modules", "8 bytes per example", "memory", "disk", "of it for fitting the projection", "generation 000001, 30 rows"):
        assert word in ran.output
    missing = CliRunner().invoke(build(), ["index", str(tmp_path / "t"), "--model", str(tiny_model_folder), "--data", str(tmp_path / "none.jsonl")])
    assert isinstance(missing.exception, DataError) and not (tmp_path / "t").exists()


def test_events_are_json_lines(tmp_path: Path, index_settings: Make, capfd: pytest.CaptureFixture[str]) -> None:
    index(tmp_path / "store", index_settings(write_jsonl(tmp_path / "d.jsonl", corpus(20))))
    events = [json.loads(line) for line in capfd.readouterr().err.splitlines()]  # nothing else is written there
    stages = [e["stage"] for e in events if e["event"] == "stage" and e["state"] == "finished"]
    assert stages == ["prepare", "curvature", "coordinates", "projection", "sketch", "finish"]
    assert events[-1]["event"] == "report" and events[-1]["counts"]["rows"] == 20


def test_a_store_answers_without_a_server(built: Path, tiny_model_folder: Path) -> None:
    import engine

    store = engine.Store.open(built)
    text = store.rows([5])[0].text
    answer = store.query(text=text, top_k=3, score="cosine", direction="proponents")
    assert answer.proponents is not None and answer.opponents is None and len(answer.proponents) == 3
    assert answer.proponents[0].text == text and answer.proponents[0].score > 0.5
    again = store.query(prompt="The Peru of", completion=" number", model=str(tiny_model_folder))
    assert again.proponents and again.proponents[0].score >= again.proponents[-1].score
    with pytest.raises(SettingError, match="no field 'top'"):
        store.query(text=text, top=3)


def test_what_does_not_fit_into_memory_is_refused_before_any_work(tmp_path: Path, index_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.plan.free_memory", lambda device: 10_000)
    with pytest.raises(LimitError, match=r"fitting needs about .* of memory on cpu, and 10\.0 KB are free; lower --fit-memory"):
        index(tmp_path / "store", index_settings(write_jsonl(tmp_path / "d.jsonl", corpus(40))))
    assert not (tmp_path / "store").exists()
