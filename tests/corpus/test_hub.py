"""A hub that answers as the real one: its files come once, what is damaged does not stay, and each failure is
one true line.
"""

import io
import json
import re
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
from huggingface_hub import constants
from pyarrow import parquet
from pytest import MonkeyPatch, fixture, mark, raises
from support.capture import Capture, read_stderr
from support.fake_hub import COMMIT, FakeHub, run_hub, use_hub
from support.text_lines import read_text_lines
from support.toy_corpus import write_toy_corpus
from support.waiting import HANG_S
from support.warm_process import finish, start_command

from nmt.config import CorpusConfig, DataConfig, VocabConfig
from nmt.config_files import load_config
from nmt.corpus.hub import fetch_snapshot
from nmt.corpus.ledger import read_ledger
from nmt.corpus.prepare import prepare
from nmt.corpus.reader import fetch_files, read_pairs
from nmt.system.errors import UserError
from nmt.system.files import read_json

SHARDS = [f"de-en/train-0000{i}-of-00003.parquet" for i in range(3)]
TRAIN = CorpusConfig(dataset="wmt/wmt14", subset="de-en", revision=COMMIT)
CARD = """---
configs:
- config_name: cs-en
  data_files:
  - split: train
    path: cs-en/train-*
- config_name: de-en
  data_files:
  - split: train
    path: de-en/train-*
  - split: validation
    path: de-en/validation-*
---
"""


def make_shard(first: int, n: int) -> bytes:
    rows = [
        {"de": f"Satz {i} {i * i}", "en": f"sentence {i} {i * i}"} for i in range(first, first + n)
    ]
    out = io.BytesIO()
    parquet.write_table(pa.table({"translation": rows}), out, compression="none")
    return out.getvalue()


@fixture(scope="module")
def dataset() -> dict[str, bytes]:
    """wmt/wmt14 in small: other subsets, obsolete files, and three shards of more than 200 kB."""
    files = {name: make_shard(4000 * i, 4000) for i, name in enumerate(SHARDS)}
    files["cs-en/train-00000-of-00001.parquet"] = make_shard(0, 10)
    files["de-en/validation-00000-of-00001.parquet"] = make_shard(50_000, 10)
    return files | {
        "README.md": CARD.encode(),
        "dataset_infos.json": b"{}",
        ".gitattributes": b"x\n",
    }


@fixture
def hub(dataset: dict[str, bytes], tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[FakeHub]:
    with run_hub("wmt/wmt14", dict(dataset)) as server:
        use_hub(monkeypatch, server.endpoint, tmp_path / "hub")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        fetch_snapshot.cache_clear()
        yield server
        fetch_snapshot.cache_clear()


def fetch(tmp_path: Path, corpus: CorpusConfig = TRAIN) -> list[Path]:
    fetch_snapshot.cache_clear()  # as a new process has none
    return fetch_files(corpus, DataConfig(root=str(tmp_path)))


def complaint(tmp_path: Path, corpus: CorpusConfig = TRAIN) -> str:
    with raises(UserError) as caught:
        fetch(tmp_path, corpus)
    return str(caught.value)


def blobs(tmp_path: Path) -> set[str]:
    folder = tmp_path / "hub" / "datasets--wmt--wmt14" / "blobs"
    return {path.name for path in folder.iterdir() if len(path.name) != 40}


def test_the_files_of_a_split_are_fetched_once_and_read_in_order(
    hub: FakeHub, tmp_path: Path, capfd: Capture
) -> None:
    data = DataConfig(root=str(tmp_path))
    size = sum(len(hub.files[name]) for name in SHARDS)
    assert [pair.tgt for pair in read_pairs(TRAIN, data)] == [
        f"Satz {i} {i * i}" for i in range(12000)
    ]
    assert hub.served == {name: len(hub.files[name]) for name in SHARDS}
    assert set(hub.tokens) == {None}  # a token is for the hub only
    assert blobs(tmp_path) == {hub.digest(name) for name in SHARDS}
    assert read_stderr(capfd) == (f"dataset wmt/wmt14 de-en train: downloading {size:,} bytes\n")
    assert [path.resolve().name for path in fetch(tmp_path)] == list(map(hub.digest, SHARDS))
    assert hub.served.total() == size


def test_small_files_that_git_keeps_are_read_too(hub: FakeHub, tmp_path: Path) -> None:
    hub.files.clear()
    hub.files["data/train.jsonl"] = b'{"en": "one dog", "de": "ein Hund"}\n'
    corpus = CorpusConfig(dataset="wmt/wmt14")
    assert [*read_pairs(corpus, DataConfig(root=str(tmp_path)))] == [("one dog", "ein Hund")]


def test_a_hub_that_fails_is_one_line_and_what_came_is_kept(hub: FakeHub, tmp_path: Path) -> None:
    hub.refused.add(SHARDS[1])
    message = complaint(tmp_path)
    assert (
        message.startswith("dataset wmt/wmt14 de-en train: Server error '500")
        and "\n" not in message
    )
    hub.refused.clear()
    hub.served.clear()
    fetch(tmp_path)
    assert hub.served == {name: len(hub.files[name]) for name in SHARDS[1:]}


def test_a_damaged_shard_is_named_and_does_not_stay(hub: FakeHub, tmp_path: Path) -> None:
    hub.damaged.add(SHARDS[2])
    message = complaint(tmp_path)
    told = rf"/{SHARDS[2]}: was damaged \(its sha256 was not {hub.digest(SHARDS[2])}\) and is removed; run the same"
    assert re.search(told, message)
    assert blobs(tmp_path) == {hub.digest(name) for name in SHARDS[:2]}
    hub.damaged.clear()
    hub.served.clear()
    fetch(tmp_path)
    assert hub.served == {SHARDS[2]: len(hub.files[SHARDS[2]])}


def test_a_file_that_was_damaged_in_the_cache_is_fetched_again(
    hub: FakeHub, tmp_path: Path
) -> None:
    path = fetch(tmp_path)[1]
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\0" + content[101:])
    assert f"{path}: was damaged" in complaint(tmp_path)
    assert fetch(tmp_path)[1].read_bytes() == content


def test_a_store_that_would_not_fit_is_refused_before_the_work(
    hub: FakeHub, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    size = sum(len(hub.files[name]) for name in SHARDS)
    data = DataConfig(root=str(tmp_path), store=str(tmp_path / "store"), train=(TRAIN,))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 2 * size}))
    with raises(UserError, match=rf"store: not enough disk space: about {6 * size:,} bytes are"):
        prepare(data, VocabConfig(), 1)
    assert not (tmp_path / "store").exists()


@mark.parametrize(
    "changed, expected",
    [
        (
            {"revision": "v2"},
            "dataset wmt/wmt14: the hub has no revision 'v2' of it; give one of its commits",
        ),
        (
            {"dataset": "wmt/wmt41"},
            "dataset wmt/wmt41: the hub has no such dataset, or its owner restricts ",
        ),
        (
            {"subset": "fr-en"},
            "dataset wmt/wmt14 fr-en train: has no such subset; give subset: cs-en or de-en",
        ),
        (
            {"split": "dev"},
            "dataset wmt/wmt14 de-en dev: has no such split; give split: train or validation",
        ),
    ],
)
def test_what_the_hub_does_not_have_is_named(
    changed: dict[str, str], expected: str, hub: FakeHub, tmp_path: Path
) -> None:
    values = {"dataset": "wmt/wmt14", "subset": "de-en", "revision": COMMIT} | changed
    assert expected in complaint(tmp_path, CorpusConfig(**values))  # type: ignore[arg-type]
    assert not hub.served


@mark.parametrize("revision", [None, "main", COMMIT])
def test_without_the_hub_the_cache_is_read(
    revision: str | None, hub: FakeHub, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    corpus = CorpusConfig(dataset="wmt/wmt14", subset="de-en", revision=revision)
    paths = fetch(tmp_path, corpus)
    dev = CorpusConfig(dataset="wmt/wmt14", subset="de-en", revision=revision, split="validation")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    hub.asked.clear()
    assert fetch(tmp_path, corpus) == paths
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(tmp_path, corpus) == paths
    assert "HF_HUB_OFFLINE is set, and not all of it is in" in complaint(tmp_path, dev)
    assert not hub.asked


def test_what_another_program_left_in_the_cache_is_read_without_the_hub(
    hub: FakeHub, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """`datasets` keeps no list of all files, and `hf download --include` may leave the card out."""
    names = [path.name for path in fetch(tmp_path)]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for left_out in ("trees", "README.md"):
        cache = tmp_path / f"without {left_out}"
        ignored = shutil.ignore_patterns("trees", left_out)
        shutil.copytree(tmp_path / "hub", cache, symlinks=True, ignore=ignored)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        paths = fetch(tmp_path)
        assert [path.name for path in paths] == names
        assert all(path.is_relative_to(cache) for path in paths)


def test_without_a_card_a_subset_is_a_folder(hub: FakeHub, tmp_path: Path) -> None:
    del hub.files["README.md"]
    assert [path.parent.name for path in fetch(tmp_path)] == ["de-en"] * 3
    assert not any(name.startswith("cs-en") for name in hub.served)


def test_a_dataset_that_lacks_a_file_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    del hub.files[SHARDS[1]]
    assert "/de-en/train-*-of-00003.parquet: 1 of 3 files are missing" in complaint(tmp_path)


PREPARE = """
data:
  root: {root}
  store: {root}/store
  train: [{{dataset: wmt/wmt14, subset: de-en, revision: {commit}}}]
  valid: {{dataset: wmt/wmt14, subset: de-en, revision: {commit}, split: validation}}
vocab: {{size: 200}}
"""


def test_a_store_from_the_hub_records_the_sha256_that_the_hub_names(
    dataset: dict[str, bytes], tmp_path: Path
) -> None:
    """Also if the first command was killed in the middle of a file, of which nothing is taken for whole."""
    (tmp_path / "c.yaml").write_text(PREPARE.format(root=tmp_path, commit=COMMIT))
    argv = ["prepare", "--config", str(tmp_path / "c.yaml")]
    with run_hub("wmt/wmt14", dataset) as server:
        hub = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        start = partial(start_command, argv, (0, 1, 2), environment=hub)
        server.stalling.add(SHARDS[1])
        killed = start()
        assert server.has_stalled.wait(HANG_S)
        finish(killed, signal.SIGKILL)
        assert server.digest(SHARDS[0]) in blobs(tmp_path)
        assert server.digest(SHARDS[1]) not in blobs(tmp_path)
        server.stalling.clear()
        server.served.clear()

        assert finish(start()) == 0
        assert server.served == {name: len(dataset[name]) for name in SHARDS[1:]}
        ledger = read_json(tmp_path / "store" / "ledger.json")
        found = {file["name"]: file["sha256"] for file in ledger["corpora"][0]["files"]}
        address = f"hf://datasets/wmt/wmt14@{COMMIT}"
        assert found == {f"{address}/{name}": server.digest(name) for name in SHARDS}
        assert [file["lines"] for file in ledger["corpora"][0]["files"]] == [4000, 4000, 4000]
    assert finish(start()) == 0  # the store is there, so the hub need not be


def test_the_shipped_config_of_a_dataset_makes_the_store_of_the_same_text(tmp_path: Path) -> None:
    """multi30k-hub.yaml, with the dataset as a folder in the hub's layout, and multi30k.yaml."""
    corpus = write_toy_corpus(tmp_path)
    layout = corpus / "bentrevett" / "multi30k"
    layout.mkdir(parents=True)
    for split, name in (("train", "train"), ("valid", "val"), ("test", "test")):
        sides = [read_text_lines(corpus / f"{split}.{side}") for side in ("en", "de")]
        rows = [json.dumps({"en": en, "de": de}) + "\n" for en, de in zip(*sides, strict=True)]
        (layout / f"{name}-0.jsonl").write_text(rows[0])
        (layout / f"{name}-1.jsonl").write_text("".join(rows[1:]))
    stores = []
    for name in ("multi30k.yaml", "multi30k-hub.yaml"):
        store = tmp_path / f"store-{name}"
        config = load_config(name, [f"data.root={corpus}", f"data.store={store}", "vocab.size=80"])
        prepare(config.data, config.vocab, config.seed)
        files = [*store.glob("*.npy"), *store.glob("*.txt"), store / "vocab.model"]
        stores.append({path.name: path.read_bytes() for path in files})
    assert stores[0] == stores[1] and len(stores[0]) == 11
    account = read_ledger(store).corpora[0]
    assert [file.lines for file in account.files] == [None, None]  # not those of both together
