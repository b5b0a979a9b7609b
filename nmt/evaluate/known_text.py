"""Whether what is scored is text that the model knows: its training text, or its dev set."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nmt.corpus.ledger import Ledger, read_ledger
from nmt.corpus.test_sets import TestSet
from nmt.corpus.text_files import digest_source
from nmt.score.text_checks import Text
from nmt.system.errors import UserError
from nmt.system.run_folder import dev_text_file
from nmt.translate.translator import LoadedModel


def read_own_ledger(model: LoadedModel) -> Ledger | None:
    """Return the ledger of the store that the model was trained on; None if that is not on this machine."""
    stores = [each.origin.store_sha256 for each in model.checkpoints]
    with suppress(UserError, OSError):
        ledger = read_ledger(Path(model.config.data.store))
        return ledger if ledger.store in stores else None
    return None


def find_known_text(model: LoadedModel, test: TestSet, files: Sequence[str | None]) -> str | None:
    """Return `train` or `valid` if that text of the model's store has a side of the test set, as one of the
    `files` or as its lines.
    """
    ledger = read_own_ledger(model)
    if ledger is None:
        return None
    with suppress(UserError, OSError):  # a file may be a pipe, or gone
        digests = {digest_source(Path(name)) for name in files if name}
        digests |= {test.src_sha256, test.ref_sha256}
        for corpus in ledger.corpora:
            if not digests.isdisjoint(file.sha256 for file in corpus.files):
                return corpus.split
    return None


def read_dev_sources(model: LoadedModel, most: int) -> Text:
    """Return the first `most` source sentences of the model's dev set; none if its store is elsewhere."""
    data = model.config.data
    lines: list[str] = []
    if read_own_ledger(model) is not None:
        with suppress(OSError, UnicodeDecodeError):
            path = Path(data.store) / dev_text_file("src")
            lines = path.read_text("utf-8").split("\n")[:-1]
    return Text("the model's dev set", lines[:most], data.src)
