"""Whether what is scored is text that the model knows: its training text, or its dev set."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nmt.corpus.ledger import read_ledger
from nmt.corpus.test_sets import TestSet
from nmt.corpus.text_files import digest_source
from nmt.score.text_checks import Text
from nmt.system.errors import UserError
from nmt.system.run_folder import dev_text_file
from nmt.translate.translator import LoadedModel


def find_known_text(model: LoadedModel, test: TestSet, files: Sequence[str | None]) -> str | None:
    """Return `train` or `valid` if that text of the model's store has a side of the test set, as one of the
    `files` or as its lines.
    """
    stores = [each.origin.store_sha256 for each in model.checkpoints]
    with suppress(UserError, OSError):  # the store need not be on this machine
        ledger = read_ledger(Path(model.config.data.store))
        digests = {digest_source(Path(name)) for name in files if name}
        digests |= {test.src_sha256, test.ref_sha256}
        for corpus in ledger.corpora if ledger.store in stores else ():
            if not digests.isdisjoint(file.sha256 for file in corpus.files):
                return corpus.split
    return None


def read_dev_sources(model: LoadedModel, most: int) -> Text:
    """Return at most so many source sentences of the dev set of the model's store, if it is on this machine."""
    data, lines = model.config.data, []
    with suppress(OSError, UnicodeDecodeError):
        text = (Path(data.store) / dev_text_file("src")).read_text("utf-8")
        lines = text.split("\n")[:-1]
    return Text("the dev set of the model", lines[:most], data.src)
