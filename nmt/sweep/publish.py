"""What a study keeps in a repository: the grid, the table, and of each run its config, its curves and
its scores, but no weights.

No file holds a path of the machine: an absolute path becomes its last name.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from nmt.config import load_recorded_config, to_plain_values
from nmt.sweep.grid import PlannedRun, Sweep, find_grid
from nmt.sweep.plot import PLOT_FILE
from nmt.sweep.table import TABLE_FILES, shorten_path_values
from nmt.system.errors import UserError
from nmt.system.files import (
    has_plain_file,
    make_folder,
    open_plain_file,
    read_bytes,
    write_bytes,
    write_text,
)
from nmt.system.run_folder import RunFolder
from nmt.system.strict_yaml import format_yaml
from nmt.train.metrics_log import LONGEST_LINE, parse_event

GRID_FILE = "grid.yaml"
PUBLISHED_KINDS = ("train", "valid")  # of lines of metrics.jsonl
# In text, a path begins where a value may begin, and ends at a blank unless it is quoted.
ABSOLUTE_PATH = re.compile(
    r"""
      (?<= ["'] ) / [^"'\n]+ (?= ["'] )
    | (?<! [^\s=,({\["'] ) / [^\s,)}\]"']+
    """,
    re.VERBOSE,
)


def check_publishable(folder: Path, grid: str) -> None:
    """Refuse a folder that holds something else than a published sweep, or the grid itself."""
    target = folder / GRID_FILE
    if target.exists() and target.samefile(find_grid(grid)):
        raise UserError(
            f"--publish {folder}: holds the grid that is being run; give another folder"
        )
    if folder.is_dir() and any(folder.iterdir()) and not (folder / GRID_FILE).is_file():
        raise UserError(
            f"--publish {folder}: is not empty, and has no {GRID_FILE}; give a new folder"
        )


def publish_sweep(sweep: Sweep, grid: str, overrides: Sequence[str], folder: Path) -> None:
    """Write the study into `folder`; what a run does not have yet is left out."""
    make_folder(folder)
    text = shorten_paths_in_text(find_grid(grid).read_text("utf-8"))
    if overrides:
        words = shlex.join(map(hide_override, overrides))
        text = f"# nmt-sweep {GRID_FILE} --out FOLDER {words}\n{text}"
    write_text(folder / GRID_FILE, text)
    for name in TABLE_FILES:  # their notes have messages of failed runs
        if has_plain_file(sweep.folder / name):
            text = read_bytes(sweep.folder / name).decode()
            write_text(folder / name, shorten_paths_in_text(text))
    if has_plain_file(sweep.folder / PLOT_FILE):
        write_bytes(folder / PLOT_FILE, read_bytes(sweep.folder / PLOT_FILE))
    for run in sweep.runs:
        publish_run(run, folder / run.label)


def publish_run(run: PlannedRun, folder: Path) -> None:
    source, target = run.folder, RunFolder(folder)
    if not has_plain_file(source.config):
        return
    make_folder(folder)
    values = shorten_path_values(to_plain_values(load_recorded_config(source.config)))
    write_text(target.config, format_yaml(values))
    write_bytes(target.metrics, b"".join(select_lines(source.metrics)))
    if has_plain_file(source.results):
        write_bytes(target.results, read_bytes(source.results))


def select_lines(metrics: Path) -> list[bytes]:
    """Return the lines of the loss and of validations."""
    if not has_plain_file(metrics):
        return []
    lines = []
    with open_plain_file(metrics) as file:
        while line := file.readline(LONGEST_LINE):
            event = parse_event(line)
            if event is not None and event.kind in PUBLISHED_KINDS:
                lines.append(line)
    return lines


def hide_override(text: str) -> str:
    """data.root=/my corpora/multi30k -> data.root=multi30k."""
    key, _, value = text.partition("=")
    return f"{key}={shorten_paths_in_text(shorten_path_values(value))}"


def shorten_paths_in_text(text: str) -> str:
    """Replace each absolute path in a text by its last name."""
    return ABSOLUTE_PATH.sub(lambda found: Path(found[0]).name, text)
