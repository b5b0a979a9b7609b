"""Size is a feature: sizes.json has one number for each ring of the house, each extra, the tests, the scripts,
the pages, the settings, the options and the words of the documentation, and this fails where one is exceeded.

Code is counted in nodes of syntax (`ast.expr`), so neither comments nor line breaks count. Code and words may
exceed their number by the larger of 1 % and 150, so that a mended mistake is not refused. After a piece of
work the numbers are set to what is: `python tests/test_size.py`. They may only fall: a commit that raises one
does only that, and names the issue whose stated price it is.
"""

import ast
import json
import re
import subprocess
from collections import Counter
from pathlib import Path

from nmt.config_files import list_setting_keys

ROOT = Path(__file__).parent.parent
SIZES = ROOT / "tests" / "sizes.json"
MIN_MARGIN = 150
PAGES = (".js", ".css", ".html")
WORDS = "words of docs"  # and of README.md, without docs/reference, which is generated
EXACT = {"lines of pages", "settings", "options"}  # these have no margin


def find_ring(path: Path) -> str:
    """core, engines, extras/NAME, tests or scripts, of a file of this checkout."""
    top, *inner = path.relative_to(ROOT).parts
    if top in ("tests", "scripts"):
        return top
    if inner[0] == "extras":
        return f"extras/{inner[1]}" if len(inner) > 2 else "extras"
    return "engines" if inner[0] == "engines" else "core"


def list_code() -> list[Path]:
    paths = []
    for top in ("nmt", "tests", "scripts"):
        paths += sorted(ROOT.glob(f"{top}/**/*.py"))
    return paths


def count_nodes(text: str) -> tuple[int, int]:
    """All nodes of a source, and how many of them are in annotations."""
    tree = ast.parse(text)
    noted = 0
    for node in ast.walk(tree):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is not None:
                noted += _count(annotation)
    return _count(tree), noted


def _count(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.expr) for node in ast.walk(tree))


def measure() -> tuple[dict[str, int], dict[str, int]]:
    """Return what sizes.json records, and of each ring the nodes without annotations."""
    sizes: Counter[str] = Counter()
    plain: Counter[str] = Counter()
    for path in list_code():
        nodes, noted = count_nodes(path.read_text())
        sizes[find_ring(path)] += nodes
        plain[find_ring(path)] += nodes - noted
    pages = [path for path in ROOT.glob("nmt/**/*") if path.suffix in PAGES]
    options = (ROOT / "docs/reference/commands.md").read_text().split("\n")
    lines = {
        "lines of pages": sum(path.read_text().count("\n") for path in pages),
        "settings": len(list_setting_keys()),
        "options": sum(line.startswith("| `-") for line in options),
        WORDS: sum(
            len(path.read_text().split()) for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]
        ),
    }
    return dict(sorted(sizes.items())) | lines, dict(plain)


def list_grown() -> list[str]:
    """The files that grew most since sizes.json was last written, if this is a checkout of git."""
    commit = _ask_git("log", "-1", "--format=%H", "--", str(SIZES)).strip()
    growth = {}
    for path in list_code() if commit else []:
        name = path.relative_to(ROOT).as_posix()
        before = _ask_git("show", f"{commit}:{name}")
        growth[name] = count_nodes(path.read_text())[0] - count_nodes(before)[0]
    largest = sorted(growth, key=lambda name: -growth[name])[:5]
    return [f"{name}: {growth[name]:+,}" for name in largest if growth[name] > 0]


def _ask_git(*words: str) -> str:
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True
        ).stdout
    except FileNotFoundError:
        return ""


def list_unpriced() -> list[str]:
    """Return the commits that raised a number together with something else, or without an issue that
    states the price, since there are numbers of words.
    """
    unpriced = []
    for commit in _ask_git("log", "--no-merges", "--format=%H", "--", str(SIZES)).split():
        before, after = (_read_sizes(f"{commit}{suffix}") for suffix in ("^", ""))
        if WORDS not in before:
            break
        raised = [name for name, size in after.items() if size > before.get(name, 0)]
        changed = _ask_git("show", "--format=", "--name-only", commit).split()
        message = _ask_git("log", "-1", "--format=%B", commit)
        if raised and (changed != ["tests/sizes.json"] or not re.search(r"issue \d+", message)):
            unpriced.append(f"{commit[:8]} raises {', '.join(raised)}")
    return unpriced


def _read_sizes(commit: str) -> dict[str, int]:
    sizes: dict[str, int] = json.loads(_ask_git("show", f"{commit}:tests/sizes.json") or "{}")
    return sizes


def list_excesses(sizes: dict[str, int], limits: dict[str, int]) -> list[str]:
    """What is larger than its number allows."""
    excesses = []
    for name, size in sizes.items():
        limit = limits.get(name, 0)
        margin = 0 if name in EXACT else max(limit // 100, MIN_MARGIN)
        if size > limit + margin:
            excesses.append(f"{name}: {size:,}, more than {limit:,} and its margin of {margin}")
    return excesses


def test_nothing_outgrows_its_number() -> None:
    sizes, plain = measure()
    limits = json.loads(SIZES.read_text())
    for name, size in sizes.items():
        without = f", {plain[name]:,} without annotations" if name in plain else ""
        print(f"{name}: {size:,}{without}; its number: {limits.get(name, 0):,}")
    excesses = list_excesses(sizes, limits)
    assert not excesses, "\n".join([*excesses, "grew most:", *list_grown()])
    assert sizes.keys() == limits.keys()


def test_numbers_only_fall_unless_an_issue_states_the_price() -> None:
    assert list_unpriced() == []


def test_what_is_too_large_is_seen() -> None:
    limits = {"core": 60_000, "extras/init": 1_000, "options": 90}
    assert list_excesses({"core": 60_600, "extras/init": 1_150, "options": 90}, limits) == []
    (core,) = list_excesses({"core": 60_601}, limits)
    assert core == "core: 60,601, more than 60,000 and its margin of 600"
    assert len(list_excesses({"extras/init": 1_151, "options": 91, "engines": 151}, limits)) == 3
    assert count_nodes("def f(x: list[int]) -> int:\n    return x[0] + 1\n") == (9, 4)


if __name__ == "__main__":
    SIZES.write_text(json.dumps(measure()[0], indent=2) + "\n")
