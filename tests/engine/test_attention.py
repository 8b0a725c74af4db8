"""The attention kernel must not depend on padding: the mask is always given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, Gemma2Config, Gemma2ForCausalLM

from engine.capture import Capture
from engine.example import Example, collate
from engine.model import from_parts
from engine.modules import track

SMALL = {"vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """(mask given, is_causal) of each call of SDPA."""
    calls: list[tuple[bool, bool]] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((kwargs.get("attn_mask") is not None, bool(kwargs.get("is_causal"))))
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return calls


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "gpt_neox", "bert"])
def test_the_mask_is_given_with_and_without_padding(kind: str, kernel_calls: list[tuple[bool, bool]], make_examples: Callable[..., list[Example]]) -> None:
    torch.manual_seed(0)
    sizes = (
        {"vocab_size": 97, "n_embd": 24, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
        if kind == "gpt2"
        else {**SMALL, "num_key_value_heads": 4}
    )
    config = AutoConfig.for_model(kind, **sizes)
    auto = AutoModelForSequenceClassification if kind == "bert" else AutoModelForCausalLM
    loaded = from_parts(auto.from_config(config))
    assert loaded.attention == "sdpa, always masked"
    capture = Capture(loaded, track(loaded).tracked)
    examples = make_examples(97, (6, 9), classes=2 if kind == "bert" else 0)
    for batch in (examples[:1], examples):
        kernel_calls.clear()
        capture.run(collate(batch, range(len(batch)), 0), lambda *_: None)
        assert kernel_calls == [(True, False)] * 2


def test_a_soft_cap_is_not_dropped() -> None:
    """SDPA has no soft cap; such models run eagerly, and the record says so."""
    loaded = from_parts(Gemma2ForCausalLM(Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8)))
    assert loaded.attention == "eager" == loaded.model.config._attn_implementation


def test_logits_are_those_of_the_plain_kernel(tiny_llama: Any, make_examples: Callable[..., list[Example]]) -> None:
    batch = collate(make_examples(320), range(4), 0)
    wanted = tiny_llama(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.detach()
    from_parts(tiny_llama)
    found = tiny_llama(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    on = batch.attention_mask.bool()
    torch.testing.assert_close(found[on], wanted[on], rtol=1e-5, atol=1e-6)


def test_generation_still_works(tiny_llama: Any) -> None:
    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = tiny_llama.generate(ids, attention_mask=torch.ones_like(ids), **options)
    from_parts(tiny_llama)
    assert torch.equal(tiny_llama.generate(ids, attention_mask=torch.ones_like(ids), **options), wanted)
