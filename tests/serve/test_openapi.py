"""The OpenAPI document names every route, and no question that it allows or forbids breaks the server."""

import json
from random import Random
from typing import Any

from pytest import mark
from support.capture import Capture, read_stderr
from support.rings import amount
from support.running_server import LINES, RunningServer, share_models, share_server  # noqa: F401

from nmt.system.strict_json import Fields

# right and wrong values of each key
STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    2,
    1.5,
    10**30,
    "",
    "a",
    "\0",
    "\ud800",
    "x" * 2_000,
    [],
    {},
    [[1]],
]
VALUES: dict[str, list[Any]] = {
    "q": ["a\n\nb", LINES[:2], [""], ["\ud800"], ["a\nb"], ["x" * 2_000], ["▁", "<s>"]],
    "source": ["en", "auto"],
    "target": ["de", "fr", "xx"],
    "format": ["text", "html"],
    "alternatives": [1, "1", 12],
    "apiKey": ["x"],
}


def test_the_document_names_all_routes(server: RunningServer) -> None:
    document = server.ask("GET", "/openapi.json").json
    described = {(path, *operations) for path, operations in document["paths"].items()}
    assert described == {("/translate", "post"), ("/languages", "get"), ("/health", "get")}
    body = document["paths"]["/translate"]["post"]["requestBody"]["content"]
    assert set(body["multipart/form-data"]["schema"]["required"]) == {"q", "source", "target"}


@mark.timeout(amount(120, 900))
def test_no_question_breaks_the_server(server: RunningServer, capfd: Capture) -> None:
    rng = Random(1)
    statuses = set()
    for _ in range(amount(120, 20_000)):
        question: Fields = {}
        for key, values in VALUES.items():
            is_needed = key in ("q", "source", "target")
            if rng.random() < (0.95 if is_needed else 0.2):
                question[key] = rng.choice(STRANGE if rng.random() < 0.1 else values)
        answer = server.post("/translate", question)
        statuses.add(answer.status)
        assert answer.status in (200, 400, 413), (question, answer.text)
        if answer.status != 200:
            assert list(answer.json) == ["error"]
            assert "\n" not in answer.json["error"]
    assert statuses >= {200, 400}
    assert "Traceback" not in read_stderr(capfd)


@mark.parametrize("kind", ["x-www-form-urlencoded", "multipart/form-data; boundary=b", "json"])
def test_no_body_breaks_the_server(server: RunningServer, kind: str) -> None:
    """Damaged bodies of each kind that LibreTranslate's routes take."""
    rng = Random(2)
    part = b'--b\r\nContent-Disposition: form-data; name="q"\r\n\r\nred dog\r\n--b--\r\n'
    whole = {"x": b"q=red%20dog&source=en&target=de", "m": part}
    body = whole.get(kind[0], json.dumps({"q": "a", "source": "en", "target": "de"}).encode())
    headers = {"Content-Type": kind if "/" in kind else f"application/{kind}"}
    for _ in range(amount(100, 5_000)):
        damaged = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.choice(b'\0%&="\r\n\xff-{[')
        answer = server.ask("POST", "/translate", bytes(damaged[: rng.randint(1, 200)]), headers)
        assert answer.status in (200, 400), (damaged, answer.text)
