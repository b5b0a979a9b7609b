"""The export to Hugging Face transformers, and an engine that runs it there.

Post-norm becomes their Marian, pre-norm their Pegasus: both add sinusoids, sin and cos in halves,
to scaled embeddings, as our model does. In Pegasus the mark at the start is the padding too, because
CTranslate2's converter has its decoder start with the padding; the embedding of padding is never
read. The converter cannot take our Marian models, because in Marian a decoder starts with zeros.

Where our attention has no biases, theirs are zeros. The table of positions is always written, even
sinusoids, which they would compute themselves. The tokenizer is Marian's, with the same SentencePiece
model and our ids. Weights are written and read as safetensors alone, so nothing is unpickled.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmt.config import DataConfig, DecodingConfig, ModelConfig
from nmt.data.batch import Sentences
from nmt.data.vocab import BOS, EOS, PAD, UNK, EncodedLines, Vocab, VocabPair, Vocabulary
from nmt.extras.export.parity import add_eos
from nmt.extras.export.tensors import (
    check_expressible,
    explain_penalty_and_tags,
    find_alpha,
    list_forbidden,
    list_layer_parts,
    make_position_table,
    read_part,
    scale_projection,
)
from nmt.extras.pair_scores.pair_scores import LogProbs
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure, UserError
from nmt.system.extras import import_extra
from nmt.system.files import write_bytes, write_json
from nmt.system.run_folder import MODEL_FILE
from nmt.system.tensor_files import write_tensors

HUGGINGFACE_USAGE = """\
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer  # 5 or newer

    tokenizer = AutoTokenizer.from_pretrained(".")
    model = AutoModelForSeq2SeqLM.from_pretrained(".", use_safetensors=True)
    line = tokenizer("A sentence.", return_tensors="pt")
    found = model.generate(**line, max_new_tokens=line.input_ids.shape[1] + {extra})
    print(tokenizer.decode(found[0], skip_special_tokens=True))
"""
HUGGINGFACE_TAG = """\
Its id comes before those of the line: `[tokenizer.convert_tokens_to_ids({tag!r}), \
*tokenizer("A sentence.").input_ids]`. In a text, a tag of the form `>>xx<<` is read as \
one if it comes first; any other is plain characters.
"""
LEARNED_POSITIONS = """
The learned positions are in `model.safetensors`, where Marian expects none but takes them. Its own \
`save_pretrained` leaves them out: do not save this model again.
"""


def import_transformers() -> Any:
    transformers = import_extra("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def write_huggingface(
    folder: Path,
    model: Transformer,
    vocab: Vocabulary,
    data: DataConfig,
    decoding: DecodingConfig,
    quantization: str,
) -> str:
    """Fill `folder` with what `from_pretrained` loads: the model, its tokenizer and the settings of
    generation; return how to use it.
    """
    shape = model.config
    check_expressible(shape)
    if shape.positions == "rotary":
        raise UserError(
            "model.positions is rotary: neither Marian nor Pegasus of transformers rotates queries and keys; "
            "use --to ctranslate2 or --to safetensors"
        )
    if shape.embedding_norm is not None:
        raise UserError(
            f"model.embedding_norm is {shape.embedding_norm}: neither Marian nor Pegasus of "
            "transformers has a LayerNorm on embeddings; use --to ctranslate2 or --to safetensors"
        )
    if isinstance(vocab, VocabPair) and shape.norm == "pre":
        raise UserError(
            "vocab.joint is false and model.norm is pre: Pegasus, which Hugging Face has for pre-norm, "
            "has one vocabulary; use --to ctranslate2 or safetensors"
        )
    dtype = getattr(torch, quantization)
    tensors = {name: tensor.to(dtype) for name, tensor in _rename_tensors(model, decoding)}
    n_positions = tensors["model.encoder.embed_positions.weight"].shape[0]

    # the model
    model_config = _make_model_config(model, n_positions, quantization)
    model_config.save_pretrained(folder)
    write_tensors(folder / MODEL_FILE, tensors, {"format": "pt"})

    # the settings with which transformers decodes as nearly as it can to our search
    generation = import_transformers().GenerationConfig(
        num_beams=decoding.beam,
        do_sample=False,
        length_penalty=find_alpha(decoding) if decoding.beam > 1 else 1.0,
        max_length=n_positions,
        early_stopping="never" if decoding.beam > 1 else False,
        pad_token_id=_find_padding(shape),
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        suppress_tokens=[*list_forbidden(vocab.tgt), *range(vocab.tgt.size, model.n_vocab)],
    )
    generation.save_pretrained(folder)

    _write_tokenizer(folder, vocab, data, _find_padding(shape), n_positions)

    usage = HUGGINGFACE_USAGE.format(extra=decoding.max_extra)
    usage += explain_penalty_and_tags(decoding, data.train_tags, HUGGINGFACE_TAG)
    forgets_positions = shape.positions == "learned" and shape.norm == "post"
    return usage + LEARNED_POSITIONS if forgets_positions else usage


def _make_model_config(model: Transformer, n_positions: int, quantization: str) -> Any:
    transformers = import_transformers()
    shape = model.config
    settings = dict(
        vocab_size=model.src_embedding.num_embeddings,
        d_model=shape.d_model,
        encoder_layers=shape.encoder_depth,
        decoder_layers=shape.decoder_depth,
        encoder_attention_heads=shape.n_heads,
        decoder_attention_heads=shape.n_heads,
        encoder_ffn_dim=shape.d_ff,
        decoder_ffn_dim=shape.d_ff,
        activation_function=shape.activation,
        dropout=shape.dropout,
        attention_dropout=shape.attention_dropout,
        activation_dropout=shape.ffn_dropout,
        scale_embedding=shape.scale_embeddings == "embedding",
        max_position_embeddings=n_positions,
        tie_word_embeddings=_is_one_matrix(shape),
        pad_token_id=_find_padding(shape),
        eos_token_id=EOS,
        bos_token_id=BOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
        dtype=quantization,
    )
    if shape.norm == "pre":
        # CTranslate2's converter asks for these two
        settings |= {"normalize_before": True, "normalize_embedding": False}
        model_config = transformers.PegasusConfig(**settings)
        model_config.architectures = ["PegasusForConditionalGeneration"]
    else:
        settings["decoder_vocab_size"] = model.n_vocab
        settings["share_encoder_decoder_embeddings"] = _is_one_matrix(shape)
        model_config = transformers.MarianConfig(**settings)
        model_config.architectures = ["MarianMTModel"]
    return model_config


def _find_padding(shape: ModelConfig) -> int:
    """Return the id of padding: in Pegasus that of the mark at the start."""
    return BOS if shape.norm == "pre" else PAD


def _is_one_matrix(shape: ModelConfig) -> bool:
    """Whether the three matrices are one there too: not if the projection's has been scaled."""
    return shape.tied is True and shape.scale_embeddings != "projection"


def _write_tokenizer(
    folder: Path, vocab: Vocabulary, data: DataConfig, padding: int, n_positions: int
) -> None:
    """Write Marian's tokenizer, with our BPE models and our ids."""
    write_bytes(folder / "source.spm", vocab.src.model)
    write_bytes(folder / "target.spm", vocab.tgt.model)
    pieces = _write_ids(folder / "vocab.json", vocab.src)
    is_pair = isinstance(vocab, VocabPair)
    if is_pair:
        _write_ids(folder / "target_vocab.json", vocab.tgt)
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": data.src,
        "target_lang": data.tgt,
        "unk_token": pieces[UNK],
        "eos_token": pieces[EOS],
        "pad_token": pieces[padding],
        "separate_vocabs": is_pair,
        "model_max_length": n_positions,
        "split_special_tokens": True,  # "</s>" in a line is text, as it is to our vocabulary
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings)


def _write_ids(path: Path, vocab: Vocab) -> list[str]:
    pieces = vocab.list_pieces()
    write_json(path, {piece: i for i, piece in enumerate(pieces)})
    return pieces


def _rename_tensors(model: Transformer, decoding: DecodingConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor under the name that it has in transformers. Only three tied matrices are
    written as one: two would be to Marian, but not to Pegasus.
    """
    shape = model.config
    src_embedding = model.src_embedding.weight.detach()
    src_table = make_position_table(model.src_positions, decoding)
    tgt_table = make_position_table(model.tgt_positions, decoding)

    # embeddings, positions, projection
    if (
        _is_one_matrix(shape) or shape.norm == "pre"
    ):  # Pegasus has it even if three other matrices are used
        yield "model.shared.weight", src_embedding
    if not _is_one_matrix(shape):
        yield "model.encoder.embed_tokens.weight", src_embedding
        yield "model.decoder.embed_tokens.weight", model.tgt_embedding.weight.detach()
        yield "lm_head.weight", scale_projection(model)
    bias: Tensor | None = model.projection.bias
    biases = torch.zeros(model.projection.out_features) if bias is None else bias.detach()
    yield "final_logits_bias", biases[None]
    yield "model.encoder.embed_positions.weight", src_table
    yield "model.decoder.embed_positions.weight", tgt_table

    # layers
    for ours, theirs in list_layer_parts(shape):
        weight, bias = read_part(model, ours)
        terms = torch.zeros(len(weight)) if bias is None else bias
        n = len(theirs)
        for name, rows, part_of_bias in zip(theirs, weight.chunk(n), terms.chunk(n), strict=True):
            yield f"model.{name}.weight", rows
            yield f"model.{name}.bias", part_of_bias


class HuggingFaceEngine:
    """transformers with the model and the tokenizer of a folder."""

    def __init__(self, folder: Path) -> None:
        transformers = import_transformers()
        self.model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
            str(folder),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
        )
        self.model.eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )

    @torch.inference_mode()
    def translate_greedily(self, src: Sentences, limit: int) -> EncodedLines:
        ids, mask = _pad_rows(add_eos(src))
        rows = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            num_beams=1,
            early_stopping=False,
            max_new_tokens=limit,
        )
        outputs = rows[:, 1:].tolist()  # without bos
        return [row[: row.index(EOS)] if EOS in row else row for row in outputs]

    @torch.inference_mode()
    def score(self, src: Sentences, tgt: Sentences) -> LogProbs:
        ids, mask = _pad_rows(add_eos(src))
        inputs, _ = _pad_rows([[BOS, *line] for line in tgt])
        expected, _ = _pad_rows(add_eos(tgt))
        logits = self.model(input_ids=ids, attention_mask=mask, decoder_input_ids=inputs).logits
        log_probs = logits.log_softmax(2)  # (S, L, V)
        chosen = log_probs.gather(2, expected[:, :, None]).squeeze(2)  # (S, L)
        return [row[: len(line) + 1] for row, line in zip(chosen.tolist(), tgt, strict=True)]

    def check_tokenizer(
        self, vocab: Vocabulary, src_lines: Sequence[str], tgt_lines: Sequence[str]
    ) -> None:
        """Compare the tokenizer with our vocabulary: from text to ids on the source's side, and back on
        the target's.
        """
        compared: list[tuple[str, object, object]] = []  # line, theirs, ours
        for line, ids in zip(src_lines, vocab.src.encode(src_lines), strict=True):
            compared.append((line, self.tokenizer(line)["input_ids"][:-1], ids))  # without eos
        for line, ids in zip(tgt_lines, vocab.tgt.encode(tgt_lines), strict=True):
            known = [i for i in ids if i != UNK]  # `skip_special_tokens` drops unknown pieces
            text = self.tokenizer.decode(known, skip_special_tokens=True)
            compared.append((line, text, vocab.tgt.decode([known])[0].strip()))
        for line, exported, wanted in compared:
            if exported != wanted:
                raise Failure(
                    f"the exported tokenizer disagrees on {line!r}: {exported!r} instead of {wanted!r}; "
                    "nothing was written"
                )


def _pad_rows(rows: EncodedLines) -> tuple[Tensor, Tensor]:
    """Return the padded ids and the mask that is 0 where they are padding, each (S, L)."""
    sequences = [torch.tensor(row) for row in rows]
    ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=PAD)
    return ids, (ids != PAD).long()  # no piece of a sentence is PAD
