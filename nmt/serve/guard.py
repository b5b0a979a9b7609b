"""What every request passes before its route, and every answer after it.

Names in the Host header that are not this server's are refused, so that no web page can reach it
through a name of its own that resolves to 127.0.0.1. Bodies are bounded in size and time, and so is
the number of requests that wait. Answers tell browsers to load nothing else and to guess no types.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from nmt.serve.limits import ServeLimits
from nmt.serve.metrics import ServerMetrics
from nmt.serve.pages import CONTENT_POLICY
from nmt.system.progress import clock

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
ANY = "*"  # host, or origin
MOST_IGNORED = 64 << 20  # bytes of a body that is too long
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
RETRY_AFTER = {"Retry-After": "1"}
HEADERS = [
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


@dataclass(frozen=True)
class Callers:
    """The names by which the server may be called, and the other sites whose pages may call it."""

    hosts: frozenset[str]
    origins: frozenset[str] = frozenset()


@dataclass
class Guard:
    """An ASGI application that wraps another one."""

    app: App
    limits: ServeLimits
    callers: Callers
    metrics: ServerMetrics
    paths: frozenset[str] = frozenset()  # that the metrics name
    n_unanswered: int = 0
    is_stopping: Callable[[], bool] = lambda: False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the server's own start and end
            await self.app(scope, receive, send)
            return
        started_at = clock()
        # If what follows these headers is not HTTP, uvicorn has already sent an error and is about to
        # close the connection. Answering before it has closed would fail; afterwards, answers are dropped.
        await asyncio.sleep(0)
        app = self.refuse_request(scope, receive) or self.app
        if scope["method"] == "HEAD":  # uvicorn sends the head alone
            scope = {**scope, "method": "GET"}
        status = 0  # not answered
        self.n_unanswered += 1

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self.n_unanswered -= 1
                message["headers"] = [*message["headers"], *HEADERS]
                if self.is_stopping():
                    # Otherwise the client would send its next request into a connection that is closing.
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            await app(scope, self.limit_body(receive), send_guarded)
        finally:
            if status == 0:
                self.n_unanswered -= 1
            route = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.observe_request(route, status or 500, clock() - started_at)

    def refuse_request(self, scope: Message, receive: Receive) -> App | None:
        """Return the refusal of a request that is not meant for this server, or is too much for it."""
        headers = dict(scope["headers"])
        host = strip_port(headers.get(b"host", b"").decode("latin-1"))
        if self.callers.hosts.isdisjoint((ANY, host)):
            return refuse(
                421, f"{host[:99]!r} is not a name of this server; see nmt-serve --allow-host"
            )
        # Browsers mark what a page of another site sends. Without this check, any page that a user
        # visits could use every server that the user's browser reaches.
        is_cross_site = headers.get(b"sec-fetch-site") == b"cross-site"
        origin = headers.get(b"origin", b"").decode("latin-1")
        is_allowed = not self.callers.origins.isdisjoint((ANY, origin))
        if scope["method"] == "POST" and is_cross_site and not is_allowed:
            return refuse(
                403, "pages of other sites may not use this server; see nmt-serve --allow-origin"
            )
        if self.n_unanswered >= self.limits.max_connections:
            return refuse(503, "the server answers too many requests at the moment; try again")
        if int(headers.get(b"content-length", 0)) > self.limits.max_body:
            return self.refuse_body(receive)
        return None

    def refuse_body(self, receive: Receive) -> App:
        """Answer at once, and close the connection only when the body has arrived: most clients
        read nothing before they have sent everything.
        """

        async def answer(scope: Message, _: Receive, send: Send) -> None:
            async def send_slowly(message: Message) -> None:
                if message["type"] == "http.response.body":
                    await send({**message, "more_body": True})
                    await self.ignore_body(receive)
                    message = {"type": "http.response.body"}
                await send(message)

            await refuse(413, self.say_too_long())(scope, receive, send_slowly)

        return answer

    async def ignore_body(self, receive: Receive) -> None:
        n_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.timeout_s):
                while n_bytes < MOST_IGNORED:
                    message = await receive()
                    if not message.get("more_body"):
                        return
                    n_bytes += len(message["body"])

    def say_too_long(self) -> str:
        return f"the body has more than {self.limits.max_body:,} bytes"

    def limit_body(self, receive: Receive) -> Receive:
        """Refuse a body that is too long or too slow."""
        deadline = asyncio.get_running_loop().time() + self.limits.timeout_s
        n_bytes = 0
        is_whole = False

        async def receive_limited() -> Message:
            nonlocal n_bytes, is_whole
            if is_whole:  # what comes now is the end of the connection
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                # Otherwise the rest of the body would keep the connection open.
                closing = {"Connection": "close"}
                raise HTTPException(408, "the request took too long", closing) from None
            if message["type"] == "http.disconnect":
                raise HTTPException(499, "the client left in the middle of its request")
            n_bytes += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if n_bytes > self.limits.max_body:
                if not is_whole:
                    await self.ignore_body(receive)
                raise HTTPException(413, self.say_too_long())
            return message

        return receive_limited


def strip_port(host: str) -> str:
    """Return the name in a Host header, in lower case and without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def refuse(status: int, message: str) -> App:
    return JSONResponse({"error": message}, status, RETRY_AFTER if status == 503 else None)
