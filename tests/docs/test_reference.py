"""The pages that are made from the code are as the code is now, and say what it does."""

import argparse
import importlib.util
import re
from types import ModuleType

from support.checkout import ROOT

from nmt.config import RunConfig
from nmt.config_files import list_setting_keys, load_config


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts/make_docs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = load_script()


def test_pages_are_as_the_code_is() -> None:
    pages = REFERENCE.render_pages()
    old = [path.name for path, text in pages.items() if path.read_text() != text]
    assert old == [], "older than the code; run make docs, or scripts/make_docs.py"


def test_every_setting_is_there_with_a_meaning() -> None:
    settings = (ROOT / "docs" / "reference" / "settings.md").read_text()
    section = ""
    shown: dict[str, str] = {}
    for line in settings.splitlines():
        if heading := re.match(r"## (.*)", line):
            section = "" if heading[1] == "Of the run" else f"{heading[1]}."
        if line.startswith("| `"):
            keys, _, defaults, meaning = re.split(r"(?<!\\) \| ", line.strip("| "), maxsplit=3)
            assert len(meaning) > 3, line
            names = re.findall(r"`(\w+)`", keys)
            values = defaults.split(", ")
            values = values if len(values) == len(names) else values * len(names)
            shown |= {section + name: value for name, value in zip(names, values, strict=True)}
    keys = list_setting_keys()
    assert set(keys) == {key for key in shown if not key.startswith("A corpus.")}
    # the config with all defaults written out is the config without them
    no_value = {"data.train", "vocab.user_symbols", "training.freeze", "out"}
    given = [f"{key}={shown[key]}" for key in keys if key not in no_value]
    assert load_config("demo.yaml", [*given, "data.train=[]", "out="]) == RunConfig()


def test_every_command_and_option_is_there() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    parts = dict(re.findall(r"^## (nmt-\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    commands = REFERENCE.find_commands()
    assert list(parts) == sorted(commands)
    for name, module in commands.items():
        parser: argparse.ArgumentParser = module.build_parser()
        rows = re.findall(r"^\| `([^`]+)`", parts[name], re.MULTILINE)
        options = {
            option for row in rows for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", row)
        }
        expected = {word for action in parser._actions for word in action.option_strings}
        assert options == expected - {"-h", "--help"}


def test_recipes_name_files_that_exist() -> None:
    recipes = (ROOT / "docs" / "how-to-change.md").read_text()
    names = set(re.findall(r"`((?:nmt|tests|scripts|configs|docs)/[a-z0-9_/.-]+\.[a-z]+)", recipes))
    assert len(names) > 50
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []


def test_the_reading_list_is_short_enough() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    (total,) = re.findall(r"^\| \*\*together\*\* \| ([\d,]+) \|", design, re.MULTILINE)
    assert int(total.replace(",", "")) <= 15_500
