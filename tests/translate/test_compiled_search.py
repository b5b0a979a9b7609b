"""The compiled search against the plain recursion and against torch's search, with its own promise: the
same bits in any company.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plain_search import EOS, Full, Ids, assert_same, recursion
from support.soaking import IS_SOAK, counted

pytest.importorskip("numba")

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import pack
from nmt.engines.cpu import compiled_search
from nmt.engines.cpu.compiled_code import find_code_folder
from nmt.engines.cpu.compiled_search import search_compiled
from nmt.model.cpu_linear import DecodingTransformer, prepare_for_decoding
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure, UserError
from nmt.translate import cpu_search
from nmt.translate.batching import search_batches
from nmt.translate.beams import Hypothesis
from nmt.translate.cpu_search import Experience, search_on_cpu
from nmt.translate.phrases import PhraseRules
from nmt.translate.search import search

# numba compiles, unless it did so before
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"),
]

SHAPE = ModelConfig(d_model=8, d_ff=16, n_heads=2, n_layers=1)
SHAPES = {
    "post": SHAPE,
    "pre-untied": replace(SHAPE, norm="pre", tied=False),
    "learned": replace(SHAPE, positions="learned", max_positions=11),
    "small-heads": replace(SHAPE, d_k=3, d_v=5, n_layers=2),
    "large-heads": replace(SHAPE, d_k=40, d_v=37, n_layers=3),
    "window": replace(SHAPE, window=2),
    "biased": replace(SHAPE, attention_bias=True),
    "gelu": replace(SHAPE, activation="gelu", embedding_norm="before_dropout"),
    "swish": replace(SHAPE, activation="swish", scale_embeddings="projection"),
}
RULES = list(itertools.product(("any", "top", "shrink"), ("exact", "full", "likely", "never")))
N_PIECES = 12
CPU = torch.device("cpu")


def make_model(seed: int, shape: ModelConfig = SHAPE, size: int = N_PIECES) -> Transformer:
    torch.manual_seed(seed)
    made = Transformer(shape, size).eval().requires_grad_(False)
    for p in made.parameters():
        p.add_(torch.randn_like(p), alpha=0.3)
    return made


def make_ready(model: Transformer, is_bf16: bool = False) -> DecodingTransformer:
    ready = prepare_for_decoding(model, is_bf16)
    assert isinstance(ready, DecodingTransformer)
    return ready


def make_sources(seed: int, n: int, longest: int, size: int = N_PIECES) -> list[Ids]:
    rng = random.Random(seed)
    return [
        (*(rng.randrange(4, size) for _ in range(rng.randint(1, longest))), EOS) for _ in range(n)
    ]


# ---- the rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("finishing", "stopping"), RULES)
@pytest.mark.parametrize("beam", range(1, 6) if IS_SOAK else (1, 4))
def test_each_rule_is_the_recursion_it_names(finishing: Any, stopping: Any, beam: int) -> None:
    for seed in range(counted(3, 20)):
        rng = random.Random(f"{finishing} {stopping} {beam} {seed}")
        model = make_model(seed)
        config = DecodingConfig(
            beam=beam,
            max_ratio=0.5,
            max_extra=rng.choice((0, 4, 9)),
            min_length=rng.choice((0, 0, 3)),
            penalty=rng.choice(("gnmt", "length", "none")),
            length_penalty=rng.choice((0.0, 0.6, 1.5)),
            finishing=finishing,
            stopping=stopping,
        )
        given = make_sources(seed, 5, 6)
        prefixes: list[Ids] = [rng.choice(((), (), (5,), (8, 1, 4, 4), (6,) * 9)) for _ in given]
        n_best = rng.randint(1, beam)
        found = search_compiled(make_ready(model), pack(given), config, n_best, prefixes)
        for src, prefix, some in zip(given, prefixes, found, strict=True):
            expected = recursion(Full(model), src, config, n_best, prefix)
            assert_same(some, expected, f"{seed} {src} {prefix}")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_each_kind_of_model(shape: ModelConfig) -> None:
    for seed in range(counted(2, 10)):
        model, given = make_model(seed, shape), make_sources(seed, 5, 8)
        config = DecodingConfig(beam=3, max_ratio=0.0, max_extra=9)
        found = search_compiled(make_ready(model), pack(given), config, 2)
        for src, some in zip(given, found, strict=True):
            assert_same(some, recursion(Full(model), src, config, 2), f"{seed} {src}")


@pytest.mark.parametrize("beam", [1, 3])
def test_long_outputs_large_vocabularies_many_sentences(
    beam: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cells grow, logits come in several blocks, and pieces in several groups."""
    monkeypatch.setattr("nmt.engines.cpu.compiled_search.FIRST_CELLS", 2)
    size = 2 * compiled_search.PART + compiled_search.N_PEAKS + 7
    model = make_model(1, replace(SHAPE, n_layers=2), size)
    ready, given = make_ready(model), make_sources(2, 70, 9, size)
    config = DecodingConfig(beam=beam, max_extra=60, min_length=50)
    found = search_compiled(ready, pack(given), config, beam)
    for some, expected in zip(found, search(model, pack(given), config, beam), strict=True):
        assert [one.ids for one in some] == [one.ids for one in expected]
        assert [one.score for one in some] == pytest.approx([one.score for one in expected], 1e-5)
    said = {piece for some in found for one in some for piece in one.ids}
    assert max(said) > 2 * compiled_search.PART


def test_sources_longer_than_what_is_encoded_by_compiled_loops() -> None:
    longest = compiled_search.MAX_COMPILED_SOURCE
    model, given = make_model(3), [(*[5, 6] * longest, EOS), (7, EOS)]
    config = DecodingConfig(max_ratio=0.0, max_extra=5)
    found = search_compiled(make_ready(model), pack(given), config)
    for some, expected in zip(found, search(model, pack(given), config), strict=True):
        assert_same(some, [(one.score, tuple(one.ids)) for one in expected])


def test_a_prefix_beyond_learned_positions_is_refused() -> None:
    ready = make_ready(make_model(4, SHAPES["learned"]))
    with pytest.raises(UserError, match=r"a prefix of 11 pieces .*model.max_positions 11"):
        search_compiled(ready, pack([(4, EOS)]), DecodingConfig(), 1, [(5,) * 11])
    with pytest.raises(UserError, match="a beam of 4 is too small for the 5 best translations"):
        search_compiled(ready, pack([(4, EOS)]), DecodingConfig(), 5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_told(value: float) -> None:
    model = make_model(5, replace(SHAPE, n_layers=2))
    model.decoder[1].feed_forward.inner.weight[3, 4] = value
    for given in ([(4, EOS)], make_sources(5, 9, 5)):
        with pytest.raises(Failure, match="NaN or infinite"):
            search_compiled(make_ready(model), pack(given), DecodingConfig())


def test_pieces_beyond_the_vocabulary_are_refused() -> None:
    ready = make_ready(make_model(4))
    for src, prefix in (((N_PIECES, EOS), ()), ((5, EOS), (6, N_PIECES))):
        with pytest.raises(UserError, match="piece 12 is not in the vocabulary of 12 pieces"):
            search_compiled(ready, pack([src]), DecodingConfig(), 1, [prefix])


# ---- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("is_bf16", [False, True])
def test_a_sentence_is_translated_alike_to_the_last_bit(is_bf16: bool, beam: int) -> None:
    ready = make_ready(make_model(6, replace(SHAPE, n_layers=2, d_model=32), 300), is_bf16)
    given = make_sources(6, counted(24, 100), 12, 300)
    config = DecodingConfig(beam=beam, max_extra=6)
    together = search_compiled(ready, pack(given), config, beam)
    assert len({tuple(some[0].ids) for some in together}) > 0.75 * len(given)
    for i, src in enumerate(given):
        assert search_compiled(ready, pack([src]), config, beam) == [together[i]]
    order = random.Random(1).sample(range(len(given)), len(given))
    shuffled = search_compiled(ready, pack([given[i] for i in order]), config, beam)
    assert shuffled == [together[i] for i in order]


def test_bf16_comes_near() -> None:
    """Its scores are those of fp32, up to the rounding of the weights."""
    model = make_model(7, replace(SHAPE, d_model=32, d_ff=64), 50)
    given, config = make_sources(7, 20, 9, 50), DecodingConfig(beam=1, max_extra=0, min_length=9)
    exact = search_compiled(make_ready(model), pack(given), config)
    near = search_compiled(make_ready(model, True), pack(given), config)
    apart = []
    for (one,), (other,) in zip(exact, near, strict=True):
        if one.ids == other.ids:
            apart.append(abs(one.score - other.score) / abs(one.score))
    assert len(apart) > 10 and 1e-6 < max(apart) < 0.05


# ---- when it is used ---------------------------------------------------------------------------------


@pytest.fixture
def experience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has searched enough, and nothing else yet."""
    monkeypatch.setattr(cpu_search, "SENTENCES_BEFORE_LOADING", 20)
    monkeypatch.setattr(Experience, "n_sentences", cpu_search.SENTENCES_BEFORE_COMPILING)
    monkeypatch.setattr(Experience, "is_loaded", False)
    monkeypatch.setattr(Experience, "has_failed", False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of sentences of each compiled search."""
    sizes: list[int] = []

    def counting(model: Any, src: Any, *rest: Any) -> list[list[Hypothesis]]:
        sizes.append(src.n_sentences)
        return search_compiled(model, src, *rest)

    monkeypatch.setattr(compiled_search, "search_compiled", counting)
    yield sizes


GIVEN = make_sources(8, 9, 5)


def test_all_batches_of_a_process_with_experience_are_compiled(
    experience: None, calls: list[int]
) -> None:
    ready, config = make_ready(make_model(8)), DecodingConfig(batch_tokens=8, max_extra=3)
    found: dict[int, list[Hypothesis]] = {}
    for batch, some in search_batches(ready, GIVEN, config, CPU):
        found.update(zip(batch, some, strict=True))
    assert sum(calls) == len(GIVEN) and len(calls) > 1
    assert [found[i] for i in range(len(GIVEN))] == search_compiled(ready, pack(GIVEN), config)


@pytest.mark.parametrize(
    ("what", "settings"),
    [
        ("sample", {"sample": True}),
        ("repeats", {"no_repeat_ngram": 2}),
        ("phrases", {}),
        ("ordinary model", {}),
        ("no numba", {}),
        ("large in bf16", {}),
    ],
)
def test_what_is_not_compiled(
    what: str,
    settings: dict[str, Any],
    experience: None,
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if what == "no numba":
        monkeypatch.setattr("nmt.model.cpu_linear.HAS_NUMBA", False)
    monkeypatch.setattr(cpu_search, "MAX_BF16_WEIGHTS", 100)
    monkeypatch.setattr(cpu_search, "has_bf16_pairs_but_no_tiles", lambda: False)
    model, config = make_model(9), DecodingConfig(max_extra=3, **settings)
    ready = model if what == "ordinary model" else make_ready(model, what == "large in bf16")
    phrases = None
    if what == "phrases":
        phrases = [PhraseRules([" a"] * N_PIECES).without_required for _ in GIVEN]
    search_on_cpu(ready, pack(GIVEN), config, 1, None, phrases)
    assert not calls
    if what == "large in bf16":
        search_on_cpu(ready, pack(GIVEN[:4]), config)
        assert calls == [4]  # few hypotheses are
        monkeypatch.setattr(cpu_search, "has_bf16_pairs_but_no_tiles", lambda: True)
        search_on_cpu(ready, pack(GIVEN), config)
        assert calls == [4, len(GIVEN)]


def test_it_is_loaded_after_some_sentences_and_compiled_after_many(
    experience: None, calls: list[int], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(cpu_search, "SENTENCES_BEFORE_LOADING", 20)
    monkeypatch.setattr(cpu_search, "SENTENCES_BEFORE_COMPILING", 40)
    ready, src, config = make_ready(make_model(10)), pack(GIVEN), DecodingConfig(max_extra=2)
    expected = search(ready, src, config)

    def count_until_compiled(is_kept: bool) -> int:
        monkeypatch.setattr(compiled_search, "is_kept", lambda: is_kept)
        monkeypatch.setattr(Experience, "n_sentences", 0)
        monkeypatch.setattr(Experience, "is_loaded", False)
        calls.clear()
        while not calls:
            for some, same in zip(search_on_cpu(ready, src, config), expected, strict=True):
                assert some[0].ids == same[0].ids
                assert some[0].score == pytest.approx(same[0].score, abs=1e-5)
        return Experience.n_sentences

    assert count_until_compiled(is_kept=True) == 27
    assert "compiling" not in capsys.readouterr().err
    assert count_until_compiled(is_kept=False) == 45
    assert capsys.readouterr().err.count("compiling the search for this processor") == 1


def test_where_numba_fails_torch_goes_on(
    experience: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """For example on damaged compiled code."""

    def fail(*_: Any) -> Any:
        raise EOFError("ran out of input")

    monkeypatch.setattr(compiled_search, "search_group", fail)
    monkeypatch.setattr(compiled_search, "is_kept", lambda: True)
    ready, config = make_ready(make_model(11)), DecodingConfig(max_extra=3)
    for _ in range(3):
        assert search_on_cpu(ready, pack(GIVEN), config) == search(ready, pack(GIVEN), config)
    message = "the search cannot be compiled (EOFError: ran out of input)"
    assert capsys.readouterr().err.count(message) == 1


def test_memory_that_is_used_up_is_told_and_no_reason_to_give_up(
    experience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        )

    with monkeypatch.context() as patch:
        patch.setattr(compiled_search, "search_group", fail)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            search_on_cpu(make_ready(make_model(11)), pack(GIVEN), DecodingConfig(max_extra=3))
    assert not Experience.has_failed


def test_bf16_is_compiled_from_the_first_sentence(
    experience: None, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Experience, "n_sentences", 0)
    for is_bf16, n_calls in ((False, 0), (True, 1)):
        ready = make_ready(make_model(12), is_bf16)
        search_on_cpu(ready, pack(GIVEN[:1]), DecodingConfig(max_extra=3))
        assert len(calls) == n_calls


def test_each_version_of_the_files_keeps_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older version's code may name types that are gone."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text("1")
    second.write_text("2")
    folder = find_code_folder(str(first), str(second))
    assert folder is not None and folder.parent == tmp_path
    second.write_text("3")
    assert find_code_folder(str(first), str(second)) not in (folder, None)
    assert not compiled_search.is_kept()
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert find_code_folder(str(first)) is None
