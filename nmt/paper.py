"""The paper as data: each hyper-parameter and rule beside tensor2tensor's released code and a config's own value.

Independent reproductions land from 16 to 29 BLEU with "the same" settings, so what differs is written out and counted.
A config is measured against base or big, whichever is nearer, on the pair that its languages name (else En-De). One
cause is one deviation. Settings that only concern the machine have no row; tests/test_paper.py lists them, and holds
every other setting to a row. The released column was read in tensor2tensor's last state (bafdc1b6, April 2023).
"""

import textwrap
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Literal

from nmt.config import CleanConfig, CorpusConfig, DataConfig, RunConfig
from nmt.known_test_sets import PAPER_DEV_SET, PAPER_TEST_SET, KnownSet

Model = Literal["base", "big"]
Setting = tuple[str, object, object]  # key, the paper's value, the config's
BLEU = {
    ("base", "en-de"): 27.3,
    ("base", "en-fr"): 38.1,
    ("big", "en-de"): 28.4,
    ("big", "en-fr"): 41.8,
}  # Table 2
PAIRS = {"en-de": "En-De", "en-fr": "En-Fr"}
CORPORA = {
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
SILENT = "not told"  # what the paper leaves open is measured against the released code or its usual reading
WIDTHS = (25, 33, 37, 36)  # of the table's columns


@dataclass(frozen=True)
class Row:
    name: str
    key: (
        str | None
    )  # of a setting; of several, the first that deviates; None for a rule without one
    paper: str
    released: str
    ours: str
    deviates: bool
    why: str = ""


@dataclass(frozen=True)
class Conformance:
    model: Model
    pair: str
    bleu: float
    n_averaged: int
    rows: tuple[Row, ...]

    @property
    def deviations(self) -> list[Row]:
        return [row for row in self.rows if row.deviates]


def conformance(config: RunConfig) -> Conformance:
    pair = "en-fr" if (config.data.src, config.data.tgt) == ("en", "fr") else "en-de"
    return min(
        (against(config, "base", pair), against(config, "big", pair)),
        key=lambda c: len(c.deviations),
    )


def against(config: RunConfig, model: Model, pair: str) -> Conformance:
    n_averaged = 5 if model == "base" else 20
    rows = (
        *data_rows(config, pair),
        *model_rows(config, model, pair),
        *training_rows(config, model, pair, n_averaged),
        *search_rows(config, pair),
    )
    return Conformance(model, pair, BLEU[model, pair], n_averaged, rows)


# ---- rows ---------------------------------------------------------------------------------------------------------


def row(
    name: str,
    settings: list[Setting],
    released: str,
    paper: str = "",
    ours: str = "",
    why: str = "",
) -> Row:
    """Of settings that all must be the paper's; texts are of the first one's values where none are given."""
    differing = [key for key, theirs, mine in settings if theirs != mine]
    key, theirs, mine = settings[0]
    return Row(
        name,
        differing[0] if differing else key,
        paper or shown(theirs),
        released,
        ours or shown(mine),
        bool(differing),
        why,
    )


def rule(name: str, paper: str, released: str, ours: str = "", why: str = "") -> Row:
    """What no setting can change; tests hold the code to it."""
    return Row(name, None, paper, released, ours or paper, False, why)


def shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:.10g}".replace("e-0", "e-")
    return f"{value:,}" if isinstance(value, int) else str(value)


def data_rows(config: RunConfig, pair: str) -> list[Row]:
    data, vocab, hub = config.data, config.vocab, "de-en" if pair == "en-de" else "fr-en"
    is_german = pair == "en-de"
    src, tgt = pair.split("-")
    preset = "paper-ende" if is_german else "paper-enfr"
    cut = asdict(CleanConfig(**CleanConfig.PRESETS[preset]))
    cleaning: list[Setting] = [
        (f"data.clean.{name}", cut[name], mine)
        for name, mine in asdict(data.clean).items()
        if name != "preset"
    ]
    unclean = ", ".join(
        f"{key.rpartition('.')[2]} {shown(mine)}"
        for key, theirs, mine in cleaning
        if theirs != mine
    )
    size = 37_000 if is_german else 32_000
    pieces = ["BPE"] + [f"{vocab.character_coverage:.6g} of characters"] * (
        vocab.character_coverage != 1
    )
    pieces += ["bytes for the rest"] * vocab.byte_fallback
    return [
        row(
            "languages",
            [("data.src", src, data.src), ("data.tgt", tgt, data.tgt)],
            pair,
            pair,
            f"{data.src}-{data.tgt}",
        ),
        train_row(data, pair, hub),
        row(
            "cleaning",
            cleaning,
            "up to 256 pieces",
            SILENT if is_german else "36M pairs; rule not told",
            unclean or preset,
        ),
        set_row(
            "dev set",
            "data.valid",
            data.valid,
            data,
            PAPER_DEV_SET,
            hub,
            PAPER_DEV_SET.name,
        ),
        set_row(
            "test set",
            "data.test",
            data.test,
            data,
            PAPER_TEST_SET,
            hub,
            f"none; its script: {PAPER_DEV_SET.name}",
        ),
        row(
            "vocabulary",
            [
                ("vocab.size", size, size if vocab.model else vocab.size),
                ("vocab.model", None, vocab.model),
            ],
            "about 32,768",
            "about 37,000" if is_german else "32,000",
            f"that of {vocab.model}" if vocab.model else shown(vocab.size),
            "size and origin of a given model are not known here" * (vocab.model is not None),
        ),
        rule("vocabulary shared", "by both languages", "by both languages"),
        row(
            "pieces",
            [
                ("vocab.character_coverage", 1.0, vocab.character_coverage),
                ("vocab.byte_fallback", False, vocab.byte_fallback),
            ],
            "own sub-words, with escapes",
            "BPE" if is_german else "word pieces",
            ", ".join(pieces),
            ""
            if is_german
            else "merges are learned by BPE's rule here, also where the paper has word pieces, which no setting can change",
        ),
        Row(
            "vocabulary learned from",
            "vocab.sample_sentences",
            SILENT,
            "1 MB of each file",
            f"up to {shown(vocab.sample_sentences)} lines",
            False,
        ),
        row(
            "BPE-dropout",
            [("vocab.bpe_dropout", 0.0, vocab.bpe_dropout)],
            "none",
            "none",
            shown(vocab.bpe_dropout or None),
        ),
    ]


def model_rows(config: RunConfig, model: Model, pair: str) -> list[Row]:
    ours, is_big = config.model, model == "big"
    is_wide = is_big and pair == "en-fr"  # what the released transformer_big_enfr is
    d_model, d_ff, n_heads = (1024, 4096, 16) if is_big else (512, 2048, 8)
    dropout = 0.3 if is_big and not is_wide else 0.1
    norms = {"post": "LayerNorm(x + Sublayer(x))", "pre": "x + Sublayer(LayerNorm(x))"}
    matrices = {True: "one matrix", False: "three matrices"}
    return [
        row("layers N", [("model.n_layers", 6, ours.n_layers)], "6"),
        row("d_model", [("model.d_model", d_model, ours.d_model)], shown(d_model)),
        row("d_ff", [("model.d_ff", d_ff, ours.d_ff)], "8,192" if is_wide else shown(d_ff)),
        row("heads h", [("model.n_heads", n_heads, ours.n_heads)], shown(n_heads)),
        head_row("d_k", ours.key_size, ours.d_model / ours.n_heads),
        head_row("d_v", ours.value_size, ours.d_model / ours.n_heads),
        row(
            "norm position",
            [("model.norm", "post", ours.norm)],
            norms["pre"],
            norms["post"],
            norms[ours.norm],
        ),
        row(
            "positions",
            [("model.positions", "sinusoidal", ours.positions)],
            "sin | cos, rates 10000^(-i/(d/2-1))",
            "sin, cos by turns, 10000^(-2i/d)",
            "sin | cos, rates 10000^(-2i/d)"
            if ours.positions == "sinusoidal"
            else f"a learned table of {shown(ours.max_positions)}",
            ""
            if ours.positions != "sinusoidal"
            else "sin and cos in halves, not by turns, are the same but for the order of the columns",
        ),
        row("attention window", [("model.window", None, ours.window)], "none"),
        row(
            "embeddings and projection",
            [("model.tied", True, ours.tied)],
            matrices[not is_wide],
            matrices[True],
            matrices[ours.tied],
        ),
        rule("embeddings multiplied by", "sqrt(d_model)", "sqrt(d_model)"),
        rule("added to the source", "positions", "positions, id of the target language"),
        rule("biases in attention", "none", "none"),
        rule("feed-forward", "ReLU, with biases", "ReLU, with biases"),
        row("dropout of sub-layers", [("model.dropout", dropout, ours.dropout)], shown(dropout)),
        rule("dropout in attention", "none", "0.1"),
        rule("dropout after ReLU", "none", "0.1"),
    ]


def training_rows(config: RunConfig, model: Model, pair: str, n_averaged: int) -> list[Row]:
    ours, adam, is_big = config.training, config.optimizer, model == "big"
    every = [f"{shown(ours.checkpoint_minutes)} minutes"] * (ours.checkpoint_minutes is not None)
    every += [f"{shown(ours.checkpoint_every)} updates"] * (ours.checkpoint_every is not None)
    tokens = f"{'2,048' if is_big and pair == 'en-de' else '4,096'} a GPU of 8, padding too"
    kept = min(ours.keep_checkpoints, n_averaged)  # more do no harm
    return [
        rule("optimizer", "Adam", "LazyAdam", "Adam"),
        row("beta1", [("optimizer.beta1", 0.9, adam.beta1)], "0.9"),
        row("beta2", [("optimizer.beta2", 0.98, adam.beta2)], "0.997"),
        row("epsilon", [("optimizer.eps", 1e-9, adam.eps)], "1e-9"),
        rule("learning rate", "min(n^-0.5, n w^-1.5) d^-0.5", "the same"),
        row("learning rate times", [("optimizer.scale", 1.0, adam.scale)], "2"),
        row("warm-up steps w", [("optimizer.warmup_steps", 4000, adam.warmup_steps)], "8,000"),
        rule("gradient clipping", "none", "none"),
        rule("weight decay", "none", "none"),
        row("label smoothing", [("training.label_smoothing", 0.1, ours.label_smoothing)], "0.1"),
        rule(
            "label smoothing rule",
            SILENT,
            "1-eps; eps/(V-1) to each other",
            "1-eps; eps/(V-1) to each other",
        ),
        row(
            "source tokens per update",
            [("training.src_tokens", 25_000, ours.src_tokens)],
            tokens,
            "about 25,000",
        ),
        row(
            "target tokens per update",
            [("training.tgt_tokens", 25_000, ours.tgt_tokens)],
            tokens,
            "about 25,000",
        ),
        row(
            "updates",
            [("training.steps", 300_000 if is_big else 100_000, ours.steps)],
            "250,000; its README: 300,000",
        ),
        row(
            "checkpoint every",
            [
                ("training.checkpoint_minutes", 10.0, ours.checkpoint_minutes),
                ("training.checkpoint_every", None, ours.checkpoint_every),
            ],
            "1,000 updates",
            "10 minutes",
            " and ".join(every) or "at the end",
        ),
        row(
            "checkpoints kept",
            [("training.keep_checkpoints", n_averaged, kept)],
            "20",
            f"the last {n_averaged}",
            shown(ours.keep_checkpoints),
        ),
        rule(
            "averaged",
            f"the last {n_averaged}",
            "on request; its script: 8",
            f"nmt-average --last {n_averaged} --every 10",
        ),
    ]


def search_rows(config: RunConfig, pair: str) -> list[Row]:
    ours = config.decoding
    formulas = {"gnmt": "((5+|Y|)/6)^alpha", "length": "|Y|^alpha", "none": "none"}
    ends = {
        "any": "any of the best 2 * beam",
        "top": "those among the best beam",
        "shrink": "those among the best, beam narrows",
    }
    stops = {
        "exact": "when none can still win",
        "full": "when so many as the beam have ended",
        "likely": "when the best living is no better",
        "never": "at the length limit",
    }
    is_german = pair == "en-de"
    score = (
        "tokenised, compounds split, cased" if is_german else "tokenised, cased"
    )  # a rung of the ladder
    return [
        row(
            "search",
            [("decoding.sample", False, ours.sample)],
            "beam search",
            "beam search",
            "sampling" if ours.sample else "beam search",
        ),
        row("beam", [("decoding.beam", 4, ours.beam)], "4"),
        row(
            "length penalty",
            [("decoding.penalty", "gnmt", ours.penalty)],
            formulas["gnmt"],
            formulas["gnmt"],
            formulas[ours.penalty],
        ),
        row("length penalty alpha", [("decoding.length_penalty", 0.6, ours.length_penalty)], "0.6"),
        row(
            "longest output",
            [
                ("decoding.max_ratio", 1.0, ours.max_ratio),
                ("decoding.max_extra", 50, ours.max_extra),
            ],
            "input + 100",
            "input + 50",
            f"{'' if ours.max_ratio == 1 else shown(ours.max_ratio) + ' * '}input + {shown(ours.max_extra)}",
        ),
        row("shortest output", [("decoding.min_length", 0, ours.min_length)], "0", SILENT),
        row(
            "ended hypotheses count",
            [("decoding.finishing", "any", ours.finishing)],
            ends["any"],
            SILENT,
            ends[ours.finishing],
        ),
        row(
            "early termination",
            [("decoding.stopping", "exact", ours.stopping)],
            stops["exact"],
            "when possible",
            stops[ours.stopping],
        ),
        row(
            "longest input",
            [("decoding.max_source", WHOLE_LINES, min(ours.max_source, WHOLE_LINES))],
            "any",
            SILENT,
            f"{shown(ours.max_source)} pieces",
        ),
        rule(
            "score",
            score,
            score if is_german else "tokenised as by mteval-v14",
            why="of Moses tokens, to be compared with the paper's figure and never with sacreBLEU's; nmt-eval "
            "--ladder has both",
        ),
    ]


def head_row(name: Literal["d_k", "d_v"], mine: int, quotient: float) -> Row:
    """Where it is d_model / h, another value comes of those, which have rows of their own."""
    follows = mine == quotient
    return row(
        name,
        [(f"model.{name}", 64, 64 if follows else mine)],
        "64, d_model / h",
        "64, d_model / h",
        f"{shown(mine)}, d_model / h" if follows else shown(mine),
    )


# ---- corpora, known by their names ----------------------------------------------------------------------------------


def train_row(data: DataConfig, pair: str, hub: str) -> Row:
    names, wanted, whole = (
        [known_as(corpus, data) for corpus in data.train],
        CORPORA[pair],
        f"wmt14 {hub} train",
    )
    is_wmt14 = sorted(names) in ([whole], sorted(wanted))
    missing = [
        name
        for name in wanted
        if name not in (*names, *[name for name in wanted if whole in names])
    ]
    foreign = [name for name in names if name not in (*wanted, whole)]
    why = [f"without {', '.join(missing)}"] * bool(missing) + [f"with {', '.join(foreign)}"] * bool(
        foreign
    )
    texts = {
        "en-de": ("WMT14, 4.5M pairs", "WMT14's, but News Commentary v13"),
        "en-fr": ("WMT14, 36M pairs", "WMT14's"),
    }[pair]
    ours = (
        f"WMT14, {'from the hub' if names == [whole] else f'{len(names)} corpora'}"
        if is_wmt14
        else ", ".join(names)
    )
    return Row(
        "training corpora",
        "data.train",
        texts[0],
        texts[1],
        ours or "none",
        not is_wmt14,
        "" if is_wmt14 or len(foreign) == len(names) else "; ".join(why) or "not each of them once",
    )


def set_row(
    name: str,
    key: str,
    corpus: CorpusConfig | None,
    data: DataConfig,
    paper: KnownSet,
    hub: str,
    released: str,
) -> Row:
    """`hub`: how the dataset of WMT14 calls this pair of languages."""
    mine = known_as(corpus, data) if corpus else "none"
    why = ""
    wanted = paper.name
    if paper.subset is not None:
        wanted = f"{paper.name} in full"
        if mine == f"sacrebleu {paper.subset.sacrebleu}":
            why = "the set as filtered for WMT14's own evaluation"
            if paper.find_subset(data.src, data.tgt):
                why += f", {len(paper.subset_lines()):,} lines of {paper.lines:,}"
            why += f"; the paper's is {paper.sacrebleu}"
        elif mine == paper.name:
            why = f"files, known by their names alone: {wanted} has {paper.lines:,} lines"
    is_other = mine not in paper.list_names(hub)
    return Row(name, key, wanted, released, mine, is_other, why)


def known_as(corpus: CorpusConfig, data: DataConfig) -> str:
    """`wmt14 de-en train` of the hub, `europarl-v7.de-en` of europarl-v7.de-en.{en,de}, packed or in an archive, or
    `sacrebleu wmt14/full`; repeated, followed by how often."""
    if corpus.dataset:
        hub = "wmt14" if corpus.dataset == "wmt/wmt14" else corpus.dataset
        name = " ".join(part for part in (hub, corpus.subset, corpus.split or "train") if part)
    elif corpus.src and corpus.tgt:
        files = [PurePosixPath(path).name for path in (corpus.src, corpus.tgt)]
        for ending in (".gz", ".xz", ".zst"):
            files = [file.removesuffix(ending) for file in files]
        stems = {
            file.removesuffix(f".{language}")
            for file, language in zip(files, (data.src, data.tgt), strict=True)
        }
        name = stems.pop() if len(stems) == 1 else " + ".join(files)
    elif corpus.sacrebleu:
        name = f"sacrebleu {corpus.sacrebleu}"
    else:
        name = f"the demo's {corpus.demo}" if corpus.demo else PurePosixPath(corpus.file or "").name
    return f"{name} x {corpus.repeat}" if corpus.repeat != 1 else name


# ---- the report -----------------------------------------------------------------------------------------------------


def explain(config: RunConfig) -> str:
    """The table, what deviates, and notes."""
    found = conformance(config)
    released = (
        "transformer_base"
        if found.model == "base"
        else "transformer_big"
        if found.pair == "en-de"
        else "transformer_big_enfr"
    )
    lines = [
        line(
            "",
            "",
            f"the paper's {found.model}, {PAIRS[found.pair]}",
            f"tensor2tensor's {released}",
            f"this config, {config.name}",
        )
    ]
    for entry in found.rows:
        if entry.name in ("layers N", "optimizer", "search"):
            lines.append("")
        lines.append(
            line("*" if entry.deviates else "", entry.name, entry.paper, entry.released, entry.ours)
        )
    n = len(found.deviations)
    lines += [
        "",
        f"{n} deviation{'s' * (n != 1)} from the paper's {found.model} model, {PAIRS[found.pair]}",
    ]
    for entry in found.deviations:
        theirs = (
            f"the released code: {entry.released}"
            if entry.paper == SILENT
            else f"the paper: {entry.paper}"
        )
        lines += wrapped(
            f"* {entry.key}: {entry.ours}; {theirs}" + f" ({entry.why})" * bool(entry.why)
        )
    lines.append("")
    for note in notes(config, found):
        lines += wrapped(f"- {note}")
    return "\n".join(lines) + "\n"


def notes(config: RunConfig, found: Conformance) -> list[str]:
    place = "Table 2; 41.0 in the text of section 6.1" if found.bleu == 41.8 else "Table 2"
    return [f"{row.name}: {row.why}." for row in found.rows if row.why and not row.deviates] + [
        f"The paper's figure is {found.bleu} BLEU ({place}).",
        "Corpora are known by their names; what was read stands in the ledger of the store.",
        f"What only concerns the machine is not counted: precision is {config.training.precision} in training and "
        f"{config.decoding.precision} in search, where the paper's P100s and the released code computed in fp32.",
    ]


def line(mark: str, *cells: str) -> str:
    columns = [
        f"{cell if len(cell) <= width else cell[: width - 4] + ' ...':{width}}"
        for cell, width in zip(cells, WIDTHS, strict=True)
    ]
    return f"{mark:2}{'  '.join(columns)}".rstrip()


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 138, subsequent_indent="  ")
