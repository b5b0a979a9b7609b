"""The length limit against arithmetic with integers: 2.1 times 30 pieces are 63, whatever floats make of it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import Packed
from nmt.translate.search_rules import make_rules
from nmt.translate.search_state import start_beams

HUNDREDTHS = range(501)
LENGTHS = range(1, 1_001)


def test_the_search_and_its_report_have_one_limit_which_is_exact() -> None:
    """For each ratio up to 5.00 and each source of up to 1,000 pieces, which eos follows."""
    offsets = torch.tensor([0, *(n + 1 for n in LENGTHS)]).cumsum(0)
    sources = Packed(torch.zeros(0, dtype=torch.int64), offsets, LENGTHS[-1] + 1, 0)
    model = ModelConfig()
    for hundredths in HUNDREDTHS:
        config = DecodingConfig(beam=1, max_ratio=hundredths / 100, max_extra=7)
        truth = [n * hundredths // 100 + 7 for n in LENGTHS]
        searched = start_beams(sources, make_rules(config), model, ()).limits.tolist()
        reported = [config.find_longest(n) for n in LENGTHS]
        assert searched == truth and reported == truth, config.max_ratio


@given(st.integers(0, 100_000_000), st.integers(1, 10**9))
def test_ratios_are_exact_to_a_millionth(millionths: int, n: int) -> None:
    config = DecodingConfig(max_ratio=millionths / 1_000_000, max_extra=0)
    truth = n * millionths // 1_000_000
    assert config.find_longest(n) == truth
    assert config.find_longest(torch.tensor([n])).tolist() == [truth]
