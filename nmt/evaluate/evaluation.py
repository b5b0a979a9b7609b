"""Computes what nmt-eval reports: the scores of one system, the difference between two, or the
spread of several.

Every evaluation takes the same steps: choose the systems, translate, check the text, score, report,
record. All systems in an evaluation share one test set. A run's scores are recorded in its
results.json.
"""

import hashlib
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from platform import python_version

import nmt
from nmt.agreement import check_agreement, check_corpus, check_sides, find_direction
from nmt.average.dev_check import find_better_member
from nmt.checkpoint.checkpoint import Checkpoint
from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.config import RunConfig
from nmt.config_files import (
    ValuesByKey,
    load_recorded_config,
    override_config,
    tabulate_differences,
    to_plain_values,
)
from nmt.corpus.reader import refuse_corpus_files
from nmt.corpus.text_files import TextFile, read_lines
from nmt.evaluate.outcome import Evaluation, Findings
from nmt.evaluate.results import (
    Result,
    ScoredTestSet,
    add_result,
    choose_headline,
    find_last_step,
    find_run,
    read_results,
)
from nmt.evaluate.scored_texts import ScoredTexts, write_scored_texts
from nmt.evaluate.systems import System, TestSetChoice, check_texts, translate_test_set
from nmt.evaluate.training_text import examine_training_text
from nmt.evaluate.verdict import SEED_RUN_KEYS, check_one_recipe, judge
from nmt.score.metrics import (
    CHRF2,
    HEADLINE,
    Metric,
    compute_score,
    find_paper_metric,
    list_metrics,
)
from nmt.score.score import Score
from nmt.score.significance import Comparison, compare_systems, estimate_spread, read_seed
from nmt.system.errors import UserError, explain_missing
from nmt.system.files import check_own_folder
from nmt.system.progress import say, track
from nmt.system.run_folder import CONFIG_FILE, MODEL_FILE, RunFolder
from nmt.translate.translator import LoadedModel, Translator, open_translator

N_BOOTSTRAP = 1_000
CardWriter = Callable[[Path, Sequence[Result]], None]  # of the folder of an average and its scores
# Settings that may be overridden: how to translate, which test set, and where things are. All others
# were fixed by training.
DATA_OVERRIDES = ("data.src=", "data.tgt=", "data.root=", "data.store=", "data.test")
OVERRIDES = ("decoding.", *DATA_OVERRIDES, "device=")


@dataclass(frozen=True)
class EvaluationRequest:
    test_set: TestSetChoice
    overrides: tuple[str, ...]
    is_forced: bool = False  # score text even if `check_texts` would refuse it
    outputs: tuple[Path, ...] = ()  # what the caller will write
    # Opens checkpoints or exported models, given their paths and the overrides.
    open_translator: Callable[[Sequence[str], Sequence[str]], LoadedModel] = open_translator


# ---- the kinds of evaluation ---------------------------------------------------------------------


def evaluate_system(
    request: EvaluationRequest,
    names: Sequence[str],
    *,
    is_text: bool = False,
    with_all_metrics: bool = False,
    with_verdict: bool = False,
) -> Evaluation:
    """Score a file of translations, a checkpoint, or an ensemble of checkpoints."""
    # choose the system and translate
    if not is_text:
        _check_folders(names)
    if with_verdict:
        names = [_choose_average(names[0]), *names[1:]]
    system = make_system(request, names, is_text)

    # score
    language = system.data.tgt
    paper_metric = find_paper_metric(language)
    metrics = [HEADLINE, CHRF2]
    if with_all_metrics:
        metrics = list_metrics(language)
    elif with_verdict:
        metrics.append(paper_metric)
    system = score_systems([system], metrics)[0]
    filtered = verdict = None
    if with_all_metrics and system.test.subset:
        filtered = compute_scores(system, metrics, system.test.subset)
    if with_verdict:
        verdict = judge(paper_metric, [system], [examine_training_text(system)])

    # report
    return Evaluation(
        [system],
        Findings(filtered=filtered, verdict=verdict),
        ladder=metrics if with_all_metrics else (),
        doubt=_doubt_average(system),
    )


def evaluate_runs(request: EvaluationRequest, names: Sequence[str]) -> Evaluation:
    """Compare several runs of one recipe, with different seeds, with the paper by their mean."""
    # refuse what cannot be judged, before hours of translation
    _check_folders(names)
    names = [_choose_average(name) for name in names]
    checkpoints = [open_checkpoint(Path(name)) for name in names]
    _check_same_data(checkpoints)
    check_one_recipe(names, checkpoints, request.overrides)

    # translate and score
    systems = make_comparable_systems(request, names)
    paper_metric = find_paper_metric(systems[0].data.tgt)
    systems = score_systems(systems, [HEADLINE, CHRF2, paper_metric])
    texts = [examine_training_text(system) for system in systems]
    return Evaluation(systems, Findings(verdict=judge(paper_metric, systems, texts)))


def _choose_average(name: str) -> str:
    """Return a run's average if it has one: the paper's results are those of averaged models."""
    average = RunFolder(Path(name)).average
    check_own_folder(average, inside=Path(name))
    return str(average) if average.is_dir() else name


def evaluate_difference(request: EvaluationRequest, names: Sequence[str]) -> Evaluation:
    """Test whether the difference between two systems is statistically significant."""
    read_seed()  # first, so that an invalid seed is refused before anything is translated
    _check_folders([name for name in names if not Path(name).is_file()])
    a, b = systems = make_comparable_systems(request, names)
    comparison = _compare(a, b)
    return Evaluation(score_systems(systems, [HEADLINE]), Findings(comparison=comparison))


def evaluate_spread(request: EvaluationRequest, names: Sequence[str]) -> Evaluation:
    """Estimate the spread of scores over runs of one recipe; tabulate runs of different ones."""
    _check_folders(names)
    systems = make_comparable_systems(request, names)
    if settings := tabulate_differences([system.config for system in systems], SEED_RUN_KEYS):
        return _tabulate_ablation(systems, settings)
    checkpoints = [system.checkpoint for system in systems]
    _check_same_data(checkpoints)
    weights = {checkpoint.sha256[MODEL_FILE] for checkpoint in checkpoints}
    if len(weights) < len(systems):
        raise UserError(
            f"{' '.join(names)}: some of these have the same weights; a spread needs different runs"
        )
    systems = score_systems(systems, [HEADLINE])
    spread = estimate_spread([system.scores[0].value for system in systems])
    return Evaluation(systems, Findings(spread=spread))


def _check_same_data(checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse runs of the same settings on other data: their scores differ by more than the seed."""
    for other in checkpoints[1:]:
        first = checkpoints[0]
        name, first_name = str(other.path), str(first.path)
        if other.vocab.digest != first.vocab.digest:
            # drawn by another seed, or learned from other text
            say(f"warning: {name} may have other data than {first_name}: its vocabulary differs")
            continue
        data, first_data = other.origin.store_sha256, first.origin.store_sha256
        remedy = "score each alone, or compare two by --compare"
        check_agreement("training data", name, data, first_name, first_data, remedy)


def _tabulate_ablation(systems: Sequence[System], settings: ValuesByKey) -> Evaluation:
    """Compare each run with the first, beside the settings in which the runs differ."""
    comparisons = [_compare(systems[0], other) for other in systems[1:]]
    systems = score_systems(systems, [HEADLINE, CHRF2])
    chrf = [system.scores[1] for system in systems]
    return Evaluation(systems, Findings(chrf=chrf, settings=settings, comparisons=comparisons))


# ---- translate and check --------------------------------------------------------------------------------------------


def make_system(request: EvaluationRequest, names: Sequence[str], is_text: bool) -> System:
    """Translate the test set with a checkpoint or an ensemble, or read translations from a file; then check them."""
    for override in request.overrides:
        if not override.startswith(OVERRIDES):
            raise UserError(
                f"{override}: was fixed by training, or lacks its section, as in decoding.beam=4; nmt-eval "
                f"accepts only {', '.join(OVERRIDES)}"
            )
    if is_text:
        data = override_config(RunConfig(), request.overrides).data
        (name,) = names
        if not request.is_forced:
            remedy = "give these as settings, such as data.tgt=fr, or rename the file"
            what = "data.src and data.tgt are"
            asked = request.test_set
            check_sides([asked.src], asked.refs, [name], what, find_direction(data), remedy)
        test = request.test_set.open(data)
        system = System(name, data, test, list(read_lines(TextFile(Path(name)))))
    else:
        model = request.open_translator(names, request.overrides)
        refuse_corpus_files(request.outputs, model.config.data, request.test_set.name)
        if not request.is_forced:
            _check_languages(model, request.test_set)
        system = translate_test_set(model, request.test_set)
    check_texts(system, request.test_set, request.is_forced)
    return system


def _check_languages(model: LoadedModel, test_set: TestSetChoice) -> None:
    """Refuse a test set of other languages than those that the model was trained for."""
    if model.config.decoding.tag is not None:  # it may choose a language
        return
    name = model.paths[0]
    data = model.config.data
    direction = find_direction(load_recorded_config(Path(name) / CONFIG_FILE).data)
    check_agreement(
        "direction",
        name,
        direction,
        "data.src and data.tgt",
        find_direction(data),
        "leave these out, or give --force if they are other names of the same languages",
    )
    check_sides([test_set.src], test_set.refs, [], f"{name} translates", direction)
    if test_set.is_of_config:
        check_corpus("data.test.", data.test, data)


def _check_folders(names: Sequence[str]) -> None:
    """Refuse what is no folder of a model: all of them before hours of translation."""
    for name in names:
        path = Path(name)
        if path.is_file():
            raise UserError(f"{name}: is a file; give translations with --hypotheses FILE")
        if not path.is_dir():
            raise explain_missing(name, "give RUN, RUN/average or RUN/checkpoints/step-...")


def make_comparable_systems(request: EvaluationRequest, names: Sequence[str]) -> list[System]:
    """Make the systems; raise UserError unless all have the same test set."""
    systems = [make_system(request, [name], Path(name).is_file()) for name in names]
    first = systems[0]
    for other in systems[1:]:
        if other.test.ref != first.test.ref or other.pair != first.pair:
            raise UserError(
                f"{other.name}: its test set is {other.test.name} ({other.pair}), but that of "
                f"{first.name} is {first.test.name} ({first.pair}); choose one for all with "
                "--test-set NAME, or --src and --ref"
            )
    return systems


# ---- score ----------------------------------------------------------------------------------------------------------


def score_systems(systems: Sequence[System], metrics: Sequence[Metric]) -> list[System]:
    return [replace(system, scores=compute_scores(system, metrics)) for system in systems]


def compute_scores(
    system: System, metrics: Sequence[Metric], lines: Sequence[int] | None = None
) -> list[Score]:
    """Score the system with each metric, on all lines or on those of sacreBLEU's filtered wmt14."""
    texts, references, name = system.texts, system.test.ref, system.test.label
    more_references = system.test.more_references
    if lines is not None:
        texts = [texts[i] for i in lines]
        references = [references[i] for i in lines]
        more_references = [[reference[i] for i in lines] for reference in more_references]
        name = f"{name}-filtered"
    return [
        compute_score(metric, texts, references, name, system.pair, N_BOOTSTRAP, more_references)
        for metric in track(metrics, "scoring", "metrics")
    ]


def _doubt_average(system: System) -> str | None:
    """Return a warning if the system is an average of a run that went on since, or is worse on the dev
    set than a member of it.
    """
    model, checkpoint = system.model, system.only_checkpoint
    if model is None or checkpoint is None or not checkpoint.averaged:
        return None
    try:
        run = find_run(checkpoint.path)
        last = find_last_step(checkpoint.path)
    except UserError:  # the record of the scores will warn of it
        return None
    if run is None or not isinstance(model.translator, Translator):
        return None
    if last > checkpoint.step:
        return f"made at update {checkpoint.step:,} of {last:,}; make it again by nmt-average"
    return find_better_member(checkpoint, model.translator.device, RunFolder(run))


def _compare(a: System, b: System) -> Comparison:
    counter = HEADLINE.make_counter()
    references = [a.test.ref, *a.test.more_references]
    return compare_systems(counter, a.texts, b.texts, references, seed=read_seed())


# ---- record ---------------------------------------------------------------------------------------------------------


def describe_system(system: System) -> tuple[Result, ScoredTexts]:
    """Describe a system and its scores, and what was scored line by line. What only one checkpoint has
    is empty for others.
    """
    test, model, checkpoint = system.test, system.model, system.only_checkpoint
    hypotheses = "".join(text + "\n" for text in system.texts)
    texts = ScoredTexts(
        checkpoint=system.recorded_name,
        test_set=test.label,
        pair=system.pair,
        hypotheses_sha256=hashlib.sha256(hypotheses.encode()).hexdigest(),
        sources=test.src,
        references=test.ref,
        translations=system.texts,
    )
    versions = {"python": python_version(), "nmt": nmt.__version__}
    versions |= {name: version(name) for name in ("torch", "sacrebleu")}
    result = Result(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        checkpoint=texts.checkpoint,
        step=0,
        averaged=[],
        weights_sha256="",
        vocab_sha256="",
        test_set=ScoredTestSet(test.label, len(test.ref), test.src_sha256, test.ref_sha256),
        pair=texts.pair,
        hypotheses_sha256=texts.hypotheses_sha256,
        decoding={} if model is None else to_plain_values(model.config.decoding),
        engine="read from a file" if model is None else model.translator.engine,
        scores=list(system.scores),
        versions=versions,
        seconds=round(system.seconds, 2),
    )
    if checkpoint is not None:
        result = replace(
            result,
            step=checkpoint.step,
            averaged=checkpoint.averaged,
            weights_sha256=checkpoint.sha256[MODEL_FILE],
            vocab_sha256=checkpoint.vocab.digest,
        )
    return result, texts


def record_scores(evaluation: Evaluation, write_card: CardWriter) -> None:
    """Record each system's scores in the results of its run, and on the card of an average.

    If that fails (a damaged file, a folder owned by someone else, a full disk), it only warns: the
    scores are still valid.
    """
    for system in evaluation.systems:
        try:
            _record(system, write_card)
        except (UserError, OSError) as error:
            say(f"warning: not recorded: {error}")
        except Exception as error:
            say(f"warning: not recorded, because of a bug; please report it: {error!r}")


def _record(system: System, write_card: CardWriter) -> None:
    checkpoint = system.only_checkpoint
    if checkpoint is None:  # a file, an export or an ensemble belongs to no single run
        return
    run = find_run(checkpoint.path)
    if run is not None:
        result, texts = describe_system(system)
        add_result(run, result)
        results = read_results(run)
        if choose_headline(results, checkpoint.config) == results[-1]:
            write_scored_texts(run, texts)
        if checkpoint.averaged:
            write_card(checkpoint.path, results)
        say(f"next: nmt-report {shlex.quote(os.path.relpath(run))}, for a page with this result")
