"""`eogp evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.settings import with_settings
from indexer.evaluate.settings import EvaluateSettings

app = typer.Typer()


@app.command("evaluate")
@with_settings(EvaluateSettings)
def evaluate(store: Annotated[Path, typer.Argument(help="The store to evaluate.")], *, settings: EvaluateSettings) -> None:
    """Measure how far the store's scores can be trusted: against uncompressed EK-FAC, retraining, one-step patches and known facts."""
    from indexer.evaluate.run import evaluate as run

    run(store, settings)
