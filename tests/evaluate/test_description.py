"""The sentences of the card: how long an output may be and how the rate changes, in each preset."""

from typing import get_args, get_type_hints

import pytest

from nmt.config import OptimizerConfig, load_config
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


def test_the_rate_of_every_schedule() -> None:
    ends = {
        "inverse_sqrt": "then 0.001 * (4000 / step)^0.5",
        "cosine": "then half a cosine down to 0",
        "constant": "and no further",
    }
    schedules = get_args(get_type_hints(OptimizerConfig)["schedule"])
    assert set(schedules) == {"paper", *ends}
    for schedule, end in ends.items():
        settings = [f"optimizer.schedule={schedule}", "optimizer.peak_lr=0.001"]
        config = load_config("base.yaml", settings)
        rows = describe_training(config.training, config.optimizer, config.model, config.seed)
        assert rows["optimizer"].endswith(f"up to 0.001, {end}")
