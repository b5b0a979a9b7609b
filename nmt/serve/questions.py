"""The questions of POST /v1/translate and /v1/stream, read strictly: an unknown key is an error.

Everything that the model or its engine cannot do is refused here, before a line is queued.
"""

from dataclasses import dataclass
from typing import Any, Literal

from nmt.serve.answers import LineOptions
from nmt.serve.limits import MAX_ATTENTION_MAPS, RequestRefused
from nmt.serve.models import WIDEST_BEAM, Search, ServedModel, ServedModels
from nmt.system.errors import UserError
from nmt.system.records import RecordReader, Rule, default
from nmt.system.strict_json import parse_json

BEAM = Rule(lambda n: 1 <= n <= WIDEST_BEAM, f"be from 1 to {WIDEST_BEAM}")


@dataclass(frozen=True)
class Question:
    q: list[str]  # lines
    model: str | None = None  # the first one
    preset: Literal["vaswani2017", "fairseq", "marian", "hf"] | None = None
    beam: int | None = default(None, BEAM)
    n_best: int = default(1, BEAM)
    prefix: list[str] | None = None  # how the translation of each line begins
    scores: bool = True
    alignments: bool = False
    pieces: bool = False
    attention: bool = False
    api_key: str | None = None

    def check(self) -> str | None:
        if self.prefix is not None and len(self.prefix) != len(self.q):
            return f"prefix has {len(self.prefix):,} lines, and q has {len(self.q):,}"
        for key, lines in (("q", self.q), ("prefix", self.prefix or ())):
            for number, line in enumerate(lines, 1):
                if "\n" in line:
                    return f"{key}: line {number} has a line end; give each line by itself"
        if self.attention and len(self.q) * self.n_best > MAX_ATTENTION_MAPS:
            return f"attention is for at most {MAX_ATTENTION_MAPS} translations; ask for fewer"
        return None


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a request is."""
    try:
        values = parse_json(body, "the body")
    except UserError:
        raise RequestRefused(400, "the body is not JSON in UTF-8") from None
    if not isinstance(values, dict):
        raise RequestRefused(400, "the body is not a JSON object")
    return values


def read_question(values: dict[str, Any]) -> Question:
    reader = RecordReader(lambda key: key or "the question", takes_any_text=True)
    try:
        return reader.read(Question, values)
    except UserError as error:
        raise RequestRefused(400, str(error)) from None


def choose_options(question: Question, models: ServedModels) -> LineOptions:
    """Return what is asked of each line, if the model can do it."""
    model = find_model(question.model, models)
    check_engine(question, model)
    search = Search(question.preset, question.beam)
    config = model.find_translator(search).config
    if question.n_best > config.beam and not config.sample:
        raise RequestRefused(
            400, f"n_best is {question.n_best}, but beam is {config.beam}; give a wider beam"
        )
    return LineOptions(
        model=model,
        search=search,
        n_best=question.n_best,
        has_prefix=question.prefix is not None,
        has_alignments=question.alignments,
        has_pieces=question.pieces,
        has_attention=question.attention,
    )


def find_model(name: str | None, models: ServedModels) -> ServedModel:
    if name is None:
        return models.first
    if name not in models.by_name:
        known = ", ".join(models.by_name)
        raise RequestRefused(400, f"model: there is no {name[:99]!r}; known: {known}")
    return models.by_name[name]


def check_engine(question: Question, model: ServedModel) -> None:
    """Refuse what only our own search can do, if another engine translates."""
    asked = {
        "n_best": question.n_best > 1,
        "prefix": question.prefix is not None,
        "alignments": question.alignments,
        "pieces": question.pieces,
        "attention": question.attention,
    }
    refused = [key for key, is_asked in asked.items() if is_asked]
    if refused and not model.is_ours:
        raise RequestRefused(
            400, f"{model.name} is translated by another engine, without {', '.join(refused)}"
        )
