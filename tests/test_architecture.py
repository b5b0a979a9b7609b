"""The house keeps its shape: levels, imports and names are read from the source.

A folder has a level; a file imports its own folder, without a circle, and lower levels. A new file
needs no row anywhere, a new folder one. What a command needs before it answers --help is measured
by running it.
"""

import ast
import configparser
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pytest import mark
from support.checkout import ROOT

import nmt

# By folder, or by file at the top of nmt/. Rooms of one level do not know each other.
# Engines know the core that they make faster. The core opens one door to them, inside a function, so that
# it also works without them.
DOOR = {("system/engines.py", "engines/choice.py"), ("system/engines.py", "engines.py")}
LEVELS = {
    "system": 0,
    "foreign_names": 0,
    "languages": 0,
    "config": 1,
    "known_test_sets": 1,
    "agreement": 2,
    "config_files": 2,
    "score": 2,
    "data": 3,
    "paper": 3,
    "corpus": 4,
    "model": 4,
    "checkpoint": 5,
    "translate": 6,
    "train": 7,
    "engines": 8,
    "average": 8,
    "evaluate": 9,
    "extras/cards": 10,
    "extras/cluster": 10,
    "extras/curve": 10,
    "extras/inspection": 10,
    "extras/maps": 10,
    "extras/mirror": 10,
    "extras/pair_scores": 10,
    "extras/tracking": 10,
    "extras/profile": 10,
    "extras/prompt": 10,
    "extras/export": 11,
    "extras/report": 11,
    "api": 12,
    "extras/init": 13,
    "extras/serve": 13,
    "extras/sweep": 13,
    "commands": 14,
}
BANNED_NAME = re.compile(
    r"(?i:utils?|helpers?|common|misc)|_?Base(?=[A-Z_]|$)\w*|\w*(Manager|Handler)"
)
CONFIG_NAME = re.compile(r"(\w*_)?(config|args|options|settings|section)")
# `main` is what a console script calls, `EXAMPLES` what its --help ends with, and two tables say which
# of its options do not go together. The reference and the tests of the documentation ask the
# other two.
IN_EVERY_COMMAND = {"main", "EXAMPLES", "CONFLICTS", "NEEDS", "build_parser", "parse_arguments"}
SLOW = ("torch", "numpy", "yaml", "datasets", "sentencepiece", "sacrebleu", "safetensors")

SOURCES = {
    path.relative_to(ROOT / "nmt").as_posix(): path.read_text()
    for path in sorted(ROOT.glob("nmt/**/*.py"))
}
FILES = [name for name in SOURCES if Path(name).name != "__init__.py"]


@cache
def parse(name: str) -> ast.Module:
    return ast.parse(SOURCES[name], name)


def commands() -> dict[str, str]:
    """The console scripts and the modules behind them."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.entry_points"]["console_scripts"].strip().split("\n")
    targets = (line.split("=") for line in lines)
    return {script.strip(): target.strip().removesuffix(":main") for script, target in targets}


def room(name: str) -> str:
    """The folder of a file under nmt/; of an extra, extras/NAME."""
    parts = Path(name).parts
    return "/".join(parts[: 2 if parts[0] == "extras" else 1]).removesuffix(".py")


def imports(name: str) -> Iterator[str]:
    """The files of this package that a file imports anywhere, also inside functions, but for the one
    arrow up: DOOR.
    """
    for node in ast.walk(parse(name)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{name}:{node.lineno}: relative import; write from nmt... import"
            )
            modules = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
        for module in modules:
            path = module.removeprefix("nmt.").replace(".", "/") + ".py"
            if (name, path) in DOOR:
                continue
            if module.startswith("nmt.") and path in SOURCES:
                yield path


def import_faults(name: str) -> Iterator[str]:
    """Imports that run upward, or sideways into another room."""
    level = LEVELS[room(name)]
    for other in sorted(set(imports(name))):
        is_own_room = room(other) == room(name)
        if not is_own_room and LEVELS[room(other)] >= level:
            yield f"{name} (level {level}) imports {other} (level {LEVELS[room(other)]})"


def style_faults(name: str, tree: ast.Module) -> Iterator[str]:
    def fault(node: ast.AST, what: str) -> str:
        return f"{name}:{getattr(node, 'lineno', 1)}: {what}"

    if not (ast.get_docstring(tree) or "").strip():
        yield fault(
            tree, "no docstring at the top: what the file is, why it is so, what always holds"
        )
    for part in Path(name).with_suffix("").parts:
        if BANNED_NAME.fullmatch(part):
            yield fault(tree, f"{part} says nothing; name the file after what it holds")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if BANNED_NAME.fullmatch(node.name):
                yield fault(node, f"{node.name} says nothing; name it after what it is or does")
        if isinstance(node, ast.Global):
            yield fault(node, "global; pass the value on")
        if isinstance(node, ast.arguments) and node.kwarg:
            yield fault(node.kwarg, f"**{node.kwarg.arg}; name the parameters")
        if isinstance(node, ast.Call) and is_lookup_in_config(node):
            yield fault(
                node, f"{ast.unparse(node)}; write the attribute out, so that a typo is an error"
            )


def is_lookup_in_config(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Name) or call.func.id not in ("getattr", "setattr"):
        return False
    last_name = ast.unparse(call.args[0]).rpartition(".")[2]
    return CONFIG_NAME.fullmatch(last_name) is not None


def public_names(tree: ast.Module) -> Iterator[str]:
    """What a file defines at its top, imports apart."""
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            targets = [name for target in node.targets for name in ast.walk(target)]
            names = [name.id for name in targets if isinstance(name, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        yield from (name for name in names if not name.startswith("_"))


def test_every_room_has_a_level_and_every_level_a_room() -> None:
    assert {room(name) for name in FILES} == set(LEVELS)


def test_imports_run_downward() -> None:
    assert [fault for name in FILES for fault in import_faults(name)] == []


def test_no_import_cycle() -> None:
    open_files = {name: set(imports(name)) for name in FILES}
    while leaves := {name for name, needs in open_files.items() if not needs & open_files.keys()}:
        open_files = {name: needs for name, needs in open_files.items() if name not in leaves}
    assert not open_files, f"these import each other in a circle: {sorted(open_files)}"


def test_files_to_read_stand_on_files_before_them() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    files = re.findall(r"^\| `nmt/([\w/]+\.py)` \|", design, re.MULTILINE)
    for number, name in enumerate(files):
        assert set(imports(name)).isdisjoint(files[number + 1 :]), name


def test_names_and_style() -> None:
    examples = {path.name: ast.parse(path.read_text()) for path in ROOT.glob("examples/**/*.py")}
    checked = {name: parse(name) for name in FILES} | examples
    assert examples
    assert [fault for name, tree in checked.items() for fault in style_faults(name, tree)] == []


def test_public_names_are_defined_once() -> None:
    places = defaultdict(list)
    for name in set(FILES) - {"api.py"}:  # which gives its functions the names of the commands
        for public in set(public_names(parse(name))) - IN_EVERY_COMMAND:
            places[public].append(name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_init_files_are_empty_and_packaged() -> None:
    packages = {f"nmt/{Path(name).parent}".removesuffix("/.") for name in SOURCES}
    inits = {name: text for name, text in SOURCES.items() if name.endswith("__init__.py")}
    assert [name for name, text in inits.items() if text] == ["__init__.py"]
    assert inits["__init__.py"] == f'__version__ = "{nmt.__version__}"\n'
    assert {f"{package}/__init__.py" for package in packages} == {f"nmt/{name}" for name in inits}
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = {package.replace(".", "/") for package in setup["options"]["packages"].split()}
    assert listed == packages | {"nmt/configs"}


def test_the_model_is_plain() -> None:
    """Devices, compilers and caches are the business of backends, which a trainer or a translator hands in."""
    told = re.compile(
        r"device\.type|is_cuda|is_compiling|numba|triton|mkldnn|nmt\.system\.(device|caches)|nmt\.engines"
    )
    faults = []
    for name, source in SOURCES.items():
        if name.startswith("model/"):
            faults += [
                f"{name}: {line.strip()}" for line in source.splitlines() if told.search(line)
            ]
    assert faults == []


def test_commands_import_nothing_slow_at_the_top() -> None:
    tops: list[tuple[str, str]] = []
    for name in FILES:
        for node in parse(name).body if name.startswith("commands/") else []:
            if isinstance(node, ast.Import):
                tops.extend((name, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                tops.append((name, str(node.module)))
    assert tops
    assert [(name, module) for name, module in tops if module.split(".")[0] in SLOW] == []


@mark.parametrize("script", commands())
def test_help_answers_at_once_and_without_torch(script: str) -> None:
    program = f"""
import json, sys, time
sys.argv = [{script!r}, "--help"]
try:
    from {commands()[script]} import main
    code = main()
except SystemExit as exit:
    code = exit.code
print()
print(json.dumps([code, time.process_time(), [m for m in {SLOW} if m in sys.modules]]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *text, last = done.stdout.splitlines()
    code, seconds, slow = json.loads(last)
    assert (code, slow) == (0, [])
    assert script in "\n".join(text)
    assert seconds < 1.0  # of the processor, whatever else it does; really under 0.3


@mark.parametrize(
    "text, fault",
    [
        ("x = 1", "no docstring"),
        ('"""Doc."""\nclass BaseModel: pass', "BaseModel"),
        ('"""Doc."""\nclass CacheManager: pass', "CacheManager"),
        ('"""Doc."""\ndef helper(): pass', "helper"),
        ('"""Doc."""\ndef f():\n    global x', "3: global"),
        ('"""Doc."""\ndef f(**kwargs): pass', "kwargs"),
        ('"""Doc."""\ngetattr(self.config, "x")', "getattr"),
        ('"""Doc."""\nclass Based: pass\ndef f(base, *args): return getattr(torch, base)', None),
    ],
)
def test_the_style_check_sees(text: str, fault: str | None) -> None:
    faults = list(style_faults("model/x.py", ast.parse(text)))
    assert len(faults) == (fault is not None)
    assert (fault or "") in "".join(faults)
