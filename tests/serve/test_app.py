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

from nmt.serve.models import SearchChoice, ServedModels
from nmt.translate.translator import Candidates, Request

NEAR = 1e-5  # as in test_invariance.py
ALONE: dict[str, Candidates] = {}  # what was found


def find_alone(server: RunningServer, question: dict[str, Any]) -> list[list[tuple[str, float]]]:
    """What the translator says to each line alone."""
    model = server.models.by_name[question.get("model", "en-de")]
    translator = model.find_translator(SearchChoice(question.get("preset"), question.get("beam")))
    found = []
    for i, line in enumerate(question["q"]):
        prefix = question.get("prefix") and [question["prefix"][i]]
        request = Request(question.get("n_best", 1))
        key = json.dumps([line, prefix, {**question, "q": None, "prefix": None}])
        if key not in ALONE:
            ALONE[key] = translator.find_candidates([line], request, prefix)[0]
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
        {"q": LINES[:2], "model": "other", "beam": 3, "n_best": 3},
        {"q": LINES[:2], "preset": "marian"},
        {"q": LINES[:2], "prefix": ["rot", ""]},
    ],
)
def test_answers_are_the_translators(server: RunningServer, question: dict[str, Any]) -> None:
    answer = server.post("/v1/translate", question)
    assert answer.status == 200
    assert answer.json["model"] == question.get("model", "en-de")
    assert_same(server, question, answer.json)


def count_batches(server: RunningServer) -> list[float]:
    """How many lines were translated so far, and in how many batches."""
    figures = server.ask("GET", "/metrics").text
    return [float(n) for n in re.findall(r"^nmt_batch_lines_(?:sum|count) (.*)$", figures, re.M)][
        ::-1
    ]


def test_requests_mixed_in_batches_are_answered_as_if_alone(server: RunningServer) -> None:
    rng = Random(1)
    questions: list[dict[str, Any]] = []
    for _ in range(counted(60, 200)):
        question: dict[str, Any] = {"q": rng.sample(LINES[:25], rng.randint(1, 3))}
        question |= rng.choice([{}, {}, {"n_best": 2}, {"beam": 1}, {"model": "other"}])
        questions.append(question)
    lines_before, batches_before = count_batches(server)
    with ThreadPoolExecutor(20) as clients:
        answers = clients.map(lambda question: server.post("/v1/translate", question), questions)
        for question, answer in zip(questions, answers, strict=True):
            assert_same(server, question, answer.json)
    lines_now, batches_now = count_batches(server)
    # so lines of several requests met
    assert lines_now - lines_before > 1.5 * (batches_now - batches_before)


def test_a_stream_answers_every_line(server: RunningServer) -> None:
    question = {"q": [*LINES[:25] * 4, ""], "n_best": 2}
    answer = server.post("/v1/stream", question)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    rows = [json.loads(row) for row in answer.text.splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(101))
    rows.sort(key=lambda row: row["index"])
    assert_same(server, question, {"translations": rows})


def test_pieces_alignments_and_attention(server: RunningServer) -> None:
    question = {"q": LINES[:2], "pieces": True, "alignments": True, "attention": True}
    answer = server.post("/v1/translate", question).json
    for row in answer["translations"]:
        (candidate,) = row["sentences"][0]["candidates"]
        pieces = [one["piece"] for one in candidate["pieces"]]
        assert pieces[-1] == "</s>"
        assert "".join(pieces[:-1]).replace("▁", " ").strip() == candidate["text"]
        penalty = ((5 + len(pieces)) / 6) ** 0.6
        total = sum(one["log_prob"] for one in candidate["pieces"])
        assert total / penalty == pytest.approx(candidate["score"], abs=1e-4)
        assert [target for _, target in candidate["alignment"]] == list(range(len(pieces) - 1))
        assert candidate["attention"]["target"] == pieces
        assert set(candidate["attention"]["attention"]) == {"memory", "encoder", "decoder"}


def test_scores_can_be_left_out(server: RunningServer) -> None:
    answer = server.post("/v1/translate", {"q": LINES[:1], "scores": False}).json
    assert list(answer["translations"][0]["sentences"][0]["candidates"][0]) == ["text"]


def test_a_text_is_split_into_sentences(server: RunningServer) -> None:
    text = "A red dog.  Two cats!\r\n\nThe house is old."
    translator = server.models.first.loaded.translator
    whole, sentences = [translator.translate([text[:21]]), translator.translate_text(text)]
    texts = [candidates[0].text for candidates in sentences.candidates]
    for route in ("/v1/translate", "/v1/stream"):
        question = {"q": [text], "prefix": [texts[0]]}
        answer = server.post(route, question).json
        row = answer["translations"][0] if "translations" in answer else answer
        assert row["text"] == "{}  {}\r\n\n{}".format(*texts)
        for one, expected in zip(row["sentences"], texts, strict=True):
            assert text[one["start"] :].startswith(one["source"])
            assert one["candidates"][0]["text"] == expected
    answer = server.post("/v1/translate", {"q": [text[:21]], "split": False}).json
    assert [answer["translations"][0]["text"]] == [one.text for one in whole]


def test_metrics_name_the_routes(server: RunningServer) -> None:
    server.post("/v1/translate", {"q": ["A dog."]})
    server.ask("GET", "/nothing")
    figures = server.ask("GET", "/metrics").text
    for route in ("/v1/translate", "other"):
        assert f'nmt_requests_total{{route="{route}"' in figures


def test_a_glossary_holds_for_its_request(server: RunningServer) -> None:
    texts = ["The dog likes the house.", "A cat."]
    question = {"q": texts, "glossary": {"dog": "hund hund"}}
    first, second = server.post("/v1/translate", question).json["translations"]
    plain = server.post("/v1/translate", {"q": texts}).json["translations"]
    assert "hund hund" in first["text"] and "hund hund" not in plain[0]["text"]
    assert second == plain[1]
    answer = server.post("/v1/stream", {**question, "q": texts[:1]}).json
    assert answer["text"] == first["text"]


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
        ([], 400, "not a JSON object"),
        ({}, 400, "q: is missing"),
        ({"q": "text"}, 400, "q: 'text' is not a list"),
        ({"q": [1]}, 400, r"q\[0\]: 1 is not a string"),
        ({"q": ["a"], "beams": 3}, 400, "beams: unknown key; did you mean beam?"),
        ({"q": ["a"], "beam": 13}, 400, "beam is 13; it must be from 1 to 12"),
        ({"q": ["a"], "n_best": 3}, 400, "n_best is 3, but beam is 2"),
        ({"q": ["a"], "preset": "moses"}, 400, "preset: 'moses' is not one of"),
        ({"q": ["a"], "model": "xx"}, 400, "model: there is no 'xx'; known: en-de, other"),
        ({"q": ["a"], "b\n": 1}, 400, r"b\\n: unknown key"),
        ({"q": ["a"], "\ud800": 1}, 400, "a key: .* has half a character"),
        ({"q": ["a"], "scores": "yes"}, 400, "scores: 'yes' is not true or false"),
        ({"q": ["a"], "prefix": []}, 400, "prefix has 0 lines, and q has 1"),
        ({"q": ["a"], "glossary": ["b"]}, 400, r"glossary: \['b'\] is not an object"),
        ({"q": ["a"], "glossary": {"b": " "}}, 400, "glossary: has an empty phrase"),
        ({"q": ["a"], "glossary": {"b": 1}}, 400, "glossary: 1 is not a string"),
        ({"q": ["a"], "glossary": {str(n): "c" for n in range(101)}}, 400, "more than 100 phrases"),
        ({"q": ["a"], "glossary": {"b": "c"}, "beam": 1}, 400, "glossary needs several"),
        ({"q": ["a"], "apiKey": "k"}, 400, "apiKey: unknown key; did you mean api_key?"),
        ({"q": ["a"], "prefix": ["a\nb"]}, 400, "prefix: line 1 has a line end"),
        ({"q": ["\ud800"]}, 400, "q: line 1 has half a character"),
        ({"q": [""] * 10_001}, 413, "q has 10,001 texts, more than 10,000"),
        ({"q": ["a", "b" * 100_000]}, 413, "q has 100,001 characters, more than 100,000"),
        ({"q": ["a"] * 9, "attention": True}, 400, "attention is for at most 8"),
        ({"q": ["A dog. " * 9], "attention": True}, 400, "attention is for at most 8"),
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
    again = server.ask("GET", "/", headers={"If-None-Match": page.headers["etag"]})
    assert (again.status, again.text) == (304, "")
    assert server.ask("GET", "/page/../app.py").status == 404
    assert server.ask("GET", "/health").json == {"status": "ok"}
    names = [row["name"] for row in server.ask("GET", "/v1/models").json["models"]]
    assert names == ["en-de", "other"]


def test_unknown_paths_and_methods(server: RunningServer) -> None:
    answer = server.ask("GET", "/nothing")
    assert (answer.status, answer.json) == (404, {"error": "Not Found"})
    answer = server.ask("GET", "/translate")
    assert (answer.status, answer.json) == (405, {"error": "Method Not Allowed"})
    assert server.ask("GET", "/health", headers={"Host": "evil.example"}).status == 421
    answer = server.post("/translate", {}, {"Sec-Fetch-Site": "cross-site"})
    assert answer.status == 403
    answer = server.ask("POST", "/v1/translate", b"<q/>", {"Content-Type": "text/xml"})
    assert answer.status == 415


def test_pages_of_allowed_origins_may_use_it(models: ServedModels) -> None:
    question = {"q": "red dog", "source": "en", "target": "de"}
    site, other = "https://a.example", "https://b.example"
    allowed = "access-control-allow-origin"
    with run_in_thread(models, origins=frozenset({site})) as server:
        asked = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type",
        }
        before = server.ask("OPTIONS", "/translate", headers={"Origin": site, **asked})
        assert (before.status, before.headers[allowed]) == (200, site)
        assert (
            allowed
            not in server.ask("OPTIONS", "/translate", headers={"Origin": other, **asked}).headers
        )
        sent = {"Sec-Fetch-Site": "cross-site"}
        answer = server.post("/translate", question, {"Origin": site, **sent})
        assert (answer.status, answer.headers[allowed]) == (200, site)
        refused = server.post("/translate", {}, {"Origin": site, **sent})
        assert (refused.status, refused.headers[allowed]) == (400, site)  # a page reads why
        assert server.post("/translate", question, {"Origin": other, **sent}).status == 403
        assert server.post("/translate", question, sent).status == 403
