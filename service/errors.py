"""Errors of the HTTP API: RFC 9457 problem documents with stable codes.

`CODES` is the one table: a code that is not in it cannot be answered with, docs/http.md is generated from it, and clients may switch on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from engine.errors import EogpError, ModelError, StoreError, UserError

MEDIA_TYPE = "application/problem+json"
MAX_LISTED = 10  # validation errors listed in one answer


@dataclass(frozen=True, slots=True)
class Code:
    """A stable error code: HTTP status, short title, and what the caller can do."""

    status: int
    title: str
    remedy: str


CODES: dict[str, Code] = {
    "bad-json": Code(400, "The body is not JSON", "Send one JSON object, UTF-8, without NaN or lone surrogates, nested at most a few dozen levels deep."),
    "bad-input": Code(422, "A field is missing, unknown, of the wrong type or out of range", "`errors` names each field and what it must be."),
    "bad-data": Code(422, "The query cannot be scored", "For instance it has no target token, or its chat has no assistant turn; the sentence says which."),
    "bad-setting": Code(422, "Two options contradict each other, or the store does not offer one", "Change or drop the option that the sentence names."),
    "bad-filter": Code(422, "The filter is not understood", "Use the grammar in the schema; fields are the store's metadata columns and `id`."),
    "too-long": Code(422, "A query is longer than the model takes", "Shorten it, or set truncation to left or right."),
    "no-chat-template": Code(422, "The model has no chat template", "Ask with text, or with prompt and completion."),
    "token-out-of-range": Code(422, "A token id is not in the vocabulary", "Use the tokenizer of the store's model."),
    "label-out-of-range": Code(422, "The model has no such class", "Use one of the model's classes."),
    "limit-exceeded": Code(422, "The request is larger than a stated limit", "The limits are listed in GET /v1/info."),
    "non-finite": Code(422, "The query's loss or gradient is not finite", "Shorten or change the query; a model in low precision may overflow."),
    "unauthorised": Code(401, "No API key, or one that is not known", "Send `Authorization: Bearer KEY` or `X-API-Key: KEY`."),
    "forbidden": Code(403, "The key may read but not administer", "Use a key with the role admin."),
    "not-found": Code(404, "No such address", "The addresses are listed in /docs."),
    "example-not-found": Code(404, "No training example has this id", "Ids are those of the results, or of GET /v1/examples."),
    "method-not-allowed": Code(405, "The address does not take this method", "The header Allow lists those that it takes."),
    "body-timeout": Code(408, "The body did not arrive in time", "Send the whole body at once."),
    "reload-failed": Code(409, "The new generation cannot be served", "The old one goes on being served; check the store with `eogp verify`."),
    "body-too-large": Code(413, "The body is larger than the server's limit", "Send fewer or shorter queries; the limit is in GET /v1/info."),
    "unsupported-media-type": Code(415, "The body is not declared as JSON", "Send `Content-Type: application/json`."),
    "queue-full": Code(429, "Too many requests are waiting", "Retry after the seconds in Retry-After."),
    "bad-request": Code(400, "The request is malformed", "See the sentence in `detail`."),
    "internal": Code(500, "A fault of the server's", "Report it with the request id; the log holds the details."),
    "bad-model": Code(503, "The model cannot be used", "The operator has to look at the log."),
    "bad-store": Code(503, "The store cannot be read", "The operator has to run `eogp verify`."),
    "out-of-memory": Code(503, "Not enough memory for this request, even alone", "Send a shorter query, or ask for fewer results."),
    "worker-restarted": Code(503, "The inference thread had to be restarted", "Retry; the request was not answered."),
    "shard-unavailable": Code(
        503, "A part of the index does not answer", "Retry after the seconds in Retry-After; an answer is never made of some parts only."
    ),
    "not-ready": Code(503, "The server is starting, stopping or stuck", "Retry after the seconds in Retry-After."),
    "deadline": Code(504, "The answer did not come within the deadline", "Retry when the load is lower, or send less at a time."),
}


class FieldError(BaseModel):
    """One field that is wrong."""

    field: str = Field(description="Path of the field, for instance queries.0.prompt.")
    message: str = Field(description="What it must be.")


class Problem(BaseModel):
    """An error, RFC 9457: media type application/problem+json."""

    type: str = Field(description="Address of the code's description.", examples=["/docs#error-queue-full"])
    title: str = Field(description="The code in words.")
    status: int = Field(description="HTTP status.")
    code: str = Field(description="Stable code, made to be compared with.", examples=["queue-full"])
    detail: str = Field(description="One sentence: what is wrong, where, and what to do.")
    request_id: str | None = Field(None, description="The request's id, also in the header X-Request-Id and in the server's log.")
    field: str | None = Field(None, description="The field that is wrong, where there is one.")
    errors: list[FieldError] | None = Field(None, description="All fields that are wrong (at most 10).")


class ApiError(EogpError):
    """An error with a code of `CODES`; `headers` go into the answer."""

    def __init__(self, code: str, message: str, *, field: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, code=code, field=field)
        self.status = CODES[code].status
        self.headers = dict(headers or {})


def clean(text: str, limit: int = 500) -> str:
    """Text that can be encoded as UTF-8 and is not longer than a sentence should be."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def problem(
    request: Request,
    code: str,
    detail: str,
    *,
    field: str | None = None,
    errors: list[FieldError] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The answer for one error; the code is left on the request's state for metrics and log."""
    known = CODES[code]
    request.state.error_code = code
    body = Problem(
        type=f"/docs#error-{code}",
        title=known.title,
        status=known.status,
        code=code,
        detail=clean(detail),
        request_id=getattr(request.state, "request_id", None),
        field=clean(field, 200) if field else None,
        errors=errors,
    )
    return JSONResponse(body.model_dump(exclude_none=True), known.status, headers=dict(headers or {}), media_type=MEDIA_TYPE)


def of_exception(request: Request, error: BaseException) -> JSONResponse:
    """Any exception as a problem. Only EogpError's own sentences reach the caller; everything else is a plain 500."""
    if isinstance(error, EogpError):
        code = error.code if error.code in CODES else ("bad-input" if isinstance(error, UserError) else "internal")
        if not isinstance(error, ApiError) and isinstance(error, StoreError | ModelError):
            code = "bad-store" if isinstance(error, StoreError) else "bad-model"
        if code in ("internal", "bad-store", "bad-model") and not isinstance(error, ApiError):
            return problem(request, code, f"{CODES[code].title}; {CODES[code].remedy}")  # such sentences name paths of the server
        return problem(request, code, error.message, field=error.field, headers=getattr(error, "headers", None))
    return problem(request, "internal", "The server failed on this request; the log holds the details under the request id.")


def of_validation(request: Request, error: RequestValidationError) -> JSONResponse:
    """pydantic's errors, without the input that they quote (it may hold NaN, lone surrogates or a megabyte)."""
    found = error.errors()
    if any(e["type"] == "json_invalid" for e in found):
        return problem(request, "bad-json", "The body is not valid JSON.")
    listed = [FieldError(field=clean(_path(e["loc"]), 200), message=clean(_sentence(e), 300)) for e in found[:MAX_LISTED]]
    if not listed:
        return problem(request, "bad-input", "The request does not fit the schema.")
    first = listed[0]
    more = f" ({len(found) - 1} more in `errors`)" if len(found) > 1 else ""
    return problem(request, "bad-input", f"{first.field}: {first.message}{more}", field=first.field, errors=listed)


def of_http(request: Request, error: HTTPException) -> JSONResponse:
    """Starlette's and FastAPI's own refusals, in the same shape."""
    codes = {404: "not-found", 405: "method-not-allowed", 413: "body-too-large", 415: "unsupported-media-type", 400: "bad-json"}
    code = codes.get(error.status_code, "bad-request" if error.status_code < 500 else "internal")
    return problem(request, code, f"{CODES[code].title}. {CODES[code].remedy}", headers=error.headers)


def _path(loc: tuple[int | str, ...]) -> str:
    parts = [str(p) for p in (loc[1:] if loc and loc[0] in ("body", "query", "path", "header") else loc)]
    return ".".join(parts) or (str(loc[0]) if loc else "body")


def _sentence(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if error["type"] == "extra_forbidden":
        return "no such field"
    if error["type"] == "missing":
        return "this field is required"
    return message[:1].lower() + message[1:] if message[:2] != message[:2].upper() else message
