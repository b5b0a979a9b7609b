"""A model of Hugging Face transformers, Marian (post-norm) or Pegasus (pre-norm), as an `Origin`.

Both are this model with biases in attention and one on the logits. Marian's tokenizer cuts text by a SentencePiece
model and takes ids from vocab.json, whose order is its own. Search begins with what `decoder_start_token_id` names.
The settings that mean another model are refused by key and value; the rest of a config is not looked at.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt.config import ModelConfig
from nmt.data.vocab import BOS, EOS, PAD, UNK, Vocab
from nmt.decode.beam import Hypothesis
from nmt.errors import Failure, UserError
from nmt.files import read_json
from nmt.model.transformer import sinusoids
from nmt.publish.agreement import Ids
from nmt.publish.huggingface import library
from nmt.publish.origin import Matrices, Origin, Rows, Settings, Tensors, said, size_at, unpickled
from nmt.publish.pieces import TEXTS, PieceModel

NORMS = {"marian": "post", "pegasus": "pre"}
SIDES = ("encoder", "decoder")
MAX_BYTES = 16 << 20  # of files that are read whole
BATCH = 8


def read(folder: Path) -> Origin:
    config = Settings(str(folder / "config.json"), mapping(folder / "config.json"))
    config.check("model_type", tuple(NORMS), "others are not this model")
    is_pre = NORMS[config.values["model_type"]] == "pre"
    config.check("activation_function", ("relu",), "this model has no other", "gelu")
    config.check("scale_embedding", (True,), "embeddings are always multiplied by sqrt(d_model)", False)
    config.check("normalize_embedding", (False,), "there is no norm on embeddings", False)
    config.check("normalize_before", (is_pre,), "it goes with model_type", is_pre)
    config.check("add_final_layer_norm", (is_pre,), "it goes with model_type", is_pre)
    config.check("forced_bos_token_id", (None,), "no piece is forced at the beginning")
    config.check("quantization_config", (None,), "weights must be plain numbers")
    for key in ("layers", "attention_heads", "ffn_dim"):
        config.check(f"decoder_{key}", (config.number(f"encoder_{key}"),), f"encoder_{key} and it are one setting")
    d_model, n_ids = config.number("d_model"), config.number("vocab_size")
    if d_model % 2:
        raise UserError(f"{config.place}: d_model is {d_model}; sinusoids need an even one")
    config.check("decoder_vocab_size", (None, n_ids), "both sides have the same pieces")
    path, tensors = folder / "model.safetensors", None
    if path.exists():
        tensors = Tensors.of_safetensors(path, "model.")
    elif (path := folder / "pytorch_model.bin").exists():
        tensors = Tensors(path, unpickled(path), "model.")
    if tensors is None:
        raise UserError(f"{folder}: has neither model.safetensors nor pytorch_model.bin; a model in several files must "
                        "be saved in one")
    vocab, rows = pieces(folder, config, n_ids)
    n_positions = config.number("max_position_embeddings")
    tables = [tensors.maybe(f"{side}.embed_positions.weight", n_positions, d_model) for side in SIDES]
    own = None  # theirs are the paper's sinusoids, which need no table, or what the file has instead
    if any(table is not None and not torch.allclose(table, sinusoids(n_positions, d_model), atol=1e-5)
           for table in tables):
        own = tuple(sinusoids(n_positions, d_model) if table is None else table for table in tables)
    embeddings = matrices(tensors, config, n_ids, d_model, is_pre)
    bias = tensors.maybe("final_logits_bias", 1, n_ids)
    shape = ModelConfig(
        d_model=d_model, d_ff=config.number("encoder_ffn_dim"), n_heads=config.number("encoder_attention_heads"),
        n_layers=config.number("encoder_layers"), dropout=config.dropout(), norm="pre" if is_pre else "post",
        positions="learned" if own else "sinusoidal", max_positions=n_positions if own else 1024)
    names = Settings("tokenizer_config.json", mapping(folder / "tokenizer_config.json", {}))
    return Origin(
        "huggingface", folder, shape, tensors, embeddings, None if bias is None or not bias.any() else bias[0],
        None if own is None else (own[0], own[1]), rows, vocab, (names.text("source_lang"), names.text("target_lang")))


def mapping(path: Path, default: Any = None) -> dict[str, Any]:
    if default is not None and not path.exists():
        return dict(default)
    if size_at(path) > MAX_BYTES:
        raise UserError(f"{path}: is too large")
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"{path}: is no mapping; use another copy")
    return found


def matrices(tensors: Tensors, config: Settings, n_ids: int, d_model: int, is_pre: bool) -> Matrices:
    """Embeddings of both sides and projection. What the config ties must be equal in the file, however often it is
    there."""
    shared, src, tgt, projection = (tensors.maybe(name, n_ids, d_model) for name in (
        "shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"))

    def one(*given: Tensor | None) -> Tensor:
        known = [matrix for matrix in given if matrix is not None]
        if not known or any(not torch.equal(matrix, known[0]) for matrix in known[1:]):
            raise UserError(f"{tensors.path}: embeddings that config.json ties (tie_word_embeddings, "
                            "share_encoder_decoder_embeddings) differ, or some are missing")
        return known[0]

    if not config.is_on("tie_word_embeddings", True):  # what is there by its own name is its own
        return one(shared if src is None else src), one(shared if tgt is None else tgt), one(projection)
    if is_pre or config.is_on("share_encoder_decoder_embeddings", True):
        shared = one(shared, src, tgt, projection)
        return shared, shared, shared
    tgt = one(tgt, projection)
    return one(src), tgt, tgt


def pieces(folder: Path, config: Settings, n_ids: int) -> tuple[Vocab, Rows]:
    """The vocabulary with our ids, and which of theirs belongs to each."""
    names = Settings(str(folder / "tokenizer_config.json"), mapping(folder / "tokenizer_config.json", {}))
    names.check("separate_vocabs", (False,), "both sides have the same pieces", False)
    ids = mapping(folder / "vocab.json")
    place = str(folder / "vocab.json")
    if sorted(ids.values(), key=str) != sorted(range(n_ids), key=str) or any(type(i) is not int for i in ids.values()):
        raise UserError(f"{place}: does not give each id below vocab_size {n_ids} to one piece")
    models = []
    for name in ("source.spm", "target.spm"):
        if size_at(folder / name) > MAX_BYTES // 2:
            raise UserError(f"{folder / name}: is too large for a SentencePiece model")
        models.append(PieceModel((folder / name).read_bytes(), str(folder / name)))
    model, other = models
    known = {text.decode(errors="replace") for text in model.texts}
    special = {key: token(names, f"{key}_token", text) for key, text in
               (("unk", "<unk>"), ("eos", "</s>"), ("pad", "<pad>"))}
    for key, text in special.items():
        if text not in ids:
            raise UserError(f"{place}: lacks {said(text)}, the {key}_token")
    for key in ("eos", "pad"):
        config.check(f"{key}_token_id", (ids[special[key]],), f"that is {special[key]} in vocab.json")
    known |= {text.decode() for text in TEXTS.values()} | set(special.values())
    strange = sorted(text for text in ids if text not in known)
    if codes := [text for text in strange if text.startswith(">>")]:
        raise UserError(f"{place}: has {said(codes[0])}: its target language is chosen by a mark in the text, which is "
                        "not cut into pieces; only models of one language pair come in")
    if strange and not model.is_unigram:
        raise UserError(f"{place}: {said(strange[0])} is no piece of source.spm, a BPE model; both sides must be cut "
                        "by one model")
    if other.data != model.data and not other.is_unigram:
        raise UserError(f"{other.place}: is another BPE model than source.spm; both sides must be cut by one model")
    vocab = model.with_our_ids(unused=strange)  # what only their target side writes
    rows: list[int | None] = [ids.get(text) for text in vocab.pieces(range(vocab.size))]
    rows[PAD], rows[UNK], rows[EOS] = (ids[special[key]] for key in ("pad", "unk", "eos"))
    if lost := set(range(n_ids)).difference(row for row in rows if row is not None):
        raise UserError(f"{place}: id {min(lost)} is of no piece that source.spm can write")
    start = config.values.get("decoder_start_token_id")
    if start is None:
        start = mapping(folder / "generation_config.json", {}).get("decoder_start_token_id")
    if type(start) is not int or not 0 <= start < n_ids:
        raise UserError(f"{config.place}: decoder_start_token_id is {said(start)}; it must be one of the ids")
    return vocab, Rows(rows, rows, ids[special["unk"]], start)


def token(names: Settings, key: str, default: str) -> str:
    """A special piece, which may be there as a mapping of its properties."""
    value = names.values.get(key, default)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else default


class Theirs:
    """transformers with the model of a folder, spoken to in our ids."""

    def __init__(self, folder: Path, rows: Rows, vocab: Vocab) -> None:
        transformers = library()
        is_safe = (folder / "model.safetensors").exists()
        try:
            self.model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
                str(folder), use_safetensors=is_safe, weights_only=True, local_files_only=True, trust_remote_code=False,
                dtype=torch.float32).eval()
            self.tokenizer = transformers.MarianTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # it may stumble over anything in a stranger's folder
            raise Failure(f"{folder}: transformers cannot load it to compare: {said(str(error))[1:-1]}") from None
        self.rows, self.vocab = rows, vocab
        self.ids = [rows.unk if row is None else row for row in rows.src]
        self.ours = {row: i for i, row in reversed(list(enumerate(rows.tgt))) if row is not None}

    def check_pieces(self, lines: list[str]) -> None:
        """Text becomes the same pieces there and here, but for characters that source.spm does not know: theirs looks
        these up in vocab.json once more, as if they were pieces."""
        for line, ids in zip(lines, self.vocab.encode(lines), strict=True):
            if UNK in ids:
                continue
            theirs, ours = self.tokenizer(line)["input_ids"], [self.ids[i] for i in (*ids, EOS)]
            if theirs != ours:
                raise Failure(f"their tokenizer gives {theirs} for {line!r}, ours {ours}; nothing was written")

    @torch.inference_mode()
    def search(self, src: Ids, beam: int, alpha: float, limit: int) -> list[Hypothesis]:
        pad, eos, bos = (self.rows.tgt[i] for i in (PAD, EOS, BOS))
        rules = library().GenerationConfig(
            num_beams=beam, do_sample=False, length_penalty=alpha, max_new_tokens=limit, pad_token_id=pad,
            eos_token_id=eos, decoder_start_token_id=self.rows.start,
            suppress_tokens=[i for i in (pad, bos) if i is not None])
        found = []
        for i in range(0, len(src), BATCH):
            ids, mask = self.padded([[*line, EOS] for line in src[i:i + BATCH]])
            made = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=rules)[:, 1:].tolist()
            found += [Hypothesis([self.ours[i] for i in (row[:row.index(eos)] if eos in row else row)], 0.0)
                      for row in made]
        return found

    @torch.inference_mode()
    def score(self, src: Ids, tgt: Ids) -> list[list[float]]:
        scores = []
        for i in range(0, len(src), BATCH):
            targets = tgt[i:i + BATCH]
            ids, mask = self.padded([[*line, EOS] for line in src[i:i + BATCH]])
            wanted, _ = self.padded([[*line, EOS] for line in targets])
            given = torch.cat((torch.full((len(targets), 1), self.rows.start), wanted[:, :-1]), 1)
            logits = self.model(input_ids=ids, attention_mask=mask, decoder_input_ids=given).logits
            each = logits.log_softmax(2).gather(2, wanted[:, :, None]).squeeze(2)
            scores += [row[:len(line) + 1] for row, line in zip(each.tolist(), targets, strict=True)]
        return scores

    def padded(self, lines: list[list[int]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, lines))
        ids = torch.tensor([[self.ids[i] for i in (*line, *[PAD] * (longest - len(line)))] for line in lines])
        return ids, (torch.arange(longest) < torch.tensor([len(line) for line in lines])[:, None]).long()
