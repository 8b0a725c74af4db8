"""Chats, completions, tokens and a classifier from end to end, and several inputs at once."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from engine.store import Store
from indexer.index import index
from indexer.settings import IndexSettings

from .conftest import corpus, write_jsonl  # type: ignore[import-not-found]  # a fixture module, resolved by pytest

Make = Callable[..., IndexSettings]


def test_chats(tmp_path: Path, index_settings: Make) -> None:
    chats = [{"messages": [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"It is {i * 7}."}]} for i in range(24)]
    index(tmp_path / "store", index_settings(write_jsonl(tmp_path / "d.jsonl", chats), chat_fallback="roles"))
    store = Store.open(tmp_path / "store")
    assert store.data_settings().chat_fallback == "roles" and store.data_settings().kind == "messages"
    for row in store.rows(range(24)):
        assert row.kind == "messages" and 0 < row.n_tokens == row.target_mask.sum() < len(row.input_ids)
        assert "user: What is" in row.text and row.loss > 0


def test_several_files_of_several_formats_are_one_data_set(tmp_path: Path, index_settings: Make) -> None:
    rows = [{"prompt": f"Number {i} times seven is", "completion": f" {i * 7}", "i": i} for i in range(36)]
    write_jsonl(tmp_path / "a.jsonl", rows[:12])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows[12:24]).encode()))
    (tmp_path / "c.json").write_text(json.dumps(rows[24:]))
    names = [f"{tmp_path}/a*.jsonl", f"{tmp_path}/b.jsonl.gz", f"{tmp_path}/c.json"]
    index(tmp_path / "store", index_settings(names))
    store = Store.open(tmp_path / "store")
    found = store.rows(range(36))
    assert [r.metadata["i"] for r in found] == list(range(36)) and {r.kind for r in found} == {"completion"}
    assert [Path(found[i].source).name for i in (0, 12, 35)] == ["a.jsonl", "b.jsonl.gz", "c.json"] and found[35].line == 12
    assert [d.size for d in store.manifest.data] == [Path(n.replace("*", "")).stat().st_size for n in names]


def test_a_classifier(tmp_path: Path, index_settings: Make, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 320, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
    names = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}, "max_position_embeddings": 64, "pad_token_id": 0}
    BertForSequenceClassification(BertConfig(**shape, **names)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows: list[dict[str, Any]] = [{"text": r["text"], "label": ("bad", "good")[i % 2], "number": i} for i, r in enumerate(corpus(32))]
    rows[4]["label"], rows[5]["label"] = 2, 1
    report = index(tmp_path / "store", index_settings(write_jsonl(tmp_path / "d.jsonl", rows), model=str(tmp_path / "model")))
    assert report["first_bad_rows"] == [{"file": str(tmp_path / "d.jsonl"), "line": 5, "reason": "field 'label' is outside the model's 2 classes"}]
    store = Store.open(tmp_path / "store", verify=True)
    found = store.rows(range(31))
    assert store.manifest.model.task == "sequence-classification" and {r.kind for r in found} == {"classification"}
    assert [r.labels for r in found] == [i % 2 for i in range(32) if i != 4] and all(r.n_tokens == 1 for r in found)
    assert not store.excluded.any() and (store.column("loss") > 0).all()


@pytest.mark.parametrize("method", ["eogp-r", "paper"])
def test_other_sketches(tmp_path: Path, index_settings: Make, method: str) -> None:
    changes = {"eogp-r": {"method": "eogp-r", "blocks": "model", "k": 40}, "paper": {"method": "eogp", "blocks": "module", "k": 8}}[method]
    index(tmp_path / "store", index_settings(write_jsonl(tmp_path / "d.jsonl", corpus(40)), **changes))
    store = Store.open(tmp_path / "store", verify=True)
    assert store.layout.k == ((40,) if method == "eogp-r" else (8,) * 8)
    assert (store.manifest.coverage_threshold is None) == (method == "eogp-r")
    assert store.recall is not None and store.recall[-1] == {"candidates": 40, "recall": 1.0}
