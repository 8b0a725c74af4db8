"""Plots of loss curves, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from indexer.finetune.progress import read_curve


@contextmanager
def figure(path: Path, x: str, y: str) -> Iterator[Any]:
    """Axes of one figure, written to `path` (PNG) with a legend when the block ends."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    yield axes
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=120)


def plot_curve(curve: Path, out: Path) -> bool:
    """Training and held-out loss over steps; False where matplotlib is missing or nothing was logged."""
    lines = read_curve(curve)
    if find_spec("matplotlib") is None or not lines:
        return False
    with figure(out, "step", "loss") as axes:
        _draw(axes, lines, "loss", "training")
        _draw(axes, lines, "eval_loss", "held out")
    return True


def _draw(axes: Any, lines: Sequence[dict[str, float]], key: str, label: str) -> None:
    points = [(line["step"], line[key]) for line in lines if key in line]
    if points:
        axes.plot([s for s, _ in points], [v for _, v in points], label=label, marker="o" if len(points) < 20 else None)
