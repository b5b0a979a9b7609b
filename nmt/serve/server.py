"""The running server: a socket, uvicorn, and a graceful end.

SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C stop it gracefully: no new connection is accepted, and pending requests are
answered, for at most ten seconds.
"""

import asyncio
import errno
import gc
import signal
import socket
from collections.abc import Sequence
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware

from nmt.serve.app import Service, make_app
from nmt.serve.batcher import Batcher, count_search_threads
from nmt.serve.detection import LanguageDetector
from nmt.serve.guard import App, Callers, Guard
from nmt.serve.limits import ServeLimits
from nmt.serve.metrics import ServerMetrics
from nmt.serve.models import ServedModels
from nmt.system.errors import UserError
from nmt.system.progress import clock, say, say_once

DRAIN_S = 10
LAST_CALL_S = 0.5  # for requests that are on their way
LONGEST_HEAD = 64 << 10  # bytes: clients of LibreTranslate put texts into the query
BACKLOG = 1_024


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
    """uvicorn, and the threads that translate for it. It says once that no more files can be
    opened; asyncio reports each attempt to accept a connection, a thousand a second. When it stops,
    it still answers requests that arrive on idle connections.
    """

    # Whether it accepts no new connections. Only then does it close open ones, because clients would open
    # others in their place.
    is_closed = False

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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(say_trouble)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        self.is_closed = True
        ends_at = clock() + LAST_CALL_S
        while self.server_state.connections and clock() < ends_at:
            await asyncio.sleep(0.02)  # each answer closes its connection
        await super().shutdown(sockets)


def say_trouble(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        say_once(
            "warning: too many connections are open, so others wait; raise the limit of open files, "
            "for example with ulimit -n 65536"
        )
    else:
        loop.default_exception_handler(context)


def make_server(
    models: ServedModels, limits: ServeLimits, keys: frozenset[str], callers: Callers
) -> TranslationServer:
    metrics = ServerMetrics()
    batcher = Batcher(limits.max_waiting, count_search_threads(models), metrics.observe_batch)
    detector = LanguageDetector(models.list_sources())
    detector.load()
    service = Service(models, batcher, limits, keys, metrics, detector)
    app = make_app(service, callers)
    config = uvicorn.Config(
        share_with_origins(app, callers),
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,  # queries hold texts and keys
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        h11_max_incomplete_event_size=LONGEST_HEAD,
        timeout_graceful_shutdown=DRAIN_S,
    )
    server = TranslationServer(config, batcher)
    app.is_stopping = lambda: server.is_closed
    metrics.watch("nmt_waiting_lines", "Lines in the queue", lambda: batcher.n_waiting)
    metrics.watch(
        "nmt_connections", "Open connections", lambda: len(server.server_state.connections)
    )
    return server


def share_with_origins(app: Guard, callers: Callers) -> App:
    """Let browsers give the answers to pages of the allowed origins."""
    if not callers.origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=sorted(callers.origins),
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type"],
    )


def run_server(server: TranslationServer, listener: socket.socket, names: Sequence[str]) -> None:
    """Answer requests until a signal ends it. SIGTERM is not a failure."""
    # uvicorn restores this and raises the signal again, once it has stopped
    signal.signal(signal.SIGTERM, lambda *_: None)
    # A closed terminal or a batch system ends it in the same way; nohup has SIGHUP ignored.
    for number in (signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, server.handle_exit)
    address = listener.getsockname()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    say(f"http://{host}:{address[1]}  {', '.join(names)}")
    # A collection of everything that was imported would stop all threads for a third of a second.
    gc.freeze()
    server.run([listener])
