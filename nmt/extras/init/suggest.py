"""A first config for your own text: sizes that fit its amount, each with its reason, and a dev and a test
set.

Sets that are not given are drawn from pairs of which neither side occurs twice. They are written as
files beside the config, and data.clean.held_out: drop-sides keeps them out of training, which costs
no other pair. The corpus is not changed. The same text and seed give the same sets.
"""

import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nmt.config import CorpusConfig, DataConfig
from nmt.config_files import load_config, to_plain_values
from nmt.corpus.prepare import prepare
from nmt.corpus.reader import describe_corpus, find_local_files, read_blocks
from nmt.corpus.shards import PAIRS_PER_SHARD
from nmt.extras.init.hours import Schedule, fit_schedule
from nmt.extras.init.recipe import Start, choose_size
from nmt.extras.init.survey import Survey, survey_corpus
from nmt.score.text_checks import look_unrelated
from nmt.system.errors import UserError
from nmt.system.escapes import escape_line
from nmt.system.files import check_writable, read_bytes, write_text
from nmt.system.progress import say
from nmt.system.strict_yaml import format_yaml

MIN_PAIRS = 1_000  # fewer are too few to train from scratch
MIN_PAIRS_TO_CONTINUE = 500
MIN_HELD_OUT, MAX_HELD_OUT = 100, 2_000  # pairs of each set that is drawn
HELD_OUT_SHARE = 0.05
MAX_SHARED = 0.05  # of the training pairs, that drop-sides may cost
MAX_RATIO = 9  # of words, the default of Moses' clean-corpus-n
CHARACTERS_A_WORD = 2  # where words have no spaces between them

HEAD = """\
# {data.src}-{data.tgt}, from {corpus}: {n_pairs:,} pairs, {n_words:,.0f} words.
# Written by nmt-init: a starting point, to be changed.
{names}
data:
{languages}  # relative paths of corpora start here
{places}  # {advice}
{train}  # {held_out.reason}
{sets}  clean:
    # untranslated text teaches the model to copy; drops {n_identical:,} pairs here
    identical: true
    # drops {n_repeated:,} pairs here
    duplicates: true
    # {held_out.reason_of_rule}
    held_out: {held_out.rule}
    # as Moses does; null where words have no spaces between them; drops {n_uneven:,} pairs here
    max_ratio: {max_ratio}
  # {survey.n_unreadable:,} pairs here cannot be read
  on_bad_line: {on_bad_line}
{evaluation}"""
EVALUATION = """
evaluation:
  # BLEU's 13a means little where words have no spaces between them
  best_by: chrf
"""


@dataclass(frozen=True)
class HeldOut:
    """The dev and the test set, and how they are kept out of training."""

    drawn: dict[str, np.ndarray]  # which pairs, from 0, of those that can be read
    reason: str
    rule: str  # the value of data.clean.held_out
    reason_of_rule: str
    is_dropped: np.ndarray  # (pairs,): True for training pairs that the sets and the rule remove


def suggest_config(
    path: Path,
    data: DataConfig,
    seed: int,
    is_forced: bool,
    start: Start | None,
    hours: float | None,
) -> None:
    """Survey the text that `data` names and write a config for it at `path`, with the drawn sets beside
    it. The model is new, or begins as `start`. A file that exists and differs is an error, unless
    `is_forced`. With `hours`, the model and its schedule are what this machine trains in them.
    """
    inputs = {file.resolve() for each in data.corpora for file in find_local_files(each, data)}
    data = replace(data, on_bad_line="skip")
    survey = survey_corpus(data.train[0], data)
    _describe(survey, data)
    _check_amount(survey, data.train[0], MIN_PAIRS if start is None else MIN_PAIRS_TO_CONTINUE)
    held_out = choose_held_out(survey, data, seed)
    is_spaced = not survey.is_unspaced.any()
    is_uneven = is_spaced & (survey.words.max(1) > MAX_RATIO * survey.words.min(1))
    is_kept = survey.is_usable & ~survey.is_repeated & ~held_out.is_dropped & ~is_uneven
    n_words = _count_words(survey, is_kept)

    contents: dict[Path, str] = {}  # of the files to write
    sets = {"valid": data.valid, "test": data.test}
    for split, pair_numbers in held_out.drawn.items():
        files = [path.with_name(f"{path.stem}.{split}.{side}") for side in (data.src, data.tgt)]
        contents.update(zip(files, _read_pairs_at(pair_numbers, data), strict=True))
        src, tgt = [os.path.relpath(file, data.root) for file in files]
        sets[split] = CorpusConfig(src, tgt)

    advice = "add text that the model learned from, or it forgets some (docs/fine-tuning.md)"
    if start is None:
        advice = "more corpora: further entries of this list (docs/data.md)"
    head = HEAD.format(
        data=data,
        survey=survey,
        held_out=held_out,
        corpus=escape_line(describe_corpus(data.train[0])),
        n_pairs=is_kept.sum(),
        n_words=n_words,
        n_identical=survey.is_identical.sum(),
        n_repeated=survey.is_repeated.sum(),
        n_uneven=is_uneven.sum(),
        max_ratio=MAX_RATIO if is_spaced else "null",
        on_bad_line="skip" if survey.n_unreadable else "stop",
        advice=advice,
        names=format_yaml({"name": path.stem, "seed": seed}),
        languages=_format_data({"src": data.src, "tgt": data.tgt}),
        places=_format_data({"root": data.root, "store": f"stores/{path.stem}"}),
        train=_format_data({"train": data.train}),
        sets=_format_data(sets),
        evaluation=EVALUATION if survey.is_unspaced[1] else "",
    )
    model = choose_size(n_words, hours) if start is None else start
    schedule = model.plan(n_words)

    def format_config(schedule: Schedule) -> str:
        return head + model.format(schedule, survey.alphabet)

    config = format_config(schedule)
    _check_files(contents | {path: config}, inputs, is_forced)
    for file, content in contents.items():
        _write_file(file, content)
    if hours is not None:
        config = format_config(_fit_into(hours, schedule, config, path))
    _write_file(path, config)


def _format_data(values: Mapping[str, object]) -> str:
    """Return entries of the section data as lines of YAML."""
    plain = {key: to_plain_values(value) for key, value in values.items()}
    return textwrap.indent(format_yaml(plain), "  ")


def _fit_into(hours: float, schedule: Schedule, config: str, path: Path) -> Schedule:
    """Return the schedule that takes these hours here, measured with the config as it is so far."""
    trial = path.with_name(f".{path.name}")  # so that nothing is left if too little fits
    write_text(trial, config)
    try:
        made = load_config(str(trial))
        prepare(made.data, made.vocab, made.seed)
        return fit_schedule(schedule, made, hours)
    finally:
        trial.unlink()


def _check_files(contents: dict[Path, str], inputs: set[Path], is_forced: bool) -> None:
    """Refuse to replace a file of the user's."""
    for file, content in contents.items():
        if file.resolve() in inputs:
            raise UserError(f"{file}: is your own text; give another -o FILE")
        check_writable(file)
        if file.exists() and not is_forced and read_bytes(file) != content.encode():
            raise UserError(f"{file}: exists; give another -o FILE, or replace it with --force")


def _write_file(file: Path, content: str) -> None:
    write_text(file, content)
    say(f"wrote {file}")


# ---- the dev and the test set -----------------------------------------------------------------------------------


def choose_held_out(survey: Survey, data: DataConfig, seed: int) -> HeldOut:
    """Draw the sets that are not given, and choose the rule that keeps all sets out of training."""
    given = {"valid": data.valid, "test": data.test}
    is_shared = np.zeros(survey.n_pairs, bool)  # has a side in common with a given set
    for corpus in filter(None, given.values()):
        other = survey_corpus(corpus, data)
        is_shared |= survey.shares_a_side(other)
        if look_unrelated(other.characters):
            say(f"warning: {describe_corpus(corpus)}: do not look like translations of each other")
    n_shared = int(is_shared.sum())
    if n_shared:
        say(
            f"{n_shared:,} training pairs have a side in common with the dev or test set that you gave"
        )
    if n_shared > survey.n_pairs / 2:
        raise UserError(
            f"{n_shared:,} of {survey.n_pairs:,} training pairs have a side in common with the dev or "
            "test set; give dev and test sets of other text"
        )

    missing = [split for split, corpus in given.items() if corpus is None]
    names = " and ".join(missing).replace("valid", "dev")
    is_usable = survey.is_usable & ~is_shared
    candidates = np.flatnonzero(is_usable & survey.is_unique)
    n_lines = int(min(MAX_HELD_OUT, max(MIN_HELD_OUT, HELD_OUT_SHARE * is_usable.sum())))
    # at least as many stay for training as are drawn
    if len(candidates) < 2 * len(missing) * n_lines:
        raise UserError(
            f"{describe_corpus(data.train[0])}: only {len(candidates):,} pairs have no side in common "
            f"with another, too few to draw {n_lines:,} for each of {names} from; give more "
            "text, or sets of your own (--valid-src, --test-src and so on of nmt-init)"
        )
    order = np.random.Generator(np.random.Philox(seed)).permutation(candidates)
    drawn = {}
    is_drawn = np.zeros(survey.n_pairs, bool)
    for number, split in enumerate(missing):
        drawn[split] = np.sort(order[number * n_lines : (number + 1) * n_lines])
        is_drawn[drawn[split]] = True
    is_drawn = np.isin(
        survey.digests[:, 0], survey.digests[is_drawn, 0]
    )  # with pairs that equal them
    reason = "as you gave them"
    if missing:
        reason = (
            f"{names}: {n_lines:,} pairs each, drawn by the seed from those without a side in common with "
            "another"
        )

    if n_shared > MAX_SHARED * survey.n_pairs:
        reason_of_rule = (
            f"no pair of these sets is trained on; drop-sides would drop {n_shared:,} pairs with "
            "one side in common too"
        )
        return HeldOut(drawn, reason, "drop-pairs", reason_of_rule, is_drawn)
    is_dropped = is_drawn | is_shared
    reason_of_rule = (
        f"no sentence of these sets is trained on; drops {is_dropped.sum():,} pairs here"
    )
    return HeldOut(drawn, reason, "drop-sides", reason_of_rule, is_dropped)


def _read_pairs_at(pair_numbers: np.ndarray, data: DataConfig) -> tuple[str, str]:
    """Return each side of the pairs at these places as text, without the spaces around its lines."""
    src = tgt = ""
    first = 0
    for block in read_blocks(data.train[0], data, PAIRS_PER_SHARD):
        end = first + len(block.src)
        for row in pair_numbers[(pair_numbers >= first) & (pair_numbers < end)] - first:
            src += block.src[row].strip() + "\n"
            tgt += block.tgt[row].strip() + "\n"
        first = end
    return src, tgt


# ---- what was seen ----------------------------------------------------------------------------------------------


def _describe(survey: Survey, data: DataConfig) -> None:
    n_words = survey.words.sum(0)
    say(
        f"{describe_corpus(data.train[0])}: {data.src} to {data.tgt}, {survey.n_pairs:,} pairs, "
        f"{n_words[0]:,} and {n_words[1]:,} words; {survey.is_repeated.sum():,} pairs equal an earlier "
        f"one, {survey.is_identical.sum():,} have equal sides, {(survey.characters.min(1) == 0).sum():,} an empty side"
    )
    if survey.n_unreadable:
        say(f"warning: {survey.n_unreadable:,} unreadable pairs, such as {survey.complaint}")
    stretches = survey.find_misaligned()
    if stretches:
        first, last = stretches[0]
        more = f"; so do {len(stretches) - 1:,} later stretches" if len(stretches) > 1 else ""
        say(
            f"warning: pairs {first:,} to {last:,} do not look like translations: the lengths of the "
            f"two sides do not match there; is a line missing on one side?{more}"
        )


def _check_amount(survey: Survey, corpus: CorpusConfig, least: int) -> None:
    name = describe_corpus(corpus)
    if survey.is_identical.sum() > survey.n_pairs / 2:
        raise UserError(
            f"{name}: {survey.is_identical.sum():,} of {survey.n_pairs:,} pairs have equal sides; "
            "is one file a copy of the other?"
        )
    n_usable = int((survey.is_usable & ~survey.is_repeated).sum())
    if n_usable < least:
        remedy = "give more text"
        if least == MIN_PAIRS:
            remedy += ", or continue another model with --from"
        raise UserError(
            f"{name}: has {n_usable:,} different usable pairs, but at least {least:,} are needed; {remedy}"
        )


def _count_words(survey: Survey, is_kept: np.ndarray) -> float:
    """Count the words of the side that has more; without spaces between them, estimate their number."""
    n_words = survey.words[is_kept].sum(0)
    n_estimated = survey.characters[is_kept].sum(0) / CHARACTERS_A_WORD
    return float(np.where(survey.is_unspaced, n_estimated, n_words).max())
