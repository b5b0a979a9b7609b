"""Workers on Ray: the results of a plain map, whatever is lost on the way."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from pytest import MonkeyPatch, fixture, mark, raises
from support.capture import Capture, read_stderr
from support.needs import needs_package

from nmt.commands.cli import open_executor
from nmt.extras.cluster import open_cluster, share_cluster, watch_head
from nmt.system.errors import UserError
from nmt.system.pool import map_in_order, map_with_workers, use_processes
from nmt.system.strict_json import Fields

needs_ray = [needs_package("ray", "ray")]


def test_without_ray_the_extra_is_named(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises(UserError, match=r"^ray cannot be imported .*pip install -e .*\[ray\]'"):
        with open_cluster(2, uses_gpu=False):
            pass


def test_without_a_cluster_it_is_this_machine() -> None:
    with open_executor(None, 3, uses_gpu=False) as executor:
        assert executor == use_processes(3)


class ThreeNodes:
    """A Ray whose head computes nothing, and which has lost a machine."""

    def nodes(self) -> list[Fields]:
        return [
            {"Alive": True, "Resources": {}},
            {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}},
            {"Alive": False, "Resources": {"CPU": 64.0}},
        ]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}


def test_workers_share_the_cores_of_what_lives(capsys: Capture) -> None:
    shares = [share_cluster(ThreeNodes(), n_workers, False) for n_workers in (2, 3, 99)]
    assert [share["num_cpus"] for share in shares] == [4, 2, 1] and read_stderr(capsys) == ""
    needs = share_cluster(ThreeNodes(), 2, uses_gpu=True)
    assert needs == {"num_cpus": 1, "num_gpus": 1}
    assert f"waiting for Ray to find a place for a worker with {needs}" in read_stderr(capsys)


class ThreeLooks(threading.Event):
    n = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.n += 1
        return self.n > 3


def test_a_head_that_cannot_be_reached_is_named_once(capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        watch_head(address, ThreeLooks())
        assert read_stderr(capsys) == ""
    watch_head(address, ThreeLooks())
    said = read_stderr(capsys)
    assert said.count("\n") == 1
    assert said.startswith(
        f"warning: Ray's head, {address}, cannot be reached (Connection refused)"
    )


@fixture(scope="module")
def started() -> Iterator[Any]:
    """A Ray of two nodes, each with room for one worker."""
    from ray.cluster_utils import Cluster

    folder = Path(__file__).parent
    with MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{folder.parent}")
        head = {"num_cpus": 1, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        yield cluster
        cluster.shutdown()


@fixture
def nodes(started: Any, monkeypatch: MonkeyPatch) -> Any:
    if len(started.list_all_nodes()) == 1:  # the first test, or one has taken the other
        started.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", started.address)
    return started


class MortalWorker:
    """Its process is killed in the middle of its fourth task."""

    def __init__(self, caller: int) -> None:
        self.caller, self.n_done = caller, 0

    def __call__(self, n: int) -> tuple[int, str]:
        self.n_done += 1
        time.sleep(0.05)
        if self.n_done == 4 and os.getpid() != self.caller:
            os.kill(os.getpid(), signal.SIGKILL)
        return n * n, "x" * 200_000  # too large for the message: it is fetched from its node


def slowly(n: int) -> tuple[int, int, str]:
    time.sleep(0.2)
    return n * n, os.getpid(), os.getcwd()


def refuse(n: int) -> int:
    if n == 3:
        raise UserError("three is too many")
    return n


@mark.usefixtures("nodes")
class TestOnRay:
    pytestmark = needs_ray

    def test_killed_workers_lose_no_task_and_double_none(self, capfd: Capture) -> None:
        start = partial(MortalWorker, os.getpid())
        with open_cluster(2, uses_gpu=False) as executor:
            found = list(map_with_workers(start, range(12), executor))
        assert found == [(n * n, "x" * 200_000) for n in range(12)]
        captured = capfd.readouterr()
        assert captured.out == "" and captured.err.count("a worker was lost") >= 2

    def test_a_lost_node_loses_no_task(self, nodes: Any) -> None:
        with open_cluster(2, uses_gpu=False) as executor:
            results = map_in_order(slowly, count(), executor)
            found = list(islice(results, 2))
            while len({pid for _, pid, _ in found} - {os.getpid()}) < 2:
                found += islice(results, 1)
            nodes.remove_node(nodes.list_all_nodes()[1], allow_graceful=False)
            found += islice(results, 30)
            results.close()
        assert [one[0] for one in found] == [n * n for n in range(len(found))]
        assert {one[2] for one in found} == {os.getcwd()}

    def test_even_one_worker_is_elsewhere(self) -> None:
        with open_cluster(1, uses_gpu=False) as executor:
            results = list(map_in_order(slowly, range(4), executor))
        assert len({pid for _, pid, _ in results[1:]} - {os.getpid()}) == 1

    def test_a_folder_that_others_lack_is_named(
        self, tmp_path: Path, monkeypatch: MonkeyPatch
    ) -> None:
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        with raises(UserError, match=r"here: cannot be entered on .* need the same files"):
            with open_cluster(2, uses_gpu=False) as executor:
                (tmp_path / "here").rename(tmp_path / "gone")
                monkeypatch.setattr("os.getcwd", lambda: str(tmp_path / "here"))
                list(map_in_order(slowly, range(9), executor))

    def test_a_mistake_of_the_user_is_one_line(self) -> None:
        with raises(UserError, match="^three is too many$") as caught:
            with open_cluster(2, uses_gpu=False) as executor:
                list(map_in_order(refuse, range(9), executor))
        assert type(caught.value) is UserError
