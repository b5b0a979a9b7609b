"""The length penalty of section 6.1, and those of other toolkits (`decoding.penalty`).

A hypothesis's score is its log-probability divided by a penalty that depends on its length |Y|, which counts the final
eos. Without it, the shortest translations would win.
"""

import torch
from torch import Tensor

from nmt.translate.search_rules import SearchRules


def compute_penalty(length: int | Tensor, rules: SearchRules) -> Tensor:
    """Return what a log-probability is divided by. `length` counts eos."""
    size = torch.as_tensor(length, dtype=torch.float32)
    if rules.penalty == "none":
        return torch.ones_like(size)
    if rules.penalty == "gnmt":
        size = (5.0 + size) / 6.0
    # The power is taken in fp64: in fp32, torch rounds that of one number otherwise than those of many,
    # and so the scores of a batch would depend on its longest sentence.
    return (size.double() ** rules.length_penalty).float()
