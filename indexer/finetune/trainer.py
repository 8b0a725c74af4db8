"""transformers' Trainer with our batches, target masks, held-out metrics, token selection and whole checkpoints."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from engine.errors import LimitError, NumericalError
from engine.example import Example
from indexer.finetune.checkpoints import check_space, checkpoints, rotate, seal
from indexer.finetune.data import IGNORED, Collator, LengthSortedBatches
from indexer.finetune.metrics import classification_metrics
from indexer.finetune.token_selection import TokenSelection

STATE_FACTOR = 3  # a checkpoint holds the weights and AdamW's two moments


class NumberedExamples(torch.utils.data.Dataset[tuple[int, Example]]):
    """Examples with the row number that seeds their token selection."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> tuple[int, Example]:
        return i, self.examples[i]


class SetEpoch(TrainerCallback):
    """Tells order and selection which epoch it is, counted from the step, so that a resumed run counts alike."""

    def __init__(self, sampler: LengthSortedBatches, collator: Collator, accumulate: int) -> None:
        self.sampler, self.collator = sampler, collator
        self.steps = math.ceil(len(sampler) / accumulate)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.sampler.epoch = self.collator.epoch = state.global_step // self.steps


class FinetuneTrainer(Trainer):
    """Minimises the mean cross-entropy of the target tokens of a step (causal LM), or of its examples (classification).

    Raises NumericalError naming the step when the loss is not finite, and LimitError when a checkpoint does not fit on the disk; in both cases the whole
    checkpoints before it stay.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        train: Sequence[Example],
        held_out: Sequence[Example],
        collator: Collator,
        *,
        keep: int,
        callbacks: Sequence[TrainerCallback] = (),
        selection: TokenSelection | None = None,
    ) -> None:
        self.sampler = LengthSortedBatches([len(e) for e in train], args.per_device_train_batch_size, args.seed)
        self.held_out = held_out
        self.keep = keep
        self.selection = selection
        self.control: TrainerControl
        super().__init__(
            model=model,
            args=args,
            train_dataset=NumberedExamples(train),
            eval_dataset=NumberedExamples(held_out) if held_out else None,
            data_collator=collator,
            callbacks=[SetEpoch(self.sampler, collator, args.gradient_accumulation_steps), *callbacks],
        )
        self.loss_is_scaled_for_ga = True

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_sampler=self.sampler, collate_fn=self.data_collator)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], torch.Tensor]:
        batches = [b for _, b in zip(range(num_batches), epoch_iterator, strict=False)]
        return batches, torch.tensor(max(sum(int((b["labels"] != IGNORED).sum()) for b in batches), 1), device=device)

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """Summed cross-entropy over the targets of this pass, divided by the targets of the whole step."""
        labels = inputs["labels"]
        if self.selection is not None:
            logits = self.selection(inputs["input_ids"], inputs["attention_mask"], inputs["selected"], inputs["selected_mask"])
        else:
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        loss = functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum") / num_items_in_batch
        return (loss, {"logits": logits}) if return_outputs else loss

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], num_items_in_batch: Any = None) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self.selection is not None:
            self.selection.release()
        if not torch.isfinite(loss):
            raise NumericalError(
                f"the loss became {loss.item()} at step {self.state.global_step + 1}; {self._last_good()} Lower --learning-rate or use --precision bfloat16"
            )
        return loss

    def _last_good(self) -> str:
        whole = checkpoints(Path(self.args.output_dir))
        return f"the last good checkpoint is {whole[-1]}." if whole else "no checkpoint had been written yet."

    @torch.no_grad()
    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Held-out metrics through all positions: eval_loss (mean over all target tokens or examples), for classification eval_accuracy and eval_f1."""
        self.model.eval()
        metrics = {f"{metric_key_prefix}_{k}": v for k, v in held_out_metrics(self.model, self.held_out, self.data_collator.pad_id, self.args).items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write, verify and seal a checkpoint; a partial one is removed."""
        root = Path(self.args.output_dir)
        folder = root / f"checkpoint-{self.state.global_step}"
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if not all(bool(torch.isfinite(p).all()) for p in trained):
            raise NumericalError(f"weights are not finite after step {self.state.global_step}; {self._last_good()} Lower --learning-rate")
        root.mkdir(parents=True, exist_ok=True)
        check_space(root, STATE_FACTOR * sum(p.numel() * p.element_size() for p in trained))
        try:
            super()._save_checkpoint(model, trial)
            seal(folder)
        except (OSError, RuntimeError, SafetensorError) as e:
            shutil.rmtree(folder, ignore_errors=True)
            reason = (str(e) or type(e).__name__).splitlines()[0]
            raise LimitError(
                f"checkpoint at step {self.state.global_step} could not be written ({reason}); {self._last_good()} Make room, then go on with --resume"
            ) from e
        rotate(root, self.keep, self.state.best_model_checkpoint)


def held_out_metrics(model: Any, examples: Sequence[Example], pad_id: int, args: TrainingArguments) -> dict[str, float]:
    """loss, and for classification accuracy and f1, over `examples`; the model must be in evaluation mode."""
    order = sorted(range(len(examples)), key=lambda i: -len(examples[i]))
    collator = Collator(pad_id)
    total, count = 0.0, 0
    predicted: list[int] = []
    true: list[int] = []
    classes = 0
    for start in range(0, len(order), args.per_device_eval_batch_size):
        batch = collator([(i, examples[i]) for i in order[start : start + args.per_device_eval_batch_size]])
        with torch.autocast(args.device.type, torch.bfloat16 if args.bf16 else torch.float16, enabled=args.bf16 or args.fp16):
            logits = model(input_ids=batch["input_ids"].to(args.device), attention_mask=batch["attention_mask"].to(args.device)).logits.float()
        labels = batch["labels"].to(args.device)
        total += float(functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"))
        count += int((labels != IGNORED).sum())
        if labels.dim() == 1:
            classes = logits.shape[-1]
            predicted += logits.argmax(-1).tolist()
            true += labels.tolist()
    metrics = {"loss": total / max(count, 1)}
    if classes:
        metrics |= classification_metrics(np.asarray(predicted), np.asarray(true), classes)
    return metrics
