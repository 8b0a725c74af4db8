import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RUNNABLE = re.compile(r"<!-- runnable -->\n```bash\n(.*?)```", re.DOTALL)


def test_reference_is_what_the_code_says() -> None:
    done = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(entries: list[object]) -> set[str]:
        found: set[str] = set()
        for entry in entries:
            for value in entry.values() if isinstance(entry, dict) else [entry]:
                found |= pages(value) if isinstance(value, list) else {str(value)}
        return found

    assert pages(config["nav"]) == {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}


@pytest.mark.slow
def test_every_command_marked_runnable_runs(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    scripts = [match for page in sorted((ROOT / "docs").rglob("*.md")) for match in RUNNABLE.findall(page.read_text())]
    assert len(scripts) >= 2
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-e"], input="".join(scripts), cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Tirana" in done.stdout
