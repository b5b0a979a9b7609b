"""Q1. True training speed of one GPU, where its time goes, and what single switches cost (4-6 min).

    python3 scripts/bench/queue/q1_speed.py base [big]        # in the repository's root; --dry on a CPU

The first table of docs/benchmarks.md was measured with a shape for random grouping, so 15 % of its
updates took two micro-batches: `as_docs`. `equal_rows` has as many rows for sources as for targets.
Here each variant is a process.
"""

import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict

sys.path[:0] = [".", "scripts/bench", "scripts/bench/queue"]
DRY = "--dry" in sys.argv
VARIANTS = [
    "right",
    "as_docs",
    "equal_rows",
    "nondeterministic",
    "chunk2048",
    "chunk8192",
    "chunk4096",
    "fp32_reduction",
    "uncompiled_graph",
    "fused_graph",
]


def worker(size, variant):
    import gpu_checks
    import torch
    from gpu_speed import make_recipe

    from nmt.data.loader import Loader, make_updates
    from nmt.data.plan import Cursor, choose_shape, divide_tokens, fit_rows, plan_epoch
    from nmt.engines.cuda import loss_triton
    from nmt.engines.cuda.recorded_replica import is_compiled
    from nmt.extras.profile.cost import DeviceTimer, count_flop, measure_ceiling
    from nmt.model.backend import use_backend
    from nmt.model.transformer import Transformer
    from nmt.train.engine import choose_training_engine
    from nmt.train.loss import Objective
    from nmt.train.optimizer import make_optimizer
    from nmt.train.update import run_update

    bench = gpu_checks.make_bench(DRY)
    recipe = make_recipe(bench, size)
    c, world = recipe.config, bench.world
    store = gpu_checks.make_store(recipe.n_pairs, recipe.n_vocab, recipe.longest)
    micro = divide_tokens(c.training.tgt_tokens, 1)
    grouping = "random" if variant == "as_docs" else c.training.grouping
    lengths = store.src.lengths, store.tgt.lengths
    shape = choose_shape(*lengths, micro, None, grouping)
    if variant not in ("as_docs", "equal_rows"):
        shape = fit_rows(shape, plan_epoch(*lengths, c.seed, 0, c.training, micro, shape))
    if variant.startswith("chunk"):
        loss_triton.CHUNK_ROWS = int(variant[5:])  # 4,608: six chunks; 4,096: seven
    if variant == "fp32_reduction":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if variant in ("uncompiled_graph", "fused_graph"):  # the graph without torch.compile
        torch.compile = lambda f, **k: f
    torch.manual_seed(c.seed)
    model = Transformer(c.model, recipe.n_vocab).to(world.device)
    if variant == "fused_graph":  # with the kernels that would replace it
        from fused_kernels import use_fused_kernels

        use_fused_kernels(model)
    engine = choose_training_engine(world.device)
    use_backend(model, engine.backend)
    rep = engine.make_replica(
        Objective(model, c.training.label_smoothing),
        world,
        c.training,
        shape if is_compiled(c.training, world.device.type) else None,
    )
    if variant == "nondeterministic":
        import torch._inductor.config as ic

        ic.deterministic = False
    opt = make_optimizer(model, c.optimizer, shares=rep.own)
    ticks, toks, n_micros, out = DeviceTimer(world.device), [], [], {}
    warm, timed = (1, 2) if DRY else (5, 40)
    with Loader(
        make_updates(lambda _: store, c.training, micro, c.seed, Cursor(), world, rep.shape)
    ) as ups:
        t0 = time.perf_counter()
        for step in range(1, warm + timed + 1):
            up = next(ups)
            o = run_update(rep, opt, up, step, c, world)
            if step == 1:
                o.values.cpu()
                out["first_s"] = time.perf_counter() - t0
            if step >= warm:
                ticks.mark()
            if step > warm:
                toks.append((up.n_src, up.n_tgt))
                n_micros.append(len(up.micros))
        secs = ticks.seconds()
        rows = shape.src_tokens, shape.tgt_tokens
        means = [float(s.lengths.mean()) for s in (store.src, store.tgt)]
        flop = count_flop(c.model, recipe.n_vocab, *means)
        out |= {
            "ms_median": 1e3 * statistics.median(secs),
            "ms_mean": 1e3 * statistics.fmean(secs),
            "tgt_s_mean": sum(t for _, t in toks) / sum(secs),
            "micros": sum(n_micros) / len(n_micros),
            "rows_useful": [sum(x[i] for x in toks) / len(toks) / rows[i] for i in (0, 1)],
            "loss": float(o.values[0]) / up.n_tgt,
            "shape": [*rows, shape.sentences],
        }
        if bench.is_cuda:
            ceil = measure_ceiling(c.model, micro, torch.bfloat16, world.device)
            out["share"] = sum(flop.src * s + flop.tgt * t for s, t in toks) / sum(secs) / ceil
            out["peak_GB"] = torch.cuda.max_memory_allocated() / 1e9
        if (
            variant == "right" and bench.is_cuda
        ):  # a profile of ten updates of exactly one micro-batch
            from torch.profiler import ProfilerActivity, profile

            torch.cuda.synchronize()
            done = 0
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                began = torch.cuda.Event(enable_timing=True)
                ended = torch.cuda.Event(enable_timing=True)
                began.record()
                while done < 10:
                    up = next(ups)
                    if len(up.micros) == 1 and up.n_tgt > 0.9 * c.training.tgt_tokens:
                        run_update(rep, opt, up, 100 + done, c, world)
                        done += 1
                ended.record()
                torch.cuda.synchronize()
            groups, n = defaultdict(float), 0
            for e in prof.events():
                if e.device_type.name != "CUDA":
                    continue
                k, n = e.name, n + 1
                g = (
                    "attention fwd"
                    if "attention_forward" in k
                    else "attention bwd"
                    if "attention_backward" in k
                    else "loss rows"
                    if "loss_rows" in k
                    else "products"
                    if any(s in k for s in ("gemm", "nvjet", "cutlass", "cublas", "splitK"))
                    else "optimizer"
                    if "dam" in k
                    else "fused cat/clone"
                    if "triton_poi" in k and ("cat" in k or "clone" in k)
                    else "fused reductions"
                    if "triton_per" in k or "triton_red" in k
                    else "fused pointwise"
                    if "triton_" in k
                    else "others: copies, sort, norm"
                )
                groups[g] += (
                    e.device_time_total if hasattr(e, "device_time_total") else e.cuda_time_total
                )
            out["profile_ms"] = {
                g: round(t / 1e4, 3) for g, t in sorted(groups.items(), key=lambda x: -x[1])
            }
            out["kernels_per_update"] = n / 10
            out["profiled_wall_ms"] = began.elapsed_time(ended) / 10
            top = sorted(prof.key_averages(), key=lambda e: -e.device_time_total)[:25]
            out["top"] = [
                (e.key[:90], e.count / 10, round(e.device_time_total / 1e4, 3)) for e in top
            ]
    print("RESULT " + json.dumps(out))


def main():
    sizes = [a for a in sys.argv[1:] if a in ("base", "big")] or ["base"]
    for size in sizes:
        for v in VARIANTS if size == "base" and not DRY else ["right", "as_docs", "equal_rows"]:
            try:
                p = subprocess.run(
                    [sys.executable, __file__, "--worker", size, v] + ["--dry"] * DRY,
                    capture_output=True,
                    text=True,
                    timeout=150,
                )
                line = [l for l in p.stdout.splitlines() if l.startswith("RESULT ")]
                found = json.loads(line[-1][7:]) if line else {"failed": p.stderr[-600:]}
            except subprocess.TimeoutExpired:
                found = {"failed": "150 s"}
            top = found.pop("top", None)
            print(size, v, json.dumps(found), flush=True)
            for row in top or ():
                print("     ", row)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        i = sys.argv.index("--worker")
        worker(sys.argv[i + 1], sys.argv[i + 2])
    else:
        main()
