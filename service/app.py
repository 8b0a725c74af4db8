"""The FastAPI application: addresses, their documentation, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from engine.errors import EogpError
from service import errors, schemas
from service.backend import Backend
from service.batching import ClientGoneError
from service.core import VERSION, Service
from service.errors import ApiError
from service.gate import Gate
from service.metrics import CONTENT_TYPE_LATEST
from service.security import ADMIN_PATHS, OPEN_PATHS, Keys
from service.settings import ServeSettings

PAGE = Path(__file__).parent / "page"
DESCRIPTION = """Which training examples made the model say this?

Every answer ranks training examples by influence on what the model said, from one-bit gradient sketches. A POSITIVE score means that training on the
example LOWERS the query's loss (a proponent); a negative one raises it (an opponent). Losses are summed over target tokens, in nats."""
# which problem statuses each address can answer with, beside 500; docs and the fuzzer hold the server to it
STATUSES: dict[str, tuple[int, ...]] = {
    "/v1/influence": (400, 408, 413, 415, 422, 429, 503, 504),
    "/influence": (400, 408, 413, 415, 422, 429, 503, 504),
    "/v1/examples": (400, 422, 503),
    "/v1/examples/{id}": (400, 404, 422, 503),
    "/v1/reload": (400, 403, 408, 409, 413, 415),
    "/v1/info": (400,),
    "/readyz": (400, 503),
    "/healthz": (400,),
    "/metrics": (400,),
}


def create_app(backend: Backend, settings: ServeSettings | None = None, keys: Keys | None = None) -> FastAPI:
    """The application for one backend. Its state holds the `Service` as `app.state.service`."""
    settings = settings or ServeSettings()
    service = Service(backend, settings, keys if keys is not None else Keys.read(settings.api_keys))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(title="eogp", version=VERSION, description=DESCRIPTION, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    app.state.service = service
    _handlers(app)
    _routes(app, service)
    app.add_middleware(Gate, settings=settings, keys=service.keys, metrics=service.metrics)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-API-Key", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.openapi = lambda: _openapi(app, bool(service.keys))  # type: ignore[method-assign]  # FastAPI's documented way to replace the schema
    return app


def _handlers(app: FastAPI) -> None:
    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return errors.of_validation(request, error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return errors.of_http(request, error)

    async def ours(request: Request, error: Exception) -> Response:
        return errors.of_exception(request, error)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; the log and the metrics do

    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(EogpError, ours)
    app.add_exception_handler(ClientGoneError, gone)


def _routes(app: FastAPI, service: Service) -> None:
    async def influence(request: Request, body: schemas.InfluenceRequest) -> Response:
        def gone() -> asyncio.Future[None]:
            return asyncio.ensure_future(_disconnected(request))

        state = request.state
        state.log = {"queries": len(body.queries), "top_k": body.top_k}
        if service.settings.log_queries:
            state.log["text"] = [q.model_dump(exclude_none=True) for q in body.queries]
        response = await service.influence(body, state.arrived, gone)
        response.request_id = state.request_id
        state.log |= {"tokens": sum(r.n_tokens for r in response.results), "generation": response.generation}
        return Response(response.model_dump_json(), media_type="application/json")

    app.post(
        "/v1/influence",
        response_model=schemas.InfluenceResponse,
        summary="Which training examples made the model say this?",
        tags=["influence"],
        operation_id="influence",
    )(influence)
    app.post("/influence", response_model=schemas.InfluenceResponse, summary="The same as /v1/influence", tags=["influence"], operation_id="influence_short")(
        influence
    )

    @app.get("/v1/examples", summary="Training examples, by position, self-influence or loss", tags=["examples"])
    async def examples(
        order: Annotated[schemas.Order, Query(description="self_influence and loss list the highest first.")] = "position",
        offset: Annotated[int, Query(ge=0, le=2**31 - 1, description="Examples to skip.")] = 0,
        limit: Annotated[int, Query(ge=1, le=200, description="Examples to list.")] = 20,
    ) -> schemas.ExampleList:
        found: schemas.ExampleList = await service.lookup(service.backend.examples, order, offset, limit)
        return found

    @app.get("/v1/examples/{id:path}", summary="One training example and its neighbours", tags=["examples"])
    async def example(
        id: str, neighbours: Annotated[int, Query(ge=0, le=50, description="Examples with the most similar sketches to list.")] = 0
    ) -> schemas.StoredExample:
        found: schemas.StoredExample | None = await service.lookup(service.backend.example, id, neighbours)
        if found is None:
            raise ApiError("example-not-found", f"No training example has the id {errors.clean(id, 80)!r}.", field="id")
        return found

    @app.get("/v1/info", summary="Model, store, limits and options", tags=["server"])
    async def info() -> schemas.Info:
        return service.info()

    @app.post("/v1/reload", summary="Serve the store's current generation (role admin)", tags=["server"])
    async def reload() -> schemas.Reloaded:
        return await service.reload()

    @app.get("/healthz", summary="The process lives", tags=["server"])
    async def healthz() -> schemas.Health:
        return schemas.Health(status="ok")

    @app.get("/readyz", summary="Requests can be answered", tags=["server"])
    async def readyz() -> schemas.Health:
        reason = service.not_ready()
        if reason is not None:
            raise ApiError("not-ready", f"Not ready: {reason}.", headers={"Retry-After": "5"})
        return schemas.Health(status="ready")

    @app.get("/metrics", summary="Prometheus metrics", tags=["server"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        return Response(service.render_metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return FileResponse(PAGE / "docs.html", headers={"Cache-Control": "no-cache"})

    app.mount("/page", StaticFiles(directory=PAGE), name="page")


async def _disconnected(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


def _openapi(app: FastAPI, secured: bool) -> dict[str, Any]:
    """FastAPI's schema with our problem documents, and security where keys are set."""
    if app.openapi_schema:
        return app.openapi_schema
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    made = errors.Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    components.update(made.pop("$defs", {}))
    components["Problem"] = made
    if secured:
        schema["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
    for path, operations in schema["paths"].items():
        statuses = {500, *STATUSES[path]}
        closed = secured and path not in OPEN_PATHS
        if closed:
            statuses |= {401, 403} if path in ADMIN_PATHS else {401}
        for operation in operations.values():
            operation["responses"].pop("422", None)
            for status in sorted(statuses):
                codes = [f"`{c}`: {known.title}." for c, known in errors.CODES.items() if known.status == status]
                answer: dict[str, Any] = {
                    "description": " ".join(codes),
                    "content": {errors.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
                }
                if status in (429, 503, 504):
                    answer["headers"] = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
                operation["responses"][str(status)] = answer
            if closed:
                operation["security"] = [{"bearer": []}, {"key": []}]
    schema["x-errors"] = [{"code": c, "status": known.status, "title": known.title, "remedy": known.remedy} for c, known in errors.CODES.items()]
    app.openapi_schema = schema
    return schema
