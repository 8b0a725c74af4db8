"""Cross-entropy in closed form and in chunks, sampled labels, uniforms, and what a batch is refused for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import engine.loss
from engine.capture import Capture
from engine.errors import DataError
from engine.example import Example, collate
from engine.loss import cross_entropy, uniforms
from engine.model import from_parts
from engine.modules import track


def test_cross_entropy_and_its_gradient_equal_autograd() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(7, 11, dtype=torch.float64) * 5).requires_grad_(True)
    labels = torch.randint(0, 11, (7,))
    wanted = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    wanted.sum().backward()
    loss, grad = cross_entropy(logits.detach(), labels, None)
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, logits.grad, rtol=1e-12, atol=1e-12)


def test_half_precision_logits_are_treated_in_float32() -> None:
    loss, grad = cross_entropy(torch.randn(3, 5).bfloat16(), torch.tensor([0, 1, 2]), None)
    assert loss.dtype == grad.dtype == torch.float32


def test_sampled_labels_follow_the_inverse_cdf() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)).repeat(5, 1)
    u = torch.tensor([0.0, 0.49, 0.51, 0.76, 0.999999])
    loss, grad = cross_entropy(logits, None, u)
    assert (grad < 0).nonzero()[:, 1].tolist() == [0, 0, 1, 2, 2]
    assert loss.tolist() == pytest.approx(-np.log([0.5, 0.5, 0.25, 0.25, 0.25]))


def test_sampled_labels_have_the_distribution_of_the_softmax() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 6, dtype=torch.float64) * 2
    n = 200_000
    u = torch.from_numpy(uniforms(3, np.arange(n), np.zeros(n, np.int64)))
    _, grad = cross_entropy(logits.repeat(n, 1), None, u)
    share = (grad < 0).double().mean(0)
    p = logits.softmax(-1)[0]
    assert float(((share - p).abs() / (p * (1 - p) / n).sqrt()).max()) < 4  # standard errors


def test_a_class_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]]).repeat(2, 1)
    loss, _ = cross_entropy(logits, None, torch.tensor([0.0, 1 - 2.0**-53]))
    assert loss.tolist() == [0.0, 0.0]


def test_uniforms_depend_on_seed_row_and_position_alone() -> None:
    rows, positions = np.repeat(np.arange(300), 50), np.tile(np.arange(50), 300)
    u = uniforms(7, rows, positions)
    assert np.array_equal(uniforms(7, rows[::-1], positions[::-1])[::-1], u)
    assert uniforms(7, rows[777:778], positions[777:778])[0] == u[777]
    assert u.min() >= 0 and u.max() < 1
    assert len(np.unique(u)) == len(u)
    assert abs(u.mean() - 0.5) < 4 / np.sqrt(12 * len(u))
    assert not np.isin(uniforms(8, rows, positions), u).any()
    grid = u.reshape(300, 50)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize("labels", ["true", "sampled"])
def test_chunks_of_the_vocabulary_head_change_nothing(
    tiny_llama: Any, labels: Any, make_examples: Callable[..., list[Example]], captured_gradients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = from_parts(tiny_llama.double())
    tracked = track(loaded).tracked
    examples = make_examples(320)
    whole = captured_gradients(loaded, examples, tracked, labels)
    monkeypatch.setattr(engine.loss, "CHUNK_BYTES", 4 * 320 * 3)
    rows: list[int] = []

    def spy(logits: torch.Tensor, *rest: Any) -> Any:
        rows.append(len(logits))
        return cross_entropy(logits, *rest)

    monkeypatch.setattr(engine.loss, "cross_entropy", spy)
    chunked = captured_gradients(loaded, examples, tracked, labels)
    assert max(rows) == 3 and sum(rows) == sum(e.n_targets for e in examples)  # logits at target positions alone, three at a time
    for a, b in zip(whole, chunked, strict=True):
        assert all(torch.allclose(a[n], b[n], rtol=1e-10, atol=1e-12) for n in a)


def test_a_head_that_does_not_come_apart_gives_the_same(
    tiny_gpt2: Any, make_examples: Callable[..., list[Example]], captured_gradients: Any, worst_error: Any
) -> None:
    loaded = from_parts(tiny_gpt2.double())
    assert loaded.separable_head
    tracked = track(loaded).tracked
    apart = captured_gradients(loaded, make_examples(320), tracked)
    loaded.separable_head = False
    whole = captured_gradients(loaded, make_examples(320), tracked)
    assert all(worst_error(a, b) <= 1e-10 for a, b in zip(whole, apart, strict=True))


def test_sampled_labels_do_not_depend_on_the_batch(
    tiny_llama: Any, make_examples: Callable[..., list[Example]], captured_gradients: Any, worst_error: Any
) -> None:
    """Rows keep their store-wide number in whatever batch they are."""
    loaded = from_parts(tiny_llama)
    tracked = track(loaded).tracked
    examples = make_examples(320, (9, 5, 12))
    together = captured_gradients(loaded, examples, tracked, "sampled", 5)
    other_seed = captured_gradients(loaded, examples, tracked, "sampled", 6)
    found: dict[str, torch.Tensor] = {}
    batch = collate([examples[2]], [2], loaded.pad_id)
    Capture(loaded, tracked).run(batch, lambda t, a, d: found.__setitem__(t.name, d[0].T @ a[0]), labels="sampled", seed=5)
    assert worst_error(together[2], found) <= 1e-4
    assert worst_error(other_seed[2], found) > 0.1


def test_sampled_gradients_use_the_labels_of_the_inverse_cdf(
    tiny_gpt2: Any, make_examples: Callable[..., list[Example]], captured_gradients: Any, autograd_gradients: Any, worst_error: Any
) -> None:
    """Labels drawn here by a plain loop over the softmax, put in place of the true ones."""
    loaded = from_parts(tiny_gpt2.double())
    tracked = track(loaded).tracked
    examples = make_examples(320)
    for row, (example, found) in enumerate(zip(examples, captured_gradients(loaded, examples, tracked, "sampled", 11), strict=True)):
        p = tiny_gpt2(input_ids=torch.from_numpy(example.input_ids)[None]).logits[0].softmax(-1).detach().numpy()
        drawn = example.labels.copy()
        for t in np.flatnonzero(example.target_mask):
            u = uniforms(11, np.array([row]), np.array([t]))[0]
            drawn[t] = int(np.flatnonzero(np.cumsum(p[t - 1]) > u)[0])
        swapped = Example("x", example.input_ids, drawn, example.target_mask, "")
        loss = _loss_with_labels(tiny_gpt2, swapped)
        wanted = dict(zip([t.name for t in tracked], _weights_grad(loss, tracked), strict=True))
        assert worst_error(found, wanted) <= 1e-10


def _loss_with_labels(model: Any, example: Example) -> torch.Tensor:
    model.requires_grad_(True)
    logits = model(input_ids=torch.from_numpy(example.input_ids)[None]).logits[0]
    on = np.flatnonzero(example.target_mask)
    return torch.nn.functional.cross_entropy(logits[on - 1], torch.from_numpy(example.labels[on]), reduction="sum")


def _weights_grad(loss: torch.Tensor, tracked: Any) -> list[torch.Tensor]:
    weights = torch.autograd.grad(loss, [t.module.weight for t in tracked], retain_graph=True)
    biases = torch.autograd.grad(loss, [t.module.bias for t in tracked])
    return [torch.cat([w.T, b[:, None]], dim=1) for w, b in zip(weights, biases, strict=True)]


def test_labels_outside_the_vocabulary_are_refused(tiny_gpt2: Any, make_examples: Callable[..., list[Example]]) -> None:
    loaded = from_parts(tiny_gpt2)
    capture = Capture(loaded, track(loaded).tracked)
    example = make_examples(320, (6,))[0]
    labels = example.labels.copy()
    labels[4] = 320
    wrong = Example("bad", example.input_ids, labels, example.target_mask, "")
    with pytest.raises(DataError, match=r"'bad' has a label outside 0\.\.319"):
        capture.run(collate([wrong], [0], 0), lambda *_: None)
    masked = Example("fine", example.input_ids, labels, example.target_mask & (np.arange(6) != 4), "")
    assert capture.run(collate([masked], [0], 0), lambda *_: None).n_targets.tolist() == [3]


def test_a_target_at_the_first_position_is_a_fault_of_the_caller(tiny_gpt2: Any, make_examples: Callable[..., list[Example]]) -> None:
    example = make_examples(320, (6,))[0]
    mask = example.target_mask.copy()
    mask[0] = True
    loaded = from_parts(tiny_gpt2)
    with pytest.raises(ValueError, match="first token"):
        Capture(loaded, track(loaded).tracked).run(collate([Example("x", example.input_ids, example.labels, mask, "")], [0], 0), lambda *_: None)
