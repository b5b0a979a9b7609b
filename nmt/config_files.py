"""Config files: reads them, compares configs and writes them out as YAML.

Values come from four sources, each overriding the one before: the defaults of nmt/config.py, the file
named by `extends`, the file itself, and `section.key=value` on the command line. Unknown keys, wrong
types and out-of-range values are rejected with a message that gives file:line, key, value and a
remedy.
"""

import copy
import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nmt.config import (
    CHANGEABLE_KEYS,
    CleanConfig,
    CorpusConfig,
    DataConfig,
    DecodingConfig,
    RunConfig,
    VocabConfig,
)
from nmt.foreign_names import explain_foreign_name
from nmt.system.errors import UserError, explain_missing
from nmt.system.files import explain_unreadable, read_bytes
from nmt.system.records import OF_ANOTHER_VERSION, RecordReader, join_key
from nmt.system.run_folder import SIDE_VOCAB_FILES, VOCAB_FILE
from nmt.system.strict_yaml import Places, Values, YamlTree, format_yaml, parse_yaml

# Parsing this much takes two seconds. A config with a hundred corpora is a tenth of this size.
MAX_CONFIG_BYTES = 128 << 10
MAX_EXTENDED = 100  # files that one config extends, one after the other
CORPUS_FILES = {"src", "tgt"}
OUR_SINKS = ("tensorboard", "wandb")  # of training.track
SINK_GROUP = "nmt.sinks"  # entry points by which packages offer others
VOCAB_FILES = (VOCAB_FILE, *SIDE_VOCAB_FILES)
FOLLOWS_LANGUAGES = ("src", "tgt", "archive", "file", "dataset", "subset")
CORPUS_SOURCES = CORPUS_FILES | {"file", "dataset", "sacrebleu", "demo"}
PRESETS = {"data.clean": CleanConfig.PRESETS, "decoding": DecodingConfig.PRESETS}
SEARCH_PRESET_KEYS = DecodingConfig.PRESETS[
    "fairseq"
].keys()  # the settings that every preset decides

ValuesByKey = dict[str, list[Any]]  # the value of a setting in each of several configs


# ---- files -> values ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacedSetting:
    """A setting that was read from a file other than a config, such as the grid of a sweep."""

    key: str  # dotted
    value: Any
    lines: Places  # where it and each value inside it were written


def find_shipped_configs() -> Path:
    """Return the folder of the shipped configs: next to the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_config(name: str, folder: Path | None = None) -> Path:
    """Return the path `name` if it exists; otherwise look it up among the shipped configs, where a
    bare name is enough for a retelling of the paper too, and table3/heads-1.yaml is a row of Table 3.
    """
    path = (folder or Path()) / name
    shipped = find_shipped_configs()
    for candidate in (path, shipped / name, shipped / "retellings" / name):
        if os.path.isfile(candidate):  # Path.is_file would raise if the name is too long
            return candidate
    names = ", ".join(shown for shown in list_config_names() if "/" not in shown)
    raise explain_missing(
        path,
        f"give a path to a YAML file or one of the shipped configs: {names}, or a row of Table 3 such as "
        "table3/heads-1.yaml",
    )


def list_config_names() -> list[str]:
    """Return the names by which the shipped configs are found."""
    shipped = find_shipped_configs()
    by_bare_name = {path.name for path in (*shipped.glob("*.yaml"), *shipped.glob("retellings/*"))}
    by_bare_name.remove("paper.yaml")  # the table that configs are compared with
    rows_of_table_3 = {f"table3/{path.name}" for path in shipped.glob("table3/*.yaml")}
    return sorted(by_bare_name) + sorted(rows_of_table_3)


def list_setting_keys() -> list[str]:
    """Return the dotted names of all settings."""
    return list(flatten_settings(to_plain_values(RunConfig())))


def explain_name(name: str, ending: str = "", section: str = "") -> str | None:
    """Say which setting is meant by a name without its section, or by that of another toolkit."""
    if foreign := explain_foreign_name(name, ending, section):
        return foreign
    for key in list_setting_keys():
        if key.startswith(section) and key.endswith(f".{name}"):
            return f"it is {key}{ending} here"
    return None


def _read_file(path: Path, n_extending: int = 0) -> YamlTree:
    """Read a file and merge it over the file that it extends; `n_extending` others extend this one."""
    source = parse_yaml(read_config_text(path), str(path))
    parent = source.values.pop("extends", None)
    if parent is None:
        return source
    key = f"{source.lines['extends']}: extends"
    if not isinstance(parent, str) or not parent.isprintable():
        raise UserError(f"{key}: {parent!r} is not a file name; give a path to a YAML file")
    if n_extending == MAX_EXTENDED:
        raise UserError(
            f"{key}: more than {MAX_EXTENDED:,} files extend one another, perhaps in a circle; leave "
            "one of these lines out"
        )
    try:
        parent_path = find_config(parent, folder=path.parent)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    base = _read_file(parent_path, n_extending + 1)
    return YamlTree(_merge(base.values, source.values), base.lines | source.lines)


def read_config_text(path: Path) -> str:
    """Read a config, or another YAML file that a person wrote; refuse what is too large to be one."""
    with explain_unreadable(path):
        return _decode(str(path), path.read_bytes())


def _decode(name: str, data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(
            f"{name}:{line}: byte {error.start} of the file is not valid UTF-8; convert it to UTF-8"
        ) from None
    if len(data) > MAX_CONFIG_BYTES:
        raise UserError(
            f"{name}: has {len(data):,} bytes, but a config may have {MAX_CONFIG_BYTES:,}; "
            "is it the right file?"
        )
    return text


def _merge(base: Values, overrides: Values, section: str = "") -> Values:
    """Merge `overrides` into a copy of `base`, key by key."""
    result = dict(base)
    if section == "decoding" and "preset" in overrides:
        # A preset replaces every key that it decides, including keys that the base gave.
        result = {key: value for key, value in base.items() if key not in SEARCH_PRESET_KEYS}
    for name, value in overrides.items():
        key = join_key(section, name)
        old = result.get(name)
        if not isinstance(old, dict) or not isinstance(value, dict):
            result[name] = value
        elif key in ("data.valid", "data.test") and _is_another_corpus(old, value):
            result[name] = value
        else:
            result[name] = _merge(old, value, key)
    return result


def _is_another_corpus(old: Values, new: Values) -> bool:
    """Whether `new` names a corpus of its own, which replaces `old`: {demo: x} merged into {src: y}
    would be invalid. If only src or only tgt is given, that file is replaced and the other one
    kept."""
    if CORPUS_SOURCES.isdisjoint(new):
        return False
    is_one_side = len(CORPUS_FILES & new.keys()) == 1
    return not (is_one_side and "src" in old)


def parse_override(text: str) -> PlacedSetting:
    """Return the setting that `section.key=value` on a command line gives."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[a-z_0-9-]+(\.[a-z_0-9-]+)*", key):
        raise UserError(
            f"{text!r} is not of the form section.key=value, without spaces (such as training.steps=1000)"
        )
    written = f"{{value: {value}}}" if value.strip() else "value: ''"
    parsed = parse_yaml(written, f"command line, {key}")
    if set(parsed.values) != {"value"}:
        raise UserError(
            f"{text!r}: is YAML syntax; write 1000 or 0.5, or quote it: {key}='\"...\"'"
        )
    inner_keys = [inner.removeprefix("value") for inner in parsed.lines if inner]
    lines = {key + inner: "command line" for inner in inner_keys}
    return PlacedSetting(key, parsed.values["value"], lines)


def _put(source: YamlTree, setting: PlacedSetting) -> YamlTree:
    """Merge one setting over `source`."""
    tree = setting.value
    for part in reversed(setting.key.split(".")):
        tree = {part: tree}
    return YamlTree(_merge(source.values, tree), source.lines | setting.lines)


# ---- values -> dataclasses --------------------------------------------------------------------------------------


def load_config(
    name: str,
    overrides: Sequence[str] = (),
    settings: Sequence[PlacedSetting] = (),
    folder: Path | None = None,
) -> RunConfig:
    """Load the config file `name`, of `folder` if it is relative, apply `settings` and then
    `section.key=value` overrides, and check the result.
    """
    source = _read_file(find_config(name, folder))
    config = _build_config(source, overrides, settings)
    check_sinks(config.training.track)
    start = config.training.init_from
    if start is None:
        return config
    return dataclasses.replace(config, vocab=_use_vocab_of(start, config.vocab))


def check_sinks(names: Sequence[str]) -> None:
    """Raise UserError if training.track names an unknown sink. Recorded configs are not checked: a
    model must translate on machines without the user's packages.
    """
    if all(name in OUR_SINKS for name in names):
        return
    from importlib.metadata import entry_points

    known = sorted({*OUR_SINKS, *entry_points(group=SINK_GROUP).names})
    for name in names:
        if name not in known:
            raise UserError(
                f"training.track: {name!r} is not a known sink; choose from {', '.join(known)}, "
                "or install the package that offers it"
            )


def _fill_in_languages(data: DataConfig) -> DataConfig:
    """Replace {src} and {tgt} in the names of corpora, so that they follow data.src and data.tgt."""

    def fill_corpus(corpus: CorpusConfig) -> CorpusConfig:
        filled = {}
        for key in FOLLOWS_LANGUAGES:
            name = vars(corpus)[key]
            filled[key] = name and name.replace("{src}", data.src).replace("{tgt}", data.tgt)
        return dataclasses.replace(corpus, **filled)

    return dataclasses.replace(
        data,
        train=tuple(map(fill_corpus, data.train)),
        valid=data.valid and fill_corpus(data.valid),
        test=data.test and fill_corpus(data.test),
    )


def find_model(name: str) -> str:
    """Return the path of a model that is part of nmt, such as en-fr; any other name as it is."""
    shipped = Path(__file__).with_name("shipped")
    is_shipped = name in os.listdir(shipped) and not os.path.exists(name)
    return str(shipped / name) if is_shipped else name


def is_published(name: str) -> bool:
    """Whether a name is that of a model in another toolkit's form: of the Hugging Face hub, or a folder."""
    if name.startswith("hf:"):
        return True
    of_formats = "config.json", "decoder.yml", "model_info.json"  # Hugging Face, Marian, Bergamot
    return any(os.path.exists(os.path.join(find_model(name), file)) for file in of_formats)


def _use_vocab_of(start: str, vocab: VocabConfig) -> VocabConfig:
    """Use the vocabulary of the model that training starts from, unless one is given."""
    if is_published(start):
        raise UserError(
            f"training.init_from={start}: is a model of another toolkit; nmt-init --from {start} writes "
            "a config that continues it"
        )
    if vocab.model is not None:
        return vocab
    joint, *sides = (os.path.join(os.path.abspath(start), name) for name in VOCAB_FILES)
    present = [path for path in (joint, *sides) if os.path.exists(path)]
    if present and (joint in present) != vocab.joint:
        other = "false" if vocab.joint else "true"
        raise UserError(
            f"training.init_from={start}: was trained with vocab.joint={other}; set the same here"
        )
    model, tgt_model = (joint, None) if vocab.joint else sides
    return dataclasses.replace(vocab, model=model, tgt_model=tgt_model)


def load_recorded_config(path: Path) -> RunConfig:
    """Load a config that nmt wrote into a run, a checkpoint or an export.

    It must be a plain file, and complete: an untrusted one could otherwise name any file on this machine.
    """
    return parse_recorded_config(read_bytes(path), str(path))


def parse_recorded_config(data: bytes, name: str) -> RunConfig:
    """Read the content of a config that nmt wrote; error messages call it `name`."""
    source = parse_yaml(_decode(name, data), name)
    if "extends" in source.values:
        raise UserError(
            f"{source.lines['extends']}: extends: a config that nmt recorded must be complete; "
            "use another copy"
        )
    return _build_config(source, remedy=OF_ANOTHER_VERSION)


def override_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Apply overrides to `config`, as nmt-eval and nmt-translate do with the config of a checkpoint."""
    return _build_config(YamlTree(to_plain_values(config)), overrides)


def parse_device(overrides: Sequence[str]) -> Literal["auto", "cpu"]:
    """Return the device that the command line asks for; that of a checkpoint was for the machine that trained it."""
    asked = [text for text in overrides if text.startswith("device=")]
    return override_config(RunConfig(), asked).device


def _build_config(
    source: YamlTree,
    overrides: Sequence[str] = (),
    settings: Sequence[PlacedSetting] = (),
    remedy: str = "",
) -> RunConfig:
    given: Places = {}
    asked = [*settings, *map(parse_override, overrides)]
    # A preset replaces the settings before it, so it is applied first, wherever it was written.
    for setting in sorted(asked, key=lambda setting: setting.key != "decoding.preset"):
        source = _put(source, setting)
        given |= setting.lines
    values = copy.deepcopy(source.values)
    _fill_in_presets(values)
    reader = RecordReader(source.name_place, remedy=remedy, explain_key=explain_name)
    config = reader.read(RunConfig, values)
    if not config.decoding.sample:
        _refuse_unsampled(config.decoding, given)
    return dataclasses.replace(config, data=_fill_in_languages(config.data))


def _refuse_unsampled(decoding: DecodingConfig, given: Mapping[str, str]) -> None:
    """Refuse settings of sampling that are given here, where nothing is sampled. A file may have them,
    for a command that samples.
    """
    for name in ("temperature", "top_k", "top_p"):
        key = f"decoding.{name}"
        value = vars(decoding)[name]
        if key in given and value != vars(DecodingConfig())[name]:
            raise UserError(
                f"{given[key]}: {key} is {value:g}, but it has no effect without decoding.sample=true; "
                "give both, or leave it out"
            )


def _fill_in_presets(values: Values) -> None:
    """Fill in the settings of each section's preset, except those that are given."""
    for key, presets in PRESETS.items():
        section = _find_section(values, key)
        for name, value in presets.get(str(section.get("preset")), {}).items():
            section.setdefault(name, value)


def _find_section(values: Any, key: str) -> Values:
    """Return the section with this dotted key, or an empty one if there is none."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


# ---- dataclasses -> text ----------------------------------------------------------------------------------------


def to_plain_values(config: Any) -> Any:
    """Convert a config to dictionaries, lists and scalars, as in YAML; a corpus keeps only the keys that were given."""
    if isinstance(config, CorpusConfig):
        unset = vars(CorpusConfig())
        return {name: value for name, value in vars(config).items() if value != unset[name]}
    if dataclasses.is_dataclass(config):
        return {name: to_plain_values(value) for name, value in vars(config).items()}
    if isinstance(config, tuple):
        return [to_plain_values(item) for item in config]
    return config


def format_config(config: RunConfig) -> str:
    """Write the config as YAML that `load_config` reads back to an equal config."""
    return format_yaml(to_plain_values(config))


def list_differences(
    old: RunConfig, new: RunConfig, ignored: tuple[str, ...] = CHANGEABLE_KEYS
) -> list[str]:
    """List the settings that differ and are not in `ignored`, each as a line `key: old -> new`."""
    if "cosine" in (old.optimizer.schedule, new.optimizer.schedule):
        # Every rate depends on the number of updates, even the rates of past updates.
        ignored = tuple(key for key in ignored if key != "training.steps")
    if new.training.precision == "auto":
        ignored = (*ignored, "training.precision")  # the run keeps the one that it began with
    table = tabulate_differences([old, new], ignored)
    return [f"{key}: {before} -> {after}" for key, (before, after) in table.items()]


def tabulate_differences(configs: Sequence[RunConfig], ignored: tuple[str, ...]) -> ValuesByKey:
    """Return the settings that differ and are not in `ignored`, each with its value in every config."""
    flat = [flatten_settings(to_plain_values(config)) for config in configs]
    table = {}
    for key in {key: None for values in flat for key in values}:
        values = [values_by_key.get(key) for values_by_key in flat]
        setting, _, _ = key.partition("[")
        is_ignored = f"{setting}.".startswith(tuple(f"{other}." for other in ignored))
        if not is_ignored and any(value != values[0] for value in values):
            table[key] = values
    return table


def format_setting(value: Any) -> str:
    """Write the value of a setting for people, as a config has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def flatten_settings(value: Any, key: str = "") -> Values:
    """{"data": {"train": [{"src": "x"}]}} -> {"data.train[0].src": "x"}"""
    if not value or not isinstance(value, dict | list):
        return {key: value}
    flat: Values = {}
    if isinstance(value, dict):
        for name, item in value.items():
            flat |= flatten_settings(item, join_key(key, name))
    else:
        for i, item in enumerate(value):
            flat |= flatten_settings(item, f"{key}[{i}]")
    return flat
