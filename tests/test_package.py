"""What is installed: its version, its extras, the pins for each Python, and a wheel that works without the checkout."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path
from zipfile import ZipFile

import pytest
from pytest import MonkeyPatch, mark, raises
from support.capture import Capture
from support.checkout import ROOT
from support.in_process import refuse
from support.waiting import until

import nmt
from nmt.commands.train import main as nmt_train
from nmt.system import extras
from nmt.system.errors import UserError
from nmt.system.extras import EXTRAS, import_extra, name_remedy

PYTHONS = re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.cfg").read_text())
OLDEST = "3.11.2"  # Debian's
# As modules are called -> as packages are
PACKAGES = {
    "pyarrow": "datasets",  # which needs it
    "vl_convert": "vl-convert-python",
    "python_multipart": "python-multipart",
}


def read_extras() -> dict[str, str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return dict(setup["options.extras_require"])


def test_each_command_says_its_version() -> None:
    command = [sys.executable, "-m", "nmt.commands.train", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"nmt {nmt.__version__}\n", "")


def test_ci_runs_each_python() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    (matrix,) = re.findall(r"python: \[(.*)\]", workflow)
    assert PYTHONS and matrix == ", ".join(f'"{version}"' for version in PYTHONS)


def test_extras_hold_what_messages_promise() -> None:
    offered = read_extras()
    for module, extra in EXTRAS.items():
        names = re.findall(r"^[\w-]+", offered[extra], re.MULTILINE)
        assert PACKAGES.get(module, module) in names, module
    for_users = set(offered) - {"docs", "dev"}
    (all_of_them,) = re.findall(r"nmtkit\[(.*)\]", offered["all"])
    assert set(all_of_them.split(",")) == for_users - {"all"} and set(EXTRAS.values()) < for_users
    assert set(re.findall(r"`(\w+)`", (ROOT / "docs/install.md").read_text())) >= for_users


def test_a_missing_package_is_named_with_its_extra(monkeypatch: MonkeyPatch) -> None:
    for package in EXTRAS:
        monkeypatch.setitem(sys.modules, package, None)  # importing it fails
        extra = re.escape(f"[{EXTRAS[package]}]")
        remedy = rf"pip install -e '\.{extra}'"
        with raises(UserError, match=rf"^{package} cannot be imported \(.*\); {remedy}$"):
            import_extra(package)


@mark.parametrize(
    "record, told",
    [
        ('{"url": "file:///n.whl", "archive_info": {}}', " @ file:///n.whl"),
        (None, ""),  # from an index
    ],
)
def test_an_extra_comes_from_where_this_copy_came(
    record: str | None, told: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    records = tmp_path / "nmtkit-1.dist-info"
    records.mkdir()
    (records / "METADATA").write_text("Name: nmtkit\n")
    if record is not None:
        (records / "direct_url.json").write_text(record)
    monkeypatch.syspath_prepend(tmp_path)
    assert name_remedy("fastapi").startswith("pip install -e ")  # in a checkout
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "nmt/system/extras.py"))
    assert name_remedy("fastapi") == f"pip install 'nmtkit[serve]{told}'"


def test_nothing_says_to_install_what_an_index_calls_nmtkit() -> None:
    """Until it can be had there: anybody may register the name."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("scripts/nmt-*")]
    for pattern in ("nmt/**/*.*", "docs/**/*.md", "examples/**/*.*"):
        files += [
            path for path in ROOT.glob(pattern) if path.suffix in (".py", ".md", ".html", ".js")
        ]
    wrong = re.compile(r"(install[^\n]*|`)nmtkit(\[[a-z]|$)", re.MULTILINE)
    assert len(files) > 200
    assert [str(path) for path in files if wrong.search(path.read_text())] == []


def test_a_hub_corpus_needs_the_hub_extra(
    monkeypatch: MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    for package in ("datasets", "pyarrow", "huggingface_hub", "pandas"):
        monkeypatch.setitem(sys.modules, package, None)
    settings = [
        f"out={tmp_path / 'run'}",
        f"data.root={tmp_path}",
        f"data.store={tmp_path / 'store'}",
    ]
    line = refuse(capsys, nmt_train, "--config", "base.yaml", *settings)
    assert "; pip install -e '.[hub]'" in line


@mark.soak  # asks the package index
@mark.parametrize("version", [OLDEST, *PYTHONS])
def test_pins_suit_each_python(version: str) -> None:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if uv is None:
        pytest.skip("uv is not installed")
    pins = ROOT / "constraints.txt"
    command = [uv, "pip", "compile", "--python-version", version, "--constraint", str(pins)]
    command += ["--extra", "dev", "--quiet", "--no-config", str(ROOT / "setup.cfg")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"torch=={re.findall(r'^torch==(.*)', pins.read_text(), re.MULTILINE)[0]}" in done.stdout


class Installation:
    """The wheel in an environment of its own, which takes all other packages from this one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "elsewhere"
        self.folder.mkdir()
        wheels = folder / "wheels"
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        source = shutil.copytree(ROOT, folder / "source", ignore=self.leave_out)
        subprocess.run([*pip, "wheel", "--no-deps", "-w", wheels, source], check=True)
        (self.wheel,) = wheels.iterdir()
        environment = folder / "environment"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        self.bin = environment / "bin"
        (packages,) = environment.glob("lib/*/site-packages")
        (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run(
            [*pip, "--python", self.bin / "python", "install", "--no-deps", self.wheel], check=True
        )

    @staticmethod
    def leave_out(folder: str, names: list[str]) -> list[str]:
        wanted = ("nmt", "configs", "scripts", "docs", "setup.cfg", "pyproject.toml", "LICENSE")
        return [name for name in names if folder == str(ROOT) and name not in wanted]

    def run(self, program: str, *words: str, stdin: str = "") -> str:
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [self.bin / program, *words],
            cwd=self.folder,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@mark.soak  # builds a wheel and trains
def test_the_wheel_makes_the_journey(tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    names = set(ZipFile(installation.wheel).namelist())
    data = "configs/base.yaml", "extras/serve/page/index.html", "shipped/en-fr/model.bin"
    assert {"nmt/py.typed", *(f"nmt/{name}" for name in data)} <= names
    assert {
        f"nmtkit-{nmt.__version__}.data/scripts/nmt-{name}" for name in ("launch", "slurm")
    } <= names
    assert not [name for name in names if not name.startswith(("nmt/", "nmtkit-"))]

    run = installation.run
    place = run("python", "-c", "import nmt; print(nmt.__file__)")
    assert Path(place.strip()).is_relative_to(tmp_path)
    told = "from nmt.system.extras import name_remedy; print(name_remedy('numba'))"
    assert str(installation.wheel) in (remedy := run("python", "-c", told))
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(installation.bin / "python")]
    words = shlex.split(remedy)[1:]  # tried as it says
    subprocess.run([*pip, *words, "--dry-run", "--no-deps"], check=True)
    training = ("--config", "demo.yaml", "training.steps=40", "training.checkpoint_every=10")
    run("nmt-train", *training, "device=cpu")
    assert run("nmt-launch", "--print-folder", *training) == "runs/demo\n"
    run("nmt-average", "runs/demo", "--last", "2")
    assert "BLEU" in run("nmt-eval", "runs/demo/average")
    run("nmt-report", "runs/demo")
    assert run("nmt-translate", "runs/demo/average", stdin="a line\n").count("\n") == 1
    run("nmt-export", "runs/demo/average", "--to", "safetensors", "-o", "exported")
    found = {path.name for path in installation.folder.glob("*/**/*")}
    assert {"report.html", "results.json", "model.safetensors"} <= found

    with open(tmp_path / "serve.err", "w+b") as err:
        command = [str(installation.bin / "nmt-serve"), "runs/demo/average", "--port", "0"]
        server = subprocess.Popen(command, cwd=installation.folder, stderr=err)
        try:
            address = re.compile(r"http://127\.0\.0\.1:\d+")
            until(lambda: address.search((tmp_path / "serve.err").read_text()) is not None)
            (found_address, *_) = address.findall((tmp_path / "serve.err").read_text())
            with urllib.request.urlopen(f"{found_address}/health") as answer:
                assert answer.status == 200
        finally:
            server.terminate()
            assert server.wait() == 0
