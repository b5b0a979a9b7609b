"""What a GPU would launch for one micro-batch: kernels, their bytes, and the sizes of matrix products.

    python scripts/bench/count_kernels.py --config base.yaml --ranks 1 8        # prints a table
    python scripts/bench/count_kernels.py --config base.yaml big.yaml --ranks 1 8 --json scripts/bench/kernels.json

No GPU is needed. The objective is traced as on a GPU (its attention, loss, dropout and LayerNorm) and handed to the
compiler, which stops where it would write code: what it has decided to fuse is counted. It decides for a CPU here, by
fusion rules that both share; what they do not share (reductions split in two, for one) is not seen. The bytes of a
fused kernel are those of its inputs and outputs, each once.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nmt.system.tables import Table

N_VOCAB = 37_000
LONGEST = 256
MEAN_LENGTH = 28.3  # target pieces of a sentence of WMT14, its mark included


@dataclass(frozen=True)
class Kernel:
    """A kernel, or several of the same kind and size."""

    kind: str  # "product", "fused", or the name of an operation that the compiler leaves as it is
    count: int
    n_bytes: int = 0  # of each
    product: tuple[int, int, int] | None = None  # rows, columns and inner size


@dataclass(frozen=True)
class Counts:
    """One compiled micro-batch, forward and backward."""

    size: str
    n_ranks: int
    tokens: int
    n_heads: int
    d_model: int
    n_layers: int
    n_parameters: int
    n_matrix_weights: int  # of them those that products read in bf16
    kernels: list[Kernel]

    def launches(self) -> int:
        return sum(kernel.count for kernel in self.kernels)

    def fused_bytes(self) -> int:
        return sum(
            kernel.count * kernel.n_bytes for kernel in self.kernels if kernel.kind == "fused"
        )


class _CountedError(Exception):
    """Ends a compilation where code would be written."""


def count_kernels(config_name: str, n_ranks: int) -> Counts:
    """Trace and lower one micro-batch of a shipped config for this number of ranks."""
    import torch

    from nmt.config_files import load_config
    from nmt.data.batch import Batch, BatchShape, Packed
    from nmt.data.plan import ROW_MULTIPLE, divide_tokens
    from nmt.engines.cuda.backend import CudaBackend
    from nmt.engines.cuda.recorded_replica import CompiledObjective
    from nmt.engines.cuda.shares import Shares
    from nmt.model.backend import use_backend
    from nmt.model.transformer import Transformer
    from nmt.system.ranks import World
    from nmt.train.loss import Objective

    config = load_config(config_name)
    share = divide_tokens(config.training.tgt_tokens, n_ranks)
    tokens = -(-share // ROW_MULTIPLE) * ROW_MULTIPLE
    sentences = int(1.5 * tokens / MEAN_LENGTH) + ROW_MULTIPLE
    shape = BatchShape(tokens, tokens, sentences, LONGEST)
    model = Transformer(config.model, N_VOCAB)
    use_backend(model, CudaBackend())
    rows = torch.zeros(tokens, dtype=torch.int64)
    side = Packed(rows, torch.zeros(sentences + 1, dtype=torch.int64), LONGEST, tokens)
    batch = Batch(side, side, rows, tokens)

    objective = Objective(model, config.training.label_smoothing)
    shares = Shares(model, World(0, n_ranks, torch.device("cpu")), is_bf16=True)
    used = {f"model.{name}": tensor for name, tensor in shares.used.items()}
    found: Counter[Kernel] = Counter()
    with _as_on_gpu(), _counting(found), torch.autocast("cpu", torch.bfloat16):
        compiled = CompiledObjective(objective, shape, is_one_graph=True)
        try:
            compiled(batch, used)
        except Exception as error:
            if "_CountedError" not in f"{type(error).__name__} {error}":
                raise
    torch._dynamo.reset()
    kernels = [Kernel(one.kind, n, one.n_bytes, one.product) for one, n in found.items()]
    n_parameters = sum(p.numel() for p in model.parameters())
    return Counts(
        config.name,
        n_ranks,
        tokens,
        config.model.n_heads,
        config.model.d_model,
        config.model.n_layers,
        n_parameters,
        sum(p.numel() for p in shares.buckets[1].parameters.values()),
        sorted(kernels, key=lambda one: (one.kind, one.n_bytes)),
    )


class _as_on_gpu:
    """The model's decisions by device, made as for a GPU while tensors are on the CPU, apart from the backend's."""

    def __enter__(self) -> None:
        import torch
        import torch._inductor.fx_passes.post_grad
        import torch.nn.functional as F

        import nmt.engines.cuda.backend
        import nmt.engines.cuda.loss_triton
        from nmt.model.transformer import LayerNorm

        def normalize(self: LayerNorm, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                y = F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps)
                return y.to(x.dtype)

        self.patches: list[tuple[Any, str, Any]] = [
            (LayerNorm, "forward", normalize),
            (nmt.engines.cuda.loss_triton, "supports_fused_loss", lambda hidden: True),
            (nmt.engines.cuda.backend, "supports_triton", lambda q, v: True),
            # A GPU adds a bias in the kernel that follows the product, a CPU in the product.
            (torch._inductor.fx_passes.post_grad, "is_gpu", lambda device: True),
        ]
        self.originals = [getattr(owner, name) for owner, name, _ in self.patches]
        for owner, name, value in self.patches:
            setattr(owner, name, value)

    def __exit__(self, *_: object) -> None:
        for (owner, name, _), value in zip(self.patches, self.originals, strict=True):
            setattr(owner, name, value)


class _counting:
    """While this holds, compilations count what they would launch, forward and backward, and end there."""

    def __init__(self, found: "Counter[Kernel]") -> None:
        self.found = found

    def __enter__(self) -> None:
        import torch._functorch.config
        import torch._inductor.config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner
        from torch._inductor.graph import GraphLowering

        from nmt.engines.cuda import recorded_replica

        torch._functorch.config.force_non_lazy_backward_lowering = True
        torch._inductor.config.force_disable_caches = True
        torch._inductor.config.compile_threads = 1
        found = self.found

        def count_instead_of_writing(graph: Any) -> None:
            graph.init_wrapper_code()
            graph._update_scheduler()
            for node in graph.scheduler.nodes:
                kernel = _kernel_of(node)
                if kernel is not None:
                    found[kernel] += 1
            raise _CountedError

        def lower(graph: Any, inputs: Any, **options: Any) -> Any:
            try:
                return compile_fx_inner(graph, inputs, **options)
            except Exception as error:
                if "_CountedError" not in f"{type(error).__name__} {error}":
                    raise

            def end(*_: object) -> None:
                raise _CountedError

            end._boxed_call = True  # type: ignore[attr-defined]
            return end

        def compile_and_count(graph: Any, inputs: Any) -> Any:
            return compile_fx(graph, inputs, inner_compile=lower)

        self.codegen, self.backend = GraphLowering.codegen, recorded_replica.BACKEND
        self.exchange(GraphLowering, count_instead_of_writing)
        recorded_replica.BACKEND = compile_and_count  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        from torch._inductor.graph import GraphLowering

        from nmt.engines.cuda import recorded_replica

        self.exchange(GraphLowering, self.codegen)
        recorded_replica.BACKEND = self.backend

    def exchange(self, lowering: Any, codegen: Any) -> None:
        lowering.codegen = codegen


def _kernel_of(node: Any) -> Kernel | None:
    """The kernel that a node of inductor's scheduler launches; None if it launches nothing."""
    from torch._inductor import scheduler

    if isinstance(node, scheduler.NopKernelSchedulerNode):
        return None
    n_bytes = int(node.get_read_write_buffers_sizes())
    if not isinstance(node, scheduler.ExternKernelSchedulerNode):
        return Kernel("fused", 1, n_bytes)
    operation: Any = node.node
    name = getattr(operation, "python_kernel_name", None) or str(
        getattr(operation, "op_overload", "")
    )
    name = name or type(operation).__name__
    if type(operation).__name__ == "MultiOutput" or "as_strided" in name:
        return None
    if "mm" not in name:
        return Kernel(name, 1, n_bytes)
    factors = operation.inputs[1:] if "addmm" in name else operation.inputs
    left = [int(n) for n in factors[0].get_size()]
    right = [int(n) for n in factors[1].get_size()]
    return Kernel("product", 1, n_bytes, (left[-2], right[-1], left[-1]))


def load(path: Path) -> list[Counts]:
    """Counts written by `--json`."""
    found = []
    for entry in json.loads(path.read_text()):
        kernels = [
            Kernel(
                one["kind"], one["count"], one["n_bytes"], one["product"] and tuple(one["product"])
            )
            for one in entry.pop("kernels")
        ]
        found.append(Counts(**entry, kernels=kernels))
    return found


def make_table(all_counts: list[Counts]) -> Table:
    rows = []
    for counts in all_counts:
        of_kind: Counter[str] = Counter()
        for kernel in counts.kernels:
            of_kind[kernel.kind] += kernel.count
        others = sum(n for kind, n in of_kind.items() if kind not in ("fused", "product"))
        rows.append(
            [
                f"{counts.size}, {counts.n_ranks} ranks",
                f"{counts.tokens:,}",
                f"{counts.launches():,}",
                f"{of_kind['fused']:,}",
                f"{counts.fused_bytes() / 1e9:.1f}",
                f"{of_kind['product']:,}",
                f"{others:,}",
            ]
        )
    head = (
        "",
        "tokens",
        "launches",
        "fused kernels",
        "GB they move",
        "products",
        "other operations",
    )
    return Table(head, rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", nargs="+", default=["base.yaml"], metavar="FILE", help="shipped configs"
    )
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[1], metavar="N", help="numbers of GPUs"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the counts to a file")
    args = parser.parse_args()
    all_counts = [
        count_kernels(config, n_ranks) for config in args.config for n_ranks in args.ranks
    ]
    if args.json:
        rows = [json.dumps(asdict(counts)) for counts in all_counts]
        Path(args.json).write_text("[" + ",\n".join(rows) + "]\n")
    print(make_table(all_counts).to_markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
