"""The store on disk: immutable segments, generations, and one writer at a time."""

from engine.store.manifest import Manifest
from engine.store.segment import Segment
from engine.store.store import Store, StoredRow
from engine.store.writer import StoreWriter

__all__ = ["Manifest", "Segment", "Store", "StoreWriter", "StoredRow"]
