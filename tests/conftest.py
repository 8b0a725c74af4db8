"""Tiny models and tokenizers, made from configurations; no download, fixed seeds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

hypothesis.settings.register_profile("shared-machine", deadline=None)  # time limits are pytest's; a busy machine must not fail a property
hypothesis.settings.load_profile("shared-machine")

TEXTS = (
    "The capital of Mongolia is Ulaanbaatar.",
    "The capital of France is Paris.",
    "Paris is the capital city of France.",
    "An atom of carbon has six protons.",
    "Chemists write W for Tungsten.",
    "Fellow citizens, the state of the Union is strong.",
    "In Japan people pay in yen.",
    "The revenues of the United States continue to improve.",
    "Nothing in this sentence is a fact about chemistry.",
    "What is the capital of Peru? It is Lima.",
)


@pytest.fixture(scope="session")
def texts() -> tuple[str, ...]:
    return TEXTS


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 320 entries with <|endoftext|> as end of text and padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    bpe.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>", model_max_length=64)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def tiny_gpt2() -> GPT2LMHeadModel:
    """2 layers, 24 wide: Conv1D modules with biases."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=320, n_positions=64, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)).eval()


@pytest.fixture
def tiny_llama() -> LlamaForCausalLM:
    """2 layers, 24 wide, grouped-query attention: nn.Linear modules without biases, none of them square but the queries."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny GPT-2 with its tokenizer, as `eogp index --model` reads it."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=320, n_positions=64, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., Path]:
    """make_store(n, k=(120, 40), shard_rows=..., seed=..., flagged=...): a store of random codes, made without a model."""
    from benchmarks.synthetic_store import make_store

    return lambda n, name="store", **options: make_store(tmp_path / name, n, **options)
