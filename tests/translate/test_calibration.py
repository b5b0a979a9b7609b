"""Calibration against sums by hand, a source of pieces that is calibrated by construction, and plain
full forward passes of real models.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.plain_search import Full
from support.toy_corpus import sentences
from support.untrained import list_shapes, make_model, make_vocab

from nmt.config import DecodingConfig
from nmt.data.vocab import EOS
from nmt.translate.calibration import N_BINS, Calibration, measure_calibration, sum_bins
from nmt.translate.pair_scores import PairScorer
from nmt.translate.translator import Translator

CPU = torch.device("cpu")


def summarise(probabilities: torch.Tensor, gold: torch.Tensor) -> Calibration:
    counts, confidences, correct = sum_bins(probabilities.log(), gold).tolist()
    return Calibration([int(n) for n in counts], confidences, [int(n) for n in correct], 0.0)


def test_five_pieces_by_hand() -> None:
    probabilities = torch.tensor(
        [
            [0.62, 0.28, 0.10],  # bin 12: right
            [0.10, 0.64, 0.26],  # bin 12: wrong
            [0.91, 0.05, 0.04],  # bin 18: right
            [0.02, 0.00, 0.98],  # bin 19: right
            [0.00, 1.00, 0.00],  # bin 19: wrong; 1 has no bin of its own
        ]
    )
    found = summarise(probabilities, torch.tensor([0, 0, 0, 2, 2]))
    assert {i: n for i, n in enumerate(found.counts) if n} == {12: 2, 18: 1, 19: 2}
    # 2/5 of |0.63 - 1/2|, 1/5 of |0.91 - 1|, 2/5 of |0.99 - 1/2|
    assert found.error == pytest.approx(0.4 * 0.13 + 0.2 * 0.09 + 0.4 * 0.49, abs=1e-6)
    assert found.accuracy == 0.6
    assert found.confidence == pytest.approx((0.62 + 0.64 + 0.91 + 0.98 + 1) / 5)


@pytest.mark.parametrize("names", [("post",), ("released",), ("post", "pre")])
def test_a_model_or_several_by_plain_full_forward_passes(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    vocab = make_vocab(tmp_path)
    models = [make_model(vocab, list_shapes(90)[name]) for name in names]
    config = DecodingConfig(batch_tokens=40)
    scorer = PairScorer(Translator(models[0], vocab, config, CPU, models[1:]))
    sources, targets = map(list, zip(*sentences(6, seed=5), strict=True))
    sources[2] = ""  # cannot have been translated

    found = measure_calibration(scorer, sources, targets)

    plain = [Full(model) for model in models]
    counts, confidences, correct = np.zeros((3, N_BINS))
    nll = 0.0
    source_ids, target_ids = vocab.encode(sources), vocab.encode(targets)
    for i in (0, 1, 3, 4, 5):
        said = [*target_ids[i], EOS]
        for n, gold in enumerate(said):
            each = [one.after((*source_ids[i], EOS), tuple(said[:n])) for one in plain]
            probabilities = np.exp(each).mean(0)
            place = int(probabilities.max() * N_BINS)
            counts[place] += 1
            confidences[place] += probabilities.max()
            correct[place] += probabilities.argmax() == gold
            nll -= math.log(probabilities[gold])
    assert found is not None
    assert (found.counts, found.correct_counts) == (counts.tolist(), correct.tolist())
    assert found.confidence_sums == pytest.approx(confidences.tolist(), abs=1e-4)
    assert found.nll == pytest.approx(nll / counts.sum(), abs=1e-5)
    assert found.impossible == 1


def test_without_a_possible_pair_there_is_none(tmp_path: Path) -> None:
    vocab = make_vocab(tmp_path)
    scorer = PairScorer(Translator(make_model(vocab), vocab, DecodingConfig(), CPU))
    assert measure_calibration(scorer, ["", " "], ["a", ""]) is None
