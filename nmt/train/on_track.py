"""Is the run on track? A yardstick that needs no other run: the unigram entropy of the target text.

A model that knows only how often each piece occurs has an NLL of that entropy. A post-norm model, or
one whose learning rate is too high, may leave warm-up there and stay for days; the loss is finite,
so nothing else notices. All that is known here comes from the token store and from metrics.jsonl, so
a continued run knows it too. Only the main rank asks, and nothing here changes the training.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nmt.config import RunConfig
from nmt.data.store import Side

# A run that is at this share of the unigram entropy, or above, has learned nothing else. Healthy runs
# are at 0.7 or below when warm-up ends, stalled ones at 1.03 (measured: docs/configuration.md).
STALLED_SHARE = 0.9
# Before this update nothing is said, however short the warm-up: a post-norm toy of three layers left
# the unigram entropy at update 200, and translated then.
MIN_UPDATES = 500
# A run that had learned is told to have fallen back after this many updates without a better line,
# so that a spike does not count.
FALLEN_UPDATES = 50

SAMPLED_IDS = 20_000_000  # enough for three digits; a large store has a billion
SAMPLED_BLOCKS = 100  # spread over the store, because corpora follow one another there

Event = dict[str, Any]  # a line of metrics.jsonl


def unigram_entropy(side: Side, sampled_ids: int = SAMPLED_IDS) -> float:
    """Compute the entropy of a side's tokens in nats per token, as the NLL is averaged: the end mark
    of each sentence is a token too.

    BPE-dropout segments the text anew in each epoch; the entropy is that of the stored segmentation.
    """
    n_ids, n_sentences = len(side.ids), len(side)
    block = n_ids if n_ids <= sampled_ids else sampled_ids // SAMPLED_BLOCKS
    # As many blocks as are needed, at equal distances from the first id to the last.
    n_blocks = 1 if block == n_ids else SAMPLED_BLOCKS
    starts = np.linspace(0, n_ids - block, n_blocks).astype(np.int64)
    counts = np.zeros(0, np.int64)
    for start in starts:
        found = np.bincount(side.ids[start : start + block], minlength=len(counts))
        found[: len(counts)] += counts
        counts = found

    # The number of end marks is known exactly, so that only the pieces are estimated.
    n_tokens = n_ids + n_sentences
    pieces = counts[counts > 0] / max(counts.sum(), 1) * (n_ids / n_tokens)
    shares = np.append(pieces, n_sentences / n_tokens)
    return float(-(shares * np.log(shares)).sum())


def smoothed_loss_floor(smoothing: float, n_vocab: int) -> float:
    """Compute the entropy of a label-smoothed target in nats: no model's smoothed loss is lower.

    The target gives 1 - eps to the gold piece and eps / (V - 1) to each other (nmt/train/loss.py).
    """
    if not smoothing:
        return 0.0
    other = smoothing / (n_vocab - 1)
    return -(1 - smoothing) * math.log(1 - smoothing) - smoothing * math.log(other)


class LearningCheck:
    """Watches the log lines of a run for one that has not learned, or no longer knows what it had
    learned. It warns of each once per process.
    """

    def __init__(self, config: RunConfig, tgt: Side, earlier: Sequence[Event]) -> None:
        """`earlier` are the lines of metrics.jsonl that the run is continued from."""
        self.config = config
        self.unigram_nll = unigram_entropy(tgt)
        self.bound = STALLED_SHARE * self.unigram_nll
        self.first_update = max(config.optimizer.warmup_steps, MIN_UPDATES)
        self.lowest = (math.inf, 0)  # the lowest NLL of a line, and its update
        self.last_step = 0  # of the line before
        self.last_learned = 0  # the newest line below the bound, 0: none yet
        self.warned: set[str] = set()  # by this process
        self.recorded = {event.get("problem") for event in earlier if event["kind"] == "warning"}
        for event in earlier:
            nll = event.get("nll")
            if event["kind"] == "train" and isinstance(nll, int | float):
                self._add_line(event["step"], nll)

    def _add_line(self, step: int, nll: float) -> None:
        self.lowest = min(self.lowest, (nll, step))
        self.last_step = step
        if nll < self.bound:
            self.last_learned = step

    def check(self, step: int, nll: float) -> Event | None:
        """Take in a log line, the mean NLL of the updates after the line before. Return a warning to
        be shown if the run is not on track.
        """
        window_start = self.last_step
        lowest_before = self.lowest
        self._add_line(step, nll)
        # A window that began earlier has the high losses of the first updates in its mean.
        if window_start < self.first_update or nll < self.bound:
            return None
        if not self.last_learned:
            problem = "stalled"
        elif step - self.last_learned >= FALLEN_UPDATES:
            problem = "fell back"
        else:
            return None
        if problem in self.warned:
            return None
        self.warned.add(problem)
        return {
            "kind": "warning",
            "step": step,
            "problem": problem,
            "nll": round(nll, 5),
            "unigram_nll": round(self.unigram_nll, 5),
            "message": self._describe(problem, step, nll, lowest_before),
        }

    def is_new(self, warning: Event) -> bool:
        """Whether metrics.jsonl does not have this warning yet, from an earlier process."""
        return warning["problem"] not in self.recorded

    def _describe(self, problem: str, step: int, nll: float, lowest: tuple[float, int]) -> str:
        optimizer, unigram = self.config.optimizer, f"{self.unigram_nll:.2f}"
        if problem == "stalled":
            what = (
                f"update {step:,}: the model has learned only how often each target piece occurs: "
                f"its NLL is {nll:.2f} nats per token, and the frequencies alone give {unigram}"
            )
        else:
            what = (
                f"update {step:,}: the run has diverged: its NLL was {lowest[0]:.2f} nats per token "
                f"at update {lowest[1]:,} and is {nll:.2f} now; the frequencies of the target pieces "
                f"alone give {unigram}"
            )
        remedies = [
            f"a lower optimizer.scale (now {optimizer.scale:g})",
            f"more optimizer.warmup_steps (now {optimizer.warmup_steps:,})",
        ]
        if self.config.model.norm == "post":
            remedies.append("model.norm=pre")
        choice = f"{', '.join(remedies[:-1])} or {remedies[-1]}"
        return f"{what}; if this lasts, start over in another out=DIR with {choice}"
