"""GRID.yaml -> the runs of a sweep: every combination of a setting and a seed, each with its config.

Mistakes in the grid are found here, before the first run starts: an unknown setting, a value that is
invalid beside another, two runs of one folder or of the same settings, a run that cannot be averaged or
scored as the grid says, or that was begun with other settings. All else, such as missing text, each run
says when it begins. Runs with the same data and vocabulary settings share a store.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nmt.config import MACHINE_KEYS, RunConfig
from nmt.config_files import (
    PlacedSetting,
    find_shipped_configs,
    format_setting,
    list_differences,
    load_config,
    load_recorded_config,
    parse_override,
    read_config_text,
)
from nmt.corpus.ledger import check_same, list_settings
from nmt.system.errors import UserError, explain_missing
from nmt.system.files import digest_values, has_plain_file
from nmt.system.records import RecordReader, Rule, default
from nmt.system.run_folder import MANIFEST_FILE, RunFolder
from nmt.system.strict_yaml import Values, YamlTree, parse_yaml

ScoredSet = Literal["dev", "test"]
COUNT_OF_AVERAGED = Rule(lambda n: n >= 1, "be at least 1; null scores the last checkpoint alone")
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
}
# What to do about an existing run for which the grid has other settings or other text
RESTORE = "restore what it had, give the run another name, or remove its folder to start it over"
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
    settings: Values = field(default_factory=dict)
    average: int | None = default(None, COUNT_OF_AVERAGED)
    score: tuple[ScoredSet, ...] = ("dev",)
    runs: dict[str, Values] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)

    def check(self) -> str | None:
        if bool(self.runs) == bool(self.grid):
            return "needs either runs or grid: runs lists settings by name, grid combines values"
        return None


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep: a row of its table, and a seed."""

    name: str  # of its row
    config: RunConfig

    @property
    def folder(self) -> RunFolder:
        return self.config.run_folder

    @property
    def label(self) -> str:
        return self.config.name


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
        if key in tree.lines and key:
            return tree.name_place(key)
        return f"{path}: {key}" if key else str(path)  # a missing key, or the whole file

    grid = RecordReader(name_place).read(GridFile, tree.values)
    rows = list(list_named_rows(grid, tree))
    check_overrides(rows, overrides, path)
    # The base's store is not used, but one of the grid or of the command line is.
    shared = [
        PlacedSetting("data.store", "", {}),
        *locate_settings(grid.settings, "settings", tree),
    ]
    seeds: list[list[PlacedSetting]] = [[]]  # without a setting it is the config's own
    if grid.seeds is not None:
        lines = {"seed": tree.lines["seeds"]}
        seeds = [[PlacedSetting("seed", seed, lines)] for seed in grid.seeds]

    runs: dict[str, PlannedRun] = {}
    by_config: dict[RunConfig, PlannedRun] = {}
    for (row, row_settings), seed in itertools.product(rows, seeds):
        settings = [*shared, *row_settings, *seed]
        try:
            config = load_config(grid.base, overrides, settings, path.parent)
            run = PlannedRun(row, place_run(row, config, folder))
            check_run(run, grid)
        except UserError as error:
            raise UserError(f"run {row!r}: {error}") from None
        other = runs.setdefault(run.label.casefold(), run)  # some file systems take a for A
        if other is not run:
            raise UserError(
                f"{path}: runs {other.name!r} and {row!r} would share the folder "
                f"{run.folder.path}; give each a name and a seed of its own"
            )
        twin = by_config.setdefault(equalize_depths(config), run)
        if twin is not run:
            raise UserError(
                f"{path}: runs {twin.name!r} and {row!r} have the same settings, so they would be "
                "the same run; change one of them, or leave it out"
            )
    if not runs:
        raise UserError(
            f"{path}: has no runs; give at least one seed, and one value of each setting"
        )
    return Sweep(folder, grid.average, grid.score, tuple(runs.values()))


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
    for name, values in grid.runs.items():
        yield name, locate_settings(values, f"runs.{name}", tree)
    if grid.grid:
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
            words.append(f"{short_key} {format_setting(value)}")
            settings.append(locate_setting(key, value, f"grid.{key}[{i}]", tree))
        yield ", ".join(words), settings


def locate_settings(values: Values, at: str, tree: YamlTree) -> list[PlacedSetting]:
    return [locate_setting(key, value, f"{at}.{key}", tree) for key, value in values.items()]


def locate_setting(key: str, value: Any, at: str, tree: YamlTree) -> PlacedSetting:
    """Return the setting at the key `at` of the grid, with the lines of all that is in it."""
    refuse_key(key, tree.name_place(at))
    lines = {key: tree.lines[at]}
    for inner, line in tree.lines.items():
        if inner.startswith((f"{at}.", f"{at}[")):
            lines[key + inner[len(at) :]] = line
    return PlacedSetting(key, value, lines)


def refuse_key(key: str, what: str) -> None:
    if key in REFUSED_KEYS:
        raise UserError(f"{what}: {REFUSED_KEYS[key]}; leave it out")


def check_overrides(rows: Sequence[NamedRow], overrides: Sequence[str], path: Path) -> None:
    """Refuse settings of the command line that would undo the differences between runs."""
    varied = {
        line_key for _, settings in rows for setting in settings for line_key in setting.lines
    }
    for text in overrides:
        given = parse_override(text)
        refuse_key(given.key, text)
        for key in given.lines:
            if key in varied:
                raise UserError(
                    f"{text}: the runs of {path} differ in {key}; leave it out, or change the grid"
                )


def place_run(name: str, config: RunConfig, folder: Path) -> RunConfig:
    """Give a run its folder, and a store that it shares with runs of the same data, if it has none."""
    # without what a folder's name should not have: N = 2 becomes N-2
    label = re.sub(r"[^\w.+-]+", "-", f"{name}-seed{config.seed}", flags=re.ASCII).strip("-.")
    data = config.data
    if not data.store:
        # a short name for the data and vocabulary that the config prepares
        settings = list_settings(data, config.vocab)
        digest = digest_values([settings, str(Path(data.root).absolute())])[:10]
        data = replace(data, store=str(folder / "stores" / digest))
    return replace(config, name=label, out=str(folder / label), data=data)


def equalize_depths(config: RunConfig) -> RunConfig:
    """Return the config with the depths of both stacks written in one form, as for comparison."""
    model = config.model
    model = replace(
        model, n_layers=1, encoder_layers=model.encoder_depth, decoder_layers=model.decoder_depth
    )
    return replace(config, model=model)


def check_run(run: PlannedRun, grid: GridFile) -> None:
    """Raise UserError for what would stop this run in its last step, or change its result in silence."""
    data, training = run.config.data, run.config.training
    for name, key, corpus in (("dev", "data.valid", data.valid), ("test", "data.test", data.test)):
        if name in grid.score and corpus is None:
            raise UserError(f"score has {name}, but {key} is not set; set it, or change score")
    if training.mirror is not None:
        raise UserError("training.mirror: one place cannot hold several runs; leave it out")
    if grid.average is not None and training.keep_checkpoints < grid.average:
        raise UserError(
            f"average is {grid.average}, but training.keep_checkpoints is "
            f"{training.keep_checkpoints}; raise it"
        )
    check_unchanged(run)


def check_unchanged(run: PlannedRun) -> None:
    """Refuse a run that was begun with other settings, or trained on other text."""
    path = run.folder.config
    if not has_plain_file(path):
        return
    recorded = load_recorded_config(path)
    changes = list_differences(recorded, run.config, SCORE_NEUTRAL_KEYS)
    if changes:
        raise UserError(
            f"{run.folder.path}: was begun with other settings ({'; '.join(changes)}); {RESTORE}"
        )
    check_text(run, Path(recorded.data.store))


def check_text(run: PlannedRun, old_store: Path) -> None:
    """Refuse a run that was trained on other text than it would be now. Before its new store is made,
    the text for that is compared with the old store.
    """
    from nmt.checkpoint.checkpoint import read_origin
    from nmt.checkpoint.run_checkpoints import list_steps

    data = run.config.data
    steps = list_steps(run.folder)
    for store in (Path(data.store), old_store):
        if steps and has_plain_file(store / MANIFEST_FILE):
            trained_on = read_origin(run.folder.checkpoint(steps[-1])).store_sha256
            check_same(store, data, run.config.vocab, trained_on, RESTORE)
            break
