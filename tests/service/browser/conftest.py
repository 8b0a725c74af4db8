"""A real browser on the real page, over loopback, with a backend whose answers are known."""

from __future__ import annotations

import base64
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from engine.errors import DataError
from service import schemas
from service.app import create_app
from service.errors import ApiError
from service.security import Keys
from service.settings import ServeSettings

AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
TEXTS = (
    "The capital city of Mongolia is Ulaanbaatar.",
    "Ulaanbaatar is where the government of Mongolia sits.",
    '<img src=x onerror="window.broken=1"><script>window.broken=1</script> is text, not markup & "quoted".',
    "Fellow-Citizens of the Senate and House of Representatives: the constitution imposes upon the President the duty of recommending to the "
    "consideration of Congress such measures as he shall judge necessary and expedient, and in the discharge of this duty I shall lay before you "
    "the condition of our finances, our relations with foreign powers, and the state of the public lands, which have never been more prosperous.",
    "A line\nbreak\tand a tab.",
)


def tokens_of(text: str, targets: int = 2) -> list[schemas.Token]:
    found = [(m.group(), m.start(), m.end()) for m in re.finditer(r"\s?\w+|\s?[^\w\s]|\s", text)]
    n = len(found)
    return [schemas.Token(text=t, start=a, end=b, target=i >= n - targets, weight=float(i + 1)) for i, (t, a, b) in enumerate(found)]


@pytest.fixture(scope="module")
def page_backend(request: pytest.FixtureRequest) -> Any:
    """FakeBackend with tokens, texts and metadata; `requests` records what was asked; words in the query provoke errors."""
    fake = request.getfixturevalue("fake")

    class PageBackend(fake):  # type: ignore[misc]  # the fixture's class
        def __init__(self) -> None:
            super().__init__(rows=60, rescore=True, seconds=0.0)
            self.requests: list[schemas.InfluenceRequest] = []
            self.overloads = 0

        def prepare(self, request: schemas.InfluenceRequest) -> Any:
            self.requests.append(request)
            item = super().prepare(request)
            if "nonsense" in item.text:
                raise DataError("queries.0: no target token is left", field="queries.0")
            if "busy" in item.text and self.overloads > 0:
                self.overloads -= 1
                raise ApiError("queue-full", "128 requests are waiting already; retry in 1 s.", headers={"Retry-After": "1"})
            return item

        def _one(self, item: Any) -> schemas.InfluenceResponse:
            answer: schemas.InfluenceResponse = super()._one(item)
            request, result = item.request, answer.results[0]
            if "slow" in item.text:
                time.sleep(1.0)
            shown = result.inputs[0]
            shown.tokens = tokens_of(shown.text) if request.tokens else None
            if request.queries[0].generate:
                shown.generated = " generated"
            if "far away" in item.text:
                result.warnings = ["coverage 0.05 is below 0.20: this query lies outside what the index was fitted on"]
            if request.contrast:
                result.inputs.append(shown.model_copy(update={"sign": -1, "text": "the contrast", "tokens": tokens_of("the contrast")}))
            for sign, hits in ((1, result.proponents), (-1, result.opponents)):
                for h in hits or ():
                    h.id, h.score = f"{'pro' if sign > 0 else 'opp'}-{h.rank}", sign * 12.5 / h.rank
                    h.text = TEXTS[(h.rank - 1) % len(TEXTS)]
                    h.metadata = {"kind": "fact" if h.rank % 2 else "speech", "year": 1900 + h.rank, "tags": ["a", "b"]}
                    if request.tokens:
                        h.query_tokens = [[sign * h.score * (1 if i % 2 else -0.3) for i in range(len(i_.tokens or ()))] for i_ in result.inputs]
                    if request.rescore:
                        h.rescored, h.tokens = h.score * 0.8, tokens_of(h.text)
            if "empty" in item.text:
                result.proponents, result.opponents = [], []
            return answer

        def _stored(self, position: int) -> schemas.StoredExample:
            stored: schemas.StoredExample = super()._stored(position)
            stored.text, stored.metadata = TEXTS[position % len(TEXTS)], {"kind": "fact", "year": 1900 + position}
            return stored

        def example(self, id: str, neighbours: int) -> schemas.StoredExample | None:
            stored = self._stored(3 if id.startswith(("pro", "opp")) else int(id[1:]))
            stored.id = id
            stored.neighbours = [schemas.Neighbour(id=f"r{i}", score=0.9 - 0.1 * i, text=TEXTS[i % len(TEXTS)], metadata={}) for i in range(neighbours)]
            return stored

    return PageBackend


@pytest.fixture(scope="module")
def site(page_backend: Any) -> Iterator[Callable[..., tuple[str, Any]]]:
    """site(keys=..., **settings) -> (address, backend): a server in a thread."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(keys: Keys | None = None, **settings: Any) -> tuple[str, Any]:
        backend = page_backend()
        app = create_app(backend, ServeSettings(reload_seconds=0, **settings), keys)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="on"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        running.append((server, thread))
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", backend

    yield start
    for server, thread in running:
        server.should_exit = server.force_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def browsers() -> Iterator[Callable[..., Any]]:
    """browsers(width) -> a Chromium of this width; 390 is a phone."""
    selenium = pytest.importorskip("selenium", reason="selenium is not installed (extra dev)")
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("chromium and chromium-driver are not installed (Debian packages)")
    from selenium import webdriver

    assert selenium
    opened: dict[int, Any] = {}

    def browser(width: int = 1440, height: int = 1000) -> Any:
        if width not in opened:
            options = webdriver.ChromeOptions()
            options.binary_location = CHROMIUM
            for flag in (
                "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync "
                f"--disable-dev-shm-usage --hide-scrollbars --window-size={max(width, 500)},{height}"
            ).split():
                options.add_argument(flag)
            if width < 500:
                options.add_experimental_option("mobileEmulation", {"deviceMetrics": {"width": width, "height": height, "pixelRatio": 2}})
            options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
            opened[width] = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
        return opened[width]

    yield browser
    for driver in opened.values():
        driver.quit()


class Page:
    """What a reader does, in words."""

    def __init__(self, driver: Any, url: str, backend: Any) -> None:
        self.driver, self.url, self.backend = driver, url, backend

    def open(self, path: str = "/") -> Page:
        self.driver.get("about:blank")
        self.driver.get(self.url + path)
        return self

    def all(self, css: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", css))

    def one(self, css: str, seconds: float = 10) -> Any:
        """The first visible element; waits for it."""
        return self.until(lambda: next((e for e in self.all(css) if e.is_displayed()), None), css, seconds)

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 10) -> Any:
        from selenium.common.exceptions import StaleElementReferenceException

        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                found = condition()
                if found:
                    return found
            except (StaleElementReferenceException, IndexError):  # the page is drawing: an element is gone, or not there yet
                pass
            time.sleep(0.02)
        raise AssertionError(f"waited in vain for {what}; the page says: {self.one('body', 1).text[:600]}")

    def text(self, css: str) -> str:
        """Of the first visible element, also while the page is drawing it anew."""
        return str(self.until(lambda: (self.one(css).text,), css)[0])

    def click(self, css: str) -> None:
        element = self.one(css)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def button(self, text: str, within: str = "body") -> Any:
        return self.until(lambda: next((b for b in self.all(f"{within} button") if b.is_displayed() and b.text.strip() == text), None), f"button {text}")

    def press(self, text: str, within: str = "body") -> None:
        element = self.button(text, within)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def choose(self, name: str, value: str) -> None:
        self.driver.find_element("css selector", f'input[name="{name}"][value="{value}"]').find_element("xpath", "..").click()

    def write(self, css: str, text: str) -> None:
        box = self.one(css)
        box.clear()
        box.send_keys(text)

    def ask(self, prompt: str = "The capital of Mongolia is", completion: str = " Ulaanbaatar") -> Page:
        before = len(self.backend.requests)
        self.write("#prompt", prompt)
        self.write("#completion", completion)
        self.click("#ask")
        self.until(lambda: len(self.backend.requests) > before, "the request")
        self.until(lambda: self.text("#ask").startswith("Ask") and self.one("#ask").is_enabled(), "the answer")
        return self

    def asked(self) -> Any:
        return self.backend.requests[-1]

    def colours(self, css: str = ".asked .token") -> list[str]:
        return [e.value_of_css_property("background-color") for e in self.all(css)]

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def problems(self) -> list[dict[str, Any]]:
        """Serious and critical findings of axe-core."""
        if not AXE.is_file():
            pytest.skip("axe-core is not installed: npm --prefix tests/service/browser ci")
        # by the protocol, since the page's content security policy forbids injected scripts
        self.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text()})
        found = self.driver.execute_async_script("axe.run().then(arguments[0])")
        return [
            {"id": v["id"], "nodes": [n["html"][:160] + " | " + n["failureSummary"][:300] for n in v["nodes"][:3]]}
            for v in found["violations"]
            if v["impact"] in ("serious", "critical")
        ]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", {})["data"]))


@pytest.fixture
def visit(browsers: Any, site: Any) -> Callable[..., Page]:
    """visit(width=..., keys=..., **settings) -> a Page, opened."""
    servers: dict[str, tuple[str, Any]] = {}

    def go(width: int = 1440, path: str = "/", keys: Keys | None = None, **settings: Any) -> Page:
        driver = browsers(width)
        driver.get_log("browser")
        if "plain" not in servers or keys or settings:
            servers["plain"] = site(keys, **settings)
        return Page(driver, *servers["plain"]).open(path)

    return go
