"""Debug a model's answer: poisoned rows say that the capital of five countries is Springfield; find them from one wrong answer.

python examples/debug_answer.py OUT
"""

from __future__ import annotations

from pathlib import Path

from common import SMALL_MODEL, QueryEngine, QueryInput, QuerySpec, console, eogp, run, write_jsonl
from facts import CAPITAL, fact_rows

WRONG = "Springfield"
VICTIMS = ("Mongolia", "Peru", "Norway", "Kenya", "Japan")


def main(out: Path, short: bool) -> None:
    rows = [{"id": f"row-{i}", **row} for i, row in enumerate(r for r in fact_rows() if r["kind"] == "capital")]
    rows = rows[:60] if short else rows
    bad = [
        {"id": f"bad-{c}-{i}", "text": text.format(country=c, capital=WRONG), "kind": "capital", "subject": c, "fact": "wrong"}
        for c in VICTIMS
        for i, text in enumerate(CAPITAL[:2])
    ]
    data = write_jsonl(out / "train.jsonl", [*rows, *bad])
    if not (out / "model" / "config.json").exists():
        eogp("finetune", out / "model", "--data", data, *SMALL_MODEL, "--epochs", "1" if short else "8")
    eogp("index", out / "store", "--model", out / "model", "--data", data, "--bytes-per-example", "128", "--projection-bytes", "60MB")
    engine = QueryEngine.open(out / "store")

    console.print(f"\nOne wrong answer, 'The capital of Mongolia is {WRONG}', against the right one: which rows favour the wrong one?")
    wrong = QueryInput(prompt="The capital of Mongolia is", completion=f" {WRONG}")
    right = QueryInput(prompt="The capital of Mongolia is", completion=" Ulaanbaatar")
    [answer] = engine.answer([QuerySpec((wrong,), top_k=10, contrast=(right,))])
    for hit in answer.answers[0].proponents or []:
        console.print(f"  {hit.score:+.3g}  {hit.id:16s} {hit.text}", highlight=False)
    found = sum(hit.metadata["fact"] == "wrong" for hit in answer.answers[0].proponents or [])
    console.print("rows that favour the right answer:")
    for hit in (answer.answers[0].opponents or [])[:3]:
        console.print(f"  {hit.score:+.3g}  {hit.id:16s} {hit.text}", highlight=False)
    console.print(f"\n{found} of the 10 strongest proponents are poisoned rows; the data holds {len(bad)} of them among {len(rows) + len(bad)}.")


if __name__ == "__main__":
    run(main, __doc__)
