"""`eogp index` and the commands that keep a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.errors import SettingError
from engine.settings import ModelSettings, with_settings
from indexer.settings import AppendSettings, IndexSettings

app = typer.Typer()

StorePath = Annotated[Path, typer.Argument(help="Folder of the store.", show_default=False)]


@app.command("index")
@with_settings(IndexSettings)
def index_command(store: StorePath, *, settings: IndexSettings) -> None:
    """Fit the sketch on a model and its training data, and write the store. Run again, it goes on with an interrupted run."""
    from indexer.index import index

    index(store, settings)


@app.command("append")
@with_settings(AppendSettings)
def append_command(store: StorePath, *, settings: AppendSettings) -> None:
    """Add rows under the same curvature and projection, and measure how well they fit it."""
    from indexer.append import append

    append(store, settings)


@app.command("delete")
def delete_command(
    store: StorePath,
    ids: Annotated[list[str] | None, typer.Option("--ids", help="Id of a row; repeat the flag for several.", show_default=False)] = None,
    where: Annotated[str | None, typer.Option("--where", help="Filter on metadata as JSON, as queries take it.", show_default=False)] = None,
) -> None:
    """Take rows out of every answer; `eogp compact` then removes them from the disk."""
    from indexer.delete import delete

    generation, n = delete(store, ids=ids or [], where=_filter(where))
    typer.echo(f"{store}: {n:,} rows deleted (generation {generation}); `eogp compact` removes them from the disk" if n else f"{store}: no row matches")


@app.command("compact")
def compact_command(
    store: StorePath,
    segment_rows: Annotated[
        int, typer.Option("--segment-rows", min=1, help="Rows up to which neighbouring segments are merged (default: 1,000,000).")
    ] = 1_000_000,
) -> None:
    """Rewrite the store without its deleted rows and with fewer segments. Old generations go with them."""
    from indexer.compact import compact

    generation, removed, segments = compact(store, segment_rows=segment_rows)
    typer.echo(f"{store}: generation {generation}, {removed:,} rows removed, {segments:,} segments")


@app.command("verify")
@with_settings(ModelSettings)
def verify_command(store: StorePath, *, settings: ModelSettings) -> None:
    """Check every file against its hash, and with --model the model's whole weights."""
    from indexer.verify import require_whole

    require_whole(store, settings)
    typer.echo(f"{store}: every file is whole{'' if settings.model is None else ', and the model is the one that it was built with'}")


@app.command("export")
def export_command(
    store: StorePath,
    out: Annotated[Path, typer.Argument(help="New folder for rows.parquet, codes.npy, scales.npy and layout.json.", show_default=False)],
    deleted: Annotated[bool, typer.Option("--deleted", help="Rows that are deleted and not yet compacted away, too.")] = False,
) -> None:
    """Write the store's rows, codes and scales for other tools."""
    from indexer.export import export

    typer.echo(f"{out}: {export(store, out, deleted=deleted):,} rows")


def _filter(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as e:
        raise SettingError(f"--where is not JSON: {e}", field="where") from None
    if not isinstance(found, dict):
        raise SettingError('--where must be an object, for instance {"field": "kind", "eq": "speech"}', field="where")
    return found
