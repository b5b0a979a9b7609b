"""Which part of an update an operation belongs to, read from what torch's profiler saw.

On CPU hooks put a range around the forward pass of each module that is a part, and a backward operation belongs to the
part of the forward operation that has its sequence number. What belongs to none, such as sums of gradients, is `other`.
On a GPU a whole micro-batch is one launch without modules: there each kernel belongs to a part by its name.
"""

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import FunctionEvent

from nmt.model.transformer import FeedForward, MemoryAttention, SelfAttention, Transformer
from nmt.train.loss import Objective

UPDATE = "update"  # the range of a whole one
PARTS = (
    "attention",
    "feed-forward",
    "embedding, norm, dropout",
    "softmax and loss",
    "optimizer",
    "data waited",
    "other",
)
ATTENTION, FEED_FORWARD, REST, LOSS, OPTIMIZER, WAITED, OTHER = PARTS
PRODUCTS, IDLE = "matrix products", "GPU without work"
KERNELS = (  # what the name of a GPU kernel contains, and the part it belongs to; the first match counts
    ("triton_", REST),
    ("attention", ATTENTION),
    ("flash", ATTENTION),
    ("fmha", ATTENTION),
    ("loss_rows", LOSS),
    ("nccl", "sum over ranks"),
    ("adam", OPTIMIZER),
    ("multi_tensor_apply", OPTIMIZER),
    ("gemm", PRODUCTS),
    ("nvjet", PRODUCTS),
    ("cutlass", PRODUCTS),
    ("xmma", PRODUCTS),
    ("cublas", PRODUCTS),
    ("splitk", PRODUCTS),
)
OWNERS: dict[type[nn.Module], str] = {  # what a module does outside the modules within it
    SelfAttention: ATTENTION,
    MemoryAttention: ATTENTION,
    FeedForward: FEED_FORWARD,
    Transformer: REST,
    Objective: LOSS,
}
BACKWARD, OF_OPTIMIZER = (
    "autograd::engine::evaluate_function",
    "Optimizer.",
)  # how torch's own ranges begin


@contextlib.contextmanager
def told_apart(objective: nn.Module) -> Iterator[None]:
    """While this holds, each module's forward pass stands in the profile under the name of its part."""
    entered: list[record_function] = []

    def enter(module: nn.Module, _: object) -> None:
        entered.append(record_function(OWNERS[type(module)]).__enter__())

    def leave(*_: object) -> None:
        entered.pop().__exit__(None, None, None)

    owners = [module for module in objective.modules() if type(module) in OWNERS]
    hooks = [module.register_forward_pre_hook(enter) for module in owners]
    hooks += [module.register_forward_hook(leave) for module in owners]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def seconds_of_kernels(events: list[FunctionEvent]) -> dict[str, float]:
    """Seconds of each part by the kernels that ran on the GPU, also those of a CUDA graph."""
    sums: dict[str, float] = {}
    for event in events:
        if event.device_type != DeviceType.CUDA or event.is_user_annotation or event.name == UPDATE:
            continue  # ranges span the kernels within them
        part = part_of_kernel(event.name)
        sums[part] = sums.get(part, 0.0) + event.time_range.elapsed_us() / 1e6
    return sums


def part_of_kernel(name: str) -> str:
    """The part that a GPU kernel belongs to."""
    for pattern, part in KERNELS:
        if pattern in name.lower():
            return part
    return OTHER


def seconds_of_parts(events: list[FunctionEvent]) -> dict[str, float]:
    """Seconds of each part by the operations' own time on CPU."""
    owners = [_owner(event) for event in events]
    forward = {
        event.sequence_nr: owner
        for event, owner in zip(events, owners, strict=True)  # later ones prevail:
        if event.sequence_nr >= 0 and owner in PARTS
    }  # the operation that made the node comes last
    sums = dict.fromkeys(PARTS, 0.0)
    for event, owner in zip(events, owners, strict=True):
        if owner is not None:
            part = owner if isinstance(owner, str) else forward.get(owner, OTHER)
            sums[part] += event.self_cpu_time_total / 1e6
    return sums


def _owner(event: FunctionEvent | None) -> str | int | None:
    """The part within which an operation ran, or for one of a backward pass its sequence number."""
    while event is not None:
        if event.name in PARTS:
            return event.name
        if event.name.startswith(BACKWARD):
            return event.sequence_nr
        if event.name.startswith(OF_OPTIMIZER):
            return OPTIMIZER
        if event.name == UPDATE:
            return OTHER
        event = event.cpu_parent
    return None
