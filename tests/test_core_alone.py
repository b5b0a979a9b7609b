"""The core needs neither nmt/engines/ nor nmt/extras/: without both, the same commands prepare, train on one rank
and on two, average, translate and score, on a CPU with the same result. What needs an extra ends in one line.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from pytest import approx, fixture, mark
from support.checkout import ROOT
from support.forks import run_on_ranks
from support.text_lines import read_text_lines

N_UPDATES = 40
LEFT_OUT = shutil.ignore_patterns("__pycache__", "engines", "extras")
# An editable installation would find in the checkout what the copy lacks.
USE_TREE = """
import sys

if tree != "checkout":
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in str(finder)]
    sys.path.insert(0, tree)
    for name in [name for name in sys.modules if name.split(".")[0] == "nmt"]:
        del sys.modules[name]
import nmt

assert tree == "checkout" or nmt.__file__.startswith(tree), nmt.__file__
if tree == "checkout":
    # training without numba, whose last bits are others
    from nmt.engines.cpu import backend

    backend.load_compiled = lambda dtype: None
"""
COMMANDS = f"""
import sys

tree, toy, place = sys.argv[1:]
{USE_TREE}
from nmt.commands import average, eval, prepare, train, translate

run = f"{{place}}/run"
assert prepare.main(["--config", toy, f"data.store={{place}}/store"]) == 0
steps = ["training.steps={N_UPDATES}", "training.checkpoint_every=20", "evaluation.bleu=false"]
assert train.main(["--config", toy, f"data.store={{place}}/store", f"out={{run}}", *steps]) == 0
assert not any(name.startswith("nmt.extras.tracking") for name in sys.modules)
assert average.main([run, "--last", "2"]) == 0
assert eval.main([f"{{run}}/average"]) == 0
words = [f"{{run}}/average", "-i", f"{{place}}/text", "--scores", "decoding.min_length=3"]
for name, settings in (("beam", []), ("greedy", ["decoding.beam=1"]), ("samples", ["--sample"])):
    assert translate.main([*words, "-o", f"{{place}}/{{name}}", *settings]) == 0
"""
ON_TWO_RANKS = f"""
import sys

tree, toy, out = sys.argv[1:]
{USE_TREE}
from nmt.commands.train import main

sys.exit(main(["--config", toy, f"out={{out}}", "training.steps=6", "evaluation.bleu=false"]))
"""
# What is asked of which extra, as a word for it.
ASKED = {
    "export RUN/average --to safetensors -o x": "export",
    "report RUN": "report",
    "serve RUN/average": "serve",
    "prepare --inspect store": "inspection",
    "prepare --config TOY --on ray": "cluster",
    "average RUN --curve": "curve",
    "score RUN/average --src text --tgt text.de": "pair_scores",
    "sweep label-smoothing.yaml --out x": "sweep",
    "init --src text --tgt text.de": "init",
    "train --src text --tgt text.de": "init",
    "train --config TOY --profile": "profile",
    "train --config TOY --plan": "profile",
    "train --config TOY out=tracked training.track=[tensorboard]": "tracking",
    "train --config TOY out=mirrored training.mirror=memory://copy": "mirror",
    "translate RUN/average -i text -o x --attention x.html": "report",
    "translate RUN/average -i text --alignments": "maps",
    "translate RUN/average --interactive": "prompt",
    "eval RUN/average --report x.html": "report",
    "translate RUN/average -i text --engine ctranslate2": "export",
    "translate hf:someone/model -i text": "export",
}
ASK = f"""
import importlib, json, sys

tree, asked = sys.argv[1:]
{USE_TREE}
for words in json.loads(asked):
    command, *rest = words.split()
    print(importlib.import_module(f"nmt.commands.{{command}}").main(rest))
"""


@fixture(scope="module", name="tree")
def copy_core(module_path: Path) -> Path:
    tree = module_path
    shutil.copytree(ROOT / "nmt", tree / "nmt", ignore=LEFT_OUT)
    shutil.copytree(ROOT / "configs", tree / "configs")
    return tree


def run_program(program: str, tree: Path | str, place: Path, *words: str) -> tuple[str, str]:
    """Run a program with the code of `tree` in the folder `place`; return what it printed."""
    done = run_on_ranks(
        1,
        f"import os; os.chdir({str(place)!r})\n{program}",
        place / "program.py",
        str(tree),
        *words,
    )
    assert done.codes == [0], done.told()
    return done.told("stdout"), done.told()


def run_commands(tree: Path | str, toy: Path, place: Path) -> str:
    place.mkdir()
    (place / "text").write_text("red dog\ndog\n")
    return run_program(COMMANDS, tree, place, str(toy), str(place))[1]


def read_scored(path: Path) -> tuple[list[str], list[float]]:
    lines = [line.split("\t") for line in read_text_lines(path)]
    return [text for _, text in lines], [float(score) for score, _ in lines]


def read_last_nll(run: Path) -> float:
    events = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return float([event["nll"] for event in events if event["kind"] == "valid"][-1])


def test_the_core_alone_gives_the_same_results(tree: Path, toy: Path, tmp_path: Path) -> None:
    run_commands("checkout", toy, tmp_path / "with")
    said = run_commands(tree, toy, tmp_path / "without")
    assert "warning: no report: the page: needs nmt/extras/report, which is missing" in said
    card = "warning: no model card: README.md: needs nmt/extras/cards, which is missing; install nmt again"
    assert said.count("no model card") == said.count(card) == 1

    for name in ("beam", "greedy", "samples"):
        texts, scores = read_scored(tmp_path / "without" / name)
        expected_texts, expected_scores = read_scored(tmp_path / "with" / name)
        assert texts == expected_texts and all(texts)
        # Trainings have the same bits in fp32; packed matrices round otherwise.
        assert scores == approx(expected_scores, abs=1e-4)
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (
            (tmp_path / name / "run" / "checkpoints" / f"step-{N_UPDATES:07}" / file).read_bytes()
            for name in ("without", "with")
        )
        assert ours == theirs
    assert read_last_nll(tmp_path / "without" / "run") < 3.5

    # an option that needs an extra names it in one line
    (tmp_path / "text.de").write_text("roter Hund\nHund\n")
    place = tmp_path / "without"
    asked = [words.replace("RUN", "run").replace("TOY", str(toy)) for words in ASKED]
    printed, said = run_program(ASK, tree, place, json.dumps(asked))
    assert [line for line in printed.splitlines() if line in "012"] == ["2"] * len(ASKED)
    errors = [line for line in said.splitlines() if ": error: " in line]
    for words, line, name in zip(ASKED, errors, ASKED.values(), strict=True):
        assert line.startswith(f"nmt-{words.split()[0]}: error: ")
        assert line.endswith(f": needs nmt/extras/{name}, which is missing; install nmt again")


def test_two_ranks_train_with_the_core_alone(tree: Path, toy: Path, tmp_path: Path) -> None:
    """One plain sum of all gradients gives the weights and moments that sharing them gives."""
    weights = []
    for name, where in (("with", "checkout"), ("without", str(tree))):
        out = tmp_path / name
        script = tmp_path / f"{name}.py"
        done = run_on_ranks(2, ON_TWO_RANKS, script, where, str(toy), str(out))
        assert done.codes == [0, 0], done.told()
        weights.append((out / "checkpoints" / "step-0000006" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


ROOMS = ("average", "corpus", "data", "evaluate", "model", "score", "train", "translate")
RUN_PYTEST = """
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in str(finder)]
import pytest

sys.exit(pytest.main(sys.argv[1:]))
"""


@mark.soak  # takes minutes
@mark.timeout(1800)
def test_the_tests_of_the_core_pass_without_engines(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name in ("nmt", "configs", "docs", "scripts", "examples", "tests"):
        skipped = shutil.ignore_patterns("__pycache__", "engines")
        shutil.copytree(ROOT / name, copy / name, ignore=skipped)
    for name in ("setup.cfg", "README.md", "Makefile"):
        shutil.copy(ROOT / name, copy / name)
    tests = [f"tests/{room}" for room in ROOMS]
    done = subprocess.run(
        [sys.executable, "-c", RUN_PYTEST, "-p", "no:cacheprovider", "-n", "0", *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "NMT_SOAK": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-9000:]
    print(done.stdout.splitlines()[-1])
