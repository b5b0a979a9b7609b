"""What the server answers: what the translator says alone, and one line to what is wrong."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

from pytest import mark
from support.rings import amount
from support.running_server import (  # noqa: F401
    LINES,
    RunningServer,
    run_in_thread,
    share_models,
    share_server,
)

from nmt.system.strict_json import Fields

ALONE: dict[str, tuple[str, list[str]]] = {}  # what was found


def ask(q: str | list[str], target: str = "de", **more: Any) -> Fields:
    return {"q": q, "source": "en", "target": target, **more}


def find_alone(server: RunningServer, question: Fields) -> list[tuple[str, list[str]]]:
    """What the translator says to each line alone: the best, and the alternatives."""
    (model,) = (model for model in server.models if model.tgt == question["target"])
    found = []
    for line in question["q"]:
        key = json.dumps([line, {**question, "q": None}])
        if key not in ALONE:
            n_best = 1 + question.get("alternatives", 0)
            (candidates,) = model.translator.find_candidates([line], n_best)
            best, *others = dict.fromkeys(one.text for one in candidates)
            ALONE[key] = (best, others)
        found.append(ALONE[key])
    return found


def assert_same(server: RunningServer, question: Fields, answer: Any) -> None:
    expected = find_alone(server, question)
    assert answer["translatedText"] == [best for best, _ in expected]
    assert answer.get("alternatives", [[]] * len(expected)) == [others for _, others in expected]


@mark.parametrize(
    "question",
    [
        ask(LINES[:3]),
        ask(["", LINES[0], ""], alternatives=1),
        ask(LINES[:2], "fr", alternatives=1),
    ],
)
def test_answers_are_the_translators(server: RunningServer, question: Fields) -> None:
    answer = server.post("/translate", question)
    assert answer.status == 200
    assert_same(server, question, answer.json)


def test_languages_may_be_in_capitals_with_a_region_or_names(server: RunningServer) -> None:
    question = ask(LINES[:1], "fr")
    for words in ({"source": "EN"}, {"source": "English", "target": "FR-ca"}):
        assert_same(server, question, server.post("/translate", question | words).json)


def test_requests_mixed_in_batches_are_answered_as_if_alone(server: RunningServer) -> None:
    rng = Random(1)
    questions: list[Fields] = []
    for _ in range(amount(60, 200)):
        question = ask(rng.sample(LINES[:25], rng.randint(1, 3)))
        question |= rng.choice([{}, {}, {"alternatives": 1}, {"target": "fr"}])
        questions.append(question)
    with ThreadPoolExecutor(20) as clients:
        answers = clients.map(lambda question: server.post("/translate", question), questions)
        for question, answer in zip(questions, answers, strict=True):
            assert_same(server, question, answer.json)


def test_a_text_is_split_into_sentences(server: RunningServer) -> None:
    text = "A red dog.  Two cats!\r\n\nThe house is old."
    translated = server.models[0].translator.translate_text(text)
    texts = [candidates[0].text for candidates in translated.candidates]
    answer = server.post("/translate", ask(text)).json
    assert answer == {"translatedText": "{}  {}\r\n\n{}".format(*texts)}


def test_a_long_text_is_answered_in_groups_that_leave_room_for_others(
    server: RunningServer,
) -> None:
    texts = [f"{line}." for line in LINES]
    answer = server.post("/translate", ask("\n".join(texts))).json
    lines = answer["translatedText"].split("\n")
    assert lines == [one.text for one in server.models[0].translator.translate(texts)]


@mark.parametrize(
    "question, status, words",
    [
        ([], 400, "not a JSON object"),
        ({}, 400, "'q': field required; JSON needs the header Content-Type: application/json"),
        (ask([]), 400, r"'q': .*\[\]"),
        (ask([1]), 400, r"'q': .* valid string .*1"),  # type: ignore[list-item]
        (ask("a", "x" * 99), 400, "en to x{20} is not supported; there is en to de, en to fr"),
        (ask("\ud800"), 400, "valid unicode|half a character"),
        (ask(["a", "\ud800"]), 400, "valid unicode|valid string|half a character"),
        (ask([""] * 10_001), 413, "q has 10,001 texts, more than 10,000"),
        (ask(["a", "b" * 100_000]), 413, "q has 100,001 characters, more than 100,000"),
        (ask(["a" * 1_300_000]), 413, "the body has more than 1,265,536 bytes"),
    ],
)
def test_bad_questions(server: RunningServer, question: object, status: int, words: str) -> None:
    answer = server.post("/translate", question)
    assert answer.status == status
    assert list(answer.json) == ["error"]
    assert re.search(words, answer.json["error"]), answer.json


def test_page_and_health(server: RunningServer) -> None:
    page = server.ask("GET", "/")
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert server.ask("GET", "/page/../app.py").status == 404
    assert server.ask("GET", "/health").json == {"status": "ok"}


def test_unknown_paths_and_methods(server: RunningServer) -> None:
    answer = server.ask("GET", "/nothing")
    assert (answer.status, answer.json) == (404, {"error": "Not Found"})
    answer = server.ask("GET", "/translate")
    assert (answer.status, answer.json) == (405, {"error": "Method Not Allowed"})
    answer = server.ask("POST", "/translate", b"<q/>", {"Content-Type": "text/xml"})
    assert (answer.status, list(answer.json)) == (415, ["error"])
