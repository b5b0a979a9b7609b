"""One run on two hosts, through nmt-launch: two network namespaces with an address each, joined by a
cable of their own.

They share this machine's files and clock and nothing of its network, so all that the ranks say to
each other goes over the cable, and pulling it out is a real loss of a host. Needs root and `ip`,
and takes minutes: `make soak` runs it.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pytest import fixture, mark
from safetensors.torch import load_file
from support.checkout import ROOT
from support.ground import check_same, steps_logged
from support.in_process import succeed
from support.waiting import until

from nmt.commands.train import main
from nmt.system.run_folder import RunFolder

WEIGHTS = "checkpoints/last/model.safetensors"
IP = shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
# So that two test runs at once seldom choose the same
NUMBERS = itertools.count(os.getpid() % 50 * 5)


def ip(*words: str) -> str:
    assert IP is not None
    return subprocess.run([IP, *words], check=True, capture_output=True, text=True).stdout


def why_not() -> str:
    """Why no namespaces are made here, or nothing."""
    if sys.platform != "linux" or IP is None or os.geteuid() != 0:
        return "needs Linux, root and the command ip"
    name = f"nmt-probe-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "exec", name, "true")
        ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return ""


WHY_NOT = why_not()
pytestmark = [mark.skipif(WHY_NOT != "", reason=WHY_NOT), mark.timeout(120)]


@dataclass
class Pair:
    """Two hosts, 10.77.N.1 and 10.77.N.2, and what is started on them."""

    number: int
    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def name(self, host: int) -> str:
        return f"nmt{os.getpid()}-{self.number}-{host}"

    def address(self, host: int) -> str:
        return f"10.77.{self.number}.{host + 1}"

    def connect(self) -> None:
        end, other = (("name", "cable", "netns", self.name(host)) for host in (0, 1))
        ip("link", "add", *end, "type", "veth", "peer", *other)
        for host in (0, 1):
            ip("-n", self.name(host), "address", "add", f"{self.address(host)}/24", "dev", "cable")
            for interface in ("lo", "cable"):
                ip("-n", self.name(host), "link", "set", interface, "up")

    def pull(self) -> None:
        ip("-n", self.name(1), "link", "set", "cable", "down")

    def plug(self) -> None:
        ip("-n", self.name(1), "link", "set", "cable", "up")

    def start(self, host: int, *arguments: str) -> subprocess.Popen[bytes]:
        assert IP is not None
        launch = str(ROOT / "scripts" / "nmt-launch")
        command = [IP, "netns", "exec", self.name(host), launch]
        command += f"--gpus 1 --hosts 2 --host-rank {host} --main-host {self.address(0)}".split()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with open(self.folder / f"host{host}.log", "ab") as log:
            process = subprocess.Popen(
                [*command, "--", *arguments],
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": path},
            )
        self.started.append(process)
        return process

    def kill(self, host: int) -> None:
        """All that runs on a host, at once."""
        for pid in ip("netns", "pids", self.name(host)).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def told(self) -> str:
        return "\n".join(
            path.read_text(errors="replace")[-3000:]
            for path in sorted(self.folder.glob("host*.log"))
        )

    def end(self) -> None:
        names = ip("netns", "list")
        for host in (0, 1):
            if self.name(host) in names:
                self.kill(host)
        for process in self.started:
            process.kill()
            process.wait()
        for host in (0, 1):
            if self.name(host) in names:
                ip("netns", "del", self.name(host))  # and the cable with it


@fixture
def hosts(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(next(NUMBERS) % 250, tmp_path)
    try:
        for host in (0, 1):
            ip("netns", "add", pair.name(host))
        pair.connect()
        yield pair
    finally:
        pair.end()


def train(pair: Pair, *arguments: str) -> None:
    """On both, to the end."""
    processes = [pair.start(host, *arguments) for host in (0, 1)]
    codes = [process.wait(timeout=300) for process in processes]
    assert codes == [0, 0], pair.told()


def test_two_hosts_train_what_one_does(hosts: Pair, toy: Path, tmp_path: Path) -> None:
    succeed(main, "--config", toy, f"out={tmp_path}/one")
    train(hosts, "--config", str(toy), f"out={tmp_path}/two")
    one, two = (load_file(tmp_path / name / WEIGHTS) for name in ("one", "two"))
    for name, tensor in one.items():
        assert float((tensor - two[name]).abs().max() / tensor.abs().max()) <= 1e-5, name


LONG = ("training.steps=400", "training.checkpoint_every=20", "training.log_every=5")


def undisturbed(pair: Pair, toy: Path, run: Path) -> tuple[str, ...]:
    """The arguments of a run of a minute, which went to its end in `run`."""
    arguments = ("--config", str(toy), *LONG)
    train(pair, *arguments, f"out={run}")
    return arguments


@mark.timeout(600)
@mark.parametrize("seconds, retries", [(20, 15), (100, 15), (60, 5)])
def test_a_cable_that_is_pulled_and_plugged_in_again(
    hosts: Pair, toy: Path, tmp_path: Path, seconds: int, retries: int
) -> None:
    """Nobody does anything but plug it in. With 15 retries, as usual, TCP waits for the cable; with
    5 it gives up after some 15 seconds, all ranks die, and the hosts join anew."""
    set_retries = f"sysctl -q -w net.ipv4.tcp_retries2={retries}".split()
    for host in (0, 1):
        ip("netns", "exec", hosts.name(host), *set_retries)
    arguments = undisturbed(hosts, toy, tmp_path / "calm")
    run = tmp_path / "cut"
    processes = [hosts.start(host, *arguments, f"out={run}") for host in (0, 1)]
    until(lambda: steps_logged(RunFolder(run)) >= 150, 100)
    hosts.pull()
    time.sleep(seconds)
    stood = steps_logged(RunFolder(run))
    assert 150 <= stood < 400, "it waits for the other"
    hosts.plug()
    until(lambda: all(process.poll() is not None for process in processes), 300)
    assert [process.returncode for process in processes] == [0, 0], hosts.told()
    is_continued = "continuing after update" in (tmp_path / "host0.log").read_text()
    assert is_continued == (retries == 5), "TCP bridged the gap, or the checkpoint did"
    check_same(RunFolder(run), RunFolder(tmp_path / "calm"))


@mark.timeout(600)
def test_a_host_that_lost_its_power_is_started_again(
    hosts: Pair, toy: Path, tmp_path: Path
) -> None:
    """The other hears nothing of its end; a person starts the same command on a machine in its
    place.
    """
    arguments = undisturbed(hosts, toy, tmp_path / "calm")
    run = tmp_path / "cut"
    first, second = (hosts.start(host, *arguments, f"out={run}") for host in (0, 1))
    until(lambda: steps_logged(RunFolder(run)) >= 150, 100)
    hosts.pull()
    hosts.kill(1)
    second.wait(timeout=20)
    time.sleep(20)
    assert first.poll() is None and steps_logged(RunFolder(run)) < 400
    ip("netns", "del", hosts.name(1))  # its connections stay open in limbo, and never say so
    ip("-n", hosts.name(0), "link", "del", "cable")
    ip("netns", "add", hosts.name(1))
    hosts.connect()
    third = hosts.start(1, *arguments, f"out={run}")
    until(lambda: first.poll() is not None and third.poll() is not None, 300)
    assert (first.returncode, third.returncode) == (0, 0), hosts.told()
    check_same(RunFolder(run), RunFolder(tmp_path / "calm"))
