"""What every request passes before its route, and every answer after it.

Names in the Host header that are not this server's are refused, so that no web page can reach it
through a name of its own that resolves to 127.0.0.1. Answers tell browsers to load nothing else and
to guess no types.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from nmt.serve.metrics import ServerMetrics
from nmt.serve.pages import CONTENT_POLICY
from nmt.system.progress import clock

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
ANY_HOST = "*"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
HEADERS = [
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class Guard:
    """An application around another one."""

    def __init__(
        self, app: App, routes: frozenset[str], hosts: frozenset[str], metrics: ServerMetrics
    ) -> None:
        self.app, self.routes, self.hosts, self.metrics = app, routes, hosts, metrics

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the server's own start and end
            await self.app(scope, receive, send)
            return
        started_at = clock()
        status = 500

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        try:
            app = self.refuse_request(scope) or self.app
            await app(scope, receive, send_guarded)
        finally:
            route = scope["path"] if scope["path"] in self.routes else "other"
            self.metrics.observe_request(route, status, clock() - started_at)

    def refuse_request(self, scope: Message) -> App | None:
        """Return the refusal of a request that is not meant for this server."""
        headers = dict(scope["headers"])
        host = strip_port(headers.get(b"host", b"").decode("latin-1"))
        if ANY_HOST not in self.hosts and host not in self.hosts:
            return refuse(
                421, f"{host[:99]!r} is no name of this server; see nmt-serve --allow-host"
            )
        # A browser says so when a page of another site sends this, which it could without asking.
        if scope["method"] == "POST" and headers.get(b"sec-fetch-site") == b"cross-site":
            return refuse(403, "pages of other sites may not use this server")
        return None


def strip_port(host: str) -> str:
    """Return the name in a Host header, in lower case and without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def refuse(status: int, message: str) -> App:
    return JSONResponse({"error": message}, status)
