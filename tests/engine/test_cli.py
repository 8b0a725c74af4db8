import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from engine import cli
from engine.errors import DataError, EogpError


def run(monkeypatch: pytest.MonkeyPatch, app: typer.Typer, *arguments: str) -> int:
    monkeypatch.setattr(cli, "build", lambda: app)
    monkeypatch.setattr(sys, "argv", ["eogp", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def failing(error: Exception) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise error

    return app


def test_a_mistake_is_one_sentence_and_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, failing(DataError("row 3 of a.jsonl has no text"))) == 2
    captured = capsys.readouterr()
    assert captured.err == "eogp: row 3 of a.jsonl has no text\n"
    assert captured.out == ""


def test_a_failure_of_ours_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, failing(EogpError("broken"))) == 1


def test_an_unknown_option_is_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, failing(DataError("unused")), "--nothing") == 2


def test_all_commands_are_joined() -> None:
    done = subprocess.run([str(Path(sys.executable).with_name("eogp")), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    listed = set(re.findall(r"^\W*([a-z][\w-]*) ", done.stdout, re.MULTILINE))
    assert {"finetune", "index", "append", "delete", "compact", "verify", "inspect", "export", "evaluate", "serve", "query", "run"} <= listed


@pytest.mark.parametrize("arguments", [["--help"], ["index", "--help"], ["inspect", "model", "--help"]])
def test_help_is_quick(arguments: list[str]) -> None:
    """Without the libraries whose import takes seconds."""
    code = f"""if True:
        import sys
        from engine.cli import main
        sys.argv = ["eogp", *{arguments!r}]
        try:
            main()
        except SystemExit as stop:
            assert stop.code == 0
        sys.exit(", ".join({{"torch", "transformers", "datasets", "numba", "ray"}} & sys.modules.keys()) or 0)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage" in done.stdout
