"""A first config for your own text: sizes that fit its amount, each with its reason, and a dev and a test
set.

Sets that are not given are drawn from pairs of which neither side occurs twice. They are written as
files beside the config, and data.clean.held_out: drop-sides keeps them out of training, which costs
no other pair. The corpus is not changed. The same text and seed give the same sets.
"""

import math
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from nmt.config import (
    CorpusConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    load_config,
    to_plain_values,
)
from nmt.corpus.prepare import prepare
from nmt.corpus.reader import describe_corpus, find_local_files, read_blocks
from nmt.corpus.shards import PAIRS_PER_SHARD
from nmt.extras.init.hours import estimate_update_seconds, fit_schedule
from nmt.extras.init.survey import Survey, survey_corpus
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
# If there are more characters than this between spaces, spaces do not separate words. German has 8.
UNSPACED_LENGTH = 14
CHARACTERS_A_WORD = 2  # where words have no spaces between them
PIECES_A_WORD = 1.4
MIN_STEPS, MAX_STEPS = 2_000, 100_000
N_CHECKPOINTS = 40
N_VALIDATIONS = 20

# A section of a config: each key has a value, or a pair of a value and the reason for it.
Choices = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """A model that fits an amount of text, and how to train it."""

    max_words: float  # of one side of the training text
    vocab: int
    d_model: int
    d_ff: int
    n_heads: int
    n_layers: int
    dropout: float
    peak_rate: float  # of learning
    tokens: int  # of an update, on each side
    passes: int  # over the text
    reason: str

    @property
    def n_weights(self) -> int:
        """Count the weights that source and target tokens are multiplied with, each of them once."""
        encoder = self.n_layers * (4 * self.d_model**2 + 2 * self.d_model * self.d_ff)
        decoder = self.n_layers * (8 * self.d_model**2 + 2 * self.d_model * self.d_ff)
        return encoder + decoder + self.d_model * self.vocab

    def count_updates(self, n_words: float) -> float:
        updates = n_words * PIECES_A_WORD * self.passes / self.tokens
        return min(MAX_STEPS, max(MIN_STEPS, updates))

    def estimate_hours(self, n_words: float) -> float:
        """Estimate the hours of training on this machine, by a speed that is measured."""
        model = ModelConfig(d_model=self.d_model, d_ff=self.d_ff)
        seconds = estimate_update_seconds(model, self.n_weights, self.tokens)
        return self.count_updates(n_words) * seconds / 3600


MULTI30K = "as multi30k.yaml, for 345,000 words"
SMALLEST = "as multi30k.yaml, with fewer pieces; 8,000 are worse for 35,000 words"
SMALLER = "as multi30k.yaml, with more dropout; fewer pieces are worse from 65,000 words"
HOUR = "as hour.yaml, which gains 5 BLEU over multi30k.yaml from 1.1 million words"
IWSLT = "as fairseq's transformer_iwslt_de_en; not measured here"
BASE_DROPOUT = "the paper's base, with more dropout; not measured"
SIZES = (
    #    words     vocab   d_model d_ff  heads layers dropout rate  tokens  passes
    Size(50e3,     2_000,  128,    256,  4,    4,     0.3,    5e-3,   4_096, 250,  SMALLEST),
    Size(150e3,    10_000, 128,    256,  4,    4,     0.4,    5e-3,   4_096, 120,  SMALLER),
    Size(500e3,    10_000, 128,    256,  4,    4,     0.3,    5e-3,   4_096, 60,   MULTI30K),
    Size(3e6,      10_000, 256,    512,  4,    3,     0.2,    2.4e-3, 4_096, 40,   HOUR),
    Size(10e6,     10_000, 512,    1024, 4,    6,     0.3,    5e-4, 4_096,  50,    IWSLT),
    Size(50e6,     20_000, 512,    2048, 8,    6,     0.2,    7e-4, 12_500, 30,    BASE_DROPOUT),
    Size(math.inf, 37_000, 512,    2048, 8,    6,     0.1,    7e-4, 25_000, 20,    "the paper's base"),
)  # fmt: skip


@dataclass(frozen=True)
class Start:
    """A model to continue from. The constants are what docs/fine-tuning.md found best."""

    path: str
    config: RunConfig  # with which it was trained

    PASSES: ClassVar[int] = 10  # over the text
    UPDATES_A_PASS: ClassVar[int] = 50
    N_VALIDATIONS: ClassVar[int] = 10
    MIN_TOKENS: ClassVar[int] = 1_024  # of an update
    RATE: ClassVar[float] = 2e-4  # of a model of d_model 256

    def choose_model(self) -> Choices:
        """Return its settings, without those that are defaults."""
        defaults = to_plain_values(ModelConfig())
        settings = to_plain_values(self.config.model)
        return {key: value for key, value in settings.items() if value != defaults[key]}

    def choose_schedule(self, n_words: float) -> Choices:
        n_tokens = n_words * PIECES_A_WORD
        wanted_tokens = max(self.MIN_TOKENS, _round_up(n_tokens / self.UPDATES_A_PASS))
        tokens = int(min(wanted_tokens, self.config.training.tgt_tokens))
        every = _round_up(max(10.0, n_tokens * self.PASSES / tokens / self.N_VALIDATIONS))
        rate = float(f"{self.RATE * math.sqrt(256 / self.config.model.d_model):.1g}")
        optimizer: Choices = {
            "schedule": "inverse_sqrt",
            "warmup_steps": every,
            "peak_lr": (
                rate,
                "low, so that it forgets less; ten times as high if old text is mixed in",
            ),
        }
        training: Choices = {
            "init_from": (
                self.path,
                "its vocabulary too; the dev set is scored before the first update",
            ),
            "steps": (self.N_VALIDATIONS * every, f"about {self.PASSES} passes over the text"),
            "patience": (3, "ends the run after three validations without a better dev BLEU"),
            "src_tokens": tokens,
            "tgt_tokens": tokens,
            "validate_every": every,
            "checkpoint_every": every,
            "keep_checkpoints": 5,
            "ema": (0.99, "the mean over about a hundred updates is validated and saved"),
            "label_smoothing": self.config.training.label_smoothing,
            "precision": ("auto", "bf16 where the processor has instructions for it"),
        }
        return {"optimizer": optimizer, "training": training}


@dataclass(frozen=True)
class HeldOut:
    """The dev and the test set, and what they cost the training text."""

    drawn: dict[str, np.ndarray]  # which pairs, from 0, of those that can be read
    n_lines: int  # of each set that is drawn
    n_shared: int  # training pairs that have a side in common with a given set
    rule: str  # the value of data.clean.held_out
    is_dropped: np.ndarray  # (pairs,): True for training pairs that the sets and the rule remove


def suggest_config(
    path: Path,
    data: DataConfig,
    seed: int,
    is_forced: bool = False,
    start: Start | None = None,
    hours: float | None = None,
) -> None:
    """Survey the text that `data` names and write a config for it at `path`, with the drawn sets beside
    it. The model is new, or begins as `start`. A file that exists and differs is an error, unless
    `is_forced`. With `hours`, the model and its schedule are what this machine trains in them.
    """
    given = [corpus for corpus in (*data.train, data.valid, data.test) if corpus is not None]
    inputs = {file.resolve() for each in given for file in find_local_files(each, data)}
    data = replace(data, on_bad_line="skip")
    survey = survey_corpus(data.train[0], data)
    _describe(survey, data)
    _check_amount(survey, data.train[0], MIN_PAIRS if start is None else MIN_PAIRS_TO_CONTINUE)
    held_out = choose_held_out(survey, data, seed)
    is_kept = survey.is_usable & ~survey.is_repeated & ~held_out.is_dropped
    if has_spaces(survey):
        is_kept &= survey.words.max(1) <= MAX_RATIO * survey.words.min(1)

    contents: dict[Path, str] = {}  # of the files to write
    sets = {"valid": data.valid, "test": data.test}
    for split, places in held_out.drawn.items():
        src_file = path.with_name(f"{path.stem}.{split}.{data.src}")
        tgt_file = path.with_name(f"{path.stem}.{split}.{data.tgt}")
        contents[src_file], contents[tgt_file] = _read_pairs_at(places, data)
        sets[split] = CorpusConfig(
            src=os.path.relpath(src_file, data.root), tgt=os.path.relpath(tgt_file, data.root)
        )
    data = replace(data, valid=sets["valid"], test=sets["test"])

    n_words = _count_words(survey, is_kept)
    choices: Choices = {
        "name": (
            path.stem,
            f"{data.src}-{data.tgt}, from {describe_corpus(data.train[0])}: {is_kept.sum():,} pairs, "
            f"{n_words:,.0f} words. Written by nmt-init: a starting point, to be changed.",
        ),
        "seed": seed,
        "data": _choose_data(f"stores/{path.stem}", data, survey, held_out, start is None),
    }
    if start is None:
        size, size_reason = choose_size(n_words, hours)
        choices["vocab"] = _choose_vocab(size, size_reason, survey.alphabet)
        choices["model"] = _choose_model(size)
        choices |= _choose_schedule(size, n_words)
    else:
        choices["vocab"] = {"joint": start.config.vocab.joint}
        choices["model"] = start.choose_model()
        choices |= start.choose_schedule(n_words)
    contents[path] = _format_config(choices)
    _check_files(contents, inputs, is_forced)
    for file, content in contents.items():
        if file != path:
            _write_file(file, content)
    if hours is not None:
        _fit_into(hours, choices, path)
    _write_file(path, _format_config(choices))


def _fit_into(hours: float, choices: Choices, path: Path) -> None:
    """Replace the schedule by one that takes these hours here, measured with the config as it is so far."""
    reason = (
        f"what fits into {60 * hours:g} minutes, by a measured speed; so do warm-up, validations and "
        "checkpoints"
    )
    trial = path.with_name(f".{path.name}")  # so that nothing is left if too little fits
    write_text(trial, _format_config(choices))
    try:
        config = load_config(str(trial))
        prepare(config.data, config.vocab, config.seed)
        settings = fit_schedule(config, hours)
    finally:
        trial.unlink()
    for key, value in settings.items():
        section, name = key.split(".")
        choices[section][name] = (value, reason) if name == "steps" else value


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


def guess_languages(names: Sequence[str]) -> tuple[str, str] | None:
    """Find the languages in the name of one file, pairs.en-de.tsv, or where the names of two differ,
    train.en and train.de.
    """
    if len(names) == 1:
        found = re.search(r"(?<![A-Za-z])([a-z]{2})[-_]([a-z]{2})(?![A-Za-z])", Path(names[0]).name)
        return (found[1], found[2]) if found else None
    src_words, tgt_words = (re.split("[^A-Za-z]+", Path(name).name) for name in names)
    # from the end: the files may have other names before their languages
    for src, tgt in zip(reversed(src_words), reversed(tgt_words), strict=False):
        if src != tgt:
            has_languages = re.fullmatch("[a-z]{2} [a-z]{2}", f"{src} {tgt}")
            return (src, tgt) if has_languages else None
    return None


# ---- the dev and the test set -----------------------------------------------------------------------------------


def choose_held_out(survey: Survey, data: DataConfig, seed: int) -> HeldOut:
    """Draw the sets that are not given, and choose the rule that keeps all sets out of training."""
    given = {"valid": data.valid, "test": data.test}
    is_shared = np.zeros(survey.n_pairs, bool)  # has a side in common with a given set
    for corpus in given.values():
        if corpus is not None:
            is_shared |= survey.shares_a_side(survey_corpus(corpus, data))
    n_shared = int(is_shared.sum())
    if n_shared > survey.n_pairs / 2:
        raise UserError(
            f"{n_shared:,} of {survey.n_pairs:,} training pairs have a side in common with the dev or "
            "test set; give dev and test sets of other text"
        )
    rule = "drop-pairs"
    is_dropped = np.zeros(survey.n_pairs, bool)
    if n_shared <= MAX_SHARED * survey.n_pairs:
        rule = "drop-sides"
        is_dropped |= is_shared

    missing = [split for split, corpus in given.items() if corpus is None]
    is_usable = survey.is_usable & ~is_shared
    candidates = np.flatnonzero(is_usable & survey.is_unique)
    n_lines = int(min(MAX_HELD_OUT, max(MIN_HELD_OUT, HELD_OUT_SHARE * is_usable.sum())))
    # at least as many stay for training as are drawn
    if len(candidates) < 2 * len(missing) * n_lines:
        raise UserError(
            f"{describe_corpus(data.train[0])}: only {len(candidates):,} pairs have no side in common "
            f"with another, too few to draw {n_lines:,} for each of {_name_sets(missing)} from; give more "
            "text, or sets of your own (--valid-src, --test-src and so on of nmt-init)"
        )
    order = np.random.Generator(np.random.Philox(seed)).permutation(candidates)
    drawn = {}
    for number, split in enumerate(missing):
        drawn[split] = np.sort(order[number * n_lines : (number + 1) * n_lines])
        is_dropped[drawn[split]] = True
    return HeldOut(drawn, n_lines, n_shared, rule, is_dropped)


def _name_sets(splits: Iterable[str]) -> str:
    return " and ".join("dev" if split == "valid" else split for split in splits)


def _read_pairs_at(places: np.ndarray, data: DataConfig) -> tuple[str, str]:
    """Return each side of the pairs at these places as text, without the spaces around its lines."""
    src = tgt = ""
    first = 0
    for block in read_blocks(data.train[0], data, PAIRS_PER_SHARD):
        end = first + len(block.src)
        for place in places[(places >= first) & (places < end)] - first:
            src += block.src[place].strip() + "\n"
            tgt += block.tgt[place].strip() + "\n"
        first = end
    return src, tgt


# ---- what was seen ----------------------------------------------------------------------------------------------


def has_spaces(survey: Survey) -> bool:
    """Whether spaces separate words on both sides."""
    return max(survey.characters_per_word) <= UNSPACED_LENGTH


def _describe(survey: Survey, data: DataConfig) -> None:
    n_words = survey.words.sum(0)
    say(
        f"{describe_corpus(data.train[0])}: {data.src} to {data.tgt}, {survey.n_pairs:,} pairs, "
        f"{n_words[0]:,} and {n_words[1]:,} words; {survey.is_repeated.sum():,} pairs equal an earlier "
        f"one, {survey.is_identical.sum():,} have equal sides"
    )
    if survey.n_unreadable:
        say(f"warning: {survey.n_unreadable:,} unreadable pairs, such as {survey.complaint}")
    stretches = survey.find_misaligned()
    for first, last in stretches[:3]:
        say(
            f"warning: pairs {first:,} to {last:,} do not look like translations: the lengths of the "
            "two sides do not match there; is a line missing on one side?"
        )
    if len(stretches) > 3:
        say(f"warning: {len(stretches) - 3:,} more stretches look like that")


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


# ---- the choices ------------------------------------------------------------------------------------------------


def choose_size(n_words: float, hours: float | None = None) -> tuple[Size, str]:
    """Return the size for this many words, or a smaller one that this machine can train in `hours`,
    and the reason.
    """
    place = next(i for i, size in enumerate(SIZES) if n_words <= size.max_words)
    wanted = SIZES[place]
    if hours is not None:
        while place > 0 and SIZES[place].estimate_hours(n_words) > hours:
            place -= 1
    size = SIZES[place]
    if size is wanted:
        return size, size.reason
    return size, (
        f"{size.reason}; the text is enough for {wanted.vocab:,} pieces, d_model {wanted.d_model}, d_ff "
        f"{wanted.d_ff} and updates of {wanted.tokens:,} tokens, which take longer here"
    )


def _choose_model(size: Size) -> Choices:
    model: Choices = {
        "d_model": size.d_model,
        "d_ff": size.d_ff,
        "n_heads": size.n_heads,
        "n_layers": size.n_layers,
        "dropout": size.dropout,
    }
    if size.d_model < 512:
        model["norm"] = "pre", "a small model learns faster with it (docs/learning.md)"
        model["positions"] = (
            "rotary",
            "up to 5 BLEU better than sinusoidal (docs/learning.md), but not in the models of Hugging Face",
        )
    return model


def _choose_data(
    store: str, data: DataConfig, survey: Survey, held_out: HeldOut, is_new: bool
) -> Choices:
    n_identical, n_repeated = survey.is_identical.sum(), survey.is_repeated.sum()
    clean: Choices = {
        "identical": (
            True,
            f"untranslated text teaches the model to copy; drops {n_identical:,} pairs here",
        ),
        "duplicates": (True, f"drops {n_repeated:,} pairs here"),
        "held_out": (held_out.rule, _describe_rule(held_out)),
    }
    if has_spaces(survey):
        n_uneven = (survey.words.max(1) > MAX_RATIO * survey.words.min(1)).sum()
        clean["max_ratio"] = MAX_RATIO, f"as Moses does; drops {n_uneven:,} pairs here"
    advice = "add text that the model learned from, or it forgets some (docs/fine-tuning.md)"
    if is_new:
        advice = "more corpora: further entries of this list (docs/data.md)"
    choices: Choices = {
        "src": data.src,
        "tgt": data.tgt,
        "root": (data.root, "relative paths of corpora start here"),
        "store": store,
        "train": ([to_plain_values(corpus) for corpus in data.train], advice),
        "valid": (to_plain_values(data.valid), _describe_sets(held_out)),
        "test": to_plain_values(data.test),
        "clean": clean,
    }
    if survey.n_unreadable:
        choices["on_bad_line"] = (
            "skip",
            f"drops {survey.n_unreadable:,} unreadable pairs here, such as {survey.complaint}",
        )
    return choices


def _choose_vocab(size: Size, reason: str, alphabet: int) -> Choices:
    choices: Choices = {
        "size": (size.vocab, f"this and the model: {reason}"),
        "byte_fallback": (True, "characters that the text lacks become bytes; nothing is unknown"),
    }
    if alphabet > size.vocab // 4:
        choices["character_coverage"] = (
            0.9995,
            f"of {alphabet:,} different characters the rare ones become bytes, to leave pieces for words",
        )
    return choices


def _choose_schedule(size: Size, n_words: float) -> Choices:
    every = _round_up(size.count_updates(n_words) / N_CHECKPOINTS)
    steps = N_CHECKPOINTS * every
    warmup = min(4_000, steps // 4)
    scale = round(size.peak_rate * math.sqrt(size.d_model * warmup), 2)
    n_passes = steps * size.tokens / (n_words * PIECES_A_WORD)
    length = f"about {n_passes:.0f} passes over the text, at {PIECES_A_WORD} pieces a word"
    training: Choices = {
        "steps": (steps, length),
        "patience": (N_VALIDATIONS // 4, "a quarter of the run without a better dev BLEU ends it"),
        "src_tokens": size.tokens,
        "tgt_tokens": size.tokens,
        "validate_every": steps // N_VALIDATIONS,
        "checkpoint_every": (
            every,
            "nmt-average --last 10 averages those of the last quarter of the run",
        ),
        "keep_checkpoints": 12,
        "precision": ("auto", "bf16 where the processor has instructions for it"),
    }
    peak = f"a peak rate of {size.peak_rate:g}, reached after the warm-up"
    return {
        "optimizer": {"warmup_steps": warmup, "scale": (scale, peak)},
        "training": training,
    }


def _count_words(survey: Survey, is_kept: np.ndarray) -> float:
    """Count the words of the side that has more; without spaces between them, estimate their number."""
    n_words = []
    for side, per_word in enumerate(survey.characters_per_word):
        words = survey.words[is_kept, side].sum()
        if per_word > UNSPACED_LENGTH:
            words = survey.characters[is_kept, side].sum() / CHARACTERS_A_WORD
        n_words.append(float(words))
    return max(n_words)


def _round_up(number: float) -> int:
    """Round up to two digits, so that people can remember the number."""
    unit = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


def _describe_sets(held_out: HeldOut) -> str:
    if not held_out.drawn:
        return ""
    return (
        f"{_name_sets(held_out.drawn)}: {held_out.n_lines:,} pairs each, drawn by the seed from those "
        "without a side in common with another"
    )


def _describe_rule(held_out: HeldOut) -> str:
    if held_out.rule == "drop-sides":
        return f"no sentence of these sets is trained on; drops {held_out.is_dropped.sum():,} pairs here"
    return (
        f"no pair of these sets is trained on; drop-sides would drop {held_out.n_shared:,} pairs with "
        "one side in common too"
    )


def _format_config(choices: Choices) -> str:
    return "\n".join(_format_choices(choices)) + "\n"


def _format_choices(choices: Choices, indent: str = "") -> list[str]:
    """Return lines of YAML, with each reason above its key."""
    lines: list[str] = []
    for key, choice in choices.items():
        value, reason = choice if isinstance(choice, tuple) else (choice, "")
        lines += textwrap.wrap(
            escape_line(reason),
            96,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
            break_on_hyphens=False,
        )
        if isinstance(value, dict):
            if not indent:
                lines.append("")
            lines += [f"{indent}{key}:", *_format_choices(value, indent + "  ")]
        else:
            lines += [indent + line for line in format_yaml({key: value}).splitlines()]
    return lines
