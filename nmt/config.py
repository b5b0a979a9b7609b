"""The configuration: one frozen dataclass for each section of the YAML file, nested in `RunConfig`.

Later ones win: the defaults below, the file that `extends` names, the file itself, `section.key=value` on the command
line. Unknown keys, wrong types and values out of range are refused by file:line, key and value, with a remedy. A config
speaks of the update and not of the machine: it counts tokens per update, never sentences per GPU. Where the paper
leaves no choice, the default is its base model's.
"""

import copy
import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from nmt.system.errors import UserError
from nmt.system.records import RecordReader, Rule, default
from nmt.system.strict_yaml import YamlTree, format_yaml, parse_yaml

MAX_CONFIG_BYTES = 1 << 20
CORPUS_FILES = {"src", "tgt"}
CORPUS_SOURCES = CORPUS_FILES | {"file", "dataset", "sacrebleu", "demo"}

# What values must be; a key that is null or a word has no rule to keep.
POSITIVE = Rule(lambda x: x > 0, "be positive")
AT_LEAST_ONE = Rule(lambda x: x >= 1, "be at least 1")
FRACTION = Rule(lambda x: 0 <= x < 1, "be in [0, 1)")
PROBABILITY = Rule(lambda x: 0 < x <= 1, "be in (0, 1]")
BEAM_SIZE = Rule(lambda x: 1 <= x <= 1_000, "be between 1 and 1000")
ALPHA = Rule(lambda x: 0 <= x <= 10, "be between 0 and 10")
LENGTH = Rule(lambda x: 0 <= x <= 10_000, "be between 0 and 10000")
LENGTH_RATIO = Rule(lambda x: 0 <= x <= 100, "be between 0 and 100")
TEMPERATURE = Rule(lambda x: 0.01 <= x <= 100, "be between 0.01 and 100")
COVERAGE = Rule(lambda x: 0.98 <= x <= 1, "be between 0.98 and 1")
VOCAB_SIZE = Rule(
    lambda x: 16 <= x <= 65_535, "be between 16 and 65535, because ids are stored in 16 bits"
)
RANDOM_SEED = Rule(lambda x: 0 <= x < 2**31, "be in [0, 2^31)")


@dataclass(frozen=True)
class CorpusConfig:
    """Where sentence pairs come from: two files, one file, a dataset, a known test set, or the demo."""

    # Two files with one sentence a line; .gz, .xz and .zst are unpacked while they are read.
    src: str | None = None
    tgt: str | None = None
    # The .tgz, .tar.gz or .tar that src and tgt are members of.
    archive: str | None = None
    # One file with both sides: .tsv (source, tab, target), .jsonl or .parquet.
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
    # How many times each pair is trained on in an epoch.
    repeat: int = default(1, AT_LEAST_ONE)

    def check(self) -> str | None:
        kinds = [self.src or self.tgt, self.file, self.dataset, self.sacrebleu, self.demo]
        if sum(kind is not None for kind in kinds) != 1:
            return "needs exactly one of {src, tgt}, file, dataset, sacrebleu, demo"
        if (self.src is None) != (self.tgt is None):
            return "needs both src and tgt"
        if self.src is not None and self.src == self.tgt:
            return f"src and tgt are both {self.src!r}"
        if self.archive is not None and self.src is None:
            return "archive needs src and tgt, the names of two of its members"
        return None


@dataclass(frozen=True)
class CleanConfig:
    """Which pairs are kept out of training; null switches a rule off. A pair with an empty side is always dropped."""

    # Values for the keys below that are not given: the paper's En-De as its authors trained on it (at most 256 pieces
    # with the end mark), and its En-Fr, the usual cut of 40.8M pairs to 36M.
    preset: Literal["none", "paper-ende", "paper-enfr"] | None = None
    # Whether to drop pairs whose sides are the same text.
    identical: bool = False
    # The longest side that is kept, in words.
    max_words: int | None = default(250, AT_LEAST_ONE)
    # The largest ratio of the longer to the shorter side that is kept, in words.
    max_ratio: float | None = default(None, AT_LEAST_ONE)
    # What becomes of training pairs that a dev or test set has too: drop where both sides agree, or either.
    held_out: Literal["keep", "drop-pairs", "drop-sides"] = "keep"
    # Whether to drop all but the first of equal pairs, over all corpora.
    duplicates: bool = False
    # The longest side that is kept, in pieces of the vocabulary.
    max_pieces: int | None = default(250, AT_LEAST_ONE)

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "none": {"max_words": None, "max_ratio": None, "max_pieces": None},
        "paper-ende": {"max_words": None, "max_ratio": None, "max_pieces": 255},
        "paper-enfr": {"max_words": 175, "max_ratio": 1.5, "max_pieces": 255},
    }


@dataclass(frozen=True)
class DataConfig:
    """The corpora, and how they become a token store."""

    # The languages, also the names of the columns of tables.
    src: str = "en"
    tgt: str = "de"
    # The folder that relative paths of corpora start from.
    root: str = "."
    # The folder for the prepared data.
    store: str = "data/store"
    # Processes that prepare it; the result does not depend on their number.
    workers: int = default(2, AT_LEAST_ONE)
    train: tuple[CorpusConfig, ...] = ()
    valid: CorpusConfig | None = None
    test: CorpusConfig | None = None
    # Whether to stop at a line that cannot be read, or to drop its pair and count it.
    on_bad_line: Literal["stop", "skip"] = "stop"
    clean: CleanConfig = CleanConfig()

    def check(self) -> str | None:
        return f"src and tgt are both {self.src!r}" if self.src == self.tgt else None


@dataclass(frozen=True)
class VocabConfig:
    """The joint BPE vocabulary of both languages."""

    # Pieces, the four marks included.
    size: int = default(37_000, VOCAB_SIZE)
    # The share of all characters in the text that the pieces must be able to write.
    character_coverage: float = default(1.0, COVERAGE)
    # The most lines that BPE is learned from.
    sample_sentences: int = default(2_000_000, AT_LEAST_ONE)
    # Whether unknown characters are written as bytes, instead of as <unk>.
    byte_fallback: bool = False
    # An existing SentencePiece model, to be used instead of learning one; it decides the size.
    model: str | None = None
    # The probability that BPE leaves a merge out, drawn anew in each epoch (Provilkov et al. 2020).
    bpe_dropout: float = default(0.0, FRACTION)


@dataclass(frozen=True)
class ModelConfig:
    """The Transformer, in the letters of the paper's Table 3."""

    d_model: int = default(512, AT_LEAST_ONE)
    d_ff: int = default(2048, AT_LEAST_ONE)
    n_heads: int = default(8, AT_LEAST_ONE)
    n_layers: int = default(6, AT_LEAST_ONE)
    # The size of a head's keys and of its values; d_model / n_heads unless given.
    d_k: int | None = default(None, AT_LEAST_ONE)
    d_v: int | None = default(None, AT_LEAST_ONE)
    # On the output of each sub-layer, and on embeddings plus positions.
    dropout: float = default(0.1, FRACTION)
    # LayerNorm after each sub-layer, as in the paper, or before it.
    norm: Literal["post", "pre"] = "post"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    # Rows of the table of learned positions; sinusoids have no end.
    max_positions: int = default(1024, AT_LEAST_ONE)
    # How many neighbours to each side self-attention sees (section 4, "restricted"); null: all.
    window: int | None = default(None, AT_LEAST_ONE)
    # Whether both embeddings and the output projection are one matrix (section 3.4).
    tied: bool = True

    def check(self) -> str | None:
        if self.d_model % self.n_heads and (self.d_k is None or self.d_v is None):
            return (
                f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}; "
                "give d_k and d_v"
            )
        if self.d_model % 2 and self.positions == "sinusoidal":
            return f"d_model is {self.d_model}; sinusoidal positions need an even one"
        return None

    @property
    def key_size(self) -> int:
        return self.d_k or self.d_model // self.n_heads

    @property
    def value_size(self) -> int:
        return self.d_v or self.d_model // self.n_heads


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam, with the learning rate scale * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5) (section 5.3)."""

    warmup_steps: int = default(4000, AT_LEAST_ONE)
    scale: float = default(1.0, POSITIVE)
    beta1: float = default(0.9, FRACTION)
    beta2: float = default(0.98, FRACTION)
    eps: float = default(1e-9, POSITIVE)


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, how much goes into an update, and what is done on the way."""

    # Updates.
    steps: int = default(100_000, AT_LEAST_ONE)
    # Tokens of one update, over all ranks.
    src_tokens: int = default(25_000, AT_LEAST_ONE)
    tgt_tokens: int = default(25_000, AT_LEAST_ONE)
    # The most tokens of each side in one forward and backward pass; auto: as many as
    # are fast and fit (nmt/train/memory_probe.py).
    micro_tokens: int | Literal["auto"] = default("auto", AT_LEAST_ONE)
    label_smoothing: float = default(0.1, FRACTION)
    # Of activations; weights, statistics and Adam's moments are always fp32.
    precision: Literal["bf16", "fp32"] = "bf16"
    # torch.compile and CUDA graphs, which constant shapes make possible; auto: on a GPU.
    compile: Literal["auto", "on", "off"] = "auto"
    # Whether each rank holds only a share of weights, gradients and moments (FSDP2), for models that do not fit.
    shard: bool = False
    # What to do when a loss or gradient is NaN or infinite; skip tolerates three such updates in a row.
    on_nonfinite: Literal["stop", "skip"] = "stop"
    # In updates.
    log_every: int = default(100, AT_LEAST_ONE)
    validate_every: int = default(5_000, AT_LEAST_ONE)
    # A checkpoint is saved every so many updates, every so many minutes (the paper's way), or both.
    checkpoint_every: int | None = default(None, AT_LEAST_ONE)
    checkpoint_minutes: float | None = default(10.0, POSITIVE)
    # How many of the newest checkpoints are kept, beside the best one.
    keep_checkpoints: int = default(20, AT_LEAST_ONE)

    def check(self) -> str | None:
        if self.shard and self.compile == "on":
            return "compile is on and shard is true, but sharded models are not compiled; drop one"
        return None


@dataclass(frozen=True)
class DecodingConfig:
    """The search for a translation, by default as in section 6.1."""

    # Whose search this is: the preset sets the next eight keys, but for those that are given.
    preset: Literal["vaswani2017", "fairseq", "marian", "hf"] = "vaswani2017"
    beam: int = default(4, BEAM_SIZE)
    # What a log-probability is divided by: ((5+|Y|)/6)^alpha, |Y|^alpha, or 1; |Y| counts the end mark.
    penalty: Literal["gnmt", "length", "none"] = "gnmt"
    length_penalty: float = default(0.6, ALPHA)
    # An output has at most max_ratio * source + max_extra pieces, and within that at least min_length;
    # the end mark is not counted.
    max_ratio: float = default(1.0, LENGTH_RATIO)
    max_extra: int = default(50, LENGTH)
    min_length: int = default(0, LENGTH)
    # Which hypotheses that end are accepted, and when a sentence is finished; see nmt/translate/search.py.
    finishing: Literal["any", "top", "shrink"] = "any"
    stopping: Literal["exact", "full", "likely", "never"] = "exact"
    # Whether to draw pieces by their probability, instead of searching.
    sample: bool = False
    # Above 1 draws more evenly, below 1 favours the probable pieces.
    temperature: float = default(1.0, TEMPERATURE)
    # Draw only from the k most probable pieces, and from the fewest that together have probability p.
    top_k: int | None = default(None, AT_LEAST_ONE)
    top_p: float = default(1.0, PROBABILITY)
    # What is drawn for a sentence depends on this and on the sentence alone.
    seed: int = default(1, RANDOM_SEED)
    # Of matrix products; bf16 is twice as fast where the hardware has it.
    precision: Literal["fp32", "bf16"] = "fp32"
    # The longest source in pieces, and what becomes of a longer one, with a warning.
    max_source: int = default(1_000, AT_LEAST_ONE)
    long_lines: Literal["cut", "split", "refuse"] = "cut"
    # Source pieces that are decoded together; null: 4,096 on a CPU, on a GPU as many as its memory holds.
    batch_tokens: int | None = default(None, AT_LEAST_ONE)

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "vaswani2017": {
            "beam": 4,
            "penalty": "gnmt",
            "length_penalty": 0.6,
            "max_ratio": 1.0,
            "max_extra": 50,
            "min_length": 0,
            "finishing": "any",
            "stopping": "exact",
        },
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


@dataclass(frozen=True)
class EvaluationConfig:
    """How the dev set is scored during training."""

    # Whether to translate it and compute BLEU, beside the loss.
    bleu: bool = True
    # Translate only the first lines; null: all.
    sentences: int | None = default(None, AT_LEAST_ONE)


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run. Only the commands and the trainer see it whole."""

    name: str = "run"
    # Weights, the order of batches and dropout follow from it.
    seed: int = default(1, RANDOM_SEED)
    # The run folder; runs/NAME unless given.
    out: str = ""
    # auto: a GPU if there is one; see nmt/system/device.py.
    device: Literal["auto", "cpu"] = "auto"
    data: DataConfig = DataConfig()
    vocab: VocabConfig = VocabConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    decoding: DecodingConfig = DecodingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    def check(self) -> str | None:
        if self.model.positions == "sinusoidal":
            return None
        rows = self.model.max_positions
        longest = self.data.clean.max_pieces
        if longest is None or longest + 1 > rows:
            return (
                f"model.max_positions {rows} is too small for learned positions: training sentences "
                f"have up to {longest or 'any number of'} pieces (data.clean.max_pieces) and a mark"
            )
        return None

    @property
    def folder(self) -> Path:
        return Path(self.out or f"runs/{self.name}")


# The settings that may change when a run continues; with any other changed it would be another run.
FREE_KEYS = (
    "name",
    "out",
    "device",
    "data.root",
    "data.workers",
    "data.store",
    "data.test",
    "training.steps",
    "training.micro_tokens",
    "training.compile",
    "training.shard",
    "training.on_nonfinite",
    "training.log_every",
    "training.validate_every",
    "training.checkpoint_every",
    "training.checkpoint_minutes",
    "training.keep_checkpoints",
    "decoding",
    "evaluation.sentences",
)

# Keys that are gone. Older runs wrote them down; they are read as long as they say what holds today.
RETIRED: dict[str, object] = {"model.attention_bias": False}
PRESETS = {"data.clean": CleanConfig.PRESETS, "decoding": DecodingConfig.PRESETS}


# ---- files -> values ---------------------------------------------------------------------------------------------


def find_shipped_configs() -> Path:
    """The folder of the shipped configs: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_config(name: str, beside: Path | None = None) -> Path:
    """A path is taken as it is; a bare name that is not there is looked up among the shipped configs."""
    is_relative = not Path(name).is_absolute()
    path = beside / name if beside and is_relative else Path(name)
    if os.path.isfile(path):  # Path.is_file would raise where the name is too long
        return path
    shipped = find_shipped_configs()
    is_bare = Path(name).name == name
    if is_bare and os.path.isfile(shipped / name):
        return shipped / name
    names = ", ".join(sorted(p.name for p in shipped.glob("*.yaml")))
    what = "is a folder" if os.path.isdir(path) else "not found"
    raise UserError(
        f"{path}: {what}; give a path to a YAML file or one of the shipped configs: {names}"
    )


def _read_file(path: Path, seen: tuple[Path, ...] = ()) -> YamlTree:
    """The values of a file laid over those of the file that it extends; `seen` led here."""
    if path.resolve() in seen:
        circle = " -> ".join(p.name for p in (*seen, path))
        raise UserError(f"{path}: 'extends' goes in a circle: {circle}")
    source = parse_yaml(_read_text(path), str(path))
    parent = source.values.pop("extends", None)
    if parent is None:
        return source
    if not isinstance(parent, str) or not parent.isprintable():
        raise UserError(f"{source.places['extends']}: extends: {parent!r} is not a file name")
    base = _read_file(find_config(parent, beside=path.parent), (*seen, path.resolve()))
    return YamlTree(_merge(base.values, source.values), base.places | source.places)


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not valid UTF-8 at byte {error.start}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise UserError(f"{path}: {len(data)} bytes are too many for a config")
    return text


def _merge(base: dict[str, Any], over: dict[str, Any], section: str = "") -> dict[str, Any]:
    """`over` laid over `base`, key by key."""
    result = dict(base)
    if section == "decoding":
        # A preset takes the place of all that it sets, also of what the base gave.
        for name in DecodingConfig.PRESETS.get(str(over.get("preset")), {}):
            result.pop(name, None)
    for name, value in over.items():
        key = f"{section}.{name}" if section else name
        old = result.get(name)
        if not isinstance(old, dict) or not isinstance(value, dict):
            result[name] = value
        elif key in ("data.valid", "data.test") and _is_another_corpus(old, value):
            result[name] = value
        else:
            result[name] = _merge(old, value, key)
    return result


def _is_another_corpus(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether `new` says where its pairs come from: {demo: x} laid over {src: y} would be neither. One of two files
    can be exchanged alone."""
    if CORPUS_SOURCES.isdisjoint(new):
        return False
    is_one_file = len(CORPUS_FILES & new.keys()) == 1
    return not (is_one_file and "src" in old)


def _override(source: YamlTree, text: str) -> YamlTree:
    """`source` with one `section.key=value` laid over it."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)*", key):
        raise UserError(
            f"{text!r} is not of the form section.key=value (for example training.steps=1000)"
        )
    written = f"{{value: {value}}}" if value.strip() else "value: ''"
    parsed = parse_yaml(written, f"command line, {key}")
    if set(parsed.values) != {"value"}:
        raise UserError(f"{text!r}: quote the value: {key}='\"...\"'")
    tree: Any = parsed.values["value"]
    for part in reversed(key.split(".")):
        tree = {part: tree}
    inner_keys = [inner.removeprefix("value") for inner in parsed.places if inner]
    places = {key + inner: "command line" for inner in inner_keys}
    return YamlTree(_merge(source.values, tree), source.places | places)


# ---- values -> dataclasses --------------------------------------------------------------------------------------


def load_config(name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The config file `name` with `section.key=value` overrides applied, checked."""
    return _build_config(_read_file(find_config(name)), overrides)


def override_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """`config` with overrides applied: what nmt-eval does to the config of a checkpoint."""
    return _build_config(YamlTree(to_plain_values(config)), overrides)


def parse_device(overrides: Sequence[str]) -> Literal["auto", "cpu"]:
    """The device that the command line asks for. The one in a checkpoint was for the machine that trained it."""
    asked = [text for text in overrides if text.startswith("device=")]
    return override_config(RunConfig(), asked).device


def _build_config(source: YamlTree, overrides: Sequence[str]) -> RunConfig:
    for text in overrides:
        source = _override(source, text)
    values = copy.deepcopy(source.values)
    _drop_retired_keys(values, source)
    _fill_in_presets(values)
    return RecordReader(source.name_place).read(RunConfig, values)


def _drop_retired_keys(values: dict[str, Any], source: YamlTree) -> None:
    for key, kept in RETIRED.items():
        section_key, _, name = key.rpartition(".")
        section = _find_section(values, section_key)
        if name not in section:
            continue
        if section[name] is not kept:
            raise UserError(
                f"{source.name_place(key)}: this key is gone; only {kept!r} is still read, "
                f"not {section[name]!r}"
            )
        del section[name]


def _fill_in_presets(values: dict[str, Any]) -> None:
    """Give each section with a preset the settings that it names, except for those that are given."""
    for key, presets in PRESETS.items():
        section = _find_section(values, key)
        for name, value in presets.get(str(section.get("preset")), {}).items():
            section.setdefault(name, value)


def _find_section(values: Any, key: str) -> dict[str, Any]:
    """The section by its dotted key; an empty one where there is none."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


# ---- dataclasses -> text ----------------------------------------------------------------------------------------


def to_plain_values(config: Any) -> Any:
    """Dictionaries, lists and scalars, as YAML has them; a corpus shows only what was given."""
    if isinstance(config, CorpusConfig):
        unset = vars(CorpusConfig())
        return {name: value for name, value in vars(config).items() if value != unset[name]}
    if dataclasses.is_dataclass(config):
        return {name: to_plain_values(value) for name, value in vars(config).items()}
    if isinstance(config, tuple):
        return [to_plain_values(item) for item in config]
    return config


def format_config(config: RunConfig) -> str:
    """YAML that `load_config` reads back to an equal config."""
    return format_yaml(to_plain_values(config))


def list_differences(
    old: RunConfig, new: RunConfig, free: tuple[str, ...] = FREE_KEYS
) -> list[str]:
    """A line `key: old -> new` for each setting that differs and is not in `free`."""
    before = _flatten(to_plain_values(old))
    after = _flatten(to_plain_values(new))
    lines = []
    for key in before | after:
        is_free = any(key == other or key.startswith(f"{other}.") for other in free)
        if not is_free and before.get(key) != after.get(key):
            lines.append(f"{key}: {before.get(key)} -> {after.get(key)}")
    return lines


def _flatten(values: dict[str, Any], section: str = "") -> dict[str, Any]:
    """The settings by their dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{section}.{name}" if section else name
        flat |= _flatten(value, key) if isinstance(value, dict) else {key: value}
    return flat
