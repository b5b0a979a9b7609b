"""What a server answers for a line: its candidates, and on request the probability of each piece and
all attention.

Lines go through the same function as those of nmt-translate. Anything else that is asked for is computed
for a whole batch at once, from the pieces that the search found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from nmt.data.vocab import EOS
from nmt.documents.document import Link
from nmt.serve.messages import LineCandidate, Piece, ShownAttention
from nmt.serve.models import SearchChoice, ServedModel
from nmt.translate.batching import DEFAULT_BATCH_TOKENS
from nmt.translate.pair_scores import compute_log_probs
from nmt.translate.phrases import Glossary, tidy_phrase
from nmt.translate.translator import Request, TextToText, Translation, Translator


def tidy_glossary(terms: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((tidy_phrase(source), tidy_phrase(target)) for source, target in terms.items())


@dataclass(frozen=True)
class LineOptions:
    """The options of a line; all lines of a batch share them."""

    model: ServedModel
    search: SearchChoice = SearchChoice()
    n_best: int = 1
    glossary: tuple[tuple[str, str], ...] = ()
    has_prefix: bool = False
    has_alignments: bool = False
    has_pieces: bool = False
    has_attention: bool = False
    has_scores: bool = True
    has_links: bool = False  # between the characters of a translation and of its source

    def make_candidate(self, source: str, translation: Translation) -> LineCandidate:
        links: Sequence[Link] = ()
        if self.has_links:
            links = self.model.loaded.translator.link(source, translation).links
        alignment = None
        if self.has_alignments:
            alignment = [(src, tgt) for tgt, src in enumerate(translation.alignment)]
        return LineCandidate(
            text=translation.text.replace("\n", " "),
            score=round(translation.score, 6) if self.has_scores else None,
            alignment=alignment,
            links=links,
        )


def answer_lines_alike(
    options: LineOptions, texts: Sequence[str], prefixes: Sequence[str]
) -> list[list[LineCandidate]]:
    """Find the candidates of lines with the same options, best first."""
    translator = options.model.find_translator(options.search)
    demanded = None
    if options.glossary:
        glossary = Glossary(dict(options.glossary))
        demanded = [glossary.list_targets(translator.read_line(text)) for text in texts]
    found = translator.find_candidates(
        texts,
        Request(options.n_best, options.has_alignments or options.has_links),
        prefixes if options.has_prefix else None,
        demanded=demanded,
    )

    # What else is asked for is computed for all candidates at once, so each gets a line of its own.
    answers: list[list[LineCandidate]] = []
    lines: list[str] = []
    translations: list[Translation] = []
    for text, best_first in zip(texts, found, strict=True):
        answers.append([options.make_candidate(text, translation) for translation in best_first])
        lines += [text] * len(best_first)
        translations += best_first
    candidates = list(chain.from_iterable(answers))
    if options.has_pieces:
        _add_pieces(translator, lines, translations, candidates)
    if options.has_attention:
        maps = translator.map_attention(lines, translations)
        for candidate, attention in zip(candidates, maps, strict=True):
            if attention is not None:
                candidate.attention = ShownAttention(**attention.to_json())
    return answers


def _add_pieces(
    translator: TextToText,
    lines: Sequence[str],
    translations: Sequence[Translation],
    candidates: Sequence[LineCandidate],
) -> None:
    """Give each candidate its pieces and their log-probabilities."""
    assert isinstance(translator, Translator)  # other engines are refused before
    ids_of_lines = translator.encode_source(lines)
    sources = [[*translator.tag_ids, *ids[: translator.longest]] for ids in ids_of_lines]
    targets = [list(translation.piece_ids) for translation in translations]
    budget = translator.config.batch_tokens or DEFAULT_BATCH_TOKENS
    found = compute_log_probs(
        translator.prepared_models, sources, targets, translator.device, budget
    )
    for candidate, target, log_probs in zip(candidates, targets, found, strict=True):
        pieces = translator.vocab.tgt.pieces([*target, EOS])
        candidate.pieces = [
            Piece(piece=piece, log_prob=round(log_prob, 6))
            for piece, log_prob in zip(pieces, log_probs, strict=True)
        ]
