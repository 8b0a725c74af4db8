"""Files to rows: every format becomes a stream of `Row` and `BadRow`, each with the file and the line (or row) that it came from."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from engine.data.settings import DataSettings
from engine.errors import DataError

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True, slots=True)
class Row:
    """One record as read: file and line (1-based; the row number where the format has no lines) and its fields."""

    file: str
    line: int
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A record that cannot be used, and why. The reason never quotes the record's text."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Source:
    """One input: a local file with its format, or a dataset (folder written by `datasets`, or a hub id)."""

    name: str
    format: str
    path: Path | None


def find_sources(settings: DataSettings) -> list[Source]:
    """Resolve files, globs, folders and hub ids, in the order given; names inside a glob or folder are sorted. Raises DataError naming what is missing."""
    if not settings.data:
        raise DataError("no data given; name a file with --data", field="data")
    found: list[Source] = []
    for entry in settings.data:
        path = Path(entry)
        if path.is_file():
            found.append(_source(path, settings))
        elif path.is_dir():
            found += _folder(path, settings)
        elif any(c in entry for c in "*?["):
            files = sorted(p for p in Path(path.anchor or ".").glob(str(path.relative_to(path.anchor) if path.anchor else path)) if p.is_file())
            if not files:
                raise DataError(f"{entry}: no file matches", field="data")
            found += [_source(p, settings) for p in files]
        elif settings.data_format in ("auto", "dataset") and _may_be_hub_id(entry):
            found.append(Source(entry, "dataset", None))
        else:
            raise DataError(f"{entry}: no such file or folder", field="data")
    return found


def read_rows(settings: DataSettings) -> Iterator[Row | BadRow]:
    """All rows of all sources in order. Raises DataError where a whole file cannot be read (missing, damaged, wrong format)."""
    for source in find_sources(settings):
        yield from read_source(source, settings)


def read_source(source: Source, settings: DataSettings) -> Iterator[Row | BadRow]:
    """The rows of one source."""
    readers: dict[str, Callable[[Source, DataSettings], Iterator[Row | BadRow]]] = {
        "jsonl": _jsonl,
        "json": _json,
        "csv": _csv,
        "parquet": _parquet,
        "arrow": _arrow,
        "dataset": _dataset,
    }
    try:
        yield from readers[source.format](source, settings)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as e:
        raise DataError(f"{source.name}: cannot be read: {_first_line(e)}", field="data") from None


def _first_line(e: BaseException) -> str:
    return (str(e) or type(e).__name__).splitlines()[0]


def _may_be_hub_id(entry: str) -> bool:
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", entry) is not None and not any(entry.endswith(s) for s in (*FORMATS, *_COMPRESSED))


def _source(path: Path, settings: DataSettings) -> Source:
    if settings.data_format != "auto":
        return Source(str(path), settings.data_format, path)
    suffixes = [s.lower() for s in path.suffixes if s.lower() not in _COMPRESSED]
    kind = FORMATS.get(suffixes[-1]) if suffixes else None
    if kind is None:
        raise DataError(f"{path}: format not known by its name; say --data-format, or use one of {', '.join(FORMATS)}", field="data")
    return Source(str(path), kind, path)


def _folder(path: Path, settings: DataSettings) -> list[Source]:
    if settings.data_format == "dataset" or any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
        return [Source(str(path), "dataset", path)]
    files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith(".") and any(s.lower() in FORMATS for s in p.suffixes))
    if not files:
        raise DataError(f"{path}: the folder holds no data file ({', '.join(FORMATS)})", field="data")
    return [_source(p, settings) for p in files]


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]  # GzipFile has no IO[bytes] base, and all its methods
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(zstandard.open(path, "rb"))
    return path.open("rb")


def _local(source: Source) -> Path:
    assert source.path is not None
    return source.path


def _lines(file: IO[bytes], limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers; None for one longer than `limit`, which is skipped without being held in memory."""
    number = 0
    while True:
        line = file.readline(limit + 2)
        if not line:
            return
        number += 1
        if len(line.rstrip(b"\r\n")) > limit:
            while line and not line.endswith(b"\n"):
                line = file.readline(1 << 20)
            yield number, None
            continue
        yield number, line


def parse_json(raw: bytes | str) -> Any:
    """JSON as data: a key written twice is refused, since which value counts would be a guess. Raises ValueError with the reason."""
    text = raw if isinstance(raw, str) else raw.decode("utf-8")
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]  # set.add returns None, which is falsy: that is the point
        raise ValueError(f"field {twice!r} appears twice")
    return found


def _jsonl(source: Source, settings: DataSettings) -> Iterator[Row | BadRow]:
    with _open(_local(source)) as file:
        for number, line in _lines(file, settings.max_row_bytes):
            if line is None:
                yield BadRow(source.name, number, f"line longer than max_row_bytes = {settings.max_row_bytes:,} bytes")
                continue
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip(b"\r\n\t ") == b"":
                yield BadRow(source.name, number, "empty line")
                continue
            yield _record(source.name, number, line)


def _record(name: str, number: int, line: bytes) -> Row | BadRow:
    try:
        value = parse_json(line)
    except UnicodeDecodeError:
        return BadRow(name, number, "invalid UTF-8")
    except json.JSONDecodeError as e:
        return BadRow(name, number, f"not JSON: {e.msg} at column {e.colno}")
    except ValueError as e:
        return BadRow(name, number, str(e))
    return _object(name, number, value)


def _object(name: str, number: int, value: Any) -> Row | BadRow:
    if not isinstance(value, dict):
        return BadRow(name, number, f"not an object but {json_type(value)}")
    return Row(name, number, value)


def json_type(value: Any) -> str:
    """A value's type in JSON's words, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list | tuple):
        return "a list"
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"


def _json(source: Source, settings: DataSettings) -> Iterator[Row | BadRow]:
    """A JSON file is a list of objects, or an object with one list of objects; it is held in memory whole (use JSONL for large data)."""
    with _open(_local(source)) as file:
        raw = file.read().removeprefix(b"\xef\xbb\xbf")
    try:
        value = parse_json(raw)
    except UnicodeDecodeError:
        raise DataError(f"{source.name}: invalid UTF-8", field="data") from None
    except json.JSONDecodeError as e:
        raise DataError(f"{source.name}: not JSON: {e.msg} at line {e.lineno}; if it has one object per line, say --data-format jsonl", field="data") from None
    except ValueError as e:
        raise DataError(f"{source.name}: {e}", field="data") from None
    if isinstance(value, dict):
        lists = [v for v in value.values() if isinstance(v, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        raise DataError(f"{source.name}: must be a list of objects, or an object with one such list", field="data")
    for number, item in enumerate(value, 1):
        yield _object(source.name, number, item)


def _csv(source: Source, settings: DataSettings) -> Iterator[Row | BadRow]:
    """CSV with a header. Columns whose every value is a number (or true/false) become numbers; the rest stay text; an empty cell is null."""
    types = _csv_types(source, settings)
    for number, cells, header in _csv_records(source, settings):
        if isinstance(cells, str):
            yield BadRow(source.name, number, cells)
            continue
        yield Row(source.name, number, {name: types[name](cell) if cell != "" else None for name, cell in zip(header, cells, strict=True)})


def _csv_records(source: Source, settings: DataSettings) -> Iterator[tuple[int, list[str] | str, list[str]]]:
    """(line, cells or the reason why there are none, header)."""
    csv.field_size_limit(max(settings.max_row_bytes, 131_072))
    with _open(_local(source)) as binary:
        text = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(text, delimiter="\t" if ".tsv" in source.name.lower() else ",", strict=True)
        header: list[str] = []
        line = 1
        while True:
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as e:
                if not header:
                    raise DataError(f"{source.name}: not CSV: {e}", field="data") from None
                yield line, f"not CSV: {e}", header
                line = reader.line_num + 1
                continue
            start, line = line, reader.line_num + 1
            if not header:
                header = cells
                if len(set(header)) != len(header) or "" in header:
                    raise DataError(f"{source.name}: the header has an empty or repeated column name", field="data")
            elif not cells:
                yield start, "empty line", header
            elif len(cells) != len(header):
                yield start, f"{len(cells)} cells under a header of {len(header)}", header
            elif any("\udc80" <= c <= "\udcff" for cell in cells for c in cell):
                yield start, "invalid UTF-8", header
            else:
                yield start, cells, header


_INT = re.compile(r"-?(0|[1-9]\d{0,17})\Z")
_FLOAT = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?\Z")


def _csv_types(source: Source, settings: DataSettings) -> dict[str, Callable[[str], Any]]:
    """One pass that finds, per column, the narrowest type that every value has. Text, ids and prompts are never converted."""
    kept = {settings.text_field, settings.prompt_field, settings.completion_field, settings.id_field, "id"}
    possible: dict[str, set[str]] = {}
    structured = {settings.messages_field, settings.input_ids_field, settings.labels_field}
    for _, cells, header in _csv_records(source, settings):
        if not possible:
            possible = {name: set() if name in kept else {"json"} if name in structured else {"int", "float", "bool"} for name in header}
        if isinstance(cells, str):
            continue
        for name, cell in zip(header, cells, strict=True):
            still = possible[name]
            if cell == "" or not still:
                continue
            if "int" in still and not _INT.match(cell):
                still.discard("int")
            if "float" in still and not (_FLOAT.match(cell) and math.isfinite(float(cell))):
                still.discard("float")
            if "bool" in still and cell.lower() not in ("true", "false"):
                still.discard("bool")
    return {name: _csv_cast(still) for name, still in possible.items()}


def _csv_cast(possible: set[str]) -> Callable[[str], Any]:
    def structured(cell: str) -> Any:
        try:
            return parse_json(cell)
        except ValueError:
            return cell

    if "json" in possible:
        return structured
    if "int" in possible:
        return int
    if "float" in possible:
        return float
    return (lambda cell: cell.lower() == "true") if "bool" in possible else str


def _parquet(source: Source, settings: DataSettings) -> Iterator[Row | BadRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(str(_local(source))) as file:
            number = 0
            for batch in file.iter_batches(batch_size=256):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(source.name, number, values)
    except pyarrow.ArrowException as e:
        raise DataError(f"{source.name}: not a whole Parquet file: {_first_line(e)}", field="data") from None


def _arrow(source: Source, settings: DataSettings) -> Iterator[Row | BadRow]:
    import pyarrow
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(_local(source))) as mapped:
            try:
                batches = _file_batches(pyarrow.ipc.open_file(mapped))
            except pyarrow.ArrowInvalid:
                batches = iter(pyarrow.ipc.open_stream(mapped))
            number = 0
            for batch in batches:
                for start in range(0, batch.num_rows, 256):
                    for values in batch.slice(start, 256).to_pylist():
                        number += 1
                        yield Row(source.name, number, values)
    except pyarrow.ArrowException as e:
        raise DataError(f"{source.name}: not a whole Arrow file: {_first_line(e)}", field="data") from None


def _file_batches(reader: Any) -> Iterator[Any]:
    for i in range(reader.num_record_batches):
        yield reader.get_batch(i)


def _dataset(source: Source, settings: DataSettings) -> Iterator[Row | BadRow]:
    dataset = open_dataset(source, settings)
    for number, values in enumerate(dataset, 1):
        yield Row(source.name, number, dict(values))


def open_dataset(source: Source, settings: DataSettings) -> Any:
    """The split of a `datasets` folder or hub id. Raises DataError naming the splits there are."""
    import datasets

    try:
        if source.path is not None and any((source.path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            dataset = datasets.load_from_disk(str(source.path))
        else:
            dataset = datasets.load_dataset(source.name)
    except Exception as e:  # the library raises a dozen kinds for an unreachable hub, a missing name or a damaged folder
        raise DataError(f"{source.name}: no such file, and datasets cannot load it: {_first_line(e)}", field="data") from None
    if isinstance(dataset, datasets.DatasetDict):
        if settings.data_split not in dataset:
            raise DataError(f"{source.name}: no split {settings.data_split!r}; there are {', '.join(dataset)}", field="data_split")
        dataset = dataset[settings.data_split]
    return dataset
