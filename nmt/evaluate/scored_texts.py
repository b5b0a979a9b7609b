"""RUN/translations.json: what was read and written for the headline of a run's report, line by line, so
that it can show sentences beside their scores.

One file, replaced as a whole. Its digest says to which entry of results.json it
belongs. It holds text of the test set, and no other file of this project does: someone who may not pass
on the text can remove the file, and loses only those sections of the report.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from nmt.system.files import has_plain_file, write_json
from nmt.system.records import read_record
from nmt.system.run_folder import RunFolder


@dataclass(frozen=True)
class ScoredTexts:
    checkpoint: str  # its name inside the run, or of whatever made the translations
    test_set: str
    pair: str
    hypotheses_sha256: str
    sources: list[str]  # none if only references were given
    references: list[str]  # the first ones
    translations: list[str]

    def check(self) -> str | None:
        lengths = {len(self.translations), len(self.references)}
        if self.sources:
            lengths.add(len(self.sources))
        return "its lists differ in length" if len(lengths) > 1 else None


def write_scored_texts(run: Path, texts: ScoredTexts) -> None:
    write_json(RunFolder(run).translations, asdict(texts))


def read_scored_texts(run: Path) -> ScoredTexts | None:
    """Return the texts of the headline; None if nothing was scored."""
    path = RunFolder(run).translations
    if not has_plain_file(path):
        return None
    return read_record(path, ScoredTexts, "damaged, or of another version of nmt; remove it")
