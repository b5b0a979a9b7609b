"""Reading corpora against brute force on bytes; every kind of damage is one line with file:line; no route differs."""

import gzip
import json
import lzma
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from nmt.config import CleanConfig, CorpusConfig, DataConfig
from nmt.data import demo
from nmt.data.corpus import Pair, clean, describe, local_files, read_lines, read_pairs
from nmt.errors import UserError

NOT_LINE_ENDS = ["\u2028", "\u2029", "\u0085", "\v", "\f", "\x1c", "\x1d", "\x1e", "\r", "\0", "\ufeff"]
PAIRS = [Pair("one dog", "ein Hund"), *(Pair(f"odd{c}one", f"{c}selt{c}sam") for c in NOT_LINE_ENDS if c != "\r"),
         Pair("", "leer"), Pair("“quotes” 👩‍👩‍👧 \u202eright", "½ é é")]


def read(corpus: CorpusConfig, root: Path, src: str = "en", tgt: str = "de") -> list[Pair]:
    return list(read_pairs(corpus, DataConfig(root=str(root), src=src, tgt=tgt)))


def complaint(corpus: CorpusConfig, root: Path, src: str = "en", tgt: str = "de") -> str:
    with pytest.raises(UserError) as caught:
        read(corpus, root, src, tgt)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(root), "ROOT")


# ---- lines ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("content", "lines"), [
    (b"a\nb\n", ["a", "b"]), (b"a\nb", ["a", "b"]), (b"\n", [""]), (b"a\r\nb\r\n", ["a", "b"]),
    (b"a\r\r\nb\rc\n", ["a\r", "b\rc"]), (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
    *((f"a{c}b{c}\nc\n".encode(), [f"a{c}b{c}", "c"]) for c in NOT_LINE_ENDS if c != "\r")])
def test_a_line_ends_with_newline_and_nothing_else(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    (tmp_path / "x").write_bytes(content)
    assert list(read_lines(tmp_path / "x")) == lines


def test_lines_equal_brute_force_in_every_packing(tmp_path: Path) -> None:
    draw = random.Random(1)
    text = "".join(draw.choice("ab é\n\n\r\u2028\u0085\v\f\0😀") for _ in range(20_000)).encode() + b"end"
    truth = [re.sub("\r$", "", line) for line in text.decode().split("\n")]
    (tmp_path / "x").write_bytes(text)
    (tmp_path / "x.gz").write_bytes(gzip.compress(text))
    (tmp_path / "x.xz").write_bytes(lzma.compress(text))
    for name in ("x", "x.gz", "x.xz"):
        assert list(read_lines(tmp_path / name)) == truth


def test_a_very_long_line_is_quick(tmp_path: Path) -> None:
    (tmp_path / "en").write_text("a " * 500_000 + "\n")
    (tmp_path / "de").write_text("b\n")
    began = time.perf_counter()
    assert not list(clean(read(CorpusConfig(src="en", tgt="de"), tmp_path), CleanConfig(), Counter()))
    assert time.perf_counter() - began < 2


# ---- every route gives the same pairs ---------------------------------------------------------------------------

@pytest.fixture
def root(tmp_path: Path) -> Path:
    """PAIRS in every form that is read."""
    for i, language in enumerate(("en", "de")):
        text = "".join(f"{pair[i]}\n" for pair in PAIRS).encode()
        (tmp_path / f"t.{language}").write_bytes(text)
        (tmp_path / f"t.{language}.gz").write_bytes(gzip.compress(text))
    (tmp_path / "t.tsv").write_bytes("".join(f"{s}\t{t}\n" for s, t in PAIRS).encode())
    (tmp_path / "t.tsv.xz").write_bytes(lzma.compress((tmp_path / "t.tsv").read_bytes()))
    rows: dict[str, Callable[[Pair], object]] = {
        "plain": lambda p: {"de": p.tgt, "id": 1, "en": p.src},
        "nested": lambda p: {"id": "x", "translation": {"de": p.tgt, "en": p.src}},
        "sides": lambda p: {"src": p.src, "tgt": p.tgt}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row(p)) + "\n" for p in PAIRS))
        table = pa.Table.from_pylist([row(p) for p in PAIRS])
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=3)
    return tmp_path


@pytest.mark.parametrize("corpus", [
    CorpusConfig(src="t.en", tgt="t.de"), CorpusConfig(src="t.en.gz", tgt="t.de"),
    *(CorpusConfig(file=name) for name in ("t.tsv", "t.tsv.xz", "plain.jsonl", "nested.jsonl", "sides.jsonl",
                                           "plain.parquet", "nested.parquet", "sides.parquet"))], ids=describe)
def test_every_form_gives_the_same_pairs(root: Path, corpus: CorpusConfig) -> None:
    assert read(corpus, root) == PAIRS
    assert all(path.is_file() for path in local_files(corpus, DataConfig(root=str(root))))


@pytest.mark.parametrize("name", ["plain.jsonl", "nested.jsonl", "plain.parquet", "nested.parquet"])
def test_columns_follow_the_direction(root: Path, name: str) -> None:
    assert read(CorpusConfig(file=name), root, "de", "en") == [Pair(t, s) for s, t in PAIRS]


def test_a_line_break_within_a_cell_becomes_a_space(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"en": "a\\nb\\r\\n", "de": "c"}')
    parquet.write_table(pa.table({"en": ["a\nb\r\n"], "de": ["c"]}), tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.parquet"):
        assert read(CorpusConfig(file=name), tmp_path) == [("a b", "c")]


@pytest.fixture
def hub(root: Path) -> Path:
    """A folder as wmt/wmt14 lies on the hub: shards with a `translation` column, and a README that names them."""
    table = pa.table({"translation": [{"de": p.tgt, "en": p.src} for p in PAIRS]})
    folder = root / "wmt" / "wmt14" / "de-en"
    folder.mkdir(parents=True)
    parquet.write_table(table[:5], folder / "train-00000-of-00002.parquet")
    parquet.write_table(table[5:], folder / "train-00001-of-00002.parquet")
    parquet.write_table(table[:1], folder / "validation-00000-of-00001.parquet")
    (folder.parent / "README.md").write_text("---\nconfigs:\n- config_name: de-en\n  data_files:\n"
                                             "  - split: train\n    path: de-en/train-*\n"
                                             "  - split: validation\n    path: de-en/validation-*\n---\n")
    return root


def test_the_hubs_layout_through_datasets_equals_direct_parquet(hub: Path, capfd: pytest.CaptureFixture[str]) -> None:
    corpus = CorpusConfig(dataset="wmt/wmt14", subset="de-en")
    assert read(corpus, hub) == read(CorpusConfig(file="nested.parquet"), hub) == PAIRS
    assert read(corpus, hub, "de", "en") == [Pair(t, s) for s, t in PAIRS]
    assert read(CorpusConfig(dataset="wmt/wmt14", subset="de-en", split="validation"), hub) == PAIRS[:1]
    files = local_files(corpus, DataConfig(root=str(hub)))
    assert [file.name[:11] for file in files] == ["train-00000", "train-00001"]
    (hub / "wmt" / "wmt14" / "README.md").unlink()
    assert read(corpus, hub) == PAIRS
    assert capfd.readouterr().err == ""


def test_a_dataset_that_lacks_what_is_asked_says_what_it_has(hub: Path) -> None:
    assert "Available: ['de-en']" in complaint(CorpusConfig(dataset="wmt/wmt14", subset="fr-en"), hub)
    corpus = CorpusConfig(dataset="wmt/wmt14", subset="de-en", split="test")
    assert "['train', 'validation']" in complaint(corpus, hub)
    assert "no columns 'en' and 'fr', but 'translation.de', 'translation.en'" in complaint(
        CorpusConfig(dataset="wmt/wmt14", subset="de-en"), hub, "en", "fr")


# ---- mistakes ---------------------------------------------------------------------------------------------------

TWO = CorpusConfig(src="x.en", tgt="x.de")


@pytest.mark.parametrize(("en", "de", "message"), [
    (b"a\nb\n", b"a\nb\nc\nd\n", "ROOT/x.en has 2 lines but ROOT/x.de has 4; line n of one must be the translation"),
    (b"a\nb\nc", b"a\n", "ROOT/x.en has 3 lines but ROOT/x.de has 1;"),
    (b"a\nb\nc\n", b"a\xe2\x80\xa8b\nc\n", "ROOT/x.en has 3 lines but ROOT/x.de has 2;"),
    (b"", b"a\n", "ROOT/x.en: empty; it should hold one sentence per line"),
    (b"a\n", b"", "ROOT/x.de: empty"),
    (b"a\nb\nstra\xdfe\n", b"a\n" * 3, "ROOT/x.en:3: not valid UTF-8: 0xdf at byte 5 of the line; convert"),
    (b"a\xed\xa0\x80\n", b"a\n", "ROOT/x.en:1: not valid UTF-8: 0xed at byte 2"),
    (None, b"a\n", "ROOT/x.en: not found; give a file, relative paths start from data.root=ROOT")])
def test_two_files_name_the_mistake(tmp_path: Path, en: bytes | None, de: bytes, message: str) -> None:
    if en is not None:
        (tmp_path / "x.en").write_bytes(en)
    (tmp_path / "x.de").write_bytes(de)
    assert complaint(TWO, tmp_path).startswith(message)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("x.tsv", "a\tb\nc\n", "ROOT/x.tsv:2: 0 tabs instead of one; a line is source, tab, target"),
    ("x.tsv", "a\tb\tc\n", "ROOT/x.tsv:1: 2 tabs instead of one"),
    ("x.jsonl", '{"en": "a", "de": "b"}\n{"en": "a"', "ROOT/x.jsonl:2: not JSON (Expecting"),
    ("x.jsonl", "[" * 100_000, "ROOT/x.jsonl:1: not JSON"),
    ("x.jsonl", "[1]", "ROOT/x.jsonl:1: [1] is not an object like"),
    ("x.jsonl", '{"en": "a", "fr": "b"}', "ROOT/x.jsonl:1: no columns 'en' and 'de', but 'en', 'fr'; name them"),
    ("x.jsonl", '{"en": "a", "de": null}', "ROOT/x.jsonl:1: de is null instead of text"),
    ("x.jsonl", '{"translation": {"en": 3, "de": "b"}}', "ROOT/x.jsonl:1: translation.en is 3 instead of text"),
    ("x.jsonl", '{"en": "\\ud83d", "de": "b"}', "ROOT/x.jsonl:1: en holds half a character (lone surrogate U+D83D)"),
    ("x.parquet", "PAR1 not really PAR1", "ROOT/x.parquet: not a readable parquet file"),
    ("x.csv", "a,b", "ROOT/x.csv: not a .tsv, .jsonl or .parquet file; two text files are given as src: and tgt:")])
def test_one_file_names_the_mistake(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    assert complaint(CorpusConfig(file=name), tmp_path).startswith(message)


@pytest.mark.parametrize(("table", "message"), [
    ({"en": ["a", "b"], "de": ["c", None]}, "ROOT/x.parquet: row 2: de is null instead of text"),
    ({"en": ["a"], "fr": ["b"]}, "ROOT/x.parquet: no columns 'en' and 'de', but 'en', 'fr'"),
    ({"en": pa.array([], pa.string()), "de": pa.array([], pa.string())}, "ROOT/x.parquet: empty"),
    ({"en": pa.array([b"\xff"]).view(pa.string()), "de": ["b"]}, "ROOT/x.parquet: not valid UTF-8 in one of")])
def test_parquet_names_the_mistake(tmp_path: Path, table: dict[str, object], message: str) -> None:
    parquet.write_table(pa.table(table), tmp_path / "x.parquet")
    assert complaint(CorpusConfig(file="x.parquet"), tmp_path).startswith(message)


@pytest.mark.parametrize("damage", ["cut", "flipped", "not packed"])
@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_corrupt_archive_is_named(tmp_path: Path, suffix: str, damage: str) -> None:
    text = "".join(f"{random.Random(i).random()}\n" for i in range(5000)).encode()
    packed = gzip.compress(text) if suffix == ".gz" else lzma.compress(text)
    middle = len(packed) // 2
    flipped = packed[:middle] + bytes([packed[middle] ^ 64]) + packed[middle + 1:]
    (tmp_path / f"x.en{suffix}").write_bytes({"cut": packed[:middle], "flipped": flipped, "not packed": text}[damage])
    (tmp_path / "x.de").write_bytes(text)
    assert re.match(rf"ROOT/x\.en\{suffix}: corrupt after line \d+ \(.*\); fetch or pack it again",
                    complaint(CorpusConfig(src=f"x.en{suffix}", tgt="x.de"), tmp_path))


def test_a_flipped_byte_in_parquet_with_checksums_is_found(tmp_path: Path) -> None:
    text = ["Hallo Welt", "Haus"] * 500
    parquet.write_table(pa.table({"en": text, "de": text}), tmp_path / "x.parquet", compression="none",
                        use_dictionary=False, write_page_checksum=True)
    content = bytearray((tmp_path / "x.parquet").read_bytes())
    content[content.index(b"Haus\n\0\0\0Hallo") + 11] ^= 1
    (tmp_path / "x.parquet").write_bytes(content)
    assert "not a readable parquet file" in complaint(CorpusConfig(file="x.parquet"), tmp_path)


# ---- no network -------------------------------------------------------------------------------------------------

OFFLINE = """
import sys
from nmt.config import CorpusConfig, DataConfig
from nmt.data.corpus import read_pairs
from nmt.errors import UserError
try:
    list(read_pairs(CorpusConfig(dataset="wmt/wmt14", subset="de-en", split="train"), DataConfig()))
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize("is_told", [False, True])
def test_an_unreachable_hub_is_one_message_in_seconds(tmp_path: Path, is_told: bool) -> None:
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9",
                   "HF_HUB_OFFLINE": str(int(is_told)), "PYTHONPATH": str(Path(__file__).parents[1])}
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", OFFLINE], cwd=tmp_path, env=environment, capture_output=True,
                          text=True, check=False)
    assert time.perf_counter() - began < 15  # 23 s of retries, were `datasets` left to itself
    assert re.fullmatch(r"dataset wmt/wmt14: Hugging Face cannot be reached and there is no copy in its cache; "
                        r"give local files instead, data\.train=\[\{src: FILE, tgt: FILE\}\], or parquet files .*"
                        r"FOLDER/de-en/train-00000-of-00001\.parquet, as dataset: FOLDER\n", done.stdout)
    assert done.stderr == ""


@pytest.fixture
def test_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where sacreBLEU keeps wmt14/full, here, and no way to download it."""
    from sacrebleu.dataset import DATASETS
    known = DATASETS["wmt14/full"]
    monkeypatch.setattr(known, "_outdir", str(tmp_path))
    monkeypatch.setattr(known, "_rawdir", str(tmp_path / "raw"))
    monkeypatch.setattr(known, "data", ["http://127.0.0.1:9/test-full.tgz"])
    return tmp_path


def test_sacrebleus_test_sets_are_read_from_its_folder(test_set: Path) -> None:
    for field, text in {"src": "a\nb\n", "ref": "c\nd\n", "docid": "1\n1\n", "genre": "", "origlang": ""}.items():
        (test_set / f"wmt14_full.en-de.{field}").write_text(text)
    corpus = CorpusConfig(sacrebleu="wmt14/full")
    assert read(corpus, test_set) == [("a", "c"), ("b", "d")]
    (test_set / "wmt14_full.en-de.ref").write_text("")
    assert "wmt14_full.en-de.ref: empty" in complaint(corpus, test_set)


def test_sacrebleu_without_network_is_one_message_each_time(test_set: Path) -> None:
    for _ in range(2):  # the first attempt leaves folders and a lock behind
        message = complaint(CorpusConfig(sacrebleu="wmt14/full"), test_set)
        assert message.startswith("sacrebleu: wmt14/full cannot be had (") and "give local files instead" in message
    (test_set / "raw" / "wmt14_full.test-full.tgz").write_bytes(b"half a download")
    assert "if it holds half, and try again" in complaint(CorpusConfig(sacrebleu="wmt14/full"), test_set)


def test_an_unknown_test_set_or_direction_names_the_known_ones(tmp_path: Path) -> None:
    assert "did you mean wmt14" in complaint(CorpusConfig(sacrebleu="wmt14/fulll"), tmp_path)
    assert "wmt14/full has no en-ja, only" in complaint(CorpusConfig(sacrebleu="wmt14/full"), tmp_path, "en", "ja")


# ---- demo and cleaning ------------------------------------------------------------------------------------------

def test_the_demo_has_both_directions(tmp_path: Path) -> None:
    forth, back = read(CorpusConfig(demo="test"), tmp_path), read(CorpusConfig(demo="test"), tmp_path, "de", "en")
    assert forth == [tuple(pair) for pair in demo.pairs("test")] == [(t, s) for s, t in back]
    assert "the embedded corpus is English-German" in complaint(CorpusConfig(demo="test"), tmp_path, "en", "fr")


@pytest.mark.parametrize("rules", [
    CleanConfig(), CleanConfig(max_words=4), CleanConfig(max_words=None, max_ratio=1.5),
    CleanConfig(max_words=5, max_ratio=2.0), CleanConfig(max_words=None)])
def test_cleaning_equals_the_rules_written_out(rules: CleanConfig) -> None:
    draw = random.Random(0)
    sides = [" " * draw.randrange(3) + " ".join(["w"] * draw.randrange(8)) for _ in range(1000)]
    pairs = list(map(Pair, sides[::2], sides[1::2]))
    kept, dropped = [], Counter[str]()
    for src, tgt in pairs:
        a, b = sorted((src.count("w"), tgt.count("w")))
        if a == 0:
            dropped["empty side"] += 1
        elif rules.max_words and b > rules.max_words:
            dropped[f"more than {rules.max_words} words"] += 1
        elif rules.max_ratio and b / a > rules.max_ratio:
            dropped[f"length ratio above {rules.max_ratio:g}"] += 1
        else:
            kept.append((src.strip(), tgt.strip()))
    counted = Counter[str]()
    assert list(clean(pairs, rules, counted)) == kept
    assert counted == dropped and kept and dropped


def test_names_are_short() -> None:
    corpora = (TWO, CorpusConfig(file="x.tsv"), CorpusConfig(dataset="wmt/wmt14", subset="de-en"),
               CorpusConfig(sacrebleu="wmt14/full"), CorpusConfig(demo="train"))
    assert [describe(corpus) for corpus in corpora] == [
        "x.en + x.de", "x.tsv", "wmt/wmt14 de-en train", "sacrebleu wmt14/full", "demo train"]
