"""What a server answers for a line: its candidates, and on request the probability of each piece and
all attention.

Lines go through the same function as those of nmt-translate. What is asked for besides is computed
for a whole batch at once, from the pieces that the search found.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nmt.data.vocab import EOS
from nmt.serve.models import Search, ServedModel
from nmt.translate.batching import DEFAULT_BATCH_TOKENS
from nmt.translate.pair_scores import compute_log_probs
from nmt.translate.translator import Candidates, Request, TextToText, Translation, Translator


@dataclass(frozen=True)
class LineOptions:
    """What is asked of a line; lines of one batch have it in common."""

    model: ServedModel
    search: Search = Search()
    n_best: int = 1
    has_prefix: bool = False
    has_alignments: bool = False
    has_pieces: bool = False
    has_attention: bool = False


@dataclass(frozen=True)
class LineAnswer:
    candidates: Candidates
    # of each candidate; None where a line was translated in parts, or nobody asked
    log_probs: Sequence[Sequence[float] | None]
    attention: Sequence[dict[str, Any] | None]


def answer_lines_alike(
    options: LineOptions, texts: Sequence[str], prefixes: Sequence[str]
) -> list[LineAnswer]:
    """Translate lines that have the options in common."""
    translator = options.model.find_translator(options.search)
    candidates = translator.find_candidates(
        texts,
        Request(options.n_best, options.has_alignments),
        prefixes if options.has_prefix else None,
    )
    pairs, places = _list_pairs(translator, texts, candidates)
    log_probs = [[None] * len(some) for some in candidates]
    attention = [[None] * len(some) for some in candidates]
    if options.has_pieces:
        _fill(log_probs, places, _find_log_probs(translator, pairs))
    return [
        LineAnswer(*one) for one in zip(candidates, log_probs, attention, strict=True)
    ]
