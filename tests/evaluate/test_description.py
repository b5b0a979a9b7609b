"""The sentences of the card: how long an output may be and how the rate changes, in each preset."""

import pytest

from nmt.config import load_config
from nmt.evaluate.description import describe_search, describe_training


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
def test_the_longest_output(settings: list[str], limit: str) -> None:
    config = load_config("base.yaml", settings)
    assert describe_search(config.decoding).endswith(f", {limit}")


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
    rows = describe_training(config.training, config.optimizer, config.model, config.seed)
    assert rows["optimizer"].endswith(f"up to 0.001, {end}")
