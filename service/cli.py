"""`eogp serve` and `eogp query`."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from engine.errors import SettingError
from engine.settings import with_settings
from service.settings import QuerySettings, ServeSettings

if TYPE_CHECKING:
    from service.schemas import InfluenceResponse

app = typer.Typer(help="Serve a store over HTTP, or ask it from the terminal.")


@app.command("serve")
@with_settings(ServeSettings)
def serve(store: Annotated[Path, typer.Argument(help="The store that `eogp index` wrote.")], *, settings: ServeSettings) -> None:
    """Answer influence queries over HTTP: the page at /, the API's description at /docs."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would contend with the inference thread
    from engine.store.manifest import current_generation
    from service.security import Keys

    keys = Keys.read(settings.api_keys)
    current_generation(store)
    listening = bind(settings.host, settings.port)
    if settings.ray is not None:
        from engine.cluster import parse_address, require_ray

        listening.close()  # it was only to say early that the address is taken: Serve listens there itself
        parse_address(settings.ray)
        require_ray()
        from service.cluster.deploy import run as run_on_cluster

        run_on_cluster(store, settings)
        return
    try:
        from service.engine_backend import EngineBackend
        from service.logs import configure
        from service.server import run

        configure(settings)
        backend = EngineBackend.open(store, settings)
        run(backend, settings, keys, listening)
    finally:
        listening.close()


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that nobody waits on a server that is still loading. Raises SettingError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise SettingError(f"--host {host}: no such address on this machine", field="host") from None
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as e:
        made.close()
        raise SettingError(f"cannot listen on {host}:{port} ({(e.strerror or str(e)).lower()}); choose another --port or --host", field="port") from None
    made.set_inheritable(True)
    return made


@app.command("query")
@with_settings(QuerySettings)
def query(
    store: Annotated[Path, typer.Argument(help="The store to ask.")],
    *,
    prompt: Annotated[str | None, typer.Option("--prompt", help="What the model was given.")] = None,
    completion: Annotated[
        str | None, typer.Option("--completion", help="What it said; mind the leading space. Without it, the model continues the prompt.")
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="A text instead of prompt and completion.")] = None,
    messages: Annotated[str | None, typer.Option("--messages", help="A chat instead, as JSON: [{role, content}, ...].")] = None,
    where: Annotated[str | None, typer.Option("--filter", help='Filter as JSON, e.g. \'{"field": "kind", "eq": "fact"}\'.')] = None,
    output: Annotated[Literal["table", "json"], typer.Option("--output", help="A table for people, or the HTTP answer as JSON.")] = "table",
    settings: QuerySettings,
) -> None:
    """Ask a store without a server."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from engine.store.manifest import current_generation

    request = build_request(prompt=prompt, completion=completion, text=text, messages=messages, where=where, settings=settings)
    current_generation(store)
    from service.engine_backend import EngineBackend

    given = {name: getattr(settings, name) for name in settings.model_fields_set & set(ServeSettings.model_fields)}
    backend = EngineBackend.open(store, ServeSettings(**given))
    (answer,) = backend.answer([backend.prepare(request)])
    if isinstance(answer, Exception):
        raise answer
    if output == "json":
        print(answer.model_dump_json(indent=1))
    else:
        show(answer)


def build_request(*, prompt: str | None, completion: str | None, text: str | None, messages: str | None, where: str | None, settings: QuerySettings) -> Any:
    """The HTTP request that the flags stand for. Raises SettingError naming the flag."""
    from pydantic import ValidationError

    from service.schemas import InfluenceRequest

    asked: dict[str, Any] = {"prompt": prompt, "completion": completion, "text": text, "messages": _json("--messages", messages)}
    asked = {k: v for k, v in asked.items() if v is not None}
    if not asked:
        raise SettingError("ask something: --prompt with --completion, --prompt alone, --text, or --messages", field="prompt")
    if "prompt" in asked and "completion" not in asked:
        asked["generate"] = {"max_new_tokens": settings.max_new_tokens}
    try:
        return InfluenceRequest.model_validate(
            {
                "queries": [asked],
                "top_k": settings.top_k,
                "score": settings.score,
                "direction": settings.direction,
                "filter": _json("--filter", where),
                "truncation": settings.truncation,
            }
        )
    except ValidationError as e:
        first = e.errors()[0]
        path = ".".join(str(p) for p in first["loc"] if p not in ("queries", 0))
        sentence = str(first["msg"]).removeprefix("Value error, ")
        raise SettingError(f"--{path}: {sentence}" if path else sentence, field=path or None) from None


def _json(flag: str, value: str | None) -> Any:
    if value is None:
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise SettingError(f"{flag}: not JSON", field=flag.lstrip("-")) from None


def show(answer: InfluenceResponse) -> None:
    """Print one answer as tables."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for result in answer.results:
        for i in result.inputs:
            console.print(f"[bold]{escape(i.text)}[/bold]")
            covered = "" if i.coverage is None else f", coverage {i.coverage:.2f}"
            console.print(f"[dim]{i.n_targets} target tokens, loss {i.loss:.3f} nats{covered}[/dim]")
        for warning in result.warnings:
            console.print(f"[yellow]{escape(warning)}[/yellow]")
        for name, colour, hits in (("proponents", "green", result.proponents), ("opponents", "red", result.opponents)):
            if hits is None:
                continue
            note = "training on them lowers the query's loss" if name == "proponents" else "training on them raises it"
            table = Table(title=f"{name}: {note}", title_justify="left", title_style=f"bold {colour}", expand=True)
            table.add_column("#", justify="right", style="dim", no_wrap=True)
            table.add_column(answer.score, justify="right", no_wrap=True)
            table.add_column("id", style="cyan", overflow="fold", max_width=20)
            table.add_column("training example", ratio=2, overflow="fold")
            table.add_column("metadata", style="dim", ratio=1, overflow="fold")
            for h in hits:
                facts = ", ".join(f"{k}={v}" for k, v in h.metadata.items())
                table.add_row(str(h.rank), f"{h.score:+.4g}", escape(h.id), escape(h.excerpt(240)), escape(facts))
            console.print(table)
    how = "every example" if answer.method == "exhaustive" else f"{answer.n_candidates:,} candidates"
    console.print(f"[dim]generation {answer.generation}; scored {how} of {answer.n_allowed:,}; {sum(answer.timing_ms.values()):.0f} ms[/dim]")
