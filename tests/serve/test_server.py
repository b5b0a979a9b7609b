"""Connections and the end of a server, over real sockets."""

import socket

from pytest import mark, raises
from support.capture import Capture, read_stderr
from support.running_server import (  # noqa: F401
    LINES,
    RunningServer,
    run_in_thread,
    share_models,
    share_server,
)
from support.waiting import until
from test_batcher import Gate, ask, hold_server, make_gate, send, wait_in_queue  # noqa: F401

from nmt.extras.serve.models import ServedModel
from nmt.extras.serve.server import open_socket
from nmt.system.errors import UserError

HEAD = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connect(server: RunningServer, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(data)
    return connection


@mark.parametrize(
    "data, status",
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS\r\n\r\n", 400),
        (b"GET / FTP/1.1\r\n\r\n", 400),
        (b"GET /" + b"a" * 100_000, 400),
        (HEAD + b"Content-Length: -1\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n{}", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (HEAD + b"\r\n", 400),  # no body
    ],
)
def test_bad_http(server: RunningServer, data: bytes, status: int, capfd: Capture) -> None:
    answer = connect(server, data).recv(4096)
    assert int(answer.split()[1]) == status
    assert server.ask("GET", "/health").status == 200
    assert "Traceback" not in read_stderr(capfd)


def test_a_body_without_a_length_is_bounded_too(server: RunningServer) -> None:
    connection = connect(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(20):
        connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
    assert connection.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_client_that_leaves_while_it_sends_is_no_bug(
    models: list[ServedModel], capfd: Capture
) -> None:
    with run_in_thread(models) as server:
        with connect(server, HEAD + b"Content-Length: 99\r\n\r\n{"):
            until(lambda: server.server.server_state.tasks)
        until(lambda: not server.server.server_state.tasks)
    assert "Traceback" not in read_stderr(capfd)


@mark.parametrize("host", ["a" * 300, "a..b"])
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    with raises(UserError, match="give another --host"):
        open_socket(host, 0)


def test_an_address_in_use_is_a_mistake(server: RunningServer) -> None:
    with raises(UserError, match=f"127.0.0.1 port {server.port} cannot be used"):
        open_socket("127.0.0.1", server.port)


def test_what_was_asked_is_answered_before_the_end(models: list[ServedModel], gate: Gate) -> None:
    with hold_server(models, gate) as (server, first):
        begun = [send(server, ask(line)) for line in LINES[1:10]]
        wait_in_queue(server, 9)
        server.server.should_exit = True
        until(lambda: not server.server.servers[0].is_serving())
        with raises(OSError):
            connect(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        gate.is_open.set()
        for connection in (first, *begun):
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
