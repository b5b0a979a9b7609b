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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nmt.errors import UserError
from nmt.strict_yaml import Source, format_yaml, parse_yaml

MAX_CONFIG_BYTES = 1 << 20
UNITS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


@dataclass(frozen=True)
class CorpusConfig:
    """Where sentence pairs come from: exactly one of two files, one file, a dataset, a known test set, the demo."""

    src: str | None = None  # a file of the source language; `.gz` and `.xz` are unpacked on the way
    tgt: str | None = None
    file: str | None = None  # .tsv (source, tab, target), .jsonl or .parquet
    dataset: str | None = None  # Hugging Face id, or a folder in the hub's layout
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    sacrebleu: str | None = None  # a test set that sacreBLEU knows, such as wmt14/full
    demo: Literal["train", "valid", "test"] | None = None  # the embedded corpus
    repeat: int = 1

    def check(self) -> str | None:
        kinds = [self.src or self.tgt, self.file, self.dataset, self.sacrebleu, self.demo]
        if sum(kind is not None for kind in kinds) != 1:
            return "needs exactly one of {src, tgt}, file, dataset, sacrebleu, demo"
        if (self.src is None) != (self.tgt is None):
            return "needs both src and tgt"
        if self.repeat < 1:
            return f"repeat is {self.repeat}; it must be at least 1"
        return None


@dataclass(frozen=True)
class CleanConfig:
    """What may not enter training; `null` switches a rule off. A pair with an empty side never enters."""

    max_words: int | None = 250
    max_ratio: float | None = None  # longer side / shorter side, in words
    max_pieces: int | None = 250  # after BPE, either side

    def check(self) -> str | None:
        for name in ("max_words", "max_ratio", "max_pieces"):
            value = getattr(self, name)
            if value is not None and value < 1:
                return f"{name} is {value}; it must be at least 1, or null"
        return None


@dataclass(frozen=True)
class DataConfig:
    src: str = "en"
    tgt: str = "de"
    root: str = "."  # what relative paths of corpora start from
    store: str = "data/store"  # where the prepared data goes
    workers: int = 2
    train: tuple[CorpusConfig, ...] = ()
    valid: CorpusConfig | None = None
    test: CorpusConfig | None = None
    clean: CleanConfig = CleanConfig()

    def check(self) -> str | None:
        if self.src == self.tgt:
            return f"src and tgt are both {self.src!r}"
        return None if self.workers >= 1 else f"workers is {self.workers}; it must be at least 1"


@dataclass(frozen=True)
class VocabConfig:
    size: int = 37_000
    character_coverage: float = 1.0
    sample_sentences: int = 10_000_000  # at most so many lines teach the BPE

    def check(self) -> str | None:
        if not 16 <= self.size <= 65_535:
            return f"size is {self.size}; ids are stored in 16 bits, so it must lie between 16 and 65535"
        if not 0.98 <= self.character_coverage <= 1.0:
            return f"character_coverage is {self.character_coverage}; it must lie between 0.98 and 1"
        return None if self.sample_sentences >= 1 else "sample_sentences must be at least 1"


@dataclass(frozen=True)
class ModelConfig:
    """The paper's letters (Table 3). `d_k` and `d_v` follow from d_model / n_heads unless given."""

    d_model: int = 512
    d_ff: int = 2048
    n_heads: int = 8
    n_layers: int = 6
    d_k: int | None = None
    d_v: int | None = None
    dropout: float = 0.1
    norm: Literal["post", "pre"] = "post"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    max_positions: int = 1024  # rows of a learned table; sinusoids have no end
    window: int | None = None  # restricted self-attention (section 4): so many neighbours to each side
    tied: bool = True  # one matrix for both embeddings and the projection

    def check(self) -> str | None:
        for name in ("d_model", "d_ff", "n_heads", "n_layers", "max_positions"):
            if getattr(self, name) < 1:
                return f"{name} is {getattr(self, name)}; it must be at least 1"
        if self.d_model % self.n_heads and (self.d_k is None or self.d_v is None):
            return f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}; give d_k and d_v"
        if self.d_model % 2 and self.positions == "sinusoidal":
            return f"d_model is {self.d_model}; sinusoidal positions need an even one"
        for name in ("d_k", "d_v", "window"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                return f"{name} is {getattr(self, name)}; it must be at least 1"
        return None if 0.0 <= self.dropout < 1.0 else f"dropout is {self.dropout}; it must lie in [0, 1)"

    @property
    def key_size(self) -> int:
        return self.d_k or self.d_model // self.n_heads

    @property
    def value_size(self) -> int:
        return self.d_v or self.d_model // self.n_heads


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam with the paper's schedule: scale * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)."""

    warmup_steps: int = 4000
    scale: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-9

    def check(self) -> str | None:
        if self.warmup_steps < 1:
            return f"warmup_steps is {self.warmup_steps}; it must be at least 1"
        for name in ("scale", "eps"):
            if getattr(self, name) <= 0:
                return f"{name} is {getattr(self, name)}; it must be positive"
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                return f"{name} is {getattr(self, name)}; it must lie in [0, 1)"
        return None


@dataclass(frozen=True)
class TrainingConfig:
    steps: int = 100_000  # updates
    src_tokens: int = 25_000  # per update, over all ranks
    tgt_tokens: int = 25_000
    micro_tokens: int = 3_200  # at most so many source and so many target tokens in one forward/backward
    label_smoothing: float = 0.1
    precision: Literal["bf16", "fp32"] = "bf16"
    log_every: int = 100  # updates
    validate_every: int = 5_000
    checkpoint_every: int | None = None  # updates; and/or
    checkpoint_minutes: float | None = 10.0  # the paper's clock
    keep_checkpoints: int = 20  # the newest so many, and the best

    def check(self) -> str | None:
        for name in ("steps", "src_tokens", "tgt_tokens", "micro_tokens", "log_every", "validate_every",
                     "checkpoint_every", "keep_checkpoints"):
            value = getattr(self, name)
            if value is not None and value < 1:
                return f"{name} is {value}; it must be at least 1"
        if self.checkpoint_minutes is not None and self.checkpoint_minutes <= 0:
            return f"checkpoint_minutes is {self.checkpoint_minutes}; it must be positive"
        if not 0.0 <= self.label_smoothing < 1.0:
            return f"label_smoothing is {self.label_smoothing}; it must lie in [0, 1)"
        return None


@dataclass(frozen=True)
class DecodingConfig:
    """Beam search as in section 6.1. `gnmt` divides by ((5+|Y|)/6)^alpha, `length` by |Y|^alpha, `none` by 1."""

    preset: Literal["vaswani2017"] = "vaswani2017"
    beam: int = 4
    length_penalty: float = 0.6
    penalty: Literal["gnmt", "length", "none"] = "gnmt"
    max_extra: int = 50  # pieces beyond the source
    max_source: int = 1_000  # pieces; a longer source is cut there, with a warning
    batch_tokens: int = 4_096  # source pieces decoded together

    def check(self) -> str | None:
        for name in ("beam", "max_extra", "max_source", "batch_tokens"):
            if getattr(self, name) < 1:
                return f"{name} is {getattr(self, name)}; it must be at least 1"
        return None if self.length_penalty >= 0 else f"length_penalty is {self.length_penalty}; it must not be negative"


@dataclass(frozen=True)
class EvaluationConfig:
    bleu: bool = True  # decode the dev set at each validation
    sentences: int | None = None  # only the first so many lines of the dev set, for its BLEU

    def check(self) -> str | None:
        ok = self.sentences is None or self.sentences >= 1
        return None if ok else f"sentences is {self.sentences}; it must be at least 1"


@dataclass(frozen=True)
class RunConfig:
    name: str = "run"
    seed: int = 1
    out: str = ""  # the run folder; runs/NAME unless given
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
            return (f"model.max_positions {model.max_positions} is too small for learned positions: training sentences "
                    f"have up to {longest or 'any number of'} pieces (data.clean.max_pieces) and a mark")
        return None if 0 <= self.seed < 2**31 else f"seed is {self.seed}; it must lie in [0, 2^31)"

    @property
    def folder(self) -> Path:
        return Path(self.out or f"runs/{self.name}")


# What may change between two sittings of one run without making it another run. Everything else is refused.
FREE_KEYS = ("name", "out", "data.root", "data.workers", "data.store", "data.test", "training.steps",
             "training.log_every", "training.validate_every", "training.checkpoint_every",
             "training.checkpoint_minutes", "training.keep_checkpoints", "decoding", "evaluation.sentences")


# ---- files -> values ---------------------------------------------------------------------------------------------

def shipped_folder() -> Path:
    """Where the shipped configs lie: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_config(name: str, beside: Path | None = None) -> Path:
    """A path is taken as it is; a bare name that is not there is looked up among the shipped configs."""
    path = (beside / name) if beside and not Path(name).is_absolute() else Path(name)
    if os.path.isfile(path):  # unlike Path.is_file it takes any text, however long, without an OSError
        return path
    shipped = shipped_folder() / Path(name).name
    if Path(name).name == name and os.path.isfile(shipped):
        return shipped
    names = ", ".join(sorted(p.name for p in shipped_folder().glob("*.yaml")))
    what = "is a folder" if os.path.isdir(path) else "not found"
    raise UserError(f"{path}: {what}; give a path to a YAML file or one of the shipped configs: {names}")


def _read(path: Path, seen: tuple[Path, ...] = ()) -> Source:
    if path.resolve() in seen:
        raise UserError(f"{path}: 'extends' goes in a circle: {' -> '.join(p.name for p in (*seen, path))}")
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data[:error.start].count(b"\n") + 1
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
    """`over` laid on `base`. A corpus of another kind replaces the inherited one: {demo: x} on {src: y} is neither."""
    result = dict(base)
    for key, value in over.items():
        old: Any = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        is_other_corpus = (both and key in ("valid", "test") and bool(_kinds(value))
                           and _kinds(old).isdisjoint(_kinds(value)))
        result[key] = _merged(old, value) if both and not is_other_corpus else value
    return result


def _kinds(corpus: dict[str, Any]) -> set[str]:
    """What says where a corpus comes from; src and tgt belong together."""
    return {"src" if key == "tgt" else key for key in corpus} & {"src", "file", "dataset", "sacrebleu", "demo"}


def _override(source: Source, text: str) -> Source:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)*", key):
        raise UserError(f"{text!r} is not of the form section.key=value (for example training.steps=1000)")
    parsed = parse_yaml(f"{{value: {value}}}" if value.strip() else "value: ''", f"command line, {key}")
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
        raise UserError(f"{_where(key, places)}: {values!r} is not a section; it takes key: value lines")
    hints = typing.get_type_hints(cls)
    fields = {f.name for f in dataclasses.fields(cls)}
    for name in values:
        if name not in fields:
            inner = f"{key}.{name}" if key else name
            close = difflib.get_close_matches(str(name), fields, 1)
            remedy = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(fields))}"
            raise UserError(f"{_where(inner, places)}: unknown key; {remedy}")
    built = {name: _convert(hints[name], value, f"{key}.{name}" if key else name, places)
             for name, value in values.items()}
    result = cls(**built)
    check = getattr(result, "check", None)
    complaint = check() if check else None
    if complaint:
        named = complaint.split(" ")[0]
        if named not in fields:  # it speaks of the section as a whole
            raise UserError(f"{_where(key, places)}: {complaint}")
        inner = f"{key}.{named}" if key else named
        raise UserError(f"{_where(inner if inner in places else key, places, inner)}{complaint.removeprefix(named)}")
    return result


def _where(key: str, places: dict[str, str], shown: str | None = None) -> str:
    """Where `key` was written, and its name."""
    place, shown = places.get(key), key if shown is None else shown
    return f"{place}: {shown}" if place and shown else place or shown or "config"


def _convert(hint: Any, value: Any, key: str, places: dict[str, str]) -> Any:
    options = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in options:
            return None
        return _convert(next(o for o in options if o is not type(None)), value, key, places)
    if origin is Literal:
        if value in options and isinstance(value, str):
            return value
        close = difflib.get_close_matches(str(value), [str(o) for o in options], 1)
        hint_text = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"{_where(key, places)}: {value!r} is not one of {', '.join(map(str, options))}{hint_text}")
    if origin is tuple:
        if not isinstance(value, list):
            raise UserError(f"{_where(key, places)}: {value!r} is not a list")
        return tuple(_convert(options[0], item, f"{key}[{i}]", places) for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, key, places)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not abs(value) < 2**63:  # NaN, infinity, and what neither int64 nor float64 holds
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


# ---- dataclasses -> text ----------------------------------------------------------------------------------------

def to_dict(config: Any) -> Any:
    """Plain values; a corpus shows only what was given."""
    if isinstance(config, CorpusConfig):
        return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)
                if getattr(config, f.name) != f.default}
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
        return {k: v for name, inner in value.items() for k, v in flat(inner, f"{key}.{name}" if key else name).items()}

    before, after = flat(to_dict(old)), flat(to_dict(new))
    keys = [k for k in {**before, **after} if before.get(k) != after.get(k)]
    return [f"{k}: {before.get(k)} -> {after.get(k)}" for k in keys
            if not any(k == f or k.startswith(f + ".") for f in free)]
