"""How fast is a GPU? The checks of first_gpu.py that measure: training and decoding.

Training is timed as `nmt-train --profile` times it, but on made data: base and big as in the paper,
25,000 tokens a side in each update. Speeds are compared with the ceiling of this GPU's own matrix
products, measured in the same minute, and with what a roofline predicts. Whatever is measured
must also be right: losses finite, translations complete.
"""

import os
import statistics
from dataclasses import dataclass, replace

import torch
from gpu_checks import Bench, Sheet, Skip, has_graph, make_store, shape_for
from roofline import predict

from nmt.config import DecodingConfig, RunConfig
from nmt.config_files import load_config
from nmt.data.plan import fit_rows, plan_epoch
from nmt.data.store import TokenStore
from nmt.data.vocab import EOS
from nmt.engines.choice import choose_backend
from nmt.extras.profile.cost import count_flop, measure_ceiling
from nmt.extras.profile.dry_run import DryRun, Timing, format_bytes
from nmt.model.backend import use_backend
from nmt.model.transformer import Transformer
from nmt.system.device import name_machine
from nmt.system.progress import clock
from nmt.system.ranks import World, join_world
from nmt.train.engine import choose_training_engine
from nmt.train.loss import Objective
from nmt.train.memory_probe import try_update
from nmt.train.optimizer import make_optimizer
from nmt.train.setup import Setup
from nmt.translate.batching import Requests
from nmt.translate.engine import SearchEngine

N_VOCAB, N_PAIRS, LONGEST = 37_000, 20_000, 255
WARM_UPS, TIMED = 3, 20  # updates
BATCH_TOKENS = 65_536, 131_072  # of decoding


# ---- training ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    config: RunConfig  # without micro_tokens
    n_vocab: int
    n_pairs: int
    longest: int
    n_timed: int


def make_recipe(bench: Bench, size: str) -> Recipe:
    config = load_config(f"{size}.yaml")
    if not bench.is_rehearsal:
        return Recipe(config, N_VOCAB, N_PAIRS, LONGEST, TIMED)
    n_heads = 4 if size == "big" else 2
    model = replace(
        bench.model, n_heads=n_heads, d_model=16 * n_heads, dropout=config.model.dropout
    )
    training = replace(
        config.training, src_tokens=bench.micro_tokens, tgt_tokens=bench.micro_tokens
    )
    tiny = replace(config, model=model, training=training)
    return Recipe(tiny, bench.n_vocab, bench.n_pairs, bench.longest, n_timed=3)


def open_made_run(recipe: Recipe, world: World) -> DryRun:
    """Open a training on made data, with micro-batches as large as nmt-train chooses."""
    store = make_store(recipe.n_pairs, recipe.n_vocab, recipe.longest)
    engine = choose_training_engine(world.device)
    least_memory = engine.find_least_memory(world)
    training = recipe.config.training

    def try_size(micro_tokens: int, alone: World) -> None:
        try_update(make_setup(recipe, store, micro_tokens, alone))

    def choose() -> int:
        return engine.choose_micro_tokens(training, world, least_memory, try_size)

    return DryRun(make_setup(recipe, store, int(world.decide(choose)), world))


def make_setup(recipe: Recipe, store: TokenStore, micro_tokens: int, world: World) -> Setup:
    """What `open_setup` opens where data is prepared."""
    training = replace(recipe.config.training, micro_tokens=micro_tokens)
    config = replace(recipe.config, training=training)
    engine = choose_training_engine(world.device)
    shape = None
    if engine.has_fixed_shape(config.model, training, world):
        lengths = store.src.lengths, store.tgt.lengths
        shape = shape_for(store, micro_tokens, training.grouping)
        plan = plan_epoch(*lengths, config.seed, 0, training, micro_tokens, shape)
        shape = fit_rows(shape, plan)
    torch.manual_seed(config.seed)
    model = Transformer(config.model, recipe.n_vocab).to(world.device)
    use_backend(model, engine.backend)
    objective = Objective(model, training.label_smoothing)
    replica = engine.make_replica(objective, world, training, config.optimizer, shape)
    return Setup(
        config,
        micro_tokens,
        world,
        vocab=None,  # type: ignore[arg-type]  # which nothing asks for
        store=store,
        shape=shape,
        mixture=None,
        dev=None,
        model=model,
        replica=replica,
        optimizer=make_optimizer(model, config.optimizer, shares=replica.own),
    )


def time_training(recipe: Recipe, run: DryRun) -> tuple[Timing, Timing]:
    """Time the first update, which is compiled, and some after others."""
    with run.updates() as updates:
        first = run.run(updates, 1, "compiling")
        run.run(updates, WARM_UPS, "warming up")
        return first, run.run(updates, recipe.n_timed, "timing")


def check_training_speed(bench: Bench, sheet: Sheet, size: str) -> None:
    """On one GPU, or as one of the ranks that torchrun has started."""
    if os.environ.get("WORLD_SIZE") == "1":
        raise Skip("this machine has one GPU")
    with join_world("cpu" if bench.is_rehearsal else "auto") as world:
        recipe = make_recipe(bench, size)
        run = open_made_run(recipe, world)
        first, timing = time_training(recipe, run)
        setup, model = run.setup, recipe.config.model
        with run.updates() as updates:
            batch = next(updates).micros[0].batch.to(world.device)
        sums = setup.replica.run(batch, 0.0, 0)

        # operations against the products of this GPU
        lengths = (float(side.lengths.mean()) for side in (setup.store.src, setup.store.tgt))
        flop = count_flop(model, recipe.n_vocab, *lengths)
        is_bf16 = recipe.config.training.precision == "bf16"
        dtype = torch.bfloat16 if is_bf16 else torch.float32
        ceiling = measure_ceiling(model, setup.micro_tokens, dtype, world.device)
        reached = (flop.src * timing.n_src + flop.tgt * timing.n_tgt) / sum(timing.seconds)

        rates = [timing.n_tgt / timing.n_updates / seconds for seconds in timing.seconds]
        rate = statistics.median(rates)
        name = name_machine(world.device, world.size)
        roof = predict(size, name, world.size)
        figures = {
            "on": name,
            "target tokens/s": f"{rate:,.0f} ({min(rates):,.0f} to {max(rates):,.0f})",
            "of the products' ceiling": f"{reached / ceiling / world.size:.1%} of {ceiling / 1e12:,.4g} TFLOP/s",
            "of the roofline": f"{rate / roof:.0%} of {roof:,.0f}" if roof else "no prediction",
            "micro-batch": f"{setup.micro_tokens:,} tokens a side",
            "first update, with compiling": f"{first.mean_s:.1f} s",
            "peak memory": format_bytes(timing.peak),
        }
        sheet.table([size, ""], [list(row) for row in figures.items()])
        sheet.require("the loss is finite", bool(sums.isfinite().all()), True)
        if bench.is_cuda:
            sheet.require("as one CUDA graph", has_graph(setup.replica), True)


def check_base(bench: Bench, sheet: Sheet) -> None:
    check_training_speed(bench, sheet, "base")


def check_big(bench: Bench, sheet: Sheet) -> None:
    check_training_speed(bench, sheet, "big")


# ---- decoding ----------------------------------------------------------------------------------------------------


def check_decoding(bench: Bench, sheet: Sheet) -> None:
    """The core's search with the backend of this device, ids to ids. Random weights never end a sentence
    by themselves: each translation has 28 pieces, or as many as news have, 1.15 for each of its source
    and four more.

    Predicted for an H200: 0.75 to 1.00 s for news lengths (1.12 s were measured for 28 pieces, by steps
    recorded as CUDA graphs), 56 to 84 ms for one sentence of 25 pieces. It decides how large a batch is
    on a GPU, and whether recorded steps were needed.
    """
    recipe = make_recipe(bench, "base")
    n_sentences, n_pieces, n_times = (40, 5, 2) if bench.is_rehearsal else (3_003, 28, 7)
    sources = news_sources(n_sentences, recipe)
    torch.manual_seed(1)
    model = Transformer(recipe.config.model, recipe.n_vocab).to(bench.device)
    engine = SearchEngine()
    engine.backend = choose_backend(bench.device.type)
    use_backend(model, engine.backend)
    ready = engine.prepare(model.eval().requires_grad_(False), is_bf16=True)
    config = replace(recipe.config.decoding, precision="bf16")
    forced = replace(config, max_ratio=0.0, max_extra=n_pieces, min_length=n_pieces)
    news = replace(config, max_ratio=1.15, max_extra=4)
    cases = (
        (f"{n_sentences:,}, {n_pieces} pieces each", sources, forced),
        (f"{n_sentences:,}, as in news", sources, news),
        ("one of 25 pieces, at most 33", [[5] * 24 + [EOS]], news),
    )
    sheet.table(["sentences", "tokens of a batch", "first, s", "median, s"], [])
    for batch_tokens in BATCH_TOKENS:
        for what, given, lengths in cases:
            limits = replace(lengths, batch_tokens=batch_tokens)
            seconds = []
            for _ in range(n_times):
                began = clock()
                found = decode(engine, ready, given, limits, bench)
                seconds.append(clock() - began)
            if lengths is forced:
                n_complete = sum(len(ids) == n_pieces for ids in found)
                name = f"{batch_tokens:,} tokens: translations of {n_pieces} pieces"
                sheet.require(name, n_complete, n_sentences)
            median = statistics.median(seconds)
            sheet.add_row(what, f"{batch_tokens:,}", f"{seconds[0]:.3f}", f"{median:.4f}")


def news_sources(n: int, recipe: Recipe) -> list[list[int]]:
    store = make_store(n, recipe.n_vocab, recipe.longest)
    sources = []
    for first, last in zip(store.src.offsets[:-1], store.src.offsets[1:], strict=True):
        sources.append([*store.src.ids[first:last].tolist(), EOS])
    return sources


def decode(
    engine: SearchEngine,
    model: Transformer,
    sources: list[list[int]],
    config: DecodingConfig,
    bench: Bench,
) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in sources]
    for batch, bests in engine.search_batches(model, Requests(sources), config, bench.device):
        for number, best in zip(batch, bests, strict=True):
            found[number] = best[0].ids
    return found
