"""The server's page in Chromium, before a stand-in for the server: it answers in the server's shapes,
and can be slow, busy, gone or hostile when a test wants it. Each test also asserts that the page did
nothing that it must never do: no script of a text, no dialog, no request to elsewhere, no breach of
the Content-Security-Policy, no uncaught error.
"""

import base64
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.browser import OpenPage, open_page
from support.hostile_text import PAYLOADS
from support.needs import needs_chromium
from support.waiting import until

from nmt.documents.document import PlainText, Translated
from nmt.documents.sentences import Splitter
from nmt.serve.pages import CONTENT_POLICY, read_page_files

pytestmark = needs_chromium()

FILES = read_page_files()
LEXICON = {
    "a": "ein", "the": "der", "dog": "Hund", "man": "Mann", "woman": "Frau", "runs": "rennt",
    "sleeps": "schläft", "through": "durch", "snow": "Schnee", "two": "zwei", "and": "und",
    "bushes": "Büschen",
}  # fmt: skip
JSON = dict[str, Any]
Respond = Callable[[JSON], tuple[int, JSON, dict[str, str]]]


class StandIn:
    """Translates word by word. A test may replace `respond`, or list the models that there are."""

    def __init__(self) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.reset()

    def reset(self) -> None:
        self.models = [make_model("multi30k", "en", "de")]
        self.respond: Respond = translate_words
        self.questions: list[JSON] = []

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.removeprefix("/").removeprefix("page/") or "index.html"
                if self.path == "/v1/models":
                    self.send(200, "application/json", json.dumps({"models": stand_in.models}))
                elif name in FILES:
                    self.send(200, FILES[name].media_type, FILES[name].content.decode())
                else:
                    self.send(404, "application/json", '{"error": "no such page"}')

            def do_POST(self) -> None:
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
                    self.send_header("Content-Security-Policy", CONTENT_POLICY)
                    for name, value in (headers or {}).items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:
                    pass  # the page aborted its question

            def log_message(self, *_: object) -> None:
                pass

        return Answer


def make_model(name: str, source: str, target: str, engine: str = "nmt") -> JSON:
    return {"name": name, "source": source, "target": target, "engine": engine, "beam": 4}


def translate_words(body: JSON) -> tuple[int, JSON, dict[str, str]]:
    translations = [
        make_translation(text, body, lambda one: list_candidates(one, body)) for text in body["q"]
    ]
    return 200, {"model": "multi30k", "translations": translations}, {}


def make_translation(text: str, body: JSON, find: Callable[[str], list[JSON]]) -> JSON:
    document = PlainText(text, Splitter("en" if body.get("split", True) else None, lambda _: True))
    sentences: list[JSON] = [
        {"source": one.text, "start": one.start, "candidates": find(one.text)}
        for one in document.sentences
    ]
    best = [Translated(one["candidates"][0]["text"]) for one in sentences]
    return {"text": document.join(best), "sentences": sentences}


def list_candidates(text: str, body: JSON) -> list[JSON]:
    """The translation, and others that end in another word."""
    pieces = [piece for word in text.split() for piece in spell(translate_word(word))]
    candidates = [make_candidate(text, pieces, body)]
    last_word = max((i for i, piece in enumerate(pieces) if piece.startswith("▁")), default=0)
    for i in range(1, body.get("n_best", 1)):
        candidates.append(make_candidate(text, [*pieces[:last_word], f"▁Wort{i}"], body))
    return candidates


def translate_word(word: str) -> str:
    bare = word.rstrip(".,")
    return LEXICON.get(bare.lower(), bare) + word[len(bare) :]


def spell(word: str) -> list[str]:
    """A word of more than four characters is two pieces."""
    return [f"▁{word[:4]}", word[4:]] if len(word) > 4 else [f"▁{word}"]


def make_candidate(source: str, pieces: list[str], body: JSON) -> JSON:
    candidate: JSON = {"text": "".join(pieces).replace("▁", " ").strip(), "score": -1.0}
    if body.get("pieces"):
        candidate["pieces"] = [{"piece": p, "log_prob": guess_log_prob(p)} for p in pieces]
    if body.get("attention"):
        candidate["attention"] = make_attention(["▁" + w for w in source.split()], pieces)
    return candidate


def guess_log_prob(piece: str) -> float:
    """Schnee is one of two equals (e^-0.9 = 41 %), and -n a long shot (e^-2.3 = 10 %)."""
    return {"▁Büsc": -0.9, "hen": -2.3, "hen.": -2.3}.get(piece, -0.1)


def make_attention(source: list[str], target: list[str]) -> JSON:
    """Two layers of two heads. A piece looks at the source word of its own word, half of one head
    at the end.
    """
    width = len(source) + 1
    rows = []
    word = -1
    for piece in [*target, "</s>"]:
        word += piece.startswith("▁")
        row = [0] * width
        row[min(word, width - 1)] = 255
        rows.append(row)
    cells = encode_cells(rows)
    blurred = encode_cells([[value // 2 for value in row] for row in rows])
    square = encode_cells([[255 if s == t else 0 for s in range(width)] for t in range(width)])
    memory = [[cells, blurred], [cells, blurred]]
    return {
        "source": [*source, "</s>"],
        "target": [*target, "</s>"],
        "alignment": [row.index(255) for row in rows],
        "attention": {"memory": memory, "encoder": [[square, square]] * 2},
    }


def encode_cells(rows: list[list[int]]) -> str:
    return base64.b64encode(bytes(value for row in rows for value in row)).decode()


# --- the browser ---

NOTE_BREACHES = """
window.breaches = [];
document.addEventListener("securitypolicyviolation", (event) => breaches.push(event.violatedDirective));
"""
ISOLATES = dict.fromkeys(map(ord, "\u2068\u2069"))  # around words, for those from right to left
STATUS_OF_ANSWER = "console: Failed to load resource"  # tests let the server refuse and fail


@pytest.fixture(scope="module")
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture(scope="module")
def tab(stand_in: StandIn) -> Iterator[OpenPage]:
    """One tab for all tests: a browser takes a second to start, a page a tenth to load again."""
    with open_page(stand_in.url) as opened:
        opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        opened.page.context.add_init_script(NOTE_BREACHES)
        yield opened


@pytest.fixture
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


def expect_text(page: Any, selector: str, pattern: str) -> None:
    def read() -> str:
        text: str = page.locator(selector).inner_text()
        return text.translate(ISOLATES)

    until_page(page, lambda: re.search(pattern, read()) is not None, read)


def until_page(page: Any, holds: Callable[[], bool], show: Callable[[], object]) -> None:
    """Wait as playwright does, so that its events are heard meanwhile."""
    end = time.monotonic() + 5
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
    page.locator("#source").press_sequentially("a dog sleeps", delay=5)
    page.keyboard.press("Control+Enter")
    expect_rows(page, "ein Hund schläft")
    assert len(stand_in.questions) == 1


def test_an_older_answer_never_replaces_a_newer_one(page: Any, stand_in: StandIn) -> None:
    is_old_answered = threading.Event()

    def respond(body: JSON) -> tuple[int, JSON, dict[str, str]]:
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


def test_lines_stay_aligned_and_only_changed_ones_are_asked_for(
    page: Any, stand_in: StandIn
) -> None:
    type_text(page, "a dog\n\nthe woman\nthe man")
    expect_rows(page, "ein Hund", "", "der Frau", "der Mann")
    type_text(page, "a dog\n\ntwo bushes\nthe man")
    expect_rows(page, "ein Hund", "", "zwei Büschen", "der Mann")
    assert [question["q"] for question in stand_in.questions] == [
        ["a dog", "the woman", "the man"],
        ["two bushes"],
    ]
    assert_rows_beside_lines(page)


def assert_rows_beside_lines(page: Any) -> None:
    tops = """(selector) => [...document.querySelectorAll(selector)]
      .map((element) => Math.round(element.getBoundingClientRect().top))"""
    assert page.evaluate(tops, ".source-line") == page.evaluate(tops, "#result > .line")


def test_a_long_text_comes_part_by_part(page: Any, stand_in: StandIn) -> None:
    type_text(page, "\n".join(["a dog"] * 19))
    expect_rows(page, *["ein Hund"] * 19)
    assert [len(question["q"]) for question in stand_in.questions] == [8, 8, 3]
    assert page.locator("#status").inner_text() == "\n".join(["ein Hund"] * 19).replace("\n", " ")


def test_a_model_is_chosen_where_there_are_several(page: Any, stand_in: StandIn) -> None:
    stand_in.models = [
        make_model("there", "en", "de"),
        make_model("back", "de", "en", engine="ctranslate2 4.6"),
    ]
    page.reload()
    type_text(page, "a dog")
    expect_rows(page, "ein Hund")
    assert page.locator("#model option").all_inner_texts() == [
        "English → German",
        "German → English",
    ]
    page.select_option("#model", "back")
    until_page(page, lambda: len(stand_in.questions) == 2, lambda: stand_in.questions)
    assert [question["model"] for question in stand_in.questions] == ["there", "back"]
    assert page.locator("#targetLanguage").inner_text() == "English"
    assert page.get_attribute("#result", "lang") == "en"
    # this one's engine only translates
    assert [question["pieces"] for question in stand_in.questions] == [True, False]
    assert (
        page.locator("#alternatives, #look, #confidence, #legend").locator("visible=true").count()
        == 0
    )
    expect_rows(page, "ein Hund")
    page.click(".word")
    assert page.locator(".alternatives").count() == 0


def test_it_works_with_the_server_itself(page: Any, tab: OpenPage, tmp_path: Path) -> None:
    from support.running_server import LINES, open_toy_models, run_in_thread

    lines = LINES[:5]
    with run_in_thread(open_toy_models(tmp_path)) as server:
        address = f"http://127.0.0.1:{server.port}/"
        page.goto(address)
        for name in ("en-de", "other"):
            page.select_option("#model", name)
            type_text(page, "\n".join(lines))
            answer = server.post("/v1/translate", {"q": lines, "model": name}).json
            expect_rows(page, *(row["text"] for row in answer["translations"]))
        page.click("#alternatives")
        page.locator("[role=option]").nth(1).click()
        page.click("#look")
        page.locator("#attentionView canvas").wait_for()
        shown = page.locator("#result > .line").last.inner_text().split()
        pieces = page.locator("#attentionView .attention-rows").inner_text()
        assert "".join(pieces.split()).replace("▁", "") == "".join(shown) + "</s>"
        tab.faults[:] = [fault for fault in tab.faults if f"request: {address}" not in fault]


# --- what can be done with a translation ---


def test_sentences_of_a_line_have_their_own_alternatives_and_attention(
    page: Any, stand_in: StandIn
) -> None:
    type_text(page, "The man\n 🎸 A dog runs.  The snow.\tThe woman sleeps.")
    expect_rows(page, "der Mann", "🎸 ein Hund rennt. der Schnee. der Frau schläft.")
    second, third = page.locator(".line:nth-child(2) .sentence").all()[1:]
    third.locator(".word").nth(1).hover()
    expect_text(page, "#detail", "Frau: looks at woman 75 %")
    assert page.locator(".source-line mark").all_text_contents() == ["woman"]
    place = "mark => mark.previousSibling.textContent"
    assert page.locator("mark").evaluate(place) == " 🎸 A dog runs.  The snow.\tThe "

    second.locator(".word").first.focus()
    page.keyboard.press("Enter")
    expect_text(page, "[role=listbox]", "Wort4")
    label = page.get_attribute("[role=listbox]", "aria-label")
    assert label == "Alternatives of sentence 2 of line 2"
    assert stand_in.questions[-1]["q"] == ["The snow."]
    page.keyboard.press("Enter")
    expect_rows(page, "der Mann", "🎸 ein Hund rennt. der Wort1 der Frau schläft.")
    page.click("#copy")
    expect_text(page, "#copy", "Copied")
    copied = "der Mann\n 🎸 ein Hund rennt.  der Wort1\tder Frau schläft."
    assert page.evaluate("navigator.clipboard.readText()") == copied

    # the sentence with the caret, which is at the end of the text
    page.focus("#source")
    page.locator("#source").press("Control+End")
    until_page(page, lambda: "current" in third.get_attribute("class"), lambda: read_rows(page))
    page.click("#look")
    expect_text(page, "#attentionTitle", "^Attention of sentence 3 of line 2$")
    page.keyboard.press("Escape")

    # what was chosen stays while other sentences change
    type_text(page, "The man\n 🎸 A dog sleeps.  The snow.\tThe woman sleeps.")
    expect_rows(page, "der Mann", "🎸 ein Hund schläft. der Wort1 der Frau schläft.")


def test_alternatives_by_keyboard_replace_the_line(page: Any) -> None:
    type_text(page, "a dog\nthe snow")
    expect_rows(page, "ein Hund", "der Schnee")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect_text(page, "[role=listbox]", "Wort4")
    assert page.get_attribute("[role=listbox]", "aria-label") == "Alternatives of line 2"
    assert page.locator("[role=option] b").all_inner_texts() == [f"Wort{i}" for i in range(1, 5)]
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.textContent") == "der Wort2"
    page.keyboard.press("Enter")
    expect_rows(page, "ein Hund", "der Wort2")
    assert page.evaluate("document.activeElement.textContent") == "der"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "source"


def test_a_click_lists_alternatives_and_a_chosen_one_stays_while_other_lines_change(
    page: Any,
) -> None:
    type_text(page, "a dog\nthe snow")
    expect_rows(page, "ein Hund", "der Schnee")
    page.click(".line:nth-child(1) .word:nth-child(2)")
    page.click("[role=option]:nth-child(4)")
    expect_rows(page, "ein Wort3", "der Schnee")
    type_text(page, "a dog\nthe man")
    expect_rows(page, "ein Wort3", "der Mann")


def test_a_word_shows_the_source_words_it_looks_at(page: Any) -> None:
    type_text(page, "the man\na dog runs through bushes")
    expect_rows(page, "der Mann", "ein Hund rennt durch Büschen")
    page.hover(".line:nth-child(2) .word:nth-child(2)")
    expect_text(page, "#detail", "Hund: looks at dog 75 %; probability 90 %$")
    assert page.locator(".source-line mark").all_text_contents() == ["dog"]
    page.focus(".line:nth-child(2) .word:nth-child(5)")
    expect_text(page, "#status", "Büschen: looks at bushes")
    assert page.locator(".source-line mark.strong").all_text_contents() == ["bushes"]
    page.focus("#copy")
    assert page.locator("mark").count() == 0


def test_writing_from_right_to_left(page: Any) -> None:
    type_text(page, "كلب يجري\nthe dog")
    expect_rows(page, "كلب يجري", "der Hund")
    first, second = page.locator("#result .word").all()[:2]
    assert first.bounding_box()["x"] > second.bounding_box()["x"]
    first.focus()
    page.keyboard.press("ArrowLeft")
    expect_text(page, "#detail", "^يجري: looks at يجري 75 %")
    # the highlights lie behind their words: lines begin where those of the text field do
    page.focus(".line:nth-child(2) .word:nth-child(1)")
    page.locator("mark", has_text="the").wait_for()
    field = page.locator("#source").bounding_box()
    assert page.locator("mark").bounding_box()["x"] < field["x"] + 60


def test_the_attention_of_a_chosen_alternative_is_its_own(page: Any, stand_in: StandIn) -> None:
    type_text(page, "a dog")
    expect_rows(page, "ein Hund")
    page.click("#alternatives")
    page.click("[role=option]:nth-child(3)")
    expect_rows(page, "ein Wort2")
    page.keyboard.press("a")
    expect_text(page, "#attentionView", "Wort2")
    assert "Hund" not in page.locator("#attentionView").inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#attention").is_visible()
    assert stand_in.questions[-1]["attention"]


def test_confidence_is_shown_by_piece_and_can_be_switched_off(page: Any) -> None:
    type_text(page, "two bushes")
    expect_rows(page, "zwei Büschen")
    assert page.locator(".with-confidence .unsure:visible").all_inner_texts()[0] == "Büsc"
    assert page.locator("#result .doubtful").all_inner_texts() == ["hen"]
    word = page.locator("#result .word").nth(1)
    assert word.get_attribute("aria-description") == "probability 4 %"
    word.hover()
    expect_text(page, "#detail", r"probability 4 % \(Büsc 41 % · hen 10 %\)")
    line = "element => getComputedStyle(element).textDecorationLine"
    assert page.locator("#result .doubtful").evaluate(line) == "underline"
    page.uncheck("#confidence")
    assert page.locator("#result .doubtful").evaluate(line) == "none"


def test_the_translation_is_copied_line_by_line(page: Any) -> None:
    type_text(page, "a dog\n\nthe man")
    expect_rows(page, "ein Hund", "", "der Mann")
    page.click("#copy")
    expect_text(page, "#copy", "Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "ein Hund\n\nder Mann"


def test_nothing_is_copied_before_all_is_translated(page: Any, stand_in: StandIn) -> None:
    type_text(page, "a dog")
    expect_rows(page, "ein Hund")
    stand_in.respond = lambda _: (500, {"error": "a bug"}, {})
    type_text(page, "a man")
    page.click("#copy")
    expect_text(page, "#copy", "Not translated yet")


def test_pieces_become_words_in_any_writing_and_spelling(page: Any) -> None:
    def split(text: str, *pieces: str) -> list[list[str]]:
        candidate = {"text": text, "pieces": [{"piece": p, "log_prob": 0.0} for p in pieces]}
        words = page.evaluate(CALL, ["splitIntoWords", candidate])
        assert all(word["probability"] in (1, None) for word in words)
        return [[part["text"] for part in word["parts"]] for word in words]

    assert split("Zwei Hunde.", "▁Zwei", "▁Hu", "nde", ".", "</s>") == [
        ["Zwei"],
        ["Hu", "nde"],
        ["."],
    ]
    assert split("„Ja“, so", "▁", "„", "Ja", "“,", "▁so") == [["„"], ["Ja"], ["“,"], ["so"]]
    assert split("mot\u00a0: oui", "▁mot", "\u00a0:", "▁oui") == [["mot", "\u00a0:"], ["oui"]]
    assert split("我喜欢茶", "▁我", "喜欢", "茶") == [["我"], ["喜欢"], ["茶"]]
    assert split("ein 🎸 da", "▁ein", "▁", "<0xF0>", "<0x9F>", "▁da") == [["ein"], ["🎸"], ["da"]]
    assert split("eins zwei", "▁eins") == [["eins"], ["zwei"]]  # which piece is where is unknown


def test_attention_finds_its_words_in_text_that_the_vocabulary_changed(page: Any) -> None:
    def weigh(source: str, *pieces: str) -> list[tuple[str, int]]:
        """All attention is on the second piece."""
        weights = [100 * (i == 1) for i in range(len(pieces) + 1)]
        attention = {"memory": [[encode_cells([[weight * 255 // 100 for weight in weights]])]]}
        attention_map = {"source": [*pieces, "</s>"], "attention": attention}
        words = page.evaluate(CALL, ["weighSourceWords", source, attention_map, [0]])
        return [(word["text"], round(word["weight"])) for word in words]

    assert weigh("A dog runs.", "▁A", "▁dog", "▁runs", ".")[1] == ("dog", 1)
    assert weigh("A ½ dog", "▁A", "▁1⁄2", "▁dog") == [("A", 0), ("½", 1), ("dog", 0)]
    assert weigh("A 世界", "▁A", "▁<unk>") == [("A", 0), ("世", 1), ("界", 0)]
    assert weigh("  don't  go", "▁don", "'", "t", "▁go") == [("don't", 1), ("go", 0)]


def test_what_differs_between_two_translations(page: Any) -> None:
    def compare(text: str, other: str) -> str:
        words = page.evaluate(CALL, ["compareWords", text, other])
        return " ".join(f"*{word['text']}*" if word["isNew"] else word["text"] for word in words)

    assert compare("a b c", "a b c") == "a b c"
    assert compare("a x c y", "a b c") == "a *x* c *y*"
    assert compare("b c a", "a b c") == "b c *a*"
    assert compare("a", "a b c") == "a"
    assert compare("x y", "") == "*x* *y*"


CALL = """async ([name, ...values]) => (await import(new URL("page/words.js", document.baseURI)))[name](...values)"""


# --- problems ---


def test_a_busy_server_is_asked_again_when_it_said(page: Any, stand_in: StandIn) -> None:
    def respond(body: JSON) -> tuple[int, JSON, dict[str, str]]:
        if len(stand_in.questions) == 1:
            return 503, {"error": "too many requests wait"}, {"Retry-After": "1"}
        return translate_words(body)

    stand_in.respond = respond
    type_text(page, "a dog")
    expect_text(page, "#problem", "The server is busy. Trying again in 1 second.")
    expect_rows(page, "ein Hund")
    assert page.locator("#problem").is_hidden()


def test_a_server_that_is_gone_is_said_and_the_text_stays(page: Any) -> None:
    type_text(page, "a dog")
    expect_rows(page, "ein Hund")
    page.context.set_offline(True)
    type_text(page, "a man")
    expect_text(page, "#problem", "The server does not answer. Trying again in 3 seconds.")
    assert read_rows(page) == ["ein Hund"]
    assert page.locator(".line.stale").count() == 1
    page.context.set_offline(False)
    page.click("#tryAgain")
    expect_rows(page, "ein Mann")


def test_a_refused_line_does_not_cost_its_neighbours_their_translation(
    page: Any, stand_in: StandIn
) -> None:
    def respond(body: JSON) -> tuple[int, JSON, dict[str, str]]:
        if any(len(text) > 20 for text in body["q"]):
            return 400, {"error": "a line has more than 20 characters"}, {}
        return translate_words(body)

    stand_in.respond = respond
    type_text(page, "a dog\n" + "snow " * 10 + "\nthe man")
    message = "Not translated: a line has more than 20 characters"
    expect_rows(page, "ein Hund", message, "der Mann")


def test_a_failure_is_said_and_not_repeated_by_itself(page: Any, stand_in: StandIn) -> None:
    stand_in.respond = lambda _: (500, {"error": "a bug"}, {})
    type_text(page, "a dog")
    expect_text(page, "#problem", "The server failed: a bug")
    stand_in.respond = translate_words
    page.click("#tryAgain")
    expect_rows(page, "ein Hund")


def test_a_key_is_asked_for_and_kept_in_memory_only(page: Any, stand_in: StandIn) -> None:
    def respond(body: JSON) -> tuple[int, JSON, dict[str, str]]:
        if body.get("api_key") != "open sesame":
            return 403, {"error": "Invalid API key"}, {}
        return translate_words(body)

    stand_in.respond = respond
    type_text(page, "a dog")
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect_text(page, "#status", "does not accept")
    page.fill("#key", "open sesame")
    page.keyboard.press("Enter")
    expect_rows(page, "ein Hund")
    assert page.locator("#keyForm").is_hidden()
    stored = "[localStorage.length, sessionStorage.length, document.cookie]"
    assert page.evaluate(stored) == [0, 0, ""]


# --- hostile text ---


def test_hostile_translations_and_pieces_are_shown_as_text(page: Any, stand_in: StandIn) -> None:
    payloads = [" ".join(payload.split()) for payload in PAYLOADS]
    tags = " ".join(payload for payload in payloads if "<" in payload)
    lines = [*payloads, tags]

    def respond(body: JSON) -> tuple[int, JSON, dict[str, str]]:
        whole = {**body, "split": False}
        return (
            200,
            {"translations": [make_translation(t, whole, list_hostile) for t in body["q"]]},
            {},
        )

    def list_hostile(text: str) -> list[JSON]:
        pieces = ["▁" + word for word in text.split(" ")]
        attention = make_attention(pieces, pieces)
        log_probs = [{"piece": piece, "log_prob": -1.0} for piece in pieces]
        candidate = {"text": text, "score": 0.0, "pieces": log_probs, "attention": attention}
        return [candidate, {**candidate, "text": f"{text} x"}]

    stand_in.respond = respond
    elements = "document.querySelectorAll('script, iframe, img, svg, a, meta, link, object').length"
    before = page.evaluate(elements)
    type_text(page, "\n".join(lines))
    until_page(page, lambda: page.locator("#working").is_hidden(), lambda: read_rows(page))
    shown = page.locator("#result > .line").all_text_contents()
    assert [row.split(" ") for row in shown] == [line.split(" ") for line in lines]

    # each line's first word, the alternatives and all attention of the line that has all tags
    focus = "row => document.querySelectorAll('.line')[row].querySelector('.word').focus()"
    for row in range(len(lines)):
        page.evaluate(focus, row)
    page.locator("mark").wait_for()
    page.keyboard.press("Enter")
    page.locator("[role=option]").first.wait_for()
    page.click("#look")
    page.locator("#attentionView canvas").wait_for()
    page.locator("#attentionView summary").click()
    page.locator("#attentionView table").wait_for(state="attached")
    assert page.evaluate(elements) == before


def test_hostile_errors_are_shown_as_text(page: Any, stand_in: StandIn) -> None:
    message = "<img src=x onerror=alert(1)>"
    stand_in.respond = lambda _: (500, {"error": message}, {})
    type_text(page, "a dog")
    expect_text(page, "#problem", re.escape(message))
    stand_in.respond = lambda _: (400, {"error": message}, {})
    page.click("#tryAgain")
    expect_rows(page, f"Not translated: {message}")


# --- for everybody ---


def show_everything(page: Any) -> None:
    """A state of the page with all that it can show: doubt, attention, alternatives, a problem."""
    type_text(page, "two bushes\nthe dog runs through the snow")
    expect_rows(page, "zwei Büschen", "der Hund rennt durch der Schnee")
    page.click("#alternatives")
    page.locator("[role=option]").first.wait_for()
    page.locator(".keys summary").click()
    page.locator(".line:nth-child(1) .word").nth(1).hover()
    page.locator("mark").first.wait_for()


def test_every_control_has_a_name_and_tab_reaches_all(page: Any) -> None:
    type_text(page, "two bushes\nthe dog")
    expect_rows(page, "zwei Büschen", "der Hund")
    reached = []
    for _ in range(8):
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.className")
        )
        page.keyboard.press("Tab")
    assert reached[:6] == ["source", "word", "alternatives", "look", "confidence", "copy"]
    assert "clear" in reached or page.evaluate("document.activeElement.id") == "clear"

    page.click("#alternatives")
    page.locator("[role=option]").first.wait_for()
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    controls = {
        "button",
        "textbox",
        "checkbox",
        "combobox",
        "option",
        "grid",
        "gridcell",
        "listbox",
    }
    shown = [node for node in tree if node.get("role", {}).get("value") in controls]
    assert len(shown) > 10
    assert [node for node in shown if not node["name"].get("value")] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    show_everything(page)
    weak = page.evaluate(MEASURE_CONTRAST)
    page.emulate_media(color_scheme="light")
    assert weak["measured"] > 30
    assert weak["below"] == []


# Contrast as WCAG 2 defines it, of each text with the ground behind it, and of the text field's ink
# with each highlight behind it. What is disabled is exempt.
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
  const field = document.querySelector("textarea");
  const measured = [];
  for (const element of document.body.querySelectorAll("*")) {
    const isBehind = element.closest(".backdrop") !== null;
    if (!element.checkVisibility() || element.matches(":disabled") || !(hasText(element) || isBehind)) continue;
    if (element.closest(".visually-hidden, noscript")) continue;
    const ink = getComputedStyle(isBehind ? field : element).color;
    measured.push([contrast(ink, ground(element)), element.className || element.localName, element.textContent]);
  }
  return { measured: measured.length, below: measured.filter(([ratio]) => ratio < 4.5) };
}"""


def test_a_narrow_screen_shows_all_without_scrolling_sideways(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    show_everything(page)
    type_text(page, "two bushes\n" + "longword" * 40)
    until_page(page, lambda: page.locator("#working").is_hidden(), lambda: read_rows(page))
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    bounds = "element => element.getBoundingClientRect().right"
    for button in page.locator("button:visible, label:visible").all():
        assert button.evaluate(bounds) <= 390
    page.click("#look")
    page.locator("#attentionView canvas").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator("#attention").evaluate(bounds) <= 390
