"""Scores files of pairs chunk by chunk, one line for each pair, in order.

Each chunk is scored as a whole, so that pairs of similar length share a batch, and written at
once. An impossible pair gets a line too, -inf, and is counted separately: the NLL and perplexity of the rest
would be infinite with it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus.reader import PAIRS_AT_ONCE, Block, read_blocks
from nmt.extras.pair_scores.pair_scores import PairScore, PairScorer, ScoreKind, open_pair_scorer
from nmt.score.score import compute_perplexity
from nmt.score.text_checks import warn_of_unrelated
from nmt.system.progress import say
from nmt.system.strict_json import Fields
from nmt.translate.lines import refuse_short
from nmt.translate.stream import DoneChunk, share_cores

MAX_NAMED = 3  # impossible pairs that are named one by one


@dataclass
class ScoreTotals:
    """The totals of all pairs."""

    pairs: int = 0
    impossible: int = 0
    tokens: int = 0  # of the possible ones, end marks included
    nll: float = 0.0

    def add(self, chunk: "ScoredChunk") -> None:
        """Add the pairs of a chunk, and say what is wrong with the first few of all."""
        self.pairs += chunk.n_lines
        for number, problem in chunk.problems.items():
            self.impossible += 1
            if self.impossible <= MAX_NAMED:
                say(f"warning: pair {number:,} is impossible: {problem}")
        self.tokens += chunk.n_tokens
        self.nll += chunk.nll

    def describe(self) -> str:
        text = f"{self.pairs:,} pairs, {self.tokens:,} tokens"
        if self.tokens:
            nll = self.nll / self.tokens
            text += f": NLL per token {nll:.4f}, perplexity {compute_perplexity(nll):.3f}"
        if self.impossible:
            text += f"; {self.impossible:,} impossible pairs are not counted"
        return text


def read_pair_chunks(src: str, tgt: str, skip: int) -> Iterator[Block]:
    """Read two files of one sentence per line, but for the first `skip` pairs, which are whole chunks:
    so the scores do not depend on where an earlier run was stopped.
    """
    n = 0
    corpus = CorpusConfig(src=src, tgt=tgt)
    for block in read_blocks(corpus, DataConfig(), PAIRS_AT_ONCE):
        if block.first == 1:
            warn_of_unrelated(src, block.src, tgt, block.tgt)
        n = block.first - 1 + len(block.src)
        if n > skip:
            yield block
    refuse_short(src, n, skip)


@dataclass(frozen=True)
class ScoredChunk(DoneChunk):
    problems: dict[int, str] = field(default_factory=dict)  # of impossible pairs, by number
    n_tokens: int = 0
    nll: float = 0.0


@dataclass(frozen=True)
class ChunkScorer:
    scorer: PairScorer
    kind: ScoreKind
    is_json: bool

    def __call__(self, chunk: Block) -> ScoredChunk:
        rows = []
        problems = {}
        n_tokens, nll = 0, 0.0
        scores = self.scorer.score_pairs(chunk.src, chunk.tgt)
        for number, score in enumerate(scores, chunk.first):
            rows.append(self._format(score, number))
            if score.problem is not None:
                problems[number] = score.problem
            else:
                n_tokens += len(score.piece_ids)
                nll -= score.log_prob
        data = "".join(rows).encode()
        return ScoredChunk(data, len(rows), chunk.share, None, problems, n_tokens, nll)

    def _format(self, score: PairScore, number: int) -> str:
        value = score.value(self.kind, self.scorer.config)
        if not self.is_json:
            return f"{value:.6f}\n"
        fields: Fields = {"line": number, "score": None}  # JSON has no infinity
        if score.problem is not None:
            fields["problem"] = score.problem
        else:
            fields["score"] = round(value, 6)
            fields["pieces"] = self.scorer.translator.vocab.tgt.pieces(score.piece_ids)
            fields["log_probs"] = [round(log_prob, 6) for log_prob in score.log_probs]
        return json.dumps(fields, ensure_ascii=False) + "\n"


def start_scoring(
    checkpoints: Sequence[str],
    overrides: Sequence[str],
    kind: ScoreKind,
    is_json: bool,
    n_here: int,
) -> ChunkScorer:
    share_cores(n_here)
    scorer = open_pair_scorer(checkpoints, overrides)
    return ChunkScorer(scorer, kind, is_json)
