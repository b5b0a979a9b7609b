"""A model for CTranslate2, and CTranslate2 with such a model: the fast C++ engine for CPU and GPU, int8 included.

Its Transformer is the paper's, so that export is a rename of tensors; only its own table of positions is another one
and gives way to ours. CTranslate2 scores by log-probability / |Y|^alpha, ends a search when it has as many finished
outputs as the beam is wide, and bounds an output by a number for all sentences: `docs/exports.md` tells what follows.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmt.config import DecodingConfig, RunConfig
from nmt.data.vocab import BOS, EOS, PAD, UNK, Vocab
from nmt.export.parity import Ids
from nmt.export.tensors import (
    check_expressible,
    explain_length_penalty,
    position_table,
    projections,
)
from nmt.model.transformer import DecoderLayer, EncoderLayer, FeedForward, Transformer
from nmt.system.errors import UserError
from nmt.system.run_folder import VOCAB_FILE
from nmt.translate.beams import Hypothesis, penalty

CTRANSLATE2_USAGE = """\
    import ctranslate2, sentencepiece

    pieces = sentencepiece.SentencePieceProcessor("vocab.model")
    engine = ctranslate2.Translator(".")
    line = pieces.encode("A sentence.", out_type=str)
    found = engine.translate_batch([line], beam_size={beam}, length_penalty={alpha}, min_decoding_length=0,
                                   max_decoding_length=len(line) + {extra}, max_input_length=0)
    print(pieces.decode(found[0].hypotheses[0]))
"""


def explain_ctranslate2(config: RunConfig) -> str:
    """Return how to use an export, for its card."""
    decoding = config.decoding
    alpha = 0.0 if decoding.penalty == "none" else decoding.length_penalty
    usage = CTRANSLATE2_USAGE.format(beam=decoding.beam, alpha=alpha, extra=decoding.max_extra)
    return usage + explain_length_penalty(config)


def library() -> Any:
    try:
        import ctranslate2
    except ImportError:
        raise UserError("CTranslate2 is not installed; pip install 'nmt[export]'") from None
    ctranslate2.set_log_level(logging.ERROR)
    return ctranslate2


def write(
    folder: Path, model: Transformer, vocab: Vocab, config: RunConfig, quantization: str
) -> None:
    """Fill `folder` with what CTranslate2 loads, and the BPE model."""
    check_expressible(config.model)
    spec = library().specs.TransformerSpec.from_config(
        (config.model.n_layers,) * 2, config.model.n_heads, pre_norm=config.model.norm == "pre"
    )
    encoder, decoder = spec.encoder, spec.decoder
    encoder.embeddings[0].weight = _array(model.src_embedding.weight)
    decoder.embeddings.weight = _array(model.tgt_embedding.weight)
    decoder.projection.weight = _array(model.projection.weight)
    encoder.position_encodings.encodings = _array(
        position_table(model.src_positions, config.decoding)
    )
    decoder.position_encodings.encodings = _array(
        position_table(model.tgt_positions, config.decoding)
    )
    if config.model.norm == "pre":
        _set_norm(encoder.layer_norm, model.encoder_norm)
        _set_norm(decoder.layer_norm, model.decoder_norm)
    layers: list[EncoderLayer | DecoderLayer] = [*model.encoder, *model.decoder]
    for place, layer in zip((*encoder.layer, *decoder.layer), layers, strict=True):
        *qkv, output = projections(layer.attention, config.model)
        _set_products(place.self_attention.linear[0], qkv)
        _set_products(place.self_attention.linear[1], [output])
        _set_norm(place.self_attention.layer_norm, layer.attention_residual.norm)
        _set_feed_forward(place.ffn, layer.feed_forward)
        _set_norm(place.ffn.layer_norm, layer.feed_forward_residual.norm)
    for place, block in zip(decoder.layer, model.decoder, strict=True):
        q, *kv, output = projections(block.memory_attention, config.model)
        for linear, products in zip(place.attention.linear, ([q], kv, [output]), strict=True):
            _set_products(linear, products)
        _set_norm(place.attention.layer_norm, block.memory_residual.norm)
    pieces = vocab.pieces(range(vocab.size))
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = (
        pieces[i] for i in (BOS, EOS, UNK)
    )
    spec.config.decoder_start_token, spec.config.add_source_eos = pieces[BOS], True
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))
    (folder / VOCAB_FILE).write_bytes(vocab.model)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().float().numpy().copy()  # CTranslate2 quantizes in place


def _set_products(place: Any, products: list[Tensor]) -> None:
    place.weight = _array(torch.cat(products))


def _set_norm(place: Any, norm: nn.Module) -> None:
    assert isinstance(norm, nn.LayerNorm)
    place.gamma, place.beta = _array(norm.weight), _array(norm.bias)


def _set_feed_forward(place: Any, layer: FeedForward) -> None:
    for linear, ours in ((place.linear_0, layer.inner), (place.linear_1, layer.outer)):
        linear.weight, linear.bias = _array(ours.weight), _array(ours.bias)


class CTranslate2:
    """The engine with the model of a folder; `translator` is CTranslate2's own, for what is not here."""

    def __init__(self, folder: Path, n_threads: int = 0, device: str = "cpu") -> None:
        """`n_threads` for one batch, 0 lets CTranslate2 choose; it may change how many torch uses in this process.
        Weights are computed with as they are stored, where the processor can."""
        try:
            self.vocab = Vocab.load(folder / VOCAB_FILE)
            self.translator = library().Translator(
                str(folder), device=device, intra_threads=n_threads
            )
        except (RuntimeError, ValueError) as error:
            raise UserError(f"{folder}: CTranslate2 cannot load it: {error}") from None
        self._pieces = self.vocab.pieces(range(self.vocab.size))
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}

    def search(self, src: Ids, beam: int, alpha: float, limit: int) -> list[Hypothesis]:
        return [found[0] for found in self._found(src, beam, alpha, limit, 1)]

    def translate(self, src: Ids, config: DecodingConfig) -> list[Hypothesis]:
        """As near to our search as CTranslate2 comes: it finishes as many outputs as the beam is wide, and of those the
        best by the penalty of `config` is taken. The longest sentence sets the limit for all."""
        limit = max(map(len, src), default=0) + config.max_extra
        scored = [
            [
                Hypothesis(one.ids, one.score / float(penalty(len(one.ids) + 1, config)))
                for one in found
            ]
            for found in self._found(src, config.beam, 0.0, limit, config.beam)
        ]
        return [max(found, key=lambda one: one.score) for found in scored]

    def _found(
        self, src: Ids, beam: int, alpha: float, limit: int, n_best: int
    ) -> list[list[Hypothesis]]:
        results = self.translator.translate_batch(
            self._named(src),
            beam_size=beam,
            num_hypotheses=n_best,
            length_penalty=alpha,
            max_decoding_length=limit,
            min_decoding_length=0,
            max_input_length=0,
            return_scores=True,
            max_batch_size=4096,
            batch_type="tokens",
            suppress_sequences=[[self._pieces[i]] for i in (PAD, BOS)],
        )
        return [
            [
                Hypothesis([self._ids[piece] for piece in pieces], score)
                for pieces, score in zip(result.hypotheses, result.scores, strict=True)
            ]
            for result in results
        ]

    def score(self, src: Ids, tgt: Ids) -> list[list[float]]:
        results = self.translator.score_batch(
            self._named(src),
            self._named(tgt),
            max_input_length=0,
            max_batch_size=4096,
            batch_type="tokens",
        )
        return [list(result.log_probs) for result in results]

    def _named(self, sentences: Ids) -> list[list[str]]:
        return [[self._pieces[i] for i in ids] for ids in sentences]
