"""Real labelled text for the classification benchmarks: movie review snippets of the vaderSentiment source distribution (MIT), each with the mean rating of
its raters from -4 to 4. Snippets rated within 0.5 of neutral are left out; the label is the sign.

    pip download --no-deps --no-binary :all: vaderSentiment==3.3.2
"""

from __future__ import annotations

import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any

INNER = "hutto_ICWSM_2014.tar.gz"
MEMBER = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
NEUTRAL = 0.5
LABELS = ("negative", "positive")


def snippets(sdist: Path) -> list[dict[str, Any]]:
    """{id, text, label, rating} of every snippet that is not neutral, in the file's order."""
    with tarfile.open(sdist) as outer:
        name = next(n for n in outer.getnames() if n.endswith(INNER))
        found = outer.extractfile(name)
        assert found is not None
        with tarfile.open(fileobj=io.BytesIO(found.read())) as inner:
            member = inner.extractfile(MEMBER)
            assert member is not None
            lines = member.read().decode("utf-8", "replace").splitlines()
    rows = []
    for line in lines:
        number, rating, text = line.split("\t", 2)
        if abs(float(rating)) > NEUTRAL:
            rows.append({"id": f"movie-{number}", "text": text, "label": LABELS[float(rating) > 0], "rating": round(float(rating), 3)})
    return rows


def draw(sdist: Path, sizes: tuple[int, ...], seed: int = 0) -> list[list[dict[str, Any]]]:
    """Disjoint samples of the given sizes."""
    rows = snippets(sdist)
    random.Random(seed).shuffle(rows)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [rows[a : a + n] for a, n in zip(starts, sizes, strict=True)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
