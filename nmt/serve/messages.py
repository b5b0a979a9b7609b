"""What clients send and what they get, as pydantic types: FastAPI reads, checks and describes them.

A `TextsRequest` is LibreTranslate's: unknown keys are ignored, an empty value is a missing one, and
numbers may come as digits. A `LinesRequest` is ours and strict: an unknown key is an error. Answers
leave out what was not asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from nmt.documents.document import Link, Translated
from nmt.system.records import suggest_key

MAX_ATTENTION_MAPS = 8  # of a request: all layers and heads of a long line are megabytes
MOST_DIGITS = 9
MAX_TERMS = 100  # of the glossary of a request
WIDEST_BEAM = 12  # that a client may ask for: time and memory grow with it
SHOWN_CHARACTERS = 99  # of a wrong value
BeamWidth = Annotated[int, Field(ge=1, le=WIDEST_BEAM)]
Preset = Literal["vaswani2017", "fairseq", "marian", "hf"]


# ---- LibreTranslate's -----------------------------------------------------------------------------------------------


def read_digits(value: Any) -> Any:
    """Read a number from a form or a query, which hold text."""
    is_number = isinstance(value, str) and value.isdecimal() and len(value) <= MOST_DIGITS
    return int(value) if is_number else value


class DetectRequest(BaseModel):
    q: str = Field(min_length=1)
    api_key: Any = None  # checked before by those servers that need one


class TextsRequest(BaseModel):
    q: str | Annotated[list[str], Field(min_length=1)]
    source: str
    target: str
    format: Literal["text", "html"] = "text"
    alternatives: Annotated[StrictInt, BeforeValidator(read_digits)] = Field(0, ge=0)
    api_key: Any = None  # checked before by those servers that need one

    @model_validator(mode="before")
    @classmethod
    def leave_out_empty(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if value not in (None, "")}

    @property
    def texts(self) -> list[str]:
        return self.q if isinstance(self.q, list) else [self.q]


class Detection(BaseModel):
    confidence: float
    language: str


class TextsAnswer(BaseModel):
    """The answer has lists where `q` is one."""

    translatedText: str | list[str]
    alternatives: list[str] | list[list[str]] | None = None
    detectedLanguage: Detection | list[Detection] | None = None


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
    preset: Preset | None = None
    beam: BeamWidth | None = None
    n_best: BeamWidth = 1
    glossary: dict[str, str] = Field(
        {}, max_length=MAX_TERMS, description="phrases of the source, and what translates them"
    )
    prefix: list[str] | None = Field(None, description="how the translation of each text begins")
    scores: bool = True
    alignments: bool = False
    pieces: bool = False
    attention: bool = False
    api_key: str | None = None

    @model_validator(mode="after")
    def check_phrases(self) -> "LinesRequest":
        for source, target in self.glossary.items():
            if not source.strip() or not target.strip():
                raise ValueError("glossary: has an empty phrase; leave it out")
        if self.prefix is not None and len(self.prefix) != len(self.q):
            raise ValueError(f"prefix has {len(self.prefix):,} lines, and q has {len(self.q):,}")
        for number, line in enumerate(self.prefix or (), 1):
            if "\n" in line:
                raise ValueError(f"prefix: line {number} has a line end; leave it out")
        return self


class Piece(BaseModel):
    piece: str
    log_prob: float


class ShownAttention(BaseModel):
    """The weights of each kind: layers of heads, each a byte a weight in base64."""

    source: list[str]
    target: list[str]
    alignment: list[int]
    attention: dict[str, list[list[str]]]


class LineCandidate(BaseModel):
    """A translation of a sentence."""

    text: str
    score: float | None = None
    pieces: list[Piece] | None = Field(None, description="the end mark comes last")
    alignment: list[tuple[int, int]] | None = None
    attention: ShownAttention | None = None
    links: SkipJsonSchema[Sequence[Link]] = Field((), exclude=True)

    @property
    def translated(self) -> Translated:
        return Translated(self.text, self.links)


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


class StreamedLine(BaseModel):
    """A line of the answer of /v1/stream: the translation of a text, or why there is none."""

    index: int | None = None
    text: str | None = None
    sentences: list[AnsweredSentence] | None = None
    error: str | None = None

    def to_row(self) -> str:
        row: str = self.model_dump_json(exclude_none=True)
        return row + "\n"


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


# What is said of a wrong value, by pydantic's name of the mistake.
MISTAKES = {
    "string_type": "is not a string",
    "string_unicode": "has half a character",
    "list_type": "is not a list",
    "int_type": "is not an integer",
    "bool_type": "is not true or false",
    "dict_type": "is not an object of phrases and their translations",
    "too_long": f"has more than {MAX_TERMS} phrases",
}
# LibreTranslate's clients show one text for anything that is wrong with a key.
LIBRETRANSLATE_MISTAKES = {
    "q": "q is missing; give a text, or a list of texts",
    "source": "source is missing; give the code of a language",
    "target": "target is missing; give the code of a language",
    "format": "format {shown} is not supported; send text or html",
    "alternatives": "alternatives is not a number of alternatives",
}


def explain_invalid(invalid: ValidationError) -> str:
    """Say in one line what is wrong with a request: the key, its value, and what it must be."""
    first: Mapping[str, Any] = invalid.errors()[0]
    kind, shown = first["type"], repr(first["input"])[:SHOWN_CHARACTERS]
    if kind == "value_error":
        return f"the question: {first['ctx']['error']}"
    place = first["loc"] or ("a key",)  # one that is not text has no name
    key = repr(place[0])[1:-1][:SHOWN_CHARACTERS]  # an unknown one may be of any characters
    if invalid.title == DetectRequest.__name__ and key == "q":
        return "q is missing; give a text"
    if invalid.title == TextsRequest.__name__ and key in LIBRETRANSLATE_MISTAKES:
        return LIBRETRANSLATE_MISTAKES[key].format(shown=shown)
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {suggest_key(key, LinesRequest.model_fields)}"
    if kind == "missing":
        return f"{key}: is missing"
    if kind in ("greater_than_equal", "less_than_equal"):
        return f"{key} is {shown}; it must be from 1 to {WIDEST_BEAM}"
    if kind == "literal_error":
        return f"{key}: {shown} is not one of {', '.join(get_args(Preset))}"
    index = f"[{place[-1]}]" if isinstance(place[-1], int) else ""
    return f"{key}{index}: {shown} {MISTAKES[kind]}"
