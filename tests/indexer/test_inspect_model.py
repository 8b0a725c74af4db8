"""`eogp inspect model`: the paper's models from shapes alone, real folders from their configuration, and what both print."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from engine.budget import choose_budget
from engine.errors import DataError, ModelError
from engine.groups import factor_bytes
from engine.memory import estimate_fit
from engine.model import LoadedModel, from_parts
from engine.modules import ModuleReport, track
from engine.settings import FitSettings, SketchSettings
from engine.shapes import CARDS, NAMED, fit_hours, named_config, without_storage
from indexer.inspect_cli import app
from indexer.inspect_model import inspect_model, shared_bytes
from indexer.settings import InspectSettings

# the paper's Table 2: bytes of an uncompressed gradient in 16 bit; modules
TABLE2 = {"olmo2-1b": (2.147, 112), "olmo2-7b": (12.952, 224), "olmo2-13b": (25.376, 280), "olmo2-32b": (62.411, 448)}
# eigenvectors and corrected eigenvalues in float32, GB
CURVATURE = {"olmo2-1b": (15, 4.3), "olmo2-7b": (64, 26), "llama-8b": (92, 28)}


@cache
def laid_out(name: str) -> tuple[LoadedModel, ModuleReport]:
    loaded = without_storage(named_config(name), name, torch.bfloat16)
    return loaded, track(loaded)


@pytest.mark.parametrize("name", TABLE2)
def test_named_shapes_reproduce_the_papers_table(name: str) -> None:
    _, report = laid_out(name)
    size, modules = TABLE2[name]
    assert round(2 * report.tracked_parameters / 1e9, 3) == size
    assert len(report.tracked) == modules
    plan = choose_budget(report.tracked, SketchSettings(method="paper"), n_fit=4096)
    assert plan.payload_bytes == modules * 258


@pytest.mark.parametrize("name", CURVATURE)
def test_curvature_of_the_named_shapes(name: str) -> None:
    loaded, report = laid_out(name)
    factors, lam = CURVATURE[name]
    assert round(factor_bytes(report.tracked) / 1e9) == factors
    assert 4 * report.tracked_parameters / 1e9 == pytest.approx(lam, abs=0.1)
    estimate = estimate_fit(loaded, report.tracked, FitSettings(), free=10**13)
    assert estimate.curvature == factor_bytes(report.tracked) + 4 * report.tracked_parameters
    assert estimate.passes == 2


def test_a_seven_billion_model_gets_through_a_24_gb_card() -> None:
    loaded, report = laid_out("olmo2-7b")
    small, large = (estimate_fit(loaded, report.tracked, FitSettings(batch_tokens=1024), free=c.memory - 2 * report.total_parameters) for c in CARDS)
    assert small.peak < 24 * 10**9 and large.peak < 80 * 10**9
    assert len(small.groups) > len(large.groups)
    assert sorted(m.name for g in small.groups for m in g.modules) == sorted(m.name for m in report.tracked)
    hours = [fit_hours(report.tracked, report.total_parameters, e, 2 * 10**6, 512, c) for e, c in zip((small, large), CARDS, strict=True)]
    assert 1 < hours[1] < hours[0] < 24


@pytest.mark.parametrize("name", NAMED)
def test_every_named_shape_is_printed(name: str) -> None:
    text = "\n".join(inspect_model(name, InspectSettings()))
    assert text.count("card with") == 2 and "passes" in text and "bytes per example" in text
    if name == "olmo2-32b":
        assert "does not fit, the weights alone take 64.5 GB" in text
    if name == "llama-8b":
        assert "32 model.layers.*.self_attn.k_proj  1024 x 4096" in text
        assert "lm_head: vocabulary head, 525,336,576 parameters" in text


FAMILIES: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0),
    "llama": transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1),
    "olmo2": transformers.Olmo2Config(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0),
    "gpt_neox": transformers.GPTNeoXConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2),
    "qwen3": transformers.Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8
    ),
    "phi": transformers.PhiConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_alone_tell_what_the_loaded_model_does(family: str) -> None:
    config = FAMILIES[family]
    bare = track(without_storage(config, family, torch.float32))
    real = track(from_parts(AutoModelForCausalLM.from_config(config)))
    assert [(m.name, m.d_out, m.d_in, m.bias, m.layer, m.input_group) for m in bare.tracked] == [
        (m.name, m.d_out, m.d_in, m.bias, m.layer, m.input_group) for m in real.tracked
    ]
    assert bare.skipped == real.skipped
    assert (bare.tracked_parameters, bare.total_parameters) == (real.tracked_parameters, real.total_parameters)


def test_a_folder_with_data(tiny_model_folder: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts) + "not json\n")
    result = CliRunner().invoke(app, ["inspect", "model", str(tiny_model_folder), "--data", str(data), "--bytes-per-example", "18"])
    assert result.exit_code == 0, result.output
    assert f"{len(texts)} examples of" in result.output
    assert "GPT2LMHeadModel, causal-lm, float32" in result.output
    assert "2 transformer.h.*.attn.c_attn  72 x 25 (bias included)" in result.output
    assert "transformer.wte: embedding" in result.output
    assert "1 group, 2 passes" in result.output


def test_a_classifier_is_loaded_where_its_shapes_do_not_tell(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = BertConfig(vocab_size=320, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = "\n".join(inspect_model(str(tmp_path), InspectSettings()))
    assert "BertForSequenceClassification, sequence-classification" in text
    assert "1 classifier  3 x 17 (bias included)" in text


def test_mistakes_are_named(tmp_path: Path, tiny_model_folder: Path) -> None:
    with pytest.raises(ModelError, match="no model"):
        inspect_model(None, InspectSettings())
    with pytest.raises(ModelError, match="cannot read a configuration"):
        inspect_model(str(tmp_path / "nothing"), InspectSettings())
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(DataError):
        inspect_model(str(tiny_model_folder), InspectSettings(data=[str(empty)]))


def test_shared_bytes_count_a_shared_basis_once() -> None:
    _, report = laid_out("llama-8b")
    plan = choose_budget(report.tracked, SketchSettings(method="paper"), n_fit=4096)
    whole = shared_bytes(report, plan)
    apart = plan.projection_bytes + 4 * sum(m.d_out * min(m.d_out, 8192) + m.d_in * min(m.d_in, 8192) for m in report.tracked) + 12 * sum(plan.m.values())
    spared = 4 * 32 * (2 + 1) * 4096**2  # of q, k, v and of gate, up all but one
    assert whole == apart - spared
