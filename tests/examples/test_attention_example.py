"""examples/attention.py: what it derives by hand is what it prints, and a wrong function is noticed."""

import runpy
from typing import Any

from pytest import MonkeyPatch, mark, raises
from support.capture import Capture
from support.checkout import ROOT

import nmt.api

EXAMPLE = str(ROOT / "examples" / "attention.py")


def test_every_matrix_is_that_of_the_calculation_by_hand(
    capsys: Capture,
) -> None:
    runpy.run_path(EXAMPLE)  # an assertion after each matrix
    printed = capsys.readouterr().out
    assert printed.count("\n\n") == 11
    assert "   26.2500  26.2500  23.3333  23.3333\n" in printed


@mark.parametrize("fault", ["causal", "window", "divisor"])
def test_it_notices_a_wrong_function(fault: str, monkeypatch: MonkeyPatch) -> None:
    right = nmt.api.attention

    def attend_wrongly(q: Any, k: Any, v: Any, return_weights: bool, **masks: Any) -> Any:
        if fault == "divisor":
            q = q * 2
        masks.pop(fault, None)
        return right(q, k, v, return_weights=True, **masks)

    monkeypatch.setattr(nmt.api, "attention", attend_wrongly)
    with raises(AssertionError, match="by hand"):
        runpy.run_path(EXAMPLE)
