"""One run of `eogp finetune`: data, model, training, and a Hugging Face folder that `eogp index` loads."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import EarlyStoppingCallback, TrainerState, TrainingArguments

from engine.errors import DataError, LimitError, ModelError, SettingError
from engine.example import Example
from engine.model import LoadedModel, from_parts
from indexer.finetune.checkpoints import RECORD, check_record, checkpoints, step_of, write_json
from indexer.finetune.data import Collator, split
from indexer.finetune.examples import Rows, check_classes, class_names, data_hash, read, report, tokenise
from indexer.finetune.models import (
    add_adapters,
    checkpoint_activations,
    folder_exists,
    four_bit,
    fresh_gpt2,
    load_causal,
    load_classifier,
    load_tokenizer,
    row_texts,
    train_tokenizer,
)
from indexer.finetune.plots import plot_curve
from indexer.finetune.progress import LossCurve, Progress
from indexer.finetune.selection import Selector
from indexer.finetune.settings import FinetuneSettings, LoraMethods, SelectionMethods
from indexer.finetune.token_selection import TokenSelection
from indexer.finetune.trainer import FinetuneTrainer
from indexer.interruption import InterruptedRunError, stop_on_signals
from indexer.reporter import Reporter, clock

RECORD_FORMAT = 1
NOT_COMPARED = {"resume", "keep_checkpoints", "threads", "data", "log_json"}  # threads and data are compared by what they amount to


@dataclass
class Finetuned:
    """What a run left behind: the folder, and what finetune.json says."""

    out: Path
    record: dict[str, Any]


def finetune(out: Path, settings: FinetuneSettings, reporter: Reporter | None = None) -> Finetuned:
    """Train as the settings say and save into `out`. Raises engine.errors.* with one sentence for every mistake in data, model or settings."""
    began = time.monotonic()
    reporter = reporter or Reporter(log_json=settings.log_json)
    check_settings(out, settings)
    transformers.utils.logging.disable_progress_bar()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    rows = read(settings)
    loaded = build_model(rows, settings)
    examples = tokenise(rows, loaded, settings)
    train, held_out = held_out_split(examples, loaded, settings)
    if loaded.task == "sequence-classification":
        check_classes(train)
    if settings.method in SelectionMethods:
        check_selected(settings.selected_tokens, max(len(e) for e in train))
    root = out / "checkpoints"
    record = run_record(settings, loaded, train, held_out)
    counts = report(rows, examples)
    reporter.say("\n".join(describe(counts, len(held_out), loaded, settings)), **counts)
    model = trainable(loaded, settings)
    selection = TokenSelection(model) if settings.method in SelectionMethods else None
    resumed = start(root, record, settings, reporter)
    trainer = make_trainer(model, loaded, selection, train, held_out, root, settings)
    trainer.add_callback(LossCurve(out / "loss.jsonl"))
    with reporter.stage("train", trainer.args.max_steps, "steps", step_of(resumed) if resumed else 0) as stage, stop_on_signals() as stop:
        trainer.add_callback(Progress(reporter, stage, stop))
        with quiet_transformers(), out_of_memory(settings):
            result = trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
        if stop.set and trainer.state.global_step < trainer.args.max_steps:
            raise InterruptedRunError(f"{out}: stopped after step {trainer.state.global_step:,}; run the same command with --resume to go on from there")
    if selection:
        selection.close()
    record |= {
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "kept_step": kept_step(trainer.state),
        "metrics": {"train_loss": result.training_loss, **(kept_metrics(trainer.state) if held_out else {})},
        "counts": counts,
        "seconds": round(time.monotonic() - began, 1),
    }
    save(out, model, loaded, settings, record)
    shutil.rmtree(root)
    plot_curve(out / "loss.jsonl", out / "loss.png")
    reporter.say(f"saved      {out} after {record['steps']:,} steps, {clock(record['seconds'])}", **record["metrics"])
    return Finetuned(out, record)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Errors only: loading a checkpoint of a model with tied weights would warn of a missing key."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)


@contextmanager
def out_of_memory(settings: FinetuneSettings) -> Iterator[None]:
    """Raises LimitError saying what would help where memory runs out."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and not isinstance(e, torch.OutOfMemoryError) and "can't allocate memory" not in str(e):
            raise
        raise LimitError(
            f"out of memory with batch_size {settings.batch_size}: lower it and raise accumulate, or try gradient_checkpointing, or --method token-selection",
            field="batch_size",
        ) from e


def describe(counts: dict[str, Any], held_out: int, loaded: LoadedModel, settings: FinetuneSettings) -> list[str]:
    """What will be trained on what, for people."""
    lines = [
        f"data       {counts['examples']:,} examples, {counts['targets']:,} targets; {counts['bad_rows']:,} bad rows skipped, {counts['truncated']:,} truncated"
    ]
    lines += [f"           {line}" for line in counts["first_bad_rows"][:5]]
    if held_out:
        lines.append(f"held out   {held_out:,} examples")
    parameters = sum(p.numel() for p in loaded.model.parameters())
    return [*lines, f"model      {loaded.source}: {parameters:,} parameters, {loaded.task}, method {settings.method}, on {loaded.device}"]


def make_trainer(
    model: Any,
    loaded: LoadedModel,
    selection: TokenSelection | None,
    train: Sequence[Example],
    held_out: Sequence[Example],
    root: Path,
    settings: FinetuneSettings,
) -> FinetuneTrainer:
    selector = Selector(settings.selected_tokens, settings.seed) if selection else None
    trainer = FinetuneTrainer(
        model,
        training_arguments(root, settings, loaded, len(train), bool(held_out)),
        train,
        held_out,
        Collator(loaded.pad_id, selector),
        keep=settings.keep_checkpoints,
        callbacks=[EarlyStoppingCallback(settings.patience)] if settings.patience else [],
        selection=selection,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def check_settings(out: Path, settings: FinetuneSettings) -> None:
    """Raises SettingError for settings that contradict each other, before any work."""
    if (settings.model is None) == (settings.new is None):
        raise SettingError("name a model with --model, or start a fresh one with --new gpt2 (one of them)", field="model")
    if settings.new and settings.task == "sequence-classification":
        raise SettingError("a fresh model is a language model; for classification name a model with --model", field="new")
    if settings.eval_data is not None and settings.eval_share > 0:
        raise SettingError("give either eval_data or eval_share, not both", field="eval_share")
    if settings.patience and settings.eval_data is None and settings.eval_share == 0:
        raise SettingError("patience needs held-out examples: give --eval-data or --eval-share", field="patience")
    if settings.eval_every and settings.save_every and settings.save_every % settings.eval_every:
        raise SettingError(
            f"save_every {settings.save_every} must be a multiple of eval_every {settings.eval_every}, so that the best model can be kept", field="save_every"
        )
    if settings.dtype not in ("auto", "float32"):
        raise SettingError("weights are trained in float32; for a lower precision of the passes use --precision", field="dtype")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingError("fine-tuning runs in one process on one device; start it without a distributed launcher", field="device")
    if settings.precision == "float16" and device(settings) == "cpu":
        raise SettingError("precision float16 needs a GPU; use bfloat16 or float32 on a CPU", field="precision")
    four_bit(settings)
    if settings.method in SelectionMethods:
        Selector(settings.selected_tokens, settings.seed)
    if not settings.resume and folder_exists(out):
        raise SettingError(f"{out} already holds a model; choose another folder, or remove it", field="out")
    if settings.resume and folder_exists(out):
        raise SettingError(f"{out} holds a finished model: there is nothing to resume", field="resume")
    if not settings.resume and checkpoints(out / "checkpoints"):
        raise SettingError(f"{out} holds checkpoints of a stopped run; go on with --resume, or remove the folder", field="resume")


def check_selected(k: float, longest: int) -> None:
    """Raises SettingError for k above the longest example. In a shorter example than k, every position is selected."""
    if k > longest:
        raise SettingError(
            f"selected_tokens {k:g} exceeds the longest training example, {longest:,} tokens: choose fewer, or use --method full or lora",
            field="selected_tokens",
        )


def build_model(rows: Rows, settings: FinetuneSettings) -> LoadedModel:
    """The model before training: fresh, a causal LM, or a classifier with a head for the classes of the data."""
    if settings.new:
        tokenizer = (
            load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
            if settings.tokenizer
            else train_tokenizer(row_texts(rows.good, settings), settings.vocabulary, settings.context)
        )
        return from_parts(fresh_gpt2(settings, tokenizer), tokenizer, device(settings), source=f"new {settings.new}")
    if classifies(settings):
        assert settings.model is not None
        tokenizer = load_tokenizer(settings.tokenizer or settings.model, trust_remote_code=settings.trust_remote_code)
        if settings.method in LoraMethods and (settings.four_bit or not settings.merge):
            raise SettingError("the head of a classifier is saved with the merged model: leave --no-merge and --four-bit off", field="merge")
        return from_parts(load_classifier(settings, class_names(rows.good, settings), tokenizer), tokenizer, device(settings), source=settings.model)
    model, tokenizer = load_causal(settings)
    return from_parts(model, tokenizer, device(settings), source=str(settings.model))


def device(settings: FinetuneSettings) -> str:
    """Raises SettingError for a device that is not there."""
    if settings.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = settings.device.partition(":")[0]
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise SettingError(f"device {settings.device!r} is not there; use auto or cpu", field="device")
    return settings.device


def classifies(settings: FinetuneSettings) -> bool:
    """Whether the run trains a classifier: as the task says, else as the kind of data or the model's architecture says."""
    if settings.task != "auto":
        return settings.task == "sequence-classification"
    if settings.kind == "classification":
        return True
    assert settings.model is not None
    if settings.model.lower().endswith(".gguf"):
        return False
    try:
        config = transformers.AutoConfig.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError, KeyError) as e:
        raise ModelError(f"cannot load a model from {settings.model}: {str(e).splitlines()[0]}", field="model") from None
    return any("SequenceClassification" in name for name in config.architectures or [])


def held_out_split(examples: list[Example], loaded: LoadedModel, settings: FinetuneSettings) -> tuple[list[Example], list[Example]]:
    """(training, held out). Raises DataError when nothing is left to train on."""
    if settings.eval_data is not None:
        other = settings.model_copy(update={"data": [str(settings.eval_data)]})
        return examples, tokenise(read(other), loaded, other)
    if settings.eval_share and len(examples) < 2:
        raise DataError("eval_share needs two usable rows or more", field="eval_share")
    kept, held = split(len(examples), settings.eval_share, settings.seed)
    return [examples[i] for i in kept], [examples[i] for i in held]


def run_record(settings: FinetuneSettings, loaded: LoadedModel, train: Sequence[Example], held_out: Sequence[Example]) -> dict[str, Any]:
    """What a resumed run must share with the one that it continues; also the head of finetune.json."""
    values = settings.model_dump(mode="json")
    return {
        "format": RECORD_FORMAT,
        **{f"setting {k}": v for k, v in values.items() if k not in NOT_COMPARED},
        "task": loaded.task,
        "device": loaded.device.type,
        "threads": torch.get_num_threads(),
        "data": data_hash(train),
        "held-out data": data_hash(held_out),
        "base model": _short(loaded.fingerprint),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _short(fingerprint: dict[str, Any]) -> str:
    import hashlib
    import json

    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]


def start(root: Path, record: dict[str, Any], settings: FinetuneSettings, reporter: Reporter) -> Path | None:
    """Write the record of a new run, or check that of the resumed one; the checkpoint to continue from."""
    if settings.resume:
        check_record(root, record)
        whole = checkpoints(root)
        reporter.say(f"resuming from {whole[-1].name}" if whole else "no whole checkpoint yet: starting from the beginning")
        return whole[-1] if whole else None
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_json(root / RECORD, record)
    except OSError as e:
        raise LimitError(f"{root}: cannot be written: {e.strerror or e}", field="out") from None
    return None


def trainable(loaded: LoadedModel, settings: FinetuneSettings) -> Any:
    """The model with the weights that the method trains requiring gradients."""
    model = loaded.model
    model.config.use_cache = False
    if settings.gradient_checkpointing:
        checkpoint_activations(model)
    if settings.method in LoraMethods:
        return add_adapters(model, settings, loaded.task)
    model.requires_grad_(True)
    return model


def training_arguments(root: Path, settings: FinetuneSettings, loaded: LoadedModel, n_train: int, evaluates: bool) -> TrainingArguments:
    """The Trainer's arguments. Steps in an epoch = ceil(ceil(n / batch) / accumulate)."""
    per_epoch = math.ceil(math.ceil(n_train / settings.batch_size) / settings.accumulate)
    total = max(1, int(per_epoch * settings.epochs + 0.5))
    eval_every, save_every = settings.eval_every or settings.save_every, settings.save_every or settings.eval_every
    log_every = max(n for n in range(1, 11) if (save_every or per_epoch) % n == 0)  # a logged mean never spans a checkpoint, so that resuming changes no line
    arguments = TrainingArguments(
        output_dir=str(root),
        max_steps=total,
        learning_rate=settings.learning_rate,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=2 * settings.batch_size,
        gradient_accumulation_steps=settings.accumulate,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(settings.schedule, settings.schedule),
        warmup_steps=round(settings.warmup * total),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip,
        bf16=settings.precision == "bfloat16",
        fp16=settings.precision == "float16",
        seed=settings.seed,
        use_cpu=loaded.device.type == "cpu",
        eval_strategy="no" if not evaluates else "steps" if eval_every else "epoch",
        eval_steps=eval_every,
        save_strategy="steps" if save_every else "epoch",
        save_steps=save_every or 500,
        load_best_model_at_end=evaluates,
        metric_for_best_model=None if not evaluates else "eval_loss" if loaded.task == "causal-lm" else "eval_accuracy",
        greater_is_better=None if not evaluates else loaded.task != "causal-lm",
        logging_steps=log_every,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        optim="adamw_torch",
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several visible GPUs would mean DataParallel, which no method here is written for
    return arguments


def kept_step(state: TrainerState) -> int:
    """The step whose weights are kept: of the best checkpoint, where held-out examples chose one, else the last."""
    return step_of(Path(state.best_model_checkpoint)) if state.best_model_checkpoint else state.global_step


def kept_metrics(state: TrainerState) -> dict[str, float]:
    """The held-out metrics of the model that is kept, as logged when it was evaluated."""
    found = [log for log in state.log_history if "eval_loss" in log and log["step"] == kept_step(state)]
    return {k: v for k, v in found[-1].items() if k.startswith("eval_")} if found else {}


def save(out: Path, model: Any, loaded: LoadedModel, settings: FinetuneSettings, record: dict[str, Any]) -> None:
    """Write the model into a partial folder, then move its files into `out`, config.json last. With LoRA: out/adapters, and the merged model unless --no-merge."""
    partial = out / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if settings.method in LoraMethods:
            model.save_pretrained(partial / "adapters")
            model = model.merge_and_unload() if settings.merge and not settings.four_bit else None
        if model is not None:
            model.config.use_cache = True
            model.save_pretrained(partial)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(partial)
        write_json(partial / "finetune.json", record)
    except (OSError, RuntimeError, SafetensorError) as e:
        shutil.rmtree(partial, ignore_errors=True)
        raise LimitError(f"{out}: the model could not be written ({str(e).splitlines()[0]}); make room, then go on with --resume") from e
    for path in sorted(partial.iterdir(), key=lambda p: p.name == "config.json"):
        path.replace(out / path.name)
    partial.rmdir()
