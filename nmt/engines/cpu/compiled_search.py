"""Beam search on a CPU as compiled loops.

The rules are those of search.py, which serves what is not compiled (cpu_search.py says what that is). The
sentences of a batch take their steps together, so that matrices are read once for all, and then each
goes through the rules by itself. Everything about a sentence is computed in rows of its own, in an order
that does not depend on the others, so its translation is the same, bit for bit, in any batch.

Keys and values stay in the cells where they were written; each hypothesis has the list of its cells.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nmt.config import DecodingConfig
from nmt.data.batch import Packed
from nmt.data.vocab import BOS, EOS, PAD
from nmt.engines.cpu.compiled_code import find_code_folder, make_compiler
from nmt.engines.cpu.compiled_layers import (
    LAYER_FILES,
    DecoderArrays,
    Ends,
    Integers,
    Past,
    Shape,
    embed,
    encode,
    normalize_at_the_end,
    normalize_embeddings,
    project_memory,
    step,
)
from nmt.engines.cpu.compiled_products import Floats, Products, exp, multiply
from nmt.model.cpu_linear import DecodingTransformer
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.translate.beams import (
    NEG_INF,
    Beams,
    Hypothesis,
    compute_penalty,
    make_hypotheses,
    start_beams,
)

BLOCK_ROWS = 64  # hypotheses whose logits are in memory at a time
N_PEAKS = 256  # groups of pieces whose highest logit is known before each piece is looked at
PART = 1024  # exponentials summed in fp32
MAX_COMPILED_SOURCE = 128  # pieces; torch attends to more of them faster
FIRST_CELLS = 16  # steps for which there is room at first
ANY_PIECE = -1
FINISHING = ("any", "top", "shrink")
STOPPING = ("exact", "full", "likely", "never")
ANY_FINISHES, _TOP, SHRINK = range(len(FINISHING))
EXACT, FULL, LIKELY, _NEVER = range(len(STOPPING))

SEARCH_FILES = (__file__, *LAYER_FILES)
compile_search = make_compiler(*SEARCH_FILES)
# A maximum is vectorized only if NaN need not come out of it.
compile_maximum = make_compiler(*SEARCH_FILES, fast_math=frozenset({"nnan", "nsz"}))


class Rules(NamedTuple):
    beam: int
    n_considered: int  # continuations of a sentence in each step
    n_best: int
    finishing: int  # an index of FINISHING
    stopping: int  # an index of STOPPING
    min_length: int
    penalties: Floats  # of each length
    n_pieces: int  # that may be chosen
    n_vocab: int  # over which the softmax is


class Group(NamedTuple):
    """The state of the search for S sentences, with B hypotheses each and n finished ones."""

    limits: Integers  # (S,)
    forced: Integers  # (S, P)
    scores: Floats  # (S, B)
    pieces: Integers  # (S, B, L)
    places: Integers  # (S, B, L): the cell of each piece
    finished_scores: Floats  # (S, n)
    finished_pieces: Integers  # (S, n, L)
    n_finished: Integers  # (S,)


class Continuations(NamedTuple):
    """The best continuations of one sentence, best first."""

    scores: Floats
    parents: Integers
    pieces: Integers


@compile_maximum
def find_peaks(logits: Floats) -> Floats:
    """Return the highest logit of the pieces i, N_PEAKS + i, 2 * N_PEAKS + i, ..., for each i."""
    peaks = np.full(N_PEAKS, NEG_INF, np.float32)
    for first in range(0, len(logits), N_PEAKS):
        part = logits[first : first + N_PEAKS]
        for i in range(len(part)):
            if part[i] > peaks[i]:
                peaks[i] = part[i]
    return peaks


@compile_search
def compute_log_sum(logits: Floats, highest: Any) -> Any:
    """Compute the logarithm of the sum of exponentials; NaN if a logit is NaN or plus infinity."""
    total: Any = 0.0
    for first in range(0, len(logits), PART):
        part = logits[first : first + PART]
        part_sum: Any = np.float32(0.0)
        for i in range(len(part)):
            part_sum += exp(part[i] - highest)
        total += part_sum
    return np.float32(highest + math.log(total))


@compile_search
def offer(best: Continuations, score: Any, parent: int, piece: int) -> None:
    """Insert a continuation that is better than the last one of `best`."""
    place = len(best.scores) - 1
    while place > 0 and best.scores[place - 1] < score:
        best.scores[place] = best.scores[place - 1]
        best.parents[place] = best.parents[place - 1]
        best.pieces[place] = best.pieces[place - 1]
        place -= 1
    best.scores[place] = score
    best.parents[place] = parent
    best.pieces[place] = piece


@compile_search
def find_continuations(
    logits: Floats, first_row: int, scores: Floats, required: int, length: int, rules: Rules
) -> tuple[Continuations, bool]:
    """Find the best continuations of one sentence's hypotheses; and whether all scores were numbers."""
    n = rules.n_considered
    best = Continuations(np.full(n, NEG_INF, np.float32), np.zeros(n, np.int64), np.full(n, PAD))
    for parent in range(len(scores)):
        if scores[parent] == NEG_INF:
            continue
        own_logits = logits[first_row + parent, : rules.n_vocab]
        peaks = find_peaks(own_logits)
        # The score of a continuation is this plus its logit.
        start = scores[parent] - compute_log_sum(own_logits, peaks.max())
        if not math.isfinite(start):
            return best, False
        if required != ANY_PIECE:
            score = start + own_logits[required]
            if score > best.scores[n - 1]:
                offer(best, score, parent, required)
            continue
        own_logits[PAD] = NEG_INF
        own_logits[BOS] = NEG_INF
        if length <= rules.min_length:
            own_logits[EOS] = NEG_INF
        for first in range(N_PEAKS):
            if not start + peaks[first] > best.scores[n - 1]:
                continue
            for piece in range(first, rules.n_pieces, N_PEAKS):
                score = start + own_logits[piece]
                if score > best.scores[n - 1]:
                    offer(best, score, parent, piece)
    return best, True


@compile_search
def keep_finished(group: Group, sentence: int, score: Any, pieces: Integers, length: int) -> None:
    """Insert a finished hypothesis among the best of its sentence."""
    scores, kept = group.finished_scores[sentence], group.finished_pieces[sentence]
    place = len(scores)
    while place > 0 and scores[place - 1] < score:
        place -= 1
    for later in range(len(scores) - 1, place, -1):
        scores[later] = scores[later - 1]
        kept[later] = kept[later - 1]
    if place < len(scores):
        scores[place] = score
        kept[place, :] = EOS
        kept[place, : length - 1] = pieces[: length - 1]


@compile_search
def follow_continuations(
    group: Group, sentence: int, best: Continuations, length: int, rules: Rules
) -> None:
    """Finish the continuations that end and count; make the best others the sentence's hypotheses."""
    earlier_pieces = group.pieces[sentence].copy()
    earlier_places = group.places[sentence].copy()
    n_considered = len(best.scores)
    if rules.finishing == SHRINK:
        n_considered = min(n_considered, rules.beam - group.n_finished[sentence])
    n_kept = 0
    group.scores[sentence, :] = NEG_INF
    for rank in range(n_considered):
        if best.scores[rank] == NEG_INF:
            break
        pieces = earlier_pieces[best.parents[rank]]
        if best.pieces[rank] != EOS:
            if n_kept < rules.beam:
                group.scores[sentence, n_kept] = best.scores[rank]
                group.pieces[sentence, n_kept] = pieces
                group.pieces[sentence, n_kept, length - 1] = best.pieces[rank]
                group.places[sentence, n_kept] = earlier_places[best.parents[rank]]
                n_kept += 1
            continue
        is_counted = rules.finishing == ANY_FINISHES or rank < rules.beam
        if rules.stopping == FULL and group.n_finished[sentence] >= rules.beam:
            is_counted = False
        if is_counted:
            group.n_finished[sentence] += 1
            keep_finished(
                group, sentence, best.scores[rank] / rules.penalties[length], pieces, length
            )


@compile_search
def is_done(group: Group, sentence: int, length: int, rules: Rules) -> bool:
    highest = group.scores[sentence, 0]
    limit = group.limits[sentence]
    if highest == NEG_INF or limit < length:
        return True
    finished = group.finished_scores[sentence]
    if rules.stopping == EXACT:
        # At best, a hypothesis reaches the length limit without losing any probability.
        return highest / rules.penalties[limit + 1] <= finished[rules.n_best - 1]
    if rules.stopping == FULL:
        return group.n_finished[sentence] >= rules.beam
    if rules.stopping == LIKELY:
        return highest / rules.penalties[length] <= finished[rules.beam - 1]
    return False


@compile_search
def find_required_piece(group: Group, sentence: int, length: int) -> int:
    if length <= group.forced.shape[1] and group.forced[sentence, length - 1] >= 0:
        return group.forced[sentence, length - 1]
    if group.limits[sentence] < length:
        return EOS
    return ANY_PIECE


@compile_search
def search_group(
    group: Group,
    memory: Floats,
    starts: Integers,
    ends: Ends,
    layers: DecoderArrays,
    projection: Products,
    shape: Shape,
    rules: Rules,
) -> bool:
    """Search until all sentences are done. Return whether all scores were numbers."""
    beam = rules.beam
    memory_cells = project_memory(memory, layers, shape)
    memory_places = np.arange(len(memory))
    active = np.arange(len(group.limits))
    n_active = len(active)
    n_cells = 0
    n_columns = shape.n_heads * (shape.key_size + shape.value_size)
    n_layers = layers.attention.norm.weight.shape[0]
    cells = np.empty((n_active * beam * FIRST_CELLS, n_layers, n_columns), np.float32)
    length = 0
    while n_active > 0:
        # extend each hypothesis by one piece
        length += 1
        n_rows = n_active * beam
        if n_cells + n_rows > len(cells):
            more = np.empty((len(cells) + len(cells) // 2 + n_rows, *cells.shape[1:]), np.float32)
            more[:n_cells] = cells[:n_cells]
            cells = more
        x = np.empty((n_rows, ends.embedding.shape[1]), np.float32)
        places = np.empty((n_rows, length), np.int64)
        memory_starts = np.empty(n_rows, np.int64)
        memory_ends = np.empty(n_rows, np.int64)
        for row in range(n_rows):
            sentence, hypothesis = active[row // beam], row % beam
            piece = BOS if length == 1 else group.pieces[sentence, hypothesis, length - 2]
            embed(piece, length - 1, ends, shape, x[row])
            group.places[sentence, hypothesis, length - 1] = n_cells + row
            places[row] = group.places[sentence, hypothesis, :length]
            memory_starts[row], memory_ends[row] = starts[sentence], starts[sentence + 1]
        past = Past(cells, n_cells, places, memory_cells, memory_places, memory_starts, memory_ends)
        x = step(normalize_embeddings(x, ends, shape), past, layers, shape)
        hidden = normalize_at_the_end(x, ends, shape) * np.float32(shape.hidden_scale)
        n_cells += n_rows

        # choose continuations
        sentences_per_block = max(1, BLOCK_ROWS // beam)
        for first in range(0, n_active, sentences_per_block):
            last = min(first + sentences_per_block, n_active)
            logits = multiply(hidden[first * beam : last * beam], projection, 0)
            for number in range(first, last):
                sentence = active[number]
                best, is_number = find_continuations(
                    logits,
                    (number - first) * beam,
                    group.scores[sentence],
                    find_required_piece(group, sentence, length),
                    length,
                    rules,
                )
                if not is_number:
                    return False
                follow_continuations(group, sentence, best, length, rules)

        # drop the sentences that are done
        n_left = 0
        for number in range(n_active):
            if not is_done(group, active[number], length, rules):
                active[n_left] = active[number]
                n_left += 1
        n_active = n_left
    return True


@torch.inference_mode()
def search_compiled(
    model: DecodingTransformer,
    src: Packed,
    config: DecodingConfig,
    n_best: int = 1,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> list[list[Hypothesis]]:
    """Find the `n_best` best translations of each sentence, best first, as `search` does."""
    check_pieces(src.tokens, model.sizes[0])
    group = start_group(start_beams(src, config, model.config, n_best, prefixes))
    if group.forced.size:
        check_pieces(torch.from_numpy(group.forced), model.n_pieces)
    longest = int(group.limits.max())
    rules = make_rules(model, config, n_best, longest)
    compiled = model.compiled
    starts = torch.cat((src.lengths.new_zeros(1), src.lengths.cumsum(0))).numpy()
    if src.longest <= MAX_COMPILED_SOURCE:
        ends = compiled.describe_source(src.longest)
        memory = encode(src.tokens.numpy(), starts, ends, compiled.encoder, compiled.shape)
    else:
        memory = model.encode(src).float().numpy()
    is_number = search_group(
        group,
        memory,
        starts,
        compiled.describe_target(longest + 1),
        compiled.decoder,
        compiled.projection,
        compiled.shape,
        rules,
    )
    if not is_number:
        group.finished_scores[:] = NEG_INF
    ids = group.finished_pieces[:, :n_best].tolist()
    scores = group.finished_scores[:, :n_best].tolist()
    return [make_hypotheses(*found) for found in zip(ids, scores, strict=True)]


def check_pieces(pieces: Tensor, n_pieces: int) -> None:
    """Raise UserError if a piece is not in the vocabulary: compiled loops do not check their indices."""
    highest = int(pieces.max())
    if highest >= n_pieces:
        raise UserError(
            f"piece {highest} is not in the vocabulary of {n_pieces:,} pieces; use the vocabulary that "
            "the model was trained with"
        )


def is_kept() -> bool:
    """Whether this version of the search was compiled and kept on this machine."""
    folder = find_code_folder(*SEARCH_FILES)
    return folder is not None and any(folder.glob(f"**/*.{search_group.__name__}-*.nbi"))


def make_rules(model: Transformer, config: DecodingConfig, n_best: int, longest: int) -> Rules:
    """State the config's rules, for outputs of at most `longest` pieces and the end mark."""
    return Rules(
        beam=config.beam,
        n_considered=2 * config.beam if config.beam > 1 else 1,
        n_best=n_best,
        finishing=FINISHING.index(config.finishing),
        stopping=STOPPING.index(config.stopping),
        min_length=config.min_length,
        penalties=compute_penalty(torch.arange(longest + 2), config).numpy(),
        n_pieces=model.n_pieces,
        n_vocab=model.n_vocab,
    )


def start_group(beams: Beams) -> Group:
    """Return the state before the first step."""
    n_sentences, beam = beams.scores.shape
    n_kept = beams.finished_scores.shape[1]
    longest = int(beams.limits.max()) + 1
    return Group(
        limits=beams.limits.numpy(),
        forced=beams.forced.numpy(),
        scores=beams.scores.numpy(),
        pieces=np.zeros((n_sentences, beam, longest), np.int64),
        places=np.zeros((n_sentences, beam, longest), np.int64),
        finished_scores=beams.finished_scores.numpy(),
        finished_pieces=np.full((n_sentences, n_kept, longest), EOS),
        n_finished=beams.n_finished.numpy(),
    )
