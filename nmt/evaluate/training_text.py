"""What a model was trained on, as the store records it. The ledger counts a pair of the test set as often
as it occurs, and only if the test set was there when the text was prepared.
"""

from dataclasses import dataclass
from pathlib import Path

from nmt.corpus.ledger import check_same
from nmt.corpus.test_sets import normalize_line
from nmt.data.store import open_store
from nmt.evaluate.systems import System
from nmt.system.errors import UserError
from nmt.system.files import verify


@dataclass(frozen=True)
class TrainingText:
    n_pairs: int = 0
    n_test_pairs: int = 0  # different pairs of the test set among them
    problem: str | None = None  # why the store cannot be read, or is not the model's

    def describe(self) -> str:
        counts = f"{self.n_pairs:,} pairs, {self.n_test_pairs:,} pairs of the test set among them"
        return self.problem or counts


def examine_training_text(system: System) -> TrainingText:
    config, vocab, test = system.checkpoint.config, system.checkpoint.vocab, system.test
    folder = Path(system.data.store)
    try:
        store = open_store(folder, "train", vocab)
        trained_on = system.checkpoint.origin.store_sha256
        check_same(folder, config.data, config.vocab, trained_on)
        verify(folder)
        # as they are and with plain spaces, because a set is known whatever white space its lines have
        src, ref = ([*lines, *map(normalize_line, lines)] for lines in (test.src, test.ref))
        pairs = zip(vocab.src.encode(src), vocab.tgt.encode(ref), strict=True)
        return TrainingText(len(store), store.count_shared(pairs))
    except UserError as error:
        return TrainingText(problem=str(error))
