"""The self-check of 16-bit gradients: cosines against the plain formula, acceptance, fallback, refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.dtype_check
from engine.dtype_check import DtypeReport, compare_gradients, probe_examples, settle_dtype
from engine.errors import ModelError
from engine.example import Example
from engine.model import from_parts, load_model
from engine.modules import bare, track
from engine.settings import ModelSettings


def test_cosines_are_those_of_the_gradients(tiny_gpt2: Any, make_examples: Callable[..., list[Example]], captured_gradients: Any) -> None:
    import copy

    low = from_parts(copy.deepcopy(tiny_gpt2).bfloat16())
    high = from_parts(tiny_gpt2)
    examples = make_examples(320, (9, 12))
    report = compare_gradients(low, high, examples)
    cosines = {}
    for i, (a, b) in enumerate(zip(*(captured_gradients(m, examples, track(m).tracked) for m in (low, high)), strict=True)):
        for name in a:
            cosines[name, f"e{i}"] = float(torch.nn.functional.cosine_similarity(a[name].float().flatten(), b[name].flatten(), dim=0))
    assert report.compared == len(cosines)
    worst = min(cosines, key=cosines.__getitem__)
    assert (report.module, report.example) == worst
    assert report.cosine == pytest.approx(cosines[worst], abs=2e-3)  # the batch of captured_gradients pads, and bfloat16 rounds
    assert 0.9 < report.cosine < 1


def test_a_model_whose_gradients_agree_keeps_its_dtype(tiny_model_folder: Path) -> None:
    loaded = load_model(ModelSettings(model=str(tiny_model_folder), device="cpu", dtype="bfloat16"))
    assert loaded.dtype == torch.bfloat16
    assert len(loaded.notes) == 1 and "gradients agree with float32, smallest cosine " in loaded.notes[0]
    assert load_model(ModelSettings(model=str(tiny_model_folder), device="cpu", dtype="bfloat16"), check_dtype=False).notes == []


def test_float32_is_not_checked(tiny_model_folder: Path) -> None:
    loaded = load_model(ModelSettings(model=str(tiny_model_folder), device="cpu"))
    assert loaded.dtype == torch.float32 and loaded.notes == []


def broken(model: Any) -> Any:
    """A layer that goes wrong in 16 bits alone."""
    linear = bare(model).model.layers[0].mlp.up_proj

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return -output if output.dtype == torch.bfloat16 else output

    linear.register_forward_hook(hook)
    return model


def test_wrong_gradients_fall_back_to_float32_or_are_refused(tiny_llama: Any) -> None:
    loaded = from_parts(broken(tiny_llama.bfloat16()))
    settled = settle_dtype(loaded, asked_for=False)
    assert settled.dtype == torch.float32 and settled.fingerprint["dtype"] == "float32"
    assert next(settled.model.parameters()).dtype == torch.float32
    assert "gradients do not agree with float32 (smallest cosine" in settled.notes[0]
    with pytest.raises(ModelError, match=r"gradients in bfloat16 do not agree with float32: smallest cosine .* \(module model\.layers\..*use --dtype float32"):
        settle_dtype(loaded, asked_for=True)


def test_non_finite_gradients_never_pass(tiny_llama: Any, make_examples: Callable[..., list[Example]]) -> None:
    import copy

    low = from_parts(copy.deepcopy(tiny_llama).bfloat16())
    with torch.no_grad():
        bare(low.model).model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    report = compare_gradients(low, from_parts(tiny_llama), make_examples(320, (9,)))
    assert report.cosine == -1.0


def test_no_room_for_a_copy_is_noted(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(engine.dtype_check.copy, "deepcopy", full)
    settled = settle_dtype(from_parts(tiny_llama.bfloat16()), asked_for=True)
    assert settled.dtype == torch.bfloat16 and "were not checked" in settled.notes[0]


def test_probes_need_no_tokenizer_and_fit_the_context(tiny_llama: Any, tokenizer: Any) -> None:
    for loaded in (from_parts(tiny_llama), from_parts(tiny_llama, tokenizer)):
        short = replace(loaded, max_length=5)
        for example in probe_examples(short):
            assert len(example) == 5 and example.target_mask.tolist() == [False] + [True] * 4
            assert example.input_ids.max() < loaded.vocab_size


def test_the_report_reads_as_a_clause() -> None:
    assert str(DtypeReport(0.98765, "a.b", "2", 56)) == "smallest cosine 0.9877 (module a.b, probe 2) of 56 gradients"
