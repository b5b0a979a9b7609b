"""nmt-launch and nmt-slurm, as a site meets them: what they start, which signals they hand on, and the exit
code that they leave with.

torchrun, srun and scontrol are exchanged for small scripts that write down how they were called,
what they heard, and a status.json as a run would; nmt-train answers --print-config for real, or as
it would if it is asked what it usually is. One test goes through torchrun itself.
tests/soak/test_slurm.py has a real Slurm, tests/soak/test_hosts.py two hosts.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from pytest import MonkeyPatch, fixture, mark
from support.capture import Capture, read_stderr
from support.checkout import ROOT
from support.text_lines import read_text_lines
from support.waiting import is_alive, until
from torch.distributed.run import parse_args

from nmt.commands.cli import run_command
from nmt.commands.train import parse_arguments, use_gpus
from nmt.config_files import format_config, load_config
from nmt.system.files import read_json

LAUNCH, SLURM = ROOT / "scripts" / "nmt-launch", ROOT / "scripts" / "nmt-slurm"
BIN = Path(sys.executable).parent

# Writes $STATUS to the run folder (the word after out=), then leaves with $CODE; given $PATIENCE it
# awaits a signal.
FAKE_RUN = """#!/bin/bash
printenv TORCH_ELASTIC_SHUTDOWN_TIMEOUT > "$NOTES/NAME.patience"
printf '%s\\n' "$@" >> "$NOTES/NAME.arguments"
for word in "$@"; do [[ $word != out=* ]] || folder=${word#out=}; done
for name in TERM INT USR1 HUP; do trap "echo $name >> $NOTES/NAME.heard" "$name"; done
[[ -z ${PATIENCE-} ]] || {
    echo $$ > "$NOTES/NAME.pid"
    until [[ -s $NOTES/NAME.heard ]]; do sleep 0.02; done
    sleep "$PATIENCE"
}
[[ -z ${STATUS-} ]] || { mkdir -p "$folder"; printf '%s\\n' "$STATUS" > "$folder/status.json"; }
exit "${CODE:-0}"
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
JOB = {"SLURM_JOB_ID": "50123", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}


def status(state: str, said: str) -> str:
    """A status.json; `said` is the run's exit code, or - if it has none yet."""
    code = None if said == "-" else int(said)
    values = {"state": state, "exit_code": code, "message": 'of "state": "done"'}
    return json.dumps(values, indent=1)


def read_table(text: str) -> list[list[str]]:
    """The cells of each line but the first, which names them."""
    return [re.split(r" *\| *| {2,}", line) for line in text.strip().splitlines()[1:]]


class Machine:
    """A PATH of its own, the notes that the programs in it take, and a run folder."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.bin, self.notes = folder / "bin", folder / "notes"
        self.run_folder = folder / "run with a space"
        for made in (self.bin, self.notes, self.run_folder):
            made.mkdir()
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
            "PYTHONPATH": f"{folder}:{ROOT}",  # the first for a sitecustomize.py
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
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=self.environment | environment,
            start_new_session=True,
        )

    def run(self, *command: str | Path, **environment: str) -> tuple[int, str, str]:
        process = self.start(*command, **environment)
        out, err = process.communicate()
        return process.returncode, out, err

    def launch(self, *options: str, **environment: str) -> tuple[int, str, str]:
        return self.run(LAUNCH, "--gpus", "1", *options, "--", *self.training, **environment)

    def slurm(self, **environment: str) -> tuple[int, str, str]:
        return self.run(SLURM, *self.training, **JOB | environment)

    def arguments(self, name: str) -> list[str]:
        path = self.notes / f"{name}.arguments"
        return read_text_lines(path) if path.exists() else []

    def heard(self, name: str) -> list[str]:
        return (self.notes / f"{name}.heard").read_text().split()

    def pid(self, name: str) -> int:
        path = self.notes / f"{name}.pid"
        until(lambda: path.exists() and path.read_text().strip() != "")
        return int(path.read_text())


@fixture
def machine(toy: Path, tmp_path: Path) -> Machine:
    return Machine(tmp_path, toy)


ALWAYS = (
    "training_script=nmt.commands.train signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
)
STARTS = """
options | what torchrun's own parser makes of the words that it gets
--gpus 3 --max-restarts 5 | standalone=True nproc_per_node=3 max_restarts=5
--hosts 2 --main-host 127.0.0.1 --host-rank 0 | standalone=False nnodes=2 rdzv_backend=c10d \
rdzv_endpoint=127.0.0.1:29400 rdzv_conf=is_host=true,read_timeout=300 local_addr=127.0.0.1
--hosts 2 --main-host localhost:1234 --host-rank 1 | standalone=False nnodes=2 rdzv_backend=c10d \
rdzv_endpoint=localhost:1234 rdzv_conf=is_host=false,read_timeout=300 local_addr=127.0.0.1
"""


@mark.parametrize("options, asked", read_table(STARTS))
def test_what_torchrun_is_started_with(machine: Machine, options: str, asked: str) -> None:
    assert machine.launch(*options.split())[0] == 0
    args = vars(parse_args(machine.arguments("torchrun")))
    found = {f"{key}={value}" for key, value in args.items()}
    assert {*asked.split(), *ALWAYS.split()} <= found
    assert args["training_script_args"] == machine.training
    if (
        "nnodes=2" in asked
    ):  # the same on each host, and no path, for torchrun makes a folder's name of it
        told = subprocess.run(
            ["cksum"], input=f" {machine.run_folder}\n", capture_output=True, text=True
        )
        assert args["rdzv_id"] == f"nmt-{told.stdout.split()[0]}"
    patience = (machine.notes / "torchrun.patience").read_text()
    assert patience == "120\n"  # seconds from SIGTERM to SIGKILL, not 30


# Of torchrun, which knows no other than 0 and 1; - is a run that did not come so far as to say anything
CODES = """
state      said  torchrun's  ours
done       0     0           0
failed     2     1           2
preempted  75    1           75
running    -     0           1
-          -     1           1
"""


@mark.parametrize("state, said, torchruns, code", read_table(CODES))
def test_the_exit_code_is_the_runs_own(
    machine: Machine, state: str, said: str, torchruns: str, code: str
) -> None:
    (machine.run_folder / "status.json").write_text(status("preempted", "130"))  # an earlier one
    told = "" if state == "-" else status(state, said)
    found, _, err = machine.launch(CODE=torchruns, STATUS=told)
    assert found == int(code) and ("was killed" in err) == (state == "running")


LOST = """
host's rank  state      said  starts
1            running    -     3
1            preempted  75    3
1            failed     2     1
1            done       0     1
0            failed     1     1
"""


@mark.parametrize("rank, state, said, starts", read_table(LOST))
def test_a_host_that_lost_the_main_one_joins_again(
    machine: Machine, rank: str, state: str, said: str, starts: str
) -> None:
    options = f"--hosts 2 --main-host 127.0.0.1 --host-rank {rank} --max-restarts 2".split()
    code, _, err = machine.launch(*options, CODE="1", STATUS=status(state, said))
    assert code == (1 if said == "-" else int(said))
    assert err.count("joining again") == int(starts) - 1
    assert machine.arguments("torchrun").count("--nnodes=2") == int(starts)


def test_a_killed_torchrun_is_not_left_before_its_ranks_have_saved(machine: Machine) -> None:
    saving = 'sleep 1.5; printf %s "$1" > "$0/status.json"'
    folder, told = machine.run_folder, status("preempted", "75")
    rank = subprocess.Popen(["flock", folder / ".lock", "bash", "-c", saving, folder, told])
    assert machine.launch(CODE="9", STATUS=status("running", "-"))[0] == 75
    rank.wait()


MISTAKES = """
options | what is told
 | nothing to train
--gpus 0 -- --config base.yaml | --gpus 0
--gpus | --gpus (nothing)
--hosts 2 --host-rank 2 --main-host a -- --config base.yaml | --host-rank 0 to 1
--hosts 2 --host-rank 0 -- --config base.yaml | --main-host
--host-rank 1 -- --config base.yaml | --hosts N
--hosts 2 --host-rank 1 --main-host no.such.invalid -- --config base.yaml | no.such.invalid
--gpus 1 --config base.yaml training.stepz=4 | training.stepz
"""


@mark.parametrize("words, told", read_table(MISTAKES))
def test_mistakes_are_told_in_one_line(machine: Machine, words: str, told: str) -> None:
    code, out, err = machine.run(LAUNCH, *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and told in err, err
    assert machine.arguments("torchrun") == []


# In the process that counts GPUs; the others start faster without torch.
OLD_GPUS = """
import sys
if "count_gpus" in " ".join(sys.orig_argv):
    import torch
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 3
    torch.cuda.get_device_capability = lambda _: (7, 5)
    torch.cuda.get_arch_list = lambda: ["sm_75", "sm_80"]
"""


def test_gpus_that_cannot_be_used_are_told_before_torchrun(
    machine: Machine, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(OLD_GPUS)
    machine.training.append("training.precision=bf16")
    code, out, err = machine.run(LAUNCH, *machine.training, COUNTS_GPUS="yes")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "nmt-launch: error: training.precision=bf16: a GPU of" in err
    assert machine.arguments("torchrun") == []
    assert machine.run(LAUNCH, *machine.training, "device=cpu", COUNTS_GPUS="yes")[0] == 0
    assert "--nproc-per-node=1" in machine.arguments("torchrun")


@mark.parametrize("options, n_ranks", [("", 3), ("--gpus 2", 2)])
def test_the_plain_command_uses_all_gpus(
    machine: Machine, tmp_path: Path, options: str, n_ranks: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text("""
import sys, types
if "nmt-train" in " ".join(sys.orig_argv):  # which only counts them
    cuda = types.SimpleNamespace(device_count=lambda: 3)
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
""")
    program = "import sys; from nmt.commands.train import main; sys.exit(main())"
    machine.install("nmt-train", f"#!{BIN}/python\n{program}\n")  # as pip installs it
    training = [*machine.training, *options.split()]
    more = {"STATUS": status("preempted", "75"), "CODE": "1", "GPUS_HERE": "3"}
    code, out, err = machine.run("-c", 'exec nmt-train "$@"', "bash", *training, **more)
    assert (code, out, err.count("\n")) == (75, "", 1), err
    assert f"using {n_ranks} GPUs through nmt-launch; --gpus 1" in err
    words = machine.arguments("torchrun")
    assert f"--nproc-per-node={n_ranks}" in words and words[-len(training) :] == training


ALONE = """
options | GPUs here | torchrun's variables | what is told
 | 1 | |
 | 0 | |
--gpus 1 | 8 | |
device=cpu | 8 | |
 | 8 | LOCAL_WORLD_SIZE=1 |
--gpus 4 | 8 | LOCAL_WORLD_SIZE=4 |
 | 8 | WORLD_SIZE=2 |
--plan | 8 | | using 1 of the 8 GPUs here; nmt-launch uses all
--profile | 8 | | using 1 of the 8 GPUs here
called from Python | 8 | | using 1 of the 8 GPUs here
--gpus 2 | 1 | | nmt-train: error: --gpus 2, but only 1 can be used here
--gpus 2 device=cpu | 8 | | nmt-train: error: --gpus 2, but only 0 can be used here; use nmt-launch
--gpus 4 | 8 | LOCAL_WORLD_SIZE=8 | nmt-train: error: --gpus 4, but torchrun started 8
"""


@mark.parametrize("options, n_gpus, variable, told", read_table(ALONE))
def test_one_process_stays_where_it_is(
    options: str,
    n_gpus: str,
    variable: str,
    told: str,
    monkeypatch: MonkeyPatch,
    capsys: Capture,
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(n_gpus))
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it became another program"))
    is_call = options == "called from Python"
    args = parse_arguments(["--config", "base.yaml", *("" if is_call else options).split()])
    if not is_call:
        args.words = []
    device = "cpu" if "device=cpu" in options else "auto"

    def start() -> int:
        use_gpus(args, device)
        return 0

    code = run_command(start, "nmt-train")
    assert code == (2 if "error" in told else 0)
    said = read_stderr(capsys)
    assert told in said and said.count("\n") == (told != "")


# ---- signals ------------------------------------------------------------------------------------------------------


# The last two come before the run could say anything.
SIGNALS = """
signal  state      ours
TERM    preempted  75
HUP     preempted  75
INT     preempted  75
USR1    -          75
INT     -          130
"""


@mark.parametrize("name, state, code", read_table(SIGNALS))
def test_a_signal_is_handed_on_once(machine: Machine, name: str, state: str, code: str) -> None:
    """Also where a terminal signals its whole foreground group, and people and schedulers are impatient."""
    told = "" if state == "-" else status(state, "75")
    more = {"PATIENCE": "0.5", "CODE": "1", "STATUS": told}
    process = machine.start(LAUNCH, "--gpus", "1", *machine.training, **more)
    pid = machine.pid("torchrun")
    for _ in range(4):
        os.killpg(process.pid, getattr(signal, f"SIG{name}"))
        until((machine.notes / "torchrun.heard").exists)
        time.sleep(0.05)
    assert process.wait() == int(code)
    assert machine.heard("torchrun") == [name] and not is_alive(pid)


@mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
def test_torchrun_does_not_outlive_a_killed_script(machine: Machine) -> None:
    process = machine.start(LAUNCH, "--gpus", "1", *machine.training, PATIENCE="0.1")
    pid = machine.pid("torchrun")
    process.kill()
    process.communicate()
    until(lambda: not is_alive(pid))
    assert machine.heard("torchrun") == ["TERM"]


def test_real_ranks_are_preempted(toy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["training.steps=100000", "training.log_every=10"]
    with open(tmp_path / "launch.err", "w+", encoding="utf-8") as err:
        process = subprocess.Popen(
            [LAUNCH, "--gpus", "1", "--", "--config", toy, *settings],
            stderr=err,
            env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"},
        )
        try:
            metrics = run / "metrics.jsonl"
            until(
                lambda: (
                    metrics.exists() and metrics.stat().st_size > 0 or process.poll() is not None
                )
            )
            process.terminate()
            assert process.wait() == 75, (tmp_path / "launch.err").read_text()[-3000:]
        finally:
            process.kill()
            process.wait()
    said = read_json(run / "status.json")
    assert (said["state"], said["exit_code"]) == ("preempted", 75) and 0 < said["step"] < 100_000
    assert (run / "checkpoints" / "last").readlink().name == f"step-{said['step']:07d}"
    assert not is_alive(said["pid"])


# ---- Slurm --------------------------------------------------------------------------------------------------------


def test_slurm_starts_launch_on_every_node(machine: Machine) -> None:
    assert machine.slurm(SLURM_CPUS_PER_TASK="12", STATUS=status("done", "0"))[0] == 0
    words = machine.arguments("srun")
    options, command = words[: words.index("bash")], words[words.index("bash") :]
    assert re.search(r"^#SBATCH --cpus-per-task=[2-9]$", SLURM.read_text(), re.MULTILINE)
    # srun takes the cores no more from sbatch; without them all ranks of a node would share one
    asked = {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=12"}
    assert asked < set(options) and command[-3:] == machine.training
    assert command[command.index("--hosts") :][:4] == ["--hosts", "2", "--main-host", "node7:20123"]
    # what srun would run on the second node
    script = "\n".join(command[2 : command.index("nmt")])
    command = [word.replace("node7", "127.0.0.1") for word in command[command.index("nmt") :]]
    code, _, err = machine.run("-c", script, *command, SLURM_NODEID="1", SLURM_JOB_ID="50123")
    words = machine.arguments("torchrun")
    assert code == 0 and err == "" and words[-3:] == machine.training
    assert "--rdzv-conf=is_host=false,read_timeout=300" in words
    assert "--rdzv-endpoint=127.0.0.1:20123" in words


QUEUED = """
state      said  signal  otherwise               asked again
done       0     USR1    -                       no
failed     1     USR1    -                       no
preempted  75    USR1    -                       yes
preempted  75    TERM    -                       yes
preempted  75    -       -                       yes
preempted  130   -       -                       no
running    -     -       SLURM_RESTART_COUNT=19  yes
running    -     -       SLURM_RESTART_COUNT=20  no
preempted  75    USR1    JOB_STATE=CANCELLED     no
unchanged  1     -       -                       no
unchanged  1     USR1    -                       yes
unchanged  75    -       CODE=75                 yes
"""  # in the last, a preemption signalled the tasks alone before the run began


@mark.parametrize("state, said, sent, more, asked", read_table(QUEUED))
def test_a_job_is_queued_again(
    machine: Machine, state: str, said: str, sent: str, more: str, asked: str
) -> None:
    environment = JOB | {"CODE": "1", "STATUS": status(state, said)}
    if state == "unchanged":
        (machine.run_folder / "status.json").write_text(status("preempted", "75"))
        del environment["STATUS"]
    if more != "-":
        name, _, value = more.partition("=")
        environment[name] = value
    if sent != "-":
        environment["PATIENCE"] = "0.1"
    process = machine.start(SLURM, *machine.training, **environment)
    if sent != "-":
        pid = machine.pid("srun")
        process.send_signal(getattr(signal, f"SIG{sent}"))
    process.communicate()
    calls = machine.arguments("scontrol")
    requeued = [call for call in calls if call.startswith("requeue")]
    assert requeued == (["requeue 50123"] if asked == "yes" else [])
    assert process.returncode == (1 if said == "-" else int(said))
    if sent != "-":
        # srun would kill its tasks at once if it heard SIGTERM
        assert machine.heard("srun") == ["USR1"] and not is_alive(pid)


def test_a_task_of_an_array_comes_back_alone(machine: Machine) -> None:
    """Its run has the task's number for %a, and so has its job: the last task's own number is that
    of the array, which would be queued again as a whole.
    """
    machine.training = [*machine.training, "name=try-%a", "seed=%a"]
    task = {"SLURM_ARRAY_JOB_ID": "50123", "SLURM_ARRAY_TASK_ID": "4", "SLURM_JOB_NUM_NODES": "1"}
    code = machine.slurm(CODE="1", STATUS=status("preempted", "75"), **task)[0]
    words = machine.arguments("srun")
    assert code == 75 and words[-2:] == ["name=try-4", "seed=4"]
    assert "--nodes=1" in words and "--hosts" not in words  # nor is there anybody to meet
    calls = machine.arguments("scontrol")
    assert calls[-2:] == ["show job 50123_4", "requeue 50123_4"]


def test_slurm_says_what_is_missing_and_each_explains_itself(machine: Machine) -> None:
    for missing, told in (({}, "sbatch"), (JOB | {"PATH": "/usr/bin:/bin"}, "nmt-launch is not")):
        code, _, err = machine.run(SLURM, *machine.training, **missing)
        assert code == 2 and err.count("\n") == 1 and told in err
    assert "usage: nmt-train" in machine.run(LAUNCH, "--", "--help")[1]
    assert "    sbatch --nodes 2" in machine.run(SLURM, "--help")[1]


# ---- the image ----------------------------------------------------------------------------------------------------


def test_the_image_is_made_of_what_is_there() -> None:
    """No image is built here; what would break its build or let private files in is read from its
    recipe.
    """
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    names = [name for name, _ in steps]
    copied = [rest.split()[:-1] for name, rest in steps if name == "COPY"]
    sources = sum(copied, [])
    assert sources and all((ROOT / source).exists() for source in sources)
    ignored = read_text_lines(ROOT / ".dockerignore")
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    assert sorted(allowed) == sorted(sources) and "*" in ignored  # all else stays out
    # A list: no shell stands before it, deaf to SIGTERM
    assert json.loads(dict(steps)["ENTRYPOINT"]) == ["nmt-train"]
    assert "RUN" not in names[names.index("USER") :]
    setup = (ROOT / "setup.cfg").read_text()
    for needed in re.findall(r"file: (\S+)|^license_files = (\S+)", setup, re.MULTILINE):
        assert set(needed) & set(sources), needed
