"""LibreTranslate's API, so that its clients work unchanged.

Its keys come as JSON, as a form, or in the query.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request

from nmt.documents.document import Document
from nmt.serve.answers import LineOptions
from nmt.serve.detection import MOST_READ, LanguageDetector
from nmt.serve.limits import ServeLimits
from nmt.serve.messages import Detection, Language, LineCandidate, TextsAnswer, TextsRequest
from nmt.serve.models import ServedModel, ServedModels
from nmt.system.errors import UserError
from nmt.system.strict_json import parse_json

JSON_TYPE = "application/json"
FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data")
MAX_FIELDS = 50  # of a form
# English names for the list of languages; others are called by their code.
LANGUAGE_NAMES: dict[str, str] = json.loads((files(__package__) / "languages.json").read_bytes())


def describe_question(request_type: Any, *content_types: str) -> dict[str, Any]:
    """Describe a body that the route reads itself, for the OpenAPI document."""
    schema = {"schema": request_type.model_json_schema()}
    return {
        "requestBody": {"content": dict.fromkeys(content_types, schema)},
        "security": [{}, {"HTTPBearer": []}],
    }


def parse_body(body: bytes) -> dict[str, Any]:
    """Return a request's body as a JSON object."""
    try:
        values = parse_json(body, "the body")
    except UserError:
        raise HTTPException(400, "the body is not JSON in UTF-8") from None
    if not isinstance(values, dict):
        raise HTTPException(400, "the body is not a JSON object")
    return values


async def read_values(request: Request) -> Mapping[str, Any]:
    """Read what a client asks, in whichever of LibreTranslate's three ways it does."""
    kind = find_content_type(request)
    if kind == JSON_TYPE:
        return parse_body(await request.body())
    form: Mapping[str, Any] = {}
    if kind == FORM_TYPES[0]:
        try:
            pairs = parse_qsl((await request.body()).decode(), True, max_num_fields=MAX_FIELDS)
        except ValueError:
            raise HTTPException(400, "the body is not a form in UTF-8") from None
        form = dict(pairs)
        if len(form) < len(pairs):
            raise HTTPException(400, "a key of the form occurs twice; send a list as JSON")
    elif kind == FORM_TYPES[1]:
        try:
            form = await request.form(max_files=0, max_fields=MAX_FIELDS)
        except HTTPException as error:
            raise HTTPException(400, f"the form: {error.detail}") from None
    elif await request.body() or (kind and not request.query_params):
        raise HTTPException(
            415, f"content type {kind[:99]!r} is not supported; send application/json or a form"
        )
    return {**request.query_params, **form}


def find_key(values: Mapping[str, Any]) -> str | None:
    """Return the key that a request has in its body, or in its query."""
    key = values.get("api_key") or values.get("apiKey")  # as the npm client calls it
    return key if isinstance(key, str) else None


def find_content_type(request: Request) -> str:
    kind: str = request.headers.get("content-type", "")
    return kind.partition(";")[0].strip().lower()


def detect_languages(
    asked: TextsRequest, models: ServedModels, detector: LanguageDetector
) -> list[Detection]:
    """Detect the language of each text, among those with a model into the target; none unless asked to."""
    if asked.source != "auto":
        return []
    sources = models.list_sources(asked.target)
    found = []
    for text in asked.texts:
        ranked = [one for one in detector.detect(text[:MOST_READ]) if one.language in sources]
        found += ranked[:1]
    return found


def choose_model(
    asked: TextsRequest, models: ServedModels, detected: Sequence[Detection]
) -> ServedModel:
    """Find the model of the two languages; `auto` is the one that most of the texts are in."""
    source = asked.source
    if detected:
        source = Counter(one.language for one in detected).most_common(1)[0][0]
    model = models.find_pair(source, asked.target)
    if model is None:
        pairs = ", ".join(f"{one.src} to {one.tgt}" for one in models.by_name.values())
        raise HTTPException(
            400, f"{source[:20]} to {asked.target[:20]} is not supported; there is {pairs}"
        )
    return model


def choose_options(asked: TextsRequest, model: ServedModel) -> LineOptions:
    """Search for fewer candidates than were asked for if the beam is narrower."""
    config = model.loaded.translator.config
    has_alternatives = model.is_ours and not config.sample
    n_best = min(1 + asked.alternatives, config.beam) if has_alternatives else 1
    has_links = asked.format == "html" and model.is_ours
    return LineOptions(model, n_best=n_best, has_links=has_links)


def join_texts(
    asked: TextsRequest,
    documents: Sequence[Document],
    candidates: Sequence[Sequence[Sequence[LineCandidate]]],
    detected: list[Detection],
) -> TextsAnswer:
    """Join the candidates of all sentences to the translations of the texts."""
    texts, alternatives = [], []
    for document, of_document in zip(documents, candidates, strict=True):
        best, *others = _join_ranks(document, of_document)
        texts.append(best)
        alternatives.append(others[: asked.alternatives])

    is_list = isinstance(asked.q, list)
    answer = TextsAnswer(translatedText=texts if is_list else texts[0])
    if asked.alternatives:
        answer.alternatives = alternatives if is_list else alternatives[0]
    if detected:
        answer.detectedLanguage = detected if is_list else detected[0]
    return answer


def _join_ranks(document: Document, candidates: Sequence[Sequence[LineCandidate]]) -> list[str]:
    """Join the best candidates of all sentences, then the second ones, and so on; no text occurs twice."""
    texts = []
    for rank in range(max(map(len, candidates), default=1)):
        chosen = [of_sentence[min(rank, len(of_sentence) - 1)] for of_sentence in candidates]
        texts.append(document.join([one.translated for one in chosen]))
    return list(dict.fromkeys(texts))


def list_languages(models: ServedModels) -> list[Language]:
    """List the languages; one that no model translates has no targets."""
    codes = dict.fromkeys([*models.list_sources(), *models.list_targets()])
    return [Language(**name_language(code), targets=models.list_targets(code)) for code in codes]


def name_language(code: str) -> dict[str, str]:
    return {"code": code, "name": LANGUAGE_NAMES.get(code, code)}


def format_settings(models: ServedModels, limits: ServeLimits, has_keys: bool) -> dict[str, Any]:
    """Format what LibreTranslate's own page asks for first."""
    first = models.first
    return {
        "apiKeys": has_keys,
        "keyRequired": has_keys,
        "charLimit": limits.max_characters,
        "frontendTimeout": 500,  # milliseconds from the last key to a request
        "language": {"source": name_language(first.src), "target": name_language(first.tgt)},
        "suggestions": False,
        "supportedFilesFormat": [],
    }
