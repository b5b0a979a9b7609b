"""Scores of given pairs, against those that the search gave its own hypotheses, and against plain
full forward passes.
"""

import math
from dataclasses import replace
from itertools import chain
from pathlib import Path

from pytest import MonkeyPatch, approx, mark
from support.plain_search import Full, Ids
from support.processor import CPU
from support.toy_corpus import sentences
from support.untrained import list_shapes, make_model, make_vocab

from nmt.config import DecodingConfig, RunConfig
from nmt.config_files import override_config
from nmt.data.vocab import EOS, Vocab
from nmt.extras.pair_scores.pair_scores import PairScore, PairScorer, compute_log_probs
from nmt.translate.batching import Requests
from nmt.translate.translator import Translator

SOURCES = [src for src, _ in sentences(12, seed=7)]
SHAPES = list_shapes(max_positions=90)


def make_scorer(vocab: Vocab, config: DecodingConfig, *names: str) -> PairScorer:
    models = [make_model(vocab, SHAPES[name]) for name in names]
    return PairScorer(Translator(models[0], vocab, config, CPU, models[1:]))


def find_search_scores(scorer: PairScorer) -> list[tuple[list[int], list[int], float]]:
    """Source, target and score of all hypotheses that the search finds."""
    translator = scorer.translator
    sources = [ids for ids in translator.vocab.src.encode(SOURCES) if ids]
    marked = [[*ids, EOS] for ids in sources]
    config = translator.config
    found = []
    for batch, hypotheses in translator.search_engine.search_batches(
        translator.decodable, Requests(marked), config, CPU, n_best=config.beam
    ):
        for i, some in zip(batch, hypotheses, strict=True):
            found += [(sources[i], one.ids, one.score) for one in some]
    assert len(found) > len(SOURCES)
    return found


@mark.parametrize(
    "names, preset",
    [
        *(((name,), "vaswani2017") for name in SHAPES),
        (("pre",), "fairseq"),
        (("post", "pre", "released"), "marian"),
    ],
)
def test_hypotheses_get_the_scores_that_the_search_gave_them(
    vocab: Vocab, names: tuple[str, ...], preset: str
) -> None:
    config = override_config(RunConfig(), [f"decoding.preset={preset}"]).decoding
    config = replace(config, beam=3, max_ratio=1.0, max_extra=3)  # no long outputs
    scorer = make_scorer(vocab, config, *names)
    sources, targets, expected = zip(*find_search_scores(scorer), strict=True)
    models = scorer.translator.prepared_models

    scores = []
    found = compute_log_probs(models, sources, targets, CPU, 64)
    for target, row in zip(targets, found, strict=True):
        scores.append(PairScore((*target, EOS), tuple(row)).value("search", config))
    assert scores == approx(expected, abs=1e-5)


def say_step_by_step(plain: Full, source: Ids, said: list[int]) -> list[float]:
    """The log-probability of each piece after those before it."""
    rows = plain.after_each(source, [tuple(said[:n]) for n in range(len(said))])
    return [row[piece] for row, piece in zip(rows, said, strict=True)]


def test_lines_are_scored_as_they_are_translated(vocab: Vocab) -> None:
    scorer = make_scorer(vocab, DecodingConfig(lower_capitals=True), "post")
    plain, *same = scorer.score_pairs(
        ["Red dog likes.", "RED DOG LIKES.", "\u00a0Red dog likes.\t"],
        ["Hund ein hund.", "HUND EIN HUND.", " Hund ein hund.\u2029"],
    )
    assert same == [plain, plain]


def test_logits_may_be_large_and_come_in_several_blocks(
    vocab: Vocab, monkeypatch: MonkeyPatch
) -> None:
    scorer = make_scorer(vocab, DecodingConfig(), "released")
    pairs = [[5, 6], [7, 8, 9]], [[9, 8, 7, 6, 5], [4]]
    models = scorer.translator.prepared_models
    expected = compute_log_probs(models, *pairs, CPU, 64)
    for limit in ("MIN_SCORED_ROWS", "MAX_SCORED_LOGITS"):
        monkeypatch.setattr(f"nmt.extras.pair_scores.pair_scores.{limit}", 3)
    scorer.translator.model.projection.bias.add_(100)  # which changes no probability
    found = compute_log_probs(models, *pairs, CPU, 64)
    assert list(chain(*found)) == approx(list(chain(*expected)), abs=1e-4)


def test_kinds_of_scores() -> None:
    score = PairScore((9, 9, EOS), (-1.0, -2.0, -3.0))
    config = DecodingConfig()
    assert score.value("sum", config) == -6.0
    assert score.value("mean", config) == -2.0
    assert score.value("search", config) == approx(-6.0 / ((5 + 3) / 6) ** 0.6)
    assert PairScore(problem="x").value("mean", config) == -math.inf
    assert PairScore().value("mean", config) == 0.0


def test_what_cannot_be_a_translation_is_impossible_and_says_why(vocab: Vocab) -> None:
    config = DecodingConfig(max_source=20, max_extra=5)
    scorer = make_scorer(vocab, config, "post")
    n = len(vocab.encode([SOURCES[0]])[0])
    times = 1 + 25 // n
    long = " ".join([SOURCES[0]] * times)
    pairs = [
        ("", ""),
        ("  ", SOURCES[0]),
        (SOURCES[0], ""),  # the end mark alone
        (long, SOURCES[0]),
        (SOURCES[0], long),
        (SOURCES[0], SOURCES[1]),
    ]
    both, empty, silent, long_src, long_tgt, usual = scorer.score_pairs(*zip(*pairs, strict=True))
    assert both == PairScore() and both.log_prob == 0
    assert empty.problem == "its source is empty" and empty.log_prob == -math.inf
    assert silent.problem is None and len(silent.log_probs) == 1
    assert "source has" in str(long_src.problem) and "more than 20" in str(long_src.problem)
    assert "target has" in str(long_tgt.problem) and "more than 25" in str(long_tgt.problem)
    assert usual.problem is None and -math.inf < usual.log_prob < 0


def test_a_learned_table_of_positions_bounds_both_sides(vocab: Vocab) -> None:
    assert make_scorer(vocab, DecodingConfig(), "learned").longest_target == 89
    assert make_scorer(vocab, DecodingConfig(), "post").longest_target == 1050
    short = replace(DecodingConfig(), max_source=30)
    assert make_scorer(vocab, short, "learned").longest_target == 80


def test_a_tag_is_in_front_of_each_source(tmp_path: Path) -> None:
    vocab = make_vocab(tmp_path, tags=("<a>", "<b>"))
    scorer = make_scorer(vocab, DecodingConfig(tag="<b>"), "pre")
    source, target = SOURCES[0], "rot hund"
    said = [*vocab.encode([target])[0], EOS]
    marked = (vocab.find_symbol("<b>"), *vocab.encode([source])[0], EOS)
    plain = Full(scorer.translator.model)
    expected = say_step_by_step(plain, marked, said)
    (score,) = scorer.score_pairs([source], [target])
    assert score.log_probs == approx(expected, abs=1e-5)
