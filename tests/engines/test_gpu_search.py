"""Decoding on a GPU, without one: torch's search finds there what it finds on a CPU, and a pretend
device tells what a step costs.

On the pretend device mixing host and device raises, and each wait and each operation is counted. How
large a batch is there, and what becomes of one that is too large, is asked of the engine itself.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from pytest import MonkeyPatch, mark, raises
from support.plain_search import Ids
from support.pretend_device import GPU, DeviceTensor, pretend_device
from support.rings import amount
from support.searches import (
    PLAIN,
    WAYS,
    assert_alike,
    make_prefixes,
    make_sources,
    make_speaker,
    put_in_order,
)
from support.untrained import TINY, list_shapes

import nmt.translate.engine
from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import Packed, pack
from nmt.model.cache import Cache
from nmt.model.transformer import Transformer
from nmt.translate.batching import Requests
from nmt.translate.engine import SearchEngine, choose_engine
from nmt.translate.ensemble import Ensemble
from nmt.translate.search import search
from nmt.translate.search_rules import make_rules
from nmt.translate.search_state import Hypothesis

V = 40
SHORT = replace(TINY, n_layers=1)
SHAPES = list_shapes(21, SHORT) | {"post": TINY}
DEEP = replace(SHAPES["pre"], n_layers=2)
ENSEMBLE = amount([DEEP, SHAPES["released"]], [*SHAPES.values()])


def model(shape: ModelConfig, seed: int = 1) -> Transformer:
    return make_speaker(shape, V, seed)


def sources(n: int, seed: int, longest: int = 20) -> list[Ids]:
    return make_sources(Random(seed), n, longest, V)


def prefixes_of(given: Sequence[Ids]) -> list[Ids]:
    return make_prefixes(Random(0), len(given), V)


# ---- on the pretend device ----------------------------------------------------------------------------------------


CASES = [(way, "short") for way in WAYS] + [("beam", name) for name in (*SHAPES, "ensemble")]


@mark.parametrize("way, name", CASES)
def test_each_way_and_each_kind_of_model_find_the_same(way: str, name: str) -> None:
    given, rules = sources(amount(5, 9), 5, 9), make_rules(WAYS[way], 1 if way == "greedy" else 2)
    shapes = ENSEMBLE if name == "ensemble" else [({"short": SHORT} | SHAPES)[name]]
    models = [model(shape, seed) for seed, shape in enumerate(shapes)]
    forced = prefixes_of(given)
    expected = search(Ensemble(models), pack(given), rules, forced)
    with pretend_device() as device:
        there = [device.to_device(each) for each in models]
        ours = Ensemble(there) if len(there) > 1 else there[0]
        found = search(ours, pack(given).to(GPU), rules, forced)
    assert_alike(found, expected)


def test_what_a_step_costs(monkeypatch: MonkeyPatch) -> None:
    """Beam 4 and two layers: the host waits once, to learn which sentences are done."""
    rules = make_rules(DecodingConfig(max_extra=20, min_length=12))
    given = sources(8, 7, 9)
    costs = []
    advance = Cache.advance

    with pretend_device() as device:
        there = device.to_device(model(TINY))

        def noted(cache: Cache) -> None:
            costs.append((device.n_launches, device.n_waits))
            advance(cache)

        monkeypatch.setattr(Cache, "advance", noted)
        search(there, pack(given).to(GPU), rules)
    early = costs[:12]  # while none may end
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(early)]
    print(f"launches and waits of each step: {steps}")
    assert len(steps) == 11 and all(n_waits == 1 for _, n_waits in steps)
    assert min(n for n, _ in steps) <= 140


def test_a_biased_product_is_one_launch() -> None:
    with pretend_device() as device, torch.no_grad():
        layer = device.to_device(model(SHORT)).decoder[0].feed_forward.outer
        x = torch.ones(3, layer.in_features, device=GPU)
        device.forget()
        layer(x)
        assert device.n_launches == 1


# ---- the pretend device itself ------------------------------------------------------------------------------------


def test_the_pretend_device_counts_waits_and_refuses_mixtures() -> None:
    with pretend_device() as device:
        x = torch.arange(4.0, device=GPU)
        assert isinstance(x, DeviceTensor) and x.device == GPU and x.is_cuda
        with raises(RuntimeError, match="mixes a host tensor"):
            x + torch.ones(4)
        assert device.n_waits == 0
        for wait in (
            lambda: float(x.sum()),
            x.nonzero,
            lambda: x[x > 1],
            x.cpu,
            x.tolist,
            lambda: bool((x > 1).any()),
            lambda: torch.ones(2).to(GPU),
            x.max().item,
        ):
            device.forget()
            wait()
            assert device.n_waits > 0
        device.forget()
        torch.ones(2).pin_memory().to(GPU, non_blocking=True)
        torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)
        torch.where(x > 1, x, 0.0).topk(2)
        assert device.n_waits == 0
    with raises(AssertionError, match="outside"):
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
        with raises(RuntimeError, match="waits while a graph is being recorded"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                float(total)


# ---- batches -------------------------------------------------------------------------------------------------------


@mark.parametrize(
    "shape, n_models, tokens",
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
    assert type(engine) is SearchEngine and engine.batch_tokens == tokens

    def list_sizes(config: DecodingConfig) -> list[int]:
        requests = Requests([[5] * 31 + [3]] * 5_000)
        batches = engine.split_into_batches(requests, config, make_rules(config))
        return [len(batch) for batch in batches]

    assert list_sizes(DecodingConfig())[0] == min(5_000, tokens // 32)
    given = DecodingConfig(batch_tokens=640)
    assert list_sizes(given)[0] == 20
    engine.make_room()
    assert engine.batch_tokens == tokens // 2 and list_sizes(given)[0] == 20


def test_a_batch_that_does_not_fit_is_halved(monkeypatch: MonkeyPatch) -> None:
    ours, given = model(SHORT), sources(30, 9)
    forced, most = prefixes_of(given), 5

    def cramped(there: Transformer, src: Packed, *args: Any) -> list[list[Hypothesis]]:
        if src.n_sentences > most:
            raise torch.OutOfMemoryError("out of memory")
        return search(there, src, *args)

    expected = search(ours, pack(given), make_rules(PLAIN, 2), forced)
    monkeypatch.setattr(nmt.translate.engine, "search", cramped)
    with pretend_device() as device:
        there = device.to_device(model(SHORT))
        engine = choose_engine([there], PLAIN, GPU)
        tokens = engine.batch_tokens
        batches = engine.search_batches(there, Requests(given, forced), PLAIN, GPU, 2)
        assert_alike(put_in_order(batches), expected)
        assert engine.batch_tokens < tokens
        most = 0
        with raises(torch.OutOfMemoryError):
            list(engine.search_batches(there, Requests(given), PLAIN, GPU, 2))
