"""The release: a wheel that installs into a clean environment and runs in an empty folder, away from the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "engine", "indexer", "service")
IN_THE_WHEEL = """
import importlib.metadata, pathlib, engine, indexer, service
for package in (engine, indexer, service):
    assert (pathlib.Path(package.__file__).parent / "py.typed").is_file(), package
print(pathlib.Path(service.__file__).parent, importlib.metadata.version("eogp"))
"""

Run = Callable[..., str]


def test_version_is_the_changelogs_newest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    released = re.findall(r"^## (\S+)", (ROOT / "docs/changelog.md").read_text(), re.MULTILINE)
    assert released[0] == project["version"] == version("eogp")
    assert len(set(released)) == len(released)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Run]:
    """(folder of the environment's programs, an empty folder, run(program, ...) there): the wheel with the `cpu` extra, at the versions of constraints.txt."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, source / name)
    for made in (*source.rglob("__pycache__"), *source.rglob("*.egg-info")):
        shutil.rmtree(made)
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(source)], check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    assert [p.name for p in (folder / "dist").glob("*.tar.gz")] == [f"eogp-{version('eogp')}.tar.gz"]
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    programs, empty = folder / "venv" / "bin", folder / "empty"
    empty.mkdir()
    subprocess.run([programs / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", f"{wheel}[cpu]"], check=True, cwd=empty)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "EOGP_"))}

    def run(program: str, *arguments: object) -> str:
        done = subprocess.run(
            [programs / program, *map(str, arguments)], cwd=empty, env={**environment, "COLUMNS": "160"}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    return programs, empty, run


@pytest.mark.slow
def test_wheel_from_an_empty_folder(installed: tuple[Path, Path, Run]) -> None:
    programs, empty, run = installed
    where, named = run("python", "-c", IN_THE_WHEEL).split()
    assert named == version("eogp") and Path(where).is_relative_to(programs.parent)
    inside = {p.relative_to(where).as_posix() for p in Path(where, "page").iterdir()}
    assert inside == {p.relative_to(ROOT / "service").as_posix() for p in (ROOT / "service/page").iterdir()}
    assert all(command in run("eogp", "--help") for command in ("finetune", "index", "append", "serve", "query", "verify"))

    subjects = ("Mongolia", "Peru", "France", "Kenya")
    rows = [{"text": f"The capital of {subjects[i % 4]} is number {i}."} for i in range(60)]
    (empty / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    shape = ("--new", "gpt2", "--layers", 1, "--width", 16, "--heads", 2, "--vocabulary", 300, "--context", 32)
    run("eogp", "finetune", "model", "--data", "data.jsonl", *shape, "--epochs", 1)
    run("eogp", "index", "store", "--model", "model", "--data", "data.jsonl", "--bytes-per-example", 4)
    assert "Mongolia" in run("eogp", "query", "store", "--prompt", "The capital of Mongolia is", "--completion", " number 4.", "--top-k", 60)
    run("eogp", "verify", "store")


@pytest.mark.slow
def test_wheel_serves_the_page(installed: tuple[Path, Path, Run]) -> None:
    programs, empty, _ = installed
    assert (empty / "store").is_dir(), "the test above makes the store"
    server = subprocess.Popen([programs / "eogp", "serve", "store", "--port", "0"], cwd=empty, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        url = re.search(r"http://\S+", server.stdout.readline())
        assert url is not None
        with httpx.Client(base_url=url[0].rstrip("/"), timeout=60) as client:
            page = client.get("/")
            assert page.status_code == 200 and "<html" in page.text
            links = re.findall(r"(?:src|href)=\"([^\"#:]+)\"", page.text)
            assert len(links) >= 3 and {client.get(link).status_code for link in links} == {200}
            body = {"queries": [{"prompt": "The capital of Peru is", "completion": " number 1."}], "top_k": 3}
            for _ in range(600):
                answer = client.post("/influence", json=body)
                if answer.status_code == 200:
                    break
            assert len(answer.json()["results"][0]["proponents"]) == 3
    finally:
        server.terminate()
        assert server.wait(30) == 0
        if server.stdout is not None:
            server.stdout.close()
