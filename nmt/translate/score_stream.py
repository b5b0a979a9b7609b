"""Scores files of pairs or n-best lists chunk by chunk, one line for each pair, in order.

Each chunk is scored as a whole, so that pairs of similar length meet, and written at once. A pair
that is impossible gets its line too, -inf, and is counted apart: the NLL and perplexity of the rest
would be infinite with it.
"""

import json
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any, NamedTuple

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus.reader import PAIRS_AT_ONCE, read_blocks
from nmt.system.errors import UserError
from nmt.system.progress import say
from nmt.translate.n_best import NBest
from nmt.translate.pair_scores import PairScore, PairScorer, ScoreKind
from nmt.translate.stream import write_uninterrupted

MAX_NAMED = 3  # impossible pairs that are named one by one


class PairChunk(NamedTuple):
    """Consecutive pairs."""

    first: int  # number of the first pair, from 1
    sources: Sequence[str]
    targets: Sequence[str]
    share: float | None = None  # of the input, read by now


@dataclass
class ScoreTotals:
    """What came of all pairs."""

    pairs: int = 0
    impossible: int = 0
    tokens: int = 0  # of the possible ones, end marks included
    nll: float = 0.0

    def add(self, score: PairScore, number: int) -> None:
        self.pairs += 1
        if score.problem is not None:
            self.impossible += 1
            if self.impossible <= MAX_NAMED:
                say(f"warning: pair {number:,} is impossible: {score.problem}")
        else:
            self.tokens += len(score.piece_ids)
            self.nll -= score.log_prob

    def describe(self) -> str:
        text = f"{self.pairs:,} pairs, {self.tokens:,} tokens"
        if self.tokens:
            nll = self.nll / self.tokens
            text += f": NLL per token {nll:.4f}, perplexity {math.exp(min(nll, 50.0)):.3f}"
        if self.impossible:
            text += f"; {self.impossible:,} impossible pairs are not counted"
        return text


def read_pair_chunks(src: str, tgt: str, skip: int = 0) -> Iterator[PairChunk]:
    """Read two files of one sentence per line, but for the first `skip` pairs."""
    n = 0
    corpus = CorpusConfig(src=src, tgt=tgt)
    for block in read_blocks(corpus, DataConfig(), PAIRS_AT_ONCE):
        n = block.first - 1 + len(block.src)
        n_skipped = max(0, skip + 1 - block.first)
        if n > skip:
            sources, targets = block.src[n_skipped:], block.tgt[n_skipped:]
            yield PairChunk(block.first + n_skipped, sources, targets, block.share)
    if n < skip:
        raise UserError(
            f"{src}: has {n:,} lines, fewer than the {skip:,} already scored; give the files that the "
            "output was made from"
        )


def pair_candidates(lists: Iterator[NBest], is_reverse: bool) -> Iterator[PairChunk]:
    """Pair each candidate with its source; in reverse the candidate is the source."""
    first = 1
    while some := list(islice(lists, PAIRS_AT_ONCE // 4)):
        sources = [one.source for one in some for _ in one.texts]
        texts = [text for one in some for text in one.texts]
        yield PairChunk(first, texts, sources) if is_reverse else PairChunk(first, sources, texts)
        first += len(texts)


def write_scores(
    chunks: Iterator[PairChunk],
    out: IO[bytes],
    score_chunk: Callable[[PairChunk], Iterator[tuple[PairScore, str]]],
    totals: ScoreTotals,
) -> Generator[PairChunk]:
    """Write a line for each pair; yields each chunk once it is written."""
    for chunk in chunks:
        rows = []
        for number, (score, row) in enumerate(score_chunk(chunk), chunk.first):
            totals.add(score, number)
            rows.append(row)
        write_uninterrupted(out, "".join(rows).encode())
        yield chunk


def score_stream(
    scorer: PairScorer,
    chunks: Iterator[PairChunk],
    out: IO[bytes],
    kind: ScoreKind,
    is_json: bool,
    totals: ScoreTotals,
) -> Generator[PairChunk]:
    """Write the score of each pair."""

    def score_chunk(chunk: PairChunk) -> Iterator[tuple[PairScore, str]]:
        scores = scorer.score_pairs(chunk.sources, chunk.targets)
        for number, score in enumerate(scores, chunk.first):
            yield score, _format_score(scorer, score, number, kind, is_json)

    return write_scores(chunks, out, score_chunk, totals)


def _format_score(
    scorer: PairScorer, score: PairScore, number: int, kind: ScoreKind, is_json: bool
) -> str:
    value = score.value(kind, scorer.config)
    if not is_json:
        return f"{value:.6f}\n"
    fields: dict[str, Any] = {"line": number, "score": None}  # JSON has no infinity
    if score.problem is not None:
        fields["problem"] = score.problem
    else:
        fields["score"] = round(value, 6)
        fields["pieces"] = scorer.translator.vocab.tgt.pieces(score.piece_ids)
        fields["log_probs"] = [round(one, 6) for one in score.log_probs]
    return json.dumps(fields, ensure_ascii=False) + "\n"
