"""Write docs/reference/cli.md from the commands themselves: every argument, flag, environment variable and default.

python docs/generate.py            rewrites the file
python docs/generate.py --check    exits with 1 where it is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer.core
import typer.main

from engine.cli import build
from engine.settings import ENV_PREFIX

TARGET = Path(__file__).parent / "reference" / "cli.md"
HEADER = """# Command line and settings

Written by `docs/generate.py` from the code. Every setting is a flag, an environment variable (`EOGP_` and the name in capitals) and a key of the YAML or TOML
file given with `--config`; flags win over the environment, the environment over the file, the file over defaults. Sizes may be written `512MB` or `1GB`
(decimal units). Exit codes: 0 done, 1 a failure of the program, 2 a mistake in what was asked.
"""


def cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def describe(name: str, command: typer.core.TyperCommand) -> list[str]:
    """One command as Markdown: its purpose, usage line, arguments and options."""
    arguments = [p for p in command.params if isinstance(p, typer.core.TyperArgument)]
    shown = [p for p in command.params if isinstance(p, typer.core.TyperOption) and not p.hidden]
    words = [(p.name or "").upper() if p.required else f"[{(p.name or '').upper()}]" for p in arguments]
    lines = [f"## eogp {name}", "", cell(command.help or ""), "", "```", " ".join(["eogp", name, *words, "[OPTIONS]"]), "```", ""]
    for argument in arguments:
        lines.append(f"- `{(argument.name or '').upper()}`: {cell(getattr(argument, 'help', ''))}")
    if arguments:
        lines.append("")
    if shown:
        lines += ["| flag | environment | meaning |", "|---|---|---|"]
    for option in shown:
        flags = ", ".join(f"`{flag}`" for flag in [*option.opts, *option.secondary_opts])
        variable = f"`{ENV_PREFIX}{(option.name or '').upper()}`" if option.default is None and option.name not in ("config", "help") else ""
        lines.append(f"| {flags} | {variable} | {cell(option.help)} |")
    return [*lines, ""]


def walk(name: str, command: typer.core.TyperCommand | typer.core.TyperGroup) -> list[str]:
    if isinstance(command, typer.core.TyperGroup):
        return [line for child in sorted(command.commands) for line in walk(f"{name} {child}".strip(), command.commands[child])]
    return describe(name, command)


def render() -> str:
    return "\n".join([HEADER, *walk("", typer.main.get_command(build()))]).rstrip() + "\n"


if __name__ == "__main__":
    text = render()
    if "--check" in sys.argv:
        current = TARGET.read_text(encoding="utf-8") if TARGET.exists() else ""
        if current != text:
            raise SystemExit(f"{TARGET.relative_to(Path.cwd())} is out of date: run python docs/generate.py")
    else:
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(text, encoding="utf-8")
