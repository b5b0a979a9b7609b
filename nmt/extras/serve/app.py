"""The server as a FastAPI application: its routes, and what happens between a request and its answer.

Its interface is LibreTranslate's, so that its clients work. Every error is one JSON object with one line; a
bug is a 500 without a traceback, which only the operator sees. TLS, limits for each client and slow
connections are the business of a proxy in front of the server.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from importlib.resources import files
from itertools import islice
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

from fastapi import APIRouter, Depends, FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from nmt.extras.serve.batcher import Batcher, LineAnswer, LineOptions, QueueFull
from nmt.extras.serve.messages import (
    Health,
    Language,
    Refusal,
    TextsAnswer,
    TextsRequest,
    explain_invalid,
)
from nmt.extras.serve.models import ServedModel
from nmt.languages import find_code, name_language
from nmt.system.errors import Failure, UserError
from nmt.system.strict_json import Fields, parse_json
from nmt.translate.sentences import RunningText
from nmt.translate.translator import Candidates

JSON_TYPE = "application/json"
FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data")
MAX_FIELDS = 50  # of a form
MAX_TEXTS = 10_000  # of a request
MAX_AT_ONCE = 64  # sentences of one request in the queue, so that others are answered beside it
BYTES_PER_CHARACTER = 12  # in JSON, if all are escaped
RETRY_AFTER = {"Retry-After": "1"}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
PAGE_TYPES = {"index.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
REFUSALS: dict[int | str, Fields] = {
    "4XX": {"model": Refusal, "description": "what is wrong with the request"},
    "5XX": {"model": Refusal, "description": "why there is no answer"},
}
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
router = APIRouter(responses=REFUSALS)


@dataclass(frozen=True)
class ServeLimits:
    max_characters: int = 100_000  # of a request
    max_waiting: int = 1_024  # sentences in the queue
    timeout_s: float = 30.0  # for an answer

    @property
    def max_body(self) -> int:
        """Bytes of a request: its text, and some kilobytes of everything else."""
        return BYTES_PER_CHARACTER * self.max_characters + (64 << 10)


@dataclass(frozen=True)
class Service:
    """What the routes use."""

    models: Sequence[ServedModel]
    batcher: Batcher
    limits: ServeLimits
    keys: frozenset[str]  # none: no key is needed

    def check_key(self, request: Request, given: str | None) -> None:
        """Refuse a request without one of the keys, if there are any."""
        if not self.keys:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = token.strip()
        if not given:
            raise HTTPException(403, "this server needs an API key; give it as api_key")
        words = given.encode(errors="replace")
        if not any(compare_digest(words, key.encode()) for key in self.keys):
            raise HTTPException(403, "this API key is not known")

    def check_amount(self, texts: Sequence[str]) -> None:
        """Refuse too much text, and anything that is not text."""
        n_characters = sum(map(len, texts))
        if n_characters > self.limits.max_characters:
            raise HTTPException(
                413, f"q has {n_characters:,} characters, more than {self.limits.max_characters:,}"
            )
        if len(texts) > MAX_TEXTS:
            raise HTTPException(413, f"q has {len(texts):,} texts, more than {MAX_TEXTS:,}")
        for number, text in enumerate(texts, 1):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise HTTPException(400, f"q: line {number} has half a character") from None

    async def translate(self, options: LineOptions, texts: Sequence[str]) -> list[list[str]]:
        """Return the translations of each text, best first, sentence by sentence. A few sentences wait at a
        time.
        """
        self.check_amount(texts)
        splitter = options.model.translator.make_splitter()
        # in a thread, because a long text takes long
        split = await asyncio.to_thread(lambda: [RunningText(text, splitter) for text in texts])
        sentences = [sentence.text for text in split for sentence in text.sentences]
        answers: list[LineAnswer] = []
        n_at_once = min(MAX_AT_ONCE, self.limits.max_waiting)
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                for first in range(0, len(sentences), n_at_once):
                    chunk = sentences[first : first + n_at_once]
                    answers += await self.batcher.translate(options, chunk)
        except TimeoutError:
            limit = f"{self.limits.timeout_s:g} s"
            raise HTTPException(504, f"there was no answer within {limit}") from None
        unread = iter(answers)
        ranked = []
        for number, text in enumerate(split, 1):
            own = islice(unread, len(text.sentences))
            ranked.append(join_ranks(text, [read_answer(answer, number) for answer in own]))
        return ranked


def read_answer(answer: LineAnswer, number: int) -> Candidates:
    """Return the candidates of a sentence of text `number`, or raise the refusal that the client gets."""
    if isinstance(answer, UserError):
        raise HTTPException(400, f"q: line {number}: {answer}")
    if isinstance(answer, Failure):
        raise HTTPException(503, str(answer), RETRY_AFTER)
    if isinstance(answer, Exception):  # the batcher has logged it
        raise answer
    return answer


def join_ranks(text: RunningText, answers: Sequence[Candidates]) -> list[str]:
    """Join the best candidates of all sentences, then the second ones, and so on; no text occurs twice."""
    joined = []
    for rank in range(max(map(len, answers), default=1)):
        chosen = [candidates[min(rank, len(candidates) - 1)] for candidates in answers]
        joined.append(text.join([candidate.text for candidate in chosen]))
    return list(dict.fromkeys(joined))


def find_service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(find_service)]


# ---- the routes -----------------------------------------------------------------------------------------------------


def describe_body(request_type: Any, *content_types: str) -> Fields:
    """Describe a body that the route reads itself, for the OpenAPI document."""
    schema = {"schema": request_type.model_json_schema()}
    return {"requestBody": {"content": dict.fromkeys(content_types, schema)}}


@router.post(
    "/translate",
    response_model_exclude_none=True,
    openapi_extra=describe_body(TextsRequest, JSON_TYPE, *FORM_TYPES),
)
async def translate_texts(request: Request, service: Served) -> TextsAnswer:
    """Translate a text, or a list of texts, sentence by sentence."""
    values = await read_values(request)
    key = values.get("api_key") or values.get("apiKey")  # as the npm client calls it
    service.check_key(request, key if isinstance(key, str) else None)
    asked = TextsRequest.model_validate(values)
    model = choose_model(asked, service.models)
    options = LineOptions(model, min(1 + asked.alternatives, model.most_candidates))
    ranked = await service.translate(options, asked.texts)
    best = [first for first, *_ in ranked]
    others = [rest[: asked.alternatives] for _, *rest in ranked]
    is_list = isinstance(asked.q, list)
    answer = TextsAnswer(translatedText=best if is_list else best[0])
    if asked.alternatives:
        answer.alternatives = others if is_list else others[0]
    return answer


async def read_values(request: Request) -> Mapping[str, Any]:
    """Read what a client asks, in whichever of LibreTranslate's three ways it does: as JSON, as a form,
    or in the query.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        body = await request.body()
        if kind == JSON_TYPE:
            values = parse_json(body, "the body", "send JSON in UTF-8")
            if not isinstance(values, dict):
                raise HTTPException(400, "the body is not a JSON object")
            return values
        if kind == FORM_TYPES[0]:
            unquote_to_bytes(body).decode()  # the parser replaces what is not UTF-8
    except (ClientDisconnect, UserError, UnicodeDecodeError) as error:  # the first has no reader
        raise HTTPException(400, str(error)) from None
    pairs = request.query_params.multi_items()
    if kind in FORM_TYPES:
        form = await request.form(max_files=0, max_fields=MAX_FIELDS)
        pairs += form.multi_items()
    elif body or (kind and not pairs):
        raise HTTPException(
            415, f"content type {kind[:99]!r} is not supported; send application/json or a form"
        )
    values = dict(pairs)
    if len(values) < len(pairs):
        raise HTTPException(400, "a key occurs twice; send a list as JSON")
    return values


def choose_model(asked: TextsRequest, models: Sequence[ServedModel]) -> ServedModel:
    """Find the model of the two languages; `auto` is the only source language, if there is only one."""
    source = asked.source
    sources = {model.src for model in models}
    if source == "auto" and len(sources) > 1:
        names = " or ".join(sorted(sources))
        raise HTTPException(
            400, f"source: auto is not supported; this server does not detect {names}"
        )
    if source == "auto":
        (source,) = sources
    for read in (str, find_code):  # exactly, or else in capitals, with a region or by name
        for model in models:
            if (read(model.src), read(model.tgt)) == (read(source), read(asked.target)):
                return model
    pairs = ", ".join(other.direction for other in models)
    raise HTTPException(
        400, f"{source[:20]} to {asked.target[:20]} is not supported; there is {pairs}"
    )


@router.get("/languages")
async def list_languages(service: Served) -> list[Language]:
    """List the languages; one that no model translates has no targets."""
    languages: dict[str, Language] = {}

    def find(code: str) -> Language:
        new = Language(code=code, name=name_language(code), targets=[])
        return languages.setdefault(code, new)

    for model in service.models:
        find(model.src).targets.append(model.tgt)
    for model in service.models:
        find(model.tgt)
    return list(languages.values())


@router.get("/health")
async def check_health() -> Health:
    return Health()


# ---- the application ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BodyLimit:
    """An ASGI application that refuses bodies that are too long, and leaves the rest to another."""

    app: App
    limit: int

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        n_bytes = 0

        async def receive_limited() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > self.limit:
                raise HTTPException(413, f"the body has more than {self.limit:,} bytes")
            return message

        await self.app(scope, receive_limited, send)


def make_app(service: Service) -> App:
    app = FastAPI(
        title="nmt-serve",
        version="1",
        docs_url=None,  # it would load scripts from elsewhere
        redoc_url=None,
        exception_handlers={
            HTTPException: answer_refusal,
            QueueFull: answer_queue_full,
            ValidationError: answer_invalid,
            Exception: answer_bug,
        },
    )
    app.state.service = service
    app.include_router(router)
    # Read once; no path of a request reaches the file system.
    folder = files(__package__) / "page"
    pages = {name: (folder / name).read_bytes() for name in PAGE_TYPES}

    async def show_page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in pages:
            raise HTTPException(404)
        return Response(pages[name], media_type=PAGE_TYPES[name], headers=PAGE_HEADERS)

    app.add_route("/", show_page)
    app.add_route("/page/{name}", show_page)
    return BodyLimit(app, service.limits.max_body)


def answer_refusal(request: Request, error: HTTPException) -> Response:
    return make_refusal(error.status_code, error.detail, error.headers)


def make_refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    # What is refused may quote half a character, which JSON can hold and UTF-8 cannot.
    return JSONResponse({"error": message.encode(errors="replace").decode()}, status, headers)


def answer_queue_full(request: Request, error: QueueFull) -> Response:
    message = "the server has too much to translate at the moment; try again"
    return make_refusal(503, message, RETRY_AFTER)


def answer_invalid(request: Request, error: ValidationError) -> Response:
    return make_refusal(400, explain_invalid(error.errors()))


def answer_bug(request: Request, error: Exception) -> Response:
    return make_refusal(500, "the server failed; its log says why")
