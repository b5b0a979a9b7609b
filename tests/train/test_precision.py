"""training.precision: auto follows from the instructions of the processor, and a run keeps it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from pytest import MonkeyPatch, mark, raises
from support.capture import Capture, read_stderr
from support.finished_run import read_losses
from support.in_process import refuse, succeed
from support.processor import CPU

from nmt.commands.train import main as nmt_train
from nmt.config_files import load_recorded_config
from nmt.system import device
from nmt.system.device import choose_precision
from nmt.system.errors import UserError
from nmt.system.ranks import World
from nmt.train.resolve import check_training_fits, resolve

SLOW = "AVX512-BF16 of this processor is slower than fp32"
NONE = "this processor has no instructions for bf16"


@mark.parametrize(
    "cpu_info, chosen, reason",
    [
        ("flags : fpu avx2 avx512f avx512_bf16 amx_bf16", "bf16", "this processor has AMX"),
        ("flags : avx2 avx512f avx512_bf16", "bf16", "this processor has AVX512-BF16"),
        ("vendor_id : AuthenticAMD\nflags : avx512_bf16", "bf16", "this processor has AVX512-BF16"),
        ("vendor_id : GenuineIntel\nflags : avx512_bf16", "fp32", SLOW),
        (
            "vendor_id : GenuineIntel\nflags : avx512_bf16 amx_bf16",
            "bf16",
            "this processor has AMX",
        ),
        ("Features : fp asimd bf16", "bf16", "this processor has ARM's BF16"),
        ("flags : fpu avx2 avx512f", "fp32", NONE),
        ("Features : fp asimd", "fp32", NONE),
        ("", "fp32", NONE),
    ],
)
def test_a_processor_computes_in_bf16_if_it_has_instructions_for_it(
    cpu_info: str, chosen: str, reason: str, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "read_cpu_info", lambda: f"processor : 0\n{cpu_info}\n")
    assert choose_precision(CPU) == (chosen, reason)


@mark.parametrize(
    "architecture, chosen",
    [
        ("gfx906:sramecc+:xnack-", "fp32"),
        ("gfx90a:sramecc+:xnack-", "bf16"),
        ("gfx942:sramecc+:xnack-", "bf16"),
        ("gfx950", "bf16"),
        ("gfx1030", "fp32"),
        ("gfx1100", "bf16"),
        ("gfx1201", "bf16"),
    ],
)
def test_a_gpu_of_amd_computes_in_bf16_if_its_architecture_does(
    architecture: str, chosen: str, monkeypatch: MonkeyPatch
) -> None:
    # ROCm's torch reads a capability from the same name, such as 9.0 of gfx906
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    properties = SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    precision, reason = choose_precision(torch.device("cuda"))
    assert precision == chosen and architecture in reason


def test_bf16_is_refused_where_a_gpu_would_emulate_it(toy: Path, monkeypatch: MonkeyPatch) -> None:
    config = load_recorded_config(toy)
    config = replace(config, training=replace(config.training, precision="bf16"))
    gpu = World(0, 1, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    auto = replace(config, training=replace(config.training, precision="auto"))
    refusal = "capability 7.5 .*; give training.precision=fp32"
    with raises(UserError, match=refusal):  # the run began on another machine
        resolve(auto, config, gpu)
    with raises(UserError, match=refusal):  # before data is prepared
        check_training_fits(config.model, config.vocab, config.training, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert resolve(config, config, gpu) == resolve(auto, config, gpu) == config


@mark.parametrize(
    "cpu_info, chosen, other",
    [("flags : avx512_bf16", "bf16", "fp32"), ("flags : avx2", "fp32", "bf16")],
)
def test_a_run_keeps_the_precision_in_which_it_began(
    cpu_info: str,
    chosen: str,
    other: str,
    toy: Path,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setattr(device, "read_cpu_info", lambda: cpu_info)
    line = ["--config", str(toy), "training.precision=auto", "training.steps=2"]
    assert nmt_train(line) == 0
    told = read_stderr(capsys)
    assert f"training.precision: auto has chosen {chosen}, because this processor has " in told
    assert load_recorded_config(tmp_path / "run" / "config.yaml").training.precision == chosen

    # on a machine that would choose the other one
    monkeypatch.setattr(
        device, "read_cpu_info", lambda: "flags : avx2" if chosen == "bf16" else "flags : amx_bf16"
    )
    succeed(nmt_train, *line, "training.steps=4")
    assert "auto has chosen" not in read_stderr(capsys)
    assert load_recorded_config(tmp_path / "run" / "config.yaml").training.precision == chosen
    assert list(read_losses(tmp_path / "run")) == [1, 2, 3, 4]

    # what is written out is never replaced
    told = refuse(capsys, nmt_train, *line, "training.steps=4", f"training.precision={other}")
    assert f"training.precision: {chosen} -> {other}" in told
