"""Models without storage: shapes of named families, or of any configuration, for estimates that read no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, Olmo2Config

from engine.covariance import input_key
from engine.errors import ModelError
from engine.memory import FitEstimate
from engine.model import LoadedModel
from engine.modules import TrackedModule

# layers, hidden, intermediate, heads, key-value heads, vocabulary
_OLMO2 = {
    "olmo2-1b": (16, 2048, 8192, 16, 16, 100352),
    "olmo2-7b": (32, 4096, 11008, 32, 32, 100352),
    "olmo2-13b": (40, 5120, 13824, 40, 40, 100352),
    "olmo2-32b": (64, 5120, 27648, 40, 8, 100352),
}
_LLAMA = {"llama-8b": (32, 4096, 14336, 32, 8, 128256)}
NAMED = (*_OLMO2, *_LLAMA)


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of GPU: bytes, and sustained multiply-adds counted as two operations per second, for the model (16 bit) and for statistics (float32)."""

    name: str
    memory: int
    model_rate: float
    sums_rate: float


CARDS = (Card("24 GB", 24 * 10**9, 80e12, 40e12), Card("80 GB", 80 * 10**9, 150e12, 14e12))  # about half the published peaks of RTX 4090 and A100


def named_config(name: str) -> Any | None:
    """Configuration of a shape in NAMED, None for another name."""
    kind, table = (Olmo2Config, _OLMO2) if name in _OLMO2 else (LlamaConfig, _LLAMA)
    if name not in table:
        return None
    layers, hidden, intermediate, heads, kv_heads, vocab = table[name]
    return kind(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )


def without_storage(config: Any, source: str, dtype: torch.dtype, device: str = "meta") -> LoadedModel:
    """A LoadedModel on the meta device: shapes and structure, no values. Raises ModelError for a family that cannot be laid out that way."""
    classification = any("SequenceClassification" in kind for kind in getattr(config, "architectures", None) or [])
    auto = AutoModelForSequenceClassification if classification else AutoModelForCausalLM
    try:
        with torch.device(device):
            model = auto.from_config(config, attn_implementation="eager", dtype=dtype).eval().requires_grad_(False)
    except (ValueError, KeyError, ImportError) as e:
        raise ModelError(f"{source}: cannot be laid out from its configuration ({str(e).splitlines()[0]})") from e
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return LoadedModel(
        model=model,
        tokenizer=None,
        task="sequence-classification" if classification else "causal-lm",
        device=torch.device(device),
        dtype=dtype,
        source=source,
        max_length=int(getattr(text, "max_position_embeddings", 2048)),
        pad_id=0,
        vocab_size=int(text.vocab_size),
        fingerprint={},
        attention="eager",
    )


def hub_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a folder or hub id, without its weights. Raises ModelError."""
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as e:
        raise ModelError(f"cannot read a configuration from {name}: {str(e).splitlines()[0]}", field="model") from e


def fit_hours(tracked: Sequence[TrackedModule], total_parameters: int, estimate: FitEstimate, tokens: int, length: int, card: Card) -> float:
    """Hours of a fit on `tokens` tokens in all, in examples of `length`, from the arithmetic alone."""
    weights = {m.name: m.d_out * m.d_in for m in tracked}
    model = sums = 0.0
    for group in estimate.groups:
        lowest = min((m.layer for m in group.modules if m.layer >= 0), default=0)
        above = sum(weights[m.name] for m in tracked if m.layer >= lowest or m.layer < 0)
        model += 2 * tokens * (2 * total_parameters + 2 * above)
        widths = [*{input_key(m): m.d_in for m in group.modules}.values(), *(m.d_out for m in group.modules)]
        sums += tokens * 2 * sum(d * d for d in widths) * (0.6 + 1)  # half a product for covariances, a rotation for eigenvalues
        sums += tokens * 2 * sum(weights[m.name] for m in group.modules)
        sums += 10 * 9 * sum(d**3 for d in widths)  # eigendecompositions run at about a tenth of the rate of products
    return (model / card.model_rate + sums / card.sums_rate) / 3600
