"""Translations of the same few dev lines at each validation.

They are lines that BLEU is computed from, so they cost nothing. Each becomes a line of metrics.jsonl,
so texts are cut.
"""

from nmt.train.events import SampleEvent

SAMPLED_LINES = 5
LONGEST_TEXT = 1_000  # characters


def take_sample(step: int, line: int, source: str, reference: str, translation: str) -> SampleEvent:
    """Describe how a dev line was translated; `line` counts from 0 here, and from 1 in the event."""
    return SampleEvent(
        step=step,
        line=line + 1,
        source=source[:LONGEST_TEXT],
        reference=reference[:LONGEST_TEXT],
        translation=translation[:LONGEST_TEXT],
    )
