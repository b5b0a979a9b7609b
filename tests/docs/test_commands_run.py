"""Every command of README and docs/ is run: those of a page one after another, in a folder of their own, where a toy
run, a text or a config lies under each name that a command reads and none before it has written. `make test` takes
what is quick, `make soak` all. What is not run stands in not_run.txt, by a part of the line, with the reason.

Trainings are made small; nothing else of a command is changed.
"""

import contextlib
import gzip
import io
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from glob import glob
from pathlib import Path
from zlib import crc32

from pytest import MonkeyPatch, TempPathFactory, fixture, mark
from safetensors.torch import load_file, save_file
from support.in_process import succeed
from support.once import make_once
from support.rings import amount
from support.text_lines import join_lines, read_text_lines
from support.toy_corpus import sentences
from support.untrained import change_config
from test_blocks import BLOCKS, COMMANDS, PAGES, ROOT, find_reason, list_commands, split_commands

from nmt.config_files import find_shipped_configs, load_config
from nmt.system.files import read_json, seal, write_json
from nmt.system.run_folder import MODEL_FILE

NOT_RUN = dict(line.split(" -> ") for line in read_text_lines(ROOT / "tests/docs/not_run.txt"))
SLOW = re.compile(  # what trains, or loads another engine
    r"nmt-train (?!.*--(print-config|explain))|nmt-prepare --config|nmt-export |--curve|ctranslate2|"
    "--profile|--workers"
)
TOY = """
vocab.size=80 vocab.byte_fallback=false model.d_model=16 model.d_ff=32 model.n_heads=2 model.n_layers=1
model.positions=sinusoidal training.steps=20 training.src_tokens=300 training.tgt_tokens=300 training.micro_tokens=150
training.precision=fp32 training.validate_every=10 training.checkpoint_every=1 training.checkpoint_minutes=null
training.keep_checkpoints=20 optimizer.warmup_steps=2 data.workers=1 decoding.max_extra=3 device=cpu
""".split()
SPLITS = [f"data.{split}={{src: {split}.en, tgt: {split}.de}}" for split in ("valid", "test")]
TEXT = ["data.train=[{src: train.en, tgt: train.de}]", *SPLITS, "data.root=."]
ENGLISH_FRENCH = dict.fromkeys(("hour", "teacher", "student"), ("en", "fr"))
LANGUAGES = {"de-en": ("de", "en"), "reverse": ("de", "en"), **ENGLISH_FRENCH}
WRITTEN = re.compile(r"(?:(?:-o|--output|--json|--report|--attention) |> ?| out=)[^\s>]+")
RUNS = re.compile(r"\b(runs/[\w-]+|RUN|CHECKPOINT|STEP[12])((?:/[\w-]+)*)")
TEXTS = re.compile(
    r"[\w./-]+\.(?:en|de|fr|hyp|ref|sv|tsv|zip)(?:\.gz)?(?![\w.])|\b(?:FILE|A|B|text)(?![\w./])"
)


def list_lines(page: Path) -> Iterator[str]:
    """The commands of a page, without what is left to fill in."""
    for block in BLOCKS:
        is_shell = block.language in ("", "text", "bash", "sh")
        if block.page == page and is_shell and not find_reason(block, block.text):
            for line in list_commands(block.text):
                if not find_reason(block, line):
                    line = re.sub(r"\[section.*\]| [\w.]+=\.\.\.| \.\.\.", "", line)
                    yield from re.split("; (?=nmt-)", re.split(r"  +| # ", line)[0])


LINES = {page: list(list_lines(page)) for page in PAGES}


def is_run(line: str) -> bool:
    return not any(part in line for part in NOT_RUN)


def list_quick() -> Iterator[tuple[Path, str]]:
    """The first command of each form, which `make test` runs."""
    known = set()
    for page, line in [(page, line) for page, lines in LINES.items() for line in lines]:
        form = re.sub(r"[\w-]*[./][\w./-]+|RUN|CHECKPOINT|\d+", "X", line)
        if not SLOW.search(line) and form not in known:
            yield page, line
        known.add(form)


QUICK = set(list_quick())


def make_run(folder: Path) -> None:
    """A toy run, and its average."""
    put_texts(folder)
    settings = [f"data.root={folder}", f"data.store={folder}/store", f"out={folder}/run"]
    toy = [setting for setting in TOY if "validate_every" not in setting]
    config = ["--config", "demo.yaml", *toy, *TEXT[:-1], *settings, "name=base"]
    succeed(COMMANDS["nmt-train"].main, *config, "training.validate_every=1")
    succeed(COMMANDS["nmt-average"].main, f"{folder}/run", "--last", "5")
    (folder / "run/average/README.md").unlink()  # is not sealed


@fixture(scope="session")
def made(tmp_path_factory: TempPathFactory) -> Path:
    return make_once(tmp_path_factory, "page-run", make_run)


def put_texts(folder: Path) -> None:
    for split in ("train", "valid", "test"):
        for language in ("en", "de"):
            put_text(folder / f"{split}.{language}")


def put_text(path: Path, program: str = "") -> None:
    """Write lines of the language that the name tells; nmt-init wants a thousand pairs."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    is_long = program == "nmt-init" and not path.name.startswith("test")
    n = 1300 if is_long or "train" in path.name else 10
    pairs = sentences(n, seed=sum(path.name.partition(".")[0].encode()))
    src, tgt = (join_lines(side) for side in zip(*pairs, strict=True))
    text = src if re.search(r"\.en\b|^text$", path.name) else tgt
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("Books.de-en.en", src)
            archive.writestr("Books.de-en.de", tgt)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        both = "".join(f"{a}\t{b}\n" for a, b in pairs)
        path.write_text(both if path.suffix == ".tsv" else text)


def put_run(made: Path, folder: Path, inner: str) -> None:
    """Copy the toy run to there, with the seed and the languages that the names tell."""
    if not folder.exists():
        shutil.copytree(made / "run", folder, symlinks=True)
        src, tgt = LANGUAGES.get(folder.name, ("en", "de"))
        (seed,) = re.findall(r"^runs/.*(\d)$", str(folder)) or [1]
        checkpoints = [folder / "average", *folder.glob("checkpoints/step-*")]
        for checkpoint in checkpoints if (src, tgt, seed) != ("en", "de", 1) else ():
            weights = load_file(checkpoint / MODEL_FILE)
            save_file({name: w * int(seed) for name, w in weights.items()}, checkpoint / MODEL_FILE)
            data = replace(load_config(str(checkpoint / "config.yaml")).data, src=src, tgt=tgt)
            change_config(checkpoint, data=data, seed=int(seed))
    checkpoint = folder / inner
    if inner == "average" and not checkpoint.exists():  # the run was trained before
        shutil.copytree(made / "run/average", checkpoint)
    step = re.fullmatch(r"step-(\d+)", checkpoint.name)
    if step and not checkpoint.exists():  # another than those that there are
        shutil.copytree(folder / "checkpoints/last", checkpoint)
        state = read_json(checkpoint / "state.json")
        write_json(checkpoint / "state.json", {**state, "step": int(step[1])})
        seal(checkpoint)


def put_config(page: Path, name: str) -> None:
    """Write the config of this name: of this page, of another, or a small one."""
    if Path(name).exists() or list(find_shipped_configs().rglob(name)):
        return
    named = re.compile(rf"^# {name}$|^name: {Path(name).stem}$", re.MULTILINE)
    blocks = [block for block in BLOCKS if block.language == "yaml" and named.search(block.text)]
    blocks.sort(key=lambda block: block.page != page)
    demo = (
        (ROOT / "configs/demo.yaml").read_text().replace("name: demo", f"name: {Path(name).stem}")
    )
    Path(name).write_text(blocks[0].text if blocks else demo)


def shrink(words: list[str], number: int) -> list[str]:
    """Make a training small, and give it text and a store if its config is a shipped one."""
    name = words[words.index("--config") + 1] if "--config" in words else ""
    settings = [*TOY]
    if (find_shipped_configs() / name).is_file():
        given = {word.partition("=")[0] for word in words}
        mine = [*TEXT, f"data.store=stores/{number}"]
        settings += [text for text in mine if text.partition("=")[0] not in given]
    keys = {setting.partition("=")[0] for setting in settings}
    return [word for word in words if word.partition("=")[0] not in keys] + settings


def run_line(page: Path, line: str, made: Path) -> str | None:
    """Run a line, and return what it said if it failed."""
    (words,) = list(split_commands(line))[:1]
    program, *words = words
    redirections = dict(re.findall(r"(?<= )([<>]) ?(\S+)", line))
    if program == "nmt-sweep" and "--dry-run" not in words:
        words.append("--dry-run")
    if "--config" in words and program in ("nmt-train", "nmt-prepare"):
        words = shrink(words, crc32(line.encode()))
    if program == "nmt-init":
        words.append("--force")  # examples may write what one before has written
    if program == "nmt-train":  # and train what one before has read
        outs = re.findall(r"(?: out=|--config )(?:\S+/)?([\w-]+)", line)
        shutil.rmtree(f"runs/{outs[-1] if outs else ''}", ignore_errors=True)
    read = WRITTEN.sub("", f"{line} {' '.join(words)}")
    for folder, inner in RUNS.findall(read):
        put_run(made, Path(folder), inner.lstrip("/"))
    for name in TEXTS.findall(read):
        put_text(Path(name), program)
    for name in re.findall(r"[\w-]+\.yaml|CONFIG", read):
        put_config(page, name)
    for root in re.findall(r"data\.root=(\S+)", read):
        put_texts(Path(root))
    if "--inspect" in words and not Path(words[-1]).exists():
        shutil.copytree(made / "store", words[-1])
    words = [name for word in words for name in ("*" in word and sorted(glob(word)) or [word])]
    if program not in COMMANDS:
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        return done.stderr if done.returncode else None
    return call(
        program, words, redirections.get("<", os.devnull), redirections.get(">", os.devnull)
    )


def call(program: str, words: list[str], stdin: str, stdout: str) -> str | None:
    kept, told = os.dup(0), io.StringIO()
    with open(stdin) as file:
        os.dup2(file.fileno(), 0)
    try:
        with open(stdout, "w") as out:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
                code = COMMANDS[program].main(words)
    except SystemExit as left:
        code = left.code
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    return f"{code}: {told.getvalue()[-600:]}" if code else None


@mark.parametrize(
    "page",
    [page for page in PAGES if any(map(is_run, LINES[page]))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_commands_of_a_page_run_one_after_another(
    page: Path, made: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    faults = []
    for line in LINES[page]:
        if is_run(line) and amount((page, line) in QUICK, True):
            if fault := run_line(page, line, made):
                faults.append(f"{line}\n    {fault}")
    assert not faults, "\n".join(faults)


def test_what_is_not_run_is_in_a_page() -> None:
    lines = [line for page in PAGES for line in LINES[page]]
    assert [part for part in NOT_RUN if not any(part in line for line in lines)] == []
