"""The HTTP schema: what a request may hold and what an answer means, with units and signs.

Requests are strict: an unknown field, `true` for a number, or NaN is refused by name, never ignored or converted.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

Score = Literal["influence", "cosine"]
Direction = Literal["proponents", "opponents", "both"]
Order = Literal["position", "self_influence", "loss"]
MAX_FIELDS = 64
_SPACE = re.compile(r"(?:\s|<\|[^|<>]*\|>)+")  # chat markup reads as a space
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


def _no_large_integer(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("an integer lies between -2^63 and 2^63 - 1")
    return value


Bounded = Annotated[float, Field(ge=-1e300, le=1e300), BeforeValidator(_no_large_integer)]
Scalar = Annotated[Annotated[str, Field(max_length=10_000)] | bool | Int64 | Bounded, Field(union_mode="left_to_right")]
Bound = Annotated[Annotated[str, Field(max_length=1_000)] | Int64 | Bounded, Field(union_mode="left_to_right")]


class Strict(BaseModel):
    """Base of everything that comes from a client."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: Any) -> Any:
        """One error instead of one for each of a hundred thousand unknown fields."""
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"{len(data):,} fields in one object; it has at most {len(cls.model_fields)}")
        return data


class Output(BaseModel):
    """Base of everything that is answered: a number that is not finite is a fault, never null."""

    model_config = ConfigDict(allow_inf_nan=False)


class Generate(Strict):
    """How the model continues a prompt before its own output is attributed."""

    max_new_tokens: int = Field(32, ge=1, le=4096, description="Longest continuation, in tokens; the server's limit is in GET /v1/info.")
    temperature: float = Field(0.0, ge=0, le=5, description="0 takes the most likely token each time; above it, tokens are sampled.")
    top_p: float = Field(1.0, gt=0, le=1, description="With a temperature: sample from the most likely tokens that together have this probability.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of the sampling.")


class Message(Strict):
    """One turn of a chat."""

    role: str = Field(min_length=1, max_length=32, description="system, user or assistant, or what the model's chat template knows.", examples=["user"])
    content: str = Field(max_length=1_000_000, description="The turn's text.")


class Query(Strict):
    """What the model said: one of text, prompt with completion, prompt with generate, messages, or input_ids.

    The measured quantity is the cross-entropy of the target tokens, SUMMED over them, in nats.
    """

    text: str | None = Field(None, min_length=1, max_length=1_000_000, description="A text; every token but the first is a target.")
    prompt: str | None = Field(
        None, max_length=1_000_000, description="What the model was given; not a target itself.", examples=["The capital of Mongolia is"]
    )
    completion: str | None = Field(
        None,
        min_length=1,
        max_length=1_000_000,
        description="What it said after `prompt`; its tokens are the targets. Mind the leading space.",
        examples=[" Ulaanbaatar"],
    )
    generate: Generate | Literal[True] | None = Field(None, description="Let the model continue `prompt`, or answer `messages`, and attribute what it says.")
    messages: list[Message] | None = Field(None, min_length=1, max_length=1_000, description="A chat; the assistant's turns are the targets.")
    input_ids: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] | None = Field(
        None, min_length=1, max_length=100_000, description="Token ids, already tokenised."
    )
    labels: list[Annotated[int, Field(ge=-100, le=2**31 - 1)]] | None = Field(
        None, min_length=1, max_length=100_000, description="With input_ids: the same ids, and -100 where a token is not a target. Default: all are targets."
    )
    label: Annotated[int, Field(ge=0, le=2**31 - 1)] | Annotated[str, Field(max_length=1_000)] | None = Field(
        None, description="With text, for a classifier: the class, by number or name."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [name for name in ("text", "prompt", "messages", "input_ids") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(f"give exactly one of text, prompt, messages or input_ids{', not ' + ' and '.join(kinds) if kinds else ''}")
        kind = kinds[0]
        if kind == "prompt" and (self.completion is None) == (self.generate is None):
            raise ValueError("a prompt needs either a completion or generate" + (", not both" if self.completion is not None else ""))
        for name, owners in (("completion", ("prompt",)), ("generate", ("prompt", "messages")), ("labels", ("input_ids",)), ("label", ("text",))):
            if getattr(self, name) is not None and kind not in owners:
                raise ValueError(f"{name} belongs to {' or '.join(owners)}, not to {kind}")
        if self.labels is not None and self.input_ids is not None and len(self.labels) != len(self.input_ids):
            raise ValueError(f"labels has {len(self.labels)} entries and input_ids {len(self.input_ids)}; they must be as many")
        if self.generate is True:
            self.generate = Generate()
        return self


class Filter(Strict):
    """Which training examples may be answered with: one condition on a metadata field (or on `id`), or and / or / not of others."""

    field: str | None = Field(None, max_length=256, description="A metadata column, or `id`.", examples=["kind"])
    eq: Scalar | None = Field(None, description="The field equals this value.")
    in_: list[Scalar] | None = Field(None, alias="in", min_length=1, description="The field is one of these values.")
    gt: Bound | None = Field(None, description="The field is greater than this.")
    gte: Bound | None = Field(None, description="The field is this or greater.")
    lt: Bound | None = Field(None, description="The field is less than this.")
    lte: Bound | None = Field(None, description="The field is this or less.")
    exists: bool | None = Field(None, description="The field has a value (true) or none (false).")
    and_: list[Filter] | None = Field(None, alias="and", min_length=1, max_length=64, description="All of these hold.")
    or_: list[Filter] | None = Field(None, alias="or", min_length=1, max_length=64, description="At least one of these holds.")
    not_: Filter | None = Field(None, alias="not", description="This does not hold.")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        operators = [n for n in ("and_", "or_", "not_") if getattr(self, n) is not None]
        tests = [n for n in ("eq", "in_", "exists") if getattr(self, n) is not None]
        bounds = [n for n in ("gt", "gte", "lt", "lte") if getattr(self, n) is not None]
        if self.field is None:
            if len(operators) != 1 or tests or bounds:
                raise ValueError("a filter is either {field, condition} or one of {and}, {or}, {not}")
        elif operators or len(tests) + bool(bounds) != 1:
            raise ValueError("a condition has a field and one of eq, in, exists, or a range of gt, gte, lt, lte")
        elif {"gt", "gte"} <= set(bounds) or {"lt", "lte"} <= set(bounds):
            raise ValueError("a range has at most one lower and one upper bound")
        return self

    def size(self) -> tuple[int, int]:
        """(conditions and operators, values in `in` lists)."""
        terms, values = 1, len(self.in_ or ())
        for part in [*(self.and_ or ()), *(self.or_ or ()), *([self.not_] if self.not_ else [])]:
            t, v = part.size()
            terms, values = terms + t, values + v
        return terms, values

    def grammar(self) -> dict[str, Any]:
        """The engine's filter JSON."""
        return self.model_dump(by_alias=True, exclude_none=True)


class Candidates(Strict):
    """Use the binary index's Hamming candidates, as many as give this recall of the exhaustive top 10 on held-out queries."""

    recall: float = Field(gt=0, le=1, description="Share of the exhaustive top results that the candidates should contain.", examples=[0.95])


class InfluenceRequest(Strict):
    """Which training examples made the model say this?"""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"queries": [{"prompt": "The capital of Mongolia is", "completion": " Ulaanbaatar"}], "top_k": 5},
                {
                    "queries": [{"messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A friendly robot."}]}],
                    "score": "cosine",
                    "direction": "proponents",
                    "tokens": True,
                },
                {"queries": [{"prompt": "The chemical symbol of gold is", "generate": {"max_new_tokens": 8}}], "filter": {"field": "kind", "eq": "element"}},
            ]
        }
    )

    queries: list[Query] = Field(min_length=1, max_length=1_000, description="One or more queries; each is answered on its own unless aggregate is sum.")
    top_k: int = Field(10, ge=1, le=1_000_000, description="Results per direction; the server's limit is in GET /v1/info.")
    score: Score = Field(
        "influence",
        description="influence: equation (14), in nats of summed query loss per unit of weight on the example, up to one common factor; long examples weigh more. "
        "cosine: its angle, for 'which examples point this way?'; an example compared with itself reads about .75, since one side is one bit.",
    )
    direction: Direction = Field(
        "both", description="proponents: training on them LOWERS the query's loss (positive scores). opponents: it raises it (negative)."
    )
    filter: Filter | None = Field(None, description="Only examples that fit are ranked; applied before top_k.")
    aggregate: Literal["each", "sum"] = Field("each", description="sum: one answer for the sum of all queries' losses.")
    contrast: list[Query] | None = Field(
        None,
        min_length=1,
        max_length=1_000,
        description="Measure loss(query) - loss(contrast) instead: a positive score favours the query. One contrast for all queries, or one for each.",
    )
    tokens: bool = Field(False, description="Also say through which of the query's positions each result acts: exact parts of the sketched score.")
    rescore: Literal["gradients"] | None = Field(
        None,
        description="gradients: recompute the gradients of the best `rescore_n` results of each direction and order those by uncompressed EK-FAC influence, in the "
        "field `rescored`, with the parts that go through their own tokens. Needs a store that keeps the whole curvature.",
    )
    rescore_n: int = Field(32, ge=1, le=10_000, description="How many results of each direction `rescore` looks at; the server's limit is in GET /v1/info.")
    candidates: Annotated[int, Field(ge=1, le=2**31 - 1)] | Candidates | None = Field(
        None, description="How many Hamming candidates are re-scored with (14), or the recall to aim at. null: every example, unless the store is very large."
    )
    truncation: Literal["error", "left", "right"] = Field(
        "error", description="What to do with a query longer than the limit: refuse, or drop tokens at its left or right."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.contrast is not None and len(self.contrast) not in (1, len(self.queries)):
            raise ValueError(f"contrast has {len(self.contrast)} entries and queries {len(self.queries)}; give one for all, or one for each")
        return self


class Token(Output):
    """One token and its part of a score."""

    text: str = Field(description="The token as text; special tokens by their names.")
    start: int = Field(description="Where it begins in the text, in characters; start = end where unknown.")
    end: int = Field(description="Where it ends.")
    target: bool = Field(description="Its loss is part of what is measured.")
    weight: float = Field(
        description="Of a query's token: what its position carries, <y_t, y> / ||y||; they sum to ||y||. Of a re-scored example's token: its part of `rescored`."
    )


class Hit(Output):
    """A training example in a ranking."""

    rank: int = Field(description="1 is the strongest.")
    id: str
    score: float = Field(
        description="Positive: training on the example LOWERS the query's loss (proponent). Negative: it raises it (opponent). Not comparable between kinds of score."
    )
    text: str
    target_start: int = Field(0, description="Character of `text` where its first target token begins: behind the markup and the user's turn of a chat.")
    metadata: dict[str, JsonValue]
    rescored: float | None = Field(
        None, description="Uncompressed EK-FAC influence, with rescore: gradients. Another scale than `score`; it then sets the order."
    )
    query_tokens: list[list[float]] | None = Field(
        None, description="With tokens: for each of the result's inputs, the part of `score` through each of its positions; all together sum to it."
    )
    tokens: list[Token] | None = Field(None, description="With rescore: the example's own tokens.")

    def excerpt(self, width: int) -> str:
        """At most `width` characters of `text` in one line, without chat markup <|...|>, a third of them for what comes before the first target token."""
        before, after = (_SPACE.sub(" ", part) for part in (self.text[: self.target_start], self.text[self.target_start :]))
        before, after = before.lstrip(), after.rstrip()
        if before.endswith(" ") or not before:
            after = after.lstrip()
        if len(before) > width // 3:
            before = "…" + before[len(before) - width // 3 + 1 :]
        whole = before + after
        return whole if len(whole) <= width else whole[: width - 1] + "…"


class QueryInput(Output):
    """One text as the model saw it: the query, or one of a sum, or a contrast."""

    text: str = Field(description="The whole text, completion or chat markup included.")
    sign: Literal[1, -1] = Field(description="-1 for a contrast.")
    n_tokens: int = Field(description="Its tokens.")
    n_targets: int = Field(description="Those whose loss is measured.")
    truncated: bool
    loss: float = Field(description="Summed over target tokens, in nats.")
    coverage: float | None = Field(
        None, description="Share of the gradient's energy inside the sketch's span, 0 to 1; null where it is undefined (SRHT). Low: trust the ranking less."
    )
    generated: str | None = Field(None, description="What the model said, with generate.")
    tokens: list[Token] | None = Field(None, description="Its tokens, when they were asked for.")


class QueryResult(Output):
    """The answer to one query, or to the sum of all of them."""

    query: int | None = Field(description="Index in `queries`; null for their sum.")
    n_tokens: int = Field(description="Tokens of all inputs.")
    truncated: bool = Field(description="One of the inputs was.")
    coverage: float | None = Field(None, description="The lowest coverage of the inputs.")
    warnings: list[str] = Field(description="What to know before trusting this answer, in sentences.")
    inputs: list[QueryInput]
    proponents: list[Hit] | None = Field(None, description="Highest scores first; null unless asked for.")
    opponents: list[Hit] | None = Field(None, description="Most negative scores first; null unless asked for.")


class InfluenceResponse(Output):
    """Ranked training examples, all from one generation of the store."""

    request_id: str | None = None
    generation: str = Field(description="The generation of the store that the whole answer comes from.")
    method: Literal["exhaustive", "candidates"] = Field(description="How examples were found; candidates are always re-scored with (14).")
    score: Score
    direction: Direction
    n_rows: int = Field(description="Examples in the store.")
    n_allowed: int = Field(description="Those that may be answered with: not deleted, not flagged, and kept by the filter.")
    n_candidates: int = Field(description="Candidates per query and direction; 0 when exhaustive.")
    recall: float | None = Field(None, description="Share of the exhaustive top 10 that this many candidates contained on held-out rows.")
    results: list[QueryResult]
    timing_ms: dict[str, float] = Field(description="Milliseconds by phase: prepare, queue, sketch, search, rows and more; total is from arrival to answer.")


class Neighbour(Output):
    """An example whose sketch points the same way."""

    id: str
    score: float = Field(description="Cosine of the two one-bit sketches, -1 to 1.")
    text: str
    metadata: dict[str, JsonValue]


class StoredExample(Output):
    """A training example as the store keeps it."""

    id: str
    position: int = Field(description="Its place in this generation, from 0.")
    text: str
    kind: str
    metadata: dict[str, JsonValue]
    n_tokens: int = Field(description="Target tokens.")
    loss: float | None = Field(description="The model's loss on it when it was indexed, summed over target tokens, in nats; null where it is not finite.")
    self_influence: float | None = Field(
        description="Squared norm of its half-whitened gradient: how unusual it is. Very high values are often outliers or wrong labels."
    )
    excluded: str | None = Field(None, description="Why it never appears in results; null where it does.")
    neighbours: list[Neighbour] | None = Field(None, description="With ?neighbours=N.")


class ExampleList(Output):
    """A page of the store's examples."""

    generation: str
    total: int
    order: Order
    offset: int
    examples: list[StoredExample]


class Limits(Output):
    """What the server accepts; 0 stands for no limit of its own."""

    max_body_bytes: int
    max_queries: int
    max_query_tokens: int
    max_request_tokens: int
    max_top_k: int
    max_results: int
    max_candidates: int
    max_filter_terms: int
    max_filter_values: int
    max_new_tokens: int
    max_rescored: int
    max_queue: int
    deadline_seconds: float


class ModelInfo(Output):
    """The model that queries are sketched with."""

    name: str
    task: str
    parameters: int
    device: str
    dtype: str
    context: int = Field(description="Longest query, in tokens.")
    chat: bool = Field(description="It has a chat template, so `messages` is accepted.")


class StoreInfo(Output):
    """The store that is served."""

    generation: str
    rows: int
    excluded: int = Field(description="Rows that never appear in results: deleted, without target, or without a finite gradient.")
    bytes_per_example: int
    bits: int = Field(description="Bits per example, all blocks together.")
    blocks: int
    method: str = Field(description="pca (EOGP) or srht (EOGP-R).")
    coverage_threshold: float | None = Field(None, description="Below it, an answer carries the warning low-coverage.")
    metadata: list[str] = Field(description="Columns that a filter may name.")


class Info(Output):
    """What runs here."""

    name: str = "eogp"
    version: str
    model: ModelInfo
    store: StoreInfo
    limits: Limits
    rescore: bool = Field(description="`rescore: gradients` is available: the store keeps the whole curvature.")
    authentication: bool = Field(description="Requests need an API key.")


class Health(Output):
    """Alive or ready."""

    status: Literal["ok", "ready"]


class Reloaded(Output):
    """The outcome of a reload."""

    generation: str
    changed: bool
