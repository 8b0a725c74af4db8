"""What both demos share: running `eogp`, a server for the time of a few queries, readable tables."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from service.schemas import Hit

READY_SECONDS = 180
console = Console(width=None if sys.stdout.isatty() else 140)


def eogp(*arguments: str | Path) -> None:
    """Run one `eogp` command and stop the demo with its exit code if it fails."""
    console.print(f"[bold]$ eogp {' '.join(map(str, arguments))}[/bold]", highlight=False)
    code = subprocess.run([str(Path(sys.executable).with_name("eogp")), *map(str, arguments)], check=False).returncode
    if code:
        raise SystemExit(code)


@contextmanager
def server(store: Path, model: Path, log: Path) -> Iterator[httpx.Client]:
    """`eogp serve` on a free loopback port, ready to answer; stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("eogp")), "serve", str(store), "--model", str(model), "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ))
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            deadline = time.monotonic() + READY_SECONDS
            while not _ready(client):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start; see {log}:\n{log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield client
    finally:
        process.terminate()
        process.wait(timeout=60)


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def ask(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """POST /influence; the answers, one per query."""
    response = client.post("/influence", json=body)
    if response.status_code != 200:
        raise SystemExit(f"POST /influence answered {response.status_code}: {response.text}")
    results: list[dict[str, Any]] = response.json()["results"]
    return results


def show(question: str, answer: dict[str, Any], rows: int = 5, width: int = 100) -> list[str]:
    """Print proponents and opponents of one query; the same as Markdown lines."""
    table = Table(title=question, title_justify="left", title_style="bold")
    for heading in ("", "score", "id", "training example"):
        table.add_column(heading, justify="right" if heading == "score" else "left", no_wrap=heading != "training example")
    lines = [f"**{question}**", "", "| | score | training example |", "|---|---:|---|"]
    for mark, side in (("+", "proponents"), ("-", "opponents")):
        for hit in answer[side][:rows]:
            text = Hit.model_validate(hit).excerpt(width)
            table.add_row(f"[{'green' if mark == '+' else 'red'}]{mark}", f"{hit['score']:+.3g}", hit["id"], text)
            lines.append(f"| {'proponent' if mark == '+' else 'opponent'} {hit['rank']} | {hit['score']:+.3g} | {text.replace('|', chr(92) + '|')} |")
        table.add_section()
    console.print(table)
    return [*lines, ""]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
