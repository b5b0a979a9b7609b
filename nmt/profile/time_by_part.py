"""Which part of an update an operation or a kernel belongs to, by the names in torch's profile.

On a GPU only a kernel's name is known, because a whole micro-batch is one launch. On CPU an
operation also has the names of the operations that it ran within, so that a product within the loss
counts as loss. Whatever matches no name, such as residual sums and sums of gradients, is `other`.
"""

import re
from collections import defaultdict

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

UPDATE = "update"  # the range of a whole one
BACKWARD = "autograd::engine::evaluate_function"  # how torch's ranges of the backward pass begin

ATTENTION = "attention"
LOSS = "softmax and loss"
OPTIMIZER = "optimizer"
OTHER = "other"
PRODUCTS = "matrix products"
REST = "embedding, norm, dropout"
SUM = "sum over ranks"

# The part that a lower-case name belongs to. The first match counts: a kernel of torch.compile also
# names what it was fused with.
PATTERNS = (
    ("triton_", REST),
    (r"optimizer\.|adam|multi_tensor_apply", OPTIMIZER),
    ("nccl|gloo", SUM),
    ("loss", LOSS),
    ("attention|flash|fmha", ATTENTION),
    ("dropout|layer_?norm|embedding", REST),
    ("gemm|nvjet|cutlass|xmma|cublas|splitk|linear|aten::addmm|aten::mm", PRODUCTS),
)


def find_part(name: str) -> str:
    for pattern, part in PATTERNS:
        if re.search(pattern, name.lower()):
            return part
    return OTHER


def sum_kernels(events: list[FunctionEvent]) -> dict[str, float]:
    """Seconds of each part by the kernels that ran on the GPU, including those of a CUDA graph."""
    sums: dict[str, float] = defaultdict(float)
    for event in events:
        # A range spans kernels that are events too.
        is_range = event.is_user_annotation or event.name == UPDATE
        if event.device_type == DeviceType.CUDA and not is_range:
            sums[find_part(event.name)] += event.time_range.elapsed_us() / 1e6
    return sums


def sum_operations(events: list[FunctionEvent]) -> dict[str, float]:
    """Seconds of each part by the operations' own time on CPU."""
    sums: dict[str, float] = defaultdict(float)
    for event in events:
        names = _names_around(event)
        is_backward = any(name.startswith(BACKWARD) for name in names)
        if is_backward or UPDATE in names:  # and not of another thread
            sums[find_part(" ".join(names))] += event.self_cpu_time_total / 1e6
    return sums


def _names_around(event: FunctionEvent | None) -> list[str]:
    """The name of an operation, and of those that it ran within."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names
