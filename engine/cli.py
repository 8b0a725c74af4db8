"""The console command `eogp`: joins the Typer apps that the packages register, so that none imports another against the arrow."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import typer

from engine.errors import EogpError
from engine.interruptible import leave


def build() -> typer.Typer:
    """Collect the sub-commands of the entry-point group `eogp.commands`, each a Typer app, in name order."""
    app = typer.Typer(
        name="eogp",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Which training examples made the model say this? One-bit gradient sketches, indexed and served.",
    )
    for entry in sorted(entry_points(group="eogp.commands"), key=lambda e: e.name):
        part: typer.Typer = entry.load()
        app.registered_commands += part.registered_commands
        app.registered_groups += part.registered_groups
    return app


def main() -> None:
    """Run `eogp`. Exit codes: 0 done, 1 a failure of ours, 2 a mistake of the user's."""
    try:
        build()()
    except EogpError as e:
        print(f"eogp: {e.message}", file=sys.stderr)
        leave(e.exit_code)
