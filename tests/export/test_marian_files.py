"""Marian's own files: what is written computes what our model does, and so does Marian itself, where `pymarian` is
installed (`pip install pymarian`, in any environment whose bin is in PATH).
"""

import hashlib
import json
import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.marian_models import LINES, PAIRS, PLAIN, SHAPES, make_exportable, make_shaped
from support.untrained import make_checkpoint, make_vocab

from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.commands.export import main as nmt_export
from nmt.config import CorpusConfig, DataConfig, DecodingConfig
from nmt.data.vocab import BOS, PAD, Vocab
from nmt.extras.export import marian_files, parity
from nmt.extras.export.export import export
from nmt.extras.export.parity import OwnEngine
from nmt.extras.profile.formats import describe_formats
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure, UserError
from nmt.translate.translator import make_translator

NEEDS_MARIAN = pytest.mark.skipif(
    shutil.which("pymarian") is None,
    reason="no program pymarian; pip install pymarian, with Python up to 3.12",
)
# of what Marian 1.12.42 read, and scored as we do: after a change, let it do so again
SHOWN = {
    "tied-unscaled-biased": "f11abc26e4622668",
    "decoder-tied-swish-uneven": "56e4506b9789dbf8",
    "embeddings-tied-logits-scaled": "0be016e5c7e0eef7",
}


@pytest.mark.parametrize("name", SHAPES)
def test_each_model_agrees(name: str, tmp_path: Path) -> None:
    checkpoint, out = make_shaped(name, tmp_path), tmp_path / "out"
    found = export(checkpoint, "marian", out, "float32", LINES)
    assert (found.lines, found.differing) == (len(LINES), 0) and found.largest < 2e-5
    with np.load(out / "model.npz") as arrays:
        written = [key.encode() + arrays[key].tobytes() for key in sorted(arrays)]
    digest = hashlib.sha256(b"".join(written)).hexdigest()
    assert digest[:16] == SHOWN.get(name, digest[:16])


def run_marian(folder: Path, *command: str, given: str = "") -> list[str]:
    settings = "--cpu-threads 1 --workspace 128 --mini-batch 1 --quiet".split()
    done = subprocess.run(
        ["pymarian", *command, *settings],
        cwd=folder,
        input=given,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@NEEDS_MARIAN
@pytest.mark.parametrize("name", SHAPES)
def test_marian_itself_scores_and_translates_alike(name: str, tmp_path: Path) -> None:
    checkpoint, out = make_shaped(name, tmp_path), tmp_path / "out"
    vocab, decoding = checkpoint.vocab, checkpoint.config.decoding
    export(checkpoint, "marian", out, "float32", LINES)
    ours = OwnEngine(make_translator(checkpoint, torch.device("cpu"), decoding).model)
    texts = []
    for file, lines in zip(("src", "tgt"), zip(*PAIRS, strict=True), strict=True):
        texts.append("".join(f"{line}\n" for line in lines))
        (out / file).write_text(texts[-1])
    names = yaml.safe_load((out / "decoder.yml").read_text())["vocabs"]
    scored = run_marian(out, "score", "-m", "model.npz", "-v", *names, "-t", "src", "tgt")
    src = vocab.src.encode(LINES)
    log_probs = ours.score(src, vocab.tgt.encode([tgt for _, tgt in PAIRS]))
    assert [float(line) for line in scored] == pytest.approx(list(map(sum, log_probs)), abs=2e-3)

    # Marian's limit counts the end mark of the source
    command = "decode -c decoder.yml --beam-size 1 --normalize 0 --max-length-factor 1"
    outputs = [ours.translate_greedily([ids], len(ids) + 1)[0] for ids in src]
    assert run_marian(out, *command.split(), given=texts[0]) == vocab.tgt.decode(outputs)


# ---- the check ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", [{"transformer-heads": 2}, {"transformer-ffn-activation": "swish"}]
)
def test_an_export_that_disagrees_never_appears(
    damage: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = marian_files.describe_for_marian
    monkeypatch.setattr(marian_files, "describe_for_marian", lambda model: whole(model) | damage)
    checkpoint = make_shaped("tied", tmp_path).path
    assert nmt_export([str(checkpoint), "--to", "marian", "-o", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()


def test_the_papers_rates_are_measured_and_bounded(
    vocab: Vocab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else is as exact as ever; what Marian's rates change is on the card."""
    shape = replace(PLAIN, positions="sinusoidal", projection_bias=False)
    checkpoint, out = make_exportable(shape, tmp_path / "average", vocab), tmp_path / "out"
    found = export(checkpoint, "marian", out, "float32", LINES)
    assert (found.differing, found.largest < 2e-5) == (0, True)
    assert str(found) in (out / "README.md").read_text()
    check = json.loads((out / "export.json").read_text())["check"]
    assert check["in_use"] == found.in_use and found.in_use.startswith("; as Marian runs it: ")
    mean = float(found.in_use.rpartition(" ")[2])
    assert mean > 1e-3
    monkeypatch.setitem(parity.MAX_MEAN, "sinusoidal", mean / 2)
    with pytest.raises(Failure, match=f"disagrees .* limit is {mean / 2} on average; nothing"):
        export(checkpoint, "marian", tmp_path / "other", "float32", LINES)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("mark", [PAD, BOS])
def test_a_mark_that_marian_would_choose_ends_the_output(mark: int, vocab: Vocab) -> None:
    torch.manual_seed(1)
    model = Transformer(PLAIN, *vocab.sizes)
    torch.nn.init.constant_(model.projection.bias[mark], 99.0)
    assert OwnEngine(model).translate_greedily([[5, 6]], 9) != [[]]
    assert marian_files.MarianEngine(model).translate_greedily([[5, 6]], 9) == [[]]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"norm": "pre"}, "model.norm is pre: "),
        ({"positions": "rotary"}, "model.positions is rotary: "),
        ({"positions": "learned"}, "model.positions is learned: "),
        ({"activation": "gelu"}, "model.activation is gelu: "),
        ({"embedding_norm": "after_dropout"}, "model.embedding_norm is after_dropout: "),
        ({"window": 2}, "model.window is 2: "),
        ({"d_k": 17}, "model.d_k is 17: "),
    ],
)
@pytest.mark.parametrize("to", ["marian", "bergamot"])
def test_what_marian_does_not_compute_is_refused_by_its_name(
    to: str, changes: dict[str, object], reason: str, vocab: Vocab, tmp_path: Path
) -> None:
    shape = replace(PLAIN, **changes)  # type: ignore[arg-type]
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "average", vocab, shape))
    with pytest.raises(UserError, match=f"^{reason}.*; use --to"):
        export(checkpoint, to, tmp_path / "out", "float32", LINES)
    assert [path.name for path in tmp_path.iterdir()] == ["average"]
    assert "d_k" in changes or "Marian and Bergamot" not in describe_formats(shape)


def test_tags_are_refused(vocab: Vocab) -> None:
    data, tagged = DataConfig(), (CorpusConfig(src="a.en", tgt="a.de", tag="<de>"),)
    published = vocab.with_symbols([">>deu<<"], [])  # whose config names no tag
    cases = (vocab, DataConfig(train=tagged), None), (vocab, data, "<de>"), (published, data, None)
    for pieces, data, tag in cases:
        with pytest.raises(UserError, match="tags, which Marian does not put there"):
            marian_files.check_marian(PLAIN, pieces, data, DecodingConfig(tag=tag))


# ---- the folder ---------------------------------------------------------------------------------------------------


def test_the_folder_is_what_marian_opens(tmp_path: Path) -> None:
    checkpoint, out = make_shaped("tied", tmp_path), tmp_path / "out"
    assert nmt_export([str(checkpoint.path), "--to", "marian", "-o", str(out)]) == 0
    with zipfile.ZipFile(out / "model.npz") as archive:  # some builds of Marian abort otherwise
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
    with np.load(out / "model.npz") as arrays:
        assert all(rows.flags.c_contiguous for rows in arrays.values())
    assert yaml.safe_load((out / "decoder.yml").read_text()) == {
        "relative-paths": True,
        "models": ["model.npz"],
        "vocabs": ["vocab.spm", "vocab.spm"],
        "beam-size": 4,
        "normalize": 0.6,
        "allow-unk": True,
    }
    assert (out / "vocab.spm").read_bytes() == checkpoint.vocab.src.model
    assert "does not know the formula above" in (out / "README.md").read_text()


def test_what_decodes_follows_the_model(tmp_path: Path) -> None:
    spelling = make_vocab(tmp_path, 400, byte_fallback=True)
    decoding = DecodingConfig(preset="marian", **DecodingConfig.PRESETS["marian"])
    shape = replace(PLAIN, vocab_rows=402)
    checkpoint = make_exportable(shape, tmp_path / "average", spelling, decoding)
    export(checkpoint, "marian", tmp_path / "out", "float32", LINES)
    settings = yaml.safe_load((tmp_path / "out" / "decoder.yml").read_text())
    assert settings["allow-unk"] is False and settings["max-length-factor"] == 3.0
    assert (settings["beam-size"], settings["normalize"]) == (6, 0.6)
    rows = Vocab((tmp_path / "out" / "vocab.spm").read_bytes())  # with a piece for each row
    unused = [f"<unused-{i}>" for i in range(spelling.size, 402)]
    assert rows.list_pieces()[spelling.size :] == unused
    assert rows.encode(LINES) == spelling.encode(LINES) and rows.decode([[401]]) == [""]
