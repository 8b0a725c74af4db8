"""Captured gradients against a loop of autograd; what a batch, padding and masks may not change; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from engine.capture import Capture
from engine.errors import DataError, NumericalError
from engine.example import Example, collate
from engine.model import from_parts
from engine.modules import bare, track

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.fixture(params=["tiny_gpt2", "tiny_llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_equal_a_loop_of_autograd(
    model: Any, dtype: torch.dtype, make_examples: Callable[..., list[Example]], captured_gradients: Any, autograd_gradients: Any, worst_error: Any
) -> None:
    loaded = from_parts(model.to(dtype))
    tracked = track(loaded).tracked
    assert any(t.d_out != t.d_in for t in tracked)
    examples = make_examples(320)
    for example, found in zip(examples, captured_gradients(loaded, examples, tracked), strict=True):
        wanted, _ = autograd_gradients(loaded, example, tracked)
        assert worst_error(found, wanted) <= TOLERANCE[dtype]


@pytest.mark.parametrize("bias", [False, True])
def test_linear_with_and_without_bias(
    tiny_llama: Any, bias: bool, make_examples: Callable[..., list[Example]], captured_gradients: Any, autograd_gradients: Any, worst_error: Any
) -> None:
    """The same layer with a bias has one column more: the gradient of the bias."""
    torch.manual_seed(1)
    for layer in tiny_llama.model.layers:
        old = layer.mlp.up_proj
        layer.mlp.up_proj = nn.Linear(old.in_features, old.out_features, bias=bias)
    loaded = from_parts(tiny_llama.double())
    tracked = track(loaded).tracked
    ups = [t for t in tracked if t.name.endswith("up_proj")]
    assert [t.d_in for t in ups] == [24 + bias] * 2
    examples = make_examples(320)
    for example, found in zip(examples, captured_gradients(loaded, examples, tracked), strict=True):
        wanted, _ = autograd_gradients(loaded, example, tracked)
        assert worst_error(found, wanted) <= 1e-10


def test_losses_and_target_counts(model: Any, make_examples: Callable[..., list[Example]], autograd_gradients: Any) -> None:
    loaded = from_parts(model)
    tracked = track(loaded).tracked
    examples = make_examples(320)
    stats = Capture(loaded, tracked).run(collate(examples, range(4), loaded.pad_id), lambda *_: None)
    assert stats.loss.dtype == torch.float32
    assert stats.n_targets.tolist() == [e.n_targets for e in examples]
    assert stats.loss.tolist() == pytest.approx([autograd_gradients(loaded, e, tracked)[1] for e in examples], rel=1e-5)


def test_an_example_alone_equals_itself_in_any_batch(
    model: Any, make_examples: Callable[..., list[Example]], captured_gradients: Any, worst_error: Any
) -> None:
    loaded = from_parts(model)
    tracked = track(loaded).tracked
    examples = make_examples(320, (9, 5, 12, 2, 30))
    together = captured_gradients(loaded, examples, tracked)
    backwards = captured_gradients(loaded, examples[::-1], tracked)[::-1]
    for i, example in enumerate(examples):
        alone = captured_gradients(loaded, [example], tracked)[0]
        assert worst_error(together[i], alone) <= 1e-4
        assert worst_error(backwards[i], alone) <= 1e-4


def test_activations_and_deltas_are_zero_at_padding(model: Any, make_examples: Callable[..., list[Example]]) -> None:
    loaded = from_parts(model)
    examples = make_examples(320, (9, 5))
    seen = []

    def consume(t: Any, a: torch.Tensor, delta: torch.Tensor) -> None:
        seen.append(t.name)
        assert a.shape == (2, 9, t.d_in) and delta.shape == (2, 9, t.d_out)
        assert not a[1, 5:].any() and not delta[1, 5:].any()
        assert a[1, :5].any(-1).all()
        if t.bias:
            assert a[..., -1].tolist() == [[1.0] * 9, [1.0] * 5 + [0.0] * 4]

    tracked = track(loaded).tracked
    Capture(loaded, tracked).run(collate(examples, [0, 1], loaded.pad_id), consume)
    assert sorted(seen) == sorted(t.name for t in tracked)


def test_the_prompt_carries_activations_but_no_loss(tiny_gpt2: Any, make_examples: Callable[..., list[Example]]) -> None:
    """Positions before the targets have non-zero deltas: later targets attend to them."""
    loaded = from_parts(tiny_gpt2)
    example = make_examples(320, (10,), prompt=7)[0]
    found = {}
    Capture(loaded, track(loaded).tracked).run(collate([example], [0], 0), lambda t, a, d: found.__setitem__(t.name, d[0]))
    first = found["transformer.h.0.attn.c_attn"]
    assert bool((first[:6].abs().amax(-1) > 0).all())
    assert not first[9].any()  # the last token predicts nothing


def test_a_subset_of_modules_gives_the_same_gradients(model: Any, make_examples: Callable[..., list[Example]], captured_gradients: Any) -> None:
    """The graph begins at the lowest module of the subset."""
    loaded = from_parts(model)
    tracked = track(loaded).tracked
    examples = make_examples(320)
    whole = captured_gradients(loaded, examples, tracked)
    for subset in (tracked[-2:], tracked[len(tracked) // 2 :], tracked[1:2]):
        part = captured_gradients(loaded, examples, subset)
        for a, b in zip(part, whole, strict=True):
            assert all(torch.equal(a[t.name], b[t.name]) for t in subset)


def test_nothing_stays_behind(model: Any, make_examples: Callable[..., list[Example]], captured_gradients: Any) -> None:
    """No hooks, no .grad, no switched flags, even after a consumer fails."""
    loaded = from_parts(model)
    inner = bare(loaded.model)
    inner.requires_grad_(True)
    inner.train()
    tracked = track(loaded).tracked
    captured_gradients(loaded, make_examples(320), tracked)

    def fail(*_: Any) -> None:
        raise RuntimeError("consumer")

    with pytest.raises(RuntimeError, match="consumer"):
        Capture(loaded, tracked).run(collate(make_examples(320), range(4), 0), fail)
    assert all(p.grad is None and p.requires_grad for p in inner.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in inner.modules())
    assert inner.training


def test_dropout_is_off(tiny_gpt2: Any, make_examples: Callable[..., list[Example]], captured_gradients: Any) -> None:
    loaded = from_parts(tiny_gpt2)
    tracked = track(loaded).tracked
    quiet = captured_gradients(loaded, make_examples(320), tracked)
    tiny_gpt2.train()
    loud = captured_gradients(loaded, make_examples(320), tracked)
    assert all(torch.equal(a[n], b[n]) for a, b in zip(quiet, loud, strict=True) for n in a)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(tiny_llama: Any, reentrant: bool, make_examples: Callable[..., list[Example]], captured_gradients: Any) -> None:
    loaded = from_parts(tiny_llama)
    tracked = track(loaded).tracked
    plain = captured_gradients(loaded, make_examples(320), tracked)
    enable = getattr(tiny_llama, "activation_checkpointing_enable", tiny_llama.gradient_checkpointing_enable)  # the name before v5.20
    enable({"use_reentrant": reentrant})
    again = captured_gradients(loaded, make_examples(320), tracked)
    assert all(torch.equal(a[n], b[n]) for a, b in zip(plain, again, strict=True) for n in a)


def test_a_checkpointed_block_inside_a_model(tiny_llama: Any, make_examples: Callable[..., list[Example]], captured_gradients: Any, worst_error: Any) -> None:
    """A model that checkpoints in evaluation mode too: the block runs twice, and counts once."""
    from torch.utils.checkpoint import checkpoint

    loaded = from_parts(tiny_llama)
    tracked = track(loaded).tracked
    plain = captured_gradients(loaded, make_examples(320), tracked)
    mlp = tiny_llama.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    again = captured_gradients(loaded, make_examples(320), tracked)
    for a, b in zip(plain, again, strict=True):
        assert worst_error(b, a) <= 1e-6


def test_a_module_called_twice(
    tiny_llama: Any, make_examples: Callable[..., list[Example]], captured_gradients: Any, autograd_gradients: Any, worst_error: Any
) -> None:
    """Two layers that share one MLP: the gradient is the sum over both calls."""
    tiny_llama.model.layers[1].mlp = tiny_llama.model.layers[0].mlp
    loaded = from_parts(tiny_llama.double())
    tracked = track(loaded).tracked
    assert sum("mlp" in t.name for t in tracked) == 3
    examples = make_examples(320)
    for example, found in zip(examples, captured_gradients(loaded, examples, tracked), strict=True):
        wanted, _ = autograd_gradients(loaded, example, tracked)
        assert worst_error(found, wanted) <= 1e-10


def test_tied_embeddings_are_not_tracked(tiny_gpt2: Any, tiny_llama: Any) -> None:
    assert tiny_gpt2.lm_head.weight is tiny_gpt2.transformer.wte.weight
    for model in (tiny_gpt2, tiny_llama):
        report = track(from_parts(model))
        assert not any("head" in t.name or "wte" in t.name or "embed" in t.name for t in report.tracked)


def test_an_example_without_targets_has_no_gradient_and_spoils_nobody(
    model: Any, make_examples: Callable[..., list[Example]], captured_gradients: Any, worst_error: Any
) -> None:
    loaded = from_parts(model)
    tracked = track(loaded).tracked
    good, masked = make_examples(320, (9, 6))
    none = Example("none", masked.input_ids, masked.labels, np.zeros(6, np.bool_), "")
    one = Example("one", masked.input_ids[:1], masked.labels[:1], np.zeros(1, np.bool_), "")
    alone = captured_gradients(loaded, [good], tracked)[0]
    first, second, third = captured_gradients(loaded, [good, none, one], tracked)
    assert worst_error(first, alone) <= 1e-4
    assert not any(g.any() for g in (*second.values(), *third.values()))
    only = captured_gradients(loaded, [none], tracked)[0]
    assert set(only) == {t.name for t in tracked} and not any(g.any() for g in only.values())


def test_non_finite_weights_name_module_and_example(model: Any, make_examples: Callable[..., list[Example]]) -> None:
    loaded = from_parts(model)
    tracked = track(loaded).tracked
    good, bad = make_examples(320, (6, 5))
    bad.input_ids[:] = 300
    good.input_ids[:] = 10
    with torch.no_grad():
        bare(loaded.model).get_input_embeddings().weight[300, 0] = float("nan")
    with pytest.raises(NumericalError, match=r"module .*: non-finite .* in example 'e1'"):
        Capture(loaded, tracked).run(collate([good, bad], [0, 1], 0), lambda *_: None, check=True)


def test_ids_outside_the_vocabulary_are_refused(tiny_gpt2: Any, make_examples: Callable[..., list[Example]]) -> None:
    loaded = from_parts(tiny_gpt2)
    capture = Capture(loaded, track(loaded).tracked)
    for token in (320, -1, 2**40):
        example = make_examples(320, (6,))[0]
        example.input_ids[3] = token
        with pytest.raises(DataError, match=f"'e0' has token id {token}, and the model's vocabulary ends at 319"):
            capture.run(collate([example], [0], 0), lambda *_: None)


def test_an_example_beyond_the_context_is_refused(tiny_gpt2: Any, make_examples: Callable[..., list[Example]]) -> None:
    loaded = from_parts(tiny_gpt2)
    with pytest.raises(DataError, match="'e0' has 65 tokens, and the model's context holds 64"):
        Capture(loaded, track(loaded).tracked).run(collate(make_examples(320, (65,)), [0], 0), lambda *_: None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("labels", ["true", "sampled"])
def test_gradients_on_a_gpu_equal_those_on_a_cpu(
    model: Any, labels: Any, make_examples: Callable[..., list[Example]], captured_gradients: Any, worst_error: Any
) -> None:
    examples = make_examples(320)
    loaded = from_parts(model)
    wanted = captured_gradients(loaded, examples, track(loaded).tracked, labels, 3)
    moved = from_parts(model, device="cuda")
    found = captured_gradients(moved, examples, track(moved).tracked, labels, 3)
    for a, b in zip(found, wanted, strict=True):
        assert worst_error({n: g.cpu() for n, g in a.items()}, b) <= 1e-4
