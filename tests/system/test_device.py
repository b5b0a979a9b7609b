"""Where commands compute: a GPU that torch cannot use is refused, never ignored, and the user can
ask for the CPU.

No GPU is needed: a folder stands in for what the kernel would show of one.
"""

import fnmatch
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
from pytest import MonkeyPatch, fixture, mark, raises
from support.capture import Capture, read_stderr
from support.in_process import succeed
from support.processor import CPU
from support.text_lines import read_text_lines

from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.commands.train import main as nmt_train
from nmt.commands.translate import main as nmt_translate
from nmt.config_files import load_config, parse_device
from nmt.system import device
from nmt.system.device import choose_device, name_machine
from nmt.system.errors import UserError
from nmt.system.files import read_json
from nmt.system.ranks import join_world

PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC: 12\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build  (dvs-builder@U16)\n"


class Machine:
    """What /dev and /proc show."""

    def __init__(self, folder: Path, monkeypatch: MonkeyPatch) -> None:
        self.devices, self.driver = folder / "dev", folder / "version"
        self.driver_of_windows = folder / "libcuda.so.1"
        self.devices.mkdir()
        monkeypatch.setattr(device, "DEVICES", self.devices)
        monkeypatch.setattr(device, "DRIVER", self.driver)
        monkeypatch.setattr(device, "WSL_DRIVER", self.driver_of_windows)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def add_gpu(self, version: str = PROPRIETARY) -> None:
        (self.devices / "nvidia0").touch()
        self.driver.write_text(version)


@fixture
def machine(tmp_path: Path, monkeypatch: MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_without_a_gpu_it_is_the_cpu(machine: Machine) -> None:
    for name in ("nvidiactl", "nvme0", "null"):  # of which none is a GPU
        (machine.devices / name).touch()
    assert choose_device().type == choose_device("cpu").type == "cpu"


def test_every_command_multiplies_fp32_alike(machine: Machine) -> None:
    for given in ("highest", "high"):  # the second: a user's own choice
        torch.set_float32_matmul_precision(given)
        choose_device("cpu")  # as translation and scoring do
        chosen = torch.get_float32_matmul_precision()
        assert given == "highest" or chosen == given
        torch.set_float32_matmul_precision(given)
        with join_world("cpu"):  # as training does
            assert torch.get_float32_matmul_precision() == chosen
        assert torch.get_float32_matmul_precision() == chosen  # a training leaves nothing behind
    torch.set_float32_matmul_precision("highest")


def pretend_gpus(monkeypatch: MonkeyPatch, capability: tuple[int, int], built: str) -> None:
    """Four GPUs of one kind, and a torch wheel that is built for some."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", built.split)


def test_with_a_gpu_it_is_the_ranks_own(machine: Machine, monkeypatch: MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, (9, 0), "sm_90")
    assert choose_device("auto", 3) == torch.device("cuda", 3)
    assert choose_device("cpu", 3) == CPU
    with raises(UserError, match="started 5 or more processes here, but there are 4 GPUs"):
        choose_device("auto", 4)


@mark.parametrize(
    "capability, built, has_code",
    [
        ((8, 6), "sm_75 sm_80 sm_90", True),
        ((8, 0), "sm_75 sm_86 sm_90", False),
        ((7, 0), "sm_75 sm_80", False),
        ((12, 0), "sm_80 sm_90", False),
        ((12, 0), "sm_80 sm_90 compute_90", True),
        ((8, 0), "sm_75 compute_90", False),
        ((9, 0), "sm_90a", True),
        ((12, 1), "sm_100 sm_120", True),
        ((9, 0), "gfx90a gfx942", True),
        ((9, 0), "", True),
    ],
)
def test_a_gpu_that_is_not_in_the_wheel_is_refused(
    machine: Machine,
    monkeypatch: MonkeyPatch,
    capability: tuple[int, int],
    built: str,
    has_code: bool,
) -> None:
    pretend_gpus(monkeypatch, capability, built)
    if has_code:
        assert choose_device().type == "cuda"
        return
    with raises(UserError) as refusal:
        choose_device()
    message = str(refusal.value)
    assert f"capability {capability[0]}.{capability[1]}," in message and f"{built} only" in message
    assert "install a torch wheel" in message and "device=cpu" in message


@mark.parametrize(
    "text, version",
    [(PROPRIETARY, "driver 550.54.15"), (OPEN, "driver 570.86"), ("", "driver of unknown version")],
)
@mark.parametrize(
    "cuda, build", [(None, "built for the CPU only"), ("13.0", "built for CUDA 13.0")]
)
def test_a_gpu_that_torch_cannot_use_is_refused(
    machine: Machine,
    monkeypatch: MonkeyPatch,
    text: str,
    version: str,
    cuda: str | None,
    build: str,
) -> None:
    machine.add_gpu(text)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with raises(UserError) as refusal:
        choose_device()
    message = str(refusal.value)
    assert "\n" not in message and "device=cpu" in message and "newer driver" in message
    assert version in message and torch.__version__ in message and build in message


@mark.parametrize("sign", ["dev/nvidia0", "version", "libcuda.so.1"])
def test_any_sign_of_a_gpu_suffices(machine: Machine, sign: str) -> None:
    (machine.devices.parent / sign).touch()
    with raises(UserError, match="has an NVIDIA GPU"):
        choose_device()


@mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_are_a_wish_for_the_cpu(
    machine: Machine, monkeypatch: MonkeyPatch, visible: str
) -> None:
    machine.add_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_device() == CPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with raises(UserError):
        choose_device()


def test_commands_refuse_and_device_cpu_is_asked_anew_each_time(
    machine: Machine, toy: Path, corpus: Path, tmp_path: Path, capsys: Capture
) -> None:
    """A checkpoint that was trained with device=cpu does not make the other commands compute there."""
    machine.add_gpu()
    run, translation = tmp_path / "run", tmp_path / "translation"
    training = ["--config", str(toy), "training.steps=4", "training.checkpoint_every=2"]
    translating = [str(run), "-i", str(corpus / "test.en"), "-o", str(translation)]
    commands = [
        (nmt_train, training),
        (nmt_eval, [str(run)]),
        (nmt_translate, translating),
        (nmt_average, [str(run), "--curve", "1,2"]),
    ]
    for main, arguments in commands:
        assert main(arguments) == 2
        message = read_stderr(capsys)
        assert message.count("\n") == 1 and "550.54.15" in message and "device=cpu" in message
        assert main([*arguments, "device=cpu"]) == 0, read_stderr(capsys)
        capsys.readouterr()
    assert load_config(str(run / "config.yaml")).device == "cpu"
    assert len(read_text_lines(translation)) == 20
    assert len(read_json(run / "averaging.json")["points"]) == 2
    succeed(nmt_train, *training, "training.steps=6", "device=cpu")
    machine.driver.unlink()
    (machine.devices / "nvidia0").unlink()
    succeed(nmt_train, *training, "training.steps=8")  # the same run, wherever it is continued


def test_only_the_command_line_asks(capsys: Capture, toy: Path, tmp_path: Path) -> None:
    assert parse_device(()) == parse_device(("decoding.beam=2",)) == "auto"
    assert parse_device(("decoding.beam=2", "device=cpu")) == "cpu"
    with raises(UserError, match="'gpu' is not one of auto, cpu"):
        parse_device(("device=gpu",))
    (tmp_path / "one").mkdir()
    with raises(SystemExit, match="2"):
        nmt_average([str(tmp_path / "one"), "-o", str(tmp_path / "out"), "device=cpu"])
    assert "only --curve computes on another device" in read_stderr(capsys)
    with raises(SystemExit):
        nmt_average(["device=cpu"])


def test_settings_are_read_without_torch(toy: Path) -> None:
    program = (
        "import sys; from nmt.commands.train import main; "
        f"code = main(['--config', {str(toy)!r}, 'device=cpu', '--print-config']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "\ndevice: cpu\n" in done.stdout, done.stderr


@mark.parametrize(
    "flags, name",
    [
        ("fpu sse2 avx2", "2 threads on Some CPU @ 2.00GHz with AVX2"),
        ("avx2 avx512f avx512_bf16 fpu", "2 threads on Some CPU @ 2.00GHz with AVX512-BF16"),
        ("avx512_bf16 avx512f amx_bf16 amx_tile", "2 threads on Some CPU @ 2.00GHz with AMX"),
        ("fpu sse2", "2 threads on Some CPU @ 2.00GHz"),
    ],
)
def test_a_machine_is_named_with_its_fastest_instructions(
    monkeypatch: MonkeyPatch, flags: str, name: str
) -> None:
    info = (
        f"processor\t: 0\nmodel name\t: Some CPU @ 2.00GHz\nflags\t\t: {flags}\nvmx flags\t: ept\n"
    )
    monkeypatch.setattr(device, "read_cpu_info", lambda: info)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert name_machine(CPU, 1) == name


def test_several_gpus_are_named_with_what_decides_how_they_sum(
    monkeypatch: MonkeyPatch,
) -> None:
    for name in fnmatch.filter(os.environ, "NCCL_*"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    gpu = torch.device("cuda", 0)
    assert name_machine(gpu, 1) == "1 x NVIDIA H200"
    told = "8 x NVIDIA H200, NCCL 2.28.9, NCCL_ALGO=Ring, NCCL_NVLS_ENABLE=0"
    assert name_machine(gpu, 8) == told


def test_a_machine_that_says_nothing_of_itself_has_a_name(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(device, "read_cpu_info", lambda: "")
    assert name_machine(CPU, 2).endswith(f"threads on {platform.machine()}")
