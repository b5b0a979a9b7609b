"""What is applied to a model from outside so that many ranks train it as one: DDP.

The model knows nothing of it. Gradients are summed in a few large buckets during the last micro-batch's backward pass;
the earlier ones of an update stay local.
"""

import contextlib
from contextlib import AbstractContextManager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nmt.dist import World

BUCKET_MB = 64


def spread(module: nn.Module, world: World) -> nn.Module:
    """`module` as one replica of many; alone it stays as it is."""
    if world.size == 1:
        return module
    ids = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=ids, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True,
                                   broadcast_buffers=False)  # positions are computed, and may have grown on one rank


def held(module: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Keep gradients local unless this is the update's last micro-batch."""
    if is_last or not isinstance(module, DistributedDataParallel):
        return contextlib.nullcontext()
    return module.no_sync()
