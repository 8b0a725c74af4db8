"""A store of every format version that was ever written, kept beside this file: it opens with its answers, or is refused by name."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from engine.errors import StoreError
from engine.query import QueryEngine, QueryInput, QuerySpec
from engine.settings import ModelSettings
from engine.store import Store
from engine.store.manifest import FORMAT_VERSION, MANIFEST, MANIFEST_HASH
from engine.store.verify import faults
from indexer.append import append
from indexer.delete import delete
from indexer.index import index
from indexer.settings import AppendSettings, IndexSettings
from tests.conftest import TEXTS, make_tokenizer

HERE = Path(__file__).parent
KEPT = sorted(HERE.glob("format-*"))
QUESTION = QueryInput(prompt="The capital of France is", completion=" Paris.")


def write_rows(path: Path, numbers: range) -> str:
    path.write_text("".join(json.dumps({"id": f"row-{i}", "text": f"{TEXTS[i % len(TEXTS)]} ({i})", "even": i % 2 == 0}) + "\n" for i in numbers))
    return str(path)


def answer(store: Path, model: Path) -> dict[str, float]:
    """Every row's score."""
    (found,) = QueryEngine.open(store, ModelSettings(model=str(model))).answer([QuerySpec((QUESTION,), top_k=100)])
    return {hit.id: hit.score for hit in (*(found.answers[0].proponents or ()), *(found.answers[0].opponents or ()))}


def make(folder: Path) -> None:
    """A model, a store of two segments and one deletion, and its answer."""
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=320, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(shape).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    settings = IndexSettings(model=str(folder / "model"), data=[write_rows(folder / "data.jsonl", range(40))], bytes_per_example=6, m=24, threads=1)
    index(folder / "store", settings)
    append(folder / "store", AppendSettings(data=[write_rows(folder / "more.jsonl", range(40, 50))]))
    delete(folder / "store", ids=["row-3"])
    (folder / "answer.json").write_text(json.dumps(answer(folder / "store", folder / "model"), indent=0) + "\n")


def test_this_versions_format_is_kept(tmp_path: Path) -> None:
    """A new format version needs a store of its own: this test makes it and asks for it to be committed."""
    kept = HERE / f"format-{FORMAT_VERSION}"
    if not kept.exists():
        (tmp_path / "eogp").mkdir()
        make(tmp_path / "eogp")
        for manifest in (tmp_path / "eogp/store/generations").glob(f"*/{MANIFEST}"):  # says where it was made; nobody else has that folder
            content = manifest.read_bytes().replace(str(tmp_path).encode(), b"/made")
            manifest.write_bytes(content)
            (manifest.parent / MANIFEST_HASH).write_text(hashlib.sha256(content).hexdigest() + "\n")
        shutil.copytree(tmp_path / "eogp", kept)
        pytest.fail(f"{kept.name} was written: commit it, so that later versions are tested with it")
    assert {p.name for p in KEPT} == {f"format-{n}" for n in range(1, FORMAT_VERSION + 1)}


@pytest.mark.parametrize("kept", KEPT, ids=lambda p: p.name)
def test_kept_store_opens_with_its_answers_or_is_refused_by_name(kept: Path, tmp_path: Path) -> None:
    number = int(kept.name.removeprefix("format-"))
    store = Path(shutil.copytree(kept / "store", tmp_path / "store"))
    if number != FORMAT_VERSION:
        with pytest.raises(StoreError, match=f"format version {number}; this program reads version {FORMAT_VERSION}"):
            Store.open(store)
        return
    manifest = Store.open(store).manifest
    assert manifest.format_version == number and faults(store, manifest) == []
    wanted = json.loads((kept / "answer.json").read_text())
    found = answer(store, kept / "model")
    largest = max(map(abs, wanted.values()))
    assert found.keys() == wanted.keys() and len(found) == 49 and "row-3" not in found
    assert all(abs(found[i] - wanted[i]) <= 1e-3 * largest for i in wanted)
    append(store, AppendSettings(model=str(kept / "model"), data=[write_rows(tmp_path / "new.jsonl", range(50, 55))]))
    assert answer(store, kept / "model").keys() == found.keys() | {f"row-{i}" for i in range(50, 55)}
