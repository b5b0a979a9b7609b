"""Each command on a toy corpus: its arguments, what it makes when nothing disturbs it, and starts of
it in which nothing else may change.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.commands.export import main as nmt_export
from nmt.commands.prepare import main as nmt_prepare
from nmt.commands.train import main as nmt_train
from nmt.commands.translate import main as nmt_translate
from support.canary import digest_tensors, record
from support.in_process import Main
from support.toy_corpus import write_toy
from support.untrained import make_checkpoint, make_vocab

MAINS: dict[str, Main] = {
    "prepare": nmt_prepare,
    "train": nmt_train,
    "average": nmt_average,
    "eval": nmt_eval,
    "translate": nmt_translate,
    "export": nmt_export,
}
# `stream` is nmt-translate from standard input to standard output, `converse` with --interactive,
# `inspect` is nmt-prepare --inspect.
COMMANDS = {"stream": "translate", "converse": "translate", "inspect": "prepare"}
CASES = [*MAINS, *COMMANDS]
DIGESTED = (".npy", ".model", ".txt")
LINES = b"red dog\n\xff\xfe cat\n\nblue cat\n" * 3


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: bytes
    results: dict[str, str]  # files and what they hold


NOTHING = Outcome(2, b"", {})


@dataclass(frozen=True)
class Bench:
    """A toy corpus, a run of six updates, a checkpoint whose translations differ, and texts."""

    folder: Path
    undisturbed: dict[str, Outcome] = field(default_factory=dict)

    def argv(self, case: str, work: Path) -> list[str]:
        """The arguments of a command whose results go into the folder `work`."""
        config = ["--config", str(self.folder / "toy.yaml")]
        sharp, text = str(self.folder / "sharp"), self.folder / "corpus"
        test = ["--src", str(text / "test.en"), "--ref", str(text / "test.de")]
        return {
            "prepare": [*config, f"data.store={work}/store"],
            "train": [*config, f"out={work}/run"],
            "average": [
                f"{self.folder}/undisturbed-train/run",
                "--last",
                "2",
                "-o",
                f"{work}/average",
            ],
            "eval": [sharp, *test, "--output", f"{work}/out.txt", "--json", f"{work}/json"],
            "translate": [sharp, "-i", str(self.folder / "in"), "-o", f"{work}/out.txt"],
            "export": [sharp, "--to", "safetensors", "-o", f"{work}/export"],
            "stream": [sharp],
            "converse": [sharp, "--interactive"],
            "inspect": ["--inspect", str(self.folder / "store")],
        }[case]

    def expect(self, case: str) -> Outcome:
        """What a command does when nothing disturbs it. It runs in this process, once."""
        if case not in self.undisturbed:
            work = self.folder / f"undisturbed-{case}"
            work.mkdir()
            if case in ("stream", "converse"):
                self.expect("translate")
                text = self.folder / "undisturbed-translate" / "out.txt"
                self.undisturbed[case] = Outcome(0, text.read_bytes(), {})
            else:
                data = io.BytesIO()
                stdout = io.TextIOWrapper(data)
                with contextlib.redirect_stdout(stdout):
                    code = MAINS[COMMANDS.get(case, case)](self.argv(case, work))
                stdout.flush()
                self.undisturbed[case] = Outcome(code, untimed(data.getvalue()), results(work))
        return self.undisturbed[case]

    def start(
        self,
        case: str,
        work: Path,
        redirection: str = "",
        streams: Mapping[str, int] = MappingProxyType({}),
        prefix: Sequence[str] = (),
        changes: Mapping[str, str | None] = MappingProxyType({}),
    ) -> Outcome:
        """Start a command as a shell does, and see that nothing but its results is made.

        `redirection` is the shell's, `streams` are descriptors to start with, `prefix` is what
        starts it as another user, `changes` are those of the environment.
        """
        current, results_folder = work / "current", work / "results"
        for folder in (work, current, results_folder):
            folder.mkdir(mode=0o777)
            folder.chmod(0o777)  # whatever the umask: others shall write there
        self.expect(case)
        given = record(self.folder)
        name = COMMANDS.get(case, case)
        command = [sys.executable, "-m", f"nmt.commands.{name}", *self.argv(case, results_folder)]
        # PYTHONUNBUFFERED: few users have it, and it hides failures at exit
        changes = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": None, **changes}
        variables = {**os.environ, **changes}
        with open(self.folder / "in", "rb") as stdin:
            process = subprocess.run(
                [*prefix, "bash", "-c", f'exec "$@" {redirection}', "bash", *command],
                env={key: value for key, value in variables.items() if value is not None},
                cwd=current,
                stdin=stdin,
                stdout=streams.get("stdout", subprocess.PIPE),
                stderr=streams.get("stderr", subprocess.DEVNULL),
            )
        assert record(self.folder) == given
        assert list(current.iterdir()) == []
        return Outcome(process.returncode, untimed(process.stdout or b""), results(results_folder))


def untimed(report: bytes) -> bytes:
    """What nmt-eval prints, without the seconds that it took."""
    return re.sub(rb"in [\d.]+ s\n", b"\n", report)


def results(folder: Path) -> dict[str, str]:
    """All files below a folder, and digests of those that are the same in any two runs."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = ""
        if path.suffix in DIGESTED:
            found[name] = sha256(path.read_bytes()).hexdigest()
        elif path.suffix == ".safetensors":
            found[name] = digest_tensors(path)
    return found


def make_bench(folder: Path) -> Bench:
    config = write_toy(folder)
    text = config.read_text().replace("  steps: 20", "  steps: 6\n  checkpoint_every: 3")
    config.write_text(text, encoding="utf-8")
    make_checkpoint(folder / "sharp", make_vocab(folder))
    (folder / "in").write_bytes(LINES)
    bench = Bench(folder)
    assert bench.expect("train").code == 0
    return bench
