"""Connections that cannot be held open for nothing: a deadline for each request, and a limit to all.

uvicorn waits without end for the first request of a connection, for a body that drips, and for a
client that does not read; its limit of connections counts idle ones, so that they would lock others
out. Here a whole request must come within some seconds, and what is sent must be read within them.
At the limit, the connection that has been without a whole request longest gives way to a new one.
"""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from nmt.serve.limits import ServeLimits


class GuardedProtocol(H11Protocol):
    """An HTTP/1.1 connection with deadlines."""

    limits = ServeLimits()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._receive_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.limits.max_connections:
            self._make_room()
        self._watch_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._receive_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.receive_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    @property
    def is_without_request(self) -> bool:
        """Whether nothing is to be answered yet: no whole request has come since the last answer."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def _watch_request(self) -> None:
        """Start the time for a whole request, or stop it when one has come."""
        if not self.is_without_request:
            if self._receive_timer is not None:
                self._receive_timer.cancel()
                self._receive_timer = None
        elif self._receive_timer is None:
            self._receive_timer = self.loop.call_later(self.limits.receive_s, self._give_up)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self._refuse(408, "the request took too long")

    def _make_room(self) -> None:
        """Close the connection that has been without a whole request longest; else this one."""
        waiting = [one for one in self.connections if one is not self and one.is_without_request]
        if not waiting:
            self._refuse(503, "too many connections")
            return
        first = min(waiting, key=lambda one: one._receive_timer.when())
        first.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not HTTP/1.1")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, if no answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"error": message}).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            if status == 503:
                headers.append(("retry-after", "1"))
            head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            events = (head, h11.Data(data=body), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) for event in events))
        if self.cycle is not None:  # the application may be about to answer, too
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def make_protocol(limits_of_server: ServeLimits) -> type[GuardedProtocol]:
    """Return the class of connections of a server with these limits."""

    class LimitedProtocol(GuardedProtocol):
        limits = limits_of_server

    return LimitedProtocol
