"""docs/data.md stays true: its configs load, and it names every kind of corpus, every rule, preset and BPE option."""

import dataclasses
import re
from pathlib import Path

import pytest

from nmt.config import CleanConfig, CorpusConfig, VocabConfig, load_config

TEXT = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
CONFIGS = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("block", "tgt", "n_corpora", "max_ratio"), [(0, "de", 3, None), (1, "fr", 5, 1.5)])
def test_the_configs_for_the_archives_load(block: int, tgt: str, n_corpora: int, max_ratio: float | None,
                                           tmp_path: Path) -> None:
    (tmp_path / "archives.yaml").write_text(CONFIGS[block])
    data = load_config(str(tmp_path / "archives.yaml")).data
    assert (data.src, data.tgt, len(data.train)) == ("en", tgt, n_corpora)
    assert (data.clean.max_pieces, data.clean.max_ratio) == (255, max_ratio)
    assert data.valid is not None and data.valid.dataset is None
    for corpus in (*data.train, data.valid):
        assert corpus.archive and corpus.archive in TEXT.partition("```yaml")[0]
        for member, language in ((corpus.src, "en"), (corpus.tgt, tgt)):
            assert member and member.removesuffix(".gz").endswith(f".{language}")
    assert len({load_config(name).data.store for name in (str(tmp_path / "archives.yaml"), "base.yaml",
                                                          "base-enfr.yaml")}) == 3


@pytest.mark.parametrize("room", [CorpusConfig, CleanConfig, VocabConfig])
def test_every_key_is_named_with_its_default(room: type) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", TEXT, re.MULTILINE))
    for field in dataclasses.fields(room):
        if room is CorpusConfig or field.name == "preset":
            assert re.search(rf"\b{field.name}:|`{field.name}`", TEXT), field.name
        else:
            shown = str(field.default).lower() if isinstance(field.default, bool) else str(field.default or "null")
            written = rows[field.name].strip().replace(",", "")
            assert written in (shown, str(field.default)), field.name


def test_the_presets_are_those_of_the_config() -> None:
    for name, values in CleanConfig.PRESETS.items():
        row = re.search(rf"^\| `{name}` \|([^|]+)\|([^|]+)\|([^|]+)\|", TEXT, re.MULTILINE)
        assert row, name
        keys = ("max_words", "max_ratio", "max_pieces")
        assert [cell.strip() for cell in row.groups()] == [str(values[key] or "null") for key in keys]
