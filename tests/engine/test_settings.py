import inspect
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from engine.errors import SettingError
from engine.settings import FitSettings, ModelSettings, SketchSettings, parse_bytes, with_settings


class Table(ModelSettings, FitSettings):
    """Run."""

    mode: Literal["fast", "slow"] = Field("fast", description="How.")
    names: list[str] = Field(default_factory=list, description="Names.")
    eos: bool = Field(True, description="End.")


def test_flag_over_environment_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("damping: 0.2\nseed: 5\nbatch-tokens: 64\n")
    assert Table.resolve({}).damping == 0.1
    assert Table.resolve({}, file).damping == 0.2
    monkeypatch.setenv("EOGP_DAMPING", "0.3")
    assert Table.resolve({}, file).damping == 0.3
    assert Table.resolve({"damping": "0.4"}, file).damping == 0.4
    assert Table.resolve({}, file).batch_tokens == 64


def test_toml_lists_and_booleans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.toml"
    file.write_text('names = ["a", "b"]\neos = false\n')
    assert Table.resolve({}, file).names == ["a", "b"]
    assert Table.resolve({}, file).eos is False
    monkeypatch.setenv("EOGP_NAMES", "x, y")
    assert Table.resolve({}, file).names == ["x", "y"]
    monkeypatch.setenv("EOGP_MODEL", "none")
    assert Table.resolve({}).model is None


@pytest.mark.parametrize(
    ("flags", "named"),
    [({"damping": -1}, "--damping"), ({"batch_tokens": 0}, "--batch-tokens"), ({"mode": "odd"}, "--mode"), ({"fit_memory": "many"}, "--fit-memory")],
)
def test_refusals_name_the_flag(flags: dict[str, object], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        Table.resolve(flags)


def test_refusals_name_file_and_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("dampening: 0.2\n")
    with pytest.raises(SettingError, match="unknown setting 'dampening'"):
        Table.resolve({}, file)
    file.write_text("a: [1\n")
    with pytest.raises(SettingError, match=r"run\.yaml"):
        Table.resolve({}, file)
    with pytest.raises(SettingError, match="does not exist"):
        Table.resolve({}, tmp_path / "none.yaml")
    monkeypatch.setenv("EOGP_SEED", "minus")
    with pytest.raises(SettingError, match="EOGP_SEED"):
        Table.resolve({})


def test_sizes() -> None:
    assert parse_bytes("1GB") == 10**9
    assert parse_bytes("1.5 kb") == 1500
    assert parse_bytes("77") == 77
    assert SketchSettings.resolve({"projection_bytes": "8GB"}).projection_bytes == 8 * 10**9


class Joined(FitSettings, SketchSettings):
    """Both tables with sizes."""


def test_sizes_survive_joining_tables() -> None:
    joined = Joined.resolve({"projection_bytes": "8GB", "fit_memory": "1.5 KB"})
    assert (joined.projection_bytes, joined.fit_memory) == (8 * 10**9, 1500)


def test_every_setting_is_a_flag_with_help() -> None:
    app = typer.Typer()
    seen: dict[str, object] = {}

    @app.command()
    @with_settings(Table)
    def run(folder: Annotated[Path, typer.Argument()], *, settings: Table) -> None:
        seen["folder"], seen["settings"] = folder, settings

    result = CliRunner().invoke(app, ["out", "--damping", "0.5", "--names", "a", "--names", "b", "--no-eos", "--fit-memory", "2GB"], catch_exceptions=False)
    assert result.exit_code == 0
    assert seen["settings"] == Table(damping=0.5, names=["a", "b"], eos=False, fit_memory=2 * 10**9)
    assert seen["folder"] == Path("out")
    assert set(Table.model_fields) < set(inspect.signature(run).parameters)
    assert all(field.description for field in Table.model_fields.values())
