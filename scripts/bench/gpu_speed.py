"""How fast is a GPU? The checks of first_gpu.py that measure: training and decoding.

Training runs the loader and `run_update` of nmt-train on made data, base and big as in the paper,
25,000 tokens a side in each update. Speeds are compared with the ceiling of this GPU's own matrix
products, measured in the same minute, and with what a roofline predicts. Whatever is measured
must also be right: losses finite, translations complete.
"""

import gc
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from gpu_checks import (
    Bench,
    Sheet,
    Skip,
    has_graph,
    make_bench,
    make_store,
    run_ranks,
    shape_for,
    update_and_fail,
)
from roofline import predict

from nmt.config import DecodingConfig, RunConfig
from nmt.config_files import load_config
from nmt.data.batch import BatchShape
from nmt.data.loader import Loader, make_updates
from nmt.data.plan import Cursor, divide_tokens, fit_rows, plan_epoch
from nmt.data.store import TokenStore
from nmt.data.vocab import EOS
from nmt.engines.choice import choose_backend
from nmt.engines.cuda.recorded_replica import RecordedReplica
from nmt.extras.profile.cost import DeviceTimer, count_flop, measure_ceiling, reset_peak_memory
from nmt.model.backend import use_backend
from nmt.model.transformer import Transformer
from nmt.system.memory import is_out_of_memory
from nmt.system.progress import clock
from nmt.system.ranks import World, join_world
from nmt.train.loss import Objective
from nmt.train.optimizer import Adam, make_optimizer
from nmt.train.update import run_update
from nmt.translate.batching import Requests
from nmt.translate.engine import SearchEngine

N_VOCAB, UPDATE_TOKENS, N_PAIRS, LONGEST = 37_000, 25_000, 20_000, 255
WARM_UPS, TIMED = 3, 20  # updates
MOST_ROUNDS = 16  # micro-batches of an update on one GPU
RANKS_S = 230.0
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


@dataclass(frozen=True)
class Speed:
    """Of one rank; tokens are those of all ranks."""

    tgt_tokens_per_s: float
    slowest: float  # of the timed updates
    fastest: float
    share_of_ceiling: float
    ceiling: float  # operations a second of this GPU's products
    first_update_s: float  # compiling and recording
    micro_tokens: int
    micros: int  # of an update on this rank
    peak_tensors: int  # bytes
    peak_reserved: int
    is_finite: bool
    has_graph: bool


@dataclass
class Trial:
    """A model that is ready to be timed."""

    config: RunConfig
    micro_tokens: int
    replica: RecordedReplica
    optimizer: Adam
    first_update_s: float


def prepare_trial(recipe: Recipe, store: TokenStore, world: World) -> Trial:
    """With micro-batches as large as fit: an equal share of an update for each rank, or half of it,
    and so on.
    """
    update_tokens = max(recipe.config.training.src_tokens, recipe.config.training.tgt_tokens)
    n_rounds = 1
    while n_rounds <= MOST_ROUNDS:
        micro_tokens = divide_tokens(update_tokens, world.size * n_rounds)
        trial = try_out(recipe, micro_tokens, store, world)
        # All ranks must take the same size
        n_failed = world.sum(torch.tensor([float(trial is None)])).item()
        if trial is not None and not n_failed:
            return trial
        del trial
        gc.collect()
        torch.cuda.empty_cache()
        n_rounds *= 2
    raise Skip(f"micro-batches of {micro_tokens} tokens do not fit into memory")


def shape_of(
    recipe: Recipe, micro_tokens: int, store: TokenStore, world: World
) -> BatchShape | None:
    """The shape of all micro-batches, as nmt-train chooses it; none on a CPU."""
    training = recipe.config.training
    if world.device.type == "cpu":
        return None
    lengths = store.src.lengths, store.tgt.lengths
    shape = shape_for(store, micro_tokens, training.grouping)
    plan = plan_epoch(*lengths, recipe.config.seed, 0, training, micro_tokens, shape)
    return fit_rows(shape, plan)


def try_out(recipe: Recipe, micro_tokens: int, store: TokenStore, world: World) -> Trial | None:
    """Compile, record and run one micro-batch, and have the optimizer make its moments; None if
    that does not fit.
    """
    config = recipe.config
    try:
        torch.compiler.reset()
        torch.manual_seed(config.seed)
        model = Transformer(config.model, recipe.n_vocab).to(world.device)
        shape = shape_of(recipe, micro_tokens, store, world)
        use_backend(model, choose_backend(world.device.type))
        objective = Objective(model, config.training.label_smoothing)
        is_bf16 = config.training.precision == "bf16"
        replica = RecordedReplica(objective, world, is_bf16, shape)
        optimizer = make_optimizer(model, config.optimizer, shares=replica.own)
        began = clock()
        with Loader(
            make_updates(
                lambda _: store,
                config.training,
                micro_tokens,
                config.seed,
                Cursor(),
                World(0, 1, world.device),
                shape,
            )
        ) as some:
            batch = next(some).micros[0].batch
        replica.run(batch, 0.0, 0).sum().item()
        first_update_s = clock() - began
        replica.clear_gradients()
        optimizer.step()
        return Trial(config, micro_tokens, replica, optimizer, first_update_s)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def time_training(bench: Bench, size: str, world: World) -> Speed:
    """The median of some updates, through the very code that nmt-train runs."""
    recipe = make_recipe(bench, size)
    store = make_store(recipe.n_pairs, recipe.n_vocab, recipe.longest)
    if bench.is_cuda:
        reset_peak_memory(world.device)
    trial = prepare_trial(recipe, store, world)
    config, replica = trial.config, trial.replica
    ticks = DeviceTimer(world.device)
    sent, n_src, n_tgt, n_micros = [], [], [], 0
    with Loader(
        make_updates(
            lambda _: store,
            config.training,
            trial.micro_tokens,
            config.seed,
            Cursor(),
            world,
            replica.shape,
        )
    ) as updates:
        for step in range(1, WARM_UPS + recipe.n_timed + 1):
            update = next(updates)
            outcome = run_update(replica, trial.optimizer, update, step, config, world)
            if step == WARM_UPS:
                ticks.mark()
            if step > WARM_UPS:
                ticks.mark()
                sent.append(outcome.stats)
                n_src.append(update.n_src)
                n_tgt.append(update.n_tgt)
                n_micros = max(n_micros, len(update.micros))
        seconds = ticks.seconds()
    is_finite = bool(torch.stack(sent)[:, :3].isfinite().all())
    peaks = [0, 0]
    if bench.is_cuda:
        peaks = [
            torch.cuda.max_memory_allocated(world.device),
            torch.cuda.max_memory_reserved(world.device),
        ]

    # operations against the products of this GPU
    means = [float(side.lengths.mean()) for side in (store.src, store.tgt)]
    flop = count_flop(config.model, recipe.n_vocab, means[0], means[1])
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    most = measure_ceiling(config.model, trial.micro_tokens, dtype, world.device)
    rates, shares = [], []
    for src, tgt, took in zip(n_src, n_tgt, seconds, strict=True):
        rates.append(tgt / took)
        shares.append((flop.src * src + flop.tgt * tgt) / took / (most * world.size))
    return Speed(
        statistics.median(rates),
        min(rates),
        max(rates),
        statistics.median(shares),
        most,
        trial.first_update_s,
        trial.micro_tokens,
        n_micros,
        peaks[0],
        peaks[1],
        is_finite,
        has_graph(replica),
    )


def write_speed(bench: Bench, sheet: Sheet, size: str, n_ranks: int, speed: Speed) -> None:
    name = torch.cuda.get_device_name(bench.device) if bench.is_cuda else "CPU"
    roof = predict(size, name, n_ranks)
    of_roof = "no prediction"
    if roof:
        of_roof = f"{speed.tgt_tokens_per_s / roof:.0%} of {roof:,.0f}"
    sheet.table(
        [
            "size",
            "GPUs",
            "target tokens/s",
            "range",
            "of the products' ceiling",
            "of the roofline",
        ],
        [
            [
                size,
                str(n_ranks),
                f"{speed.tgt_tokens_per_s:,.0f}",
                f"{speed.slowest:,.0f} to {speed.fastest:,.0f}",
                f"{speed.share_of_ceiling:.1%} of {speed.ceiling / 1e12:,.4g} TFLOP/s",
                of_roof,
            ]
        ],
    )
    sheet.table(
        [
            "micro-batch",
            "micro-batches an update",
            "first one, with compiling",
            "peak of tensors",
            "peak reserved",
        ],
        [
            [
                f"{speed.micro_tokens:,} tokens a side",
                str(speed.micros),
                f"{speed.first_update_s:.1f} s",
                gigabytes(speed.peak_tensors),
                gigabytes(speed.peak_reserved),
            ]
        ],
    )
    sheet.require("all losses are finite", speed.is_finite, True)
    if bench.is_cuda:
        sheet.require("as one CUDA graph", speed.has_graph, True)


def gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes else "not measured"


def check_training_speed(bench: Bench, sheet: Sheet, size: str) -> None:
    write_speed(bench, sheet, size, 1, time_training(bench, size, bench.world))


def check_speed_of_ranks(bench: Bench, sheet: Sheet, size: str) -> None:
    if bench.n_ranks < 2:
        raise Skip("this machine has one GPU")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        order = {"what": "speed", "size": size, "n_ranks": bench.n_ranks}
        (folder / "order.json").write_text(json.dumps(order))
        code = run_ranks(bench, folder, RANKS_S)
        if code != 0:
            raise RuntimeError(f"torchrun left with exit code {code}; it says why above")
        speed = Speed(**json.loads((folder / "speed.json").read_text()))
    write_speed(bench, sheet, size, bench.n_ranks, speed)


def check_base(bench: Bench, sheet: Sheet) -> None:
    check_training_speed(bench, sheet, "base")


def check_big(bench: Bench, sheet: Sheet) -> None:
    check_training_speed(bench, sheet, "big")


def check_base_ranks(bench: Bench, sheet: Sheet) -> None:
    check_speed_of_ranks(bench, sheet, "base")


def check_big_ranks(bench: Bench, sheet: Sheet) -> None:
    check_speed_of_ranks(bench, sheet, "big")


def time_as_rank(bench: Bench, world: World, folder: Path, size: str) -> None:
    speed = time_training(bench, size, world)
    if world.is_main:
        (folder / "speed.json").write_text(json.dumps(asdict(speed)))


# ---- decoding ----------------------------------------------------------------------------------------------------


def work_as_rank(folder: Path, is_rehearsal: bool) -> None:
    """What each process does that `run_ranks` starts."""
    order = json.loads((folder / "order.json").read_text())
    bench = replace(make_bench(is_rehearsal), n_ranks=order["n_ranks"])
    with join_world() as world:
        if order["what"] == "speed":
            time_as_rank(bench, world, folder, order["size"])
        else:
            update_and_fail(bench, world, folder)


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
