"""The server's page in Chromium, before a stand-in for the server: it answers in the server's shapes,
and can be slow, busy, gone or hostile when a test wants it. Each test also asserts that the page did
nothing that it must never do: no script of a text, no dialog, no request to elsewhere, no breach of
the Content-Security-Policy, no uncaught error.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pytest import fixture, mark
from support.browser import OpenPage, open_page
from support.hostile_text import PAYLOADS
from support.needs import needs_chromium
from support.waiting import HANG_S, until

import nmt.extras.serve.app
from nmt.extras.serve.app import PAGE_HEADERS, PAGE_TYPES

pytestmark = needs_chromium()

PAGE = Path(nmt.extras.serve.app.__file__).parent / "page"
LEXICON = {
    "a": "ein", "the": "der", "dog": "Hund", "man": "Mann", "woman": "Frau", "runs": "rennt",
    "sleeps": "schläft", "through": "durch", "snow": "Schnee", "two": "zwei", "and": "und",
    "bushes": "Büschen",
}  # fmt: skip
JSON = dict[str, Any]
Response = tuple[int, JSON, dict[str, str]]  # status, body, headers
Respond = Callable[[JSON], Response]


class StandIn:
    """Translates word by word. A test may replace `respond`, or the languages that there are."""

    def __init__(self) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.reset()

    def reset(self) -> None:
        self.languages = [
            {"code": "en", "name": "English", "targets": ["de"]},
            {"code": "de", "name": "German", "targets": []},
        ]
        self.respond: Respond = translate_words
        self.questions: list[JSON] = []

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.removeprefix("/").removeprefix("page/") or "index.html"
                if self.path == "/languages":
                    self.send(200, "application/json", json.dumps(stand_in.languages))
                elif name in PAGE_TYPES:
                    self.send(200, PAGE_TYPES[name], (PAGE / name).read_text())
                else:
                    self.send(404, "application/json", '{"error": "no such page"}')

            def do_POST(self) -> None:
                assert self.path == "/translate"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stand_in.questions.append(body)
                status, answer, headers = stand_in.respond(body)
                self.send(status, "application/json", json.dumps(answer), headers)

            def send(
                self, status: int, kind: str, text: str, headers: dict[str, str] | None = None
            ) -> None:
                body = text.encode("utf-8", "surrogatepass")
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(body)))
                    self.send_header(*next(iter(PAGE_HEADERS.items())))  # the policy
                    for name, value in (headers or {}).items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:
                    pass  # the page aborted its question

            def log_message(self, *_: object) -> None:
                pass

        return Answer


def translate_words(body: JSON) -> Response:
    translated = [translate_line(text) for text in body["q"]]
    answer: JSON = {"translatedText": translated}
    if body["alternatives"]:
        answer["alternatives"] = [list_others(text, body["alternatives"]) for text in translated]
    return 200, answer, {}


def translate_line(text: str) -> str:
    return " ".join(translate_word(word) for word in text.split())


def list_others(translation: str, n: int) -> list[str]:
    """Translations that end in another word."""
    words = translation.split()
    return [" ".join([*words[:-1], f"Wort{i}"]) for i in range(1, n + 1)]


def translate_word(word: str) -> str:
    bare = word.rstrip(".,")
    return LEXICON.get(bare.lower(), bare) + word[len(bare) :]


# --- the browser ---

NOTE_BREACHES = """
window.breaches = [];
document.addEventListener("securitypolicyviolation", (event) => breaches.push(event.violatedDirective));
"""
STATUS_OF_ANSWER = "console: Failed to load resource"  # tests let the server refuse and fail


@fixture(scope="module")
def stand_in() -> StandIn:
    return StandIn()


@fixture(scope="module")
def tab(stand_in: StandIn) -> Iterator[OpenPage]:
    """One tab for all tests: a browser takes a second to start, a page a tenth to load again."""
    with open_page(stand_in.url) as opened:
        opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        opened.page.context.add_init_script(NOTE_BREACHES)
        yield opened


@fixture
def page(tab: OpenPage, stand_in: StandIn) -> Iterator[Any]:
    stand_in.reset()
    tab.faults.clear()
    tab.page.set_viewport_size({"width": 1200, "height": 800})
    tab.page.mouse.move(0, 0)
    tab.page.goto(stand_in.url)
    yield tab.page
    assert [fault for fault in tab.faults if not fault.startswith(STATUS_OF_ANSWER)] == []
    assert tab.page.evaluate("breaches") == []


def type_text(page: Any, text: str) -> None:
    page.fill("#source", text)
    page.keyboard.press("Control+Enter")  # without waiting for a pause


def read_rows(page: Any) -> list[str]:
    """What a reader sees of each line of the translation."""
    rows: list[str] = page.locator("#result > .line").all_inner_texts()
    return [" ".join(row.split()) for row in rows]


def expect_rows(page: Any, *rows: str) -> None:
    until_page(page, lambda: read_rows(page) == list(rows), lambda: read_rows(page))


def expect_problem(page: Any, pattern: str) -> None:
    def read() -> str:
        text: str = page.locator("#problem").inner_text()
        return text

    until_page(page, lambda: re.search(pattern, read()) is not None, read)


def until_page(page: Any, holds: Callable[[], bool], show: Callable[[], object]) -> None:
    """Wait as playwright does, so that its events are heard meanwhile."""
    end = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end, show()
        page.wait_for_timeout(20)


# --- translating ---


def test_it_translates_while_one_types(page: Any) -> None:
    page.locator("#source").press_sequentially("a dog runs", delay=5)
    expect_rows(page, "ein Hund rennt")
    page.locator("#source").press_sequentially(" through the snow", delay=5)
    expect_rows(page, "ein Hund rennt durch der Schnee")
    assert page.locator("#status").inner_text() == "ein Hund rennt durch der Schnee"
    assert page.locator("#sourceLanguage").inner_text() == "English"
    assert page.locator("#targetLanguage").inner_text() == "German"


def test_a_pause_is_waited_for_and_ctrl_enter_does_not_wait(page: Any, stand_in: StandIn) -> None:
    page.evaluate("window.setTimeout = (_, ms) => void (window.lastPause = ms)")  # never ends
    page.locator("#source").press_sequentially("a dog sleeps")
    assert page.evaluate("lastPause") == 250 and stand_in.questions == []
    page.keyboard.press("Control+Enter")
    expect_rows(page, "ein Hund schläft")
    assert len(stand_in.questions) == 1


def test_an_older_answer_never_replaces_a_newer_one(page: Any, stand_in: StandIn) -> None:
    is_old_answered = threading.Event()

    def respond(body: JSON) -> Response:
        if body["q"] == ["a dog"]:
            time.sleep(0.6)  # the newer question is answered long before
            is_old_answered.set()
        return translate_words(body)

    stand_in.respond = respond
    type_text(page, "a dog")
    until_page(page, lambda: len(stand_in.questions) == 1, lambda: stand_in.questions)
    type_text(page, "a man")
    expect_rows(page, "ein Mann")
    until(is_old_answered.is_set)
    page.wait_for_timeout(60)
    assert read_rows(page) == ["ein Mann"]


def test_only_changed_lines_are_asked_for(page: Any, stand_in: StandIn) -> None:
    type_text(page, "a dog\n\nthe woman\nthe man")
    expect_rows(page, "ein Hund", "", "der Frau", "der Mann")
    type_text(page, "a dog\n\ntwo bushes\nthe man")
    expect_rows(page, "ein Hund", "", "zwei Büschen", "der Mann")
    assert [question["q"] for question in stand_in.questions] == [
        ["a dog", "the woman", "the man"],
        ["two bushes"],
    ]


def test_a_long_text_comes_part_by_part(page: Any, stand_in: StandIn) -> None:
    type_text(page, "\n".join(["a dog"] * 19))
    expect_rows(page, *["ein Hund"] * 19)
    assert [len(question["q"]) for question in stand_in.questions] == [8, 8, 3]
    assert page.locator("#status").inner_text() == "\n".join(["ein Hund"] * 19).replace("\n", " ")


def test_a_direction_is_chosen_where_there_are_several(page: Any, stand_in: StandIn) -> None:
    assert page.locator("#direction").is_hidden()
    stand_in.languages[1]["targets"] = ["en"]
    page.reload()
    type_text(page, "a dog")
    expect_rows(page, "ein Hund")
    names = page.locator("#direction option").all_inner_texts()
    assert names == ["English to German", "German to English"]
    page.select_option("#direction", "German to English")
    until_page(page, lambda: len(stand_in.questions) == 2, lambda: stand_in.questions)
    asked = [(question["source"], question["target"]) for question in stand_in.questions]
    assert asked == [("en", "de"), ("de", "en")]
    assert page.locator("#targetLanguage").inner_text() == "English"
    assert page.get_attribute("#result", "lang") == "en"


def test_it_works_with_the_server_itself(page: Any, tab: OpenPage, tmp_path: Path) -> None:
    from support.running_server import LINES, open_toy_models, run_in_thread

    lines = LINES[:5]
    with run_in_thread(open_toy_models(tmp_path, ["decoding.min_length=2"])) as server:
        address = f"http://127.0.0.1:{server.port}/"
        page.goto(address)
        for code, name in (("de", "German"), ("fr", "French")):
            page.select_option("#direction", f"English to {name}")
            type_text(page, "\n".join(lines))
            answer = server.post("/translate", {"q": lines, "source": "en", "target": code}).json
            expect_rows(page, *answer["translatedText"])
        page.locator(".translation").first.click()
        page.locator(".alternatives button").nth(1).click()
        tab.faults[:] = [fault for fault in tab.faults if f"request: {address}" not in fault]


# --- what can be done with a translation ---


def test_a_chosen_alternative_stays_while_other_lines_change(page: Any, stand_in: StandIn) -> None:
    type_text(page, "a dog. The man.\nthe woman")
    expect_rows(page, "ein Hund. der Mann.", "der Frau")
    page.locator(".translation").first.focus()
    page.keyboard.press("Enter")
    page.locator(".alternatives button").nth(1).wait_for()
    assert stand_in.questions[-1]["q"] == ["a dog. The man."]
    assert stand_in.questions[-1]["alternatives"] == 4
    page.locator(".alternatives button").nth(1).click()
    expect_rows(page, "ein Hund. der Wort1", "der Frau")
    type_text(page, "a dog. The man.\nthe dog")
    expect_rows(page, "ein Hund. der Wort1", "der Hund")


def test_the_translation_is_copied_line_by_line(page: Any) -> None:
    assert page.locator("#copy").is_disabled()
    type_text(page, "a dog\n\nthe man")
    expect_rows(page, "ein Hund", "", "der Mann")
    page.click("#copy")
    assert page.evaluate("navigator.clipboard.readText()") == "ein Hund\n\nder Mann"


# --- problems ---


def test_a_busy_server_is_asked_again_when_it_said(page: Any, stand_in: StandIn) -> None:
    def respond(body: JSON) -> Response:
        if len(stand_in.questions) == 1:
            return 503, {"error": "too many requests wait"}, {"Retry-After": "1"}
        return translate_words(body)

    stand_in.respond = respond
    type_text(page, "a dog")
    expect_problem(page, "The server is busy.")
    expect_rows(page, "ein Hund")
    assert page.locator("#problem").is_hidden()


def test_a_server_that_is_gone_is_said_and_the_text_stays(page: Any) -> None:
    type_text(page, "a dog")
    expect_rows(page, "ein Hund")
    page.context.set_offline(True)
    type_text(page, "a man")
    expect_problem(page, "The server does not answer.")
    assert read_rows(page) == ["ein Hund"]
    assert page.locator(".line.stale").count() == 1
    page.context.set_offline(False)
    page.click("#tryAgain")
    expect_rows(page, "ein Mann")


def test_a_refused_line_does_not_cost_its_neighbours_their_translation(
    page: Any, stand_in: StandIn
) -> None:
    def respond(body: JSON) -> Response:
        if any(len(text) > 20 for text in body["q"]):
            return 400, {"error": "a line has more than 20 characters"}, {}
        return translate_words(body)

    stand_in.respond = respond
    type_text(page, "a dog\n" + "snow " * 10 + "\nthe man")
    message = "a line has more than 20 characters"
    expect_rows(page, "ein Hund", message, "der Mann")


def test_a_failure_is_said_and_not_repeated_by_itself(page: Any, stand_in: StandIn) -> None:
    stand_in.respond = lambda _: (500, {"error": "a bug"}, {})
    type_text(page, "a dog")
    expect_problem(page, "The server failed: a bug")
    stand_in.respond = translate_words
    page.click("#tryAgain")
    expect_rows(page, "ein Hund")


def test_a_key_is_asked_for_and_kept_in_memory_only(page: Any, stand_in: StandIn) -> None:
    def respond(body: JSON) -> Response:
        if body.get("api_key") != "open sesame":
            return 403, {"error": "Invalid API key"}, {}
        return translate_words(body)

    stand_in.respond = respond
    type_text(page, "a dog")
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect_problem(page, "Invalid API key")
    page.fill("#key", "open sesame")
    page.keyboard.press("Enter")
    expect_rows(page, "ein Hund")
    assert page.locator("#keyForm").is_hidden()
    stored = "[localStorage.length, sessionStorage.length, document.cookie]"
    assert page.evaluate(stored) == [0, 0, ""]


# --- hostile text ---


def test_hostile_translations_are_shown_as_text(page: Any, stand_in: StandIn) -> None:
    payloads = [" ".join(payload.split()) for payload in PAYLOADS]
    tags = " ".join(payload for payload in payloads if "<" in payload)
    lines = [*payloads, tags]

    def respond(body: JSON) -> Response:
        others = [[f"{text} x"] for text in body["q"]]
        return 200, {"translatedText": body["q"], "alternatives": others}, {}

    stand_in.respond = respond
    elements = "document.querySelectorAll('script, iframe, img, svg, a, meta, link, object').length"
    before = page.evaluate(elements)
    type_text(page, "\n".join(lines))
    expect_rows(page, *lines)
    page.locator(".translation").last.click()
    page.locator(".alternatives button").first.wait_for()
    assert page.evaluate(elements) == before


def test_hostile_errors_are_shown_as_text(page: Any, stand_in: StandIn) -> None:
    message = "<img src=x onerror=alert(1)>"
    stand_in.respond = lambda _: (500, {"error": message}, {})
    type_text(page, "a dog")
    expect_problem(page, re.escape(message))
    stand_in.respond = lambda _: (400, {"error": message}, {})
    page.click("#tryAgain")
    expect_rows(page, message)


# --- for everybody ---


def show_everything(page: Any, stand_in: StandIn) -> None:
    """A state of the page with all that it can show: alternatives, a refused line, a problem, the key."""
    type_text(page, "two bushes\nthe dog runs through the snow")
    expect_rows(page, "zwei Büschen", "der Hund rennt durch der Schnee")
    page.locator(".translation").first.click()
    page.locator(".alternatives button").first.wait_for()
    stand_in.respond = lambda _: (403, {"error": "this server needs an API key"}, {})
    page.fill("#source", "two bushes\nthe dog runs through the snow\na man")
    page.keyboard.press("Control+Enter")
    page.locator("#key").wait_for()


def test_every_control_has_a_name_and_tab_reaches_all(page: Any) -> None:
    type_text(page, "two bushes\nthe dog")
    expect_rows(page, "zwei Büschen", "der Hund")
    reached = []
    for _ in range(4):
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.className")
        )
        page.keyboard.press("Tab")
    assert reached == ["source", "translation", "translation", "copy"]
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    controls = {"button", "textbox", "combobox"}
    shown = [node for node in tree if node.get("role", {}).get("value") in controls]
    assert len(shown) >= 4
    assert [node for node in shown if not node["name"].get("value")] == []


@mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(page: Any, stand_in: StandIn, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    show_everything(page, stand_in)
    weak = page.evaluate(MEASURE_CONTRAST)
    page.emulate_media(color_scheme="light")
    assert weak["measured"] > 12
    assert weak["below"] == []


# Contrast as WCAG 2 defines it, of each text with the ground behind it. What is disabled is exempt.
MEASURE_CONTRAST = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => {
    const [r, g, b] = numbers(colour).slice(0, 3).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return (numbers(colour)[3] ?? 1) === 0 ? ground(element.parentElement) : colour;
  };
  const contrast = (ink, behind) => {
    const [low, high] = [luminance(ink), luminance(behind)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const hasText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const measured = [];
  for (const element of document.body.querySelectorAll("*")) {
    if (!element.checkVisibility() || element.matches(":disabled") || !hasText(element)) continue;
    if (element.closest(".visually-hidden, noscript")) continue;
    const ink = getComputedStyle(element).color;
    measured.push([contrast(ink, ground(element)), element.className || element.localName, element.textContent]);
  }
  return { measured: measured.length, below: measured.filter(([ratio]) => ratio < 4.5) };
}"""


def test_a_narrow_screen_shows_all_without_scrolling_sideways(page: Any, stand_in: StandIn) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    show_everything(page, stand_in)
    stand_in.respond = translate_words
    type_text(page, "two bushes\n" + "longword" * 40)
    until_page(page, lambda: read_rows(page)[1] == "longword" * 40, lambda: read_rows(page))
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    bounds = "element => element.getBoundingClientRect().right"
    for button in page.locator("button:visible, label:visible").all():
        assert button.evaluate(bounds) <= 390
