"""Prometheus metrics of one server, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]


class Metrics:
    """Counters, gauges and histograms; names start with eogp_ (the process's own with process_)."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        ProcessCollector(registry=r)
        self.requests = Counter("eogp_requests", "Answered HTTP requests.", ["path", "method", "status"], registry=r)
        self.seconds = Histogram("eogp_request_seconds", "From arrival to answer.", ["path"], buckets=SECONDS, registry=r)
        self.phase = Histogram("eogp_phase_seconds", "Time of one request in one phase.", ["phase"], buckets=SECONDS, registry=r)
        self.errors = Counter("eogp_errors", "Problem answers by code.", ["code"], registry=r)
        self.in_flight = Gauge("eogp_requests_in_flight", "HTTP requests being answered.", registry=r)
        self.queue_jobs = Gauge("eogp_queue_requests", "Requests that wait for the inference thread.", registry=r)
        self.queue_tokens = Gauge("eogp_queue_tokens", "Their tokens.", registry=r)
        self.batch_jobs = Histogram("eogp_batch_requests", "Requests answered in one batch.", buckets=(1, 2, 4, 8, 16, 32, 64, 128), registry=r)
        self.batch_tokens = Histogram("eogp_batch_tokens", "Tokens of one batch.", buckets=(16, 64, 256, 1024, 4096, 16384), registry=r)
        self.batch_seconds = Histogram("eogp_batch_seconds", "Time of one batch on the inference thread.", buckets=SECONDS, registry=r)
        self.tokens = Counter("eogp_tokens", "Query tokens answered.", registry=r)
        self.dropped = Counter("eogp_dropped", "Requests dropped before they ran, by reason.", ["reason"], registry=r)
        self.restarts = Counter("eogp_worker_restarts", "Restarts of the inference thread.", registry=r)
        self.reloads = Counter("eogp_reloads", "Reloads of the store by outcome.", ["outcome"], registry=r)
        self.rows = Gauge("eogp_store_rows", "Rows of the generation that is served.", registry=r)
        self.excluded = Gauge("eogp_store_excluded_rows", "Rows that never appear in results.", registry=r)
        self.checked = Counter("eogp_store_checked_bytes", "Bytes that the background check has compared with their hashes.", registry=r)
        self.damaged = Gauge("eogp_store_damaged_files", "Files that differ from their hashes.", registry=r)
        self.ready = Gauge("eogp_ready", "1 when /readyz says so.", registry=r)
        self.generation = Gauge("eogp_generation_info", "1 for the generation that is served.", ["generation"], registry=r)

    def batch(self, jobs: int, tokens: int, seconds: float) -> None:
        """Record one batch; safe on any thread."""
        self.batch_jobs.observe(jobs)
        self.batch_tokens.observe(tokens)
        self.batch_seconds.observe(seconds)
        self.tokens.inc(tokens)

    def serve(self, generation: str, rows: int, excluded: int) -> None:
        """Record which generation is served now."""
        self.generation.clear()
        self.generation.labels(generation).set(1)
        self.rows.set(rows)
        self.excluded.set(excluded)

    def render(self, refresh: Callable[[], None]) -> bytes:
        """The exposition text, after `refresh` has set the gauges that are read on demand."""
        refresh()
        return generate_latest(self.registry)
