"""nmt-eval as its users meet it: its numbers are sacreBLEU's own, and what is refused leaves no trace.

One toy run is trained for the module; a test that writes into it takes a copy. Digests are of the
files. Resamples are few, except where their number is the point.
"""

import os
import re
import shutil
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import sacrebleu
from pytest import MonkeyPatch, approx, fixture, mark, raises
from sacrebleu.dataset import DATASETS
from sacrebleu.metrics.bleu import BLEU
from support.capture import Capture, read_errors, read_stderr
from support.in_process import succeed
from support.text_lines import join_lines
from support.toy_corpus import sentences

from nmt import known_test_sets
from nmt.commands.average import main as nmt_average
from nmt.commands.eval import main as nmt_eval
from nmt.commands.train import main as nmt_train
from nmt.commands.translate import main as nmt_translate
from nmt.config_files import format_config, load_config
from nmt.corpus import test_sets as testsets
from nmt.corpus.demo import generate_pairs
from nmt.evaluate import evaluation, known_text, systems
from nmt.known_test_sets import KnownSet, KnownSubset
from nmt.score.metrics import compute_score, find_paper_metric, list_metrics
from nmt.score.significance import compare_systems, estimate_spread
from nmt.system.files import digest_file, read_json, seal
from nmt.system.run_folder import dev_text_file
from nmt.system.strict_json import Fields
from nmt.system.tables import format_interval

N_BOOTSTRAP = evaluation.N_BOOTSTRAP  # as shipped
FEW = 40
ENGLISH, GERMAN = (list(side) for side in zip(*islice(generate_pairs("train"), 3003), strict=True))
TOY = """
name: toy
seed: 2
out: {folder}/run
data:
  root: {folder}
  store: {folder}/store
  workers: 1
  train: [{{src: train.en, tgt: train.de}}]
  valid: {{src: valid.en, tgt: valid.de}}
  test: {{src: test.en, tgt: test.de}}
vocab: {{size: 80}}
model: {{d_model: 32, d_ff: 64, n_heads: 2, n_layers: 1, dropout: 0.0}}
optimizer: {{warmup_steps: 20, scale: 0.3}}
decoding: {{beam: 1, max_extra: 5}}
training:
  steps: 60
  src_tokens: 800
  tgt_tokens: 800
  micro_tokens: 800
  precision: fp32
  validate_every: 1000
  checkpoint_every: 20
  checkpoint_minutes: null
"""


@fixture(scope="module")
def ground(module_path: Path) -> Path:
    """{valid,test}.{en,de} and a run of 60 updates, saved every 20, that has learned a few words."""
    folder = module_path
    for seed, (split, n) in enumerate((("train", 400), ("valid", 20), ("test", 30))):
        drawn = sentences(n, seed)
        for side, language in enumerate(("en", "de")):
            put(folder / f"{split}.{language}", [pair[side] for pair in drawn])
    (folder / "toy.yaml").write_text(TOY.format(folder=folder))
    succeed(nmt_train, "--config", folder / "toy.yaml")
    return folder


@fixture
def run(ground: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ground / "run", tmp_path / "run", symlinks=True))


@fixture(autouse=True)
def quick_and_offline(monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    """Few resamples, no network, no cache of sacreBLEU's."""
    monkeypatch.setattr(evaluation, "N_BOOTSTRAP", FEW)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("SACREBLEU_SEED", raising=False)
    for name in ("wmt14", "wmt14/full"):
        monkeypatch.setattr(DATASETS[name], "_outdir", str(tmp_path / "cache" / name))


def list_checkpoints(run: Path) -> list[Path]:
    """Those of updates 20, 40 and 60."""
    return sorted((run / "checkpoints").glob("step-*"))


def put(path: Path, lines: list[str]) -> str:
    path.write_bytes(join_lines(lines).encode())
    return str(path)


def lines_of(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\n")[:-1]


def evaluate(tmp_path: Path, *words: str | Path) -> Fields:
    """The JSON of an evaluation that must succeed."""
    succeed(nmt_eval, *words, "--json", tmp_path / "scores.json")
    return read_json(tmp_path / "scores.json")


def read_records(run: Path) -> list[Fields]:
    return read_json(run / "results.json")


def get_refusal(capsys: Capture, *words: str | Path) -> str:
    """The one line of a refusal."""
    capsys.readouterr()
    code = nmt_eval([*map(str, words)])
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert code == 2 and out == "" and len(errors) == 1, (code, out, err)
    return errors[0].removeprefix("nmt-eval: error: ")


def bleu(hypotheses: list[str], references: list[str]) -> float:
    return sacrebleu.corpus_bleu(hypotheses, [references]).score


# ---- a file of translations ---------------------------------------------------------------------------------------


def good(n: int) -> list[str]:
    """A word is missing in each third line."""
    return [" ".join(line.split()[1:]) if i % 3 == 0 else line for i, line in enumerate(GERMAN[:n])]


@mark.parametrize("language", ["de", "fr"])
def test_the_ladder_has_every_metric(language: str, tmp_path: Path, capsys: Capture) -> None:
    """tests/score holds each of them against outside truths."""
    references = put(tmp_path / "ref.txt", GERMAN[:12])
    hypotheses = put(tmp_path / "out.txt", good(12))
    files = ("--hypotheses", hypotheses, "--ref", references)
    found = evaluate(tmp_path, *files, "--ladder", f"data.tgt={language}")
    pair = f"en-{language}"
    assert (found["pair"], found["sentences"], found["system"]) == (pair, 12, hypotheses)
    assert not found.keys() & {"filtered", "verdict", "checkpoint"}
    out = capsys.readouterr().out
    label = f"ref.txt#{digest_file(Path(references))[:8]}"
    for score, metric in zip(found["scores"], list_metrics(language), strict=True):
        truth = compute_score(metric, good(12), GERMAN[:12], label, pair, FEW)
        assert score == asdict(truth)
        line = rf"  {re.escape(metric.name)} +{truth.value:.2f} +{truth.format_interval()} +"
        assert re.search(rf"^{line}{re.escape(truth.signature)}$", out, re.MULTILINE), out
    readings = [line for line in out.splitlines() if line.startswith("    BLEU")]
    (likeliest,) = [line for line in readings if line.endswith("and the verdict's")]
    assert likeliest.startswith(f"    {find_paper_metric(language).name}: ")


def test_the_headline_and_its_interval_by_default(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "N_BOOTSTRAP", N_BOOTSTRAP)
    texts, gold = good(12), GERMAN[:12]
    files = ("--hypotheses", put(tmp_path / "h", texts), "--ref", put(tmp_path / "r", gold))
    found = evaluate(tmp_path, *files)["scores"]
    assert [score["name"] for score in found] == ["BLEU", "chrF2"]
    direct: Any = BLEU().corpus_score(texts, [gold], n_bootstrap=1000)
    interval = (direct._mean - direct._ci, direct._mean + direct._ci)
    assert (found[0]["low"], found[0]["high"]) == approx(interval)
    with_source = evaluate(tmp_path, *files, "--src", put(tmp_path / "s", ENGLISH[:12]))["scores"]
    for score, other in zip(found, with_source, strict=True):
        assert score["value"] == other["value"]


def test_it_says_so_when_two_are_the_same_text(tmp_path: Path, capsys: Capture) -> None:
    same, copy = put(tmp_path / "same", GERMAN[:20]), put(tmp_path / "copy", GERMAN[:20])
    other = put(tmp_path / "other", good(20))
    for files in (
        ("--hypotheses", same, "--ref", other, "--ref", copy),
        ("--hypotheses", other, "--src", same, "--ref", copy),
    ):
        evaluate(tmp_path, *files)
        note = f"note: {same} and {copy} are the same text, line for line"
        assert read_errors(capsys)[-1] == note
    evaluate(tmp_path, "--hypotheses", same, "--ref", other)
    assert read_stderr(capsys) == ""


@mark.parametrize(
    "n, gold, message",
    [
        (39, 40, "39 translations cannot be scored against 40 references"),
        (
            2737,
            3003,
            "2,737 is the size of sacreBLEU's filtered wmt14, 3,003 that of newstest2014 in full",
        ),
        (40, 40, "BPE was left in"),
    ],
)
def test_what_cannot_be_scored_rightly_is_refused_and_forced(
    n: int, gold: int, message: str, tmp_path: Path, capsys: Capture
) -> None:
    """tests/score/test_text_checks.py has every kind of damage. Lists of unequal length have no score."""
    texts = good(n) if n < gold else [f"▁{line}" for line in good(n)]
    hypotheses = put(tmp_path / "out.txt", texts)
    files = ("--hypotheses", hypotheses, "--ref", put(tmp_path / "ref.de", GERMAN[:gold]))
    put(tmp_path / "old.json", ["of yesterday"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for json_file in ("new.json", "old.json"):
        for option in ("--ladder", "--force") if n < gold else ("--ladder",):
            line = get_refusal(capsys, *files, option, "--json", tmp_path / json_file)
            assert message in line and f"{hypotheses}:" in line
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    if n == gold:
        found = evaluate(tmp_path, *files, "--force")
        assert found["scores"][0]["value"] == bleu(texts, GERMAN[:n]) > 0
        out, err = capsys.readouterr()
        assert "warning: " in err and message in err and "warning" not in out


# ---- a checkpoint -------------------------------------------------------------------------------------------------


def test_what_was_scored_of_a_run_stands_in_its_results(
    run: Path, ground: Path, tmp_path: Path, capsys: Capture
) -> None:
    checkpoint, output = run / "checkpoints" / "step-0000060", tmp_path / "out.txt"
    found = evaluate(tmp_path, run, "--output", output)
    assert f"next: nmt-report {os.path.relpath(run)}, for" in read_stderr(capsys)
    [record] = read_records(run)
    assert found["scores"][0]["value"] == bleu(lines_of(output), lines_of(ground / "test.de")) > 1
    expected = {
        "scores": found["scores"],
        "hypotheses_sha256": digest_file(output),
        "weights_sha256": digest_file(checkpoint / "model.safetensors"),
        "vocab_sha256": digest_file(checkpoint / "vocab.model"),
        "test_set": {
            "name": f"test.en+test.de#{digest_file(ground / 'test.de')[:8]}",
            "lines": 30,
            "src_sha256": digest_file(ground / "test.en"),
            "ref_sha256": digest_file(ground / "test.de"),
        },
        "checkpoint": "step-0000060",
        "step": 60,
        "averaged": [],
        "engine": "nmt",
    }
    assert record | expected == record
    assert record["decoding"] | {"beam": 1, "max_extra": 5} == record["decoding"]
    assert record["versions"]["sacrebleu"] == sacrebleu.__version__
    assert record["when"].endswith("+00:00")
    assert (found["checkpoint"], found["engine"], found["ensemble"]) == (str(checkpoint), "nmt", [])


def test_a_record_names_the_folder_itself(run: Path, monkeypatch: MonkeyPatch) -> None:
    """`last` is another one tomorrow, and `.` is none at all."""
    monkeypatch.chdir(run / "checkpoints" / "step-0000040")
    for name in (str(run / "checkpoints" / "last"), "."):
        succeed(nmt_eval, name)
    records = read_records(run)
    assert [record["checkpoint"] for record in records] == ["step-0000060", "step-0000040"]


def test_the_card_of_an_average_carries_its_scores(run: Path, capsys: Capture) -> None:
    """What else it says, and when it is left alone, is in test_card.py."""
    succeed(nmt_average, run, "--last", "2")
    card = run / "average" / "README.md"
    succeed(nmt_eval, run / "average", "--ladder")
    [record] = read_records(run)
    text = card.read_text()
    assert record["averaged"] == ["step-0000040", "step-0000060"]
    for score in record["scores"]:
        interval = format_interval(score["low"], score["high"])
        assert f"{score['name']} {score['value']:.2f} | {interval} |" in text
    card.write_text(text.replace("# toy", "# My own words"))
    capsys.readouterr()
    succeed(nmt_eval, run / "average", "decoding.beam=2")
    out, err = capsys.readouterr()
    assert "BLEU" in out and err.count("warning: ") == 1 and f"{card}: was edited" in err
    assert len(read_records(run)) == 2


@mark.parametrize("kind", ["alone", "ensemble", "file"])
def test_what_is_not_one_system_of_a_run_records_nothing(
    kind: str, run: Path, ground: Path, tmp_path: Path, capsys: Capture
) -> None:
    _, first, last = list_checkpoints(run)
    words: list[str | Path] = [last, "--ensemble", first]
    if kind == "alone":
        words = [shutil.copytree(last, tmp_path / "alone" / "model")]
    elif kind == "file":
        hypotheses = shutil.copy(ground / "test.de", run / "out.txt")
        words = ["--hypotheses", hypotheses, "--ref", ground / "test.de"]
    before = set(tmp_path.rglob("*"))
    found = evaluate(tmp_path, *words)
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "scores.json"}
    assert found["sentences"] == 30
    assert found.get("ensemble", []) == [str(first)] * (kind == "ensemble")
    assert "results" not in read_stderr(capsys)


@mark.parametrize("fault", ["damaged", "no file can be made", "a bug"])
def test_a_score_is_told_though_its_record_cannot_be_written(
    fault: str, run: Path, tmp_path: Path, capsys: Capture, monkeypatch: MonkeyPatch
) -> None:
    results, lock = run / "results.json", run / ".results.lock"
    warning = "not recorded, because of a bug"
    if fault == "damaged":
        results.write_text("{half of")
        warning = str(results)
    elif fault == "no file can be made":
        lock.mkdir()
        warning = str(lock)
    else:
        monkeypatch.setattr(evaluation, "add_result", None)
    found = evaluate(tmp_path, run)
    out, err = capsys.readouterr()
    assert f"{found['scores'][0]['value']:.2f}" in out
    assert err.startswith("warning: ") and err.count("\n") == 1 and warning in err
    assert results.read_text() == "{half of" if fault == "damaged" else not results.exists()


# ---- two, and several ---------------------------------------------------------------------------------------------


@mark.parametrize("seed", [None, "777"])
def test_the_difference_of_two_files(
    seed: str | None, tmp_path: Path, capsys: Capture, monkeypatch: MonkeyPatch
) -> None:
    """Its figures are sacreBLEU's: tests/score/test_significance.py."""
    # As shipped there are as many trials as the sacrebleu command line makes.
    assert compare_systems.__defaults__[:2] == (1_000, 10_000)  # type: ignore[index]
    few_trials = partial(compare_systems, n_bootstrap=200, n_randomisation=300)
    monkeypatch.setattr(evaluation, "compare_systems", few_trials)
    if seed:
        monkeypatch.setenv("SACREBLEU_SEED", seed)
    gold, a = GERMAN[:24], good(24)
    b = [line if i % 4 else " ".join(line.split()[:-1]) for i, line in enumerate(gold)]
    names = (put(tmp_path / "a", a), put(tmp_path / "b", b))
    found = evaluate(tmp_path, "--compare", *names, "--ref", put(tmp_path / "ref", gold))
    expected = few_trials(BLEU(), a, b, [gold], seed=int(seed or 12345))
    assert found["comparison"] == asdict(expected)
    assert [score["value"] for score in found["scores"]] == [bleu(a, gold), bleu(b, gold)]
    out = capsys.readouterr().out
    for line in (
        f"difference {expected.b - expected.a:+.2f}",
        f"p = {expected.p_bootstrap:.4f} by paired bootstrap, 200",
        f"p = {expected.p_randomisation:.4f} by approximate randomisation, 300",
    ):
        assert line in out
    damaged = put(tmp_path / "damaged", [" ".join(line.split()[::-1]) for line in gold])
    for compared, words in (
        ((names[0], names[0]), " not significant: "),
        ((damaged, names[0]), " significant at p < 0.05: the second system is better"),
        ((names[0], damaged), " significant at p < 0.05: the first system is better"),
    ):
        evaluate(tmp_path, "--compare", *compared, "--ref", tmp_path / "ref")
        assert words in capsys.readouterr().out


def test_a_checkpoint_is_compared_on_source_and_reference(
    run: Path, ground: Path, capsys: Capture
) -> None:
    test = ground / "test.de"
    assert "there is nothing to translate; give --src FILE" in get_refusal(
        capsys, "--compare", run, test, "--ref", test
    )


def change_config(checkpoint: Path, *settings: str) -> None:
    config = load_config(str(checkpoint / "config.yaml"), settings)
    (checkpoint / "config.yaml").write_text(format_config(config))
    seal(checkpoint)


def test_systems_on_different_test_sets_are_not_compared(
    run: Path, ground: Path, tmp_path: Path, capsys: Capture
) -> None:
    _, first, second = list_checkpoints(run)
    lines = lines_of(ground / "test.de")
    put(ground / "other.de", [*lines[:-1], "ein hund"])  # as many lines
    change_config(second, "data.test.tgt=other.de")
    json_file = tmp_path / "scores.json"
    line = get_refusal(capsys, "--compare", first, second, "--json", json_file)
    assert "test.en + other.de" in line and "test.en + test.de" in line and "--test-set" in line
    assert not json_file.exists() and not (run / "results.json").exists()


def test_mean_and_spread_of_several(run: Path, tmp_path: Path, capsys: Capture) -> None:
    checkpoints = list_checkpoints(run)
    found = evaluate(tmp_path, *checkpoints)
    records = read_records(run)
    assert [record["step"] for record in records] == [20, 40, 60]
    assert [score for record in records for score in record["scores"]] == found["scores"]
    values = [score["value"] for score in found["scores"]]
    spread = estimate_spread(values)
    assert len(set(values)) == 3 and found["spread"] == asdict(spread)
    out = capsys.readouterr().out
    assert f"mean {spread.mean:.2f}, standard deviation {spread.std:.2f}" in out
    assert format_interval(spread.low, spread.high) in out
    for path, value in zip(checkpoints, values, strict=True):
        assert re.search(rf"^  {re.escape(str(path))} +{value:.2f}  .* to .*$", out, re.MULTILINE)
    assert "same weights" in get_refusal(capsys, run, checkpoints[-1])


# ---- test sets that are known -------------------------------------------------------------------------------------

DROPPED = (range(3, 5), range(20, 22))
KEPT = [i for i in range(30) if i not in (3, 4, 20, 21)]


@fixture
def known(ground: Path, monkeypatch: MonkeyPatch) -> None:
    """The toy's test set in the place of newstest2014, with four lines that the filtered one has
    not.
    """
    digests = {language: digest_file(ground / f"test.{language}") for language in ("en", "de")}
    subset = KnownSubset("wmt14", ("en", "de"), DROPPED)
    toy = KnownSet("newstest2014", "wmt14/full", 30, (digests,), subset=subset)
    monkeypatch.setattr(testsets, "KNOWN_SETS", (toy,))


@mark.usefixtures("known")
@mark.parametrize("is_file", [False, True])
def test_the_full_set_is_followed_by_the_filtered_one(
    is_file: bool, run: Path, ground: Path, tmp_path: Path, capsys: Capture
) -> None:
    output, gold = tmp_path / "out.txt", lines_of(ground / "test.de")
    succeed(nmt_eval, run, "--output", output)
    words = ("--hypotheses", output, "--ref", ground / "test.de") if is_file else (run,)
    capsys.readouterr()
    found, texts = evaluate(tmp_path, *words, "--ladder"), lines_of(output)
    for scores, numbers, name in (
        (found["scores"], range(30), "newstest2014"),
        (found["filtered"], KEPT, "newstest2014-filtered"),
    ):
        assert len(scores) == 11
        assert scores[0]["value"] == bleu([texts[i] for i in numbers], [gold[i] for i in numbers])
        for score in scores:
            assert f"|test:{name}|" in score["signature"]
            assert f"|lines:{len(numbers)}|" in score["signature"]
    out, err = capsys.readouterr()
    assert "on the 26 of these lines that sacreBLEU's wmt14 contains; Table 2 counts all 30" in out
    assert out.count("the likeliest for Table 2") == 1 and "after filtering" not in err
    assert "filtered" not in evaluate(tmp_path, *words)
    [record] = read_records(run)
    assert all("|lines:30|" in score["signature"] for score in record["scores"])


def test_a_filtered_set_from_files_is_recognised_by_its_size(
    run: Path, ground: Path, tmp_path: Path, capsys: Capture, monkeypatch: MonkeyPatch
) -> None:
    """No digest of the filtered lines is known, so the warning says what it goes by."""
    subset = KnownSubset("wmt14", ("en", "de"), DROPPED)
    toy = KnownSet("newstest2014", "wmt14/full", 30, subset=subset)
    monkeypatch.setattr(known_test_sets, "KNOWN_SETS", (toy,))
    warned = "test.de: 26 lines, as many as newstest2014 after filtering (sacreBLEU's wmt14); if"
    for lines in (range(30), KEPT):
        for name in ("test.en", "test.de"):
            whole = lines_of(ground / name)
            put(tmp_path / name, [whole[i] for i in lines])
        files = ("--src", tmp_path / "test.en", "--ref", tmp_path / "test.de")
        capsys.readouterr()
        evaluate(tmp_path, run, *files, "--ladder")
        out, err = capsys.readouterr()
        assert (warned in err) == (lines is KEPT)
        assert ("the likeliest for Table 2" in out) == (lines is not KEPT)


@mark.usefixtures("known")
def test_a_set_by_its_name(run: Path, ground: Path, tmp_path: Path, capsys: Capture) -> None:
    root = tmp_path / "sets"
    root.mkdir()
    words = (run, "--test-set", "newstest2014", "--offline", f"data.root={root}")
    assert "newstest2014.en and newstest2014.de" in get_refusal(capsys, *words)
    for language in ("en", "de"):
        shutil.copy(ground / f"test.{language}", root / f"newstest2014.{language}")
    found = evaluate(tmp_path, *words)
    assert found["test_set"] == "newstest2014"
    assert found["scores"] == evaluate(tmp_path, run)["scores"]
    put(root / "newstest2014.de", [*lines_of(ground / "test.de")[:-1], "und"])
    line = get_refusal(capsys, *words)
    assert "newstest2014.de is not the de side of newstest2014" in line


# ---- usage --------------------------------------------------------------------------------------------------------

# What is given -> what is said of it
MISUSED = f"""
 -> give CHECKPOINT, or several, or --hypotheses FILE, or --compare A B
decoding.beam=2 -> give CHECKPOINT, or several
a --hypotheses b --ref c -> give CHECKPOINT, or several
a --compare b c -> give CHECKPOINT, or several
--hypotheses a --compare b c --ref d -> --compare: not allowed with argument --hypotheses
a --ref b --test-set c -> --test-set: not allowed with argument --ref
--hypotheses a -> --hypotheses needs --ref FILE or --test-set NAME
--hypotheses a --src b -> --hypotheses needs --ref FILE or --test-set NAME
a --src b -> give both --src and --ref
a --ref b -> give both --src and --ref
a --src b --test-set c -> give both --src and --ref
--hypotheses a --src b --test-set c -> give both --src and --ref
--compare a b --src c -> give both --src and --ref
--hypotheses a --ref b --ensemble c -> need exactly one CHECKPOINT
--hypotheses a --ref b --output c -> need exactly one CHECKPOINT
--compare a b --engine ctranslate2 -> need exactly one CHECKPOINT
--compare a b --output c -> need exactly one CHECKPOINT
a b --ensemble c -> need exactly one CHECKPOINT
a b --engine ctranslate2 -> need exactly one CHECKPOINT
--hypotheses a --ref b --verdict -> --verdict needs a CHECKPOINT
--compare a b --verdict -> --verdict needs a CHECKPOINT
a --engine ctranslate2 --ensemble b -> does not support --ensemble
a --engine ctranslate2 --verdict -> does not support --verdict
--hypotheses a --ref b decoding.beam=1 -> decoding.beam=1: has no effect on a file
--compare {__file__} {__file__} decoding.beam=9 -> decoding.beam=9: has no effect on a file
a b --ladder -> --ladder accepts only one system
--compare a b --ladder -> --ladder accepts only one system
a --engine other -> invalid choice: 'other'
--compare a -> expected 2 arguments
"""


@mark.parametrize("line", MISUSED.strip("\n").splitlines())
def test_what_does_not_go_together(line: str, capsys: Capture) -> None:
    words, message = line.split(" -> ")
    with raises(SystemExit) as left:
        nmt_eval(words.split())
    out, err = capsys.readouterr()
    *usage, said = err.splitlines()
    assert left.value.code == 2 and out == ""
    assert said.startswith("nmt-eval: error: ") and message in said
    assert not any("error" in each for each in usage)


MISTAKEN = """
--hypotheses nowhere --ref REF -> nowhere: not found; give a file of translations
--hypotheses FOLDER --ref REF -> FOLDER: cannot be read (Is a directory)
--hypotheses REF --ref nowhere -> nowhere: cannot be read
nowhere --src REF --ref REF -> nowhere: not found; give RUN
--compare REF nowhere --ref REF -> nowhere: not found; give RUN
--compare REF REF -> data.test: is not set
REF --src REF --ref REF --verdict -> REF: is a file; give translations with --hypotheses
REF --src REF --ref REF --ensemble nowhere -> REF: is a file; give translations with --hypotheses
FOLDER --src REF --ref REF training.steps=5 -> training.steps=5: was fixed by training
FOLDER --src REF --ref REF beam=5 -> beam=5: was fixed by training, or lacks its section, as in decoding.beam=4
--hypotheses REF --ref REF --json REF -> REF: is given twice, once as an output
--hypotheses REF --test-set newstest2013 --json REF -> REF: is given twice, once as an output
FOLDER --src REF --ref REF --output nowhere/a -> nowhere/a: its folder does not exist
--hypotheses REF --ref REF --json nowhere/a.json -> nowhere/a.json: its folder does not exist
--hypotheses REF --ref REF --json FOLDER -> FOLDER: is not a regular file
--hypotheses REF --ref REF data.tgt=en -> src and tgt are both 'en'
--hypotheses REF --ref REF data.test.bean=2 -> data.test.bean: unknown key
--compare REF FOLDER --ref REF decoding.bean=2 -> decoding.bean: unknown key
--hypotheses REF --test-set newstest2041 -> newstest2041
"""


@mark.parametrize("line", MISTAKEN.strip().splitlines())
def test_a_mistake_is_told_in_one_line(
    line: str, tmp_path: Path, capsys: Capture, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ref = put(tmp_path / "ref.de", GERMAN[:4])
    words, message = line.replace("REF", ref).replace("FOLDER", str(tmp_path)).split(" -> ")
    assert message in get_refusal(capsys, *words.split())
    assert {path.name for path in tmp_path.iterdir()} == {"ref.de"}


def test_what_is_read_or_belongs_to_a_run_is_not_written_over(run: Path, capsys: Capture) -> None:
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    checkpoint = run / "checkpoints" / "step-0000060"
    for file in (run / "config.yaml", run / "metrics.jsonl", checkpoint / "new.json"):
        refusal = get_refusal(capsys, run, "--json", file)
        assert "belongs to a run, a checkpoint, a store or an export" in refusal
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == kept


def test_a_corpus_is_not_written_over(
    run: Path, ground: Path, tmp_path: Path, capsys: Capture
) -> None:
    """One of the config, or of the command line."""
    for name in ("test.en", "test.de"):
        shutil.copy(ground / name, tmp_path / name.replace("test", "mine"))
    mine = (f"data.root={tmp_path}", "--test-set", "mine", "--output", tmp_path / "mine.de")
    train, valid, test = (ground / name for name in ("train.en", "valid.en", "test.de"))
    texts = [file.read_bytes() for file in (train, valid, test)]
    for words in (mine, ("--output", train), ("--json", valid), ("--output", test)):
        refusal = f"{words[-1]}: is a corpus or a test set; choose another file"
        assert get_refusal(capsys, run, *words) == refusal
    # nor by nmt-translate, which knows the run's own
    assert nmt_translate([str(run), "-i", str(ground / "test.en"), "-o", str(test)]) == 2
    message = f"nmt-translate: error: {test}: is a corpus or a test set; choose another file\n"
    assert read_stderr(capsys) == message
    assert [file.read_bytes() for file in (train, valid, test, tmp_path / "mine.de")] == [
        *texts,
        texts[-1],
    ]
    assert not (run / "results.json").exists()


def test_corpora_that_are_gone_are_no_obstacle(run: Path, ground: Path, tmp_path: Path) -> None:
    files = ("--src", str(ground / "test.en"), "--ref", str(ground / "test.de"))
    output = tmp_path / "out.de"
    evaluate(tmp_path, run, f"data.root={tmp_path}", *files, "--output", output)
    assert len(lines_of(output)) == 30


def test_a_source_in_pieces_is_named(run: Path, tmp_path: Path, capsys: Capture) -> None:
    src, ref = put(tmp_path / "a.en", ["ein@@ s zwei"] * 9), put(tmp_path / "a.de", GERMAN[:9])
    succeed(nmt_eval, run, "--src", src, "--ref", ref, "decoding.beam=1")
    assert f"warning: {src}:1: BPE was left in" in read_stderr(capsys)


def test_pipes_and_names_with_equals_signs_are_read(run: Path, tmp_path: Path) -> None:
    odd = run.rename(run.with_name("beam=1"))
    assert evaluate(tmp_path, odd)["checkpoint"].startswith(str(odd))
    names = []
    for _ in range(2):
        end, other_end = os.pipe()
        os.write(other_end, "\n".join([*GERMAN[:FEW], ""]).encode())
        os.close(other_end)
        names.append(f"/dev/fd/{end}")
    (score, _) = evaluate(tmp_path, "--hypotheses", names[0], "--ref", names[1])["scores"]
    assert score["value"] == approx(100)


def test_a_seed_that_is_none(tmp_path: Path, capsys: Capture, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("SACREBLEU_SEED", "0")
    ref = put(tmp_path / "ref.de", GERMAN[:4])
    assert "SACREBLEU_SEED is '0'" in get_refusal(capsys, "--compare", ref, ref, "--ref", ref)


# ---- the verdict, through the command -----------------------------------------------------------------------------


def test_a_run_is_judged_by_its_average(
    run: Path, ground: Path, tmp_path: Path, capsys: Capture
) -> None:
    found = evaluate(tmp_path, run, "--verdict")
    assert found["checkpoint"] == str(run / "checkpoints" / "step-0000060")
    assert any(step.startswith("averaging: none") for step in found["verdict"]["not_applied"])
    succeed(nmt_average, run, "--last", "2")
    capsys.readouterr()
    found = evaluate(tmp_path, run, "--verdict")
    out, judged = capsys.readouterr().out, found["verdict"]
    assert found["checkpoint"] == str(run / "average")
    assert any(step.startswith("averaging: 2 checkpoints") for step in judged["not_applied"])
    assert judged["outcome"] == "not comparable" and judged["paper"]["bleu"] == 27.3
    train = set(zip(lines_of(ground / "train.en"), lines_of(ground / "train.de"), strict=True))
    test = set(zip(lines_of(ground / "test.en"), lines_of(ground / "test.de"), strict=True))
    text = {"n_pairs": 400, "n_test_pairs": len(train & test), "problem": None}
    assert judged["runs"][0]["training_text"] == text
    names = [score["name"] for score in found["scores"]]
    assert names == ["BLEU", "chrF2", "BLEU tokenised, split"]
    assert judged["score"]["value"] == found["scores"][2]["value"]
    assert "verdict: not comparable because " in out and "the test set is test.en + test.de" in out
    names = [record["checkpoint"] for record in read_records(run)]
    assert names == ["step-0000060", "average"]
    # Spaces that no digest of a test set counts hide no pair.
    src, ref = (lines_of(ground / f"train.{side}")[:9] for side in ("en", "de"))
    spaced = put(tmp_path / "spaced.de", [line.replace(" ", "\u00a0") for line in ref])
    files = ("--src", put(tmp_path / "src.en", src), "--ref", spaced)
    text = evaluate(tmp_path, run, "--verdict", *files)["verdict"]["runs"][0]["training_text"]
    assert text["n_test_pairs"] == len(set(zip(src, ref, strict=True)))
    with_ladder = evaluate(tmp_path, run, "--verdict", "--ladder")
    assert len(with_ladder["scores"]) == 11 and with_ladder["verdict"]["score"] == judged["score"]


def test_the_store_must_be_the_models(run: Path, ground: Path, tmp_path: Path) -> None:
    """A copy of it is, wherever it lies; one that is damaged, or that another text went into, is not."""
    last, store = list_checkpoints(run)[-1], tmp_path / "store"
    ledger, vocab = store / "ledger.json", store / "vocab.model"

    def find_problem() -> str | None:
        judged = evaluate(tmp_path, last, "--verdict", f"data.store={store}")["verdict"]
        problem: str | None = judged["runs"][0]["training_text"]["problem"]
        if problem is not None:
            assert f"the training text cannot be checked here: {problem}" in judged["because"]
        return problem

    assert "contains no prepared data" in str(find_problem())
    shutil.copytree(ground / "store", store)
    assert find_problem() is None
    whole, pieces = ledger.read_text(), vocab.read_bytes()
    ledger.write_text(whole.replace('"kept": 400', '"kept": 500'))
    assert "its sha256 does not match" in str(find_problem())
    for text, model, problem in (
        (whole.replace('"train.en"', '"other.en"'), pieces, "other settings (data.train[0].src"),
        (
            re.sub('"store": "[0-9a-f]+"', f'"store": "{"0" * 64}"', whole),
            pieces,
            "other text than",
        ),
        (whole, pieces[::-1], "another BPE model"),
    ):
        ledger.write_text(text)
        vocab.write_bytes(model)
        seal(store)
        assert problem in str(find_problem())


def test_several_runs_are_judged_by_their_mean(run: Path, tmp_path: Path, capsys: Capture) -> None:
    """How they are judged, and what is refused, is in test_verdict.py."""
    checkpoints = list_checkpoints(run)
    assert "has the same seed as" in get_refusal(capsys, *checkpoints, "--verdict")
    for seed, checkpoint in enumerate(checkpoints):
        change_config(checkpoint, f"seed={seed}")
    judged = evaluate(tmp_path, *checkpoints, "--verdict")["verdict"]
    mean = sum(each["value"] for each in judged["runs"]) / 3
    assert judged["score"]["value"] == approx(mean)
    assert f"their mean   {mean:6.2f}  standard deviation " in capsys.readouterr().out
    assert f"{checkpoints[0]}: the end of training: 20 of 60 updates" in judged["not_applied"]
    records = [(record["step"], len(record["scores"])) for record in read_records(run)]
    assert records == [(20, 3), (40, 3), (60, 3)]


def test_runs_of_different_recipes_are_a_table_and_have_no_mean(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    """A setting of the search differs, which needs no training."""
    first, second, third = list_checkpoints(run)
    change_config(first, "decoding.max_extra=0", "training.clip_norm=0.5")
    change_config(second, "decoding.beam=2", "seed=2")
    found = evaluate(tmp_path, first, second, third)
    assert "spread" not in found and found["settings"] == {
        "decoding.beam": [1, 2, 1],
        "decoding.max_extra": [0, 5, 5],
        "training.clip_norm": [0.5, None, None],
    }
    assert [score["name"] for score in found["chrf"]] == ["chrF2"] * 3
    bleu = [score["value"] for score in found["scores"]]
    differences = [comparison["difference"] for comparison in found["comparisons"]]
    assert differences == approx([bleu[1] - bleu[0], bleu[2] - bleu[0]])
    _, head, *rows = capsys.readouterr().out.splitlines()
    columns = ["BLEU", "95", "%", "chrF2", "difference", "p", *found["settings"]]
    assert head.split() == columns
    assert rows[0].split()[-3:] == ["0.5", "1", "0"]
    assert rows[1].split()[-3:] == ["null", "2", "5"]  # as a config has it
    assert f"{differences[0]:+.2f}" in rows[1]
    assert "is a file; give translations" in get_refusal(capsys, first, put(tmp_path / "a", []))


@mark.parametrize("is_paired", [True, False])
def test_a_reference_of_another_source_is_named(
    is_paired: bool, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    draw = Random(4)
    src = [" ".join(["wort"] * draw.randint(1, 9)) for _ in range(100)]
    ref = src if is_paired else draw.sample(src, len(src))
    src_file, ref_file = put(tmp_path / "v", src), put(tmp_path / "x.de", ref)
    short = ("decoding.max_extra=1", "decoding.max_ratio=0")
    of_config = f"data.test={{src: {src_file}, tgt: {ref_file}}}"
    for words, names in (
        ((run, "--src", src_file, "--ref", ref_file, *short), "x.de"),
        ((run, of_config, *short), "x.de, reference"),
        # so are translations that were made of other lines
        (("--hypotheses", ref_file, "--ref", src_file), f"x.de and {src_file}"),
    ):
        evaluate(tmp_path, *words)
        warning = f"{names} do not look like translations of each other"
        assert (warning in read_stderr(capsys)) == (not is_paired)


@mark.parametrize("text, known", [("train", "train"), ("valid", "valid"), ("test", None)])
def test_the_models_own_text_is_named(
    text: str, known: str | None, ground: Path, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    src, ref = (
        str(shutil.copy(ground / f"{text}.{language}", tmp_path / f"some.{language}"))
        for language in ("en", "de")
    )
    scores = tmp_path / "scores.json"
    succeed(nmt_eval, run, "--src", src, "--ref", ref, "--json", scores)
    told = capsys.readouterr().out
    assert ("the model was trained on this text" in told) == (known == "train")
    assert ("; its dev set" in told) == (known == "valid")
    assert read_json(scores).get("known_text") == known


def test_a_source_that_lost_what_the_models_text_has_is_named(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: MonkeyPatch
) -> None:
    (tmp_path / dev_text_file("src")).write_text("le café\n" * 300)
    other: Any = SimpleNamespace(config=load_config("base.yaml", [f"data.store={tmp_path}"]))
    own = SimpleNamespace(corpora=())
    monkeypatch.setattr(known_text, "read_own_ledger", lambda _: own)
    read = systems.read_dev_sources
    monkeypatch.setattr(systems, "read_dev_sources", lambda _, most: read(other, most))
    for side in ("src", "ref"):
        (tmp_path / side).write_text("red dog\n" * 200)
    texts = ["--src", str(tmp_path / "src"), "--ref", str(tmp_path / "ref")]
    succeed(nmt_eval, run, *texts)
    assert "letters, but the model's dev set has some: 'red dog', in" in read_stderr(capsys)
