"""Files that a stranger, a crash or a careless program wrote, some of them known, others drawn by the
thousand: each reader returns a value or raises one UserError, a printable line that names the file.

It raises nothing else, does not hang, swell or crash (support/hunting.py), and executes nothing. A
corpus that is read nevertheless has pairs that belong together. A hundred cases are drawn for each
reader in `make test`, a million in all in `make soak`; they are the same on every machine.
"""

import io
import json
import pickle
import re
import shutil
import xml.etree.ElementTree
from collections.abc import Callable
from contextlib import closing, redirect_stderr
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from pytest import TempPathFactory, fixture, mark
from support.crafted_bpe import craft_readable, craft_refused, draw_damaged_model
from support.crafted_checkpoints import (
    NEWEST,
    OLDER,
    find_canary,
    list_cases,
    pickled,
    saved_by_torch,
    write_run,
)
from support.damages import damage_often
from support.fuzzing import (
    TEXTS,
    Tree,
    dump_json,
    strange_value,
    vary_bytes,
    vary_json,
    vary_lines,
    vary_safetensors,
    vary_yaml,
)
from support.hunting import (
    MAX_MESSAGE,
    READ,
    REFUSED,
    Case,
    Change,
    Draw,
    Target,
    hunt_drawn,
    hunt_known,
)
from support.numbered_pairs import FORMS, check_pairs, draw_files, read_corpus
from support.once import make_once
from support.packing import pack, zip_members
from support.prepared_toy import prepare_toy
from support.processor import CPU
from support.rings import amount
from support.untrained import make_checkpoint, make_vocab

from nmt.average.select import read_validations
from nmt.checkpoint.checkpoint import TrainState, read_origin
from nmt.checkpoint.run_checkpoints import find_newest, open_checkpoint
from nmt.checkpoint.tensors import open_tensors
from nmt.config import CorpusConfig, DecodingConfig, OptimizerConfig, RunConfig
from nmt.config_files import format_config, load_config, load_recorded_config, to_plain_values
from nmt.corpus.encoder import CorpusEncoder
from nmt.corpus.ledger import format_ledger, read_ledger
from nmt.data.bpe_dropout import MergeTable
from nmt.data.store import Side, SideWriter, open_store
from nmt.data.vocab import Vocab
from nmt.evaluate.results import read_results
from nmt.extras.inspection import format_samples
from nmt.extras.report.facts import RunFacts
from nmt.extras.report.page import render_page
from nmt.system.errors import UserError
from nmt.system.files import seal, verify
from nmt.system.run_folder import (
    LEDGER_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    STATE_FILE,
    VOCAB_FILE,
    RunFolder,
)
from nmt.system.strict_yaml import parse_yaml
from nmt.train.events import read_events
from nmt.train.on_track import LearningCheck
from nmt.translate.translator import make_translator

PAIRS = {f"pairs {form}": form for form in FORMS}
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
    "store": 50_000,
    "results": 60_000,
    "metrics": 40_000,
    "ledger": 40_000,
    "vocabulary": 50_000,
    "checkpoint": 0,
}
SOAK_CASES |= dict.fromkeys(PAIRS, 4_000)
QUICK_CASES, QUICK_PAIRS = 100, 30
# The offsets of the source side of the store that a target reads.
OFFSETS = "store/train.src.offsets.npy"
ENTRY = {"sha256": sha256(b"abc").hexdigest(), "size": 3}  # of a manifest


def write(path: Path, data: bytes) -> Path:
    path.unlink(missing_ok=True)  # some file systems are slow to replace the content of a file
    path.write_bytes(data)
    return path


# ---- targets ----------------------------------------------------------------------------------------------------


def read_yaml(folder: Path) -> None:
    text = (folder / "run.yaml").read_bytes().decode(errors="surrogateescape")
    parse_yaml(text, str(folder))


def read_config(folder: Path) -> None:
    """What is accepted is written and read again without a change."""
    config = load_config(str(folder / "run.yaml"))
    again = load_recorded_config(write(folder / "again.yaml", format_config(config).encode()))
    assert config == again


def list_configs() -> list[Tree]:
    plain = to_plain_values(RunConfig())
    small = {"model": plain["model"], "training": {"steps": 100, "src_tokens": 25_000}}
    corpora = [{"src": "a.en", "tgt": "a.de"}, {"file": "b.tsv", "weight": 2}, {"demo": "train"}]
    data = {"data": {"root": ".", "train": corpora, "valid": {"sacrebleu": "wmt13"}}}
    return [plain, small, data, {"extends": "demo.yaml", "optimizer": {"scale": 1e-9}}, {}]


def read_tensors(folder: Path) -> None:
    with open_tensors(folder / "model.safetensors", "numpy") as file:
        for name in file.keys():  # noqa: SIM118, it is no dict
            tensor = file.get_slice(name)
            tensor.get_shape()
            tensor.get_dtype()


# ---- corpora ----------------------------------------------------------------------------------------------------


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


# ---- stores -----------------------------------------------------------------------------------------------------


def make_array(rng: Random) -> bytes:
    """A .npy file, often with another header."""
    array: Any = np.array([0, 2, 2, 5], rng.choice(["int64", "int64", "uint16", "O", "U3", "f8"]))
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    data = file.getvalue()
    if rng.random() < 0.3:
        return damage_often(data, rng)
    header: dict[str, Any] = {"descr": "<i8", "fortran_order": False, "shape": (4,)}
    if rng.random() < 0.7:
        header[rng.choice([*header, "more"])] = rng.choice([*STRANGE_SHAPES, strange_value(rng)])
    items = "".join(f"{key!r}: {value!r}, " for key, value in header.items())
    text = f"{{{items}}}{' ' * rng.randrange(20)}\n".encode("utf-8", "surrogatepass")
    if rng.random() < 0.3:
        text = damage_often(text, rng)
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
    seal(store)


def read_store(folder: Path) -> None:
    """The manifest describes the offsets of the source side as they are."""
    store = folder / "store"
    manifest = json.loads((store / "manifest.json").read_bytes())
    size = (store / "train.src.offsets.npy").stat().st_size
    manifest["train.src.offsets.npy"]["size"] = size
    write(store / "manifest.json", json.dumps(manifest).encode())
    opened = open_store(store, "train")
    assert len(opened.src.lengths) == len(opened) == 3


# ---- runs, ledgers and exports ------------------------------------------------------------------------------------


def read_scores(folder: Path) -> None:
    """What is read is a result that can be added again."""
    for result in read_results(folder):
        hash(result.checkpoint)
        assert result.subject == result.subject and result.with_scores_of(result)


def read_run_metrics(folder: Path) -> None:
    """A page that a browser and an XML parser can read; a run that is continued; --best."""
    run = RunFolder(folder)
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


def read_store_ledger(folder: Path) -> None:
    """What nmt-prepare --inspect shows of it."""
    ledger = read_ledger(folder)
    format_ledger(ledger)
    format_samples(ledger)
    json.dumps(ledger.to_plain())


# ---- checkpoints --------------------------------------------------------------------------------------------------

LINES = ["ab c abc", "", "a" * 2000, " \u2581a \u00bd \x01\0 x <s> <0x41>", "\U0001f469"]


def read_vocabulary(folder: Path) -> None:
    """What is refused has a remedy; all else encodes, decodes and merges."""
    try:
        vocab = Vocab.load(folder / VOCAB_FILE)
    except UserError as error:
        assert "; use " in str(error) or "expected a BPE model" in str(error)
        raise
    vocab.decode(vocab.encode(LINES))
    CorpusEncoder(vocab)([line.encode() for line in LINES])
    vocab.decode([[i] for i in range(vocab.size)])
    vocab.list_pieces()
    MergeTable(vocab.model)


def list_models() -> list[Case]:
    refused = [
        Case(name, put(VOCAB_FILE, model), REFUSED, VOCAB_FILE)
        for name, model in craft_refused().items()
    ]
    return refused + [
        Case(name, put(VOCAB_FILE, model), READ) for name, model in craft_readable().items()
    ]


def read_run(folder: Path) -> None:
    """Continue a run as nmt-train does, and open its newest checkpoint as nmt-translate does."""
    run = RunFolder(folder)
    newest = run.checkpoint(NEWEST)
    with redirect_stderr(io.StringIO()) as stderr:
        found = find_newest(run)  # it opens each checkpoint as nmt-translate does
    said = stderr.getvalue()
    assert found and not find_canary(newest).exists()
    if found.step == NEWEST:
        assert said == ""
        make_translator(open_checkpoint(newest), CPU, DecodingConfig())
        return
    begin, end = "warning: ", "; trying the previous checkpoint\n"
    assert found.step == OLDER
    assert said.startswith(f"{begin}{newest}") and said.endswith(end)
    complaint = said.removeprefix(begin).removesuffix(end)
    assert complaint.isprintable() and len(complaint) < MAX_MESSAGE  # as docs/security.md says
    raise UserError(complaint)


# ---- cases ------------------------------------------------------------------------------------------------------


def put(name: str, data: bytes) -> Change:
    """A case: the file has this content."""

    def change(folder: Path) -> None:
        write(folder / name, data)

    return change


def refuse(what: str, name: str, data: bytes) -> Case:
    return Case(what, put(name, data), REFUSED, name)


def draw_file(name: str, make: Callable[[Random], bytes]) -> Draw:
    def draw(rng: Random, folder: Path) -> None:
        write(folder / name, make(rng))

    return draw


def draw_model(seed: bytes) -> Draw:
    vary = vary_bytes([seed])

    def make(rng: Random) -> bytes:
        return vary(rng) if rng.random() < 0.7 else draw_damaged_model(rng)

    return draw_file(VOCAB_FILE, make)


def draw_corpus(form: str) -> Draw:
    def draw(rng: Random, folder: Path) -> None:
        for name, data in draw_files(form, rng).items():
            write(folder / name, data)

    return draw


def name_outside(folder: Path) -> None:
    """A manifest that describes a file outside the folder as it is."""
    write(folder.parent / "outside", b"abc")
    write(folder / MANIFEST_FILE, json.dumps({"../outside": ENTRY}).encode())


UMLAUT = zip_members({"\u00e4": b"a\n"})
# What the fuzzers found, as small as it could be made. Each was a traceback, unless it says what.
FINDS = {
    "config": [
        refuse("long key, of which the line was not named", "run.yaml", b"x" * 200 + b": 1"),
        refuse("parent, of which the line was not named", "run.yaml", b"extends: none.yaml"),
        refuse("key of 90 kB, all of which was printed", "run.yaml", b"x" * 90_000 + b": 1"),
    ],
    "manifest": [Case("leads out, which was never found", name_outside, REFUSED, MANIFEST_FILE)],
    "parquet": [
        refuse("control character in the message", "x.parquet", b"PAR1\x1f\x01\0\0\0PAR1"),
    ],
    "store": [
        refuse("header for a tokenizer", OFFSETS, b"\x93NUMPY\x01\x00\x0a\x00{'descr': ("),
    ],
    "pairs .tsv.gz": [
        refuse("end cut off, also never found", "x.tsv.gz", pack(b"a\tb\n" * 50_000, ".gz")[:-8]),
    ],
    "pairs .zip": [
        refuse("member without a name", "x.zip", zip_members({"": b"a\n"})),
        refuse("name not UTF-8", "x.zip", UMLAUT.replace(b"\xc3\xa4", b"\xe4\xe4")),
    ],
}


def list_known(name: str) -> list[Case]:
    """The known cases of a target."""
    if name == "vocabulary":
        return list_models()
    return list_cases() if name == "checkpoint" else FINDS.get(name, [])


# ---- the hunt ---------------------------------------------------------------------------------------------------


def list_targets(seeds: Path) -> dict[str, Target]:
    model = (seeds / "checkpoint" / MODEL_FILE).read_bytes()
    vocabulary = (seeds / "checkpoint" / VOCAB_FILE).read_bytes()
    state = json.loads((seeds / "checkpoint" / STATE_FILE).read_bytes())
    ledger = json.loads((seeds / "store" / LEDGER_FILE).read_bytes())
    ledger |= {"command": "nmt-prepare", "versions": {"nmt": "0.1.0"}}  # the same everywhere
    manifest = {"a": ENTRY, "b": ENTRY}

    def write_members(folder: Path) -> None:
        for name in manifest:
            write(folder / name, b"abc")

    def copy_run(folder: Path) -> None:
        shutil.copytree(seeds / "run", folder, dirs_exist_ok=True)

    def read_table(suffix: str) -> Callable[[Path], object]:
        return partial(read_corpus, CorpusConfig(file=f"x{suffix}"), size=3)

    manifests, states = [manifest, {}], [state, asdict(TrainState())]
    configs, tables = list_configs(), list_parquet_files()
    metrics = vary_lines(make_metrics_line)
    targets = [
        Target("yaml", read_yaml, draw_file("run.yaml", vary_yaml(configs[1:]))),
        Target("config", read_config, draw_file("run.yaml", vary_yaml(configs))),
        Target("manifest", verify, draw_file(MANIFEST_FILE, vary_json(manifests)), write_members),
        Target("tensors", read_tensors, draw_file(MODEL_FILE, vary_safetensors([model]))),
        Target("state", read_origin, draw_file(STATE_FILE, vary_json(states))),
        Target("tsv", read_table(".tsv"), draw_file("x.tsv", vary_lines(make_tsv_line))),
        Target("jsonl", read_table(".jsonl"), draw_file("x.jsonl", vary_lines(make_jsonl_line))),
        Target("tmx", read_table(".tmx"), draw_file("x.tmx", vary_bytes(TMX_FILES))),
        Target("parquet", read_table(".parquet"), draw_file("x.parquet", vary_bytes(tables))),
        Target("store", read_store, draw_file(OFFSETS, make_array), make_store),
        Target("results", read_scores, draw_file("results.json", vary_json([RESULTS, []]))),
        Target("metrics", read_run_metrics, draw_file("metrics.jsonl", metrics)),
        Target("ledger", read_store_ledger, draw_file(LEDGER_FILE, vary_json([ledger]))),
        Target("vocabulary", read_vocabulary, draw_model(vocabulary)),
        Target("checkpoint", read_run, None, copy_run, address_space_mb=100_000),
    ]
    targets += [
        Target(name, partial(check_pairs, form), draw_corpus(form)) for name, form in PAIRS.items()
    ]
    return {target.name: target for target in targets}


def make_seeds(folder: Path) -> None:
    """A prepared store, a checkpoint and a run."""
    prepare_toy(folder)
    make_checkpoint(folder / "checkpoint", make_vocab(folder))
    write_run(folder / "run")


@fixture(scope="module")
def targets(tmp_path_factory: TempPathFactory) -> dict[str, Target]:
    return list_targets(make_once(tmp_path_factory, "seeds", make_seeds))


@mark.timeout(3600)
@mark.parametrize("name", SOAK_CASES)
def test_a_reader_returns_or_refuses(name: str, targets: dict[str, Target], tmp_path: Path) -> None:
    target = targets[name]
    known = hunt_known(target, list_known(name), tmp_path / "known")
    assert not known.finds, "\n".join(known.finds)
    quick = QUICK_PAIRS if name in PAIRS else QUICK_CASES
    n_cases = amount(min(quick, SOAK_CASES[name]), SOAK_CASES[name])
    drawn = hunt_drawn(target, n_cases, tmp_path / "drawn")
    speed = drawn.n_cases / drawn.seconds
    print(f"\n{name}: {drawn.n_cases:,} cases, {speed:,.0f}/s, {drawn.n_read:,} were read")
    assert not drawn.finds, "\n".join(drawn.finds)
    assert drawn.n_cases == n_cases
    # What is made is not hopeless as a rule, and damage to pairs not harmless.
    assert target.draw is None or n_cases // 200 < drawn.n_read
    assert name not in PAIRS or drawn.n_read < n_cases


def test_the_payloads_would_have_worked(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "x"
    checkpoint.mkdir(parents=True)
    for attempt in (
        lambda: pickle.loads(pickled(checkpoint)),
        lambda: torch.load(io.BytesIO(saved_by_torch(checkpoint)), weights_only=False),
    ):
        attempt()
        find_canary(checkpoint).unlink()
