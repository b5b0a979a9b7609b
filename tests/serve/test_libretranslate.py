"""LibreTranslate's clients: what they send, as recorded from them, and themselves where they are installed.

Recorded with deep-translator 1.11.4, libretranslatepy 2.1.4 and the npm package libretranslate 1.0.1.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

import pytest
from pytest import mark, raises
from starlette.exceptions import HTTPException
from support.running_server import (  # noqa: F401
    LINES,
    RunningServer,
    run_in_thread,
    share_models,
    share_server,
)

from nmt.extras.serve.app import choose_model
from nmt.extras.serve.messages import TextsRequest
from nmt.extras.serve.models import ServedModel

JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
BOUNDARY = "----x"
MULTIPART = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


def translate(server: RunningServer, text: str) -> str:
    lines = [one.text for one in server.models[0].translator.translate(text.split("\n"))]
    return "\n".join(lines)


def test_deep_translator_asks_in_the_query(server: RunningServer) -> None:
    asked = {"q": LINES[0], "source": "en", "target": "de", "format": "text", "api_key": "x"}
    answer = server.ask("POST", f"/translate?{urlencode(asked)}", headers={"Content-Length": "0"})
    assert (answer.status, answer.json) == (200, {"translatedText": translate(server, LINES[0])})
    assert "occurs twice" in server.ask("POST", "/translate?q=a&q=b").text


def test_libretranslatepy_asks_by_forms(server: RunningServer) -> None:
    body = urlencode({"q": f"{LINES[0]}\n\n{LINES[1]}", "source": "en", "target": "de"}).encode()
    answer = server.ask("POST", "/translate", body, FORM)
    assert answer.json == {"translatedText": translate(server, f"{LINES[0]}\n\n{LINES[1]}")}
    answer = server.ask("GET", "/languages", headers=FORM)
    assert answer.json == [
        {"code": "en", "name": "English", "targets": ["de", "fr"]},
        {"code": "de", "name": "German", "targets": []},
        {"code": "fr", "name": "French", "targets": []},
    ]


def test_npm_client_asks_in_json_and_names_the_key_otherwise(server: RunningServer) -> None:
    asked = {"q": LINES[0], "source": "auto", "target": "de", "format": "text", "apiKey": "x"}
    answer = server.post("/translate", asked).json
    assert answer["translatedText"] == translate(server, LINES[0])


def test_lists_alternatives_and_multipart_forms(server: RunningServer) -> None:
    asked = {"q": LINES[:3], "source": "auto", "target": "de", "alternatives": 5}
    answer = server.post("/translate", asked).json
    assert answer["translatedText"] == [translate(server, line) for line in LINES[:3]]
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


def test_html_is_refused_and_names_who_takes_it(server: RunningServer) -> None:
    asked = {"q": "<p>A dog.</p>", "source": "en", "target": "de", "format": "html"}
    answer = server.post("/translate", asked)
    assert answer.status == 400
    assert "LibreTranslate translates HTML with this model" in answer.json["error"]


@mark.parametrize(
    "headers, body, status, words",
    [
        (JSON, b"{", 400, "not JSON"),
        (JSON, b"[" * 100_000, 400, "nested"),
        (JSON, b'{"alternatives": 1000000000000000000000000}', 400, "number 1000"),
        (JSON, b"[]", 400, "not a JSON object"),
        (JSON, b'{"source": "en", "target": "de"}', 400, "'q': field required"),
        (JSON, b'{"q": {}, "source": "en", "target": "de"}', 400, "'q': "),
        (JSON, b'{"q": "a", "target": "de"}', 400, "'source': field required"),
        (JSON, b'{"q": "a", "source": "fr", "target": "de"}', 400, "there is en to de"),
        (JSON, b'{"q": "a", "source": "auto", "target": "xx"}', 400, "not supported"),
        (JSON, b'{"q": "a", "source": "en", "target": "de", "format": "rtf"}', 400, "'format'"),
        (JSON, b'{"q": "a", "source": "en", "target": "de", "alternatives": -1}', 400, "'altern"),
        (JSON, b'{"q": "a", "source": "en", "target": "de", "alternatives": true}', 400, "integer"),
        (FORM, b"q=a&q=b&source=en&target=de", 400, "occurs twice"),
        (FORM, b"q=%ff%fe&source=en&target=de", 400, "can't decode byte 0xff"),
        (FORM, b"q=a&source=en&target=de&alternatives=x", 400, "integer"),
        (FORM, b"&".join(b"a=1" for _ in range(60)), 400, ""),
        (MULTIPART, b"------y\r\n", 400, ""),
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


def test_keys(models: list[ServedModel]) -> None:
    question = {"q": "a", "source": "en", "target": "de"}
    with run_in_thread(models, keys=frozenset({"secret", "sécret"})) as server:
        assert "needs an API key" in server.post("/translate", question).json["error"]
        answer = server.post("/translate", {**question, "api_key": "x"})
        assert (answer.status, answer.json) == (403, {"error": "this API key is not known"})
        for name in ("api_key", "apiKey"):
            assert server.post("/translate", {**question, name: "sécret"}).status == 200
        bearer = {"Authorization": "Bearer secret"}
        assert server.post("/translate", question).status == 403
        assert server.post("/translate", question, bearer).status == 200
        assert server.ask("GET", "/languages").status == 200


def test_auto_is_refused_where_there_is_a_choice() -> None:
    class Named(ServedModel):
        src, tgt = "fr", "de"

    one = Named(None)  # type: ignore[arg-type]
    asked = TextsRequest(q="a", source="auto", target="de")
    assert choose_model(asked, [one]) is one

    class Another(ServedModel):
        src, tgt = "en", "de"

    both = [one, Another(None)]  # type: ignore[arg-type]
    with raises(HTTPException, match="does not detect en or fr"):
        choose_model(asked, both)


# ---- the clients themselves -----------------------------------------------------------------------------------------

DEEP_TRANSLATOR = """
from deep_translator import LibreTranslator
client = LibreTranslator(source="en", target="de", api_key="x", custom_url={url!r})
print(json.dumps(client.translate_batch({lines!r})))
"""
LIBRETRANSLATEPY = """
from libretranslatepy import LibreTranslateAPI
client = LibreTranslateAPI({url!r})
client.languages()
print(json.dumps([client.translate(line, "en", "de") for line in {lines!r}]))
"""
NPM = """
const {{ translate }} = require("libretranslate");
const ask = query => translate({{ query, source: "en", target: "de", apiurl: {url} }});
(async () => console.log(JSON.stringify([await ask({lines}[0]), await ask({lines}[1])])))();
"""


@mark.parametrize(
    "package, program",
    [("deep_translator", DEEP_TRANSLATOR), ("libretranslatepy", LIBRETRANSLATEPY)],
)
def test_python_clients(server: RunningServer, package: str, program: str) -> None:
    python = os.environ.get("NMT_CLIENTS_PYTHON", sys.executable)
    if python == sys.executable and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; NMT_CLIENTS_PYTHON names a Python that has it")
    text = program.format(url=f"http://127.0.0.1:{server.port}/", lines=LINES[:2])
    done = subprocess.run([python, "-c", f"import json{text}"], capture_output=True, text=True)
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
        env={**os.environ, "NODE_PATH": modules},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [translate(server, line) for line in LINES[:2]]
