"""`extends: suggested`: settings that follow from the training text and this machine, as in own.yaml.

The choices are nmt-init's, from the same table (first_config.py), and made once: suggested.yaml and the
sets that were drawn are written beside the store. Later starts read that file, so a run continues
exactly, whatever the machine or this code would choose then. Settings in the config and on the command
line override it. The run's config.yaml records the values, not where they came from.
"""

from collections.abc import Sequence
from pathlib import Path

from nmt.config import DataConfig, RunConfig, is_suggested, load_config, to_plain_values
from nmt.corpus.first_config import (
    ConfigRequest,
    Machine,
    guess_languages,
    make_first_config,
    write_choices,
)
from nmt.system.errors import UserError
from nmt.system.files import make_folder, read_bytes
from nmt.system.memory import find_memory_limit
from nmt.system.runtime import (
    count_cores,
    read_cpu_info,
    read_rank_variable,
    tune_process,
)
from nmt.system.strict_yaml import YamlTree, parse_yaml

SUGGESTION_FILE = "suggested.yaml"
TEXT_KEYS = ("src", "tgt", "root", "train")  # of data
ELSEWHERE = "give another data.store=FOLDER/store and another name=NAME"
IN_PLACE = "remove the file"
BF16_FLAGS = ("avx512_bf16", "amx_bf16")
NO_SUGGESTION = YamlTree({}, {})


def look_at_machine(device: str) -> Machine:
    tune_process()  # before torch is imported

    from nmt.system.device import has_nvidia

    flags = read_cpu_info().split()
    has_bf16 = any(flag in flags for flag in BF16_FLAGS)
    has_gpu = device != "cpu" and has_nvidia()
    return Machine(count_cores(), find_memory_limit().n_bytes, has_bf16, has_gpu)


def load_suggested_config(name: str, overrides: Sequence[str]) -> RunConfig:
    """Load a config that says `extends: suggested`; choose and write what it stands for, if that was
    not done yet.
    """
    config = _load_with_languages(name, overrides)
    path = _locate(config)
    if not path.exists():
        if read_rank_variable("WORLD_SIZE", 1) > 1:
            raise UserError(
                f"{path}: is not written yet; run nmt-prepare with the same settings once, without "
                "torchrun, so that all ranks read the same choices"
            )
        _write(_choose(config, path), config.data)
    _check_text(path, config.data)
    suggestion = parse_yaml(read_bytes(path).decode(), str(path))
    return load_config(name, overrides, suggestion=suggestion)


def suggest_config(name: str, overrides: Sequence[str]) -> str:
    """Return the YAML that fits the text of a config and this machine. Dev and test sets that the
    config does not name are drawn and written.
    """
    if is_suggested(name):
        config = load_suggested_config(name, overrides)
        return read_bytes(_locate(config)).decode()
    config = load_config(name, overrides)
    path = _locate(config)
    written = _choose(config, path)
    text = written.pop(path)
    _write(written, config.data)
    return text


def _locate(config: RunConfig) -> Path:
    return Path(config.data.store).parent / SUGGESTION_FILE


def _load_with_languages(name: str, overrides: Sequence[str]) -> RunConfig:
    """Load the config without a suggestion; the names of the files tell the languages if nothing else
    does.
    """
    config = load_config(name, overrides, suggestion=NO_SUGGESTION)
    _check_corpora(config.data)
    corpus = config.data.train[0]
    names = [each for each in (corpus.file, corpus.src, corpus.tgt) if each is not None]
    languages = guess_languages(names) if names else None
    if languages is None:
        return config
    sides = dict(zip(("src", "tgt"), languages, strict=True))
    return load_config(name, overrides, suggestion=YamlTree({"data": sides}, {}))


def _choose(config: RunConfig, path: Path) -> dict[Path, str]:
    _check_corpora(config.data)
    machine = look_at_machine(config.device)
    request = ConfigRequest(config.name, config.data.store, "nmt-train --suggest", machine)
    return make_first_config(path, config.data, config.seed, request)


def _write(written: dict[Path, str], data: DataConfig) -> None:
    for file in written:
        make_folder(file.parent)
    write_choices(written, data, ELSEWHERE, IN_PLACE)


def _check_text(path: Path, data: DataConfig) -> None:
    """Refuse a suggestion that was made for other text."""
    old, new = to_plain_values(load_config(str(path)).data), to_plain_values(data)
    others = [f"data.{key}: {old[key]} -> {new[key]}" for key in TEXT_KEYS if old[key] != new[key]]
    if others:
        raise UserError(
            f"{path}: was made for other text ({'; '.join(others)}); {ELSEWHERE}, or {IN_PLACE}"
        )


def _check_corpora(data: DataConfig) -> None:
    if len(data.train) != 1:
        raise UserError(
            f"data.train: has {len(data.train)} corpora, but a suggestion is made for one; give it as "
            "data.train='[{src: my.en, tgt: my.de}]', and add others to what nmt-train --suggest prints"
        )
