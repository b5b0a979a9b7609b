"""Q3. The kernels of fused_kernels.py, which would replace inductor's, against torch.compile on the same card (1.5-2 min).

    python3 scripts/bench/queue/q3_fused.py          # --dry: Triton's interpreter, tiny: checks values against float64

z = x + dropout(f + bias); y = LayerNorm(z): one kernel forward, one backward (mask from a hash of the element's index, as
on the CPU, so the same mask on every device), and bias + ReLU each way. Deterministic: partial sums per program, then one sum.
"""

import json
import os
import sys

sys.path[:0] = [".", "scripts/bench/queue"]
DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
import torch
import torch.nn.functional as F
import triton
from fused_kernels import norm_backward, norm_forward, relu_backward, relu_forward

dev = "cpu" if DRY else "cuda"


def bench(f):
    if DRY:
        f()
        return float("nan")
    from triton.testing import do_bench_cudagraph

    with torch.cuda.stream(torch.cuda.Stream()):
        return do_bench_cudagraph(f, rep=40)


def run(T, D, dff, dtype, p=0.1):
    thr = round(p * 2**32)
    scale = 2**32 / (2**32 - thr)
    torch.manual_seed(0)
    x, f, dy, dy2 = (torch.randn(T, D, device=dev).to(dtype) for _ in range(4))
    w, b, bias = (
        torch.rand(D, device=dev) + 0.5,
        torch.randn(D, device=dev),
        torch.randn(D, device=dev),
    )
    seed = torch.tensor([12345, 678], device=dev, dtype=torch.int64)
    y, z, dz, df = (torch.full_like(x, float("nan")) for _ in range(4))
    mean, rstd = torch.empty(2, T, device=dev)

    def fwd(ROWS, warps):
        norm_forward[(triton.cdiv(T, ROWS),)](
            x,
            f,
            bias,
            w,
            b,
            seed,
            y,
            z,
            mean,
            rstd,
            T,
            1e-5,
            scale,
            thr,
            D,
            True,
            ROWS,
            num_warps=warps,
        )

    def bwd(ROWS, STEPS, warps):
        n = triton.cdiv(T, ROWS * STEPS)
        parts = torch.empty(n, 3, D, device=dev)
        norm_backward[(n,)](
            dy,
            dy2,
            z,
            mean,
            rstd,
            w,
            seed,
            dz,
            df,
            parts,
            T,
            scale,
            thr,
            D,
            ROWS,
            STEPS,
            num_warps=warps,
        )
        return parts.sum(0)

    fwd(4, 4)
    sums = bwd(4, 8, 4)
    # values: the mask in numpy, everything else in float64
    import numpy as np

    from nmt.model.dropout_masks import fill_by_arrays

    m = np.empty(T * D, np.float32)
    fill_by_arrays(m, np.ones(1, np.float32), 12345 | 678 << 32, thr)
    mask = torch.from_numpy(m).view(T, D).double().to(dev)
    X, Fz, B, W64 = (t.double().requires_grad_() for t in (x, f, bias, w))
    b64 = b.double().requires_grad_()
    Z = X + (Fz + B) * mask * scale
    Y = F.layer_norm(Z, (D,), W64, b64, 1e-5)
    gr = torch.autograd.grad(Y, (X, Fz, W64, b64, B), dy.double() + dy2.double())
    rel = lambda a, r: f"{float((a.double() - r).norm() / r.norm()):.1e}"
    print(
        json.dumps(
            {
                "T": T,
                "D": D,
                "dropped": round(1 - float(mask.mean()), 4),
                "y": rel(y, Y),
                "dx": rel(dz, gr[0]),
                "df": rel(df, gr[1]),
                "dw": rel(sums[0], gr[2]),
                "db": rel(sums[1], gr[3]),
                "dbias": rel(sums[2], gr[4]),
            }
        ),
        flush=True,
    )
    h, dh, bf = (
        torch.randn(T, dff, device=dev).to(dtype),
        torch.randn(T, dff, device=dev).to(dtype),
        torch.randn(dff, device=dev),
    )
    h0, out = h.clone(), torch.empty_like(h)

    def rf():
        relu_forward[(triton.cdiv(T * dff, 4096),)](h, bf, T * dff, dff, 4096, num_warps=8)

    def rb(COLS=128, ROWS=16, STEPS=16, warps=4):
        n = triton.cdiv(T, ROWS * STEPS)
        parts = torch.empty(n, dff, device=dev)
        relu_backward[(n, dff // COLS)](
            dh, h, out, parts, T, dff, COLS, ROWS, STEPS, num_warps=warps
        )
        return parts.sum(0)

    rf()
    s = rb(COLS=min(128, dff))
    R = torch.relu(h0.double() + bf.double())
    G = dh.double() * (h.double() > 0)
    print(json.dumps({"relu": rel(h, R), "d": rel(out, G), "dbias": rel(s, G.sum(0))}), flush=True)
    if DRY:
        return
    import torch._inductor.config as ic

    ic.deterministic = True

    def plain(x, f, w, b, bias, h, bf):
        y = F.layer_norm((x + F.dropout((f + bias.to(f.dtype)), p)).float(), (D,), w, b, 1e-5).to(
            x.dtype
        )
        return y, torch.relu(h + bf.to(h.dtype))

    leaves = [t.clone().requires_grad_() for t in (x, f, w, b, bias, h0, bf)]
    c = torch.compile(plain, dynamic=False)
    out = c(*leaves)
    from triton.testing import do_bench

    both = [dy, torch.randn_like(out[1])]
    comp_f, comp_b = (
        do_bench(lambda: c(*leaves), rep=40),
        do_bench(lambda: torch.autograd.grad(out, leaves, both, retain_graph=True), rep=40),
    )
    U = T * D * 2
    ours = {
        f"fwd {r} rows {wn} warps": bench(lambda: fwd(r, wn))
        for r, wn in ((1, 1), (2, 2), (4, 4), (8, 8), (8, 4))
    }
    oursb = {
        f"bwd {r} rows x {s}, {wn} warps": bench(lambda: bwd(r, s, wn))
        for r, s, wn in ((1, 32, 1), (2, 16, 2), (4, 16, 4), (8, 12, 8), (4, 48, 8))
    }
    rbs = {
        f"relu bwd {a}": bench(lambda: rb(*a))
        for a in ((128, 16, 16, 4), (256, 8, 32, 4), (512, 8, 16, 8), (64, 32, 16, 4))
    }
    print(
        json.dumps(
            {
                "us": {
                    k: round(1e3 * v, 1)
                    for k, v in (ours | oursb | {"relu fwd": bench(rf)} | rbs).items()
                },
                "compiled fwd (norm + relu)": round(1e3 * comp_f, 1),
                "compiled bwd": round(1e3 * comp_b, 1),
                "floor us at 4.1 TB/s": {
                    "fwd": U * 4 / 4.1e6,
                    "bwd": U * 5 / 4.1e6,
                    "relu fwd": 2 * T * dff * 2 / 4.1e6,
                    "relu bwd": 3 * T * dff * 2 / 4.1e6,
                },
            }
        ),
        flush=True,
    )
    xin, wt = (
        torch.randn(T, D, device=dev, dtype=dtype),
        torch.randn(dff, D, device=dev, dtype=dtype),
    )  # cuBLASLt's epilogue
    bt = bf.to(dtype)
    t1 = bench(lambda: torch.mm(xin, wt.T))
    t2 = bench(lambda: torch._addmm_activation(bt, xin, wt.T))
    t3 = bench(lambda: torch.addmm(bt, xin, wt.T))
    print(
        json.dumps(
            {
                "product us": round(1e3 * t1, 1),
                "with bias + relu in its epilogue": round(1e3 * t2, 1),
                "with bias": round(1e3 * t3, 1),
            }
        ),
        flush=True,
    )


if DRY:
    run(37, 32, 64, torch.float32)
else:
    print(torch.cuda.get_device_name(), torch.__version__)
    run(25024, 512, 2048, torch.bfloat16)
    run(25024, 1024, 4096, torch.bfloat16)
