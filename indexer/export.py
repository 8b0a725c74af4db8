"""`eogp export`: the rows as Parquet, codes and scales as arrays, for other tools."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import SettingError
from engine.store import Store
from engine.store.files import disk_errors
from engine.store.merge import aligned, common_schema

CHUNK = 16_384


def export(path: Path, out: Path, *, deleted: bool = False) -> int:
    """Write rows.parquet, codes.npy, scales.npy and layout.json into a new folder; rows in all three agree. Returns the rows written.

    codes (n, code_bytes) uint8, little bit order, blocks byte-aligned; scales (n, n_blocks) float32 = c_b x stored, so that equation (14) needs nothing else.
    """
    store = Store.open(path)
    if out.exists() and any(out.iterdir()):
        raise SettingError(f"{out}: is not empty; name a new folder", field="out")
    out.mkdir(parents=True, exist_ok=True)
    keep = np.ones(store.n_rows, np.bool_)
    if not deleted:
        keep[store.deleted] = False
    n = int(keep.sum())
    with disk_errors(out):
        codes = np.lib.format.open_memmap(out / "codes.npy", mode="w+", dtype=np.uint8, shape=(n, store.layout.code_bytes))
        scales = np.lib.format.open_memmap(out / "scales.npy", mode="w+", dtype=np.float32, shape=(n, store.layout.n_blocks))
        schema = common_schema([s.table.schema for s in store.segments])
        at = 0
        with pq.ParquetWriter(out / "rows.parquet", schema) as writer:
            for segment in store.segments:
                live = np.flatnonzero(keep[segment.base : segment.base + segment.n])
                for start in range(0, len(live), CHUNK):
                    chunk = live[start : start + CHUNK]
                    codes[at : at + len(chunk)] = segment.codes[chunk]
                    scales[at : at + len(chunk)] = segment.scales[chunk].astype(np.float32) * store.c
                    writer.write_table(aligned(segment.table.take(pa.array(chunk)), schema))
                    at += len(chunk)
        codes.flush()
        scales.flush()
        described = {"layout": store.layout.to_json(), "bit_order": "little", "score": "sum over blocks of scale times the dot product of y with the signs"}
        (out / "layout.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
    return n
