"""The continuations of a beam search whose translations must contain phrases, and must not contain others.

A piece that completes a forbidden phrase is ruled out, and so is the end while a required phrase is missing. A beam of
the best hypotheses alone would lose those that begin a required phrase, so it is divided: hypotheses that contain
equally much of it compete with each other (dynamic beam allocation, Post and Vilar 2018). Where nothing is
required, it is a plain beam search over what is allowed.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from nmt.data.vocab import EOS
from nmt.translate.allowed_pieces import compute_logit_blocks, forbid_pieces
from nmt.translate.phrases import START, LinePhrases
from nmt.translate.search_rules import Length, SearchRules
from nmt.translate.search_state import NEG_INF, Beams, Decodable

Continuation = tuple[float, int, int]  # log-probability, parent, piece


class PhraseSearch:
    """How much of its phrases each hypothesis of each sentence of a batch contains."""

    def __init__(self, phrases: Sequence[LinePhrases], beams: Beams, max_limit: int | None) -> None:
        """Raise the limits of the sentences to what their phrases need, but not above `max_limit`."""
        n_needed = torch.tensor([one.n_needed for one in phrases], device=beams.limits.device)
        n_forced = (beams.forced >= 0).sum(1)
        beams.limits = beams.limits.maximum(n_forced + n_needed)
        if max_limit is not None:
            beams.limits.clamp_(max=max_limit)
        self.phrases = phrases
        self.states = [[START] * beams.scores.shape[1] for _ in phrases]  # of each sentence

    def find_continuations(
        self, beams: Beams, model: Decodable, hidden: Tensor, length: Length, rules: SearchRules
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the continuations to consider: parents, pieces and log-probabilities, each (S, n).

        The first ones of a sentence are to be kept, whatever their log-probabilities.
        """
        beam = beams.scores.shape[1]
        n = rules.n_considered
        sentences, limits = beams.sentences.tolist(), beams.limits.tolist()
        chosen: list[list[Continuation]] = []
        blocks = compute_logit_blocks(beams, model, hidden, length, rules)
        for here, logits, forced, repeats in blocks:
            totals = logits.log_softmax(1) + beams.scores[here].reshape(-1, 1)  # (s * B, V)
            # what is forbidden stays so in a prefix and at the length limit
            self._rule_out_forbidden(totals, sentences[here])
            forced_totals = totals.gather(1, forced.clamp(min=0))
            forbid_pieces(totals, model, length <= rules.min_length, repeats)
            only_forced = torch.full_like(totals, NEG_INF)
            only_forced.scatter_(1, forced.clamp(min=0), forced_totals)
            totals = torch.where(forced < 0, totals, only_forced)

            best = totals.topk(min(n, totals.shape[1]), 1)
            best_scores, best_pieces = best.values.tolist(), best.indices.tolist()
            for place, sentence in enumerate(sentences[here]):
                must_end = limits[here.start + place] == length
                candidates: set[Continuation] = set()
                for parent in range(beam):
                    row = place * beam + parent
                    of_parent = self._add_useful(
                        dict(zip(best_pieces[row], best_scores[row], strict=True)),
                        totals[row],
                        sentence,
                        parent,
                        must_end,
                    )
                    for piece, score in of_parent.items():
                        if score > NEG_INF:
                            candidates.add((score, parent, piece))
                chosen.append(self._choose(list(candidates), sentence, n))

        padded = [[*some, *[(NEG_INF, 0, 0)] * (n - len(some))] for some in chosen]
        scores, parents, pieces = torch.tensor(padded, dtype=torch.float64).unbind(2)
        device = hidden.device
        return parents.long().to(device), pieces.long().to(device), scores.float().to(device)

    def _rule_out_forbidden(self, totals: Tensor, sentences: list[int]) -> None:
        """Set what the phrases of these sentences forbid next to -inf in totals (s * B, V)."""
        row = 0
        for sentence in sentences:
            for state in self.states[sentence]:
                for banned in self.phrases[sentence].find_banned(state):
                    totals[row, banned.to(totals.device)] = NEG_INF
                row += 1

    def _add_useful(
        self,
        best: dict[int, float],
        totals: Tensor,
        sentence: int,
        parent: int,
        must_end: bool,
    ) -> dict[int, float]:
        """Add to the best pieces behind one hypothesis the one that helps most to say what is
        required; at the length limit also the end, and leave out what cannot be followed by it.
        """
        line, state = self.phrases[sentence], self.states[sentence][parent]
        helpful = line.find_helpful(state)
        if len(helpful):
            score, i = totals[helpful.to(totals.device)].max(0)
            best[int(helpful[i])] = float(score)
        if not must_end:
            return best
        best[EOS] = float(totals[EOS])
        return {piece: score for piece, score in best.items() if line.may_end_after(state, piece)}

    def _choose(self, candidates: list[Continuation], sentence: int, n: int) -> list[Continuation]:
        """Choose `n`: in turn the best of those that have said the most, the least, the second most, ..."""
        line, states = self.phrases[sentence], self.states[sentence]
        candidates.sort(reverse=True)
        if not line.required:
            return candidates[:n]
        banks: dict[int, list[Continuation]] = defaultdict(list)
        for one in candidates:
            _, parent, piece = one
            banks[line.measure_progress(line.advance(states[parent], piece))].append(one)
        levels = sorted(banks)
        turns = []
        while levels:
            turns.append(banks[levels.pop()])
            levels.reverse()
        chosen: list[Continuation] = []
        while len(chosen) < n and any(turns):
            chosen += [bank.pop(0) for bank in turns if bank]
        return chosen[:n]

    def follow(self, sentences: Tensor, parents: Tensor, pieces: Tensor) -> None:
        """Note which hypotheses were kept, (S, B), and what they said."""
        rows = zip(sentences.tolist(), parents.tolist(), pieces.tolist(), strict=True)
        for sentence, own_parents, own_pieces in rows:
            line, before = self.phrases[sentence], self.states[sentence]
            self.states[sentence] = [
                line.advance(before[parent], piece)
                for parent, piece in zip(own_parents, own_pieces, strict=True)
            ]
