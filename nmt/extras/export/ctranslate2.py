"""The export to CTranslate2, a fast C++ engine for CPU and GPU with int8, and an engine that runs
it there.

Its Transformer is the paper's, so that the export renames tensors; only its table of positions
differs, and ours replaces it. CTranslate2 scores by log-probability / |Y|^alpha, ends a
search when it has as many finished outputs as the beam is wide, and limits all outputs to one
length: `docs/exports.md` explains what follows from that.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt.agreement import find_direction
from nmt.config import DataConfig, DecodingConfig, ModelConfig
from nmt.config_files import load_recorded_config, override_config, parse_device
from nmt.data.batch import Sentences
from nmt.data.vocab import BOS, EOS, UNK, EncodedLines, Vocab, Vocabulary, load_vocab, write_vocab
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
from nmt.system.device import choose_device
from nmt.system.errors import UserError, explain_missing
from nmt.system.extras import import_extra
from nmt.system.files import has_plain_file, read_json, read_manifest, verify
from nmt.system.run_folder import CONFIG_FILE, EXPORT_FILE, find_vocab_files
from nmt.translate.batching import (
    DEFAULT_BATCH_TOKENS,
    Requests,
    SearchedBatch,
    split_by_budget,
)
from nmt.translate.length_penalty import compute_penalty
from nmt.translate.search_rules import make_rules
from nmt.translate.search_state import BestHypotheses, Hypothesis
from nmt.translate.translator import LoadedModel, TextToText

# Where CTranslate2 has the parts of one of our layers, by the names of `MARIAN_NAMES`
PLACES = {
    "attention.qkv": "self_attention/linear_0",
    "attention.output": "self_attention/linear_1",
    "attention_residual.norm": "self_attention/layer_norm",
    "memory_attention.q": "attention/linear_0",
    "memory_attention.kv": "attention/linear_1",
    "memory_attention.output": "attention/linear_2",
    "memory_residual.norm": "attention/layer_norm",
    "feed_forward.inner": "ffn/linear_0",
    "feed_forward.outer": "ffn/linear_1",
    "feed_forward_residual.norm": "ffn/layer_norm",
}
# as CTranslate2 calls them
CTRANSLATE2_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swish": "SWISH"}
SHARED_VOCAB_FILE, TGT_VOCAB_FILE = "shared_vocabulary.json", "target_vocabulary.json"
BATCHES: dict[str, Any] = {"max_input_length": 0, "max_batch_size": 4096, "batch_type": "tokens"}
LOAD_MODEL = 'pieces = sentencepiece.SentencePieceProcessor("vocab.model")'
LOAD_MODELS = """\
pieces = sentencepiece.SentencePieceProcessor("vocab.src.model")
    tgt_pieces = sentencepiece.SentencePieceProcessor("vocab.tgt.model")"""
CTRANSLATE2_USAGE = """\
    import ctranslate2, sentencepiece

    {models}
    engine = ctranslate2.Translator(".")
    line = pieces.encode("A sentence.", out_type=str)
    found = engine.translate_batch([line], beam_size={beam}, length_penalty={alpha}, min_decoding_length=0,
                                   max_decoding_length=len(line) + {extra}, max_input_length=0)
    print({decoder}.decode(found[0].hypotheses[0]))
"""
CTRANSLATE2_TAG = "It comes before the pieces: `line = [{tag!r}, *line]`.\n"
UNUSED_ROWS = """
The model has more rows than pieces. The others are named `<unused-N>` in the vocabulary; \
`suppress_sequences` excludes them from a search.
"""


def import_ctranslate2() -> Any:
    ctranslate2 = import_extra("ctranslate2")
    ctranslate2.set_log_level(logging.ERROR)
    return ctranslate2


def write_ctranslate2(
    folder: Path,
    model: Transformer,
    vocab: Vocabulary,
    data: DataConfig,
    decoding: DecodingConfig,
    quantization: str,
) -> str:
    """Fill `folder` with the model that CTranslate2 loads, and the BPE model; return how to use it."""
    shape = model.config
    check_expressible(shape)
    if shape.activation not in CTRANSLATE2_ACTIVATIONS:
        raise UserError(
            f"model.activation is {shape.activation}, which has no name in CTranslate2; export to "
            "another format"
        )
    specs = import_ctranslate2().specs
    options = {
        "pre_norm": shape.norm == "pre",
        "activation": specs.common_spec.Activation[CTRANSLATE2_ACTIVATIONS[shape.activation]],
        "layernorm_embedding": shape.embedding_norm is not None,
    }
    if shape.positions == "rotary":
        options |= {"rotary_dim": shape.key_size, "rotary_interleave": False}
    spec = specs.TransformerSpec(
        specs.transformer_spec.TransformerEncoderSpec(
            shape.encoder_depth, shape.n_heads, **options
        ),
        specs.transformer_spec.TransformerDecoderSpec(
            shape.decoder_depth, shape.n_heads, **options
        ),
    )
    is_scaled = shape.scale_embeddings == "embedding"
    spec.encoder.scale_embeddings = spec.decoder.scale_embeddings = is_scaled
    _set_weights(spec, model, decoding)

    def list_row_names(side: Vocab) -> list[str]:
        return name_rows(side.list_pieces(), shape.count_rows(side.size))

    # vocabulary
    spec.register_source_vocabulary(list_row_names(vocab.src))
    spec.register_target_vocabulary(list_row_names(vocab.tgt))
    bos, eos, unk = vocab.tgt.pieces([BOS, EOS, UNK])
    spec.config.bos_token = spec.config.decoder_start_token = bos
    spec.config.eos_token = eos
    spec.config.unk_token = unk
    spec.config.add_source_eos = True

    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))
    write_vocab(folder, vocab)

    is_joint = isinstance(vocab, Vocab)
    usage = CTRANSLATE2_USAGE.format(
        models=LOAD_MODEL if is_joint else LOAD_MODELS,
        decoder="pieces" if is_joint else "tgt_pieces",
        beam=decoding.beam,
        alpha=find_alpha(decoding),
        extra=decoding.max_extra,
    )
    usage += explain_penalty_and_tags(decoding, data.train_tags, CTRANSLATE2_TAG)
    return usage if shape.vocab_rows is None else usage + UNUSED_ROWS


def name_rows(pieces: list[str], n_rows: int) -> list[str]:
    """Name each row of an embedding, as CTranslate2 wants it: by its piece, or as unused."""
    unused = [f"<unused-{i}>" for i in range(len(pieces), n_rows)]
    for name in set(unused) & set(pieces):
        raise UserError(
            f"model.vocab_rows is {n_rows}: --to ctranslate2 names an unused row {name}, but the "
            "vocabulary has a piece of this name; use another format"
        )
    return pieces + unused


def _set_weights(spec: Any, model: Transformer, decoding: DecodingConfig) -> None:
    encoder, decoder, shape = spec.encoder, spec.decoder, model.config

    # layers
    for name, _ in list_layer_parts(shape):
        _set_part(spec, _find_place(name), model, name)
    if shape.embedding_norm is not None:
        _set_part(spec, "encoder/layernorm_embedding", model, "src_embedding_norm")
        _set_part(spec, "decoder/layernorm_embedding", model, "tgt_embedding_norm")

    # embeddings, positions, projection
    encoder.embeddings[0].weight = _copy_to_array(model.src_embedding.weight)
    decoder.embeddings.weight = _copy_to_array(model.tgt_embedding.weight)
    decoder.projection.weight = _copy_to_array(scale_projection(model))
    if model.projection.bias is not None:
        decoder.projection.bias = _copy_to_array(model.projection.bias)
    if shape.positions == "rotary":
        del encoder.position_encodings  # which would stay empty
        return
    src_table = make_position_table(model.src_positions, decoding)
    tgt_table = make_position_table(model.tgt_positions, decoding)
    encoder.position_encodings.encodings = _copy_to_array(src_table)
    decoder.position_encodings.encodings = _copy_to_array(tgt_table)


def _find_place(name: str) -> str:
    side, _, rest = name.partition(".")
    if not rest:  # the LayerNorm after a stack of pre-norm layers
        return side.replace("_norm", "/layer_norm")
    layer, _, part = rest.partition(".")
    return f"{side}/layer_{layer}/{PLACES[part]}"


def _set_part(spec: Any, path: str, model: Transformer, name: str) -> None:
    """Set a linear layer or a LayerNorm of CTranslate2 to that of our model."""
    from ctranslate2.specs.model_spec import index_spec

    layer = index_spec(spec, path)
    weight, bias = read_part(model, name)
    is_norm = hasattr(layer, "gamma")
    setattr(layer, "gamma" if is_norm else "weight", _copy_to_array(weight))
    if bias is not None:
        setattr(layer, "beta" if is_norm else "bias", _copy_to_array(bias))


def _copy_to_array(tensor: Tensor) -> Any:
    return tensor.detach().float().numpy().copy()  # because CTranslate2 quantizes in place


class CTranslate2Engine:
    """CTranslate2 with the model of a folder; `translator` is CTranslate2's own object."""

    def __init__(
        self,
        folder: Path,
        n_threads: int | None = None,
        device: str = "cpu",
        n_batches: int = 1,
        compute_type: str = "default",
    ) -> None:
        """Load the model; by default it computes in the type of its stored weights if the processor
        supports that.

        `n_threads` work on one batch, by default as many as torch has. Loading may change the number
        of torch's threads too. Up to `n_batches` are translated at a time, if as many threads ask.
        """
        try:
            self.vocab = load_vocab(folder)
            self.translator = import_ctranslate2().Translator(
                str(folder),
                device=device,
                compute_type=compute_type,
                intra_threads=n_threads or torch.get_num_threads(),
                inter_threads=n_batches,
            )
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"{folder}: CTranslate2 cannot load it ({error}); export it again with nmt-export"
            ) from None
        tgt = self.vocab.tgt
        self._src_pieces, self._tgt_pieces = self.vocab.src.list_pieces(), tgt.list_pieces()
        self._ids = {piece: i for i, piece in enumerate(self._tgt_pieces)}
        file = folder / SHARED_VOCAB_FILE
        if not has_plain_file(file):
            file = folder / TGT_VOCAB_FILE
        names = read_json(file)  # a list of pieces, or CTranslate2 had not loaded it
        self._suppressed = [[self._tgt_pieces[i]] for i in list_forbidden(tgt)]
        self._suppressed += [[name] for name in names[tgt.size :]]  # unused rows

    def translate_greedily(self, src: Sentences, limit: int) -> EncodedLines:
        return [best.ids for (best,) in self.search(src, beam=1, alpha=0.0, limit=limit)]

    def translate(self, src: Sentences, config: DecodingConfig) -> list[Hypothesis]:
        """Search as nearly to our own search as CTranslate2 can.

        It finishes as many outputs as the beam is wide, and the best of these by the penalty of
        `config` is taken. The longest sentence sets the limit for all.
        """
        limit = max(map(len, src), default=0) + config.max_extra
        beams = self.search(src, config.beam, 0.0, limit, config.beam, config.no_repeat_ngram or 0)
        rules, best = make_rules(config), []
        for hypotheses in beams:
            scored = []
            for unscored in hypotheses:
                penalty = float(compute_penalty(len(unscored.ids) + 1, rules))  # with eos
                scored.append(Hypothesis(unscored.ids, unscored.score / penalty))
            best.append(max(scored, key=lambda hypothesis: hypothesis.score))
        return best

    def search(
        self,
        src: Sentences,
        beam: int,
        alpha: float,
        limit: int,
        n_best: int = 1,
        no_repeat_ngram: int = 0,
    ) -> BestHypotheses:
        """Find the best outputs of each sentence, by CTranslate2's own rules."""
        results = self.translator.translate_batch(
            _to_pieces(src, self._src_pieces),
            beam_size=beam,
            num_hypotheses=n_best,
            length_penalty=alpha,
            max_decoding_length=limit,
            min_decoding_length=0,
            no_repeat_ngram_size=no_repeat_ngram,
            return_scores=True,
            suppress_sequences=self._suppressed,
            **BATCHES,
        )
        beams = []
        for result in results:
            ids = [[self._ids[piece] for piece in pieces] for pieces in result.hypotheses]
            beams.append(list(map(Hypothesis, ids, result.scores)))
        return beams

    def score(self, src: Sentences, tgt: Sentences) -> LogProbs:
        results = self.translator.score_batch(
            _to_pieces(src, self._src_pieces),
            _to_pieces(tgt, self._tgt_pieces),
            **BATCHES,
        )
        return [list(result.log_probs) for result in results]


def _to_pieces(sentences: Sentences, pieces: list[str]) -> list[list[str]]:
    return [[pieces[i] for i in ids] for ids in sentences]


class CTranslate2Translator(TextToText):
    """Translates text with CTranslate2. Because its search has other rules (`docs/exports.md`), its
    output is labelled with the engine, its version and the type of its weights."""

    def __init__(
        self,
        exported: CTranslate2Engine,
        data: DataConfig,
        model: ModelConfig,
        decoding: DecodingConfig,
        quantization: str,
    ) -> None:
        super().__init__(exported.vocab, decoding, model)
        self.exported = exported
        self.languages = data.src, data.tgt
        self.direction = find_direction(data)
        self.version: str = import_ctranslate2().__version__
        self.engine = f"ctranslate2 {self.version}, {quantization}"

    def search_batches(self, requests: Requests, n_best: int) -> Iterator[SearchedBatch]:
        if n_best > 1 or requests.prefixes or self.config.sample:
            raise UserError(
                "--engine ctranslate2 does not support --n-best, --sample or --prefix; leave them out"
            )
        n_tokens = self.config.batch_tokens or DEFAULT_BATCH_TOKENS
        for batch in split_by_budget(requests.sources, self.config.beam, n_tokens):
            best = self.exported.translate([requests.sources[i] for i in batch], self.config)
            yield batch, [[hypothesis] for hypothesis in best]


def open_ctranslate2(
    paths: Sequence[str], overrides: Sequence[str], is_served: bool = False
) -> LoadedModel:
    """Verify and load the one export in `paths`, on the device that the overrides ask for. A server's batches
    are small: on a CPU each core gets one of its own, because threads that share one mostly wait.
    """
    (path,) = paths
    folder = Path(path)
    if not (folder / EXPORT_FILE).exists():
        raise explain_missing(folder / EXPORT_FILE, "give what nmt-export --to ctranslate2 wrote")
    verify(folder, (EXPORT_FILE, *find_vocab_files(read_manifest(folder))))
    record = read_json(folder / EXPORT_FILE)
    values = record if isinstance(record, dict) else {}
    to, quantization = values.get("format"), values.get("quantization")
    if not isinstance(to, str) or not isinstance(quantization, str):
        raise UserError(
            f"{folder / EXPORT_FILE}: is damaged (it must name a format and a quantization); "
            "export it again with nmt-export"
        )
    if to != "ctranslate2":
        raise UserError(
            f"{folder}: is an export to {to}, not to CTranslate2; "
            "make one with nmt-export --to ctranslate2"
        )
    device = choose_device(parse_device(overrides))
    n_threads, n_batches = torch.get_num_threads(), 1
    if is_served and device.type == "cpu":
        n_threads, n_batches = 1, n_threads
    exported = CTranslate2Engine(folder, n_threads, device.type, n_batches)
    if is_served:
        torch.set_num_threads(n_threads * n_batches)  # which loading has changed
    config = override_config(load_recorded_config(folder / CONFIG_FILE), overrides)
    translator = CTranslate2Translator(
        exported, config.data, config.model, config.decoding, quantization
    )
    return LoadedModel(translator, config, [path])
