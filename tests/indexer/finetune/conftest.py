"""Small models of each architecture, drawn from a fixed seed, without dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.pooling import mean_pooled_class

VOCAB = 50
GPT2 = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
LLAMA = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
BERT = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
BERT |= {"num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**LLAMA)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA, head_dim=4)),
    "bert": lambda: mean_pooled_class(BertForSequenceClassification)(BertConfig(**BERT)),
    "gpt2-classifier": lambda: mean_pooled_class(GPT2ForSequenceClassification)(GPT2Config(**GPT2, num_labels=3)),
}


@pytest.fixture
def build() -> Callable[[str], Any]:
    """Name -> a fresh float32 model in evaluation mode; the same weights at every call."""

    def make(name: str) -> Any:
        torch.manual_seed(0)
        model = ARCHITECTURES[name]()
        for p in model.parameters():  # zero biases and unit norms would hide mistakes
            torch.nn.init.normal_(p, std=0.3)
        return model.eval()

    return make


@pytest.fixture
def architectures() -> list[str]:
    return list(ARCHITECTURES)
