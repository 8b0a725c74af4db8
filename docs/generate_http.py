"""Write docs/http.md from the server's own schema: addresses, fields, examples, limits, errors, metrics.

python docs/generate_http.py            rewrites the file
python docs/generate_http.py --check    exits with 1 where it is out of date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from service.errors import CODES
from service.limits import limits_of
from service.metrics import Metrics
from service.settings import LimitSettings, QueueSettings, ServeSettings

TARGET = Path(__file__).parent / "http.md"
HEADER = """# HTTP API

Written by `docs/generate_http.py` from the code; a running server shows the same at `/docs`, and as OpenAPI at `/openapi.json`.

`eogp serve STORE` answers at `http://127.0.0.1:8000`. `POST /influence` and `POST /v1/influence` are the same. A POSITIVE score means that training on the example
LOWERS the query's loss (a proponent); a negative one raises it (an opponent). Losses are summed over target tokens, in nats.
"""
CLIENT = """## From Python

```python
from service.client import InfluenceClient, to_pandas

with InfluenceClient("http://127.0.0.1:8000", api_key=None) as client:
    answer = client.influence(prompt="The capital of Mongolia is", completion=" Ulaanbaatar", top_k=5)
    for hit in answer.results[0].proponents:
        print(f"{hit.score:+.3g}", hit.text)
    print(to_pandas(answer))
```

`AsyncInfluenceClient` has the same methods as coroutines. Both wait as long as `Retry-After` says after 429 and 503, and raise `InfluenceError` with the `code` below
for everything else. Importing the client loads no model library.

## API keys

`eogp serve STORE --api-keys FILE` with one key a line:

```
0f8b2c41d3e94a7c  read   alice
5d1e7a90bb6c4f22  admin  operations
```

Send `Authorization: Bearer KEY` or `X-API-Key: KEY`. The role `read` may ask; `admin` may also call `POST /v1/reload`. `/`, `/docs`, `/openapi.json`, `/healthz` and
`/readyz` need no key. Without a key file everything is allowed, but a reload only from the server's own machine.

## Running it

- One inference thread answers what has arrived while it was busy in one pass of the model, up to `--batch-tokens`. More than `--max-queue` waiting requests get 429 with
  `Retry-After`; past `--deadline-seconds`, 504. Whoever disconnects is dropped from the queue.
- A new generation of the store (`eogp append`, `delete`, `compact`) is noticed within `--reload-seconds`. Every answer comes from one generation and names it.
- `GET /readyz` looks at the inference thread: it is 503 while draining, when a batch takes longer than `--stuck-seconds`, when an idle thread gives no sign of life, or when the background
  check of the store (`--check-rate`) has found a damaged file, which it names.
- SIGTERM: `/readyz` says 503, requests are accepted for `--drain-seconds` more, running ones get `--grace-seconds` to finish, then the process ends with 0.
- Logs are JSON lines on standard error, one per request with its id (`X-Request-Id`, yours or ours); the text of queries is only in them with `--log-queries`.
"""


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def kind(node: dict[str, Any]) -> str:
    """The type of a field in a few words."""
    if "$ref" in node:
        return str(node["$ref"].rsplit("/", 1)[-1])
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(kind(n) for n in node["anyOf"]))
    if "const" in node:
        return f"`{json.dumps(node['const'])}`"
    if "enum" in node:
        return " or ".join(f"`{json.dumps(v)}`" for v in node["enum"])
    if node.get("type") == "array":
        return f"list of {kind(node.get('items', {}))}"
    low, high = node.get("minimum", node.get("exclusiveMinimum")), node.get("maximum")
    bounds = [f"from {low:g}"] if low is not None and abs(low) < 1e15 else []
    bounds += [f"to {high:,}"] if high is not None and high < 1e6 else []
    return f"{node.get('type', 'any value')}{', ' if bounds else ''}{' '.join(bounds)}"


def fields(name: str, schema: dict[str, Any]) -> list[str]:
    """One model as a table."""
    lines = [f"### {name}", "", cell(schema.get("description", "")), "", "| field | type | meaning |", "|---|---|---|"]
    for field, node in schema.get("properties", {}).items():
        default = node.get("default")
        shown = f"; default `{json.dumps(default)}`" if default is not None and default != [] else ""
        required = "; **required**" if field in schema.get("required", ()) else ""
        lines.append(f"| `{field}` | {cell(kind(node))}{shown}{required} | {cell(node.get('description', ''))} |")
    return [*lines, ""]


def render() -> str:
    """The whole page."""
    from fastapi import FastAPI

    from service.app import create_app

    app: FastAPI = create_app(None, ServeSettings())  # type: ignore[arg-type]  # the schema needs no backend
    schema = app.openapi()
    models = schema["components"]["schemas"]
    lines = [HEADER, "## Addresses", "", "| address | what | statuses |", "|---|---|---|"]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            lines.append(f"| `{method.upper()} {path}` | {cell(operation['summary'])} | {', '.join(sorted(operation['responses']))} |")
    lines += ["| `GET /` | The page | 200 |", "| `GET /docs` | This description | 200 |", "", "## Examples", ""]
    for example in models["InfluenceRequest"]["examples"]:
        data = json.dumps(example, ensure_ascii=False).replace("'", "'\\''")
        lines += ["```bash", f"curl -s http://127.0.0.1:8000/v1/influence -H 'Content-Type: application/json' \\\n  -d '{data}'", "```", ""]
    lines += ["```bash", "curl -s 'http://127.0.0.1:8000/v1/examples?order=self_influence&limit=5'   # the most unusual examples", "```", "", CLIENT]
    lines += ["## Request", ""]
    for name in ("InfluenceRequest", "Query", "Generate", "Message", "Filter", "Candidates"):
        lines += fields(name, models[name])
    lines += ["## Answer", ""]
    for name in ("InfluenceResponse", "QueryResult", "QueryInput", "Hit", "Token", "StoredExample", "Neighbour", "Info", "Problem"):
        lines += fields(name, models[name])
    lines += ["## Limits", "", "| limit | default | meaning |", "|---|---|---|"]
    for name, value in limits_of(ServeSettings()).model_dump().items():
        owner = LimitSettings if name in LimitSettings.model_fields else QueueSettings
        lines.append(f"| `--{name.replace('_', '-')}` | {value:,} | {cell(owner.model_fields[name].description or '')} |")
    lines += [
        "",
        "## Errors",
        "",
        "Every error is a problem document (RFC 9457, `application/problem+json`). `code` is stable and made to be compared with.",
        "",
    ]
    lines += ["| code | status | meaning | what to do |", "|---|---|---|---|"]
    lines += [f"| `{code}` | {known.status} | {cell(known.title)} | {cell(known.remedy)} |" for code, known in CODES.items()]
    lines += ["", "## Metrics", "", "| metric | type | meaning |", "|---|---|---|"]
    for metric in Metrics().registry.collect():
        if metric.name.startswith("eogp_"):
            suffix = "_total" if metric.type == "counter" else ""
            lines.append(f"| `{metric.name}{suffix}` | {metric.type} | {cell(metric.documentation)} |")
    lines += ["| `process_*` | gauge | Memory, CPU time and open files of the process. |"]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    text = render()
    if "--check" in sys.argv:
        if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text:
            raise SystemExit("docs/http.md is out of date: run python docs/generate_http.py")
    else:
        TARGET.write_text(text, encoding="utf-8")
