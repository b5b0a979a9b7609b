"""The configuration: one frozen dataclass for each room, nested in `RunConfig`, which only commands and trainer see.

Order of authority: defaults < `extends` < file < `section.key=value`. YAML is read strictly (numbers such as 1e-9 are
numbers; duplicate keys, aliases and objects are refused) and every complaint names file:line, key, value and remedy.
The config speaks of the update, not of the machine: tokens per update, never sentences per GPU.
"""

import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nmt.system.errors import UserError
from nmt.system.strict_yaml import Source, format_yaml, parse_yaml

FILES = {"src", "tgt"}
SOURCES = FILES | {"file", "dataset", "sacrebleu", "demo"}  # what says where a corpus comes from
MAX_CONFIG_BYTES = 1 << 20
UNITS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
Value = typing.TypeVar("Value")


@dataclass(frozen=True)
class Rule:
    """What must hold for a value; `words` completes `it must ...`."""

    holds: Callable[[float], bool]
    words: str


POSITIVE = Rule(lambda x: x > 0, "be positive")
NOT_NEGATIVE = Rule(lambda x: x >= 0, "not be negative")
ONE_OR_MORE = Rule(lambda x: x >= 1, "be at least 1")
BEAM = Rule(lambda x: 1 <= x <= 1_000, "lie between 1 and 1000")
ALPHA = Rule(lambda x: 0 <= x <= 10, "lie between 0 and 10")
LENGTHS = Rule(lambda x: 0 <= x <= 10_000, "lie between 0 and 10000")
RATIO = Rule(lambda x: 0 <= x <= 100, "lie between 0 and 100")
HEAT = Rule(lambda x: 0.01 <= x <= 100, "lie between 0.01 and 100")
PROBABILITY = Rule(lambda x: 0 < x <= 1, "lie in (0, 1]")
SHARE = Rule(lambda x: 0 <= x < 1, "lie in [0, 1)")
SIXTEEN_BITS = Rule(
    lambda x: 16 <= x <= 65_535, "lie between 16 and 65535, for ids are stored in 16 bits"
)
COVERAGE = Rule(lambda x: 0.98 <= x <= 1, "lie between 0.98 and 1")
SEED = Rule(lambda x: 0 <= x < 2**31, "lie in [0, 2^31)")


def ruled(default: Value, rule: Rule) -> Value:
    """The default of a field, and the rule for its values other than null."""
    return field(default=default, metadata={"rule": rule})


@dataclass(frozen=True)
class CorpusConfig:
    """Where sentence pairs come from: exactly one of two files, one file, a dataset, a known test set, the demo."""

    src: str | None = (
        None  # a file of the source language; `.gz`, `.xz` and `.zst` are unpacked on the way
    )
    tgt: str | None = None
    archive: str | None = (
        None  # a `.tgz`, `.tar.gz` or `.tar`; src and tgt are then names of members of it
    )
    file: str | None = None  # .tsv (source, tab, target), .jsonl or .parquet
    dataset: str | None = None  # Hugging Face id, or a folder in the hub's layout
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    sacrebleu: str | None = None  # a test set that sacreBLEU knows, such as wmt14/full
    demo: Literal["train", "valid", "test"] | None = None  # the embedded corpus
    repeat: int = ruled(1, ONE_OR_MORE)

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
    """What may not enter training; `null` switches a rule off. A pair with an empty side never enters.

    A preset fills in what is not given: the paper's En-De as its authors trained on it, at most 256 pieces with the
    end mark, and its En-Fr, the usual cut of 40.8M pairs to 36M.
    """

    preset: Literal["none", "paper-ende", "paper-enfr"] | None = None
    identical: bool = False  # drop pairs whose sides are the same text
    max_words: int | None = ruled(250, ONE_OR_MORE)
    max_ratio: float | None = ruled(None, ONE_OR_MORE)  # longer side / shorter side, in words
    held_out: Literal["keep", "drop-pairs", "drop-sides"] = (
        "keep"  # what the dev and test sets contain too
    )
    duplicates: bool = False  # drop all but the first of equal pairs, over all corpora
    max_pieces: int | None = ruled(250, ONE_OR_MORE)  # after BPE, either side

    PRESETS: typing.ClassVar[dict[str, dict[str, Any]]] = {
        "none": {"max_words": None, "max_ratio": None, "max_pieces": None},
        "paper-ende": {"max_words": None, "max_ratio": None, "max_pieces": 255},
        "paper-enfr": {"max_words": 175, "max_ratio": 1.5, "max_pieces": 255},
    }


@dataclass(frozen=True)
class DataConfig:
    src: str = "en"
    tgt: str = "de"
    root: str = "."  # what relative paths of corpora start from
    store: str = "data/store"  # where the prepared data goes
    workers: int = ruled(2, ONE_OR_MORE)
    train: tuple[CorpusConfig, ...] = ()
    valid: CorpusConfig | None = None
    test: CorpusConfig | None = None
    on_bad_line: Literal["stop", "skip"] = (
        "stop"  # at what cannot be read, or drop the pair and count it
    )
    clean: CleanConfig = CleanConfig()

    def check(self) -> str | None:
        return f"src and tgt are both {self.src!r}" if self.src == self.tgt else None


@dataclass(frozen=True)
class VocabConfig:
    size: int = ruled(37_000, SIXTEEN_BITS)
    character_coverage: float = ruled(1.0, COVERAGE)
    sample_sentences: int = ruled(2_000_000, ONE_OR_MORE)  # at most so many lines teach the BPE
    byte_fallback: bool = False  # write unknown characters as bytes instead of <unk>
    model: str | None = (
        None  # an existing SentencePiece model instead of learning one; size then follows from it
    )
    bpe_dropout: float = ruled(
        0.0, SHARE
    )  # segmentations drawn anew in each epoch (Provilkov et al. 2020)


@dataclass(frozen=True)
class ModelConfig:
    """The paper's letters (Table 3). `d_k` and `d_v` follow from d_model / n_heads unless given."""

    d_model: int = ruled(512, ONE_OR_MORE)
    d_ff: int = ruled(2048, ONE_OR_MORE)
    n_heads: int = ruled(8, ONE_OR_MORE)
    n_layers: int = ruled(6, ONE_OR_MORE)
    d_k: int | None = ruled(None, ONE_OR_MORE)
    d_v: int | None = ruled(None, ONE_OR_MORE)
    dropout: float = ruled(0.1, SHARE)
    norm: Literal["post", "pre"] = "post"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    max_positions: int = ruled(1024, ONE_OR_MORE)  # rows of a learned table; sinusoids have no end
    window: int | None = ruled(
        None, ONE_OR_MORE
    )  # restricted self-attention (section 4): neighbours to each side
    tied: bool = True  # one matrix for both embeddings and the projection

    def check(self) -> str | None:
        if self.d_model % self.n_heads and (self.d_k is None or self.d_v is None):
            return f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}; give d_k and d_v"
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
    """Adam with the paper's schedule: scale * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)."""

    warmup_steps: int = ruled(4000, ONE_OR_MORE)
    scale: float = ruled(1.0, POSITIVE)
    beta1: float = ruled(0.9, SHARE)
    beta2: float = ruled(0.98, SHARE)
    eps: float = ruled(1e-9, POSITIVE)


@dataclass(frozen=True)
class TrainingConfig:
    steps: int = ruled(100_000, ONE_OR_MORE)  # updates
    src_tokens: int = ruled(25_000, ONE_OR_MORE)  # per update, over all ranks
    tgt_tokens: int = ruled(25_000, ONE_OR_MORE)
    micro_tokens: int | Literal["auto"] = ruled(
        "auto", ONE_OR_MORE
    )  # at most, of each side, in one pass; auto: see nmt/train/memory_probe.py
    label_smoothing: float = ruled(0.1, SHARE)
    precision: Literal["bf16", "fp32"] = "bf16"
    compile: Literal["auto", "on", "off"] = (
        "auto"  # constant shapes, fused and captured code; auto: on a GPU
    )
    shard: bool = False  # weights, gradients and moments in shares over the ranks, for models that do not fit (FSDP2)
    on_nonfinite: Literal["stop", "skip"] = (
        "stop"  # a loss or gradient that is no number; skip: three in a row at most
    )
    log_every: int = ruled(100, ONE_OR_MORE)  # updates
    validate_every: int = ruled(5_000, ONE_OR_MORE)
    checkpoint_every: int | None = ruled(None, ONE_OR_MORE)  # updates; and/or
    checkpoint_minutes: float | None = ruled(10.0, POSITIVE)  # the paper's clock
    keep_checkpoints: int = ruled(20, ONE_OR_MORE)  # the newest so many, and the best

    def check(self) -> str | None:
        is_both = self.shard and self.compile == "on"
        return (
            "compile is on and shard is true, but shares are not compiled; give one of them up"
            if is_both
            else None
        )


@dataclass(frozen=True)
class DecodingConfig:
    """Search, by default as in section 6.1. A preset sets the first eight of these keys; what stands beside it wins.

    `gnmt` divides a log-probability by ((5+|Y|)/6)^alpha, `length` by |Y|^alpha, `none` by 1; |Y| counts eos.
    """

    preset: Literal["vaswani2017", "fairseq", "marian", "hf"] = "vaswani2017"
    beam: int = ruled(4, BEAM)
    penalty: Literal["gnmt", "length", "none"] = "gnmt"
    length_penalty: float = ruled(0.6, ALPHA)  # alpha
    max_ratio: float = ruled(
        1.0, RATIO
    )  # at most max_ratio * source + max_extra pieces, eos not counted
    max_extra: int = ruled(50, LENGTHS)
    min_length: int = ruled(0, LENGTHS)  # and at least so many, where those allow it
    finishing: Literal["any", "top", "shrink"] = (
        "any"  # which ended continuations count; see nmt/translate/search.py
    )
    stopping: Literal["exact", "full", "likely", "never"] = "exact"  # when a sentence is done
    sample: bool = False  # draw pieces by their probability instead of searching
    temperature: float = ruled(1.0, HEAT)  # of sampling: above 1 flatter, below 1 sharper
    top_k: int | None = ruled(None, ONE_OR_MORE)  # sample among the most probable so many pieces
    top_p: float = ruled(
        1.0, PROBABILITY
    )  # and among the fewest that hold so much of the probability
    seed: int = ruled(
        1, SEED
    )  # of sampling; what is drawn for a sentence depends on it and on the sentence alone
    precision: Literal["fp32", "bf16"] = (
        "fp32"  # bf16: of products; twice as fast where the hardware has it
    )
    max_source: int = ruled(1_000, ONE_OR_MORE)  # pieces
    long_lines: Literal["cut", "split", "refuse"] = (
        "cut"  # what becomes of a longer source, with a word about it
    )
    # Source pieces decoded together. None: 4,096 on CPU, on a GPU as many as its memory holds.
    batch_tokens: int | None = ruled(None, ONE_OR_MORE)

    PRESETS: typing.ClassVar[dict[str, dict[str, Any]]] = {
        name: dict(
            zip(
                (
                    "beam",
                    "penalty",
                    "length_penalty",
                    "max_ratio",
                    "max_extra",
                    "min_length",
                    "finishing",
                    "stopping",
                ),
                values,
                strict=True,
            )
        )
        for name, values in {
            "vaswani2017": (4, "gnmt", 0.6, 1.0, 50, 0, "any", "exact"),
            "fairseq": (5, "length", 1.0, 0.0, 200, 1, "top", "full"),
            "marian": (6, "length", 0.6, 3.0, 0, 0, "shrink", "never"),
            "hf": (4, "length", 1.0, 0.0, 512, 0, "top", "likely"),
        }.items()
    }


@dataclass(frozen=True)
class EvaluationConfig:
    bleu: bool = True  # decode the dev set at each validation
    sentences: int | None = ruled(
        None, ONE_OR_MORE
    )  # only the first so many lines of the dev set, for its BLEU


@dataclass(frozen=True)
class RunConfig:
    name: str = "run"
    seed: int = ruled(1, SEED)
    out: str = ""  # the run folder; runs/NAME unless given
    device: Literal["auto", "cpu"] = "auto"  # auto: a GPU if there is one; see nmt/system/device.py
    data: DataConfig = DataConfig()
    vocab: VocabConfig = VocabConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    decoding: DecodingConfig = DecodingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    def check(self) -> str | None:
        model, longest = self.model, self.data.clean.max_pieces
        if model.positions == "learned" and (longest is None or longest + 1 > model.max_positions):
            return (
                f"model.max_positions {model.max_positions} is too small for learned positions: training sentences "
                f"have up to {longest or 'any number of'} pieces (data.clean.max_pieces) and a mark"
            )
        return None

    @property
    def folder(self) -> Path:
        return Path(self.out or f"runs/{self.name}")


# What may change between two sittings of one run without making it another run. Everything else is refused.
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


# Keys that are gone. Older runs wrote them down, and are read where the value is what there is now.
RETIRED: dict[str, object] = {"model.attention_bias": False}


# ---- files -> values ---------------------------------------------------------------------------------------------


def shipped_folder() -> Path:
    """Where the shipped configs lie: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_config(name: str, beside: Path | None = None) -> Path:
    """A path is taken as it is; a bare name that is not there is looked up among the shipped configs."""
    path = (beside / name) if beside and not Path(name).is_absolute() else Path(name)
    if os.path.isfile(
        path
    ):  # unlike Path.is_file it takes any text, however long, without an OSError
        return path
    shipped = shipped_folder() / Path(name).name
    if Path(name).name == name and os.path.isfile(shipped):
        return shipped
    names = ", ".join(sorted(p.name for p in shipped_folder().glob("*.yaml")))
    what = "is a folder" if os.path.isdir(path) else "not found"
    raise UserError(
        f"{path}: {what}; give a path to a YAML file or one of the shipped configs: {names}"
    )


def _read(path: Path, seen: tuple[Path, ...] = ()) -> Source:
    if path.resolve() in seen:
        raise UserError(
            f"{path}: 'extends' goes in a circle: {' -> '.join(p.name for p in (*seen, path))}"
        )
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
    source = parse_yaml(text, str(path))
    parent = source.values.pop("extends", None)
    if parent is None:
        return source
    if not isinstance(parent, str) or not parent.isprintable():
        raise UserError(f"{source.places['extends']}: extends: {parent!r} is not a file name")
    base = _read(find_config(parent, beside=path.parent), (*seen, path.resolve()))
    return Source(_merged(base.values, source.values), base.places | source.places)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`. A corpus that says where it comes from replaces the inherited one: {demo: x} on {src: y}
    is neither. Only one of two files can be exchanged alone. A preset of decoding takes the place of what it sets."""
    set_by_preset = DecodingConfig.PRESETS.get(str(over.get("preset")), {})
    result = {key: value for key, value in base.items() if key not in set_by_preset}
    for key, value in over.items():
        old: Any = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        is_other_corpus = (
            both
            and key in ("valid", "test")
            and not SOURCES.isdisjoint(value)
            and not (len(FILES & value.keys()) == 1 and "src" in old)
        )
        result[key] = _merged(old, value) if both and not is_other_corpus else value
    return result


def _override(source: Source, text: str) -> Source:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)*", key):
        raise UserError(
            f"{text!r} is not of the form section.key=value (for example training.steps=1000)"
        )
    parsed = parse_yaml(
        f"{{value: {value}}}" if value.strip() else "value: ''", f"command line, {key}"
    )
    if set(parsed.values) != {"value"}:
        raise UserError(f"{text!r}: quote the value: {key}='\"...\"'")
    tree: Any = parsed.values["value"]
    for part in reversed(key.split(".")):
        tree = {part: tree}
    places = {k.replace("value", key, 1): "command line" for k in parsed.places if k}
    return Source(_merged(source.values, tree), source.places | places)


# ---- values -> dataclasses --------------------------------------------------------------------------------------


def _build(cls: type, values: Any, key: str, places: dict[str, str]) -> Any:
    if not isinstance(values, dict):
        raise UserError(
            f"{_where(key, places)}: {values!r} is not a section; it takes key: value lines"
        )
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    built = {}
    presets = cls.PRESETS if cls is CleanConfig or cls is DecodingConfig else {}
    for name, value in {**presets.get(str(values.get("preset")), {}), **values}.items():
        inner = f"{key}.{name}" if key else name
        if inner in RETIRED:
            if value is not RETIRED[inner]:
                raise UserError(
                    f"{_where(inner, places)}: this key is gone; only {RETIRED[inner]!r} is still read, "
                    f"not {value!r}"
                )
            continue
        if name not in fields:
            close = difflib.get_close_matches(str(name), fields, 1)
            remedy = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(fields))}"
            raise UserError(f"{_where(inner, places)}: unknown key; {remedy}")
        built[name] = _convert(hints[name], value, inner, places)
        rule = fields[name].metadata.get("rule")
        if rule and not isinstance(value, str | None) and not rule.holds(value):
            raise UserError(f"{_where(inner, places)} is {value}; it must {rule.words}")
    result = cls(**built)
    complaint = result.check() if hasattr(result, "check") else None
    if complaint:
        raise UserError(f"{_where(key, places)}: {complaint}" if key else complaint)
    return result


def _where(key: str, places: dict[str, str]) -> str:
    """Where `key` was written, and its name."""
    return ": ".join(part for part in (places.get(key), key) if part) or "config"


def _convert(hint: Any, value: Any, key: str, places: dict[str, str]) -> Any:
    options = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in options:
            return None
        kinds = [o for o in options if o is not type(None)]
        return _convert(kinds[-1] if isinstance(value, str) else kinds[0], value, key, places)
    if origin is Literal:
        if value in options and isinstance(value, str):
            return value
        close = difflib.get_close_matches(str(value), [str(o) for o in options], 1)
        hint_text = f"; did you mean {close[0]}?" if close else ""
        raise UserError(
            f"{_where(key, places)}: {value!r} is not one of {', '.join(map(str, options))}{hint_text}"
        )
    if origin is tuple:
        if not isinstance(value, list):
            raise UserError(f"{_where(key, places)}: {value!r} is not a list")
        return tuple(
            _convert(options[0], item, f"{key}[{i}]", places) for i, item in enumerate(value)
        )
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, key, places)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if (
        is_number and not abs(value) < 2**63
    ):  # NaN, infinity, and what neither int64 nor float64 holds
        raise UserError(f"{_where(key, places)}: {value!r} is not a finite number of sensible size")
    if hint is float and is_number:
        value = float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{_where(key, places)}: {value!r} is not {UNITS[hint]}")
    return value


def load_config(name: str, overrides: typing.Sequence[str] = ()) -> RunConfig:
    """The config file `name` with `section.key=value` overrides applied, checked."""
    source = _read(find_config(name))
    for text in overrides:
        source = _override(source, text)
    return typing.cast(RunConfig, _build(RunConfig, source.values, "", source.places))


def changed(config: RunConfig, overrides: typing.Sequence[str]) -> RunConfig:
    """`config` with overrides applied: what nmt-eval does to the config of a checkpoint."""
    source = Source(to_dict(config))
    for text in overrides:
        source = _override(source, text)
    return typing.cast(RunConfig, _build(RunConfig, source.values, "", source.places))


def asked_device(overrides: typing.Sequence[str]) -> Literal["auto", "cpu"]:
    """Where to compute, as the command line says. What a checkpoint recorded was for the machine that trained it."""
    return changed(RunConfig(), [text for text in overrides if text.startswith("device=")]).device


# ---- dataclasses -> text ----------------------------------------------------------------------------------------


def to_dict(config: Any) -> Any:
    """Plain values; a corpus shows only what was given."""
    if isinstance(config, CorpusConfig):
        return {
            f.name: getattr(config, f.name)
            for f in dataclasses.fields(config)
            if getattr(config, f.name) != f.default
        }
    if dataclasses.is_dataclass(config):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return [to_dict(item) for item in config] if isinstance(config, tuple) else config


def dump(config: RunConfig) -> str:
    """YAML that `load_config` reads back to an equal config."""
    return format_yaml(to_dict(config))


def differences(old: RunConfig, new: RunConfig, free: tuple[str, ...] = FREE_KEYS) -> list[str]:
    """Lines `key: old -> new` for every setting outside `free` that differs."""

    def flat(value: Any, key: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {key: value}
        return {
            k: v
            for name, inner in value.items()
            for k, v in flat(inner, f"{key}.{name}" if key else name).items()
        }

    before, after = flat(to_dict(old)), flat(to_dict(new))
    keys = [k for k in {**before, **after} if before.get(k) != after.get(k)]
    return [
        f"{k}: {before.get(k)} -> {after.get(k)}"
        for k in keys
        if not any(k == f or k.startswith(f + ".") for f in free)
    ]
