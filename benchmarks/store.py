"""The store at a million rows, without a model: open, append, delete, compact, verify. Codes are random, text and metadata synthetic.

python -m benchmarks.store [--rows 1000000] [--work DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.synthetic_store import synthetic_examples, synthetic_sketch
from engine.blocks import BlockLayout
from engine.data.reading import find_sources
from engine.model import from_parts
from engine.search import Searcher, SearchRequest
from engine.store import Manifest, Store, StoreWriter
from engine.store.manifest import SegmentEntry, SketchEntry
from engine.store.rows import examples_table
from engine.store.writer import segment_name
from indexer.append import commit
from indexer.compact import compact
from indexer.delete import delete
from indexer.duplicates import KnownIds
from indexer.interruption import StopRequest
from indexer.prepare import prepare
from indexer.reporter import Reporter
from indexer.verify import verify

LAYOUT = BlockLayout(("model",), (2032,))  # 254 bytes of code and 2 of scale
SHARD = 4096
OPEN = """
import json, sys, time
from engine.store import Store
from indexer.process import resident
before = resident()
started, cpu = time.perf_counter(), time.process_time()
store = Store.open(sys.argv[1])
seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
opened = resident()
started = time.perf_counter()
row = store.rows([store.position_of(f"row-{store.n_rows // 2}")])[0]
print(json.dumps({"rows": store.n_rows, "seconds": seconds, "cpu_seconds": cpu, "row_seconds": time.perf_counter() - started,
                  "anonymous_before": before["anonymous"], "anonymous_open": opened["anonymous"], "mapped_open": opened["mapped"]}))
"""


def build(path: Path, rows: int) -> None:
    """A store of `rows` rows in shards of 4,096, each with its own id, text and codes."""
    rng = np.random.default_rng(0)
    base = examples_table(synthetic_examples(rng, range(SHARD)), list(range(SHARD)), [0] * SHARD, list(range(SHARD)))
    segments = []
    with StoreWriter(path) as writer:
        for number, start in enumerate(range(0, rows, SHARD)):
            n = min(SHARD, rows - start)
            table = _renumbered(base.slice(0, n), start)
            writer.write_segment(number, table, synthetic_sketch(rng, n, LAYOUT), LAYOUT)
            segments.append(SegmentEntry(name=segment_name(number), rows=n))
        manifest = Manifest(
            sketch=SketchEntry(layout=LAYOUT.to_json(), c=[1.0], scale="l1", method="pca", bytes_per_example=LAYOUT.payload_bytes),
            settings={"id_field": "id", "kind": "text"},
            next_row=rows,
            next_segment=len(segments),
            segments=segments,
            files=writer.segment_entries(range(len(segments))),
        )
        writer.commit(manifest)


def _renumbered(table: pa.Table, start: int) -> pa.Table:
    rows = np.arange(start, start + table.num_rows)
    ids = pc.binary_join_element_wise(pa.array(["row"] * len(rows)), pa.array(rows).cast(pa.string()), "-").cast(pa.large_string())
    text = pc.binary_join_element_wise(table.column("text"), ids, pa.scalar(" ", pa.large_string()))
    replaced = {"row": pa.array(rows), "id": ids, "text": text, "line": pa.array(rows + 1), "meta.year": pa.array(1790 + rows % 230)}
    for name, column in replaced.items():
        table = table.set_column(table.column_names.index(name), name, column)
    return table.combine_chunks()


def timed(work: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Wall-clock and processor seconds (of all threads), and the result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}, result


def append_rows(path: Path, work: Path, n: int, loaded: Any) -> int:
    """`eogp append` of n rows, all of it but the model: read, tokenise, check ids against the store, write, commit."""
    data = work / "more.jsonl"
    data.write_text(
        "".join(json.dumps({"id": f"new-{i}", "text": f"the king of number {i} and peace", "year": 3000}) + "\n" for i in range(n)), encoding="utf-8"
    )
    with StoreWriter(path) as writer:
        store = Store.open(path)
        settings = store.data_settings().model_copy(update={"data": [str(data)]})
        with Reporter(log_json=True).stage("append") as stage:
            prepared = prepare(
                find_sources(settings),
                settings,
                loaded,
                work / "prepared",
                shard_rows=SHARD,
                first_row=store.manifest.next_row,
                known=KnownIds(store),
                stage=stage,
                stop=StopRequest(),
            )
            number = store.manifest.next_segment
            writer.write_segment(number, prepared.table(0), synthetic_sketch(np.random.default_rng(1), n, LAYOUT), LAYOUT)
            commit(store, writer, prepared, [SegmentEntry(name=segment_name(number), rows=n)], [])
    return prepared.n


def tiny_model() -> Any:
    """A tokenizer of bytes, and a model of one layer that is never run."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, "<|end|>"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", model_max_length=64)
    return from_parts(GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=64, n_embd=8, n_layer=1, n_head=1)), tokenizer)


def answers(path: Path) -> list[tuple[str, float]]:
    """Ids and scores of the ten best and worst rows for four random queries."""
    store = Store.open(path)
    y = np.random.default_rng(2).standard_normal((4, LAYOUT.total_k)).astype(np.float32)
    result = Searcher(store.segments, store.layout, store.c, excluded=store.excluded).search(SearchRequest(y, 10))
    found: list[tuple[str, float]] = []
    for ranking in (result.proponents, result.opponents):
        assert ranking is not None
        found += [(row.id, float(score)) for q in range(4) for row, score in zip(store.rows(ranking.positions[q]), ranking.scores[q], strict=True)]
    return found


def opened(path: Path) -> dict[str, Any]:
    """Open the store in a fresh process."""
    root = str(Path(__file__).parents[1])
    ran = subprocess.run([sys.executable, "-c", OPEN, str(path)], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": root})
    return dict(json.loads(ran.stdout))


def measure(rows: int, work: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """All figures, as a flat mapping."""
    path = work / "store"
    found: dict[str, Any] = {"rows": rows}
    loaded = tiny_model()
    found["build"], _ = timed(lambda: build(path, rows))
    found["store_bytes"] = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    say(f"built {rows:,} rows, {found['store_bytes'] / 1e6:,.0f} MB, {_clock(found['build'])}")
    found["open"] = opened(path)
    say(
        f"open: {_clock(found['open'])}, {found['open']['anonymous_open'] / 1e6:,.0f} MB of memory besides mapped files ({found['open']['anonymous_before'] / 1e6:,.0f} before)"
    )
    before = answers(path)
    found["append"], _ = timed(lambda: append_rows(path, work, 1000, loaded))
    say(f"append of 1,000: {_clock(found['append'])}")
    found["delete"], (_, found["deleted"]) = timed(lambda: delete(path, where={"field": "year", "in": [1800, 1900, 3000]}))
    say(f"delete by filter: {_clock(found['delete'])}, {found['deleted']:,} rows")
    kept = answers(path)
    found["compact"], (_, removed, segments) = timed(lambda: compact(path))
    found |= {"removed": removed, "segments": segments, "same_answers": answers(path) == kept, "answers": len(before)}
    say(f"compact: {_clock(found['compact'])}, {removed:,} rows removed, {segments} segments, same answers: {found['same_answers']}")
    found["verify"], faults = timed(lambda: verify(path, reporter=Reporter(log_json=True)))
    found["faults"] = len(faults)
    found["open_compacted"] = opened(path)
    say(f"after compaction: open {_clock(found['open_compacted'])}; verify {_clock(found['verify'])}")
    return found


def _clock(t: dict[str, float]) -> str:
    return f"{t['seconds']:.2f} s ({t['cpu_seconds']:.2f} s of processor time)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    work = given.work or Path(tempfile.mkdtemp(prefix="eogp-store-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        found = measure(given.rows, work)
    finally:
        shutil.rmtree(work)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
