"""The paper as data: each rule of its sections 3, 5 and 6 beside the authors' code and a config.

Independent reproductions land from 16 to 29 BLEU with "the same" settings, so what differs is
written out and counted. A config is compared with base or big, whichever is nearer, on the pair
that its languages name (else En-De). A setting deviates if it differs from what the paper says or,
where the paper is silent, from the authors' code of June 2017 or the usual reading. Each setting
is in one row. Settings that only concern the machine have none; tests/test_paper.py lists them, and
checks that every other setting has one. docs/recipe.md has the sources of the cells.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Literal

from nmt.config import CleanConfig, CorpusConfig, DataConfig, ModelConfig, RunConfig, TrainingConfig
from nmt.known_test_sets import PAPER_DEV_SET, PAPER_TEST_SET, WMT14, KnownSet

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
SMOOTHING = 0.1  # of labels, in all rows of Table 3 but two
VARIANT_STEPS = 100_000  # assumed: the paper does not say how long the variants were trained
# The other rows of Table 3: what they change in base, label smoothing, perplexity and BLEU
TABLE_3 = (
    (ModelConfig(n_heads=1), SMOOTHING, 5.29, 24.9),
    (ModelConfig(n_heads=4), SMOOTHING, 5.00, 25.5),
    (ModelConfig(n_heads=16), SMOOTHING, 4.91, 25.8),
    (ModelConfig(n_heads=32), SMOOTHING, 5.01, 25.4),
    (ModelConfig(d_k=16), SMOOTHING, 5.16, 25.1),
    (ModelConfig(d_k=32), SMOOTHING, 5.01, 25.4),
    (ModelConfig(n_layers=2), SMOOTHING, 6.11, 23.7),
    (ModelConfig(n_layers=4), SMOOTHING, 5.19, 25.3),
    (ModelConfig(n_layers=8), SMOOTHING, 4.88, 25.5),
    (ModelConfig(d_model=256), SMOOTHING, 5.75, 24.5),
    (ModelConfig(d_model=1024), SMOOTHING, 4.66, 26.0),
    (ModelConfig(d_ff=1024), SMOOTHING, 5.12, 25.4),
    (ModelConfig(d_ff=4096), SMOOTHING, 4.75, 26.2),
    (ModelConfig(dropout=0.0), SMOOTHING, 5.77, 24.6),
    (ModelConfig(dropout=0.2), SMOOTHING, 4.95, 25.5),
    (ModelConfig(), 0.0, 4.67, 25.3),
    (ModelConfig(), 0.2, 5.47, 25.7),
    (ModelConfig(positions="learned"), SMOOTHING, 4.92, 25.7),
)
# Settings without influence on what the model scores on the dev set at that update
HARMLESS_KEYS = {
    "data.test",
    "training.steps",
    "training.checkpoint_every",
    "training.keep_checkpoints",
}
PAPER_PAIRS = {"en-de": "En-De", "en-fr": "En-Fr"}
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
WHOLE_LINES = 1_000  # pieces; the longest line of newstest2013 has 715 bytes
MANY_LINES = 2_000_000  # a BPE learned from more hardly differs
# Ten minutes (section 6.1) at the 0.4 s (base) or 1.0 s (big) of an update (section 5.2)
CHECKPOINT_UPDATES = {"base": 1_500, "big": 600}
ONE_SIDE_IS_FULL = (
    "an update ends when one side is full; the other then has about 23,300 on text like WMT's"
)
SILENT = "silent"
EMBEDDING_SCALES = {
    "embedding": "sqrt(d_model)",
    "projection": "1; logits by 1/sqrt(d_model)",
    "none": "1",
}
TYING_RULES: dict[bool | str, str] = {
    True: "one matrix",
    False: "three matrices",
    "decoder": "source; target = projection",
    "embeddings": "source = target; projection",
}
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


@dataclass(frozen=True)
class ComparedSetting:
    """A key of the config, with the paper's value and the config's own."""

    key: str
    paper: object
    ours: object


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
        """What the config is compared with, and what that says."""
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
    for model, smoothing, perplexity, bleu in TABLE_3:
        if (config.model, config.training.label_smoothing) == (model, smoothing):
            base_training = replace(config.training, label_smoothing=SMOOTHING)
            base = replace(config, model=ModelConfig(), training=base_training)
            is_variant = find_reproduced_model(base) == "base"
            figures = DevReference("variant of base", perplexity, bleu, VARIANT_STEPS)
            return figures if is_variant else None
    reproduced = find_reproduced_model(config)
    return reproduced and DevReference(reproduced, *PAPER_DEV[reproduced])


def find_reproduced_model(config: RunConfig) -> Model | None:
    """Return which of the paper's English-German models this config trains, if it is one."""
    found = check_conformance(config)
    deviating = {row.key for row in found.deviations}
    is_reproduced = found.pair == "en-de" and deviating <= HARMLESS_KEYS
    return found.model if is_reproduced else None


def check_conformance(config: RunConfig) -> Conformance:
    """Compare the config with base or big, whichever has fewer deviations."""
    is_french = (config.data.src, config.data.tgt) == ("en", "fr")
    pair = "en-fr" if is_french else "en-de"
    base = compare_with(config, "base", pair)
    big = compare_with(config, "big", pair)
    if len(big.deviations) < len(base.deviations):
        return big
    return base


def compare_with(config: RunConfig, model: Model, pair: str) -> Conformance:
    n_averaged = 5 if model == "base" else 20  # section 6.1
    rows = (
        *list_corpus_rows(config.data, pair),
        *list_cleaning_rows(config.data.clean, pair),
        *list_vocab_rows(config, pair),
        *list_model_rows(config, model, pair),
        *list_initial_rows(config.training),
        *list_optimizer_rows(config),
        *list_training_rows(config, model, pair),
        *list_checkpoint_rows(config, model, n_averaged),
        *list_search_rows(config, pair),
    )
    return Conformance(model, pair, PAPER_BLEU[model, pair], n_averaged, rows)


# ---- rows ----------------------------------------------------------------------------------------


def compare(
    name: str,
    *settings: ComparedSetting,
    code_2017: str,
    code_2023: str = "",
    paper: str = "",
    ours: str = "",
    why: str = "",
    reading: str = "",
) -> PaperRow:
    """Make a row of one or more settings, which all must have the paper's value.

    Where `paper` or `ours` is not given, it is the value of the first setting; where `code_2023` is
    not given, the code never changed.
    """
    deviating = [setting for setting in settings if setting.paper != setting.ours]
    named = (deviating or settings)[0]
    return PaperRow(
        name=name,
        key=named.key,
        paper=paper or format_value(settings[0].paper),
        code_2017=code_2017,
        code_2023=code_2023 or code_2017,
        ours=ours or format_value(settings[0].ours),
        deviates=bool(deviating),
        why=why,
        reading=reading,
    )


def state_rule(
    name: str, paper: str, code_2017: str, code_2023: str = "", ours: str = "", why: str = ""
) -> PaperRow:
    """Make a row of a rule that no setting can change; tests check that the code follows it.

    Where `ours` is not given, it is the paper's rule, or if the paper is silent that of June 2017.
    """
    if not ours:
        ours = code_2017 if paper == SILENT else paper
    return PaperRow(
        name=name,
        key=None,
        paper=paper,
        code_2017=code_2017,
        code_2023=code_2023 or code_2017,
        ours=ours,
        deviates=False,
        why=why,
    )


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


def list_corpus_rows(data: DataConfig, pair: str) -> list[PaperRow]:
    src, tgt = pair.split("-")
    hub = "de-en" if pair == "en-de" else "fr-en"
    return [
        compare(
            "languages",
            ComparedSetting("data.src", src, data.src),
            ComparedSetting("data.tgt", tgt, data.tgt),
            paper=pair,
            code_2017=pair,
            ours=f"{data.src}-{data.tgt}",
        ),
        compare_training_corpora(data, pair, hub),
        compare(
            "corpora evened out",
            ComparedSetting("data.temperature", None, data.temperature),
            paper=SILENT,
            code_2017="no",
            ours="no" if data.temperature is None else f"temperature {data.temperature:.6g}",
        ),
        compare_test_set(
            "dev set",
            "data.valid",
            data.valid,
            data,
            PAPER_DEV_SET,
            hub,
            code_2017=PAPER_DEV_SET.name,
            code_2023=PAPER_DEV_SET.name,
        ),
        compare_test_set(
            "test set",
            "data.test",
            data.test,
            data,
            PAPER_TEST_SET,
            hub,
            code_2017="none",
            code_2023=f"none; its script: {PAPER_DEV_SET.name}",
        ),
    ]


def list_cleaning_rows(ours: CleanConfig, pair: str) -> list[PaperRow]:
    """The paper only gives numbers of pairs. Each rule is compared with the preset for this pair."""
    if pair == "en-de":
        preset = "paper-ende"
        paper_words = SILENT
        words_2017 = "its file: 1 to 80 Moses tokens"
    else:
        preset = "paper-enfr"
        paper_words = f"{SILENT}; 36M pairs"
        words_2017 = "any"
    paper = CleanConfig(**CleanConfig.PRESETS[preset])
    return [
        compare(
            "words per sentence",
            ComparedSetting("data.clean.max_words", paper.max_words, ours.max_words),
            paper=paper_words,
            code_2017=words_2017,
            code_2023="any",
            ours=_format_limit(ours.max_words, "between spaces"),
            reading=_format_limit(paper.max_words, "between spaces"),
        ),
        compare(
            "length ratio",
            ComparedSetting("data.clean.max_ratio", paper.max_ratio, ours.max_ratio),
            paper=paper_words,
            code_2017="any",
            ours=_format_limit(ours.max_ratio, "in words"),
            reading=_format_limit(paper.max_ratio, "in words"),
        ),
        compare(
            "pieces per sentence",
            ComparedSetting("data.clean.max_pieces", paper.max_pieces, ours.max_pieces),
            paper=SILENT,
            code_2017="at most 255 + end mark",
            ours=_format_limit(ours.max_pieces, "+ end mark"),
        ),
        compare(
            "pairs of equal sides",
            ComparedSetting("data.clean.identical", paper.identical, ours.identical),
            paper=SILENT,
            code_2017="kept",
            ours="dropped" if ours.identical else "kept",
        ),
        compare(
            "equal pairs",
            ComparedSetting("data.clean.duplicates", paper.duplicates, ours.duplicates),
            paper=SILENT,
            code_2017="kept",
            ours="the first kept" if ours.duplicates else "kept",
        ),
        compare(
            "test text in training",
            ComparedSetting("data.clean.held_out", paper.held_out, ours.held_out),
            paper=SILENT,
            code_2017="kept",
            ours="kept" if ours.held_out == "keep" else ours.held_out,
        ),
    ]


def _format_limit(limit: float | None, unit: str) -> str:
    return "any" if limit is None else f"at most {format_value(limit)} {unit}"


def list_vocab_rows(config: RunConfig, pair: str) -> list[PaperRow]:
    vocab = config.vocab
    one_each = "one for each piece"
    # where the pairs differ
    if pair == "en-de":
        size = 37_000
        paper_size = "about 37,000"
        size_2017 = "about 36,500"
        paper_rows = f"{SILENT}; Table 3 fits 40,960"
        rows_2017 = "40,960, some without a piece"
        paper_pieces = "BPE"
        pieces_2017 = "BPE, 32,000 merges"
        why_pieces = ""
        cut_2017 = "as Moses does"
        sample_2017 = "all training text"
    else:
        size = 32_000
        paper_size = "32,000"
        size_2017 = "about 32,768"
        paper_rows = SILENT
        rows_2017 = one_each
        paper_pieces = "word pieces"
        pieces_2017 = "own sub-words, with escapes"
        why_pieces = (
            "the paper has word pieces for En-Fr; "
            "here BPE learns the merges by its own rule, which no setting can change"
        )
        cut_2017 = "letters and digits apart"
        sample_2017 = "350 kB of each file, also German"

    # what the config says
    our_size = vocab.size
    size_shown = format_value(vocab.size)
    why_size = ""
    if not vocab.joint:
        size_shown = " + ".join(map(format_value, vocab.sizes))
    if vocab.model is not None:
        our_size = size  # not known here, so the deviation is the given model itself
        size_shown = f"that of {' and '.join(filter(None, (vocab.model, vocab.tgt_model)))}"
        why_size = "the size and origin of a given model are not known here"
    rows = config.model.vocab_rows
    pieces = ["BPE"]
    if vocab.character_coverage != 1:
        pieces.append(f"{vocab.character_coverage:.6g} of characters")
    if vocab.byte_fallback:
        pieces.append("bytes for the rest")
    n_symbols = len(vocab.user_symbols or ())
    if n_symbols:
        pieces.append(f"{n_symbols} symbols")
    return [
        compare(
            "vocabulary",
            ComparedSetting("vocab.size", size, our_size),
            ComparedSetting("vocab.model", None, vocab.model),
            paper=paper_size,
            code_2017=size_2017,
            code_2023="about 32,768",
            ours=size_shown,
            why=why_size,
        ),
        compare(
            "embedding rows",
            ComparedSetting("model.vocab_rows", None, rows),
            paper=paper_rows,
            code_2017=rows_2017,
            code_2023=one_each,
            ours=one_each if rows is None else format_value(rows),
            reading=one_each,
        ),
        compare(
            "vocabulary shared",
            ComparedSetting("vocab.tgt_size", None, vocab.tgt_size),
            ComparedSetting("vocab.joint", True, vocab.joint),
            paper="by both languages",
            code_2017="by both languages",
            ours="by both languages" if vocab.joint else "no, one for each",
        ),
        compare(
            "pieces",
            ComparedSetting("vocab.character_coverage", 1.0, vocab.character_coverage),
            ComparedSetting("vocab.byte_fallback", False, vocab.byte_fallback),
            ComparedSetting("vocab.user_symbols", 0, n_symbols),
            paper=paper_pieces,
            code_2017=pieces_2017,
            code_2023="own sub-words, with escapes",
            ours=", ".join(pieces),
            why=why_pieces,
        ),
        state_rule(
            "text cut before BPE",
            paper=SILENT,
            code_2017=cut_2017,
            code_2023="letters and digits apart",
            ours="at spaces",
        ),
        state_rule("characters per piece", paper=SILENT, code_2017="any number", ours="at most 16"),
        compare(
            "vocabulary learned from",
            # more is nearer to the code of June 2017
            ComparedSetting(
                "vocab.sample_sentences", MANY_LINES, min(vocab.sample_sentences, MANY_LINES)
            ),
            paper=SILENT,
            code_2017=sample_2017,
            code_2023="1 MB of each file",
            ours=f"up to {format_value(vocab.sample_sentences)} lines",
            reading=f"{format_value(MANY_LINES)} lines or more",
        ),
        compare(
            "BPE-dropout",
            ComparedSetting("vocab.bpe_dropout", 0.0, vocab.bpe_dropout),
            paper=SILENT,
            code_2017="none",
            ours=format_value(vocab.bpe_dropout or None),
        ),
    ]


def list_model_rows(config: RunConfig, model: Model, pair: str) -> list[PaperRow]:
    ours = config.model
    # Table 3
    if model == "big":
        d_model, d_ff, n_heads, dropout = 1024, 4096, 16, 0.3
    else:
        d_model, d_ff, n_heads, dropout = 512, 2048, 8, 0.1
    d_ff_2017 = format_value(d_ff)
    matrices_2017 = "one matrix"
    if model == "big" and pair == "en-fr":
        dropout = 0.1  # section 6.1
        d_ff_2017 = "8,192"
        matrices_2017 = "three matrices"
    norms = {"post": "LayerNorm(x + Sublayer(x))", "pre": "x + Sublayer(LayerNorm(x))"}
    tied = ours.tied
    if tied == "decoder" and not config.vocab.joint:
        tied = True  # two vocabularies cannot share more
    window = "all positions"
    if ours.window is not None:
        window = f"{format_value(ours.window)} to each side"
    return [
        compare_layers(ours),
        compare(
            "d_model",
            ComparedSetting("model.d_model", d_model, ours.d_model),
            code_2017=format_value(d_model),
        ),
        compare(
            "d_ff",
            ComparedSetting("model.d_ff", d_ff, ours.d_ff),
            code_2017=d_ff_2017,
        ),
        compare(
            "heads h",
            ComparedSetting("model.n_heads", n_heads, ours.n_heads),
            code_2017=format_value(n_heads),
        ),
        compare_head_size("d_k", ours.key_size, ours.d_model / ours.n_heads),
        compare_head_size("d_v", ours.value_size, ours.d_model / ours.n_heads),
        compare(
            "norm position",
            ComparedSetting("model.norm", "post", ours.norm),
            paper=norms["post"],
            code_2017=norms["post"],
            code_2023=norms["pre"],
            ours=norms[ours.norm],
        ),
        state_rule(
            "norm above the last layer",
            paper="none",
            code_2017="none",
            code_2023="LayerNorm",
            ours="none" if ours.norm == "post" else "LayerNorm",  # it follows from the position
        ),
        state_rule(
            "LayerNorm epsilon",
            paper=SILENT,
            code_2017="1e-6",
            ours="1e-5",
            why="torch's, beside a variance of about 1",
        ),
        state_rule(
            "attention",
            paper="softmax(QK^T / sqrt(d_k)) V",
            code_2017="the same",
        ),
        compare(
            "attention window",
            ComparedSetting("model.window", None, ours.window),
            paper="all positions",
            code_2017="all positions",
            ours=window,
        ),
        state_rule(
            "mask of the decoder", paper="no later positions", code_2017="no later positions"
        ),
        state_rule(
            "memory of the decoder",
            paper="the last encoder layer",
            code_2017="the last encoder layer",
        ),
        compare(
            "biases in attention",
            ComparedSetting("model.attention_bias", False, ours.attention_bias),
            paper="none in its formulas",
            code_2017="yes, in all four",
            code_2023="none",
            ours="yes, in all four" if ours.attention_bias else "none",
            why="Table 3's counts of parameters fit only with them and with 40,960 rows: "
            "see docs/recipe.md",
        ),
        compare(
            "feed-forward",
            ComparedSetting("model.activation", "relu", ours.activation),
            paper="ReLU, with biases",
            code_2017="ReLU, with biases",
            ours=f"{'ReLU' if ours.activation == 'relu' else ours.activation}, with biases",
        ),
        compare(
            "embeddings and projection",
            ComparedSetting("model.tied", True, tied),
            paper="one matrix",
            code_2017=matrices_2017,
            ours=TYING_RULES[ours.tied],
        ),
        state_rule("bias of the projection", paper=SILENT, code_2017="none"),
        compare(
            "embeddings multiplied by",
            ComparedSetting("model.scale_embeddings", "embedding", ours.scale_embeddings),
            paper="sqrt(d_model)",
            code_2017="sqrt(d_model)",
            ours=EMBEDDING_SCALES[ours.scale_embeddings],
        ),
        compare(
            "LayerNorm of embeddings",
            ComparedSetting("model.embedding_norm", None, ours.embedding_norm),
            paper=SILENT,
            code_2017="none",
        ),
        compare_positions(ours),
        state_rule(
            "added to the source",
            paper="positions",
            code_2017="positions, id of the target language",
        ),
        state_rule(
            "first decoder input",
            paper=SILENT,
            code_2017="zeros",
            ours="embedding of the begin mark",
        ),
        compare(
            "dropout of sub-layers",
            ComparedSetting("model.dropout", dropout, ours.dropout),
            code_2017=format_value(dropout),
        ),
        state_rule(
            "dropout of embeddings",
            paper="the same, with positions",
            code_2017="the same, with positions",
        ),
        compare(
            "dropout in attention",
            ComparedSetting("model.attention_dropout", 0.0, ours.attention_dropout),
            paper=SILENT,
            code_2017="none",
            code_2023="0.1",
            ours=format_value(ours.attention_dropout or None),
        ),
        compare(
            "dropout after ReLU",
            ComparedSetting("model.ffn_dropout", 0.0, ours.ffn_dropout),
            paper=SILENT,
            code_2017="none",
            code_2023="0.1",
            ours=format_value(ours.ffn_dropout or None),
        ),
    ]


def compare_layers(ours: ModelConfig) -> PaperRow:
    depths = ours.encoder_depth, ours.decoder_depth
    fills = ours.encoder_layers is None or ours.decoder_layers is None
    return compare(
        "layers N",
        ComparedSetting("model.n_layers", 6, ours.n_layers if fills else 6),
        ComparedSetting("model.encoder_layers", 6, ours.encoder_layers or 6),
        ComparedSetting("model.decoder_layers", 6, ours.decoder_layers or 6),
        code_2017="6",
        ours=format_value(depths[0]) if depths[0] == depths[1] else f"{depths[0]} and {depths[1]}",
    )


def compare_positions(ours: ModelConfig) -> PaperRow:
    if ours.positions == "sinusoidal":
        rule = "sin | cos, rates 10000^(-2i/d)"
        why = "sin and cos in halves instead of by turns are the same up to the order of columns"
    else:
        rule = f"a learned table of {format_value(ours.max_positions)}"
        why = ""
    return compare(
        "positions",
        ComparedSetting("model.positions", "sinusoidal", ours.positions),
        paper="sin, cos by turns, rates 10000^(-2i/d)",
        code_2017="sin | cos, rates 10000^(-i/(d/2-1))",
        ours=rule,
        why=why,
    )


def compare_head_size(name: Literal["d_k", "d_v"], ours: int, quotient: float) -> PaperRow:
    """Compare d_k or d_v; a deviation counts only where it is not d_model / h.

    Where it is, it follows from those two, which have rows of their own.
    """
    size, counted = format_value(ours), ours
    if ours == quotient:
        size, counted = f"{size}, d_model / h", 64
    return compare(
        name,
        ComparedSetting(f"model.{name}", 64, counted),
        paper="64, d_model / h",
        code_2017="64, d_model / h",
        ours=size,
    )


def list_initial_rows(ours: TrainingConfig) -> list[PaperRow]:
    """List the rules for initial weights, which the paper does not mention."""
    return [
        compare(
            "weights at the start",
            ComparedSetting("training.init_from", None, ours.init_from),
            paper=SILENT,
            code_2017="drawn at random",
            ours="drawn at random" if ours.init_from is None else "another model's",
        ),
        compare(
            "weights that are trained",
            ComparedSetting("training.freeze", (), ours.freeze),
            paper=SILENT,
            code_2017="all",
            ours=f"all but {', '.join(ours.freeze)}" if ours.freeze else "all",
        ),
        state_rule("embeddings at the start", paper=SILENT, code_2017="N(0, 1/d_model)"),
        state_rule("matrices at the start", paper=SILENT, code_2017="Xavier-uniform"),
        state_rule(
            "q, k, v at the start",
            paper=SILENT,
            code_2017="drawn as one matrix",
            code_2023="drawn as three matrices",
            ours="drawn as one matrix",
        ),
        state_rule("biases at the start", paper=SILENT, code_2017="zero"),
    ]


def list_optimizer_rows(config: RunConfig) -> list[PaperRow]:
    adam, clip_norm = config.optimizer, config.training.clip_norm
    rate = "min(n^-0.5, n w^-1.5) d^-0.5"
    return [
        state_rule("optimizer", paper="Adam", code_2017="LazyAdam, on all rows: Adam"),
        compare("beta1", ComparedSetting("optimizer.beta1", 0.9, adam.beta1), code_2017="0.9"),
        compare(
            "beta2",
            ComparedSetting("optimizer.beta2", 0.98, adam.beta2),
            code_2017="0.98",
            code_2023="0.997",
        ),
        compare(
            "epsilon",
            ComparedSetting("optimizer.eps", 1e-9, adam.eps),
            code_2017="1e-9, as Adam's epsilon hat",
        ),
        compare(
            "learning rate",
            ComparedSetting("optimizer.schedule", "paper", adam.schedule),
            ComparedSetting("optimizer.peak_lr", None, adam.peak_lr),
            ComparedSetting("optimizer.final_lr", 0.0, adam.final_lr),
            paper=rate,
            code_2017="the same",
            ours=rate if adam.peak_lr is None else f"{adam.schedule}, at most {adam.peak_lr:g}",
        ),
        compare(
            "learning rate times",
            ComparedSetting("optimizer.scale", 1.0, adam.scale),
            code_2017="1",
            code_2023="2",
        ),
        compare(
            "warm-up steps w",
            ComparedSetting("optimizer.warmup_steps", 4000, adam.warmup_steps),
            code_2017="4,000",
            code_2023="8,000",
        ),
        compare(
            "gradient clipping",
            ComparedSetting("training.clip_norm", None, config.training.clip_norm),
            paper=SILENT,
            code_2017="none",
            ours="none" if clip_norm is None else f"to a norm of {clip_norm:g}",
        ),
        compare(
            "weight decay",
            ComparedSetting("optimizer.weight_decay", 0.0, adam.weight_decay),
            paper=SILENT,
            code_2017="none",
            ours="none" if not adam.weight_decay else f"{adam.weight_decay:g}, of matrices",
        ),
    ]


def list_training_rows(config: RunConfig, model: Model, pair: str) -> list[PaperRow]:
    ours = config.training
    updates = 300_000 if model == "big" else 100_000
    tokens_2017 = "4,096 a GPU of 8, padding too"
    tokens_2023 = tokens_2017
    if model == "big" and pair == "en-de":
        tokens_2023 = "2,048 a GPU of 8, padding too"
    by_length = "by the longer side, in steps of 1.1"
    return [
        compare(
            "label smoothing",
            ComparedSetting("training.label_smoothing", 0.1, ours.label_smoothing),
            code_2017="0.1",
        ),
        state_rule(
            "label smoothing rule", paper=SILENT, code_2017="1-eps; eps/(V-1) to each other"
        ),
        state_rule(
            "loss",
            paper=SILENT,
            code_2017="sum / target tokens, x 1.4, which cancels in Adam",
            code_2023="sum / target tokens",
            ours="sum / target tokens",
        ),
        compare(
            "batches by length",
            ComparedSetting("training.grouping", "length", ours.grouping),
            paper="by approximate length",
            code_2017="buckets by the longer side, 8 to 256",
            code_2023=f"buckets {by_length}",
            ours=by_length if ours.grouping == "length" else "of any length",
        ),
        state_rule(
            "order of training",
            paper=SILENT,
            code_2017="shuffled once on disk; files and a queue anew",
            code_2023="shuffled once on disk; files and 1,024 pairs anew",
            ours="anew in each epoch",
        ),
        compare(
            "source tokens per update",
            ComparedSetting("training.src_tokens", 25_000, ours.src_tokens),
            paper="about 25,000",
            code_2017=tokens_2017,
            code_2023=tokens_2023,
            why=ONE_SIDE_IS_FULL if ours.src_tokens == 25_000 else "",
        ),
        compare(
            "target tokens per update",
            ComparedSetting("training.tgt_tokens", 25_000, ours.tgt_tokens),
            paper="about 25,000",
            code_2017=tokens_2017,
            code_2023=tokens_2023,
        ),
        compare(
            "updates",
            ComparedSetting("training.steps", updates, ours.steps),
            code_2017="250,000",
            code_2023="250,000; its README: 300,000",
        ),
        compare(
            "training ends earlier",
            ComparedSetting("training.patience", None, ours.patience),
            ComparedSetting("training.max_epochs", None, ours.max_epochs),
            ComparedSetting("training.max_hours", None, ours.max_hours),
            paper="never",
            code_2017="never",
            ours=_describe_early_end(ours),
        ),
    ]


def _describe_early_end(training: TrainingConfig) -> str:
    limits = []
    if training.patience is not None:
        limits.append(f"{training.patience:,} validations without a best")
    if training.max_epochs is not None:
        limits.append(f"{training.max_epochs:,} epochs")
    if training.max_hours is not None:
        limits.append(f"{training.max_hours:g} hours")
    return ", ".join(limits) or "never"


def list_checkpoint_rows(config: RunConfig, model: Model, n_averaged: int) -> list[PaperRow]:
    ours = config.training
    every = CHECKPOINT_UPDATES[model]
    planned = "not planned by updates"
    if ours.checkpoint_every is not None:
        planned = f"{format_value(ours.checkpoint_every)} updates"
    return [
        compare(
            "checkpoint every",
            ComparedSetting("training.checkpoint_every", every, ours.checkpoint_every),
            paper=f"10 minutes: about {format_value(every)} updates",
            code_2017="10 minutes",
            code_2023="1,000 updates",
            ours=planned,
            why="ten minutes at the paper's speed" if ours.checkpoint_every == every else "",
        ),
        compare(
            "checkpoints kept",
            # Keeping more than are averaged does no harm.
            ComparedSetting(
                "training.keep_checkpoints", n_averaged, min(ours.keep_checkpoints, n_averaged)
            ),
            paper=f"the last {n_averaged}",
            code_2017="20",
            ours=format_value(ours.keep_checkpoints),
        ),
        compare(
            "moving average",
            ComparedSetting("training.ema", None, ours.ema),
            paper=SILENT,
            code_2017="none",
            ours="none" if ours.ema is None else f"of the weights, decay {ours.ema:g}",
        ),
        state_rule(
            "averaged",
            paper=f"the last {n_averaged}",
            code_2017="on request, of those listed",
            code_2023="on request; its script: 8",
            ours=f"nmt-average --last {n_averaged}",
        ),
    ]


def list_search_rows(config: RunConfig, pair: str) -> list[PaperRow]:
    ours = config.decoding
    repeats = ours.no_repeat_ngram
    formulas = {"gnmt": "((5+|Y|)/6)^alpha", "length": "|Y|^alpha", "none": "none"}
    finishing_rules = {
        "any": "any of the best 2 * beam",
        "top": "those among the best beam",
        "shrink": "those among the best, beam narrows",
    }
    stopping_rules = {
        "exact": "when none can still win",
        "full": "when as many as the beam have ended",
        "likely": "when the best living is no better",
        "never": "at the length limit",
    }
    longest_output = f"input + {format_value(ours.max_extra)}"
    if ours.max_ratio != 1:
        longest_output = f"{format_value(ours.max_ratio)} * {longest_output}"
    if pair == "en-de":
        score = "tokenised, compounds split, cased"
        score_2017 = f"none; on 29 June: {score}"
        score_2023 = f"{score}, plain quotes"
    else:
        score = "tokenised, cased"
        score_2017 = "none"
        score_2023 = "tokenised as by mteval-v14"
    return [
        compare(
            "search",
            ComparedSetting("decoding.sample", False, ours.sample),
            paper="beam search",
            code_2017="beam search",
            ours="sampling" if ours.sample else "beam search",
        ),
        compare("beam", ComparedSetting("decoding.beam", 4, ours.beam), code_2017="4"),
        compare(
            "length penalty",
            ComparedSetting("decoding.penalty", "gnmt", ours.penalty),
            paper=formulas["gnmt"],
            code_2017=formulas["gnmt"],
            ours=formulas[ours.penalty],
        ),
        compare(
            "length penalty alpha",
            ComparedSetting("decoding.length_penalty", 0.6, ours.length_penalty),
            code_2017="0.6",
        ),
        compare(
            "longest output",
            ComparedSetting("decoding.max_ratio", 1.0, ours.max_ratio),
            ComparedSetting("decoding.max_extra", 50, ours.max_extra),
            paper="input + 50",
            code_2017="longest input of a batch + 50",
            code_2023="longest input of a batch + 100",
            ours=longest_output,
        ),
        compare(
            "shortest output",
            ComparedSetting("decoding.min_length", 0, ours.min_length),
            paper=SILENT,
            code_2017="0",
        ),
        compare(
            "repeated n-grams",
            ComparedSetting("decoding.no_repeat_ngram", None, ours.no_repeat_ngram),
            paper=SILENT,
            code_2017="allowed",
            ours="allowed" if repeats is None else f"none of {repeats} pieces",
        ),
        compare(
            "ended hypotheses count",
            ComparedSetting("decoding.finishing", "any", ours.finishing),
            paper=SILENT,
            code_2017=finishing_rules["any"],
            ours=finishing_rules[ours.finishing],
        ),
        compare(
            "early termination",
            ComparedSetting("decoding.stopping", "exact", ours.stopping),
            paper="when possible",
            code_2017=stopping_rules["exact"],
            ours=stopping_rules[ours.stopping],
        ),
        compare(
            "longest input",
            ComparedSetting("decoding.max_source", WHOLE_LINES, min(ours.max_source, WHOLE_LINES)),
            paper=SILENT,
            code_2017="any",
            ours=f"{format_value(ours.max_source)} pieces",
        ),
        state_rule(
            "score",
            paper=SILENT,
            code_2017=score_2017,
            code_2023=score_2023,
            ours=score,
            why="computed on Moses tokens; comparable with the paper's figure and never with "
            "sacreBLEU's; nmt-eval --ladder has both",
        ),
    ]


# ---- corpora, recognised by their names ----------------------------------------------------------


def compare_training_corpora(data: DataConfig, pair: str, hub: str) -> PaperRow:
    if pair == "en-de":
        paper = "WMT14, about 4.5M pairs"
        code_2017 = "WMT16's, News Commentary v11"
        code_2023 = "WMT14's, but News Commentary v13"
        why = (
            "WMT14 has News Commentary v9; the authors' file of 32,000 merges is WMT16's, with v11"
        )
    else:
        paper = "WMT14, 36M pairs"
        code_2017 = code_2023 = "WMT14's"
        why = ""

    names = [name_corpus(corpus, data) for corpus in data.train]
    wanted = PAPER_CORPORA[pair]
    whole = f"wmt14 {hub} train"  # all of them at once, from the hub
    deviates = False
    if names == [whole]:
        ours = "WMT14, from the hub"
    elif sorted(names) == sorted(wanted):
        ours = f"WMT14, {len(names)} corpora"
    else:
        deviates = True
        ours = ", ".join(names) or "none"
        why = _explain_corpora(names, wanted, whole)
    return PaperRow(
        name="training corpora",
        key="data.train",
        paper=paper,
        code_2017=code_2017,
        code_2023=code_2023,
        ours=ours,
        deviates=deviates,
        why=why,
    )


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


def compare_test_set(
    name: str,
    key: str,
    corpus: CorpusConfig | None,
    data: DataConfig,
    paper: KnownSet,
    hub: str,
    code_2017: str,
    code_2023: str,
) -> PaperRow:
    """`hub` is what the WMT14 dataset calls this pair of languages."""
    ours = name_corpus(corpus, data) if corpus else "none"
    wanted = paper.name
    why = ""
    if paper.subset is not None:
        wanted = f"{paper.name} in full"
        if ours == f"sacrebleu {paper.subset.sacrebleu}":
            why = "the set as filtered for WMT14's own evaluation"
            if paper.find_subset(data.src, data.tgt):
                why += f", {len(paper.subset_lines()):,} lines of {paper.lines:,}"
            why += f"; the paper's is {paper.sacrebleu}"
        elif ours == paper.name:
            why = f"files, recognised by their names alone: {wanted} has {paper.lines:,} lines"
    return PaperRow(
        name=name,
        key=key,
        paper=wanted,
        code_2017=code_2017,
        code_2023=code_2023,
        ours=ours,
        deviates=ours not in paper.list_names(hub),
        why=why,
    )


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
    if corpus.repeat != 1:
        name = f"{name} x {corpus.repeat}"
    if corpus.weight is not None:
        name = f"{name} x {corpus.weight:.6g}"
    if corpus.tag is not None:
        name = f"{corpus.tag} {name}"
    return name


def _strip_packing(path: str) -> str:
    """Return the file's name without its folder and without .gz, .xz, .bz2 or .zst."""
    name = PurePosixPath(path).name
    for ending in (".gz", ".xz", ".bz2", ".zst"):
        name = name.removesuffix(ending)
    return name


# ---- the table -----------------------------------------------------------------------------------


def explain(config: RunConfig) -> str:
    """Return the table, the deviations, and notes: what nmt-train --explain prints."""
    found = check_conformance(config)
    pair = PAPER_PAIRS[found.pair]
    code_2017 = f"{COMMIT_2017}, {HYPERPARAMETERS_2017[found.model, found.pair]}"
    code_2023 = f"{COMMIT_2023}, {HYPERPARAMETERS_2023[found.model, found.pair]}"
    # the table
    lines = format_line(
        "",
        "",
        "the paper",
        "tensor2tensor of June 2017",
        "tensor2tensor of April 2023",
        "this config",
    )
    lines += format_line("", "", f"{found.model}, {pair}", code_2017, code_2023, config.name)
    lines.append("")
    for row in found.rows:
        if row.name in FIRST_OF_BLOCK:
            lines.append("")
        mark = "*" if row.deviates else ""
        lines += format_line(mark, row.name, row.paper, row.code_2017, row.code_2023, row.ours)
    # deviations
    n = len(found.deviations)
    deviations = "1 deviation" if n == 1 else f"{n} deviations"
    lines += ["", f"{deviations} from the paper's {found.model} model, {pair}"]
    for row in found.deviations:
        lines += _wrap(_describe_deviation(row))
    # notes
    lines.append("")
    for note in _list_notes(config, found):
        lines += _wrap(f"- {note}")
    return "\n".join(lines) + "\n"


def format_line(mark: str, *cells: str) -> list[str]:
    """Format a row of the table; a cell that is too wide goes on below, a little to the right."""
    wrapped = []
    for cell, width in zip(cells, COLUMN_WIDTHS, strict=True):
        wrapped.append(textwrap.wrap(cell, width, subsequent_indent="  ", break_on_hyphens=False))
    lines = []
    for parts in zip_longest(*wrapped, fillvalue=""):
        columns = [f"{part:{width}}" for part, width in zip(parts, COLUMN_WIDTHS, strict=True)]
        lines.append(f"{mark:2}{'  '.join(columns)}".rstrip())
        mark = ""
    return lines


def _describe_deviation(row: PaperRow) -> str:
    source, value = row.measure
    why = f" ({row.why})" if row.why else ""
    return f"* {row.key}: {row.ours}; {source}: {value}{why}"


def _list_notes(config: RunConfig, found: Conformance) -> list[str]:
    place = "Table 2"
    if (found.model, found.pair) == ("big", "en-fr"):
        place = "Table 2; 41.0 in the text of section 6.1"
    notes = [f"{row.name}: {row.why}." for row in found.rows if row.why and not row.deviates]
    return [
        *notes,
        f"The paper's figure is {found.bleu} BLEU ({place}).",
        f"Where the paper is {SILENT}, the measure is the code of June 2017, or the usual reading. "
        f"The code is tensor2tensor's: {COMMIT_2017} of 15 June 2017 with the fixes of that month, "
        f"and its last commit, {COMMIT_2023}; sources in docs/recipe.md.",
        "Corpora are recognised by their names; the ledger of the store records what was read.",
        "What only concerns the machine is not counted: precision is "
        f"{config.training.precision} in training and {config.decoding.precision} in search, "
        "where the paper's P100s and the authors' code computed in fp32.",
    ]


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, TABLE_WIDTH, subsequent_indent="  ")
