"""Beam search on a CPU as compiled loops.

The rules are those of nmt/translate/search.py, which does what is not compiled. The sentences of
a batch take their steps together, so that matrices are read once for all, and then each goes
through the rules by itself. Everything about a sentence is computed in rows of its own, in an order
that does not depend on the others, so its translation is the same, bit for bit, in any batch.

Keys and values stay in the cells where they were written; each hypothesis has the list of its cells.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import Packed, Sentences, pack
from nmt.data.vocab import BOS, EOS, PAD, UNK
from nmt.engines.cpu.compiled_code import compile_once, make_compiler
from nmt.engines.cpu.compiled_layers import (
    ACTIVATIONS,
    LAYER_FILES,
    CompiledWeights,
    DecoderArrays,
    DecodingCells,
    Integers,
    LayerShape,
    StackBoundaries,
    embed,
    encode,
    normalize_at_the_end,
    normalize_embeddings,
    project_memory,
    step,
)
from nmt.engines.cpu.compiled_products import (
    N_GROUPS,
    Floats,
    Products,
    exp,
    find_group_maxima,
    multiply,
)
from nmt.engines.cpu.packed_linear import count_layer_weights
from nmt.engines.known_values import ANY_VALUE, KnownValues, find_unknown_value
from nmt.model.transformer import Transformer
from nmt.system.device import AVX512_BF16, find_bf16_instructions
from nmt.system.errors import UserError
from nmt.translate.batching import Requests, count_threads
from nmt.translate.engine import SearchEngine
from nmt.translate.length_penalty import compute_penalty
from nmt.translate.search_rules import SearchRules, make_rules
from nmt.translate.search_state import (
    NEG_INF,
    Beams,
    BestHypotheses,
    Decodable,
    make_hypotheses,
    start_beams,
)

BLOCK_ROWS = 64  # hypotheses whose logits are in memory at a time
PART = 1024  # exponentials summed in fp32
FIRST_CELLS = 16  # steps for which there is room at first
ANY_PIECE = -1
FINISHING = ("any", "top", "shrink")
STOPPING = ("exact", "full", "likely", "never")
ANY_FINISHES, _TOP, SHRINK = range(len(FINISHING))
EXACT, FULL, LIKELY, _NEVER = range(len(STOPPING))

# Hypotheses of a batch: with more, products are not faster; with fewer, they are slower.
MAX_HYPOTHESES, MIN_HYPOTHESES = 256, 64
BATCHES_PER_THREAD = 4  # so that threads end at about the same time
# Where torch multiplies bf16 faster, the search is compiled for layers of at most this many weights.
MAX_BF16_WEIGHTS = 1 << 20

# What the loops know. A field or a value that is not here is left to torch.
COMPILED_MODELS: KnownValues = {
    **dict.fromkeys(
        (
            "d_model",
            "d_ff",
            "n_heads",
            "n_layers",
            "encoder_layers",
            "decoder_layers",
            "d_k",
            "d_v",
            "dropout",
            "attention_dropout",
            "ffn_dropout",
            "max_positions",
            "window",
            "vocab_rows",
        ),
        ANY_VALUE,
    ),
    "activation": ACTIVATIONS,
    "norm": ("post", "pre"),
    "positions": ("sinusoidal", "marian", "learned", "rotary"),
    "tied": (True, False, "decoder", "embeddings"),
    "scale_embeddings": ("embedding", "projection", "none"),
    "embedding_norm": (None, "before_dropout", "after_dropout"),
    "attention_bias": (True, False),
    "projection_bias": (True, False),
}
COMPILED_RULES: KnownValues = {
    **dict.fromkeys(
        (
            "n_best",
            "beam",
            "length_penalty",
            "max_ratio",
            "max_extra",
            "min_length",
            "temperature",
            "top_k",
            "top_p",
            "seed",
        ),
        ANY_VALUE,
    ),
    "is_sampling": (False,),
    "penalty": ("gnmt", "length", "none"),
    "no_repeat_ngram": (None,),
    "finishing": FINISHING,
    "stopping": STOPPING,
}
KNOWN_LAYERS = {
    "Transformer",
    "ModuleList",
    "EncoderLayer",
    "DecoderLayer",
    "SelfAttention",
    "MemoryAttention",
    "FeedForward",
    "Residual",
    "Linear",
    "BiasedLinear",
    "ActivatedLinear",
    "LayerNorm",
    "Identity",
    "Embedding",
    "Positions",
    "Dropout",
}

SEARCH_FILES = (__file__, *LAYER_FILES)
compile_search = make_compiler(*SEARCH_FILES)


class CompiledRules(NamedTuple):
    beam: int
    n_considered: int  # continuations of a sentence in each step
    n_best: int
    finishing: int  # an index of FINISHING
    stopping: int  # an index of STOPPING
    min_length: int
    penalties: Floats  # of each length
    n_pieces: int  # that may be chosen
    writes_unknown: bool
    n_vocab: int  # over which the softmax is


class SearchState(NamedTuple):
    """The state of the search for S sentences, with B hypotheses each and n finished ones."""

    limits: Integers  # (S,)
    forced: Integers  # (S, P)
    scores: Floats  # (S, B)
    pieces: Integers  # (S, B, L)
    cell_numbers: Integers  # (S, B, L): the cell of each piece
    finished_scores: Floats  # (S, n)
    finished_pieces: Integers  # (S, n, L)
    n_finished: Integers  # (S,)


class Continuations(NamedTuple):
    """The best continuations of one sentence, best first."""

    scores: Floats
    parents: Integers
    pieces: Integers


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
def insert_continuation(best: Continuations, score: Any, parent: int, piece: int) -> None:
    """Insert a continuation that is better than the last one of `best`."""
    rank = len(best.scores) - 1
    while rank > 0 and best.scores[rank - 1] < score:
        best.scores[rank] = best.scores[rank - 1]
        best.parents[rank] = best.parents[rank - 1]
        best.pieces[rank] = best.pieces[rank - 1]
        rank -= 1
    best.scores[rank] = score
    best.parents[rank] = parent
    best.pieces[rank] = piece


@compile_search
def find_continuations(
    logits: Floats, first_row: int, scores: Floats, required: int, length: int, rules: CompiledRules
) -> tuple[Continuations, bool]:
    """Find the best continuations of one sentence's hypotheses; and whether all scores were numbers."""
    n = rules.n_considered
    best = Continuations(np.full(n, NEG_INF, np.float32), np.zeros(n, np.int64), np.full(n, PAD))
    for parent in range(len(scores)):
        if scores[parent] == NEG_INF:
            continue
        own_logits = logits[first_row + parent, : rules.n_vocab]
        maxima = find_group_maxima(own_logits)
        # The score of a continuation is this plus its logit.
        start = scores[parent] - compute_log_sum(own_logits, maxima.max())
        # Not isfinite: numba asks whether x - x is a number, which reordered sums take to be 0.
        if not NEG_INF < start < math.inf or start + own_logits[EOS] == NEG_INF:
            return best, False
        if required != ANY_PIECE:
            score = start + own_logits[required]
            if score > best.scores[n - 1]:
                insert_continuation(best, score, parent, required)
            continue
        own_logits[PAD] = NEG_INF
        own_logits[BOS] = NEG_INF
        if not rules.writes_unknown:
            own_logits[UNK] = NEG_INF
        if length <= rules.min_length:
            own_logits[EOS] = NEG_INF
        for first in range(N_GROUPS):
            if not start + maxima[first] > best.scores[n - 1]:
                continue
            for piece in range(first, rules.n_pieces, N_GROUPS):
                score = start + own_logits[piece]
                if score > best.scores[n - 1]:
                    insert_continuation(best, score, parent, piece)
    return best, True


@compile_search
def keep_finished(
    state: SearchState, sentence: int, score: Any, pieces: Integers, length: int
) -> None:
    """Insert a finished hypothesis among the best of its sentence."""
    scores, kept = state.finished_scores[sentence], state.finished_pieces[sentence]
    rank = len(scores)
    while rank > 0 and scores[rank - 1] < score:
        rank -= 1
    for later in range(len(scores) - 1, rank, -1):
        scores[later] = scores[later - 1]
        kept[later] = kept[later - 1]
    if rank < len(scores):
        scores[rank] = score
        kept[rank, :] = EOS
        kept[rank, : length - 1] = pieces[: length - 1]


@compile_search
def apply_continuations(
    state: SearchState, sentence: int, best: Continuations, length: int, rules: CompiledRules
) -> None:
    """Finish the continuations that end and count; make the best others the sentence's hypotheses."""
    earlier_pieces = state.pieces[sentence].copy()
    earlier_numbers = state.cell_numbers[sentence].copy()
    n_considered = len(best.scores)
    if rules.finishing == SHRINK:
        n_considered = min(n_considered, rules.beam - state.n_finished[sentence])
    n_kept = 0
    state.scores[sentence, :] = NEG_INF
    for rank in range(n_considered):
        if best.scores[rank] == NEG_INF:
            break
        pieces = earlier_pieces[best.parents[rank]]
        if best.pieces[rank] != EOS:
            if n_kept < rules.beam:
                state.scores[sentence, n_kept] = best.scores[rank]
                state.pieces[sentence, n_kept] = pieces
                state.pieces[sentence, n_kept, length - 1] = best.pieces[rank]
                state.cell_numbers[sentence, n_kept] = earlier_numbers[best.parents[rank]]
                n_kept += 1
            continue
        is_counted = rules.finishing == ANY_FINISHES or rank < rules.beam
        if rules.stopping == FULL and state.n_finished[sentence] >= rules.beam:
            is_counted = False
        if is_counted:
            state.n_finished[sentence] += 1
            keep_finished(
                state, sentence, best.scores[rank] / rules.penalties[length], pieces, length
            )


@compile_search
def is_done(state: SearchState, sentence: int, length: int, rules: CompiledRules) -> bool:
    highest = state.scores[sentence, 0]
    limit = state.limits[sentence]
    if highest == NEG_INF or limit < length:
        return True
    finished = state.finished_scores[sentence]
    if rules.stopping == EXACT:
        # At best, a hypothesis reaches the length limit without losing any probability.
        return highest / rules.penalties[limit + 1] <= finished[rules.n_best - 1]
    if rules.stopping == FULL:
        return state.n_finished[sentence] >= rules.beam
    if rules.stopping == LIKELY:
        return highest / rules.penalties[length] <= finished[rules.beam - 1]
    return False


@compile_search
def find_required_piece(state: SearchState, sentence: int, length: int) -> int:
    if length <= state.forced.shape[1] and state.forced[sentence, length - 1] >= 0:
        return state.forced[sentence, length - 1]
    if state.limits[sentence] < length:
        return EOS
    return ANY_PIECE


@compile_search
def search_together(
    state: SearchState,
    memory: Floats,
    starts: Integers,
    boundaries: StackBoundaries,
    layers: DecoderArrays,
    projection: Products,
    shape: LayerShape,
    rules: CompiledRules,
) -> bool:
    """Search until all sentences are done. Return whether all scores were numbers."""
    beam = rules.beam
    memory_cells = project_memory(memory, layers, shape)
    memory_numbers = np.arange(len(memory))
    active = np.arange(len(state.limits))
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
        x = np.empty((n_rows, boundaries.embedding.shape[1]), np.float32)
        own_numbers = np.empty((n_rows, length), np.int64)
        memory_starts = np.empty(n_rows, np.int64)
        memory_ends = np.empty(n_rows, np.int64)
        for row in range(n_rows):
            sentence, hypothesis = active[row // beam], row % beam
            piece = BOS if length == 1 else state.pieces[sentence, hypothesis, length - 2]
            embed(piece, length - 1, boundaries, shape, x[row])
            state.cell_numbers[sentence, hypothesis, length - 1] = n_cells + row
            own_numbers[row] = state.cell_numbers[sentence, hypothesis, :length]
            memory_starts[row], memory_ends[row] = starts[sentence], starts[sentence + 1]
        all_cells = DecodingCells(
            cells, n_cells, own_numbers, memory_cells, memory_numbers, memory_starts, memory_ends
        )
        x = normalize_embeddings(x, boundaries, shape)
        x = step(x, all_cells, boundaries.positions, layers, shape)
        hidden = normalize_at_the_end(x, boundaries, shape) * np.float32(shape.hidden_scale)
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
                    state.scores[sentence],
                    find_required_piece(state, sentence, length),
                    length,
                    rules,
                )
                if not is_number:
                    return False
                apply_continuations(state, sentence, best, length, rules)

        # drop the sentences that are done
        n_left = 0
        for number in range(n_active):
            if not is_done(state, active[number], length, rules):
                active[n_left] = active[number]
                n_left += 1
        n_active = n_left
    return True


class CompiledEngine(SearchEngine):
    """Searches with one model at a time: the one that was prepared last."""

    def prepare(self, model: Transformer, is_bf16: bool) -> Transformer:
        self.weights = CompiledWeights(model, is_bf16)
        return model

    def count_most_hypotheses(self, n_hypotheses: int) -> int | None:
        n_batches = BATCHES_PER_THREAD * count_threads()
        share = -(-n_hypotheses // n_batches)
        return min(max(share, MIN_HYPOTHESES), MAX_HYPOTHESES)

    def search_batch(
        self, model: Decodable, requests: Requests, rules: SearchRules, device: torch.device
    ) -> BestHypotheses:
        return search_compiled(self.weights, requests.pack(device), rules, requests.prefixes)


@torch.inference_mode()
def search_compiled(
    weights: CompiledWeights,
    src: Packed,
    rules: SearchRules,
    prefixes: Sentences = (),
) -> BestHypotheses:
    """Find the best translations of each sentence, best first, as `search` does."""
    model = weights.model
    check_pieces(src.tokens, model.sizes[0])
    state = start_state(start_beams(src, rules, model.config, prefixes))
    if state.forced.size:
        check_pieces(torch.from_numpy(state.forced), model.n_pieces)
    longest = int(state.limits.max())
    starts = src.offsets.numpy()
    boundaries = weights.describe_source(src.longest)
    is_number = search_together(
        state,
        encode(src.tokens.numpy(), starts, boundaries, weights.encoder, weights.shape),
        starts,
        weights.describe_target(longest + 1),
        weights.decoder,
        weights.projection,
        weights.shape,
        compile_rules(model, rules, longest),
    )
    if not is_number:
        state.finished_scores[:] = NEG_INF
    ids = state.finished_pieces[:, : rules.n_best].tolist()
    scores = state.finished_scores[:, : rules.n_best].tolist()
    return [make_hypotheses(*ranked) for ranked in zip(ids, scores, strict=True)]


def check_pieces(pieces: Tensor, n_pieces: int) -> None:
    """Raise UserError if a piece is not in the vocabulary: compiled loops do not check their indices."""
    highest = int(pieces.max())
    if highest >= n_pieces:
        raise UserError(
            f"piece {highest} is not in the vocabulary of {n_pieces:,} pieces; use the vocabulary that "
            "the model was trained with"
        )


def compile_rules(model: Transformer, rules: SearchRules, longest: int) -> CompiledRules:
    """State the rules for outputs of at most `longest` pieces and the end mark."""
    return CompiledRules(
        beam=rules.beam,
        n_considered=rules.n_considered,
        n_best=rules.n_best,
        finishing=FINISHING.index(rules.finishing),
        stopping=STOPPING.index(rules.stopping),
        min_length=rules.min_length,
        penalties=compute_penalty(torch.arange(longest + 2), rules).numpy(),
        n_pieces=model.n_pieces,
        writes_unknown=model.writes_unknown,
        n_vocab=model.n_vocab,
    )


def start_state(beams: Beams) -> SearchState:
    """Return the state before the first step."""
    n_sentences, beam = beams.scores.shape
    n_kept = beams.finished_scores.shape[1]
    longest = int(beams.limits.max()) + 1
    return SearchState(
        limits=beams.limits.numpy(),
        forced=beams.forced.numpy(),
        scores=beams.scores.numpy(),
        pieces=np.zeros((n_sentences, beam, longest), np.int64),
        cell_numbers=np.zeros((n_sentences, beam, longest), np.int64),
        finished_scores=beams.finished_scores.numpy(),
        finished_pieces=np.full((n_sentences, n_kept, longest), EOS),
        n_finished=beams.n_finished.numpy(),
    )


# ---- when it is used -----------------------------------------------------------------------------


def supports(models: Sequence[Transformer], rules: SearchRules, is_bf16: bool) -> str | None:
    """Say why the search with these models and rules is not compiled; None if it is."""
    if len(models) > 1:
        return "it does not support ensembles"
    (model,) = models
    unknown = find_unknown_value(model.config, COMPILED_MODELS) or find_unknown_value(
        rules, COMPILED_RULES
    )
    if unknown is not None:
        return f"it does not support {unknown}"
    strange_layers = {type(module).__name__ for module in model.modules()} - KNOWN_LAYERS
    if strange_layers:
        return f"it does not support {', '.join(sorted(strange_layers))}"
    if is_bf16 and not multiplies_bf16_faster(model):
        return "torch multiplies bf16 faster on this processor"
    return None


def multiplies_bf16_faster(model: Transformer) -> bool:
    """Whether compiled loops are faster than torch in bf16: AVX512-BF16 serves both, AMX only torch, but
    the layers of a small model are computed before torch has started them.
    """
    if find_bf16_instructions() == AVX512_BF16:
        return True
    return count_layer_weights(model) <= MAX_BF16_WEIGHTS


@functools.cache
def find_fault_of_compiler(is_bf16: bool) -> Exception | None:
    """Compile the search for this processor, or load what was compiled. Return why that fails; None if it
    does not. What was compiled is kept, so later processes start in half a second.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            tiny = Transformer(ModelConfig(d_model=8, d_ff=8, n_heads=1, n_layers=1), EOS + 1)
        rules = make_rules(DecodingConfig(max_extra=1))
        compile_once(
            "the search",
            search_together.__name__,
            SEARCH_FILES,
            lambda: search_compiled(CompiledWeights(tiny.eval(), is_bf16), pack([[EOS]]), rules),
        )
    except Exception as error:  # numba raises many kinds of errors
        return error
    return None
