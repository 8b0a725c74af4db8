"""Token selection against ordinary fine-tuning (k = L) and against a naive reference that detaches unselected states, keys and values (k < L)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AlbertConfig, AlbertForSequenceClassification, BloomConfig, BloomForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from engine.errors import ModelError
from engine.pooling import classify, mean_pool, mean_pooled_class
from indexer.finetune.models import checkpoint_activations
from indexer.finetune.saved import SavedBytes
from indexer.finetune.token_selection import TokenSelection

NAMES = ("gpt2", "llama", "olmo2", "qwen2", "qwen3", "bert", "gpt2-classifier")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-8}
T = 13


def batch(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """input_ids, attention_mask, and the next tokens (or classes), three rows of 13, 9 and 6 tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 50, (3, T), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = mask[2, 6:] = 0
    ids[mask == 0] = 0
    if getattr(model.config, "pooling", None):
        return ids, mask, torch.tensor([0, 2, 1])
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = torch.where(mask[:, 1:] == 1, ids[:, 1:], -100)
    return ids, mask, labels


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    scale = max(float(g.abs().max()) for g in expected.values())
    assert scale > 1e-3
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= tolerance * max(scale, 1.0), name


@contextmanager
def naive(model: Any, chosen: Tensor) -> Iterator[None]:
    """All positions run as ever; hidden states enter each block, and keys and values enter attention, detached where `chosen` (B, T) is off."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        on = chosen[:, None, :, None]
        return AttentionInterface()["sdpa"](module, query, torch.where(on, key, key.detach()), torch.where(on, value, value.detach()), attention_mask, **kwargs)

    def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        states = args[0] if args else kwargs["hidden_states"]
        states = torch.where(chosen[:, :, None], states, states.detach())
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

    AttentionInterface.register("naive", attend)
    AttentionMaskInterface.register("naive", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("naive")
    blocks = [m for n, m in model.named_modules() if n.rpartition(".")[2].isdigit()]
    handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    assert len(blocks) == 2
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_all_positions_equal_ordinary_fine_tuning(build: Callable[[str], Any], name: str, dtype: torch.dtype) -> None:
    model = build(name).to(dtype)
    ids, mask, labels = batch(model)
    ordinary = loss_of(model(input_ids=ids, attention_mask=mask).logits, labels)
    expected = gradients(model, ordinary)
    selection = TokenSelection(model)
    everything = torch.arange(T).expand(3, T)
    loss = loss_of(selection(ids, mask, everything, mask.bool()), labels)
    assert loss.item() == pytest.approx(ordinary.item(), rel=TOLERANCE[dtype])
    assert_close(gradients(model, loss), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("name", NAMES)
def test_the_two_passes_equal_one_where_every_real_position_is_selected(build: Callable[[str], Any], name: str) -> None:
    """K < T, since the longest row is left out: two passes really run, and the answer is still ordinary fine-tuning."""
    model = build(name).double()
    ids, mask, labels = (x[1:] for x in batch(model))
    expected = gradients(model, loss_of(model(input_ids=ids, attention_mask=mask).logits, labels))
    selection = TokenSelection(model)
    selected = torch.arange(9).expand(2, 9)
    chosen_labels = labels if labels.dim() == 1 else labels.gather(1, selected)
    loss = loss_of(selection(ids, mask, selected, mask.gather(1, selected).bool()), chosen_labels)
    assert_close(gradients(model, loss), expected, 1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_some_positions_equal_the_naive_reference(build: Callable[[str], Any], name: str, dtype: torch.dtype) -> None:
    model = build(name).to(dtype)
    ids, mask, labels = batch(model)
    selected = torch.tensor([[1, 4, 5, 11], [0, 2, 7, 8], [2, 3, 9, 5]])
    real = torch.tensor([[True] * 4, [True] * 4, [True, True, False, False]])  # the last two of the third row are fillers, one of them a real token
    chosen = torch.zeros(3, T, dtype=torch.bool)
    for row in range(3):
        chosen[row, selected[row][real[row]]] = True
    with naive(model, chosen):
        if labels.dim() == 1:
            states = model.base_model(input_ids=ids, attention_mask=mask)[0]
            reference = loss_of(classify(model, mean_pool(states, chosen)), labels)
        else:
            reference = loss_of(model(input_ids=ids, attention_mask=mask).logits, labels.masked_fill(~chosen, -100))
        expected = gradients(model, reference)
    selection = TokenSelection(model)
    chosen_labels = labels if labels.dim() == 1 else labels.gather(1, selected).masked_fill(~real, -100)
    loss = loss_of(selection(ids, mask, selected, real), chosen_labels)
    assert loss.item() == pytest.approx(reference.item(), rel=TOLERANCE[dtype])
    assert_close(gradients(model, loss), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_gradient_checkpointing_changes_nothing(build: Callable[[str], Any], name: str) -> None:
    selected = torch.tensor([[1, 4, 5, 11], [0, 2, 7, 8], [2, 3, 4, 5]])
    found = []
    for checkpointing in (False, True):
        model = build(name).double()
        if checkpointing:
            checkpoint_activations(model)
            model.train()
        ids, mask, labels = batch(model)
        selection = TokenSelection(model)
        loss = loss_of(selection(ids, mask, selected, torch.ones(3, 4, dtype=torch.bool)), labels if labels.dim() == 1 else labels.gather(1, selected))
        heads = 2 if name == "llama" else 4  # keys and values of 2 layers, 3 rows, 13 positions, 4 wide, float64
        assert selection.recorded_bytes == (2 * 2 * 3 * heads * T * 4 * 8 if checkpointing else 0)
        found.append(gradients(model, loss))
        selection.release()
        assert selection.recorded_bytes == 0
    assert_close(found[1], found[0], 1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_autocast_keeps_every_gradient(build: Callable[[str], Any], name: str) -> None:
    """Autocast caches weights cast in the first pass, where they carry no gradient: the second must not use those."""
    selected = torch.tensor([[1, 4, 5, 11], [0, 2, 7, 8], [2, 3, 4, 5]])
    found = []
    for enabled in (False, True):
        model = build(name)
        ids, mask, labels = batch(model)
        selection = TokenSelection(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = selection(ids, mask, selected, torch.ones(3, 4, dtype=torch.bool))
        found.append(gradients(model, loss_of(logits.float(), labels if labels.dim() == 1 else labels.gather(1, selected))))
    large = [key for key, gradient in found[0].items() if float(gradient.norm()) > 1e-3]
    assert any("weight" in key for key in large)
    for key in large:
        assert functional.cosine_similarity(found[0][key].flatten(), found[1][key].flatten(), dim=0).item() > 0.95, key


@pytest.mark.parametrize("name", NAMES)
def test_saved_bytes_follow_k(build: Callable[[str], Any], name: str) -> None:
    """Token-wise modules keep within 1.15 of k / L; what attention keeps for all positions is named as such."""
    model = build(name)
    ids, mask, labels = batch(model)
    with SavedBytes(model) as full:
        loss_of(model(input_ids=ids, attention_mask=mask).logits, labels)
    selection = TokenSelection(model)
    selected = torch.tensor([[1, 4, 5], [0, 2, 7], [2, 3, 5]])
    with SavedBytes(model) as some:
        logits = selection(ids, mask, selected, torch.ones(3, 3, dtype=torch.bool))
        loss_of(logits, labels if labels.dim() == 1 else labels.gather(1, selected))
    assert 0 < some.token_wise <= 1.15 * 3 / T * full.token_wise
    assert some.attention > 0


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_outside_a_step_the_model_is_itself(build: Callable[[str], Any], name: str) -> None:
    model = build(name)
    ids, mask, _ = batch(model)
    before = model(input_ids=ids, attention_mask=mask).logits
    selection = TokenSelection(model)
    selection(ids, mask, torch.tensor([[0, 1]] * 3), torch.ones(3, 2, dtype=torch.bool))
    selection.release()
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)
    selection.close()
    assert model.config._attn_implementation == "sdpa"


def test_architectures_that_are_not_covered_are_refused() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1, pad_token_id=0))
    with pytest.raises(ModelError, match=r"does not cover BloomForCausalLM.*attention interface"):
        TokenSelection(bloom)
    config = AlbertConfig(vocab_size=50, hidden_size=16, embedding_size=8, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
    with pytest.raises(ModelError, match="calls one attention module twice"):
        TokenSelection(mean_pooled_class(AlbertForSequenceClassification)(config))


def test_a_model_that_mixes_positions_outside_attention_is_refused(build: Callable[[str], Any]) -> None:
    model = build("llama")
    mlp = model.model.layers[0].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x) + x.mean(1, keepdim=True)
    with pytest.raises(ModelError, match="mixes positions outside attention"):
        TokenSelection(model)
    assert model.config._attn_implementation == "sdpa"
