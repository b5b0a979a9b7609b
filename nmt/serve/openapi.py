"""The interface as an OpenAPI document, written by hand; a test compares it with the routes.

What the document allows is answered with a status that it names, as schemathesis finds by asking.
Its limits are those of this server.
"""

from collections.abc import Iterable
from typing import Any

from nmt.config import DecodingConfig
from nmt.serve.limits import MAX_STREAMED_LINES, ServeLimits
from nmt.serve.models import WIDEST_BEAM, ServedModels
from nmt.serve.pages import PAGE_FILES

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
BEAM_WIDTH: Schema = {"type": "integer", "minimum": 1, "maximum": WIDEST_BEAM}
JSON_TYPE, NDJSON_TYPE = "application/json", "application/x-ndjson"
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
PROBLEMS = {
    "400": "a mistake in the request",
    "403": "the API key is missing or not known, or a page of another site asks",
    "404": "there is nothing of this name",
    "405": "another method is needed",
    "408": "the request took too long to come",
    "413": "the request is too large",
    "415": "the type of the content is not supported",
    "421": "the Host header is no name of this server",
    "500": "a bug; the log of the server says more",
    "503": "too much to do; Retry-After says when to try again",
    "504": "there was no answer in time",
}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def either(*schemas: Schema) -> Schema:
    return {"oneOf": list(schemas)}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
    }


def refer(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def describe(
    summary: str,
    answer: Schema,
    kind: str = JSON_TYPE,
    json: Schema | None = None,
    form: Schema | None = None,
) -> Schema:
    """Describe an operation: what it answers, and what is asked, as JSON and perhaps as a form."""
    responses: Schema = {"200": {"description": "done", "content": {kind: {"schema": answer}}}}
    for status, text in PROBLEMS.items():
        responses[status] = {
            "description": text,
            "content": {JSON_TYPE: {"schema": refer("Error")}},
        }
    operation: Schema = {"summary": summary, "responses": responses}
    if json is not None:
        content = {JSON_TYPE: {"schema": json}}
        if form is not None:
            content |= {kind_of_form: {"schema": form} for kind_of_form in FORMS}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def describe_candidate() -> Schema:
    piece = record({"piece": TEXT, "log_prob": NUMBER})
    weights = {"type": "array", "description": "layers of heads, each base64 of one byte a weight"}
    attention = record(
        {
            "source": list_of(TEXT),
            "target": list_of(TEXT),
            "alignment": list_of(WHOLE),
            "attention": record({}, {"memory": weights, "encoder": weights, "decoder": weights}),
        }
    )
    optional = {
        "score": NUMBER,
        "pieces": list_of(piece),
        "alignment": list_of({**list_of(WHOLE), "minItems": 2, "maxItems": 2}),
        "attention": attention,
    }
    return record({"text": TEXT}, optional)


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def choose(words: Iterable[str]) -> Schema:
    return {"type": "string", "enum": list(words)}


def describe_question(models: ServedModels, limits: ServeLimits, max_lines: int) -> Schema:
    line = {**TEXT, "maxLength": limits.max_characters, "pattern": "^[^\n]*$"}
    optional = {
        "model": or_null(choose(models.by_name)),
        "preset": or_null(choose(DecodingConfig.PRESETS)),
        "beam": or_null(BEAM_WIDTH),
        "n_best": BEAM_WIDTH,
        "prefix": or_null({**list_of(line), "description": "one for each line of q"}),
        "scores": FLAG,
        "alignments": FLAG,
        "pieces": FLAG,
        "attention": FLAG,
        "api_key": or_null(TEXT),
    }
    lines = {**list_of(line), "maxItems": max_lines}
    return {**record({"q": lines}, optional), "additionalProperties": False}


def describe_texts(q: Schema, models: ServedModels) -> Schema:
    source, target = choose([*models.list_sources(), "auto"]), choose(models.list_targets())
    optional = {"format": choose(["text"]), "alternatives": WHOLE, "api_key": TEXT}
    return record({"q": q, "source": source, "target": target}, optional)


def make_openapi(models: ServedModels, limits: ServeLimits) -> Schema:
    """Make the document of a server with these models and limits."""
    text = {**TEXT, "minLength": 1}
    texts = either(text, {**list_of(TEXT), "minItems": 1})
    detection = record({"language": TEXT, "confidence": NUMBER})
    translated = record(
        {"translatedText": either(TEXT, list_of(TEXT))},
        {
            "alternatives": either(list_of(TEXT), list_of(list_of(TEXT))),
            "detectedLanguage": either(detection, list_of(detection)),
        },
    )
    candidates = {"candidates": list_of(refer("Candidate"))}
    language = record({"code": TEXT, "name": TEXT, "targets": list_of(TEXT)})
    model = record(
        {"name": TEXT, "source": TEXT, "target": TEXT, "engine": TEXT, "beam": BEAM_WIDTH}
    )
    anything: Schema = {"type": "object"}
    paths = {
        "/translate": {
            "post": describe(
                "Translate a text, or a list of texts, as LibreTranslate does",
                translated,
                json=describe_texts(texts, models),
                form=describe_texts(text, models),
            )
        },
        "/detect": {
            "post": describe(
                "List the languages that a text may be in; nothing is measured",
                list_of(detection),
                json=record({"q": text}, {"api_key": TEXT}),
                form=record({"q": text}, {"api_key": TEXT}),
            )
        },
        "/languages": {"get": describe("List the languages, with targets", list_of(language))},
        "/frontend/settings": {"get": describe("What a page needs to know", anything)},
        "/health": {"get": describe("Whether the server works", record({"status": TEXT}))},
        "/v1/models": {"get": describe("List the models", record({"models": list_of(model)}))},
        "/v1/translate": {
            "post": describe(
                "Translate lines",
                record({"model": TEXT, "translations": list_of(record(candidates))}),
                json=describe_question(models, limits, limits.max_lines),
            )
        },
        "/v1/stream": {
            "post": describe(
                "Translate many lines; each line of the answer is an object, in the order they are ready",
                record({}, {"index": WHOLE, "error": TEXT, **candidates}),
                NDJSON_TYPE,
                json=describe_question(models, limits, MAX_STREAMED_LINES),
            )
        },
        "/openapi.json": {"get": describe("This document", anything)},
        "/metrics": {"get": describe("Figures for Prometheus", TEXT, "text/plain")},
        "/": {"get": describe("A page to try it", TEXT, "text/html")},
        "/page/{name}": {
            "get": describe("A file of the page", TEXT, "text/*"),
            "parameters": [
                {"name": "name", "in": "path", "required": True, "schema": choose(PAGE_FILES)}
            ],
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "nmt-serve", "version": "1"},
        "components": {
            "schemas": {"Error": record({"error": TEXT}), "Candidate": describe_candidate()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
        "paths": paths,
    }
