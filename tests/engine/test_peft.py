"""LoRA: attribution to the adapters (default) or to the base weights, against autograd; what cannot be attributed is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model

from engine.errors import ModelError
from engine.example import Example
from engine.model import from_parts, load_model
from engine.modules import bare, track
from engine.settings import ModelSettings

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks transformers by the old name


def with_lora(model: Any, **options: Any) -> PeftModel:
    """LoRA on queries and up-projections, with non-zero B, so that A has a gradient."""
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "up_proj"], lora_dropout=0.5, task_type="CAUSAL_LM", **options)
    peft = get_peft_model(model, config)
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in peft.named_parameters():
            if "lora_" in name:
                p.add_(torch.randn(p.shape, generator=g) * 0.1)
    return peft


@pytest.mark.parametrize("where", ["adapters", "base"])
@pytest.mark.parametrize("rslora", [False, True])
def test_gradients_of_adapters_and_of_base_weights(
    tiny_llama: Any, where: str, rslora: bool, make_examples: Callable[..., list[Example]], captured_gradients: Any, autograd_gradients: Any, worst_error: Any
) -> None:
    loaded = from_parts(with_lora(tiny_llama, use_rslora=rslora).double(), attribute_to=where)
    report = track(loaded)
    names = {t.name.removeprefix("model.layers.0.") for t in report.tracked if t.layer == 0}
    if where == "adapters":
        assert names == {f"{part}.lora_{x}.default" for part in ("self_attn.q_proj", "mlp.up_proj") for x in "AB"}
        assert {(t.d_out, t.d_in) for t in report.tracked} == {(3, 24), (24, 3), (40, 3)}
    else:
        assert len(names) == 7 and {"self_attn.q_proj.base_layer", "mlp.up_proj.base_layer", "mlp.down_proj"} <= names
    examples = make_examples(320)
    for example, found in zip(examples, captured_gradients(loaded, examples, report.tracked), strict=True):
        wanted, _ = autograd_gradients(loaded, example, report.tracked)
        assert worst_error(found, wanted) <= 1e-10


def test_queries_and_keys_of_one_input_share_a_group(tiny_llama: Any) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    tracked = track(from_parts(get_peft_model(tiny_llama, config))).tracked
    first = [t for t in tracked if t.layer == 0 and "lora_A" in t.name]
    assert len(first) == 2 and len({t.input_group for t in first}) == 1


def test_what_is_skipped_is_reported(tiny_llama: Any) -> None:
    loaded = from_parts(with_lora(tiny_llama))
    report = track(loaded)
    assert report.tracked_parameters == sum(p.numel() for n, p in bare(loaded.model).named_parameters() if "lora_" in n)
    reasons = {name: reason for name, reason, _ in report.skipped}
    assert reasons["model.layers.0.self_attn.k_proj"] == "base weight under an adapter"
    assert report.tracked_parameters + sum(n for *_, n in report.skipped) == report.total_parameters


def test_other_kinds_of_adapters_are_refused_by_name(tiny_llama: Any) -> None:
    ia3 = get_peft_model(tiny_llama, IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"))
    with pytest.raises(ModelError, match=r"adapters of kind IA3 .* --attribute-to base"):
        from_parts(ia3)


def test_dora_is_refused_by_name(tiny_llama: Any) -> None:
    with pytest.raises(ModelError, match="DoRA"):
        from_parts(with_lora(tiny_llama, use_dora=True))


def test_adapters_from_a_folder(tiny_model_folder: Path, tmp_path: Path, make_examples: Callable[..., list[Example]], captured_gradients: Any) -> None:
    base = load_model(ModelSettings(model=str(tiny_model_folder), device="cpu"))
    peft = get_peft_model(base.model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False, task_type="CAUSAL_LM"))
    peft.save_pretrained(tmp_path / "adapters")
    settings = ModelSettings(model=str(tiny_model_folder), adapters=str(tmp_path / "adapters"), device="cpu")
    loaded = load_model(settings)
    assert loaded.has_adapters and loaded.adapters_tracked
    assert all("lora_" in t.name for t in track(loaded).tracked)
    assert loaded.fingerprint != base.fingerprint
    wanted = captured_gradients(from_parts(peft), make_examples(320), track(from_parts(peft)).tracked)
    found = captured_gradients(loaded, make_examples(320), track(loaded).tracked)
    assert all(torch.allclose(a[n], b[n], rtol=1e-5, atol=1e-7) for a, b in zip(wanted, found, strict=True) for n in a)
    with pytest.raises(ModelError, match="cannot load adapters from"):
        load_model(ModelSettings(model=str(tiny_model_folder), adapters=str(tmp_path / "nothing"), device="cpu"))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning", "ignore:.*blocksize.*:UserWarning")
def test_lora_on_a_quantised_base(
    bits: int,
    tiny_llama: Any,
    tmp_path: Path,
    make_examples: Callable[..., list[Example]],
    captured_gradients: Any,
    worst_error: Any,
) -> None:
    pytest.importorskip("bitsandbytes", reason="quantised base models need the package bitsandbytes")
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, bos_token_id=0, eos_token_id=0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32) if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    base = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=quantised, dtype=torch.float32, device_map={"": "cpu"})
    loaded = from_parts(with_lora(base))
    report = track(loaded)
    assert len(report.tracked) == 8 and all("lora_" in t.name for t in report.tracked)
    examples = make_examples(320)
    for example, found in zip(examples, captured_gradients(loaded, examples, report.tracked), strict=True):
        weights = [t.module.weight for t in report.tracked]
        for w in weights:
            w.requires_grad_(True)
        logits = bare(loaded.model)(input_ids=torch.from_numpy(example.input_ids)[None]).logits[0]
        on = torch.from_numpy(example.target_mask[1:])
        loss = torch.nn.functional.cross_entropy(logits[:-1][on], torch.from_numpy(example.input_ids)[1:][on], reduction="sum")
        wanted = dict(zip((t.name for t in report.tracked), torch.autograd.grad(loss, weights), strict=True))
        for w in weights:
            w.requires_grad_(False)
        assert worst_error(found, wanted) <= 1e-5
