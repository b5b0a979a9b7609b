"""How good the model is on the dev set: NLL per piece, perplexity, and BLEU by real decoding.

BLEU goes through the translator and the scorer that nmt-eval uses, so the two cannot differ (law 9). Perplexity is per
piece and without label smoothing, comparable across tools with the same BPE.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from nmt.config import RunConfig
from nmt.data.loader import make_batch
from nmt.data.plan import cut
from nmt.data.store import TokenStore
from nmt.decode.translator import Translator
from nmt.dist import World
from nmt.progress import Progress
from nmt.score.bleu import Score, bleu
from nmt.train.loss import loss_sums


@dataclass(frozen=True)
class DevSet:
    store: TokenStore
    sources: list[str]
    references: list[str]


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
def dev_nll(translator: Translator, store: TokenStore, micro_tokens: int, world: World) -> float:
    """Mean NLL per target piece; the ranks share the work."""
    model = translator.model
    order = np.argsort(store.tgt.lengths, kind="stable")
    bounds = cut(store.src.lengths[order] + 1, store.tgt.lengths[order] + 1, micro_tokens, micro_tokens)
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    was_training = model.training
    model.eval()
    for n in range(world.rank, len(bounds) - 1, world.size):
        batch = make_batch(store, order[bounds[n]:bounds[n + 1]]).to(world.device)
        _, nll = loss_sums(model(batch.src, batch.tgt), model.projection.weight, batch.labels, 0.0)
        sums += torch.stack((nll.double(), torch.tensor(batch.n_tokens, device=world.device).double()))
    model.train(was_training)
    total, count = world.sum(sums).tolist()
    return total / count


def validate(translator: Translator, dev: DevSet, config: RunConfig, world: World) -> Validation:
    nll = dev_nll(translator, dev.store, config.training.sized, world)
    score = None
    if config.evaluation.bleu and world.is_main:
        n = config.evaluation.sentences
        progress = Progress("  decoding dev", len(dev.sources[:n]), "sentences")
        texts = [t.text for t in translator.translate(dev.sources[:n], progress)]
        progress.close()
        score = bleu(texts, dev.references[:n])
    world.barrier()
    return Validation(nll, score)
