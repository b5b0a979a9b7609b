"""Whether what is scored is text that the model knows: its training text, or its dev set."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from nmt.corpus.ledger import read_ledger
from nmt.corpus.text_files import digest_source
from nmt.evaluate.systems import System
from nmt.system.errors import UserError


def find_known_text(system: System, files: Sequence[str]) -> str | None:
    """Return `train` or `valid` if the model's own training text or dev set is scored: by the digests of the
    `files` that were given, and of their lines, among those in the ledger of its store.
    """
    try:
        ledger = read_ledger(Path(system.data.store))
    except (UserError, OSError):  # it need not be on this machine
        return None
    if system.only_checkpoint is None or system.only_checkpoint.origin.store_sha256 != ledger.store:
        return None
    texts = ["".join(line + "\n" for line in lines) for lines in (system.test.src, system.test.ref)]
    digests = {hashlib.sha256(text.encode()).hexdigest() for text in texts}
    digests |= {digest_source(Path(file)) for file in files}
    own = (each for each in ledger.corpora for file in each.files if file.sha256 in digests)
    return next((each.split for each in own), None)
