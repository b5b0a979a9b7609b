"""What LibreTranslate's clients send and what they get, as pydantic types that check and describe it.

Unknown keys are ignored, an empty value is a missing one, and numbers may come as digits. Answers leave
out what was not asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StrictInt, model_validator

from nmt.system.strict_json import Fields

SHOWN_CHARACTERS = 99  # of a wrong value
NO_JSON = "; JSON needs the header Content-Type: application/json"  # curl sends another


def read_digits(value: Any) -> Any:
    """Read a number from a form or a query, which hold text."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class TextsRequest(BaseModel):
    q: str | Annotated[list[str], Field(min_length=1)]
    source: str
    target: str
    format: Literal["text"] = "text"
    alternatives: Annotated[StrictInt, BeforeValidator(read_digits)] = Field(0, ge=0)
    api_key: Any = None  # checked before by those servers that need one

    @model_validator(mode="before")
    @classmethod
    def leave_out_empty(cls, values: Fields) -> Fields:
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


class Refusal(BaseModel):
    error: str


def explain_invalid(errors: Sequence[Mapping[str, Any]]) -> str:
    """Say in one line what is wrong with a request: the key, its value, and what it must be."""
    first = errors[0]
    key = first["loc"][0]
    shown = f" ({first['input']!r:.{SHOWN_CHARACTERS}})" if first["type"] != "missing" else NO_JSON
    if key == "format" and first["input"] == "html":
        return (
            "format: html is not supported; LibreTranslate translates HTML with this model, from the "
            "package that nmt-export --to argos writes"
        )
    return f"{key!r}: {first['msg'].lower()}{shown}"
