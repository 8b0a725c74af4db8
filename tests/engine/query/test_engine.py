"""A request answered end to end: search, token shares, contrasts, sums, re-scoring, warnings, errors that name their query."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from engine.curvature import Curvature
from engine.errors import DataError, LimitError, ModelError, SettingError, UserError
from engine.example import Example
from engine.query import Answer, Generate, Hit, Limits, QueryEngine, QueryInput, QuerySpec
from engine.rescore import example_of
from engine.settings import ModelSettings
from engine.store import Store
from engine.uncompressed import UncompressedInfluence

PARIS = QueryInput(prompt="The capital of France is", completion=" Paris.")
LIMA = QueryInput(prompt="What is the capital of Peru?", completion=" It is Lima.")
CHAT = [{"role": "user", "content": "Capital?"}, {"role": "assistant", "content": "Paris is."}]


def ask(engine: QueryEngine, *queries: QueryInput, **options: Any) -> Answer:
    return engine.answer([QuerySpec(queries or (PARIS,), **options)])[0]


def scores(hits: list[Hit] | None) -> list[float]:
    assert hits is not None
    return [h.score for h in hits]


def all_scores(engine: QueryEngine, answer: int = 0, *queries: QueryInput, **options: Any) -> dict[int, float]:
    hits = ask(engine, *queries, top_k=1000, direction="proponents", **options).answers[answer].proponents
    assert hits is not None
    return {h.position: h.score for h in hits}


def test_an_answer_is_whole(asked: QueryEngine) -> None:
    answer = ask(asked, top_k=5)
    found = answer.answers[0]
    assert found.proponents is not None and found.opponents is not None
    assert [h.rank for h in found.proponents] == [1, 2, 3, 4, 5]
    assert scores(found.proponents) == sorted(scores(found.proponents), reverse=True)
    assert scores(found.opponents) == sorted(scores(found.opponents))
    first = found.proponents[0]
    row = asked.store.rows([first.position])[0]
    assert (first.id, first.text, first.metadata) == (row.id, row.text, row.metadata)
    assert first.metadata["kind"] in ("fact", "speech", "other")
    assert (answer.method, answer.n_rows, answer.n_allowed, answer.generation) == ("exhaustive", 90, 90, asked.store.generation)
    assert {"tokenise", "sketch", "search", "rows"} <= set(answer.timing)
    report = found.inputs[0]
    assert report.text == "The capital of France is Paris."
    assert 0 < report.n_targets < report.n_tokens == found.n_tokens
    assert report.loss > 0 and found.coverage is not None and 0 < found.coverage <= 1 + 1e-5


@pytest.mark.parametrize(
    "query",
    [
        QueryInput(text="The capital of France is Paris."),
        PARIS,
        QueryInput(messages=CHAT),
        QueryInput(input_ids=[5, 6, 7, 8]),
        QueryInput(input_ids=[5, 6, 7, 8], labels=[-100, -100, 7, 8]),
        QueryInput(prompt="The capital", generate=Generate(4)),
        QueryInput(messages=CHAT[:1], generate=Generate(4)),
    ],
)
def test_every_form_of_query_is_answered(asked: QueryEngine, query: QueryInput) -> None:
    found = ask(asked, query).answers[0]
    assert len(scores(found.proponents)) == 10
    assert (found.inputs[0].generated is not None) == (query.generate is not None)


def test_requests_answered_together_are_answered_as_if_alone(asked: QueryEngine) -> None:
    specs = [QuerySpec((PARIS,)), QuerySpec((LIMA, PARIS), score="cosine"), QuerySpec((QueryInput(text="carbon"),), direction="opponents")]
    together = asked.answer(specs)
    for spec, answer in zip(specs, together, strict=True):
        alone = asked.answer([spec])[0]
        for a, b in zip(answer.answers, alone.answers, strict=True):
            for mine, other in ((a.proponents, b.proponents), (a.opponents, b.opponents)):
                if mine is not None:
                    np.testing.assert_allclose(scores(mine), scores(other), rtol=1e-3, atol=1e-5 * max(map(abs, scores(mine))))
    assert together[2].answers[0].proponents is None


def test_a_sum_and_a_contrast_are_sums_and_differences_of_scores(asked: QueryEngine) -> None:
    a, b = all_scores(asked), all_scores(asked, 0, LIMA)
    size = max(map(abs, a.values()))
    together = all_scores(asked, 0, PARIS, LIMA, aggregate="sum")
    against = all_scores(asked, 0, PARIS, contrast=(LIMA,))
    for i in a:
        assert together[i] == pytest.approx(a[i] + b[i], abs=1e-4 * size)
        assert against[i] == pytest.approx(a[i] - b[i], abs=1e-4 * size)
    one_for_both = ask(asked, LIMA, LIMA, contrast=(LIMA,)).answers
    assert [r.sign for r in one_for_both[1].inputs] == [1, -1]
    assert "cancel out" in " ".join(ask(asked, PARIS, contrast=(PARIS,)).answers[0].warnings)


@pytest.mark.parametrize("score", ["influence", "cosine"])
def test_shares_of_the_query_tokens_sum_to_the_score(asked: QueryEngine, score: Any) -> None:
    for options in ({}, {"contrast": (LIMA,)}):
        found = ask(asked, PARIS, score=score, tokens=True, **options).answers[0]
        assert found.proponents is not None
        for hit in found.proponents:
            assert hit.query_tokens is not None
            assert [len(part) for part in hit.query_tokens] == [r.n_tokens for r in found.inputs]
            assert sum(map(sum, hit.query_tokens)) == pytest.approx(hit.score, rel=1e-3, abs=1e-4 * abs(found.proponents[0].score))
        tokens = found.inputs[0].tokens
        assert tokens is not None
        assert "".join(t.text for t in tokens) == found.inputs[0].text
        assert [t.target for t in tokens].count(True) == found.inputs[0].n_targets
        y = asked.sketcher.query([_example(asked, PARIS)]).y[0]
        assert sum(t.weight for t in tokens) == pytest.approx(float(np.linalg.norm(y)), rel=1e-3)


def _example(engine: QueryEngine, query: QueryInput) -> Example:
    (example,) = engine.prepare(QuerySpec((query,))).inputs
    assert isinstance(example, Example)
    return example


def test_rescored_results_are_ordered_by_uncompressed_influence(asked: QueryEngine) -> None:
    found = ask(asked, PARIS, contrast=(LIMA,), rescore="gradients", rescore_n=8, top_k=6).answers[0]
    assert asked.store.full_dir is not None
    reference = UncompressedInfluence(asked.loaded, Curvature.load(asked.store.full_dir))
    for hits, best_first in ((found.proponents, True), (found.opponents, False)):
        assert hits is not None and len(hits) == 6
        examples = [example_of(row, asked.loaded) for row in asked.store.rows([h.position for h in hits])]
        a, b = reference.scores([_example(asked, PARIS), _example(asked, LIMA)], examples)
        rescored = [h.rescored for h in hits]
        np.testing.assert_allclose(np.array(rescored, float), a - b, rtol=1e-3, atol=1e-4 * np.abs(a).max())
        assert rescored == sorted(rescored, reverse=best_first)  # type: ignore[type-var]  # none is None after a re-scoring
        for hit in hits:
            assert hit.tokens is not None
            assert "".join(t.text for t in hit.tokens if t.end) == hit.text
            assert sum(t.weight for t in hit.tokens) == pytest.approx(hit.rescored, rel=1e-4)
    # the rows are the best eight of the sketch, which alone decides who is looked at
    best = {h.position for h in ask(asked, PARIS, contrast=(LIMA,), top_k=8).answers[0].proponents or []}
    assert {h.position for h in found.proponents or []} <= best


def test_training_side_tokens_equal_the_plain_reference(asked: QueryEngine) -> None:
    assert asked.store.full_dir is not None
    row = example_of(asked.store.rows([3])[0], asked.loaded)
    query = _example(asked, PARIS)
    reference = UncompressedInfluence(asked.loaded, Curvature.load(asked.store.full_dir)).token_scores([query], row)[0]
    other = example_of(asked.store.rows([4])[0], asked.loaded)
    mine = asked._rescorer.by_position([query], [1.0], [other, row])[1]
    np.testing.assert_allclose(mine, reference, rtol=1e-3, atol=1e-5 * np.abs(reference).max())


def test_filters_and_candidates(asked: QueryEngine) -> None:
    answer = ask(asked, filter={"and": [{"field": "kind", "eq": "fact"}, {"field": "year", "lt": 1950}]}, top_k=100)
    hits = answer.answers[0].proponents
    assert hits is not None and len(hits) == answer.n_allowed == 17
    assert all(h.metadata["kind"] == "fact" and h.metadata["year"] < 1950 for h in hits)
    whole, near = ask(asked, top_k=3), ask(asked, top_k=3, candidates=90)
    assert (near.method, near.n_candidates) == ("candidates", 90)
    assert scores(near.answers[0].proponents) == pytest.approx(scores(whole.answers[0].proponents), rel=1e-5)
    recalled = ask(asked, top_k=3, candidates={"recall": 0.9})
    assert recalled.recall is not None and recalled.recall >= 0.9
    none = ask(asked, filter={"field": "kind", "eq": "nothing"})
    assert none.answers[0].proponents == []
    assert "no row is left" in none.answers[0].warnings[-1]


def test_a_query_outside_the_fitted_span_is_warned_about(asked: QueryEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    threshold = asked.store.manifest.coverage_threshold
    assert threshold is not None
    high = asked.store.manifest.model_copy(update={"coverage_threshold": 1.1})
    monkeypatch.setattr(asked.store, "manifest", high)
    assert "outside what the index was fitted on" in ask(asked).answers[0].warnings[0]


def test_long_queries_are_refused_or_truncated_as_told(asked: QueryEngine) -> None:
    long = QueryInput(prompt="The capital of France is " * 10, completion=" Paris, of course. " * 8)
    with pytest.raises(LimitError, match=r"queries\[0\].*at most 64 are allowed") as raised:
        ask(asked, long)
    assert raised.value.code == "too-long"
    left, right = (ask(asked, long, truncation=side).answers[0] for side in ("left", "right"))  # type: ignore[arg-type]  # a Truncation, inferred as str
    for found in (left, right):
        assert found.truncated and found.n_tokens == 64
        assert "truncated to 64 tokens" in " ".join(found.warnings)
    assert left.inputs[0].n_targets > right.inputs[0].n_targets
    with pytest.raises(DataError, match="no target token is left"):
        ask(asked, QueryInput(prompt="The capital of France is " * 20, completion=" Paris"), truncation="right")


@pytest.mark.parametrize(
    ("queries", "options", "message", "field"),
    [
        ((PARIS, QueryInput()), {}, r"queries\[1\] is empty", "queries[1]"),
        ((QueryInput(text="a", prompt="b"),), {}, "exactly one of", "queries[0]"),
        ((QueryInput(text="a", label=1),), {}, "exactly one of", "queries[0]"),
        ((QueryInput(prompt="a", completion=""),), {}, "empty", "queries[0].completion"),
        ((QueryInput(text="\ud800"),), {}, "surrogate", "queries[0].text"),
        ((QueryInput(input_ids=[1, 99999]),), {}, "outside", "queries[0].input_ids"),
        ((PARIS,), {"contrast": (PARIS, QueryInput(text=""))}, "contrast has 2", "contrast"),
        ((PARIS,), {"contrast": (QueryInput(text=""),)}, r"contrast\[0\]", "contrast[0].text"),
        ((), {}, "empty", "queries"),
        ((PARIS,) * 65, {}, "at most 64", "queries"),
        ((PARIS,), {"top_k": 0}, "at least 1", "top_k"),
        ((PARIS,), {"top_k": 10**12}, "at most 1,000", "top_k"),
        ((PARIS,), {"score": "dot"}, "influence, cosine", "score"),
        ((PARIS,), {"candidates": 10**9}, "at most", "candidates"),
        ((PARIS,), {"rescore": "gradients", "top_k": 40}, "raise rescore_n", "rescore_n"),
        ((PARIS,), {"filter": {"field": "kind"}}, "exactly one of", "filter"),
        ((PARIS,), {"filter": {"field": "nothing", "eq": 1}}, "no field", "filter"),
        ((QueryInput(prompt="a", generate=Generate(0)),), {}, "between", "queries[0].generate.max_new_tokens"),
        ((QueryInput(prompt="a", generate=Generate(4, temperature=float("nan"))),), {}, "between", "queries[0].generate.temperature"),
        ((QueryInput(prompt="a", generate=Generate(64)),), {}, "exceed 64", "queries[0]"),
        ((QueryInput(prompt="", generate=Generate(4)),), {}, "no token", "queries[0]"),
        ((QueryInput(messages=CHAT, generate=Generate(4)),), {}, "before the assistant", "queries[0].messages"),
    ],
)
def test_mistakes_name_the_field(asked: QueryEngine, queries: tuple[QueryInput, ...], options: dict[str, Any], message: str, field: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        asked.answer([QuerySpec(queries, **options)])
    assert raised.value.field == field


def test_one_bad_request_does_not_spoil_its_batch(asked: QueryEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = asked.prepare(QuerySpec((PARIS,))), asked.prepare(QuerySpec((LIMA,)))
    plain = asked.sketcher.query

    def flagged(examples: Any) -> Any:
        found = plain(examples)
        flags = found.flags.copy()
        flags[1] = 4
        return dataclasses.replace(found, flags=flags)

    monkeypatch.setattr(asked.sketcher, "query", flagged)
    sketched = asked.sketch([good, bad])
    searched = asked.search([good, bad], sketched)
    assert asked.finish(good, sketched[0], searched[0]).answers
    with pytest.raises(DataError, match=r"queries\[0\] has a gradient that is not finite"):
        asked.finish(bad, sketched[1], searched[1])


def test_generation_is_repeatable_and_sampling_follows_its_seed(asked: QueryEngine) -> None:
    def written(seed: int, temperature: float) -> str | None:
        options = Generate(8, temperature=temperature, seed=seed)
        return ask(asked, QueryInput(prompt="The capital of", generate=options), top_k=1).answers[0].inputs[0].generated

    state = torch.random.get_rng_state()
    assert written(0, 0.0) == written(1, 0.0)
    assert written(1, 1.5) == written(1, 1.5)
    assert len({written(seed, 1.5) for seed in range(4)}) > 1
    assert torch.equal(state, torch.random.get_rng_state())


def test_another_model_is_refused(asked_store: Path, tmp_path: Path, tokenizer: Any) -> None:
    torch.manual_seed(1)
    other = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_positions=64, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
    other.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="is not the model that"):
        QueryEngine.open(asked_store, ModelSettings(model=str(tmp_path / "other")))


def test_without_the_whole_curvature_rescoring_is_refused(asked: QueryEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "full_dir", None)
    with pytest.raises(SettingError, match="--keep-curvature"):
        ask(asked, rescore="gradients")


def test_a_reopened_engine_shares_the_model(asked: QueryEngine, asked_store: Path) -> None:
    again = asked.reopened(Store.open(asked_store))
    assert again.loaded is asked.loaded and again.sketcher is asked.sketcher
    assert scores(ask(again).answers[0].proponents) == pytest.approx(scores(ask(asked).answers[0].proponents))


def test_limits_are_the_callers(asked: QueryEngine) -> None:
    narrow = QueryEngine(asked.store, asked.loaded, asked.sketcher, limits=Limits(queries=1))
    with pytest.raises(LimitError, match="at most 1 are allowed"):
        ask(narrow, PARIS, PARIS)


def test_a_store_is_asked_without_a_server(asked: QueryEngine, asked_store: Path) -> None:
    found = Store.open(asked_store).query(prompt=PARIS.prompt, completion=PARIS.completion, top_k=3)
    assert scores(found.proponents) == pytest.approx(scores(ask(asked, top_k=3).answers[0].proponents), rel=1e-4)
