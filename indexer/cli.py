"""`eogp index` and the commands that keep a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.settings import with_settings
from indexer.settings import IndexSettings

app = typer.Typer()

StorePath = Annotated[Path, typer.Argument(help="Folder of the store.", show_default=False)]


@app.command("index")
@with_settings(IndexSettings)
def index_command(store: StorePath, *, settings: IndexSettings) -> None:
    """Fit the sketch on a model and its training data, and write the store. Run again, it goes on with an interrupted run."""
    from indexer.index import index

    index(store, settings)
