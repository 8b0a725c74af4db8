"""The one place that turns a parsed request into ranked training examples.

prepare (any thread) -> sketch (the thread that owns the model) -> search, both for several requests at once -> finish (token shares, rows). A request with
`rescore` needs the model in `finish` too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.curvature import Curvature
from engine.data.settings import DataSettings
from engine.errors import DataError, EogpError, ModelError, SettingError
from engine.example import Example
from engine.model import LoadedModel, fingerprint_mismatch, load_model
from engine.query.excerpt import target_start
from engine.query.generate import complete
from engine.query.prepare import Pending, Prepared, prepare
from engine.query.searching import Searched, search_together
from engine.query.spec import Answer, Hit, InputReport, Limits, QueryAnswer, QuerySpec, Token
from engine.rescore import Rescorer, example_of
from engine.search import Ranking, Searcher
from engine.settings import ModelSettings
from engine.signs import FLAG_NO_TARGET, FLAG_NONFINITE
from engine.sketcher import Sketcher
from engine.store import Store, StoredRow

CANCELLED = 1e-4  # coordinates are good to about this much in float32


@dataclass(frozen=True, slots=True)
class Sketched:
    """The float side of one request: per input its Example, generated text, coordinates (n, K), coverage, loss, flag, and coordinates by position (T, K).

    error: this request alone cannot be answered; the others of its batch can.
    """

    examples: list[Example]
    generated: list[str | None]
    y: NDArray[np.float32]
    coverage: list[float | None]
    loss: list[float]
    by_position: list[NDArray[np.float32]] | None
    timing: dict[str, float]
    error: EogpError | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A ranked row; with rescore, its uncompressed influence and that of its tokens."""

    row: StoredRow
    score: float
    rescored: float | None = None
    tokens: list[Token] | None = None


class QueryEngine:
    """A store opened together with its model."""

    def __init__(
        self,
        store: Store,
        loaded: LoadedModel,
        sketcher: Sketcher,
        *,
        limits: Limits | None = None,
        data: DataSettings | None = None,
        threads: int = 0,
        searching: Callable[[Store], Searcher] | None = None,
    ) -> None:
        """searching: what makes the searcher of a generation; by default one over the store's own segments, in this process."""
        self.store = store
        self.loaded = loaded
        self.sketcher = sketcher
        self.limits = limits or Limits()
        self.data = data or store.data_settings()
        self.searching = searching
        if searching is not None:
            self.searcher = searching(store)
        else:
            self.searcher = Searcher(
                store.segments, store.layout, store.c, excluded=store.excluded, calibration=store.recall, threads=threads, device=loaded.device
            )

    @classmethod
    def open(cls, path: Path | str, settings: ModelSettings | None = None, *, limits: Limits | None = None) -> QueryEngine:
        """Open a store, load the model that it names (or `settings.model`, where it has moved to), and check that it is the same model.

        Raises StoreError or ModelError in one sentence.
        """
        store = Store.open(Path(path))
        return cls.of(store, settings, limits=limits)

    @classmethod
    def of(
        cls,
        store: Store,
        settings: ModelSettings | None = None,
        *,
        limits: Limits | None = None,
        searching: Callable[[Store], Searcher] | None = None,
    ) -> QueryEngine:
        """As `open`, for a store that is open already."""
        settings = store.model_settings(settings)
        loaded = load_model(settings, check_dtype=False)
        difference = fingerprint_mismatch(store.manifest.model.fingerprint, loaded.fingerprint)
        if difference:
            raise ModelError(f"{loaded.source} is not the model that {store.path} was built with: {difference}", field="model")
        engine = cls(store, loaded, Sketcher.load(store.sketch_dir, loaded), limits=limits, threads=settings.threads, searching=searching)
        engine.searcher.warm_up()
        engine.sketcher.query([_short_example(loaded)])  # what is compiled on first use, is now
        return engine

    def reopened(self, store: Store) -> QueryEngine:
        """An engine on another generation of the same store: model and sketcher are shared, as no generation changes them."""
        engine = QueryEngine(store, self.loaded, self.sketcher, limits=self.limits, data=self.data, threads=self.searcher.threads, searching=self.searching)
        engine.searcher.warm_up()
        return engine

    def answer(self, specs: Sequence[QuerySpec]) -> list[Answer]:
        """Answer requests, the model running over all of them together. Raises the first request's error that cannot be answered."""
        prepared = [self.prepare(spec) for spec in specs]
        sketched = self.sketch(prepared)
        return [self.finish(p, s, found) for p, s, found in zip(prepared, sketched, self.search(prepared, sketched), strict=True)]

    def prepare(self, spec: QuerySpec) -> Prepared:
        """Check and tokenise; needs no weights, any thread may call it. Raises UserError naming the field."""
        timing: dict[str, float] = {}
        with _timed(timing, "tokenise"):
            prepared = prepare(spec, self.loaded, self.data, self.limits)
            if spec.candidates is not None or spec.rescore:
                self._check_optional(spec)
        prepared.timing.update(timing)
        return prepared

    def _check_optional(self, spec: QuerySpec) -> None:
        if spec.rescore and self.store.full_dir is None:
            raise SettingError("this store keeps no full curvature, so results cannot be re-scored; index with --keep-curvature", field="rescore")
        if isinstance(spec.candidates, dict) and not self.searcher.calibration:
            raise SettingError("this store has no calibration of candidate recall; give candidates as a number of rows", field="candidates")

    def sketch(self, batch: Sequence[Prepared]) -> list[Sketched]:
        """Generate where asked, then one pass of the model over every input of every request. A request that fails carries its own error."""
        timings: list[dict[str, float]] = [{} for _ in batch]
        inputs = [self._complete(p, t) for p, t in zip(batch, timings, strict=True)]
        flat = [example for found in inputs if not isinstance(found, EogpError) for example, _ in found]
        started = time.perf_counter()
        sketch = self.sketcher.query(flat) if flat else None
        milliseconds = 1000 * (time.perf_counter() - started)
        done, at = [], 0
        for p, found, timing in zip(batch, inputs, timings, strict=True):
            if isinstance(found, EogpError) or sketch is None:
                error = found if isinstance(found, EogpError) else None
                done.append(Sketched([], [], np.zeros((0, self.store.layout.total_k), np.float32), [], [], None, timing, error))
                continue
            rows = slice(at, at + len(found))
            at += len(found)
            timing["sketch"] = milliseconds
            examples = [example for example, _ in found]
            error = _flag_error(sketch.flags[rows], len(p.spec.queries))
            by_position = None
            if p.spec.tokens and error is None:
                with _timed(timing, "tokens"):
                    by_position = [self.sketcher.token_coordinates(e) for e in examples]
            coverage: list[float | None] = [None] * len(found) if sketch.coverage is None else [float(c) for c in sketch.coverage[rows]]
            loss = [float(v) for v in sketch.loss[rows]]
            done.append(Sketched(examples, [text for _, text in found], sketch.y[rows], coverage, loss, by_position, timing, error))
        return done

    def _complete(self, prepared: Prepared, timing: dict[str, float]) -> list[tuple[Example, str | None]] | EogpError:
        found: list[tuple[Example, str | None]] = []
        for x in prepared.inputs:
            if isinstance(x, Pending):
                try:
                    with _timed(timing, "generate"):
                        found.append(complete(x, self.loaded, self.data))
                except EogpError as e:
                    return e
            else:
                found.append((x, None))
        return found

    def search(self, batch: Sequence[Prepared], sketched: Sequence[Sketched]) -> list[Searched | EogpError]:
        """What each request finds, or its own error; requests with the same filter and options share one read of the codes."""
        found: list[Searched | EogpError | None] = [s.error for s in sketched]
        good = [i for i, error in enumerate(found) if error is None]
        ys = [_measured(batch[i], sketched[i].y) for i in good]
        for i, one in zip(good, search_together(self.searcher, self.store, [batch[i].spec for i in good], ys), strict=True):
            found[i] = one
        return [one for one in found if one is not None]

    def finish(self, prepared: Prepared, sketched: Sketched, searched: Searched | EogpError) -> Answer:
        """Attach rows, token shares and warnings. Runs without the model unless the request says `rescore`. Raises the request's own error."""
        if isinstance(searched, EogpError):
            raise searched
        spec, timing = prepared.spec, {**prepared.timing, **sketched.timing, **searched.timing}
        y, result, n_allowed = searched.y, searched.result, searched.n_allowed
        answers = []
        for a, group in enumerate(prepared.groups):
            found = [None if r is None else self._found(r, a, timing) for r in (result.proponents, result.opponents)]
            if spec.rescore:
                with _timed(timing, "rescore"):
                    found = self._rescored(found, prepared, sketched, group)
            hits = [None if f is None else self._hits(f[: spec.top_k], spec, y[a], prepared, sketched, group, timing) for f in found]
            reports = [self._report(prepared, sketched, i) for i in group]
            answers.append(QueryAnswer(reports, hits[0], hits[1], self._warnings(reports, y[a], sketched.y[group], n_allowed)))
        return Answer(
            answers, self.store.generation, result.method, spec.score, spec.direction, self.store.n_rows, n_allowed, result.n_candidates, result.recall, timing
        )

    def _found(self, ranking: Ranking, a: int, timing: dict[str, float]) -> list[Found]:
        """The ranked rows of one answer, read from the store."""
        n = int(ranking.counts[a])
        with _timed(timing, "rows"):
            rows = self.store.rows(ranking.positions[a, :n])
        return [Found(row, float(score)) for row, score in zip(rows, ranking.scores[a, :n], strict=True)]

    def _rescored(self, found: Sequence[list[Found] | None], prepared: Prepared, sketched: Sketched, group: list[int]) -> list[list[Found] | None]:
        """The same rows with their uncompressed influence, ordered by it; both directions in one pass of the model."""
        rows = {f.row.position: f.row for some in found if some for f in some}
        examples = {position: example_of(row, self.loaded) for position, row in rows.items()}
        queries, weights = [sketched.examples[i] for i in group], [float(prepared.signs[i]) for i in group]
        parts = dict(zip(examples, self._rescorer.by_position(queries, weights, list(examples.values())), strict=True))
        ordered: list[list[Found] | None] = []
        for some, sign in zip(found, (-1, 1), strict=True):
            if some is None:
                ordered.append(None)
                continue
            new = [Found(f.row, f.score, float(parts[f.row.position].sum()), self.tokens(examples[f.row.position], parts[f.row.position])) for f in some]
            ordered.append(sorted(new, key=lambda f: (sign * (f.rescored or 0.0), f.row.position)))
        return ordered

    @cached_property
    def _rescorer(self) -> Rescorer:
        folder = self.store.full_dir
        assert folder is not None  # refused in prepare
        return Rescorer(self.loaded, Curvature.load(folder))

    def _hits(
        self,
        found: Sequence[Found],
        spec: QuerySpec,
        y: NDArray[np.float32],
        prepared: Prepared,
        sketched: Sketched,
        group: list[int],
        timing: dict[str, float],
    ) -> list[Hit]:
        shares: list[list[list[float]]] | None = None
        if sketched.by_position is not None:
            with _timed(timing, "tokens"):
                shares = self._shares(np.array([f.row.position for f in found], np.int64), y, spec, sketched, prepared, group)
        return [
            Hit(
                rank=i + 1,
                position=f.row.position,
                id=f.row.id,
                score=f.score,
                text=f.row.text,
                metadata=f.row.metadata,
                target_start=target_start(f.row.text, f.row.input_ids, f.row.target_mask, self.loaded.tokenizer),
                rescored=f.rescored,
                query_tokens=None if shares is None else [part[i] for part in shares],
                tokens=f.tokens,
            )
            for i, f in enumerate(found)
        ]

    def _shares(
        self, positions: NDArray[np.int64], y: NDArray[np.float32], spec: QuerySpec, sketched: Sketched, prepared: Prepared, group: list[int]
    ) -> list[list[list[float]]]:
        """For each input of the group and each result, the part of the score that goes through each position of that input."""
        assert sketched.by_position is not None
        decoded = self.searcher.decode(positions)  # (n, K): c_b s b, so that a row's product with y is (14)
        if spec.score == "cosine":
            length = np.linalg.norm(decoded, axis=1, keepdims=True) * np.linalg.norm(y)
            decoded = np.divide(decoded, length, out=np.zeros_like(decoded), where=length > 0)
        return [(prepared.signs[i] * (decoded @ sketched.by_position[i].T)).tolist() for i in group]

    def _report(self, prepared: Prepared, sketched: Sketched, i: int) -> InputReport:
        example = sketched.examples[i]
        tokens = None
        if sketched.by_position is not None:
            y = sketched.y[i].astype(np.float64)
            length = float(np.linalg.norm(y)) or 1.0
            tokens = self.tokens(example, sketched.by_position[i] @ y / length)
        return InputReport(
            text=example.text,
            sign=prepared.signs[i],
            n_tokens=len(example),
            n_targets=example.n_targets,
            truncated=example.truncated,
            loss=sketched.loss[i],
            coverage=sketched.coverage[i],
            generated=sketched.generated[i],
            tokens=tokens,
        )

    def tokens(self, example: Example, weights: NDArray[Any]) -> list[Token]:
        """The example's tokens as a reader sees them, with a weight each."""
        found = []
        for t, token in enumerate(example.input_ids.tolist()):
            start, end = (0, 0) if example.offsets is None else (int(example.offsets[t, 0]), int(example.offsets[t, 1]))
            text = example.text[start:end] if end > start else ""
            if not text and self.loaded.tokenizer is not None:
                text = str(self.loaded.tokenizer.decode([token]))
            found.append(Token(text, start, end, bool(example.target_mask[t]), float(weights[t])))
        return found

    def _warnings(self, reports: Sequence[InputReport], y: NDArray[np.float32], parts: NDArray[np.float32], n_allowed: int) -> list[str]:
        """y (K,): what was searched for; parts (inputs, K): what it was summed from."""
        found = []
        threshold = self.store.manifest.coverage_threshold
        for i, r in enumerate(reports):
            which = "this query" if len(reports) == 1 else f"input {i + 1}"
            if threshold is not None and r.coverage is not None and r.coverage < threshold:
                found.append(
                    f"coverage {r.coverage:.2f} is below {threshold:.2f}: {which} lies outside what the index was fitted on, so its ranking is less reliable"
                )
            if r.truncated:
                found.append(f"{which} was truncated to {r.n_tokens:,} tokens")
        if float(np.linalg.norm(y)) <= CANCELLED * float(np.linalg.norm(parts, axis=1).sum()):
            found.append("the inputs cancel out: what is left of their gradients is rounding")
        if n_allowed == 0:
            found.append("no row is left to search: the filter, or the rows' flags, leave none")
        return found


def _short_example(loaded: LoadedModel) -> Example:
    """Two tokens, whatever they mean."""
    ids = np.zeros(2, np.int64)
    return Example("", ids, 0 if loaded.task == "sequence-classification" else ids, np.array([False, True]), "")


def _measured(prepared: Prepared, y: NDArray[np.float32]) -> NDArray[np.float32]:
    """(A, K) float32: the coordinates of each answer's measurement, from those of the inputs y (n, K)."""
    signs = np.asarray(prepared.signs, np.float64)
    return np.stack([(signs[g, None] * y[g]).sum(axis=0) for g in prepared.groups]).astype(np.float32)


def _flag_error(flags: NDArray[np.uint8], n_queries: int) -> EogpError | None:
    for i, flag in enumerate(flags.tolist()):
        if flag:
            where = f"queries[{i}]" if i < n_queries else f"contrast[{i - n_queries}]"
            reason = (
                "has no target token" if flag & FLAG_NO_TARGET else "has a gradient that is not finite" if flag & FLAG_NONFINITE else "has a gradient of zero"
            )
            return DataError(f"{where} {reason}, so nothing can be attributed to it", field=where)
    return None


@contextmanager
def _timed(timing: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        timing[phase] = timing.get(phase, 0.0) + 1000 * (time.perf_counter() - started)
