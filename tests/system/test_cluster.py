"""Workers on Ray: the results of a plain map, whatever is lost on the way."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.needs import needs_package

from nmt.system.cluster import open_executor
from nmt.system.errors import UserError
from nmt.system.pool import map_in_order, map_with_workers, use_processes

needs_ray = [needs_package("ray", "ray"), pytest.mark.timeout(300)]


@pytest.mark.parametrize("on", ["", "dask", "ray --gpus 1", "slurmx -p low"])
def test_only_known_clusters(on: str) -> None:
    with pytest.raises(UserError, match=f"^--on {on}: give ray, or 'slurm'"):
        with open_executor(on, 2, uses_gpu=False):
            pass


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"^ray cannot be imported .*pip install 'nmtkit\[ray\]'"):
        with open_executor("ray", 2, uses_gpu=False):
            pass


def test_without_a_cluster_it_is_this_machine() -> None:
    with open_executor(None, 3, uses_gpu=False) as executor:
        assert executor == use_processes(3)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray of two nodes, each with room for one worker."""
    from ray.cluster_utils import Cluster

    monkeypatch.setattr("nmt.system.pool.QUICK_S", -1.0)
    folder = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{folder.parent}")
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


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


def slowly(folder: Path, n: int) -> tuple[int, int, str]:
    time.sleep(0.2)
    return n * n, os.getpid(), os.getcwd()


def refuse(n: int) -> int:
    if n == 3:
        raise UserError("three is too many")
    return n


@pytest.mark.usefixtures("nodes")
class TestOnRay:
    pytestmark = needs_ray

    def test_killed_workers_lose_no_task_and_double_none(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        start = partial(MortalWorker, os.getpid())
        with open_executor("ray", 2, uses_gpu=False) as executor:
            found = list(map_with_workers(start, range(12), executor))
        assert found == [(n * n, "x" * 200_000) for n in range(12)]
        captured = capfd.readouterr()
        assert captured.out == "" and captured.err.count("a worker was lost") >= 2

    def test_a_lost_node_loses_no_task(self, nodes: Any, tmp_path: Path) -> None:
        with open_executor("ray", 2, uses_gpu=False) as executor:
            results = map_in_order(partial(slowly, tmp_path), range(60), executor)
            found = [next(results) for _ in range(20)]
            nodes.remove_node(nodes.list_all_nodes()[1], allow_graceful=False)
            found += results
        assert [one[0] for one in found] == [n * n for n in range(60)]
        assert {one[2] for one in found} == {os.getcwd()}
        assert len({one[1] for one in found} - {os.getpid()}) == 2

    def test_a_mistake_of_the_user_is_one_line(self) -> None:
        with pytest.raises(UserError, match="^three is too many$") as caught:
            with open_executor("ray", 2, uses_gpu=False) as executor:
                list(map_in_order(refuse, range(9), executor))
        assert type(caught.value) is UserError
