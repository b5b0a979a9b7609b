"""Files that a stranger, a crash or a careless program wrote, by the thousand: each reader returns a
value or raises one UserError, a printable line that names the file.

It raises nothing else, does not hang, swell or crash (fuzzing.py). Some hundred cases of each reader
in `make test`, a million in all in `make soak`; they are the same on every machine. What was found
stands below as a case of its own.
"""

import io
import json
import re
import shutil
import xml.etree.ElementTree
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from support.fuzzing import (
    TEXTS,
    Target,
    Tree,
    dump_json,
    find_fault,
    hunt,
    mutate_often,
    strange_value,
    vary_bytes,
    vary_json,
    vary_lines,
    vary_safetensors,
    vary_yaml,
)
from support.packing import pack, pack_archive, zip_members
from support.prepared_toy import prepare_toy
from support.soaking import IS_SOAK
from support.untrained import make_checkpoint, make_vocab

from nmt.average.select import read_validations
from nmt.checkpoint import TrainState, open_tensors, read_origin
from nmt.config import (
    CorpusConfig,
    DataConfig,
    OptimizerConfig,
    RunConfig,
    format_config,
    load_config,
    load_recorded_config,
    to_plain_values,
)
from nmt.corpus.inspection import format_samples
from nmt.corpus.ledger import format_ledger, read_ledger
from nmt.corpus.reader import read_blocks
from nmt.data.bpe_dropout import MergeTable
from nmt.data.store import Side, SideWriter, open_store
from nmt.data.vocab import Vocab
from nmt.evaluate.results import read_results
from nmt.extras.report.facts import RunFacts
from nmt.extras.report.page import render_page
from nmt.system.errors import UserError
from nmt.system.files import verify
from nmt.system.run_folder import RunFolder
from nmt.system.strict_yaml import parse_yaml
from nmt.train.events import read_events
from nmt.train.on_track import LearningCheck

# Cases in `make soak`, in proportion to the speed of the reader.
SOAK_CASES = {
    "yaml": 150_000,
    "config": 15_000,
    "manifest": 150_000,
    "tensors": 40_000,
    "state": 120_000,
    "tsv": 80_000,
    "jsonl": 80_000,
    "tmx": 40_000,
    "parquet": 40_000,
    "packed": 60_000,
    "store": 50_000,
    "results": 60_000,
    "metrics": 40_000,
    "ledger": 40_000,
    "vocabulary": 40_000,
}
QUICK_CASES = 300


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared store and a checkpoint."""
    folder = tmp_path_factory.mktemp("seeds")
    prepare_toy(folder)
    make_checkpoint(folder / "checkpoint", make_vocab(folder))
    return folder


def write(path: Path, data: bytes) -> Path:
    path.unlink(missing_ok=True)  # some file systems are slow to replace the content of a file
    path.write_bytes(data)
    return path


def seal_quickly(folder: Path) -> None:
    """As `nmt.system.files.seal`, without waiting for the disk."""
    entries = {}
    for path in folder.iterdir():
        if path.name != "manifest.json":
            data = path.read_bytes()
            entries[path.name] = {"sha256": sha256(data).hexdigest(), "size": len(data)}
    write(folder / "manifest.json", json.dumps(entries).encode())


# ---- targets ----------------------------------------------------------------------------------------------------


def read_yaml(folder: Path, data: bytes) -> None:
    parse_yaml(data.decode(errors="surrogateescape"), str(folder))


def read_config(folder: Path, data: bytes) -> None:
    """What is accepted is written and read again without a change."""
    config = load_config(str(write(folder / "run.yaml", data)))
    again = load_recorded_config(write(folder / "again.yaml", format_config(config).encode()))
    assert config == again


def list_configs() -> list[Tree]:
    plain = to_plain_values(RunConfig())
    small = {"model": plain["model"], "training": {"steps": 100, "src_tokens": 25_000}}
    corpora = [{"src": "a.en", "tgt": "a.de"}, {"file": "b.tsv", "weight": 2}, {"demo": "train"}]
    data = {"data": {"root": ".", "train": corpora, "valid": {"sacrebleu": "wmt13"}}}
    return [plain, small, data, {"extends": "demo.yaml", "optimizer": {"scale": 1e-9}}, {}]


def read_sealed(folder: Path, data: bytes) -> None:
    write(folder / "manifest.json", data)
    verify(folder)


def read_tensors(folder: Path, data: bytes) -> None:
    with open_tensors(write(folder / "model.safetensors", data), "numpy") as file:
        for name in file.keys():  # noqa: SIM118, it is no dict
            tensor = file.get_slice(name)
            tensor.get_shape()
            tensor.get_dtype()


def read_state(folder: Path, data: bytes) -> None:
    write(folder / "state.json", data)
    read_origin(folder)


# ---- corpora ----------------------------------------------------------------------------------------------------


def read_corpus(corpus: CorpusConfig) -> Callable[[Path, bytes], None]:
    """A reader that drops the bad lines; one that stops at the first says the same about it."""

    def read(folder: Path, data: bytes) -> None:
        write(folder / str(corpus.archive or corpus.file or corpus.src), data)
        bad = []
        for block in read_blocks(corpus, DataConfig(root=str(folder), on_bad_line="skip"), 3):
            assert len(block.src) == len(block.tgt)
            assert not any("\n" in text for text in (*block.src, *block.tgt))
            bad += block.bad
        refusal = None
        try:
            for _ in read_blocks(corpus, DataConfig(root=str(folder)), 3):
                pass
        except UserError as error:
            refusal = str(error)
        assert refusal == (str(UserError(bad[0])) if bad else None)
        assert all(str(folder) in text for text in bad)

    return read


def make_tsv_line(rng: Random) -> bytes:
    cells = [rng.choice(["a dog", "ein Hund", *TEXTS]) for _ in range(rng.choice([2, 2, 2, 1, 3]))]
    return "\t".join(cells).encode("utf-8", "surrogatepass")


TMX = """<?xml version="1.0"?><tmx>
<tu><tuv xml:lang="en"><seg>a &#228; &lt;<ph>x</ph></seg></tuv>
<tuv xml:lang="DE-at"><seg>b <hi>y</hi><!-- c --></seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>text</seg></tuv><tuv xml:lang="fr"><seg/></tuv></tu>
<tu><tuv xml:lang="de"><seg>zwei\nZeilen</seg></tuv><tuv xml:lang="en"><seg>two</seg></tuv></tu>
</tmx>"""
ENTITY = '<!DOCTYPE t [<!ENTITY b "ha">]>'
TMX_FILES = [TMX.encode(), TMX.encode("utf-16"), TMX.replace("<tmx>", f"{ENTITY}<tmx>&b;").encode()]


def make_jsonl_line(rng: Random) -> bytes:
    row = {"en": "a dog", "de": "ein Hund"}
    return vary_json([row, {"src": "a", "tgt": "b", "n": 1}, {"translation": row}])(rng)


def list_parquet_files() -> list[bytes]:
    texts = ["a dog", "", "große", None, "x" * 300]
    types: list[dict[str, Any]] = [
        {"en": texts, "de": pa.array(texts).dictionary_encode()},
        {"translation": [{"en": "a", "de": "b"}, None, {"en": None, "de": "c"}]},
        {"en": [1, 2, None], "de": [b"\xff", b"a", None], "other": [1.5, None, 2.5]},
        {"src": [["a"], [], None], "tgt": [{"x": 1}, None, {"x": 2}]},
    ]
    files = []
    for columns in types:
        for compression in ("none", "snappy", "zstd"):
            file = io.BytesIO()
            parquet.write_table(pa.table(columns), file, compression=compression)
            files.append(file.getvalue())
    return files


PACKINGS = [".gz", ".xz", ".zst", ".bz2", ".tgz", ".tar", ".zip"]
ARCHIVES = PACKINGS[4:]


def list_packed_files() -> list[bytes]:
    """The first byte says how it is packed."""
    first, more = b"a dog\n", b"\xff\n\n"
    content = first + more
    members = {
        "./x.en": content,
        "../x.en": content,
        "\x1b[31m": content,
        "x.de": b"ein Hund\n" * 3,
    }
    files = []
    for i, packing in enumerate(PACKINGS):
        is_archive = packing in ARCHIVES
        packed = (
            pack_archive(members, packing)
            if is_archive
            else pack(first, packing) + pack(more, packing)
        )
        files.append(bytes([i]) + packed)
    return files


def read_packed(folder: Path, data: bytes) -> None:
    kind, content = int.from_bytes(data[:1]), data[1:]  # nothing may be left of a file
    packing = PACKINGS[kind % len(PACKINGS)]
    if packing in ARCHIVES:
        corpus = CorpusConfig(archive=f"x{packing}", src="x.en", tgt="x.de")
    else:
        corpus = CorpusConfig(src=f"x.en{packing}", tgt="x.de")
    read_corpus(corpus)(folder, content)


# ---- stores -----------------------------------------------------------------------------------------------------


def make_array(rng: Random) -> bytes:
    """A .npy file, often with another header."""
    array: Any = np.array([0, 2, 2, 5], rng.choice(["int64", "int64", "uint16", "O", "U3", "f8"]))
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    data = file.getvalue()
    if rng.random() < 0.3:
        return mutate_often(data, rng)
    header: dict[str, Any] = {"descr": "<i8", "fortran_order": False, "shape": (4,)}
    if rng.random() < 0.7:
        header[rng.choice([*header, "more"])] = rng.choice([*STRANGE_SHAPES, strange_value(rng)])
    items = "".join(f"{key!r}: {value!r}, " for key, value in header.items())
    text = f"{{{items}}}{' ' * rng.randrange(20)}\n".encode("utf-8", "surrogatepass")
    if rng.random() < 0.3:
        text = mutate_often(text, rng)
    version = rng.choice([b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"])
    size = (
        len(text).to_bytes(2 if version[0] == 1 else 4, "little")
        if len(text) < 65_536
        else b"\xff\xff"
    )
    return b"\x93NUMPY" + version + size + text + data[-32:]


STRANGE_SHAPES: list[Any] = [(2**62,), (-1,), (4.0,), (2, 2), "|O", "<i9", [("a", "<i8")], "V8"]


def make_store(folder: Path) -> None:
    """Three pairs; the offsets of the source side are 0, 2, 2, 5."""
    store = folder / "store"
    store.mkdir()
    write(store / "vocab.model", b"a model")
    for side in ("src", "tgt"):
        with closing(SideWriter(store, "train", side)) as writer:
            writer.append(np.arange(5, dtype=np.uint16), np.array([2, 0, 3]))
    seal_quickly(store)
    shutil.copy(store / "manifest.json", folder)


def read_store(folder: Path, data: bytes) -> None:
    """The offsets of the source side, which the manifest describes as they are."""
    store = folder / "store"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["train.src.offsets.npy"]["size"] = len(data)
    write(store / "manifest.json", json.dumps(manifest).encode())
    write(store / "train.src.offsets.npy", data)
    opened = open_store(store, "train")
    assert len(opened.src.lengths) == len(opened) == 3


# ---- runs, ledgers and exports ------------------------------------------------------------------------------------


def read_scores(folder: Path, data: bytes) -> None:
    """What is read is a result that can be added again."""
    write(folder / "results.json", data)
    for result in read_results(folder):
        hash(result.checkpoint)
        assert result.subject == result.subject and result.with_scores_of(result)


def read_run_metrics(folder: Path, data: bytes) -> None:
    """A page that a browser and an XML parser can read; a run that is continued; --best."""
    run = RunFolder(folder)
    write(run.metrics, data)
    events, n_damaged = read_events(run.metrics)
    run_facts = RunFacts("a run", {}, events=tuple(events), n_damaged=n_damaged)
    page = re.sub(r"<script>.*?</script>", "", render_page([run_facts], None), flags=re.DOTALL)
    xml.etree.ElementTree.fromstring(page)
    side = Side(np.array([4, 5, 4], np.uint16), np.array([0, 1, 3]))
    LearningCheck(OptimizerConfig(), "post", side, events).check(1_000, 3.0)
    read_validations(run)


def make_metrics_line(rng: Random) -> bytes:
    return vary_json(METRICS)(rng) if rng.random() < 0.5 else dump_json(rng.choice(METRICS), rng)


RESULTS: list[Tree] = [
    {
        "when": "2026-11-21T20:00:00Z",
        "checkpoint": "average",
        "step": 100,
        "averaged": ["step-0000090", "step-0000100"],
        "weights_sha256": "a" * 64,
        "vocab_sha256": "b" * 64,
        "test_set": {"name": "newstest2014", "lines": 3003, "src_sha256": "", "ref_sha256": ""},
        "pair": "en-de",
        "hypotheses_sha256": "e" * 64,
        "decoding": {"beam": 4, "penalty": "gnmt", "length_penalty": 0.6, "top_k": None},
        "engine": "nmt",
        "scores": [
            {"name": "BLEU", "value": 27.3, "signature": "tok:13a", "low": 26.9, "high": 28}
        ],
        "versions": {"nmt": "0.1.0"},
        "seconds": 12.5,
    }
]
METRICS: list[Tree] = [
    {
        "kind": "train",
        "step": 5,
        "loss": 4.5,
        "nll": 4.25,
        "tgt_tokens_per_s": 900,
        "elapsed_s": 1.5,
    },
    {
        "kind": "train",
        "step": 10,
        "loss": 3.5,
        "nll": 3.25,
        "tgt_tokens_per_s": 800,
        "elapsed_s": 3,
    },
    {"kind": "valid", "step": 10, "nll": 3.0, "bleu": 12.5, "signature": "tok:13a", "elapsed_s": 4},
    {"kind": "warning", "step": 12, "problem": "stalled", "unigram_nll": 4.0, "message": "stalled"},
    {"kind": "skipped", "step": 13},
]


def read_store_ledger(folder: Path, data: bytes) -> None:
    """What nmt-prepare --inspect shows of it."""
    write(folder / "ledger.json", data)
    ledger = read_ledger(folder)
    format_ledger(ledger)
    format_samples(ledger)
    json.dumps(ledger.to_plain())


def read_vocabulary(folder: Path, data: bytes) -> None:
    vocab = Vocab.load(write(folder / "vocab.model", data))
    MergeTable(data)
    ids = vocab.encode(["a red dog", "\u2581 \0 \U0001f469", ""])
    vocab.decode(ids)
    vocab.pieces(range(vocab.size))


# ---- the hunt ---------------------------------------------------------------------------------------------------


def list_targets(seeds: Path) -> dict[str, Target]:
    model = (seeds / "checkpoint" / "model.safetensors").read_bytes()
    entry = {"sha256": sha256(b"abc").hexdigest(), "size": 3}
    manifest = {"a": entry, "b": entry}
    state = json.loads((seeds / "checkpoint" / "state.json").read_bytes())
    vocabulary = (seeds / "checkpoint" / "vocab.model").read_bytes()
    ledger = json.loads((seeds / "store" / "ledger.json").read_bytes())
    ledger |= {"command": "nmt-prepare", "versions": {"nmt": "0.1.0"}}  # the same everywhere

    def write_members(folder: Path) -> None:
        for name in manifest:
            write(folder / name, b"abc")

    def write_target_side(folder: Path) -> None:
        write(folder / "x.de", b"ein Hund\n" * 3)

    targets = [
        Target("yaml", vary_yaml(list_configs()[1:]), read_yaml),
        Target("config", vary_yaml(list_configs()), read_config),
        Target("manifest", vary_json([manifest, {}]), read_sealed, write_members),
        Target("tensors", vary_safetensors([model]), read_tensors),
        Target("state", vary_json([state, asdict(TrainState())]), read_state),
        Target("tsv", vary_lines(make_tsv_line), read_corpus(CorpusConfig(file="x.tsv"))),
        Target("jsonl", vary_lines(make_jsonl_line), read_corpus(CorpusConfig(file="x.jsonl"))),
        Target("tmx", vary_bytes(TMX_FILES), read_corpus(CorpusConfig(file="x.tmx"))),
        Target(
            "parquet",
            vary_bytes(list_parquet_files()),
            read_corpus(CorpusConfig(file="x.parquet")),
        ),
        Target("packed", vary_bytes(list_packed_files()), read_packed, write_target_side),
        Target("store", make_array, read_store, make_store),
        Target("results", vary_json([RESULTS, []]), read_scores),
        Target("metrics", vary_lines(make_metrics_line), read_run_metrics),
        Target("ledger", vary_json([ledger]), read_store_ledger),
        Target("vocabulary", vary_bytes([vocabulary]), read_vocabulary),
    ]
    return {target.name: target for target in targets}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SOAK_CASES)
def test_a_reader_returns_or_refuses(name: str, seeds: Path, tmp_path: Path) -> None:
    target = list_targets(seeds)[name]
    n_cases = SOAK_CASES[name] if IS_SOAK else min(QUICK_CASES, SOAK_CASES[name] // 50)
    report = hunt(target, range(n_cases), tmp_path / "here")
    speed = report.n_cases / report.seconds
    print(f"\n{name}: {report.n_cases:,} cases, {speed:,.0f}/s, {report.n_read:,} were read")
    assert not report.finds, "\n".join(report.finds)
    assert report.n_cases == n_cases
    assert report.n_read > n_cases // 200  # what is made is not hopeless as a rule


# What the fuzzers found, as small as it could be made. Each was a traceback, unless it says what.
FINDS = {
    "array: header that only a tokenizer could read": (
        "store",
        b"\x93NUMPY\x01\x00\x0a\x00{'descr': (",
    ),
    "parquet: control character in the message": ("parquet", b"PAR1\x1f\x01\0\0\0PAR1"),
    "zip: member without a name": ("packed", b"\x06" + zip_members({"": b"a\n"})),
    "zip: name not UTF-8": (
        "packed",
        b"\x06" + zip_members({"\u00e4": b"a\n"}).replace(b"\xc3\xa4", b"\xe4\xe4"),
    ),
    "config: long key, of which the line was not named": ("config", b"x" * 200 + b": 1"),
    "config: file to extend, of which the line was not named": ("config", b"extends: none.yaml"),
    "config: key of 90 kB, all of which was printed": ("config", b"x" * 90_000 + b": 1"),
}


@pytest.mark.parametrize("what", FINDS)
def test_finds_are_refused(what: str, seeds: Path, tmp_path: Path) -> None:
    name, data = FINDS[what]
    target = list_targets(seeds)[name]
    target.prepare(tmp_path)
    assert find_fault(target, data, tmp_path) == ""
