"""What a process asks of the system: to end with its parent, and to learn that the other side of a
connection is gone.
"""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from pytest import MonkeyPatch, mark
from support.capture import Capture, read_stderr
from support.checkout import ROOT

from nmt.system import runtime
from nmt.system.runtime import limit_connection_silence, tune_process

pytestmark = mark.skipif(sys.platform != "linux", reason="asks Linux for it")


def test_connections_end_after_silence_and_other_files_are_left_alone(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as link,
    ):
        assert not link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        before = sorted(os.listdir("/proc/self/fd"))
        with open(tmp_path / "file", "w"):
            limit_connection_silence(120)
        assert sorted(os.listdir("/proc/self/fd")) == before  # none is left open, none closed
        keep = [
            link.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert keep[0] + keep[1] * keep[2] == 120  # an idle one
        # One with data in flight
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
        link.sendall(b"still there")


def test_a_child_is_asked_to_end_when_its_parent_is_killed(tmp_path: Path) -> None:
    child = textwrap.dedent(f"""
        import os, signal, sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from nmt.system.runtime import end_with_parent
        signal.signal(signal.SIGTERM, lambda *_: (open({str(tmp_path / "asked")!r}, "w").close(), os._exit(0)))
        end_with_parent()
        open({str(tmp_path / "ready")!r}, "w").close()
        time.sleep(60)
    """)
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])",
        ]
    )
    for name in ("ready", "asked"):
        while not (tmp_path / name).exists():
            time.sleep(0.01)
        parent.send_signal(signal.SIGKILL)
    parent.wait()


@mark.parametrize(
    "ranks, cores, share", [("1", 16, None), ("8", 64, "8"), ("8", 4, "1"), ("2", 256, "32")]
)
def test_ranks_of_a_machine_share_its_cores_for_compiling(
    ranks: str, cores: int, share: str | None, monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    environment = {"LOCAL_WORLD_SIZE": ranks, "XDG_CACHE_HOME": str(tmp_path)}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(runtime, "count_cores", lambda: cores)
    tune_process()
    assert os.environ.get("TORCHINDUCTOR_COMPILE_THREADS") == share
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/nmt/inductor"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "3"
    tune_process()
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "3"  # the user's own


@mark.parametrize("threads", ["0", "two", "", "-1", "3", "4, 2"])
def test_a_number_of_threads_that_is_none_is_told_once(
    threads: str, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    tune_process()
    tune_process()
    is_number = threads[:1] in ("3", "4")
    told = f"warning: OMP_NUM_THREADS is {threads!r}, not a number of threads, and is ignored\n"
    assert read_stderr(capsys) == ("" if is_number else told)
    assert os.environ.get("OMP_NUM_THREADS") == (threads if is_number else None)


def test_torch_is_silent_about_a_toolkit_without_a_gpu(
    monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.utils import cpp_extension

    tune_process()
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(cpp_extension.logger, "propagate", True)
    assert cpp_extension._find_cuda_home() == "/usr/local/cuda"
    assert caplog.text == ""


def test_torch_takes_the_number_of_compilers_from_there(monkeypatch: MonkeyPatch) -> None:
    from torch._inductor.config import decide_compile_threads

    monkeypatch.setattr(os, "environ", {"LOCAL_WORLD_SIZE": "2"})
    monkeypatch.setattr(runtime, "count_cores", lambda: 10)
    tune_process()
    assert decide_compile_threads() == 5
