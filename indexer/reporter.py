"""Progress of long work for people and for machines: a display with rate and ETA, plain lines without a terminal, or JSON lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_EVERY = 10.0  # seconds between lines where there is no terminal


class Stage:
    """One stage of work: `advance` it; rate and ETA follow."""

    def __init__(self, reporter: Reporter, name: str, total: int | None, unit: str, done: int) -> None:
        self.reporter, self.name, self.total, self.unit = reporter, name, total, unit
        self.done, self.first = done, done
        self.started = self.said = time.monotonic()
        self.task: TaskID | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def rate(self) -> float:
        """Units per second since this process began the stage."""
        return (self.done - self.first) / max(self.seconds, 1e-9)

    def eta(self) -> float | None:
        """Seconds left, or None before the first step."""
        rate = self.rate()
        return None if self.total is None or rate == 0 else (self.total - self.done) / rate

    def advance(self, n: int = 1) -> None:
        self.done += n
        self.reporter.show(self)

    def reach(self, done: int, total: int) -> None:
        """Progress in absolute terms, where the work itself counts."""
        self.done, self.total = done, total
        self.reporter.show(self)


class Reporter:
    """Where progress goes. `say` writes one line of the plan or the report; `event` one JSON line with --log-json."""

    def __init__(self, *, log_json: bool = False) -> None:
        self.log_json = log_json
        if log_json:
            from transformers.utils.logging import disable_progress_bar

            disable_progress_bar()  # transformers' own, which is not JSON
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.seconds: dict[str, float] = {}
        self._bars: Progress | None = None

    def say(self, text: str, **fields: Any) -> None:
        """A line for people; with --log-json an event with these fields."""
        if self.log_json:
            self.event("message", text=text, **fields)
        else:
            self.console.print(text, markup=False)

    def event(self, kind: str, **fields: Any) -> None:
        if self.log_json:
            print(json.dumps({"event": kind, "time": round(time.time(), 3), **fields}, ensure_ascii=False, default=str), file=sys.stderr, flush=True)

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "examples", done: int = 0) -> Iterator[Stage]:
        """Time a stage and show it. `done`: what an earlier, interrupted run has finished of it."""
        stage = Stage(self, name, total, unit, done)
        self.event("stage", stage=name, state="started", done=done, total=total)
        with self._display(stage):
            try:
                yield stage
            finally:
                self.seconds[name] = round(self.seconds.get(name, 0.0) + stage.seconds, 3)
        self.event("stage", stage=name, state="finished", done=stage.done, seconds=round(stage.seconds, 3), rate=round(stage.rate(), 3))

    @contextmanager
    def _display(self, stage: Stage) -> Iterator[None]:
        if self.log_json:
            yield
            return
        if not self.console.is_terminal:
            yield
            self.console.print(_line(stage), markup=False)
            return
        columns = (
            TextColumn("{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as bars:
            self._bars = bars
            stage.task = bars.add_task(stage.name, total=stage.total, completed=stage.done, rate="")
            try:
                yield
            finally:
                self._bars = None

    def show(self, stage: Stage) -> None:
        """Bring the display up to date; lines and events at most every ten seconds."""
        if self._bars is not None and stage.task is not None:
            self._bars.update(stage.task, completed=stage.done, total=stage.total, rate=f"{stage.rate():,.1f} {stage.unit}/s")
            return
        now = time.monotonic()
        if now - stage.said < _EVERY:
            return
        stage.said = now
        if self.log_json:
            self.event("progress", stage=stage.name, done=stage.done, total=stage.total, rate=round(stage.rate(), 3), eta_seconds=stage.eta())
        else:
            self.console.print(_line(stage), markup=False)


def _line(stage: Stage) -> str:
    of = "" if stage.total is None else f" of {stage.total:,}"
    eta = stage.eta()
    left = "" if not eta else f", {clock(eta)} left"
    return f"{stage.name}: {stage.done:,}{of} {stage.unit}, {stage.rate():,.1f} {stage.unit}/s, {clock(stage.seconds)}{left}"


def clock(seconds: float) -> str:
    """12 s, 3 min 20 s, 2 h 5 min."""
    s = round(seconds)
    if s < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{s} s"
    return f"{s // 60} min {s % 60} s" if s < 3600 else f"{s // 3600} h {s % 3600 // 60} min"


def size(n: float) -> str:
    """Bytes in decimal units: 1 KB = 1,000 bytes."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if n >= factor:
            return f"{n / factor:,.{1 if n < 100 * factor else 0}f} {unit}"
    return f"{n:,.0f} bytes"
