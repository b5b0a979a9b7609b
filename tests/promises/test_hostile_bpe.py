"""BPE models that a hostile author wrote: each is refused in one line, or does what any model does.

SentencePiece reads them in C++, where a mistake is not an exception but a crash or worse. So one
child process with little memory and time opens them all: it would not come back from a crash. In
`make test` it also opens 200 damaged ones, in `make soak` it opens 10,000.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.crafted_bpe import craft_readable, craft_refused, draw_damaged_models
from support.once import make_once
from support.soaking import IS_SOAK
from support.untrained import make_checkpoint

from nmt.commands.export import main as nmt_export
from nmt.commands.prepare import main as nmt_prepare
from nmt.commands.translate import main as nmt_translate
from nmt.config import ModelConfig
from nmt.data.vocab import Vocab
from nmt.system.files import seal
from nmt.system.run_folder import VOCAB_FILE

ROOT = Path(__file__).parents[2]
TINY = ModelConfig(d_model=8, d_ff=8, n_heads=1, n_layers=1)
N_DAMAGED = 5_000 if IS_SOAK else 100  # of each kind
OPEN_ALL = """
import json, resource, sys
from pathlib import Path
from nmt.corpus.encoder import CorpusEncoder
from nmt.data.vocab import Vocab
from nmt.system.errors import UserError

resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (600, 600))
LINES = ["ab c abc", "", "a" * 2000, " \\u2581a \\u00bd \\x01\\0 x <s> <0x41>", "\\U0001f600"]

def use(path):
    vocab = Vocab.load(path)
    vocab.decode(vocab.encode(LINES))
    CorpusEncoder(vocab)([line.encode() for line in LINES])
    vocab.decode([[i] for i in range(vocab.size)])
    vocab.pieces(range(vocab.size))

for path in map(Path, sys.stdin.read().splitlines()):
    print(json.dumps(path.name), end="", flush=True)  # named even if it is the last
    try:
        answer = use(path)
    except UserError as error:
        answer = str(error)
    print("\\t" + json.dumps(answer), flush=True)
"""


def open_all(folder: Path) -> None:
    """Write all models into `folder`, open them in a child process, and keep its answers."""
    models = craft_readable() | craft_refused() | dict(draw_damaged_models(N_DAMAGED))
    for name, model in models.items():
        (folder / name).write_bytes(model)
    done = subprocess.run(
        [sys.executable, "-c", OPEN_ALL],
        input="".join(f"{folder / name}\n" for name in models),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-200:]}\n{done.stderr[-2000:]}"
    assert done.stderr == ""
    answers = {}
    for line in done.stdout.splitlines():
        name, _, answer = line.partition("\t")
        answers[json.loads(name)] = json.loads(answer)
    (folder / "answers.json").write_text(json.dumps(answers))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_once(tmp_path_factory, "bpe", open_all)


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, str | None]:
    found: dict[str, str | None] = json.loads((folder / "answers.json").read_text())
    return found


def test_a_hostile_model_is_refused_in_one_line(
    folder: Path, answers: dict[str, str | None]
) -> None:
    for name in craft_refused():
        answer = answers[name]
        assert answer and answer.startswith(f"{folder / name}: ") and answer.isprintable(), name
        assert "; use " in answer or "expected a BPE model" in answer, answer


def test_a_strange_model_works(answers: dict[str, str | None]) -> None:
    assert {name: answers[name] for name in craft_readable()} == dict.fromkeys(craft_readable())


def test_a_damaged_model_crashes_nothing(answers: dict[str, str | None]) -> None:
    damaged = [
        answer for name, answer in answers.items() if name not in craft_readable() | craft_refused()
    ]
    assert len(damaged) == 2 * N_DAMAGED
    assert all(answer is None or answer.isprintable() for answer in damaged)
    assert None in damaged  # else most of the code was never reached


@pytest.mark.parametrize("name", ["duplicate pieces", "65,537 pieces", "byte not UTF-8", "9 MB"])
def test_commands_refuse_a_hostile_model(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", Vocab(craft_readable()["plain"]), TINY)
    (checkpoint / VOCAB_FILE).write_bytes(craft_refused()[name])
    seal(checkpoint)
    (tmp_path / "text").write_text("a b\n")
    (tmp_path / "other").write_text("b a\n")
    prepare = ["-c", "demo.yaml", f"data.root={tmp_path}", "data.train=[{src: text, tgt: other}]"]
    prepare += ["vocab.model=model/vocab.model", f"data.store={tmp_path}/store"]
    out = ["-o", str(tmp_path / "out")]
    for command, argv in (
        (nmt_translate, [str(checkpoint), "-i", str(tmp_path / "text"), *out]),
        (nmt_export, [str(checkpoint), "--to", "safetensors", *out]),
        (nmt_prepare, prepare),
    ):
        assert command(argv) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and "vocab.model" in lines[0], lines
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other", "text"]


def test_commands_use_a_strange_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "text"
    source.write_text("ab c\n\u263a\n\na\n")
    for name in craft_readable() if IS_SOAK else ("escape sequences", "scores NaN", "words"):
        checkpoint = make_checkpoint(tmp_path / name, Vocab(craft_readable()[name]), TINY)
        out = tmp_path / f"{name}.out"
        assert nmt_translate([str(checkpoint), "-i", str(source), "-o", str(out)]) == 0
        assert out.read_bytes().count(b"\n") == 4, name
        assert not [
            line
            for line in capsys.readouterr().err.splitlines()
            if "are mostly <unk>" not in line and "decoding.max_extra" not in line  # true of some
        ]
