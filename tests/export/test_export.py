"""Exports agree with their checkpoint in the engines that they are for; one that does not never
appears.

The models are random, with noise on every LayerNorm and bias, so that a forgotten or exchanged
tensor shows.
"""

import json
import operator
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.needs import needs_package
from support.rings import amount
from support.toy_corpus import sentences
from support.untrained import make_checkpoint, make_vocab

import nmt.api
from nmt.checkpoint.checkpoint import Checkpoint, load_weights
from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.commands.export import FORMAT_NAMES
from nmt.commands.export import main as nmt_export
from nmt.config import CorpusConfig, DataConfig, DecodingConfig, ModelConfig, RunConfig, VocabConfig
from nmt.config_files import format_config
from nmt.data.batch import Sentences, pack
from nmt.data.vocab import BOS, EOS, PAD, Vocab
from nmt.extras.export import ctranslate2, huggingface, tensors
from nmt.extras.export.export import FORMATS, MAX_COMPARED, export, make_lines
from nmt.extras.export.parity import Agreement, OwnEngine, compare_engines
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure, UserError
from nmt.system.files import digest_file, seal, write_text
from nmt.system.run_folder import CONFIG_FILE, MODEL_FILE, VOCAB_FILE

PACKAGES = {
    "ctranslate2": "ctranslate2",
    "huggingface": "transformers",
    "safetensors": "safetensors",
}
NEEDS = {to: needs_package(package) for to, package in PACKAGES.items()}
NEEDS_CT2, NEEDS_HF = NEEDS["ctranslate2"], NEEDS["huggingface"]
ENGINES = [pytest.param(to, marks=NEEDS[to]) for to in PACKAGES]
REDUCED = [
    pytest.param(to, quantization, marks=NEEDS[to])
    for to in PACKAGES
    for quantization in FORMATS[to].quantizations[1:]
]
LINES = [src for src, _ in sentences(8, seed=5)]
PLAIN = ModelConfig(d_model=32, d_ff=48, n_heads=4, n_layers=2, max_positions=256)
SHAPES = {
    f"{norm}-{'tied' if tied else 'untied'}-{positions}": replace(
        PLAIN, norm=norm, tied=tied, positions=positions
    )
    for norm in ("post", "pre")
    for tied in (True, False)
    for positions in ("sinusoidal", "learned")
    # half of the eight has each pair of values
    if amount((norm == "pre") == (tied == (positions == "learned")), True)
}
SHAPES["small-heads"] = replace(PLAIN, d_k=3, d_v=5)
SHAPES["pre-small-heads"] = replace(PLAIN, norm="pre", d_k=3, d_v=5)
SHAPES["pre-rotary"] = replace(PLAIN, norm="pre", positions="rotary")
SHAPES["rotary-small-heads"] = replace(PLAIN, positions="rotary", d_k=4, d_v=5)
SHAPES["decoder-tied-marian"] = replace(PLAIN, tied="decoder", positions="marian")
SHAPES["pre-embeddings-tied"] = replace(PLAIN, norm="pre", tied="embeddings")
SHAPES["swish-logits-scaled"] = replace(
    PLAIN, activation="swish", scale_embeddings="projection", encoder_layers=3, decoder_layers=1
)
SHAPES["pre-gelu-unscaled"] = replace(
    PLAIN, norm="pre", tied=False, activation="gelu", scale_embeddings="none"
)
SHAPES["normed"] = replace(PLAIN, embedding_norm="before_dropout")
SHAPES["unused-rows"] = replace(PLAIN, vocab_rows=99)
SHAPES["biased-pre-small-heads"] = replace(
    SHAPES["pre-small-heads"], attention_bias=True, projection_bias=True
)


def make_exportable(
    shape: ModelConfig, vocab: Vocab, folder: Path, tags: Sequence[str | None] = (None,)
) -> Checkpoint:
    """Write a checkpoint of random weights that looks like an average."""
    torch.manual_seed(2)
    model = Transformer(shape, vocab.size)
    weights = {name: p.detach() + 0.3 * torch.randn_like(p) for name, p in model.named_parameters()}
    if shape.vocab_rows is not None:
        # the most probable rows are unused ones, so that a search that may choose them does
        weights["tgt_embedding.weight"][vocab.size :] *= 3
    if not shape.tied and shape.norm == "post":
        # as in a trained model, outputs end, and pad and bos are unlikely
        bias = weights["decoder.1.feed_forward_residual.norm.bias"]
        weights["projection.weight"][EOS] = 3 * bias
        weights["projection.weight"][[PAD, BOS]] = -5 * bias
    train = tuple(CorpusConfig(src="a.en", tgt="a.de", tag=tag) for tag in tags)
    data = DataConfig(root="/secret/place", train=train)
    config = RunConfig(name="toy", vocab=VocabConfig(size=vocab.size), model=shape, data=data)
    make_checkpoint(folder, vocab)
    save_file(weights, folder / MODEL_FILE)
    write_text(folder / CONFIG_FILE, format_config(config))
    seal(folder)
    return open_checkpoint(folder)


@pytest.fixture
def checkpoint(vocab: Vocab, tmp_path: Path) -> Checkpoint:
    return make_exportable(PLAIN, vocab, tmp_path / "average")


@pytest.fixture(autouse=True)
def compare_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models seldom end, so their outputs have all the pieces that may be compared."""
    monkeypatch.setattr("nmt.extras.export.export.MAX_COMPARED", 20)


@pytest.fixture
def whole_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pieces are compared as for a user."""
    monkeypatch.setattr("nmt.extras.export.export.MAX_COMPARED", MAX_COMPARED)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: digest_file(path) for path in folder.iterdir()}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("to", ENGINES[:2])
def test_each_model_agrees_in_each_engine(
    to: str, shape: ModelConfig, vocab: Vocab, tmp_path: Path
) -> None:
    checkpoint, out = make_exportable(shape, vocab, tmp_path / "average"), tmp_path / "out"
    if to == "huggingface" and (shape.embedding_norm or shape.positions == "rotary"):
        with pytest.raises(
            UserError, match=r"model\.\w+ is (before_dropout|rotary): neither Marian"
        ):
            export(checkpoint, to, out, "float32", LINES)
        assert not out.exists()
        return
    found = export(checkpoint, to, out, "float32", LINES)
    assert (found.lines, found.differing) == (len(LINES), 0) and found.largest < 2e-5
    recorded = json.loads((out / "export.json").read_text())
    assert recorded["check"]["largest"] == found.largest


def test_a_piece_with_the_name_of_an_unused_row_is_refused() -> None:
    assert ctranslate2.name_rows(["a", "b"], 4) == ["a", "b", "<unused-2>", "<unused-3>"]
    with pytest.raises(UserError, match="model.vocab_rows is 4: .* has a piece of this name"):
        ctranslate2.name_rows(["a", "<unused-3>"], 4)


@NEEDS_HF
def test_hugging_face_has_our_logits_whoever_loads_it(
    checkpoint: Checkpoint, tmp_path: Path, vocab: Vocab
) -> None:
    """Text goes in, the distribution of the first piece comes out, by their code alone."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    out = tmp_path / "out"
    export(checkpoint, "huggingface", out, "float32", LINES)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(out, use_safetensors=True)
    given = AutoTokenizer.from_pretrained(out)(LINES[0], return_tensors="pt")
    logits = theirs(**given, decoder_input_ids=torch.tensor([[BOS]])).logits[0]
    model = Transformer(PLAIN, vocab.size).eval()
    load_weights(checkpoint, model)
    src = pack([[*vocab.encode(LINES[:1])[0], EOS]])
    expected = model.projection(model(src, pack([[BOS]])))
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)
    suffixes = {path.suffix for path in out.iterdir()}
    assert suffixes.isdisjoint({".bin", ".pt", ".pth", ".pkl"})


@pytest.mark.parametrize("to, quantization", REDUCED)
def test_fewer_bits_come_close(
    to: str,
    quantization: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if quantization.startswith("int8"):  # which comes close in the mean of many pieces
        request.getfixturevalue("whole_outputs")
    found = export(checkpoint, to, tmp_path / "out", quantization, LINES)
    assert 1e-6 < found.mean < {"float16": 0.005, "bfloat16": 0.05}.get(quantization, 0.1)


EXPORT_TO_EACH = """
import sys
from nmt.commands.export import main
checkpoint, out, *formats = sys.argv[1:]
sys.exit(any(main([checkpoint, "--to", to, "-o", f"{out}/{to}"]) for to in formats))
"""


@NEEDS_CT2
@NEEDS_HF
@pytest.mark.soak  # test_tensor_files.py covers our own writer
def test_every_process_exports_the_same_bytes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXPORT_TO_EACH, str(checkpoint.path)]
    processes = []
    for seed in "123":
        environment = os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        arguments = [*command, str(tmp_path / seed), *PACKAGES]
        processes.append(subprocess.Popen(arguments, env=environment))
    assert [process.wait() for process in processes] == [0, 0, 0]
    for to in PACKAGES:
        first, *others = [contents(tmp_path / seed / to) for seed in "123"]
        assert others == [first, first]


@NEEDS_HF
@pytest.mark.parametrize("penalty", ["gnmt", "none"])
def test_a_greedy_model_is_exported_too(
    penalty: Literal["gnmt", "none"], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """transformers refuses a length penalty where there is one beam."""
    decoding = replace(checkpoint.config.decoding, beam=1, penalty=penalty)
    greedy = replace(checkpoint, config=replace(checkpoint.config, decoding=decoding))
    export(greedy, "huggingface", tmp_path / "out", "float32", LINES[:1])
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["num_beams"] == 1


def test_the_dev_set_is_compared_where_its_store_is_here(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def note(
        _: Checkpoint, to: str, out: Path, quantization: str, lines: list[str], *rest: bool
    ) -> str:
        compared.append(lines)
        return "the same"

    monkeypatch.setattr("nmt.extras.export.by_name.export", note)
    monkeypatch.chdir(tmp_path)
    command = [str(checkpoint.path.absolute()), "--to", "safetensors", "-o", "out"]
    assert nmt_export(command) == 0
    dev = tmp_path / checkpoint.config.data.store / "valid.src.txt"
    dev.parent.mkdir(parents=True)
    dev.write_text("".join(f"line {n}\n" for n in range(150)))
    assert nmt_export(command) == 0
    assert compared == [make_lines(checkpoint.vocab), [f"line {n}" for n in range(100)]]


@pytest.mark.parametrize(
    "shape, setting",
    [
        (replace(PLAIN, window=3), "model.window is 3"),
        (replace(PLAIN, d_k=9), "model.d_k is 9"),
        (replace(PLAIN, d_v=16), "model.d_v is 16"),
        (replace(PLAIN, n_heads=5, d_k=4, d_v=4), "model.n_heads 5"),
    ],
)
def test_what_a_format_cannot_express_is_refused_by_its_name(
    shape: ModelConfig, setting: str, vocab: Vocab, tmp_path: Path
) -> None:
    checkpoint = make_exportable(shape, vocab, tmp_path / "average")
    for to in ("ctranslate2", "huggingface"):
        with pytest.raises(UserError, match=setting) as error:
            export(checkpoint, to, tmp_path / "out", "float32", LINES)
        assert "\n" not in str(error.value)
        assert [path.name for path in tmp_path.iterdir()] == ["average"]
    assert export(checkpoint, "safetensors", tmp_path / "out", "float32", LINES).largest == 0


def test_an_activation_that_ctranslate2_lacks_is_named(
    vocab: Vocab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(ctranslate2.CTRANSLATE2_ACTIVATIONS, "gelu")
    checkpoint = make_exportable(replace(PLAIN, activation="gelu"), vocab, tmp_path / "average")
    with pytest.raises(UserError, match="model.activation is gelu"):
        export(checkpoint, "ctranslate2", tmp_path / "out", "float32", LINES)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ENGINES[:2])
def test_an_export_that_disagrees_never_appears(
    to: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    arguments = [str(checkpoint.path), "--to", to, "-o"]
    assert nmt_export([*arguments, str(out)]) == 0
    before = contents(out)
    room = {"ctranslate2": ctranslate2, "huggingface": huggingface}[to]
    monkeypatch.setattr(
        room, "make_position_table", lambda *given: 1.001 * tensors.make_position_table(*given)
    )
    for place in (out, tmp_path / "other"):
        capsys.readouterr()
        assert nmt_export([*arguments, str(place)]) == 1
        assert "disagrees with the checkpoint" in capsys.readouterr().err
    assert contents(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["average", "out"]


def test_a_path_that_no_engine_can_open_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / os.fsdecode(b"\xe9")
    with pytest.raises(UserError, match="not UTF-8.*choose another -o DIR"):
        export(checkpoint, "safetensors", out, "float32", LINES)
    assert not out.exists()


def test_an_export_is_replaced_and_nothing_else(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What may be replaced at all is in tests/system/test_output_folder.py."""
    out = tmp_path / "out"
    export(checkpoint, "safetensors", out, "float32", LINES)
    export(checkpoint, "safetensors", out, "float16", LINES)
    assert {weight.dtype for weight in load_file(out / MODEL_FILE).values()} == {torch.float16}
    other = "something other than an export.*-o DIR; nothing"
    for taken, message in ((out, other), (checkpoint.path, "contains the input")):
        (taken / "notes.txt").write_text("mine")
        before = contents(taken)
        for is_forced in (False, True):
            with pytest.raises(UserError, match=message):
                export(checkpoint, "safetensors", taken, "float32", LINES, is_forced=is_forced)
        assert contents(taken) == before


def test_safetensors_hold_the_very_weights_and_the_config(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    assert export(checkpoint, "safetensors", tmp_path / "out", "float32", LINES).largest == 0
    written = load_file(tmp_path / "out" / MODEL_FILE)
    torch.testing.assert_close(written, load_file(checkpoint.path / MODEL_FILE), rtol=0, atol=0)
    with safe_open(tmp_path / "out" / MODEL_FILE, "pt") as file:
        metadata = file.metadata()
    assert metadata["config"] == (checkpoint.path / CONFIG_FILE).read_text()
    assert metadata["vocab_sha256"] == digest_file(checkpoint.path / VOCAB_FILE)


ODD = [
    "</s> a <unk> <pad>",
    "  two  spaces ",
    "don 't , i 'm ok ?",
    "\u65e5\u672c",
    "x\0y",
    "\u2028x\u0085",
    "a \u2581 b",
    "red dog " * 200,
    "\ufb01 \u00bd\u00a0!",
    "\u05e9\u05dc\u05d5\u05dd",
]


@NEEDS_HF
def test_the_tokenizer_gives_our_ids_and_text(
    checkpoint: Checkpoint, vocab: Vocab, tmp_path: Path
) -> None:
    export(checkpoint, "huggingface", tmp_path / "out", "float32", LINES)
    engine = huggingface.HuggingFaceEngine(tmp_path / "out")
    tokenizer = engine.tokenizer
    for line, ids in zip(LINES + ODD, vocab.encode(LINES + ODD), strict=True):
        assert tokenizer(line)["input_ids"] == [*ids, 3], line
    for line, ids in zip(LINES, vocab.encode(LINES), strict=True):
        assert tokenizer.decode([2, *ids, 3, 0], skip_special_tokens=True) == line
    engine.check_tokenizer(vocab, ODD[2:5], ODD[2:5])  # with pieces that are unknown
    tokenizer.decode = lambda *_, **__: ""
    with pytest.raises(Failure, match="tokenizer disagrees on .*: '' instead of 'don t "):
        engine.check_tokenizer(vocab, [], ODD[2:5])


@NEEDS_HF
def test_weights_are_never_unpickled(checkpoint: Checkpoint, tmp_path: Path) -> None:
    export(checkpoint, "huggingface", tmp_path / "out", "float32", LINES)

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "executed"),)

    (tmp_path / "out" / MODEL_FILE).unlink()
    (tmp_path / "out" / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(OSError, match="safetensors"):
        huggingface.HuggingFaceEngine(tmp_path / "out")
    assert not (tmp_path / "executed").exists()


@NEEDS_CT2
def test_ctranslate2_ranks_by_our_penalty(vocab: Vocab, tmp_path: Path) -> None:
    """Of the outputs that it finishes, it returns the best by the formula of the config."""
    config = DecodingConfig(beam=6, max_extra=8, length_penalty=2.0)
    checkpoint = make_exportable(replace(PLAIN, tied=False), vocab, tmp_path / "average")
    export(checkpoint, "ctranslate2", tmp_path / "out", "float32", LINES)
    engine, src = ctranslate2.CTranslate2Engine(tmp_path / "out", 1), vocab.encode(LINES)
    found = engine.translate(src, config)
    log_probs = engine.score(src, [hypothesis.ids for hypothesis in found])
    limit = max(map(len, src)) + config.max_extra
    lengths = [len(hypothesis.ids) for hypothesis in found]
    assert min(lengths) < limit  # one that ended
    for hypothesis, pieces, length in zip(found, log_probs, lengths, strict=True):
        if length < limit:
            score = sum(pieces) / ((5 + length + 1) / 6) ** 2
            assert hypothesis.score == pytest.approx(score, abs=1e-4)
    by_sum = engine.translate(src, replace(config, penalty="none"))
    shorter = [len(hypothesis.ids) for hypothesis in by_sum]
    assert shorter != lengths and all(map(operator.le, shorter, lengths))


@NEEDS_CT2
@pytest.mark.usefixtures("whole_outputs")
def test_an_export_opens_again_when_it_is_whole(checkpoint: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(checkpoint, "ctranslate2", out, "int8", LINES)
    opened = ctranslate2.open_ctranslate2([str(out)], ["device=cpu"]).translator
    assert isinstance(opened, ctranslate2.CTranslate2Translator)
    assert opened.engine.endswith(", int8")
    data = bytearray((out / "model.bin").read_bytes())
    data[-1] ^= 1
    (out / "model.bin").write_bytes(data)
    with pytest.raises(UserError, match="model.bin"):
        ctranslate2.open_ctranslate2([str(out)], [])
    export(checkpoint, "safetensors", tmp_path / "other", "float32", LINES)
    with pytest.raises(UserError, match="export to safetensors"):
        ctranslate2.open_ctranslate2([str(tmp_path / "other")], [])


@NEEDS_HF
def test_the_card_warns_where_marian_forgets(vocab: Vocab, tmp_path: Path) -> None:
    learned = make_exportable(replace(PLAIN, positions="learned"), vocab, tmp_path / "average")
    export(learned, "huggingface", tmp_path / "out", "float32", LINES)
    assert "do not save this model again" in (tmp_path / "out" / "README.md").read_text()
    side = huggingface.HuggingFaceEngine(tmp_path / "out")
    side.model.save_pretrained(tmp_path / "again")
    with safe_open(tmp_path / "again" / MODEL_FILE, "pt") as file:
        # the day this fails, the warning can go
        assert "model.encoder.embed_positions.weight" not in file.keys()


@pytest.mark.parametrize("to", ["ctranslate2", "huggingface"])
def test_a_missing_library_is_reported_with_its_remedy(
    to: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[to], None)
    with pytest.raises(UserError, match=r"pip install -e .*\[export\]'"):
        export(checkpoint, to, tmp_path / "out", "float32", LINES)
    assert not (tmp_path / "out").exists()


MISTAKES = {
    "--check-lines empty": "nothing to compare",
    "--check-lines latin": "latin:2:3",
    "--check-lines none": "No such file",
    "--quantization int8": "--to safetensors does not support it; use one of float32, float16",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_take_one_line(
    words: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").write_text("\n \n\n")
    Path("latin").write_bytes(b"fine\nna\xefve\n")
    command = [str(checkpoint.path), "--to", "safetensors", "-o", "out"]
    assert nmt_export([*command, *words.split()]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert MISTAKES[words] in error and not Path("out").exists()


def test_the_command_offers_every_format() -> None:
    assert list(FORMATS) == list(FORMAT_NAMES)


def test_the_command_takes_lines_of_a_file(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines").write_text("\n".join([*LINES, "", ""]))
    words = f"--to safetensors -o {tmp_path}/new/out --check-lines {tmp_path}/lines".split()
    assert nmt_export([str(checkpoint.path), *words]) == 0
    said = capsys.readouterr()
    assert said.out == "" and f"8 of {len(LINES)} lines greedily the same" in said.err


class WrongEngine(OwnEngine):
    """OwnEngine with one flaw."""

    def __init__(self, model: Transformer, score: float = 0.0, piece: int | None = None) -> None:
        super().__init__(model)
        self.change, self.piece = score, piece

    def score(self, src: Sentences, tgt: Sentences) -> list[list[float]]:
        found = super().score(src, tgt)
        found[0][0] += self.change
        return found

    def translate_greedily(self, src: Sentences, limit: int) -> list[list[int]]:
        found = super().translate_greedily(src, limit)
        if self.piece is not None:
            found[0][-1] = self.piece
        return found


def test_the_comparison_sees_one_wrong_piece_and_one_wrong_score(vocab: Vocab) -> None:
    torch.manual_seed(0)
    model = Transformer(PLAIN, vocab.size)
    ours, src = OwnEngine(model), vocab.encode(LINES)
    same = compare_engines(ours, ours, src, 20)
    assert same == Agreement(len(LINES), 0, 0.0, 0.0) and same.is_within("float32")
    scored = compare_engines(ours, WrongEngine(model, score=2e-4), src, 20)
    assert scored.largest == pytest.approx(2e-4, rel=1e-2)
    assert scored.is_within("int8") and not scored.is_within("float32")
    lost = compare_engines(ours, WrongEngine(model, score=float("nan")), src, 20)
    assert not lost.is_within("int8") and not lost.is_within("float32")
    changed = compare_engines(ours, WrongEngine(model, piece=79), src, 20)
    assert changed.differing == 1 and not changed.is_within("float32")


def test_make_lines_are_the_same_each_time_and_are_text(vocab: Vocab) -> None:
    lines = make_lines(vocab)
    assert lines == make_lines(vocab) and len(set(lines)) == 32
    assert all(vocab.encode([line])[0] for line in lines)


# ---- tags ---------------------------------------------------------------------------------------------------------

TAGS = ("<de>", ">>fr<<")


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Vocab:
    return make_vocab(tmp_path_factory.mktemp("words"), tags=TAGS)


@NEEDS_CT2
@pytest.mark.usefixtures("whole_outputs")
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_tagged_sources_are_translated_alike(
    positions: Literal["sinusoidal", "learned"], tagged: Vocab, tmp_path: Path
) -> None:
    shape = replace(PLAIN, norm="pre", positions=positions)
    checkpoint = make_exportable(shape, tagged, tmp_path / "average", TAGS)
    out = tmp_path / "out"
    found = export(checkpoint, "ctranslate2", out, "float32", [*LINES, " ".join(LINES * 20)])
    assert found.differing == 0 and found.largest < 2e-5
    assert "`line = ['<de>', *line]`" in (out / "README.md").read_text()
    settings = ["decoding.beam=1", "decoding.tag='>>fr<<'", "decoding.max_ratio=0"]
    ours = nmt.api.load(checkpoint.path, settings=settings).translate(LINES)
    theirs = nmt.api.load(out, settings=settings, engine="ctranslate2").translate(LINES)
    untagged = nmt.api.load(checkpoint.path, settings=settings[::2]).translate(LINES)
    texts = [[one.text[:30] for one in found] for found in (ours, theirs, untagged)]
    assert texts[0] == texts[1] != texts[2]  # CTranslate2 ends later


@NEEDS_HF
@pytest.mark.usefixtures("whole_outputs")
def test_hugging_face_knows_the_tags(tagged: Vocab, tmp_path: Path) -> None:
    checkpoint = make_exportable(PLAIN, tagged, tmp_path / "average", TAGS)
    found = export(checkpoint, "huggingface", tmp_path / "out", "float32", LINES)
    assert found.differing == 0 and found.largest < 2e-5
    tokenizer = huggingface.HuggingFaceEngine(tmp_path / "out").tokenizer
    tag, other = map(tagged.find_symbol, TAGS)
    assert tokenizer.convert_tokens_to_ids("<de>") == tag
    (ids,) = tagged.encode([LINES[0]])
    assert tokenizer(f">>fr<< {LINES[0]}")["input_ids"] == [other, *ids, EOS]
    (literal,) = tagged.encode([f"<de> {LINES[0]}"])
    assert tokenizer(f"<de> {LINES[0]}")["input_ids"] == [*literal, EOS]
    assert tag not in literal


@pytest.mark.parametrize("to", [pytest.param("huggingface", marks=[NEEDS_CT2, NEEDS_HF])])
def test_ctranslate2_converts_what_is_exported_as_pegasus(
    to: str, vocab: Vocab, tmp_path: Path
) -> None:
    """As ct2-transformers-converter does."""
    from ctranslate2 import Translator
    from ctranslate2.converters import TransformersConverter

    checkpoint = make_exportable(replace(PLAIN, norm="pre"), vocab, tmp_path / "average")
    export(checkpoint, to, tmp_path / "exported", "float32", LINES)
    TransformersConverter(str(tmp_path / "exported")).convert(str(tmp_path / "converted"))
    sources = vocab.encode(LINES)
    model = Transformer(checkpoint.config.model, vocab.size)
    load_weights(checkpoint, model)
    ours = OwnEngine(model).translate_greedily(sources, 20)
    lines = [[*vocab.pieces(ids), "</s>"] for ids in sources]
    found = Translator(str(tmp_path / "converted")).translate_batch(
        lines,
        beam_size=1,
        max_decoding_length=20,
        suppress_sequences=[["<s>"], ["<pad>"]],  # which trained models never choose
    )
    theirs = [result.hypotheses[0] for result in found]
    assert [vocab.pieces(ids)[:19] for ids in ours] == [pieces[:19] for pieces in theirs]
