"""Engines only make things faster: without nmt/engines/ the same commands train and translate, with the same
result.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.soaking import IS_SOAK
from support.toy_corpus import write_toy_config, write_toy_corpus
from support.two_ranks import run_on_two_ranks

ROOT = Path(__file__).parent.parent
N_UPDATES = 40
# In one process, because importing torch takes longer than the rest.
PROGRAM = """
import sys
from pathlib import Path

tree, toy, place = sys.argv[1:]
if tree != "checkout":  # An editable installation would find in the checkout what the copy lacks.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in str(finder)]
import nmt
from nmt.commands import average, eval, train, translate

assert tree == "checkout" or Path(nmt.__file__).is_relative_to(tree), nmt.__file__
run = f"{place}/run"
steps = ["training.checkpoint_every=20", "evaluation.bleu=false"]
assert train.main(["--config", toy, f"out={run}", "training.steps=STEPS", *steps]) == 0
assert average.main([run, "--last", "2"]) == 0
assert eval.main([f"{run}/average"]) == 0
words = [f"{run}/average", "-i", f"{place}/text", "--scores", "decoding.min_length=3"]
for name, settings in (("beam", []), ("greedy", ["decoding.beam=1"]), ("samples", ["--sample"])):
    assert translate.main([*words, "-o", f"{place}/{name}", *settings]) == 0
""".replace("STEPS", str(N_UPDATES))


def run_commands(tree: Path | str, toy: Path, place: Path) -> None:
    place.mkdir()
    (place / "text").write_text("red dog\ndog\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tree), str(toy), str(place)],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


def read_scored(path: Path) -> tuple[list[str], list[float]]:
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    return [text for _, text in lines], [float(score) for score, _ in lines]


def read_last_nll(run: Path) -> float:
    events = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return float([event["nll"] for event in events if event["kind"] == "valid"][-1])


def test_the_core_gives_the_same_results_without_engines(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns("__pycache__", "engines")
    shutil.copytree(ROOT / "nmt", copy / "nmt", ignore=ignored)
    shutil.copytree(ROOT / "configs", copy / "configs")
    toy = write_toy_config(write_toy_corpus(tmp_path), tmp_path)
    run_commands("checkout", toy, tmp_path / "with")
    run_commands(copy, toy, tmp_path / "without")

    for name in ("beam", "greedy", "samples"):
        texts, scores = read_scored(tmp_path / "without" / name)
        expected_texts, expected_scores = read_scored(tmp_path / "with" / name)
        assert texts == expected_texts and all(texts)
        # Trainings have the same bits in fp32; packed matrices round otherwise.
        assert scores == pytest.approx(expected_scores, abs=1e-4)
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (
            (tmp_path / name / "run" / "checkpoints" / f"step-{N_UPDATES:07}" / file).read_bytes()
            for name in ("without", "with")
        )
        assert ours == theirs
    assert read_last_nll(tmp_path / "without" / "run") < 3.5


TRAIN_ON_TWO_RANKS = """
import sys

tree, toy, out = sys.argv[1:]
if tree != "checkout":
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in str(finder)]
    sys.path.insert(0, tree)
    for name in [name for name in sys.modules if name.split(".")[0] == "nmt"]:
        del sys.modules[name]
import nmt
from nmt.commands.train import main

assert tree == "checkout" or nmt.__file__.startswith(tree), nmt.__file__
sys.exit(main(["--config", toy, f"out={out}", "training.steps=6", "evaluation.bleu=false"]))
"""


def test_two_ranks_train_without_engines(tmp_path: Path) -> None:
    """One plain sum of all gradients gives the weights and moments that sharing them gives."""
    copy = tmp_path / "copy"
    shutil.copytree(
        ROOT / "nmt", copy / "nmt", ignore=shutil.ignore_patterns("__pycache__", "engines")
    )
    shutil.copytree(ROOT / "configs", copy / "configs")
    toy = write_toy_config(write_toy_corpus(tmp_path), tmp_path)
    weights = []
    for name, tree in (("with", "checkout"), ("without", str(copy))):
        out = tmp_path / name
        script = tmp_path / f"{name}.py"
        done = run_on_two_ranks(TRAIN_ON_TWO_RANKS, script, tree, str(toy), str(out))
        assert done.codes == [0, 0], done.stderr
        weights.append((out / "checkpoints" / "step-0000006" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


ROOMS = ("average", "corpus", "data", "evaluate", "model", "score", "train", "translate")
RUN_PYTEST = """
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in str(finder)]
import pytest

sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.skipif(not IS_SOAK, reason="takes minutes: NMT_SOAK=1")
@pytest.mark.timeout(1800)
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
