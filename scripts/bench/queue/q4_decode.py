"""Q4. Decoding 3,003 sentences, base, beam 4, bf16: what its seconds are made of, what constants change, and peers (3-4 min).

    python3 scripts/bench/queue/q4_decode.py            # --dry: CPU, tiny

Each variant: batch_tokens x UNRECORDED_STEPS; cold (a new engine) and steady (the same engine again, graphs kept); 28 pieces
forced, or limits of 1.15 pieces for each source piece, so that sentences end as in a text and shapes are many. The last has
the kernel of best_pieces.py. Then Hugging Face generate (MarianMTModel, sdpa) and, if a libcublas.so.12 can be made from the
machine's libcublas.so.13 (CTranslate2 opens it by that name, and calls nine functions), CTranslate2 float16.
"""

import glob
import json
import os
import subprocess
import sys
import time

sys.path[:0] = [".", "scripts/bench"]
DRY = "--dry" in sys.argv
from contextlib import nullcontext
from dataclasses import replace

import torch


def search_with_kernel():
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import best_pieces

    return best_pieces.in_place()


def ours():
    import gpu_checks
    from gpu_speed import FORCED, N_SENTENCES, decode, make_recipe, news_sources

    from nmt.engines.cuda import graph_search
    from nmt.model.backend import use_backend
    from nmt.model.transformer import Transformer
    from nmt.translate.engine import choose_engine

    bench = gpu_checks.make_bench(DRY)
    recipe = make_recipe(bench, "base")
    n, pieces = (40, 5) if DRY else (N_SENTENCES, FORCED)
    sources = news_sources(n, recipe)
    torch.manual_seed(1)
    model = (
        Transformer(recipe.config.model, recipe.n_vocab)
        .to(bench.device)
        .eval()
        .requires_grad_(False)
    )
    forced = replace(
        recipe.config.decoding, max_ratio=0.0, max_extra=pieces, min_length=pieces, precision="bf16"
    )
    ready, first = None, {}
    sync = torch.cuda.synchronize if bench.is_cuda else lambda: None
    grid = [(16384, 16), (16384, 2), (65536, 16), (65536, 2), (131072, 2), (131072, 0), (262144, 2)]
    news = replace(forced, max_ratio=1.15, max_extra=4, min_length=0)
    variants = [(*one, False, forced) for one in (grid[:2] if DRY else grid)]
    some = [(16384, 16), (65536, 16), (65536, 8), (65536, 2), (131072, 8)]
    variants += [(*one, False, news) for one in (some[:1] if DRY else some)]
    variants += [] if DRY else [(65536, 2, True, forced)]
    for tokens, unrecorded, has_kernel, config in variants:
        graph_search.UNRECORDED_STEPS = unrecorded
        engine = choose_engine([model], config, bench.device)
        use_backend(model, engine.backend)
        ready = ready or engine.prepare(model, is_bf16=True)
        engine.batch_tokens = tokens
        row = {"batch_tokens": tokens, "unrecorded": unrecorded, "kernel": has_kernel}
        row["ends"] = "forced" if config is forced else "news"
        for kind in ("cold", "steady", "steady again"):
            sync()
            t = time.perf_counter()
            with search_with_kernel() if has_kernel else nullcontext():
                found = decode(engine, ready, sources, config, bench)
            sync()
            s = time.perf_counter() - t
            row[kind] = f"{s:.3f} s, {n / s:,.0f}/s"
        same = first.setdefault(row["ends"], found)
        row["same as first"] = sum(a == b for a, b in zip(found, same)) / n
        g = getattr(engine, "graph_search", None)
        row["graphs"] = len(g.graphs) if g else None
        if bench.is_cuda:
            row["peak_GB"] = round(torch.cuda.max_memory_reserved() / 1e9, 1)
        print("ours", json.dumps(row), flush=True)
    if bench.is_cuda:  # where a recorded step's time goes, at the largest batch
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            decode(engine, ready, sources, forced, bench)
            sync()
        for e in sorted(prof.key_averages(), key=lambda e: -e.device_time_total)[:14]:
            print("     ", e.key[:80], e.count, f"{e.device_time_total / 1e3:.1f} ms")
    return sources, pieces, ready, recipe


def hugging_face(sources, pieces, n_vocab):
    from transformers import MarianConfig, MarianMTModel

    d = (
        dict(
            d_model=32,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
        )
        if DRY
        else dict(
            d_model=512,
            encoder_ffn_dim=2048,
            decoder_ffn_dim=2048,
            encoder_layers=6,
            decoder_layers=6,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
        )
    )
    c = MarianConfig(
        vocab_size=n_vocab,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
        max_position_embeddings=512,
        attn_implementation="sdpa",
        **d,
    )
    dev = "cpu" if DRY else "cuda"
    m = MarianMTModel(c).to(dev, torch.bfloat16).eval()
    order = sorted(sources, key=len, reverse=True)
    for size in [8] if DRY else [256, 1024]:
        for again in range(2):
            t = time.perf_counter()
            for i in range(0, len(order), size):
                part = order[i : i + size]
                L = len(part[0])
                ids = torch.tensor([s + [0] * (L - len(s)) for s in part], device=dev)
                m.generate(
                    input_ids=ids,
                    attention_mask=(ids != 0).long(),
                    num_beams=4,
                    do_sample=False,
                    min_new_tokens=pieces,
                    max_new_tokens=pieces,
                    length_penalty=0.6,
                )
            if not DRY:
                torch.cuda.synchronize()
            s = time.perf_counter() - t
            print(f"hugging face, batch {size}: {s:.2f} s, {len(order) / s:,.0f}/s", flush=True)


def ctranslate2_worker():
    from pathlib import Path

    import ctranslate2

    folder = Path(os.environ["CT2_MODEL"])
    sources = json.loads((folder / "sources.json").read_text())
    for kind in ("float16", "bfloat16", "int8_float16"):
        try:
            tr = ctranslate2.Translator(
                str(folder),
                device="cuda" if not DRY else "cpu",
                compute_type=kind if not DRY else "float32",
            )
            pieces = int(os.environ["PIECES"])
            words = [[f"t{i}" for i in s[:-1]] for s in sources]
            for tokens in (16384, 65536):
                for again in range(2):
                    t = time.perf_counter()
                    tr.translate_batch(
                        words,
                        beam_size=4,
                        length_penalty=0.6,
                        min_decoding_length=pieces,
                        max_decoding_length=pieces,
                        max_input_length=0,
                        max_batch_size=tokens,
                        batch_type="tokens",
                    )
                    s = time.perf_counter() - t
                    print(
                        f"ctranslate2 {kind}, batch of {tokens} tokens: {s:.2f} s, {len(words) / s:,.0f}/s",
                        flush=True,
                    )
        except Exception as e:
            print("ctranslate2", kind, type(e).__name__, str(e)[:200], flush=True)


def ctranslate2_model(model, recipe, sources, pieces, folder):
    """Random weights of the same sizes, in CTranslate2's format, through its own spec; words are t0 t1 ..."""
    import ctranslate2
    import numpy as np
    from ctranslate2.specs import TransformerSpec

    spec = TransformerSpec.from_config(
        recipe.config.model.n_layers,
        recipe.config.model.n_heads,
        pre_norm=False,
        activation=ctranslate2.specs.Activation.RELU,
    )
    rng = np.random.default_rng(0)
    d, f, v = recipe.config.model.d_model, recipe.config.model.d_ff, recipe.n_vocab
    m = lambda *s: (rng.standard_normal(s) * s[-1] ** -0.5).astype(np.float32)

    def linear(s, o, i):
        s.weight, s.bias = m(o, i), np.zeros(o, np.float32)

    def norm(s):
        s.gamma, s.beta = np.ones(d, np.float32), np.zeros(d, np.float32)

    def attention(s, is_self):
        linear(s.linear[0], 3 * d if is_self else d, d)
        (None if is_self else linear(s.linear[1], 2 * d, d))
        linear(s.linear[-1], d, d)
        norm(s.layer_norm)

    table = m(v, d)
    position = m(512, d)
    for part in (spec.encoder, spec.decoder):
        e = part.embeddings[0] if isinstance(part.embeddings, list) else part.embeddings
        e.weight = table
        part.scale_embeddings = True
        part.position_encodings.encodings = position
        for l in part.layer:
            attention(l.self_attention, True)
            linear(l.ffn.linear_0, f, d)
            linear(l.ffn.linear_1, d, f)
            norm(l.ffn.layer_norm)
            if part is spec.decoder:
                attention(l.attention, False)
    spec.decoder.projection.weight, spec.decoder.projection.bias = table, np.zeros(v, np.float32)
    words = [f"t{i}" for i in range(v)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    (
        spec.config.bos_token,
        spec.config.eos_token,
        spec.config.unk_token,
        spec.config.decoder_start_token,
        spec.config.add_source_eos,
    ) = "t2", "t3", "t1", "t2", True
    spec.validate()
    os.makedirs(folder, exist_ok=True)
    spec.save(folder)
    open(f"{folder}/sources.json", "w").write(json.dumps(sources))


if __name__ == "__main__":
    if "--ct2" in sys.argv:
        ctranslate2_worker()
        sys.exit()
    sources, pieces, ready, recipe = ours()
    try:
        hugging_face(sources, pieces, recipe.n_vocab)
    except Exception as e:
        print("hugging face", type(e).__name__, str(e)[:300])
    try:
        ctranslate2_model(ready, recipe, sources, pieces, "build/q4ct2")
        env = os.environ | {"CT2_MODEL": "build/q4ct2", "PIECES": str(pieces)}
        found = [
            p for p in sys.path for p in glob.glob(p + "/nvidia/**/libcublas.so.13", recursive=True)
        ] + glob.glob("/usr/local/cuda*/lib64/libcublas.so.13")
        if found:
            os.makedirs("build/q4lib", exist_ok=True)
            link = "build/q4lib/libcublas.so.12"
            if not os.path.lexists(link):
                os.symlink(found[0], link)
            env["LD_LIBRARY_PATH"] = (
                "build/q4lib:" + os.path.dirname(found[0]) + ":" + env.get("LD_LIBRARY_PATH", "")
            )
        print(
            subprocess.run(
                [sys.executable, __file__, "--ct2"] + ["--dry"] * DRY,
                env=env,
                capture_output=True,
                text=True,
                timeout=120,
            ).stdout
        )
    except Exception as e:
        print("ctranslate2", type(e).__name__, str(e)[:300])
