"""The compiled search: where its loops meet their bounds, and when it is chosen. Its rules are held by
tests/translate/test_every_search.py, and its bits in any company by tests/promises/test_invariance.py.
"""

import itertools
import runpy
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from random import Random

import pytest
import torch
from pytest import MonkeyPatch, approx, fixture, importorskip, mark, raises
from support.capture import Capture, read_stderr
from support.plain_search import EOS, Ids
from support.processor import CPU
from support.searches import RULES, SMALL, make_sources, make_speaker, put_in_order
from support.untrained import make_random_model

from nmt.system.strict_json import Fields

importorskip("numba")

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import pack
from nmt.engines import choice
from nmt.engines.cpu import compiled_search
from nmt.engines.cpu.compiled_code import find_code_folder, is_kept
from nmt.engines.cpu.compiled_layers import CompiledWeights
from nmt.engines.cpu.compiled_search import CompiledEngine, search_compiled
from nmt.engines.cpu.packed_linear import PackedEngine, find_fault_of_packing
from nmt.extras.maps.alignment import align
from nmt.model.decoding_copy import copy_sharing_weights
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.translate.batching import Requests
from nmt.translate.engine import SearchEngine, choose_engine
from nmt.translate.search import search
from nmt.translate.search_rules import SearchRules, make_rules

# numba compiles, unless it did so before
pytestmark = [
    mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"),
]

N_PIECES = 12


def make_model(seed: int, shape: ModelConfig = SMALL, size: int = N_PIECES) -> Transformer:
    return make_random_model(shape, size, seed)


def make_ready(model: Transformer, is_bf16: bool = False) -> CompiledWeights:
    return CompiledWeights(copy_sharing_weights(model), is_bf16)


def check_same_as_torch(model: Transformer, given: list[Ids], rules: SearchRules) -> int:
    """Return the largest piece that is said."""
    src = pack(given)
    found, expected = search_compiled(make_ready(model), src, rules), search(model, src, rules)
    ours, theirs = (list(itertools.chain(*each)) for each in (found, expected))
    assert [one.ids for one in ours] == [one.ids for one in theirs]
    assert [one.score for one in ours] == approx([one.score for one in theirs], 1e-5)
    return max(piece for one in ours for piece in one.ids)


# ---- the rules ------------------------------------------------------------------------------------


def test_each_rule_keeps_of_many_sentences_what_torch_keeps() -> None:
    """All that a beam finishes: where only the best is asked for, a wrong rule seldom shows."""
    model, given = make_speaker(SMALL, N_PIECES), make_sources(Random(2), 12, 9, N_PIECES)
    for finishing, stopping in RULES:
        config = DecodingConfig(finishing=finishing, stopping=stopping)  # type: ignore[arg-type]
        check_same_as_torch(model, given, make_rules(config, config.beam))


@mark.parametrize("beam", [1, 3])
def test_long_outputs_large_vocabularies_many_sentences(
    beam: int, monkeypatch: MonkeyPatch
) -> None:
    """The cells grow, logits come in several blocks, and pieces in several groups."""
    monkeypatch.setattr("nmt.engines.cpu.compiled_search.FIRST_CELLS", 2)
    size = 2 * compiled_search.PART + compiled_search.N_GROUPS + 7
    model = make_model(1, replace(SMALL, n_layers=2), size)
    given = make_sources(Random(2), 70, 9, size)
    rules = make_rules(DecodingConfig(beam=beam, max_extra=60, min_length=50), beam)
    assert check_same_as_torch(model, given, rules) > 2 * compiled_search.PART


def test_scores_of_attention_may_be_far_apart() -> None:
    """As a trained model's: the exponential of their differences, taken the wrong way, overflows."""
    model = make_model(3)
    for name, weight in model.named_parameters():
        if name.endswith(("qkv.weight", "q.weight")):
            weight.mul_(30)
    given = make_sources(Random(2), 9, 9, N_PIECES)
    check_same_as_torch(model, given, make_rules(DecodingConfig(beam=1)))


def test_pieces_beyond_the_vocabulary_are_refused() -> None:
    ready = make_ready(make_model(4))
    for src, prefix in (((N_PIECES, EOS), ()), ((5, EOS), (6, N_PIECES))):
        with raises(UserError, match="piece 12 is not in the vocabulary of 12 pieces"):
            search_compiled(ready, pack([src]), make_rules(DecodingConfig()), [prefix])


# ---- bf16 ---------------------------------------------------------------------------------


def test_bf16_comes_near() -> None:
    """Its scores are those of fp32, up to the rounding of the weights."""
    model, src = (
        make_model(7, replace(SMALL, d_model=32, d_ff=64), 50),
        pack(make_sources(Random(7), 20, 9, 50)),
    )
    rules = make_rules(DecodingConfig(beam=1, max_extra=0, min_length=9))
    exact, near = (
        search_compiled(make_ready(model, is_bf16), src, rules) for is_bf16 in (False, True)
    )
    apart = [
        abs(one.score / other.score - 1)
        for (one,), (other,) in zip(exact, near, strict=True)
        if one.ids == other.ids
    ]
    assert len(apart) > 10 and 1e-6 < max(apart) < 0.05


# ---- when it is used ---------------------------------------------------------------------------------

ON = DecodingConfig(compile="on")
HAS_FAST_BF16 = find_fault_of_packing(is_bf16=True) is None
NEEDS_BF16 = mark.skipif(not HAS_FAST_BF16, reason="this processor does not multiply bf16")


@fixture(autouse=True)
def say_again() -> None:
    choice.say_once.cache_clear()


@mark.parametrize(
    "settings, expected",
    [
        ({"compile": "on"}, CompiledEngine),
        ({"compile": "auto"}, PackedEngine),
        ({"compile": "off"}, PackedEngine),
        pytest.param({"precision": "bf16"}, CompiledEngine, marks=NEEDS_BF16),
        pytest.param({"precision": "bf16", "compile": "off"}, PackedEngine, marks=NEEDS_BF16),
        ({"compile": "on", "sample": True}, PackedEngine),
        ({"compile": "on", "no_repeat_ngram": 2}, PackedEngine),
    ],
)
def test_settings_choose_the_engine(
    settings: Fields, expected: type[SearchEngine], monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_search, "multiplies_bf16_faster", lambda _: True)
    engine = choose_engine([make_model(8)], DecodingConfig(**settings), CPU)
    assert type(engine) is expected


def test_in_fp32_large_models_are_compiled(monkeypatch: MonkeyPatch) -> None:
    model = make_model(8)
    n_weights = sum(weight.numel() for weight in model.decoder[0].parameters())
    for least, expected in ((n_weights, CompiledEngine), (n_weights + 1, PackedEngine)):
        monkeypatch.setattr(choice, "MIN_FP32_WEIGHTS", least)
        assert type(choose_engine([model], DecodingConfig(), CPU)) is expected


class UnknownLayer(torch.nn.Linear):
    pass


def test_a_field_a_value_or_a_layer_that_is_not_known_is_left_to_torch(
    monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    def check_reason(reason: str, *models: Transformer) -> None:
        choice.say_once.cache_clear()
        assert type(choose_engine(models, ON, CPU)) is PackedEngine
        assert f"does not support {reason}" in read_stderr(capsys)

    check_reason("ensembles", make_model(1), make_model(2))
    strange = make_model(3)
    strange.decoder[0].feed_forward.add_module("inner", UnknownLayer(8, 16))
    check_reason("UnknownLayer", strange)
    models, rules = compiled_search.COMPILED_MODELS, compiled_search.COMPILED_RULES
    monkeypatch.setitem(models, "norm", ("pre",))
    check_reason("norm=post", make_model(4))
    monkeypatch.delitem(models, "norm")
    check_reason("norm=", make_model(4))
    monkeypatch.undo()
    monkeypatch.delitem(rules, "beam")
    check_reason("beam=", make_model(4))


def test_every_field_is_known_so_far() -> None:
    assert set(compiled_search.COMPILED_MODELS) == {field.name for field in fields(ModelConfig)}
    assert set(compiled_search.COMPILED_RULES) == {field.name for field in fields(SearchRules)}


def test_torch_searches_if_numba_fails(monkeypatch: MonkeyPatch, capsys: Capture) -> None:
    def check_torch_searches(fault: str) -> None:
        choice.say_once.cache_clear()
        for _ in range(2):
            assert type(choose_engine([make_model(9)], ON, CPU)) is PackedEngine
        message = f"compiling for this processor fails ({fault}"
        assert read_stderr(capsys).count(message) == 1

    fault = EOFError("ran out of input")  # as on damaged compiled code
    monkeypatch.setattr(compiled_search, "find_fault_of_compiler", lambda _: fault)
    check_torch_searches("EOFError: ran out of input)")
    monkeypatch.setitem(sys.modules, "nmt.engines.cpu.compiled_search", None)
    check_torch_searches("ModuleNotFoundError")


def test_all_batches_are_compiled_whatever_their_size(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.translate.engine.search", lambda *_: pytest.fail("torch searched"))
    engine, config = CompiledEngine(), DecodingConfig(batch_tokens=8, max_extra=3)
    given = make_sources(Random(8), 9, 5, N_PIECES)
    ready = engine.prepare(copy_sharing_weights(make_model(8)), False)
    batches = list(engine.search_batches(ready, Requests(given), config, CPU))
    assert len(batches) > 1
    assert put_in_order(batches) == search_compiled(engine.weights, pack(given), make_rules(config))


def test_alignments_are_those_of_the_model() -> None:
    """They go through layers that read the compiled search's weights."""
    model, src, tgt = make_model(9), [[5, 6, 7], [8], [9, 4]], [[4, 9], [10, 11, 4], []]
    ready = CompiledEngine().prepare(copy_sharing_weights(model), False)
    assert align(ready, src, tgt) == align(model, src, tgt)


MEASURE = """
import ctypes, gc, torch
from nmt.config import DecodingConfig, ModelConfig
from nmt.model.transformer import Transformer
from nmt.system.runtime import tune_process
from nmt.translate.batching import Requests, split_by_budget
from nmt.translate.engine import choose_engine

tune_process()

def read_bytes():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed does not count
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024

def translate(config, shape, n_vocab):
    model = Transformer(shape, n_vocab).eval().requires_grad_(False)
    n_bytes = sum(p.nbytes for p in model.parameters())
    engine = choose_engine([model], config, torch.device("cpu"))
    model = engine.prepare(model, False)
    list(engine.search_batches(model, Requests([[5, 3]]), config, torch.device("cpu")))
    return n_bytes, engine, model

for compile in ("on", "off"):
    config = DecodingConfig(max_extra=2, compile=compile)
    small = translate(config, ModelConfig(d_model=8, d_ff=8, n_heads=1, n_layers=1), 50)
    before = read_bytes()
    n_bytes, engine, model = translate(config, ModelConfig(d_ff=4096, n_layers=2), 4_500)
    print(type(engine).__name__, (read_bytes() - before) / n_bytes)
    del engine, model
"""


@mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc")
def test_there_is_one_copy_of_the_weights() -> None:
    """Only the matrix that embeddings and projection share is there twice, because they lay it out
    differently: 9 of 105 MB here.
    """
    command = [sys.executable, "-c", MEASURE]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    engines, copies = zip(*map(str.split, run.stdout.splitlines()), strict=True)
    assert engines == ("CompiledEngine", "PackedEngine"), run.stderr
    assert all(0.9 < float(n) < 1.3 for n in copies), (copies, run.stderr)


COMPILED_FILE = """
from nmt.engines.cpu.compiled_code import make_compiler

@make_compiler(__file__, __file__.replace("doubles", "helper"))
def double(x):
    return 2 * x
"""


def test_code_is_kept_by_content_and_not_by_place(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A second checkout finds what the first compiled. After a change in any of the files all is compiled
    again, because an older version's code may name types that are gone.
    """
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    n_found = []
    for checkout, helper in (("first", ""), ("second", ""), ("third", "# changed")):
        files = [tmp_path / checkout / name for name in ("doubles.py", "helper.py")]
        files[0].parent.mkdir()
        files[0].write_text(COMPILED_FILE)
        files[1].write_text(helper)
        was_kept = is_kept("double", *map(str, files))
        double = runpy.run_path(str(files[0]))["double"]
        assert double(4) == 8 and is_kept("double", *map(str, files))
        n_found.append((was_kept, sum(double.stats.cache_hits.values())))
    assert n_found == [(False, 0), (True, 1), (False, 0)]


def test_code_is_kept_nowhere_without_a_folder(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert find_code_folder(__file__) is None and not is_kept("double", __file__)
