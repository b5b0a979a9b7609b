"""The server as an ASGI application: its routes, and what happens between a request and its answer.

A request is read within limits, becomes lines, waits for their translations until its deadline, and
gives way when its client leaves. Every error is one JSON object with one line; a bug is a 500
without a traceback, which only the operator sees.
"""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nmt.serve.answers import LineCandidate, LineOptions
from nmt.serve.batcher import Batcher, LineAnswer, QueueFull, WaitingLine
from nmt.serve.guard import App, Guard
from nmt.serve.libretranslate import (
    Values,
    count_candidates,
    format_detections,
    format_languages,
    format_settings,
    format_translation,
    read_texts,
    read_values,
)
from nmt.serve.limits import (
    MAX_STREAMED_LINES,
    ClientLeft,
    RequestRefused,
    ServeLimits,
    check_lines,
    read_body,
)
from nmt.serve.metrics import ServerMetrics
from nmt.serve.models import ServedModels
from nmt.serve.openapi import make_openapi
from nmt.serve.pages import PageFile, read_page_files
from nmt.serve.questions import Question, choose_options, parse_body, read_question
from nmt.system.errors import Failure, UserError
from nmt.translate.translator import LineTooLong, Translation

RETRY_AFTER = {"Retry-After": "1"}
STATUS_CLIENT_LEFT = 499  # never read, but the metrics count it
ROOM_PAUSE_S = 0.05  # until a stream looks for room in the queue again
EMPTY_LINE = [LineCandidate(Translation("", 0.0))]


@dataclass(frozen=True)
class Service:
    """What the routes answer from."""

    models: ServedModels
    batcher: Batcher
    limits: ServeLimits
    keys: frozenset[str]  # none: everybody may ask
    metrics: ServerMetrics
    pages: dict[str, PageFile]

    # LibreTranslate's routes

    async def translate(self, request: Request) -> Response:
        values = await read_values(request, await read_body(request, self.limits))
        self.check_key(request, values)
        question = read_texts(values, self.models)
        lines = question.lines
        check_lines(lines, self.limits, self.limits.max_lines)
        options = LineOptions(question.model, n_best=count_candidates(question))
        answers = await self.answer_lines(request, options, lines)
        return JSONResponse(format_translation(question, answers))

    async def detect(self, request: Request) -> Response:
        values = await read_values(request, await read_body(request, self.limits))
        self.check_key(request, values)
        return JSONResponse(format_detections(values, self.models))

    async def list_languages(self, request: Request) -> Response:
        return JSONResponse(format_languages(self.models))

    async def show_settings(self, request: Request) -> Response:
        return JSONResponse(format_settings(self.models, self.limits, bool(self.keys)))

    async def check_health(self, request: Request) -> Response:
        if not self.batcher.is_working:
            raise RequestRefused(503, "a thread that translates has ended; start the server again")
        return JSONResponse({"status": "ok"})

    # ours

    async def list_models(self, request: Request) -> Response:
        rows = []
        for model in self.models.by_name.values():
            translator = model.loaded.translator
            rows.append(
                {
                    "name": model.name,
                    "source": model.src,
                    "target": model.tgt,
                    "engine": translator.engine,
                    "beam": translator.config.beam,
                }
            )
        return JSONResponse({"models": rows})

    async def translate_lines(self, request: Request) -> Response:
        question, options = await self._read_question(request, self.limits.max_lines)
        answers = await self.answer_lines(request, options, question.q, question.prefix)
        rows = [{"candidates": format_candidates(one, question)} for one in answers]
        return JSONResponse({"model": options.model.name, "translations": rows})

    async def stream_lines(self, request: Request) -> Response:
        question, options = await self._read_question(request, MAX_STREAMED_LINES)
        if self.batcher.n_waiting >= self.batcher.max_waiting:
            raise QueueFull
        rows = self._generate_rows(question, options)
        return StreamingResponse(rows, media_type="application/x-ndjson")

    async def show_openapi(self, request: Request) -> Response:
        return JSONResponse(make_openapi(self.models, self.limits))

    async def show_metrics(self, request: Request) -> Response:
        self.check_key(request, {})
        return Response(self.metrics.format(), media_type="text/plain; version=0.0.4")

    async def show_page(self, request: Request) -> Response:
        page = self.pages.get(request.path_params.get("name", "index.html"))
        if page is None:
            raise HTTPException(404)
        headers = {"ETag": page.tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == page.tag:
            return Response(status_code=304, headers=headers)
        return Response(page.content, media_type=page.media_type, headers=headers)

    # what they share

    def check_key(self, request: Request, values: Values) -> None:
        """Refuse a request without one of the keys, if there are any."""
        if not self.keys:
            return
        given = values.get("api_key") or values.get("apiKey")  # as the npm client calls it
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = token.strip()
        if not isinstance(given, str) or not given:
            raise RequestRefused(403, "this server needs an API key; give it as api_key")
        digest = sha256(given.encode(errors="replace")).digest()
        is_known = [hmac.compare_digest(digest, sha256(key.encode()).digest()) for key in self.keys]
        if not any(is_known):
            raise RequestRefused(403, "this API key is not known")

    async def _read_question(
        self, request: Request, max_lines: int
    ) -> tuple[Question, LineOptions]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestRefused(415, "send the question as application/json")
        values = parse_body(await read_body(request, self.limits))
        self.check_key(request, values)
        question = read_question(values)
        check_lines(question.q, self.limits, max_lines)
        check_lines(question.prefix or (), self.limits, max_lines)
        return question, choose_options(question, self.models)

    async def answer_lines(
        self,
        request: Request,
        options: LineOptions,
        lines: Sequence[str],
        prefixes: Sequence[str] | None = None,
    ) -> list[list[LineCandidate]]:
        """Return the candidates of each line, or raise why one of them has none."""
        waiting = queue_lines(self.batcher, options, lines, prefixes)
        try:
            await self._wait(request, [line.answered for line in waiting if line])
        finally:
            self.batcher.drop([line for line in waiting if line])
        answers = []
        for number, line in enumerate(waiting, 1):
            answer = line.answered.result() if line else EMPTY_LINE
            answers.append(read_answer(answer, number))
        return answers

    async def _wait(self, request: Request, answers: list["asyncio.Future[LineAnswer]"]) -> None:
        """Wait for all answers, but no longer than the deadline or the client."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.limits.timeout_s
        leaving = asyncio.ensure_future(wait_for_departure(request))
        waiting: set[asyncio.Future[Any]] = set(answers)
        try:
            while waiting:
                done, _ = await asyncio.wait(
                    {*waiting, leaving},
                    timeout=deadline - clock(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                waiting -= done
                if leaving in done and waiting:
                    raise ClientLeft
                if not done:
                    raise RequestRefused(
                        504, f"there was no answer within {self.limits.timeout_s:g} s"
                    )
        finally:
            leaving.cancel()

    async def _generate_rows(self, question: Question, options: LineOptions) -> AsyncIterator[str]:
        """Yield an object for each line, as soon as it is translated. A few lines wait at a time."""
        left = list(range(len(question.q)))[::-1]
        waiting: dict[asyncio.Future[LineAnswer], tuple[int, WaitingLine]] = {}
        too_late = format_error(f"there was no answer within {self.limits.timeout_s:g} s")
        n_pauses = 0  # because others fill the queue
        try:
            while left or waiting:
                # keep some lines in the queue, as far as it has room
                while left and len(waiting) < self.limits.max_lines:
                    index = left[-1]
                    prefixes = question.prefix and [question.prefix[index]]
                    try:
                        (line,) = queue_lines(self.batcher, options, [question.q[index]], prefixes)
                    except QueueFull:
                        break
                    left.pop()
                    if line is None:
                        yield format_row(index, EMPTY_LINE, question)
                    else:
                        waiting[line.answered] = (index, line)
                if not waiting:
                    if n_pauses * ROOM_PAUSE_S > self.limits.timeout_s:
                        yield too_late
                        return
                    await asyncio.sleep(ROOM_PAUSE_S)
                    n_pauses += 1
                    continue
                n_pauses = 0

                # what has come
                done, _ = await asyncio.wait(
                    waiting, timeout=self.limits.timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    yield too_late
                    return
                for answered in done:
                    index, _ = waiting.pop(answered)
                    yield format_row(index, answered.result(), question)
        finally:
            self.batcher.drop([line for _, line in waiting.values()])


def queue_lines(
    batcher: Batcher,
    options: LineOptions,
    lines: Sequence[str],
    prefixes: Sequence[str] | None,
) -> list[WaitingLine | None]:
    """Queue all lines that have text."""
    waiting = []
    for text, prefix in zip(lines, prefixes or [""] * len(lines), strict=True):
        waiting.append(WaitingLine(options, text, prefix) if text else None)
    batcher.put([line for line in waiting if line])
    return waiting


def read_answer(answer: LineAnswer, number: int) -> list[LineCandidate]:
    """Return the candidates of line `number`, or raise the refusal that the client gets."""
    if isinstance(answer, list):
        return answer
    if isinstance(answer, LineTooLong):
        raise RequestRefused(413, f"q: line {number} or its prefix is too long for the model")
    if isinstance(answer, UserError):
        raise RequestRefused(400, f"q: line {number}: {answer}")
    if isinstance(answer, Failure):
        raise RequestRefused(503, str(answer))
    raise answer


def format_candidates(
    candidates: Sequence[LineCandidate], question: Question
) -> list[dict[str, Any]]:
    rows = [one.to_json(question.alignments) for one in candidates]
    if not question.scores:
        for row in rows:
            del row["score"]
    return rows


def format_row(index: int, answer: LineAnswer, question: Question) -> str:
    """A line of a stream: the candidates of a line, or why it has none."""
    try:
        candidates = read_answer(answer, index + 1)
    except RequestRefused as error:
        return format_error(str(error), index)
    except Exception:  # a bug in the search, logged by the batcher; the other lines go on
        return format_error("the server failed; its log says why", index)
    row = {"index": index, "candidates": format_candidates(candidates, question)}
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"


def format_error(message: str, index: int | None = None) -> str:
    row = {"error": message} if index is None else {"index": index, "error": message}
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"


async def wait_for_departure(request: Request) -> None:
    """Wait until the client closes its connection; its request was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ---- the application ------------------------------------------------------------------------------------------------


def list_routes(service: Service) -> list[Route]:
    routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("POST", "/translate", service.translate),
        ("POST", "/detect", service.detect),
        ("GET", "/languages", service.list_languages),
        ("GET", "/frontend/settings", service.show_settings),
        ("GET", "/health", service.check_health),
        ("GET", "/v1/models", service.list_models),
        ("POST", "/v1/translate", service.translate_lines),
        ("POST", "/v1/stream", service.stream_lines),
        ("GET", "/openapi.json", service.show_openapi),
        ("GET", "/metrics", service.show_metrics),
        ("GET", "/", service.show_page),
        ("GET", "/page/{name}", service.show_page),
    ]
    return [Route(path, endpoint, methods=[method]) for method, path, endpoint in routes]


def make_app(
    models: ServedModels,
    batcher: Batcher,
    limits: ServeLimits,
    keys: frozenset[str],
    hosts: frozenset[str],
    metrics: ServerMetrics,
) -> App:
    service = Service(models, batcher, limits, keys, metrics, read_page_files())
    routes = list_routes(service)
    handlers: dict[Any, Any] = {
        RequestRefused: answer_refusal,
        QueueFull: answer_queue_full,
        ClientLeft: answer_nobody,
        HTTPException: answer_http_error,
        Exception: answer_bug,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    return Guard(app, frozenset(route.path for route in routes), hosts, metrics)


def answer_refusal(request: Request, error: RequestRefused) -> Response:
    # The rest of a body that is too long is received and ignored, so that its sender reads this.
    headers = RETRY_AFTER if error.status == 503 else {}
    return JSONResponse({"error": str(error)}, error.status, headers)


def answer_queue_full(request: Request, error: QueueFull) -> Response:
    message = "the server has too much to translate at the moment; try again"
    return JSONResponse({"error": message}, 503, RETRY_AFTER)


def answer_nobody(request: Request, error: ClientLeft) -> Response:
    return Response(status_code=STATUS_CLIENT_LEFT)


def answer_http_error(request: Request, error: HTTPException) -> Response:
    """What Starlette refuses: an unknown path, a wrong method."""
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def answer_bug(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the server failed; its log says why"}, 500)
