"""The configuration's promises: strict reading, complaints of one line that name the place, and
dumps that read back.

The bad inputs are a table of (text, what the complaint must say); each of them once was, or would
have been, a silent default, another value than the one written, or a traceback.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch, TempPathFactory, fixture, mark, raises

from nmt.config import (
    CHANGEABLE_KEYS,
    CorpusConfig,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
)
from nmt.config_files import (
    find_config,
    find_shipped_configs,
    format_config,
    list_config_names,
    list_differences,
    load_config,
    load_recorded_config,
    override_config,
)
from nmt.system.errors import UserError
from nmt.system.records import OF_ANOTHER_VERSION

RETELLINGS = sorted(path.name for path in find_shipped_configs().glob("retellings/*.yaml"))
SHIPPED = [name for name in list_config_names() if "/" not in name and name not in RETELLINGS]
Loader = Callable[..., RunConfig]


@fixture
def load(tmp_path: Path, monkeypatch: MonkeyPatch) -> Loader:
    """Load the text as c.yaml of an empty working folder, with overrides."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str | bytes, *overrides: str) -> RunConfig:
        Path("c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config("c.yaml", overrides)

    return load_text


# ---- values -----------------------------------------------------------------------------------------------------


def test_an_empty_file_is_the_defaults(load: Loader) -> None:
    assert load("") == load("# nothing\n") == RunConfig()


@mark.parametrize(
    "text, value",
    [
        ("1e-9", 1e-9),
        ("1E-9", 1e-9),
        ("1.e-9", 1e-9),
        (".5", 0.5),
        ("+2", 2.0),
        ("3", 3.0),
        ("1_000.5", 1000.5),
    ],
)
def test_numbers(load: Loader, text: str, value: float) -> None:
    config = load(f"optimizer: {{scale: {text}}}")
    assert config.optimizer.scale == value
    assert type(config.optimizer.scale) is float


@mark.parametrize(
    "text, value",
    [
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("12:30:00", "12:30:00"),
        ("2001-01-01", "2001-01-01"),
        ("0x10", "0x10"),
        (".nan", ".nan"),
        ("'5'", "5"),
        ("'null'", "null"),
        ("=", "="),
        ("a b", "a b"),
        ("|\n  a\n  b", "a\nb"),
    ],
)
def test_words_stay_words(load: Loader, text: str, value: str) -> None:
    """YAML 1.1, which PyYAML speaks, takes several of these for truth values, dates and numbers in
    base 60.
    """
    assert load(f"name: {text}").name == value


def test_leading_zeros_do_not_make_octal_numbers(load: Loader) -> None:
    assert load("seed: 010").seed == 10


def test_truth_and_absence(load: Loader) -> None:
    config = load(
        "model: {tied: false, window: 5}\ndata: {clean: {max_words: null}}\nevaluation: {sentences: ~}\n"
    )
    assert config.model.tied is False
    assert config.model.window == 5
    assert config.data.clean.max_words is None
    assert config.evaluation.sentences is None


def test_corpora(load: Loader) -> None:
    config = load("""
data:
  train:
    - {src: a.en, tgt: a.de}
    - {dataset: wmt/wmt14, subset: de-en, split: train, weight: 2}
  valid: {file: v.tsv}
""")
    assert config.data.train == (
        CorpusConfig(src="a.en", tgt="a.de"),
        CorpusConfig(dataset="wmt/wmt14", subset="de-en", split="train", weight=2.0),
    )
    assert config.data.valid == CorpusConfig(file="v.tsv")


# ---- bad input --------------------------------------------------------------------------------------------------

BAD = [
    # keys
    ("trainng: {steps: 1}", "c.yaml:1: trainng: unknown key; did you mean training?"),
    (
        "name: x\ntraining:\n  stesp: 1",
        "c.yaml:3: training.stesp: unknown key; did you mean steps?",
    ),
    ("qqq: 1", "known: data, decoding, device, evaluation"),
    ("training.steps: 5", "c.yaml:1: training.steps: unknown key"),
    ("model: {attention_bias: 0}", "model.attention_bias: "),
    ("<<: {name: x}", "c.yaml:1: <<: unknown key"),
    ("data: {train: [{src: a, tgt: a}]}", "data.train[0]: src and tgt are both 'a'"),
    ("data: {train: [{scr: a}]}", "data.train[0].scr: unknown key; did you mean src?"),
    ("name: a\nname: b", "c.yaml:2: key 'name' is given twice"),
    ("training:\n  steps: 5\n  'steps': 6", "c.yaml:3: key 'steps' is given twice"),
    ("? [a]\n: 1", "a key must be a plain word"),
    ('"a\\nb": 1', "a key must be a plain word"),
    # types
    ("training: 5", "c.yaml:1: training: 5 is not a section"),
    ("training:", "c.yaml:1: training: an empty value is not a section"),
    ("training: {steps: many}", "training.steps: 'many' is not an integer"),
    ("training: {steps: '5'}", "'5' is not an integer"),
    ("training: {steps: 1.5}", "1.5 is not an integer"),
    ("training: {steps: true}", "True is not an integer"),
    ("training:\n  steps:", "c.yaml:2: training.steps: an empty value is not an integer"),
    ("seed: 0x10", "'0x10' is not an integer"),
    ("seed: 12:30:00", "'12:30:00' is not an integer"),
    ("model: {tied: no}", "model.tied: 'no' is not true or false or decoder or embeddings"),
    ("model: {tied: 1}", "1 is not true or false or decoder or embeddings"),
    ("name: 5", "name: 5 is not a string"),
    ("data: {train: {src: a}}", "data.train: {'src': 'a'} is not a list"),
    ("data: {train: [5]}", "data.train[0]: 5 is not a section"),
    ("model: {norm: prenorm}", "model.norm: 'prenorm' is not one of post, pre; did you mean pre?"),
    ("model: {norm: [pre]}", "is not one of post, pre"),
    ("training: {precision: fp16}", "'fp16' is not one of bf16, fp32, auto"),
    # ranges
    ("training:\n  steps: -5", "c.yaml:2: training.steps is -5; it must be at least 1"),
    ("training: {steps: 0}", "steps is 0"),
    ("training: {label_smoothing: 1}", "label_smoothing is 1; it must be in [0, 1)"),
    ("training: {checkpoint_minutes: -1}", "checkpoint_minutes is -1; it must be positive"),
    ("training: {checkpoint_every: 0}", "checkpoint_every is 0"),
    ("optimizer: {eps: -1e-9}", "eps is -1e-09; it must be positive"),
    ("optimizer: {beta2: 1}", "beta2 is 1"),
    ("decoding: {beam: 0}", "beam is 0"),
    ("decoding: {length_penalty: -1}", "length_penalty is -1"),
    ("data: {store: ~/store}", "write the whole path"),
    ("evaluation: {sentences: 0}", "sentences is 0"),
    (
        "vocab: {size: 70000}",
        "size is 70000; it must be between 16 and 65535, because ids are stored in 16 bits",
    ),
    ("seed: -1", "c.yaml:1: seed is -1"),
    ("data: {workers: 0}", "workers is 0"),
    ("data: {clean: {max_words: -5}}", "data.clean.max_words is -5"),
    ("data: {clean: {max_ratio: 0.5}}", "max_ratio is 0.5"),
    ("model: {d_k: 0}", "d_k is 0"),
    ("model: {dropout: 1.5}", "dropout is 1.5"),
    ("optimizer: {scale: .nan}", "'.nan' is not a number"),
    ("optimizer: {scale: -.inf}", "'-.inf' is not a number"),
    ("optimizer: {scale: 1e999}", "inf is not a finite number"),
    ("optimizer: {scale: 1" + 400 * "0" + "}", "is not a finite number"),
    ("training: {steps: 1" + 400 * "0" + "}", "is not a finite number"),
    ("training: {steps: 1" + 5000 * "0" + "}", "a number is too long"),
    # values that do not go together
    ("model:\n  n_heads: 7", "model: d_model 512 is not divisible by n_heads 7; give d_k and d_v"),
    (
        "model: {d_model: 51, n_heads: 3}",
        "d_model is 51, but sinusoidal positions need an even d_model",
    ),
    (
        "model: {d_model: 9, n_heads: 3, positions: rotary}",
        "d_k is 3, but rotary positions need an even size",
    ),
    ("data: {src: de}", "src and tgt are both 'de'"),
    ("data: {valid: {src: x}}", "data.valid: needs both src and tgt"),
    ("data: {valid: {demo: valid, file: x}}", "data.valid: needs exactly one of"),
    ("data: {valid: {}}", "data.valid: needs exactly one of"),
    # YAML that is none, or more than plain values
    ("name: [", "c.yaml:1: is not valid YAML"),
    ("name: x\nout: a: b", "c.yaml:2: is not valid YAML: mapping values are not allowed here"),
    (
        "training:\n  steps:60\n  seed: 1",
        "c.yaml:3: is not valid YAML: mapping values are not allowed here; is a space missing after ':'",
    ),
    ("\tname: x", "is not valid YAML: found character '\\t'"),
    ("name: a\x01b", "is not valid YAML: unacceptable character"),
    ("name: a\n--- \nname: b", "c.yaml:2: is not valid YAML"),
    ("- a", "a config must be a mapping of sections, not a list"),
    ("a word", "not a str"),
    ("a: " + "[" * 500 + "]" * 500, "nested too deeply"),
    ("name: &a x\nout: *a", "c.yaml:2: aliases (*a) are not accepted"),
    ("name: &a [*a]", "aliases (*a) are not accepted"),
    ("name: !!python/object/apply:os.system [ls]", "c.yaml:1: objects and tags"),
    ("!!python/name:os.system name: x", "c.yaml:1: objects and tags"),
    ("name: !x:str y", "objects and tags (!x:str)"),
    ("training: {steps: !!int abc}", "objects and tags"),
    (b"name: x\nout: \xff", "c.yaml:2: byte 13 of the file is not valid UTF-8"),
    ("# " + "x" * (1 << 20), "bytes, but a config may have"),
    # extends
    ("extends: 5", "extends: 5 is not a file name"),
    ('extends: "a\\nb"', "is not a file name"),
    (
        "extends: c.yaml",
        "c.yaml:1: extends: more than 100 files extend one another, perhaps in a circle",
    ),
    (
        "extends: nope.yaml",
        "c.yaml:1: extends: nope.yaml: not found; give a path to a YAML file or one of the shipped configs",
    ),
    ("extends: " + 300 * "x", "not found"),
    # names that no file can have
    ('name: "a\\0b"', r"c.yaml:1: name: 'a\x00b' holds U+0000, which no file name can contain"),
    ('data: {store: "\\ud800"}', r"c.yaml:1: data.store: '\ud800' holds U+D800"),
    ('data: {train: [{file: "\\0"}]}', "data.train[0].file: "),
]


@mark.parametrize("text, complaint", BAD, ids=lambda value: repr(value[:40]))
def test_bad_text_is_refused_in_one_line(load: Loader, text: str | bytes, complaint: str) -> None:
    with raises(UserError) as caught:
        load(text)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@mark.parametrize(
    "override, complaint",
    [
        ("training.steps", "'training.steps' is not of the form section.key=value"),
        ("=5", "is not of the form section.key=value, without spaces"),
        ("training.steps=1,000", "write 1000 or 0.5"),
        ("Training.steps=5", "is not of the form"),
        ("training..steps=5", "is not of the form"),
        ("training.stesp=5", "command line: training.stesp: unknown key; did you mean steps?"),
        ("training.steps=", "command line: training.steps: '' is not an integer"),
        ("training.steps=-5", "command line: training.steps is -5"),
        ("training=5", "command line: training: 5 is not a section"),
        ("steps=10", "command line: steps: unknown setting; it is training.steps here"),
        ("device=cuda", "not one of auto, cpu; did you mean auto, which takes the GPU?"),
        ("data.train.0.src=x", "data.train: {'0': {'src': 'x'}} is not a list"),
        ("name=a, b: c", "quote it"),
        ("name=a\nb: c", "command line, name:2: is not valid YAML"),
        ("name=\x01", "command line, name: is not valid YAML"),
        ("name=*x", "aliases"),
        ("name={a: 1, a: 2}", "key 'a' is given twice"),
        ("extends=base.yaml", "extends: unknown key"),
        ('out="a\\0b"', r"command line: out: 'a\x00b' holds U+0000"),
    ],
)
def test_bad_overrides_are_refused_in_one_line(load: Loader, override: str, complaint: str) -> None:
    with raises(UserError) as caught:
        load("", override)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@mark.parametrize(
    "name, complaint",
    [
        (
            "missing.yaml",
            "missing.yaml: not found; give a path to a YAML file or one of the shipped configs: ",
        ),
        (".", "is a folder"),
        ("no/such/base.yaml", "no/such/base.yaml: not found"),
    ],
)
def test_a_config_that_is_not_there(name: str, complaint: str) -> None:
    with raises(UserError) as caught:
        load_config(name)
    assert complaint in str(caught.value)
    assert all(shipped in str(caught.value) for shipped in SHIPPED)


# ---- layers -----------------------------------------------------------------------------------------------------


def test_overrides_win_over_the_file_and_later_over_earlier(load: Loader) -> None:
    config = load(
        "training: {steps: 5, log_every: 7}",
        "training.steps=6",
        "training.steps=8",
        "optimizer.eps=1e-7",
        "model={d_model: 64, n_heads: 2}",
        "name='12'",
        "out=~/runs/a:b",
        "data.train=[{demo: train}]",
    )
    assert (config.training.steps, config.training.log_every, config.optimizer.eps) == (8, 7, 1e-7)
    assert (config.model.d_model, config.model.n_heads, config.model.d_ff) == (
        64,
        2,
        ModelConfig().d_ff,
    )
    assert (config.name, config.out) == ("12", "~/runs/a:b")
    assert config.data.train == (CorpusConfig(demo="train"),)


@mark.parametrize("order", [1, -1])
def test_a_preset_replaces_no_setting_that_is_given_beside_it(order: int) -> None:
    given = ["decoding.beam=9", "decoding.preset=fairseq"][::order]
    decoding = load_config("base.yaml", given).decoding
    assert (decoding.beam, decoding.preset) == (9, "fairseq")
    assert override_config(RunConfig(), given).decoding == decoding


def test_extends_a_relative_file_then_a_shipped_one(load: Loader, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/middle.yaml").write_text(
        "extends: base.yaml\nmodel: {dropout: 0.25, n_layers: 3}\n"
    )
    config = load("extends: sub/middle.yaml\nmodel: {n_layers: 2}\n", "model.d_ff=64")
    base = load_config("base.yaml")
    assert config == dataclasses.replace(
        base, model=dataclasses.replace(base.model, dropout=0.25, n_layers=2, d_ff=64)
    )


def test_extends_names_the_file_of_the_mistake(load: Loader, tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("\n\ntraining: {stesp: 3}\n")
    with raises(UserError, match=r"parent\.yaml:3: training\.stesp"):
        load("extends: parent.yaml\nname: x")


def test_extends_in_a_chain(load: Loader, tmp_path: Path) -> None:
    for i in range(1, 200):
        (tmp_path / f"{i}.yaml").write_text(f"extends: {i + 1}.yaml")
    (tmp_path / "100.yaml").write_text("name: x")
    assert load("extends: 1.yaml").name == "x"
    (tmp_path / "100.yaml").write_text("extends: 101.yaml")
    complaint = r"100\.yaml:1: extends: more than 100 files extend one another"
    with raises(UserError, match=complaint):
        load("extends: 1.yaml")


def test_a_corpus_of_another_kind_replaces_the_inherited_one(load: Loader, tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(
        "data:\n  valid: {dataset: d, split: validation}\n  test: {demo: test}\n"
    )
    config = load(
        "extends: parent.yaml\ndata: {valid: {split: dev}}", "data.test.src=a", "data.test.tgt=b"
    )
    assert config.data.valid == CorpusConfig(dataset="d", split="dev")
    assert config.data.test == CorpusConfig(src="a", tgt="b")
    config = load(
        "extends: parent.yaml\ndata: {test: {archive: a.tgz, src: x, tgt: y}}",
        "data.valid={dataset: e}",
        "data.test={src: b, tgt: c}",
    )
    assert (config.data.valid, config.data.test) == (
        CorpusConfig(dataset="e"),
        CorpusConfig(src="b", tgt="c"),
    )


def test_a_path_is_taken_before_a_shipped_name(load: Loader, tmp_path: Path) -> None:
    assert find_config("base.yaml") == find_shipped_configs() / "base.yaml"
    (tmp_path / "base.yaml").write_text("name: mine")
    assert load_config("base.yaml").name == "mine"


@mark.parametrize("name", SHIPPED)
def test_shipped_configs_load_and_dump(load: Loader, name: str) -> None:
    config = load_config(name)
    assert config.name == Path(name).stem
    assert load(format_config(config)) == config


@mark.parametrize("name", RETELLINGS)
def test_retellings_load_by_their_bare_names_and_dump(load: Loader, name: str) -> None:
    assert find_config(name) == find_shipped_configs() / "retellings" / name
    assert load(format_config(load_config(name))) == load_config(name)
    assert name not in SHIPPED


def test_the_paper_is_shipped() -> None:
    assert {
        "base.yaml",
        "big.yaml",
        "base-enfr.yaml",
        "big-enfr.yaml",
        "base-released.yaml",
        "big-released.yaml",
        "demo.yaml",
        "multi30k.yaml",
    } <= set(SHIPPED)


# ---- dumps and differences --------------------------------------------------------------------------------------


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, exclude_max=True, allow_subnormal=False)


COUNTS = st.integers(1, 2**40)
CHARACTERS = st.characters(
    exclude_categories=["Cs"], exclude_characters="\0"
)  # what a name may hold
WORDS = st.text(CHARACTERS, max_size=12).filter(
    lambda word: "{src}" not in word and "{tgt}" not in word  # a loaded name has neither
) | st.sampled_from(["no", "on", "null", "~", "1e5", "08", "1_0", ".5", "0x1", "12:30", "<<"])
CORPORA = st.one_of(
    st.builds(CorpusConfig, src=WORDS, tgt=WORDS).filter(lambda corpus: corpus.src != corpus.tgt),
    st.builds(CorpusConfig, file=WORDS),
    st.builds(CorpusConfig, dataset=WORDS, subset=st.none() | WORDS, split=WORDS),
    st.builds(CorpusConfig, demo=st.sampled_from(["train", "valid", "test"])),
)
CONFIGS = st.builds(
    RunConfig,
    name=WORDS,
    out=WORDS,
    seed=st.integers(0, 2**31 - 1),
    data=st.builds(
        DataConfig,
        src=WORDS.filter(lambda word: word != "de"),
        root=WORDS.filter(lambda word: not word.startswith("~")),
        train=st.lists(CORPORA, max_size=3).map(tuple),
        valid=st.none() | CORPORA,
    ),
    model=st.builds(ModelConfig, tied=st.sampled_from([True, False, "decoder", "embeddings"])),
    optimizer=st.builds(OptimizerConfig, eps=numbers(1e-300, 1e18), beta2=numbers(0, 1)),
    training=st.builds(
        TrainingConfig, steps=COUNTS, checkpoint_minutes=st.none() | numbers(1e-9, 1e18)
    ),
)


@settings(max_examples=25, derandomize=True, database=None)
@given(config=CONFIGS)
def test_a_dump_reads_back_to_an_equal_config(
    tmp_path_factory: TempPathFactory, config: RunConfig
) -> None:
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(format_config(config), encoding="utf-8", newline="")
    assert load_config(str(path)) == config
    assert override_config(config, []) == config


def test_a_recorded_setting_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    text = format_config(RunConfig()).replace("\ntraining:\n", "\ntraining:\n  engine: keep\n")
    path.write_text(text)
    line = text.splitlines().index("  engine: keep") + 1
    with raises(UserError) as caught:
        load_recorded_config(path)
    expected = f"{path}:{line}: training.engine: unknown key; {OF_ANOTHER_VERSION}"
    assert str(caught.value) == expected


def test_changed_applies_overrides_to_a_config() -> None:
    config = override_config(RunConfig(), ["decoding.beam=1", 'data.test={file: "x.{src}.tsv"}'])
    assert config == dataclasses.replace(
        RunConfig(),
        decoding=DecodingConfig(beam=1),
        data=DataConfig(test=CorpusConfig(file="x.en.tsv")),
    )
    with raises(UserError, match="beam is 0"):
        override_config(config, ["decoding.beam=0"])


@mark.parametrize("setting", ["temperature=5", "top_k=5", "top_p=0.5"])
def test_a_setting_of_sampling_is_refused_where_nothing_is_sampled(
    setting: str, tmp_path: Path
) -> None:
    fault = f"decoding.{setting.replace('=', ' is ')}, but it has no effect without decoding.sample"
    given = f"decoding.{setting}"
    with raises(UserError, match=fault):
        override_config(RunConfig(), [given])
    with raises(UserError, match=fault):
        load_config("demo.yaml", [given])
    config = override_config(RunConfig(), [given, "decoding.sample=true"])
    assert config != override_config(RunConfig(), ["decoding.sample=true"])

    # what a model was trained with is no mistake of the command that uses it
    recorded = override_config(config, ["decoding.sample=false"])
    path = tmp_path / "config.yaml"
    path.write_text(format_config(recorded))
    assert load_recorded_config(path) == load_config(str(path)) == recorded
    assert override_config(recorded, ["decoding.beam=1"]).decoding.beam == 1
    usual = ["decoding.temperature=1", "decoding.top_k=null", "decoding.top_p=1"]
    assert override_config(recorded, usual) == RunConfig()


def test_differences_names_what_makes_another_run() -> None:
    old = RunConfig()
    new = override_config(
        old,
        [
            "model.d_model=256",
            "seed=2",
            "data.valid={demo: valid}",
            "training.steps=7",
            "decoding.beam=1",
            "out=elsewhere",
        ],
    )  # these may change
    assert sorted(list_differences(old, new)) == [
        "data.valid.demo: None -> valid",
        "model.d_model: 512 -> 256",
        "seed: 1 -> 2",
    ]
    assert list_differences(old, old) == []
    assert "training.steps: 100000 -> 7" in list_differences(old, new, ignored=())


def test_free_keys_are_keys() -> None:
    """A misspelt key would never allow a change."""
    for key in CHANGEABLE_KEYS:
        section: object = RunConfig()
        for part in key.split("."):
            section = getattr(section, part)


def test_names_of_corpora_follow_the_languages(tmp_path: Path) -> None:
    config = load_config("multi30k.yaml", ["data.src=de", "data.tgt=fr"]).data
    for corpus, split in (
        (config.train[0], "train"),
        (config.valid, "valid"),
        (config.test, "test"),
    ):
        assert corpus is not None and (corpus.src, corpus.tgt) == (f"{split}.de", f"{split}.fr")
    path = tmp_path / "c.yaml"
    path.write_text(
        'data: {src: nl, tgt: cs, train: [{archive: "{src}-{tgt}.tgz", src: a, tgt: b}, '
        '{dataset: wmt, subset: "{tgt}-{src}"}]}'
    )
    archive, dataset = load_config(str(path)).data.train
    assert (archive.archive, dataset.subset) == ("nl-cs.tgz", "cs-nl")


# ---- tags ---------------------------------------------------------------------------------------------------------

TAGGED = "data: {train: [{src: a, tgt: b, tag: <de>}], valid: {src: c, tgt: d, tag: <de>}}"


def test_tags_are_those_of_the_training_corpora(load: Loader) -> None:
    config = load(TAGGED, "decoding.tag=<fr>")
    assert config.data.train_tags == ["<de>"]
    assert config.dev_decoding.tag == "<de>" and config.decoding.tag == "<fr>"
    assert load("data: {valid: {src: a, tgt: b}}", "decoding.tag=<fr>").dev_decoding.tag is None
    assert load(TAGGED, "data.valid.tag=<it>", "vocab.user_symbols=[<it>]")
    assert load(TAGGED, "data.valid.tag=<it>", "vocab.model=has-it.model")


@mark.parametrize(
    "override, complaint",
    [
        (
            "data.valid.tag=<it>",
            "data.valid.tag is '<it>', but no corpus of data.train has this tag",
        ),
        (
            "data.train=[{src: a, tgt: b, tag: de}]",
            "tag is 'de'; enclose it in punctuation, such as <de>",
        ),
        ("data.train=[{src: a, tgt: b, tag: '<d e>'}]", "'<d e>' cannot be a symbol"),
        ("data.train=[{src: a, tgt: b, tag: ''}]", "'' cannot be a symbol"),
        ("data.train=[{src: a, tgt: b, tag: </s>}]", "'</s>' is reserved in every vocabulary"),
        ("vocab.user_symbols=[a b]", "user_symbols: 'a b' cannot be a symbol"),
        ("vocab.user_symbols=[<a>, <a>]", "user_symbols names a symbol twice"),
    ],
)
def test_what_cannot_be_a_tag_or_a_weight_is_refused(
    load: Loader, override: str, complaint: str
) -> None:
    with raises(UserError, match=re.escape(complaint)):
        load(TAGGED, override)


def test_a_temperature_does_not_go_with_weights(load: Loader) -> None:
    with raises(UserError, match="temperature is given, but a corpus has a weight"):
        load(TAGGED, "data.temperature=2", "data.train=[{src: a, tgt: b, weight: 2}]")
