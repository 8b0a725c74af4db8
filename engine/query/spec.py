"""What can be asked, and what comes back: plain data, free of HTTP.

One QuerySpec is one request. Its queries share every option; each is answered on its own (aggregate="each") or their losses are summed into one
measurement (aggregate="sum"). With `contrast` the measurement is loss(query) - loss(contrast), and a positive score favours the query.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from engine.search.request import Direction, Method, Score

Truncation = Literal["error", "left", "right"]
Aggregate = Literal["each", "sum"]
Rescore = Literal["gradients"]


@dataclass(frozen=True, slots=True)
class Generate:
    """The model writes the completion that is then attributed. temperature 0 is greedy; a seed makes sampling repeatable."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class QueryInput:
    """One query, in exactly one of these forms:

    text: loss on every token; prompt + completion: loss on the completion; prompt + generate: the model's own continuation carries the loss;
    messages: loss on assistant turns, or, with generate, on the assistant turn that the model writes; input_ids, optionally with labels
    (-100 marks tokens without loss); text + label: sequence classification.
    """

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    generate: Generate | None = None
    messages: list[dict[str, Any]] | None = None
    input_ids: list[int] | None = None
    labels: list[int] | None = None
    label: int | str | None = None


@dataclass(frozen=True, slots=True)
class QuerySpec:
    """One request.

    top_k per direction. score: influence (14), or cosine, which ignores the length of examples. direction: proponents lower the query's loss (score > 0),
    opponents raise it. filter: see engine.search.filters. contrast: none, one for all queries, or one for each. tokens: also say through which of the
    query's positions each result acts. rescore="gradients": order the best rescore_n of each direction by uncompressed EK-FAC influence, with scores of the
    results' own tokens. candidates: None scores all rows; a number, or {"recall": r}, scores Hamming candidates only. truncation: what to do with a query
    that is longer than the model's context.
    """

    queries: tuple[QueryInput, ...]
    top_k: int = 10
    score: Score = "influence"
    direction: Direction = "both"
    filter: dict[str, Any] | None = None
    aggregate: Aggregate = "each"
    contrast: tuple[QueryInput, ...] = ()
    tokens: bool = False
    rescore: Rescore | None = None
    rescore_n: int = 32
    candidates: int | dict[str, float] | None = None
    truncation: Truncation = "error"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for; the service narrows them by its settings."""

    queries: int = 64
    top_k: int = 1000
    rescore_n: int = 64
    candidates: int = 1_000_000
    new_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Token:
    """One token and its share of a score. start, end: character span in the example's text (0, 0 where unknown). target: it carries loss.

    weight of a query's token: <y_t, y> / ||y|| with y_t the coordinates of its position alone; they sum to ||y||. Of a re-scored result's token: the part of
    its uncompressed influence that goes through that position; they sum to `rescored`.
    """

    text: str
    start: int
    end: int
    target: bool
    weight: float


@dataclass(frozen=True, slots=True)
class InputReport:
    """One input as the model saw it. sign: -1 for a contrast. n_tokens: its length; n_targets: tokens that carry loss; loss: summed over them, in nats.

    coverage: share of the gradient's energy inside the span that the sketch was fitted on; None for EOGP-R, where it is undefined. generated: what the model wrote.
    """

    text: str
    sign: int
    n_tokens: int
    n_targets: int
    truncated: bool
    loss: float
    coverage: float | None
    generated: str | None = None
    tokens: list[Token] | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """One training example. score: equation (14) (influence, in nats per unit of damped training weight, only the ratio of two scores has meaning) or its
    cosine (an example compared with itself reads about .75). rescored: uncompressed EK-FAC influence, where asked for; then results are ordered by it.
    query_tokens: for each input of the answer the part of `score` that goes through each of its positions; in total, the score. tokens: the example's own
    tokens, with `rescored` split over its positions. target_start: character of `text` at which its first target token begins (behind the markup and the
    user's turn of a chat); 0 where all tokens are targets, or where the text cannot be told from the tokens."""

    rank: int
    position: int
    id: str
    score: float
    text: str
    metadata: dict[str, Any]
    target_start: int = 0
    rescored: float | None = None
    query_tokens: list[list[float]] | None = None
    tokens: list[Token] | None = None


@dataclass(frozen=True, slots=True)
class QueryAnswer:
    """Ranked results of one measurement: one input, several (aggregate="sum"), or a contrast. A direction that was not asked for is None."""

    inputs: list[InputReport]
    proponents: list[Hit] | None
    opponents: list[Hit] | None
    warnings: list[str]

    @property
    def n_tokens(self) -> int:
        return sum(i.n_tokens for i in self.inputs)

    @property
    def truncated(self) -> bool:
        return any(i.truncated for i in self.inputs)

    @property
    def coverage(self) -> float | None:
        """The lowest coverage of the inputs."""
        known = [i.coverage for i in self.inputs if i.coverage is not None]
        return min(known, default=None)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one QuerySpec got. timing: milliseconds per phase (tokenise, generate, sketch, search, tokens, rescore, rows).

    n_rows: rows of the store; n_allowed: of those, not deleted, not flagged, and kept by the filter. n_candidates and recall: see SearchResult.
    """

    answers: list[QueryAnswer]
    generation: str
    method: Method
    score: Score
    direction: Direction
    n_rows: int
    n_allowed: int
    n_candidates: int
    recall: float | None
    timing: dict[str, float] = field(default_factory=dict)
