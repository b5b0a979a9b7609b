"""What clients send and what they get, as pydantic types: FastAPI reads, checks and describes them.

A `TextsRequest` is LibreTranslate's: unknown keys are ignored, an empty value is a missing one, and
numbers may come as digits. A `LinesRequest` is ours and strict: an unknown key is an error. Answers
leave out what was not asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

MAX_ATTENTION_MAPS = 8  # of a request: all layers and heads of a long line are megabytes
WIDEST_BEAM = 12  # that a client may ask for: time and memory grow with it
SHOWN_CHARACTERS = 99  # of a wrong value
BeamWidth = Annotated[int, Field(ge=1, le=WIDEST_BEAM)]
Preset = Literal["vaswani2017", "fairseq", "marian", "hf"]


class KeyedRequest(BaseModel):
    """A request with the key that some servers ask for; `apiKey` is what the npm client calls it."""

    api_key: str | None = Field(None, validation_alias=AliasChoices("api_key", "apiKey"))


# ---- LibreTranslate's -----------------------------------------------------------------------------------------------


class DetectRequest(KeyedRequest):
    q: str = Field(min_length=1)


class TextsRequest(KeyedRequest):
    q: str | Annotated[list[str], Field(min_length=1)]
    source: str
    target: str
    format: Literal["text"] = "text"
    alternatives: int = Field(0, ge=0)

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


class LinesRequest(KeyedRequest):
    model_config = ConfigDict(strict=True, extra="forbid")

    q: list[str] = Field(description="lines")
    model: str | None = Field(None, description="the first one if absent")
    preset: Preset | None = None
    beam: BeamWidth | None = None
    n_best: BeamWidth = 1
    prefix: list[str] | None = Field(None, description="how each translation begins")
    scores: bool = True
    alignments: bool = False
    pieces: bool = False
    attention: bool = False

    @model_validator(mode="after")
    def check_lines(self) -> "LinesRequest":
        if self.prefix is not None and len(self.prefix) != len(self.q):
            raise ValueError(f"prefix has {len(self.prefix):,} lines, and q has {len(self.q):,}")
        for key, lines in (("q", self.q), ("prefix", self.prefix or ())):
            for number, line in enumerate(lines, 1):
                if "\n" in line:
                    raise ValueError(
                        f"{key}: line {number} has a line end; give each line by itself"
                    )
        if self.attention and len(self.q) * self.n_best > MAX_ATTENTION_MAPS:
            raise ValueError(
                f"attention is for at most {MAX_ATTENTION_MAPS} translations; ask for fewer"
            )
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
    """A translation of a line. A line that was translated in parts has no pieces."""

    text: str
    score: float | None = None
    pieces: list[Piece] | None = Field(None, description="the end mark comes last")
    alignment: list[tuple[int, int]] | None = None
    attention: ShownAttention | None = None


class TranslatedLine(BaseModel):
    candidates: list[LineCandidate]


class LinesAnswer(BaseModel):
    model: str
    translations: list[TranslatedLine]


class StreamedLine(BaseModel):
    """A line of the answer of /v1/stream: candidates, or why there are none."""

    index: int | None = None
    candidates: list[LineCandidate] | None = None
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


def explain_invalid(errors: Sequence[Mapping[str, Any]]) -> str:
    """Say in one line what is wrong with a request: the key, what it must be, and what it is."""
    first = errors[0]
    kind, message = first["type"], first["msg"]
    keys = [part for part in first["loc"] if part != "body"]
    if kind == "json_invalid":
        return "the body is not JSON"
    if kind == "value_error":
        return str(first["ctx"]["error"])
    if not keys:
        return "the body is not a JSON object"
    if kind == "extra_forbidden":
        known = ", ".join(LinesRequest.model_fields)
        return f"unknown key {keys[0][:SHOWN_CHARACTERS]!r}; known: {known}"
    place = keys[0]
    if isinstance(keys[-1], int):
        place += f"[{keys[-1]}]"
    if kind == "missing":
        return f"{place} is missing"
    shown = repr(first["input"])[:SHOWN_CHARACTERS]
    return f"{place}: {message[0].lower()}{message[1:]}, not {shown}"
