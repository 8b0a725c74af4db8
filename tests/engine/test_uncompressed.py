"""Uncompressed influence: pieces against the whole, chunks of modules against all at once, and against plain gradient products."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from engine.curvature import Curvature
from engine.errors import LimitError
from engine.example import Example
from engine.fit_curvature import fit_curvature
from engine.model import LoadedModel, from_parts
from engine.modules import track
from engine.settings import FitSettings
from engine.uncompressed import UncompressedInfluence


def make_examples(n: int, seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    found = []
    for i in range(n):
        ids = rng.integers(1, 320, rng.integers(4, 13))
        found.append(Example(f"e{i}", ids, ids, np.arange(len(ids)) >= (1 if i % 2 else 3), ""))
    return found


@pytest.fixture
def fitted(tiny_gpt2: GPT2LMHeadModel) -> tuple[LoadedModel, Curvature]:
    loaded = from_parts(tiny_gpt2.double())
    return loaded, fit_curvature(loaded, track(loaded).tracked, make_examples(10), range(10), FitSettings())


def test_scores_are_inner_products_of_half_whitened_gradients(fitted: tuple[LoadedModel, Curvature]) -> None:
    influence = UncompressedInfluence(*fitted, batch_tokens=30)
    queries, examples = make_examples(3, 1), make_examples(7, 2)
    t: list[dict[str, np.ndarray]] = []
    for rows in (queries, examples):
        found = {m.name: np.zeros((len(rows), m.n_parameters)) for m in influence.modules}
        influence.half_whitened(rows, lambda name, where, part, found=found: found[name].__setitem__(where, part.reshape(len(where), -1).numpy()))  # type: ignore[misc]  # a lambda in a loop has no inferred type
        t.append(found)
    expected = sum(t[0][name] @ t[1][name].T for name in t[0])
    np.testing.assert_allclose(influence.scores(queries, examples), expected, rtol=1e-6, atol=1e-7 * np.abs(expected).max())


def test_chunks_of_modules_and_batches_change_nothing(fitted: tuple[LoadedModel, Curvature]) -> None:
    queries, examples = make_examples(2, 1), make_examples(5, 2)
    whole = UncompressedInfluence(*fitted).scores(queries, examples)
    seen: list[tuple[int, int]] = []
    pieces = UncompressedInfluence(*fitted, memory=400_000, batch_tokens=12).scores(queries, examples, progress=lambda *step: seen.append(step))
    assert seen[-1][0] == seen[-1][1] > 5  # more than one pass over the examples
    np.testing.assert_allclose(pieces, whole, rtol=1e-6)


def test_token_scores_sum_to_the_score(fitted: tuple[LoadedModel, Curvature]) -> None:
    influence = UncompressedInfluence(*fitted)
    queries, examples = make_examples(2, 1), make_examples(3, 2)
    scores = influence.scores(queries, examples)
    for i, example in enumerate(examples):
        tokens = influence.token_scores(queries, example)
        assert tokens.shape == (2, len(example))
        np.testing.assert_allclose(tokens.sum(1), scores[:, i], rtol=1e-5, atol=1e-6 * np.abs(scores).max())


def test_without_the_inverse_it_is_the_product_of_plain_gradients(fitted: tuple[LoadedModel, Curvature]) -> None:
    loaded, curvature = fitted
    examples = make_examples(4, 2)
    weights = [p for m in track(loaded).tracked for p in m.module.parameters()]
    rows = []
    for e in examples:
        for p in weights:
            p.requires_grad_(True)
        logp = torch.log_softmax(loaded.model(input_ids=torch.from_numpy(e.input_ids)[None]).logits[0], -1)
        targets = np.flatnonzero(e.target_mask)
        loss = -logp[targets - 1, e.input_ids[targets]].sum()
        rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, weights)]).numpy())
        for p in weights:
            p.requires_grad_(False)
    expected = np.stack(rows) @ np.stack(rows).T
    found = UncompressedInfluence(loaded, curvature, precondition=False).scores(examples, examples)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9 * np.abs(expected).max())


def test_much_damping_tends_to_the_plain_product_and_sign_and_scale_are_right(fitted: tuple[LoadedModel, Curvature]) -> None:
    loaded, curvature = fitted
    examples = make_examples(4, 2)
    one = {name: curvature.modules[name] for name in list(curvature.modules)[:1]}
    single = Curvature(one, {}, curvature.c)
    plain = UncompressedInfluence(loaded, single, precondition=False).scores(examples, examples)
    damped = UncompressedInfluence(loaded, single, c=1e9).scores(examples, examples)
    np.testing.assert_allclose(damped * 1e9 * next(iter(one.values())).mean_lambda, plain, rtol=1e-4, atol=1e-6 * np.abs(plain).max())
    assert (np.diagonal(plain) > 0).all()  # training on the query itself lowers its loss


def test_examples_without_targets_and_no_examples(tiny_llama: LlamaForCausalLM) -> None:
    loaded = from_parts(tiny_llama)
    curvature = fit_curvature(loaded, track(loaded).tracked, make_examples(4), range(4), FitSettings())
    influence = UncompressedInfluence(loaded, curvature)
    assert influence.scores([], make_examples(2)).shape == (0, 2)
    ids = np.arange(1, 6)
    empty = Example("none", ids, ids, np.zeros(5, bool), "")
    assert (influence.scores(make_examples(2), [empty]) == 0).all()


def test_too_many_queries_for_the_memory_are_refused(fitted: tuple[LoadedModel, Curvature]) -> None:
    with pytest.raises(LimitError, match=r"gradients of 50 queries for module transformer\.h\.\d\.\S+ take [\d.]+ .B, and 100 KB"):
        UncompressedInfluence(*fitted, memory=100_000).scores(make_examples(50), make_examples(2))
