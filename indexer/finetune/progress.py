"""What a run says while it works: rate, ETA and loss through the reporter, and a loss curve in JSONL. A signal stops it behind a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indexer.interruption import StopRequest
from indexer.reporter import Reporter, Stage


class Progress(TrainerCallback):
    """Moves the stage on by steps, with the last loss in its name, and says each evaluation. At a stop request it asks for a checkpoint and the end."""

    def __init__(self, reporter: Reporter, stage: Stage, stop: StopRequest) -> None:
        self.reporter, self.stage, self.stop = reporter, stage, stop

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.stage.reach(state.global_step, state.max_steps)
        if self.stop.set:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        if "eval_loss" in logs:
            found = ", ".join(f"{k.removeprefix('eval_')} {v:.4f}" for k, v in logs.items() if k.startswith("eval_"))
            self.reporter.say(f"held out   step {state.global_step:,}: {found}", step=state.global_step, **logs)
        elif "loss" in logs:
            self.reporter.event("loss", step=state.global_step, **logs)
            if not self.reporter.log_json:
                self.stage.name = f"train, epoch {state.epoch or 0:.1f}, loss {logs['loss']:.3f}"


class LossCurve(TrainerCallback):
    """Appends one JSON object per log to `path`: step, epoch, loss, learning_rate, grad_norm, or the eval_ metrics.

    A resumed run first drops what the stopped one wrote past its checkpoint, so that the file equals that of an uninterrupted run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_curve(self.path) if line["step"] <= state.global_step] if state.global_step else []
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not logs or not ("loss" in logs or "eval_loss" in logs):
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def read_curve(path: Path) -> list[dict[str, float]]:
    """The lines of a loss curve; a half-written last line is dropped."""
    lines: list[dict[str, float]] = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
