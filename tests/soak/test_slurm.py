"""scripts/nmt-slurm in a real Slurm: a run that a job loses and gets back ends in the bits of a run
that kept it.

The tests start a cluster of their own on the loopback interface: one slurmctld and two slurmd, which
play two nodes of this machine. Nothing of it is left behind. It needs Debian's slurmctld, slurmd
and slurm-client, and minutes.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pytest import FixtureRequest, fixture, mark
from support.capture import Capture
from support.checkout import ROOT
from support.forks import find_free_port
from support.ground import check_same
from support.in_process import succeed
from support.toy_corpus import write_toy
from support.waiting import until

from nmt.commands.eval import main as nmt_eval
from nmt.system.files import read_json
from nmt.system.run_folder import RunFolder

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
MISSING = [
    name
    for name in ("slurmctld", "slurmd", "sbatch", "scontrol")
    if shutil.which(name, path=PATH) is None
]
STEPS = 100
NODES = ("127.0.0.1", "127.0.0.2")  # names that need no resolver
WAIT_S = 300.0  # for what takes seconds on a machine that does nothing else

pytestmark = [
    mark.skipif(bool(MISSING), reason=f"no Slurm here: {', '.join(MISSING)} not found"),
    mark.timeout(1200),
]

# Two nodes of two cores. A job in `high` takes the nodes of one in `low` after a time of grace, and
# those of one in `abrupt` after KillWait.
CONFIG = """
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
NodeName=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=2
NodeName=127.0.0.2 NodeHostname={host} Port={ports[2]} CPUs=2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=abrupt Nodes=ALL PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    """A Slurm of our own, a toy corpus, and where the runs on it lie."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = folder / "slurm.conf"
        text = CONFIG.format(
            folder=folder,
            host=socket.gethostname().partition(".")[0],
            user=subprocess.check_output(["id", "-un"], text=True).strip(),
            ports=[find_free_port() for _ in range(3)],
        )
        config.write_text(text)
        self.environment = {
            "SLURM_CONF": str(config),
            "PATH": PATH,
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.toy = write_toy(folder)

    def start(self) -> None:
        for name in ("state", *NODES):
            (self.folder / name).mkdir()
        self.start_daemon("slurmctld")
        for node in NODES:
            self.start_daemon("slurmd", "-N", node)
        until(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", 60)

    def start_daemon(self, *command: str) -> None:
        with open(self.folder / f"{'-'.join(command)}.log", "wb") as log:
            self.daemons.append(
                subprocess.Popen([*command, "-D"], stdout=log, stderr=log, env=self.environment)
            )

    def stop(self) -> None:
        for job in self.ask("squeue", "-h", "-o", "%A").split():
            self.ask("scancel", job)
        until(lambda: self.ask("squeue", "-h") == "", 60)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(timeout=60)

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=ROOT, text=True, capture_output=True
        )
        return done.stdout.strip()

    def train(self, name: str, *settings: str, options: tuple[str, ...] = ()) -> str:
        """Submit a run into the folder `name`, and return its job."""
        said = self.ask(
            "sbatch",
            "--cpus-per-task=2",
            f"--output={self.folder}/{name}.log",
            *options,
            "scripts/nmt-slurm",
            "--config",
            str(self.toy),
            f"out={self.folder}/{name}",
            f"training.steps={STEPS}",
            "training.log_every=5",
            "training.validate_every=1000",
            "training.checkpoint_every=1000",
            "device=cpu",
            *settings,
        )
        return said.split()[-1]

    def state(self, job: str) -> str:
        found = re.search(r"JobState=(\w+)", self.ask("scontrol", "show", "job", job))
        return found[1] if found else ""

    def n_restarts(self, job: str) -> int:
        found = re.search(r"Restarts=(\d+)", self.ask("scontrol", "show", "job", job))
        return int(found[1]) if found else 0

    def until_ended(self, job: str) -> str:
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        until(lambda: self.state(job) in ends, WAIT_S)
        return self.state(job)

    def until_trains(self, name: str) -> None:
        metrics = self.folder / name / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.stat().st_size > 0, WAIT_S)

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.folder / name)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")


@fixture(scope="module")
def cluster(module_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(module_path)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@fixture(scope="module")
def whole(cluster: Cluster) -> RunFolder:
    """A run that nobody disturbs; it also prepares the data of the others."""
    job = cluster.train("whole")
    assert cluster.until_ended(job) == "COMPLETED", cluster.log("whole")
    return cluster.run("whole")


def requeue(cluster: Cluster, job: str) -> None:
    cluster.ask("scontrol", "requeue", job)


def preempt(cluster: Cluster, job: str) -> None:
    said = cluster.ask(
        "sbatch", "-p", "high", "-N2", "--exclusive", "-o/dev/null", "--wrap=sleep 1"
    )
    assert cluster.until_ended(said.split()[-1]) == "COMPLETED"


def shorten(cluster: Cluster, job: str) -> None:
    """The time limit comes nearer than what --signal says. The next start has its time again."""
    cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    until(lambda: cluster.n_restarts(job) == 1, WAIT_S)
    cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=60")


@mark.parametrize(
    "take_away, partition",
    [(requeue, "low"), (preempt, "low"), (preempt, "abrupt"), (shorten, "low")],
    ids=["requeued", "preempted", "preempted without grace", "time is up"],
)
def test_a_job_that_is_taken_away_comes_back_and_ends_in_the_same_bits(
    cluster: Cluster,
    whole: RunFolder,
    take_away: Callable[[Cluster, str], None],
    partition: str,
    request: FixtureRequest,
) -> None:
    name = request.node.callspec.id.replace(" ", "-")
    job = cluster.train(name, options=(f"--partition={partition}", "--time=60"))
    cluster.until_trains(name)
    take_away(cluster, job)
    assert cluster.until_ended(job) == "COMPLETED", cluster.log(name)
    log = cluster.log(name)
    assert cluster.n_restarts(job) == 1, log
    stopped = re.search(r"stopped: (\d+) updates", log)
    assert stopped and 0 < int(stopped[1]) < STEPS, log
    assert re.search(rf"continu\w+ .*{stopped[1]}\b", log), log
    check_same(cluster.run(name), whole)


def test_a_cancelled_job_ends_for_good_with_its_checkpoint(
    cluster: Cluster, whole: RunFolder
) -> None:
    job = cluster.train("cancelled")
    cluster.until_trains("cancelled")
    cluster.ask("scancel", job)
    assert cluster.until_ended(job) == "CANCELLED"
    time.sleep(8)  # longer than it takes a job to come back
    assert cluster.state(job) == "CANCELLED" and cluster.n_restarts(job) == 0
    said = read_json(cluster.run("cancelled").status)
    assert said["state"] == "preempted" and said["step"] > 0, cluster.log("cancelled")
    job = cluster.train("cancelled")
    assert cluster.until_ended(job) == "COMPLETED"
    check_same(cluster.run("cancelled"), whole)


def test_two_nodes_train_one_model_and_are_requeued_together(
    cluster: Cluster, whole: RunFolder
) -> None:
    job = cluster.train("undisturbed-pair", options=("--nodes=2",))
    assert cluster.until_ended(job) == "COMPLETED", cluster.log("undisturbed-pair")
    assert "2 x cpu" in cluster.log("undisturbed-pair")
    job = cluster.train("pair", options=("--nodes=2",))
    cluster.until_trains("pair")
    preempt(cluster, job)
    assert cluster.until_ended(job) == "COMPLETED", cluster.log("pair")
    assert cluster.n_restarts(job) == 1
    check_same(cluster.run("pair"), cluster.run("undisturbed-pair"))


def test_a_sweep_is_an_array_and_one_of_its_tasks_comes_back_alone(
    cluster: Cluster, whole: RunFolder, capsys: Capture
) -> None:
    job = cluster.train("seed-%a", "seed=%a", options=("--array=1-2",))
    cluster.until_trains("seed-2")
    # It has the number of the whole array, and must not take the others with it.
    cluster.ask("scancel", "--signal=USR1", "--batch", f"{job}_2")
    for task in ("1", "2"):
        assert cluster.until_ended(f"{job}_{task}") == "COMPLETED", cluster.log(f"seed-{task}")
    assert [cluster.n_restarts(f"{job}_{task}") for task in "12"] == [0, 1]
    succeed(nmt_eval, *(str(cluster.folder / f"seed-{task}") for task in "12"), "--verdict")
    assert "spread of seeds" in capsys.readouterr().out
