"""`eogp inspect model` and `eogp inspect store`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.settings import with_settings
from indexer.settings import InspectSettings

app = typer.Typer()
inspect = typer.Typer(no_args_is_help=True, help="What indexing a model will take, or what a store holds.")
app.add_typer(inspect, name="inspect")


@inspect.command("model")
@with_settings(InspectSettings)
def inspect_model(
    source: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Model folder, hub id, GGUF file, or a named shape such as olmo2-7b.", show_default=False)
    ] = None,
    *,
    settings: InspectSettings,
) -> None:
    """Print what is tracked and skipped, and the memory, disk and time that indexing will take, before any work."""
    from indexer.inspect_model import inspect_model as run

    for line in run(source, settings):
        typer.echo(line)


@inspect.command("store")
def inspect_store(
    store: Annotated[Path, typer.Argument(help="Folder of the store.", show_default=False)],
    settings: Annotated[bool, typer.Option("--settings", help="Print the settings that reproduce the store, as YAML for `eogp index --config`.")] = False,
) -> None:
    """Print what a store holds: rows, bytes, sketch, model, data, calibration."""
    from indexer.inspect_store import inspect_store as run
    from indexer.inspect_store import lines, settings_yaml

    if settings:
        typer.echo(settings_yaml(store), nl=False)
        return
    for line in lines(run(store)):
        typer.echo(line)
