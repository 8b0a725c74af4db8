"""`eogp finetune` and `eogp run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.settings import with_settings
from indexer.finetune.settings import FinetuneSettings

app = typer.Typer()


@app.command("finetune")
@with_settings(FinetuneSettings)
def finetune(out: Annotated[Path, typer.Argument(help="Folder for the trained model; it must not hold one yet.")], *, settings: FinetuneSettings) -> None:
    """Fine-tune a model, or train a small fresh one, and save a folder that `eogp index` loads."""
    from indexer.finetune.run import finetune as run

    run(out, settings)


@app.command("run")
def run_both(config: Annotated[Path, typer.Argument(help="YAML or TOML file with out, store, and the sections finetune and index.")]) -> None:
    """Fine-tune and index in one go. Run again, it goes on where it was interrupted."""
    from indexer.finetune.both import run

    run(config)
