"""The configuration: one frozen dataclass for each section of the YAML file, nested in `RunConfig`.

A config describes the update, not the machine: it counts tokens per update, never sentences per GPU.
Where the paper gives a value, the default is that of its base model, except for training.grouping and
training.checkpoint_every, which the paper's configs set. nmt/config_files.py reads and writes configs.

The comment above a field, or above the first of several, is its description in
docs/reference/settings.md, which `make docs` writes.
"""

import dataclasses
import functools
import os
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from nmt.system.errors import UserError
from nmt.system.records import Rule, default
from nmt.system.run_folder import RunFolder
from nmt.system.strict_yaml import Values

if TYPE_CHECKING:
    from torch import Tensor

Grouping = Literal["length", "random"]
Count = TypeVar("Count", int, "Tensor")

SPECIAL_PIECES = ("<pad>", "<unk>", "<s>", "</s>")  # of every vocabulary


def between(low: float, high: float) -> Rule:
    return Rule(lambda x: low <= x <= high, f"be between {low} and {high}")


@functools.cache
def _make_exact(ratio: float) -> Fraction:
    return Fraction(ratio).limit_denominator(1_000_000)


def multiply_exactly(n: Count, ratio: float) -> Count:
    """Multiply as people do and round down: 50 times 1.16 is 58, where floats say 57. Ratios are exact to a
    millionth.
    """
    exact = _make_exact(ratio)
    return n * exact.numerator // exact.denominator


# Rules for numeric values; a null or a string is not checked against them.
WORKERS = between(1, 4_096)
SIZE = Rule(lambda x: 1 <= x <= 2**40, "be between 1 and 2^40")
POSITIVE = Rule(lambda x: x > 0, "be positive")
AT_LEAST_ONE = Rule(lambda x: x >= 1, "be at least 1")
FRACTION = Rule(lambda x: 0 <= x < 1, "be in [0, 1)")
DECAY = Rule(lambda x: 0 < x < 1, "be between 0 and 1; null switches it off")
PROBABILITY = Rule(lambda x: 0 < x <= 1, "be in (0, 1]")
BEAM_SIZE = between(1, 1_000)
ALPHA = between(0, 10)
LENGTH = between(0, 10_000)
LENGTH_RATIO = between(0, 100)
WEIGHT = Rule(lambda x: 0 < x <= 1_000, "be above 0 and at most 1000")
TEMPERATURE = between(0.01, 100)
COVERAGE = between(0.98, 1)
VOCAB_SIZE = Rule(
    lambda x: 16 <= x <= 65_535, "be between 16 and 65535, because ids are stored in 16 bits"
)
RANDOM_SEED = Rule(lambda x: 0 <= x < 2**31, "be in [0, 2^31)")


@dataclass(frozen=True)
class CorpusConfig:
    """Where sentence pairs come from: two files, one file, a dataset, a known test set, or the
    demo.
    """

    # Two files with one sentence per line; .gz, .xz, .bz2 and .zst are decompressed on the fly.
    src: str | None = None
    tgt: str | None = None
    # The archive (.tgz, .zip, .tar.gz or .tar) that contains src and tgt, or file.
    archive: str | None = None
    # One file with both sides: .tsv (source, tab, target), .jsonl, .tmx or .parquet.
    file: str | None = None
    # A Hugging Face dataset: its id, or a folder with the hub's layout.
    dataset: str | None = None
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    # A test set that sacreBLEU knows, such as wmt14/full.
    sacrebleu: str | None = None
    # A split of the demo corpus, which comes with the library.
    demo: Literal["train", "valid", "test"] | None = None
    # How many copies of this training corpus an epoch has; a fraction is a share of its pairs, drawn
    # anew for each epoch (docs/data.md#weights).
    weight: float | None = default(None, WEIGHT)
    # A symbol to put in front of every source sentence, such as <bt> or <de>; see docs/data.md#tags.
    tag: str | None = None

    def check(self) -> str | None:
        kinds = [self.src or self.tgt, self.file, self.dataset, self.sacrebleu, self.demo]
        if sum(kind is not None for kind in kinds) != 1:
            return "needs exactly one of {src, tgt}, file, dataset, sacrebleu, demo"
        if (self.src is None) != (self.tgt is None):
            return "needs both src and tgt"
        if self.src and self.tgt and os.path.normpath(self.src) == os.path.normpath(self.tgt):
            return f"src and tgt are both {self.src!r}; give two different files"
        if self.archive is not None and self.src is None and self.file is None:
            return "archive needs src and tgt, or file, which name its members"
        if self.tag is not None:
            return explain_invalid_tag(self.tag)
        return None


def explain_invalid_tag(tag: str) -> str | None:
    """Return why a text cannot be a tag, or None if it can."""
    # No word of a language is like this: the BPE learns nothing from words that hold a tag.
    is_bracketed = len(tag) > 2 and not (tag[0].isalnum() or tag[-1].isalnum())
    fault = explain_invalid_symbol(tag)
    if fault is None and not is_bracketed:
        fault = f"tag is {tag!r}; enclose it in punctuation, such as <{tag}>"
    return fault


def explain_invalid_symbol(symbol: str) -> str | None:
    """Return why a text cannot be a symbol of the vocabulary, or None if it can."""
    if not symbol.isprintable() or len(symbol.split()) != 1 or " " in symbol or "\u2581" in symbol:
        return f"{symbol!r} cannot be a symbol; use printable characters, without spaces or \u2581"
    if symbol in SPECIAL_PIECES:
        return f"{symbol!r} is reserved in every vocabulary; choose another name"
    return None


@dataclass(frozen=True)
class CleanConfig:
    """Rules for dropping training pairs; null turns a rule off. A pair with an empty side or a NUL
    character is always dropped.
    """

    # Sets the keys below that are not given (docs/data.md#cleaning). paper-ende: the paper's En-De
    # data as its authors filtered it (at most 256 pieces including the end mark); paper-enfr: its
    # En-Fr data with the usual filter, from 40.8M pairs to about 36M; words are counted between spaces.
    preset: Literal["none", "paper-ende", "paper-enfr"] | None = None
    # Whether to drop pairs whose sides are the same text.
    identical: bool = False
    # The longest side that is kept, in words.
    max_words: int | None = default(250, AT_LEAST_ONE)
    # The largest ratio of the longer to the shorter side that is kept, in words.
    max_ratio: float | None = default(None, AT_LEAST_ONE)
    # What to do with training pairs that also occur in the dev or test set: keep them, drop those
    # where both sides match (drop-pairs), or drop those where either side matches (drop-sides).
    held_out: Literal["keep", "drop-pairs", "drop-sides"] = "keep"
    # Whether to keep only the first of identical pairs, across all corpora.
    duplicates: bool = False
    # The longest side that is kept, in pieces of the vocabulary.
    max_pieces: int | None = default(250, SIZE)

    PRESETS: ClassVar[dict[str, Values]] = {
        "none": {"max_words": None, "max_ratio": None, "max_pieces": None},
        "paper-ende": {"max_words": None, "max_ratio": None, "max_pieces": 255},
        "paper-enfr": {"max_words": 175, "max_ratio": 1.5, "max_pieces": 255},
    }


@dataclass(frozen=True)
class DataConfig:
    """The corpora, and how they become a token store."""

    # The languages; they are also the column names in tables.
    src: str = "en"
    tgt: str = "de"
    # The folder that relative corpus paths are resolved against.
    root: str = "."
    # The folder for the prepared data. Once it exists, training needs no other file.
    store: str = "data/store"
    # The number of processes that prepare the data; the result does not depend on it.
    workers: int = default(2, WORKERS)
    # train is a list of corpora, valid and test are one corpus each; see docs/data.md#corpora.
    train: tuple[CorpusConfig, ...] = ()
    valid: CorpusConfig | None = None
    test: CorpusConfig | None = None
    # T, to mix the corpora in proportion to their sizes to the power of 1/T; null: as they are. See
    # docs/data.md#weights.
    temperature: float | None = default(None, AT_LEAST_ONE)
    # Whether to stop at a line that cannot be read, or to drop its pair and count it.
    on_bad_line: Literal["stop", "skip"] = "stop"
    clean: CleanConfig = CleanConfig()

    @property
    def corpora(self) -> list[CorpusConfig]:
        """All that are given."""
        return [corpus for corpus in (*self.train, self.valid, self.test) if corpus is not None]

    @property
    def is_weighted(self) -> bool:
        return any(corpus.weight is not None for corpus in self.train)

    @property
    def is_mixed(self) -> bool:
        """Whether an epoch has other pairs than the store, or other numbers of copies of them."""
        return self.temperature is not None or self.is_weighted

    @property
    def has_tags_only(self) -> bool:
        """Whether all training sources have a tag, such as that of a language."""
        return bool(self.train) and all(corpus.tag is not None for corpus in self.train)

    @property
    def train_tags(self) -> list[str]:
        """The tags of the training corpora, each once."""
        tags = [corpus.tag for corpus in self.train if corpus.tag is not None]
        return list(dict.fromkeys(tags))

    def check(self) -> str | None:
        if self.src == self.tgt:
            return f"src and tgt are both {self.src!r}; give two languages"
        for name, corpus in (("valid", self.valid), ("test", self.test)):
            if corpus is not None and corpus.weight is not None:
                return f"{name} has a weight, but only a corpus of train can have one; leave it out"
        if self.temperature is not None and self.is_weighted:
            return "temperature is given, but a corpus has a weight; give only one of these"
        for key, folder in (("root", self.root), ("store", self.store)):
            if folder.startswith("~"):
                return (
                    f"{key} is {folder!r}, but ~ is expanded only by a shell, not here; "
                    "write the whole path"
                )
        return None


@dataclass(frozen=True)
class VocabConfig:
    """The BPE vocabulary: a joint one for both languages, or one for each."""

    # Whether both languages share one vocabulary. false: one for each, in vocab.src.model and
    # vocab.tgt.model, for languages in different scripts, such as English and Chinese; model.tied
    # must then be decoder or false, because the languages share no embeddings.
    joint: bool = True
    # The number of pieces, including the four special ones (pad, unk, bos, eos).
    size: int = default(37_000, VOCAB_SIZE)
    # The number of pieces of the target's own vocabulary; null: the same number.
    tgt_size: int | None = default(None, VOCAB_SIZE)
    # The share of the characters in the text that the pieces must cover.
    character_coverage: float = default(1.0, COVERAGE)
    # The maximum number of lines to learn the BPE from.
    sample_sentences: int = default(2_000_000, AT_LEAST_ONE)
    # Whether unknown characters are written as bytes, instead of as <unk>.
    byte_fallback: bool = False
    # An existing SentencePiece model, relative to data.root, to be used instead of learning one; it
    # decides the size.
    model: str | None = None
    # With joint: false, the target's model; model is then the source's. Give both or neither.
    tgt_model: str | None = None
    # The probability of skipping a BPE merge (Provilkov et al. 2020, who use 0.1). Each epoch is
    # segmented anew, into STORE.epochs/, which may be deleted between runs.
    bpe_dropout: float = default(0.0, FRACTION)
    # Texts that are always one piece, wherever they occur, such as [<url>]; null: none. Tags of
    # corpora are symbols too, and need not be listed. An existing model gets the symbols that it
    # lacks as additional pieces.
    user_symbols: tuple[str, ...] | None = None

    def check(self) -> str | None:
        symbols = self.user_symbols or ()
        for symbol in symbols:
            if fault := explain_invalid_symbol(symbol):
                return f"user_symbols: {fault}"
        if len(set(symbols)) < len(symbols):
            return "user_symbols names a symbol twice; leave one of them out"
        for key, value in (("tgt_size", self.tgt_size), ("tgt_model", self.tgt_model)):
            if self.joint and value is not None:
                return f"{key} is {value}, but both languages share one vocabulary; set joint=false"
        if not self.joint and (self.model is None) != (self.tgt_model is None):
            return "needs both model and tgt_model, or neither, because joint is false"
        return None

    @property
    def sizes(self) -> tuple[int, int]:
        """The sizes of the source's and the target's vocabulary if they are learned."""
        return self.size, self.tgt_size or self.size


@dataclass(frozen=True)
class ModelConfig:
    """The dimensions of the Transformer, named as in Table 3 of the paper."""

    # The size of the vector at each position.
    d_model: int = default(512, AT_LEAST_ONE)
    # The inner size of the feed-forward network.
    d_ff: int = default(2048, AT_LEAST_ONE)
    # The number of attention heads.
    n_heads: int = default(8, AT_LEAST_ONE)
    # The number of layers of each stack; the other two override it for one of them.
    n_layers: int = default(6, AT_LEAST_ONE)
    encoder_layers: int | None = default(None, AT_LEAST_ONE)
    decoder_layers: int | None = default(None, AT_LEAST_ONE)
    # The size of a head's keys and of its values; null: d_model / n_heads.
    d_k: int | None = default(None, AT_LEAST_ONE)
    d_v: int | None = default(None, AT_LEAST_ONE)
    # Applied to the output of each sub-layer and to the sum of embeddings and positions.
    dropout: float = default(0.1, FRACTION)
    # Applied to the attention weights, and after the activation of the feed-forward network: not in
    # the paper, but in tensor2tensor since October 2017.
    attention_dropout: float = default(0.0, FRACTION)
    ffn_dropout: float = default(0.0, FRACTION)
    # The function between the two products of the feed-forward network. gelu is the exact form; swish
    # is also called SiLU.
    activation: Literal["relu", "gelu", "swish"] = "relu"
    # Where LayerNorm is: after each sub-layer (post), as in the paper, or before it (pre).
    norm: Literal["post", "pre"] = "post"
    # Sines and cosines (section 3.5), the same with the rates of Marian and the authors' code
    # (docs/recipe.md), or a learned table, added to embeddings; or rotary: self-attention rotates
    # queries and keys by angles that grow with the position (docs/learning.md).
    positions: Literal["sinusoidal", "marian", "learned", "rotary"] = "sinusoidal"
    # The number of rows in the table of learned positions; the other kinds have no limit.
    max_positions: int = default(1024, AT_LEAST_ONE)
    # How many neighbours on each side self-attention can attend to (section 4, "restricted"); null:
    # all.
    window: int | None = default(None, SIZE)
    # Which of the two embeddings and the output projection share one matrix: all three (true; section
    # 3.4), none (false), target embedding and projection (decoder), or both embeddings (embeddings).
    tied: bool | Literal["decoder", "embeddings"] = True
    # Where the factor of section 3.4 is applied: embeddings are multiplied by sqrt(d_model)
    # (embedding), logits are divided by it (projection), or neither (none).
    scale_embeddings: Literal["embedding", "projection", "none"] = "embedding"
    # LayerNorm on the sum of embeddings and positions, before its dropout (fairseq's
    # layernorm_embedding) or after it; null: none.
    embedding_norm: Literal["before_dropout", "after_dropout"] | None = None
    # Whether queries, keys, values and the output of attention have biases. The paper's formulas
    # have none; the authors' code of June 2017 has them.
    attention_bias: bool = False
    # Whether the logits have a bias. The paper's have none; those of Marian's models have one.
    projection_bias: bool = False
    # The number of rows of the embeddings and the projection; null: one for each piece. The
    # authors' code of June 2017 had 40,960. Rows beyond the vocabulary take part in the softmax and
    # in label smoothing, and are never decoded.
    vocab_rows: int | None = default(None, AT_LEAST_ONE)

    def check(self) -> str | None:
        if self.d_model % self.n_heads and (self.d_k is None or self.d_v is None):
            return (
                f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}; "
                "give d_k and d_v"
            )
        if self.d_model % 2 and self.positions in ("sinusoidal", "marian"):
            return f"d_model is {self.d_model}, but sinusoidal positions need an even d_model"
        if self.key_size % 2 and self.positions == "rotary":
            return (
                f"d_k is {self.key_size}, but rotary positions need an even size; give an even d_k"
            )
        return None

    def count_rows(self, vocab_size: int) -> int:
        """Return the number of rows of the embeddings and the projection."""
        if self.vocab_rows is None:
            return vocab_size
        if self.vocab_rows < vocab_size:
            raise UserError(
                f"model.vocab_rows is {self.vocab_rows}, but the vocabulary has {vocab_size} pieces; "
                "give at least one row for each piece"
            )
        return self.vocab_rows

    @property
    def has_shared_embeddings(self) -> bool:
        return self.tied in (True, "embeddings")

    @property
    def has_shared_projection(self) -> bool:
        return self.tied in (True, "decoder")

    @property
    def encoder_depth(self) -> int:
        return self.encoder_layers or self.n_layers

    @property
    def decoder_depth(self) -> int:
        return self.decoder_layers or self.n_layers

    @property
    def key_size(self) -> int:
        return self.d_k or self.d_model // self.n_heads

    @property
    def value_size(self) -> int:
        return self.d_v or self.d_model // self.n_heads


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam, and its learning rate, which rises linearly over the first warmup_steps updates."""

    # How the learning rate depends on the number of the update; paper is the rule of section 5.3. For
    # the formulas, see docs/configuration.md#schedules.
    schedule: Literal["paper", "inverse_sqrt", "cosine", "constant"] = "paper"
    # The number of updates over which the rate rises linearly at first, in all schedules.
    warmup_steps: int = default(4000, AT_LEAST_ONE)
    # Multiplies the rates of the paper schedule; the other schedules do not take it.
    scale: float = default(1.0, POSITIVE)
    # The rate after warm-up: required by every schedule but paper, which refuses it.
    peak_lr: float | None = default(None, POSITIVE)
    # The rate that the cosine schedule ends at.
    final_lr: float = default(0.0, FRACTION)
    # Adam's constants.
    beta1: float = default(0.9, FRACTION)
    beta2: float = default(0.98, FRACTION)
    eps: float = default(1e-9, POSITIVE)
    # AdamW: each update first multiplies the matrices, embeddings included, by
    # 1 - rate * weight_decay. Biases, the weights of LayerNorm and frozen parts do not decay, as with
    # Hugging Face's trainer; with fairseq's AdamW all weights do.
    weight_decay: float = default(0.0, FRACTION)

    def check(self) -> str | None:
        schedule, peak, final = self.schedule, self.peak_lr, self.final_lr
        if schedule == "paper":
            if peak is not None:
                return (
                    f"peak_lr is {peak:g}, but schedule is paper, whose rate comes from scale; "
                    "choose another schedule, or leave peak_lr out"
                )
        elif peak is None:
            return f"schedule is {schedule}, which needs a peak_lr; give one, such as 5e-4"
        elif self.scale != 1:
            return (
                f"scale is {self.scale:g}, but schedule is {schedule}, whose rate comes from "
                "peak_lr; set scale to 1"
            )
        if schedule != "cosine" and final != 0:
            return (
                f"final_lr is {final:g}, but schedule is {schedule}, and only cosine "
                "ends at a given rate; leave final_lr out"
            )
        if peak is not None and final > peak:
            return f"final_lr is {final:g}, more than the peak_lr of {peak:g}; lower it"
        return None

    @property
    def rate_setting(self) -> tuple[str, float]:
        """The name and the value of the setting that every rate is a multiple of."""
        if self.peak_lr is None:
            return "optimizer.scale", self.scale
        return "optimizer.peak_lr", self.peak_lr


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, how large an update is, and what happens along the way."""

    # The number of updates.
    steps: int = default(100_000, AT_LEAST_ONE)
    # End training earlier: after this many validations in a row without a new best, after this many
    # passes over the data, or after this many hours of training, summed over all its starts. The run
    # then counts as done; raise the setting to continue. It ends with a validation and a checkpoint,
    # which nmt-average counts.
    patience: int | None = default(None, SIZE)
    max_epochs: int | None = default(None, SIZE)
    max_hours: float | None = default(None, POSITIVE)
    # A run, an average or a checkpoint whose weights training begins with; null: random weights. Its
    # vocabulary is used too, unless vocab.model says otherwise. The store must have the same pieces in
    # the same order, and may have more at the end, whose embeddings begin as the mean of the others.
    # Data, optimizer, schedule and run folder are new. What it gains:
    # docs/learning.md#what-helps-with-10000-pairs-2026-11-22.
    init_from: str | None = None
    # Parts of the model that keep the weights they began with; embeddings includes the projection,
    # tied or not.
    freeze: tuple[Literal["embeddings", "encoder", "decoder"], ...] = ()
    # The token budget of an update on each side, summed over all ranks.
    src_tokens: int = default(25_000, SIZE)
    tgt_tokens: int = default(25_000, SIZE)
    # Which pairs form an update: pairs of about the same length, as in the paper (section 5.1) and in
    # its configs, with the updates in random order; or random pairs, which learns better on a small
    # corpus (docs/learning.md#does-grouping-by-length-learn-as-well-2026-11-22) and is what we
    # recommend for your own data.
    grouping: Grouping = "random"
    # The maximum number of tokens per side in one forward and backward pass; auto: chosen for
    # speed within the available memory (docs/configuration.md#micro_tokens).
    micro_tokens: int | Literal["auto"] = default("auto", SIZE)
    # The share of the loss that is spread over all other pieces.
    label_smoothing: float = default(0.1, FRACTION)
    # Gradients with a larger norm are scaled down to this norm; null: never.
    clip_norm: float | None = default(None, POSITIVE)
    # The decay, such as 0.999, of an exponential moving average of the weights: after update n it is
    # d * average + (1 - d) * weights, with d = min(ema, (n + 1) / (n + 10)). Validation scores the
    # average, and a checkpoint's model.safetensors holds it, so nmt-translate, nmt-eval, nmt-average,
    # exports and init_from use it; the weights themselves are saved with Adam's moments. It needs a
    # third more memory for weights and moments, and a third more space for checkpoints. null: none.
    ema: float | None = default(None, DECAY)
    # The precision of products and activations; weights, statistics and Adam's moments are always
    # fp32. bf16 is slow on most CPUs, except those with AMX, AMD's AVX512-BF16 or ARM's BF16, and refused
    # on a GPU below compute capability 8.0. auto: bf16 if the machine that the run begins on is fast in it,
    # otherwise fp32; the run keeps the choice.
    precision: Literal["bf16", "fp32", "auto"] = "bf16"
    # auto: on a GPU all micro-batches have one shape and run through torch.compile as one CUDA graph; on a
    # CPU compiling takes a minute and gains nothing. Compiled code is kept in ~/.cache/nmt, so a second
    # start is quick; if that cannot be written, it is kept in a private temporary folder until the process
    # ends. off: uncompiled on a GPU as well.
    compile: Literal["auto", "off"] = "auto"
    # What to do when a loss or gradient is NaN or infinite. The update is never applied, on any rank,
    # and nonfinite-STEP.json in the run folder lists its sentences. stop ends the run with exit code 1;
    # skip continues, but the fourth in a row ends the run.
    on_nonfinite: Literal["stop", "skip"] = "stop"
    # The number of updates between two lines of metrics.jsonl (docs/tracking.md), and between two
    # validations.
    log_every: int = default(100, AT_LEAST_ONE)
    validate_every: int = default(5_000, AT_LEAST_ONE)
    # Save a checkpoint every N updates. nmt-average counts these and the one saved when a run ends;
    # null: it counts all. The paper's ten minutes are 1,500 updates of base and 600 of big, at its
    # speed.
    checkpoint_every: int | None = default(None, AT_LEAST_ONE)
    # Also save one when the last is this many minutes old, so that no more work is lost; null: never. A
    # checkpoint that follows another within a tenth of this time has only weights: it is for averages,
    # and a third as large.
    checkpoint_minutes: float | None = default(10.0, POSITIVE)
    # How many checkpoints to keep: the newest of those that nmt-average counts. The very newest and
    # the best are always kept.
    keep_checkpoints: int = default(20, AT_LEAST_ONE)
    # Where the run is copied to while it trains, and fetched from by a machine that has no copy:
    # s3://bucket/prefix or another URL of fsspec (docs/distributed.md#machines-that-are-taken-away).
    mirror: str | None = None
    # Where else to send the figures of metrics.jsonl: tensorboard, wandb, or a sink that an installed
    # package offers (docs/tracking.md).
    track: tuple[str, ...] = ()

    def is_checkpoint_step(self, step: int) -> bool:
        """Whether a checkpoint of this update is planned, whatever the clock says."""
        is_due = self.checkpoint_every is not None and step % self.checkpoint_every == 0
        return is_due or step == self.steps

    def is_counted(self, step: int) -> bool:
        """Whether averaging counts the checkpoint of this update.

        It does not count those saved between planned ones because of the clock, a stop or a good score.
        """
        return self.checkpoint_every is None or self.is_checkpoint_step(step)

    def check(self) -> str | None:
        if self.mirror is not None and not re.fullmatch(
            r"[a-z][a-z0-9+.-]*://[^@?#]+", self.mirror
        ):
            return (
                f"mirror is {self.mirror!r}; give a URL such as s3://bucket/prefix, without a password, "
                "which belongs in the environment"
            )
        if len(set(self.track)) < len(self.track):
            return "track names a sink twice; leave one of them out"
        if set(self.freeze) == {"embeddings", "encoder", "decoder"}:
            return "freeze names all parts of the model, so nothing would be trained; leave one out"
        return None


@dataclass(frozen=True)
class DecodingConfig:
    """How to search for a translation; the defaults are those of section 6.1."""

    # Which toolkit's search to reproduce: the preset sets beam, penalty, length_penalty, max_ratio,
    # max_extra, min_length, finishing and stopping where they are not given (docs/decoding.md#search).
    # vaswani2017 is the paper's.
    preset: Literal["vaswani2017", "fairseq", "marian", "hf"] = "vaswani2017"
    # Hypotheses per sentence; 1 is greedy.
    beam: int = default(4, BEAM_SIZE)
    # What a log-probability is divided by: gnmt: ((5+|Y|)/6)^alpha, length: |Y|^alpha, none: 1. alpha
    # is length_penalty, and |Y| counts the end mark.
    penalty: Literal["gnmt", "length", "none"] = "gnmt"
    length_penalty: float = default(0.6, ALPHA)
    # An output has at most max_ratio * (source pieces) + max_extra pieces and, if that allows it,
    # at least min_length; the end mark is not counted.
    max_ratio: float = default(1.0, LENGTH_RATIO)
    max_extra: int = default(50, LENGTH)
    min_length: int = default(0, LENGTH)
    # No n pieces in a row occur twice in an output, except in its --prefix; if every next piece would
    # repeat such a sequence, the output ends. null: repeats are allowed.
    no_repeat_ngram: int | None = default(None, SIZE)
    # Which finished hypotheses are accepted, and when the search for a sentence stops; see
    # docs/decoding.md#search.
    finishing: Literal["any", "top", "shrink"] = "any"
    stopping: Literal["exact", "full", "likely", "never"] = "exact"
    # Whether to draw pieces by their probability, instead of searching.
    sample: bool = False
    # Above 1 the distribution becomes flatter, below 1 sharper.
    temperature: float = default(1.0, TEMPERATURE)
    # Sample only from the k most probable pieces (top_k), and only from the smallest set of pieces
    # whose total probability reaches p (top_p).
    top_k: int | None = default(None, SIZE)
    top_p: float = default(1.0, PROBABILITY)
    # The sample for a sentence depends only on this seed and on the sentence.
    seed: int = default(1, RANDOM_SEED)
    # The precision of matrix products; bf16 is twice as fast on hardware that has it.
    precision: Literal["fp32", "bf16"] = "fp32"
    # Whether to search with compiled loops on a CPU. They take a second to load and, once per machine, 20
    # seconds to compile. auto: on in bf16, and in fp32 for models of base's size or larger; the default
    # of nmt-serve and nmt.api.load is on.
    compile: Literal["auto", "on", "off"] = "auto"
    # The longest source in pieces, and what to do with a longer one: cut it with a warning, or
    # refuse it.
    max_source: int = default(1_000, SIZE)
    long_lines: Literal["cut", "refuse"] = "cut"
    # A tag to put in front of every source, such as a training corpus has (docs/data.md#tags). The dev
    # set and the test set have their own.
    tag: str | None = None
    # Whether a line in capitals is translated in lower case, and its translation put in capitals. The
    # default of nmt-translate, nmt-serve and nmt.api.load is true; nmt-eval and validation score lines
    # as they are.
    lower_capitals: bool = False
    # How many source pieces to decode together; null: 4,096 on a CPU, and on a GPU by the size of the
    # model, 65,536 for base (docs/decoding.md#speed). In fp32 it does not change results.
    batch_tokens: int | None = default(None, SIZE)

    PRESETS: ClassVar[dict[str, Values]] = {
        "vaswani2017": {},  # the defaults above
        "fairseq": {
            "beam": 5,
            "penalty": "length",
            "length_penalty": 1.0,
            "max_ratio": 0.0,
            "max_extra": 200,
            "min_length": 1,
            "finishing": "top",
            "stopping": "full",
        },
        "marian": {
            "beam": 6,
            "penalty": "length",
            "length_penalty": 0.6,
            "max_ratio": 3.0,
            "max_extra": 0,
            "min_length": 0,
            "finishing": "shrink",
            "stopping": "never",
        },
        "hf": {
            "beam": 4,
            "penalty": "length",
            "length_penalty": 1.0,
            "max_ratio": 0.0,
            "max_extra": 512,
            "min_length": 0,
            "finishing": "top",
            "stopping": "likely",
        },
    }

    def find_longest(self, n_source: Count) -> Count:
        """Return how many pieces a translation of this many may have, without the end mark."""
        return multiply_exactly(n_source, self.max_ratio) + self.max_extra


# Settings for a user's text, which is not scored beside the paper's, unless the user says otherwise:
# capitals do no harm.
USERS_TEXT = ("decoding.lower_capitals=true",)
# ... and for running text: no sentence vanishes because a weak model gives the end mark the best score.
RUNNING_TEXT = (*USERS_TEXT, "decoding.min_length=1")


@dataclass(frozen=True)
class EvaluationConfig:
    """How the dev set is scored during training."""

    # Whether to translate the dev set at each validation and compute BLEU, in addition to the loss.
    bleu: bool = True
    # How many lines to translate, spread evenly over the set; the signature shows this as
    # lines:300/2027. null: all.
    sentences: int | None = default(None, SIZE)
    # The dev score that decides which checkpoint is the best; chrf is chrF2. If bleu is false, it is
    # the NLL, and so below 2 BLEU, where BLEU is noise.
    best_by: Literal["bleu", "chrf", "nll"] = "bleu"

    def check(self) -> str | None:
        if self.best_by == "chrf" and not self.bleu:
            return (
                "best_by is chrf, but bleu is false, so nothing is translated; change one of them"
            )
        return None


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run."""

    # Names the run folder, unless out is given.
    name: str = "run"
    # Determines the initial weights, the order of batches and dropout.
    seed: int = default(1, RANDOM_SEED)
    # The run folder; runs/NAME unless given. docs/configuration.md#the-run-folder lists what is in it.
    out: str = ""
    # auto: a GPU if there is one, otherwise the CPU; see docs/configuration.md#device.
    device: Literal["auto", "cpu"] = "auto"
    # The license of the weights, as the Hugging Face hub names it: apache-2.0, cc-by-4.0, ... Model
    # cards take it from the checkpoint, so set it before the last checkpoint is saved.
    license: str | None = None
    data: DataConfig = DataConfig()
    vocab: VocabConfig = VocabConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    decoding: DecodingConfig = DecodingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    def check(self) -> str | None:
        return (
            self._check_course()
            or self._check_tags()
            or self._check_embeddings()
            or self._check_positions()
        )

    def _check_course(self) -> str | None:
        patience, steps = self.training.patience, self.training.steps
        if patience is not None and self.data.valid is None:
            return f"training.patience is {patience}, but there is no dev set; give data.valid"
        warmup_steps = self.optimizer.warmup_steps
        if self.optimizer.schedule == "cosine" and warmup_steps >= steps:
            return (
                f"optimizer.warmup_steps is {warmup_steps}, but training.steps is {steps}, so the "
                "cosine would never begin; lower optimizer.warmup_steps"
            )
        return None

    def _check_tags(self) -> str | None:
        """Check that the dev and the test set have tags that the BPE learned here will have."""
        if self.vocab.model is not None or self.training.init_from is not None:
            return None  # data preparation checks against that model
        known = [*self.data.train_tags, *(self.vocab.user_symbols or ())]
        for name, corpus in (("valid", self.data.valid), ("test", self.data.test)):
            tag = corpus and corpus.tag
            if tag is not None and self.data.train and tag not in known:
                return (
                    f"data.{name}.tag is {tag!r}, but no corpus of data.train has this tag; "
                    "use one of theirs, or add it to vocab.user_symbols"
                )
        return None

    def _check_embeddings(self) -> str | None:
        model, vocab = self.model, self.vocab
        sizes = vocab.sizes
        rows, pieces = model.vocab_rows, max(sizes)
        # the size of a given BPE model is not known here
        if rows is not None and vocab.model is None and rows < pieces:
            key = "vocab.size" if sizes[0] == pieces else "vocab.tgt_size"
            return (
                f"model.vocab_rows is {rows}, but {key} is {pieces}; "
                "give at least one row for each piece"
            )
        if model.has_shared_embeddings and not vocab.joint:
            return (
                f"model.tied is {model.tied}, but with vocab.joint=false each language has its own embeddings; "
                "set model.tied=decoder or false"
            )
        return None

    def _check_positions(self) -> str | None:
        rows, longest = self.model.max_positions, self.data.clean.max_pieces
        if self.model.positions == "learned" and (longest is None or longest >= rows):
            return (
                f"model.max_positions {rows} is too small for learned positions: data.clean.max_pieces "
                f"is {longest}, plus the end mark; raise max_positions or lower max_pieces"
            )
        return None

    @property
    def folder(self) -> Path:
        return Path(self.out or f"runs/{self.name}")

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(self.folder)

    @property
    def dev_decoding(self) -> DecodingConfig:
        """How the dev set is translated: with its own tag."""
        tag = self.data.valid.tag if self.data.valid is not None else None
        return dataclasses.replace(self.decoding, tag=tag)


# Settings of decoding that change no translation, or only by others
SILENT_SETTINGS = ("preset", "compile", "batch_tokens")
# Settings that only name places or fit the work to the machine
MACHINE_KEYS = (
    "name",
    "out",
    "license",
    "device",
    "data.root",
    "data.workers",
    "data.store",
    "training.micro_tokens",
    "training.compile",
    "training.log_every",
)
# Settings that say when a training ends and what it saves, and change no update before that
COURSE_KEYS = (
    "training.steps",
    "training.patience",
    "training.max_epochs",
    "training.max_hours",
    "training.on_nonfinite",
    "training.validate_every",
    "training.checkpoint_every",
    "training.checkpoint_minutes",
    "training.keep_checkpoints",
    "training.mirror",
    "training.track",
)
# Settings that may change when a run is resumed; changing any other would make it a different run.
CHANGEABLE_KEYS = (
    *MACHINE_KEYS,
    *COURSE_KEYS,
    "data.test",
    "decoding",
    "evaluation.sentences",
)
