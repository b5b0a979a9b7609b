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
from nmt.translate.attention_maps import AttentionMap
from nmt.translate.batching import DEFAULT_BATCH_TOKENS
from nmt.translate.pair_scores import compute_log_probs
from nmt.translate.translator import Request, TextToText, Translation, Translator


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


@dataclass
class LineCandidate:
    """A translation of a line. What was not asked for is None, as it is for a line in parts."""

    translation: Translation
    pieces: list[str] | None = None  # the end mark comes last
    log_probs: list[float] | None = None  # of each piece
    attention: AttentionMap | None = None

    def to_json(self, has_alignment: bool) -> dict[str, Any]:
        values: dict[str, Any] = {
            "text": self.translation.text.replace("\n", " "),
            "score": round(self.translation.score, 6),
        }
        if self.pieces is not None and self.log_probs is not None:
            rows = zip(self.pieces, self.log_probs, strict=True)
            values["pieces"] = [{"piece": p, "log_prob": round(x, 6)} for p, x in rows]
        if has_alignment:
            values["alignment"] = [[s, t] for t, s in enumerate(self.translation.alignment)]
        if self.attention is not None:
            values["attention"] = self.attention.to_json()
        return values


def answer_lines_alike(
    options: LineOptions, texts: Sequence[str], prefixes: Sequence[str]
) -> list[list[LineCandidate]]:
    """Find the candidates of lines that have the options in common, best first."""
    translator = options.model.find_translator(options.search)
    found = translator.find_candidates(
        texts,
        Request(options.n_best, options.has_alignments),
        prefixes if options.has_prefix else None,
    )
    answers = [[LineCandidate(one) for one in candidates] for candidates in found]

    # all candidates of all lines in one list, each with its line
    lines, flat = [], []
    for text, candidates in zip(texts, answers, strict=True):
        lines += [text] * len(candidates)
        flat += candidates
    if options.has_pieces:
        _add_log_probs(translator, lines, flat)
    if options.has_attention:
        maps = translator.map_attention(lines, [one.translation for one in flat])
        for candidate, map_of_one in zip(flat, maps, strict=True):
            candidate.attention = map_of_one
    return answers


def _add_log_probs(
    translator: TextToText, lines: Sequence[str], candidates: Sequence[LineCandidate]
) -> None:
    """Give each candidate its pieces and their log-probabilities, if its line was translated whole."""
    assert isinstance(translator, Translator)
    whole, sources, targets = [], [], []
    for ids, candidate in zip(translator.vocab.src.encode(lines), candidates, strict=True):
        if len(ids) <= translator.longest or translator.config.long_lines == "cut":
            whole.append(candidate)
            sources.append([*translator.tag_ids, *ids[: translator.longest]])
            targets.append(list(candidate.translation.piece_ids))
    budget = translator.config.batch_tokens or DEFAULT_BATCH_TOKENS
    found = compute_log_probs(
        translator.prepared_models, sources, targets, translator.device, budget
    )
    for batch, rows in found:
        for i, log_probs in zip(batch, rows, strict=True):
            whole[i].pieces = translator.vocab.tgt.pieces([*targets[i], EOS])
            whole[i].log_probs = log_probs
