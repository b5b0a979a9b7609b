"""Connections and the end of a server, over real sockets: what clients do wrong, and who waits for whom."""

import errno
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.running_server import LINES, RunningServer, run_in_thread, share_models  # noqa: F401
from support.waiting import until
from test_batcher import Gate, hold_server, make_gate, send, wait_in_queue  # noqa: F401

from nmt.serve.limits import ServeLimits
from nmt.serve.models import ServedModels
from nmt.serve.server import open_socket
from nmt.system.errors import UserError
from nmt.system.progress import say_once

IMPATIENT = ServeLimits(timeout_s=0.4, max_connections=4)
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = b"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module", name="server")
def start_server(models: ServedModels) -> Iterator[RunningServer]:
    with run_in_thread(models, IMPATIENT) as server:
        yield server


def connect(server: RunningServer, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(data)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    data = b""
    while more := connection.recv(4096):
        data += more
    return data


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"Content-Length: 100\r\n\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    ],
)
def test_a_body_that_never_ends_is_ended(server: RunningServer, data: bytes) -> None:
    started_at = time.monotonic()
    answer = read_all(connect(server, data))
    assert time.monotonic() - started_at < 5
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'{"error":"the request took too long"}' in answer


def test_a_body_that_drips_is_ended(server: RunningServer) -> None:
    connection = connect(server, HEAD + b"Content-Length: 1000\r\n\r\n")
    started_at = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - started_at < 20:
            connection.sendall(b" ")
            time.sleep(0.05)
    assert time.monotonic() - started_at < 5


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What uvicorn logs, which it keeps from the root logger."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_failure(
    server: RunningServer, log: pytest.LogCaptureFixture
) -> None:
    connect(server, HEAD + b"Content-Length: 100\r\n\r\n{").close()
    metrics = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    until(lambda: b'status="499"' in read_all(connect(server, metrics)))
    assert log.records == []


def test_a_body_that_is_no_http_is_no_failure_of_what_answers_without_it(
    server: RunningServer, log: pytest.LogCaptureFixture
) -> None:
    head = b"POST /none HTTP/1.1\r\nHost: evil.example\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert read_all(connect(server, head + b"zz\r\n")).startswith(b"HTTP/1.1 400")
    time.sleep(0.1)
    assert log.records == []


def stop_listening(server: RunningServer) -> None:
    stopped = server.server
    stopped.should_exit = True
    until(lambda: not stopped.servers[0].is_serving())


def test_a_stopping_server_says_that_no_more_requests_may_come(models: ServedModels) -> None:
    with run_in_thread(models) as server:
        connection = connect(server, HEAD + b"Content-Length: 2\r\n\r\n{")
        app: Any = server.server.config.app
        until(lambda: app.n_unanswered == 1)
        stop_listening(server)
        connection.sendall(b"}")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 4") and b"connection: close" in answer


def test_a_request_that_comes_on_an_idle_connection_at_the_end_is_answered(
    models: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmt.serve.server.LAST_CALL_S", 20)
    with run_in_thread(models) as server:
        connection = connect(server, HEALTH)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        stop_listening(server)
        connection.sendall(HEALTH)
        answer = read_all(connection)
    assert b"HTTP/1.1 200 OK" in answer and b"connection: close" in answer


@pytest.mark.parametrize(
    "data, status",
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS\r\n\r\n", 400),
        (b"GET / FTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.0\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /" + b"a" * 100_000, 400),
        (HEAD + b"Content-Length: -1\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: x\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: 1265537\r\n\r\n{}", 413),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n{}", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (HEAD + b"\r\n", 400),  # no body
    ],
)
def test_bad_http(
    server: RunningServer, data: bytes, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    connection = connect(server, data)
    answer = b""
    while b"}" not in answer:
        more = connection.recv(4096)
        answer += more
        if not more or b"Invalid HTTP" in answer:  # what is not HTTP is refused by uvicorn
            break
    assert int(answer.split()[1]) == status
    assert b'{"error":' in answer or answer.startswith(b"HTTP/1.1 400")
    assert server.ask("GET", "/health").status == 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["Content-Length: 10000000", "Transfer-Encoding: chunked"])
def test_a_client_that_sends_all_before_it_reads_learns_why(
    server: RunningServer, kind: str
) -> None:
    connection = connect(server, HEAD + f"Connection: close\r\n{kind}\r\n\r\n".encode())
    is_chunked = "chunked" in kind
    for _ in range(100):
        time.sleep(0.001)  # else all of it may have come before the answer
        connection.sendall((b"186a0\r\n" if is_chunked else b"") + b" " * 100_000)
        connection.sendall(b"\r\n" if is_chunked else b"")
    connection.sendall(b"0\r\n\r\n" if is_chunked else b"")
    assert b"the body has more than 1,265,536 bytes" in read_all(connection)


def test_connections_beyond_the_limit_of_files_take_one_line(
    server: RunningServer, capfd: pytest.CaptureFixture[str]
) -> None:
    say_once.cache_clear()
    loop = server.server.servers[0].get_loop()
    for _ in range(1_000):  # as asyncio does in a second
        error = OSError(errno.EMFILE, "Too many open files")
        context = {"message": "socket.accept() out of system resource", "exception": error}
        loop.call_soon_threadsafe(loop.call_exception_handler, context)
    assert server.ask("GET", "/health").status == 200
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("host", ["a" * 300, "a..b"])
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    with pytest.raises(UserError, match="give another --host"):
        open_socket(host, 0)


def test_a_body_too_long_is_ignored_to_its_end(server: RunningServer) -> None:
    connection = connect(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(40):
        connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
    connection.sendall(b"0\r\n\r\n")
    assert connection.recv(4096).startswith(b"HTTP/1.1 413")
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    data = b""
    while b'"ok"' not in data:
        more = connection.recv(4096)
        assert more
        data += more


def test_a_bounded_number_of_requests_waits(server: RunningServer) -> None:
    """Those without a whole request do not count, nor do clients that do not read."""
    one = b"GET /page/page.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    idle = [connect(server, data) for data in [b"", b"GET /hea", one * 1_000] * 5]
    until(lambda: server.ask("GET", "/health").status == 200)
    begun = [connect(server, HEAD + b"Content-Length: 9\r\n\r\n") for _ in range(4)]
    until(lambda: server.ask("GET", "/health").status == 503)
    answer = server.ask("GET", "/health")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    until(lambda: server.ask("GET", "/health").status == 200)  # the others took too long
    for connection in (*idle, *begun):
        connection.close()


def test_heads_alone_can_be_asked_for(server: RunningServer) -> None:
    answer = server.ask("HEAD", "/health")
    assert (answer.status, answer.text) == (200, "")


def test_pipelined_requests_are_all_answered(server: RunningServer) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection = connect(server, one * 5)
    data = b""
    while data.count(b'"ok"') < 5:
        data += connection.recv(4096)
    assert data.count(b"HTTP/1.1 200") == 5


def test_an_address_in_use_is_a_mistake(server: RunningServer) -> None:
    with pytest.raises(UserError, match=f"127.0.0.1 port {server.port} cannot be used"):
        open_socket("127.0.0.1", server.port)


def test_what_was_asked_is_answered_before_the_end(models: ServedModels, gate: Gate) -> None:
    with hold_server(models, gate) as (server, first):
        idle = connect(server)
        begun = [send(server, {"q": [line]}) for line in LINES[1:10]]
        wait_in_queue(server, 9)
        server.server.should_exit = True
        until(lambda: not server.server.servers[0].is_serving())
        with pytest.raises(OSError):
            connect(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        gate.is_open.set()
        for connection in (first, *begun):
            assert read_all(connection).startswith(b"HTTP/1.1 200")
        assert read_all(idle) == b""
