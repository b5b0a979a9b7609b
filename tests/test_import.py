"""Models of other hands say here what they say at home, and what cannot is refused in one line, unexecuted.

The outside truth is transformers itself for Marian and Pegasus, and for fairseq a forward pass written here from its
documented layout. All models are random, with noise on every LayerNorm and bias, so that an exchanged tensor shows.
"""

import argparse
import importlib.util
import io
import json
import math
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from conftest import sentences
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from soaking import IS_SOAK
from torch import Tensor

from nmt.batch import pack
from nmt.checkpoint import CONFIG, MODEL, PARTS, STATE, VOCAB, load
from nmt.commands.adopt import main as nmt_import
from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.commands.export import main as nmt_export
from nmt.commands.translate import main as nmt_translate
from nmt.config import DecodingConfig, ModelConfig, RunConfig, dump
from nmt.decode.beam import search
from nmt.decode.translator import Translator, make_translator
from nmt.files import MANIFEST, digest, seal, write_json, write_text
from nmt.model.transformer import Transformer
from nmt.publish import adoption
from nmt.publish.agreement import Ours
from nmt.publish.pieces import PieceModel

NEEDS_HF = pytest.mark.skipif(importlib.util.find_spec("transformers") is None,
                              reason="transformers is not installed; pip install 'nmt[export]'")
PAIRS = sentences(8, seed=5)
LINES = [src for src, _ in PAIRS] + ["a quite unheard-of caf\u00e9", "dog"]
TARGETS = [tgt for _, tgt in PAIRS] + ["ein hund", "unerh\u00f6rt"]
D, D_FF, HEADS, LAYERS = 32, 48, 4, 2
GREEDY = DecodingConfig(beam=1, penalty="none", max_extra=20)


def spm(kind: str, side: int | None = None, size: int = 90, **options: Any) -> bytes:
    """A SentencePiece model with the ids that spm_train gives: unk 0, bos 1, eos 2, no pad."""
    model = io.BytesIO()
    lines = [text for pair in sentences(200, seed=1) for text in (pair if side is None else pair[side:side + 1])]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, model_type=kind,
                                             vocab_size=size, hard_vocab_limit=False, minloglevel=2, **options)
    return model.getvalue()


@pytest.fixture(scope="session")
def models() -> dict[str, bytes]:
    return {"bpe": spm("bpe"), "unigram": spm("unigram"), "source": spm("unigram", 0, 50),
            "target": spm("unigram", 1, 50), "target-bpe": spm("bpe", 1, 50)}


def texts(model: bytes) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(processor.get_piece_size())]


def noisy(state: dict[str, Tensor], seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: value + 0.3 * torch.randn(value.shape, generator=generator) for name, value in state.items()}


# ---- Hugging Face ----------------------------------------------------------------------------------------------------

def hub_folder(folder: Path, source: bytes, target: bytes | None = None, kind: str = "Marian", logits_bias: bool = True,
               start: str = "<pad>", has_bos: bool = False, **options: Any) -> Path:
    """As Helsinki-NLP's are: </s> 0, <unk> 1, pieces in an order of their own, <pad> last, no <s>."""
    import transformers

    known = dict.fromkeys(texts(source) + texts(target or source))
    pieces = ["</s>", "<unk>", *sorted(set(known) - {"</s>", "<unk>", "<s>"}), *["<s>"] * has_bos, "<pad>"]
    ids = {text: i for i, text in enumerate(pieces)}
    settings = dict(
        vocab_size=len(ids), d_model=D, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=D_FF, decoder_ffn_dim=D_FF, activation_function="relu",
        scale_embedding=True, max_position_embeddings=128, pad_token_id=ids["<pad>"], eos_token_id=ids["</s>"],
        bos_token_id=None, decoder_start_token_id=ids[start], forced_eos_token_id=None) | options
    made = {"Marian": (transformers.MarianConfig, transformers.MarianMTModel),
            "Pegasus": (transformers.PegasusConfig, transformers.PegasusForConditionalGeneration)}[kind]
    torch.manual_seed(1)
    model = made[1](made[0](**settings))
    with torch.no_grad():
        for name, value in noisy({name: p for name, p in model.named_parameters() if "positions" not in name}).items():
            model.get_parameter(name).copy_(value)
        if logits_bias:
            model.final_logits_bias.copy_(3 * torch.randn_like(model.final_logits_bias))
    model.save_pretrained(folder)
    (folder / "source.spm").write_bytes(source)
    (folder / "target.spm").write_bytes(target or source)
    write_json(folder / "vocab.json", ids)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "MarianTokenizer", "source_lang": "en",
                                                  "target_lang": "de",
                                                  "eos_token": {"__type": "AddedToken", "content": "</s>"}})
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert nmt_import([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
    out, error = capsys.readouterr()
    assert out == ""
    return error.splitlines()[-1]


def from_hub(capsys: pytest.CaptureFixture[str], folder: Path, out: Path) -> str:
    return run(capsys, folder, "--from", "huggingface", "-o", out)


def opened(folder: Path) -> Translator:
    return make_translator(load(folder), torch.device("cpu"), GREEDY)


CASES: dict[str, dict[str, Any]] = {
    "marian": {},
    "pegasus": {"kind": "Pegasus"},
    "unigram, starts with </s>": {"source": "unigram", "start": "</s>"},
    "two models": {"source": "source", "target": "target"},
    "untied": {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False},
    "projection apart": {"tie_word_embeddings": False},
    "source apart": {"share_encoder_decoder_embeddings": False},
    "pegasus untied, no bias on logits": {"kind": "Pegasus", "tie_word_embeddings": False, "logits_bias": False},
    "with <s>": {"has_bos": True, "start": "<s>", "logits_bias": False}}

FEW_CASES = ["marian", "two models", "pegasus untied, no bias on logits", "with <s>"]  # the others in make soak


@NEEDS_HF
@pytest.mark.parametrize("case", CASES if IS_SOAK else FEW_CASES)
def test_hugging_face_models_say_the_same_here(case: str, models: dict[str, bytes], tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    options = {"source": "bpe"} | CASES[case]
    options |= {key: models[options[key]] for key in ("source", "target") if key in options}
    folder = hub_folder(tmp_path / "hub", **options)
    said = from_hub(capsys, folder, tmp_path / "out")
    assert "compared with transformers: 32 of 32 lines" in said
    ours = opened(tmp_path / "out")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    src, tgt = ours.vocab.encode(LINES), ours.vocab.encode(TARGETS)
    scores = Ours(ours.model).score(src, tgt)
    for line, target, judged in zip(LINES, tgt, scores, strict=True):
        given = tokenizer(line, return_tensors="pt")
        labels = torch.tensor([tokenizer.convert_tokens_to_ids([*ours.vocab.pieces(target), "</s>"])])
        with torch.inference_mode():
            logits = theirs(**given, labels=labels).logits[0]
        expected = logits.log_softmax(1).gather(1, labels.T).squeeze(1)
        known = labels[0] != 1  # a piece that they lack has no probability of its own
        assert known.any() and (expected - torch.tensor(judged))[known].abs().max() < 2e-5
        made = theirs.generate(**given, max_new_tokens=given["input_ids"].shape[1] - 1 + 20, num_beams=1,
                               do_sample=False, suppress_tokens=[tokenizer.pad_token_id])
        (found,), = search(ours.model, pack([[*ours.vocab.encode([line])[0], 3]]), GREEDY)
        pieces = tokenizer.convert_ids_to_tokens(made[0])[1:]
        assert ours.vocab.pieces(found.ids) == pieces[:-1 if pieces[-1] == "</s>" else None]
    config = load(tmp_path / "out").config
    assert config.model.attention_bias and config.model.tied == (case == "with <s>")
    assert (config.data.src, config.data.tgt) == ("en", "de")


@NEEDS_HF
def test_learned_positions_come_along(models: dict[str, bytes], tmp_path: Path,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    folder = hub_folder(tmp_path / "hub", models["bpe"])
    weights = load_file(folder / MODEL)
    weights["model.encoder.embed_positions.weight"] = torch.randn(128, D)
    save_file(weights, folder / MODEL, metadata={"format": "pt"})
    assert "32 of 32" in from_hub(capsys, folder, tmp_path / "out")
    config = load(tmp_path / "out").config
    assert (config.model.positions, config.model.max_positions, config.data.clean.max_pieces) == ("learned", 128, 127)


@NEEDS_HF
@pytest.mark.parametrize("shape", [
    ModelConfig(d_model=D, d_ff=D_FF, n_heads=HEADS, n_layers=LAYERS, attention_bias=True),
    ModelConfig(d_model=D, d_ff=D_FF, n_heads=HEADS, n_layers=LAYERS, norm="pre", tied=False, positions="learned")])
def test_an_export_comes_back_as_it_was(shape: ModelConfig, models: dict[str, bytes], tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    vocab = PieceModel(models["bpe"], "x").with_our_ids()
    torch.manual_seed(2)
    weights = noisy({name: p.detach() for name, p in Transformer(shape, vocab.size).named_parameters()})
    origin = tmp_path / "average"
    origin.mkdir()
    save_file(weights, origin / MODEL)
    write_json(origin / STATE, {"averaged": ["step-0000010"], "step": 10})
    write_text(origin / CONFIG, dump(RunConfig(model=shape)))
    (origin / VOCAB).write_bytes(vocab.model)
    seal(origin)
    assert nmt_export([str(origin), "--to", "huggingface", "-o", str(tmp_path / "export")]) == 0
    from_hub(capsys, tmp_path / "export", tmp_path / "back")
    back = load_file(tmp_path / "back" / MODEL)
    assert back.keys() == weights.keys()
    spare = {"src_embedding.weight": [0, 2], "tgt_embedding.weight": [0]} if not shape.tied else {}
    for name, value in weights.items():
        rows = [i for i in range(len(value)) if i not in spare.get(name, [])]  # never looked up
        assert torch.equal(back[name][rows], value[rows]), name
    assert digest(tmp_path / "back" / VOCAB) == digest(origin / VOCAB)
    assert load(tmp_path / "back").config.model == replace(shape, max_positions=1024, dropout=0.1)


@NEEDS_HF
def test_a_pickled_file_of_weights_alone_comes_in(models: dict[str, bytes], tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    folder = hub_folder(tmp_path / "hub", models["bpe"])
    from_hub(capsys, folder, tmp_path / "a")
    torch.save(load_file(folder / MODEL), folder / "pytorch_model.bin")
    (folder / MODEL).unlink()
    (tmp_path / "cache").mkdir()
    for path in folder.iterdir():  # as the hub's cache is made
        (tmp_path / "cache" / path.name).symlink_to(path)
    from_hub(capsys, tmp_path / "cache", tmp_path / "b")
    assert digest(tmp_path / "a" / MODEL) == digest(tmp_path / "b" / MODEL)


# ---- fairseq ---------------------------------------------------------------------------------------------------------

class Fairseq:
    """Its forward pass over one sentence, from the layout of its state dict: batches and caches left out."""

    def __init__(self, weights: dict[str, Tensor], is_pre: bool, is_learned: bool) -> None:
        self.weights, self.is_pre, self.is_learned = weights, is_pre, is_learned

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (D,), self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def attention(self, x: Tensor, memory: Tensor, name: str, is_causal: bool) -> Tensor:
        q, k, v = (self.linear(y, f"{name}.{part}_proj").view(-1, HEADS, D // HEADS).transpose(0, 1)
                   for part, y in (("q", x), ("k", memory), ("v", memory)))
        scores = q @ k.transpose(1, 2) / math.sqrt(D // HEADS)
        if is_causal:
            scores = scores + torch.full(scores.shape[1:], -torch.inf).triu(1)
        return self.linear((scores.softmax(2) @ v).transpose(0, 1).reshape(-1, D), f"{name}.out_proj")

    def before(self, x: Tensor, name: str) -> Tensor:
        return self.norm(x, name) if self.is_pre else x

    def after(self, x: Tensor, name: str) -> Tensor:
        return x if self.is_pre else self.norm(x, name)

    def stack(self, ids: list[int], side: str, memory: Tensor | None = None) -> Tensor:
        x = self.weights[f"{side}.embed_tokens.weight"][ids] * math.sqrt(D)
        if self.is_learned:
            x = x + self.weights[f"{side}.embed_positions.weight"][2:2 + len(ids)]
        else:
            angles = [[(2 + i) / 10_000 ** (j / (D // 2 - 1)) for j in range(D // 2)] for i in range(len(ids))]
            x = x + torch.tensor([[*map(math.sin, row), *map(math.cos, row)] for row in angles])
        for i in range(LAYERS):
            name = f"{side}.layers.{i}"
            y = self.before(x, f"{name}.self_attn_layer_norm")
            x = self.after(x + self.attention(y, y, f"{name}.self_attn", memory is not None),
                           f"{name}.self_attn_layer_norm")
            if memory is not None:
                y = self.before(x, f"{name}.encoder_attn_layer_norm")
                x = self.after(x + self.attention(y, memory, f"{name}.encoder_attn", False),
                               f"{name}.encoder_attn_layer_norm")
            y = self.before(x, f"{name}.final_layer_norm")
            x = self.after(x + self.linear(self.linear(y, f"{name}.fc1").relu(), f"{name}.fc2"),
                           f"{name}.final_layer_norm")
        return self.norm(x, f"{side}.layer_norm") if self.is_pre else x

    def log_probabilities(self, src: list[int], tgt: list[int]) -> Tensor:
        """Of each piece of `tgt` and of its end; ids are those of fairseq, 2 is </s>."""
        memory = self.stack([*src, 2], "encoder")
        logits = self.stack([2, *tgt], "decoder", memory) @ self.weights["decoder.output_projection.weight"].T
        return logits.log_softmax(1).gather(1, torch.tensor([*tgt, 2])[:, None]).squeeze(1)


def fairseq_weights(n_src: int, n_tgt: int, is_pre: bool, is_learned: bool, sharing: str) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for side, n in (("encoder", n_src), ("decoder", n_tgt)):
        shapes[f"{side}.embed_tokens.weight"] = (n, D)
        if is_learned:
            shapes[f"{side}.embed_positions.weight"] = (130, D)
        for i in range(LAYERS):
            name = f"{side}.layers.{i}"
            for attention in ("self_attn", "encoder_attn")[:1 + (side == "decoder")]:
                shapes |= {f"{name}.{attention}.{part}_proj.weight": (D, D) for part in ("q", "k", "v", "out")}
                shapes |= {f"{name}.{attention}.{part}_proj.bias": (D,) for part in ("q", "k", "v", "out")}
                shapes |= {f"{name}.{attention}_layer_norm.{part}": (D,) for part in ("weight", "bias")}
            shapes |= {f"{name}.fc1.weight": (D_FF, D), f"{name}.fc1.bias": (D_FF,), f"{name}.fc2.weight": (D, D_FF),
                       f"{name}.fc2.bias": (D,), f"{name}.final_layer_norm.weight": (D,),
                       f"{name}.final_layer_norm.bias": (D,)}
        if is_pre:
            shapes |= {f"{side}.layer_norm.weight": (D,), f"{side}.layer_norm.bias": (D,)}
    shapes["decoder.output_projection.weight"] = (n_tgt, D)
    torch.manual_seed(4)
    weights = {name: 0.2 * torch.randn(shape) + ("norm.weight" in name) for name, shape in shapes.items()}
    if sharing != "none":
        weights["decoder.output_projection.weight"] = weights["decoder.embed_tokens.weight"]
    if sharing == "all":
        weights["encoder.embed_tokens.weight"] = weights["decoder.embed_tokens.weight"]
    return weights


def fairseq_args(is_pre: bool, is_learned: bool, sharing: str, options: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "arch": "transformer_iwslt_de_en", "task": "translation", "source_lang": "en", "target_lang": "de",
        "activation_fn": "relu", "dropout": 0.3, "max_source_positions": 128, "max_target_positions": 128,
        "share_all_embeddings": sharing == "all", "share_decoder_input_output_embed": sharing != "none",
        "decoder_output_dim": D, "decoder_input_dim": D, "adaptive_softmax_cutoff": None, "no_scale_embedding": False}
    for side in ("encoder", "decoder"):
        values |= {f"{side}_embed_dim": D, f"{side}_ffn_embed_dim": D_FF, f"{side}_layers": LAYERS,
                   f"{side}_attention_heads": HEADS, f"{side}_normalize_before": is_pre,
                   f"{side}_learned_pos": is_learned}
    return values | options


def fairseq_folder(folder: Path, model: bytes, is_pre: bool = False, is_learned: bool = False, sharing: str = "all",
                   form: str = "args", **options: Any) -> Path:
    """A .pt file, dict.txt as fairseq-preprocess writes it, without pieces that are in no text, and spm.model."""
    folder.mkdir()
    pieces = texts(model)[3:]
    dictionaries = [[*sorted(pieces)[5:], "madeupword0000", "madeupword0001"]]
    if sharing != "all":
        dictionaries.append(sorted(pieces)[:-4][::-1])
    for name, entries in zip(("dict.en.txt", "dict.de.txt"), dictionaries, strict=False):
        (folder / name).write_text("".join(f"{text} {9}\n" for text in entries), encoding="utf-8")
    (folder / "spm.model").write_bytes(model)
    weights = fairseq_weights(4 + len(dictionaries[0]), 4 + len(dictionaries[-1]), is_pre, is_learned, sharing)
    values = fairseq_args(is_pre, is_learned, sharing, options)
    state: dict[str, Any] = {"model": weights | {"encoder.version": torch.ones(1), "decoder.version": torch.ones(1)},
                             "optimizer_history": [{"num_updates": 777}], "extra_state": {"val_loss": 1.5}}
    if form == "args":
        state["args"] = argparse.Namespace(**values)
    elif form == "cfg":
        state |= {"args": None, "cfg": {"model": argparse.Namespace(**values)}}
    else:  # a dataclass made a dict
        inner = {side: {key.removeprefix(f"{side}_"): value for key, value in values.items()
                        if key.startswith(f"{side}_")} for side in ("encoder", "decoder")}
        outer = {key: value for key, value in values.items() if not key.startswith(("encoder_", "decoder_", "arch"))}
        state["cfg"] = {"model": {"_name": "transformer", **outer, **inner}, "task": {"_name": "translation"}}
    torch.save(state, folder / "checkpoint.pt")
    return folder


def from_fairseq(folder: Path, out: Path) -> list[str]:
    names = [str(path) for path in (folder / "dict.en.txt", folder / "dict.de.txt") if path.exists()]
    return [str(folder / "checkpoint.pt"), "--from", "fairseq", "--sentencepiece", str(folder / "spm.model"), "--dict",
            *names, "-o", str(out)]


@pytest.mark.parametrize("options", [
    {}, {"is_pre": True, "form": "cfg"}, {"is_learned": True, "form": "nested"},
    {"sharing": "decoder", "is_pre": True}, {"sharing": "none"}], ids=["post", "pre", "learned", "joined", "three"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_fairseq_models_say_the_same_here(kind: str, options: dict[str, Any], models: dict[str, bytes], tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    folder = fairseq_folder(tmp_path / "theirs", models[kind], **options)
    said = run(capsys, *from_fairseq(folder, tmp_path / "out"))
    assert "not compared with its origin" in said
    weights = torch.load(folder / "checkpoint.pt", weights_only=False)["model"]
    theirs = Fairseq(weights, options.get("is_pre", False), options.get("is_learned", False))
    names = [folder / "dict.en.txt", folder / ("dict.de.txt" if "sharing" in options else "dict.en.txt")]
    ids = [{line.split()[0]: 4 + i for i, line in enumerate(name.read_text().splitlines())} for name in names]
    processor = sentencepiece.SentencePieceProcessor(model_proto=models[kind])
    src, tgt = ([[one.get(piece, 3) for piece in processor.encode(line, out_type=str)] for line in lines]
                for one, lines in zip(ids, (LINES, TARGETS), strict=True))
    ours = opened(tmp_path / "out")
    scores = Ours(ours.model).score(ours.vocab.encode(LINES), ours.vocab.encode(TARGETS))
    n_compared = 0
    for source, target, judged in zip(src, tgt, scores, strict=True):
        expected = theirs.log_probabilities(source, target)
        known = torch.tensor([*target, 2]) != 3  # a piece that they lack has no probability of its own
        assert (expected - torch.tensor(judged))[known].abs().max() < 2e-5
        n_compared += int(known.sum())
    assert n_compared > 50
    model = ours.model
    with torch.inference_mode():  # and their </s> begins, all their pieces share the softmax, and no other does
        cache = model.start(pack([[*ours.vocab.encode(LINES[:1])[0], 3]]), 1)
        first = model.projection(model.step(torch.tensor([2]), cache)).log_softmax(1)[0]
        memory = theirs.stack([*src[0], 2], "encoder")
        expected = (theirs.stack([2], "decoder", memory) @ weights["decoder.output_projection.weight"].T).log_softmax(1)
    assert first.exp().sort(descending=True).values[:expected.shape[1]] == pytest.approx(
        expected[0].exp().sort(descending=True).values, abs=1e-6)
    checkpoint = load(tmp_path / "out")
    assert checkpoint.state == {"averaged": ["fairseq:checkpoint.pt"], "step": 777}
    assert not checkpoint.config.model.tied and checkpoint.config.model.positions == "learned"


class DictConfig:
    """Pickled under the name of omegaconf's."""


DictConfig.__module__ = "omegaconf.dictconfig"


def test_objects_of_omegaconf_are_read_and_stay_inert(models: dict[str, bytes], tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fairseq_folder(tmp_path / "theirs", models["bpe"])
    run(capsys, *from_fairseq(folder, tmp_path / "a"))
    module = type(sys)("omegaconf.dictconfig")
    module.__dict__["DictConfig"] = DictConfig
    for name in ("omegaconf", "omegaconf.dictconfig"):
        monkeypatch.setitem(sys.modules, name, module)

    def wrapped(values: Any) -> Any:
        node = DictConfig()
        node.__dict__.update({"_content": {key: wrapped(value) for key, value in values.items()}}
                             if isinstance(values, dict) else {"_val": values})
        return node

    state = torch.load(folder / "checkpoint.pt", weights_only=False)
    values = vars(state.pop("args"))
    torch.save(state | {"cfg": wrapped({"model": {"_name": values.pop("arch"), **values}})}, folder / "checkpoint.pt")
    for name in ("omegaconf", "omegaconf.dictconfig"):
        monkeypatch.setitem(sys.modules, name, None)
    run(capsys, *from_fairseq(folder, tmp_path / "b"))
    assert digest(tmp_path / "a" / MODEL) == digest(tmp_path / "b" / MODEL)


# ---- pieces ----------------------------------------------------------------------------------------------------------

ODD = ["\u65e5\u672c x", "\u00bd \ufb01  a\tb", "", "a\u2028b", "madeupword0000 </s> <s> xqz", "\u2581x  y"]


@pytest.mark.parametrize("options", [
    {}, {"bos_id": -1}, {"eos_id": -1, "bos_id": -1}, {"pad_id": 3}, {"byte_fallback": True, "size": 350},
    {"bos_piece": "<start>"}, {"control_symbols": ["<pad>", "<x>"]}, {"user_defined_symbols": ["xqz"]}],
    ids=["default", "no bos", "no marks", "pad", "bytes", "named", "control", "user"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_other_ids_cut_text_the_same(kind: str, options: dict[str, Any]) -> None:
    model = spm(kind, **options)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocab = PieceModel(model, "x").with_our_ids(unused=["\u2581red\u2581dog"] if kind == "unigram" else [],
                                                silent=["madeupword0000"])
    for line in [src for src, _ in sentences(100, seed=9)] + ODD:
        ids = theirs.encode(line)
        assert [theirs.id_to_piece(i) for i in ids] == [
            piece if i != 1 else theirs.id_to_piece(theirs.unk_id())
            for i, piece in zip(vocab.encode([line])[0], vocab.pieces(vocab.encode([line])[0]), strict=True)]
        assert vocab.decode(vocab.encode([line]))[0] == theirs.decode(ids)
    assert vocab.decode([[vocab.size - 1]]) == [""]
    assert PieceModel(vocab.model, "x").with_our_ids().model == vocab.model


def test_a_model_that_is_none_is_told(models: dict[str, bytes]) -> None:
    from nmt.errors import UserError
    taken = spm("bpe", user_defined_symbols=["<pad>"])
    for data in (b"", b"\xff" * 99, models["bpe"][:-3], b"\x0b", b"\x80" * 99_999, taken):
        with pytest.raises(UserError, match="^place: "):
            PieceModel(data, "place").with_our_ids()


# ---- what is refused -------------------------------------------------------------------------------------------------

def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], out: Path) -> str:
    before = sorted(os.listdir(out.parent))
    capsys.readouterr()
    assert nmt_import(arguments) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == "" and len(lines) == 1 and lines[0].isprintable() and len(lines[0]) < 900
    assert not out.exists() and sorted(os.listdir(out.parent)) == before
    return lines[0]


@NEEDS_HF
@pytest.mark.parametrize("key, value", [
    ("activation_function", "swish"), ("activation_function", None), ("scale_embedding", False), ("scale_embedding", 2),
    ("decoder_layers", 3), ("decoder_attention_heads", 2), ("decoder_ffn_dim", 64), ("model_type", "bart"),
    ("normalize_embedding", True), ("normalize_before", True), ("add_final_layer_norm", True), ("d_model", 10**9),
    ("d_model", "32"), ("d_model", -1), ("d_model", None), ("d_model", 33), ("encoder_layers", 0),
    ("vocab_size", 5), ("forced_bos_token_id", 3),
    ("quantization_config", {"x": 1}), ("eos_token_id", 1), ("pad_token_id", 0), ("decoder_start_token_id", 10**6),
    ("decoder_start_token_id", None), ("decoder_vocab_size", 3), ("tie_word_embeddings", "yes"),
    ("encoder_attention_heads", 5), ("max_position_embeddings", 10**12)])
def test_settings_of_another_model_are_refused_by_key(key: str, value: Any, models: dict[str, bytes], tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    folder = hub_folder(tmp_path / "hub", models["bpe"])
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {key: value})
    error = refused(capsys, [str(folder), "--from", "huggingface", "-o", str(tmp_path / "out")], tmp_path / "out")
    assert key.replace("d_model", "").replace("encoder_attention_heads", "attention_heads") in error


@NEEDS_HF
def test_pieces_that_cannot_be_had_are_refused(models: dict[str, bytes], tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    folder = hub_folder(tmp_path / "hub", models["bpe"])
    command = [str(folder), "--from", "huggingface", "-o", str(tmp_path / "out")]
    ids = json.loads((folder / "vocab.json").read_text())
    some = next(text for text, i in ids.items() if i == 20)
    for change, words in (({some: None, ">>fin<<": 20}, ">>fin<<"), ({some: None, "zzz": 20}, "zzz"),
                          ({some: 21}, "does not give each id"), ({some: True}, "does not give each id"),
                          ({some: 20.0}, "does not give each id"), ({"<unk>": None, "x": 1}, "<unk>")):
        changed = {text: i for text, i in (ids | change).items() if i is not None}
        write_json(folder / "vocab.json", changed)
        assert words in refused(capsys, command, tmp_path / "out")
    write_json(folder / "vocab.json", ids)
    for name, words in (("target-bpe", "target.spm: is another BPE model"), ("target", "")):
        (folder / "target.spm").write_bytes(models[name])
        if words:
            assert words in refused(capsys, command, tmp_path / "out")
    (folder / "source.spm").unlink()
    assert "source.spm" in refused(capsys, command, tmp_path / "out")


@NEEDS_HF
def test_what_the_last_norm_cannot_carry_is_refused(models: dict[str, bytes], tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """The bias on logits, and pieces without a row, need a last LayerNorm without weights of zero; biases may be."""
    folder = hub_folder(tmp_path / "hub", models["bpe"])
    weights = load_file(folder / MODEL)
    name = f"model.decoder.layers.{LAYERS - 1}.final_layer_norm"
    gain = weights[f"{name}.weight"]
    for changed in (gain * 0, gain * (torch.arange(D) > 0)):
        save_file(weights | {f"{name}.weight": changed}, folder / MODEL, metadata={"format": "pt"})
        error = refused(capsys, [str(folder), "--from", "huggingface", "-o", str(tmp_path / "out")], tmp_path / "out")
        assert "its last LayerNorm has weights of zero" in error
    save_file(weights | {f"{name}.bias": torch.zeros(D)}, folder / MODEL, metadata={"format": "pt"})
    from_hub(capsys, folder, tmp_path / "out")


@pytest.mark.parametrize("key, value", [
    ("activation_fn", "gelu"), ("no_scale_embedding", True), ("layernorm_embedding", True), ("decoder_layers", 3),
    ("adaptive_softmax_cutoff", [1, 2]), ("cross_self_attention", True), ("decoder_output_dim", 16),
    ("decoder_normalize_before", True), ("arch", "fconv"), ("arch", None), ("task", "multilingual_translation"),
    ("encoder_layers_to_keep", "1,2"), ("encoder_embed_dim", None), ("encoder_embed_dim", 10**9),
    ("share_all_embeddings", torch.ones(9)), ("no_token_positional_embeddings", True)])
def test_settings_of_another_fairseq_model_are_refused(key: str, value: Any, models: dict[str, bytes], tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    folder = fairseq_folder(tmp_path / "theirs", models["bpe"], **{key: value})
    error = refused(capsys, from_fairseq(folder, tmp_path / "out"), tmp_path / "out")
    assert key.replace("encoder_embed_dim", "embed_dim") in error


def test_mistakes_in_a_dictionary_are_told_by_line(models: dict[str, bytes], tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    folder = fairseq_folder(tmp_path / "theirs", models["bpe"])
    path = folder / "dict.en.txt"
    good = path.read_text().splitlines()
    for line, words in (("x", "dict.en.txt:2"), (good[0], "dict.en.txt:2"), ("</s> 3", "dict.en.txt:2"),
                        ("x y", "dict.en.txt:2"), ("@@@ 3", "@@@")):
        path.write_text("\n".join([good[0], line, *good[2:]]) + "\n")
        assert words in refused(capsys, from_fairseq(folder, tmp_path / "out"), tmp_path / "out")
    path.write_text("\n".join(good[:-1]) + "\n")
    assert "embed_tokens.weight has shape" in refused(capsys, from_fairseq(folder, tmp_path / "out"), tmp_path / "out")
    path.write_bytes(b"\xff 3\n")
    assert "UTF-8" in refused(capsys, from_fairseq(folder, tmp_path / "out"), tmp_path / "out")


class Payload:
    """Makes a file when unpickled."""

    def __init__(self, path: Path, call: Callable[..., object] = open) -> None:
        self.path, self.call = path, call

    def __reduce__(self) -> Any:
        text = {open: str(self.path), os.system: f"touch {self.path}", eval: f"open({str(self.path)!r}, 'w')"}
        return self.call, (text[self.call], *["w"] * (self.call is open))


NAME = "encoder.layers.0.fc1.weight"
Change = Callable[[dict[str, Any], Path], object]


def tensor(make: Callable[[Tensor], Any], name: str = NAME) -> Change:
    return lambda state, canary: state["model"].update({name: make(state["model"].get(name))})


def deepen(state: dict[str, Any]) -> None:
    """Each level names the next one twice."""
    level: dict[str, Any] = {}
    state["args"].extra = level
    for _ in range(300):
        level["a"] = level["b"] = level = {}


def settings(**values: int) -> Change:
    return lambda state, canary: state["args"].__dict__.update(values)


HOSTILE: dict[str, tuple[Change, str]] = {
    "an open in the args": (lambda state, canary: setattr(state["args"], "x", Payload(canary)), "io.open"),
    "another order in memory": (tensor(lambda t: t.T.contiguous().T), ""),
    "an object of numpy": (lambda state, canary: setattr(state["args"], "x", numpy.float64(3)), ""),
    "eval": (lambda state, canary: setattr(state["args"], "x", Payload(canary, eval)), ""),
    "eval for weights": (lambda state, canary: state["model"].update({NAME: Payload(canary, eval)}), NAME),
    "a command": (lambda state, canary: state.update(x=Payload(canary, os.system)), "system"),
    "expanded": (tensor(lambda t: t[:1, :1].clone().expand(D_FF, D)), "claims more"),
    "expanded to 10^10": (tensor(lambda t: torch.zeros(1).expand(10**10)), "has shape"),
    "another shape": (tensor(lambda t: t.T.contiguous()), "has shape [32, 48]"),
    "integers": (tensor(lambda t: t.long()), "no plain tensor"),
    "sparse": (tensor(lambda t: t.to_sparse()), "no plain tensor"),
    "on no device": (tensor(lambda t: t.to("meta")), "no plain tensor"),
    "a number": (tensor(lambda t: 3), "no plain tensor"),
    "NaN": (tensor(lambda t: t * torch.nan), "NaN"),
    "infinite": (tensor(lambda t: torch.full_like(t, torch.inf)), "infinite"),
    "missing": (lambda state, canary: state["model"].pop(NAME), f"lacks tensor {NAME}"),
    "stray": (tensor(lambda t: torch.ones(3), "encoder.adapter"), "stray tensor encoder.adapter"),
    "no model": (lambda state, canary: state.pop("model"), "no 'model'"),
    "no args": (lambda state, canary: state.pop("args"), "'args'"),
    "10^6 layers": (settings(encoder_layers=10**6, decoder_layers=10**6), "layers.2"),
    "10^9 positions": (settings(max_source_positions=2**40), "positions")}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_unexecuted(case: str, models: dict[str, bytes], tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    folder, canary = fairseq_folder(tmp_path / "theirs", models["bpe"]), tmp_path / "executed"
    change, words = HOSTILE[case]
    state = torch.load(folder / "checkpoint.pt", weights_only=False)
    change(state, canary)
    torch.save(state, folder / "checkpoint.pt")
    if not words:  # an object that is never looked at does no harm
        run(capsys, *from_fairseq(folder, tmp_path / "out"))
    else:
        assert words in refused(capsys, from_fairseq(folder, tmp_path / "out"), tmp_path / "out")
    assert not canary.exists()


def test_files_that_are_none_are_refused_unexecuted(models: dict[str, bytes], tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    folder, canary = fairseq_folder(tmp_path / "theirs", models["bpe"]), tmp_path / "executed"
    path = folder / "checkpoint.pt"
    good = path.read_bytes()
    packed, legacy, script = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, bytes(10**6) if "/data/" in name else old.read(name))
    torch.save({"model": Payload(canary)}, legacy, _use_new_zipfile_serialization=False)
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), script)
    for data in (b"", good[:-100], good[:1000], pickle.dumps(Payload(canary)), packed.getvalue(), legacy.getvalue(),
                 script.getvalue(), b"PK\x03\x04" * 99):
        path.write_bytes(data)
        assert "checkpoint.pt" in refused(capsys, from_fairseq(folder, tmp_path / "out"), tmp_path / "out")
    path.unlink()
    assert "checkpoint.pt: missing" in refused(capsys, from_fairseq(folder, tmp_path / "out"), tmp_path / "out")
    assert not canary.exists()
    torch.load(io.BytesIO(legacy.getvalue()), weights_only=False)
    assert canary.exists()  # the payload would have worked


def test_settings_that_contain_themselves_end(models: dict[str, bytes], tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    folder = fairseq_folder(tmp_path / "theirs", models["bpe"])
    state = torch.load(folder / "checkpoint.pt", weights_only=False)
    deepen(state)
    state["args"].itself = state["args"]
    torch.save(state, folder / "checkpoint.pt")
    run(capsys, *from_fairseq(folder, tmp_path / "out"))


@NEEDS_HF
def test_a_hostile_folder_of_hugging_face(models: dict[str, bytes], tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    folder, canary, out = hub_folder(tmp_path / "hub", models["bpe"]), tmp_path / "executed", tmp_path / "out"
    command = [str(folder), "--from", "huggingface", "-o", str(out)]
    weights = load_file(folder / MODEL)
    name = "model.decoder.layers.0.fc1.bias"
    apart = {"lm_head.weight": weights["model.shared.weight"] + 1}
    for changed, words in (({name: torch.ones(3)}, "has shape [3]"), ({"model.x": torch.ones(3)}, "stray tensor x"),
                           ({name: weights[name] * torch.nan}, "NaN"), (apart, "differ")):
        save_file(weights | changed, folder / MODEL)
        assert words in refused(capsys, command, out)
    (folder / MODEL).write_bytes(b"\xff" * 99)
    assert MODEL in refused(capsys, command, out)
    (folder / MODEL).unlink()
    assert "neither" in refused(capsys, command, out)
    torch.save(weights | {"x": Payload(canary, os.system)}, folder / "pytorch_model.bin")
    assert "system" in refused(capsys, command, out)
    assert not canary.exists()


# ---- the command -----------------------------------------------------------------------------------------------------

def test_the_folder_is_a_checkpoint_for_all_commands(models: dict[str, bytes], tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = fairseq_folder(tmp_path / "theirs", models["bpe"], is_pre=True), tmp_path / "new" / "out"
    run(capsys, *from_fairseq(folder, out))
    assert {path.name for path in out.iterdir()} == {MANIFEST, *PARTS}
    (tmp_path / "lines").write_text("\n".join(LINES) + "\n")
    assert nmt_translate([str(out), "-i", str(tmp_path / "lines"), "-o", str(tmp_path / "said")]) == 0
    assert len((tmp_path / "said").read_text().splitlines()) == len(LINES)
    for name, lines in (("a.en", LINES), ("a.de", TARGETS)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    assert nmt_eval([str(out), "--src", str(tmp_path / "a.en"), "--ref", str(tmp_path / "a.de")]) == 0
    assert "BLEU" in capsys.readouterr().out
    assert nmt_export([str(out), "--to", "safetensors", "-o", str(tmp_path / "export")]) == 0
    assert nmt_average([str(out), "-o", str(tmp_path / "mean")]) == 0


def test_only_an_earlier_import_is_replaced(models: dict[str, bytes], tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = fairseq_folder(tmp_path / "theirs", models["bpe"]), tmp_path / "out"
    command = from_fairseq(folder, out)
    for _ in range(2):
        run(capsys, *command)
    before = {path.name: digest(path) for path in out.iterdir()}
    os.rename(folder / "spm.model", folder / "gone")
    assert nmt_import(command) == 2  # and what was there stays
    os.rename(folder / "gone", folder / "spm.model")
    assert {path.name: digest(path) for path in out.iterdir()} == before
    assert nmt_average([str(out), "-o", str(tmp_path / "mean")]) == 0
    (tmp_path / "file").write_text("x")
    (out / "notes.txt").write_text("mine")
    capsys.readouterr()
    for taken in (out, tmp_path / "mean", tmp_path / "file", folder):
        assert nmt_import([*command[:-1], str(taken)]) == 2
        assert "not just an import" in capsys.readouterr().err
    assert (out / "notes.txt").exists() and (tmp_path / "file").read_text() == "x"


@NEEDS_HF
def test_an_import_that_says_something_else_never_appears(
        models: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub_folder(tmp_path / "hub", models["bpe"])
    right = adoption.weights_of

    def wrong(origin: Any) -> Any:
        weights, shape = right(origin)
        weights["decoder.0.memory_attention.kv.bias"][-1] += 0.05
        return weights, shape

    monkeypatch.setattr(adoption, "weights_of", wrong)
    command = [str(folder), "--from", "huggingface", "-o", str(tmp_path / "out")]
    assert nmt_import(command) == 1
    assert "does not say the same" in capsys.readouterr().err and os.listdir(tmp_path) == ["hub"]
    monkeypatch.setitem(sys.modules, "transformers", None)  # nobody can tell then, and that is said
    assert nmt_import(command) == 0
    assert "not compared with its origin: transformers is not installed" in capsys.readouterr().err


def test_a_full_disk_is_told_in_a_line(models: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    def write(tensors: object, path: Path, metadata: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(adoption, "save_file", write)
    folder, out = fairseq_folder(tmp_path / "theirs", models["bpe"]), tmp_path / "out"
    assert nmt_import(from_fairseq(folder, out)) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and f"{out}: cannot be written: " in told[0] and "No space left" in told[0]
    assert os.listdir(tmp_path) == ["theirs"]


def test_arguments_that_do_not_belong_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    for arguments, words in ((["x", "--from", "fairseq", "-o", str(out)], "--sentencepiece"),
                             (["x", "--from", "huggingface", "-o", str(out), "--dict", "d"], "go with"),
                             ([str(tmp_path / "none"), "--from", "huggingface", "-o", str(out)], "config.json")):
        assert words in refused(capsys, arguments, out)


def test_among_the_checkpoints_of_a_run_is_no_place_for_a_model(tmp_path: Path) -> None:
    from nmt.errors import UserError

    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-0000010").mkdir(parents=True)
    with pytest.raises(UserError, match="checkpoints of training alone"):
        adoption.adopt(cast(Any, None), checkpoints / "step-0000020")  # before anything of the origin is looked at
    assert [path.name for path in checkpoints.iterdir()] == ["step-0000010"]
