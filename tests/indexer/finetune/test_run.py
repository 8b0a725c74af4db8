"""Whole runs on tiny models: what is saved, determinism, resumption bit for bit, and every kind of bad input."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, BertConfig, BertForSequenceClassification, BertModel, PreTrainedModel

from engine.errors import DataError, LimitError, NumericalError, SettingError
from engine.model import load_model
from engine.pooling import mean_pooled_class
from engine.settings import ModelSettings
from indexer.finetune import trainer as trainer_module
from indexer.finetune.checkpoints import checkpoints
from indexer.finetune.progress import read_curve
from indexer.finetune.run import finetune
from indexer.finetune.settings import FinetuneSettings
from indexer.interruption import InterruptedRunError

SENTENCES = [
    f"The {a} {b} sees a {c} in the {d}." for a in ("red", "old", "big") for b in ("cat", "dog") for c in ("bird", "fish") for d in ("garden", "house")
]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def text_data(tmp_path: Path) -> str:
    return write(tmp_path / "text.jsonl", [{"text": t} for t in SENTENCES])


@pytest.fixture
def label_rows() -> list[dict[str, Any]]:
    return [{"text": t, "label": "cats" if "cat" in t else "dogs"} for t in SENTENCES]


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A causal LM to start from."""
    folder = tmp_path_factory.mktemp("base")
    data = write(folder / "text.jsonl", [{"text": t} for t in SENTENCES])
    finetune(folder / "model", new_gpt2(data))
    return folder / "model"


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """An encoder without a head, with dropout."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64)
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def new_gpt2(data: str, **changes: Any) -> FinetuneSettings:
    values: dict[str, Any] = {
        "new": "gpt2", "layers": 2, "width": 16, "heads": 2, "vocabulary": 300, "context": 48, "data": [data],
        "epochs": 2, "batch_size": 8, "learning_rate": 3e-3, "device": "cpu",
    }  # fmt: skip
    return FinetuneSettings(**{**values, **changes})


def classifier(bert: Path, data: str, **changes: Any) -> FinetuneSettings:
    values: dict[str, Any] = {
        "model": str(bert), "kind": "classification", "data": [data], "epochs": 4, "batch_size": 8, "learning_rate": 5e-3, "device": "cpu",
    }  # fmt: skip
    return FinetuneSettings(**{**values, **changes})


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


class StoppedError(Exception):
    """Stands for a kill."""


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Kill the run when it begins the pass behind `steps` passes."""
    plain = trainer_module.FinetuneTrainer.training_step
    seen = 0

    def step(self: Any, *args: Any) -> Any:
        nonlocal seen
        if seen == steps:
            raise StoppedError
        seen += 1
        return plain(self, *args)

    monkeypatch.setattr(trainer_module.FinetuneTrainer, "training_step", step)


def test_a_fresh_model_learns_and_loads(tmp_path: Path, text_data: str) -> None:
    found = finetune(tmp_path / "out", new_gpt2(text_data, eval_share=0.2, epochs=4))
    curve = read_curve(tmp_path / "out" / "loss.jsonl")
    held_out = [line["eval_loss"] for line in curve if "eval_loss" in line]
    assert len(held_out) == 4 and held_out[-1] < held_out[0] - 0.1
    assert found.record["metrics"]["eval_loss"] == min(held_out)
    loaded = load_model(ModelSettings(model=str(tmp_path / "out"), device="cpu"))
    assert loaded.task == "causal-lm" and loaded.max_length == 48
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert json.loads((tmp_path / "out" / "finetune.json").read_text())["counts"]["examples"] == 24


def test_held_out_loss_is_the_mean_over_target_tokens(tmp_path: Path, text_data: str) -> None:
    """The saved model's loss, token by token with Hugging Face's own forward, equals what the run reports."""
    held = write(tmp_path / "held.jsonl", [{"text": t} for t in SENTENCES[:5]] + [{"prompt": "The cat", "completion": " sees a dog."}][:0])
    found = finetune(tmp_path / "out", new_gpt2(text_data, eval_data=Path(held)))
    loaded = load_model(ModelSettings(model=str(tmp_path / "out"), device="cpu"))
    total, count = 0.0, 0
    for text in SENTENCES[:5]:
        ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            total += loaded.model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert found.record["metrics"]["eval_loss"] == pytest.approx(total / count, rel=1e-4)


def test_the_seed_decides(tmp_path: Path, text_data: str) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        finetune(tmp_path / name, new_gpt2(text_data, seed=seed, method="token-selection", selected_tokens=4))
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert weights(tmp_path / "a") != weights(tmp_path / "c")
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


def test_prompts_carry_no_loss(tmp_path: Path, base_folder: Path) -> None:
    """Held-out loss of prompt + completion rows is that of the completion's tokens and the end of text."""
    rows = [{"prompt": "The old cat sees", "completion": " a bird in the house."}, {"prompt": "The big dog", "completion": " sees a fish."}]
    data = write(tmp_path / "data.jsonl", rows)
    found = finetune(tmp_path / "out", FinetuneSettings(model=str(base_folder), data=[data], eval_data=Path(data), epochs=1, device="cpu", learning_rate=1e-9))
    loaded = load_model(ModelSettings(model=str(base_folder), device="cpu"))
    total, count = 0.0, 0
    for row in rows:
        ids = [*loaded.tokenizer(row["prompt"] + row["completion"])["input_ids"], loaded.tokenizer.eos_token_id]
        first = len(loaded.tokenizer(row["prompt"])["input_ids"])  # these prompts end at a token's border
        with torch.no_grad():
            logits = loaded.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        total -= sum(logits[t - 1, ids[t]].item() for t in range(first, len(ids)))
        count += len(ids) - first
    assert found.record["metrics"]["eval_loss"] == pytest.approx(total / count, rel=1e-4)


def test_accumulated_passes_equal_one_large_pass(tmp_path: Path, base_folder: Path) -> None:
    """One step over all 24 rows, whose lengths differ, as 3 passes of 8 and as 1 of 24."""
    rows = [{"text": t + " " + t * (i % 3)} for i, t in enumerate(SENTENCES)]
    data = write(tmp_path / "data.jsonl", rows)
    tensors = []
    for name, size, accumulate in (("a", 8, 3), ("b", 24, 1)):
        settings = FinetuneSettings(
            model=str(base_folder), data=[data], epochs=1, batch_size=size, accumulate=accumulate, learning_rate=1e-3, warmup=0, device="cpu", clip=0
        )
        finetune(tmp_path / name, settings)
        tensors.append(load_model(ModelSettings(model=str(tmp_path / name), device="cpu")).model.state_dict())
    before = load_model(ModelSettings(model=str(base_folder), device="cpu")).model.state_dict()
    name = "transformer.h.1.mlp.c_proj.weight"
    assert float((tensors[0][name] - before[name]).abs().max()) > 5e-4
    for key in tensors[0]:
        close = (tensors[0][key] - tensors[1][key]).abs() <= 1e-5
        assert float(close.float().mean()) > 0.99, key  # AdamW's first step is a sign: a gradient of zero up to rounding may go either way


@pytest.mark.parametrize(
    ("killed", "changes"),
    [
        (4, {"method": "full", "eval_share": 0.2}),
        (7, {"method": "full", "accumulate": 2, "save_every": 2, "epochs": 4}),
        (5, {"method": "lora+token-selection", "selected_tokens": 0.3, "lora_dropout": 0.2, "save_every": 2}),
    ],
)
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, text_data: str, monkeypatch: pytest.MonkeyPatch, killed: int, changes: dict[str, Any]) -> None:
    settings = new_gpt2(text_data, **{"epochs": 3, **changes})
    finetune(tmp_path / "whole", settings)
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, killed)
        finetune(tmp_path / "killed", settings)
    assert checkpoints(tmp_path / "killed" / "checkpoints")
    finetune(tmp_path / "killed", settings.model_copy(update={"resume": True}))
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert read_curve(tmp_path / "killed" / "loss.jsonl") == read_curve(tmp_path / "whole" / "loss.jsonl")


def test_a_classifier_with_dropout_resumes_bit_for_bit(
    tmp_path: Path, bert_folder: Path, label_rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = classifier(bert_folder, write(tmp_path / "labels.jsonl", label_rows), method="token-selection", selected_tokens=3, epochs=3, eval_share=0.2)
    finetune(tmp_path / "whole", settings)
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 7)
        finetune(tmp_path / "killed", settings)
    finetune(tmp_path / "killed", settings.model_copy(update={"resume": True}))
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


def test_half_a_checkpoint_does_not_count(tmp_path: Path, text_data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = new_gpt2(text_data, save_every=1)
    finetune(tmp_path / "whole", settings)
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 4)
        finetune(tmp_path / "killed", settings)
    found = checkpoints(tmp_path / "killed" / "checkpoints")
    assert [p.name for p in found] == ["checkpoint-3", "checkpoint-4"]
    with (found[-1] / "optimizer.pt").open("r+b") as file:
        file.truncate(100)
    assert [p.name for p in checkpoints(tmp_path / "killed" / "checkpoints")] == ["checkpoint-3"]
    finetune(tmp_path / "killed", settings.model_copy(update={"resume": True}))
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


def test_resuming_with_other_settings_is_refused(tmp_path: Path, text_data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = new_gpt2(text_data)
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 4)
        finetune(tmp_path / "out", settings)
    with pytest.raises(SettingError, match=r"learning_rate was 0\.003 and is now 0\.1"):
        finetune(tmp_path / "out", settings.model_copy(update={"resume": True, "learning_rate": 0.1}))
    with pytest.raises(SettingError, match="data was"):
        other = write(tmp_path / "other.jsonl", [{"text": t} for t in [*SENTENCES[1:], SENTENCES[0]]])
        finetune(tmp_path / "out", settings.model_copy(update={"resume": True, "data": [other]}))
    with pytest.raises(SettingError, match="go on with --resume"):
        finetune(tmp_path / "out", settings)
    with pytest.raises(SettingError, match="nothing to resume"):
        finetune(tmp_path / "elsewhere", settings.model_copy(update={"resume": True}))
    assert not (tmp_path / "elsewhere").exists()


def test_a_finished_model_is_not_overwritten(base_folder: Path, text_data: str) -> None:
    before = weights(base_folder)
    with pytest.raises(SettingError, match="already holds a model"):
        finetune(base_folder, new_gpt2(text_data))
    with pytest.raises(SettingError, match="nothing to resume"):
        finetune(base_folder, new_gpt2(text_data, resume=True))
    assert weights(base_folder) == before


def test_a_loss_that_becomes_nan_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path, text_data: str) -> None:
    with pytest.raises(NumericalError, match=r"the loss became (nan|inf) at step 2; the last good checkpoint is .*checkpoint-1\."):
        finetune(tmp_path / "out", new_gpt2(text_data, learning_rate=1e30, warmup=0, save_every=1, schedule="constant"))
    [good] = checkpoints(tmp_path / "out" / "checkpoints")
    assert good.name == "checkpoint-1"
    assert not (tmp_path / "out" / "config.json").exists()


def test_weights_that_are_not_finite_are_not_checkpointed(tmp_path: Path, text_data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trainer_module.FinetuneTrainer.training_step

    def step(self: Any, *args: Any) -> Any:
        loss = plain(self, *args)
        if self.state.global_step == 1:
            next(iter(self.model.parameters())).grad[0, 0] = math.nan
        return loss

    monkeypatch.setattr(trainer_module.FinetuneTrainer, "training_step", step)
    with pytest.raises(NumericalError, match="weights are not finite after step 2; the last good checkpoint is"):
        finetune(tmp_path / "out", new_gpt2(text_data, save_every=1, clip=0))
    assert [p.name for p in checkpoints(tmp_path / "out" / "checkpoints")] == ["checkpoint-1"]


def test_a_full_disk_keeps_the_checkpoints_before(tmp_path: Path, text_data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = new_gpt2(text_data, save_every=1)
    plain = torch.save

    def full(obj: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if "checkpoint-3" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(obj, path, *args, **kwargs)

    with (
        monkeypatch.context() as patch,
        pytest.raises(LimitError, match=r"step 3 could not be written .*No space left.*last good checkpoint is .*checkpoint-2"),
    ):
        patch.setattr(torch, "save", full)
        finetune(tmp_path / "out", settings)
    assert sorted(p.name for p in (tmp_path / "out" / "checkpoints").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    with monkeypatch.context() as patch, pytest.raises(LimitError, match=r"needs about .* MB and the disk has 0 MB free"):
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
        finetune(tmp_path / "out", settings.model_copy(update={"resume": True}))
    finetune(tmp_path / "out", settings.model_copy(update={"resume": True}))
    finetune(tmp_path / "whole", settings)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


def test_a_full_disk_at_the_end_loses_nothing(tmp_path: Path, text_data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = new_gpt2(text_data)
    plain = PreTrainedModel.save_pretrained

    def full(self: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).name == "partial":
            raise SafetensorError("Error while serializing: I/O error: No space left on device")
        plain(self, path, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(LimitError, match=r"the model could not be written .*No space left.*--resume"):
        patch.setattr(PreTrainedModel, "save_pretrained", full)
        finetune(tmp_path / "out", settings)
    assert not (tmp_path / "out" / "config.json").exists() and not (tmp_path / "out" / "partial").exists()
    finetune(tmp_path / "out", settings.model_copy(update={"resume": True}))
    finetune(tmp_path / "whole", settings)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


def test_memory_that_runs_out_says_what_helps(tmp_path: Path, text_data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer_module.FinetuneTrainer, "training_step", step)
    with pytest.raises(LimitError, match="out of memory with batch_size 8: lower it"):
        finetune(tmp_path / "out", new_gpt2(text_data))


def test_a_signal_stops_behind_a_checkpoint(tmp_path: Path, text_data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trainer_module.FinetuneTrainer.training_step

    def step(self: Any, *args: Any) -> Any:
        if self.state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *args)

    with monkeypatch.context() as patch, pytest.raises(InterruptedRunError, match="stopped after step 4; run the same command with --resume"):
        patch.setattr(trainer_module.FinetuneTrainer, "training_step", step)
        finetune(tmp_path / "out", new_gpt2(text_data))
    assert checkpoints(tmp_path / "out" / "checkpoints")[-1].name == "checkpoint-4"
    finetune(tmp_path / "out", new_gpt2(text_data, resume=True))
    finetune(tmp_path / "whole", new_gpt2(text_data))
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


def test_bfloat16_passes_train_float32_weights(tmp_path: Path, text_data: str) -> None:
    settings = new_gpt2(text_data, precision="bfloat16", method="token-selection", selected_tokens=6, epochs=6, eval_share=0.2)
    finetune(tmp_path / "out", settings)
    held_out = [line["eval_loss"] for line in read_curve(tmp_path / "out" / "loss.jsonl") if "eval_loss" in line]
    assert held_out[-1] < held_out[0] - 0.1
    assert load_model(ModelSettings(model=str(tmp_path / "out"), device="cpu")).dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda"}, "device 'cuda' is not there"),
        ({"device": "gpu7"}, "device 'gpu7' is not there"),
        ({"selected_tokens": 2.5, "method": "token-selection"}, "whole number"),
        ({"selected_tokens": 40, "method": "token-selection"}, r"selected_tokens 40 exceeds the longest training example, \d+ tokens"),
        ({"heads": 3}, "width 16 is not divisible by heads 3"),
        ({"model": "x"}, "one of them"),
        ({"new": None}, "one of them"),
        ({"task": "sequence-classification"}, "a fresh model is a language model"),
        ({"patience": 2}, "patience needs held-out examples"),
        ({"eval_every": 3, "save_every": 4, "eval_share": 0.2}, "multiple of eval_every"),
        ({"precision": "float16"}, "needs a GPU"),
        ({"dtype": "bfloat16"}, "--precision"),
        ({"four_bit": True}, "lora"),
        ({"four_bit": True, "method": "lora"}, "needs a CUDA GPU"),
        ({"method": "lora", "lora_targets": ["nonsense"]}, "no module 'nonsense'"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, text_data: str, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match=message):
        finetune(tmp_path / "out", new_gpt2(text_data, **changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("k", ["0", "-3", "nan", "many"])
def test_k_must_be_positive(k: str) -> None:
    with pytest.raises(SettingError, match="--selected-tokens"):
        FinetuneSettings.resolve({"selected_tokens": k})


def test_a_classifier_by_token_selection_loads_as_it_was_trained(tmp_path: Path, bert_folder: Path, label_rows: list[dict[str, Any]]) -> None:
    data = write(tmp_path / "labels.jsonl", label_rows)
    found = finetune(
        tmp_path / "out", classifier(bert_folder, data, method="token-selection", selected_tokens=4, eval_data=Path(data), epochs=15, learning_rate=1e-2)
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["pooling"] == "mean" and config["label2id"] == {"cats": 0, "dogs": 1}
    loaded = load_model(ModelSettings(model=str(tmp_path / "out"), device="cpu"))
    assert loaded.task == "sequence-classification"
    hits, losses = 0, []
    for row in label_rows:
        ids = torch.tensor([loaded.tokenizer(row["text"])["input_ids"]])
        with torch.no_grad():
            logits = loaded.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        label = config["label2id"][row["label"]]
        hits += int(logits.argmax()) == label
        losses.append(-logits.log_softmax(-1)[label].item())
    assert found.record["metrics"]["eval_accuracy"] == hits / len(label_rows)
    assert found.record["metrics"]["eval_loss"] == pytest.approx(float(np.mean(losses)), rel=1e-4)
    assert found.record["metrics"]["eval_accuracy"] > 0.9


def test_lora_saves_adapters_and_a_merged_model_of_the_same_mind(tmp_path: Path, bert_folder: Path, label_rows: list[dict[str, Any]]) -> None:
    from peft import PeftModel

    data = write(tmp_path / "labels.jsonl", label_rows)
    finetune(tmp_path / "out", classifier(bert_folder, data, method="lora+token-selection", selected_tokens=4, learning_rate=2e-2))
    merged = load_model(ModelSettings(model=str(tmp_path / "out"), device="cpu"))
    torch.manual_seed(0)
    base = mean_pooled_class(BertForSequenceClassification).from_pretrained(bert_folder, config=AutoConfig.from_pretrained(tmp_path / "out")).eval()
    ids = torch.tensor([merged.tokenizer(SENTENCES[0])["input_ids"]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        untrained = base(**inputs).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "adapters").eval()(**inputs).logits
        assert torch.allclose(merged.model(**inputs).logits, adapted, atol=1e-5)
    assert not torch.allclose(untrained, adapted, atol=1e-2)


def test_lora_without_merging_leaves_the_adapters_alone(tmp_path: Path, base_folder: Path, text_data: str) -> None:
    settings = FinetuneSettings(model=str(base_folder), data=[text_data], method="lora", merge=False, epochs=1, learning_rate=1e-2, device="cpu")
    finetune(tmp_path / "out", settings)
    assert not (tmp_path / "out" / "config.json").exists()
    loaded = load_model(ModelSettings(model=str(base_folder), adapters=str(tmp_path / "out" / "adapters"), device="cpu"))
    assert loaded.has_adapters and loaded.adapters_tracked


def test_bad_labels_are_named_by_line(tmp_path: Path, bert_folder: Path, label_rows: list[dict[str, Any]]) -> None:
    rows = [{**r, "label": int(r["label"] == "cats")} for r in label_rows]
    bad = [{"text": "a cat"}, {"text": "a cat", "label": 1.5}, {"text": "a cat", "label": -1}, {"text": "a cat", "label": None}, "{not json"]
    data = write(tmp_path / "labels.jsonl", [*rows, *bad])
    found = finetune(tmp_path / "out", classifier(bert_folder, data, epochs=1))
    reasons = found.record["counts"]["first_bad_rows"]
    assert found.record["counts"]["bad_rows"] == 5
    for line, word in ((25, "missing"), (26, "number"), (27, "outside"), (28, "null"), (29, "not JSON")):
        assert any(f":{line}:" in r and word in r for r in reasons), (line, reasons)
    with pytest.raises(DataError, match=r"labels\.jsonl:2[59]: "):
        finetune(tmp_path / "strict", classifier(bert_folder, data, on_error="fail"))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["cats"] * 4, "only the class 'cats'"),
        ([3, 3, 3], "only the class 3"),
        ([0, "cats", 1], "both class numbers and names"),
        ([0, 10**9, 1], "more than 10,000 classes"),
        ([1.5, 2.5], "no usable class"),
    ],
)
def test_classes_that_cannot_be_learned(tmp_path: Path, bert_folder: Path, labels: list[Any], message: str) -> None:
    data = write(tmp_path / "labels.jsonl", [{"text": "a cat", "label": label} for label in labels])
    with pytest.raises(DataError, match=message):
        finetune(tmp_path / "out", classifier(bert_folder, data))
    assert not (tmp_path / "out").exists()


def test_token_selection_refuses_another_pooling(tmp_path: Path, bert_folder: Path, label_rows: list[dict[str, Any]]) -> None:
    with pytest.raises(SettingError, match="--pooling mean"):
        finetune(tmp_path / "out", classifier(bert_folder, write(tmp_path / "l.jsonl", label_rows), method="token-selection", pooling="model"))


def test_a_classifier_is_saved_merged(tmp_path: Path, bert_folder: Path, label_rows: list[dict[str, Any]]) -> None:
    with pytest.raises(SettingError, match="saved with the merged model"):
        finetune(tmp_path / "out", classifier(bert_folder, write(tmp_path / "l.jsonl", label_rows), method="lora", merge=False))


def test_data_without_a_usable_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no usable row; the first bad row: .*data\.jsonl:1: "):
        finetune(tmp_path / "out", new_gpt2(write(tmp_path / "data.jsonl", ["{"]), tokenizer=None, new="gpt2"))
    assert not (tmp_path / "out").exists()


def test_early_stop_keeps_the_best(tmp_path: Path, text_data: str) -> None:
    """At a learning rate that diverges from its best, patience ends the run and the best step's metrics are reported."""
    settings = new_gpt2(text_data, eval_share=0.2, eval_every=1, patience=2, epochs=30, learning_rate=0.5, warmup=0, schedule="constant")
    found = finetune(tmp_path / "out", settings)
    held_out = {line["step"]: line["eval_loss"] for line in read_curve(tmp_path / "out" / "loss.jsonl") if "eval_loss" in line}
    assert found.record["steps"] < 90
    assert found.record["kept_step"] == min(held_out, key=lambda s: held_out[s])
    assert found.record["metrics"]["eval_loss"] == min(held_out.values())


def test_gradient_checkpointing_trains_alike(tmp_path: Path, text_data: str) -> None:
    for name, on in (("a", False), ("b", True)):
        finetune(tmp_path / name, new_gpt2(text_data, gradient_checkpointing=on, method="token-selection", selected_tokens=4, epochs=1))
    a, b = (load_model(ModelSettings(model=str(tmp_path / n), device="cpu")).model.state_dict() for n in "ab")
    assert all(torch.allclose(a[k], b[k], atol=1e-5) for k in a)
