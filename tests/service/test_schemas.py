"""What the schemas say in words."""

from __future__ import annotations

from service import schemas


def hit(text: str, target: str) -> schemas.Hit:
    return schemas.Hit(rank=1, id="a", score=1.0, text=text, target_start=text.index(target), metadata={})


def test_an_excerpt_begins_near_the_first_target() -> None:
    shown = hit("<system> " + "instructions " * 20 + "<|im_end|>\nquestion?<|im_end|>\nanswer" + " more" * 30, "answer").excerpt(60)
    assert shown.startswith("…") and "question? answer more" in shown and shown.endswith("…")
    assert len(shown) == 60


def test_an_excerpt_of_a_short_text_is_all_of_it() -> None:
    assert hit("short\n text", "ort").excerpt(60) == "short text"
    assert hit("short\0 text\0", "ort").excerpt(60) == "short\0 text\0"
