"""Q7. What a user would take instead, side by side on one card: base, bf16, 25,000 target tokens an update (5-6 min).

    python3 scripts/bench/queue/q7_peers.py [--only NAME ...]        # --dry: CPU, tiny.  Names: ours hf hf_compiled nn_transformer eole

Same text (ids of made news lengths), sizes, dropout 0.1, label smoothing 0.1, Adam. Rates are target tokens without padding over
whole updates after warm-up, all shapes seen; peers get length-sorted padded batches, fused Adam, SDPA, bf16 autocast.
eole: PYTHONPATH must hold its wheels (eole, pyonmttok, pydantic, pydantic_core, typing_inspection, annotated_types).
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time

sys.path[:0] = [".", "scripts/bench"]
DRY = "--dry" in sys.argv
NAMES = ["ours", "hf", "hf_compiled", "nn_transformer", "nn_compiled", "eole"]
WORK = "build/q7"
PAD, BOS, EOS = 0, 2, 3
S = (
    dict(n_vocab=101, d=32, ff=64, h=2, n=1, tokens=300, pairs=200, longest=40, updates=3, skip=2)
    if DRY
    else dict(
        n_vocab=37000,
        d=512,
        ff=2048,
        h=8,
        n=6,
        tokens=25000,
        pairs=20000,
        longest=255,
        updates=60,
        skip=30,
    )
)


def text():
    from gpu_checks import make_store

    store = make_store(S["pairs"], S["n_vocab"], S["longest"])
    side = lambda s: [s.ids[a:b].tolist() for a, b in zip(s.offsets[:-1], s.offsets[1:])]
    return list(zip(side(store.src), side(store.tgt)))


def batches(pairs):
    """Length-sorted, padded, multiples of 16 positions so that compiled code meets few shapes."""
    import torch

    pairs = sorted(pairs, key=lambda p: (len(p[1]), len(p[0])))
    groups, room = [], 0
    for p in pairs:
        room -= len(p[1]) + 1
        if room < 0:
            groups.append([])
            room = S["tokens"] - len(p[1]) - 1
        groups[-1].append(p)
    up = lambda n: -(-n // 16) * 16

    def pad(rows, n):
        return torch.tensor([r + [PAD] * (n - len(r)) for r in rows])

    made = []
    for g in groups:
        ls, lt = up(max(len(s) for s, _ in g) + 1), up(max(len(t) for _, t in g) + 1)
        n = up(len(g))
        g = g + [([], [])] * (n - len(g))
        made.append(
            (
                pad([s + [EOS] if s else [] for s, _ in g], ls),
                pad([[BOS, *t] if t else [] for _, t in g], lt),
                pad([[*t, EOS] if t else [] for _, t in g], lt),
            )
        )
    draw = random.Random(1)
    while True:
        yield from draw.sample(made, len(made))


def loop(make):
    import torch
    import torch.nn.functional as F

    dev = "cpu" if DRY else "cuda"
    torch.manual_seed(1)
    step_fn, params = make(dev)
    opt = torch.optim.Adam(params, lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    toks, pad, secs, first, t = [], [], [], None, time.perf_counter()
    for i, (src, inp, lab) in enumerate(batches(text())):
        n = int((lab != PAD).sum())
        src, inp, lab = (x.to(dev, non_blocking=True) for x in (src, inp, lab))
        with torch.autocast(dev, torch.bfloat16):
            logits = step_fn(src, inp)
        loss = F.cross_entropy(
            logits.flatten(0, 1), lab.flatten(), ignore_index=PAD, label_smoothing=0.1
        )
        opt.zero_grad()
        loss.backward()
        opt.step()
        if not DRY:
            torch.cuda.synchronize()
        now = time.perf_counter()
        first = first or now - t
        if i >= S["skip"]:
            toks.append(n)
            secs.append(now - t)
            pad.append(n / lab.numel())
        t = now
        if len(toks) >= S["updates"]:
            break
    return {
        "tgt_s": sum(toks) / sum(secs),
        "median_ms": 1e3 * statistics.median(secs),
        "tokens": sum(toks) / len(toks),
        "fill": round(sum(pad) / len(pad), 3),
        "first_s": first,
        "loss": float(loss),
        "peak_GB": 0 if DRY else torch.cuda.max_memory_allocated() / 1e9,
    }


def hf(dev, compiled=False):
    import torch
    from transformers import MarianConfig, MarianMTModel

    c = MarianConfig(
        vocab_size=S["n_vocab"],
        d_model=S["d"],
        encoder_layers=S["n"],
        decoder_layers=S["n"],
        encoder_attention_heads=S["h"],
        decoder_attention_heads=S["h"],
        encoder_ffn_dim=S["ff"],
        decoder_ffn_dim=S["ff"],
        dropout=0.1,
        attention_dropout=0.0,
        activation_dropout=0.0,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        max_position_embeddings=512,
        use_cache=False,
        attn_implementation="sdpa",
    )
    m = MarianMTModel(c).to(dev).train()
    f = lambda src, inp: m(input_ids=src, attention_mask=src != PAD, decoder_input_ids=inp).logits
    return (torch.compile(f, dynamic=True) if compiled else f), m.parameters()


def nn_transformer(dev, compiled=False):
    import torch
    from torch import nn

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(S["n_vocab"], S["d"])
            self.p = nn.Embedding(512, S["d"])
            self.t = nn.Transformer(S["d"], S["h"], S["n"], S["n"], S["ff"], 0.1, batch_first=True)
            nn.init.normal_(self.e.weight, std=S["d"] ** -0.5)

        def embed(self, x):
            return self.e(x) * S["d"] ** 0.5 + self.p.weight[: x.shape[1]]

        def forward(self, src, inp):
            mask = (
                nn.Transformer.generate_square_subsequent_mask(
                    inp.shape[1], device=src.device, dtype=torch.bool
                )
                if False
                else torch.ones(
                    inp.shape[1], inp.shape[1], dtype=torch.bool, device=src.device
                ).triu(1)
            )
            dead = src == PAD
            dead = dead & ~dead.all(1, keepdim=True)
            return (
                self.t(
                    self.embed(src),
                    self.embed(inp),
                    tgt_mask=mask,
                    tgt_is_causal=True,
                    src_key_padding_mask=dead,
                    memory_key_padding_mask=dead,
                )
                @ self.e.weight.T
            )

    m = M().to(dev).train()
    return (torch.compile(m, dynamic=True) if compiled else m), m.parameters()


def ours():
    p = subprocess.run(
        [
            sys.executable,
            os.path.dirname(os.path.abspath(__file__)) + "/q1_speed.py",
            "--worker",
            "base",
            "right",
        ]
        + ["--dry"] * DRY,
        capture_output=True,
        text=True,
    )
    found = json.loads([l for l in p.stdout.splitlines() if l.startswith("RESULT ")][-1][7:])
    found.pop("top", None)
    return {"tgt_s": found["tgt_s_mean"], **found}


def eole():
    os.makedirs(WORK, exist_ok=True)
    pairs = text()
    for i, name in enumerate(("src", "tgt")):
        open(f"{WORK}/train.{name}", "w").write(
            "".join(" ".join(f"t{x}" for x in p[i]) + "\n" for p in pairs)
        )
    open(f"{WORK}/vocab.txt", "w").write(
        "".join(f"t{i}\n" for i in range(S["n_vocab"]) if i not in (PAD, BOS, EOS))
    )
    job = dict(
        system="eole",
        precision="bf16",
        text=WORK,
        scratch=WORK,
        n_vocab=S["n_vocab"],
        d_model=S["d"],
        d_ff=S["ff"],
        n_heads=S["h"],
        n_layers=S["n"],
        tokens=S["tokens"],
        updates=S["updates"],
        threads=os.cpu_count(),
        seconds=60.0,
        skip=S["skip"],
    )
    open(f"{WORK}/job.json", "w").write(json.dumps(job))
    p = subprocess.run(
        [sys.executable, "scripts/bench/peers.py", f"{WORK}/job.json"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    if not p.stdout:
        raise RuntimeError(p.stderr[-700:])
    a = json.loads(p.stdout)
    return {
        "tgt_s": sum(a["tgt_tokens"]) / sum(a["seconds"]),
        "tokens": statistics.fmean(a["tgt_tokens"]),
        "median_ms": 1e3 * statistics.median(a["seconds"]),
        "versions": a["versions"],
    }


if __name__ == "__main__":
    if "--worker" in sys.argv:
        name = sys.argv[sys.argv.index("--worker") + 1]
        try:
            found = (
                {"ours": ours, "eole": eole}[name]()
                if name in ("ours", "eole")
                else loop(
                    {
                        "hf": hf,
                        "hf_compiled": lambda d: hf(d, True),
                        "nn_transformer": nn_transformer,
                        "nn_compiled": lambda d: nn_transformer(d, True),
                    }[name]
                )
            )
        except BaseException as e:
            found = {"failed": f"{type(e).__name__}: {str(e)[-600:]}"}
        print("FOUND " + json.dumps(found))
        sys.exit()
    only = [a for a in sys.argv[1:] if a in NAMES] or NAMES
    for name in only:
        try:
            p = subprocess.run(
                [sys.executable, __file__, "--worker", name] + ["--dry"] * DRY,
                capture_output=True,
                text=True,
                timeout=170,
            )
            print(
                name,
                next(
                    (l[6:] for l in p.stdout.splitlines() if l.startswith("FOUND ")),
                    p.stderr[-500:],
                ),
                flush=True,
            )
        except subprocess.TimeoutExpired:
            print(name, "170 s were not enough", flush=True)
