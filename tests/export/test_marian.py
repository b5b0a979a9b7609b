"""A Marian model of the Hugging Face hub computes here what it computes in transformers.

No published weights are needed: the folders have the files that OPUS-MT has, with random weights and
SentencePiece models of the kind that it was trained with.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from support.fake_hub import run_hub, use_hub
from support.finished_run import read_lines
from support.needs import needs_package
from support.once import make_once
from support.toy_corpus import sentences
from support.untrained import SHAPE, make_checkpoint

from nmt.api import convert_published, open_model
from nmt.checkpoint.checkpoint import Checkpoint
from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.commands.export import main as nmt_export
from nmt.commands.init import main as nmt_init
from nmt.commands.score import main as nmt_score
from nmt.commands.train import main as nmt_train
from nmt.commands.translate import main as nmt_translate
from nmt.data.batch import pack
from nmt.data.vocab import BOS, EOS, UNK, Vocab
from nmt.extras.export import parity
from nmt.system.errors import UserError
from nmt.translate.translator import Translator

pytestmark = needs_package("transformers")
PAIRS = sentences(300, seed=1)
LINES = [src for src, _ in sentences(8, seed=5)]
CASES = ("one table", "two tables", "pickled", "tags")


@pytest.fixture
def publish(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a folder of a case, the test's own copy."""

    def copy(case: str) -> Path:
        made = make_once(tmp_path_factory, f"marian {case}", partial(write_folder, case=case))
        return shutil.copytree(made, tmp_path / "published")

    return copy


def write_folder(folder: Path, case: str) -> None:
    from transformers import MarianConfig, MarianMTModel

    # two SentencePiece models as SentencePiece trains them by default
    pieces = []
    for side, name in enumerate(("source", "target")):
        text = folder / f"{name}.txt"
        text.write_text("".join(pair[side] + "\n" for pair in PAIRS))
        sentencepiece.SentencePieceTrainer.train(
            input=str(text),
            model_prefix=str(folder / name),
            vocab_size=70,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (folder / f"{name}.model").rename(folder / f"{name}.spm")
        (folder / f"{name}.vocab").unlink()
        text.unlink()
        processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{name}.spm"))
        pieces.append([processor.id_to_piece(i) for i in range(3, len(processor))])

    # one table of ids, in which a piece is missing, or two
    tags = [">>deu<<", ">>fra<<"] if case == "tags" else []
    has_two = case == "two tables"
    sides = pieces if has_two else [[*tags, *pieces[0][:-1], *pieces[1]]]
    tables = []
    size = max(map(len, sides))
    for texts, name in zip(sides, ("vocab", "target_vocab"), strict=False):
        fillers = [f"filler{i}" for i in range(size - len(texts))]
        texts = ["</s>", "<unk>", *dict.fromkeys(texts), *fillers, "<pad>"]
        tables.append({text: i for i, text in enumerate(texts)})
        (folder / f"{name}.json").write_text(json.dumps(tables[-1]))
    tokenizer = {"source_lang": "en", "target_lang": "de", "separate_vocabs": has_two}
    tokenizer |= {"tokenizer_class": "MarianTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))

    # random weights; outputs end now and then
    torch.manual_seed(1)
    heads = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    widths = {f"{side}_ffn_dim": 24 for side in ("encoder", "decoder")}
    config = MarianConfig(
        vocab_size=len(tables[0]),
        decoder_vocab_size=len(tables[-1]),
        d_model=16,
        encoder_layers=2,
        decoder_layers=1,
        **heads,
        **widths,
        activation_function="swish",
        pad_token_id=tables[0]["<pad>"],
        decoder_start_token_id=tables[0]["<pad>"] if not has_two else 0,
        eos_token_id=0,
        bos_token_id=0,
        forced_eos_token_id=0,
        scale_embedding=True,
        max_position_embeddings=64,
        share_encoder_decoder_embeddings=not has_two,
        tie_word_embeddings=not has_two,
        init_std=0.3,
    )
    model = MarianMTModel(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "embed" not in name:
                p.add_(torch.randn_like(p), alpha=0.2)
        model.final_logits_bias.normal_()
        model.final_logits_bias[0, 0] = 1.5
    model.save_pretrained(folder)
    if case == "pickled":
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()


def open_both(folder: Path, *settings: str) -> tuple[Translator, Any, Any]:
    from transformers import MarianMTModel, MarianTokenizer

    ours = open_model([str(folder)], settings).translator
    assert isinstance(ours, Translator)
    theirs = MarianMTModel.from_pretrained(str(folder)).eval()
    return ours, theirs, MarianTokenizer.from_pretrained(str(folder))


def open_converted(name: str | Path) -> Checkpoint:
    return open_checkpoint(convert_published(name))


@pytest.fixture(autouse=True)
def keep_caches_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_it_computes_what_transformers_computes(case: str, publish: Callable[[str], Path]) -> None:
    folder = publish(case)
    ours, theirs, tokenizer = open_both(folder, "decoding.max_extra=40", "decoding.beam=1")
    tag = ">>deu<<" if case == "tags" else ""
    if tag:
        ours.set_tag(tag)
    vocab, model = ours.vocab, ours.model
    prefix = [vocab.src.find_symbol(tag)] if tag else []
    targets = [tgt for _, tgt in sentences(len(LINES), seed=5)]

    # logits of each piece, in their order of ids
    both = zip(LINES, targets, vocab.src.encode(LINES), vocab.tgt.encode(targets), strict=True)
    for src, tgt, src_ids, tgt_ids in both:
        inputs = tokenizer(tag + src, text_target=tgt, return_tensors="pt")
        labels = inputs.pop("labels")
        start = theirs.config.decoder_start_token_id
        before = torch.cat((torch.tensor([[start]]), labels[:, :-1]), 1)
        expected = theirs(**inputs, decoder_input_ids=before).logits[0].log_softmax(1)
        hidden = model(pack([[*prefix, *src_ids, EOS]]), pack([[BOS, *tgt_ids]]))
        found = model.projection(hidden).log_softmax(1)
        assert len(found) == len(expected)
        expected = expected.gather(1, labels.T)
        found = found.gather(1, torch.tensor([*tgt_ids, EOS])[:, None])
        assert torch.allclose(found, expected, atol=1e-5)

    # translations; greedy, because transformers' beam takes an end that it forces for certain
    translations = [one.text for one in ours.translate(LINES)]
    for line, translation in zip(LINES, translations, strict=True):
        ids = theirs.generate(
            **tokenizer(tag + line, return_tensors="pt"),
            num_beams=1,
            max_new_tokens=41,
            bad_words_ids=[[theirs.config.pad_token_id]],
        )
        assert translation == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert len(set(translations)) > 3


def test_a_piece_that_the_table_lacks_is_unknown_as_there(
    publish: Callable[[str], Path],
) -> None:
    folder = publish("one table")
    ours, theirs, tokenizer = open_both(folder)
    processor = tokenizer.spm_source
    lacking = processor.id_to_piece(len(processor) - 1)
    assert tokenizer.convert_tokens_to_ids(lacking) == tokenizer.unk_token_id
    weights = ours.model.src_embedding.weight
    i = ours.vocab.src.encode([lacking.replace("\u2581", " ")])[0][-1]
    assert i != UNK and torch.equal(weights[i], weights[UNK])


def test_a_model_that_nmt_exported_comes_back(vocab: Vocab, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "average", vocab))
    out = tmp_path / "exported"
    assert nmt_export([str(checkpoint.path), "--to", "huggingface", "-o", str(out)]) == 0
    found = open_converted(out)
    assert found.vocab.digest == vocab.digest and found.config.model.tied == SHAPE.tied
    lines = {}
    for path in (checkpoint.path, out):
        settings = ["decoding.preset=vaswani2017", "decoding.max_extra=5"]
        opened = open_model([str(path)], settings).translator
        lines[path] = [one.text for one in opened.translate(LINES)]
    assert lines[out] == lines[checkpoint.path]


@pytest.mark.parametrize("case", ["one table", "two tables"])
def test_it_goes_on_to_marians_own_files(
    case: str, publish: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Marian's rates, which such models were trained with; transformers has the paper's, and so has what was
    converted. These weights are random, so the two differ by more than those of a trained model would.
    """
    monkeypatch.setitem(parity.MAX_MEAN, "sinusoidal", 9.0)
    monkeypatch.setattr("nmt.extras.export.export.MAX_COMPARED", 20)
    lines, out = tmp_path / "lines", tmp_path / "out"
    lines.write_text("".join(f"{line}\n" for line in LINES))
    command = [str(publish(case)), "--to", "marian", "-o", str(out), "--check-lines", str(lines)]
    assert nmt_export(command) == 0
    check = json.loads((out / "export.json").read_text())["check"]
    assert (check["differing"], check["largest"] < 1e-4) == (0, True)
    assert len(list(out.glob("*.spm"))) == 2


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"model_type": "m2m_100"}, "model_type is 'm2m_100'; only marian"),
        ("config.json", {"decoder_ffn_dim": 25}, "decoder_ffn_dim is 25; only encoder_ffn_dim"),
        ("config.json", {"d_model": "wide"}, "d_model is 'wide'; expected a number"),
        ("config.json", {"activation_function": "glu"}, "activation_function is 'glu'; use one"),
        ("vocab.json", {"a": -1}, "is not a table of at most 65,536 pieces"),
        ("vocab.json", {"a": 9_999}, "its weights, pieces and settings do not fit each other"),
        ("config.json", {"d_model": 32}, "has shape"),
        ("source.spm", None, "damaged SentencePiece model"),
        ("model.safetensors", None, "its weights cannot be read"),
        ("target.spm", {}, "target.spm: cannot be read"),
    ],
)
def test_what_is_not_supported_or_damaged_is_refused_by_name(
    file: str,
    change: dict[str, Any] | None,
    message: str,
    publish: Callable[[str], Path],
) -> None:
    folder = publish("one table")
    path = folder / file
    if change is None:
        path.write_bytes(path.read_bytes()[:100])
    elif not change:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message):
        open_converted(folder)


@pytest.mark.parametrize("case", ["two tables", "one table"])
def test_a_config_that_continues_it_trains_and_scores_it_first(
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    publish: Callable[[str], Path],
) -> None:
    folder = publish(case)
    monkeypatch.chdir(tmp_path)
    for side, name in enumerate(("my.en", "my.de")):
        pairs = sentences(1_500, seed=9)
        (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in pairs))
    text = ["--src", "my.en", "--tgt", "my.de"]
    assert nmt_init(["--from", str(folder), *text, "-o", "tuned.yaml"]) == 0
    settings = ["training.steps=3", "training.validate_every=2", "optimizer.warmup_steps=2"]
    settings += ["training.precision=fp32", "decoding.max_extra=10"]
    assert nmt_train(["--config", "tuned.yaml", *settings]) == 0
    steps = [line["step"] for line in read_lines(tmp_path / "runs" / "tuned", "valid")]
    assert steps == [0, 2, 3]
    assert not (tmp_path / "runs" / "tuned" / "checkpoints" / "step-0000000").exists()
    found = open_checkpoint(tmp_path / "runs" / "tuned")
    assert found.vocab.digest == open_converted(folder).vocab.digest
    assert found.config.model == open_converted(folder).config.model

    # the converted model replaces itself, and nothing else
    assert nmt_init(["--from", str(folder), *text, "-o", "tuned.yaml"]) == 0
    (tmp_path / "other.start").mkdir()
    (tmp_path / "other.start" / "thesis.txt").write_text("years of work")
    assert nmt_init(["--from", str(folder), *text, "-o", "other.yaml"]) == 2
    assert (tmp_path / "other.start" / "thesis.txt").read_text() == "years of work"

    # without a config there is a remedy
    capsys.readouterr()
    for name in (str(folder), "hf:some/model"):
        assert nmt_train(["--config", "tuned.yaml", f"training.init_from={name}"]) == 2
        assert f"nmt-init --from {name} writes a config" in capsys.readouterr().err


def test_a_model_of_the_hub_is_fetched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish: Callable[[str], Path]
) -> None:
    """By the hub's own library, from a server that answers as the hub does."""
    folder = publish("one table")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with run_hub("some/model", files, "models") as hub:
        use_hub(monkeypatch, hub.endpoint, tmp_path / "cache")
        fetched, own = open_converted("hf:some/model"), open_converted(folder)
        for name in ("model.safetensors", "vocab.src.model", "vocab.tgt.model"):
            assert fetched.sha256[name] == own.sha256[name]
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    assert open_converted("hf:some/model").sha256 == fetched.sha256  # without a network
    with pytest.raises(UserError, match="hf:some/other: cannot be fetched from the hub"):
        open_converted("hf:some/other")


def test_offline_a_model_that_was_never_fetched_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for variable in ("HF_HUB_OFFLINE", "WANDB_MODE"):  # which --offline sets
        monkeypatch.setenv(variable, "1")
    assert nmt_eval(["hf:some/model", "--offline"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nmt-eval: error: hf:some/model: cannot be fetched from the hub (")


def test_commands_convert_it_and_opening_a_checkpoint_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], publish: Callable[[str], Path]
) -> None:
    folder = publish("one table")
    for name in (folder, Path("hf:some/model")):
        with pytest.raises(UserError):
            open_checkpoint(name)
    assert not (tmp_path / "cache").exists()

    text, other = tmp_path / "text", tmp_path / "other"
    for file in (text, other):
        file.write_text("".join(f"{line}\n" for line in LINES[:3]))
    out, settings = tmp_path / "out", ["decoding.max_extra=5", "device=cpu"]
    files = ["--src", str(text), "--tgt", str(other)]
    assert nmt_translate([str(folder), "-i", str(text), "-o", str(out), *settings]) == 0
    assert "converting" in capsys.readouterr().err
    assert nmt_score([str(folder), *files, "device=cpu"]) == 0
    files[2] = "--ref"
    for more in ([], ["--ensemble", str(folder)]):
        assert nmt_eval([str(folder), *more, *files, "--force", *settings]) == 0
    exported, average = str(tmp_path / "exported"), str(tmp_path / "average")
    assert nmt_export([str(folder), "--to", "safetensors", "-o", exported]) == 0
    assert nmt_average([str(folder), "-o", average]) == 0
    assert "converting" not in capsys.readouterr().err
    assert open_checkpoint(Path(average)).config == open_converted(folder).config
