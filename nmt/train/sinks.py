"""The sinks that `training.track` names: TensorBoard, W&B, and those of installed packages.

A sink is made from the run folder, gets each line of metrics.jsonl as a dictionary, and is closed at
the end. It runs in a thread of its own (tracking.py), so it may raise or wait. A user's package
offers one by an entry point of the group `nmt.sinks`; a config can only name it (docs/tracking.md).
"""

from collections.abc import Sequence
from typing import Any, Protocol

from nmt.config import OUR_SINKS
from nmt.system.errors import UserError
from nmt.system.extras import is_installed, name_remedy
from nmt.train.events import find_figures

SAMPLE_TEXTS = ("source", "reference", "translation")


class Sink(Protocol):
    def write(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def check_sinks_installed(names: Sequence[str]) -> None:
    """Raise UserError if a sink of ours needs a package that is not installed."""
    for name in names:
        if name in OUR_SINKS and not is_installed(name):
            raise UserError(
                f"training.track names {name}, which is not installed; {name_remedy(name)}, or leave it out"
            )


def name_figures(line: dict[str, Any]) -> dict[str, float]:
    """Name the numbers of a line as charts are titled: train/nll, grad_norm/encoder.0."""
    return {
        key if "/" in key else f"{line['kind']}/{key}": value
        for key, value in find_figures(line).items()
    }
