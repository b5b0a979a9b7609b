"""Test sets by name: found in sacreBLEU's cache or beside the corpora, and held against digests
worked out by hand.

The cache is a folder of the test's own in sacreBLEU's layout; nothing goes to the network. The
known sets are toys, and the real newstest2012 and newstest2013 where those are.
"""

import gzip
import hashlib
import json
import lzma
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pytest import MonkeyPatch, fixture, mark, raises
from support.checkout import ROOT
from support.needs import REAL_TEXT, needs_text
from support.text_lines import join_lines

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus import test_sets as testsets
from nmt.corpus.reader import read_pairs
from nmt.known_test_sets import KNOWN_SETS, PAPER_TEST_SET, SACREBLEU_NAMES, KnownSet
from nmt.system.errors import UserError

SRC = ["A dog sees the café.", "Big cats & small cats", "One house", "The end"]
REF = ["Ein Hund sieht das Café.", "Große Katzen & kleine Katzen", "Ein Haus zu 5 %", "Das Ende"]


def sha(lines: list[str]) -> str:
    return hashlib.sha256(join_lines(lines).encode("utf-8")).hexdigest()


def write(path: Path, lines: list[str]) -> None:
    text = join_lines(lines).encode()
    path.write_bytes(
        gzip.compress(text)
        if path.suffix == ".gz"
        else lzma.compress(text)
        if path.suffix == ".xz"
        else text
    )


def put(data: DataConfig, name: str, lines: list[str]) -> None:
    """Write a file beside the corpora."""
    write(Path(data.root) / name, lines)


@fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """sacreBLEU's folder, empty, and toys in the place of newstest2013 and newstest2012."""
    from sacrebleu.dataset import DATASETS

    for name in ("wmt12", "wmt13", "wmt14", "wmt14/full"):
        monkeypatch.setattr(DATASETS[name], "_outdir", str(tmp_path / "cache" / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(
        testsets,
        "KNOWN_SETS",
        (
            KnownSet("newstest2012", "wmt12", 4, ({"en": sha(SRC[::-1]), "de": sha(REF[::-1])},)),
            KnownSet("newstest2013", "wmt13", 4, ({"en": sha(SRC), "de": sha(REF)},)),
            PAPER_TEST_SET,
        ),
    )
    return tmp_path / "cache"


def fill(cache: Path, name: str, src: list[str], ref: list[str]) -> None:
    (cache / name).mkdir(parents=True, exist_ok=True)
    fields = {"src": src, "ref": ref, "docid": src, "genre": src, "origlang": src}
    for field, lines in fields.items():
        write(cache / name / f"{name.replace('/', '_')}.en-de.{field}", lines)


@fixture
def data(tmp_path: Path) -> DataConfig:
    (tmp_path / "root").mkdir()
    return DataConfig(root=str(tmp_path / "root"))


def complaint(name: str, data: DataConfig) -> str:
    with raises(UserError) as error:
        testsets.open_test_set(name, data)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- names and places -------------------------------------------------------------------------------------------


def test_years_are_names_of_sets_that_sacrebleu_has() -> None:
    from sacrebleu.dataset import DATASETS

    assert list(SACREBLEU_NAMES) == [f"newstest{year}" for year in range(2008, 2022)]
    assert [
        name for name in SACREBLEU_NAMES.values() if "en-de" not in DATASETS[name].langpairs
    ] == []
    assert [SACREBLEU_NAMES[f"newstest20{year}"] for year in ("08", "13", "14", "19")] == [
        "wmt08",
        "wmt13",
        "wmt14/full",
        "wmt19",
    ]


@mark.parametrize("name", ["newstest2013", "wmt13"])
def test_a_set_by_either_name_from_sacrebleus_cache(
    cache: Path, data: DataConfig, name: str
) -> None:
    fill(cache, "wmt13", SRC, REF)
    found = testsets.open_test_set(name, data)
    assert (
        found.name,
        found.src,
        found.ref,
        found.known_as,
        found.warning,
        found.subset,
    ) == (name, SRC, REF, "newstest2013", None, None)
    assert (found.src_sha256, found.ref_sha256) == (sha(SRC), sha(REF))
    # A config may name the year too
    assert testsets.open_test_set(CorpusConfig(sacrebleu=name), data).known_as == "newstest2013"


@mark.parametrize(
    "names, asked",
    [
        (("newstest2013.en", "newstest2013.de"), "newstest2013"),
        (("newstest2013.en", "newstest2013.de"), "wmt13"),
        (("newstest2013-src.en.xz", "newstest2013-ref.de.gz"), "newstest2013"),
        (("wmt13.en.gz", "wmt13.de"), "wmt13"),
    ],
)
def test_a_set_from_files_beside_the_corpora(
    data: DataConfig, names: tuple[str, str], asked: str
) -> None:
    assert "is not in sacreBLEU's cache" in complaint(asked, data)
    put(data, names[0], SRC)
    assert "is not in sacreBLEU's cache" in complaint(asked, data)  # one side is no set
    put(data, names[1], REF)
    assert testsets.open_test_set(asked, data).known_as == "newstest2013"
    # as a config names it; nmt-prepare searches the training text for these pairs
    corpus = CorpusConfig(sacrebleu=asked)
    found = testsets.open_test_set(corpus, data)
    assert (found.name, found.known_as) == (f"sacrebleu {asked}", "newstest2013")
    assert list(read_pairs(corpus, data)) == list(zip(SRC, REF, strict=True))
    put(data, names[1], REF[::-1])
    with raises(UserError, match="is not the de side of newstest2013"):
        testsets.open_test_set(corpus, data)


def test_the_folders_of_the_corpora_are_looked_into(data: DataConfig) -> None:
    (Path(data.root) / "news").mkdir()
    for name, lines in (
        ("newstest2013.en", SRC),
        ("newstest2013.de", REF),
        ("mine.en", SRC[:2]),
        ("mine.de", REF[:2]),
    ):
        put(data, f"news/{name}", lines)
    data = replace(data, train=(CorpusConfig(src="news/train.en", tgt="news/train.de"),))
    assert testsets.open_test_set("newstest2013", data).known_as == "newstest2013"
    mine = testsets.open_test_set("mine", data)  # any name will do
    assert (mine.src, mine.ref, mine.known_as, mine.warning) == (SRC[:2], REF[:2], None, None)


def test_sacrebleus_copy_goes_before_files(cache: Path, data: DataConfig) -> None:
    fill(cache, "wmt13", SRC, REF)
    put(data, "newstest2013.en", ["other"])
    put(data, "newstest2013.de", ["anderes"])
    assert testsets.open_test_set("newstest2013", data).src == SRC


def test_nothing_there_is_one_line_with_the_remedies(data: DataConfig) -> None:
    root = data.root
    assert complaint("newstest2014", data) == (
        "sacrebleu: wmt14/full is not in sacreBLEU's cache and cannot be downloaded, "
        "because HF_HUB_OFFLINE is set; give local files instead, "
        f"{{src: FILE, tgt: FILE}} (or put newstest2014.en and newstest2014.de into {root})"
    )
    with raises(UserError, match="or put newstest2014.en and newstest2014.de into"):
        testsets.open_test_set(CorpusConfig(sacrebleu="wmt14/full"), data)
    for typo, meant in (
        ("newstest14", "newstest2014"),
        ("newstst2013", "newstest2013"),
        ("WMT14/Full", "wmt14/full"),
        ("wmt-13", "wmt13"),
    ):
        assert f"sacrebleu: unknown test set {typo!r}; did you mean {meant}" in complaint(
            typo, data
        )
    assert "sacrebleu: wmt13 does not have en-ja; set data.src and data.tgt to one of" in complaint(
        "newstest2013", replace(data, tgt="ja")
    )
    for language in ("en", "ja"):
        write(Path(root) / f"newstest2013.{language}", SRC)
    assert testsets.open_test_set("newstest2013", replace(data, tgt="ja")).known_as is None


NO_NETWORK = """
import json, socket
def refuse(*arguments): raise OSError("no network here")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
from nmt.config import DataConfig
from nmt.corpus.test_sets import open_test_set
from nmt.system.errors import UserError
told = []
for name in ("newstest2010", "newstest2009"):
    try:
        told.append(open_test_set(name, DataConfig()).ref)
    except UserError as error:
        told.append(str(error))
print(json.dumps(told))
"""


def test_the_folder_that_SACREBLEU_names_is_read_without_a_network(
    cache: Path, tmp_path: Path
) -> None:
    fill(cache, "wmt10", SRC, REF)
    environment = {
        **os.environ,
        "SACREBLEU": str(cache),
        "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", NO_NETWORK],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found, told = json.loads(done.stdout)
    assert found == REF
    assert told.startswith("sacrebleu: wmt09 cannot be downloaded (")
    assert told.endswith("(or put newstest2009.en and newstest2009.de into .)")


# ---- what it is -------------------------------------------------------------------------------------------------


def test_spaces_and_line_ends_do_not_make_another_set(data: DataConfig) -> None:
    put(data, "newstest2013.en", [line + " \r" for line in SRC])
    put(data, "newstest2013.de", [line.replace("5 %", "5\u00a0%") for line in REF])
    by_name = testsets.open_test_set("newstest2013", data)
    # The same text as from elsewhere
    assert (by_name.known_as, by_name.src, by_name.ref) == ("newstest2013", SRC, REF)
    as_files = testsets.open_test_set(
        CorpusConfig(src="newstest2013.en", tgt="newstest2013.de"), data
    )
    # As it lies, as validation reads it
    assert as_files.known_as == "newstest2013" and as_files.ref[2] == "Ein Haus zu 5\u00a0%"
    # Moses' tokenizer makes one word of two around this one, and so would shorten the reference.
    put(data, "newstest2013.de", [line.replace("5 %", "5\x1c%") for line in REF])
    with raises(UserError, match="is not the de side of newstest2013"):
        testsets.open_test_set("newstest2013", data)


CHANGES = {
    "3 lines, not 4": (SRC[:3], REF[:3]),
    f"its sha256 begins with {sha([*REF[:3], 'das Ende'])[:12]}, not {sha(REF)[:12]}": (
        SRC,
        [*REF[:3], "das Ende"],
    ),
    "it is newstest2012, de": (SRC, REF[::-1]),
}


@mark.parametrize("what, src, ref", [(what, *sides) for what, sides in CHANGES.items()])
def test_another_text_is_refused_by_name_and_warned_of_in_files(
    cache: Path, data: DataConfig, what: str, src: list[str], ref: list[str]
) -> None:
    side, language, k = ("source", "en", 0) if src != SRC else ("reference", "de", 1)
    for name, lines in (("newstest2013.en", src), ("newstest2013.de", ref)):
        put(data, name, lines)
    file = Path(data.root) / f"newstest2013.{language}"
    remedy = "replace it with the real test set, or remove it so that sacreBLEU downloads it"
    assert (
        complaint("newstest2013", data)
        == f"{file} is not the {language} side of newstest2013: {what}; {remedy}"
    )

    found = testsets.open_test_set(CorpusConfig(src="newstest2013.en", tgt="newstest2013.de"), data)
    assert (found.src, found.ref, found.known_as) == (src, ref, None)
    assert found.warning == f"the {side} is not the {language} side of newstest2013: {what}"

    fill(cache, "wmt13", src, ref)  # half a file in the cache is no set either
    assert (
        f"wmt13.en-de.{('src', 'ref')[k]} is not the {language} side of newstest2013: {what}"
        in complaint("newstest2013", data)
    )


def test_files_are_known_by_what_they_hold(data: DataConfig) -> None:
    for name, lines in (("a.en", SRC), ("a.de", REF), ("b.de", ["Ja"] * 4), ("b.en", ["Yes"] * 4)):
        put(data, name, lines)
    found = testsets.open_test_set(CorpusConfig(src="a.en", tgt="a.de"), data)
    assert (found.name, found.known_as) == ("a.en + a.de", "newstest2013")
    back = testsets.open_test_set(
        CorpusConfig(src="a.de", tgt="a.en"), replace(data, src="de", tgt="en")
    )
    assert back.known_as == "newstest2013"
    half = testsets.open_test_set(CorpusConfig(src="a.en", tgt="b.de"), data)
    assert half.warning is not None and half.warning.startswith(
        "the reference is not the de side of newstest2013: "
    )
    other = testsets.open_test_set(CorpusConfig(src="b.en", tgt="b.de"), data)
    assert (other.known_as, other.warning) == (None, None)
    turned = testsets.open_test_set(CorpusConfig(src="a.de", tgt="a.en"), data)
    assert (turned.known_as, turned.warning) == (
        None,
        None,
    )  # it names no set, so nothing is expected of it


@mark.parametrize("name", ["newstest2012", "newstest2016", "wmt14"])
def test_a_known_set_under_the_name_of_another(data: DataConfig, name: str) -> None:
    for language, lines in (("en", SRC), ("de", REF)):
        put(data, f"{name}.{language}", lines)
    assert complaint(name, data).startswith(
        f"{data.root}/{name}.en and {data.root}/{name}.de are newstest2013, not {name}; "
        "replace it with the real test set"
    )
    found = testsets.open_test_set(CorpusConfig(src=f"{name}.en", tgt=f"{name}.de"), data)
    assert found.known_as == "newstest2013"
    # Of files, only newstestYEAR is taken for a claim
    told = None if name == "wmt14" else f"the source and the reference are newstest2013, not {name}"
    assert found.warning == told


# ---- what is left of newstest2014 -------------------------------------------------------------------------------


def test_the_lines_of_the_filtered_set(
    cache: Path, data: DataConfig, monkeypatch: MonkeyPatch
) -> None:
    src, ref = [f"line {i % 3000}" for i in range(3003)], [f"Zeile {i}" for i in range(3003)]
    toy = replace(PAPER_TEST_SET, texts=({"en": sha(src), "de": sha(ref)},))
    monkeypatch.setattr(testsets, "KNOWN_SETS", (toy,))
    fill(cache, "wmt14/full", src, ref)
    subset = testsets.open_test_set("newstest2014", data).subset
    assert subset is not None and len(subset) == 2737
    assert PAPER_TEST_SET.subset is not None and len(PAPER_TEST_SET.subset.left_out) == 12
    left_out = [i for document in PAPER_TEST_SET.subset.left_out for i in document]
    assert sorted([*subset, *left_out]) == list(range(3003))

    filtered = testsets.open_test_set(
        CorpusConfig(
            src="cache/wmt14/full/wmt14_full.en-de.ref", tgt="cache/wmt14/full/wmt14_full.en-de.src"
        ),
        DataConfig(root=str(cache.parent), src="de", tgt="en"),
    )
    assert (filtered.known_as, filtered.subset) == (
        "newstest2014",
        None,
    )  # the other direction was not filtered


# ---- the real sets ----------------------------------------------------------------------------------------------


GERMAN_NEWS, FRENCH_NEWS = "news-en-de", "news-en-fr"


@mark.parametrize(
    "folder, tgt, name, n",
    [
        pytest.param(GERMAN_NEWS, "de", "newstest2012", 3003, marks=needs_text(GERMAN_NEWS)),
        pytest.param(GERMAN_NEWS, "de", "newstest2013", 3000, marks=needs_text(GERMAN_NEWS)),
        pytest.param(FRENCH_NEWS, "fr", "newstest2013", 3000, marks=needs_text(FRENCH_NEWS)),
    ],
)
def test_the_real_newstests(
    monkeypatch: MonkeyPatch, folder: str, tgt: str, name: str, n: int
) -> None:
    monkeypatch.setattr(testsets, "KNOWN_SETS", KNOWN_SETS)
    data = DataConfig(root=str(REAL_TEXT / folder), tgt=tgt)
    found = testsets.open_test_set(name, data)
    assert (found.known_as, len(found.src), len(found.ref), found.warning) == (name, n, n, None)
    files = testsets.open_test_set(
        CorpusConfig(src=f"{name}.{tgt}", tgt=f"{name}.en"), replace(data, src=tgt, tgt="en")
    )
    assert files.known_as == name
    turned = testsets.open_test_set(CorpusConfig(src=f"{name}.{tgt}", tgt=f"{name}.en"), data)
    assert turned.warning == f"the source is not the en side of {name}: it is {name}, {tgt}"
