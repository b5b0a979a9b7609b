"""Q9. Seconds to the first update: cold, warm caches, and what could shorten it (2-3 min).

    python3 scripts/bench/queue/q9_startup.py          # --dry: CPU, tiny, aot cache counters only

Each line is a process of base with one micro-batch of 25,000 tokens: torch import, compile + record, first update; with the
counters of the caches. `trial first` does what micro_tokens: auto does (the same code compiled twice in one process).
"""

import json
import os
import subprocess
import sys
import tempfile
import time

sys.path[:0] = [".", "scripts/bench"]
DRY = "--dry" in sys.argv


def worker(kind):
    t0 = time.perf_counter()
    import gpu_checks
    import torch
    from gpu_speed import make_recipe

    from nmt.data.loader import make_batch
    from nmt.data.plan import choose_shape, divide_tokens, plan_epoch
    from nmt.model.backend import use_backend
    from nmt.model.transformer import Transformer
    from nmt.train.engine import choose_training_engine
    from nmt.train.loss import Objective

    imported = time.perf_counter() - t0
    if "aotcache" in kind:
        import torch._functorch.config as fc

        fc.autograd_cache_allow_custom_autograd_functions = True
    bench = gpu_checks.make_bench(DRY)
    recipe = make_recipe(bench, "base")
    c, dev = recipe.config, bench.world.device
    store = gpu_checks.make_store(recipe.n_pairs, recipe.n_vocab, recipe.longest)
    micro = divide_tokens(c.training.tgt_tokens, 1)
    shape = choose_shape(store.src.lengths, store.tgt.lengths, micro, None, c.training.grouping)
    batch = make_batch(
        store,
        plan_epoch(store.src.lengths, store.tgt.lengths, 1, 0, c.training, micro, shape).micros(0)[
            0
        ],
        shape,
    ).to(dev)
    took = []
    for _ in range(2 if kind == "twice" else 1):
        t = time.perf_counter()
        torch.manual_seed(1)
        engine = choose_training_engine(dev)
        model = Transformer(c.model, recipe.n_vocab).to(dev)
        use_backend(model, engine.backend)
        rep = engine.make_replica(Objective(model, 0.1), bench.world, c.training, shape)
        sums = rep.run(batch, 1e-5, 0).cpu()
        took.append(round(time.perf_counter() - t, 1))
        del rep
    from torch._dynamo.utils import compile_times, counters

    n = {k: v for g in ("inductor", "aot_autograd") for k, v in counters[g].items() if "cache" in k}
    print(
        "RESULT "
        + json.dumps({"import_s": round(imported, 1), "first_micro_batch_s": took, "caches": n})
    )
    if kind == "cold":
        print(compile_times()[-1500:], file=sys.stderr)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(sys.argv[-1] if sys.argv[-1] != "--dry" else sys.argv[-2])
        sys.exit()
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        for kind, folder in (
            ("cold", a),
            ("warm", a),
            ("aotcache cold", b),
            ("aotcache warm", b),
            ("twice", None),
        ):
            with tempfile.TemporaryDirectory() as fresh:
                env = os.environ | {
                    "TORCHINDUCTOR_CACHE_DIR": (folder or fresh) + "/i",
                    "TRITON_CACHE_DIR": (folder or fresh) + "/t",
                }
                p = subprocess.run(
                    [sys.executable, __file__, "--worker", kind] + ["--dry"] * DRY,
                    env=env,
                    capture_output=True,
                    text=True,
                    timeout=180,
                )
                print(
                    kind,
                    next(
                        (l[7:] for l in p.stdout.splitlines() if l.startswith("RESULT ")),
                        p.stderr[-600:],
                    ),
                    flush=True,
                )
                if kind == "cold":
                    print(p.stderr[-1200:])
