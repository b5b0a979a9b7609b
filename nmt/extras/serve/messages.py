"""What clients send and what they get, as pydantic types: FastAPI reads, checks and describes them.

A `TextsRequest` is LibreTranslate's: unknown keys are ignored, an empty value is a missing one, and
numbers may come as digits. A `LinesRequest` is ours and strict: an unknown key is an error. Answers
leave out what was not asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, model_validator

MOST_DIGITS = 9
MOST_CANDIDATES = 12
SHOWN_CHARACTERS = 99  # of a wrong value


# ---- LibreTranslate's -----------------------------------------------------------------------------------------------


def read_digits(value: Any) -> Any:
    """Read a number from a form or a query, which hold text."""
    is_number = isinstance(value, str) and value.isdecimal() and len(value) <= MOST_DIGITS
    return int(value) if is_number else value


class TextsRequest(BaseModel):
    q: str | Annotated[list[str], Field(min_length=1)]
    source: str
    target: str
    format: Literal["text"] = "text"
    alternatives: Annotated[StrictInt, BeforeValidator(read_digits)] = Field(0, ge=0)
    api_key: Any = None  # checked before by those servers that need one

    @model_validator(mode="before")
    @classmethod
    def leave_out_empty(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if value not in (None, "")}

    @property
    def texts(self) -> list[str]:
        return self.q if isinstance(self.q, list) else [self.q]


class TextsAnswer(BaseModel):
    """The answer has lists where `q` is one."""

    translatedText: str | list[str]
    alternatives: list[str] | list[list[str]] | None = None


class Language(BaseModel):
    code: str
    name: str
    targets: list[str]


class Health(BaseModel):
    status: Literal["ok"] = "ok"


# ---- ours -----------------------------------------------------------------------------------------------------------


class LinesRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    q: list[str] = Field(description="texts, each a line or several")
    split: bool = Field(True, description="into sentences; otherwise each line is one")
    model: str | None = Field(None, description="the first one if absent")
    n_best: int = Field(1, ge=1, le=MOST_CANDIDATES)
    api_key: str | None = None


class LineCandidate(BaseModel):
    """A translation of a sentence."""

    text: str
    score: float


class AnsweredSentence(BaseModel):
    source: str
    start: int = Field(description="its first character in the text")
    candidates: list[LineCandidate]


class AnsweredText(BaseModel):
    text: str
    sentences: list[AnsweredSentence]


class LinesAnswer(BaseModel):
    model: str
    translations: list[AnsweredText]


class ModelDescription(BaseModel):
    name: str
    source: str
    target: str
    engine: str
    beam: int


class ModelList(BaseModel):
    models: list[ModelDescription]


class Refusal(BaseModel):
    error: str


def explain_invalid(errors: Sequence[Mapping[str, Any]]) -> str:
    """Say in one line what is wrong with a request: the key, its value, and what it must be."""
    first = errors[0]
    names = [str(name) for name in first["loc"] if name != "body"]
    key = ".".join(names[:1] + [name for name in names[1:] if name.isdecimal()])
    shown = f" ({first['input']!r:.{SHOWN_CHARACTERS}})" if first["type"] != "missing" else ""
    if key == "format" and first["input"] == "html":
        return (
            "format: html is not supported; LibreTranslate translates HTML with this model, from the "
            "package that nmt-export --to argos writes"
        )
    return f"{key!r:.{SHOWN_CHARACTERS}}: {first['msg'].lower()}{shown}"
