"""The running server: a socket, uvicorn, and a graceful end.

SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C stop it gracefully: no new connection is accepted, and pending requests are
answered, for at most ten seconds.
"""

import gc
import signal
import socket
from collections.abc import Sequence

import uvicorn

from nmt.extras.serve.app import ServeLimits, Service, make_app
from nmt.extras.serve.batcher import Batcher, count_search_threads
from nmt.extras.serve.models import ServedModel
from nmt.system.errors import UserError
from nmt.system.progress import say

DRAIN_S = 10
LONGEST_HEAD = 64 << 10  # bytes: clients of LibreTranslate put texts into the query
BACKLOG = 1_024
MOST_CONNECTIONS = 1_000  # beyond these, uvicorn answers 503


def open_socket(host: str, port: int) -> socket.socket:
    """Bind the address; port 0 is any that is free."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:  # a name may have parts that are too long, or empty
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{host} port {port} cannot be used ({reason}); give another --host or --port"
        ) from None
    # Connections inherit it. asyncio sets it only on its own sockets, and without it the second part
    # of each answer waits 40 ms for the client to acknowledge the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class TranslationServer(uvicorn.Server):
    """uvicorn, and the threads that translate for it."""

    def __init__(self, config: uvicorn.Config, batcher: Batcher) -> None:
        super().__init__(config)
        self.batcher = batcher

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests until the server is asked to stop."""
        self.batcher.start()
        try:
            super().run(sockets)
        finally:
            self.batcher.stop()


def make_server(
    models: Sequence[ServedModel], limits: ServeLimits, keys: frozenset[str]
) -> TranslationServer:
    batcher = Batcher(limits.max_waiting, count_search_threads(models))
    config = uvicorn.Config(
        make_app(Service(models, batcher, limits, keys)),
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,  # queries hold texts and keys
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=LONGEST_HEAD,
        timeout_graceful_shutdown=DRAIN_S,
    )
    return TranslationServer(config, batcher)


def run_server(
    server: TranslationServer, listener: socket.socket, directions: Sequence[str]
) -> None:
    """Answer requests until a signal ends it. SIGTERM is not a failure."""
    # uvicorn restores this and raises the signal again, once it has stopped
    signal.signal(signal.SIGTERM, lambda *_: None)
    # A closed terminal or a batch system ends it in the same way; nohup has SIGHUP ignored.
    for number in (signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, server.handle_exit)
    address = listener.getsockname()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    say(f"http://{host}:{address[1]}  {', '.join(directions)}")
    # A collection of everything that was imported would stop all threads for a third of a second.
    gc.freeze()
    server.run([listener])
