"""What a recipe is, in words: the training text, the model and its search, the training.

Model cards and reports use these lines, which need only the config and the vocabulary, and no torch.
"""

from nmt.config import DataConfig, DecodingConfig, ModelConfig, OptimizerConfig, TrainingConfig
from nmt.corpus.reader import describe_corpus
from nmt.data.vocab import Vocabulary, format_size

TIED_MATRICES: dict[bool | str, str] = {
    True: "one matrix for embeddings and projection",
    False: "separate embeddings and projection",
    "decoder": "one matrix for target embedding and projection",
    "embeddings": "one matrix for both embeddings",
}
FORMULAS = {"gnmt": "((5 + n) / 6)^{alpha:g}", "length": "n^{alpha:g}", "none": "1"}


def describe_training_text(data: DataConfig) -> str:
    corpora = [describe_corpus(corpus) for corpus in data.train]
    return "; ".join(corpora) or "not recorded"


def describe_model(model: ModelConfig, vocab: Vocabulary) -> dict[str, str]:
    """Return the rows for the shape of the model and for its pieces."""
    traits = [
        f"{model.encoder_depth} + {model.decoder_depth} layers",
        f"d_model {model.d_model}",
        f"d_ff {model.d_ff}",
        f"{model.n_heads} heads",
        f"{model.norm}-norm",
        f"{model.positions} positions",
        TIED_MATRICES[model.tied],
    ]
    if model.d_k is not None or model.d_v is not None:
        traits.append(f"keys of {model.key_size} and values of {model.value_size} in each head")
    if model.window is not None:
        traits.append(f"self-attention to {model.window} neighbours on each side")
    if model.attention_bias:
        traits.append("biases in attention")
    if model.projection_bias:
        traits.append("a bias in the projection")
    if model.activation != "relu":
        traits.append(f"{model.activation} in the feed-forward layers")
    if model.scale_embeddings != "embedding":
        traits.append(f"scale_embeddings: {model.scale_embeddings}")
    if model.embedding_norm is not None:
        traits.append("LayerNorm on embeddings")

    kind = "joint BPE" if vocab.src is vocab.tgt else "BPE of each language"
    pieces = f"{kind} (SentencePiece), {format_size(vocab)}"
    if model.vocab_rows is not None:
        pieces += f", in matrices of {model.vocab_rows:,} rows"
    return {"model": ", ".join(traits), "pieces": pieces}


def describe_search(decoding: DecodingConfig) -> str:
    penalty = FORMULAS[decoding.penalty].format(alpha=decoding.length_penalty)
    limit = describe_output_limit(decoding.max_ratio, decoding.max_extra)
    return f"beam {decoding.beam}, log-probability / {penalty}, {limit}"


def describe_output_limit(max_ratio: float, max_extra: int) -> str:
    """Say in words how long an output may be: max_ratio * (source pieces) + max_extra pieces."""
    if max_ratio == 0:
        return f"at most {max_extra} pieces"
    if max_ratio == 1:
        return f"at most {max_extra} pieces more than the source"
    limit = f"at most {max_ratio:g} times as many pieces as the source"
    return f"{limit}, and {max_extra} more" if max_extra else limit


def describe_training(
    training: TrainingConfig, optimizer: OptimizerConfig, model: ModelConfig, seed: int
) -> dict[str, str]:
    tokens = f"{training.src_tokens:,} + {training.tgt_tokens:,} tokens"

    name = "Adam"
    if optimizer.weight_decay:
        name = f"AdamW, weight decay {optimizer.weight_decay:g}"
    constants = f"beta {optimizer.beta1:g} and {optimizer.beta2:g}, epsilon {optimizer.eps:g}"

    regularisation = [f"dropout {model.dropout:g}"]
    if model.attention_dropout:
        regularisation.append(f"{model.attention_dropout:g} in attention")
    if model.ffn_dropout:
        regularisation.append(f"{model.ffn_dropout:g} in the feed-forward layers")
    regularisation.append(f"label smoothing {training.label_smoothing:g}")

    rows = {
        "updates planned": f"{training.steps:,} of about {tokens}",
        "optimizer": f"{name}, {constants}; rate {_describe_rate(optimizer)}",
        "regularisation": ", ".join(regularisation),
    }
    if training.ema is not None:
        rows["moving average"] = f"of the weights, decay {training.ema:g}: it is what was saved"
    rows["precision, seed"] = f"{training.precision}, {seed}"
    return rows


def _describe_rate(optimizer: OptimizerConfig) -> str:
    warmup, peak = optimizer.warmup_steps, optimizer.peak_lr
    if peak is None:
        return f"{optimizer.scale:g} * d_model^-0.5 * min(step^-0.5, step * {warmup}^-1.5)"
    after = {
        "inverse_sqrt": f"then {peak:g} * ({warmup} / step)^0.5",
        "cosine": f"then half a cosine down to {optimizer.final_lr:g}",
        "constant": "and no further",
    }
    return f"linear over {warmup} updates up to {peak:g}, {after[optimizer.schedule]}"
