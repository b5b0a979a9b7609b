"""Scores beside a corpus: line n is of pair n, or the file is refused."""

import gzip
import math
from pathlib import Path

import pytest

from nmt.config import CorpusConfig, DataConfig, RunConfig, override_config
from nmt.corpus.reader import Block, read_blocks
from nmt.system.errors import UserError

N = 7


def read(folder: Path, scores: str, size: int = 3, on_bad_line: str = "stop") -> list[Block]:
    (folder / "x.tsv").write_text("".join(f"a{i}\tb{i}\n" for i in range(N)))
    (folder / "x.gz").write_bytes(gzip.compress(scores.encode()))
    corpus = CorpusConfig(file="x.tsv", scores="x.gz", min_score=0.0)
    data = DataConfig(root=str(folder), on_bad_line=on_bad_line)  # type: ignore[arg-type]
    return list(read_blocks(corpus, data, size))


def test_each_pair_has_the_score_of_its_line(tmp_path: Path) -> None:
    blocks = read(tmp_path, "1\n-2.5\n-inf\n4e-3\n5\r\n 6\n7")
    expected = [1, -2.5, -math.inf, 0.004, 5, 6, 7]
    assert [score for block in blocks for score in block.scores or ()] == expected


def test_a_bad_pair_takes_its_score_with_it(tmp_path: Path) -> None:
    (tmp_path / "src").write_bytes(b"a\n\xff\nc\n")
    (tmp_path / "tgt").write_text("x\ny\nz\n")
    (tmp_path / "scores").write_text("1\n2\n3\n")
    corpus = CorpusConfig(src="src", tgt="tgt", scores="scores", min_score=0.0)
    (block,) = read_blocks(corpus, DataConfig(root=str(tmp_path), on_bad_line="skip"), 10)
    assert (block.src, block.scores) == (["a", "c"], [1.0, 3.0])


@pytest.mark.parametrize(
    "scores, message",
    [
        ("1\n" * 6, "x.gz: ends after line 6, but the corpus has more"),
        ("1\n" * 3, "x.gz: ends after line 3, but the corpus has more"),
        ("1\n" * 8, "x.gz:8: the corpus has no such line, but only 7"),
        ("1\n" * 12, "x.gz:8: the corpus has no such line, but only 7"),
        ("1\n1\n1\n1\nnan\n1\n1\n", "x.gz:5: 'nan' is not a finite number or -inf"),
        ("1\n1\ninf\n1\n1\n1\n1\n", "x.gz:3: 'inf' is not a finite number"),
        ("1\n\n1\n1\n1\n1\n1\n", "x.gz:2: '' is not a finite number"),
        ("1\t2\n" * 7, "x.gz:1: '1\\t2' is not a finite number"),
        ("", "x.gz: is empty"),
    ],
)
@pytest.mark.parametrize("size", [3, 10])
def test_other_files_are_refused_with_their_place(
    tmp_path: Path, scores: str, message: str, size: int
) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, scores, size)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "setting, message",
    [
        ("data.train=[{file: x.tsv, scores: s}]", "needs both scores and min_score"),
        ("data.train=[{file: x.tsv, min_score: 1}]", "needs both scores and min_score"),
        ("data.train=[{file: x.tsv, scores: s, min_score: .nan}]", "min_score"),
        ("data.valid={file: x.tsv, scores: s, min_score: 1}", "valid has scores"),
        ("data.test={file: x.tsv, scores: s, min_score: 1}", "test has scores"),
    ],
)
def test_settings_that_do_not_fit_are_refused(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        override_config(RunConfig(), [setting])
