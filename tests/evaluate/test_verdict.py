"""The verdict on runs that never took place: each reason and each step left out is named, alone and
by its own words.

A perfect base run is made of the shipped config; every case departs from it in one thing. Its
figures are those of the paper's Table 2.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from nmt.checkpoint import Average, Checkpoint, Origin, TrainState
from nmt.config import RunConfig, load_config, override_config
from nmt.corpus.test_sets import TestSet
from nmt.data.vocab import Vocab
from nmt.evaluate.systems import System
from nmt.evaluate.verdict import Verdict, judge
from nmt.score.score import Interval, Score
from nmt.system.errors import UserError
from nmt.translate.translator import LoadedModel, TextToText

BASE = load_config("base.yaml")
FULL = TestSet("wmt14/full", [], [], "", "", "newstest2014", None, None)


def average(
    n: int = 5,
    step: int = 100_000,
    gaps: Sequence[float] = (),
    weights: list[float] | None = None,
) -> Average:
    """An average of `n` checkpoints, `gaps` minutes apart (10 where none are given)."""
    minutes = [100.0]
    for gap in gaps or [10.0] * (n - 1):
        minutes.append(minutes[-1] + gap)
    names = [f"step-{i:07}" for i in range(n)]
    return Average(names, step, [60 * minute for minute in minutes], weights)


def score_between(low: float, high: float) -> Score:
    return Score(
        "BLEU tokenised, split, plain quotes",
        (low + high) / 2,
        "nrefs:1|tok:moses",
        Interval(low, high),
    )


REACHED, MISSED = score_between(26.7, 27.9), score_between(25.1, 26.3)


def judge_run(
    of: Score = REACHED,
    config: RunConfig = BASE,
    made: Origin | None = None,
    test: TestSet = FULL,
    overrides: Sequence[str] = (),
    n_others: int = 0,
) -> Verdict:
    """`overrides` are those of nmt-eval's command line."""
    checkpoint = Checkpoint(Path("average"), config, cast(Vocab, None), made or average(), {})
    engine = LoadedModel(
        cast(TextToText, None), config, ["average"], (checkpoint,) * (1 + n_others)
    )
    return judge(of, System("average", override_config(config, overrides), test, [], model=engine))


def with_settings(*settings: str) -> RunConfig:
    return override_config(BASE, settings)


# ---- outcomes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (26.7, 27.9, "reproduced"),
        (26.1, 27.3, "reproduced"),
        (27.3, 28.5, "reproduced"),
        (27.8, 29.0, "reproduced"),  # better than the paper
        (26.0, 27.29, "not reproduced"),
        (0.0, 0.1, "not reproduced"),
    ],
)
def test_a_perfect_run_is_judged_by_its_interval(low: float, high: float, outcome: str) -> None:
    found = judge_run(score_between(low, high))
    assert (found.outcome, found.reasons, found.missing) == (outcome, (), ())
    assert (found.paper.bleu, found.paper.model, found.paper.pair) == (27.3, "base", "en-de")


@pytest.mark.parametrize(
    ("name", "bleu", "n"),
    [("base", 27.3, 5), ("big", 28.4, 20), ("base-enfr", 38.1, 5), ("big-enfr", 41.8, 20)],
)
def test_each_model_has_its_own_figure(name: str, bleu: float, n: int) -> None:
    config = load_config(f"{name}.yaml")
    made = average(n, config.training.steps)
    for low, high, outcome in (
        (bleu - 0.5, bleu + 0.5, "reproduced"),
        (bleu - 1, bleu - 0.01, "not reproduced"),
    ):
        found = judge_run(score_between(low, high), config, made)
        assert (found.outcome, found.reasons, found.missing, found.paper.bleu) == (
            outcome,
            (),
            (),
            bleu,
        )


COMPARABLE_TO_NOTHING: dict[str, tuple[dict[str, Any], str]] = {
    "pair": (
        {"config": with_settings("data.src=de", "data.tgt=en")},
        "languages: de-en, in the paper en-de",
    ),
    "data": (
        {"config": replace(BASE, data=replace(BASE.data, train=BASE.data.train[:1] * 2))},
        "training corpora: wmt14 de-en train, wmt14 de-en train, in the paper WMT14",
    ),
    "test set": (
        {"test": replace(FULL, name="newstest2013", known_as="newstest2013")},
        "the test set is newstest2013, in the paper newstest2014 in full (3,003 lines)",
    ),
    "unknown test set": (
        {"test": replace(FULL, name="a.en + a.de", known_as=None)},
        "the test set is a.en + a.de, in",
    ),
    "ensemble": ({"n_others": 2}, "3 systems translated together, in the paper one"),
}


@pytest.mark.parametrize("case", COMPARABLE_TO_NOTHING)
@pytest.mark.parametrize("score", [REACHED, MISSED])
def test_another_task_is_not_comparable_whatever_the_score(case: str, score: Score) -> None:
    settings, reason = COMPARABLE_TO_NOTHING[case]
    found = judge_run(score, **settings)
    assert (
        found.outcome == "not comparable"
        and len(found.reasons) == 1
        and found.reasons[0].startswith(reason)
    )
    assert found.format_report().startswith(f"verdict: not comparable because {reason}")


def test_all_reasons_are_told() -> None:
    found = judge_run(
        config=with_settings("data.src=de", "data.tgt=en"),
        test=replace(FULL, known_as=None),
        n_others=1,
    )
    assert [reason.split(" ")[0] for reason in found.reasons] == ["languages:", "the", "2"]


# ---- steps of the recipe ------------------------------------------------------------------------------------------

LEFT_OUT: dict[str, tuple[dict[str, Any], str]] = {
    "half of the training": (
        {"made": average(step=50_000)},
        "the end of training: 50,000 of 100,000 updates",
    ),
    "the last update": (
        {"made": average(step=99_999)},
        "the end of training: 99,999 of 100,000 updates",
    ),
    "not averaged": (
        {"made": TrainState(step=100_000)},
        "averaging: none, in the paper the mean of the last 5",
    ),
    "one averaged": (
        {"made": average(1)},
        "averaging: 1 checkpoints, in the paper the mean of the last 5",
    ),
    "4 averaged": (
        {"made": average(4)},
        "averaging: 4 checkpoints, in the paper the mean of the last 5",
    ),
    "20 averaged": (
        {"made": average(20)},
        "averaging: 20 checkpoints, in the paper the mean of the last 5",
    ),
    "weighted": (
        {"made": average(weights=[0.1, 0.1, 0.2, 0.2, 0.4])},
        "averaging: a weighted mean, in the paper the plain one of the last 5",
    ),
    "times unknown": (
        {"made": Average(list("abcde"), 100_000)},
        "averaging: the times of its checkpoints are not recorded; average again with nmt-average",
    ),
    "too near": (
        {"made": average(gaps=(10, 8.9, 10, 10))},
        "averaging: its checkpoints are 8.9 to 10.0 minutes apart",
    ),
    "too far": (
        {"made": average(gaps=(10, 10, 10, 20.1))},
        "averaging: its checkpoints are 10.0 to 20.1 minutes apart",
    ),
    "all too near": (
        {"made": average(gaps=(1, 2, 1, 1))},
        "averaging: its checkpoints are 1.0 to 2.0 minutes apart, in the paper 10; try --last 5 --every",
    ),
    "fewer updates": (
        {"config": with_settings("training.steps=50000")},
        "updates: 50,000, in the paper 100,000",
    ),
    "smaller batches": (
        {"config": with_settings("training.src_tokens=4096")},
        "source tokens per update: 4,096, in the paper about 25,000",
    ),
    "norm": (
        {"config": with_settings("model.norm=pre")},
        "norm position: x + Sublayer(LayerNorm(x)), in the paper LayerNorm(x + Sublayer(x))",
    ),
    "dropout": (
        {"config": with_settings("model.dropout=0.2")},
        "dropout of sub-layers: 0.2, in the paper 0.1",
    ),
    "beam of the config": ({"config": with_settings("decoding.beam=5")}, "beam: 5, in the paper 4"),
    "beam asked for": ({"overrides": ["decoding.beam=5"]}, "beam: 5, in the paper 4"),
    "penalty asked for": (
        {"overrides": ["decoding.length_penalty=1.0"]},
        "length penalty alpha: 1, in the paper 0.6",
    ),
    "dropout, hidden by the command line": (
        {"config": with_settings("model.dropout=0.2"), "overrides": ["model.dropout=0.1"]},
        "dropout of sub-layers: 0.2, in the paper 0.1",
    ),
    "updates, hidden by the command line": (
        {"config": with_settings("training.steps=50000"), "overrides": ["training.steps=100000"]},
        "updates: 50,000, in the paper 100,000",
    ),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_each_step_left_out_is_named(case: str) -> None:
    settings, step = LEFT_OUT[case]
    found = judge_run(REACHED, **settings)
    assert len(found.missing) == 1 and found.missing[0].startswith(step)
    assert found.outcome == "not comparable" and found.reasons == (
        "the paper's figure was reached by another recipe: 1 of its steps were not applied",
    )
    assert (
        f"    - {step}" in found.format_report()
        and "were not applied: 1\n" in found.format_report()
    )
    low = judge_run(MISSED, **settings)  # that it failed is true of any recipe
    assert (low.outcome, low.reasons, low.missing) == ("not reproduced", (), found.missing)


@pytest.mark.parametrize("gaps", [(9, 9, 9, 9), (20, 20, 20, 20), (10.2, 9.1, 19.9, 10)])
def test_about_ten_minutes_are_ten(gaps: tuple[float, ...]) -> None:
    made = average(gaps=gaps)
    assert judge_run(made=made).outcome == "reproduced"
    assert made.elapsed_s is not None
    made.elapsed_s.reverse()  # as they were given to nmt-average
    assert judge_run(made=made).outcome == "reproduced"


@pytest.mark.parametrize(
    "settings",
    [
        ["decoding.batch_tokens=100"],
        ["decoding.precision=fp32"],
        ["data.test.sacrebleu=wmt13"],
        ["seed=7"],
        ["training.keep_checkpoints=50"],
    ],
)
def test_what_is_the_machines_or_was_not_scored_is_no_step(settings: list[str]) -> None:
    """The test set of the config does not matter, but the one that was translated."""
    for found in (judge_run(overrides=settings), judge_run(config=with_settings(*settings))):
        assert (found.outcome, found.missing) == ("reproduced", ())


def test_several_steps_in_their_order() -> None:
    found = judge_run(
        config=with_settings("model.dropout=0.2", "decoding.beam=1"), made=average(3, 7)
    )
    assert [step.partition(":")[0] for step in found.missing] == [
        "dropout of sub-layers",
        "beam",
        "the end of training",
        "averaging",
    ]
    assert found.reasons == (
        "the paper's figure was reached by another recipe: 4 of its steps were not applied",
    )


# ---- as it is reported ---------------------------------------------------------------------------


def test_what_is_printed() -> None:
    assert judge_run().format_report().splitlines() == [
        "verdict: reproduced",
        "  this system   27.30  95 % of resampled test sets: 26.70 to 27.90",
        "  the paper     27.30  Table 2, base, en-de",
        "  counted as   nrefs:1|tok:moses",
        "  steps of the recipe that were not applied: none",
    ]


def test_figures_are_json() -> None:
    found = json.loads(json.dumps(judge_run(MISSED, made=average(4)).to_json()))
    assert found == {
        "outcome": "not reproduced",
        "because": [],
        "not_applied": ["averaging: 4 checkpoints, in the paper the mean of the last 5"],
        "paper": {"bleu": 27.3, "model": "base", "pair": "en-de"},
        "score": {
            "name": "BLEU tokenised, split, plain quotes",
            "value": pytest.approx(25.7),
            "signature": "nrefs:1|tok:moses",
        },
    }


def test_without_training_there_is_no_verdict() -> None:
    texts, export = (
        System("out.txt", BASE, FULL, []),
        LoadedModel(cast(TextToText, None), BASE, ["export"]),
    )
    for system in (texts, replace(texts, model=export)):
        with pytest.raises(
            UserError,
            match=r"^out\.txt: a verdict judges the training too, so it needs a checkpoint",
        ):
            judge(REACHED, system)
