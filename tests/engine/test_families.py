"""Every supported model family, from a tiny random configuration: captured gradients against autograd, alone against in a padded batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.capture import Capture
from engine.coordinates import CoordinateMap
from engine.example import Example, collate
from engine.experts import ExpertLinear
from engine.loss import uniforms
from engine.model import LoadedModel, from_parts
from engine.modules import bare, track

SMALL = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    # model type, configuration, tracked modules
    "gpt2": ("gpt2", {"vocab_size": 97, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}, 8),
    "llama": ("llama", GROUPED, 14),
    "llama-biases": ("llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}, 14),
    "olmo2": ("olmo2", GROUPED, 14),
    "qwen2": ("qwen2", GROUPED, 14),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 8}, 14),
    "mistral": ("mistral", {**GROUPED, "sliding_window": 4}, 14),
    "gpt-neox": ("gpt_neox", SMALL, 8),
    "gemma": ("gemma", {**GROUPED, "head_dim": 8}, 14),
    "gemma2": ("gemma2", {**GROUPED, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}, 14),
    "phi": ("phi", {**SMALL, "hidden_size": 32}, 12),
    "phi3": ("phi3", GROUPED, 8),
    "mixtral": ("mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, 8 + 2 * 8),
    "olmoe": ("olmoe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}, 8 + 2 * 8),
    "qwen2-moe": (
        "qwen2_moe",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "decoder_sparse_step": 1},
        8 + 2 * (4 + 8),
    ),
    "qwen3-moe": ("qwen3_moe", {**GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}, 8 + 2 * 8),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **SMALL,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 6,
            "n_group": 1,
            "topk_group": 1,
        },
        5 + 3 + 5 + 8 + 3,
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **GROUPED,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        8 + 2 * 8,
    ),
}
CLASSIFIERS = {
    "bert": ("bert", SMALL, 2 * 6 + 2),
    "roberta": ("roberta", {**SMALL, "max_position_embeddings": 66}, 2 * 6 + 2),
    "distilbert": ("distilbert", {"vocab_size": 97, "dim": 24, "hidden_dim": 40, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}, 2 * 6 + 2),
    "llama": ("llama", GROUPED, 15),
    "gpt2": ("gpt2", FAMILIES["gpt2"][1], 9),
}


def scrambled(model: Any) -> Any:
    """Random weights of a size that a trained model has, biases and norms included, so that no term vanishes."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.08)
    return model


def causal(family: str) -> LoadedModel:
    kind, settings, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **settings)
    attention = "eager" if kind in ("gemma2", "gpt_oss") else "sdpa"
    return from_parts(scrambled(AutoModelForCausalLM.from_config(config, attn_implementation=attention)))


def classifier(family: str) -> LoadedModel:
    kind, settings, _ = CLASSIFIERS[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{"pad_token_id": 0, **settings}, num_labels=3)
    return from_parts(scrambled(AutoModelForSequenceClassification.from_config(config)))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_causal_model(
    family: str, make_examples: Callable[..., list[Example]], captured_gradients: Any, autograd_gradients: Any, worst_error: Any
) -> None:
    loaded = causal(family)
    assert loaded.task == "causal-lm" and loaded.separable_head
    tracked = track(loaded).tracked
    assert len(tracked) == FAMILIES[family][2], [t.name for t in tracked]
    examples = make_examples(97)
    together = captured_gradients(loaded, examples, tracked)
    for example, found in zip(examples, together, strict=True):
        wanted, _ = autograd_gradients(loaded, example, tracked)
        assert worst_error(found, wanted) <= 1e-5
        assert worst_error(found, captured_gradients(loaded, [example], tracked)[0]) <= 1e-4


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_gradients_of_a_classifier(
    family: str, make_examples: Callable[..., list[Example]], captured_gradients: Any, autograd_gradients: Any, worst_error: Any
) -> None:
    loaded = classifier(family)
    assert loaded.task == "sequence-classification"
    tracked = track(loaded).tracked
    assert len(tracked) == CLASSIFIERS[family][2], [t.name for t in tracked]
    examples = make_examples(97, classes=3)
    together = captured_gradients(loaded, examples, tracked)
    sampled = captured_gradients(loaded, examples, tracked, "sampled", 2)
    for row, (example, found) in enumerate(zip(examples, together, strict=True)):
        wanted, _ = autograd_gradients(loaded, example, tracked)
        assert worst_error(found, wanted) <= 1e-5
        assert worst_error(found, captured_gradients(loaded, [example], tracked)[0]) <= 1e-4
        logits = loaded.model(input_ids=torch.from_numpy(example.input_ids)[None]).logits[0].detach()
        drawn = int((logits.softmax(-1).cumsum(-1) > uniforms(2, np.array([row]), np.array([0]))[0]).nonzero()[0])
        swapped = Example("drawn", example.input_ids, drawn, example.target_mask, "")
        assert worst_error(sampled[row], autograd_gradients(loaded, swapped, tracked)[0]) <= 1e-5
    assert any(worst_error(a, b) > 0.1 for a, b in zip(together, sampled, strict=True))


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_fused_experts_are_tracked_one_by_one(family: str, make_examples: Callable[..., list[Example]]) -> None:
    loaded = causal(family)
    report = track(loaded)
    experts = [t for t in report.tracked if isinstance(t.module, ExpertLinear)]
    assert [t.name for t in experts[:3]] == [f"model.layers.0.mlp.experts.{part}" for part in ("0.gate_up_proj", "0.down_proj", "1.gate_up_proj")]
    assert len({t.input_group for t in experts}) == len(experts)
    assert all(t.layer in (0, 1) for t in experts)
    assert any("router" in reason for _, reason, _ in report.skipped)
    layers = sum(p.numel() for p in bare(loaded.model).model.layers.parameters())
    skipped = sum(n for name, _, n in report.skipped if ".layers." in name)
    assert report.tracked_parameters + skipped == layers


def test_an_expert_that_no_token_reaches_gets_zeros(make_examples: Callable[..., list[Example]]) -> None:
    loaded = causal("mixtral")
    tracked = track(loaded).tracked
    example = Example("one", np.array([5, 6]), np.array([5, 6]), np.array([False, True]), "")
    seen: dict[str, bool] = {}
    Capture(loaded, tracked).run(collate([example], [0], 0), lambda t, a, d: seen.__setitem__(t.name, bool(d.any())))
    assert set(seen) == {t.name for t in tracked}
    assert not all(seen[t.name] for t in tracked if isinstance(t.module, ExpertLinear))


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "classifier"])
def test_positions_add_up_where_modules_do_not_see_the_whole_text(family: str, make_examples: Callable[..., list[Example]], worst_error: Any) -> None:
    """Experts see the tokens routed to them, a pooler sees one vector."""
    loaded = classifier("bert") if family == "classifier" else causal(family)
    curvature = identity_curvature(loaded)
    selection = {name: np.arange(0, c.d_out * c.d_in, 7) for name, c in curvature.modules.items()}
    coordinates = CoordinateMap.from_curvature(loaded, curvature, selection)
    batch = collate(make_examples(97, classes=3 if family == "classifier" else 0), range(4), loaded.pad_id)
    each: dict[str, torch.Tensor] = {}
    coordinates.stream(batch, each.__setitem__, per_position=True)
    assert all(z.shape[:2] == (4, 12) for z in each.values())
    assert worst_error({n: z.sum(1) for n, z in each.items()}, coordinates(batch)) <= 1e-6


def identity_curvature(loaded: LoadedModel) -> Any:
    """Bases that leave the gradient as it is: z = G / sqrt(1.5)."""
    from types import SimpleNamespace

    modules = {}
    for t in track(loaded).tracked:
        lam = torch.ones(t.d_out, t.d_in)
        modules[t.name] = SimpleNamespace(d_out=t.d_out, d_in=t.d_in, q_s=torch.eye(t.d_out), q_a=torch.eye(t.d_in), lam=lam, damping=0.5)
    return SimpleNamespace(modules=modules)


def test_experts_that_cannot_be_split_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import engine.experts

    monkeypatch.setattr(engine.experts, "_forward", None)
    monkeypatch.setattr(engine.experts, "_fused", lambda m: False)
    report = track(causal("mixtral"))
    assert ("model.layers.0.mlp.experts", "fused experts (MixtralExperts)", 4 * 3 * 24 * 40) in report.skipped
    assert not any("experts" in t.name for t in report.tracked)


def test_a_router_that_derives_from_a_linear_layer_is_not_tracked() -> None:
    config = AutoConfig.for_model("phimoe", **GROUPED, num_local_experts=4, num_experts_per_tok=2)
    report = track(from_parts(AutoModelForCausalLM.from_config(config)))
    reasons = {name: reason for name, reason, _ in report.skipped if "router" in name}
    assert reasons == {f"model.layers.{i}.mlp.router": "does more than a linear layer (PhimoeTopKRouter)" for i in (0, 1)}


def test_shared_inputs_are_one_group() -> None:
    groups = {t.name.removeprefix("model.layers.1."): t.input_group.removeprefix("model.layers.1.") for t in track(causal("qwen3")).tracked if t.layer == 1}
    assert groups == {
        "self_attn.q_proj": "self_attn.q_proj",
        "self_attn.k_proj": "self_attn.q_proj",
        "self_attn.v_proj": "self_attn.q_proj",
        "self_attn.o_proj": "self_attn.o_proj",
        "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.gate_proj",
        "mlp.down_proj": "mlp.down_proj",
    }
    parallel = [t for t in track(causal("phi")).tracked if t.layer == 0]
    assert {t.input_group for t in parallel if t.name.endswith(("q_proj", "k_proj", "v_proj", "fc1"))} == {parallel[0].name}


def test_modules_with_and_without_bias_do_not_share_a_group() -> None:
    """Qwen2 has biases on q, k, v; a bias adds a column to the basis."""
    tracked = track(causal("qwen2")).tracked
    for t in tracked:
        head = next(u for u in tracked if u.name == t.input_group)
        assert (head.d_in, head.bias) == (t.d_in, t.bias)


def test_regression_heads_are_refused() -> None:
    from engine.errors import ModelError

    config = transformers.BertConfig(**SMALL, num_labels=1)
    with pytest.raises(ModelError, match="has 1 output"):
        from_parts(transformers.BertForSequenceClassification(config))
