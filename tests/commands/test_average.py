"""nmt-average as a user meets it."""

import numpy as np
from pytest import MonkeyPatch, mark
from safetensors.torch import load_file
from support.capture import Capture, read_errors, read_stderr
from support.in_process import refuse, succeed
from support.saved_run import compute_mean, copy_template, make_template, read_state  # noqa: F401
from test_checkpoint import CONFIG

from nmt.commands.average import main as nmt_average
from nmt.config_files import format_config
from nmt.system.output_folder import is_unedited_card
from nmt.system.run_folder import MODEL_FILE, RunFolder

REFUSED: dict[str, str] = {  # the arguments after RUN, and what is complained about
    "--last 6": "has 5 checkpoints that averaging counts, but 6 were",
    "--last 0": "argument --last: 0: give a number of at least 1",
    "--best 0": "argument --best: 0: give a number of at least 1",
    "--best 1 --last 1": "--last: not allowed with argument --best",
    "--best 1 --curve": "--curve: not allowed with argument --best",
    "--curve --last 2": "--last: not allowed with argument --curve",
    "--best 1 --every 3": "--best does not support --every",
    "--every 0": "argument --every: 0",
    "--every nan": "argument --every: nan",
    "--every 9": "but 5 were requested",
    "--every often": "put it before the options",
    "--curve -o x": "--curve does not support -o",
    "--curve 0,2": "argument --curve: 0,2",
    "--curve 1,9": "has 5 checkpoints that averaging counts, but 9 were",
    "--curve runs": "put it before the options",
    "--curve": "data.valid",
    "../one": "give -o DIR",
    "../one -o x --every 3": "--every needs one run folder",
    "../one --curve": "--curve needs one run folder; give it, not several nor",
}


def test_bad_arguments_take_one_line(
    run: RunFolder, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(run.path)
    before = sorted(run.path.iterdir())
    for arguments, complaint in REFUSED.items():
        try:
            code: object = nmt_average([str(run.path), *arguments.split()])
        except SystemExit as left:  # argparse's
            code = left.code
        captured = capsys.readouterr()
        assert code == 2 and captured.out == "", arguments
        assert captured.err.count("\n") == 1 and complaint in captured.err, captured.err
    assert sorted(run.path.iterdir()) == before


@mark.parametrize("name", ["checkpoints", "checkpoints/step-0000050", "average", ".."])
def test_the_run_is_named_where_something_else_is_given(
    name: str, run: RunFolder, capsys: Capture
) -> None:
    run.config.touch()
    run.average.mkdir()
    assert nmt_average([str(run.path / name), "--last", "2"]) == 2
    wanted = "it, not several" if name == ".." else str(run.path)
    assert f"--last needs one run folder; give {wanted}" in read_stderr(capsys)


def test_nothing_of_the_users_is_replaced(run: RunFolder, capsys: Capture) -> None:
    run.average.mkdir()
    notes = run.average / "notes.txt"
    notes.write_text("mine")
    for force in ([], ["--force"]):
        last = refuse(capsys, nmt_average, run.path, *force)
        assert "an average (notes.txt); choose another -o DIR; nothing was changed" in last
        assert notes.read_text() == "mine"
    notes.rename(run.average / "README.md")
    assert nmt_average([str(run.path), "--force"]) == 2


def test_scores_and_minutes_are_said_and_kept(run: RunFolder, capsys: Capture) -> None:
    succeed(nmt_average, run.path, "--last", "2")
    said = capsys.readouterr()
    assert said.out == "" and "update 40, minute 24.0, dev NLL 2.0000, BLEU 21.00" in said.err
    assert "update 50, minute 30.0, dev NLL 2.2000, BLEU 22.00" in said.err
    assert said.err.endswith(f"next: nmt-eval {run.average}\n")
    assert read_state(run.average) == {
        "averaged": ["step-0000040", "step-0000050"],
        "step": 50,
        "elapsed_s": [1440.0, 1800.0],
    }
    found = load_file(run.average / MODEL_FILE)
    for name, value in compute_mean([run.checkpoint(40), run.checkpoint(50)]).items():
        assert np.abs(found[name].numpy() - value).max() < 1e-7
    succeed(nmt_average, run.path, "--every", "6.5", "--last", "2")  # over its own card
    assert read_state(run.average)["elapsed_s"] == [840.0, 1800.0] and is_unedited_card(
        run.average / "README.md"
    )
    succeed(nmt_average, run.path, "--last", "1")
    assert "the mean of 1 checkpoint (step-0000050)" in read_stderr(capsys)


@mark.parametrize("fault", ["cut off", "of another version", "a folder"])
def test_results_that_cannot_be_read_cost_no_average(
    fault: str, run: RunFolder, capsys: Capture
) -> None:
    run.config.write_text(format_config(CONFIG))
    results = run.path / "results.json"
    if fault == "a folder":
        results.mkdir()
    else:
        results.write_text('[{"when": "20' if fault == "cut off" else '[{"when": "2026-11-21"}]')
    succeed(nmt_average, run.path, "--last", "2")
    told = [line for line in read_errors(capsys) if "results.json" in line]
    assert len(told) == 1 and str(results) in told[0] and "without scores" in told[0]
    assert is_unedited_card(run.average / "README.md") and results.exists()
