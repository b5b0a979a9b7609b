"""Packed sentences against lists of them, with empty sentences and a dead tail."""

import torch

from nmt.data.batch import Packed, pack

SENTENCES = [[5, 6, 7], [], [8], [9, 10]]


def test_pack_lays_sentences_end_to_end() -> None:
    packed = pack(SENTENCES)
    assert packed.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert packed.offsets.tolist() == [0, 3, 3, 4, 6]
    assert (packed.n_sentences, packed.longest, packed.n_live) == (4, 3, 6)
    assert pack([]).offsets.tolist() == [0]


def test_each_token_knows_its_sentence_and_place_and_the_dead_tail_neither() -> None:
    live = pack(SENTENCES)
    packed = Packed(torch.cat((live.tokens, torch.zeros(2))), live.offsets, 3, live.n_live)
    assert packed.lengths.tolist() == [3, 0, 1, 2]
    assert packed.sentence.tolist() == [0, 0, 0, 2, 3, 3, 4, 4]
    assert packed.positions.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
