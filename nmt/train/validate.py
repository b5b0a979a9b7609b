"""How good the model is on the dev set: NLL per piece, perplexity, and BLEU by real decoding.

BLEU goes through the translator and the scorer that nmt-eval uses, so the two cannot differ.
Perplexity is per piece and without label smoothing, comparable across tools with the same BPE.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path

import numpy as np
import torch

from nmt.config import EvaluationConfig
from nmt.data.loader import make_batch
from nmt.data.plan import split_pairs
from nmt.data.store import REMEDY, TokenStore, open_store
from nmt.data.vocab import Vocabulary
from nmt.model.dropout import suspend_dropout
from nmt.model.transformer import Transformer
from nmt.score.score import Score, compute_perplexity, score_bleu, score_chrf
from nmt.system.errors import UserError
from nmt.system.files import read_bytes
from nmt.system.progress import Progress
from nmt.system.ranks import World
from nmt.system.run_folder import dev_text_file
from nmt.train.events import SampleEvent
from nmt.train.loss import Objective
from nmt.train.samples import SAMPLED_LINES, take_sample
from nmt.train.shutdown import StopRequest
from nmt.translate.batching import halve_until_it_fits
from nmt.translate.translator import FoundBatch, Translator

# Below this BLEU is noise: on Europarl it stayed between 0.00 and 0.03 while the dev NLL fell from 8.5 to 6.2.
MIN_BLEU = 2.0
EQUAL_BLEU = 1e-6  # what a nat is worth, so that NLL decides only between equal scores


@dataclass(frozen=True)
class DevSet:
    store: TokenStore
    sources: list[str]
    references: list[str]


def open_dev(folder: Path, vocab: Vocabulary) -> DevSet:
    """Open the dev set of a prepared store: its token ids for the NLL, its raw text for BLEU."""
    store = open_store(folder, "valid", vocab)
    # In memory: it is small, and a validation should not fail because somebody touches the store.
    store = TokenStore(store.src.load(), store.tgt.load())
    return DevSet(
        store, _read_lines(folder, "src", len(store)), _read_lines(folder, "tgt", len(store))
    )


def _read_lines(folder: Path, side: str, n_lines: int) -> list[str]:
    path = folder / dev_text_file(side)
    try:
        lines = read_bytes(path).decode().split("\n")[:-1]
    except UnicodeDecodeError:
        raise UserError(f"{path}: is damaged (it is not UTF-8); {REMEDY}") from None
    if len(lines) != n_lines:
        raise UserError(
            f"{path}: is damaged ({len(lines)} lines for {n_lines} sentences); {REMEDY}"
        )
    return lines


@dataclass(frozen=True)
class Validation:
    nll: float  # per target piece
    bleu: Score | None  # None if BLEU is switched off, and on ranks that do not decode
    selection_score: float  # decides which checkpoint is best; higher is better
    chrf: float | None = None  # only where evaluation.best_by asks for it
    samples: Sequence[SampleEvent] = ()

    @property
    def perplexity(self) -> float:
        return compute_perplexity(self.nll)


@torch.inference_mode()
def compute_dev_nll(
    model: Transformer,
    store: TokenStore,
    micro_tokens: int,
    world: World,
    stop: StopRequest,
) -> float | None:
    """Compute the mean NLL per target piece; the ranks share the work. Return None if a stop cut it
    short.

    It has only the memory of a GPU that training leaves free, so a batch that does not fit is halved.
    """
    tgt_lengths = store.tgt.lengths  # with the end mark
    order = np.argsort(tgt_lengths, kind="stable")
    bounds = split_pairs(store.src.lengths[order], tgt_lengths[order], micro_tokens, micro_tokens)
    batches = [order[first:last].tolist() for first, last in pairwise(bounds)]
    nll_sum = torch.zeros((), dtype=torch.float64, device=world.device)

    objective = Objective(model, 0.0)

    def score(pairs: list[int]) -> None:
        _, nll = objective(make_batch(store, np.array(pairs)).to(world.device))
        nll_sum.add_(nll.double())

    mine = batches[world.rank :: world.size]
    work = halve_until_it_fits(mine, score, torch.cuda.empty_cache)
    with suspend_dropout(model):
        if not stop.run_in_step(work, world):
            return None
    return float(world.sum(nll_sum) / store.tgt.n_tokens)


def validate(
    translator: Translator,
    dev: DevSet,
    step: int,
    evaluation: EvaluationConfig,
    micro_tokens: int,
    world: World,
    stop: StopRequest | None = None,
) -> Validation | None:
    """Score the dev set; the ranks share the work, and rank 0 has the scores. Return None if `stop` cut
    it short.
    """
    stop = stop or StopRequest()  # one that is never made
    nll = compute_dev_nll(translator.model, dev.store, micro_tokens, world, stop)
    if nll is None:
        return None
    if not evaluation.bleu:
        return Validation(nll, None, -nll)
    chosen = choose_dev_lines(len(dev.sources), evaluation.sentences)
    sources = [dev.sources[line] for line in chosen]
    texts = _translate(translator, sources, world, stop)
    if texts is None:
        return None
    if not world.is_main:
        return Validation(nll, None, -nll)
    references = [dev.references[line] for line in chosen]
    samples = [
        take_sample(step, chosen[i], sources[i], references[i], texts[i])
        for i in choose_dev_lines(len(chosen), SAMPLED_LINES)
    ]
    score = score_bleu(texts, references)
    selection_scores = {"bleu": rate_bleu(score.value, nll), "nll": -nll}
    chrf = None
    if evaluation.best_by == "chrf":
        chrf = selection_scores["chrf"] = score_chrf(texts, references)
    if len(chosen) < len(dev.sources):
        part = f"{score.signature}|lines:{len(chosen)}/{len(dev.sources)}"
        score = replace(score, signature=part)
    return Validation(nll, score, selection_scores[evaluation.best_by], chrf, samples)


def rate_bleu(bleu: float, nll: float) -> float:
    """Rate a model by its BLEU, and by its NLL where BLEU is noise, or equal: any NLL below any BLEU."""
    return -nll if bleu < MIN_BLEU else bleu - nll * EQUAL_BLEU


def _translate(
    translator: Translator, sources: Sequence[str], world: World, stop: StopRequest
) -> list[str] | None:
    """Translate the lines, which are dealt to the ranks like cards. Rank 0 returns all texts; all return
    None if `stop` cut it short.
    """
    mine = sources[world.rank :: world.size]
    found: FoundBatch = []
    progress = Progress("  decoding dev", len(mine), "sentences", is_shown=world.is_main)

    def take(batch: FoundBatch) -> None:
        found.extend(batch)
        progress.advance(len(batch))

    with progress, closing(translator.find_by_batch(mine)) as batches:
        if not stop.run_in_step(map(take, batches), world):
            return None
    texts = [best.text for _, (best, *_) in sorted(found)]
    hands = world.collect(json.dumps(texts).encode())
    rounds = zip_longest(*map(json.loads, hands))  # the first line of each rank, then the second
    return [text for of_round in rounds for text in of_round if text is not None]


def choose_dev_lines(n_lines: int, n_wanted: int | None) -> Sequence[int]:
    """Choose the dev lines that are translated: all, or as many as wanted, spread evenly over the
    set.

    The first lines are not a fair sample: a set sorted by length begins with the shortest, and a
    model that is best on those may be worse on the whole.
    """
    if n_wanted is None or n_wanted >= n_lines:
        return range(n_lines)
    return [(2 * i + 1) * n_lines // (2 * n_wanted) for i in range(n_wanted)]
