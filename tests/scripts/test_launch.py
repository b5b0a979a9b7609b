"""nmt-launch and nmt-slurm: what they start, which signals they hand on, and the exit code that they
leave with.

torchrun, srun and scontrol are exchanged for small scripts that write down how they were called,
what they heard, and a status.json as a run would; nmt-train answers --print-config for real, or as
it would if it is asked what it usually is. One
test goes through torchrun itself, with ranks that are preempted. test_slurm.py has a real Slurm.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.rings import amount
from support.waiting import is_alive, until
from torch.distributed.run import parse_args

from nmt.commands.train import parse_arguments, use_gpus
from nmt.config_files import format_config, load_config
from nmt.system.errors import UserError

ROOT = Path(__file__).parents[2]
LAUNCH, SLURM = ROOT / "scripts" / "nmt-launch", ROOT / "scripts" / "nmt-slurm"
BIN = Path(sys.executable).parent

# Writes $STATUS to the run folder (the word after out=), then leaves with $CODE; given $PATIENCE it
# awaits a signal.
FAKE_RUN = """#!/bin/bash
printenv TORCH_ELASTIC_SHUTDOWN_TIMEOUT > "$NOTES/NAME.patience"
printf '%s\\n' "$@" >> "$NOTES/NAME.arguments"
for word in "$@"; do [[ $word != out=* ]] || folder=${word#out=}; done
say() {
    [[ -z ${STATUS-} ]] || { mkdir -p "$folder"; printf '%s\\n' "$STATUS" > "$folder/status.json"; }
    exit "${CODE:-0}"
}
for name in TERM INT USR1 HUP; do trap "echo $name >> $NOTES/NAME.heard" "$name"; done
[[ -z ${PATIENCE-} ]] || {
    echo $$ > "$NOTES/NAME.pid"
    until [[ -s $NOTES/NAME.heard ]]; do sleep 0.02; done
    sleep "$PATIENCE"
}
say
"""
# Loading torch takes seconds, so GPUs are counted for real only where a test says so.
PYTHON = f"""#!/bin/bash
[[ "$2" != *count_gpus* || -n ${{COUNTS_GPUS-}} ]] || exec echo "${{GPUS_HERE:-1}}"
exec {BIN}/python "$@"
"""
FAKE_SCONTROL = """#!/bin/bash
echo "$@" >> "$NOTES/scontrol.arguments"
case $1-$2 in
    show-hostnames) printf 'node7\\nnode8\\n' ;;
    show-job) echo "JobId=$3 JobState=${JOB_STATE:-RUNNING} Reason=None" ;;
esac
"""


def status(state: str, code: int | None) -> str:
    return json.dumps(
        {
            "state": state,
            "step": 7,
            "steps": 20,
            "exit_code": code,
            "message": 'of "state": "done"',
            "host": "node7",
            "pid": 4711,
            "updated": "2026-11-21 14:00:00",
        },
        indent=1,
    )


class Machine:
    """A PATH of its own, the notes that the programs in it take, and a run folder."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.bin, self.notes, self.run_folder = (
            folder / "bin",
            folder / "notes",
            folder / "run with a space",
        )
        self.bin.mkdir()
        self.notes.mkdir()
        for name in ("torchrun", "srun"):
            self.install(name, FAKE_RUN.replace("NAME", name))
        self.install("scontrol", FAKE_SCONTROL)
        for script in (LAUNCH, SLURM):
            (self.bin / script.name).symlink_to(script)
        self.training = ["--config", str(config), f"out={self.run_folder}"]
        usual = self.notes / "config.yaml"  # printed once, because each start of Python costs
        usual.write_text(format_config(load_config(str(config), self.training[2:])))
        answer = f'[[ "$*" != "{" ".join(self.training)} --print-config" ]] || exec cat {usual}'
        program = f'exec {BIN}/python -m nmt.commands.train "$@"'
        self.install("nmt-train", f"#!/bin/bash\n{answer}\n{program}\n")
        self.install("python3", PYTHON)
        self.environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "NOTES": str(self.notes),
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
        }

    def install(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, *command: str | Path, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", *map(str, command)],
            text=True,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            stderr=subprocess.PIPE,
            env=self.environment | environment,
        )

    def run(self, *command: str | Path, **environment: str) -> tuple[int, str, str]:
        process = self.start(*command, **environment)
        out, err = process.communicate()
        return process.returncode, out, err

    def launch(self, *options: str, **environment: str) -> tuple[int, str, str]:
        return self.run(LAUNCH, *options, "--", *self.training, **environment)

    def launch_as_host(
        self, rank: str, *options: str, address: str = "127.0.0.1", **environment: str
    ) -> tuple[int, str, str]:
        hosts = ("--hosts", "2", "--host-rank", rank, "--main-host", address)
        return self.launch("--gpus", "1", *hosts, *options, **environment)

    def slurm(self, **environment: str) -> tuple[int, str, str]:
        return self.run(SLURM, *self.training, **JOB, **environment)

    def arguments(self, name: str) -> list[str]:
        path = self.notes / f"{name}.arguments"
        return path.read_text().splitlines() if path.exists() else []

    def heard(self, name: str) -> list[str]:
        return (self.notes / f"{name}.heard").read_text().split()

    def pid(self, name: str) -> int:
        path = self.notes / f"{name}.pid"
        until(lambda: path.exists() and path.read_text().strip() != "")
        return int(path.read_text())


JOB = {"SLURM_JOB_ID": "50123", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}


@pytest.fixture
def machine(toy: Path, tmp_path: Path) -> Machine:
    return Machine(tmp_path, toy)


def test_one_machine(machine: Machine) -> None:
    assert machine.launch("--gpus", "3", "--max-restarts", "5")[0] == 0
    assert machine.arguments("torchrun") == [
        "--max-restarts=5",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "--standalone",
        "--nproc-per-node=3",
        "-m",
        "nmt.commands.train",
        *machine.training,
    ]
    assert (
        machine.notes / "torchrun.patience"
    ).read_text() == "120\n"  # seconds from SIGTERM to SIGKILL, not 30


def test_many_machines(machine: Machine) -> None:
    for rank in "01":
        assert machine.launch_as_host(rank)[0] == 0
    words = machine.arguments("torchrun")
    ids = {word for word in words if word.startswith("--rdzv-id=")}
    assert len(ids) == 1 and "/" not in ids.pop()  # of which torchrun makes a folder's name
    told = [
        word
        for word in words
        if re.match("--(nnodes|rdzv|local)", word) and not word.startswith("--rdzv-id")
    ]
    assert told == [
        word
        for is_host in ("true", "false")
        for word in (
            "--nnodes=2",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:29400",
            f"--rdzv-conf=is_host={is_host},read_timeout=300",
            "--local-addr=127.0.0.1",
        )
    ]
    assert "--standalone" not in words


def test_the_real_torchrun_takes_these_options(machine: Machine) -> None:
    assert machine.launch("--gpus", "1", "--hosts", "1")[0] == 0
    assert machine.launch_as_host("0", address="localhost:1234")[0] == 0
    words = machine.arguments("torchrun")
    second = words.index("--max-restarts=3", 1)
    one, many = parse_args(words[:second]), parse_args(words[second:])
    assert one.training_script == many.training_script == "nmt.commands.train"
    assert one.training_script_args == many.training_script_args == machine.training
    assert (
        one.standalone and many.rdzv_endpoint == "localhost:1234" and many.local_addr == "127.0.0.1"
    )


@pytest.mark.parametrize(
    ("state", "said", "code"),
    [
        ("done", 0, 0),
        ("failed", 1, 1),
        ("failed", 2, 2),
        ("preempted", 75, 75),
        ("preempted", 130, 130),
    ],
)
def test_the_exit_code_is_the_runs_own(machine: Machine, state: str, said: int, code: int) -> None:
    torchruns = 1 if code else 0  # it knows no other
    assert machine.launch("--gpus", "1", CODE=str(torchruns), STATUS=status(state, said))[0] == code


def test_a_killed_run_is_no_success_and_an_old_status_is_no_answer(machine: Machine) -> None:
    code, _, err = machine.launch("--gpus", "1", CODE="0", STATUS=status("running", None))
    assert code == 1 and "was killed" in err
    assert machine.launch("--gpus", "1", CODE="0", STATUS=status("done", 0))[0] == 0
    # It died before it could write its own
    code, _, err = machine.launch("--gpus", "1", CODE="1", STATUS="")
    assert code == 1


@pytest.mark.parametrize(
    ("rank", "state", "said", "starts"),
    [
        ("1", "running", None, 3),
        ("1", "failed", 1, 3),
        ("1", "failed", 2, 1),
        ("1", "preempted", 75, 3),
        ("1", "done", 0, 1),
        ("0", "running", None, 1),
        ("0", "failed", 1, 1),
    ],
)
def test_a_host_that_lost_the_main_one_joins_again(
    machine: Machine, rank: str, state: str, said: int | None, starts: int
) -> None:
    code, _, err = machine.launch_as_host(
        rank, "--max-restarts", "2", CODE="1", STATUS=status(state, said)
    )
    assert code == (1 if said is None else said)
    assert machine.arguments("torchrun").count("--nnodes=2") == starts
    assert err.count("joining again") == starts - 1


def test_a_killed_torchrun_is_not_left_before_its_ranks_have_saved(machine: Machine) -> None:
    machine.run_folder.mkdir()
    lock, path = machine.run_folder / ".lock", machine.run_folder / "status.json"
    rank = subprocess.Popen(
        [
            "flock",
            lock,
            sys.executable,
            "-c",
            f"import sys, time; time.sleep(1.5); open({str(path)!r}, 'w').write(sys.argv[1])",
            status("preempted", 75),
        ]
    )
    try:
        assert machine.launch("--gpus", "1", CODE="9", STATUS=status("running", None))[0] == 75
    finally:
        rank.wait()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ([], "nothing to train"),
        (["--gpus", "0", "--"], "--gpus 0"),
        (["--gpus"], "--gpus (nothing)"),
        (["--hosts", "two"], "--hosts two"),
        (["--hosts", "2", "--host-rank", "2", "--main-host", "a"], "--host-rank 0 to 1"),
        (["--hosts", "2", "--host-rank", "0"], "--main-host"),
        (["--host-rank", "1"], "--hosts N"),
        (["--max-restarts", "-1"], "--max-restarts -1"),
        (
            ["--hosts", "2", "--host-rank", "1", "--main-host", "no.such.host.invalid"],
            "no.such.host.invalid",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_in_one_line(machine: Machine, options: list[str], word: str) -> None:
    code, out, err = machine.run(LAUNCH, *options, *(machine.training if len(options) > 1 else []))
    assert (code, out, err.count("\n")) == (2, "", 1) and word in err, err
    assert machine.arguments("torchrun") == []


def test_mistakes_in_the_config_are_told_before_torchrun(machine: Machine) -> None:
    code, _, err = machine.run(LAUNCH, "--gpus", "1", *machine.training, "training.stepz=4")
    assert code == 2 and err.count("\n") == 1 and "training.stepz" in err
    # Not ours, and not nmt-train's
    assert machine.run(LAUNCH, "--host", "1", *machine.training)[0] == 2
    code, out, _ = machine.run(LAUNCH, "--", "--help")
    assert code == 0 and "usage: nmt-train" in out
    assert machine.arguments("torchrun") == []


def test_a_gpu_that_torch_cannot_use_is_told_before_torchrun(
    machine: Machine, tmp_path: Path
) -> None:
    driver = tmp_path / "driver"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\n")
    # Only in the process that counts GPUs: the others start faster without torch.
    (tmp_path / "sitecustomize.py").write_text(f"""
import sys
if "count_gpus" in " ".join(sys.orig_argv):
    import pathlib, torch, nmt.system.device
    nmt.system.device.DRIVER = pathlib.Path({str(driver)!r})
    torch.cuda.is_available = lambda: False
""")
    seen = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "COUNTS_GPUS": "yes"}
    code, out, err = machine.launch(**seen)
    assert (
        (code, out, err.count("\n")) == (2, "", 1)
        and "nmt-launch: error:" in err
        and "550.54.15" in err
    ), err
    assert machine.arguments("torchrun") == []
    assert machine.run(LAUNCH, *machine.training, "device=cpu", **seen)[0] == 0
    assert "--nproc-per-node=1" in machine.arguments("torchrun")


# nmt-train only counts them, and a start is faster without torch.
THREE_GPUS = """
import sys, types
if "nmt-train" in " ".join(sys.orig_argv):
    cuda = types.SimpleNamespace(device_count=lambda: 3)
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
if "count_gpus" in " ".join(sys.orig_argv):
    import torch
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 3
    torch.cuda.get_device_capability = lambda _: {capability}
    torch.cuda.get_arch_list = lambda: ["sm_75", "sm_80"]
"""


@pytest.fixture
def many_gpus(machine: Machine, tmp_path: Path) -> Machine:
    """Three of them, and nmt-train as pip installs it."""
    (tmp_path / "sitecustomize.py").write_text(THREE_GPUS.format(capability=(8, 0)))
    machine.environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    program = "import sys; from nmt.commands.train import main; sys.exit(main())"
    machine.install("nmt-train", f"#!{BIN}/python\n{program}\n")
    return machine


def train_as_command(machine: Machine, *options: str, **more: str) -> tuple[int, str, str]:
    program = 'exec nmt-train "$@"'  # through the PATH, as people start it
    return machine.run("-c", program, "bash", *machine.training, *options, **more)


@pytest.mark.parametrize(("options", "n_ranks"), [([], 3), (["--gpus", "2"], 2)])
def test_the_plain_command_uses_all_gpus(
    many_gpus: Machine, options: list[str], n_ranks: int
) -> None:
    told = status("preempted", 75)
    code, out, err = train_as_command(many_gpus, *options, STATUS=told, CODE="1", GPUS_HERE="3")
    assert (code, out, err.count("\n")) == (75, "", 1), err
    assert f"using {n_ranks} GPUs through nmt-launch; --gpus 1" in err
    words = many_gpus.arguments("torchrun")
    assert f"--nproc-per-node={n_ranks}" in words
    place = words.index("nmt.commands.train") + 1
    assert words[place:] == [*many_gpus.training, *options]


def test_bf16_on_old_gpus_is_told_before_torchrun(many_gpus: Machine, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(THREE_GPUS.format(capability=(7, 5)))
    code, out, err = train_as_command(many_gpus, "training.precision=bf16", COUNTS_GPUS="yes")
    assert (code, out, err.count("\n")) == (2, "", 2)
    assert "nmt-launch: error: training.precision=bf16: a GPU of" in err.splitlines()[1]
    assert many_gpus.arguments("torchrun") == []


@pytest.mark.parametrize(
    ("options", "n_gpus", "variables", "told"),
    [
        ("", 1, {}, ""),
        ("", 0, {}, ""),
        ("--gpus 1", 8, {}, ""),
        ("device=cpu", 8, {}, ""),
        ("", 8, {"LOCAL_WORLD_SIZE": "1"}, ""),  # of torchrun
        ("--gpus 4", 8, {"LOCAL_WORLD_SIZE": "4"}, ""),
        ("", 8, {"WORLD_SIZE": "2"}, ""),
        ("--plan", 8, {}, "using 1 of the 8 GPUs here; nmt-launch uses all"),
        ("--profile", 8, {}, "using 1 of the 8 GPUs here"),
        ("--gpus 2", 1, {}, "--gpus 2, but only 1 can be used here"),
        ("--gpus 2 device=cpu", 8, {}, "but only 0 can be used here; use nmt-launch"),
        ("--gpus 4", 8, {"LOCAL_WORLD_SIZE": "8"}, "torchrun started 8"),
    ],
)
def test_one_process_stays_where_it_is(
    options: str,
    n_gpus: int,
    variables: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it became another program"))
    args = parse_arguments(["--config", "base.yaml", *options.split()])
    args.words = []  # as if it were a command
    device = "cpu" if "device=cpu" in options else "auto"
    if "but" in told or "torchrun" in told:
        with pytest.raises(UserError, match=told):
            use_gpus(args, device)
        return
    use_gpus(args, device)
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == (told != "")


def test_a_function_called_from_python_returns_to_its_caller(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it became another program"))
    use_gpus(parse_arguments(["--config", "base.yaml"]), "auto")
    assert "using 1 of the 8 GPUs here" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["TERM", "INT", "USR1", "HUP"])
def test_a_signal_is_handed_on_once(machine: Machine, name: str) -> None:
    process = machine.start(
        LAUNCH,
        "--gpus",
        "1",
        *machine.training,
        PATIENCE="0.5",
        CODE="1",
        STATUS=status("preempted", 75),
    )
    pid, number = machine.pid("torchrun"), getattr(signal, f"SIG{name}")
    process.send_signal(number)
    until(lambda: (machine.notes / "torchrun.heard").exists())
    for _ in range(3):  # as impatient people and schedulers do
        process.send_signal(number)
        time.sleep(0.05)
    assert process.wait() == 75
    assert machine.heard("torchrun") == [name] and not is_alive(pid)


@pytest.mark.parametrize(("name", "code"), [("TERM", 75), ("USR1", 75), ("INT", 130)])
def test_a_signal_before_the_run_began_is_a_preemption_too(
    machine: Machine, name: str, code: int
) -> None:
    process = machine.start(LAUNCH, "--gpus", "1", *machine.training, PATIENCE="0", CODE="143")
    machine.pid("torchrun")
    process.send_signal(getattr(signal, f"SIG{name}"))
    assert process.wait() == code


def test_ctrl_c_reaches_torchrun_through_the_script_alone(machine: Machine) -> None:
    more = {"PATIENCE": "0.3", "CODE": "1", "STATUS": status("preempted", 130)}
    process = subprocess.Popen(
        ["bash", LAUNCH, "--gpus", "1", *machine.training],
        start_new_session=True,
        stderr=subprocess.PIPE,
        env=machine.environment | more,
    )
    pid = machine.pid("torchrun")
    os.killpg(process.pid, signal.SIGINT)  # a terminal signals its whole foreground group
    process.communicate()
    assert process.returncode == 130 and machine.heard("torchrun") == ["INT"] and not is_alive(pid)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
def test_torchrun_does_not_outlive_a_killed_script(machine: Machine) -> None:
    process = machine.start(LAUNCH, "--gpus", "1", *machine.training, PATIENCE="0.1")
    pid = machine.pid("torchrun")
    process.kill()
    process.communicate()
    until(lambda: not is_alive(pid))
    assert machine.heard("torchrun") == ["TERM"]


# ---- Slurm --------------------------------------------------------------------------------------------------------


def test_slurm_starts_launch_on_every_node(machine: Machine) -> None:
    assert machine.slurm(STATUS=status("done", 0))[0] == 0
    words = machine.arguments("srun")
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} < set(words) and words[
        -3:
    ] == machine.training
    assert words[words.index("--hosts") :][:4] == ["--hosts", "2", "--main-host", "node7:20123"]
    command = words[words.index("bash") :]  # which srun would run on the second node
    script = "\n".join(command[2 : command.index("nmt")])
    command = [word.replace("node7", "127.0.0.1") for word in command[command.index("nmt") :]]
    code, _, err = machine.run(
        "-c", script, *command, SLURM_NODEID="1", SLURM_JOB_ID="50123", STATUS=status("done", 0)
    )
    words = machine.arguments("torchrun")
    assert code == 0 and err == "" and words[-3:] == machine.training
    assert {"--rdzv-conf=is_host=false,read_timeout=300", "--rdzv-endpoint=127.0.0.1:20123"} < set(
        words
    )


def test_slurm_on_one_node_needs_no_rendezvous(machine: Machine) -> None:
    assert (
        machine.run(
            SLURM, *machine.training, **JOB | {"SLURM_JOB_NUM_NODES": "1"}, STATUS=status("done", 0)
        )[0]
        == 0
    )
    words = machine.arguments("srun")
    assert "--nodes=1" in words and "--hosts" not in words


def test_slurm_hands_the_cores_on_to_its_step(machine: Machine) -> None:
    """srun takes them no more from sbatch; without them all ranks of a node would share one core."""
    asked = [
        line
        for line in SLURM.read_text().splitlines()
        if line.startswith("#SBATCH --cpus-per-task=")
    ]
    assert len(asked) == 1 and int(asked[0].partition("=")[2]) > 1
    assert machine.slurm(SLURM_CPUS_PER_TASK="12", STATUS=status("done", 0))[0] == 0
    words = machine.arguments("srun")
    assert words.count("--cpus-per-task=12") == 1 and words.index(
        "--cpus-per-task=12"
    ) < words.index("bash")


REQUEUE = [  # state, exit code in status.json, is it new, time is up, job's state, requeued before; asked again?
    ("done", 0, True, False, "RUNNING", 0, False),
    ("done", 0, True, True, "RUNNING", 0, False),
    ("failed", 1, True, True, "RUNNING", 0, False),
    ("failed", 2, True, False, "RUNNING", 0, False),
    ("preempted", 75, True, True, "RUNNING", 0, True),
    ("preempted", 75, True, False, "RUNNING", 0, True),
    ("preempted", 130, True, False, "RUNNING", 0, False),
    ("running", None, True, False, "RUNNING", 0, True),
    ("running", None, True, True, "RUNNING", 19, True),
    ("running", None, True, False, "RUNNING", 20, False),
    ("preempted", 75, True, True, "CANCELLED", 0, False),
    ("preempted", 75, True, False, "COMPLETING", 0, False),
    ("preempted", 75, False, False, "RUNNING", 0, False),
    ("preempted", 75, False, True, "RUNNING", 0, True),
]


def test_a_job_that_was_asked_before_it_began_is_queued_again(machine: Machine) -> None:
    """A preemption may signal the tasks alone, which then leave with 75."""
    assert machine.slurm(CODE="75")[0] == 75
    assert "requeue 50123" in machine.arguments("scontrol")


def test_a_task_of_an_array_comes_back_alone(machine: Machine) -> None:
    """Its run has the task's number for %a, and so has its job: the last task's own number is that
    of the array, which would be queued again as a whole.
    """
    run = machine.run_folder
    machine.training = [*machine.training[:-1], f"out={run}", "name=try-%a", "seed=%a"]
    task = {"SLURM_ARRAY_JOB_ID": "50123", "SLURM_ARRAY_TASK_ID": "4"}
    code = machine.slurm(CODE="1", STATUS=status("preempted", 75), **task)[0]
    assert code == 75 and machine.arguments("srun")[-2:] == ["name=try-4", "seed=4"]
    calls = machine.arguments("scontrol")
    assert calls[-2:] == ["show job 50123_4", "requeue 50123_4"]


@pytest.mark.parametrize(("state", "said", "is_new", "is_up", "job", "before", "is_asked"), REQUEUE)
def test_a_job_is_queued_again(
    machine: Machine,
    state: str,
    said: int | None,
    is_new: bool,
    is_up: bool,
    job: str,
    before: int,
    is_asked: bool,
) -> None:
    environment = {"JOB_STATE": job, "SLURM_RESTART_COUNT": str(before), "CODE": "1"}
    if is_new:
        environment["STATUS"] = status(state, said)
    else:
        machine.run_folder.mkdir()
        (machine.run_folder / "status.json").write_text(status(state, said))
    if is_up:
        environment["PATIENCE"] = "0.1"
    process = machine.start(SLURM, *machine.training, **JOB, **environment)
    if is_up:
        pid = machine.pid("srun")
        process.send_signal(signal.SIGUSR1)
    process.communicate()
    calls = machine.arguments("scontrol")
    assert [call for call in calls if call.startswith("requeue")] == (
        ["requeue 50123"] if is_asked else []
    )
    assert process.returncode == (1 if said is None or not is_new else said)
    if is_up:
        assert machine.heard("srun") == ["USR1"] and not is_alive(pid)


def test_srun_is_never_sent_a_sigterm(machine: Machine) -> None:
    """It would kill its tasks at once."""
    process = machine.start(
        SLURM, *machine.training, **JOB, PATIENCE="0.3", CODE="1", STATUS=status("preempted", 75)
    )
    machine.pid("srun")
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert machine.heard("srun") == ["USR1"] and process.returncode == 75


def test_slurm_says_what_is_missing(machine: Machine) -> None:
    code, _, err = machine.run(SLURM, *machine.training)
    assert code == 2 and err.count("\n") == 1 and "sbatch" in err
    code, _, err = machine.run(SLURM, *machine.training, **JOB, PATH="/usr/bin:/bin")
    assert code == 2 and err.count("\n") == 1 and "nmt-launch is not on the PATH" in err


def test_slurm_explains_itself_anywhere(machine: Machine) -> None:
    code, out, err = machine.run(SLURM, "--help")
    assert code == 0 and not err and "    sbatch --nodes 2" in out and "#" not in out


# ---- the real torchrun --------------------------------------------------------------------------------------------

N_REAL_RANKS = amount(1, 2)


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from descendants(child)


def test_real_ranks_are_preempted(toy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [
        "bash",
        str(LAUNCH),
        "--gpus",
        str(N_REAL_RANKS),
        "--",
        "--config",
        str(toy),
        "training.steps=100000",
        "training.log_every=10",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    with open(tmp_path / "launch.err", "w+", encoding="utf-8") as err:
        process = subprocess.Popen(command, stderr=err, env=environment)
        try:
            metrics = run / "metrics.jsonl"
            until(
                lambda: (
                    metrics.exists() and metrics.stat().st_size > 0 or process.poll() is not None
                ),
                60,
            )
            started = set(descendants(process.pid))
            assert len(started) >= 1 + N_REAL_RANKS, "torchrun and its ranks"
            process.terminate()
            assert process.wait() == 75, (tmp_path / "launch.err").read_text()[-3000:]
        finally:
            process.kill()
            process.wait()
    said = json.loads((run / "status.json").read_text())
    assert (said["state"], said["exit_code"]) == ("preempted", 75) and 0 < said["step"] < 100_000
    assert (run / "checkpoints" / "last").readlink().name == f"step-{said['step']:07d}"
    assert not any(map(is_alive, started))


def test_the_image_is_made_of_what_is_there() -> None:
    """No image is built here; what would break its build or let private files in is read from its
    recipe.
    """
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    sources = [word for name, rest in steps if name == "COPY" for word in rest.split()[:-1]]
    for source, place in [
        rest.split() for name, rest in steps if name == "COPY" and rest.count(" ") == 1
    ]:
        assert place in (source, "./")
    assert sources and all((ROOT / source).exists() for source in sources)
    assert os.access(LAUNCH, os.X_OK)
    assert sorted(allowed) == sorted(sources)
    assert (ROOT / ".dockerignore").read_text().splitlines().count("*") == 1  # all else stays out
    names = [name for name, _ in steps]
    assert (
        names[0] == "ARG"
        and names.count("ENTRYPOINT") == 1
        and set(names) <= {"ARG", "FROM", "RUN", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "ENV"}
    )
    # A list: no shell stands before it, deaf to SIGTERM
    assert json.loads(dict(steps)["ENTRYPOINT"]) == ["nmt-train"]
    assert names.index("USER") > max(at for at, name in enumerate(names) if name == "RUN")
    setup = (ROOT / "setup.cfg").read_text()
    for needed in re.findall(r"file: (\S+)|^license_files = (\S+)", setup, re.MULTILINE):
        assert set(needed) & set(sources), needed
