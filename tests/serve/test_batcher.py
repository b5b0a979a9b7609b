"""The queue: its bound, deadlines, clients that leave, and lines whose neighbours fail."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from support.running_server import (  # noqa: F401
    DEFAULTS,
    LINES,
    RunningServer,
    open_toy_models,
    run_in_thread,
    share_models,
)
from support.waiting import until

from nmt.serve import batcher
from nmt.serve.answers import LineOptions
from nmt.serve.batcher import (
    MOST_BESIDE_SHORT,
    MOST_LONG,
    SHORT_S,
    Asker,
    Batcher,
    QueueFull,
    WaitingLine,
)
from nmt.serve.limits import MAX_AT_ONCE, MOST_CHARACTERS_AT_ONCE, ServeLimits
from nmt.serve.messages import LineCandidate
from nmt.serve.models import ServedModels
from nmt.system.progress import clock

LIMITS = ServeLimits(max_waiting=4, timeout_s=0.5)


class Gate:
    """Translates each line to itself, while it is open."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.batches: list[list[str]] = []

    def translate(
        self, options: LineOptions, texts: Sequence[str], prefixes: Sequence[str]
    ) -> list[list[LineCandidate]]:
        self.batches.append(list(texts))
        assert self.is_open.wait(20)
        if "bug" in texts:
            raise ZeroDivisionError
        return [[LineCandidate(text=text, score=-1.0)] for text in texts]


@pytest.fixture(name="gate")
def make_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(batcher, "answer_lines_alike", gate.translate)
    yield gate
    gate.is_open.set()


def send(server: RunningServer, question: object) -> socket.socket:
    """Send a question and do not wait for its answer."""
    body = json.dumps(question).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    head = "POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def wait_in_queue(server: RunningServer, n_lines: int) -> None:
    until(lambda: server.server.batcher.n_waiting == n_lines)


@contextmanager
def hold_server(
    models: ServedModels, gate: Gate, limits: ServeLimits = DEFAULTS
) -> Iterator[tuple[RunningServer, socket.socket]]:
    """A server that is busy with the line "a" until the gate is open, and the connection that asked."""
    with run_in_thread(models, limits) as server, send(server, {"q": ["a"]}) as first:
        until(lambda: gate.batches == [["a"]])
        yield server, first


def test_a_full_queue_says_try_again_and_a_late_answer_is_a_504(
    models: ServedModels, gate: Gate
) -> None:
    limits = replace(LIMITS, timeout_s=3.0)  # in which the queue must fill, on a busy machine too
    with hold_server(models, gate, limits) as (server, first):
        second = send(server, {"q": ["b"] * 4})
        wait_in_queue(server, 4)
        answer = server.post("/v1/translate", {"q": ["c"]})
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert server.post("/v1/stream", {"q": ["c"]}).status == 503
        for late in (first, second):
            assert late.recv(100).startswith(b"HTTP/1.1 504")
        wait_in_queue(server, 0)
        gate.is_open.set()
        assert server.post("/v1/translate", {"q": ["d"]}).status == 200
        assert "b" not in sum(gate.batches, [])  # their client was told that it is too late


def test_a_stream_waits_for_room_and_not_for_ever(models: ServedModels, gate: Gate) -> None:
    with run_in_thread(models, LIMITS) as server:
        answer = server.post("/v1/stream", {"q": ["a", "b"] * 4})
        assert answer.text.splitlines()[-1] == '{"error":"there was no answer within 0.5 s"}'
        gate.is_open.set()
        answer = server.post("/v1/stream", {"q": ["a", "b", ""] * 10})
        assert sorted(json.loads(row)["index"] for row in answer.text.splitlines()) == [*range(30)]


def test_a_stream_of_long_texts_leaves_room_for_others(models: ServedModels, gate: Gate) -> None:
    with run_in_thread(models) as server, ThreadPoolExecutor() as clients:
        question = {"q": ["A red dog. " * 40] * 64}
        answer = clients.submit(server.post, "/v1/stream", question)
        until(lambda: len(gate.batches) > 0)
        time.sleep(0.2)  # in which it puts into the queue what it may
        n_taken = sum(map(len, gate.batches))
        assert MAX_AT_ONCE < n_taken + server.server.batcher.n_waiting <= 2 * MAX_AT_ONCE
        gate.is_open.set()
        assert len(answer.result().text.splitlines()) == 64


def test_long_sentences_wait_in_small_groups(models: ServedModels, gate: Gate) -> None:
    with hold_server(models, gate) as (server, _):
        waiting = send(server, {"q": ["x" * 4_000] * 20})
        until(lambda: server.server.batcher.n_waiting > 0)
        time.sleep(0.2)
        n_taken = sum(len(line) for batch in gate.batches[1:] for line in batch)
        assert n_taken + 1_000 * server.server.batcher.n_waiting <= MOST_CHARACTERS_AT_ONCE + 2_000
        gate.is_open.set()
        assert waiting.recv(100).startswith(b"HTTP/1.1 200")


def test_lines_of_a_client_that_left_are_dropped(models: ServedModels, gate: Gate) -> None:
    with hold_server(models, gate) as (server, _):
        leaving = send(server, {"q": ["b", "c"]})
        staying = send(server, {"q": ["d"]})
        wait_in_queue(server, 3)
        leaving.close()
        wait_in_queue(server, 1)
        gate.is_open.set()
        assert staying.recv(100).startswith(b"HTTP/1.1 200")
    assert gate.batches == [["a"], ["d"]]


def test_a_bug_in_one_line_does_not_affect_its_neighbours(
    models: ServedModels, gate: Gate, capfd: pytest.CaptureFixture[str]
) -> None:
    with hold_server(models, gate) as (server, first):
        others = [send(server, {"q": [text]}) for text in ("b", "bug", "c")]
        wait_in_queue(server, 3)
        gate.is_open.set()
        found = [one.recv(4096) for one in (first, *others)]
        assert [answer.split()[1] for answer in found] == [b"200", b"200", b"500", b"200"]
        assert b"ZeroDivisionError" not in b"".join(found)
        assert "ZeroDivisionError" in capfd.readouterr().err  # for the operator
        assert server.ask("GET", "/health").status == 200


def test_only_lines_with_equal_options_share_a_batch(models: ServedModels, gate: Gate) -> None:
    questions = [
        {"q": ["b"]},
        {"q": ["c"], "beam": 3},
        {"q": ["d"], "prefix": ["x"]},
        {"q": ["e"]},
        {"q": ["f"], "model": "other"},
        {"q": ["g"], "beam": 3},
    ]
    with hold_server(models, gate) as (server, first):
        connections = []
        for n_waiting, question in enumerate(questions, 1):
            connections.append(send(server, question))
            wait_in_queue(server, n_waiting)
        gate.is_open.set()
        for connection in (first, *connections):
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert gate.batches[1:] == [["b", "e"], ["c", "g"], ["d"], ["f"]]


def test_a_batch_has_a_bounded_size(models: ServedModels, gate: Gate) -> None:
    budget = batcher.find_budget(LineOptions(models.first))
    with hold_server(models, gate) as (server, _):
        waiting = [send(server, {"q": ["x" * 1_000] * 10}) for _ in range(4)]
        wait_in_queue(server, 40)
        gate.is_open.set()
        for one in waiting:
            assert one.recv(100).startswith(b"HTTP/1.1 200")
    sizes = [len(batch) * 1_000 for batch in gate.batches[1:]]
    assert sum(sizes) == 40_000 and max(sizes) <= budget


def fill_queue(models: ServedModels, n_threads: int = 2, max_waiting: int = 200) -> Batcher:
    """A queue whose threads have not started, full of the lines of one client's 20 requests."""
    queue = Batcher(max_waiting, n_threads, lambda _: None)
    for number in range(20):
        put_lines(queue, models, Asker("big"), max_waiting // 20, f"big {number}", is_long=True)
    return queue


def put_lines(
    queue: Batcher, models: ServedModels, asker: Asker, n: int, text: str, is_long: bool = False
) -> None:
    asker.is_long = is_long
    queue.put([WaitingLine(asker, LineOptions(models.first), text) for _ in range(n)])


def in_loop(test: Callable[[ServedModels], None]) -> Callable[[ServedModels], None]:
    async def run(models: ServedModels) -> None:
        test(models)

    return lambda models: asyncio.run(run(models))


@in_loop
def test_clients_take_turns_and_so_do_their_requests(models: ServedModels) -> None:
    queue = fill_queue(models, n_threads=8, max_waiting=400)
    first = queue._take_batch()
    assert len({line.text for line in first}) > 10
    # beside 20 requests of one client, one of another has its turn after each of their lines
    put_lines(queue, models, Asker("small"), 3, "small", is_long=True)
    put_lines(queue, models, Asker("big"), 1, "big and new", is_long=True)
    texts = [line.text for line in queue._take_batch()]
    assert texts.index("small") <= 1 and texts.count("small") >= 2
    later = [line.text for _ in range(2) for line in queue._take_batch()]
    place = [*texts, *later].index("big and new")
    assert place <= 20 + 3  # a line of each other request of its client, and those of the other


@in_loop
def test_a_thread_is_left_to_short_requests_while_they_come(models: ServedModels) -> None:
    queue = fill_queue(models)
    now = 100.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batcher, "clock", lambda: now)
        put_lines(queue, models, Asker("small"), 1, "short")
        first, second = queue._take_batch(), queue._take_batch()
        assert sorted(map(len, (first, second))) == [1, MOST_BESIDE_SHORT]
        assert queue._list_lines_to_take() == []  # one thread translates lines of long requests
        put_lines(queue, models, Asker("small"), 2, "short")
        assert [line.text for line in queue._take_batch()] == ["short", "short"]
        now += SHORT_S
        assert len(queue._take_batch()) == MOST_LONG


@in_loop
def test_while_short_requests_come_long_ones_pause_after_each_batch(models: ServedModels) -> None:
    queue = fill_queue(models)
    times = []

    def answer(lines: Sequence[WaitingLine]) -> list[Exception]:
        began_at = clock()
        time.sleep(0.02)
        if lines[0].asker.is_long:
            times.append((began_at, clock()))
        return [ZeroDivisionError()] * len(lines)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batcher, "answer_batch", answer)
        put_lines(queue, models, Asker("small"), 1, "short")
        queue.start()
        until(lambda: len(times) >= 4)
        queue.stop()
        until(lambda: not any(thread.is_alive() for thread in queue._threads))
    for (began_at, ended_at), (next_at, _) in pairwise(times[:4]):
        assert next_at - ended_at >= ended_at - began_at


@in_loop
def test_a_client_that_fills_the_queue_leaves_others_their_share(models: ServedModels) -> None:
    queue = fill_queue(models)
    assert queue.n_waiting == 200 and not queue.has_room("big")
    put_lines(queue, models, Asker("small"), 100, "small", is_long=True)
    for client in ("small", "big"):
        with pytest.raises(QueueFull):
            put_lines(queue, models, Asker(client), 1, client)
    lines = [line for _ in range(40) if queue.n_waiting for line in queue._take_batch()]
    assert len(lines) == 300 and queue.n_waiting == 0


def test_a_prefix_too_long_is_refused_by_itself(tmp_path: Path) -> None:
    overrides = ["decoding.long_lines=refuse", "decoding.max_source=30"]
    with run_in_thread(open_toy_models(tmp_path, overrides)) as server:
        question = {"q": ["red dog", "blue dog"], "prefix": ["", " ".join(LINES)[:900]]}
        answer = server.post("/v1/translate", question)
        assert (answer.status, "line 2" in answer.json["error"]) == (413, True)
        answer = server.post("/v1/stream", question)
        rows = {row["index"]: row for row in map(json.loads, answer.text.splitlines())}
        assert "line 2" in rows[1]["error"]
        expected = server.models.first.loaded.translator.translate(["red dog"])
        assert rows[0]["text"] == expected[0].text
