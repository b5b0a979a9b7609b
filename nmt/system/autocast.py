"""In which type products are computed."""

import torch
from torch import Tensor


def find_product_type(x: Tensor) -> torch.dtype:
    """Return the type of products with `x`: that of autocast where it is on, otherwise that of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
