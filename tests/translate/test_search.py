"""Search against brute force where a beam can hold everything, and against the plain recursion
where it cannot.

Only torch's can look through a random table in place of a model (test_every_search.py has the others,
and real models). Then the engines whose rules they are: Hugging Face and CTranslate2, asked themselves.
"""

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from pytest import MonkeyPatch, approx, mark, raises
from support.needs import needs_package
from support.plain_search import (
    BOS,
    EOS,
    PAD,
    Ids,
    Toy,
    allowed,
    assert_same,
    everything,
    recursion,
    repeats,
    score_of,
)
from support.rings import amount
from support.searches import RULES, SMALL, make_sources
from support.untrained import make_random_model

from nmt.config import DecodingConfig, ModelConfig, RunConfig
from nmt.data.batch import pack
from nmt.data.vocab import Vocab
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.translate.search import search
from nmt.translate.search_rules import make_rules
from nmt.translate.search_state import Hypothesis

PRESETS = {
    name: replace(DecodingConfig(preset=name), **values)  # type: ignore[arg-type]
    for name, values in DecodingConfig.PRESETS.items()
}


def model(seed: int, size: int, shape: ModelConfig) -> Transformer:
    return make_random_model(shape, size, seed)


def short(config: DecodingConfig, most: int) -> DecodingConfig:
    """The limit of a preset, on sentences of up to `most` / 2 pieces never more than `most`."""
    if config.preset == "vaswani2017":
        return replace(config, max_extra=most - most // 2)
    return (
        replace(config, max_ratio=2.0)
        if config.preset == "marian"
        else replace(config, max_extra=most)
    )


# ---- brute force --------------------------------------------------------------------------------------------------


@mark.parametrize("preset", PRESETS)
@mark.parametrize("chunk", range(amount(1, 5)))
def test_a_beam_that_holds_everything_is_brute_force(preset: str, chunk: int) -> None:
    """Ten models a chunk; the rule that stops early, that which never does, and the preset's own."""
    for seed in range(chunk * 10, chunk * 10 + 10):
        rng = Random(f"{preset} {seed}")
        is_wide = seed % 10 == 0  # three pieces can be written: 1,093 sequences; else two, 127
        toy = Toy(seed, n=6 if is_wide else 5, ending=rng.choice((-2.0, 0.0, 2.0)))
        config = replace(
            short(PRESETS[preset], 6),
            min_length=rng.choice((0, 0, 1, 3)),
            length_penalty=rng.choice((PRESETS[preset].length_penalty, 0.0, 1.5)),
            penalty=rng.choice((PRESETS[preset].penalty, "none")),
            no_repeat_ngram=(None, 1, 2, 3)[seed % 4],
            beam=2100 if is_wide else 256,
        )
        given = make_sources(rng, 3, 3, len(toy.table[0]))
        prefixes: list[Ids] = [(), (4, 1), (4,) * 3]
        n_best = rng.choice((1, 3, 10))
        for src, prefix in zip(given, prefixes, strict=True):
            expected = everything(toy, src, config, prefix)[:n_best]
            for stopping in ("exact", "never", config.stopping):
                (found,) = search(
                    toy,
                    pack([src]),
                    make_rules(replace(config, stopping=stopping), n_best),
                    [prefix],
                )
                assert_same(found, expected, f"{preset} {seed} {stopping}")


# ---- step by step -------------------------------------------------------------------------------------------------


@mark.parametrize("finishing, stopping", RULES)
@mark.parametrize("beam", amount([1, 4], range(1, 6)))
def test_each_rule_is_the_recursion_it_names(finishing: Any, stopping: Any, beam: int) -> None:
    for preset, n_best in itertools.product(PRESETS, (1, 3)):
        if n_best > beam:
            continue
        rng = Random(f"{finishing} {stopping} {beam} {preset} {n_best}")
        toy = Toy(rng.randrange(1 << 30), n=9, ending=rng.choice((-1.0, 0.5, 2.0)))
        config = replace(
            short(PRESETS[preset], 14),
            beam=beam,
            finishing=finishing,
            stopping=stopping,
            min_length=rng.choice((0, 0, 3)),
            no_repeat_ngram=rng.choice((None, None, 1, 2, 3)),
        )
        given = make_sources(rng, 7, 7, 9)
        prefixes: list[Ids] = [rng.choice(((), (), (5,), (8, 1, 4, 4), (6,) * 20)) for _ in given]
        found = search(toy, pack(given), make_rules(config, n_best), prefixes)
        for src, prefix, some in zip(given, prefixes, found, strict=True):
            assert_same(
                some,
                recursion(toy, src, config, n_best, prefix),
                f"{preset} {n_best} {src} {prefix}",
            )


@mark.parametrize("max_small", [0, 1 << 15])
@mark.parametrize("beam", [1, 2, 5])
def test_a_vocabulary_of_many_groups(beam: int, max_small: int, monkeypatch: MonkeyPatch) -> None:
    """Where the best pieces are found by way of the best groups; the last group is not full."""
    monkeypatch.setattr("nmt.translate.search.MAX_SMALL_LOGITS", max_small)
    toy = Toy(3, n=64 * 40 + 17, ending=5.0, n_rows=211)
    toy.table[:, -9:] += 2.0
    given = make_sources(Random(4), 4, 5, 2_000)
    config = DecodingConfig(beam=beam, max_extra=3)
    found = search(toy, pack(given), make_rules(config, beam))
    for src, some in zip(given, found, strict=True):
        assert_same(some, recursion(toy, src, config, beam))
    # Also of the last
    assert max(piece for some in found for one in some for piece in one.ids) >= 64 * 40


def test_more_sentences_than_a_block_of_logits_holds(monkeypatch: MonkeyPatch) -> None:
    toy, given = Toy(5, n=7, ending=1.0), make_sources(Random(6), 100, 8, 7)
    config = DecodingConfig(beam=4, max_extra=4)
    sampling = make_rules(replace(config, sample=True), 2)
    drawn = search(toy, pack(given), sampling)
    # The logits of 30 sentences
    monkeypatch.setattr("nmt.translate.allowed_pieces.MAX_BLOCK_LOGITS", 4 * 7 * 30)
    assert len(set(given)) > 70
    assert search(toy, pack(given), sampling) == drawn
    for src, some in zip(given, search(toy, pack(given), make_rules(config, 2)), strict=True):
        assert_same(some, recursion(toy, src, config, 2))


@mark.parametrize("sample", [False, True])
def test_logits_may_be_large(sample: bool) -> None:
    toy, given = Toy(5, n=9, ending=1.0), make_sources(Random(6), 9, 8, 9)
    rules = make_rules(DecodingConfig(beam=3, max_extra=4, sample=sample), 2)
    usual = search(toy, pack(given), rules)
    toy.table += 100  # which changes no probability, but overflows as an exponent
    for some, expected in zip(search(toy, pack(given), rules), usual, strict=True):
        assert [one.ids for one in some] == [one.ids for one in expected]
        assert [one.score for one in some] == approx([one.score for one in expected], 1e-4)


def test_stopping_early_changes_nothing_and_saves_steps() -> None:
    saved, n_models = 0, amount(40, 200)
    for seed in range(n_models):
        rng = Random(seed)
        toy = Toy(seed, n=8, ending=rng.choice((-1.0, 1.0, 3.0)))
        config = DecodingConfig(
            beam=rng.randint(1, 5),
            max_extra=rng.randint(0, 20),
            max_ratio=rng.choice((0.0, 1.5)),
            penalty=rng.choice(("gnmt", "length", "none")),
            length_penalty=rng.uniform(0.0, 1.5),
        )
        given, n_best = make_sources(rng, 3, 8, 8), rng.randint(1, config.beam)
        steps, results = [], []
        for stopping in ("exact", "never"):
            toy.n_steps = 0
            results.append(
                search(toy, pack(given), make_rules(replace(config, stopping=stopping), n_best))
            )
            steps.append(toy.n_steps)
        assert results[0] == results[1], seed
        assert steps[0] <= steps[1]
        saved += steps[0] < steps[1]
    assert saved > n_models / 2


# ---- limits and prefixes ------------------------------------------------------------------------------------------


@mark.parametrize(
    "ratio, extra, at_least",
    [(0.0, 0, 0), (0.0, 3, 5), (1.5, 0, 2), (0.5, 2, 4), (3.0, 1, 0)],
)
@mark.parametrize("sample", [False, True])
def test_lengths_keep_to_their_limits(
    ratio: float, extra: int, at_least: int, sample: bool
) -> None:
    config = DecodingConfig(
        beam=3, max_ratio=ratio, max_extra=extra, min_length=at_least, sample=sample
    )
    given = [(*[4] * n, EOS) for n in range(9)]
    reached = set()
    for ending in (-9.0, 9.0):
        for src, some in zip(
            given,
            search(Toy(1, n=8, ending=ending), pack(given), make_rules(config, 3)),
            strict=True,
        ):
            most = int((len(src) - 1) * ratio) + extra
            for one in some:
                assert min(at_least, most) <= len(one.ids) <= most
                assert not {PAD, BOS, EOS} & set(one.ids)
                reached.add((ending, len(one.ids) in (min(at_least, most), most)))
    assert (-9.0, True) in reached and (9.0, True) in reached


@mark.parametrize("sample", [False, True])
def test_no_ngram_is_said_twice(sample: bool) -> None:
    """But in a prefix: what follows repeats nothing of it. Where only the end is left, it ends."""
    given, prefixes = [(4, EOS), (5, EOS), (6, EOS)], [(), (5, 5, 5), (4, 7)]
    for size in (1, 2, 3):
        config = DecodingConfig(
            beam=4, max_ratio=0.0, max_extra=30, min_length=30, no_repeat_ngram=size, sample=sample
        )
        toy = Toy(3, n=8, ending=-9.0)
        found = search(toy, pack(given), make_rules(config, 4), prefixes)
        for src, prefix, some in zip(given, prefixes, found, strict=True):
            assert len(some) == 4
            for one in some:
                for n in range(len(prefix), len(one.ids)):
                    assert not repeats(tuple(one.ids[:n]), one.ids[n], size)
                end = allowed(tuple(one.ids), 8, 31, replace(config, min_length=31), prefix)
                assert len(one.ids) == 30 or end == [EOS]
                assert one.score == approx(score_of(toy, src, one.ids, config), abs=1e-4)


@mark.parametrize("sample", [False, True])
def test_translations_begin_with_their_prefixes(sample: bool) -> None:
    config = DecodingConfig(beam=4, max_ratio=0.0, max_extra=4, min_length=2, sample=sample)
    rng = Random(2)
    toy, given = Toy(2, n=8), make_sources(rng, 9, 5, 8)
    prefixes: list[Ids] = [tuple(rng.randrange(4, 8) for _ in range(n)) for n in range(9)]
    for src, prefix, some in zip(
        given, prefixes, search(toy, pack(given), make_rules(config, 4), prefixes), strict=True
    ):
        assert some and all(tuple(one.ids[: len(prefix)]) == prefix for one in some)
        if len(prefix) >= 4:
            assert all(tuple(one.ids) == prefix for one in some)
        for one in some:  # what must be said weighs as what is chosen
            assert one.score == approx(score_of(toy, src, one.ids, config), abs=1e-5)


@mark.parametrize("sample", [False, True])
def test_learned_positions_end_a_translation(sample: bool) -> None:
    ours = model(4, 8, replace(SMALL, positions="learned", max_positions=7))
    config, given = (
        DecodingConfig(beam=2, max_extra=50, min_length=50, sample=sample),
        [(4, 5, EOS), (6, EOS)],
    )
    for prefixes in ([(), ()], [(5,) * 3, ()], [(), (5,) * 6]):
        assert [
            len(some[0].ids) for some in search(ours, pack(given), make_rules(config), prefixes)
        ] == [
            6,
            6,
        ]
    with raises(UserError, match=r"a prefix of 7 pieces .*model.max_positions 7"):
        search(ours, pack(given), make_rules(config), [(), (5,) * 7])


# ---- the engines whose rules they are -----------------------------------------------------------------------------

LIMIT = 16
N_MODELS = amount(5, 20)


def exported(seed: int, vocab: Vocab) -> tuple[Transformer, RunConfig, list[Ids]]:
    """A model that ends by itself more often than not, and what to translate. Pad and bos are so
    unlikely that it does not matter whether an engine rules them out before or after the softmax.
    """
    rng = Random(seed)
    shape = ModelConfig(d_model=16, d_ff=24, n_heads=2, n_layers=1, tied=False, max_positions=64)
    ours = model(seed, vocab.size, shape)
    # Whose outputs then add up to 4, whatever goes in
    norm = ours.decoder[-1].feed_forward_residual.norm
    norm.weight.fill_(1.0)
    norm.bias.fill_(4 / shape.d_model)
    ours.projection.weight[[PAD, BOS]] = -10.0
    ours.projection.weight[EOS] += rng.choice((0.6, 0.9, 1.2))
    return ours, RunConfig(model=shape), make_sources(rng, 6, 8, vocab.size)


def compared(ours: list[list[Hypothesis]], theirs: list[tuple[Ids, float]], where: str) -> int:
    """How many of theirs ended before the limit, at which we end and they break off; all of those
    are ours.
    """
    ended = [
        (mine, ids, score)
        for (mine, *_), (ids, score) in zip(ours, theirs, strict=True)
        if len(ids) < LIMIT
    ]
    for mine, ids, score in ended:
        assert tuple(mine.ids) == ids and mine.score == approx(score, abs=1e-4), where
    return len(ended)


@needs_package("transformers")
def test_it_is_the_search_of_hugging_face(vocab: Vocab, tmp_path: Path) -> None:
    from transformers import GenerationConfig, MarianMTModel
    from transformers.utils import logging as their_logging

    from nmt.extras.export import huggingface

    their_logging.set_verbosity(logging.ERROR)
    their_logging.disable_progress_bar()
    n = 0
    ours, config, _ = exported(0, vocab)
    huggingface.write_huggingface(tmp_path, ours, vocab, config.data, config.decoding, "float32")
    theirs = MarianMTModel.from_pretrained(tmp_path, use_safetensors=True).eval()
    for seed in range(N_MODELS):
        ours, config, given = exported(seed, vocab)
        theirs.load_state_dict(
            dict(huggingface._rename_tensors(ours, config.decoding)), strict=False
        )
        ids, mask = huggingface._pad_rows([list(src) for src in given])
        for beam in range(1, 6):
            is_full, alpha = (seed + beam) % 2 == 0, (0.0, 0.6, 1.0)[(seed + beam) % 3]
            repeated = (None, 1, 2)[seed % 3]
            rules = GenerationConfig(
                num_beams=beam,
                early_stopping=is_full and beam > 1,
                length_penalty=alpha,
                max_new_tokens=LIMIT + 1,
                do_sample=False,
                pad_token_id=PAD,
                bos_token_id=BOS,
                eos_token_id=EOS,
                decoder_start_token_id=BOS,
                suppress_tokens=[PAD, BOS],
                no_repeat_ngram_size=repeated or 0,
            )
            with torch.inference_mode():
                made = theirs.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    generation_config=rules,
                    return_dict_in_generate=True,
                    output_scores=True,
                )
            rows = made.sequences[:, 1:].tolist()
            wanted = DecodingConfig(
                beam=beam,
                penalty="length",
                length_penalty=alpha,
                max_ratio=0.0,
                max_extra=LIMIT,
                finishing="top",
                stopping="full" if is_full else "likely",
                no_repeat_ngram=repeated,
            )
            found = search(ours, pack(given), make_rules(wanted))
            scores = (
                made.sequences_scores.tolist() if beam > 1 else [some[0].score for some in found]
            )
            ended = [tuple(row[: row.index(EOS)]) if EOS in row else (0,) * LIMIT for row in rows]
            n += compared(found, list(zip(ended, scores, strict=True)), f"{seed} {beam}")
    assert n > N_MODELS * 5 * 6 / 2


@needs_package("ctranslate2")
def test_it_is_the_search_of_ctranslate2(vocab: Vocab, tmp_path: Path) -> None:
    from nmt.extras.export import ctranslate2

    n = 0
    for seed in range(N_MODELS):
        ours, config, given = exported(seed, vocab)
        folder = tmp_path / str(seed)
        folder.mkdir()
        ctranslate2.write_ctranslate2(folder, ours, vocab, config.data, config.decoding, "float32")
        engine = ctranslate2.CTranslate2Engine(folder, 1)
        for beam in range(1, 6):
            alpha = (0.0, 0.6, 1.0)[(seed + beam) % 3]
            theirs = engine.search([src[:-1] for src in given], beam, alpha, LIMIT)
            wanted = DecodingConfig(
                beam=beam,
                penalty="length",
                length_penalty=alpha,
                max_ratio=0.0,
                max_extra=LIMIT,
                finishing="top",
                stopping="full" if alpha else "exact",
            )
            n += compared(
                search(ours, pack(given), make_rules(wanted)),
                [(tuple(one.ids), one.score) for (one,) in theirs],
                f"{seed} {beam}",
            )
        # Its scores are of what may still be said, so only the greedy choice is ours.
        once = replace(wanted, beam=1, no_repeat_ngram=1)
        repeated = engine.translate([src[:-1] for src in given], once)
        for (mine,), other in zip(
            search(ours, pack(given), make_rules(once)), repeated, strict=True
        ):
            assert len(other.ids) >= LIMIT or mine.ids == other.ids
    assert n > N_MODELS * 5 * 6 / 2
