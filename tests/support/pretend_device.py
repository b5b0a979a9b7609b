"""A pretend GPU: tensors that say cuda:0 and compute on the CPU, for tests of what a real one would
punish.

    with pretend_device() as device:
        device.to_device(module)
        x = torch.zeros(3, device="cuda")
        ...
    device.waits, device.operations

Mixing host and device tensors raises. Each wait for the device is counted, by what waits. Operations
are counted as the dispatcher sees them, each of which would be about one launch. CUDA graphs are
recorded and replayed for real: what is recorded does not happen, and a replay repeats the operations
on the very tensors of the recording, so that whatever Python decides anew in a step goes wrong here as
it would there. A wait while recording raises. An event completes late, when the next is recorded, so
that code which does not wait is seen to go on.

With a `budget` of bytes its memory is counted too: what tensors hold at a time, without what a
recorded graph keeps. An operation whose result does not fit fails as torch's allocator does.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nmt.engines.cuda.backend import CudaBackend
from nmt.model.backend import use_backend
from nmt.system.strict_json import Fields

Module = TypeVar("Module", bound=nn.Module)
GPU = torch.device("cuda", 0)
WAITING = {
    "aten::" + name
    for name in (
        "_local_scalar_dense nonzero is_nonzero equal masked_select _unique2 unique_dim item repeat_interleave"
    ).split()
}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
COPYING = {"aten::_to_copy", "aten::copy_"}
NO_WORK = {  # only the shape of a tensor, or memory for it
    "aten::" + name
    for name in (
        "view _unsafe_view expand slice select transpose unsqueeze squeeze permute detach alias as_strided t split"
        " split_with_sizes unbind diagonal unfold lift_fresh empty empty_strided new_empty new_empty_strided"
        " empty_like _reshape_alias"
    ).split()
}


class DeviceTensor(Tensor):
    """A tensor of the pretend device; `on_host` holds its values. To torch's own code it lies on
    the meta device, which every build of torch has; to Python it says cuda:0."""

    on_host: Tensor
    device = GPU
    is_cuda = True
    is_meta = False

    @staticmethod
    def __new__(cls, real: Tensor) -> "DeviceTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            layout=real.layout,
            device=torch.device("meta"),
            requires_grad=False,
        )
        made.on_host = real
        _present().hold(made)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def tolist(self) -> Any:
        _present().wait("tolist")
        return self.on_host.tolist()

    def data_ptr(self) -> int:
        return self.on_host.data_ptr()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def pin_memory(self, device: Any = None) -> Tensor:
        raise RuntimeError("pretend device: cannot pin a tensor of the device")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        return _present().run(function, args, kwargs or {})


class Recording:
    """The operations of a pretend CUDA graph, with the tensors they read and write."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Execute an operation for the sake of its shapes; `end` takes its effects back."""
        for index, argument in enumerate(function._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if (
                value is not None
                and argument.alias_info is not None
                and argument.alias_info.is_write
            ):
                for x in pytree.tree_leaves(value):
                    storage = x.untyped_storage()
                    self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, result))
        return result

    def end(self) -> None:
        for storage, before in self.before.values():
            storage.copy_(before)

    def replay(self) -> None:
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True):
                # what was written in place, and a view, is up to date already
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@dataclass
class PretendDevice:
    waits: Counter[str] = field(default_factory=Counter)  # by what waits
    operations: Counter[str] = field(default_factory=Counter)  # by name, launched one by one
    replays: int = 0  # launches of graphs
    n_events: int = 0
    recording: Recording | None = None
    budget: int | None = None
    n_bytes: int = 0  # held at present
    peak: int = 0
    holders: Counter[int] = field(default_factory=Counter)  # tensors that lie in a storage

    @property
    def n_waits(self) -> int:
        return self.waits.total()

    @property
    def n_launches(self) -> int:
        return self.replays + sum(n for name, n in self.operations.items() if name not in NO_WORK)

    def forget(self) -> None:
        """Count from zero."""
        self.waits.clear()
        self.operations.clear()
        self.replays = 0

    def to_device(self, module: Module) -> Module:
        """Move a module there, with what its parameters share; it computes as on a GPU."""
        use_backend(module, CudaBackend())
        moved: dict[int, Tensor] = {}
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, x in tensors.items():
                    if x is None or isinstance(x, DeviceTensor):
                        continue
                    if id(x) not in moved:
                        there: Tensor = DeviceTensor(x.detach())
                        is_parameter = isinstance(x, nn.Parameter)
                        moved[id(x)] = (
                            nn.Parameter(there, x.requires_grad) if is_parameter else there
                        )
                    tensors[name] = moved[id(x)]  # type: ignore[assignment]
        return module

    def hold(self, x: DeviceTensor) -> None:
        """Count the memory of a tensor for as long as it lives."""
        storage = x.on_host.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if self.budget is None or not size:
            return
        if not self.holders[place]:
            if self.n_bytes + size > self.budget:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size} bytes; {self.n_bytes} are held"
                )
            self.n_bytes += size
            self.peak = max(self.peak, self.n_bytes)
        self.holders[place] += 1
        weakref.finalize(x, self.release, place, size)

    def release(self, place: int, size: int) -> None:
        self.holders[place] -= 1
        if not self.holders[place]:
            self.n_bytes -= size

    def wait(self, what: str) -> None:
        if self.recording is not None:
            raise RuntimeError(f"pretend device: {what} waits while a graph is being recorded")
        self.waits[what] += 1

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        name = function._schema.name
        leaves = pytree.tree_leaves((args, kwargs))
        mine = [x for x in leaves if isinstance(x, DeviceTensor)]
        device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if not mine and (device is None or device.type not in ("cuda", "meta")):
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            return function(*args, **kwargs)

        # what waits, and what a real device would refuse
        theirs = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, DeviceTensor)]
        goes_home = False
        if name in COPYING:
            goes_home = name == "aten::_to_copy" and device is not None and device.type == "cpu"
            crosses = goes_home or bool(theirs)
            is_async = kwargs.get("non_blocking") or (
                name == "aten::copy_" and len(args) > 2 and args[2]
            )
            if crosses and not is_async:
                self.wait("a copy between host and device")
            if crosses and self.recording is not None:
                raise RuntimeError("pretend device: a copy between host and device is recorded")
        for x in theirs:
            if name in INDEXING:
                self.wait("an index on the host")
            elif name not in COPYING and x.dim() > 0:
                raise RuntimeError(
                    f"pretend device: {name} mixes a host tensor {tuple(x.shape)} with device tensors"
                )
        if name in WAITING:
            self.wait(name)
        if name in INDEXING:
            for index in args[1]:
                if isinstance(index, Tensor) and index.dtype == torch.bool:
                    self.wait("a boolean index")

        # the same on the CPU
        real_args, real_kwargs = pytree.tree_map(_real, (args, kwargs))
        if real_kwargs.get("device") is not None:
            real_kwargs["device"] = torch.device("cpu")
        if real_kwargs.get("pin_memory"):
            real_kwargs["pin_memory"] = False
        if self.recording is not None:
            result = self.recording.run(function, real_args, real_kwargs)
        else:
            self.operations[name] += 1
            result = function(*real_args, **real_kwargs)
        if goes_home:
            return result.clone()
        if name == "aten::copy_":
            return args[0]
        wrapped = {id(x.on_host): x for x in mine}
        return pytree.tree_map(lambda x: _wrapped(x, wrapped), result)


def _real(x: Any) -> Any:
    if isinstance(x, DeviceTensor):
        return x.on_host
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _wrapped(x: Any, wrapped: dict[int, DeviceTensor]) -> Any:
    if not isinstance(x, Tensor):
        return x
    return wrapped[id(x)] if id(x) in wrapped else DeviceTensor(x)


# ---- what torch.cuda offers ---------------------------------------------------------------------------------------

_open: list[PretendDevice] = []


def _present() -> PretendDevice:
    assert _open, "a tensor of the pretend device is used outside of `with pretend_device()`"
    return _open[-1]


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _present().run(function, args, kwargs or {})


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = 0

    def record(self, stream: Any = None) -> None:
        _present().n_events += 1
        self.number = _present().n_events

    def synchronize(self) -> None:
        if self.number == _present().n_events:
            _present().wait("an event")


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None:
        _present().wait("a stream")


class _Graph:
    def __init__(self) -> None:
        self.recording = Recording()

    def replay(self) -> None:
        device = _present()
        device.replays += 1
        with torch.utils._python_dispatch._disable_current_modes():
            self.recording.replay()


@contextmanager
def _graph(
    graph: _Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    device = _present()
    assert device.recording is None, "pretend device: a graph is recorded within another"
    device.recording = graph.recording
    try:
        yield
    finally:
        device.recording = None
    with torch.utils._python_dispatch._disable_current_modes():
        graph.recording.end()


@contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    yield


def _no_grad(_: bool) -> torch.no_grad:
    """In place of inference mode, in which the dispatcher does not take composite operations apart."""
    return torch.no_grad()


@contextmanager
def pretend_device(budget: int | None = None) -> Iterator[PretendDevice]:
    """A fresh device. Meanwhile `torch.inference_mode` is `torch.no_grad`."""
    device = PretendDevice(budget=budget)
    replaced: Fields = {
        "Event": _Event,
        "Stream": _Stream,
        "CUDAGraph": _Graph,
        "graph": _graph,
        "stream": _on_stream,
        "current_stream": _Stream,
        "graph_pool_handle": lambda: (0, 0),
        "synchronize": lambda *_: device.wait("the device"),
        "_lazy_init": lambda *_: None,
    }
    with (
        mock.patch.multiple(torch.cuda, **replaced),
        mock.patch.object(torch._C, "_InferenceMode", _no_grad),
        mock.patch.object(Tensor, "pin_memory", lambda x, *_: x),
        mock.patch("nmt.engines.cuda.backend.supports_triton", lambda *_: False),
    ):  # Triton's kernels need a driver
        _open.append(device)
        # Torch.tensor copies to the device where the mode sees it
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with _Mode():
                yield device
        finally:
            torch._C._set_only_lift_cpu_tensors(False)
            _open.pop()
