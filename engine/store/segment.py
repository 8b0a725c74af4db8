"""One immutable segment: codes in a memory-mapped FAISS index, scales, and rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from engine.blocks import BlockLayout
from engine.errors import StoreError
from engine.signs import Sketch
from engine.store.rows import add_sketch, fixed_width

CODES, SCALES, ROWS = "codes.faiss", "scales.npy", "rows.arrow"
SEGMENT_FILES = (CODES, SCALES, ROWS)
BATCH_ROWS = 65_536


class Segment:
    """Rows base .. base + n - 1 of a store.

    codes (n, code_bytes) uint8: a read-only view of the mapped index; scales (n, n_blocks) float16, mapped, stored as s / c_b; index: the FAISS binary
    index itself (never add to it or remove from it: it is mapped); table: the rows, mapped, with the columns of `engine.store.rows`.
    Raises StoreError naming a file that is missing or does not fit.
    """

    def __init__(self, folder: Path, base: int, rows: int, layout: BlockLayout) -> None:
        self.name, self.base, self.n = folder.name, base, rows
        self.index = _open_index(folder / CODES, rows, 8 * layout.code_bytes)
        codes = faiss.rev_swig_ptr(self.index.xb.data(), rows * layout.code_bytes).reshape(rows, layout.code_bytes)
        codes.flags.writeable = False
        self.codes: NDArray[np.uint8] = codes
        self.scales: NDArray[np.float16] = _open_scales(folder / SCALES, (rows, layout.n_blocks))
        self.table: pa.Table = _open_table(folder / ROWS, rows)

    def column(self, name: str) -> NDArray[Any]:
        """A fixed-width column as an array (n,)."""
        return fixed_width(self.table.column(name))


def write_segment(folder: Path, table: pa.Table, sketch: Sketch, layout: BlockLayout) -> None:
    """Write the three files of a segment into a folder that exists. `table` holds the example columns, `sketch` the rest."""
    if table.num_rows != len(sketch) or not len(sketch):
        raise ValueError(f"{table.num_rows} rows and {len(sketch)} sketches")
    index = faiss.IndexBinaryFlat(8 * layout.code_bytes)
    index.add(np.ascontiguousarray(sketch.codes))
    faiss.write_index_binary(index, str(folder / CODES))
    np.save(folder / SCALES, np.ascontiguousarray(sketch.scales), allow_pickle=False)
    write_table(folder / ROWS, add_sketch(table, sketch))


def write_table(path: Path, table: pa.Table) -> None:
    """An uncompressed Arrow file in batches of at most 65,536 rows, so that it can be mapped and read row by row."""
    table = table.combine_chunks()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=BATCH_ROWS)


def read_table(path: Path) -> pa.Table:
    """The whole file, memory-mapped."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _open_index(path: Path, rows: int, bits: int) -> Any:
    try:
        index = faiss.read_index_binary(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError:
        raise StoreError(f"{path}: not a whole FAISS binary index; the store is damaged", code="damaged-store") from None
    if not isinstance(index, faiss.IndexBinaryFlat) or index.d != bits or index.ntotal != rows:
        raise StoreError(f"{path}: holds {index.ntotal} codes of {index.d} bits, the manifest says {rows} of {bits}", code="damaged-store")
    return index


def _open_scales(path: Path, shape: tuple[int, int]) -> NDArray[np.float16]:
    try:
        scales = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        raise StoreError(f"{path}: missing, or not a whole array; the store is damaged", code="damaged-store") from None
    if scales.shape != shape or scales.dtype != np.float16:
        raise StoreError(f"{path}: holds {scales.dtype} {scales.shape}, the manifest says float16 {shape}", code="damaged-store")
    return np.asarray(scales)


def _open_table(path: Path, rows: int) -> pa.Table:
    try:
        table = read_table(path)
    except (OSError, pa.ArrowException):
        raise StoreError(f"{path}: missing, or not a whole Arrow file; the store is damaged", code="damaged-store") from None
    if table.num_rows != rows:
        raise StoreError(f"{path}: holds {table.num_rows} rows, the manifest says {rows}", code="damaged-store")
    return table


def total_rows(segments: Sequence[Segment]) -> int:
    """Rows of all segments."""
    return sum(s.n for s in segments)
