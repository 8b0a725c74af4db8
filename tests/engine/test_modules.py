"""Which modules are tracked, in which order, and what is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from engine.errors import ModelError
from engine.model import from_parts
from engine.modules import layer_of, track


def test_gpt2_modules_in_forward_order(tiny_gpt2: Any) -> None:
    report = track(from_parts(tiny_gpt2))
    parts = [("attn.c_attn", 72, 25), ("attn.c_proj", 24, 25), ("mlp.c_fc", 96, 25), ("mlp.c_proj", 24, 97)]
    wanted = [(f"transformer.h.{i}.{part}", d_out, d_in, i) for i in (0, 1) for part, d_out, d_in in parts]
    assert [(t.name, t.d_out, t.d_in, t.layer) for t in report.tracked] == wanted
    assert all(t.bias for t in report.tracked)
    assert all(t.input_group == t.name for t in report.tracked)


def test_llama_modules_share_inputs(tiny_llama: Any) -> None:
    report = track(from_parts(tiny_llama))
    first = {t.name.split(".", 3)[3]: (t.d_out, t.d_in, t.bias, t.input_group.split(".", 3)[3]) for t in report.tracked if t.layer == 0}
    assert first == {
        "self_attn.q_proj": (24, 24, False, "self_attn.q_proj"),
        "self_attn.k_proj": (12, 24, False, "self_attn.q_proj"),
        "self_attn.v_proj": (12, 24, False, "self_attn.q_proj"),
        "self_attn.o_proj": (24, 24, False, "self_attn.o_proj"),
        "mlp.gate_proj": (40, 24, False, "mlp.gate_proj"),
        "mlp.up_proj": (40, 24, False, "mlp.gate_proj"),
        "mlp.down_proj": (24, 40, False, "mlp.down_proj"),
    }


def test_every_parameter_is_tracked_or_skipped_with_a_reason(tiny_gpt2: Any, tiny_llama: Any) -> None:
    for model in (tiny_gpt2, tiny_llama):
        report = track(from_parts(model))
        assert report.total_parameters == sum(p.numel() for p in model.parameters())
        assert report.tracked_parameters + sum(n for *_, n in report.skipped) == report.total_parameters
        assert 0 < report.share < 1
    reasons = {name: reason for name, reason, _ in report.skipped}
    assert reasons["model.embed_tokens"] == "embedding"
    assert reasons["lm_head"] == "vocabulary head"
    assert reasons["model.norm"] == "not a linear layer (LlamaRMSNorm)"


def test_a_classification_head_is_tracked() -> None:
    config = BertConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    report = track(from_parts(BertForSequenceClassification(config)))
    last = report.tracked[-2:]
    assert [(t.name, t.d_out, t.d_in, t.layer) for t in last] == [("bert.pooler.dense", 16, 17, -1), ("classifier", 3, 17, -1)]


def test_a_module_that_the_forward_pass_does_not_call_is_reported(tiny_llama: Any) -> None:
    tiny_llama.model.layers[1].spare = nn.Linear(3, 2)
    report = track(from_parts(tiny_llama))
    assert ("model.layers.1.spare", "not called in the forward pass", 8) in report.skipped
    assert len(report.tracked) == 14


def test_equal_tensors_that_are_not_the_same_are_two_groups(tiny_llama: Any) -> None:
    attention = tiny_llama.model.layers[0].self_attn
    v_proj = attention.v_proj
    attention.v_proj = nn.Sequential(Copy(), v_proj)
    tracked = {t.name: t for t in track(from_parts(tiny_llama)).tracked}
    assert tracked["model.layers.0.self_attn.v_proj.1"].input_group == "model.layers.0.self_attn.v_proj.1"


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Plain(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_a_subclass_is_tracked_only_if_it_acts_as_linear(tiny_llama: Any) -> None:
    """Otherwise delta a^T would not be the gradient of its weight."""
    for mlp, kind in zip((layer.mlp for layer in tiny_llama.model.layers), (Scaled, Plain), strict=True):
        mlp.up_proj = kind(24, 40, bias=False)
    report = track(from_parts(tiny_llama))
    assert ("model.layers.0.mlp.up_proj", "does more than a linear layer (Scaled)", 24 * 40) in report.skipped
    names = [t.name for t in report.tracked]
    assert "model.layers.0.mlp.up_proj" not in names and "model.layers.1.mlp.up_proj" in names


class Copy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def test_a_model_without_linear_layers_is_refused(tiny_llama: Any) -> None:
    tiny_llama.model.layers = nn.ModuleList()
    with pytest.raises(ModelError, match="no linear layer"):
        track(from_parts(tiny_llama))


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.up_proj", 3),
        ("transformer.h.11.attn.c_attn", 11),
        ("bert.encoder.layer.0.output.dense", 0),
        ("gpt_neox.layers.7.mlp.dense_h_to_4h", 7),
        ("model.layers.2.mlp.experts.5.down_proj", 2),
        ("classifier", -1),
    ],
)
def test_block_index(name: str, layer: int) -> None:
    assert layer_of(name) == layer
