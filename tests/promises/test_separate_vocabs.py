"""A vocabulary for each side, from raw text to exports: languages that share no letter, so that no
place can take one vocabulary for the other unnoticed.
"""

import shutil
from pathlib import Path

import ctranslate2
import numpy as np
import sentencepiece
from pytest import TempPathFactory, fixture, mark, raises
from safetensors.torch import load_file
from support.capture import Capture, read_errors
from support.in_process import succeed
from support.once import make_once
from support.text_lines import join_lines, read_json_lines, read_text_lines
from support.toy_corpus import write_toy_config, write_toy_corpus

import nmt.api
from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.commands.export import main as nmt_export
from nmt.commands.score import main as nmt_score
from nmt.commands.train import main as nmt_train
from nmt.commands.translate import main as nmt_translate
from nmt.config_files import load_config
from nmt.data.store import open_store
from nmt.data.vocab import UNK, load_vocab
from nmt.system.errors import UserError
from nmt.system.files import read_json
from nmt.system.run_folder import RunFolder

FILES = ("vocab.src.model", "vocab.tgt.model")
SEPARATE = ["vocab.joint=false", "vocab.size=70", "vocab.tgt_size=60", "model.tied=decoder"]
DRAWN = ["vocab.bpe_dropout=0.1", "training.steps=8"]
CYRILLIC = str.maketrans("abcdefghijklmnopqrstuvwxyzäöüß", "абцдефгхийклмнопярстувшжызэюёч")


def write_corpus(folder: Path) -> Path:
    """Write the toy corpus with its target in other letters."""
    corpus = write_toy_corpus(folder)
    for path in corpus.glob("*.de"):
        path.write_text(path.read_text().lower().translate(CYRILLIC))
    return corpus


@fixture(scope="module")
def ground(tmp_path_factory: TempPathFactory) -> Path:
    """A folder with a run of 8 updates, with BPE-dropout, and its average; tests only read it."""

    def make(folder: Path) -> None:
        write_toy_config(write_corpus(folder), folder)
        assert train(folder, *DRAWN, "training.checkpoint_every=4") == 0
        succeed(nmt_average, folder / "run", "--last", "2")

    return make_once(tmp_path_factory, "separate-vocabs", make)


def train(folder: Path, *settings: str) -> int:
    return nmt_train(["--config", str(folder / "toy.yaml"), *SEPARATE, *settings])


def read_lines(ground: Path, name: str) -> list[str]:
    return read_text_lines(ground / "corpus" / name)


def last_error(capsys: Capture) -> str:
    return read_errors(capsys)[-1]


def test_each_side_has_the_ids_of_its_own_model(ground: Path) -> None:
    store = ground / "store"
    pair = open_store(store, "train", load_vocab(store))
    both = zip(("en", "de"), (pair.src, pair.tgt), FILES, (70, 60), strict=True)
    for language, side, file, size in both:
        spm = sentencepiece.SentencePieceProcessor(str(store / file))
        assert spm.get_piece_size() == size
        expected = spm.encode(read_lines(ground, f"train.{language}"))
        assert side.read_ids(0, len(side.ids)).tolist() == sum(expected, [])
        assert UNK not in side.ids and side.n_pieces == size
        letters = {letter for i in range(4, size) for letter in spm.id_to_piece(i)} - {"\u2581"}
        assert {letter.isascii() for letter in letters} == {language == "en"}
    assert not (store / "vocab.model").exists()


def test_the_ledger_has_both(ground: Path, tmp_path: Path, capsys: Capture) -> None:
    ledger = read_json(ground / "store" / "ledger.json")
    assert [ledger[key]["pieces"] for key in ("bpe", "tgt_bpe")] == [70, 60]
    assert ledger["settings"]["vocab"]["joint"] is False
    again = [*DRAWN, f"out={tmp_path}/again", "training.steps=1"]
    assert train(ground, *again) == 0  # same store
    settings = ["vocab.tgt_size=59", "vocab.joint=true vocab.tgt_size=null model.tied=true"]
    for changes in settings:
        assert train(ground, f"out={tmp_path}/other", *changes.split()) == 2
        assert "was prepared with other settings (vocab." in last_error(capsys)


def test_a_checkpoint_has_both_and_continues_exactly(ground: Path, tmp_path: Path) -> None:
    run = RunFolder(ground / "run")
    for folder in (run.path, run.checkpoint(4), run.average):
        assert [path.name for path in sorted(folder.glob("vocab.*"))] == list(FILES)
        assert load_vocab(folder).digest == load_vocab(ground / "store").digest
    weights = load_file(run.checkpoint(8) / "model.safetensors")
    assert weights["src_embedding.weight"].shape == (70, 16)
    assert weights["tgt_embedding.weight"].shape == (60, 16)
    for steps in (3, 8):
        settings = [*DRAWN, f"out={tmp_path}/parts", f"training.steps={steps}"]
        assert train(ground, *settings) == 0
    found = load_file(RunFolder(tmp_path / "parts").checkpoint(8) / "model.safetensors")
    assert all((found[name] == weights[name]).all() for name in weights)


def test_what_does_not_fit_together_is_refused(
    ground: Path, tmp_path: Path, capsys: Capture
) -> None:
    for settings, expected in (
        ("model.tied=true", "set model.tied=decoder or false"),
        ("model.tied=embeddings", "set model.tied=decoder or false"),
        ("vocab.joint=true", "tgt_size is 60, but both languages share one vocabulary"),
        ("vocab.model=a.model", "needs both model and tgt_model, or neither"),
        ("model.vocab_rows=69", "model.vocab_rows is 69, but vocab.size is 70"),
        ("model.vocab_rows=79 vocab.tgt_size=80", "but vocab.tgt_size is 80"),
        ("vocab.tgt_size=5000", "vocab.tgt_size: 5000 is too large for so little text"),
        ("vocab.model=x vocab.tgt_model=y", "vocab.model: "),
    ):
        store = tmp_path / "store"
        assert train(ground, f"out={tmp_path}/out", f"data.store={store}", *settings.split()) == 2
        assert expected in last_error(capsys) and not (store / "manifest.json").exists()

    # files that do not belong together
    mixed = tmp_path / "mixed"
    shutil.copytree(ground / "run" / "average", mixed)
    shutil.copy(mixed / FILES[1], mixed / FILES[0])
    with raises(UserError, match=r"vocab\.src\.model: is damaged"):
        open_checkpoint(mixed)


def test_training_starts_from_its_weights(ground: Path, tmp_path: Path, capsys: Capture) -> None:
    start = [f"training.init_from={ground}/run/average", f"out={tmp_path}/tuned"]
    start += [f"data.store={tmp_path}/store", "training.steps=1", "evaluation.bleu=false"]
    assert train(ground, *start) == 0
    assert load_vocab(tmp_path / "store").digest == load_vocab(ground / "run").digest
    joint = ["vocab.joint=true", "vocab.tgt_size=null", "model.tied=true"]
    assert train(ground, *start, *joint) == 2
    assert "was trained with vocab.joint=false; set the same here" in last_error(capsys)


def test_it_translates_scores_and_evaluates(ground: Path, tmp_path: Path, capsys: Capture) -> None:
    run = shutil.copytree(ground / "run", tmp_path / "run")
    average = str(run / "average")
    files = [str(ground / "corpus" / name) for name in ("test.en", "test.de")]
    lines = read_lines(ground, "test.en")

    # the text is what SentencePiece makes of the ids
    out = tmp_path / "out.json"
    aligned = ["--json", "--alignments", "-i", files[0], "-o", str(out)]
    succeed(nmt_translate, average, *aligned)
    src, tgt = (sentencepiece.SentencePieceProcessor(f"{average}/{name}") for name in FILES)
    rows = read_json_lines(out)
    for line, row in zip(lines, rows, strict=True):
        (best,) = row["candidates"]
        assert best["text"] == tgt.decode_pieces(best["pieces"])
        assert row["source_pieces"] == src.encode(line, out_type=str)

    # a prefix is the target's
    prefixes = tmp_path / "prefixes"
    starts = [line.split()[0] for line in read_lines(ground, "test.de")]
    prefixes.write_text(join_lines(starts))
    arguments = ["--prefix", str(prefixes), "-i", files[0], "-o", str(tmp_path / "forced")]
    succeed(nmt_translate, average, *arguments)
    forced = read_text_lines(tmp_path / "forced")
    assert all(text.startswith(start) for text, start in zip(forced, starts, strict=True))

    # a score is that of the search; an ensemble of a model with itself is the model
    translator = nmt.api.load(average, average, settings=["decoding.beam=2"])
    capsys.readouterr()
    hypotheses = translator.translate(lines)
    (tmp_path / "hyp").write_text("".join(one.text + "\n" for one in hypotheses))
    scored = ["--src", files[0], "--tgt", str(tmp_path / "hyp"), "--score", "search"]
    succeed(nmt_score, average, *scored)
    scores = np.array([float(line) for line in capsys.readouterr().out.split()])
    is_same = []
    for one in hypotheses:  # a search may write a text in pieces that nobody would cut it into
        is_same.append(list(one.piece_ids) == tgt.encode(one.text))
    expected = np.array([one.score for one in hypotheses])
    assert any(is_same) and np.allclose(scores[is_same], expected[is_same], atol=1e-4)

    succeed(nmt_eval, average)
    record = read_json(run / "results.json")[-1]
    assert record["vocab_sha256"] == load_vocab(run).digest
    card = (run / "average" / "README.md").read_text()
    assert (
        "BPE of each language (SentencePiece), 70 + 60" in card and f"sha256 of {FILES[1]}" in card
    )


@mark.parametrize("to", ["ctranslate2", "huggingface", "safetensors"])
def test_an_export_agrees_with_the_checkpoint(to: str, ground: Path, tmp_path: Path) -> None:
    out = tmp_path / to
    lines = ["--check-lines", str(ground / "corpus" / "test.en")]
    succeed(nmt_export, ground / "run" / "average", "--to", to, "-o", out, *lines)
    record = read_json(out / "export.json")
    assert record["check"]["differing"] == 0 and record["check"]["largest"] < 1e-4
    if to == "ctranslate2":
        src, tgt = (sentencepiece.SentencePieceProcessor(str(out / name)) for name in FILES)
        engine = ctranslate2.Translator(str(out))
        text = read_lines(ground, "test.en")[0]
        pieces = src.encode(text, out_type=str)
        limits = {"min_decoding_length": 0, "max_decoding_length": 5}  # its own minimum is 1
        (found,) = engine.translate_batch([pieces], beam_size=1, **limits)
        expected = nmt.api.load(
            ground / "run" / "average", settings=["decoding.beam=1", "decoding.max_ratio=0"]
        )
        assert tgt.decode(found.hypotheses[0]) == expected.translate([text])[0].text
        ours = nmt.api.load(out, engine="ctranslate2").translate([text])[0].text
        assert not set(ours) & set("abcdefghijklmnopqrstuvwxyz")
    if to == "huggingface":
        from transformers import MarianTokenizer

        target = read_lines(ground, "test.de")[0]
        tokenizer = MarianTokenizer.from_pretrained(str(out))
        ids = tokenizer(text_target=target)["input_ids"]
        assert ids[:-1] == load_vocab(ground / "run").tgt.encode([target])[0]


def test_an_export_that_has_one_vocabulary_is_refused(
    ground: Path, tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    assert train(ground, f"out={run}", "model.norm=pre", "training.steps=1") == 0
    assert nmt_export([str(run), "--to", "huggingface", "-o", str(tmp_path / "hf")]) == 2
    assert "vocab.joint is false and model.norm is pre" in last_error(capsys)


def test_a_tag_is_a_symbol_of_the_source_alone(ground: Path, tmp_path: Path) -> None:
    corpus = "{src: train.en, tgt: train.de, tag: <ru>}"
    settings = [*SEPARATE, f"data.train=[{corpus}]", f"data.store={tmp_path}/store"]
    config = load_config(str(ground / "toy.yaml"), settings)
    nmt.api.prepare(config)
    vocab = load_vocab(tmp_path / "store")
    train_set = open_store(tmp_path / "store", "train", vocab)
    tag = vocab.src.find_symbol("<ru>")
    assert (train_set.src.ids[train_set.src.offsets[:-1]] == tag).all()
    with raises(UserError, match="is not a symbol of this BPE model"):
        vocab.tgt.find_symbol("<ru>")
