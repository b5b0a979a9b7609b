"""Decoding on a GPU, without one: the recorded search is the search, and a pretend device tells
what a step costs.

First its steps run on the CPU as they are, for all rules and kinds of models. Then they are
recorded and replayed on the pretend device, where news of what is done comes late, mixing host and
device raises, and each wait and each operation is counted.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.plain_search import Ids
from support.pretend_device import GPU, DeviceTensor, PretendDevice, pretend_device
from support.searches import (
    CPU,
    PLAIN,
    WAYS,
    assert_alike,
    make_prefixes,
    make_sources,
    make_speaker,
    make_steps_small,
    put_in_order,
)
from support.soaking import IS_SOAK, counted
from support.untrained import TINY, list_shapes

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import Packed, pack
from nmt.engines.cuda import graph_search
from nmt.engines.cuda.graph_search import GraphSearch
from nmt.engines.cuda.recorded_search import RecordedEngine
from nmt.model.cache import round_up_source_width, round_up_to_class
from nmt.model.transformer import Transformer
from nmt.translate.batching import Requests
from nmt.translate.engine import choose_engine
from nmt.translate.ensemble import Ensemble
from nmt.translate.search import search
from nmt.translate.search_rules import make_rules
from nmt.translate.search_state import Decodable, Hypothesis

V = 40
SHORT = replace(TINY, n_layers=1)
SHAPES = list_shapes(21, SHORT) | {"post": TINY}
DEEP = replace(SHAPES["pre"], n_layers=2)
ENSEMBLE = list(SHAPES.values()) if IS_SOAK else [DEEP, SHAPES["released"]]


def model(shape: ModelConfig, seed: int = 1) -> Transformer:
    return make_speaker(shape, V, seed)


def sources(n: int, seed: int, longest: int = 20) -> list[Ids]:
    return make_sources(random.Random(seed), n, longest, V)


def prefixes_of(given: Sequence[Ids]) -> list[Ids]:
    return make_prefixes(random.Random(0), len(given), V)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    make_steps_small(monkeypatch)
    monkeypatch.setattr(graph_search, "UNRECORDED_STEPS", 1)


# ---- the same search ----------------------------------------------------------------------------------------------


def test_batches_of_all_sizes_one_after_another() -> None:
    """In buffers that hold what earlier and larger batches left there."""
    ours = model(SHORT)
    recorded = GraphSearch(ours, make_rules(PLAIN, 2), CPU)
    for n, longest in ((20, 30), (3, 5), (9, 70), (1, 1), (48, 6), (20, 30)):
        given = sources(n, n, longest)
        assert_alike(recorded.search(pack(given)), search(ours, pack(given), make_rules(PLAIN, 2)))


def test_the_table_of_positions_grows_between_batches() -> None:
    shape = replace(SHORT, max_positions=8)
    recorded = GraphSearch(model(shape), make_rules(PLAIN, 2), CPU)
    for longest in (3, 40, 3, 90):
        given = sources(5, 1, longest)
        assert_alike(
            recorded.search(pack(given)), search(model(SHORT), pack(given), make_rules(PLAIN, 2))
        )


def test_the_classes_of_sizes() -> None:
    assert [round_up_to_class(n) for n in range(1, 18)] == [
        1,
        2,
        3,
        4,
        6,
        6,
        8,
        8,
        12,
        12,
        12,
        12,
        16,
        16,
        16,
        16,
        24,
    ]
    assert [round_up_source_width(n) for n in (0, 1, 16, 17, 49, 65)] == [16, 16, 16, 32, 64, 96]


# ---- on the pretend device ----------------------------------------------------------------------------------------


def search_twice(
    speaker: Callable[[PretendDevice], Decodable],
    given: Sequence[Ids],
    config: DecodingConfig,
    lag: int,
    n_best: int,
    forced: Sequence[Ids] | None,
) -> list[list[Hypothesis]]:
    """Twice, so that the second search finds recordings and what the first left."""
    with pretend_device(event_lag=lag) as device:
        recorded = GraphSearch(speaker(device), make_rules(config, n_best), GPU)
        first = recorded.search(pack(given).to(GPU), forced)
        again = recorded.search(pack(given).to(GPU), forced)
        assert first == again and device.replays > 0
    return again


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("lag", [0, 3, 100] if IS_SOAK else [3])
@pytest.mark.parametrize("way", WAYS)
def test_recorded_steps_find_the_same_however_late_events_are(way: str, lag: int) -> None:
    config, given, n_best = WAYS[way], sources(counted(5, 9), 5, 9), 1 if way == "greedy" else 2
    for forced in (None, prefixes_of(given)) if IS_SOAK else (prefixes_of(given),):
        expected = search(model(SHORT), pack(given), make_rules(config, n_best), forced)
        found = search_twice(
            lambda device: device.to_device(model(SHORT)), given, config, lag, n_best, forced
        )
        assert_alike(found, expected)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("name", [*SHAPES, "ensemble"])
def test_recorded_steps_of_models_of_all_kinds(name: str) -> None:
    given = sources(counted(5, 9), 6, 9)
    shapes = ENSEMBLE if name == "ensemble" else [SHAPES[name]]

    def made(device: PretendDevice | None = None) -> Decodable:
        models = [model(shape, seed) for seed, shape in enumerate(shapes)]
        if device is not None:
            models = [device.to_device(one) for one in models]
        return Ensemble(models) if name == "ensemble" else models[0]

    assert_alike(
        search_twice(made, given, PLAIN, 2, 2, None),
        search(made(), pack(given), make_rules(PLAIN, 2)),
    )


def test_what_is_recorded_is_forgotten_when_addresses_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_search, "UNRECORDED_STEPS", 0)
    ours = model(SHORT)
    with pretend_device() as device:
        recorded = GraphSearch(device.to_device(model(SHORT)), make_rules(PLAIN, 2), GPU)
        moves = []
        for n, longest in ((6, 8), (6, 8), (3, 5), (16, 16), (6, 8), (2, 9), (16, 16)):
            given = sources(n, n, longest)
            assert_alike(
                recorded.search(pack(given).to(GPU)),
                search(ours, pack(given), make_rules(PLAIN, 2)),
            )
            moves.append(recorded.n_moves)
    assert moves[0] == moves[1] == moves[2] < moves[3] == moves[-1]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_what_a_step_costs(is_recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beam 4 and two layers: one launch, and a copy that nobody waits for. A step that is not
    recorded launches much more, but does not wait either."""
    monkeypatch.setattr(graph_search, "UNRECORDED_STEPS", 0 if is_recorded else 1000)
    shape = TINY
    config = DecodingConfig(max_extra=20, min_length=12)
    given = sources(8, 7, 9)
    with pretend_device() as device:
        recorded = GraphSearch(device.to_device(model(shape)), make_rules(config), GPU)
        recorded.search(pack(given).to(GPU))
        costs, replay = [], recorded._choose_step

        def noted() -> Callable[[], None]:
            n_done = int(recorded.is_done.on_host.sum())  # type: ignore[attr-defined]
            costs.append(
                (device.n_operations, device.n_waits, n_done, recorded.n, recorded.capacity)
            )
            return replay()

        recorded._choose_step = noted  # type: ignore[method-assign]
        device.forget()
        recorded.search(pack(given).to(GPU))
        n_steps, n_waits = len(costs), device.n_waits
    pairs = list(itertools.pairwise(costs))
    assert max(after[1] - before[1] for before, after in pairs) <= 1
    undisturbed = [
        (before, after)
        for before, after in pairs
        if before[2] == after[2] == 0 and before[3] == after[3]
    ]
    assert len(undisturbed) >= 11 and n_steps > 20
    # While all sentences live nothing waits
    assert all(before[1] == after[1] for before, after in undisturbed)
    steady = [after[0] - before[0] for before, after in undisturbed if before[4] == after[4]]
    print(f"operations a step: {steady}; waits of a search: {n_waits}")
    assert len(steady) >= 10 and max(steady) <= (10 if is_recorded else 300)
    assert n_waits <= 4  # of a whole search: to begin, when half are done, at the end


def test_the_host_waits_only_when_it_is_too_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_search, "UNRECORDED_STEPS", 0)
    given = sources(6, 8)
    with pretend_device(event_lag=100) as device:
        recorded = GraphSearch(
            device.to_device(model(SHORT)), make_rules(replace(PLAIN, min_length=10)), GPU
        )
        recorded.search(pack(given).to(GPU))
        at = device.waits.copy()
    events = sum(n for (what, _), n in at.items() if what == "an event")
    assert 0 < events < device.replays


def test_search_batches_takes_it_on_a_gpu() -> None:
    """The entrance that all translation takes."""
    ours, given = model(SHORT), sources(30, 9)
    expected = search(ours, pack(given), make_rules(PLAIN, 2))
    with pretend_device() as device:
        there = device.to_device(model(SHORT))
        batches = RecordedEngine([there]).search_batches(there, Requests(given), PLAIN, GPU, 2)
        found = put_in_order(batches)
    assert_alike(found, expected)


# ---- the pretend device itself ------------------------------------------------------------------------------------


def test_the_pretend_device_counts_waits_and_refuses_mixtures() -> None:
    with pretend_device() as device:
        x = torch.arange(4.0, device=GPU)
        assert isinstance(x, DeviceTensor) and x.device == GPU and x.is_cuda
        with pytest.raises(RuntimeError, match="mixes a host tensor"):
            x + torch.ones(4)
        assert device.n_waits == 0
        for wait in (
            lambda: float(x.sum()),
            lambda: x.nonzero(),
            lambda: x[x > 1],
            lambda: x.cpu(),
            lambda: x.tolist(),
            lambda: bool((x > 1).any()),
            lambda: torch.ones(2).to(GPU),
            lambda: x.max().item(),
        ):
            before = device.n_waits
            wait()
            assert device.n_waits > before
        before = device.n_waits
        torch.ones(2).pin_memory().to(GPU, non_blocking=True)
        torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)
        torch.where(x > 1, x, 0.0).topk(2)
        assert device.n_waits == before and device.n_operations > 10
    with pytest.raises(AssertionError, match="outside"):
        x + 1


def test_graphs_of_the_pretend_device_repeat_only_what_was_recorded() -> None:
    with pretend_device() as device:
        x, total, n = torch.ones(3, device=GPU), torch.zeros((), device=GPU), 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            n += 1
            total.add_((x * n).sum())
        assert float(total.on_host) == 0.0  # type: ignore[attr-defined]  # to record is not to do
        for _ in range(3):
            graph.replay()
            x.add_(1)
        assert float(total.on_host) == 3 + 6 + 9  # type: ignore[attr-defined]
        assert (n, device.replays) == (1, 3)
        with pytest.raises(RuntimeError, match="waits while a graph is being recorded"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                float(total)


# ---- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "n_models", "tokens"),
    [
        (ModelConfig(), 1, 65_536),
        (ModelConfig(decoder_layers=3), 1, 131_072),
        (ModelConfig(d_model=1024, d_ff=4096, n_heads=16), 1, 32_768),
        (ModelConfig(), 4, 16_384),
        (SHORT, 1, 131_072),
    ],
)
def test_models_decide_how_large_a_batch_is(shape: ModelConfig, n_models: int, tokens: int) -> None:
    """Whatever the beam and the free memory; unless the config says it."""
    with torch.device("meta"):
        models = [Transformer(shape, 8) for _ in range(n_models)]
    engine = choose_engine(models, DecodingConfig(), GPU)
    assert isinstance(engine, RecordedEngine) and engine.batch_tokens == tokens

    def list_sizes(config: DecodingConfig) -> list[int]:
        requests = Requests([[5] * 31 + [3]] * 5_000)
        batches = engine.split_into_batches(requests, config, make_rules(config))
        return [len(batch) for batch in batches]

    assert list_sizes(DecodingConfig())[0] == min(5_000, tokens // 32)
    given = DecodingConfig(batch_tokens=640)
    assert list_sizes(given)[0] == 20
    engine.make_room()
    assert engine.batch_tokens == tokens // 2 and list_sizes(given)[0] == 20


def test_a_batch_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, given, whole = model(SHORT), sources(30, 9), GraphSearch.search

    def cramped(self: GraphSearch, src: Packed, *args: Any) -> list[list[Hypothesis]]:
        if src.n_sentences > most:
            raise torch.OutOfMemoryError("out of memory")
        return whole(self, src, *args)

    monkeypatch.setattr(GraphSearch, "search", cramped)
    forced, most = prefixes_of(given), 5
    gpu = RecordedEngine([ours])
    tokens = gpu.batch_tokens
    batches = gpu.search_batches(ours, Requests(given, forced), PLAIN, CPU, 2)
    expected = search(ours, pack(given), make_rules(PLAIN, 2), forced)
    assert_alike(put_in_order(batches), expected)
    assert gpu.batch_tokens < tokens
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        list(gpu.search_batches(ours, Requests(given), PLAIN, CPU, 2))
