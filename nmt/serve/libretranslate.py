"""The requests and answers of LibreTranslate's API, so that its clients work unchanged.

Its keys come as JSON, as a form, or in the query, and unknown ones are ignored, as LibreTranslate
does. Two things it offers are not done here and never pretended: markup is refused, and languages
are not detected (a server knows only those of its models).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from nmt.serve.answers import LineCandidate
from nmt.serve.limits import RequestRefused, ServeLimits
from nmt.serve.models import ServedModel, ServedModels
from nmt.serve.questions import parse_body

Values = Mapping[str, Any]
MAX_FIELDS = 50  # of a form
UNMEASURED = 0.0  # confidence in a language that nothing was measured of
# English names for the list of languages; others are called by their code.
LANGUAGE_NAMES = {
    "ar": "Arabic",
    "bg": "Bulgarian",
    "ca": "Catalan",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "et": "Estonian",
    "fa": "Persian",
    "fi": "Finnish",
    "fr": "French",
    "he": "Hebrew",
    "hi": "Hindi",
    "hr": "Croatian",
    "hu": "Hungarian",
    "id": "Indonesian",
    "is": "Icelandic",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "lt": "Lithuanian",
    "lv": "Latvian",
    "nl": "Dutch",
    "no": "Norwegian",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sk": "Slovak",
    "sl": "Slovenian",
    "sv": "Swedish",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "vi": "Vietnamese",
    "zh": "Chinese",
}


@dataclass(frozen=True)
class TextsToTranslate:
    texts: list[str]
    is_list: bool  # and so is the answer
    model: ServedModel
    detected: str | None  # the language that was found for source: auto
    n_alternatives: int

    @property
    def lines(self) -> list[str]:
        """The lines of all texts."""
        return [line for text in self.texts for line in split_lines(text)]


def split_lines(text: str) -> list[str]:
    return [line.removesuffix("\r") for line in text.split("\n")]


async def read_values(request: Request, body: bytes) -> Values:
    """Read what a client asks, in whichever of LibreTranslate's three ways it does."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return parse_body(body)
    values = dict(request.query_params)
    if kind == "application/x-www-form-urlencoded":
        try:
            values.update(parse_qsl(body.decode(), True, max_num_fields=MAX_FIELDS))
        except ValueError:
            raise RequestRefused(400, "the body is not a form in UTF-8") from None
    elif kind == "multipart/form-data":
        values.update(await _read_multipart(request, body))
    elif body or (kind and not values):
        raise RequestRefused(
            415, f"content type {kind[:99]!r} is not supported; send application/json or a form"
        )
    return values


async def _read_multipart(request: Request, body: bytes) -> dict[str, str]:
    async def replay() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    values = {}
    try:
        form = await Request(request.scope, replay).form(max_files=0, max_fields=MAX_FIELDS)
    except HTTPException as error:
        raise RequestRefused(400, f"the form: {error.detail}") from None
    for key, value in form.items():
        if isinstance(value, UploadFile):
            raise RequestRefused(400, "files are not translated; send their text as q")
        values[key] = value
    return values


def read_texts(values: Values, models: ServedModels) -> TextsToTranslate:
    """Read the question of POST /translate."""
    q = values.get("q")
    texts: list[Any] = q if isinstance(q, list) else [q]
    if not q or not all(isinstance(text, str) for text in texts):
        raise RequestRefused(400, "q is missing; give a text, or a list of texts")
    source, target = _read_code(values, "source"), _read_code(values, "target")
    if (text_format := values.get("format") or "text") != "text":
        shown = str(text_format)[:99]
        raise RequestRefused(400, f"format {shown!r} is not supported; send plain text")
    detected = None
    if source == "auto":
        source = detected = _choose_source(target, models)
    model = models.find_pair(source, target)
    if model is None:
        pairs = ", ".join(f"{one.src} to {one.tgt}" for one in models.by_name.values())
        raise RequestRefused(
            400, f"{source[:20]} to {target[:20]} is not supported; there is {pairs}"
        )
    return TextsToTranslate(texts, isinstance(q, list), model, detected, _read_count(values))


def _read_code(values: Values, key: str) -> str:
    code = values.get(key)
    if not isinstance(code, str) or not code:
        raise RequestRefused(400, f"{key} is missing; give the code of a language")
    return code


def _choose_source(target: str, models: ServedModels) -> str:
    """The source language of `auto`, which is clear only where there is one."""
    sources = models.list_sources(target)
    if len(sources) > 1:
        raise RequestRefused(
            400,
            f"source: auto: this server does not detect languages; give one of {', '.join(sources)}",
        )
    return sources[0] if sources else "auto"


def _read_count(values: Values) -> int:
    """How many alternatives are preferred; a form has it as digits."""
    given = values.get("alternatives") or 0
    if isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) < 9:
        given = int(given)
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise RequestRefused(400, "alternatives is not a number of alternatives")
    return given


def count_candidates(question: TextsToTranslate) -> int:
    """How many candidates to search for: fewer than were asked for where the beam is not as wide."""
    translator = question.model.loaded.translator
    if not question.model.is_ours or translator.config.sample:
        return 1
    return min(1 + question.n_alternatives, translator.config.beam)


def format_translation(
    question: TextsToTranslate, answers: Sequence[Sequence[LineCandidate]]
) -> dict[str, Any]:
    """Format the answer of POST /translate from the candidates of each line."""
    texts, alternatives = [], []
    done = 0
    for text in question.texts:
        n_lines = len(split_lines(text))
        best, *others = _join_lines(answers[done : done + n_lines])
        texts.append(best)
        alternatives.append(others[: question.n_alternatives])
        done += n_lines

    answer: dict[str, Any] = {"translatedText": texts if question.is_list else texts[0]}
    if question.n_alternatives:
        answer["alternatives"] = alternatives if question.is_list else alternatives[0]
    if question.detected is not None:
        detected = {"confidence": UNMEASURED, "language": question.detected}
        answer["detectedLanguage"] = [detected] * len(texts) if question.is_list else detected
    return answer


def _join_lines(lines: Sequence[Sequence[LineCandidate]]) -> list[str]:
    """Join the best candidates of all lines, then the second ones, and so on; no text occurs twice."""
    texts = []
    for rank in range(max(map(len, lines))):
        chosen = [candidates[min(rank, len(candidates) - 1)] for candidates in lines]
        texts.append("\n".join(one.translation.text.replace("\n", " ") for one in chosen))
    return list(dict.fromkeys(texts))


def format_languages(models: ServedModels) -> list[dict[str, Any]]:
    """Format the answer of GET /languages; a language that nothing translates has no targets."""
    codes = dict.fromkeys([*models.list_sources(), *models.list_targets()])
    return [
        {"code": code, "name": name_language(code), "targets": models.list_targets(code)}
        for code in codes
    ]


def name_language(code: str) -> str:
    return LANGUAGE_NAMES.get(code, code)


def format_detections(values: Values, models: ServedModels) -> list[dict[str, Any]]:
    """Format the answer of POST /detect: the languages that the text may be in, nothing more."""
    if not isinstance(values.get("q"), str) or not values["q"]:
        raise RequestRefused(400, "q is missing; give a text")
    return [{"confidence": UNMEASURED, "language": code} for code in models.list_sources()]


def format_settings(models: ServedModels, limits: ServeLimits, has_keys: bool) -> dict[str, Any]:
    """Format the answer of GET /frontend/settings."""

    def describe(code: str) -> dict[str, str]:
        return {"code": code, "name": name_language(code)}

    return {
        "apiKeys": has_keys,
        "keyRequired": has_keys,
        "charLimit": limits.max_characters,
        "frontendTimeout": 500,  # milliseconds from the last key to a request
        "language": {
            "source": describe(models.first.src),
            "target": describe(models.first.tgt),
        },
        "suggestions": False,
        "supportedFilesFormat": [],
    }
