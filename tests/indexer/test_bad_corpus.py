"""A corpus of rubbish: every kind of bad row is skipped and listed with its line, and everything usable is indexed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import DataError
from engine.store import Store
from indexer.index import index
from indexer.settings import IndexSettings

Make = Callable[..., IndexSettings]

# (line, what the report says); None: the row is usable
TEXT_LINES: list[tuple[bytes, str | None]] = [
    (b'{"text": "The first row fixes the kind", "id": "first"}', None),
    (b"", "empty line"),
    (b"   ", "empty line"),
    (b"not json", "not JSON"),
    (b'{"text": "cut off', "not JSON"),
    (b'{"text": "two"} {"text": "objects"}', "not JSON: Extra data"),
    (b"{'text': 'single quotes'}", "not JSON"),
    (b'{"text": "tab\tinside", "id": "raw-tab"}', "not JSON: Invalid control character"),
    (b"[1, 2]", "not an object but a list"),
    (b'"a string"', "not an object but a string"),
    (b"42", "not an object but a number"),
    (b"null", "not an object but null"),
    (b"true", "not an object but a boolean"),
    (b'{"text": "bad \xff byte", "id": "u"}', "invalid UTF-8"),
    (b'{"text": "cut \xf0\x9f", "id": "u"}', "invalid UTF-8"),
    (b'{"text": "\xed\xa0\x80", "id": "u"}', "invalid UTF-8"),
    (b"\xff\xfe{\x00}\x00", "invalid UTF-8"),
    (b'{"text": "lone \\ud800 surrogate", "id": "s"}', "field 'text' has a lone surrogate"),
    (b'{"text": "x y", "id": "s2", "note": "\\udfff"}', "metadata field 'note' has a lone surrogate"),
    (b'{"text": "x y", "id": "s3", "\\ud800": 1}', "metadata name has a lone surrogate"),
    (b'{"text": "x y", "id": "\\ud800"}', "field 'id' has a lone surrogate"),
    (b'{"text": "a", "text": "b", "id": "t"}', "field 'text' appears twice"),
    (b'{"id": "missing"}', "field 'text' is missing"),
    (b'{"Text": "wrong case", "id": "case"}', "field 'text' is missing"),
    (b'{"prompt": "other", "completion": "schema", "id": "schema"}', "field 'text' is missing"),
    (b'{"messages": [{"role": "user", "content": "x"}], "id": "chat"}', "field 'text' is missing"),
    (b'{"text": null, "id": "n"}', "field 'text' is null, not a string"),
    (b'{"text": 5, "id": "n"}', "field 'text' is a number, not a string"),
    (b'{"text": NaN, "id": "n"}', "field 'text' is a number, not a string"),
    (b'{"text": true, "id": "n"}', "field 'text' is a boolean, not a string"),
    (b'{"text": ["a"], "id": "n"}', "field 'text' is a list, not a string"),
    (b'{"text": {"a": 1}, "id": "n"}', "field 'text' is an object, not a string"),
    (b'{"text": "", "id": "e"}', "field 'text' is empty"),
    (b'{"text": " \\n\\t\\u00a0", "id": "e"}', "field 'text' is only white space"),
    (b'{"text": "a", "id": "e"}', "no target token"),
    (b'{"text": "<|endoftext|>", "id": "e"}', "no target token"),
    (b'{"text": "<|endoftext|><|endoftext|><|endoftext|>", "id": "e"}', "no target token other than special tokens"),
    (b'{"text": "without an id"}', "field 'id' is missing"),
    (b'{"text": "x y", "id": null}', "field 'id' is null"),
    (b'{"text": "x y", "id": 1.5}', "field 'id' is a number, not a string or an integer"),
    (b'{"text": "x y", "id": true}', "field 'id' is a boolean"),
    (b'{"text": "x y", "id": ""}', "field 'id' is empty"),
    (b'{"text": "x y", "id": ["a"]}', "field 'id' is a list"),
    (b'{"text": "x y", "id": "' + b"i" * 1001 + b'"}', "field 'id' is longer than"),
    (b'{"text": "an id again", "id": "first"}', "its id is that of"),
    (b'{"text": "' + b"x" * 10_000_000 + b'", "id": "long"}', "line longer than max_row_bytes = 4,000,000 bytes"),
    (b'{"text": "nested", "id": "deep", "m": ' + b'{"a": ' * 40 + b"1" + b"}" * 40 + b"}", "metadata field 'm' is nested more than 32 deep"),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (b'{"text": "number as id", "id": 77}', None),
    (b'{"text": "windows line", "id": "crlf"}\r', None),
    (b'{"text": "NaN metadata", "id": "nan", "v": NaN, "w": -Infinity, "z": 1e999}', None),
    (b'{"text": "nested metadata", "id": "nested", "v": {"a": [1, {"b": null}]}}', None),
    (b'{"text": "mixed metadata", "id": "mixed", "v": "text"}', None),
    (b'{"text": "big integer", "id": "big", "v": 123456789012345678901234567890}', None),
    (b'{"text": "the same text", "id": "same-1"}', None),
    (b'{"text": "the same text", "id": "same-2"}', None),
    (b'{"text": "nul \\u0000 and \\u2028 separators", "id": "nul"}', None),
    ('{"text": "näïve 🎉 \u202eright to left", "id": "unicode"}'.encode(), None),
    (b'{"text": "' + b"The capital of Peru is Lima. " * 40 + b'", "id": "over-long"}', None),
    (b'{"text": "<|endoftext|> a special token first", "id": "special"}', None),
    (b'{"text": "a field named like ours", "id": "ours", "input_ids": 3, "kind": "x", "meta.v": 1, "row": -1, "": 0}', None),
]


def test_more_than_forty_kinds_of_bad_rows(tmp_path: Path, index_settings: Make) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_bytes(b"\xef\xbb\xbf" + b"\n".join(line for line, _ in TEXT_LINES))  # no newline at the end
    expected = [(n, reason) for n, (_, reason) in enumerate(TEXT_LINES, 1) if reason is not None]
    assert len({reason for _, reason in expected}) >= 30 and len(expected) >= 40
    report = index(tmp_path / "store", index_settings(data))
    listed = [json.loads(line) for line in (tmp_path / "store/reports/000001/bad_rows.jsonl").read_text("utf-8").splitlines()]
    assert [b["line"] for b in listed] == [n for n, _ in expected]
    for bad, (_, reason) in zip(listed, expected, strict=True):
        assert bad["reason"].startswith(reason) and bad["file"] == str(data), bad
    assert listed[[n for n, _ in expected].index(45)]["reason"] == f"its id is that of {data}:1"
    assert report["counts"]["bad"] == len(expected) == sum(report["bad"].values()) and report["counts"]["truncated"] == 1
    store = Store.open(tmp_path / "store", verify=True)
    rows = {r.id: r for r in store.rows(range(store.n_rows))}
    assert list(rows) == [json.loads(line.decode("utf-8"))["id"] if b"77" not in line else "77" for line, reason in LINES_USABLE]
    assert rows["nan"].metadata == {} and rows["nested"].metadata == {"v": {"a": [1, {"b": None}]}}
    assert rows["mixed"].metadata == {"v": "text"} and rows["big"].metadata == {"v": 123456789012345678901234567890}
    assert rows["same-1"].text == rows["same-2"].text and rows["nul"].text == "nul \0 and \u2028 separators"
    assert rows["over-long"].truncated and len(rows["over-long"].input_ids) == 64
    assert rows["ours"].metadata == {"input_ids": 3, "kind": "x", "meta.v": 1, "row": -1, "": 0}
    assert not store.excluded.any() and (store.column("norm_sq") > 0).all()
    searchable = [s.codes.any() for s in store.segments]
    assert all(searchable)


LINES_USABLE = [(line, reason) for line, reason in TEXT_LINES if reason is None]


@pytest.mark.parametrize("position", [n for n, (_, reason) in enumerate(TEXT_LINES, 1) if reason is not None][::6])
def test_the_first_bad_row_is_fatal_when_asked(tmp_path: Path, index_settings: Make, position: int) -> None:
    line, reason = TEXT_LINES[position - 1]
    assert reason is not None
    data = tmp_path / "bad.jsonl"
    data.write_bytes(b'{"text": "good one", "id": "first"}\n' * 1 + b'{"text": "good two", "id": "g"}\n' + line + b"\n")
    with pytest.raises(DataError) as error:
        index(tmp_path / "store", index_settings(data, on_error="fail"))
    assert error.value.message.startswith(f"{data}:3: {reason}")
    assert not (tmp_path / "store").exists()


OTHER_KINDS: dict[str, list[tuple[str, str | None]]] = {
    "completion": [
        ('{"prompt": "Peru:", "completion": " Lima"}', None),
        ('{"prompt": "Peru:", "completion": null}', "field 'completion' is null"),
        ('{"prompt": null, "completion": "Lima"}', "field 'prompt' is null"),
        ('{"prompt": "Peru:"}', "field 'completion' is missing"),
        ('{"completion": "Lima"}', "field 'prompt' is missing"),
        ('{"prompt": "Peru:", "completion": ""}', "field 'completion' is empty"),
        ('{"prompt": "Peru:", "completion": " \\n "}', "field 'completion' is only white space"),
        ('{"prompt": "Peru:", "completion": ["Lima"]}', "field 'completion' is a list"),
        ('{"prompt": "", "completion": "Lima is big"}', None),
    ],
    "messages": [
        ('{"messages": [{"role": "user", "content": "Peru?"}, {"role": "assistant", "content": "Lima"}]}', None),
        ('{"messages": []}', "field 'messages' is an empty chat"),
        ('{"messages": "hi"}', "field 'messages' is a string"),
        ('{"messages": [{"role": "user", "content": "Peru?"}]}', "field 'messages' has no assistant turn"),
        ('{"messages": [{"role": "user", "content": "Peru?"}, {"role": "assistant", "content": ""}]}', "messages[1] is an empty assistant turn"),
        ('{"messages": [{"role": "user", "content": "Peru?"}, {"role": "assistant", "content": null}]}', "messages[1].content is null"),
        ('{"messages": [{"role": "wizard", "content": "x"}, {"role": "assistant", "content": "y"}]}', "messages[0].role is not one of"),
        ('{"messages": [{"content": "x"}]}', "messages[0].role is missing"),
        ('{"messages": [null]}', "messages[0] is null"),
    ],
    "tokens": [
        ('{"input_ids": [5, 6, 7]}', None),
        ('{"input_ids": []}', "field 'input_ids' is empty"),
        ('{"input_ids": [5, 320]}', "field 'input_ids' has an entry outside 0 to 319"),
        ('{"input_ids": [5, -1]}', "field 'input_ids' has an entry outside"),
        ('{"input_ids": [5, 1.5]}', "field 'input_ids' has a number at 1, not an integer"),
        ('{"input_ids": ["5"]}', "field 'input_ids' has a string at 0"),
        ('{"input_ids": [5, 6], "labels": [5]}', "field 'labels' has 1 entries for 2"),
        ('{"input_ids": [5, 6], "labels": [-100, -100]}', "no target token"),
        ('{"input_ids": [5, 6], "labels": [-100, 320]}', "field 'labels' has an entry outside"),
        ('{"input_ids": [5]}', "no target token"),
        ('{"input_ids": [5, 6, 100000000000000000000]}', "field 'input_ids' has an entry outside"),
    ],
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_bad_rows_of_the_other_kinds(tmp_path: Path, index_settings: Make, kind: str) -> None:
    lines = OTHER_KINDS[kind]
    data = tmp_path / "bad.jsonl"
    data.write_text("\n".join(line for line, _ in lines), encoding="utf-8")
    index(tmp_path / "store", index_settings(data, chat_fallback="roles"))
    listed = [json.loads(line) for line in (tmp_path / "store/reports/000001/bad_rows.jsonl").read_text("utf-8").splitlines()]
    expected = [(n, reason) for n, (_, reason) in enumerate(lines, 1) if reason is not None]
    assert [b["line"] for b in listed] == [n for n, _ in expected]
    for bad, (_, reason) in zip(listed, expected, strict=True):
        assert bad["reason"].startswith(reason), bad
    store = Store.open(tmp_path / "store")
    assert [r.kind for r in store.rows(range(store.n_rows))] == [kind] * (len(lines) - len(expected))


def test_reports_never_quote_the_text(tmp_path: Path, index_settings: Make) -> None:
    secret = "xyzzy"
    rows = [
        '{"text": "fine row"}',
        f'{{"text": ["{secret}"]}}',
        f'"{secret}"',
        f'{{"text": "{secret}',
        f'{{"text": "{secret}\\ud800"}}',
        f'{{"text": "a", "m": "{secret}\\ud800"}}',
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    index(tmp_path / "store", index_settings(tmp_path / "d.jsonl"))
    reports = list((tmp_path / "store" / "reports").rglob("*.json*"))
    assert len(reports) == 2 and not any(secret in p.read_text("utf-8") for p in reports)


def test_a_model_without_chat_template_is_a_setting_not_a_bad_row(tmp_path: Path, index_settings: Make) -> None:
    (tmp_path / "d.jsonl").write_text(OTHER_KINDS["messages"][0][0])
    with pytest.raises(DataError, match="the tokenizer has no chat template; say --chat-fallback roles"):
        index(tmp_path / "store", index_settings(tmp_path / "d.jsonl"))
