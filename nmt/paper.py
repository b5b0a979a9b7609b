"""The paper as data: its settings and rules beside those of tensor2tensor and of a config.

Independent reproductions reach from 16 to 29 BLEU with "the same" settings, so what differs is
written out and counted. A config is compared with base or big, whichever is nearer, on the pair that
its languages name (else En-De). One cause is one deviation. Settings that only concern the machine
have no row; tests/test_paper.py lists them, and checks that every other setting has one. The
released code is tensor2tensor in its last state (bafdc1b6, April 2023).
"""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Literal

from nmt.config import CleanConfig, CorpusConfig, DataConfig, RunConfig
from nmt.known_test_sets import PAPER_DEV_SET, PAPER_TEST_SET, KnownSet

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
# What may differ from the paper's model without a change of what it scores on the dev set at that update.
HARMLESS_KEYS = {
    "data.test",
    "training.steps",
    "training.checkpoint_minutes",
    "training.checkpoint_every",
    "training.keep_checkpoints",
}
PAPER_PAIRS = {"en-de": "En-De", "en-fr": "En-Fr"}
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
# What the paper leaves open is compared with the released code or its usual reading.
NOT_STATED = "not stated"
COLUMN_WIDTHS = (25, 33, 37, 36)


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
    released: str
    ours: str
    deviates: bool
    why: str = ""


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

    model: Model
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
    """The dev figures of the paper's base or big, if the config is that model in all that changes them."""
    found = check_conformance(config)
    has_deviated = any(row.key not in HARMLESS_KEYS for row in found.deviations)
    if has_deviated or found.pair != "en-de" or config.evaluation.sentences is not None:
        return None
    return DevReference(found.model, *PAPER_DEV[found.model])


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
        *list_vocab_rows(config, pair),
        *list_model_rows(config, model, pair),
        *list_optimizer_rows(config),
        *list_training_rows(config, model, pair, n_averaged),
        *list_search_rows(config, pair),
    )
    return Conformance(model, pair, PAPER_BLEU[model, pair], n_averaged, rows)


# ---- rows ----------------------------------------------------------------------------------------


def compare(
    name: str,
    *settings: ComparedSetting,
    released: str,
    paper: str = "",
    ours: str = "",
    why: str = "",
) -> PaperRow:
    """Make a row of one or more settings, which all must have the paper's value.

    Where `paper` or `ours` is not given, it is the value of the first setting.
    """
    first = settings[0]
    deviating = find_deviating(settings)
    shown = deviating[0] if deviating else first
    return PaperRow(
        name,
        shown.key,
        paper or format_value(first.paper),
        released,
        ours or format_value(first.ours),
        bool(deviating),
        why,
    )


def find_deviating(settings: Sequence[ComparedSetting]) -> list[ComparedSetting]:
    return [setting for setting in settings if setting.paper != setting.ours]


def state_rule(name: str, paper: str, released: str, ours: str = "", why: str = "") -> PaperRow:
    """Make a row of a rule that no setting can change; tests check that the code follows it."""
    return PaperRow(name, None, paper, released, ours or paper, False, why)


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
    is_german = pair == "en-de"
    src, tgt = pair.split("-")
    hub = "de-en" if is_german else "fr-en"
    # Each setting of the cleaning is compared with what the paper's preset resolves to.
    preset = "paper-ende" if is_german else "paper-enfr"
    paper_cleaning = asdict(CleanConfig(**CleanConfig.PRESETS[preset]))
    our_cleaning = asdict(data.clean)
    cleaning = []
    for name, value in paper_cleaning.items():
        if name != "preset":
            key = f"data.clean.{name}"
            cleaning.append(ComparedSetting(key, value, our_cleaning[name]))
    other_rules = []
    for setting in find_deviating(cleaning):
        name = setting.key.removeprefix("data.clean.")
        other_rules.append(f"{name} {format_value(setting.ours)}")
    return [
        compare(
            "languages",
            ComparedSetting("data.src", src, data.src),
            ComparedSetting("data.tgt", tgt, data.tgt),
            paper=pair,
            released=pair,
            ours=f"{data.src}-{data.tgt}",
        ),
        compare_training_corpora(data, pair, hub),
        compare(
            "cleaning",
            *cleaning,
            paper=NOT_STATED if is_german else "36M pairs; rule not stated",
            released="up to 256 pieces",
            ours=", ".join(other_rules) or preset,
        ),
        compare_test_set(
            "dev set",
            "data.valid",
            data.valid,
            data,
            PAPER_DEV_SET,
            hub,
            released=PAPER_DEV_SET.name,
        ),
        compare_test_set(
            "test set",
            "data.test",
            data.test,
            data,
            PAPER_TEST_SET,
            hub,
            released=f"none; its script: {PAPER_DEV_SET.name}",
        ),
    ]


def list_vocab_rows(config: RunConfig, pair: str) -> list[PaperRow]:
    vocab = config.vocab
    is_german = pair == "en-de"
    size = 37_000 if is_german else 32_000
    is_given = vocab.model is not None
    pieces = ["BPE"]
    if vocab.character_coverage != 1:
        pieces.append(f"{vocab.character_coverage:.6g} of characters")
    if vocab.byte_fallback:
        pieces.append("bytes for the rest")
    word_pieces = (
        "the paper has word pieces for En-Fr; "
        "here BPE learns the merges by its own rule, which no setting can change"
    )
    return [
        compare(
            "vocabulary",
            ComparedSetting("vocab.size", size, size if is_given else vocab.size),
            ComparedSetting("vocab.model", None, vocab.model),
            paper="about 37,000" if is_german else "32,000",
            released="about 32,768",
            ours=f"that of {vocab.model}" if is_given else format_value(vocab.size),
            why="the size and origin of a given model are not known here" if is_given else "",
        ),
        state_rule("vocabulary shared", paper="by both languages", released="by both languages"),
        compare(
            "pieces",
            ComparedSetting("vocab.character_coverage", 1.0, vocab.character_coverage),
            ComparedSetting("vocab.byte_fallback", False, vocab.byte_fallback),
            paper="BPE" if is_german else "word pieces",
            released="own sub-words, with escapes",
            ours=", ".join(pieces),
            why="" if is_german else word_pieces,
        ),
        # Shown but never counted: the paper says nothing, and no sample is the right one.
        PaperRow(
            "vocabulary learned from",
            "vocab.sample_sentences",
            NOT_STATED,
            "1 MB of each file",
            f"up to {format_value(vocab.sample_sentences)} lines",
            False,
        ),
        compare(
            "BPE-dropout",
            ComparedSetting("vocab.bpe_dropout", 0.0, vocab.bpe_dropout),
            paper="none",
            released="none",
            ours=format_value(vocab.bpe_dropout or None),
        ),
    ]


def list_model_rows(config: RunConfig, model: Model, pair: str) -> list[PaperRow]:
    ours = config.model
    is_big = model == "big"
    is_big_french = is_big and pair == "en-fr"  # tensor2tensor's transformer_big_enfr
    d_model, d_ff, n_heads = (1024, 4096, 16) if is_big else (512, 2048, 8)
    dropout = 0.3 if is_big and not is_big_french else 0.1
    norms = {"post": "LayerNorm(x + Sublayer(x))", "pre": "x + Sublayer(LayerNorm(x))"}
    matrices = {True: "one matrix", False: "three matrices"}
    return [
        compare("layers N", ComparedSetting("model.n_layers", 6, ours.n_layers), released="6"),
        compare(
            "d_model",
            ComparedSetting("model.d_model", d_model, ours.d_model),
            released=format_value(d_model),
        ),
        compare(
            "d_ff",
            ComparedSetting("model.d_ff", d_ff, ours.d_ff),
            released="8,192" if is_big_french else format_value(d_ff),
        ),
        compare(
            "heads h",
            ComparedSetting("model.n_heads", n_heads, ours.n_heads),
            released=format_value(n_heads),
        ),
        compare_head_size("d_k", ours.key_size, ours.d_model / ours.n_heads),
        compare_head_size("d_v", ours.value_size, ours.d_model / ours.n_heads),
        compare(
            "norm position",
            ComparedSetting("model.norm", "post", ours.norm),
            paper=norms["post"],
            released=norms["pre"],
            ours=norms[ours.norm],
        ),
        _compare_positions(config),
        compare(
            "attention window", ComparedSetting("model.window", None, ours.window), released="none"
        ),
        compare(
            "embeddings and projection",
            ComparedSetting("model.tied", True, ours.tied),
            paper=matrices[True],
            released=matrices[not is_big_french],
            ours=matrices[ours.tied],
        ),
        compare(
            "embedding rows",
            ComparedSetting("model.vocab_rows", None, ours.vocab_rows),
            paper="one for each piece",
            released="one for each piece",
            ours="one for each piece" if ours.vocab_rows is None else format_value(ours.vocab_rows),
        ),
        state_rule("embeddings multiplied by", paper="sqrt(d_model)", released="sqrt(d_model)"),
        state_rule(
            "added to the source",
            paper="positions",
            released="positions, id of the target language",
        ),
        compare(
            "biases in attention",
            ComparedSetting("model.attention_bias", False, ours.attention_bias),
            paper="none",
            released="none",
            ours="yes" if ours.attention_bias else "none",
        ),
        state_rule("feed-forward", paper="ReLU, with biases", released="ReLU, with biases"),
        compare(
            "dropout of sub-layers",
            ComparedSetting("model.dropout", dropout, ours.dropout),
            released=format_value(dropout),
        ),
        state_rule("dropout in attention", paper="none", released="0.1"),
        state_rule("dropout after ReLU", paper="none", released="0.1"),
    ]


def _compare_positions(config: RunConfig) -> PaperRow:
    ours = config.model
    rule, why = f"a learned table of {format_value(ours.max_positions)}", ""
    if ours.positions == "sinusoidal":
        rule = "sin | cos, rates 10000^(-2i/d)"
        why = "sin and cos in halves instead of by turns are the same up to the order of columns"
    return compare(
        "positions",
        ComparedSetting("model.positions", "sinusoidal", ours.positions),
        paper="sin, cos by turns, 10000^(-2i/d)",
        released="sin | cos, rates 10000^(-i/(d/2-1))",
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
        released="64, d_model / h",
        ours=size,
    )


def list_optimizer_rows(config: RunConfig) -> list[PaperRow]:
    adam = config.optimizer
    return [
        state_rule("optimizer", paper="Adam", released="LazyAdam"),
        compare("beta1", ComparedSetting("optimizer.beta1", 0.9, adam.beta1), released="0.9"),
        compare("beta2", ComparedSetting("optimizer.beta2", 0.98, adam.beta2), released="0.997"),
        compare("epsilon", ComparedSetting("optimizer.eps", 1e-9, adam.eps), released="1e-9"),
        state_rule("learning rate", paper="min(n^-0.5, n w^-1.5) d^-0.5", released="the same"),
        compare(
            "learning rate times", ComparedSetting("optimizer.scale", 1.0, adam.scale), released="2"
        ),
        compare(
            "warm-up steps w",
            ComparedSetting("optimizer.warmup_steps", 4000, adam.warmup_steps),
            released="8,000",
        ),
        state_rule("gradient clipping", paper="none", released="none"),
        state_rule("weight decay", paper="none", released="none"),
    ]


def list_training_rows(
    config: RunConfig, model: Model, pair: str, n_averaged: int
) -> list[PaperRow]:
    ours = config.training
    is_big = model == "big"
    tokens_a_gpu = "2,048" if is_big and pair == "en-de" else "4,096"
    released_tokens = f"{tokens_a_gpu} a GPU of 8, padding too"
    intervals = []
    if ours.checkpoint_minutes is not None:
        intervals.append(f"{format_value(ours.checkpoint_minutes)} minutes")
    if ours.checkpoint_every is not None:
        intervals.append(f"{format_value(ours.checkpoint_every)} updates")
    smoothing = "1-eps; eps/(V-1) to each other"
    return [
        compare(
            "label smoothing",
            ComparedSetting("training.label_smoothing", 0.1, ours.label_smoothing),
            released="0.1",
        ),
        state_rule("label smoothing rule", paper=NOT_STATED, released=smoothing, ours=smoothing),
        compare(
            "source tokens per update",
            ComparedSetting("training.src_tokens", 25_000, ours.src_tokens),
            paper="about 25,000",
            released=released_tokens,
        ),
        compare(
            "target tokens per update",
            ComparedSetting("training.tgt_tokens", 25_000, ours.tgt_tokens),
            paper="about 25,000",
            released=released_tokens,
        ),
        compare(
            "updates",
            ComparedSetting("training.steps", 300_000 if is_big else 100_000, ours.steps),
            released="250,000; its README: 300,000",
        ),
        compare(
            "checkpoint every",
            ComparedSetting("training.checkpoint_minutes", 10.0, ours.checkpoint_minutes),
            ComparedSetting("training.checkpoint_every", None, ours.checkpoint_every),
            paper="10 minutes",
            released="1,000 updates",
            ours=" and ".join(intervals) or "at the end",
        ),
        compare(
            "checkpoints kept",
            # Keeping more than are averaged does no harm.
            ComparedSetting(
                "training.keep_checkpoints", n_averaged, min(ours.keep_checkpoints, n_averaged)
            ),
            paper=f"the last {n_averaged}",
            released="20",
            ours=format_value(ours.keep_checkpoints),
        ),
        state_rule(
            "averaged",
            paper=f"the last {n_averaged}",
            released="on request; its script: 8",
            ours=f"nmt-average --last {n_averaged} --every 10",
        ),
    ]


def list_search_rows(config: RunConfig, pair: str) -> list[PaperRow]:
    ours = config.decoding
    is_german = pair == "en-de"
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
    ratio = "" if ours.max_ratio == 1 else f"{format_value(ours.max_ratio)} * "
    score = "tokenised, compounds split, cased" if is_german else "tokenised, cased"
    return [
        compare(
            "search",
            ComparedSetting("decoding.sample", False, ours.sample),
            paper="beam search",
            released="beam search",
            ours="sampling" if ours.sample else "beam search",
        ),
        compare("beam", ComparedSetting("decoding.beam", 4, ours.beam), released="4"),
        compare(
            "length penalty",
            ComparedSetting("decoding.penalty", "gnmt", ours.penalty),
            paper=formulas["gnmt"],
            released=formulas["gnmt"],
            ours=formulas[ours.penalty],
        ),
        compare(
            "length penalty alpha",
            ComparedSetting("decoding.length_penalty", 0.6, ours.length_penalty),
            released="0.6",
        ),
        compare(
            "longest output",
            ComparedSetting("decoding.max_ratio", 1.0, ours.max_ratio),
            ComparedSetting("decoding.max_extra", 50, ours.max_extra),
            paper="input + 50",
            released="input + 100",
            ours=f"{ratio}input + {format_value(ours.max_extra)}",
        ),
        compare(
            "shortest output",
            ComparedSetting("decoding.min_length", 0, ours.min_length),
            paper=NOT_STATED,
            released="0",
        ),
        compare(
            "ended hypotheses count",
            ComparedSetting("decoding.finishing", "any", ours.finishing),
            paper=NOT_STATED,
            released=finishing_rules["any"],
            ours=finishing_rules[ours.finishing],
        ),
        compare(
            "early termination",
            ComparedSetting("decoding.stopping", "exact", ours.stopping),
            paper="when possible",
            released=stopping_rules["exact"],
            ours=stopping_rules[ours.stopping],
        ),
        compare(
            "longest input",
            ComparedSetting("decoding.max_source", WHOLE_LINES, min(ours.max_source, WHOLE_LINES)),
            paper=NOT_STATED,
            released="any",
            ours=f"{format_value(ours.max_source)} pieces",
        ),
        state_rule(
            "score",
            paper=score,
            released=score if is_german else "tokenised as by mteval-v14",
            why="computed on Moses tokens; comparable with the paper's figure and never with sacreBLEU's; "
            "nmt-eval --ladder has both",
        ),
    ]


# ---- corpora, recognised by their names ----------------------------------------------------------


def compare_training_corpora(data: DataConfig, pair: str, hub: str) -> PaperRow:
    names = [name_corpus(corpus, data) for corpus in data.train]
    wanted = PAPER_CORPORA[pair]
    whole = f"wmt14 {hub} train"  # all of them at once, from the hub
    is_paper = sorted(names) in ([whole], sorted(wanted))
    if not is_paper:
        ours = ", ".join(names) or "none"
    elif names == [whole]:
        ours = "WMT14, from the hub"
    else:
        ours = f"WMT14, {len(names)} corpora"
    is_german = pair == "en-de"
    return PaperRow(
        "training corpora",
        "data.train",
        "WMT14, 4.5M pairs" if is_german else "WMT14, 36M pairs",
        "WMT14's, but News Commentary v13" if is_german else "WMT14's",
        ours,
        not is_paper,
        "" if is_paper else _explain_corpora(names, wanted, whole),
    )


def _explain_corpora(names: Sequence[str], wanted: Sequence[str], whole: str) -> str:
    """Say what is missing and what should not be there, "" where no corpus is the paper's."""
    foreign = [name for name in names if name not in (*wanted, whole)]
    if len(foreign) == len(names):
        return ""
    missing = [name for name in wanted if name not in names and whole not in names]
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
    released: str,
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
    is_other = ours not in paper.list_names(hub)
    return PaperRow(name, key, wanted, released, ours, is_other, why)


def name_corpus(corpus: CorpusConfig, data: DataConfig) -> str:
    """Return the name by which a corpus is recognised.

    It is `wmt14 de-en train` of the hub, `europarl-v7.de-en` of europarl-v7.de-en.{en,de}, packed
    or in an archive, or `sacrebleu wmt14/full`; if it is repeated, with the number of times.
    """
    if corpus.dataset:
        hub = "wmt14" if corpus.dataset == "wmt/wmt14" else corpus.dataset
        split = corpus.split or "train"
        name = f"{hub} {corpus.subset} {split}" if corpus.subset else f"{hub} {split}"
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
    return name


def _strip_packing(path: str) -> str:
    """Return the file's name without its folder and without .gz, .xz or .zst."""
    name = PurePosixPath(path).name
    for ending in (".gz", ".xz", ".zst"):
        name = name.removesuffix(ending)
    return name


# ---- the table -----------------------------------------------------------------------------------


def explain(config: RunConfig) -> str:
    """Return the table, the deviations, and notes: what nmt-train --explain prints."""
    found = check_conformance(config)
    model_and_pair = f"{found.model}, {PAPER_PAIRS[found.pair]}"
    released = {
        ("base", "en-de"): "transformer_base",
        ("base", "en-fr"): "transformer_base",
        ("big", "en-de"): "transformer_big",
        ("big", "en-fr"): "transformer_big_enfr",
    }[found.model, found.pair]
    # the table
    head = ("", f"the paper's {model_and_pair}", f"tensor2tensor's {released}")
    lines = [_format_line("", *head, f"this config, {config.name}")]
    for row in found.rows:
        if row.name in ("layers N", "optimizer", "search"):
            lines.append("")
        mark = "*" if row.deviates else ""
        lines.append(_format_line(mark, row.name, row.paper, row.released, row.ours))
    # deviations
    n = len(found.deviations)
    deviations = "1 deviation" if n == 1 else f"{n} deviations"
    pair = PAPER_PAIRS[found.pair]
    lines += ["", f"{deviations} from the paper's {found.model} model, {pair}"]
    for row in found.deviations:
        lines += _wrap(_describe_deviation(row))
    # notes
    lines.append("")
    for note in _list_notes(config, found):
        lines += _wrap(f"- {note}")
    return "\n".join(lines) + "\n"


def _describe_deviation(row: PaperRow) -> str:
    if row.paper == NOT_STATED:
        theirs = f"the released code: {row.released}"
    else:
        theirs = f"the paper: {row.paper}"
    why = f" ({row.why})" if row.why else ""
    return f"* {row.key}: {row.ours}; {theirs}{why}"


def _list_notes(config: RunConfig, found: Conformance) -> list[str]:
    place = "Table 2; 41.0 in the text of section 6.1" if found.bleu == 41.8 else "Table 2"
    notes = [f"{row.name}: {row.why}." for row in found.rows if row.why and not row.deviates]
    return [
        *notes,
        f"The paper's figure is {found.bleu} BLEU ({place}).",
        "Corpora are recognised by their names; the ledger of the store records what was read.",
        "What only concerns the machine is not counted: precision is "
        f"{config.training.precision} in training and {config.decoding.precision} in search, "
        "where the paper's P100s and the released code computed in fp32.",
    ]


def _format_line(mark: str, *cells: str) -> str:
    columns = []
    for cell, width in zip(cells, COLUMN_WIDTHS, strict=True):
        shortened = cell if len(cell) <= width else f"{cell[: width - 4]} ..."
        columns.append(f"{shortened:{width}}")
    return f"{mark:2}{'  '.join(columns)}".rstrip()


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, 138, subsequent_indent="  ")
