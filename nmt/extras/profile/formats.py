"""Which formats nmt-export can give a model, told before hours are spent on its training."""

from nmt.config import ModelConfig


def describe_formats(shape: ModelConfig) -> str:
    """Name the formats other than our own that a model of this shape can be exported to."""
    if shape.window is not None:
        return "no other engine: none has model.window"
    formats = "CTranslate2, LibreTranslate"
    if shape.positions == "rotary" or shape.embedding_norm:
        return f"{formats}; Hugging Face and Marian have no rotary positions or norm of embeddings"
    formats += ", Hugging Face"
    if shape.norm == "pre" or shape.positions == "learned" or shape.activation == "gelu":
        return f"{formats}; Marian needs model.norm=post, positions=marian and no gelu"
    agreement = (
        "exactly" if shape.positions == "marian" else "nearly: model.positions=marian is exact"
    )
    return f"{formats}; Marian and Bergamot {agreement}"
