"""Which formats nmt-export can give a model, told before hours are spent on its training."""

from nmt.config import ModelConfig


def describe_formats(shape: ModelConfig) -> str:
    """Name the formats other than our own that a model of this shape can be exported to."""
    formats = "CTranslate2, LibreTranslate"
    if shape.positions == "rotary":
        return f"{formats}; Hugging Face and Marian have no rotary positions"
    formats += ", Hugging Face"
    if shape.norm == "pre" or shape.positions == "learned":
        return f"{formats}; Marian needs model.norm=post and model.positions=marian"
    agreement = (
        "exactly" if shape.positions == "marian" else "nearly: model.positions=marian is exact"
    )
    return f"{formats}; Marian and Bergamot {agreement}"
