"""The continuations of a beam search whose translations must contain phrases, and must not contain others.

A piece that completes a forbidden phrase is ruled out, and so is the end while a required phrase is missing. A beam of
the best hypotheses alone would lose those that begin to say what is required, so it is divided: hypotheses that have
said equally much of it compete with each other (dynamic beam allocation, Post and Vilar 2018). Where nothing is
required, it is a plain beam search over what is allowed.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from nmt.config import DecodingConfig
from nmt.data.vocab import EOS
from nmt.translate.beams import (
    NEG_INF,
    Beams,
    Decodable,
    Length,
    compute_logit_blocks,
    find_repeats,
    find_required_pieces,
    forbid_pieces,
)
from nmt.translate.phrases import START, LinePhrases

Continuation = tuple[float, int, int]  # log-probability, parent, piece


class PhraseSearch:
    """What the hypotheses of each sentence of a batch have said of its phrases."""

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
        self, beams: Beams, model: Decodable, hidden: Tensor, length: Length, config: DecodingConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the continuations to consider: parents, pieces and log-probabilities, each (S, n).

        The first ones of a sentence are to be kept, whatever their log-probabilities.
        """
        beam = beams.scores.shape[1]
        n = 2 * beam if beam > 1 else 1
        required = find_required_pieces(beams, length)
        sentences, limits = beams.sentences.tolist(), beams.limits.tolist()
        chosen: list[list[Continuation]] = []
        for here, logits in compute_logit_blocks(model, hidden, beam):
            totals = logits.log_softmax(1) + beams.scores[here].reshape(-1, 1)  # (s * B, V)
            # what is forbidden stays so in a prefix and at the length limit
            states = [state for i in sentences[here] for state in self.states[i]]
            lines = [self.phrases[i] for i in sentences[here] for _ in range(beam)]
            for row, line, state in zip(totals, lines, states, strict=True):
                for banned in line.find_banned(state):
                    row[banned.to(row.device)] = NEG_INF
            forced = required[here, None].expand(-1, beam).reshape(-1, 1)  # (s * B, 1)
            forced_totals = totals.gather(1, forced.clamp(min=0))
            repeats = find_repeats(beams.ids[here].flatten(0, 1), length, config)
            forbid_pieces(totals, model.n_pieces, length <= config.min_length, repeats)
            only_forced = torch.full_like(totals, NEG_INF)
            only_forced.scatter_(1, forced.clamp(min=0), forced_totals)
            totals = torch.where(forced < 0, totals, only_forced)

            best = totals.topk(min(n, totals.shape[1]), 1)
            rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            candidates = [
                [(score, row % beam, piece) for score, piece in zip(*columns, strict=True)]
                for row, columns in enumerate(rows)
            ]
            for row, (line, state) in enumerate(zip(lines, states, strict=True)):
                helpful = line.find_helpful(state)
                if len(helpful):
                    score, i = totals[row, helpful.to(totals.device)].max(0)
                    candidates[row].append((float(score), row % beam, int(helpful[i])))
                if limits[here.start + row // beam] == length:  # the next piece must be the end
                    candidates[row].append((float(totals[row, EOS]), row % beam, EOS))
                    candidates[row] = [
                        one for one in candidates[row] if line.may_end_after(state, one[2])
                    ]
            for first in range(0, len(candidates), beam):
                own = {one for row in candidates[first : first + beam] for one in row}
                alive = [one for one in own if one[0] > NEG_INF]
                chosen.append(self._choose(alive, sentences[here][first // beam], n))

        padded = [[*some, *[(NEG_INF, 0, 0)] * (n - len(some))] for some in chosen]
        scores, parents, pieces = torch.tensor(padded, dtype=torch.float64).unbind(2)
        device = hidden.device
        return parents.long().to(device), pieces.long().to(device), scores.float().to(device)

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
