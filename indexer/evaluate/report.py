"""The result of an evaluation as a table, JSON and plots."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.errors import SettingError
from indexer.evaluate.measure import Figures


def shown(value: Any) -> str:
    """A figure for the table: 0.431 [0.40, 0.46], or a dash where undefined."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, list):
        return f"{shown(value[0])} [{value[1]:.2f}, {value[2]:.2f}]"
    return f"{value:.3f}"


def table(figures: Figures, bytes_of: dict[str, float]) -> Table:
    """Methods down, figures across."""
    columns = list(dict.fromkeys(label for own in figures.values() for label in own))
    made = Table(title="mean over queries [95 % interval]")
    made.add_column("method")
    made.add_column("bytes/example", justify="right")
    for label in columns:
        made.add_column(label, justify="right")
    for name, own in figures.items():
        made.add_row(name, f"{bytes_of[name]:,.0f}", *(shown(own.get(label)) for label in columns))
    return made


def print_table(figures: Figures, bytes_of: dict[str, float], about: dict[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table(figures, bytes_of))
    if "ceiling" in about.get("lds", {}):
        console.print(f"LDS ceiling (two training seeds, {about['lds']['second_seed_subsets']} subsets): {about['lds']['ceiling']:.3f}")


def without_nan(value: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(value, dict):
        return {k: without_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(without_nan(record), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def plot(path: Path, figures: Figures, bytes_of: dict[str, float]) -> None:
    """One panel per figure, one bar per method, with intervals; SettingError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise SettingError("the plot needs matplotlib; install eogp[evaluate]") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    labels = list(dict.fromkeys(label for own in figures.values() for label in own))
    columns = min(len(labels), 4)
    rows = -(-len(labels) // columns)
    names = [f"{name} ({bytes_of[name]:,.0f} B)" for name in figures]
    figure, axes = plt.subplots(rows, columns, figsize=(1.5 + 3.2 * columns, rows * (1 + 0.32 * len(names))), squeeze=False, sharey=True, layout="constrained")
    for axis in axes.flat[len(labels) :]:
        axis.set_visible(False)
    for axis, label in zip(axes.flat, labels, strict=False):
        for y, own in enumerate(figures.values()):
            value = own.get(label)
            middle, low, high = value if isinstance(value, list) else (value, value, value)
            if middle is None or math.isnan(middle):
                continue
            axis.barh(y, middle, color="tab:blue", height=0.6)
            axis.plot([low, high], [y, y], color="black", linewidth=1.2)
        axis.set_yticks(range(len(names)), names)
        axis.set_title(label)
        axis.axvline(0, color="black", linewidth=0.6)
    axes[0, 0].invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
