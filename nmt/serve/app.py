"""The server as a FastAPI application: its routes, and what happens between a request and its answer.

A request is checked, becomes lines, waits for their translations until its deadline, and gives way
when its client leaves. Every error is one JSON object with one line; a bug is a 500 without a
traceback, which only the operator sees.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from itertools import islice, repeat
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nmt.documents.document import Document, PlainText
from nmt.documents.html import HtmlDocument
from nmt.serve.answers import LineOptions, tidy_glossary
from nmt.serve.batcher import (
    SMALLEST_SHARE,
    Asker,
    Batcher,
    LineAnswer,
    QueueFull,
    WaitingLine,
)
from nmt.serve.detection import MOST_READ, LanguageDetector
from nmt.serve.guard import RETRY_AFTER, Callers, Guard
from nmt.serve.libretranslate import (
    FORM_TYPES,
    JSON_TYPE,
    choose_model,
    choose_options,
    describe_question,
    detect_languages,
    find_content_type,
    find_key,
    format_settings,
    join_texts,
    list_languages,
    parse_body,
    read_values,
)
from nmt.serve.limits import MOST_CHARACTERS_AT_ONCE, ServeLimits, check_amount
from nmt.serve.messages import (
    MAX_ATTENTION_MAPS,
    AnsweredSentence,
    AnsweredText,
    Detection,
    DetectRequest,
    Health,
    Language,
    LineCandidate,
    LinesAnswer,
    LinesRequest,
    ModelDescription,
    ModelList,
    Refusal,
    StreamedLine,
    TextsAnswer,
    TextsRequest,
    explain_invalid,
)
from nmt.serve.metrics import ServerMetrics
from nmt.serve.models import SearchChoice, ServedModel, ServedModels
from nmt.serve.pages import read_page_files
from nmt.system.errors import Failure, UserError
from nmt.translate.translator import LineTooLong

STATUS_CLIENT_LEFT = 499  # counted by the metrics, and read by no client
LONG_TEXT = 2_000  # characters
T = TypeVar("T")
ROOM_PAUSE_S = 0.05  # until a stream looks for room in the queue again
BUG = "the server failed; its log says why"

REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Refusal, "description": "what is wrong with the request"},
    "5XX": {"model": Refusal, "description": "why there is no answer"},
}
router = APIRouter(responses=REFUSALS)


class SearchFailed(Exception):
    """A bug in the search of a line, which the batcher has logged."""


@dataclass(frozen=True)
class Service:
    """The state that the routes use."""

    models: ServedModels
    batcher: Batcher
    limits: ServeLimits
    keys: frozenset[str]  # none: no key is needed
    metrics: ServerMetrics
    detector: LanguageDetector

    def check_key(self, request: Request, given: str | None = None) -> Asker:
        """Refuse a request without one of the keys, if there are any. Return the client."""
        if not self.keys:
            return Asker(request.client.host if request.client else "")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = token.strip()
        if not given:
            raise HTTPException(403, "this server needs an API key; give it as api_key")
        words = given.encode(errors="replace")
        if not any(compare_digest(words, key.encode()) for key in self.keys):
            raise HTTPException(403, "this API key is not known")
        return Asker(given)

    async def answer_in_time(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Do what a request asks. It ends with the deadline, or as soon as the client leaves."""
        answered = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(wait_for_departure(request))
        try:
            done, _ = await asyncio.wait(
                (answered, leaving),
                timeout=self.limits.timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            leaving.cancel()
            answered.cancel()
        if not done:
            raise HTTPException(504, self.say_too_late())
        if answered not in done:
            raise HTTPException(STATUS_CLIENT_LEFT, "the client left")
        return answered.result()

    async def translate_documents(
        self,
        asker: Asker,
        options: LineOptions,
        documents: Sequence[Document],
        prefixes: Sequence[str] = (),
        waits_for_room: bool = False,
        first_number: int = 1,
    ) -> list[list[list[LineCandidate]]]:
        """Return the candidates of each sentence of each document; a few sentences wait at a time. In
        messages the documents are lines of the request, the first of them line `first_number`.
        """
        lines = [
            WaitingLine(asker, options, sentence.text, prefix if number == 0 else "")
            for document, prefix in zip(documents, prefixes or repeat(""), strict=False)
            for number, sentence in enumerate(document.sentences)
        ]
        asker.is_long |= len(lines) > SMALLEST_SHARE
        for group in split_into_groups(lines, self.limits.max_at_once):
            await self._translate_lines(group, waits_for_room)
            waits_for_room = True  # what has begun is not refused any more
        unread = iter(lines)
        candidates = []
        for number, document in enumerate(documents, first_number):
            own_lines = islice(unread, len(document.sentences))
            candidates.append([read_answer(line.answered.result(), number) for line in own_lines])
        return candidates

    async def _translate_lines(self, lines: Sequence[WaitingLine], waits_for_room: bool) -> None:
        while waits_for_room and not self.batcher.has_room(lines[0].asker.client, len(lines)):
            await asyncio.sleep(ROOM_PAUSE_S)
        self.batcher.put(lines)
        try:
            # unlike gather, it cancels no answer if it is cancelled itself; `drop` does
            await asyncio.wait([line.answered for line in lines])
        finally:
            self.batcher.drop(lines)

    def say_too_late(self) -> str:
        return f"there was no answer within {self.limits.timeout_s:g} s"

    async def stream_rows(
        self, asker: Asker, asked: LinesRequest, options: LineOptions
    ) -> AsyncIterator[str]:
        """Yield a row for each text, as soon as it is translated. A few texts wait at a time."""
        asker.is_long = len(asked.q) > SMALLEST_SHARE
        n_started = 0
        running: dict[asyncio.Task[str], int] = {}  # what each row takes of max_at_once
        try:
            while running or n_started < len(asked.q):
                while n_started < len(asked.q) and sum(running.values()) < self.limits.max_at_once:
                    text = asked.q[n_started]
                    (document,) = await split_texts([text], options, asked.split)
                    row = self._answer_row(asker, n_started, document, asked, options)
                    # 1 more, because a text without sentences has a row too
                    running[asyncio.create_task(row)] = 1 + len(document.sentences)
                    n_started += 1
                done, _ = await asyncio.wait(
                    running, timeout=self.limits.timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    yield StreamedLine(error=self.say_too_late()).to_row()
                    return
                for task in done:
                    del running[task]
                    yield task.result()
        finally:
            for task in running:
                task.cancel()

    async def _answer_row(
        self,
        asker: Asker,
        index: int,
        document: Document,
        asked: LinesRequest,
        options: LineOptions,
    ) -> str:
        """Translate a text once the queue has room for it."""
        prefixes = asked.prefix[index : index + 1] if asked.prefix else ()
        try:
            (candidates,) = await self.translate_documents(
                asker, options, [document], prefixes, waits_for_room=True, first_number=index + 1
            )
        except HTTPException as error:
            return StreamedLine(index=index, error=error.detail).to_row()
        except SearchFailed:  # the other lines continue
            return StreamedLine(index=index, error=BUG).to_row()
        translated = join_text(document, candidates)
        return StreamedLine(
            index=index, text=translated.text, sentences=translated.sentences
        ).to_row()


def split_into_groups(lines: Sequence[WaitingLine], most: int) -> Iterator[Sequence[WaitingLine]]:
    """Split the lines of a request into those that wait at a time, so that others are answered between them."""
    group: list[WaitingLine] = []
    n_characters = 0
    for line in lines:
        if group and (len(group) == most or n_characters > MOST_CHARACTERS_AT_ONCE):
            yield group
            group, n_characters = [], 0
        group.append(line)
        n_characters += len(line.text)
    if group:
        yield group


async def read_documents(asked: TextsRequest, options: LineOptions) -> Sequence[Document]:
    if asked.format == "text":
        return await split_texts(asked.texts, options, has_sentences=True)
    splitter = options.model.loaded.translator.make_splitter()
    try:
        return await asyncio.to_thread(
            lambda: [HtmlDocument(text, splitter) for text in asked.texts]
        )
    except UserError as error:
        raise HTTPException(400, f"q: {error}") from None


async def split_texts(
    texts: Sequence[str], options: LineOptions, has_sentences: bool
) -> list[PlainText]:
    splitter = options.model.loaded.translator.make_splitter(has_sentences)

    def split() -> list[PlainText]:
        return [PlainText(text, splitter) for text in texts]

    # A long text is split in a thread, so that others are answered meanwhile. For a short one, starting
    # a thread takes longer than splitting.
    is_long = sum(map(len, texts)) > LONG_TEXT
    return await asyncio.to_thread(split) if is_long else split()


def join_text(document: Document, candidates: Sequence[list[LineCandidate]]) -> AnsweredText:
    """Join the best candidates of the sentences, and list all of them."""
    text = document.join([of_sentence[0].translated for of_sentence in candidates])
    sentences = [
        AnsweredSentence(source=sentence.text, start=sentence.start, candidates=of_sentence)
        for sentence, of_sentence in zip(document.sentences, candidates, strict=True)
    ]
    return AnsweredText(text=text, sentences=sentences)


def read_answer(answer: LineAnswer, number: int) -> list[LineCandidate]:
    """Return the candidates of line `number`, or raise the refusal that the client gets."""
    if isinstance(answer, list):
        return answer
    if isinstance(answer, LineTooLong):
        raise HTTPException(413, f"q: line {number} or its prefix is too long for the model")
    if isinstance(answer, UserError):
        raise HTTPException(400, f"q: line {number}: {answer}")
    if isinstance(answer, Failure):
        raise HTTPException(503, str(answer), RETRY_AFTER)
    raise SearchFailed from answer


async def wait_for_departure(request: Request) -> None:
    """Wait until the client closes its connection; its request was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def find_service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(find_service)]


def answer_with(answer: BaseModel) -> Response:
    """Send what was asked for: other fields of the answer are None, and left out."""
    return Response(answer.model_dump_json(exclude_none=True), media_type=JSON_TYPE)


# ---- LibreTranslate's routes ----------------------------------------------------------------------------------------

# The routes that translate read their body and write their answer themselves: FastAPI's own way, which
# checks an answer again, takes as long as everything else that a short request costs here.


@router.post(
    "/translate",
    responses={200: {"model": TextsAnswer}},
    openapi_extra=describe_question(TextsRequest, JSON_TYPE, *FORM_TYPES),
)
async def translate(request: Request) -> Response:
    """Translate a text, or a list of texts, sentence by sentence."""
    service = find_service(request)
    values = await read_values(request)
    asker = service.check_key(request, find_key(values))
    asked = TextsRequest.model_validate(values)
    check_amount(asked.texts, service.limits)
    detected = detect_languages(asked, service.models, service.detector)
    model = choose_model(asked, service.models, detected)
    options = choose_options(asked, model)

    async def translate_texts() -> TextsAnswer:
        documents = await read_documents(asked, options)
        candidates = await service.translate_documents(asker, options, documents)
        if asked.format == "html":
            return await asyncio.to_thread(join_texts, asked, documents, candidates, detected)
        return join_texts(asked, documents, candidates, detected)

    return answer_with(await service.answer_in_time(request, translate_texts()))


@router.post("/detect", openapi_extra=describe_question(DetectRequest, JSON_TYPE, *FORM_TYPES))
async def detect(request: Request, service: Served) -> list[Detection]:
    """List the languages that a text may be in, the most probable first."""
    values = await read_values(request)
    service.check_key(request, find_key(values))
    asked = DetectRequest.model_validate(values)
    return service.detector.detect(asked.q[:MOST_READ])


@router.get("/languages")
async def show_languages(service: Served) -> list[Language]:
    return list_languages(service.models)


@router.get("/frontend/settings")
async def show_settings(service: Served) -> dict[str, Any]:
    """What LibreTranslate's own page asks for first."""
    return format_settings(service.models, service.limits, bool(service.keys))


@router.get("/health")
async def check_health(service: Served) -> Health:
    if not service.batcher.is_working:
        raise HTTPException(503, "a thread that translates has ended; start the server again")
    return Health()


# ---- ours -----------------------------------------------------------------------------------------------------------


async def read_lines_request(request: Request, service: Service) -> tuple[Asker, LinesRequest]:
    if find_content_type(request) != JSON_TYPE:
        raise HTTPException(415, "send the request as application/json")
    values = parse_body(await request.body())
    asker = service.check_key(request, find_key(values))
    return asker, LinesRequest.model_validate(values)


@router.get("/v1/models")
async def list_models(service: Served) -> ModelList:
    rows = []
    for model in service.models.by_name.values():
        translator = model.loaded.translator
        description = ModelDescription(
            name=model.name,
            source=model.src,
            target=model.tgt,
            engine=translator.engine,
            beam=translator.config.beam,
        )
        rows.append(description)
    return ModelList(models=rows)


@router.post(
    "/v1/translate",
    responses={200: {"model": LinesAnswer}},
    openapi_extra=describe_question(LinesRequest, JSON_TYPE),
)
async def translate_lines(request: Request) -> Response:
    """Translate texts, with n-best lists, pieces, alignments and attention of their sentences on request."""
    service = find_service(request)
    asker, asked = await read_lines_request(request, service)
    options = check_question(asked, service)

    async def translate_texts() -> LinesAnswer:
        documents = await split_texts(asked.q, options, asked.split)
        n_sentences = sum(len(document.sentences) for document in documents)
        if asked.attention and n_sentences * asked.n_best > MAX_ATTENTION_MAPS:
            raise HTTPException(
                400, f"attention is for at most {MAX_ATTENTION_MAPS} translations; ask for fewer"
            )
        candidates = await service.translate_documents(
            asker, options, documents, asked.prefix or ()
        )
        texts = [join_text(*one) for one in zip(documents, candidates, strict=True)]
        return LinesAnswer(model=options.model.name, translations=texts)

    return answer_with(await service.answer_in_time(request, translate_texts()))


@router.post(
    "/v1/stream",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {}}}},
    openapi_extra=describe_question(LinesRequest, JSON_TYPE),
)
async def stream_lines(request: Request) -> StreamingResponse:
    """Translate many texts; each line of the answer is an object, in the order they are ready."""
    service = find_service(request)
    asker, asked = await read_lines_request(request, service)
    options = check_question(asked, service)
    if asked.attention:
        raise HTTPException(400, "/v1/stream does not support attention; use /v1/translate")
    if not service.batcher.has_room(asker.client):
        raise QueueFull
    rows = service.stream_rows(asker, asked, options)
    return StreamingResponse(rows, media_type="application/x-ndjson")


def check_question(asked: LinesRequest, service: Service) -> LineOptions:
    """Return what is asked of each sentence, if the server's limits and the model allow it."""
    check_amount(asked.q, service.limits)
    check_amount(asked.prefix or (), service.limits)
    check_amount([*asked.glossary.values(), *asked.glossary], service.limits)
    model = find_model(asked.model, service.models)
    options = LineOptions(
        model=model,
        search=SearchChoice(asked.preset, asked.beam),
        n_best=asked.n_best,
        glossary=tidy_glossary(asked.glossary),
        has_prefix=asked.prefix is not None,
        has_alignments=asked.alignments,
        has_pieces=asked.pieces,
        has_attention=asked.attention,
        has_scores=asked.scores,
    )
    text_and_score = LineOptions(model, options.search, has_scores=asked.scores)
    if not model.is_ours and options != text_and_score:
        raise HTTPException(
            400, f"{model.name} is translated by another engine, which gives text and score only"
        )
    config = model.find_translator(options.search).config
    if asked.n_best > config.beam and not config.sample:
        raise HTTPException(
            400, f"n_best is {asked.n_best}, but beam is {config.beam}; give a wider beam"
        )
    if asked.glossary and config.beam == 1:
        raise HTTPException(400, "glossary needs several hypotheses; give beam 2 or more")
    return options


def find_model(name: str | None, models: ServedModels) -> ServedModel:
    if name is None:
        return models.first
    if name not in models.by_name:
        known = ", ".join(models.by_name)
        raise HTTPException(400, f"model: there is no {name[:99]!r}; known: {known}")
    return models.by_name[name]


# HTTPBearer names the scheme in the document; `check_key` checks the key.
@router.get(
    "/metrics", response_class=Response, dependencies=[Depends(HTTPBearer(auto_error=False))]
)
async def show_metrics(request: Request, service: Served) -> Response:
    """Figures for Prometheus."""
    service.check_key(request)
    return Response(service.metrics.format(), media_type="text/plain; version=0.0.4")


# ---- the application ------------------------------------------------------------------------------------------------


def make_app(service: Service, callers: Callers) -> Guard:
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
    # Starlette's own routes come first and answer: FastAPI's, which describe them in the document, would
    # spend more on an empty dependency tree than a short request costs here.
    app.add_route("/translate", translate, methods=["POST"])
    app.add_route("/v1/translate", translate_lines, methods=["POST"])
    # not include_router: a router inside the application's own would look for each route twice
    app.router.routes.extend(router.routes)
    pages = read_page_files()

    async def show_page(request: Request) -> Response:
        page = pages.get(request.path_params.get("name", "index.html"))
        if page is None:
            raise HTTPException(404)
        headers = {"ETag": page.tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == page.tag:
            return Response(status_code=304, headers=headers)
        return Response(page.content, media_type=page.media_type, headers=headers)

    app.add_route("/", show_page)
    app.add_route("/page/{name}", show_page)
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    return Guard(app, service.limits, callers, service.metrics, paths)


def answer_refusal(request: Request, error: HTTPException) -> Response:
    return make_refusal(error.status_code, error.detail, error.headers)


def make_refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    # What is refused may quote half a character, which JSON can hold and UTF-8 cannot.
    return JSONResponse({"error": message.encode(errors="replace").decode()}, status, headers)


def answer_queue_full(request: Request, error: QueueFull) -> Response:
    message = "the server has too much to translate at the moment; try again"
    return make_refusal(503, message, RETRY_AFTER)


def answer_invalid(request: Request, error: ValidationError) -> Response:
    return make_refusal(400, explain_invalid(error))


def answer_bug(request: Request, error: Exception) -> Response:
    return make_refusal(500, BUG)
