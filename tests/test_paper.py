"""The conformance report: the shipped recipes do not deviate, each flipped setting is found, no setting is missed.

The last one keeps the table complete: every setting of `RunConfig` has a row that sees it change, or a reason in
`WITHOUT_ROW`. Rules that no setting can change are compared with the code that they describe.
"""

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
from pytest import approx, mark, raises
from support.capture import Capture, read_stderr
from support.checkout import ROOT
from support.golden import check_golden
from support.in_process import succeed
from support.recipes import FLIPS, list_recipes
from torch import nn

from nmt import paper
from nmt.commands.train import main
from nmt.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    VocabConfig,
)
from nmt.config_files import find_shipped_configs, list_setting_keys, load_config, override_config
from nmt.corpus.learn_bpe import train_bpe, write_word_counts
from nmt.data.vocab import Vocab
from nmt.model.dropout import Dropout
from nmt.model.multi_head_attention import Attention
from nmt.model.positions import Positions, sinusoids
from nmt.model.transformer import Residual, Transformer
from nmt.paper import PaperRow, check_conformance, explain, find_dev_reference
from nmt.system.strict_yaml import parse_yaml
from nmt.train.optimizer import learning_rate, make_optimizer

CONFIGS_OF_DOCS = re.findall(
    r"^```yaml\n(.*?)^```$", (ROOT / "docs" / "data.md").read_text(), re.MULTILINE | re.DOTALL
)
SLOW = ("torch", "numpy", "datasets", "sentencepiece", "sacrebleu", "safetensors")

WITHOUT_ROW = {
    "goes with vocab.model": "vocab.tgt_model",
    "where things lie": "name out data.root data.store",
    "of the weights, for their cards": "license",
    "a draw, not a rule": "seed decoding.seed",
    "the machine's; the report names the precision": (
        "device data.workers training.micro_tokens training.precision training.compile decoding.compile"
        " training.checkpoint_minutes training.mirror training.track decoding.precision decoding.batch_tokens"
    ),
    "what is reported on the way": (
        "training.log_every training.validate_every evaluation.bleu evaluation.sentences evaluation.best_by"
    ),
    "about what must not occur; counted where it does": "data.on_bad_line training.on_nonfinite",
    "names for other settings, which have rows as resolved": "data.clean.preset decoding.preset",
    "of sampling, which has a row": "decoding.temperature decoding.top_k decoding.top_p",
    "of models whose training corpora have tags, which have a row": "decoding.tag",
    "of learned positions, which have a row": "model.max_positions",
    "of lines longer than decoding.max_source, which has a row": "decoding.long_lines",
}
ROWLESS = set(" ".join(WITHOUT_ROW.values()).split())


def keys_of(rows: list[PaperRow]) -> list[str | None]:
    return [row.key for row in rows]


# ---- the shipped configs ------------------------------------------------------------------------------------------


@mark.parametrize(
    "name, model, pair, bleu, n_averaged",
    [
        ("base", "base", "en-de", 27.3, 5),
        ("big", "big", "en-de", 28.4, 20),
        ("base-enfr", "base", "en-fr", 38.1, 5),
        ("big-enfr", "big", "en-fr", 41.8, 20),
    ],
)
def test_the_papers_configs_do_not_deviate(
    name: str, model: str, pair: str, bleu: float, n_averaged: int
) -> None:
    config = load_config(f"{name}.yaml")
    found = check_conformance(config)
    assert found.deviations == []
    assert (found.model, found.pair, found.bleu, found.n_averaged) == (
        model,
        pair,
        bleu,
        n_averaged,
    )


def test_one_store_serves_both_released_configs() -> None:
    base, big = (load_config(f"{name}-released.yaml") for name in ("base", "big"))
    assert (big.data, big.vocab) == (base.data, base.vocab)


@mark.parametrize("block, parent", [(0, "base"), (1, "base-enfr")])
def test_wmts_own_archives_are_the_papers_corpora(block: int, parent: str, tmp_path: Path) -> None:
    file = tmp_path / "archives.yaml"
    file.write_text(CONFIGS_OF_DOCS[block])
    assert check_conformance(load_config(str(file))).deviations == []
    corpora = load_config(str(file)).data.train
    fewer = dataclasses.replace(load_config(str(file)).data, train=corpora[1:])
    (row,) = check_conformance(dataclasses.replace(load_config(str(file)), data=fewer)).deviations
    assert row.key == "data.train" and row.why.startswith("without europarl-v7.")


# ---- one flip, one deviation --------------------------------------------------------------------------------------


def test_a_flipped_setting_is_one_deviation() -> None:
    for name, flips in FLIPS.items():
        for flip in flips:
            found = check_conformance(list_recipes()[f"{name}: {flip}"])
            key = flip.partition("=")[0]
            assert keys_of(found.deviations) == [key], flip
            assert found.model == name.partition("-")[0]


def test_every_setting_that_has_a_row_is_flipped() -> None:
    settings = "; ".join(flip for flips in FLIPS.values() for flip in flips).split("; ")
    flipped = {setting.partition("=")[0] for setting in settings}
    assert flipped == set(list_setting_keys()) - ROWLESS


def test_what_follows_from_others_does_not_deviate_beside_them() -> None:
    found = check_conformance(load_config("base.yaml", ["model.n_heads=4"]))
    d_k = next(row for row in found.rows if row.name == "d_k")
    assert d_k.ours == "128, d_model / h" and keys_of(found.deviations) == ["model.n_heads"]
    for spelled_out in ("model.d_k=128", "model.d_k=64"):  # as it follows, and as in the paper
        both = check_conformance(load_config("base.yaml", ["model.n_heads=4", spelled_out]))
        assert keys_of(both.deviations) == ["model.n_heads"]


def test_the_nearer_model_is_the_measure_and_base_in_a_tie() -> None:
    size = ["model.d_model=1024", "model.d_ff=4096"]
    # H, dropout and updates are base's still
    assert check_conformance(load_config("base.yaml", size)).model == "base"
    assert check_conformance(load_config("big.yaml", ["training.steps=100000"])).model == "big"
    between = (
        "model.d_model=512 model.d_ff=2048 model.n_heads=12 model.d_k=64 model.d_v=64"
        " training.checkpoint_every=1000"
    )
    tie = check_conformance(load_config("big.yaml", between.split()))
    # from base h, dropout, updates and checkpoints; from big d_model, d_ff, h and checkpoints
    assert (tie.model, len(tie.deviations)) == ("base", 4)


# ---- no hole ------------------------------------------------------------------------------------------------------


BASE = load_config("base.yaml")


def test_each_setting_has_a_row_or_a_reason_to_have_none() -> None:
    """If this fails for a new setting: give it a row in configs/paper.yaml, or WITHOUT_ROW the reason to have none."""
    with_row: set[str] = set()
    for row in paper.read_table()[0]:
        for text in (row, *(row.get(case, {}) for case in paper.CASES)):
            with_row |= text.get("settings", {}).keys()
    assert with_row.isdisjoint(ROWLESS)
    assert with_row | ROWLESS == set(list_setting_keys())


# What is known of the code of June 2017 (docs/recipe.md)
KNOWN_RULES = """
languages; training corpora; dev set; test set; words per sentence; length ratio; pieces per
sentence; vocabulary; embedding rows; vocabulary shared; pieces; text cut before BPE; characters
per piece; vocabulary learned from; BPE-dropout; layers N; d_model; d_ff; heads h; d_k; d_v;
norm position; LayerNorm epsilon; attention window; biases in attention; feed-forward;
embeddings and projection; bias of the projection; embeddings multiplied by; positions; added to
the source; dropout of sub-layers; dropout of embeddings; dropout in attention; dropout after
ReLU; embeddings at the start; matrices at the start; q, k, v at the start; optimizer; beta1;
beta2; epsilon; learning rate; learning rate times; warm-up steps w; gradient clipping; weight
decay; label smoothing; label smoothing rule; loss; batches by length; order of training; source
tokens per update; target tokens per update; updates; checkpoint every; checkpoints kept;
averaged; search; beam; length penalty; length penalty alpha; longest output; shortest output;
ended hypotheses count; early termination; longest input; score
"""


@mark.parametrize("name", ["base", "big", "base-enfr", "big-enfr"])
def test_every_rule_has_a_row_and_every_row_says_what_each_code_does(name: str) -> None:
    rows = check_conformance(load_config(f"{name}.yaml")).rows
    names = {row.name for row in rows}
    assert len(names) == len(rows)
    assert set(" ".join(KNOWN_RULES.split()).split("; ")) <= names
    for row in rows:
        for cell in (row.paper, row.code_2017, row.code_2023, row.ours):
            assert cell.strip() == cell and cell, row.name


def test_the_paper_is_silent_about_what_it_does_not_say() -> None:
    """A silent paper is never the measure, and what it says always is."""
    for row in check_conformance(BASE).rows:
        source, value = row.measure
        assert (source == "the paper") == (not row.paper.startswith("silent")) and value


# ---- the report ---------------------------------------------------------------------------------------------------


def test_golden_explanations() -> None:
    shown = {}
    for name, config in list_recipes().items():
        text = explain(config)  # if it has no table, it is no change of another
        shown[
            name if text.startswith(" ") else name.replace(": ", " with ", 1).replace(": ", ":")
        ] = text
    check_golden("explain.txt", shown)


def test_explain_tells_of_a_corpus_that_is_not_here(tmp_path: Path, capsys: Capture) -> None:
    """The language goes into the names of the corpora, so a wrong one means files that are missing."""
    for split in ("train", "valid", "test"):
        for language in ("en", "de"):
            (tmp_path / f"{split}.{language}").write_text("x\n")
    store = f"data.store={tmp_path / 'store'}"
    explain_pair = ["--config", "multi30k.yaml", "--explain", f"data.root={tmp_path}", store]
    succeed(main, *explain_pair, "data.tgt=fi")
    missing = tmp_path / "train.fi"
    assert f"note: training could not start here: {missing}: not found" in read_stderr(capsys)
    assert main(explain_pair) == 0
    assert read_stderr(capsys) == ""
    (tmp_path / "store").mkdir()
    succeed(main, *explain_pair, "data.tgt=fi")
    assert read_stderr(capsys) == ""  # what is prepared needs no other file


def test_what_matters_for_other_text_is_told_and_where_the_rest_is() -> None:
    first, *deviations, last = explain(load_config("multi30k.yaml")).splitlines()
    assert (
        first
        == f"{len(deviations)} deviations from the paper's base model, En-De, besides its text: train"
    )
    assert all(line.startswith("* ") and "* data." not in line for line in deviations)
    assert last.endswith(
        "rules are the paper's or about its text: nmt-train --config base.yaml --explain"
    )


def test_the_answer_comes_without_torch_data_or_network(tmp_path: Path) -> None:
    program = f"""
import json, sys
seen = []
sys.addaudithook(lambda event, _: seen.append(event) if event.startswith("socket.") else None)
from nmt import paper
from nmt.commands.train import main
code = main(["--config", "base.yaml", "--explain", "decoding.beam=5"])
print(json.dumps([code, seen, [m for m in {SLOW} if m in sys.modules]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    code, sockets, slow = json.loads(done.stdout.splitlines()[-1])
    assert (code, sockets, slow) == (0, [], [])
    assert "\n* decoding.beam: 5; the paper: 4\n" in done.stdout
    assert list(tmp_path.iterdir()) == []


# The rows of Table 3 that print a number of parameters, as they are named in docs/recipe.md
SIZES_OF_TABLE_3 = {
    "base": {},
    "d_k 16": {"d_k": 16},
    "d_k 32": {"d_k": 32},
    "N 2": {"n_layers": 2},
    "N 4": {"n_layers": 4},
    "N 8": {"n_layers": 8},
    "d_model 256": {"d_model": 256, "d_k": 32, "d_v": 32},
    "d_model 1,024": {"d_model": 1024, "d_k": 128, "d_v": 128},
    "d_ff 1,024": {"d_ff": 1024},
    "d_ff 4,096": {"d_ff": 4096},
    "big": {"d_model": 1024, "d_ff": 4096, "n_heads": 16},
}


def count_millions(sizes: dict[str, int], n_rows: int, has_biases: bool) -> float:
    """Count the parameters of a row of Table 3, with the 32 rows for target languages that the
    code of June 2017 has.
    """
    config = ModelConfig(**sizes, attention_bias=has_biases)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = Transformer(config, n_rows)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    return (n_parameters + 32 * config.d_model) / 1e6


def test_table_3_fits_40960_rows_and_biases_but_for_big() -> None:
    text = (ROOT / "docs" / "recipe.md").read_text().replace("**", "")
    for name, sizes in SIZES_OF_TABLE_3.items():
        (cells,) = re.findall(rf"^\| {name} \| ([0-9. |]+) \|$", text, re.MULTILINE)
        paper, *documented = cells.split(" | ")
        counts = []
        for n_rows, has_biases in ((40_960, True), (40_960, False), (37_000, False)):
            counts.append(count_millions(sizes, n_rows, has_biases))
        for count, figure in zip(counts, documented, strict=True):
            n_digits = len(figure.partition(".")[2])
            assert f"{count:.{n_digits}f}" == figure, name
        fits = [round(count) == int(paper) for count in counts]
        if name == "big":
            assert fits == [False, False, False]
        else:
            assert fits == [True, name != "d_ff 1,024", False], name


# ---- rules without a setting, held against the code; others are in tests/model, tests/train and tests/translate ---

TINY = ModelConfig(d_model=8, d_ff=16, n_heads=2, n_layers=2, dropout=0.5)


def test_dropout_is_nowhere_but_on_sub_layers_and_embeddings() -> None:
    model = Transformer(TINY, 16)
    places = [
        parent
        for parent in model.modules()
        for child in parent.children()
        if isinstance(child, Dropout | nn.Dropout)
        and (not isinstance(child, Dropout) or child.rate)
    ]
    assert {type(place) for place in places} == {Residual, Transformer} and len(
        places
    ) == 2 * 2 + 2 * 3 + 1
    torch.manual_seed(1)
    x = torch.randn(3, 8)
    forward = model.encoder[0].feed_forward.train()
    assert torch.equal(forward(x), forward(x))
    attention = [module for module in model.modules() if isinstance(module, Attention)]
    assert len(attention) == 2 + 2 * 2 and all(module.dropout == 0 for module in attention)


def test_sinusoids_are_the_papers_in_another_order_of_columns() -> None:
    table = [
        [(math.cos if i % 2 else math.sin)(place / 10_000 ** (i // 2 * 2 / 8)) for i in range(8)]
        for place in range(9)
    ]
    expected = torch.tensor(table)[:, [0, 2, 4, 6, 1, 3, 5, 7]]
    torch.testing.assert_close(sinusoids(9, 8), expected, rtol=1e-5, atol=1e-6)


def test_the_rates_of_the_authors_code_fall_to_a_ten_thousandth() -> None:
    """`get_timing_signal` of 3d9c62f2, which Marian has too, written out."""
    increment = math.log(10_000) / (4 - 1)
    angles = [[place * math.exp(-i * increment) for i in range(4)] for place in range(9)]
    table = [[*map(math.sin, row), *map(math.cos, row)] for row in angles]
    found = Positions(ModelConfig(d_model=8, n_heads=2, positions="marian", max_positions=4))
    assert torch.equal(found.find_rows(torch.arange(4), 4), sinusoids(4, 8, is_marian=True))
    rows = found.find_rows(torch.arange(9), 9)  # of a longer table
    torch.testing.assert_close(rows, torch.tensor(table), rtol=1e-5, atol=1e-6)


def test_adam_and_the_rate_are_as_written() -> None:
    optimizer = make_optimizer(nn.Linear(2, 2), OptimizerConfig())
    (group,) = optimizer.param_groups
    assert (
        isinstance(optimizer, torch.optim.Adam)
        and group["weight_decay"] == 0
        and not group["amsgrad"]
    )
    assert (group["betas"], group["eps"]) == ((0.9, 0.98), 1e-9)
    for n in (1, 4000, 100_000):
        assert learning_rate(n, 512, 100_000, OptimizerConfig()) == approx(
            min(n**-0.5, n * 4000**-1.5) * 512**-0.5
        )
    assert not [
        path.name
        for path in (ROOT / "nmt" / "train").glob("*.py")
        if "clip_grad" in path.read_text()
    ]


def test_defaults_are_the_papers_but_for_the_data_and_the_order_of_work() -> None:
    """A config that says nothing about model, training and search follows base, but it does not
    group pairs by length nor plan checkpoints by updates.
    """
    config = dataclasses.replace(
        RunConfig(),
        data=DataConfig(
            train=BASE.data.train, valid=BASE.data.valid, test=BASE.data.test, clean=BASE.data.clean
        ),
    )
    assert keys_of(check_conformance(config).deviations) == [
        "training.grouping",
        "training.checkpoint_every",
    ]


def test_initial_weights_are_those_of_june_2017_and_norms_have_torchs_epsilon() -> None:
    model = Transformer(ModelConfig(d_model=64, d_ff=128, n_heads=2, n_layers=1), 1_000)
    assert {layer.eps for layer in model.modules() if isinstance(layer, nn.LayerNorm)} == {1e-5}
    assert [name for name, _ in model.projection.named_parameters()] == ["weight"]
    embedding = model.tgt_embedding.weight
    assert embedding.shape[0] == 1_000  # a row for each piece
    assert float(embedding.std()) == approx(64**-0.5, rel=0.02)
    products = [
        layer
        for layer in model.modules()
        if isinstance(layer, nn.Linear) and layer is not model.projection
    ]
    fused = {tuple(layer.weight.shape) for layer in products}
    assert {(3 * 64, 64), (2 * 64, 64)} <= fused  # q, k, v; k, v of the memory
    for layer in products:
        limit = (6 / sum(layer.weight.shape)) ** 0.5
        assert 0.95 * limit < float(layer.weight.abs().max()) <= limit
        assert layer.bias is None or not layer.bias.any()


def test_pieces_have_at_most_16_characters(tmp_path: Path) -> None:
    words = tmp_path / "words"
    write_word_counts(words, Counter({b"abcd" * 16: 9}))
    vocab = Vocab(train_bpe(words, VocabConfig(size=16)))
    assert max(len(piece) for piece in vocab.pieces(range(vocab.size))) == 16


# ---- Table 3's dev figures -----------------------------------------------------------------------


# A config and what is changed of it; perplexity, BLEU and updates, which a row of Table 3 has from its test below
DEV_FIGURES = """
base.yaml -> 4.92 25.8 100000
big.yaml -> 4.33 26.4 300000
base.yaml, training.steps=200000, data.test=null -> 4.92 25.8 100000
base.yaml, model.norm=pre -> none
base.yaml, optimizer.scale=2 -> none
base.yaml, training.label_smoothing=0.05 -> none
base.yaml, data.valid={sacrebleu: wmt14/full} -> none
base.yaml, decoding.beam=1 -> none
base.yaml, evaluation.sentences=500 -> none
base-enfr.yaml -> none
demo.yaml -> none
table3/keys-16.yaml, training.label_smoothing=0 -> none
table3/keys-16.yaml, optimizer.scale=2 -> none
big.yaml, training.label_smoothing=0 -> none
"""


@mark.parametrize("line", DEV_FIGURES.strip().splitlines())
def test_the_papers_dev_figures_are_given_to_the_papers_models_alone(line: str) -> None:
    given, figures = line.split(" -> ")
    name, *overrides = given.split(", ")
    found = find_dev_reference(load_config(name, overrides))
    shown = f"{found.perplexity} {found.bleu} {found.step}" if found else "none"
    assert shown == figures


# As printed: settings, perplexity, BLEU
ROWS_OF_TABLE_3 = """
heads-1            n_heads 1             5.29 24.9
heads-4            n_heads 4             5.00 25.5
heads-16           n_heads 16            4.91 25.8
heads-32           n_heads 32            5.01 25.4
keys-16            d_k 16                5.16 25.1
keys-32            d_k 32                5.01 25.4
layers-2           n_layers 2            6.11 23.7
layers-4           n_layers 4            5.19 25.3
layers-8           n_layers 8            4.88 25.5
d-model-256        d_model 256           5.75 24.5
d-model-1024       d_model 1024          4.66 26.0
d-ff-1024          d_ff 1024             5.12 25.4
d-ff-4096          d_ff 4096             4.75 26.2
dropout-0          dropout 0.0           5.77 24.6
dropout-0.2        dropout 0.2           4.95 25.5
smoothing-0        label_smoothing 0.0   4.67 25.3
smoothing-0.2      label_smoothing 0.2   5.47 25.7
learned-positions  positions learned     4.92 25.7
"""


def test_each_row_of_table_3_has_its_config_and_its_figures() -> None:
    base = load_config("base.yaml")
    shipped = {path.stem for path in find_shipped_configs().glob("table3/*.yaml")}
    rows = [line.split() for line in ROWS_OF_TABLE_3.strip().splitlines()]
    assert {row[0] for row in rows} == shipped
    for name, key, value, perplexity, bleu in rows:
        config = load_config(f"table3/{name}.yaml")
        section = "training" if key == "label_smoothing" else "model"
        assert config == dataclasses.replace(
            override_config(base, [f"{section}.{key}={value}"]), name=name
        ), name
        found = find_dev_reference(config)
        assert found is not None
        assert (found.perplexity, found.bleu) == (float(perplexity), float(bleu)), name


@mark.parametrize("key", ["en_fr: {why: x}", "en-fr: {whyy: x}", "codes_2017: x"])
def test_a_misspelt_key_of_the_table_is_refused(key: str) -> None:
    row = parse_yaml(f"name: search\n{key}", "paper.yaml").values
    with raises(TypeError, match="unexpected keyword argument"):
        paper.choose_text(row, "base", "en-fr")
