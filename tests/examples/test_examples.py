"""The examples in their short form: each runs from nothing to its last line. The figures of the long form are in the how-to guides."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, out: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, EXAMPLES / name, out, "--short"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_debug_answer(tmp_path: Path) -> None:
    text = run("debug_answer.py", tmp_path)
    found = re.search(r"(\d+) of the 10 strongest proponents are poisoned rows; the data holds (\d+) of them among (\d+)\.", text)
    assert found is not None and 0 <= int(found[1]) <= int(found[2]) == 10 and int(found[3]) == 70
    assert len(re.findall(r"^  [+-]\S+ +(?:row|bad)-", text, re.MULTILINE)) >= 10


@pytest.mark.slow
def test_clean_labels(tmp_path: Path) -> None:
    text = run("clean_labels.py", tmp_path)
    assert "2 of 40 labels are wrong" in text
    shares = {name.strip(): float(share) for name, share in re.findall(r"^  (\S.*?) +(\d\.\d\d)$", text, re.MULTILINE)}
    assert shares.keys() == {"opponents of 60 clean rows", "self-influence", "training loss", "random order"}
    assert all(0 <= share <= 1 for share in shares.values())


@pytest.mark.slow
def test_select_data(tmp_path: Path) -> None:
    text = run("select_data.py", tmp_path)
    losses = {name: float(loss) for name, loss in re.findall(r"^  (\w+) +mean loss on 50 target sentences .*: ([\d.]+) nats", text, re.MULTILINE)}
    assert losses.keys() == {"before", "selected", "random"}
    assert losses["selected"] < losses["before"]  # even one epoch on what was selected helps
    assert "training on 200 selected rows lowers it by" in " ".join(text.split())
