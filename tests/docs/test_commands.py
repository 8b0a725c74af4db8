"""Commands, requests and links that readers copy: each option exists, each body is a valid request, each link leads somewhere. tests/docs/test_docs.py runs those marked runnable."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import typer.main
from click import Command, Group

from engine.cli import build
from service.schemas import InfluenceRequest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "examples/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OUTSIDE = [ROOT / "README.md", ROOT / "examples/README.md"]  # MkDocs does not see them, so their links are checked here


def shell(page: Path) -> str:
    """The page's bash blocks, continuation lines joined."""
    blocks = re.findall(r"^( *)```bash\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return "\n".join(body for _, body in blocks).replace("\\\n", " ")


def commands(page: Path) -> list[list[str]]:
    """Every `eogp ...` of the page, as words; those of a container follow the name of their service."""
    found = []
    for line in shell(page).splitlines():
        words = shlex.split(line, comments=True) if line.strip().startswith(("eogp ", "docker compose")) else []
        if words[:1] == ["eogp"]:
            found.append(words[1:])
        elif "indexer" in words:
            found.append(words[words.index("indexer") + 1 :])
    return found


def command_named(words: list[str]) -> tuple[Command, list[str]]:
    """The command, and what is left of the words."""
    found: Command = typer.main.get_command(build())  # type: ignore[assignment]  # Typer's own class of command
    while isinstance(found, Group) or hasattr(found, "commands"):
        assert words and words[0] in found.commands, words
        found, words = found.commands[words[0]], words[1:]
    return found, words


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_have_the_options_that_they_are_given(page: Path) -> None:
    for words in commands(page):
        command, rest = command_named(words)
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        given = {word.split("=")[0] for word in rest if word.startswith("--")}
        assert given <= known, f"{' '.join(words)}: no such option {sorted(given - known)}"


def test_there_are_commands_to_check() -> None:
    named = {words[0] for page in PAGES for words in commands(page)}
    assert {"index", "serve", "query", "finetune", "append", "delete", "compact", "verify", "inspect", "export"} <= named


def test_requests_are_valid() -> None:
    bodies = [body for page in PAGES for body in re.findall(r"-d '(\{.*?\})'", shell(page), re.DOTALL)]
    assert len(bodies) >= 6
    for body in bodies:
        InfluenceRequest.model_validate(json.loads(body))


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_outside_the_site_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for link in links:
        name, _, anchor = link.partition("#")
        assert (page.parent / name).exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", (page.parent / name).read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in headings}, link
    files = re.findall(r"`((?:docs|examples|docker|benchmarks|tests)/[\w./-]+)`", text)
    assert all((ROOT / name).exists() for name in files), files


def test_code_paths_named_in_the_documentation_exist() -> None:
    for page in PAGES:
        for name in re.findall(
            r"`(?:python )?((?:docs|examples|docker|benchmarks|tests|engine|indexer|service)/[\w./-]+\.\w+)", page.read_text(encoding="utf-8")
        ):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
