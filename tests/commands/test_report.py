"""nmt-report: where it writes, and what it refuses to replace."""

import json
from pathlib import Path

from pytest import fixture, mark, raises
from support.capture import Capture, read_stderr
from support.in_process import refuse, succeed
from support.text_lines import join_lines

from nmt.commands.report import main
from nmt.config import RunConfig
from nmt.config_files import format_config
from nmt.system.files import seal
from nmt.system.run_folder import RunFolder


@fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    folder.config.write_text(format_config(RunConfig(name="one")))
    lines = [{"kind": "train", "step": step, "nll": 5.0 - step} for step in (1, 2)]
    folder.metrics.write_text(join_lines(map(json.dumps, lines)))
    return folder


def test_one_run_has_its_report_and_several_need_a_place(
    run: RunFolder, tmp_path: Path, capsys: Capture
) -> None:
    assert main([str(run.path)]) == main([str(run.path)]) == 0
    assert "<h1>one</h1>" in run.report.read_text()
    with raises(SystemExit, match="2"):
        main([str(run.path), str(run.path)])
    assert "-o FILE" in read_stderr(capsys)
    both = tmp_path / "both.html"
    for _ in range(2):  # a report may be replaced by a report
        succeed(main, run.path, run.path, "-o", both)
    assert "one and one" in both.read_text()


def test_a_run_that_is_not_there_is_named(run: RunFolder, tmp_path: Path, capsys: Capture) -> None:
    missing = tmp_path / "nosuch"
    assert main([str(missing)]) == main([str(run.path), str(missing), "-o", "both.html"]) == 2
    message = f"nmt-report: error: {missing}: not found; give a run folder\n"
    assert read_stderr(capsys) == 2 * message


@mark.parametrize("name", ["average", "checkpoints/step-0000300"])
def test_a_checkpoint_is_not_a_run(run: RunFolder, name: str, capsys: Capture) -> None:
    checkpoint = run.path / name
    checkpoint.mkdir()
    (checkpoint / "config.yaml").write_bytes(run.config.read_bytes())
    seal(checkpoint)
    files = sorted(run.path.rglob("*"))
    page = run.path.parent / "page.html"
    assert main([str(checkpoint)]) == main([str(run.path), str(checkpoint), "-o", str(page)]) == 2
    refusal = f"{checkpoint}: is a checkpoint, a store or an export; give the run folder\n"
    assert read_stderr(capsys) == 2 * f"nmt-report: error: {refusal}"
    assert sorted(run.path.rglob("*")) == files and not page.exists()


def test_nothing_but_a_report_is_replaced(run: RunFolder, tmp_path: Path, capsys: Capture) -> None:
    other = tmp_path / "page.html"
    other.write_text("<p>mine</p>")
    for path in (other, run.metrics, run.path, tmp_path / "none" / "page.html"):
        assert str(path) in refuse(capsys, main, run.path, "-o", path)
    assert other.read_text() == "<p>mine</p>"
    assert "give a run folder" in refuse(capsys, main, tmp_path)
