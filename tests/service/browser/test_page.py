"""Every feature of the page, clicked in Chromium."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.security import Keys


def test_ask_shows_both_sides_and_token_colours(visit: Any) -> None:
    page = visit()
    assert "60 examples" in page.text("#facts") and page.text(".empty h2") == "Ask about anything the model said"
    page.ask()
    assert page.asked().queries[0].completion == " Ulaanbaatar" and page.asked().tokens is True
    for side, sign in ((".side.pro", "+"), (".side.opp", "−")):
        cards = page.all(f"{side} .hit")
        assert len(cards) == 10
        scores = [c.find_element("css selector", ".score").text for c in cards]
        assert scores[0] == f"{sign}12.5" and all(s.startswith(sign) for s in scores)
        shares = [float(page.script("return arguments[0].getBoundingClientRect().width", c.find_element("css selector", ".meter span"))) for c in cards]
        assert shares == sorted(shares, reverse=True) and shares[0] > 5 * shares[9]
    resting = page.colours()
    assert len(set(resting)) > 2  # each by what it carries
    assert "".join(t.get_attribute("textContent") for t in page.all(".asked .token")) == "The capital of Mongolia is Ulaanbaatar"
    page.script("arguments[0].focus()", page.all(".side.pro .hit")[1])
    page.until(lambda: page.colours() != resting and "for result 2" in page.text(".legend"), "colours of result 2")
    driven = page.colours()
    page.script("document.activeElement.blur()")
    page.until(lambda: page.colours() == resting, "resting colours")
    assert driven != resting


def test_pointing_at_a_result_colours_the_query(visit: Any) -> None:
    from selenium.webdriver import ActionChains

    page = visit().ask()
    resting = page.colours()
    ActionChains(page.driver).move_to_element(page.all(".side.pro .hit")[0]).perform()
    page.until(lambda: "for result 1" in page.text(".legend") and page.colours() != resting, "colours of result 1")
    ActionChains(page.driver).move_to_element(page.one("h1")).perform()
    page.until(lambda: page.colours() == resting and "carries" in page.text(".legend"), "resting colours")


def test_own_tokens_on_request(visit: Any) -> None:
    page = visit().ask()
    page.press("Its tokens", ".side.pro .hit:first-child")
    page.until(lambda: page.all(".side.pro .hit:first-child .text.tokens .token"), "own tokens")
    sent = page.asked()
    assert sent.rescore == "gradients" and sent.filter.field == "id" and sent.filter.eq == "pro-1" and sent.top_k == 1
    assert len(set(page.colours(".side.pro .hit:first-child .token"))) > 2


def test_markup_in_texts_stays_text(visit: Any) -> None:
    page = visit().ask("<b>bold</b> <img src=x onerror=window.broken=1>", " <script>window.broken=1</script>")
    assert not page.all("#answer img, #answer script, #answer b:not(.chip b)")
    assert "<img src=x onerror=" in page.all(".side.pro .hit .text")[2].text
    page.press("Open", ".side.pro .hit:nth-child(3)")
    page.one("dialog .full")
    assert page.script("return window.broken") is None


def test_chips_filter_and_can_be_removed(visit: Any) -> None:
    page = visit().ask()
    page.click(".side.pro .hit:nth-child(2) button.chip")
    page.until(lambda: page.asked().filter is not None and page.all("#filters .chip"), "filter")
    assert (page.asked().filter.field, page.asked().filter.eq) == ("kind", "speech") and "kind speech" in page.text("#filters")
    page.until(lambda: len(page.all(".side.pro .hit")) == 10, "answer")
    page.script("document.querySelectorAll('.side.pro .hit')[1].querySelectorAll('button.chip')[1].click()")
    page.until(lambda: page.asked().filter.and_ is not None, "two filters")
    assert [f.field for f in page.asked().filter.and_] == ["kind", "year"]
    page.click("#filters .chip")
    page.until(lambda: page.asked().filter.field == "year", "one filter")
    page.click("#filters .chip")
    page.until(lambda: page.asked().filter is None, "no filter")


def test_example_dialog_with_neighbours(visit: Any) -> None:
    page = visit().ask()
    page.press("Open", ".side.opp .hit:nth-child(4)")
    assert page.text("#example-title") == "opp-4"
    assert page.until(lambda: page.text("dialog .full"), "text").startswith("Fellow-Citizens") and page.text("dialog .full").endswith("prosperous.")
    assert "Self-influence" in page.text("dialog .stats") and len(page.all(".neighbours button")) == 6
    page.click(".neighbours li:nth-child(2) button")
    page.until(lambda: page.text("#example-title") == "r1", "the neighbour")
    page.press("Close", "dialog")
    page.until(lambda: not page.script("return document.getElementById('example').open"), "closing")


def test_unusual_examples(visit: Any) -> None:
    page = visit()
    page.click("#tab-unusual")
    page.until(lambda: len(page.all("#unusual .hit")) == 20, "the list")
    assert page.all("#unusual .hit .id")[0].text == "r59"
    page.press("Show more")
    page.until(lambda: len(page.all("#unusual .hit")) == 40, "more")
    page.choose("order", "position")
    page.until(lambda: page.all("#unusual .hit .id")[0].text == "r0", "another order")
    page.press("Open", "#unusual .hit:first-child")
    assert page.text("#example-title") == "r0"


def test_copies(visit: Any) -> None:
    page = visit().ask()
    page.script("window.copied = []; navigator.clipboard.writeText = async (t) => { window.copied.push(t); }")
    for name in ("JSON", "CSV", "curl"):
        page.press(f"Copy {name}")
        page.until(lambda name=name: f"{name} copied" in page.text("#toast"), "toast")
    as_json, as_csv, as_curl = page.script("return window.copied")
    assert json.loads(as_json)["results"][0]["proponents"][0]["id"] == "pro-1"
    import csv
    import io

    rows = list(csv.reader(io.StringIO(as_csv)))
    assert len(rows) == 21 and rows[0][:5] == ["query", "direction", "rank", "id", "influence"] and rows[1][1:5] == ["proponent", "1", "pro-1", "12.5"]
    assert rows[5][6] == "A line\nbreak\tand a tab."
    assert as_curl.startswith(f"curl {page.url}/v1/influence") and '"completion":" Ulaanbaatar"' in as_curl


def test_every_option_reaches_the_request(visit: Any) -> None:
    page = visit()
    page.write("#top-k", "3")
    page.choose("score", "cosine")
    page.choose("direction", "proponents")
    page.click(".more summary")
    page.write("#contrast", " Beijing")
    page.script("for (const [id, v] of [['truncation', 'left'], ['candidates', 'recall']]) document.getElementById(id).value = v")
    page.click("#rescore")
    page.click("h1")
    page.ask()
    sent = page.asked()
    assert (sent.top_k, sent.score, sent.direction, sent.truncation, sent.rescore) == (3, "cosine", "proponents", "left", "gradients")
    assert sent.candidates.recall == 0.95 and sent.contrast[0].completion == " Beijing" and sent.contrast[0].prompt == sent.queries[0].prompt
    assert len(page.all(".hit")) == 3 and not page.all(".side.opp") and "rather than" in page.text(".asked")
    assert page.all(".hit .text.tokens .token") and "∇" in page.text(".hit .head")


def test_chat_text_and_generation(visit: Any) -> None:
    page = visit()
    page.choose("kind", "messages")
    boxes = page.all("#turns textarea")
    boxes[0].send_keys("Who are you?")
    boxes[1].send_keys("A robot.")
    page.press("Add a turn")
    page.all("#turns textarea")[2].send_keys("Really?")
    page.click("#generate-chat")
    page.click("#ask")
    page.one(".asked")
    sent = page.asked().queries[0]
    assert [(m.role, m.content) for m in sent.messages] == [("user", "Who are you?"), ("assistant", "A robot."), ("user", "Really?")] and sent.generate
    assert page.text(".asked h2") == "What the model said"
    page.choose("kind", "text")
    page.write("#text", "any text at all")
    page.click("#ask")
    page.until(lambda: page.asked().queries[0].text == "any text at all", "text")
    page.choose("kind", "completion")
    page.write("#prompt", "The capital of")
    page.click("#generate")
    assert not page.one("#completion").is_enabled()
    page.click("#ask")
    page.until(lambda: page.asked().queries[0].generate and page.asked().queries[0].prompt == "The capital of", "generation")


def test_a_classifier_is_asked_with_text_and_class(visit: Any) -> None:
    page = visit()
    page.backend.task = "sequence-classification"
    page.open()
    page.until(lambda: page.one("#label-field"), "the class")
    assert not any(e.is_displayed() for e in page.all(".kinds, #prompt"))
    page.write("#text", "a fine film")
    page.click("#ask")
    assert "Write the class" in page.text(".notice.warn")
    for given, sent in (("positive", "positive"), ("1", 1)):
        page.write("#label", given)
        page.click("#ask")
        page.until(lambda sent=sent: page.backend.requests and page.asked().queries[0].label == sent, "the request")


def test_states_loading_empty_warning_error(visit: Any) -> None:
    page = visit()
    page.click("#ask")
    assert page.text(".notice.warn").startswith("Write what the model said") and page.script("return document.activeElement.id") == "completion"
    page.write("#prompt", "slow")
    page.write("#completion", " answer")
    page.click("#ask")
    assert page.one(".skeleton") and page.text("#ask").startswith("Working")
    page.until(lambda: page.all(".hit"), "the answer")
    assert "Nothing to rank" in page.ask("empty", " x").text(".empty")
    assert "outside what the index was fitted on" in page.ask("far away", " x").text(".notice.warn")
    box = page.ask("nonsense", " x").one(".notice.error")
    assert "no target token is left" in box.text and "bad-data" in box.text and "request" in box.text
    page.button("Try again")


def test_overload_counts_down_and_asks_again(visit: Any) -> None:
    page = visit()
    page.backend.overloads = 1
    page.ask("busy", " x")
    box = page.one(".notice.warn")
    assert "Many are asking at once" in box.text and "Asking again in 1 s" in box.text
    page.until(lambda: page.all(".hit"), "the answer after the wait", 5)


def test_api_key_is_asked_for_and_used(visit: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("page-key-0123456789 read\n")
    page = visit(keys=Keys.read(path))
    assert "needs an API key" in page.text(".notice.error")
    page.press("Enter an API key")
    page.one("#key-input").send_keys("page-key-0123456789")
    page.press("Use this key")
    page.until(lambda: "60 examples" in page.text("#facts"), "info")
    page.ask()
    assert page.all(".hit")
    page.script("sessionStorage.clear()")


def test_theme_is_kept(visit: Any) -> None:
    page = visit()
    before = page.one("body").value_of_css_property("background-color")
    page.click("#theme")
    after = page.one("body").value_of_css_property("background-color")
    page.open()
    assert before != after == page.one("body").value_of_css_property("background-color")
    page.script("localStorage.clear()")


def test_keyboard_alone(visit: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    page = visit()

    def keys(*pressed: str) -> None:
        ActionChains(page.driver).send_keys(*pressed).perform()

    page.one(".empty")
    keys("/")
    page.until(lambda: page.script("return document.activeElement.id") == "prompt", "focus")
    keys("The capital of Mongolia is", Keys.TAB, " Ulaanbaatar")
    ActionChains(page.driver).key_down(Keys.CONTROL).send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()
    page.until(lambda: len(page.all(".side.pro .hit")) == 10, "the answer")
    page.script("document.querySelector('.side.pro .hit').focus()")
    keys(Keys.ARROW_DOWN, "j", Keys.ARROW_UP)
    assert page.script("return document.activeElement.getAttribute('aria-label')").startswith("Rank 2,")
    assert "Result 2 acts through" in page.script("return document.querySelector('.asked .visually-hidden').textContent")
    page.script("document.getElementById('tab-ask').focus()")
    keys(Keys.ARROW_RIGHT)
    page.until(lambda: page.script("return document.activeElement.id") == "tab-unusual" and page.all("#unusual .hit"), "the other view")


def test_the_address_remembers_the_question(visit: Any) -> None:
    page = visit().ask()
    address = page.driver.current_url
    page.driver.get("about:blank")
    page.driver.get(address)
    page.until(lambda: page.all(".hit"), "the same answer")
    assert page.one("#completion").get_attribute("value") == " Ulaanbaatar"


@pytest.mark.parametrize("width", [1440, 390])
def test_nothing_overflows_and_nothing_is_fetched_from_elsewhere(visit: Any, width: int) -> None:
    page = visit(width).ask()
    for view in ("tab-ask", "tab-unusual"):
        page.click(f"#{view}")
        page.until(lambda: page.all(".hit"), "results")
        assert page.script("return document.documentElement.scrollWidth <= window.innerWidth")
    names = page.script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert names and all(n.startswith(page.url) for n in names)
    page.open("/docs").until(lambda: page.all("#reference .op"), "the reference")
    assert page.script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert [e["message"] for e in page.driver.get_log("browser")] == []


def test_reference_shows_addresses_fields_and_errors(visit: Any) -> None:
    page = visit(path="/docs#error-queue-full")
    page.until(lambda: len(page.all("#reference .op")) == 8, "operations")
    assert page.all("#error-queue-full") and "retry after the seconds" in page.text("#error-queue-full").lower()
    assert any("truncation" in e.text for e in page.all(".properties code")) and "curl " in page.text("pre")


@pytest.mark.parametrize(
    ("width", "theme"), [(1440, "light"), pytest.param(1440, "dark", marks=pytest.mark.slow), pytest.param(390, "light", marks=pytest.mark.slow), (390, "dark")]
)
def test_accessibility(visit: Any, width: int, theme: str) -> None:
    page = visit(width)
    page.script("localStorage.setItem('eogp-theme', arguments[0])", theme)
    try:
        found = {}
        page.open().one(".empty")
        found["start"] = page.problems()
        page.ask("far away", " x")
        page.press("Its tokens", ".side.pro .hit:first-child")
        page.until(lambda: page.all(".text.tokens"), "own tokens")
        page.script("document.querySelectorAll('.side.pro .hit')[1].focus()")
        found["answer"] = page.problems()
        page.press("Open", ".side.pro .hit:nth-child(4)")
        page.until(lambda: page.all("dialog .neighbours"), "dialog")
        found["dialog"] = page.problems()
        page.press("Close", "dialog")
        page.ask("nonsense", " x")
        found["error"] = page.problems()
        page.click("#tab-unusual")
        page.until(lambda: page.all("#unusual .hit"), "list")
        found["unusual"] = page.problems()
        page.open("/docs").until(lambda: page.all("#reference .op"), "reference")
        found["docs"] = page.problems()
    finally:
        page.script("localStorage.clear()")
    assert not any(found.values()), json.dumps(found, indent=1)
