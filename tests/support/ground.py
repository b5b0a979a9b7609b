"""A toy run of 16 updates, started, killed and finished, and what must hold of its folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmt.checkpoint.checkpoint import COMMON_FILES
from nmt.checkpoint.run_checkpoints import find_newest, list_steps
from nmt.system.files import digest_values, read_json, verify
from nmt.system.run_folder import MODEL_FILE, OPTIMIZER_FILE, VOCAB_FILE, RunFolder
from nmt.system.strict_json import Fields
from nmt.train.events import read_events
from support.canary import digest_tensors
from support.faults import Faults
from support.finished_run import read_lines
from support.forks import Start
from support.toy_corpus import write_splits


@dataclass(frozen=True)
class Ground:
    """A prepared toy corpus and where its runs lie."""

    folder: Path
    config: Path
    command: str = "train"  # or the path of a program with the same arguments

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.folder / name)

    def argv(self, name: str, *settings: str) -> list[str]:
        return ["--config", str(self.config), f"out={self.folder / name}", *settings]

    def start(self, name: str, *settings: str, size: int = 1, at: str = "", **faults: Any) -> Start:
        """Start the run `name` with these faults; `at` sets apart what goes on at the same time."""
        folder, argv = self.folder / f"{name}{at}.ranks", self.argv(name, *settings)
        return Start(folder, argv, size, Faults(**faults), self.command)

    def finish(self, name: str, *settings: str, size: int = 1) -> RunFolder:
        """The run `name`, at its end, undisturbed from here on."""
        start = self.start(name, *settings, size=size)
        assert set(start.wait()) == {0}, start.told()
        return self.run(name)


def make_ground(folder: Path) -> Ground:
    """Log lines, validations and checkpoints of the run come at odds with each other; it has dropout."""
    write_splits(folder, train=300, valid=12)
    config = folder / "toy.yaml"
    config.write_text(
        f"""
name: toy
seed: 3
data:
  root: {folder}
  store: {folder}/store
  workers: 1
  train: [{{src: train.en, tgt: train.de}}]
  valid: {{src: valid.en, tgt: valid.de}}
vocab: {{size: 80}}
model: {{d_model: 16, d_ff: 32, n_heads: 2, n_layers: 1, dropout: 0.2}}
optimizer: {{warmup_steps: 20}}
training:
  steps: 16
  grouping: length
  src_tokens: 300
  tgt_tokens: 300
  micro_tokens: 110
  precision: fp32
  log_every: 5
  validate_every: 4
  checkpoint_every: 3
  checkpoint_minutes: null
  keep_checkpoints: 2
decoding: {{max_extra: 3, batch_tokens: 40}}
evaluation: {{sentences: 6}}
""",
        "utf-8",
    )
    return Ground(folder, config)


def read_contents(run: RunFolder) -> Fields:
    """What a run is to end in: the integers it continues from, its metrics, weights and moments."""
    last = run.checkpoints / "last"
    state = read_json(last / "state.json")
    numbers = ("step", "cursor", "tokens_seen", "best", "best_step")
    return (
        {name: state[name] for name in numbers} | digest_checkpoint(last) | {"lines": untime(run)}
    )


def digest(run: RunFolder) -> str:
    return digest_values(read_contents(run))


def check_same(run: RunFolder, whole: RunFolder) -> None:
    """A run ended like the one that nobody disturbed."""
    contents, expected = read_contents(run), read_contents(whole)
    differing = {name: value for name, value in contents.items() if value != expected.get(name)}
    assert contents == expected, f"{run.path}: {differing}"


def digest_checkpoint(folder: Path) -> dict[str, str]:
    return {name: digest_tensors(folder / name) for name in (MODEL_FILE, OPTIMIZER_FILE)}


def untime(run: RunFolder) -> list[Fields]:
    """metrics.jsonl without what differs between any two runs."""
    return [
        {
            name: value
            for name, value in line.items()
            if not name.endswith("_s") and name != "memory_bytes"
        }
        for line in read_lines(run.path)
    ]


def steps_logged(run: RunFolder) -> int:
    """The last update of which metrics.jsonl tells, 0 if it tells of none."""
    return max((event.step for event in read_events(run.metrics)[0]), default=0)


def check_readable(run: RunFolder) -> list[int]:
    """What must hold at any moment at all: each checkpoint that has its name is whole, and so is
    what is linked.
    """
    steps = list_steps(run)
    for step in steps:
        verify(run.checkpoint(step), (*COMMON_FILES, VOCAB_FILE, OPTIMIZER_FILE))
    newest = find_newest(run)
    assert (newest.step if newest else 0) == max(steps, default=0)
    for link in (run.checkpoints / "last", run.checkpoints / "best"):
        assert not link.is_symlink() or link.exists(), f"{link} leads nowhere"
    for file in (run.config, *run.vocabs, run.status):
        assert not file.exists() or file.stat().st_size, f"{file} is empty"
    if run.status.exists():
        read_json(run.status)
    return steps


def check_done(run: RunFolder, steps: int) -> None:
    """What must hold of a run that has come to its end, whatever happened on the way."""
    assert check_readable(run)[-1] == steps
    assert (run.checkpoints / "last").resolve() == run.checkpoint(steps).resolve()
    assert [path.name for path in run.checkpoints.iterdir() if path.name[0] == "."] == []
