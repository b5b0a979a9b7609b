"""Every file name that this library writes: in a run, a checkpoint, a store, an average or an
export.

Scripts of users rely on these names, so they change nowhere but here, and a format's version is
recognised by its content. Most folders share names on purpose: `vocab.model` and `config.yaml` mean the
same in a run, a checkpoint and an export.
"""

from collections.abc import Container
from pathlib import Path

# In every sealed folder: the sha256 and the size of each of its files.
MANIFEST_FILE = "manifest.json"

# In a checkpoint, an average or an export.
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"  # Adam's moments; an average has none
STATE_FILE = "state.json"
CONFIG_FILE = "config.yaml"
VOCAB_FILE = "vocab.model"  # SentencePiece's
SIDE_VOCAB_FILES = ("vocab.src.model", "vocab.tgt.model")  # instead, if each side has its own
CARD_FILE = "README.md"  # the model card, as hubs name it
EXPORT_FILE = "export.json"

# In a token store, beside its ids.
LEDGER_FILE = "ledger.json"

# In a run folder, beside its checkpoints.
METRICS_FILE = "metrics.jsonl"
STATUS_FILE = "status.json"
REPORT_FILE = "report.html"
RESULTS_FILE = "results.json"
TRANSLATIONS_FILE = "translations.json"  # what the last evaluation read and wrote
CURVE_FILE = "averaging.json"  # the dev score of averages of several sizes
SWEEP_FILE = "sweep.json"  # what the run adds to the table of its sweep
RUN_FILES = (
    CONFIG_FILE,
    VOCAB_FILE,
    *SIDE_VOCAB_FILES,
    METRICS_FILE,
    STATUS_FILE,
    REPORT_FILE,
    RESULTS_FILE,
    TRANSLATIONS_FILE,
    CURVE_FILE,
    SWEEP_FILE,
)


def find_vocab_files(names: Container[str]) -> tuple[str, ...]:
    """Tell which of the files of a folder are its vocabulary."""
    return SIDE_VOCAB_FILES if SIDE_VOCAB_FILES[0] in names else (VOCAB_FILE,)


def ids_file(split: str, side: str) -> str:
    """Name the file of the token ids of one side of a split."""
    return f"{split}.{side}.ids.npy"


def offsets_file(split: str, side: str) -> str:
    """Where each sentence begins among those ids."""
    return f"{split}.{side}.offsets.npy"


def dev_text_file(side: str) -> str:
    """Name the file of the raw text of one side of the dev set, which validation scores against."""
    return f"valid.{side}.txt"


class RunFolder:
    """The paths of everything in the folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG_FILE
        # The files of its vocabulary: it has the first or the others.
        self.vocabs = [path / name for name in (VOCAB_FILE, *SIDE_VOCAB_FILES)]
        self.metrics = path / METRICS_FILE
        self.status = path / STATUS_FILE
        self.report = path / REPORT_FILE
        self.results = path / RESULTS_FILE
        self.translations = path / TRANSLATIONS_FILE
        self.curve = path / CURVE_FILE
        self.sweep = path / SWEEP_FILE
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.average = path / "average"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:07d}"

    def nonfinite(self, step: int) -> Path:
        """Return the path of the report on an update whose loss or gradient was NaN or infinite."""
        return self.path / f"nonfinite-{step:07d}.json"
