"""LibreTranslate's clients: what they send, as recorded from them, and themselves where they are installed.

Recorded with deep-translator 1.11.4, libretranslatepy 2.1.4 and the npm package libretranslate 1.0.1.
"""

import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

import pytest
from support.running_server import (  # noqa: F401
    LINES,
    RunningServer,
    run_in_thread,
    share_models,
    share_server,
)

from nmt.serve.detection import LanguageDetector
from nmt.serve.libretranslate import detect_languages
from nmt.serve.messages import TextsRequest
from nmt.serve.models import ServedModels

JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
BOUNDARY = "----x"
MULTIPART = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


def translate(server: RunningServer, text: str) -> str:
    lines = [one.text for one in server.models.first.loaded.translator.translate(text.split("\n"))]
    return "\n".join(lines)


def test_deep_translator_asks_in_the_query(server: RunningServer) -> None:
    asked = {"q": LINES[0], "source": "en", "target": "de", "format": "text", "api_key": "x"}
    answer = server.ask("POST", f"/translate?{urlencode(asked)}", headers={"Content-Length": "0"})
    assert (answer.status, answer.json) == (200, {"translatedText": translate(server, LINES[0])})


def test_libretranslatepy_asks_by_forms(server: RunningServer) -> None:
    body = urlencode({"q": f"{LINES[0]}\n\n{LINES[1]}", "source": "en", "target": "de"}).encode()
    answer = server.ask("POST", "/translate", body, FORM)
    assert answer.json == {"translatedText": translate(server, f"{LINES[0]}\n\n{LINES[1]}")}
    answer = server.ask("GET", "/languages", headers=FORM)
    assert answer.json == [
        {"code": "en", "name": "English", "targets": ["de"]},
        {"code": "de", "name": "German", "targets": []},
    ]
    answer = server.ask("POST", "/detect", b"q=Hello", FORM)
    assert answer.json == [{"language": "en", "confidence": 0.0}]


def test_npm_client_asks_in_json_and_names_the_key_otherwise(server: RunningServer) -> None:
    asked = {"q": LINES[0], "source": "auto", "target": "de", "format": "text", "apiKey": "x"}
    answer = server.post("/translate", asked).json
    assert answer["translatedText"] == translate(server, LINES[0])
    assert answer["detectedLanguage"] == {"language": "en", "confidence": 0.0}


def test_lists_alternatives_and_multipart_forms(server: RunningServer) -> None:
    asked = {"q": LINES[:3], "source": "auto", "target": "de", "alternatives": 5}
    answer = server.post("/translate", asked).json
    assert answer["translatedText"] == [translate(server, line) for line in LINES[:3]]
    assert len(answer["detectedLanguage"]) == 3
    for text, others in zip(answer["translatedText"], answer["alternatives"], strict=True):
        assert len(others) == 1  # the beam is 2
        assert text not in others

    fields = {"q": LINES[0], "source": "en", "target": "de", "alternatives": "1"}
    body = ""
    for key, value in fields.items():
        body += f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'
    answer = server.ask("POST", "/translate", f"{body}--{BOUNDARY}--\r\n".encode(), MULTIPART).json
    assert answer["translatedText"] == translate(server, LINES[0])
    assert len(answer["alternatives"]) == 1


def test_html_as_mastodon_and_wagtail_localize_ask(server: RunningServer) -> None:
    """Mastodon: one text, JSON, with a key of null. wagtail-localize: a list of strings with inline tags."""
    asked = {"source": "en", "target": "de", "format": "html", "api_key": None}
    post = f'<p>{LINES[0]} <a href="https://x.example/?a=1&amp;b=2" class="u-url">@<span>{LINES[1]}</span></a></p>'
    answer = server.post("/translate", {**asked, "q": post})
    assert answer.status == 200
    found = answer.json["translatedText"]
    for part in ("<p>", "</p>", 'href="https://x.example/?a=1&amp;b=2"', "<span>", "</span></a>"):
        assert found.count(part) == 1
    words = re.sub("<.*?>", "", found)
    assert words == translate(server, re.sub("<.*?>", "", post))

    texts = [f"{LINES[0]} <b>&amp;</b>", f'<a id="a1">{LINES[1]}</a>', "", "Tom &lt;3 Jerry"]
    answer = server.post("/translate", {**asked, "q": texts, "alternatives": 1})
    found = answer.json["translatedText"]
    assert [re.findall("<.*?>", text) for text in found] == [
        ["<b>", "</b>"],
        ['<a id="a1">', "</a>"],
        [],
        [],
    ]
    assert len(answer.json["alternatives"]) == 4
    plain = server.post("/translate", {**asked, "q": LINES[2]}).json["translatedText"]
    assert html.unescape(plain) == translate(server, LINES[2])


def test_settings_for_pages(server: RunningServer) -> None:
    answer = server.ask("GET", "/frontend/settings").json
    assert answer["language"]["source"] == {"code": "en", "name": "English"}
    assert answer["keyRequired"] is False


@pytest.mark.parametrize(
    "headers, body, status, words",
    [
        (JSON, b"{", 400, "not JSON"),
        (JSON, b"[" * 100_000, 400, "not JSON"),
        (JSON, b'{"source": "en", "target": "de"}', 400, "q is missing"),
        (JSON, b'{"q": {}, "source": "en", "target": "de"}', 400, "q is missing"),
        (JSON, b'{"q": "a", "target": "de"}', 400, "source is missing"),
        (JSON, b'{"q": "a", "source": "fr", "target": "de"}', 400, "there is en to de"),
        (JSON, b'{"q": "a", "source": "auto", "target": "fr"}', 400, "not supported"),
        (JSON, b'{"q": "a", "source": "en", "target": "de", "format": "rtf"}', 400, "text or html"),
        (JSON, b'{"q": "a", "source": "en", "target": "de", "alternatives": -1}', 400, "number"),
        (JSON, b'{"q": "a", "source": "en", "target": "de", "alternatives": true}', 400, "number"),
        (JSON, b'{"q": "a", "source": "en", "target": "de", "alternatives": 2.0}', 400, "number"),
        (FORM, b"q=%ff\xff", 400, "UTF-8"),
        (FORM, b"q=a&q=b&source=en&target=de", 400, "occurs twice"),
        (FORM, b"q=a&source=en&target=de&alternatives=x", 400, "number"),
        (FORM, b"&".join(b"a=1" for _ in range(60)), 400, "not a form"),
        (MULTIPART, b"------y\r\n", 400, "form"),
        ({"Content-Type": "text/plain"}, b"q=a", 415, "text/plain"),
        ({}, b"q=a", 415, "''"),
    ],
)
def test_bad_requests(
    server: RunningServer, headers: dict[str, str], body: bytes, status: int, words: str
) -> None:
    answer = server.ask("POST", "/translate", body, headers)
    assert answer.status == status
    assert words in answer.json["error"]


def test_keys(models: ServedModels) -> None:
    question = {"q": "a", "source": "en", "target": "de"}
    with run_in_thread(models, keys=frozenset({"secret", "sécret"})) as server:
        assert "needs an API key" in server.post("/translate", question).json["error"]
        answer = server.post("/translate", {**question, "api_key": "x"})
        assert (answer.status, answer.json) == (403, {"error": "this API key is not known"})
        for name in ("api_key", "apiKey"):
            assert server.post("/translate", {**question, name: "sécret"}).status == 200
        bearer = {"Authorization": "Bearer secret"}
        assert server.post("/v1/translate", {"q": ["a"]}).status == 403
        assert server.post("/v1/translate", {"q": ["a"]}, bearer).status == 200
        assert server.ask("GET", "/metrics").status == 403
        assert server.ask("GET", "/metrics", headers=bearer).status == 200
        assert server.ask("GET", "/languages").status == 200


# ---- the clients themselves -----------------------------------------------------------------------------------------

DEEP_TRANSLATOR = """
from deep_translator import LibreTranslator
client = LibreTranslator(source="en", target="de", api_key="x", custom_url={url!r})
print(json.dumps(client.translate_batch({lines!r})))
"""
LIBRETRANSLATEPY = """
from libretranslatepy import LibreTranslateAPI
client = LibreTranslateAPI({url!r})
client.languages(), client.detect("Hello")
print(json.dumps([client.translate(line, "en", "de") for line in {lines!r}]))
"""
NPM = """
const {{ translate }} = require("libretranslate");
const ask = query => translate({{ query, source: "en", target: "de", apiurl: {url} }});
(async () => console.log(JSON.stringify([await ask({lines}[0]), await ask({lines}[1])])))();
"""


@pytest.mark.parametrize(
    "package, program",
    [("deep_translator", DEEP_TRANSLATOR), ("libretranslatepy", LIBRETRANSLATEPY)],
)
def test_python_clients(server: RunningServer, package: str, program: str) -> None:
    python = os.environ.get("NMT_CLIENTS_PYTHON", sys.executable)
    if python == sys.executable and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; NMT_CLIENTS_PYTHON names a Python that has it")
    text = program.format(url=f"http://127.0.0.1:{server.port}/", lines=LINES[:2])
    done = subprocess.run(
        [python, "-c", f"import json{text}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [translate(server, line) for line in LINES[:2]]


def test_npm_client(server: RunningServer) -> None:
    modules = os.environ.get("NMT_NODE_MODULES", "")
    if not shutil.which("node") or not Path(modules, "libretranslate").is_dir():
        pytest.skip("NMT_NODE_MODULES names no folder with the npm package libretranslate")
    url, lines = json.dumps(f"http://127.0.0.1:{server.port}"), json.dumps(LINES[:2])
    done = subprocess.run(
        ["node", "-e", NPM.format(url=url, lines=lines)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NODE_PATH": modules},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [translate(server, line) for line in LINES[:2]]


# ---- languages ------------------------------------------------------------------------------------------------------

TEXTS = {
    "en": "The old house stands on a hill.",
    "de": "Das alte Haus steht auf einem Hügel.",
    "fr": "La vieille maison est sur une colline.",
}


class Directions(ServedModels):
    """Models into English, as far as their languages go."""

    def __init__(self, sources: list[str]) -> None:
        super().__init__([])
        self.sources = sources

    def list_sources(self, tgt: str | None = None) -> list[str]:
        return self.sources if tgt in (None, "en") else []


def test_languages_are_detected_among_those_of_the_server() -> None:
    detector = LanguageDetector(["en", "de", "fr", "a language that nobody knows"])
    for language, text in TEXTS.items():
        first, *others = detector.detect(text)
        assert first.language == language and 90 < first.confidence <= 100
        assert {one.language for one in others} == TEXTS.keys() - {language}
    asked = TextsRequest(q=[TEXTS["de"], TEXTS["fr"], TEXTS["de"]], source="auto", target="en")
    found = detect_languages(asked, Directions(["de", "fr"]), detector)
    assert [one.language for one in found] == ["de", "fr", "de"]
    (only,) = LanguageDetector(["en"]).detect(TEXTS["de"])
    assert (only.language, only.confidence) == ("en", 0.0)  # there was nothing to measure
    nothing = detect_languages(asked, Directions([]), detector)
    assert nothing == []
