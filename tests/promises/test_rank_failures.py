"""A rank that fails leaves at once with its own exit code, although the others wait for it in an
all-reduce.

torchrun ends a run when it sees a rank exit, so the exit must not wait for anybody. NCCL waits in
destroy_process_group; gloo does not, so here that function is exchanged for one that never returns.
"""

from pathlib import Path

from pytest import MonkeyPatch, mark, raises
from support.capture import Capture, read_stderr
from support.forks import run_on_ranks
from support.rings import amount

from nmt.commands.cli import run_command
from nmt.system.errors import Failure, UserError
from nmt.system.files import read_json

PROGRAM = """
import os, sys, time
import torch.distributed
import nmt.train.loop as trainer
from nmt.commands.train import main
from nmt.system.errors import Failure, UserError

run_update, failing, notes = trainer.run_update, sys.argv[1], sys.argv[2]

def update_or_fail(objective, optimizer, update, step, *rest):
    if step == 3 and os.environ["RANK"] == "1":
        time.sleep(0.5)  # rank 0 is in the all-reduce by then
        raise eval(failing)
    return run_update(objective, optimizer, update, step, *rest)

def never_return(*_):
    open(f"{notes}/hangs", "w").close()
    time.sleep(600)

trainer.run_update = update_or_fail
torch.distributed.destroy_process_group = never_return
sys.exit(main(sys.argv[3:]))
"""


ERRORS = [
    ("UserError('lower the beam')", 2, "nmt-train: error: lower the beam"),
    ("ValueError('a bug')", 1, "ValueError: a bug"),
    ("Failure('no more room')", 1, "nmt-train: failed: no more room"),
    ("SystemExit(75)", 75, ""),
    ("KeyboardInterrupt()", 130, "nmt-train: interrupted"),
]


@mark.parametrize(
    "error, code, told",
    amount(ERRORS[:1], ERRORS),
    ids=lambda value: str(value).partition("(")[0],
)
def test_a_rank_that_fails_leaves_at_once(
    toy: Path, tmp_path: Path, error: str, code: int, told: str
) -> None:
    argv = [error, str(tmp_path), "--config", str(toy)]
    ended = run_on_ranks(2, PROGRAM, tmp_path / "rank.py", *argv)
    assert ended.codes[1] == code and told in ended.told(), ended.told()
    assert not (tmp_path / "hangs").exists()
    status = read_json(tmp_path / "run" / "status.json")
    # Which is how a rank leaves whose main rank has told why
    if not error.startswith("SystemExit"):
        assert (status["state"], status["exit_code"]) == ("failed", 1 if code == 130 else code)


def test_one_process_alone_returns_and_one_of_many_leaves(
    monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    def refuse() -> int:
        raise UserError("not so")

    def stumble() -> int:
        raise Failure("no room")

    def crash() -> int:
        raise ValueError("a bug")

    def follow_main() -> int:
        raise SystemExit(2)

    left: list[int] = []

    def leave(code: int) -> None:
        left.append(code)
        raise InterruptedError  # as if nothing came after it

    monkeypatch.setattr("os._exit", leave)
    assert (run_command(refuse, "nmt"), run_command(stumble, "nmt")) == (2, 1)
    for work, kind in ((crash, ValueError), (follow_main, SystemExit)):
        with raises(kind):
            run_command(work, "nmt")
    assert left == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for work in (refuse, stumble, crash, follow_main):
        with raises(InterruptedError):
            run_command(work, "nmt")
    assert left == [2, 1, 1, 2]
    # All ranks agreed on this end: it is an ordinary one
    assert run_command(lambda: 75, "nmt") == 75
    assert read_stderr(capsys).count("ValueError: a bug") == 1
