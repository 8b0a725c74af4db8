"""Score matrices against the engine's parts and autograd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.pytorch_utils import Conv1D

from engine.errors import DataError, SettingError, StoreError
from engine.example import collate
from engine.modules import track
from engine.query import QueryEngine
from engine.signs import decode_signs
from indexer.evaluate.case import Case, open_case
from indexer.evaluate.scores import bm25, compute_scores, gradient_norms, proof_of
from indexer.evaluate.settings import EvaluateSettings

QUERIES: list[dict[str, Any]] = [{"text": "The carbon of number 7 is Peru", "kind": "a"}, {"text": "citizens and revenue indeed", "kind": "zz"}]


def settings_for(folder: Path, rows: list[dict[str, Any]] = QUERIES, **changes: Any) -> EvaluateSettings:
    path = folder / "queries.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return EvaluateSettings(queries=[str(path)], out=folder / "out", **changes)


@pytest.fixture(scope="module")
def case(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return open_case(QueryEngine.open(built), settings_for(tmp_path_factory.mktemp("queries")))


def test_the_rows_are_the_stored_ones(case: Case) -> None:
    assert len(case.examples) == 80 and [e.id for e in case.examples[:3]] == ["0", "1", "2"]
    assert [q.text for q in case.queries] == [q["text"] for q in QUERIES]
    assert case.examples[5].n_targets == len(case.examples[5]) - 1


def test_store_scores_are_equation_14(case: Case) -> None:
    found = compute_scores(case, ["store"])["store"]
    store = case.engine.store
    y = case.engine.sketcher.query(case.queries).y
    codes = np.concatenate([s.codes for s in store.segments])
    scales = np.concatenate([s.scales for s in store.segments]).astype(np.float64) * store.c
    signs = decode_signs(codes, store.layout).astype(np.float64)
    for q in range(2):
        for i in (0, 17, 79):
            expected = sum(scales[i, b] * float(y[q, store.layout.slice(b)] @ signs[i, store.layout.slice(b)]) for b in range(store.layout.n_blocks))
            assert found.scores[q, i] == pytest.approx(expected, rel=1e-4)
    assert found.bytes == store.layout.payload_bytes


def autograd(case: Case, index: int, queries: bool = False) -> dict[str, torch.Tensor]:
    """Weight gradients of the summed loss of one example, by autograd; (d_out, d_in) with the bias as the last column."""
    loaded = case.engine.loaded
    example = (case.queries if queries else case.examples)[index]
    batch = collate([example], [0], loaded.pad_id)
    model = loaded.model
    model.requires_grad_(True)
    model.zero_grad()
    logits = model(input_ids=batch.input_ids).logits[0, :-1]
    torch.nn.functional.cross_entropy(logits[batch.target_mask[0, 1:]], batch.input_ids[0, 1:][batch.target_mask[0, 1:]], reduction="sum").backward()
    grads = {}
    for m in track(loaded).tracked:
        weight = m.module.weight.grad
        weight = weight.T if isinstance(m.module, Conv1D) else weight
        grads[m.name] = (torch.cat([weight, m.module.bias.grad[:, None]], 1) if m.bias else weight).clone()
    model.zero_grad(set_to_none=True)
    model.requires_grad_(False)
    return grads


def test_gradient_rows_equal_autograd(case: Case) -> None:
    found = compute_scores(case, ["gradient-dot", "gradient-cosine"])
    asked = autograd(case, 0, queries=True)
    for i in (3, 40):
        own = autograd(case, i)
        dot = sum(float((asked[n] * own[n]).sum()) for n in own)
        norms = [sum(float(g.square().sum()) for g in side.values()) ** 0.5 for side in (asked, own)]
        assert found["gradient-dot"].scores[0, i] == pytest.approx(dot, rel=1e-3, abs=1e-3)
        assert found["gradient-cosine"].scores[0, i] == pytest.approx(dot / (norms[0] * norms[1]), rel=1e-3, abs=1e-5)


def test_gradient_norms_equal_autograd(case: Case) -> None:
    found = gradient_norms(case.engine.loaded, track(case.engine.loaded).tracked, case.examples[:6], 128)
    for i in range(6):
        assert found[i] == pytest.approx(sum(float(g.square().sum()) for g in autograd(case, i).values()) ** 0.5, rel=1e-4)


def test_ek_fac_is_the_dense_form(case: Case) -> None:
    found = compute_scores(case, ["ek-fac"])["ek-fac"]
    curvature = case.curvature()
    asked, own = autograd(case, 1, queries=True), autograd(case, 11)
    expected = 0.0
    for name, module in ((n, curvature.modules[n]) for n in curvature.modules):
        t_q, t_i = (module.q_s.T @ g[name] @ module.q_a for g in (asked, own))
        expected += float((t_q * t_i / (module.lam + module.damping)).sum())
    assert found.scores[1, 11] == pytest.approx(expected, rel=1e-3)
    assert found.bytes == 2 * sum(m.n_parameters for m in track(case.engine.loaded).tracked)


def test_bm25_prefers_shared_rare_words() -> None:
    texts = ["the yen of Japan", "the capital of Peru is Lima", "the capital of France"]
    found = bm25(texts, ["is Lima in Peru", "zebra"])
    assert found[0].argmax() == 1 and found[0, 0] == 0
    assert not found[1].any()
    k1, b, average = 1.5, 0.75, np.mean([4, 6, 4])
    idf = np.log(1 + (3 - 1 + 0.5) / (1 + 0.5))  # a word of one text of three
    expected = 3 * idf / (1 + k1 * (1 - b + b * 6 / average))  # is, Lima, Peru; Lucene's variant leaves out the factor k1 + 1
    assert found[0, 1] == pytest.approx(expected, rel=1e-5)


def test_proofs_share_a_metadata_value(case: Case) -> None:
    proof = proof_of(case, "kind")
    assert proof(0, 0) and not proof(0, 1)
    assert not any(proof(1, i) for i in range(80))
    with pytest.raises(SettingError, match="no query has the metadata field 'absent'"):
        proof_of(case, "absent")


def test_bad_queries_are_refused_by_line(built: Path, tmp_path: Path) -> None:
    engine = QueryEngine.open(built)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\nnot json\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        open_case(engine, EvaluateSettings(queries=[str(bad)]))
    with pytest.raises(SettingError, match="--queries"):
        open_case(engine, EvaluateSettings())


def test_a_store_without_curvature_says_so(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(case.engine.store), "full_dir", None)
    with pytest.raises(StoreError, match="--keep-curvature"):
        compute_scores(case, ["ek-fac"])
