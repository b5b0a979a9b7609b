"""A model for Hugging Face transformers, and transformers with such a model.

Post-norm is their Marian, pre-norm their Pegasus: both add sinusoids, sin and cos in halves, to scaled embeddings, as
ours does. Attention biases that ours lacks are zeros. The table of positions is written too, learned or not, though
they would compute sinusoids themselves. The tokenizer is Marian's, around the same SentencePiece model, with our ids.
Only safetensors are written and read.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nmt.config import RunConfig
from nmt.data.vocab import BOS, EOS, PAD, UNK, Vocab
from nmt.export.format import FLOATS, Format
from nmt.export.parity import BATCH_SENTENCES, Ids
from nmt.export.tensors import (
    check_expressible,
    explain_length_penalty,
    list_projections,
    make_position_table,
)
from nmt.model.transformer import (
    DecoderLayer,
    EncoderLayer,
    MemoryAttention,
    SelfAttention,
    Transformer,
)
from nmt.system.errors import Failure, UserError
from nmt.system.files import write_json
from nmt.translate.beams import Hypothesis

HUGGINGFACE_USAGE = """\
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer  # 5 or newer

    tokenizer = AutoTokenizer.from_pretrained(".")
    model = AutoModelForSeq2SeqLM.from_pretrained(".", use_safetensors=True)
    line = tokenizer("A sentence.", return_tensors="pt")
    found = model.generate(**line, max_new_tokens=line.input_ids.shape[1] + {extra})
    print(tokenizer.decode(found[0], skip_special_tokens=True))
"""


def explain_huggingface(config: RunConfig) -> str:
    """Return how to use an export, for its card."""
    usage = HUGGINGFACE_USAGE.format(extra=config.decoding.max_extra)
    usage += explain_length_penalty(config)
    if config.model.positions == "learned" and config.model.norm == "post":
        usage += (
            "\nThe learned positions are in `model.safetensors`, where Marian expects none but takes them. Its own "
            "`save_pretrained` leaves them out: do not save this model again.\n"
        )
    return usage


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("transformers is not installed; pip install 'nmt[export]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def write_huggingface(
    folder: Path, model: Transformer, vocab: Vocab, config: RunConfig, quantization: str
) -> None:
    """Fill `folder` with what `from_pretrained` loads: model, tokenizer and settings of generation."""
    check_expressible(config.model)
    transformers, shape, pieces = (
        import_transformers(),
        config.model,
        vocab.pieces(range(vocab.size)),
    )
    tensors = {
        name: tensor.to(getattr(torch, quantization)).contiguous()
        for name, tensor in _rename_tensors(model, config)
    }
    n_positions = tensors["model.encoder.embed_positions.weight"].shape[0]
    settings = dict(
        vocab_size=vocab.size,
        d_model=shape.d_model,
        encoder_layers=shape.n_layers,
        decoder_layers=shape.n_layers,
        encoder_attention_heads=shape.n_heads,
        decoder_attention_heads=shape.n_heads,
        encoder_ffn_dim=shape.d_ff,
        decoder_ffn_dim=shape.d_ff,
        activation_function="relu",
        dropout=shape.dropout,
        scale_embedding=True,
        max_position_embeddings=n_positions,
        tie_word_embeddings=shape.tied,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
        dtype=quantization,
    )
    if shape.norm == "post":
        described = transformers.MarianConfig(
            share_encoder_decoder_embeddings=shape.tied, **settings
        )
        described.architectures = ["MarianMTModel"]
    else:
        described = transformers.PegasusConfig(**settings)
        described.architectures = ["PegasusForConditionalGeneration"]
    described.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    decoding = config.decoding
    _make_generation_config(
        decoding.beam,
        0.0 if decoding.penalty == "none" else decoding.length_penalty,
        max_length=n_positions,
    ).save_pretrained(folder)
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(vocab.model)
    write_json(folder / "vocab.json", {piece: i for i, piece in enumerate(pieces)})
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "MarianTokenizer",
            "source_lang": config.data.src,
            "target_lang": config.data.tgt,
            "unk_token": pieces[UNK],
            "eos_token": pieces[EOS],
            "pad_token": pieces[PAD],
            "separate_vocabs": False,
            "model_max_length": n_positions,
            "split_special_tokens": True,
            "clean_up_tokenization_spaces": False,
        },
    )


def _make_generation_config(
    beam: int, alpha: float, max_length: int | None = None, max_new_tokens: int | None = None
) -> Any:
    """How they are to decode so that it is what ours does, as far as it can be."""
    return import_transformers().GenerationConfig(
        num_beams=beam,
        do_sample=False,
        length_penalty=alpha,
        max_length=max_length,
        max_new_tokens=max_new_tokens,
        early_stopping="never" if beam > 1 else False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        suppress_tokens=[PAD, BOS],
    )


def _rename_tensors(model: Transformer, config: RunConfig) -> Iterator[tuple[str, Tensor]]:
    """Each tensor by the name that it has there; what they tie is there once."""
    shape = config.model
    if (
        shape.tied or shape.norm == "pre"
    ):  # Pegasus has it in any case, beside the three that are used
        yield "model.shared.weight", model.src_embedding.weight.detach().clone()
    if not shape.tied:
        yield "model.encoder.embed_tokens.weight", model.src_embedding.weight.detach()
        yield "model.decoder.embed_tokens.weight", model.tgt_embedding.weight.detach()
        yield "lm_head.weight", model.projection.weight.detach()
    yield "final_logits_bias", torch.zeros(1, model.projection.out_features)
    yield (
        "model.encoder.embed_positions.weight",
        make_position_table(model.src_positions, config.decoding),
    )
    yield (
        "model.decoder.embed_positions.weight",
        make_position_table(model.tgt_positions, config.decoding).clone(),
    )
    if shape.norm == "pre":
        yield from _parameters("model.encoder.layer_norm", model.encoder_norm)
        yield from _parameters("model.decoder.layer_norm", model.decoder_norm)

    def attention(name: str, ours: SelfAttention | MemoryAttention) -> Iterator[tuple[str, Tensor]]:
        for part, product in zip(
            ("q_proj", "k_proj", "v_proj", "out_proj"), list_projections(ours, shape), strict=True
        ):
            yield f"{name}.{part}.weight", product
            yield f"{name}.{part}.bias", torch.zeros(shape.d_model)

    def layer(name: str, ours: EncoderLayer | DecoderLayer) -> Iterator[tuple[str, Tensor]]:
        yield from attention(f"{name}.self_attn", ours.attention)
        yield from _parameters(f"{name}.self_attn_layer_norm", ours.attention_residual.norm)
        yield from _parameters(f"{name}.fc1", ours.feed_forward.inner)
        yield from _parameters(f"{name}.fc2", ours.feed_forward.outer)
        yield from _parameters(f"{name}.final_layer_norm", ours.feed_forward_residual.norm)

    for i, encoder in enumerate(model.encoder):
        yield from layer(f"model.encoder.layers.{i}", encoder)
    for i, decoder in enumerate(model.decoder):
        yield from layer(f"model.decoder.layers.{i}", decoder)
        yield from attention(f"model.decoder.layers.{i}.encoder_attn", decoder.memory_attention)
        yield from _parameters(
            f"model.decoder.layers.{i}.encoder_attn_layer_norm", decoder.memory_residual.norm
        )


def _parameters(name: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for part, value in module.named_parameters():
        yield f"{name}.{part}", value.detach()


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
    def search(self, src: Ids, beam: int, alpha: float, limit: int) -> list[Hypothesis]:
        found: list[Hypothesis] = []
        for i in range(0, len(src), BATCH_SENTENCES):
            ids, mask = _pad([[*line, EOS] for line in src[i : i + BATCH_SENTENCES]])
            made = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                return_dict_in_generate=True,
                output_scores=True,
                generation_config=_make_generation_config(beam, alpha, max_new_tokens=limit),
            )
            outputs = [
                row[: row.index(EOS)] if EOS in row else row
                for row in made.sequences[:, 1:].tolist()
            ]
            scores = (
                made.sequences_scores.tolist()
                if beam > 1
                else [  # greedily they report none
                    sum(each) / len(each) ** alpha
                    for each in self.score(src[i : i + BATCH_SENTENCES], outputs)
                ]
            )
            found += map(Hypothesis, outputs, scores)
        return found

    @torch.inference_mode()
    def score(self, src: Ids, tgt: Ids) -> list[list[float]]:
        scores = []
        for i in range(0, len(src), BATCH_SENTENCES):
            targets = tgt[i : i + BATCH_SENTENCES]
            ids, mask = _pad([[*line, EOS] for line in src[i : i + BATCH_SENTENCES]])
            given, _ = _pad([[BOS, *line] for line in targets])
            wanted, _ = _pad([[*line, EOS] for line in targets])
            logits = self.model(input_ids=ids, attention_mask=mask, decoder_input_ids=given).logits
            each = logits.log_softmax(2).gather(2, wanted[:, :, None]).squeeze(2)
            scores += [
                row[: len(line) + 1] for row, line in zip(each.tolist(), targets, strict=True)
            ]
        return scores


def _pad(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The ids and where there are any, each (S, L)."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(longest) < lengths[:, None]).long()


def check_tokenizer(tokenizer: Any, vocab: Vocab, lines: Sequence[str]) -> None:
    """Compare text to ids and back with ours, except that `skip_special_tokens` drops unknown pieces."""
    for line, ours in zip(lines, vocab.encode(lines), strict=True):
        theirs = tokenizer(line)["input_ids"][:-1]
        known = [i for i in ours if i != UNK]
        text = tokenizer.decode(known, skip_special_tokens=True)
        if theirs != ours or text != vocab.decode([known])[0].strip():
            raise Failure(
                f"the exported tokenizer disagrees on {line!r}: {theirs} instead of {ours}; "
                "nothing was written"
            )


def _load_to_compare(folder: Path, config: RunConfig) -> HuggingFaceEngine:
    return HuggingFaceEngine(folder)


HUGGING_FACE = Format(
    "transformers", FLOATS, write_huggingface, _load_to_compare, explain_huggingface
)
