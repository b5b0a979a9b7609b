"""Q2. Is the attention kernel fast enough? Its shapes, beside torch's FlashAttention for several lengths (2-3 min).

    python3 scripts/bench/queue/q2_attention.py               # --dry: interpreted, tiny, checks the script and the values

Times by CUDA graph (triton do_bench) forward and backward apart, for the three uses (encoder, causal, memory), on
lengths of news grouped by length and at random; bytes / time against the copy bandwidth of the same minute.
"""

import json
import math
import os
import sys

sys.path[:0] = [".", "scripts/bench"]
DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
import numpy as np
import torch

from nmt.data.batch import Packed
from nmt.engines.cuda import attention_triton as A
from nmt.model.attention_mask import AttentionMask

dev = torch.device("cpu" if DRY else "cuda")
T, H, D = (256, 2, 32) if DRY else (25024, 8, 64)
dtype = torch.float32 if DRY else torch.bfloat16


def side(lengths, longest):
    off = np.concatenate(([0], np.cumsum(lengths)))
    return Packed(
        torch.zeros(T, dtype=torch.int64, device=dev),
        torch.tensor(off, device=dev),
        longest,
        int(off[-1]),
    )


def draw(kind, rng):
    if kind == "news":
        l = np.exp(rng.normal(math.log(28) - 0.18, 0.6, T)).round().clip(2, 255).astype(int)
    else:
        l = rng.integers(int(kind) - 1, int(kind) + 2, T)
    n = int((np.cumsum(l) <= T).sum())
    return l[:n]


def intervals(q, k, causal):
    m = AttentionMask(q, k, causal)
    return m.key_intervals, m.query_intervals


def bench(f):
    if DRY:
        f()
        return 0.0
    from triton.testing import do_bench_cudagraph

    with torch.cuda.stream(torch.cuda.Stream()):
        return do_bench_cudagraph(f, rep=30)


rng = np.random.default_rng(0)
if not DRY:
    a = torch.empty(1 << 30, dtype=torch.bfloat16, device=dev)
    b = torch.empty_like(a)
    copy = bench(lambda: b.copy_(a))
    print(f"{torch.cuda.get_device_name()}: copy {4 * a.numel() / copy / 1e9:.2f} TB/s")
    del a, b
floor_f, floor_b = 4 * T * H * D * 2, 8 * T * H * D * 2
best = {}
default = A.choose_kernel_shape
for kind in ["12"] if DRY else ["news", "30", "60", "12"]:
    l = draw(kind, rng)
    q_side = k_side = side(l, 256)
    qkv = torch.randn(T, 3 * H * D, device=dev, dtype=dtype)
    q, k, v = (x.unflatten(-1, (H, D)) for x in qkv.split(H * D, -1))
    g = torch.randn(T, H, D, device=dev, dtype=dtype)
    for causal in (False, True):
        iv = intervals(q_side, k_side, causal)
        out, lse = A._attention(q, k, v, *iv, None, 0)
        # against fp32 plain attention of one sentence
        s = slice(int(q_side.offsets[1]), int(q_side.offsets[2]))
        qs, ks, vs = (x[s].float().transpose(0, 1) for x in (q, k, v))
        ref = torch.nn.functional.scaled_dot_product_attention(
            qs[None], ks[None], vs[None], is_causal=causal
        )[0].transpose(0, 1)
        err = float((out[s].float() - ref).norm() / ref.norm())
        row = {"lengths": kind, "causal": causal, "error": f"{err:.1e}"}
        for tile, block, warps, stages in (
            [(32, 16, 4, 2)]
            if DRY
            else [
                (64, 32, 4, 2),
                (64, 64, 4, 2),
                (64, 64, 8, 2),
                (64, 32, 4, 3),
                (128, 32, 8, 2),
                (128, 64, 8, 2),
                (32, 32, 2, 2),
                (32, 32, 4, 3),
                (64, 16, 4, 3),
            ]
        ):

            def plan(q, k, v, dropped, is_backward, o=A._plan):
                x = o(q, k, v, dropped, is_backward)
                s = list(x.scalars)
                s[-3:-1] = [tile, block]
                return A.Launch(s, tile, {"num_warps": warps, "num_stages": stages})

            old, A._plan = A._plan, plan
            try:
                f = bench(lambda: A._attention(q, k, v, *iv, None, 0))
                bw = bench(lambda: A._gradients(g, q, k, v, *iv, None, out, lse, 0))
                row[f"{tile}x{block}w{warps}s{stages}"] = f"{1e3 * f:.0f}/{1e3 * bw:.0f} us"
            except Exception as e:
                row[f"{tile}x{block}w{warps}s{stages}"] = type(e).__name__
            finally:
                A._plan = old
        if not DRY:
            row["floor"] = f"{floor_f / 4.1e6:.0f}/{floor_b / 4.1e6:.0f} us at 4.1 TB/s"
            cu = torch.cat((q_side.offsets.int(), q_side.offsets[-1:].int()))[: len(l) + 1]
            for name, mx in (("fa2 max 256", 256), ("fa2 max exact", int(l.max()))):
                try:
                    o = torch.ops.aten._flash_attention_forward(
                        q, k, v, cu, cu, mx, mx, 0.0, causal, False
                    )
                    f = bench(
                        lambda: torch.ops.aten._flash_attention_forward(
                            q, k, v, cu, cu, mx, mx, 0.0, causal, False
                        )
                    )
                    bw = bench(
                        lambda: torch.ops.aten._flash_attention_backward(
                            g, q, k, v, o[0], o[1], cu, cu, mx, mx, 0.0, causal, o[2], o[3]
                        )
                    )
                    row[name] = f"{1e3 * f:.0f}/{1e3 * bw:.0f} us"
                except Exception as e:
                    row[name] = f"{type(e).__name__}: {str(e)[:80]}"
            try:  # flex_attention over the flat row, mask built from sentence numbers
                from torch.nn.attention.flex_attention import create_block_mask, flex_attention

                doc = q_side.sentence
                mm = (
                    (lambda b, h, i, j: (doc[i] == doc[j]) & (i >= j))
                    if causal
                    else (lambda b, h, i, j: doc[i] == doc[j])
                )
                bm = torch.compile(create_block_mask)(mm, None, None, T, T, device=dev)
                fl = torch.compile(flex_attention, dynamic=False)
                Q, K, V = (x.transpose(0, 1)[None].contiguous().requires_grad_() for x in (q, k, v))
                G = g.transpose(0, 1)[None].contiguous()
                O = fl(Q, K, V, block_mask=bm)
                f = bench(lambda: fl(Q.detach(), K.detach(), V.detach(), block_mask=bm))
                from triton.testing import do_bench

                bw = do_bench(
                    lambda: torch.autograd.grad(O, (Q, K, V), G, retain_graph=True), rep=30
                )
                row["flex"] = f"{1e3 * f:.0f}/{1e3 * bw:.0f} us"
            except Exception as e:
                row["flex"] = f"{type(e).__name__}: {str(e)[:80]}"
        print(json.dumps(row), flush=True)
