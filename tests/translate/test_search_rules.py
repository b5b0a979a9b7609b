"""The rules of a search: what cannot be asked for."""

from pytest import raises

from nmt.config import DecodingConfig
from nmt.system.errors import UserError
from nmt.translate.search_rules import make_rules


def test_more_than_the_beam_cannot_be_asked_for() -> None:
    with raises(UserError, match="beam of 2"):
        make_rules(DecodingConfig(beam=2), 3)
    assert make_rules(DecodingConfig(beam=2, sample=True), 3).beam == 3
