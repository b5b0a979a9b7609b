"""The queue: its bound, deadlines, and lines whose neighbours fail."""

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pytest import MonkeyPatch, fixture
from support.capture import Capture, read_stderr
from support.running_server import (  # noqa: F401
    DEFAULTS,
    RunningServer,
    run_in_thread,
    share_models,
)
from support.waiting import until

from nmt.extras.serve import batcher
from nmt.extras.serve.app import ServeLimits
from nmt.extras.serve.batcher import LineOptions
from nmt.extras.serve.models import ServedModel
from nmt.translate.translator import Candidates, Translation

LIMITS = ServeLimits(max_waiting=4, timeout_s=1)


class Gate:
    """Translates each line to itself, while it is open."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.batches: list[list[str]] = []

    def translate(self, options: LineOptions, texts: Sequence[str]) -> list[Candidates]:
        self.batches.append(list(texts))
        assert self.is_open.wait(60)
        if "bug" in texts:
            raise ZeroDivisionError
        return [[Translation(text=text, score=-1.0)] for text in texts]


@fixture(name="gate")
def make_gate(monkeypatch: MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(batcher, "search_lines", gate.translate)
    monkeypatch.setattr("nmt.extras.serve.server.count_search_threads", lambda models: 1)
    yield gate
    gate.is_open.set()


def ask(*texts: str, **more: object) -> dict[str, object]:
    return {"q": texts, "source": "en", "target": "de", **more}


def send(server: RunningServer, question: object) -> socket.socket:
    """Send a question and do not wait for its answer."""
    body = json.dumps(question).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = "POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def wait_in_queue(server: RunningServer, n_lines: int) -> None:
    until(lambda: server.server.batcher.n_waiting == n_lines)


@contextmanager
def hold_server(
    models: list[ServedModel], gate: Gate, limits: ServeLimits = DEFAULTS
) -> Iterator[tuple[RunningServer, socket.socket]]:
    """A server that is busy with the line "a" until the gate is open, and the connection that asked."""
    with run_in_thread(models, limits) as server, send(server, ask("a")) as first:
        until(lambda: gate.batches == [["a"]])
        yield server, first


def test_a_full_queue_says_try_again_and_a_late_answer_is_a_504(
    models: list[ServedModel], gate: Gate
) -> None:
    with hold_server(models, gate, LIMITS) as (server, first):
        waiting = send(server, ask("b", "c", "d", "e"))
        wait_in_queue(server, 4)
        refused = server.post("/translate", ask("f"))
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        for connection in (first, waiting):
            assert connection.recv(4096).startswith(b"HTTP/1.1 504")
        wait_in_queue(server, 0)  # nobody waits for them any more


def test_an_idle_server_answers_what_is_longer_than_its_queue(
    models: list[ServedModel], gate: Gate
) -> None:
    gate.is_open.set()
    with run_in_thread(models, ServeLimits(max_waiting=4)) as server:
        answer = server.post("/translate", ask(*"abcdefghi"))
    assert answer.json == {"translatedText": [*"abcdefghi"]}


def test_a_bug_in_one_line_does_not_affect_its_neighbours(
    models: list[ServedModel], gate: Gate, capfd: Capture
) -> None:
    with hold_server(models, gate) as (server, first):
        others = [send(server, ask(text)) for text in ("b", "bug", "c")]
        wait_in_queue(server, 3)
        gate.is_open.set()
        found = [one.recv(4096) for one in (first, *others)]
        assert [answer.split()[1] for answer in found] == [b"200", b"200", b"500", b"200"]
        assert b"ZeroDivisionError" not in b"".join(found)
        assert "ZeroDivisionError" in read_stderr(capfd)  # for the operator
        assert server.ask("GET", "/health").status == 200


def test_only_lines_with_equal_options_share_a_batch(models: list[ServedModel], gate: Gate) -> None:
    questions = [
        ask("b"),
        ask("c", alternatives=1),
        ask("d"),
        ask("e", target="fr"),
        ask("f", alternatives=1),
    ]
    with hold_server(models, gate) as (server, first):
        connections = []
        for n_waiting, question in enumerate(questions, 1):
            connections.append(send(server, question))
            wait_in_queue(server, n_waiting)
        gate.is_open.set()
        for connection in (first, *connections):
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert gate.batches[1:] == [["b", "d"], ["c", "f"], ["e"]]


def test_a_batch_has_a_bounded_size(models: list[ServedModel], gate: Gate) -> None:
    budget = batcher.find_budget(LineOptions(models[0], 1))
    with hold_server(models, gate) as (server, _):
        waiting = [send(server, ask(*["x" * 1_000] * 10)) for _ in range(4)]
        wait_in_queue(server, 40)
        gate.is_open.set()
        for one in waiting:
            assert one.recv(100).startswith(b"HTTP/1.1 200")
    sizes = [len(batch) * 1_000 for batch in gate.batches[1:]]
    assert sum(sizes) == 40_000 and max(sizes) <= budget
