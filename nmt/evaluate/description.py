"""What a recipe is, in words: the training text, the model and its search, the training.

Model cards and reports say it with these lines, from the config and the vocabulary alone, so
without torch.
"""

from nmt.config import OptimizerConfig, RunConfig
from nmt.corpus.reader import describe_corpus
from nmt.data.vocab import Vocabulary, format_size

TIED_MATRICES: dict[bool | str, str] = {
    True: "one matrix for embeddings and projection",
    False: "separate embeddings and projection",
    "decoder": "one matrix for target embedding and projection",
    "embeddings": "one matrix for both embeddings",
}
FORMULAS = {"gnmt": "((5 + n) / 6)^{alpha:g}", "length": "n^{alpha:g}", "none": "1"}


def describe_training_text(config: RunConfig) -> str:
    return "; ".join(describe_corpus(corpus) for corpus in config.data.train) or "not recorded"


def describe_model(config: RunConfig, vocab: Vocabulary) -> dict[str, str]:
    """Return the rows for the shape of the model and for the search that it is meant for."""
    model, decoding = config.model, config.decoding
    biases = ", biases in attention" if model.attention_bias else ""
    others = (
        "" if model.activation == "relu" else f", {model.activation} in the feed-forward layers"
    )
    if model.scale_embeddings != "embedding":
        others += f", scale_embeddings: {model.scale_embeddings}"
    if model.embedding_norm is not None:
        others += ", LayerNorm on embeddings"
    rows = "" if model.vocab_rows is None else f", in matrices of {model.vocab_rows:,} rows"
    kind = "joint BPE" if config.vocab.joint else "BPE of each language"
    penalty = FORMULAS[decoding.penalty].format(alpha=decoding.length_penalty)
    return {
        "model": f"{model.encoder_depth} + {model.decoder_depth} layers, d_model {model.d_model}, d_ff {model.d_ff}, "
        f"{model.n_heads} heads, {model.norm}-norm, {model.positions} positions, "
        f"{TIED_MATRICES[model.tied]}{biases}{others}",
        "pieces": f"{kind} (SentencePiece), {format_size(vocab)}{rows}",
        "meant to decode with": f"beam {decoding.beam}, log-probability / {penalty}, at most "
        f"{decoding.max_extra} pieces more than the source",
    }


def describe_training(config: RunConfig) -> dict[str, str]:
    training, optimizer = config.training, config.optimizer
    average: dict[str, str] = {}
    if training.ema is not None:
        average["moving average"] = f"of the weights, decay {training.ema:g}: it is what was saved"
    inner = ""
    if config.model.attention_dropout:
        inner += f", {config.model.attention_dropout:g} in attention"
    if config.model.ffn_dropout:
        inner += f", {config.model.ffn_dropout:g} in the feed-forward layers"
    name = f"AdamW, weight decay {optimizer.weight_decay:g}" if optimizer.weight_decay else "Adam"
    return {
        "updates planned": f"{training.steps:,} of about {training.src_tokens:,} + {training.tgt_tokens:,} tokens",
        "optimizer": f"{name}, beta {optimizer.beta1:g} and {optimizer.beta2:g}, epsilon {optimizer.eps:g}; rate "
        f"{_describe_rate(optimizer)}",
        "regularisation": f"dropout {config.model.dropout:g}{inner}, label smoothing {training.label_smoothing:g}",
        **average,
        "precision, seed": f"{training.precision}, {config.seed}",
    }


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
