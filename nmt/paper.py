"""The paper as data: each rule of its sections 3, 5 and 6 (not 6.3, parsing) beside the authors'
code and a config.

Independent reproductions land from 16 to 29 BLEU with "the same" settings, so every difference is
written out and counted. The table itself is configs/paper.yaml, which also describes its columns;
docs/recipe.md has the sources of its cells. A config is compared with base or big, whichever is
nearer, on the pair that its languages name (else En-De). A setting deviates if it differs from what
the paper says or, where the paper is silent, from the authors' code of June 2017 or the usual
reading. Each setting is in one row. Settings that only concern the machine have none;
tests/test_paper.py lists them, and checks that every other setting has one.
"""

import functools
import operator
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Any, Literal

from nmt.config import (
    CorpusConfig,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    RunConfig,
    TrainingConfig,
    VocabConfig,
)
from nmt.config_files import find_shipped_configs
from nmt.known_test_sets import PAPER_DEV_SET, PAPER_TEST_SET, WMT14, KnownSet
from nmt.system.files import COMPRESSED
from nmt.system.strict_yaml import Values, parse_yaml

Model = Literal["base", "big"]
# Table 2
PAPER_BLEU = {
    ("base", "en-de"): 27.3,
    ("base", "en-fr"): 38.1,
    ("big", "en-de"): 28.4,
    ("big", "en-fr"): 41.8,
}
# Table 3, En-De, newstest2013: perplexity per piece, BLEU, and after how many updates (section 5.2)
PAPER_DEV = {"base": (4.92, 25.8, 100_000), "big": (4.33, 26.4, 300_000)}
N_AVERAGED: dict[Model, int] = {"base": 5, "big": 20}  # section 6.1
SMOOTHING = 0.1  # of labels, in all rows of Table 3 but two
VARIANT_STEPS = 100_000  # assumed: the paper does not say how long the variants were trained
# Settings without influence on what the model scores on the dev set at that update
HARMLESS_KEYS = {
    "data.test",
    "training.steps",
    "training.checkpoint_every",
    "training.keep_checkpoints",
}
# The paper names WMT14 alone. News Commentary v9 is WMT14's; the authors' own file had WMT16's v11.
PAPER_CORPORA = {
    "en-de": ("europarl-v7.de-en", "commoncrawl.de-en", "news-commentary-v9.de-en"),
    "en-fr": (
        "europarl-v7.fr-en",
        "commoncrawl.fr-en",
        "news-commentary-v9.fr-en",
        "undoc.2000.fr-en",
        "giga-fren.release2.fixed",
    ),
}
# About 4.5M and 36M in the paper; what the usual cut leaves of En-Fr's 40.8M was not counted here.
TRAINING_PAIRS = {"en-de": (4_400_000, 4_600_000), "en-fr": (32_000_000, 40_000_000)}
# Ten minutes (section 6.1) at the 0.4 s (base) or 1.0 s (big) of an update (section 5.2)
CHECKPOINT_UPDATES = {"base": 1_500, "big": 600}
SILENT = "silent"
SAME = object()  # a value that counts as the paper's
HUB_NAMES = {"en-de": "de-en", "en-fr": "fr-en"}  # what the WMT14 dataset calls a pair
# tensor2tensor: its first push, of 15 June 2017, with the fixes of that month; and its last commit
COMMIT_2017, COMMIT_2023 = "3d9c62f2", "bafdc1b6"
HYPERPARAMETERS_2017 = {
    ("base", "en-de"): "transformer_base",
    ("base", "en-fr"): "transformer_base",
    ("big", "en-de"): "transformer_big_dr3",  # transformer_big is of 20 June
    ("big", "en-fr"): "transformer_big_enfr",
}
HYPERPARAMETERS_2023 = {**HYPERPARAMETERS_2017, ("big", "en-de"): "transformer_big"}
COLUMN_WIDTHS = (25, 28, 30, 30, 27)
TABLE_WIDTH = 150
FIRST_OF_BLOCK = ("vocabulary", "layers N", "embeddings at the start", "label smoothing", "search")


Words = str | dict[str, str]  # for all values of a setting, or for each
Variants = tuple[tuple[ModelConfig, float, float, float], ...]


@dataclass(frozen=True)
class RowText:
    """A row of configs/paper.yaml, which describes the fields, for one model and pair."""

    name: str
    settings: Values = field(default_factory=dict)
    shown: str = ""
    more_is_fine: bool = False
    special: str = ""
    paper: str = ""
    code_2017: str = ""
    code_2023: str = ""
    ours: Words = ""
    why: Words = ""
    reading: str = ""


CASES = {case for model, pair in PAPER_BLEU for case in (pair, model, f"{model} {pair}")}


@dataclass(frozen=True)
class Reading:
    """What a config says in a row that takes more than one value to read."""

    ours: str = ""
    values: dict[str, object] = field(default_factory=dict)  # compared instead of the config's own
    why: str | None = None


@dataclass(frozen=True)
class PaperRow:
    """A row of the table.

    Its key is that of its setting, of several settings the first that deviates; it is None for a
    rule that no setting can change.
    """

    name: str
    key: str | None
    paper: str
    code_2017: str
    code_2023: str
    ours: str
    deviates: bool
    why: str = ""
    reading: str = ""  # what counts where the paper is silent, if not the code of June 2017

    @property
    def measure(self) -> tuple[str, str]:
        """The source that the config is compared with, and its value."""
        if not self.paper.startswith(SILENT):
            return "the paper", self.paper
        if self.reading:
            return "the usual reading", self.reading
        return "the code of June 2017", self.code_2017


@dataclass(frozen=True)
class Conformance:
    """A config beside one of the paper's models."""

    model: Model
    pair: str
    bleu: float
    n_averaged: int
    rows: tuple[PaperRow, ...]

    @property
    def deviations(self) -> list[PaperRow]:
        return [row for row in self.rows if row.deviates]

    @property
    def reproduced(self) -> Model | None:
        """Which of the paper's English-German models the config trains, if it is one."""
        deviating = {row.key for row in self.deviations}
        is_reproduced = self.pair == "en-de" and deviating <= HARMLESS_KEYS
        return self.model if is_reproduced else None


@dataclass(frozen=True)
class DevReference:
    """What the paper's model scored on the dev set: a single model, no averaging (Table 3)."""

    model: str
    perplexity: float
    bleu: float
    step: int

    def describe(self) -> str:
        return (
            f"for comparison: the paper's {self.model} reached dev perplexity {self.perplexity} and BLEU {self.bleu} "
            f"at update {self.step:,} (Table 3; perplexity is per piece and depends on the vocabulary; "
            "BLEU is tokenised)"
        )


def find_dev_reference(config: RunConfig) -> DevReference | None:
    """Return the dev figures of the row of Table 3 that this config should reach, if it is one."""
    if config.evaluation.sentences is not None:
        return None
    for model, smoothing, perplexity, bleu in read_table()[1]:
        if (config.model, config.training.label_smoothing) == (model, smoothing):
            base_training = replace(config.training, label_smoothing=SMOOTHING)
            base = replace(config, model=ModelConfig(), training=base_training)
            is_variant = check_conformance(base).reproduced == "base"
            figures = DevReference("variant of base", perplexity, bleu, VARIANT_STEPS)
            return figures if is_variant else None
    reproduced = check_conformance(config).reproduced
    return reproduced and DevReference(reproduced, *PAPER_DEV[reproduced])


def check_conformance(config: RunConfig) -> Conformance:
    """Compare the config with base or big, whichever has fewer deviations."""
    is_french = (config.data.src, config.data.tgt) == ("en", "fr")
    pair = "en-fr" if is_french else "en-de"
    models = []
    for model, n_averaged in N_AVERAGED.items():
        rows = [compare(choose_text(row, model, pair), config, pair) for row in read_table()[0]]
        bleu = PAPER_BLEU[model, pair]
        models.append(Conformance(model, pair, bleu, n_averaged, tuple(rows)))
    return min(
        models, key=lambda conformance: len(conformance.deviations)
    )  # base, if both have as many


# ---- rows ----------------------------------------------------------------------------------------


@functools.cache
def read_table() -> tuple[list[Values], Variants]:
    """Return the rows of configs/paper.yaml, and its variants of Table 3."""
    path = find_shipped_configs() / "paper.yaml"
    table = parse_yaml(path.read_text(encoding="utf-8"), str(path)).values
    variants = []
    for row in table["variants"]:
        perplexity, bleu = row.pop("perplexity"), row.pop("bleu")
        smoothing = row.pop("label_smoothing", SMOOTHING)
        variants.append((ModelConfig(**row), smoothing, perplexity, bleu))
    return table["rows"], tuple(variants)


def choose_text(row: Values, model: Model, pair: str) -> RowText:
    """Return the row with what differs for this model and pair; RowText refuses an unknown key."""
    chosen = {key: value for key, value in row.items() if key not in CASES}
    for case in (pair, model, f"{model} {pair}"):
        chosen |= row.get(case, {})
    return RowText(**chosen)


def compare(text: RowText, config: RunConfig, pair: str) -> PaperRow:
    """Compare the settings of a row, which all must have the paper's value."""
    reading = read_special(
        text.special, pair, config.data, config.vocab, config.model, config.training
    )
    deviating = []
    for key, value in text.settings.items():
        ours: Any = reading.values.get(key, join_list(operator.attrgetter(key)(config)))
        if text.more_is_fine:
            ours = min(ours, value)
        if ours is not SAME and ours != value:
            deviating.append(key)
    keys = [*deviating, *text.settings, None]
    paper = text.paper or format_value(next(iter(text.settings.values())))
    code_2017 = text.code_2017 or paper
    shown = text.shown or next(iter(text.settings), "")
    value = join_list(operator.attrgetter(shown)(config)) if shown else None
    in_our_words = choose_words(text.ours, value).format(value, config=config)
    # A rule that no setting can change is the paper's, or where that is silent, that of June 2017.
    rule = "" if shown else code_2017 if paper == SILENT else paper
    return PaperRow(
        name=text.name,
        key=keys[0],
        paper=paper,
        code_2017=code_2017,
        code_2023=text.code_2023 or code_2017,
        ours=reading.ours or in_our_words or rule or format_value(value),
        deviates=bool(deviating),
        why=choose_words(text.why, value) if reading.why is None else reading.why,
        reading=text.reading,
    )


def join_list(value: Any) -> Any:
    """Return a list as one text, as the table has it, and any other value as it is."""
    return ", ".join(map(str, value)) or None if isinstance(value, tuple) else value


def choose_words(text: Words, value: object) -> str:
    """Return the text for this value."""
    if isinstance(text, dict):
        text = text.get(format_value(value), text.get("else", ""))
    return text


def format_value(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.10g}".replace("e-0", "e-")
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


# ---- what one value does not say -----------------------------------------------------------------


def read_special(
    name: str,
    pair: str,
    data: DataConfig,
    vocab: VocabConfig,
    model: ModelConfig,
    training: TrainingConfig,
) -> Reading:
    """Read what the sections have in a row with this `special`."""
    match name:
        case "":
            return Reading()
        case "corpora":
            return read_corpora(data, pair)
        case "dev set":
            return read_test_set("data.valid", data.valid, PAPER_DEV_SET, data, pair)
        case "test set":
            return read_test_set("data.test", data.test, PAPER_TEST_SET, data, pair)
        case "vocabulary":
            return read_vocabulary(vocab)
        case "pieces":
            return read_pieces(vocab)
        case "layers":
            return read_layers(model)
        case "d_k":
            return read_head_size("model.d_k", model.key_size, model)
        case "d_v":
            return read_head_size("model.d_v", model.value_size, model)
        case "tying":
            return read_tying(model, vocab)
        case "early end":
            return read_early_end(training)
        case _:
            raise ValueError(f"configs/paper.yaml: {name!r} is not known to read_special")


def read_vocabulary(vocab: VocabConfig) -> Reading:
    if vocab.model is not None:
        # The deviation is the given model itself.
        models = " and ".join(filter(None, (vocab.model, vocab.tgt_model)))
        why = "the size and origin of a given model are not known here"
        return Reading(f"that of {models}", {"vocab.size": SAME}, why)
    if not vocab.joint:
        return Reading(" + ".join(map(format_value, vocab.sizes)))
    return Reading()


def read_pieces(vocab: VocabConfig) -> Reading:
    pieces = ["BPE"]
    if vocab.character_coverage != 1:
        pieces.append(f"{vocab.character_coverage:.6g} of characters")
    if vocab.byte_fallback:
        pieces.append("bytes for the rest")
    if vocab.user_symbols:
        pieces.append(f"{len(vocab.user_symbols)} symbols")
    return Reading(", ".join(pieces))


def read_layers(ours: ModelConfig) -> Reading:
    depths = ours.encoder_depth, ours.decoder_depth
    values = {
        "model.encoder_layers": ours.encoder_layers or SAME,
        "model.decoder_layers": ours.decoder_layers or SAME,
    }
    if ours.encoder_layers is not None and ours.decoder_layers is not None:
        values["model.n_layers"] = SAME  # it is not used
    shown = format_value(depths[0]) if depths[0] == depths[1] else f"{depths[0]} and {depths[1]}"
    return Reading(shown, values)


def read_head_size(key: str, size: int, model: ModelConfig) -> Reading:
    """d_k or d_v deviates only where it is not d_model / h; those two have rows of their own."""
    if size == model.d_model / model.n_heads:
        return Reading(f"{format_value(size)}, d_model / h", {key: SAME})
    return Reading(format_value(size), {key: size})


def read_tying(model: ModelConfig, vocab: VocabConfig) -> Reading:
    # Two vocabularies cannot share more than the decoder's matrices.
    shares_all = model.tied == "decoder" and not vocab.joint
    return Reading(values={"model.tied": SAME} if shares_all else {})


def read_early_end(training: TrainingConfig) -> Reading:
    limits = []
    if training.patience is not None:
        limits.append(f"{training.patience:,} validations without a best")
    if training.max_epochs is not None:
        limits.append(f"{training.max_epochs:,} epochs")
    if training.max_hours is not None:
        limits.append(f"{training.max_hours:g} hours")
    return Reading(", ".join(limits) or "never")


def read_corpora(data: DataConfig, pair: str) -> Reading:
    """Corpora are recognised by their names."""
    names = [name_corpus(corpus, data) for corpus in data.train]
    wanted = PAPER_CORPORA[pair]
    whole = f"wmt14 {HUB_NAMES[pair]} train"  # all of them at once, from the hub
    if names == [whole]:
        return Reading("WMT14, from the hub", {"data.train": SAME})
    if sorted(names) == sorted(wanted):
        return Reading(f"WMT14, {len(names)} corpora", {"data.train": SAME})
    why = _explain_corpora(names, wanted, whole)
    return Reading(", ".join(names) or "none", {"data.train": names}, why)


# ---- corpora, recognised by their names ----------------------------------------------------------


def _explain_corpora(names: Sequence[str], wanted: Sequence[str], whole: str) -> str:
    """Say which corpora are missing or not the paper's; "" if none of them is the paper's."""
    foreign = [name for name in names if name not in (*wanted, whole)]
    if len(foreign) == len(names):
        return ""
    missing = []
    if whole not in names:
        missing = [name for name in wanted if name not in names]
    why = []
    if missing:
        why.append(f"without {', '.join(missing)}")
    if foreign:
        why.append(f"with {', '.join(foreign)}")
    return "; ".join(why) or "not each of them once"


def read_test_set(
    key: str, corpus: CorpusConfig | None, paper: KnownSet, data: DataConfig, pair: str
) -> Reading:
    ours = name_corpus(corpus, data) if corpus else "none"
    why = None
    if paper.subset is not None:
        if ours == f"sacrebleu {paper.subset.sacrebleu}":
            why = "the set as filtered for WMT14's own evaluation"
            if lines := paper.list_subset(data.src, data.tgt):
                why += f", {len(lines):,} lines of {paper.lines:,}"
            why += f"; the paper's is {paper.sacrebleu}"
        elif ours == paper.name:
            why = f"files, recognised by their names alone: {paper.name} in full has {paper.lines:,} lines"
    is_the_papers = ours in paper.list_names(HUB_NAMES[pair])
    return Reading(ours, {key: SAME if is_the_papers else ours}, why)


def name_corpus(corpus: CorpusConfig, data: DataConfig) -> str:
    """Return the name by which a corpus is recognised.

    It is `wmt14 de-en train` of the hub, `europarl-v7.de-en` of europarl-v7.de-en.{en,de}, packed
    or in an archive, or `sacrebleu wmt14/full`; if it is repeated, with the number of times, and
    if it has a weight or a tag, with that.
    """
    if corpus.dataset:
        hub = "wmt14" if corpus.dataset == WMT14 else corpus.dataset
        words = [hub, corpus.subset, corpus.split or "train"]
        name = " ".join(word for word in words if word)
    elif corpus.src and corpus.tgt:
        src, tgt = _strip_packing(corpus.src), _strip_packing(corpus.tgt)
        stem = src.removesuffix(f".{data.src}")
        if stem == tgt.removesuffix(f".{data.tgt}"):
            name = stem
        else:
            name = f"{src} + {tgt}"
    elif corpus.sacrebleu:
        name = f"sacrebleu {corpus.sacrebleu}"
    elif corpus.demo:
        name = f"the demo's {corpus.demo}"
    else:
        name = PurePosixPath(corpus.file or "").name
    if corpus.weight is not None:
        name = f"{name} x {corpus.weight:.6g}"
    if corpus.tag is not None:
        name = f"{corpus.tag} {name}"
    return name


def _strip_packing(path: str) -> str:
    """Return the file's name without its folder and without .gz, .xz, .bz2 or .zst."""
    name = PurePosixPath(path).name
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name


# ---- the table -----------------------------------------------------------------------------------


def explain(config: RunConfig) -> str:
    """Return the table, the deviations, and notes: what nmt-train --explain prints."""
    conformance = check_conformance(config)
    pair = conformance.pair.title()
    deviating = conformance.deviations
    own = [row.ours for row in deviating if row.key == "data.train" and not row.why]
    if own:  # what follows from another text is not told row by row
        deviating = [row for row in deviating if not str(row.key).startswith("data.")]
    n = len(deviating)
    count = "1 deviation" if n == 1 else f"{n} deviations"
    deviations = [f"{count} from the paper's {conformance.model} model, {pair}"]
    for row in deviating:
        deviations += _wrap(_describe_deviation(row))
    if own:
        deviations[0] += f", besides its text: {own[0]}"
        deviations += _wrap(
            f"The other {len(conformance.rows) - n} rules are the paper's or about its text: "
            f"nmt-train --config {conformance.model}.yaml --explain"
        )
        return "\n".join(deviations) + "\n"
    code_2017 = f"{COMMIT_2017}, {HYPERPARAMETERS_2017[conformance.model, conformance.pair]}"
    code_2023 = f"{COMMIT_2023}, {HYPERPARAMETERS_2023[conformance.model, conformance.pair]}"
    # the table
    lines = format_line(
        "",
        "",
        "the paper",
        "tensor2tensor of June 2017",
        "tensor2tensor of April 2023",
        "this config",
    )
    lines += format_line("", "", f"{conformance.model}, {pair}", code_2017, code_2023, config.name)
    lines.append("")
    for row in conformance.rows:
        if row.name in FIRST_OF_BLOCK:
            lines.append("")
        mark = "*" if row.deviates else ""
        lines += format_line(mark, row.name, row.paper, row.code_2017, row.code_2023, row.ours)
    lines += ["", *deviations, ""]
    for note in _list_notes(conformance, config.training, config.decoding):
        lines += _wrap(f"- {note}")
    return "\n".join(lines) + "\n"


def format_line(mark: str, *cells: str) -> list[str]:
    """Format a row of the table; a cell that is too wide continues below, indented."""
    wrapped = []
    for cell, width in zip(cells, COLUMN_WIDTHS, strict=True):
        wrapped.append(textwrap.wrap(cell, width, subsequent_indent="  ", break_on_hyphens=False))
    lines = []
    for row in zip_longest(*wrapped, fillvalue=""):
        columns = [f"{part:{width}}" for part, width in zip(row, COLUMN_WIDTHS, strict=True)]
        lines.append(f"{mark:2}{'  '.join(columns)}".rstrip())
        mark = ""
    return lines


def _describe_deviation(row: PaperRow) -> str:
    source, value = row.measure
    why = f" ({row.why})" if row.why else ""
    return f"* {row.key}: {row.ours}; {source}: {value}{why}"


def _list_notes(
    conformance: Conformance, training: TrainingConfig, decoding: DecodingConfig
) -> list[str]:
    table = "Table 2"
    if (conformance.model, conformance.pair) == ("big", "en-fr"):
        table = "Table 2; 41.0 in the text of section 6.1"
    if any(row.key == "data.test" and row.deviates for row in conformance.rows):
        table += ", on newstest2014: not to be compared with scores of this test set"
    notes = [f"{row.name}: {row.why}." for row in conformance.rows if row.why and not row.deviates]
    return [
        *notes,
        f"The paper's figure is {conformance.bleu} BLEU ({table}).",
        f"Where the paper is {SILENT}, the measure is the code of June 2017, or the usual reading. "
        f"The code is tensor2tensor's: {COMMIT_2017} of 15 June 2017 with the fixes of that month, "
        f"and its last commit, {COMMIT_2023}; sources in docs/recipe.md.",
        "Corpora are recognised by their names; nmt-eval --verdict counts the pairs of the store.",
        "What only concerns the machine is not counted: precision is "
        f"{training.precision} in training and {decoding.precision} in search, "
        "where the paper's P100s and the authors' code computed in fp32.",
    ]


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, TABLE_WIDTH, subsequent_indent="  ")
