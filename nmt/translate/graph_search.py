"""Beam search on a GPU: each step is one launch, and the host runs ahead of the device.

A step of the model and of the search's rules is recorded once for each shape (`nmt/system/cuda_graph.py`) and replayed. So
nothing in a step may depend on Python: the number of the step is a tensor, tensors have room for steps to come, and
what a step finds is written where the next one looks for it. Shapes are few: sentences, steps and source places are
rounded up to a size class. They change only between steps, when the room is full or half of the sentences are done.

The host learns which sentences are done from copies that it does not wait for, so it may launch a few steps too many.
A sentence that is done is frozen on the device: later steps cannot change its result. The rules are those of
`nmt/translate/search.py`, and so are the results. Without a GPU the same protocol runs, unrecorded.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nmt.config import DecodingConfig
from nmt.data.batch import Packed
from nmt.model.cache import FLOAT, Buffers, size_class, source_width
from nmt.system.cuda_graph import capture
from nmt.translate.search import (
    EOS,
    NEVER,
    Beams,
    Hypothesis,
    Speaker,
    advance,
    begin,
    draw_lots,
    hypotheses,
    is_done,
    say,
    width,
)

ROOM = 32  # steps, at first; doubled when they are used up
FEWEST = (
    16  # sentences: a step of fewer takes no less time, so the last ones are not moved together
)
AHEAD = 4  # steps that the host may launch beyond those whose outcome it knows
UNRECORDED = 16  # steps of a shape before it is recorded, which costs about as much
MOST_GRAPHS = 128
SHARE = 0.7  # of free memory: the rest is for fragments, libraries, and others
MOST_CELLS = 1 << 31  # logits in one tensor: more cannot be indexed with 32 bits
ID = 8  # bytes
CHANGING = ("tokens", "ids", "scores", "finished_ids", "finished_scores", "n_finished")  # in a step


class GraphSearch:
    """Searches one batch after another with one model, whose weights stay where they are, and by one set of rules."""

    def __init__(self, model: Speaker, config: DecodingConfig, device: torch.device) -> None:
        self.model, self.config, self.device = model, config, device
        self.n_best = 0  # for which everything below has been made
        self.graphs: dict[tuple[int, ...], Callable[[], None]] = {}  # by shape
        self.n_uses: Counter[tuple[int, ...]] = Counter()  # of a shape, in steps

    @torch.inference_mode()
    def search(
        self, src: Packed, n_best: int = 1, prefixes: Sequence[Sequence[int]] | None = None
    ) -> list[list[Hypothesis]]:
        """What `beam.search` returns."""
        self._prepare(n_best)
        n_steps = self._load(src, prefixes)
        results: list[list[Hypothesis]] = [[] for _ in range(src.n_sentences)]
        sentences = list(range(src.n_sentences))  # of each row that is no padding
        news = News(self.device)
        for length in range(1, n_steps + 1):
            if length > self.room:
                self._resize(None, self.n, min(2 * self.room, self.most_room))
            self._ready_step()()
            n_living = news.after_step(self.n_living, len(sentences))
            is_last = length == n_steps  # after which all sentences are done, whatever the news
            if not is_last and n_living > 0 and (n_living > self.n // 2 or self.n <= FEWEST):
                continue

            # take down what is done, and go on with the others in fewer rows
            living = self._collect(sentences, results)
            if not living:
                return results
            sentences = [sentences[row] for row in living]
            self._resize(
                _sent(torch.tensor(living), self.device), size_class(len(living)), self.room
            )
            news = News(self.device)
        raise AssertionError(f"{len(sentences)} sentences are not done at their limits")

    def _prepare(self, n_best: int) -> None:
        """Start anew if the last search was for another number of hypotheses."""
        if n_best != self.n_best:
            self.beam = width(self.config, n_best)
            self.n_best = n_best
            self.cache, self.buffers = self.model.static_cache(self.beam), Buffers()
            self._forget_graphs(0)

    def _load(self, src: Packed, prefixes: Sequence[Sequence[int]] | None) -> int:
        """Take over the sentences of a batch. Returns after how many steps all of them are done."""
        live = begin(src, self.config, self.model.config, self.n_best, prefixes)
        longest_prefix = live.forced.shape[1]
        n_steps = count_steps(src.longest, longest_prefix, self.config)
        if self.model.config.positions == "learned":
            n_steps = min(n_steps, self.model.config.max_positions)
        self.n, self.n_source = size_class(src.n_sentences), source_width(src.longest)
        self.most_room = most_room(n_steps)
        self.room = min(ROOM, self.most_room)
        while self.room < longest_prefix:
            self.room = min(2 * self.room, self.most_room)

        none_done = torch.zeros(src.n_sentences, dtype=torch.bool, device=self.device)
        lots = torch.zeros(src.n_sentences, self.beam, 0, device=self.device)
        if self.config.sample:
            lots = draw_lots(src, live.limits, self.beam, self.config.seed)
        self._place(live, none_done, lots)
        self.length = self.buffers.place("length", torch.zeros_like(live.limits[:1]), (1,), 0)
        self.n_living = self.buffers.place("n_living", torch.zeros_like(live.limits[:1]), (1,), 0)
        self.model.restart(self.cache, src, self.n, self.room, self.most_room)
        return n_steps

    def _resize(self, rows: Tensor | None, n: int, room: int) -> None:
        """Make room for more steps, and keep of the sentences only those at `rows`, if it is given."""
        self.n, self.room = n, room
        live = Beams(*(_taken(x, rows) for x in vars(self.live).values()))
        self._place(live, _taken(self.is_done, rows), _taken(self.lots, rows))
        self.cache.resize(rows, n, room)

    def _place(self, live: Beams, done: Tensor, lots: Tensor) -> None:
        """Put the state of a search where the recorded steps of its shape look for it. Rows of padding are done."""
        n, n_kept, room = self.n, live.finished_ids.shape[1], self.room
        self.live = Beams(
            sentences=self._placed("sentences", live.sentences, (n,), -1),
            limits=self._placed("limits", live.limits, (n,), -1),
            forced=self._placed("forced", live.forced, (n, room), -1),
            tokens=self._placed("tokens", live.tokens, (n, self.beam), EOS),
            ids=self._placed("ids", live.ids, (n, self.beam, room), EOS),
            scores=self._placed("scores", live.scores, (n, self.beam), NEVER),
            finished_ids=self._placed("finished_ids", live.finished_ids, (n, n_kept, room), EOS),
            finished_scores=self._placed(
                "finished_scores", live.finished_scores, (n, n_kept), NEVER
            ),
            n_finished=self._placed("n_finished", live.n_finished, (n,), 0),
        )
        self.is_done = self._placed("is_done", done, (n,), True)
        self.lots = self._placed(
            "lots", lots, (n, self.beam, self.most_room if self.config.sample else 0), 0.0
        )

    def _placed(self, name: str, x: Tensor, shape: tuple[int, ...], fill: float) -> Tensor:
        """Memory is taken for the room that the batch may need in the end, so that it need not move on the way."""
        has_room = name in ("forced", "ids", "finished_ids")
        return self.buffers.place(
            name, x, shape, fill, (*shape[:-1], self.most_room) if has_room else shape
        )

    # ---- memory ----------------------------------------------------------------------------------------------------

    def count_fitting(self, longest: int, longest_prefix: int, n_best: int, n_bytes: int) -> int:
        """So many sentences, whose sources have at most so many pieces, fit into memory together: at least one."""
        each = self.sentence_bytes(longest, longest_prefix, n_best)
        n = min(n_bytes // each, MOST_CELLS // (width(self.config, n_best) * self.model.n_vocab))
        return max(1, whole_class(n))

    def sentence_bytes(self, longest: int, longest_prefix: int, n_best: int) -> int:
        """At most so much memory is taken by a sentence: what the model needs for it, and the search."""
        config, beam = self.config, width(self.config, n_best)
        room = most_room(count_steps(longest, longest_prefix, config))
        n_kept = beam if config.stopping == "likely" else n_best
        state = (
            (beam + n_kept + 1) * room * ID
        )  # pieces of the living, of the finished, and demanded ones
        growing = 3 * (2 * beam + n_kept) * room * ID
        drawing = 0
        if config.sample:
            sorting = 9 * FLOAT + ID  # of a piece: its share, sorted, and the sums
            drawing = beam * (room * FLOAT + self.model.n_vocab * sorting)
        return self.model.sentence_bytes(beam, longest, room) + state + growing + drawing

    # ---- a step ------------------------------------------------------------------------------------------------

    def _ready_step(self) -> Callable[[], None]:
        """What makes a step in the present shape: a recording, if the shape occurs often enough."""
        n_moves = self.buffers.n_moves + self.cache.n_moves
        if n_moves != self.n_moves or len(self.graphs) == MOST_GRAPHS:
            self._forget_graphs(n_moves)
        shape = (self.n, self.room, self.n_source, self.lots.shape[2])
        self.n_uses[shape] += 1
        if self.n_uses[shape] <= UNRECORDED:
            return self._step
        if shape not in self.graphs:
            # A recording makes some steps to warm up. What they change is put back.
            state = [
                *vars(self.live).values(),
                self.is_done,
                self.length,
                self.n_living,
                *self.cache.state(),
            ]
            saved = [x.clone() for x in state]
            self.graphs[shape] = capture(self._step, self.device, self.pool)
            for x, before in zip(state, saved, strict=True):
                x.copy_(before)
        return self.graphs[shape]

    def _forget_graphs(self, n_moves: int) -> None:
        self.graphs.clear()
        self.n_moves = n_moves
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def _step(self) -> None:
        """All of a step, on the device alone and in place."""
        live, length = self.live, self.length
        length.add_(1)
        hidden = self.model.step(live.tokens.flatten(), self.cache)
        after = replace(live)  # to which the rules bind what they find
        if self.config.sample:
            column = (length - 1).clamp(max=self.lots.shape[2] - 1)
            lots = self.lots.index_select(2, column).squeeze(2)  # (n, B)
            say(after, self.model, hidden, lots, length, self.config)
        else:
            self.cache.reorder(advance(after, self.model, hidden, length, self.config))
        done = is_done(after, length, self.config, self.n_best)

        # A sentence that is done stays as it was.
        for name in CHANGING:
            old, new = vars(live)[name], vars(after)[name]
            frozen = self.is_done.view(-1, *[1] * (old.dim() - 1))
            old.copy_(torch.where(frozen, old, new))
        self.is_done.logical_or_(done)
        self.n_living.copy_(self.is_done.logical_not().sum())

    def _collect(self, sentences: list[int], results: list[list[Hypothesis]]) -> list[int]:
        """Take down what was found of the sentences that are done. Returns the rows of the others. Waits once."""
        live = self.live
        ids, scores, done = _fetched(
            (
                live.finished_ids[:, : self.n_best],
                live.finished_scores[:, : self.n_best],
                self.is_done,
            ),
            self.device,
        )
        living = []
        for row, sentence in enumerate(sentences):
            if done[row]:
                results[sentence] = hypotheses(ids[row], scores[row])
            else:
                living.append(row)
        return living


class News:
    """How many sentences still live, as far as the host knows: copies are on their way while it launches more steps."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.coming: deque[tuple[Tensor, Any]] = deque()
        self.newest: int | None = None

    def after_step(self, n_living: Tensor, n_at_first: int) -> int:
        """Send for the news of this step. Returns the newest that have come; if the host is too far ahead it waits."""
        if not self.is_cuda:
            return int(n_living)
        copy = torch.empty(1, dtype=n_living.dtype, pin_memory=True)
        copy.copy_(n_living, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.coming.append((copy, event))
        while self.coming and (len(self.coming) > AHEAD or self.coming[0][1].query()):
            copy, event = self.coming.popleft()
            event.synchronize()
            self.newest = int(copy)
        return n_at_first if self.newest is None else self.newest


def free_bytes(device: torch.device) -> int:
    """What may be filled with sentences: a share of what is free."""
    torch.cuda.empty_cache()  # gives back what torch has cached; the pools of graphs stay, and serve nothing else
    in_driver, _ = torch.cuda.mem_get_info(device)
    return int(SHARE * in_driver)


def whole_class(n: int) -> int:
    """The largest size class that is not above n, so that a full batch has no padding."""
    while n > 1 and size_class(n) != n:
        n -= 1
    return n


def count_steps(longest: int, longest_prefix: int, config: DecodingConfig) -> int:
    """After so many steps, or fewer, a search is over whose longest source has so many pieces, eos included."""
    limit = int((longest - 1) * config.max_ratio) + 1 + config.max_extra  # rounding may add the one
    return max(limit, longest_prefix) + 1


def most_room(n_steps: int) -> int:
    return ROOM * size_class(-(-n_steps // ROOM))


def _taken(x: Tensor, rows: Tensor | None) -> Tensor:
    """A copy of some rows, or of all."""
    return x.clone() if rows is None else x.index_select(0, rows)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def _fetched(tensors: Sequence[Tensor], device: torch.device) -> list[list[Any]]:
    """The values of some tensors, at the cost of one wait."""
    if device.type != "cuda":
        return [x.tolist() for x in tensors]
    copies = []
    for x in tensors:
        copies.append(
            torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
        )
    torch.cuda.current_stream(device).synchronize()
    return [x.tolist() for x in copies]
