"""Cached beam search over a batch of sentences, by the rules of the paper's section 6.1 or those of another toolkit.

Each step considers the 2 * beam best continuations of a sentence, or just the best one if beam is 1 (greedy search).
`decoding.finishing` selects the continuations ending in eos that count as finished hypotheses:
- `any`: all of them (the authors' code);
- `top`: those among the `beam` best (fairseq, Hugging Face, CTranslate2);
- `shrink`: the same, and each one reduces the beam by one for the rest of the search (Marian).
Which pieces may follow is in allowed_pieces.py, the penalty in length_penalty.py, when a sentence is
done in search_state.py, and sampling in sampling.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.data.batch import Packed, Sentences
from nmt.data.vocab import EOS
from nmt.translate.allowed_pieces import LogitBlock, compute_logit_blocks, forbid_pieces
from nmt.translate.length_penalty import compute_penalty
from nmt.translate.sampling import draw_uniforms, sample_step
from nmt.translate.search_rules import SearchRules
from nmt.translate.search_state import (
    NEG_INF,
    Beams,
    BestHypotheses,
    Decodable,
    append_eos,
    append_pieces,
    find_done,
    find_ended,
    gather_rows,
    make_hypotheses,
    mark_overflow,
    start_beams,
)

# Pieces per group in `find_topk_by_group`, which first compares only the best of each group
GROUP_SIZE = 64
MAX_SMALL_LOGITS = 1 << 15  # for which the steps of `find_topk_by_group` cost more than they save


@torch.inference_mode()
def search(
    model: Decodable,
    src: Packed,
    rules: SearchRules,
    prefixes: Sentences = (),
) -> BestHypotheses:
    """Find the best translations of each sentence, best first, or draw samples.

    Source sentences end with eos. A translation begins with the pieces that `prefixes` gives for its sentence.
    """
    beams = start_beams(src, rules, model.config, prefixes)
    if rules.is_sampling:
        uniforms = draw_uniforms(src, beams.limits, rules.beam, rules.seed)
    cache = model.make_cache(src, rules.beam)
    results: BestHypotheses = [[] for _ in range(src.n_sentences)]
    length = 0  # of the hypotheses, eos included
    while True:
        # extend each hypothesis by one piece
        length += 1
        hidden = model.step(beams.tokens.flatten(), cache)  # (S * B, D)
        if rules.is_sampling:
            drawn = uniforms[beams.sentences, :, length - 1]  # (S, B)
            sample_step(beams, model, hidden, drawn, length, rules)
        else:
            cache.reorder(beam_step(beams, model, hidden, length, rules))

        # collect the sentences that are done
        done = find_done(beams, length, rules)
        if not done.any():
            continue
        sentences = beams.sentences[done].tolist()
        ids = beams.finished_ids[:, : rules.n_best][done].tolist()
        scores = beams.finished_scores[:, : rules.n_best][done].tolist()
        for sentence, rows, row_scores in zip(sentences, ids, scores, strict=True):
            results[sentence] = make_hypotheses(rows, row_scores)

        # move the unfinished sentences into the first n rows and drop the rest
        n = int((~done).sum())
        if n == 0:
            return results
        free_rows = done[:n].nonzero().squeeze(1)
        moved_rows = n + (~done[n:]).nonzero().squeeze(1)
        beams.keep(n, free_rows, moved_rows)
        cache.keep(n, free_rows, moved_rows)


def beam_step(
    beams: Beams, model: Decodable, hidden: Tensor, length: int, rules: SearchRules
) -> Tensor:
    """Extend the hypotheses by one piece; return the index of each new hypothesis's parent, (S, B)."""
    beam = rules.beam

    # The continuations to consider, (S, 2B)
    blocks = []
    for block in compute_logit_blocks(beams, model, hidden, length, rules):
        blocks.append(_best_continuations(block, beams.scores, model, length, rules))
    parents, pieces, scores = (torch.cat(block) for block in zip(*blocks, strict=True))
    rank = torch.arange(scores.shape[1], device=scores.device)
    if rules.finishing == "shrink":
        is_beyond = rank >= beam - beams.n_finished[:, None]
        scores = scores.masked_fill(is_beyond & ~scores.isnan(), NEG_INF)
    has_ended = find_ended(pieces, scores)
    ids = append_pieces(gather_rows(beams.ids, parents), pieces)  # (S, 2B, t + 1)

    # Finished hypotheses: keep the best of the earlier ones and of those that end in this step.
    is_counted = has_ended if rules.finishing == "any" else has_ended & (rank < beam)
    if rules.stopping == "full":  # never count more than `beam` of them
        is_counted = is_counted & (beams.n_finished[:, None] + is_counted.cumsum(1) <= beam)
    penalty = compute_penalty(length, rules)  # on the host: a copy of it would wait for a GPU
    new_scores = scores.masked_fill(~is_counted, NEG_INF) / penalty
    n_kept = beams.finished_scores.shape[1]
    all_scores = torch.cat((beams.finished_scores, new_scores), 1)
    beams.n_finished = beams.n_finished + is_counted.sum(1)
    beams.finished_scores, order = all_scores.topk(n_kept, 1)
    all_ids = torch.cat((append_eos(beams.finished_ids), ids), 1)
    beams.finished_ids = gather_rows(all_ids, order)

    # Active hypotheses: keep the `beam` best continuations that have not ended.
    active_scores = scores.masked_fill(has_ended, NEG_INF)
    beams.scores, order = active_scores.topk(beam, 1)
    beams.tokens = pieces.gather(1, order)
    beams.ids = gather_rows(ids, order)
    return parents.gather(1, order)


def _best_continuations(
    block: LogitBlock, scores: Tensor, model: Decodable, length: int, rules: SearchRules
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the n best continuations of each sentence of a block: parents, pieces and log-probabilities,
    each (s, n).

    `scores` (S, B) are those of the hypotheses.
    """
    here, logits, required, repeats = block
    scores = scores[here]
    n = rules.n_considered
    # A continuation's score is base + its logit, where base = hypothesis score - logsumexp(logits).
    # Any logit minus its log_softmax is logsumexp; torch's log_softmax takes half the time of its logsumexp.
    eos_logits = logits[:, EOS]
    base = scores.flatten() - (eos_logits - logits.log_softmax(1)[:, EOS])
    base = mark_overflow(base, base + eos_logits, scores.flatten())
    required_logits = logits.gather(1, required.clamp(min=0))
    forbid_pieces(logits, model, length <= rules.min_length, repeats)
    # A sentence's n best are among each parent's n best
    values, pieces = find_topk_by_group(logits, n)

    # A required piece is the only continuation.
    only_required = F.pad(required_logits, (0, values.shape[1] - 1), value=NEG_INF)
    values = torch.where(required < 0, values, only_required)
    pieces = torch.where(required < 0, pieces, required)

    totals = (values + base[:, None]).view(len(scores), -1)
    n_each = values.shape[1]
    if totals.shape[1] < n:  # a toy vocabulary
        totals = F.pad(totals, (0, n - totals.shape[1]), value=NEG_INF)
    best, index = totals.topk(n, 1)
    # Padding, of score NEG_INF, lies beyond the last candidate
    index = index.clamp(max=scores.shape[1] * n_each - 1)
    return index // n_each, pieces.view(len(scores), -1).gather(1, index), best


def find_topk_by_group(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Compute logits.topk(n, 1) faster: the n highest logits all lie in the n groups with the highest maxima."""
    n_groups = logits.shape[1] // GROUP_SIZE
    is_small = logits.device.type == "cpu" and logits.numel() <= MAX_SMALL_LOGITS
    if n_groups < 4 * n or is_small:
        return logits.topk(min(n, logits.shape[1]), 1)
    n_grouped = n_groups * GROUP_SIZE
    grouped = logits[:, :n_grouped].unflatten(1, (n_groups, GROUP_SIZE))
    groups = grouped.amax(2).topk(n, 1, sorted=False).indices  # (R, n)
    rest = logits[:, n_grouped:]
    values, index = torch.cat((gather_rows(grouped, groups).flatten(1), rest), 1).topk(n, 1)

    # The same of piece ids tells which pieces these are.
    ids = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    ids_grouped = ids[:, :n_grouped].unflatten(1, (n_groups, GROUP_SIZE))
    chosen = torch.cat((gather_rows(ids_grouped, groups).flatten(1), ids[:, n_grouped:]), 1)
    return values, chosen.gather(1, index)
