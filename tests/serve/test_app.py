"""The server's own routes: what they answer, and that it is what the translator says alone."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
from support.running_server import (  # noqa: F401
    LINES,
    RunningServer,
    run_in_thread,
    share_models,
    share_server,
)
from support.soaking import counted

from nmt.translate.translator import Candidates, Request

NEAR = 1e-5  # as in test_invariance.py
ALONE: dict[str, Candidates] = {}  # what was found


def find_alone(server: RunningServer, question: dict[str, Any]) -> list[list[tuple[str, float]]]:
    """What the translator says to each line alone."""
    translator = server.models.by_name[question.get("model", "en-de")].translator
    found = []
    for line in question["q"]:
        key = json.dumps([line, {**question, "q": None}])
        if key not in ALONE:
            request = Request(question.get("n_best", 1))
            ALONE[key] = translator.find_candidates([line], request)[0]
        found.append([(one.text, one.score) for one in ALONE[key]])
    return found


def assert_same(server: RunningServer, question: dict[str, Any], answer: Any) -> None:
    for found, expected in zip(answer["translations"], find_alone(server, question), strict=True):
        if not found["sentences"]:
            assert (found["text"], expected[0][0]) == ("", "")
            continue
        (sentence,) = found["sentences"]
        texts = [one["text"] for one in sentence["candidates"]]
        scores = [one["score"] for one in sentence["candidates"]]
        assert texts == [text for text, _ in expected] and found["text"] == texts[0]
        assert scores == pytest.approx([score for _, score in expected], abs=NEAR)


@pytest.mark.parametrize(
    "question",
    [
        {"q": LINES[:3]},
        {"q": ["", LINES[0], ""], "n_best": 2},
        {"q": LINES[:2], "model": "other", "n_best": 2},
    ],
)
def test_answers_are_the_translators(server: RunningServer, question: dict[str, Any]) -> None:
    answer = server.post("/v1/translate", question)
    assert answer.status == 200
    assert answer.json["model"] == question.get("model", "en-de")
    assert_same(server, question, answer.json)


def test_requests_mixed_in_batches_are_answered_as_if_alone(server: RunningServer) -> None:
    rng = Random(1)
    questions: list[dict[str, Any]] = []
    for _ in range(counted(60, 200)):
        question: dict[str, Any] = {"q": rng.sample(LINES[:25], rng.randint(1, 3))}
        question |= rng.choice([{}, {}, {"n_best": 2}, {"model": "other"}])
        questions.append(question)
    with ThreadPoolExecutor(20) as clients:
        answers = clients.map(lambda question: server.post("/v1/translate", question), questions)
        for question, answer in zip(questions, answers, strict=True):
            assert_same(server, question, answer.json)


def test_a_text_is_split_into_sentences(server: RunningServer) -> None:
    text = "A red dog.  Two cats!\r\n\nThe house is old."
    translator = server.models.first.loaded.translator
    whole, sentences = [translator.translate([text[:21]]), translator.translate_text(text)]
    texts = [candidates[0].text for candidates in sentences.candidates]
    (row,) = server.post("/v1/translate", {"q": [text]}).json["translations"]
    assert row["text"] == "{}  {}\r\n\n{}".format(*texts)
    for one, expected in zip(row["sentences"], texts, strict=True):
        assert text[one["start"] :].startswith(one["source"])
        assert one["candidates"][0]["text"] == expected
    answer = server.post("/v1/translate", {"q": [text[:21]], "split": False}).json
    assert [answer["translations"][0]["text"]] == [one.text for one in whole]


def test_a_long_text_is_answered_in_groups_that_leave_room_for_others(
    server: RunningServer,
) -> None:
    texts = [f"{line}." for line in LINES]
    answer = server.post("/v1/translate", {"q": ["\n".join(texts)]}).json
    lines = answer["translations"][0]["text"].split("\n")
    assert lines == [one.text for one in server.models.first.loaded.translator.translate(texts)]


@pytest.mark.parametrize(
    "question, status, words",
    [
        ([], 400, "valid dictionary"),
        ({}, 400, "'q': field required"),
        ({"q": "text"}, 400, r"'q': .* valid list .*'text'"),
        ({"q": [1]}, 400, r"'q\.0': .* valid string .*1"),
        ({"q": ["a"], "beams": 3}, 400, "'beams': .* not permitted"),
        ({"q": ["a"], "n_best": 13}, 400, "'n_best': .* less than or equal to 12"),
        ({"q": ["a"], "n_best": 3}, 400, "n_best is 3, but this model's search finds 2"),
        ({"q": ["a"], "model": "xx"}, 400, "model: there is no 'xx'; known: en-de, other"),
        ({"q": ["a"], "b\n": 1}, 400, r"'b\\n': "),
        ({"q": ["a"], "split": "yes"}, 400, "'split': .* valid boolean"),
        ({"q": ["\ud800"]}, 400, "'q.0': .* valid unicode|half a character"),
        ({"q": [""] * 10_001}, 413, "q has 10,001 texts, more than 10,000"),
        ({"q": ["a", "b" * 100_000]}, 413, "q has 100,001 characters, more than 100,000"),
        ({"q": ["a" * 1_300_000]}, 413, "the body has more than 1,265,536 bytes"),
    ],
)
def test_bad_questions(server: RunningServer, question: object, status: int, words: str) -> None:
    answer = server.post("/v1/translate", question)
    assert answer.status == status
    assert list(answer.json) == ["error"]
    assert re.search(words, answer.json["error"]), answer.json


def test_page_and_lists(server: RunningServer) -> None:
    page = server.ask("GET", "/")
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert server.ask("GET", "/page/../app.py").status == 404
    assert server.ask("GET", "/health").json == {"status": "ok"}
    names = [row["name"] for row in server.ask("GET", "/v1/models").json["models"]]
    assert names == ["en-de", "other"]


def test_unknown_paths_and_methods(server: RunningServer) -> None:
    answer = server.ask("GET", "/nothing")
    assert (answer.status, answer.json) == (404, {"error": "Not Found"})
    answer = server.ask("GET", "/translate")
    assert (answer.status, answer.json) == (405, {"error": "Method Not Allowed"})
    answer = server.ask("POST", "/v1/translate", b"<q/>", {"Content-Type": "text/xml"})
    assert (answer.status, list(answer.json)) == (400, ["error"])
