"""How long ranks wait for each other: hours while rank 0 works for all, minutes within an update,
and never in silence.

Two real processes with gloo, the two timeouts shortened.
"""

import sys
from pathlib import Path

import torch
from pytest import MonkeyPatch, mark, raises
from support.forks import run_on_ranks

from nmt.system.errors import UserError
from nmt.system.ranks import join_world

ONE_OF_TWO = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@mark.parametrize(
    "variables, complaint",
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x'"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0, but RANK is not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is ''"),
        (ONE_OF_TWO | {"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        (ONE_OF_TWO | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
    ],
    ids=str,
)
def test_variables_that_torchrun_did_not_set(
    variables: dict[str, str], complaint: str, monkeypatch: MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", *ONE_OF_TWO):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with raises(UserError, match=complaint), join_world("cpu"):
        pass


def test_each_rank_computes_on_a_gpu_of_its_own(monkeypatch: MonkeyPatch) -> None:
    """Chosen before anything is started on it."""
    for name, value in {**ONE_OF_TWO, "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    done: list[object] = []

    def join(backend: str, **_: object) -> None:
        done.append(backend)
        raise ConnectionError

    monkeypatch.setattr(
        "nmt.system.ranks.choose_device", lambda _, number: torch.device("cuda", number)
    )
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    with raises(ConnectionError), join_world():
        pass
    assert done == [torch.device("cuda", 1), "nccl"]


PROGRAM = """
import os, socket, stat, sys, time
from datetime import timedelta
from pathlib import Path
import torch
from nmt.system import ranks

def tcp_connections():
    for number in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                with socket.socket(fileno=os.dup(int(number))) as link:
                    if link.family in (socket.AF_INET, socket.AF_INET6) and link.type == socket.SOCK_STREAM:
                        link.getpeername()
                        yield link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        except OSError:  # it listens, or is gone
            continue

def work():
    time.sleep(5.0)
    return "found"

# both are there, which may take longer for one of them than the timeout
folder = Path(__file__).parent
(folder / os.environ["RANK"]).touch()
while not all((folder / rank).exists() for rank in "01"):
    time.sleep(0.01)

ranks.UPDATE_TIMEOUT, ranks.MAIN_TIMEOUT = timedelta(seconds=3), timedelta(seconds=300)
with ranks.join_world() as world:
    limits = list(tcp_connections())
    assert len(limits) >= 3 and set(limits) == {120_000}, limits  # the store and two groups
    assert world.on_main(work) == ("found" if world.is_main else None)
    assert world.broadcast(7.0 if world.is_main else 0.0) == 7.0
    items = (work() for _ in range(1)) if world.is_main else ()
    assert world.run_in_step(items, lambda: (float(world.rank), 0.5)) == [1.0, 1.0]
    assert world.sum(torch.tensor([1.0, world.rank])).tolist() == [2.0, 1.0]
    print("patient", flush=True)
    if world.is_main:
        work()
    try:
        world.sum(torch.ones(1))
    except RuntimeError as error:
        assert ranks.is_rank_lost(error, world), error
        print("gave up", flush=True)
        os._exit(3)
"""


@mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_wait_long_for_rank_0_and_shortly_in_an_update(tmp_path: Path) -> None:
    ranks = run_on_ranks(2, PROGRAM, tmp_path / "rank.py")
    outputs = [ranks.told("stdout", [rank]) for rank in range(2)]
    assert all(out.startswith("patient\n") for out in outputs), ranks.told()
    assert ranks.codes[1] == 3 and "gave up" in outputs[1], outputs
