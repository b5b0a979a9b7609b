"""Attention behind chosen lines of the test set: their checkpoint reads their evaluated translations.

This is the one part of a report that loads a model.
"""

from collections.abc import Sequence
from pathlib import Path

from nmt.report.facts import LineAttention, RunFacts
from nmt.system.errors import UserError
from nmt.system.run_folder import RunFolder
from nmt.translate.translator import Translation, open_translator


def map_test_lines(run: Path, facts: RunFacts, numbers: Sequence[int]) -> list[LineAttention]:
    """Return the attention behind these lines of the last evaluation, counted from 1."""
    texts = facts.texts
    if texts is None or not texts.sources:
        raise UserError(f"--attention: {run} has no translations yet; run nmt-eval {run} first")
    for number in numbers:
        if not 1 <= number <= len(texts.sources):
            raise UserError(
                f"--attention {number}: {texts.test_set} has the lines 1 to {len(texts.sources)}"
            )
    place = find_scored_checkpoint(run, texts.checkpoint)
    translator = open_translator([str(place)], ()).translator
    for result in facts.results:
        if result.hypotheses_sha256 == texts.hypotheses_sha256:
            tag = result.decoding.get("tag")
            translator.set_tag(None if tag is None else str(tag))
    lines = [texts.sources[number - 1] for number in numbers]
    evaluated = [texts.translations[number - 1] for number in numbers]
    # not searched again: other settings, or another processor, could find another translation
    translations = [
        Translation(text, 0.0, tuple(ids))
        for text, ids in zip(evaluated, translator.vocab.tgt.encode(evaluated), strict=True)
    ]
    found = []
    maps = translator.map_attention(lines, translations)
    for number, line, translation, one in zip(numbers, lines, translations, maps, strict=True):
        if one is not None:
            name = f"test line {number}"
            found.append(LineAttention(name, line, translation.text, one.to_json()))
    return found


def find_scored_checkpoint(run: Path, name: str) -> Path:
    """Return where the checkpoint of this name is; the name may be a stranger's."""
    folder = RunFolder(run)
    for path in (folder.average, *folder.checkpoints.glob("step-*")):
        if path.name == name:
            return path
    raise UserError(f"--attention: {run} has no checkpoint {name} any more; run nmt-eval again")
