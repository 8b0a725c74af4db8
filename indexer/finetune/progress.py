"""What a run says while it works: a line with rate and ETA on the terminal, and a loss curve in JSONL."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import IO, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

SECONDS_BETWEEN_LINES = 10.0


def duration(seconds: float) -> str:
    """'42s', '3m05s', '2h10m'."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    return f"{s // 60}m{s % 60:02d}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02d}m"


class Progress(TrainerCallback):
    """Prints epoch, step, loss, steps per second and time left, at most every ten seconds."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self.stream = stream or sys.stderr
        self.loss = float("nan")
        self.began = self.said = time.monotonic()
        self.first = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.began = self.said = time.monotonic()
        self.first = state.global_step

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        self.loss = logs.get("loss", self.loss)
        if "eval_loss" in logs:
            self._say(
                state, " ".join(f"{k.removeprefix('eval_')} {v:.4f}" for k, v in logs.items() if k.startswith("eval_") and k != "eval_examples"), "held out: "
            )
        elif "loss" in logs and (state.global_step >= state.max_steps or time.monotonic() - self.said >= SECONDS_BETWEEN_LINES):
            self._say(state, f"loss {self.loss:.4f}")

    def _say(self, state: TrainerState, what: str, prefix: str = "") -> None:
        self.said = time.monotonic()
        rate = (state.global_step - self.first) / max(self.said - self.began, 1e-9)
        left = duration((state.max_steps - state.global_step) / rate) if rate > 0 else "?"
        print(
            f"{prefix}epoch {state.epoch or 0:.2f} step {state.global_step}/{state.max_steps} {what} {rate:.2f} steps/s ETA {left}",
            file=self.stream,
            flush=True,
        )


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
