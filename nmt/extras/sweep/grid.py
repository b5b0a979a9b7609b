"""GRID.yaml -> the runs of a sweep: every combination of a setting and a seed, each with its config.

Mistakes in the grid are found here, before the first run starts: an unknown setting, a value that is
invalid beside another, two runs of one folder, a run that cannot be averaged or scored as the grid says,
or that was begun with other settings. All else, such as missing text, each run says when it begins. Runs
with the same data and vocabulary settings share a store.
"""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nmt.config import (
    MACHINE_KEYS,
    DataConfig,
    PlacedSetting,
    RunConfig,
    TrainingConfig,
    VocabConfig,
    find_shipped_configs,
    list_differences,
    load_config,
    load_recorded_config,
    parse_override,
    read_config_text,
)
from nmt.corpus.ledger import list_settings
from nmt.system.errors import UserError
from nmt.system.files import digest_values, explain_missing, has_plain_file
from nmt.system.records import RecordReader, Rule, default
from nmt.system.run_folder import RunFolder
from nmt.system.strict_yaml import YamlTree, parse_yaml

ScoredSet = Literal["dev", "test"]
COUNT_OF_AVERAGED = Rule(lambda n: n >= 1, "be at least 1; null scores the last checkpoint alone")
MAX_GRID_RUNS = 1_000
LONGEST_FOLDER_NAME = 150
# What nmt-sweep writes into its folder, and what each of these files begins with.
OUTPUTS = {
    "table.md": "| run | settings | seeds | parameters |",
    "table.csv": "run,settings,seeds,parameters,",
}
# Settings that a grid may not have, and why.
REFUSED_KEYS = {
    "name": "a run is named after its row and its seed",
    "out": "the folder of a run follows from --out and its name",
    "seed": "the grid's key seeds lists the seeds of all runs, such as seeds: [1, 2, 3]",
    "training.mirror": "one place cannot hold several runs",
}
# Settings that may differ when a run is continued, because they cannot change a score.
SCORE_NEUTRAL_KEYS = (
    *MACHINE_KEYS,
    "training.on_nonfinite",
    "training.checkpoint_minutes",
    "training.keep_checkpoints",
    "training.track",
)


@dataclass(frozen=True)
class GridFile:
    """What GRID.yaml says (docs/sweeps.md)."""

    base: str
    seeds: tuple[int, ...] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    average: int | None = default(None, COUNT_OF_AVERAGED)
    score: tuple[ScoredSet, ...] = ("dev",)
    runs: dict[str, dict[str, Any]] | None = None
    grid: dict[str, list[Any]] | None = None

    def check(self) -> str | None:
        if (self.runs is None) == (self.grid is None):
            return "needs either runs or grid: runs lists settings by name, grid combines values"
        if self.runs == {}:
            return "runs is empty; give at least one, such as base: {}"
        if self.grid is not None and not (self.grid and all(self.grid.values())):
            return "grid needs at least one setting, and each of them at least one value"
        for name, values in (("seeds", self.seeds), ("score", self.score)):
            if values is not None and (not values or len(set(values)) < len(values)):
                return f"{name} is {list(values)}; give at least one value, and none twice"
        n_rows = len(self.runs or {})
        if self.grid is not None:
            n_rows = math.prod(map(len, self.grid.values()))
        n_runs = n_rows if self.seeds is None else n_rows * len(self.seeds)
        if n_runs > MAX_GRID_RUNS:
            return f"has {n_runs:,} runs; a sweep may have {MAX_GRID_RUNS:,}"
        return None


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep: a row of its table, and a seed."""

    index: int  # from 1, as --only takes it
    name: str  # of its row
    config: RunConfig

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.config.folder)

    @property
    def label(self) -> str:
        return self.config.folder.name


@dataclass(frozen=True)
class Sweep:
    folder: Path
    average: int | None
    score: tuple[ScoredSet, ...]
    runs: tuple[PlannedRun, ...]

    def log_path(self, run: PlannedRun) -> Path:
        """The file that takes the output of a run."""
        return self.folder / "logs" / f"{run.label}.log"

    def config_path(self, run: PlannedRun) -> Path:
        """The config that `nmt-train --config` gets."""
        return self.folder / "configs" / f"{run.label}.yaml"


NamedRow = tuple[str, list[PlacedSetting]]


def read_grid(name: str, folder: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a grid and check all its runs; `overrides` apply to all of them."""
    path = find_grid(name)
    tree = parse_yaml(read_config_text(path), str(path))

    def name_place(key: str) -> str:
        if key in tree.places and key:
            return tree.name_place(key)
        return f"{path}: {key}" if key else str(path)  # a missing key, or the whole file

    grid = RecordReader(name_place).read(GridFile, tree.values)
    rows = list(list_named_rows(grid, tree))
    check_names([row for row, _ in rows], path)
    given = {text: parse_override(text) for text in overrides}
    check_overrides(rows, given, path)
    shared = locate_settings(grid.settings, "settings", tree)
    seeds: list[list[PlacedSetting]] = [[]]  # without a setting it is the config's own
    if grid.seeds is not None:
        place = {"seed": tree.places["seeds"]}
        seeds = [[PlacedSetting("seed", seed, place)] for seed in grid.seeds]

    runs: list[PlannedRun] = []
    for (row, row_settings), seed in itertools.product(rows, seeds):
        settings = [*shared, *row_settings, *seed]
        has_store = any("data.store" in each.places for each in (*settings, *given.values()))
        try:
            config = load_config(grid.base, overrides, settings, path.parent)
            run = PlannedRun(len(runs) + 1, row, place_run(row, config, folder, has_store))
            check_run(run, grid)
        except UserError as error:
            raise UserError(f"run {row!r}: {error}") from None
        runs.append(run)
    return Sweep(folder, grid.average, grid.score, tuple(runs))


def find_grid(name: str) -> Path:
    """Return the path `name`, or a shipped grid of this name."""
    if Path(name).is_file():
        return Path(name)
    shipped = {path.name: path for path in find_shipped_configs().glob("sweeps/*.yaml")}
    if name in shipped and not Path(name).exists():
        return shipped[name]
    names = ", ".join(sorted(shipped))
    raise explain_missing(
        name, f"give a grid file (docs/sweeps.md), or one of the shipped grids: {names}"
    )


def list_named_rows(grid: GridFile, tree: YamlTree) -> Iterator[NamedRow]:
    """Yield the name and the settings of each row of the table, without the seed."""
    for name, values in (grid.runs or {}).items():
        yield name, locate_settings(values, f"runs.{name}", tree)
    if grid.grid is not None:
        yield from combine_values(grid.grid, tree)


def combine_values(grid: dict[str, list[Any]], tree: YamlTree) -> Iterator[NamedRow]:
    """Yield a row for each combination of the values, named after them."""
    short_keys = [key.rpartition(".")[2] for key in grid]
    if len(set(short_keys)) < len(grid):
        short_keys = list(grid)  # they differ only in their sections
    for chosen in itertools.product(*map(enumerate, grid.values())):
        words = []
        settings = []
        for key, short_key, (i, value) in zip(grid, short_keys, chosen, strict=True):
            words.append(f"{short_key} {format_setting_value(value)}")
            settings.append(locate_setting(key, value, f"grid.{key}[{i}]", tree))
        yield ", ".join(words), settings


def locate_settings(values: dict[str, Any], at: str, tree: YamlTree) -> list[PlacedSetting]:
    return [locate_setting(key, value, f"{at}.{key}", tree) for key, value in values.items()]


def locate_setting(key: str, value: Any, at: str, tree: YamlTree) -> PlacedSetting:
    """Return the setting at the key `at` of the grid, with the lines of all that is in it."""
    if not re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)*", key):
        raise UserError(f"{tree.name_place(at)}: {key!r} is not the name of a setting")
    places = {key: tree.places[at]}
    for inner, place in tree.places.items():
        if inner.startswith((f"{at}.", f"{at}[")):
            places[key + inner[len(at) :]] = place
    refuse_keys(places, tree.name_place(at))
    return PlacedSetting(key, value, places)


def refuse_keys(keys: Iterable[str], what: str) -> None:
    for key in keys:
        if key in REFUSED_KEYS:
            raise UserError(f"{what}: {REFUSED_KEYS[key]}; leave it out")


def format_setting_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def check_names(names: Sequence[str], path: Path) -> None:
    """Refuse names that cannot be those of folders, and two that would be one folder."""
    seen: dict[str, str] = {}
    for name in names:
        folder = make_folder_name(name)
        if not re.search("[A-Za-z0-9]", folder) or len(folder) > LONGEST_FOLDER_NAME:
            raise UserError(
                f"{path}: run {name!r} has no usable folder name; give a name of letters, digits and "
                f"- _ . +, at most {LONGEST_FOLDER_NAME} characters"
            )
        key = folder.casefold()  # some file systems do not distinguish a from A
        if key in seen:
            raise UserError(
                f"{path}: runs {seen[key]!r} and {name!r} would share the folder {folder}-seed...; "
                "rename one of them"
            )
        seen[key] = name


def make_folder_name(name: str) -> str:
    """Replace what a folder's name should not have, as in N = 2 -> N-2."""
    return re.sub(r"[^\w.+-]+", "-", name, flags=re.ASCII).strip("-.")


def check_overrides(
    rows: Sequence[NamedRow], overrides: Mapping[str, PlacedSetting], path: Path
) -> None:
    """Refuse settings of the command line that would undo the differences between runs."""
    # A setting may be a whole section, whose keys have places of their own. So may an override: model
    # undoes model.d_ff, but not models.
    varied = {key for _, settings in rows for setting in settings for key in setting.places}
    for text, setting in overrides.items():
        key = setting.key
        if any(f"{inner}.".startswith(f"{key}.") for inner in varied):
            raise UserError(
                f"{text}: the runs of {path} differ in {key}; leave it out, or change the grid"
            )
        refuse_keys(setting.places, text)


def place_run(name: str, config: RunConfig, folder: Path, has_store: bool) -> RunConfig:
    """Give a run its folder, and a store that it shares with runs of the same data, unless the grid
    or the command line sets one.
    """
    label = f"{make_folder_name(name)}-seed{config.seed}"
    data = config.data
    if not has_store:
        data = replace(data, store=str(folder / "stores" / digest_data(data, config.vocab)))
    return replace(config, name=label, out=str(folder / label), data=data)


def digest_data(data: DataConfig, vocab: VocabConfig) -> str:
    """Return a short name for the data and vocabulary that a config prepares."""
    settings = list_settings(data, vocab)
    return digest_values([settings, str(Path(data.root).absolute())])[:10]


# ---- checks of one run ---------------------------------------------------------------------------


def check_run(run: PlannedRun, grid: GridFile) -> None:
    """Raise UserError for what would stop this run, or change its result in silence."""
    config = run.config
    for name, key, corpus in (
        ("dev", "data.valid", config.data.valid),
        ("test", "data.test", config.data.test),
    ):
        if name in grid.score and corpus is None:
            raise UserError(f"score has {name}, but {key} is not set; set it, or change score")
    if config.training.mirror is not None:  # of the base
        raise UserError(f"training.mirror: {REFUSED_KEYS['training.mirror']}; leave it out")
    check_average(config.training, grid.average)
    check_unchanged(run)


def check_average(training: TrainingConfig, n: int | None) -> None:
    """Refuse an average of more checkpoints than a run will have."""
    if n is None:
        return
    every = training.checkpoint_every  # None: only at the end
    n_planned = math.ceil(training.steps / (every or training.steps))
    if n_planned < n:
        raise UserError(
            f"average is {n}, but the run will write {n_planned} planned checkpoints "
            f"(training.steps {training.steps}, training.checkpoint_every "
            f"{format_setting_value(every)}); lower average, or set a smaller "
            "training.checkpoint_every"
        )
    if training.keep_checkpoints < n:
        raise UserError(
            f"average is {n}, but training.keep_checkpoints is {training.keep_checkpoints}; raise it"
        )


def check_unchanged(run: PlannedRun) -> None:
    """Refuse a run that was begun with other settings."""
    path = run.folder.config
    if not has_plain_file(path):
        return
    changes = list_differences(load_recorded_config(path), run.config, SCORE_NEUTRAL_KEYS)
    if changes:
        raise UserError(
            f"{run.folder.path}: was begun with other settings ({'; '.join(changes)}); restore them, "
            "give the run another name, or remove its folder to start it over"
        )
