"""Every code block of README and docs/ is checked: Python by mypy, YAML by the reader of configs, lines
for a shell by the parsers of our commands, by the Makefile and by the options of our scripts.

Commands are run by test_commands_run.py. Those that no machine of ours can run are checked here too: options and
settings are read by the parser of the command and by the config that it names. What cannot be checked is listed in
`UNCHECKED` and `FOREIGN`, each with the reason.
"""

import configparser
import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest import mark
from support.checkout import ROOT
from test_reference import REFERENCE

from nmt.config_files import load_config
from nmt.extras.sweep.grid import read_grid
from nmt.system.errors import UserError

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES += sorted(ROOT.glob("examples/**/*.md"))
COMMANDS = REFERENCE.find_commands()
TO_FILL_IN = re.compile(r"%|=\.\.\.$|^section\.key=value$|^\.\.\.$")
LAUNCHERS = ("nmt-launch", "nmt-slurm")

# By page, and how the block or the line begins.
UNCHECKED = {
    ("CONTRIBUTING.md", "git clone"): "the address of the repository is for you to fill in",
    ("back-translation.md", "corpus  "): "output",
    ("evaluation.md", "reference  "): "text, tokenised in several ways",
    ("evaluation.md", "13a  "): "text, tokenised in several ways",
    ("evaluation.md", "ref.de  "): "text",
    ("README.md", "  BLEU  "): "output",
    ("README.md", "A woman in a gray"): "translated sentences",
    ("evaluation.md", "BLEU  "): "output",
    ("evaluation.md", "nrefs:1|"): "a signature",
    ("evaluation.md", "verdict: "): "output",
    ("serving.md", '{"translatedText"'): "the answer",
    ("tracking.md", "[project]"): "TOML, which no command of ours reads",
}
# Programs that are not ours, and why their own words are not checked; a call of ours among them is.
FOREIGN = {
    **dict.fromkeys("awk cat cd do done echo for head paste python3 tar".split(), "the shell's"),
    **dict.fromkeys("aws curl docker sbatch".split(), "needs another machine, or a daemon"),
    **dict.fromkeys(
        "argospm comet-score marian-decoder npm translateLocally".split(), "not installed with nmt"
    ),
    **dict.fromkeys("git sacrebleu tensorboard torchrun".split(), "another project's options"),
}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str  # of a fenced block; "" for an indented one
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def collect_blocks(page: Path) -> list[Block]:
    """Return the fenced and the indented blocks of a page."""
    blocks: list[Block] = []
    lines = page.read_text().split("\n")
    number = 0
    while number < len(lines):
        line = lines[number]
        fence = re.match(r"( *)```(\w*)", line)
        is_code = line.startswith("    ") and (number == 0 or not lines[number - 1].strip())
        start = number
        if fence:
            number += 1
            while lines[number].strip() != "```":
                number += 1
            body = [text.removeprefix(fence[1]) for text in lines[start + 1 : number]]
            blocks.append(Block(page, start + 1, fence[2] or "text", "\n".join(body)))
        elif is_code and line.startswith(indent := _find_indent(lines, start)):
            while number < len(lines) and (lines[number].startswith(indent) or not lines[number]):
                number += 1
            body = [text.strip() for text in lines[start:number]]
            blocks.append(Block(page, start + 1, "", "\n".join(body).strip("\n")))
            number -= 1
        number += 1
    return blocks


def _find_indent(lines: list[str], number: int) -> str:
    """Return how far code is indented here: in an item of a list, twice."""
    before = [line for line in lines[:number] if line.strip() and not line.startswith(" ")]
    is_in_list = bool(before) and re.match(r"(\d+\.|-) ", before[-1]) is not None
    return " " * (8 if is_in_list else 4)


BLOCKS = [block for page in PAGES for block in collect_blocks(page)]


def find_reason(block: Block, text: str) -> str | None:
    """Return why a block or a line is not checked, or None."""
    if block.page.parent.name == "reference" and block.language == "text":
        return "the notes of --help"
    for (page, start), reason in UNCHECKED.items():
        if block.page.name == page and text.startswith(start):
            return reason
    return None


def list_commands(text: str) -> list[str]:
    """Return the command lines of a block: all, or those after a `$` if it has any."""
    joined = re.sub(r" *\\\n *", " ", text)
    lines = [line for line in joined.split("\n") if line.strip()]
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return prompted or lines


def split_commands(line: str) -> Iterator[list[str]]:
    """Return the words of each simple command of a line, without redirections and comments.

    Two spaces begin a comment, as in the pages; brackets around what may be left out are dropped.
    """
    line = re.split(r"  +| # ", line.strip())[0]
    line = re.sub(r"\[(?=[-s])([^\]]*)\]", r"\1", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>()")
    lexer.whitespace_split = True
    words: list[str] = []
    is_target = False  # of a redirection
    for token in lexer:
        if token and set(token) <= set("|;&()"):
            yield words
            words = []
        elif token and set(token) <= set("<>"):
            is_target = True
        elif is_target:
            is_target = False
        else:
            words.append(token)
    yield words


def find_fault(words: list[str]) -> str | None:
    """Return what is wrong with a simple command."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]  # variables of the environment
    if not words:
        return None
    program, *rest = words
    program = program.removeprefix(".venv/bin/")
    if program in COMMANDS:
        return find_fault_of_ours(program, rest)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = [word for word in rest if "=" not in word and word not in targets]
        return f"the Makefile has no {unknown}" if unknown else None
    if program == "pip":
        return find_fault_of_extras(rest)
    if program in ("python", "bash", "sh") or program.startswith("scripts/"):
        return find_fault_of_script(words if program.startswith("scripts/") else rest)
    if program in LAUNCHERS:
        return find_fault_of_script(words)
    for ours in (*LAUNCHERS, "nmt.commands.train"):
        if ours in rest:
            return find_fault_of_script(rest[rest.index(ours) :])
    if program == "docker" and "--config" in rest:
        return find_fault_of_ours("nmt-train", rest[rest.index("--config") :])
    return None if program in FOREIGN else f"{program} is no command known here"


def find_fault_of_ours(program: str, words: list[str]) -> str | None:
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            args = vars(COMMANDS[program].parse_arguments(words))
    except (SystemExit, UserError) as error:
        return stderr.getvalue() or str(error)
    settings = args.get("overrides", args.get("settings", []))
    named = args.get("config")
    is_shipped = named is not None and (ROOT / "configs" / named).is_file()
    try:
        load_config(
            named if is_shipped else "base.yaml",
            [word for word in settings if not TO_FILL_IN.search(word)],
        )
    except UserError as error:
        return str(error)
    return None


def find_fault_of_extras(words: list[str]) -> str | None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for word in words:
        if extras := re.fullmatch(r"\.\[(.*)\]", word):
            for extra in extras[1].split(","):
                if extra not in setup["options.extras_require"]:
                    return f"setup.cfg has no extra {extra}"
    return None


def find_fault_of_script(words: list[str]) -> str | None:
    """Check the options of a script by its text, and those of nmt-train behind them by its parser."""
    name, *rest = words
    if name == "-m":
        name, *rest = rest
    if name == "nmt.commands.train":
        return find_fault_of_ours("nmt-train", rest)
    file = ROOT / "scripts" / name if name in LAUNCHERS else ROOT / name
    if not file.is_file():
        return f"there is no {name}"
    if name in LAUNCHERS and "--config" in rest:
        fault = find_fault_of_ours("nmt-train", rest[rest.index("--config") :])
        if fault:
            return fault
        rest = rest[: rest.index("--config")]
    source = file.read_text()
    options = [word.partition("=")[0] for word in rest if re.match(r"--[a-z]", word)]
    unknown = [
        option for option in options if not re.search(rf"(--|[\"']){option[2:]}(?![\w-])", source)
    ]
    return f"{name} has no {unknown}" if unknown else None


def list_faults(block: Block) -> Iterator[str]:
    """List what is wrong with the lines for a shell of a block, each with its place."""
    if find_reason(block, block.text):
        return
    for line in list_commands(block.text):
        if not find_reason(block, line):
            faults = map(find_fault, split_commands(line))
            yield from (f"{block}: {line}: {fault}" for fault in faults if fault)


def test_lines_for_a_shell_are_understood() -> None:
    blocks = [block for block in BLOCKS if block.language in ("", "text", "bash", "sh")]
    assert blocks
    assert [fault for block in blocks for fault in list_faults(block)] == []


def test_configs_can_be_read(tmp_path: Path) -> None:
    path, faults = tmp_path / "config.yaml", []
    blocks = [block for block in BLOCKS if block.language == "yaml"]
    for block in blocks:
        path.write_text(block.text)
        try:
            if re.search("^base:", block.text, re.MULTILINE):
                read_grid(str(path), tmp_path / "sweep")
            else:
                load_config(str(path))
        except UserError as error:
            faults.append(f"{block}: {error}")
    assert blocks and faults == []


@mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_python_blocks_have_no_type_errors(tmp_path: Path) -> None:
    blocks = [block for block in BLOCKS if block.language == "python"]
    for number, block in enumerate(blocks):
        text = f"# mypy: disable-error-code=no-untyped-def\n{block.text}\n"
        (tmp_path / f"block_{number}.py").write_text(text)
    # without options, which would make mypy read again what `make types` has just read
    command = [sys.executable, "-m", "mypy", *sorted(map(str, tmp_path.glob("*.py")))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + "\n".join(map(str, blocks))


def test_blocks_of_other_languages_are_listed() -> None:
    known = {"", "text", "bash", "sh", "yaml", "python"}
    known |= {"nginx", "ini"}  # in serving.md, tried by hand with nginx and systemd-analyze verify
    assert [str(block) for block in BLOCKS if block.language not in known] == []


@mark.parametrize(
    "line",
    [
        "nmt-train --config demo.yaml --explian",
        "nmt-train --config demo.yaml training.step=5",
        "nmt-train --config demo.yaml training.steps=many > log",
        "nmt-train --config demo.yaml --profile --plan",
        "cat text | nmt-translate RUN --n-best four",
        "nmt-translat RUN",
        "make demos",
        "pip install '.[exports]'",
        "nmt-launch --host 2 -- --config demo.yaml",
        "nmt-launch -- --config demo.yaml seeds=1",
        "python scripts/bench/step.py --confg demo.yaml",
    ],
)
def test_faults_are_found(line: str) -> None:
    assert any(find_fault(words) for words in split_commands(line))
