"""Checks whether a run is learning, by a yardstick that needs no other run: the unigram entropy of
the target text.

That is the NLL of a model that knows only how often each piece occurs. A post-norm model, or one
whose learning rate is too high, may come out of warm-up at this level and stay there for days. Its
loss is finite, so no other check notices. This one reads only the token store and metrics.jsonl, so
it judges a continued run as it would an uninterrupted one. Only the main rank checks, and training
continues whatever it finds.
"""

import math
from collections.abc import Sequence

import numpy as np

from nmt.config import OptimizerConfig
from nmt.data.store import Side
from nmt.train.events import Event, TrainEvent, WarningEvent

# An NLL of this share of the unigram entropy, or above, counts as no learning. When warm-up ends,
# healthy runs are at 0.7 or below, stalled ones at 1.03 (measured: docs/configuration.md).
STALLED_SHARE = 0.9
# No warning comes before this update, however short the warm-up: a post-norm toy of three layers
# was still at the unigram entropy at update 200, and learned to translate after that.
MIN_UPDATES = 500
# A run that had learned has fallen back if it stays at that level for this many updates. A spike is
# shorter.
FALLEN_UPDATES = 50

SAMPLED_IDS = 20_000_000  # enough for three digits; a large store has a billion
SAMPLED_BLOCKS = 100  # spread over the store, because corpora follow one another there


def unigram_entropy(side: Side, sampled_ids: int = SAMPLED_IDS) -> float:
    """Compute the entropy of a side's tokens in nats per token. The end mark of each sentence is a
    token, as it is in the NLL.

    BPE-dropout segments the text anew in each epoch; the entropy is that of the stored segmentation.
    """
    n_ids, n_sentences = len(side.ids), len(side)
    if n_ids <= sampled_ids:
        block, n_blocks = n_ids, 1
    else:
        block, n_blocks = sampled_ids // SAMPLED_BLOCKS, SAMPLED_BLOCKS
    # at equal distances from the first id to the last
    starts = np.linspace(0, n_ids - block, n_blocks).astype(np.int64)
    counts = np.zeros(0, np.int64)
    for start in starts:
        block_counts = np.bincount(
            side.read_ids(int(start), int(start) + block), minlength=len(counts)
        )
        block_counts[: len(counts)] += counts
        counts = block_counts

    # Only the shares of the pieces are estimated: the number of end marks is known exactly.
    n_tokens = n_ids + n_sentences
    pieces = counts[counts > 0] / max(counts.sum(), 1) * (n_ids / n_tokens)
    shares = np.append(pieces, n_sentences / n_tokens)
    return float(-(shares * np.log(shares)).sum())


class LearningCheck:
    """Watches the log lines of a run, and warns if it has not learned or has lost what it had
    learned; once of each per process.
    """

    def __init__(
        self, optimizer: OptimizerConfig, norm: str, tgt: Side, earlier: Sequence[Event]
    ) -> None:
        """`earlier` are the events of the run's earlier starts."""
        self.optimizer, self.norm = optimizer, norm
        self.unigram_nll = unigram_entropy(tgt)
        self.bound = STALLED_SHARE * self.unigram_nll
        self.first_update = max(optimizer.warmup_steps, MIN_UPDATES)
        self.lowest = (math.inf, 0)  # the lowest NLL of a line, and its update
        self.last_step = 0  # the update of the newest line
        self.last_learned = 0  # that of the newest line below the bound; 0: none yet
        self.warned: set[str] = set()  # problems that this process has warned of
        self.recorded: set[str] = set()  # problems that metrics.jsonl already has
        for event in earlier:
            if isinstance(event, WarningEvent):
                self.recorded.add(event.problem)
            elif isinstance(event, TrainEvent) and math.isfinite(event.nll):
                self._add_line(event.step, event.nll)

    def _add_line(self, step: int, nll: float) -> None:
        self.lowest = min(self.lowest, (nll, step))
        self.last_step = step
        if nll < self.bound:
            self.last_learned = step

    def check(self, step: int, nll: float) -> WarningEvent | None:
        """Take in a log line: the mean NLL of the updates since the line before. Return a warning if
        the run is not on track.
        """
        window_start = self.last_step
        lowest_before = self.lowest
        self._add_line(step, nll)
        # The mean of a window that began earlier includes the high losses of the first updates.
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
        return WarningEvent(
            step=step,
            problem=problem,
            nll=round(nll, 5),
            unigram_nll=round(self.unigram_nll, 5),
            message=self._describe(problem, step, nll, lowest_before),
        )

    def is_new(self, warning: WarningEvent) -> bool:
        """Tell whether metrics.jsonl lacks a warning of this problem from an earlier start."""
        return warning.problem not in self.recorded

    def _describe(self, problem: str, step: int, nll: float, lowest: tuple[float, int]) -> str:
        optimizer = self.optimizer
        if problem == "stalled":
            what = (
                f"the model has learned only how often each target piece occurs: its NLL is {nll:.2f} "
                f"nats per token, and that of the frequencies alone is {self.unigram_nll:.2f}"
            )
        else:
            what = (
                f"the run has diverged: its NLL was {lowest[0]:.2f} nats per token at update "
                f"{lowest[1]:,} and is now {nll:.2f}, and that of a model that knows only how often "
                f"each target piece occurs is {self.unigram_nll:.2f}"
            )
        rate, value = optimizer.rate_setting
        remedies = [
            f"a lower {rate} (now {value:g})",
            f"more optimizer.warmup_steps (now {optimizer.warmup_steps:,})",
        ]
        if self.norm == "post":
            remedies.append("model.norm=pre")
        choice = f"{', '.join(remedies[:-1])} or {remedies[-1]}"
        return (
            f"update {step:,}: {what}; if it does not recover soon, start over in another out=DIR "
            f"with {choice}"
        )
