"""Every format gives the same rows, and damage is named with file and line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from engine.data.fingerprint import fingerprint_sources
from engine.data.reading import BadRow, Row, find_sources, read_rows
from engine.data.settings import DataSettings
from engine.errors import DataError

ROWS = [{"text": 'Lima, "Peru"\nis', "year": 1821, "share": 0.5, "old": True}, {"text": "Päris 🎉", "year": None, "share": 2.0, "old": False}]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(r) + "\n" for r in rows).encode()


def _csv(path: Path) -> None:
    path.write_text('text,year,share,old\n"Lima, ""Peru""\nis",1821,0.5,true\nPäris 🎉,,2.0,false\n', encoding="utf-8")


def _arrow(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _stream(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def _dataset(path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}).save_to_disk(str(path))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "d.jsonl": lambda p: p.write_bytes(jsonl(ROWS)),
    "bom-and-crlf.jsonl": lambda p: p.write_bytes(b"\xef\xbb\xbf" + jsonl(ROWS).replace(b"\n", b"\r\n")),
    "no-newline-at-the-end.ndjson": lambda p: p.write_bytes(jsonl(ROWS).rstrip()),
    "d.jsonl.gz": lambda p: p.write_bytes(gzip.compress(jsonl(ROWS))),
    "d.jsonl.zst": lambda p: p.write_bytes(zstandard.compress(jsonl(ROWS))),
    "d.json": lambda p: p.write_text(json.dumps(ROWS)),
    "wrapped.json": lambda p: p.write_text(json.dumps({"version": 1, "data": ROWS})),
    "d.csv": _csv,
    "d.parquet": lambda p: pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), p),
    "d.arrow": _arrow,
    "stream.arrow": _stream,
    "dataset": _dataset,
}


def read(path: Path | str | list[str], **settings: Any) -> list[Row | BadRow]:
    return list(read_rows(DataSettings(data=path if isinstance(path, list) else [str(path)], **settings)))


@pytest.mark.parametrize("name", WRITERS)
def test_formats_agree(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    found = read(tmp_path / name)
    assert [r.values for r in found if isinstance(r, Row)] == ROWS
    expected = [2, 4] if name == "d.csv" else [1, 2]
    assert [r.line for r in found] == expected
    assert {r.file for r in found} == {str(tmp_path / name)}


def test_the_split_is_named(tmp_path: Path) -> None:
    _dataset(tmp_path / "dataset")
    assert len(read(tmp_path / "dataset", data_split="test")) == 1
    with pytest.raises(DataError, match="no split 'dev'; there are train, test"):
        read(tmp_path / "dataset", data_split="dev")


def test_globs_and_folders_in_name_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_bytes(jsonl([{"text": name}]))
    assert [r.values["text"] for r in read(f"{tmp_path}/*.jsonl") if isinstance(r, Row)] == ["a.jsonl", "b.jsonl"]
    assert [r.values["text"] for r in read(tmp_path) if isinstance(r, Row)] == ["a.jsonl", "b.jsonl"]
    both = read([f"{tmp_path}/b.jsonl", f"{tmp_path}/a.jsonl"])
    assert [r.values["text"] for r in both if isinstance(r, Row)] == ["b.jsonl", "a.jsonl"]
    assert read(tmp_path / "c.txt", data_format="jsonl")[0] == Row(str(tmp_path / "c.txt"), 1, {"text": "c.txt"})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"not json", "not JSON: Expecting value at column 1"),
        (b'{"text": "x"', "not JSON: Expecting ',' delimiter"),
        (b'{"text": "x"} {"text": "y"}', "not JSON: Extra data"),
        (b"[1]", "not an object but a list"),
        (b'"text"', "not an object but a string"),
        (b"3", "not an object but a number"),
        (b"null", "not an object but null"),
        (b'{"text": "\xff"}', "invalid UTF-8"),
        (b'{"text": "a", "text": "b"}', "field 'text' appears twice"),
        (b"", "empty line"),
        (b" \t ", "empty line"),
        (b'{"text": "' + b"x" * 2000 + b'"}', "line longer than max_row_bytes = 1,000 bytes"),
        (b'{"a":' + b"[" * 400 + b"]" * 400 + b"}", ""),
        (b"\x00", "not JSON"),
    ],
)
def test_bad_lines_say_why_and_the_next_is_read(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "before"}\n' + line + b"\n" + b'{"text": "after"}\n')
    found = read(path, max_row_bytes=1000)
    assert [r.line for r in found] == [1, 2, 3]
    assert isinstance(found[2], Row) and found[2].values == {"text": "after"}
    if reason:
        assert isinstance(found[1], BadRow) and found[1].reason.startswith(reason)


def test_nesting_without_end_is_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
    assert read(tmp_path / "d.jsonl") == [BadRow(str(tmp_path / "d.jsonl"), 1, "nested too deeply")]


def test_bad_csv_rows(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_bytes(b"text,n\nLima,1\nParis\nOslo,2,3\n\nB\xff,4\nBern,5\n")
    found = read(path)
    assert [(r.line, r.reason) for r in found if isinstance(r, BadRow)] == [
        (3, "1 cells under a header of 2"),
        (4, "3 cells under a header of 2"),
        (5, "empty line"),
        (6, "invalid UTF-8"),
    ]
    assert [r.values for r in found if isinstance(r, Row)] == [{"text": "Lima", "n": 1}, {"text": "Bern", "n": 5}]
    path.write_text("text,text\na,b\n")
    with pytest.raises(DataError, match="repeated column name"):
        read(path)


def test_csv_columns_are_numbers_only_where_every_cell_is(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text('id,text,zip,n,x,messages\n1,12,007,3,1e3,"[{""role"": ""user""}]"\n2,13,12,-4,,x\n')
    assert [r.values for r in read(path) if isinstance(r, Row)] == [
        {"id": "1", "text": "12", "zip": "007", "n": 3, "x": 1000.0, "messages": [{"role": "user"}]},
        {"id": "2", "text": "13", "zip": "12", "n": -4, "x": None, "messages": "x"},
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("d.json", b"[1", "not JSON: .* at line 1"),
        ("d.json", b'{"a": 1}', "must be a list of objects"),
        ("d.parquet", b"PAR1 nothing", "not a whole Parquet file"),
        ("d.arrow", b"ARROW1 nothing", "not a whole Arrow file"),
        ("d.jsonl.gz", gzip.compress(jsonl(ROWS))[:-12], "cannot be read"),
        ("d.jsonl.gz", b"plain", "cannot be read"),
        ("d.jsonl.zst", b"plain text", "cannot be read"),
        ("d.bin", b"x", "format not known by its name"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: {reason}"):
        read(tmp_path / name)


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data given"):
        read([])
    for name in (f"{tmp_path}/none.jsonl", f"{tmp_path}/none"):
        with pytest.raises(DataError, match="no such file or folder"):
            read(name)
    with pytest.raises(DataError, match="no file matches"):
        read(f"{tmp_path}/*.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no data file"):
        read(tmp_path / "empty")


def test_a_fingerprint_tells_contents_apart(tmp_path: Path) -> None:
    def taken(path: Path) -> list[dict[str, Any]]:
        settings = DataSettings(data=[str(path)])
        return fingerprint_sources(find_sources(settings), settings)

    (tmp_path / "d.jsonl").write_bytes(jsonl(ROWS))
    first = taken(tmp_path / "d.jsonl")
    assert first[0]["size"] == len(jsonl(ROWS)) and first == taken(tmp_path / "d.jsonl")
    (tmp_path / "d.jsonl").write_bytes(jsonl(ROWS[::-1]))
    assert taken(tmp_path / "d.jsonl") != first
    _dataset(tmp_path / "dataset")
    assert taken(tmp_path / "dataset")[0]["format"] == "dataset"
