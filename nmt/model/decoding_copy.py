"""A copy of a model that shares its weights, so that decoding can lay them out in another way while the
model itself trains on.
"""

import torch

from nmt.model.backend import use_backend
from nmt.model.transformer import Transformer
from nmt.model.weightless import without_weights


@torch.inference_mode()
def copy_sharing_weights(model: Transformer) -> Transformer:
    """Return a copy in evaluation mode. The weights of `model` must not change as long as it is used."""
    with without_weights():
        copy = Transformer(model.config, *model.sizes).eval()
    use_backend(copy, model.backend)
    copy.load_state_dict(model.state_dict(), assign=True)
    # A learned table came with the weights. Sinusoids are in no state.
    for mine, its in (
        (copy.src_positions, model.src_positions),
        (copy.tgt_positions, model.tgt_positions),
    ):
        if not mine.is_learned:
            mine.table = its.table
    return copy
