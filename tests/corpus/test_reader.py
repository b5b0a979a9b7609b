"""Reading corpora against brute force on bytes; every kind of damage is one line with file:line; no
route differs.
"""

import gzip
import json
import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from random import Random

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from pytest import MonkeyPatch, TempPathFactory, fixture, mark, raises
from support.capture import Capture, read_stderr
from support.checkout import ROOT
from support.packing import tar, zstd
from support.rings import amount

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus import demo
from nmt.corpus.reader import (
    Block,
    Pair,
    describe_corpus,
    find_local_files,
    read_blocks,
    read_pairs,
)
from nmt.system.errors import UserError

NOT_LINE_ENDS = [
    "\u2028",
    "\u2029",
    "\u0085",
    "\v",
    "\f",
    "\x1c",
    "\x1d",
    "\x1e",
    "\r",
    "\0",
    "\ufeff",
]
PAIRS = [
    Pair("one dog", "ein Hund"),
    *(Pair(f"odd{c}one", f"{c}selt{c}sam") for c in NOT_LINE_ENDS if c != "\r"),
    Pair("", "leer"),
    Pair("“quotes” 👩‍👩‍👧 \u202eright", "½ é é"),
]


def read(corpus: CorpusConfig, root: Path, src: str = "en", tgt: str = "de") -> list[Pair]:
    return list(read_pairs(corpus, DataConfig(root=str(root), src=src, tgt=tgt)))


def complaint(corpus: CorpusConfig, root: Path, src: str = "en", tgt: str = "de") -> str:
    with raises(UserError) as caught:
        read(corpus, root, src, tgt)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(root), "ROOT")


# ---- every route gives the same pairs ---------------------------------------------------------------------------


@fixture
def root(tmp_path: Path) -> Path:
    """PAIRS in every form that is read."""
    for i, language in enumerate(("en", "de")):
        text = "".join(f"{pair[i]}\n" for pair in PAIRS).encode()
        (tmp_path / f"t.{language}").write_bytes(text)
        (tmp_path / f"t.{language}.gz").write_bytes(gzip.compress(text))
    (tmp_path / "t.tgz").write_bytes(
        gzip.compress(
            tar(
                {
                    f"training/t.{language}": (tmp_path / f"t.{language}").read_bytes()
                    for language in ("en", "de")
                }
            )
        )
    )
    (tmp_path / "t.tsv").write_bytes("".join(f"{s}\t{t}\n" for s, t in PAIRS).encode())
    (tmp_path / "t.tsv.xz").write_bytes(lzma.compress((tmp_path / "t.tsv").read_bytes()))
    rows: dict[str, Callable[[Pair], object]] = {
        "plain": lambda p: {"de": p.tgt, "id": 1, "en": p.src},
        "nested": lambda p: {"id": "x", "translation": {"de": p.tgt, "en": p.src}},
        "sides": lambda p: {"src": p.src, "tgt": p.tgt},
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row(p)) + "\n" for p in PAIRS))
        table = pa.Table.from_pylist([row(p) for p in PAIRS])
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=3)
    (tmp_path / "plain.jsonl.zst").write_bytes(zstd((tmp_path / "plain.jsonl").read_bytes()))
    return tmp_path


EVERY_FORM = [
    CorpusConfig(src="t.en", tgt="t.de"),
    CorpusConfig(src="t.en.gz", tgt="t.de"),
    CorpusConfig(archive="t.tgz", src="training/t.en", tgt="training/t.de"),
    *(
        CorpusConfig(file=name)
        for name in (
            "t.tsv",
            "t.tsv.xz",
            "plain.jsonl",
            "plain.jsonl.zst",
            "nested.jsonl",
            "sides.jsonl",
            "plain.parquet",
            "nested.parquet",
            "sides.parquet",
        )
    ),
]


@fixture
def hub(root: Path) -> Path:
    """A folder as wmt/wmt14 lies on the hub: shards with a `translation` column, and a README that
    names them.
    """
    table = pa.table({"translation": [{"de": p.tgt, "en": p.src} for p in PAIRS]})
    folder = root / "wmt" / "wmt14" / "de-en"
    folder.mkdir(parents=True)
    parquet.write_table(table[:5], folder / "train-00000-of-00002.parquet")
    parquet.write_table(table[5:], folder / "train-00001-of-00002.parquet")
    parquet.write_table(table[:1], folder / "validation-00000-of-00001.parquet")
    (folder.parent / "README.md").write_text(
        "---\nconfigs:\n- config_name: de-en\n  data_files:\n"
        "  - split: train\n    path: de-en/train-*\n"
        "  - split: validation\n    path: de-en/validation-*\n---\n"
    )
    return root


def test_the_hubs_layout_through_datasets_equals_direct_parquet(hub: Path, capfd: Capture) -> None:
    corpus = CorpusConfig(dataset="wmt/wmt14", subset="de-en")
    assert read(corpus, hub) == read(CorpusConfig(file="nested.parquet"), hub) == PAIRS
    assert read(corpus, hub, "de", "en") == [Pair(t, s) for s, t in PAIRS]
    assert (
        read(CorpusConfig(dataset="wmt/wmt14", subset="de-en", split="validation"), hub)
        == PAIRS[:1]
    )
    files = find_local_files(corpus, DataConfig(root=str(hub)))
    assert [file.name[:11] for file in files] == ["train-00000", "train-00001"]
    (hub / "wmt" / "wmt14" / "README.md").unlink()
    assert read(corpus, hub) == PAIRS
    assert read_stderr(capfd) == ""


def test_folders_of_save_to_disk_equal_parquet(root: Path, capfd: Capture) -> None:
    """Whatever an earlier save, `map` and `filter` left in them."""
    import datasets

    rows = [{"translation": {"de": p.tgt, "en": p.src}} for p in PAIRS]
    whole = datasets.Dataset.from_list(rows)
    whole.save_to_disk(str(root / "one"), num_shards=3)
    whole.save_to_disk(str(root / "one"), num_shards=2)
    datasets.DatasetDict({"train": whole, "dev": whole.select([0])}).save_to_disk(
        str(root / "sub/two")
    )
    for folder in (root / "one", root / "sub/two/train"):
        kept = datasets.load_from_disk(folder)
        kept.map(lambda row: {"x": 1}).filter(lambda row: False)
        assert [*folder.glob("cache-*.arrow")]
    state = folder / "state.json"
    state.symlink_to(state.rename(root / "blob"))  # as in the hub's cache
    capfd.readouterr()

    one = CorpusConfig(dataset="one")
    assert read(one, root) == PAIRS
    assert read(CorpusConfig(dataset="sub/two"), root) == PAIRS
    assert read(CorpusConfig(dataset="sub", subset="two"), root) == PAIRS
    assert read(CorpusConfig(dataset="sub/two", split="dev"), root) == PAIRS[:1]
    files = find_local_files(one, DataConfig(root=str(root)))
    assert [file.name for file in files] == [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    assert read_stderr(capfd) == ""

    assert (
        complaint(CorpusConfig(dataset="one", split="dev"), root)
        == "dataset one dev: has no such split; give split: train"
    )
    assert (
        complaint(CorpusConfig(dataset="sub/two", split="test"), root)
        == "dataset sub/two test: has no such split; give split: dev or train"
    )
    message = complaint(CorpusConfig(dataset="sub/two", subset="x"), root)
    assert message.startswith("dataset sub/two x train: BuilderConfig 'x' not found.")
    files[1].unlink()
    os.mkfifo(files[1])  # which is not waited for
    message = complaint(one, root)
    assert message.startswith(
        "ROOT/one/data-00001-of-00002.arrow: is a pipe or a device; give the whole"
    )
    state = root / "one" / "state.json"
    state.write_text("[]")
    assert (
        complaint(one, root)
        == "ROOT/one/state.json: does not list the files of the dataset; use another copy"
    )
    state.unlink()
    assert "ROOT/one/state.json: not found; give the whole folder" in complaint(one, root)


@mark.parametrize("place", [1, 100, 399])
def test_a_damaged_arrow_file_is_named(place: int, tmp_path: Path) -> None:
    """Arrow reads offsets as they are, and the process would end with SIGSEGV."""
    import datasets

    sides = {"en": ["one dog"] * 400, "de": ["ein Hund"] * 400}
    datasets.Dataset.from_dict(sides).save_to_disk(str(tmp_path / "saved"))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    content = bytearray(file.read_bytes())
    offset = content.index(struct.pack("<4i", 0, 7, 14, 21)) + 4 * place
    content[offset : offset + 4] = struct.pack("<i", 2**31 - 1)
    file.write_bytes(content)
    with raises(UserError, match="dataset saved train: .*[Oo]ffset"):
        read(CorpusConfig(dataset="saved"), tmp_path)


def test_a_dataset_that_lacks_what_is_asked_says_what_it_has(hub: Path) -> None:
    assert "has no such subset; give subset: de-en" in complaint(
        CorpusConfig(dataset="wmt/wmt14", subset="fr-en"), hub
    )
    corpus = CorpusConfig(dataset="wmt/wmt14", subset="de-en", split="test")
    assert "has no such split; give split: train or validation" in complaint(corpus, hub)
    assert (
        "columns 'en' and 'fr' are missing (found: 'translation.de', 'translation.en')"
        in complaint(CorpusConfig(dataset="wmt/wmt14", subset="de-en"), hub, "en", "fr")
    )


def test_a_dataset_with_a_missing_shard_or_several_subsets_is_refused(hub: Path) -> None:
    folder = hub / "wmt" / "wmt14"
    (folder / "README.md").unlink()
    shutil.copytree(folder / "de-en", folder / "fr-en")
    assert "has no such subset; give subset: de-en or fr-en" in complaint(
        CorpusConfig(dataset="wmt/wmt14"), hub
    )
    (folder / "de-en" / "train-00000-of-00002.parquet").unlink()
    assert "de-en/train-*-of-00002.parquet: 1 of 2 files are missing" in complaint(
        CorpusConfig(dataset="wmt/wmt14", subset="de-en"), hub
    )


@mark.parametrize("name", ["/etc/hosts", "../../nested.jsonl", "https://127.0.0.1:9/x.jsonl"])
def test_a_card_cannot_name_files_outside_of_its_dataset(name: str, hub: Path) -> None:
    card = hub / "wmt" / "wmt14" / "README.md"
    card.write_text(card.read_text().replace("de-en/train-*", name))
    message = complaint(CorpusConfig(dataset="wmt/wmt14", subset="de-en"), hub)
    assert message.startswith(f"dataset wmt/wmt14: its README.md names {name!r}, which is not in")


def test_the_settings_of_a_card_are_used(root: Path) -> None:
    (root / "semicolons").mkdir()
    (root / "semicolons" / "pairs.csv").write_text("en;de\none dog;ein Hund\n")
    (root / "semicolons" / "README.md").write_text(
        "---\nconfigs:\n- config_name: x\n  sep: ';'\n  data_files: pairs.csv\n---\n"
    )
    assert read(CorpusConfig(dataset="semicolons"), root) == [Pair("one dog", "ein Hund")]


# ---- mistakes ---------------------------------------------------------------------------------------------------

TWO = CorpusConfig(src="x.en", tgt="x.de")


@mark.parametrize(
    "en, de, message",
    [
        (b"", b"a\n", "ROOT/x.en: is empty; it should hold one sentence per line"),
        (b"a\n", b"", "ROOT/x.de: is empty"),
        (
            b"a\nb\nstra\xdfe\n",
            b"a\n" * 3,
            "ROOT/x.en:3:5: byte 0xdf is not valid UTF-8; convert the file to UTF-8",
        ),
        (
            b"\x1f\x8b\n",
            b"a\n",
            "ROOT/x.en:1:2: byte 0x8b is not valid UTF-8; name it .gz",
        ),
        (b"a\xed\xa0\x80\n", b"a\n", "ROOT/x.en:1:2: byte 0xed is not valid UTF-8"),
        (b"a\n\xff\n", b"\xfe\nb\n", "ROOT/x.de:1:1: byte 0xfe is not valid UTF-8"),
        (
            None,
            b"a\n",
            "ROOT/x.en: not found; give a file (relative paths start from data.root=ROOT; ~, $ and * mean themselves)",
        ),
    ],
)
def test_two_files_name_the_mistake(
    tmp_path: Path, en: bytes | None, de: bytes, message: str
) -> None:
    if en is not None:
        (tmp_path / "x.en").write_bytes(en)
    (tmp_path / "x.de").write_bytes(de)
    assert complaint(TWO, tmp_path).startswith(message)


@mark.parametrize(
    "corpus, message",
    [
        (
            CorpusConfig(file="x.csv"),
            "ROOT/x.csv: is not a .tsv, .jsonl, .tmx or .parquet file; give two text files as",
        ),
        (CorpusConfig(file="x.parquet"), "ROOT/x.parquet: is not a readable parquet file"),
        (
            CorpusConfig(archive="x.csv", src="a", tgt="b"),
            "ROOT/x.csv: is not a supported archive; its name must end in one of .tgz, .txz, ",
        ),
        (
            CorpusConfig(archive="x.tar", src="a", tgt="b"),
            "ROOT/x.tar: has no member 'a'; give one of its 1 files, such as 'c'",
        ),
        (CorpusConfig(archive="folder", src="a", tgt="b"), "ROOT/folder: is a folder; give a file"),
    ],
)
def test_one_file_names_the_mistake(tmp_path: Path, corpus: CorpusConfig, message: str) -> None:
    for name in ("x.csv", "x.parquet"):
        (tmp_path / name).write_bytes(b"PAR1 not really PAR1")
    (tmp_path / "x.tar").write_bytes(tar({"c": b""}))
    (tmp_path / "folder").mkdir()
    assert complaint(corpus, tmp_path).startswith(message)


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    parquet.write_table(
        pa.table({side: pa.array([], pa.string()) for side in ("en", "de")}), tmp_path / "x.parquet"
    )
    assert complaint(CorpusConfig(file="x.parquet"), tmp_path) == (
        "ROOT/x.parquet: is empty; it should hold one pair per row"
    )


@mark.parametrize("seed", range(3))
def test_a_lost_line_is_found_by_the_lengths_of_the_lines(tmp_path: Path, seed: int) -> None:
    draw = Random(seed)
    sides: list[list[str]] = [
        list(side) for side in zip(*islice(demo.generate_pairs("train"), 1500), strict=True)
    ]
    lost, n, side = draw.randrange(1400), draw.choice([1, 1, 5]), draw.randrange(2)
    del sides[side][lost : lost + n]
    for name, lines in zip(("x.en", "x.de"), sides, strict=True):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    found = re.fullmatch(
        r"ROOT/x.en has ([\d,]+) lines but ROOT/x.de has ([\d,]+); perhaps (a line is|5 lines are) "
        r"missing near line ([\d,]+) of ROOT/(x\.\w\w); line n of one must be the translation of "
        "line n of the other",
        complaint(TWO, tmp_path),
    )
    assert found and abs(int(found[4].replace(",", "")) - (lost + 1)) <= 6
    assert [int(found[i].replace(",", "")) for i in (1, 2)] == [len(lines) for lines in sides]
    assert found[5] == ("x.en", "x.de")[side] and (found[3] == "a line is") == (n == 1)


def test_a_side_that_ends_too_early_is_called_so(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.corpus.reader.PAIRS_AT_ONCE", 90)  # it is read in several blocks
    english, german = zip(*islice(demo.generate_pairs("train"), 300), strict=True)
    (tmp_path / "x.en").write_text("\n".join(english))
    (tmp_path / "x.de").write_text("\n".join(german[:250]))
    assert (
        "300 lines but ROOT/x.de has 250; perhaps 50 lines are missing at the end of ROOT/x.de"
        in complaint(TWO, tmp_path)
    )


# ---- blocks -----------------------------------------------------------------------------------------------------


def blocks(corpus: CorpusConfig, root: Path, size: int) -> list[Block]:
    return list(read_blocks(corpus, DataConfig(root=str(root), on_bad_line="skip"), size))


@mark.parametrize("corpus", EVERY_FORM, ids=describe_corpus)
@mark.parametrize("size", [1, 5, 100])
def test_every_form_gives_the_same_pairs_in_blocks_of_one_size(
    root: Path, corpus: CorpusConfig, size: int
) -> None:
    whole = blocks(corpus, root, size)
    assert [pair for block in whole for pair in zip(block.src, block.tgt, strict=True)] == PAIRS
    assert [(block.first, len(block.src)) for block in whole] == [
        (i + 1, min(size, len(PAIRS) - i)) for i in range(0, len(PAIRS), size)
    ]
    assert all(path.is_file() for path in find_local_files(corpus, DataConfig(root=str(root))))
    shares = [block.share for block in whole]
    assert shares == sorted(shares) and shares[-1] == 1


@given(
    st.lists(st.tuples(*[st.sampled_from(["a", "é\u2028", "", "\0", None])] * 2), min_size=1),
    st.integers(1, 5),
)
@settings(max_examples=amount(20, 100))
def test_what_is_left_out_never_shifts_the_rest(
    tmp_path_factory: TempPathFactory, cells: list[tuple[str | None, str | None]], size: int
) -> None:
    root = tmp_path_factory.mktemp("x")
    pairs = [
        tuple(cell if cell is None else f"{cell}{i}" for cell in row) for i, row in enumerate(cells)
    ]
    for side, name in enumerate(("x.en", "x.de")):
        (root / name).write_bytes(
            b"".join(
                b"\xc3\n" if pair[side] is None else f"{pair[side]}\n".encode() for pair in pairs
            )
        )
    (root / "x.jsonl").write_text("".join(json.dumps({"en": s, "de": t}) + "\n" for s, t in pairs))
    for corpus in (TWO, CorpusConfig(file="x.jsonl")):
        found = blocks(corpus, root, size)
        for block in found:
            raw = pairs[block.first - 1 : block.first - 1 + size]
            assert list(zip(block.src, block.tgt, strict=True)) == [
                pair for pair in raw if None not in pair
            ]
            assert len(block.src) + len(block.bad) == len(raw)
        assert sum(len(block.src) + len(block.bad) for block in found) == len(pairs)


# ---- no network -------------------------------------------------------------------------------------------------

BLOCKED = """
import json, os, socket
asked = []
def refuse(*arguments, **options):
    asked.append(str(arguments[-1]))
    raise OSError("no network here")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
from nmt.config import CorpusConfig, DataConfig
from nmt.corpus.reader import read_pairs
from nmt.system.errors import UserError
for dataset in ("wmt/wmt14", "wmt/wmt16"):
    for offline in ("0", "1", "yes"):
        os.environ["HF_HUB_OFFLINE"] = offline
        asked.clear()
        corpus = CorpusConfig(dataset=dataset, subset="de-en", split="train")
        try:
            found = list(read_pairs(corpus, DataConfig()))
        except UserError as error:
            found = str(error)
        print(json.dumps([dataset, offline, found, len(asked)]))
"""


def test_a_local_copy_and_an_offline_run_touch_no_network_and_no_hub_is_one_message(
    hub: Path,
) -> None:
    environment = {
        **os.environ,
        "HF_HOME": str(hub / "cache"),
        "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        cwd=hub,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == 6
    for dataset, offline, found, n_asked in outcomes:
        # asked once, and once by huggingface_hub for itself; `datasets` would ask for 23 seconds
        assert n_asked <= 2 * int(dataset == "wmt/wmt16" and offline == "0")
        if dataset == "wmt/wmt14":
            assert [Pair(*pair) for pair in found] == PAIRS
            continue
        why = "Hugging Face cannot be reached" if offline == "0" else "HF_HUB_OFFLINE is set"
        assert re.fullmatch(
            rf"dataset wmt/wmt16: {why}, and not all of it is in the local cache; "
            r"give local files instead, data\.train=\[\{src: FILE, tgt: FILE\}\], or parquet files .*"
            r"FOLDER/de-en/train-00000-of-00001\.parquet, as dataset: FOLDER",
            found,
        )


@fixture
def test_set(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """The folder where sacreBLEU keeps wmt14/full, here, and no way to download it."""
    from sacrebleu.dataset import DATASETS

    known = DATASETS["wmt14/full"]
    monkeypatch.setattr(known, "_outdir", str(tmp_path))
    monkeypatch.setattr(known, "_rawdir", str(tmp_path / "raw"))
    monkeypatch.setattr(known, "data", ["http://127.0.0.1:9/test-full.tgz"])
    return tmp_path


def test_sacrebleu_without_network_is_one_message_each_time(test_set: Path) -> None:
    for _ in range(2):  # the first attempt leaves folders and a lock behind
        message = complaint(CorpusConfig(sacrebleu="wmt14/full"), test_set)
        assert (
            message.startswith("sacrebleu: wmt14/full cannot be downloaded (")
            and "give local files instead" in message
        )
    (test_set / "raw" / "wmt14_full.test-full.tgz").write_bytes(b"half a download")
    assert "is incomplete, remove it and try again" in complaint(
        CorpusConfig(sacrebleu="wmt14/full"), test_set
    )


# ---- demo and names ---------------------------------------------------------------------------------------------


@mark.parametrize("tgt", ["./x.en", "hard.de", "soft.de"])
def test_one_file_is_not_two_sides(tgt: str, tmp_path: Path) -> None:
    """A model that learned to copy would be the first to say so."""
    (tmp_path / "x.en").write_text("one dog\n")
    os.link(tmp_path / "x.en", tmp_path / "hard.de")
    (tmp_path / "soft.de").symlink_to("x.en")
    complaint = CorpusConfig(src="x.en", tgt=tgt).check()
    if tgt == "./x.en":
        assert complaint == "src and tgt are both 'x.en'; give two different files"
    else:
        with raises(UserError, match=f"{tgt}: is the same file as .*x.en; give two"):
            find_local_files(CorpusConfig(src="x.en", tgt=tgt), DataConfig(root=str(tmp_path)))


@mark.parametrize(
    "encode, message",
    [
        (lambda text: text.encode("utf-16"), "x.en:1: is UTF-16 or UTF-32; convert it"),
        (lambda text: gzip.compress(text.encode()), r"x.en:1:\d: byte .* is not valid UTF-8"),
    ],
)
def test_another_encoding_is_named_before_its_number_of_lines(
    encode: Callable[[str], bytes], message: str, tmp_path: Path
) -> None:
    (tmp_path / "x.en").write_bytes(encode("one dog\n" * 10))
    (tmp_path / "x.de").write_text("ein Hund\n" * 10)
    with raises(UserError, match=message):
        read(CorpusConfig(src="x.en", tgt="x.de"), tmp_path)


def test_the_demo_has_both_directions(tmp_path: Path) -> None:
    forth, back = (
        read(CorpusConfig(demo="test"), tmp_path),
        read(CorpusConfig(demo="test"), tmp_path, "de", "en"),
    )
    assert (
        forth == [tuple(pair) for pair in demo.generate_pairs("test")] == [(t, s) for s, t in back]
    )
    assert "the demo corpus is English-German" in complaint(
        CorpusConfig(demo="test"), tmp_path, "en", "fr"
    )
