"""Marian's own files: its formulas, computed from what is written, are our model's, and so is what Marian
itself computes, where `pymarian` is installed (`pip install pymarian`, in any environment whose bin is in PATH).

The models are random, with noise on every LayerNorm and bias, so that a forgotten or exchanged tensor shows.
"""

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
from support.toy_corpus import sentences
from support.untrained import make_checkpoint, make_vocab

from nmt.checkpoint.checkpoint import Average, Checkpoint, Snapshot, save_checkpoint
from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.commands.export import main as nmt_export
from nmt.config import CorpusConfig, DataConfig, DecodingConfig, ModelConfig, RunConfig, VocabConfig
from nmt.data.vocab import BOS, PAD, Vocab, VocabPair, Vocabulary
from nmt.extras.export import marian_files, parity
from nmt.extras.export.export import export
from nmt.extras.export.marian_files import check_marian
from nmt.extras.export.marian_files import load_marian
from nmt.extras.export.parity import OwnEngine, compare_engines
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure, UserError
from nmt.translate.translator import make_translator

PYMARIAN = shutil.which("pymarian")
NEEDS_MARIAN = pytest.mark.skipif(
    PYMARIAN is None, reason="no program pymarian; pip install pymarian, with Python up to 3.12"
)
PAIRS = sentences(8, seed=5)
LINES = [src for src, _ in PAIRS]
PLAIN = ModelConfig(
    d_model=32, d_ff=48, n_heads=4, n_layers=2, max_positions=256, positions="marian"
)
SHAPES = {
    "tied": PLAIN,
    "tied-unscaled-biased": replace(
        PLAIN, scale_embeddings="none", attention_bias=True, projection_bias=True
    ),
    "decoder-tied-swish-uneven": replace(
        PLAIN, tied="decoder", activation="swish", encoder_layers=3, decoder_layers=1
    ),
    "embeddings-tied-unscaled": replace(PLAIN, tied="embeddings", scale_embeddings="none"),
    "embeddings-tied-logits-scaled": replace(
        PLAIN, tied="embeddings", scale_embeddings="projection"
    ),
    "untied-small-heads": replace(PLAIN, tied=False, d_k=3, d_v=5, projection_bias=True),
    "tied-logits-scaled-rows": replace(PLAIN, scale_embeddings="projection", vocab_rows=90),
    "pair": replace(PLAIN, tied="decoder", scale_embeddings="projection", attention_bias=True),
}


def make_exportable(
    shape: ModelConfig,
    vocab: Vocabulary,
    folder: Path,
    **decoding: object,
) -> Checkpoint:
    """Write an average of random weights that has none of the pieces in its outputs that our search forbids."""
    torch.manual_seed(2)
    model = Transformer(shape, *vocab.sizes)
    weights = {name: p.detach() + 0.2 * torch.randn_like(p) for name, p in model.named_parameters()}
    last = f"decoder.{shape.decoder_depth - 1}.feed_forward_residual.norm.bias"
    weights[last] *= 3
    name = "tgt_embedding.weight" if shape.has_shared_projection else "projection.weight"
    never = [PAD, BOS, *range(vocab.tgt.size, model.n_vocab)]
    weights[name][never] = -2 * weights[last]
    size, tgt_size = vocab.sizes
    is_joint = isinstance(vocab, Vocab)
    config = RunConfig(
        name="toy",
        vocab=VocabConfig(size=size, joint=is_joint, tgt_size=None if is_joint else tgt_size),
        model=shape,
        decoding=DecodingConfig(**decoding),  # type: ignore[arg-type]
    )
    save_checkpoint(folder, Snapshot(weights, {}), Average(["step-10"], 10), config, vocab)
    return open_checkpoint(folder)


@pytest.fixture(autouse=True)
def compare_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models seldom end, so their outputs have all the pieces that may be compared."""
    monkeypatch.setattr("nmt.extras.export.export.MAX_COMPARED", 20)


@pytest.fixture(params=SHAPES, name="checkpoint")
def make_each(request: pytest.FixtureRequest, vocab: Vocab, tmp_path: Path) -> Checkpoint:
    pieces: Vocabulary = vocab
    if request.param == "pair":
        pieces = VocabPair(make_vocab(tmp_path, 70, byte_fallback=False), vocab)
    return make_exportable(SHAPES[request.param], pieces, tmp_path / "average")


def test_each_model_is_computed_by_marians_formulas(checkpoint: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = export(checkpoint, "marian", out, "float32", LINES)
    assert (found.lines, found.differing) == (len(LINES), 0) and found.largest < 2e-5


def run_marian(mode: str, folder: Path, *arguments: str, given: str = "") -> list[str]:
    settings = "--cpu-threads 1 --workspace 128 --mini-batch 1 --quiet".split()
    command = [str(PYMARIAN), mode, *arguments, *settings]
    done = subprocess.run(
        command, cwd=folder, input=given, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@NEEDS_MARIAN
def test_marian_itself_scores_and_translates_alike(checkpoint: Checkpoint, tmp_path: Path) -> None:
    out, vocab = tmp_path / "out", checkpoint.vocab
    export(checkpoint, "marian", out, "float32", LINES)
    sources, targets = zip(*PAIRS, strict=True)
    (out / "src").write_text("".join(f"{line}\n" for line in sources))
    (out / "tgt").write_text("".join(f"{line}\n" for line in targets))
    names = yaml.safe_load((out / "decoder.yml").read_text())["vocabs"]
    scored = run_marian("score", out, "-m", "model.npz", "-v", *names, "-t", "src", "tgt")
    translator = make_translator(checkpoint, torch.device("cpu"), checkpoint.config.decoding)
    ours = OwnEngine(translator.model)
    src, tgt = vocab.src.encode(sources), vocab.tgt.encode(targets)
    expected = [sum(scores) for scores in ours.score(src, tgt)]
    assert [float(line) for line in scored] == pytest.approx(expected, abs=2e-3)

    # Marian's limit counts the end mark of the source
    beam = "--beam-size 1 --normalize 0 --max-length-factor 1".split()
    outputs = [ours.translate_greedily([ids], len(ids) + 1)[0] for ids in src]
    translated = run_marian(
        "decode", out, "-c", "decoder.yml", *beam, given=(out / "src").read_text()
    )
    assert translated == vocab.tgt.decode(outputs)


# ---- the check ----------------------------------------------------------------------------------------------------


@pytest.fixture
def plain(vocab: Vocab, tmp_path: Path) -> Checkpoint:
    return make_exportable(PLAIN, vocab, tmp_path / "average")


def test_no_tensor_is_left_out_of_what_is_checked(plain: Checkpoint, tmp_path: Path) -> None:
    """Each but the biases of keys, which move all scores of an attention alike."""
    out = tmp_path / "out"
    export(plain, "marian", out, "float32", LINES)
    engine = load_marian(out)
    src = plain.vocab.src.encode(LINES[:2])
    before = sum(engine.score(src, src), [])
    torch.manual_seed(1)
    unseen = []
    for name, tensor in engine.tensors.items():
        engine.tensors[name] = tensor + 0.1 * torch.randn_like(tensor)
        after = sum(engine.score(src, src), [])
        engine.tensors[name] = tensor
        if after == pytest.approx(before, abs=1e-4):
            unseen.append(name)
    assert (
        all(name.endswith("_bk") for name in unseen) and sum(engine.score(src, src), []) == before
    )


@pytest.mark.parametrize(
    "damage", [{"transformer-heads": 2}, {"transformer-ffn-activation": "swish"}]
)
def test_an_export_that_disagrees_never_appears(
    damage: dict[str, object], plain: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = marian_files.describe_for_marian
    monkeypatch.setattr(marian_files, "describe_for_marian", lambda model: whole(model) | damage)
    assert nmt_export([str(plain.path), "--to", "marian", "-o", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()


def test_the_papers_rates_are_measured_and_bounded(
    vocab: Vocab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else is as exact as ever; what Marian's rates change is on the card."""
    shape = replace(PLAIN, positions="sinusoidal", d_model=64)
    checkpoint, out = make_exportable(shape, vocab, tmp_path / "average"), tmp_path / "out"
    monkeypatch.setitem(parity.MAX_MEAN, "sinusoidal positions in Marian", 9.0)
    found = export(checkpoint, "marian", out, "float32", LINES)
    assert (found.differing, found.largest < 2e-5) == (0, True)
    src = vocab.encode(LINES)
    in_use = compare_engines(
        OwnEngine(make_translator(checkpoint, torch.device("cpu"), DecodingConfig()).model),
        load_marian(out),
        src,
        20,
    )
    assert in_use.mean > 1e-3
    assert f"; as Marian runs it: {in_use}" in (out / "README.md").read_text()
    assert str(in_use) in json.loads((out / "export.json").read_text())["check"]["in_use"]
    monkeypatch.setitem(parity.MAX_MEAN, "sinusoidal positions in Marian", in_use.mean / 2)
    with pytest.raises(
        Failure, match=f"disagrees .* limit is {in_use.mean / 2} on average; nothing"
    ):
        export(checkpoint, "marian", tmp_path / "other", "float32", LINES)
    assert not (tmp_path / "other").exists()


TAGGED = (CorpusConfig(src="a.en", tgt="a.de", tag="<de>"),)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"norm": "pre"}, "model.norm is pre: "),
        ({"positions": "rotary"}, "model.positions is rotary: "),
        ({"positions": "learned"}, "model.positions is learned: "),
        ({"activation": "gelu"}, "model.activation is gelu: "),
        ({"embedding_norm": "after_dropout"}, "model.embedding_norm is after_dropout: "),
        ({"window": 2}, "model.window is 2: "),
        ({"d_k": 9}, "model.d_k is 9: "),
    ],
)
def test_what_marian_does_not_compute_is_refused_by_its_name(
    changes: dict[str, object], reason: str, vocab: Vocab, tmp_path: Path
) -> None:
    shape = replace(PLAIN, **changes)  # type: ignore[arg-type]
    checkpoint = make_checkpoint(tmp_path / "average", vocab, shape)
    with pytest.raises(UserError, match=reason) as error:
        export(open_checkpoint(checkpoint), "marian", tmp_path / "out", "float32", LINES)
    assert "use --to" in str(error.value) and "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["average"]


@pytest.mark.parametrize(
    "data, decoding",
    [(DataConfig(train=TAGGED), DecodingConfig()), (DataConfig(), DecodingConfig(tag="<de>"))],
)
def test_tags_are_refused(data: DataConfig, decoding: DecodingConfig) -> None:
    with pytest.raises(UserError, match="tags which Marian does not put there"):
        check_marian(PLAIN, data, decoding)


# ---- the folder ---------------------------------------------------------------------------------------------------


def test_the_folder_is_what_marian_opens(plain: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert nmt_export([str(plain.path), "--to", "marian", "-o", str(out)]) == 0
    with zipfile.ZipFile(out / "model.npz") as archive:  # some builds of Marian abort otherwise
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
    with np.load(out / "model.npz") as arrays:
        entry = arrays["special:model.yml"]
        shapes = {name: arrays[name].shape for name in ("Wemb", "decoder_ff_logit_out_b")}
        assert {arrays[name].dtype for name in shapes} == {np.dtype(np.float32)}
    size = plain.vocab.src.size
    assert shapes == {"Wemb": (size, 32), "decoder_ff_logit_out_b": (1, size)}
    assert (entry.dtype, entry.ndim, entry[-1]) == (np.int8, 1, 0)
    settings = yaml.safe_load(entry.tobytes().rstrip(b"\0"))
    assert (
        settings["dim-vocabs"] == [size, size] and settings["transformer-ffn-activation"] == "relu"
    )
    assert yaml.safe_load((out / "decoder.yml").read_text()) == {
        "relative-paths": True,
        "models": ["model.npz"],
        "vocabs": ["vocab.spm", "vocab.spm"],
        "beam-size": 4,
        "normalize": 0.6,
        "allow-unk": True,
    }
    assert (out / "vocab.spm").read_bytes() == plain.vocab.src.model
    assert "does not know the formula above" in (out / "README.md").read_text()


def test_what_decodes_follows_the_model(tmp_path: Path) -> None:
    spelling = make_vocab(tmp_path, 400, byte_fallback=True)
    shape = replace(PLAIN, vocab_rows=406)
    decoding = {"preset": "marian", **DecodingConfig.PRESETS["marian"]}
    checkpoint = make_exportable(shape, spelling, tmp_path / "average", **decoding)
    export(checkpoint, "marian", tmp_path / "out", "float32", LINES)
    settings = yaml.safe_load((tmp_path / "out" / "decoder.yml").read_text())
    assert settings["allow-unk"] is False and settings["max-length-factor"] == 3.0
    assert (settings["beam-size"], settings["normalize"]) == (6, 0.6)
    rows = Vocab((tmp_path / "out" / "vocab.spm").read_bytes())  # with a piece for each row
    assert rows.list_pieces()[spelling.size :] == [
        f"<unused-{i}>" for i in range(spelling.size, 406)
    ]
    assert rows.encode(LINES) == spelling.encode(LINES) and rows.decode([[405]]) == [""]
