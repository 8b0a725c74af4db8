"""The backend that is real: a QueryEngine on one generation of a store, speaking the HTTP schema."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path, PurePath

import numpy as np
from numpy.typing import NDArray

from engine import query
from engine.errors import EogpError, StoreError
from engine.query import QueryEngine
from engine.search import Searcher, SearchRequest
from engine.settings import ModelSettings
from engine.signs import FLAG_NO_TARGET, FLAG_NONFINITE, FLAG_ZERO
from engine.store import Store, StoredRow
from engine.store.manifest import MANIFEST_HASH, current_generation
from engine.store.verify import faults
from service import schemas
from service.settings import ServeSettings

FIELD = re.compile(r"\[(\d+)\]")  # the engine writes queries[2].prompt, the schema queries.2.prompt


class EngineBackend:
    """One generation of a store with its model. Nothing here changes after construction."""

    def __init__(self, engine: QueryEngine, settings: ServeSettings) -> None:
        self.engine, self.settings = engine, settings
        self.version = _version(engine.store.path, engine.store.generation)

    @classmethod
    def open(cls, path: Path, settings: ServeSettings, searching: Callable[[Store], Searcher] | None = None) -> EngineBackend:
        """Open the store, then load its model. searching: what makes the searcher of a generation. Raises StoreError or ModelError in one sentence."""
        return cls._of(Store.open(path, verify=settings.verify), settings, searching)

    @classmethod
    def _of(cls, store: Store, settings: ServeSettings, searching: Callable[[Store], Searcher] | None) -> EngineBackend:
        given = {name: getattr(settings, name) for name in ModelSettings.model_fields if name in settings.model_fields_set}
        limits = query.Limits(
            queries=settings.max_queries,
            top_k=settings.max_top_k,
            rescore_n=settings.max_rescored,
            candidates=settings.max_candidates,
            new_tokens=settings.max_new_tokens,
        )
        engine = QueryEngine.of(store, ModelSettings(**given), limits=limits, searching=searching)
        if settings.max_query_tokens and settings.max_query_tokens < engine.loaded.max_length:
            engine.data = engine.data.model_copy(update={"max_length": settings.max_query_tokens})
        return cls(engine, settings)

    # --- answers

    def prepare(self, request: schemas.InfluenceRequest) -> query.Prepared:
        """Check and tokenise."""
        try:
            return self.engine.prepare(spec_of(request))
        except EogpError as e:
            raise _renamed(e) from None

    def answer(self, items: Sequence[query.Prepared]) -> list[schemas.InfluenceResponse | EogpError]:
        """One pass of the model over all of them, then their searches, those that are alike together."""
        answers: list[schemas.InfluenceResponse | EogpError] = []
        sketched = self.engine.sketch(items)
        for item, sketch, searched in zip(items, sketched, self.engine.search(items, sketched), strict=True):
            try:
                answers.append(response_of(self.engine.finish(item, sketch, searched)))
            except EogpError as e:
                answers.append(_renamed(e))
        return answers

    # --- examples

    def example(self, id: str, neighbours: int) -> schemas.StoredExample | None:
        """A stored row by its id, with the rows whose sketches are most alike."""
        store = self.engine.store
        try:
            position = store.position_of(id)
        except StoreError as e:
            if e.code == "unknown-id":
                return None
            raise
        found = self._stored(store.rows([position])[0])
        if neighbours and found.excluded is None:
            found.neighbours = self._neighbours(position, neighbours)
        return found

    def examples(self, order: schemas.Order, offset: int, limit: int) -> schemas.ExampleList:
        """Rows that are not deleted, in this order."""
        store = self.engine.store
        positions = self._orders[order]
        rows = store.rows(positions[offset : offset + limit])
        return schemas.ExampleList(generation=store.generation, total=len(positions), order=order, offset=offset, examples=[self._stored(r) for r in rows])

    @cached_property
    def _orders(self) -> dict[str, NDArray[np.int64]]:
        store = self.engine.store
        orders: dict[str, NDArray[np.int64]] = {"position": np.setdiff1d(np.arange(store.n_rows), store.deleted)}
        usable = np.flatnonzero(~store.excluded)
        for order, column in (("self_influence", "norm_sq"), ("loss", "loss")):
            orders[order] = usable[np.argsort(-store.column(column)[usable], kind="stable")]
        return orders

    def _neighbours(self, position: int, n: int) -> list[schemas.Neighbour]:
        searcher, store = self.engine.searcher, self.engine.store
        y = searcher.decode(np.array([position], np.int64))
        ranking = searcher.search(SearchRequest(y, n + 1, "cosine", "proponents")).proponents
        assert ranking is not None
        near = [(int(p), float(s)) for p, s in zip(ranking.positions[0], ranking.scores[0], strict=True) if p not in (-1, position)][:n]
        rows = store.rows([p for p, _ in near])
        return [schemas.Neighbour(id=r.id, score=s, text=r.text, metadata=r.metadata) for r, (_, s) in zip(rows, near, strict=True)]

    def _stored(self, row: StoredRow) -> schemas.StoredExample:
        return schemas.StoredExample(
            id=row.id,
            position=row.position,
            text=row.text,
            kind=row.kind,
            metadata=row.metadata,
            n_tokens=row.n_tokens,
            loss=_finite(row.loss),
            self_influence=_finite(row.norm_sq),
            excluded=_reason(row.flags),
        )

    # --- the server

    @property
    def generation(self) -> str:
        return self.engine.store.generation

    @property
    def rescore(self) -> bool:
        return self.engine.store.full_dir is not None

    @cached_property
    def model(self) -> schemas.ModelInfo:
        """Names only: no path of this machine leaves it."""
        loaded = self.engine.loaded
        limit = self.engine.data.max_length or loaded.max_length
        return schemas.ModelInfo(
            name=PurePath(loaded.source).name,
            task=loaded.task,
            parameters=sum(p.numel() for p in loaded.model.parameters()),
            device=str(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            context=min(limit, loaded.max_length),
            chat=bool(getattr(loaded.tokenizer, "chat_template", None)) or self.engine.data.chat_fallback != "refuse",
        )

    @cached_property
    def store(self) -> schemas.StoreInfo:
        """Shape and method of the store."""
        store = self.engine.store
        sketch = store.manifest.sketch
        return schemas.StoreInfo(
            generation=store.generation,
            rows=store.n_rows,
            excluded=int(np.count_nonzero(store.excluded)),
            bytes_per_example=sketch.bytes_per_example or store.layout.payload_bytes,
            bits=store.layout.total_k,
            blocks=store.layout.n_blocks,
            method=sketch.method,
            coverage_threshold=store.manifest.coverage_threshold,
            metadata=list(store.metadata.column_names),
        )

    def damage(self, told: Callable[[int], None]) -> list[tuple[str, str]]:
        """Every file against its hash; where the store has gone on meanwhile, what is missing here is no damage."""
        store = self.engine.store
        found = faults(store.path, store.manifest, told)
        return found if found and self._is_current() else []

    def _is_current(self) -> bool:
        store = self.engine.store
        generation = current_generation(store.path)
        return (generation, _version(store.path, generation)) == (store.generation, self.version)

    def reload(self) -> EngineBackend | None:
        """The live generation with the same model and projection, or, where the store was built anew, with its own."""
        old = self.engine.store
        if self._is_current():
            return None
        store = Store.open(old.path, verify=self.settings.verify)
        same = store.manifest.model == old.manifest.model and store.manifest.sketch == old.manifest.sketch
        return EngineBackend(self.engine.reopened(store), self.settings) if same else self._of(store, self.settings, self.engine.searching)


def spec_of(request: schemas.InfluenceRequest) -> query.QuerySpec:
    """The engine's form of a request."""
    return query.QuerySpec(
        queries=tuple(_input(q) for q in request.queries),
        top_k=request.top_k,
        score=request.score,
        direction=request.direction,
        filter=request.filter.grammar() if request.filter else None,
        aggregate=request.aggregate,
        contrast=tuple(_input(q) for q in request.contrast or ()),
        tokens=request.tokens,
        rescore=request.rescore,
        rescore_n=request.rescore_n,
        candidates=request.candidates if request.candidates is None or isinstance(request.candidates, int) else {"recall": request.candidates.recall},
        truncation=request.truncation,
    )


def _input(q: schemas.Query) -> query.QueryInput:
    generate = schemas.Generate() if q.generate is True else q.generate
    return query.QueryInput(
        text=q.text,
        prompt=q.prompt,
        completion=q.completion,
        generate=query.Generate(**generate.model_dump()) if generate else None,
        messages=[m.model_dump() for m in q.messages] if q.messages else None,
        input_ids=q.input_ids,
        labels=q.labels,
        label=q.label,
    )


def response_of(answer: query.Answer) -> schemas.InfluenceResponse:
    """The schema's form of an answer. A score that is not finite raises, and is answered as a fault of ours."""
    each = len(answer.answers) > 1 or not answer.answers or sum(i.sign > 0 for i in answer.answers[0].inputs) == 1
    return schemas.InfluenceResponse(
        generation=answer.generation,
        method=answer.method,
        score=answer.score,
        direction=answer.direction,
        n_rows=answer.n_rows,
        n_allowed=answer.n_allowed,
        n_candidates=answer.n_candidates,
        recall=answer.recall,
        results=[_result(i if each else None, a) for i, a in enumerate(answer.answers)],
        timing_ms=dict(answer.timing),
    )


def _result(index: int | None, a: query.QueryAnswer) -> schemas.QueryResult:
    return schemas.QueryResult(
        query=index,
        n_tokens=a.n_tokens,
        truncated=a.truncated,
        coverage=a.coverage,
        warnings=a.warnings,
        inputs=[
            schemas.QueryInput(
                text=i.text,
                sign=1 if i.sign > 0 else -1,
                n_tokens=i.n_tokens,
                n_targets=i.n_targets,
                truncated=i.truncated,
                loss=i.loss,
                coverage=i.coverage,
                generated=i.generated,
                tokens=_tokens(i.tokens),
            )
            for i in a.inputs
        ],
        proponents=_hits(a.proponents),
        opponents=_hits(a.opponents),
    )


def _hits(hits: Sequence[query.Hit] | None) -> list[schemas.Hit] | None:
    if hits is None:
        return None
    return [
        schemas.Hit(
            rank=h.rank,
            id=h.id,
            score=h.score,
            text=h.text,
            target_start=h.target_start,
            metadata=h.metadata,
            rescored=h.rescored,
            query_tokens=h.query_tokens,
            tokens=_tokens(h.tokens),
        )
        for h in hits
    ]


def _tokens(tokens: Sequence[query.Token] | None) -> list[schemas.Token] | None:
    return None if tokens is None else [schemas.Token(text=t.text, start=t.start, end=t.end, target=t.target, weight=t.weight) for t in tokens]


def _renamed(error: EogpError) -> EogpError:
    """The same error with the schema's field paths."""
    error.message = FIELD.sub(r".\1", error.message)
    error.field = FIELD.sub(r".\1", error.field) if error.field else None
    return error


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _reason(flags: int) -> str | None:
    reasons = ((FLAG_NO_TARGET, "it has no target token"), (FLAG_NONFINITE, "its gradient is not finite"), (FLAG_ZERO, "its gradient is zero"))
    return next((reason for flag, reason in reasons if flags & flag), None)


def _version(path: Path, generation: str) -> bytes:
    """What tells a generation from another of the same name, in a store that was built anew."""
    try:
        return (path / "generations" / generation / MANIFEST_HASH).read_bytes()
    except OSError as e:
        raise StoreError(f"{e.filename}: {e.strerror}; the store is damaged", code="damaged-store") from None
