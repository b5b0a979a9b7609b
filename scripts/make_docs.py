"""Writes what the documentation takes from the code: the pages of docs/reference, the comparison with
the paper that docs/recipe.md shows, the tables of docs/coming-from.md, the speeds in docs/benchmarks.md,
the lines of the files that docs/design.md tells a newcomer to read, and the curves in README.md.

Settings come from the dataclasses in nmt/config.py with the comments above their fields, commands from
their argparse parsers. So nothing is written twice, and tests/docs/test_reference.py fails while a page
is older than the code. `make docs` runs this.
"""

import argparse
import ast
import dataclasses
import importlib
import json
import re
import textwrap
import typing
from pathlib import Path
from typing import Any, Literal

from nmt import config
from nmt.config import CHANGEABLE_KEYS, RunConfig
from nmt.config_files import list_setting_keys, load_config
from nmt.extras.report.curves import BLEU, Chart, ReferenceLine, Series
from nmt.extras.report.markup import read_page_file
from nmt.extras.report.vega import make_spec
from nmt.foreign_names import TOOLKITS, read_counterparts
from nmt.paper import explain

ROOT = Path(__file__).parents[1]
FLOORS = ROOT / "scripts" / "bench" / "floors.json"
EQUAL_TIME = ROOT / "docs/results/equal-time/runs.jsonl"
CURVES = ROOT / "docs/images/bleu-by-minute.svg"
NAMES_OF_TYPES = {int: "whole number", float: "number", str: "text", bool: "true, false"}
TRAINERS = ("nmt", "fairseq", "eole")
PUBLISHED = ReferenceLine("published, on the test set, lower-cased: about 41.0", 41.0)
SETTINGS_INTRO = """\
# Settings

Made from nmt/config.py by `make docs`; change it there. [How settings work](../configuration.md) explains where they
are written and which wins. `nmt-train --config C --print-config` prints them as they are for a run. Their comparison
with the paper is [the recipe](../recipe.md).
"""
COMMANDS_INTRO = """\
# Commands

Made from the commands' own parsers by `make docs`; `--help` says the same. Settings such as `training.steps=1000` may
appear anywhere on the command line, where a command takes them. Data goes to standard output, everything else to
standard error. Exit codes: 0 done, 1 a failure, 2 a mistake in the input, 75 stopped by a signal and saved, 130 the
same after Ctrl-C.
"""


def find_commands() -> dict[str, Any]:
    """Return the module of each command."""
    found = re.findall(
        r"^    (nmt-\w+) = (.*):main$", (ROOT / "setup.cfg").read_text(), re.MULTILINE
    )
    return {name: importlib.import_module(module) for name, module in sorted(found)}


def read_comments(kind: type) -> dict[str, str | None]:
    """Return the comment above each field of a dataclass of nmt/config.py; None: it shares the one of
    the field above it.
    """
    source = Path(str(config.__file__)).read_text()
    lines = source.split("\n")
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    (found,) = [node for node in classes if node.name == kind.__name__]
    comments: dict[str, str | None] = {}
    for field in found.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        first = field.lineno - 1
        above = first
        while lines[above - 1].strip().startswith("#"):
            above -= 1
        words = [line.strip().removeprefix("#").strip() for line in lines[above:first]]
        comments[field.target.id] = " ".join(words) or None
    return comments


def describe_values(hint: Any, rule: Any) -> str:
    """Say which values a setting takes."""
    options = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{option}`" for option in options)
    if typing.get_origin(hint) is tuple:
        return f"list of {describe_values(options[0], None)}"
    if options:
        kinds = [option for option in options if option is not type(None)]
        return ", ".join(describe_values(kind, rule) for kind in kinds)
    if dataclasses.is_dataclass(hint):
        return "corpus"
    name = NAMES_OF_TYPES[hint]
    if rule and hint is not bool:
        name += f", {rule.words.removeprefix('be ')}"
    return name


def format_default(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def format_cell(text: str, known: set[str], prefix: str) -> str:
    """Turn a comment into a cell of a table: names of settings as code, paths of pages as links."""
    for character, written in (("|", r"\|"), ("<", "&lt;"), ("*", r"\*")):
        text = text.replace(character, written)

    def mark_setting(word: re.Match[str]) -> str:
        return f"`{word[0]}`" if word[0] in known else word[0]

    def link_page(path: re.Match[str]) -> str:
        page, anchor = path[1], path[2] or ""
        return f"[{page}]({prefix}{page}{anchor})"

    text = re.sub(r"(?<![\w./#-])[a-z_]+(?:\.[a-z_]+)*(?![\w/=-]|\.\w)", mark_setting, text)
    return re.sub(r"docs/([\w-]+\.md)(#[\w-]*)?", link_page, text)


def list_rows(kind: type, known: set[str]) -> list[str]:
    """Return the rows of a section's table; fields under one comment share a row."""
    hints = typing.get_type_hints(kind)
    comments = read_comments(kind)
    groups: list[list[dataclasses.Field[Any]]] = []
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.default):
            continue  # a section of its own
        if comments[field.name] is None:
            groups[-1].append(field)
        else:
            groups.append([field])
    rows = []
    for group in groups:
        names = []
        values = []
        defaults = []
        for field in group:
            names.append(f"`{field.name}`")
            values.append(describe_values(hints[field.name], field.metadata.get("rule")))
            defaults.append(format_default(field.default))
        if len(set(defaults)) == 1:
            defaults = defaults[:1]
        meaning = format_cell(str(comments[group[0].name]), known, "../")
        distinct_values = dict.fromkeys(values)
        cells = (", ".join(names), "; ".join(distinct_values), ", ".join(defaults), meaning)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def render_settings() -> str:
    dotted = {key for key in list_setting_keys() if "." in key}
    sections: list[tuple[str, type]] = [("Of the run", RunConfig)]
    for field in dataclasses.fields(RunConfig):
        if dataclasses.is_dataclass(field.default):
            sections.append((field.name, type(field.default)))
            if field.name == "data":
                sections.append(("data.clean", config.CleanConfig))
                sections.append(("A corpus", config.CorpusConfig))
    parts = [SETTINGS_INTRO]
    for title, kind in sections:
        # names without a dot that no ordinary word has
        names = [field.name for field in dataclasses.fields(kind)]
        known = dotted | {name for name in names if "_" in name}
        parts += [f"## {title}\n", f"{' '.join(str(kind.__doc__).split())}\n"]
        parts += ["| key | values | default | meaning |", "|---|---|---|---|"]
        parts += [*list_rows(kind, known), ""]
    changeable = ", ".join(f"`{key}`" for key in CHANGEABLE_KEYS)
    parts += [
        "## What may change when a run is continued\n",
        f"{changeable}. Any other change is refused by name, because the result would be a different run.",
    ]
    return "\n".join(parts).rstrip() + "\n"


def render_commands() -> str:
    parts = [COMMANDS_INTRO]
    for name, module in find_commands().items():
        parser: argparse.ArgumentParser = module.build_parser()
        parts += [f"## {name}\n", f"{parser.description}\n", "| argument | meaning |", "|---|---|"]
        for action in parser._actions:
            if action.help != argparse.SUPPRESS and action.dest != "help":
                parts.append(f"| {format_argument(action)} | {format_help(parser, action)} |")
        *_, examples = str(parser.epilog).partition("examples:\n")
        examples, _, notes = examples.partition("\n\n")
        lines = [line.removeprefix("  ") for line in examples.rstrip().split("\n")]
        parts += ["\n```sh", *lines, "```\n"]
        if notes:
            parts += ["```text", notes.rstrip(), "```\n"]
    return "\n".join(parts).rstrip() + "\n"


def format_argument(action: argparse.Action) -> str:
    if action.nargs == 0:
        values = ""
    elif action.choices is not None:
        values = " {" + ",".join(map(str, action.choices)) + "}"
    elif isinstance(action.metavar, tuple):
        values = " " + " ".join(action.metavar)
    elif action.nargs == "?":
        values = f" [{action.metavar}]"
    else:
        values = f" {action.metavar}"
    words = ", ".join(action.option_strings) + values
    return "`" + words.strip().replace("|", r"\|") + "`"


def format_help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = str(action.help) % {"prog": parser.prog, "default": action.default}
    meaning = format_cell(" ".join(text.split()), set(), "../")
    if action.required and action.option_strings:
        meaning += " (required)"
    return meaning


def update_recipe(text: str) -> str:
    """Replace the comparison with the paper in docs/recipe.md."""
    command = "    $ nmt-train --config base.yaml --explain model.norm=pre\n"
    shown = explain(load_config("base.yaml", ["model.norm=pre"])).splitlines()
    indented = textwrap.indent("\n".join(shown) + "\n", "    ")
    last = f"    {shown[-1]}\n"
    before, _, rest = text.partition(command)
    _, _, after = rest.partition(last)
    return before + command + indented + after


def update_coming_from(text: str) -> str:
    """Replace the table of each toolkit in docs/coming-from.md."""
    known = set(list_setting_keys())
    for toolkit, title in TOOLKITS.items():
        rows = [f"| {title} | here | |", "|---|---|---|"]
        for counterpart in read_counterparts():
            theirs = ", ".join(f"`{name}`" for name in counterpart.names.get(toolkit, ()))
            ours = ", ".join(f"`{name}`" for name in counterpart.ours)
            cells = [theirs, ours, format_cell(counterpart.note, known, "")]
            if theirs:
                rows.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
        text = re.sub(rf"^\| {title} \|.*\n(\|.*\n)*", "\n".join(rows) + "\n", text, flags=re.M)
    return text


def update_floors(text: str) -> str:
    """Replace the table of speeds in docs/benchmarks.md by what `make bench-floors` recorded."""
    recorded = json.loads(FLOORS.read_text())
    yardsticks = recorded.pop("yardsticks")
    rows = [f"| ratio | {' | '.join(recorded)} | to |", "|---" * (len(recorded) + 2) + "|"]
    for name in dict.fromkeys(name for figures in recorded.values() for name in figures):
        values = [
            f"{figures[name]:.2f}" if name in figures else "" for figures in recorded.values()
        ]
        rows.append(f"| {name} | {' | '.join(values)} | {yardsticks[name.split(',')[0]]} |")
    return re.sub(r"^\| ratio \|.*\n(\|.*\n)*", "\n".join(rows) + "\n", text, flags=re.M)


def update_reading_list(text: str) -> str:
    """Replace the number of lines of each file that docs/design.md lists, and their sum."""
    counts: list[int] = []

    def count_lines(row: re.Match[str]) -> str:
        counts.append(len((ROOT / row[1]).read_text().splitlines()))
        return f"| `{row[1]}` | {counts[-1]:,} |"

    text = re.sub(r"^\| `(nmt/[\w/]+\.py)` \| [\d,]+ \|", count_lines, text, flags=re.M)
    total = f"| **together** | {sum(counts):,} | {len(counts)} files |"
    return re.sub(r"^\| \*\*together\*\* .*", total, text, flags=re.M)


UPDATES = {
    "recipe.md": update_recipe,
    "coming-from.md": update_coming_from,
    "benchmarks.md": update_floors,
    "design.md": update_reading_list,
}


def render_pages() -> dict[Path, str]:
    """Return the content of each page that is made from the code."""
    docs = ROOT / "docs"
    pages = {
        docs / "reference" / "settings.md": render_settings(),
        docs / "reference" / "commands.md": render_commands(),
    }
    for name, update in UPDATES.items():
        pages[docs / name] = update((docs / name).read_text())
    return pages


def draw_curves() -> str:
    """Return dev BLEU by minute of the longest run of each trainer, as reports draw curves."""
    import vl_convert  # of the extra `report`, which no test of the pages needs

    runs = [json.loads(line) for line in EQUAL_TIME.open() if '"multi30k"' in line]
    runs.sort(key=lambda run: len(run["points"]))
    longest = {run["system"]: run["points"] for run in runs}
    series = tuple(Series(0, name, ()) for name in TRAINERS)
    spec = make_spec(Chart(BLEU, BLEU, series, (PUBLISHED,), from_zero=True), n_runs=1)
    spec["data"]["values"] = [{"s": name, **point} for name in TRAINERS for point in longest[name]]
    curves = spec["layer"][0]
    del curves["transform"]
    curves["mark"]["point"] = True
    encoding = curves["encoding"]
    encoding["x"] = {"field": "minutes", "type": "quantitative", "title": "processor minutes"}
    encoding["y"]["field"] = "bleu"
    encoding["color"]["legend"]["columnPadding"] = 60
    svg = vl_convert.vegalite_to_svg(spec | {"width": 800, "height": 280})
    style = read_page_file("page.css").partition("* {")[0]
    return svg.replace("><", f"><style>{style}svg {{ background: var(--paper) }}</style><", 1)


if __name__ == "__main__":
    for path, content in render_pages().items():
        path.write_text(content)
    CURVES.write_text(draw_curves())
