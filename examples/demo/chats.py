"""Question-answer chats of chatterbot-corpus (BSD) as `messages` rows."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from facts import package

TOPICS = ("ai", "computers", "food", "history", "literature", "money", "movies", "psychology", "science", "sports")


def write(folder: Path, per_topic: int = 16) -> int:
    """Write chats.jsonl: the first question-answer pairs of each topic, one chat each; returns the count."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for topic in TOPICS:
        source = package("chatterbot_corpus") / "data" / "english" / f"{topic}.yml"
        pairs = [
            c[:2]
            for c in yaml.safe_load(source.read_text(encoding="utf-8"))["conversations"]
            if len(c) >= 2 and all(isinstance(t, str) and t.strip() for t in c[:2])
        ]
        for number, (question, answer) in enumerate(pairs[:per_topic]):
            messages = [{"role": "user", "content": " ".join(question.split())}, {"role": "assistant", "content": " ".join(answer.split())}]
            rows.append({"id": f"{topic}-{number}", "messages": messages, "topic": topic})
    (folder / "chats.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    return len(rows)
