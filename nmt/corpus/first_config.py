"""A first config for somebody's own text: sizes that fit its amount, each with its reason, and a
dev and a test set.

A split is drawn from pairs of which neither side occurs twice, written as files beside the config,
and dropped from training by data.clean.held_out: drop-sides, which costs no other pair. The corpus
stays as it is. The same text and seed give the same files.
"""

import math
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nmt.config import CorpusConfig, DataConfig, to_plain_values
from nmt.corpus.reader import describe_corpus, find_local_files, read_blocks
from nmt.corpus.shards import PAIRS_PER_SHARD
from nmt.corpus.survey import Survey, survey_corpus
from nmt.system.errors import UserError
from nmt.system.escapes import escape_line
from nmt.system.files import read_bytes, write_text
from nmt.system.memory import format_memory
from nmt.system.progress import say
from nmt.system.strict_yaml import format_yaml

MIN_PAIRS = 1_000  # to train on; fewer teach nothing from scratch
MIN_HELD_OUT, MAX_HELD_OUT = 100, 2_000  # pairs of each set that is drawn
HELD_OUT_SHARE = 0.05
MAX_SHARED = 0.05  # of the training pairs, that drop-sides may cost
MAX_RATIO = 9  # of words, the default of Moses' clean-corpus-n
# More characters than this between spaces: words have none between them. German has 8.
UNSPACED_LENGTH = 14
CHARACTERS_A_WORD = 2  # where words have no spaces between them
PIECES_A_WORD = 1.4
MIN_STEPS, MAX_STEPS = 2_000, 100_000
N_CHECKPOINTS = 40
N_VALIDATIONS = 20

# A larger model than one that trains within this time is not suggested for a machine without a GPU.
MAX_DAYS = 3
# fp32 operations a second of a core: multi30k.yaml takes an hour on two cores of 2.5 GHz
CORE_SPEED = 35e9
BF16_GAIN = 2  # at least, of a core that has bf16 products
# Weights, gradients and Adam's moments in fp32; a share of the memory is left for the rest.
BYTES_A_WEIGHT = 16
WEIGHTS_SHARE = 0.5


@dataclass(frozen=True)
class Machine:
    """What is trained on, as far as it decides what is suggested."""

    n_cores: int
    n_bytes: int  # of memory
    has_bf16: bool  # fast products of bf16
    has_gpu: bool

    def describe(self) -> str:
        cores = f"{self.n_cores} core{'s' if self.n_cores > 1 else ''}"
        return "this GPU" if self.has_gpu else f"these {cores}"


@dataclass(frozen=True)
class ConfigPurpose:
    """Who asks for a config, and for what."""

    name: str  # of the run
    store: str
    author: str  # the command
    machine: Machine | None = None  # None: for any


@dataclass(frozen=True)
class Size:
    """A model for so much text."""

    max_words: float  # of one side of the training text
    reason: str
    vocab: int
    d_model: int
    d_ff: int
    n_heads: int
    n_layers: int
    dropout: float
    peak_rate: float  # of learning
    tokens: int  # of an update, on each side
    passes: int  # over the text

    @property
    def n_encoder_products(self) -> int:
        """Multiplications for a source token; as many weights are in the encoder."""
        return self.n_layers * (4 * self.d_model**2 + 2 * self.d_model * self.d_ff)

    @property
    def n_decoder_products(self) -> int:
        """Those for a target token, the projection included."""
        layers = self.n_layers * (8 * self.d_model**2 + 2 * self.d_model * self.d_ff)
        return layers + self.d_model * self.vocab

    def count_updates(self, n_words: float) -> float:
        updates = n_words * PIECES_A_WORD * self.passes / self.tokens
        return min(MAX_STEPS, max(MIN_STEPS, updates))

    def estimate_hours(self, n_words: float, machine: Machine) -> float:
        """Hours of training on a CPU: a rough count of products."""
        n_products = (self.n_encoder_products + self.n_decoder_products) * self.tokens
        speed = CORE_SPEED * machine.n_cores * (BF16_GAIN if self.has_bf16(machine) else 1)
        # forward and twice as much backward, a multiplication and an addition each
        return self.count_updates(n_words) * 6 * n_products / speed / 3600

    def has_bf16(self, machine: Machine) -> bool:
        return self.d_model >= 512 and (machine.has_bf16 or machine.has_gpu)

    def fits(self, n_words: float, machine: Machine) -> bool:
        if machine.has_gpu:
            return True
        n_bytes = BYTES_A_WEIGHT * (self.n_encoder_products + self.n_decoder_products)
        is_quick = self.estimate_hours(n_words, machine) <= 24 * MAX_DAYS
        return is_quick and n_bytes <= WEIGHTS_SHARE * machine.n_bytes


MULTI30K = "multi30k.yaml, which reaches 38.7 BLEU from 345,000 words (docs/benchmarks.md)"
IWSLT = "the usual model for IWSLT's 160,000 pairs (fairseq's transformer_iwslt_de_en); not measured here"
SIZES = (
    Size(150e3, MULTI30K + ", with fewer pieces", 2_000, 128, 256, 4, 4, 0.3, 5e-3, 4_096, 40),
    Size(1e6, MULTI30K, 10_000, 128, 256, 4, 4, 0.3, 5e-3, 4_096, 40),
    Size(10e6, IWSLT, 10_000, 512, 1024, 4, 6, 0.3, 5e-4, 4_096, 50),
    Size(50e6, "the paper's base, with more dropout; not measured", 20_000, 512, 2048, 8, 6, 0.2, 7e-4, 12_500, 30),
    Size(math.inf, "the paper's base", 37_000, 512, 2048, 8, 6, 0.1, 7e-4, 25_000, 20),
)  # fmt: skip


@dataclass(frozen=True)
class HeldOut:
    """The dev and the test set, and what they cost the training text."""

    drawn: dict[str, np.ndarray]  # which pairs, from 0, of those that can be read
    n_lines: int  # of each that is drawn
    n_shared: int  # training pairs that have a side in common with what is given
    rule: str  # of data.clean.held_out
    is_dropped: np.ndarray  # (pairs,): for this rule


def write_first_config(path: Path, data: DataConfig, seed: int, is_forced: bool) -> None:
    """Look at the text that `data` names, choose, and write `path` and the sets that were drawn
    beside it. `UserError` if one of them exists and differs, unless `is_forced`.
    """
    purpose = ConfigPurpose(path.stem, f"stores/{path.stem}", "nmt-init")
    written = make_first_config(path, data, seed, purpose)
    remedy = "give another -o FILE, or replace it with --force"
    write_choices(written, data, remedy, is_forced)


def write_choices(
    written: dict[Path, str], data: DataConfig, remedy: str, is_forced: bool = False
) -> None:
    """Write a config and its sets. `UserError` if one exists and differs, unless `is_forced`."""
    given = [corpus for corpus in (*data.train, data.valid, data.test) if corpus is not None]
    inputs = {file.resolve() for each in given for file in find_local_files(each, data)}
    for file, content in written.items():
        if file.resolve() in inputs:
            raise UserError(f"{file}: is your own text; {remedy.partition(',')[0]}")
        if file.exists() and not is_forced and read_bytes(file) != content.encode():
            raise UserError(f"{file}: exists; {remedy}")
    for file, content in written.items():
        write_text(file, content)
        say(f"wrote {file}")


def make_first_config(
    path: Path, data: DataConfig, seed: int, purpose: ConfigPurpose
) -> dict[Path, str]:
    """Look at the text that `data` names and choose: the files to write, `path` itself last."""
    data = replace(data, on_bad_line="skip")
    corpus = data.train[0]
    survey = survey_corpus(corpus, data)
    _describe(survey, data)
    _check_amount(survey, corpus)
    held_out = choose_held_out(survey, data, seed)
    is_kept = survey.is_usable & ~survey.is_repeated & ~held_out.is_dropped
    if has_spaces(survey):
        is_kept &= survey.words.max(1) <= MAX_RATIO * survey.words.min(1)

    written: dict[Path, str] = {}
    named = {}
    for split, places in held_out.drawn.items():
        files = []
        for side, lines in zip(
            (data.src, data.tgt), _read_pairs_at(places, corpus, data), strict=True
        ):
            files.append(path.with_name(f"{path.stem}.{split}.{side}"))
            written[files[-1]] = "".join(f"{line}\n" for line in lines)
        src, tgt = (os.path.relpath(file, data.root) for file in files)
        named[split] = CorpusConfig(src=src, tgt=tgt)
    named_data = replace(
        data, valid=named.get("valid", data.valid), test=named.get("test", data.test)
    )
    written[path] = format_first_config(purpose, named_data, seed, survey, held_out, is_kept)
    return written


def guess_languages(names: Sequence[str]) -> tuple[str, str] | None:
    """The languages in the names of two files, train.en and train.de, or of one, pairs.en-de.tsv."""
    words = [re.split("[^A-Za-z]+", Path(name).name) for name in names]
    if len(words) == 1:
        found = re.search(r"(?<![A-Za-z])([a-z]{2})[-_]([a-z]{2})(?![A-Za-z])", Path(names[0]).name)
        return (found[1], found[2]) if found else None
    # from the end: the files may have other names before their languages
    for src, tgt in zip(reversed(words[0]), reversed(words[1]), strict=False):
        if src != tgt:
            are_languages = re.fullmatch("[a-z]{2} [a-z]{2}", f"{src} {tgt}")
            return (src, tgt) if are_languages else None
    return None


# ---- the dev and the test set -----------------------------------------------------------------------------------


def choose_held_out(survey: Survey, data: DataConfig, seed: int) -> HeldOut:
    """Draw the sets that are not given."""
    given = {"valid": data.valid, "test": data.test}
    shares_a_side = np.zeros(survey.n_pairs, bool)
    for corpus in given.values():
        if corpus is not None:
            shares_a_side |= survey.shares_a_side(survey_corpus(corpus, data))
    if shares_a_side.sum() > survey.n_pairs / 2:
        raise UserError(
            f"{shares_a_side.sum():,} of {survey.n_pairs:,} training pairs have a side in common with "
            "the dev or test set; give sets of other text"
        )
    n_shared = int(shares_a_side.sum())
    rule = "drop-sides" if n_shared <= MAX_SHARED * survey.n_pairs else "drop-pairs"

    wanted = [split for split, corpus in given.items() if corpus is None]
    is_usable = survey.is_usable & ~shares_a_side
    candidates = np.flatnonzero(is_usable & survey.is_unique)
    n_lines = int(min(MAX_HELD_OUT, max(MIN_HELD_OUT, HELD_OUT_SHARE * is_usable.sum())))
    if len(candidates) < 2 * len(wanted) * n_lines:
        raise UserError(
            f"{describe_corpus(data.train[0])}: only {len(candidates):,} pairs have no side in common "
            f"with another, too few to draw {' and '.join(wanted)} sets of {n_lines:,} from; give more "
            "text, or sets of your own (data.valid and data.test, or --valid-src and so on of nmt-init)"
        )
    order = np.random.Generator(np.random.Philox(seed)).permutation(candidates)
    drawn = {}
    is_dropped = shares_a_side if rule == "drop-sides" else np.zeros(survey.n_pairs, bool)
    for number, split in enumerate(wanted):
        drawn[split] = np.sort(order[number * n_lines : (number + 1) * n_lines])
        is_dropped[drawn[split]] = True
    return HeldOut(drawn, n_lines, n_shared, rule, is_dropped)


def _read_pairs_at(
    places: np.ndarray, corpus: CorpusConfig, data: DataConfig
) -> tuple[list[str], list[str]]:
    """The pairs at these places, without the spaces around them."""
    src, tgt = [], []
    first = 0
    for block in read_blocks(corpus, data, PAIRS_PER_SHARD):
        last = first + len(block.src)
        for place in places[(places >= first) & (places < last)] - first:
            src.append(block.src[place].strip())
            tgt.append(block.tgt[place].strip())
        first = last
    return src, tgt


# ---- what was seen ----------------------------------------------------------------------------------------------


def has_spaces(survey: Survey) -> bool:
    """Whether words stand between spaces on both sides."""
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
            f"warning: pairs {first:,} to {last:,} do not look like translations: long lines do not "
            "meet long lines there; is a line missing on one side?"
        )
    if len(stretches) > 3:
        say(f"warning: {len(stretches) - 3:,} more stretches look like that")


def _check_amount(survey: Survey, corpus: CorpusConfig) -> None:
    name = describe_corpus(corpus)
    if survey.is_identical.sum() > survey.n_pairs / 2:
        raise UserError(
            f"{name}: {survey.is_identical.sum():,} of {survey.n_pairs:,} pairs have equal sides; "
            "is one file a copy of the other?"
        )
    n_usable = int((survey.is_usable & ~survey.is_repeated).sum())
    if n_usable < MIN_PAIRS:
        raise UserError(
            f"{name}: has {n_usable:,} different usable pairs, but fewer than {MIN_PAIRS:,} teach "
            "nothing from scratch; give more text, or continue another model with training.init_from"
        )


# ---- the config -------------------------------------------------------------------------------------------------


def choose_size(n_words: float, machine: Machine | None) -> tuple[Size, str]:
    """Return the size for so much text, or a smaller one that this machine can train, and the reason."""
    place = next(i for i, size in enumerate(SIZES) if n_words <= size.max_words)
    wanted = SIZES[place]
    if machine is None:
        return wanted, wanted.reason
    while place > 0 and not SIZES[place].fits(n_words, machine):
        place -= 1
    size = SIZES[place]
    if size is wanted:
        return size, size.reason
    days = wanted.estimate_hours(n_words, machine) / 24
    return size, (
        f"{size.reason}; the text is enough for a model of d_model {wanted.d_model} and d_ff {wanted.d_ff}, "
        f"which would take about {days:,.0f} days on {machine.describe()}"
    )


def format_first_config(
    purpose: ConfigPurpose,
    data: DataConfig,
    seed: int,
    survey: Survey,
    held_out: HeldOut,
    is_kept: np.ndarray,
) -> str:
    """The config as YAML, with a reason above each choice. `is_kept` marks the training pairs."""
    n_words = _count_words(survey, is_kept)
    machine = purpose.machine
    size, size_reason = choose_size(n_words, machine)

    # how long to train
    every = _round_up(size.count_updates(n_words) / N_CHECKPOINTS)
    steps = N_CHECKPOINTS * every
    warmup = min(4_000, steps // 4)
    scale = round(size.peak_rate * math.sqrt(size.d_model * warmup), 2)

    values: dict[str, Any] = {"name": purpose.name, "seed": seed}
    values["data"] = {
        "src": data.src,
        "tgt": data.tgt,
        "root": data.root,
        "store": purpose.store,
        "train": [to_plain_values(corpus) for corpus in data.train],
        "valid": to_plain_values(data.valid),
        "test": to_plain_values(data.test),
        "clean": {"identical": True, "duplicates": True, "held_out": held_out.rule},
    }
    values["vocab"] = {"size": size.vocab}
    values["model"] = {
        "d_model": size.d_model,
        "d_ff": size.d_ff,
        "n_heads": size.n_heads,
        "n_layers": size.n_layers,
        "dropout": size.dropout,
    }
    values["optimizer"] = {"warmup_steps": warmup, "scale": scale}
    values["training"] = {
        "steps": steps,
        "patience": N_VALIDATIONS // 4,
        "src_tokens": size.tokens,
        "tgt_tokens": size.tokens,
        "validate_every": steps // N_VALIDATIONS,
        "checkpoint_every": every,
        "keep_checkpoints": 12,
    }
    reasons = {
        "name": f"{data.src}-{data.tgt}, from {describe_corpus(data.train[0])}: {is_kept.sum():,} "
        f"pairs and {n_words:,.0f} words to train on. Written by {purpose.author}: first choices, to be changed.",
        "data.root": "where the paths of the corpora start",
        "data.train": "more corpora: further entries of this list (docs/data.md)",
        "data.valid": _describe_sets(held_out),
        "data.clean.identical": "text that was not translated teaches to copy; drops "
        f"{survey.is_identical.sum():,} pairs here",
        "data.clean.duplicates": f"drops {survey.is_repeated.sum():,} pairs here",
        "data.clean.held_out": _describe_rule(held_out),
        "vocab.size": f"this and the model: {size_reason}",
        "optimizer.warmup_steps": f"scale: a peak rate of {size.peak_rate:g}, reached after the "
        "warm-up",
        "training.steps": f"about {steps * size.tokens / (n_words * PIECES_A_WORD):.0f} passes over "
        f"the text, at {PIECES_A_WORD} pieces a word",
        "training.patience": "a quarter of the run without a better dev BLEU ends it",
        "training.checkpoint_every": "10 of these, which nmt-average --last 10 takes, are the last "
        "quarter of the run",
    }
    if machine is not None:
        values["training"]["micro_tokens"] = "auto"
        reasons["training.micro_tokens"] = (
            f"as many as are fastest within {format_memory(machine.n_bytes)}, found when training starts"
        )
    if machine is not None and not machine.has_gpu:
        hours = size.estimate_hours(n_words, machine)
        reasons["training.steps"] += (
            f"; about {_describe_hours(hours)} on {machine.describe()}, by a rough count; "
            "nmt-train --plan measures it"
        )
    if machine is not None and size.d_model >= 512:
        is_bf16 = size.has_bf16(machine)
        values["training"]["precision"] = "bf16" if is_bf16 else "fp32"
        reasons["training.precision"] = (
            "this machine has fast products of bf16"
            if is_bf16
            else "bf16 is slow on this processor"
        )
    elif size.d_model < 512:
        values["training"]["precision"] = "fp32"
        reasons["training.precision"] = (
            "a model this small gains little from bf16, which many CPUs lack"
        )
    if has_spaces(survey):
        values["data"]["clean"]["max_ratio"] = MAX_RATIO
        too_long = survey.words.max(1) > MAX_RATIO * survey.words.min(1)
        reasons["data.clean.max_ratio"] = f"as Moses does; drops {too_long.sum():,} pairs here"
    if survey.n_unreadable:
        values["data"]["on_bad_line"] = "skip"
        reasons["data.on_bad_line"] = (
            f"drops {survey.n_unreadable:,} unreadable pairs here, such as {survey.complaint}"
        )
    if survey.alphabet > size.vocab // 4:
        values["vocab"]["character_coverage"] = 0.9995
        values["vocab"]["byte_fallback"] = True
        reasons["vocab.character_coverage"] = (
            f"the text has {survey.alphabet:,} different characters; rare ones become bytes, so that "
            "pieces are left for words"
        )
    return _add_comments(format_yaml(values), reasons)


def _count_words(survey: Survey, is_kept: np.ndarray) -> float:
    """The words of the side that has more; where words have no spaces between them, an estimate."""
    n_words = []
    for side, per_word in enumerate(survey.characters_per_word):
        words = survey.words[is_kept, side].sum()
        if per_word > UNSPACED_LENGTH:
            words = survey.characters[is_kept, side].sum() / CHARACTERS_A_WORD
        n_words.append(float(words))
    return max(n_words)


def _describe_hours(hours: float) -> str:
    if hours < 1:
        return f"{max(1, round(60 * hours))} minutes"
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.0f} days"


def _round_up(number: float) -> int:
    """To two digits, so that people can remember it."""
    unit = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


def _describe_sets(held_out: HeldOut) -> str:
    if not held_out.drawn:
        return ""
    names = " and ".join("dev" if split == "valid" else split for split in held_out.drawn)
    return (
        f"{names}: sets of {held_out.n_lines:,} pairs, drawn by the seed from those that have no side in "
        "common with another"
    )


def _describe_rule(held_out: HeldOut) -> str:
    if held_out.rule == "drop-sides":
        return f"no sentence of these sets is trained on; drops {held_out.is_dropped.sum():,} pairs here"
    return (
        f"no pair of these sets is trained on; {held_out.n_shared:,} pairs have one side in common "
        "with them, which drop-sides would drop too"
    )


def _format_comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        escape_line(text),
        96,
        initial_indent=f"{indent}# ",
        break_on_hyphens=False,
        subsequent_indent=f"{indent}# ",
    )


def _add_comments(yaml: str, comments: dict[str, str]) -> str:
    """Write each comment above the line of its key."""
    lines: list[str] = []
    sections: list[str] = []
    for line in yaml.splitlines():
        found = re.match(r"( *)(\w+):", line)
        if found:
            indent = found[1]
            sections = [*sections[: len(indent) // 2], found[2]]
            if not indent and len(sections) == 1 and lines and line.endswith(":"):
                lines.append("")
            lines += _format_comment(comments.get(".".join(sections), ""), indent)
        lines.append(line)
    return "\n".join(lines) + "\n"
