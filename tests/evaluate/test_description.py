"""The sentences of the card: how long an output may be and how the rate changes, in each preset."""

from pathlib import Path

import pytest
from support.untrained import make_vocab

from nmt.config import load_config
from nmt.evaluate.description import describe_model, describe_training


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ([], "at most 50 pieces more than the source"),
        (["decoding.preset=fairseq"], "at most 200 pieces"),
        (["decoding.preset=marian"], "at most 3 times as many pieces as the source"),
        (["decoding.preset=hf"], "at most 512 pieces"),
        (
            ["decoding.max_ratio=1.5", "decoding.max_extra=10"],
            "at most 1.5 times as many pieces as the source, and 10 more",
        ),
    ],
)
def test_the_longest_output(settings: list[str], limit: str, tmp_path: Path) -> None:
    config = load_config("base.yaml", settings)
    search = describe_model(config, make_vocab(tmp_path))["meant to decode with"]
    assert search.endswith(f", {limit}")


@pytest.mark.parametrize(
    ("schedule", "end"),
    [
        ("inverse_sqrt", "then 0.001 * (4000 / step)^0.5"),
        ("cosine", "then half a cosine down to 0"),
        ("constant", "and no further"),
        ("stairs", "then stairs"),  # one that is not described yet
    ],
)
def test_the_rate_of_every_schedule(schedule: str, end: str) -> None:
    config = load_config("base.yaml", ["optimizer.schedule=cosine", "optimizer.peak_lr=0.001"])
    object.__setattr__(config.optimizer, "schedule", schedule)  # as a new schedule would be
    assert describe_training(config)["optimizer"].endswith(f"up to 0.001, {end}")
