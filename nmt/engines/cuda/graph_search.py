"""Beam search on a GPU: each step is one launch, and the host runs ahead of the device.

A step of the model and of the search's rules is recorded once for each shape
(nmt/engines/cuda/cuda_graph.py) and replayed. So nothing in a step may depend on Python: the number of
the step is a tensor, tensors have columns for later steps, and a step writes its results where the
next one reads them. Shapes are few: sentences, steps and source positions are rounded up to a size
class. They change only between steps, when the capacity is used up or half of the sentences are
done.

The host learns which sentences are done from copies that it does not wait for, so it may launch a
few steps too many. A sentence that is done is frozen on the device: later steps cannot change its
result. The rules, and so the results, are those of nmt/translate/search.py. Without a GPU the same
protocol runs, unrecorded.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nmt.config import multiply_exactly
from nmt.data.batch import Packed
from nmt.data.vocab import EOS
from nmt.engines.cuda.cuda_graph import capture
from nmt.engines.known_values import ANY_VALUE, NUMBERS_OF_RULES, KnownValues
from nmt.model.cache import Buffers, round_up_source_width, round_up_to_class
from nmt.translate.sampling import draw_uniforms, sample_step
from nmt.translate.search import beam_step
from nmt.translate.search_rules import SearchRules
from nmt.translate.search_state import (
    NEG_INF,
    Beams,
    Decodable,
    Hypothesis,
    find_done,
    make_hypotheses,
    start_beams,
)

FIRST_CAPACITY = 32  # steps; doubled when they are used up
FEWEST_ROWS = (
    64  # a step of fewer sentences takes hardly less time, so rows are not compacted below
)
STEPS_AHEAD = 4  # that the host may launch beyond those whose outcome it knows
UNRECORDED_STEPS = 8  # of a shape before it is recorded, which takes some; most shapes are rarer
MAX_GRAPHS = 128
# What the rows and columns of padding hold.
FILLS = {
    "sentences": -1,
    "limits": -1,
    "forced": -1,
    "tokens": EOS,
    "ids": EOS,
    "scores": NEG_INF,
    "finished_ids": EOS,
    "finished_scores": NEG_INF,
    "n_finished": 0,
}
STEP_STATE = ("tokens", "ids", "scores", "finished_ids", "finished_scores", "n_finished")

# The rules of which a step can be recorded. One that is not here is left to torch's own search.
RECORDED_RULES: KnownValues = {
    **dict.fromkeys(NUMBERS_OF_RULES, ANY_VALUE),
    "no_repeat_ngram": ANY_VALUE,
    "is_sampling": (True, False),
    "penalty": ("gnmt", "length", "none"),
    "finishing": ("any", "top", "shrink"),
    "stopping": ("exact", "full", "likely", "never"),
}


class GraphSearch:
    """Searches one batch after another with one model, whose weights keep their addresses, and one
    set of rules.
    """

    def __init__(self, model: Decodable, rules: SearchRules, device: torch.device) -> None:
        self.model, self.rules, self.device = model, rules, device
        self.beam = rules.beam
        self.graphs: dict[tuple[int, ...], Callable[[], None]] = {}  # by shape
        self.n_uses: Counter[tuple[int, ...]] = Counter()  # of a shape, in steps
        self.cache = model.make_static_cache(self.beam)
        self.buffers = Buffers()
        self._forget_graphs(0)

    @torch.inference_mode()
    def search(
        self, src: Packed, prefixes: Sequence[Sequence[int]] | None = None
    ) -> list[list[Hypothesis]]:
        """The same hypotheses as `search` of nmt/translate/search.py."""
        n_steps = self._load(src, prefixes)
        results: list[list[Hypothesis]] = [[] for _ in range(src.n_sentences)]
        sentences = list(range(src.n_sentences))  # of each row that is not padding
        survivors = SurvivorCount(self.device, len(sentences))
        for length in range(1, n_steps + 1):
            if length > self.capacity:
                self._resize(None, self.n, min(2 * self.capacity, self.max_capacity))
            run_step = self._choose_step()
            run_step()

            # Go on as long as sentences live and fill their rows well. After the last step all are
            # done, whatever the host knows.
            n_living = survivors.after_step(self.n_living)
            has_few_empty_rows = n_living > self.n // 2 or self.n <= FEWEST_ROWS
            if length < n_steps and n_living > 0 and has_few_empty_rows:
                continue

            # collect what is done, and continue with the others in fewer rows
            living = self._collect(sentences, results)
            if not living:
                return results
            sentences = [sentences[row] for row in living]
            rows = _send(torch.tensor(living), self.device)
            self._resize(rows, round_up_to_class(len(living)), self.capacity)
            survivors = SurvivorCount(self.device, len(living))
        raise AssertionError(f"{len(sentences)} sentences are not done at their limits")

    def _load(self, src: Packed, prefixes: Sequence[Sequence[int]] | None) -> int:
        """Load the sentences of a batch. Returns the number of steps after which all of them are
        done.
        """
        beams = start_beams(src, self.rules, self.model.config, prefixes)
        longest_prefix = beams.forced.shape[1]
        n_steps = count_steps(src.longest, longest_prefix, self.rules)
        if self.model.config.positions == "learned":
            n_steps = min(n_steps, self.model.config.max_positions)
        self.n = round_up_to_class(src.n_sentences)
        self.n_source = round_up_source_width(src.longest)
        self.max_capacity = find_full_capacity(n_steps)
        self.capacity = min(FIRST_CAPACITY, self.max_capacity)
        while self.capacity < longest_prefix:  # all forced pieces are in columns from the start
            self.capacity = min(2 * self.capacity, self.max_capacity)

        none_done = torch.zeros(src.n_sentences, dtype=torch.bool, device=self.device)
        uniforms = torch.zeros(src.n_sentences, self.beam, 0, device=self.device)
        if self.rules.is_sampling:
            # all at once: a recorded step cannot draw what depends on the batch
            uniforms = draw_uniforms(src, beams.limits, self.beam, self.rules.seed)
        self._store_state(beams, none_done, uniforms)
        zero = torch.zeros_like(beams.limits[:1])
        self.length = self.buffers.store("length", zero, 1, 0)
        self.n_living = self.buffers.store("n_living", zero, 1, 0)
        self.model.refill_cache(self.cache, src, self.n, self.capacity, self.max_capacity)
        return n_steps

    def _resize(self, rows: Tensor | None, n: int, capacity: int) -> None:
        """Change the capacity, and keep only the sentences at `rows`, if given."""
        self.n, self.capacity = n, capacity
        copies = [_copy_rows(x, rows) for x in vars(self.beams).values()]
        beams = Beams(*copies)
        self._store_state(beams, _copy_rows(self.is_done, rows), _copy_rows(self.uniforms, rows))
        self.cache.resize(rows, n, capacity)

    def _store_state(self, beams: Beams, done: Tensor, uniforms: Tensor) -> None:
        """Put the state of a search where the recorded steps of its shape read it. Rows of padding
        count as done.
        """
        stored = {name: self._store(name, x, FILLS[name]) for name, x in vars(beams).items()}
        self.beams = Beams(**stored)
        self.is_done = self._store("is_done", done, True)
        self.uniforms = self._store("uniforms", uniforms, 0.0)

    def _store(self, name: str, x: Tensor, fill: float) -> Tensor:
        """Copy a tensor into its buffer, which is allocated for full capacity at once so that it
        need not move.
        """
        widths = None
        if name in ("forced", "ids", "finished_ids"):
            widths = self.capacity, self.max_capacity
        elif name == "uniforms" and self.rules.is_sampling:
            widths = self.max_capacity, self.max_capacity
        return self.buffers.store(name, x, self.n, fill, sizes=widths)

    # ---- a step ------------------------------------------------------------------------------------------------

    def _choose_step(self) -> Callable[[], None]:
        """The function for a step of the present shape: a recording, if the shape occurs often
        enough.
        """
        # A recording reads fixed addresses: once a buffer has moved, no recording is valid.
        n_moves = self.buffers.n_moves + self.cache.n_moves
        if n_moves != self.n_moves or len(self.graphs) == MAX_GRAPHS:
            self._forget_graphs(n_moves)
        shape = (self.n, self.capacity, self.n_source, self.uniforms.shape[2])
        self.n_uses[shape] += 1
        if self.n_uses[shape] <= UNRECORDED_STEPS:
            return self._step
        if shape not in self.graphs:
            self.graphs[shape] = self._record_step()
        return self.graphs[shape]

    def _record_step(self) -> Callable[[], None]:
        """Record a step of the present shape. Recording runs some steps to warm up; what they
        change is restored.
        """
        counters = [self.is_done, self.length, self.n_living]
        state = [*vars(self.beams).values(), *counters, *self.cache.list_state()]
        saved = [x.clone() for x in state]
        graph = capture(self._step, self.device, self.pool)
        for x, before in zip(state, saved, strict=True):
            x.copy_(before)
        return graph

    def _forget_graphs(self, n_moves: int) -> None:
        self.graphs.clear()  # frees their memory
        self.n_moves = n_moves
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def _step(self) -> None:
        """A whole step, on the device alone and in place."""
        beams, length = self.beams, self.length
        length.add_(1)
        hidden = self.model.step(beams.tokens.flatten(), self.cache)
        after = replace(beams)  # the rules put new tensors there
        if self.rules.is_sampling:
            column = (length - 1).clamp(max=self.uniforms.shape[2] - 1)
            uniforms = self.uniforms.index_select(2, column).squeeze(2)  # (n, B)
            sample_step(after, self.model, hidden, uniforms, length, self.rules)
        else:
            self.cache.reorder(beam_step(after, self.model, hidden, length, self.rules))
        done = find_done(after, length, self.rules)

        # A sentence that was done stays as it was.
        for name in STEP_STATE:
            old, new = vars(beams)[name], vars(after)[name]
            frozen = self.is_done.view(-1, *[1] * (old.dim() - 1))
            old.copy_(torch.where(frozen, old, new))
        self.is_done.logical_or_(done)
        self.n_living.copy_(self.is_done.logical_not().sum())

    def _collect(self, sentences: list[int], results: list[list[Hypothesis]]) -> list[int]:
        """Store the hypotheses of the sentences that are done; returns the rows of the others.
        Waits for the device once.
        """
        finished_ids = self.beams.finished_ids[:, : self.rules.n_best]
        finished_scores = self.beams.finished_scores[:, : self.rules.n_best]
        ids, scores, done = _fetch((finished_ids, finished_scores, self.is_done), self.device)
        living = []
        for row, sentence in enumerate(sentences):
            if done[row]:
                results[sentence] = make_hypotheses(ids[row], scores[row])
            else:
                living.append(row)
        return living


class SurvivorCount:
    """How many sentences are still searched, as far as the host knows: copies arrive while it
    launches more steps.
    """

    def __init__(self, device: torch.device, n_sentences: int) -> None:
        self.is_cuda = device.type == "cuda"
        self.pending: deque[tuple[Tensor, Any]] = deque()
        self.newest = n_sentences

    def after_step(self, n_living: Tensor) -> int:
        """Request the count of this step. Returns the newest that has arrived; waits if the host is
        too far ahead.
        """
        if not self.is_cuda:
            return int(n_living)
        copy = torch.empty(1, dtype=n_living.dtype, pin_memory=True)
        copy.copy_(n_living, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.pending.append((copy, event))
        while self.pending:
            copy, event = self.pending[0]
            if len(self.pending) <= STEPS_AHEAD and not event.query():
                break  # this count has not arrived, and there is no need to wait for it
            event.synchronize()
            self.newest = int(copy)
            self.pending.popleft()
        return self.newest


def count_steps(longest: int, longest_prefix: int, rules: SearchRules) -> int:
    """Count the most steps of a search whose longest source has `longest` pieces, eos included."""
    limit = multiply_exactly(longest - 1, rules.max_ratio) + rules.max_extra
    return max(limit, longest_prefix) + 1


def find_full_capacity(n_steps: int) -> int:
    """Find the capacity at the end of a search of `n_steps`; there are few possible values."""
    return FIRST_CAPACITY * round_up_to_class(-(-n_steps // FIRST_CAPACITY))


def _copy_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Copy some rows, or all. Never a view: the buffer that holds them is about to be written."""
    if rows is None:
        return x.clone()
    return x.index_select(0, rows)


def _send(x: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return x
    return x.pin_memory().to(device, non_blocking=True)  # the host does not wait for pinned memory


def _fetch(tensors: Sequence[Tensor], device: torch.device) -> list[list[Any]]:
    """Copy the values of some tensors to the host, waiting for the device only once."""
    if device.type != "cuda":
        return [x.tolist() for x in tensors]
    copies = []
    for x in tensors:
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        copies.append(copy.copy_(x, non_blocking=True))
    torch.cuda.current_stream(device).synchronize()
    return [x.tolist() for x in copies]
