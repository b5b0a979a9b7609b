"""The search of a batch on a CPU: as compiled loops where they can do it and gain time, else with torch.

Compiled loops serve a single model, and all rules but samples, phrases and repeats. They are faster for
one sentence and for many. Large batches of a large model in bf16 are an exception on processors with
AMX, whose tiles only torch uses, and on processors that do not multiply bf16 at all.

In fp32 a process begins with torch: compiling takes some 20 seconds, once on a machine, and loading what
was compiled takes half a second.
"""

import math
from collections.abc import Sequence

import torch

from nmt.config import DecodingConfig
from nmt.data.batch import Packed
from nmt.model.cpu_linear import DecodingTransformer
from nmt.system.errors import Failure, UserError
from nmt.system.memory import is_out_of_memory
from nmt.system.progress import say
from nmt.translate.beams import Decodable, Hypothesis
from nmt.translate.phrases import LinePhrases
from nmt.translate.search import search

# Where torch may be faster in bf16, a batch with more hypotheses of a model with larger layers is not compiled.
MAX_BF16_HYPOTHESES = 16
MAX_BF16_WEIGHTS = 1 << 20
# Sentences that a process searches with torch before it compiles, and before it loads what was compiled.
SENTENCES_BEFORE_COMPILING = 2_000
SENTENCES_BEFORE_LOADING = 20


class Experience:
    """What this process knows of compiled search."""

    n_sentences = 0  # that were searched with torch
    is_loaded = False
    has_failed = False


def expect_many_sentences() -> None:
    """Compile, or load, at the next search: this process will go on for long."""
    Experience.n_sentences = SENTENCES_BEFORE_COMPILING


def search_on_cpu(
    model: Decodable,
    src: Packed,
    config: DecodingConfig,
    n_best: int = 1,
    prefixes: Sequence[Sequence[int]] | None = None,
    phrases: Sequence[LinePhrases] | None = None,
) -> list[list[Hypothesis]]:
    """Find the `n_best` best translations of each sentence, best first, as `search` does."""
    is_possible = phrases is None and not config.sample and config.no_repeat_ngram is None
    if is_possible and isinstance(model, DecodingTransformer) and is_faster(model, src, config):
        Experience.n_sentences += src.n_sentences
        found = try_compiled(model, src, config, n_best, prefixes)
        if found is not None:
            return found
    return search(model, src, config, n_best, prefixes, phrases)


def is_faster(model: DecodingTransformer, src: Packed, config: DecodingConfig) -> bool:
    if not model.is_compilable:
        return False
    if not model.is_bf16 or has_bf16_pairs_but_no_tiles():
        return True
    n_weights = sum(weight.numel() for weight in model.source.decoder[0].parameters())
    n_hypotheses = src.n_sentences * config.beam
    return n_weights <= MAX_BF16_WEIGHTS or n_hypotheses <= MAX_BF16_HYPOTHESES


def has_bf16_pairs_but_no_tiles() -> bool:
    """Whether this processor has AVX512-BF16, which compiled loops use, and not AMX, which only torch uses."""
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


def try_compiled(
    model: DecodingTransformer,
    src: Packed,
    config: DecodingConfig,
    n_best: int,
    prefixes: Sequence[Sequence[int]] | None,
) -> list[list[Hypothesis]] | None:
    """Search as compiled loops. Return None if that is not worth loading yet, or if numba fails, for
    example on damaged compiled code; then it is not tried again.
    """
    # bf16 would give other translations before than after, so it does not wait.
    n_sentences = math.inf if model.is_bf16 else Experience.n_sentences
    if Experience.has_failed or n_sentences <= SENTENCES_BEFORE_LOADING:
        return None
    try:
        from nmt.engines.cpu import compiled_search

        if not Experience.is_loaded and not compiled_search.is_kept():
            if n_sentences <= SENTENCES_BEFORE_COMPILING:
                return None
            say("compiling the search for this processor, once; this takes some 20 seconds")
        Experience.is_loaded = True
        return compiled_search.search_compiled(model, src, config, n_best, prefixes)
    except (UserError, Failure, MemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        is_first = not Experience.has_failed  # another thread may have failed while this one waited
        Experience.has_failed = True
        if is_first:
            say(f"warning: the search cannot be compiled ({reason}); decoding goes on more slowly")
        return None
