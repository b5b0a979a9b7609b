"""How good the model is on the dev set: NLL per piece, perplexity, and BLEU by real decoding.

BLEU goes through the translator and the scorer that nmt-eval uses, so the two cannot differ (law 9). Perplexity is per
piece and without label smoothing, comparable across tools with the same BPE.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nmt.config import RunConfig
from nmt.data.loader import make_batch
from nmt.data.plan import split_by_budget
from nmt.data.store import TokenStore, open_store
from nmt.data.vocab import Vocab
from nmt.score.score import Score, score_bleu
from nmt.system.progress import Progress
from nmt.system.ranks import World
from nmt.system.run_folder import dev_text_file
from nmt.train.loss import loss_sums
from nmt.translate.translator import Translation, Translator

GoThrough = Callable[
    [Iterable[object]], bool
]  # does all of the work, unless somebody asks for an end meanwhile


@dataclass(frozen=True)
class DevSet:
    store: TokenStore
    sources: list[str]
    references: list[str]


def open_dev(folder: Path, vocab: Vocab) -> DevSet:
    """That of a store."""
    texts = [
        (folder / dev_text_file(side)).read_bytes().decode().split("\n")[:-1]
        for side in ("src", "tgt")
    ]
    return DevSet(open_store(folder, "valid", vocab.digest), *texts)


@dataclass(frozen=True)
class Validation:
    nll: float
    bleu: Score | None

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nll, 700.0))

    @property
    def goodness(self) -> float:
        """Higher is better: BLEU, or the likelihood where BLEU is switched off."""
        return -self.nll if self.bleu is None else self.bleu.value


@torch.inference_mode()
def dev_nll(
    translator: Translator,
    store: TokenStore,
    micro_tokens: int,
    world: World,
    go_through: GoThrough,
) -> float | None:
    """Mean NLL per target piece; the ranks share the work. None if it was cut short."""
    model = translator.model
    order = np.argsort(store.tgt.lengths, kind="stable")
    bounds = split_by_budget(
        store.src.lengths[order], store.tgt.lengths[order], micro_tokens, micro_tokens
    )
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    n_tokens = 0

    def add(n: int) -> None:
        nonlocal n_tokens
        batch = make_batch(store, order[bounds[n] : bounds[n + 1]]).to(world.device)
        _, nll = loss_sums(model(batch.src, batch.tgt), model.projection.weight, batch.labels, 0.0)
        total.add_(nll.double())
        n_tokens += batch.n_tokens

    was_training = model.training
    model.eval()
    is_done = go_through(map(add, range(world.rank, len(bounds) - 1, world.size)))
    model.train(was_training)
    if not is_done:
        return None
    sums = torch.tensor([total.item(), n_tokens], dtype=torch.float64, device=world.device)
    nll, count = world.sum(sums).tolist()
    return nll / count


def validate(
    translator: Translator,
    dev: DevSet,
    config: RunConfig,
    micro_tokens: int,
    world: World,
    go_through: GoThrough,
) -> Validation | None:
    """On all ranks, of which the first decodes; None if it was cut short."""
    nll = dev_nll(translator, dev.store, micro_tokens, world, go_through)
    if nll is None or not config.evaluation.bleu:
        return None if nll is None else Validation(nll, None)
    sources = dev.sources[: config.evaluation.sentences]
    results = [Translation("", 0.0)] * len(sources)
    with (
        closing(
            Progress("  decoding dev", len(sources), "sentences", is_shown=world.is_main)
        ) as progress,
        closing(translator.translating(sources, results)) as batches,
    ):
        if not go_through(map(progress.advance, batches if world.is_main else ())):
            return None
    texts = [result.text for result in results]
    return Validation(
        nll, score_bleu(texts, dev.references[: len(sources)]) if world.is_main else None
    )
