"""Computes what nmt-eval reports: the scores of one system, the difference between two, or the
spread of several.

Every evaluation takes the same steps: choose the systems, translate, check the text, score, report,
record. All systems in an evaluation share one test set. A run's scores are recorded in its
results.json and its average's model card.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import nmt
from nmt.agreement import check_agreement, check_sides, find_direction
from nmt.average.dev_check import find_better_member
from nmt.checkpoint import Checkpoint, open_checkpoint
from nmt.config import (
    RunConfig,
    load_recorded_config,
    override_config,
    tabulate_differences,
    to_plain_values,
)
from nmt.evaluate.card import write_average_card
from nmt.evaluate.results import Result, ScoredTestSet, add_result, find_run, read_results
from nmt.evaluate.scored_texts import ScoredTexts, write_scored_texts
from nmt.evaluate.systems import (
    System,
    TestSetChoice,
    check_texts,
    read_translations,
    translate_test_set,
)
from nmt.evaluate.training_text import examine_training_text
from nmt.evaluate.verdict import SEED_RUN_KEYS, JudgedRun, check_one_recipe, judge
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
from nmt.system.errors import UserError
from nmt.system.escapes import escape_line
from nmt.system.files import check_own_folder
from nmt.system.progress import say, track
from nmt.system.run_folder import CONFIG_FILE, MODEL_FILE, RunFolder
from nmt.system.tables import Cell, Table, format_interval
from nmt.translate.calibration import N_BINS, Calibration, measure_calibration
from nmt.translate.pair_scores import PairScorer
from nmt.translate.translator import LoadedModel, Translator, open_translator

N_BOOTSTRAP = 1_000
# Settings that may be overridden: how to translate, which test set, and where things are. All others
# were fixed by training.
DATA_OVERRIDES = ("data.src=", "data.tgt=", "data.root=", "data.store=", "data.test")
OVERRIDES = ("decoding.", *DATA_OVERRIDES, "device=")


@dataclass(frozen=True)
class EvaluationRequest:
    test_set: TestSetChoice
    overrides: tuple[str, ...]
    is_forced: bool = False  # score text even if `check_texts` would refuse it
    # Opens checkpoints or exported models, given their paths and the overrides.
    open_translator: Callable[[Sequence[str], Sequence[str]], LoadedModel] = open_translator


@dataclass(frozen=True)
class Evaluation:
    report: str  # for people
    json_values: dict[str, Any]
    systems: Sequence[System]
    scores: Sequence[Sequence[Score]]  # of each system


# ---- the kinds of evaluation ---------------------------------------------------------------------


def evaluate_system(
    request: EvaluationRequest,
    names: Sequence[str],
    *,
    is_text: bool = False,
    with_all_metrics: bool = False,
    with_verdict: bool = False,
    with_calibration: bool = False,
) -> Evaluation:
    """Score a file of translations, a checkpoint, or an ensemble of checkpoints."""
    # choose the system and translate
    if with_verdict:
        names = [_choose_average(names[0]), *names[1:]]
    system = make_system(request, names, is_text)

    # score
    language = system.config.data.tgt
    paper_metric = find_paper_metric(language)
    if with_all_metrics:
        metrics = list_metrics(language)
    elif with_verdict:
        metrics = [HEADLINE, CHRF2, paper_metric]
    else:
        metrics = [HEADLINE, CHRF2]
    scores = score_system(system, metrics)

    # report
    report = [_format_head(system), *_format_scores(scores)]
    if doubt := _doubt_average(system):
        report.append(f"  warning: {doubt}")
    if with_all_metrics:
        report += _format_readings(metrics, system)
    values = _describe_system(system) | {"scores": _scores_to_json(scores)}
    if with_all_metrics and system.test.subset:
        filtered = score_system(system, metrics, system.test.subset)
        report.append(
            f"on the {len(system.test.subset):,} of these lines that sacreBLEU's wmt14 contains; "
            f"Table 2 counts all {len(system.texts):,}, so no score below compares with it:"
        )
        report += _format_scores(filtered)
        values["filtered"] = _scores_to_json(filtered)
    if with_calibration and (calibration := _calibrate(system)):
        scores += score_calibration(calibration, system)
        report += _format_calibration(calibration)
        values["scores"] = _scores_to_json(scores)  # now with the figures of calibration
        values["calibration"] = _describe_calibration(calibration)
    if with_verdict:
        by_name = {score.name: score for score in scores}
        score = by_name[paper_metric.name]
        verdict = judge(paper_metric, [JudgedRun(system, score, examine_training_text(system))])
        report += ["", *verdict.to_lines()]
        values["verdict"] = verdict.to_json()
    return Evaluation(_join_lines(report), values, [system], [scores])


def evaluate_runs(request: EvaluationRequest, names: Sequence[str]) -> Evaluation:
    """Compare several runs of one recipe, with different seeds, with the paper by their mean."""
    # refuse what cannot be judged, before hours of translation
    for name in names:
        _check_is_folder(name)
    names = [_choose_average(name) for name in names]
    checkpoints = [open_checkpoint(Path(name)) for name in names]
    _check_same_data(checkpoints)
    check_one_recipe(names, checkpoints, request.overrides)

    # translate and score
    systems = make_comparable_systems(request, names)
    paper_metric = find_paper_metric(systems[0].config.data.tgt)
    metrics = [HEADLINE, CHRF2, paper_metric]
    scores = [score_system(system, metrics) for system in systems]

    # report
    runs = [
        JudgedRun(system, on_paper_metric, examine_training_text(system))
        for system, (*_, on_paper_metric) in zip(systems, scores, strict=True)
    ]
    verdict = judge(paper_metric, runs)
    report = [*_format_side_by_side(systems, scores), "", *verdict.to_lines()]
    return _evaluate_together(report, systems, scores, {"verdict": verdict.to_json()})


def _choose_average(name: str) -> str:
    """Return a run's average if it has one: the paper's results are those of averaged models."""
    average = RunFolder(Path(name)).average
    check_own_folder(average, inside=Path(name))
    return str(average) if average.is_dir() else name


def evaluate_difference(request: EvaluationRequest, names: Sequence[str]) -> Evaluation:
    """Test whether the difference between two systems is statistically significant."""
    seed = read_seed()  # first, so that an invalid seed is refused before anything is translated
    a, b = systems = make_comparable_systems(request, names)
    found = _compare(a, b, seed)
    scores = [score_system(system, [HEADLINE]) for system in systems]
    report = [
        *_format_side_by_side(systems, scores),
        f"  difference {found.difference:+.2f}",
        f"  p = {found.p_bootstrap:.4f} by paired bootstrap, "
        f"{found.n_bootstrap:,} resampled test sets",
        f"  p = {found.p_randomisation:.4f} by approximate randomisation, "
        f"{found.n_randomisation:,} trials",
        f"  {_explain_comparison(found)}",
    ]
    return _evaluate_together(report, systems, scores, {"comparison": asdict(found)})


def evaluate_spread(request: EvaluationRequest, names: Sequence[str]) -> Evaluation:
    """Estimate the spread of scores over runs of one recipe; tabulate runs of different ones."""
    systems = make_comparable_systems(request, names)
    if settings := tabulate_differences([system.config for system in systems], SEED_RUN_KEYS):
        return _tabulate_ablation(systems, settings)
    models = [system.model for system in systems if system.model is not None]
    _check_same_data([model.checkpoints[0] for model in models])
    weights = {model.checkpoints[0].sha256[MODEL_FILE] for model in models}
    if len(weights) < len(systems):
        raise UserError(
            f"{' '.join(names)}: some of these have the same weights; a spread needs different runs"
        )
    scores = [score_system(system, [HEADLINE]) for system in systems]
    spread = estimate_spread([headline.value for (headline,) in scores])
    report = [
        *_format_side_by_side(systems, scores),
        f"  mean {spread.mean:.2f}, standard deviation {spread.std:.2f}; 95 % confidence interval "
        f"of the mean {format_interval(spread.low, spread.high)} (Student's t)",
    ]
    return _evaluate_together(report, systems, scores, {"spread": asdict(spread)})


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


def _tabulate_ablation(systems: Sequence[System], settings: dict[str, list[Any]]) -> Evaluation:
    """Compare each run with the first, beside the settings in which the runs differ: no mean, which
    would mix them.
    """
    seed = read_seed()
    first, *others = systems
    scores = [score_system(system, [HEADLINE, CHRF2]) for system in systems]
    comparisons = [_compare(first, other, seed) for other in others]
    from_first = [["", ""]]
    from_first += [[f"{each.difference:+.2f}", f"{each.p_bootstrap:.4f}"] for each in comparisons]
    rows = []
    for i, (system, (bleu, chrf)) in enumerate(zip(systems, scores, strict=True)):
        figures = [f"{bleu.value:.2f}", bleu.format_interval(), f"{chrf.value:.2f}"]
        own_settings = [str(values[i]) for values in settings.values()]
        rows.append([system.label, *figures, *from_first[i], *own_settings])
    head = ["", "BLEU", "95 %", "chrF2", "difference", "p", *settings]
    report = [
        _format_joint_head(systems),
        *_indent([head, *rows]),
        *(f"  {score.name}: {score.signature}" for score in scores[0]),
        "  difference from the first in BLEU, and its p by paired bootstrap",
    ]
    values = {
        "chrf": _scores_to_json([chrf for _, chrf in scores]),
        "settings": settings,
        "comparisons": [asdict(found) for found in comparisons],
    }
    return _evaluate_together(report, systems, scores, values)


def _evaluate_together(
    report: Sequence[str],
    systems: Sequence[System],
    scores: Sequence[Sequence[Score]],
    more_values: dict[str, Any],
) -> Evaluation:
    """Return the evaluation of several systems; the first score of each is its headline."""
    values = {
        "systems": [system.label for system in systems],
        **_describe_test_set(systems[0]),
        "scores": _scores_to_json([own[0] for own in scores]),
        **more_values,
    }
    return Evaluation(_join_lines(report), values, systems, scores)


# ---- translate and check --------------------------------------------------------------------------------------------


def make_system(request: EvaluationRequest, names: Sequence[str], is_text: bool) -> System:
    """Translate the test set with a checkpoint or an ensemble, or read translations from a file;
    then check them.
    """
    if not is_text:
        _check_is_folder(names[0])
    for override in request.overrides:
        if not override.startswith(OVERRIDES):
            raise UserError(
                f"{override}: was fixed by training; nmt-eval accepts only {', '.join(OVERRIDES)}"
            )
    if is_text:
        config = override_config(RunConfig(), request.overrides)
        system = read_translations(names[0], request.test_set, config)
    else:
        model = request.open_translator(names, request.overrides)
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
    direction = find_direction(load_recorded_config(Path(name) / CONFIG_FILE).data)
    check_agreement(
        "direction",
        name,
        direction,
        "data.src and data.tgt",
        find_direction(model.config.data),
        "leave these out, or give --force if they are other names of the same languages",
    )
    check_sides(test_set.src, test_set.refs[0] if test_set.refs else None, name, direction)


def _check_is_folder(name: str) -> None:
    path = Path(name)
    if path.is_file():
        raise UserError(f"{name}: is a file; give translations with --hypotheses FILE")
    if not path.is_dir():
        raise UserError(
            f"{name}: no such checkpoint folder or file; give RUN, RUN/average or "
            "RUN/checkpoints/step-..."
        )


def make_comparable_systems(request: EvaluationRequest, names: Sequence[str]) -> list[System]:
    """Make the systems; raise UserError unless all have the same test set."""
    are_texts = [Path(name).is_file() for name in names]
    for name, is_text in zip(names, are_texts, strict=True):
        if not is_text:
            _check_is_folder(name)  # all of them before hours of translation
    systems = [
        make_system(request, [name], is_text)
        for name, is_text in zip(names, are_texts, strict=True)
    ]
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


def score_system(
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
    """Return a warning if the system is an average that is worse on the dev set than a member of it."""
    model = system.model
    if model is None or len(model.checkpoints) != 1:
        return None
    (checkpoint,) = model.checkpoints
    try:
        run = find_run(checkpoint.path) if checkpoint.averaged else None
    except UserError:  # the record of the scores will warn of it
        return None
    if run is None or not isinstance(model.translator, Translator):
        return None
    return find_better_member(checkpoint, model.translator.device, RunFolder(run))


def _compare(a: System, b: System, seed: int) -> Comparison:
    counter = HEADLINE.make_counter()
    references = [a.test.ref, *a.test.more_references]
    return compare_systems(counter, a.texts, b.texts, references, seed=seed)


def _calibrate(system: System) -> Calibration | None:
    assert system.model is not None and isinstance(system.model.translator, Translator)
    scorer = PairScorer(system.model.translator)
    calibration = measure_calibration(scorer, system.test.src, system.test.ref)
    if calibration is None:
        say(
            f"warning: {system.test.name}: no line can be scored piece by piece; see nmt-score --json"
        )
    return calibration


def score_calibration(calibration: Calibration, system: System) -> list[Score]:
    """Return the figures that a table may compare; all are lower for better models."""
    assert system.model is not None
    counted = f"pieces:{calibration.n_pieces}|vocab:{system.model.translator.vocab.digest[:8]}"
    if calibration.impossible:
        counted += f"|left_out:{calibration.impossible}"
    return [
        Score("NLL", calibration.nll, f"nll|{counted}"),
        Score("perplexity", calibration.perplexity, f"perplexity|{counted}"),
        Score("ECE", 100 * calibration.error, f"ece|bins:{N_BINS}|{counted}"),
    ]


# ---- report ---------------------------------------------------------------------------------------------------------


def _join_lines(lines: Sequence[str]) -> str:
    """Return the lines as one text. Names of systems and test sets may be a stranger's."""
    return "\n".join(map(escape_line, lines))


def _format_head(system: System) -> str:
    head = f"{system.label} on {system.test.name}, {system.pair}: {len(system.texts):,} sentences"
    if system.model is None:
        return head
    return f"{head} in {system.seconds:.1f} s"


def _format_scores(scores: Sequence[Score]) -> list[str]:
    """Return one line per score, with its 95% interval and its signature."""
    return _indent(
        (score.name, f"{score.value:5.2f}", score.format_interval(), score.signature)
        for score in scores
    )


def _indent(rows: Iterable[Sequence[Cell]]) -> list[str]:
    head, *others = rows
    return [f"  {line}" for line in Table(head, others).to_lines()]


def _format_readings(metrics: Sequence[Metric], system: System) -> Iterator[str]:
    """Say whose way of counting each tokenised metric is. Only on the whole test set is one of them
    likely to be that of the paper.
    """
    yield "  The paper does not say how it counted tokens. Ways that are known:"
    for metric in metrics:
        if not metric.reading:
            continue
        line = f"    {metric.name}: {metric.reading}"
        if metric.is_likeliest and system.filtered_set is None:
            line += "; the likeliest for Table 2, and the verdict's"
        yield line


def _format_calibration(calibration: Calibration) -> Iterator[str]:
    yield (
        f"the reference, piece by piece: NLL {calibration.nll:.4f}, perplexity "
        f"{calibration.perplexity:.2f}, {calibration.n_pieces:,} pieces"
    )
    tendency = "over" if calibration.confidence > calibration.accuracy else "under"
    yield (
        f"  expected calibration error {100 * calibration.error:.2f} % ({N_BINS} bins): the most probable "
        f"piece has a probability of {100 * calibration.confidence:.2f} % and is right in "
        f"{100 * calibration.accuracy:.2f} %, so the model is {tendency}-confident"
    )
    if calibration.impossible:
        yield f"  {calibration.impossible:,} lines are too long or lack a source and are not counted"


def _describe_calibration(calibration: Calibration) -> dict[str, Any]:
    """Describe the bins, for a diagram of reliability, as JSON values."""
    sums = zip(
        calibration.counts, calibration.confidence_sums, calibration.correct_counts, strict=True
    )
    bins = []
    for number, (n_pieces, confidence, n_correct) in enumerate(sums):
        if n_pieces:
            bins.append(
                {
                    "from": number / N_BINS,
                    "to": (number + 1) / N_BINS,
                    "pieces": n_pieces,
                    "confidence": confidence / n_pieces,
                    "accuracy": n_correct / n_pieces,
                }
            )
    return {
        "pieces": calibration.n_pieces,
        "confidence": calibration.confidence,
        "accuracy": calibration.accuracy,
        "bins": bins,
    }


def _format_side_by_side(
    systems: Sequence[System], scores: Sequence[Sequence[Score]]
) -> Iterator[str]:
    """Yield one line per system with its headline score, then the signature they share."""
    yield _format_joint_head(systems)
    yield from _indent(
        (system.label, f"{headline.value:5.2f}", headline.format_interval())
        for system, (headline, *_) in zip(systems, scores, strict=True)
    )
    yield f"  {scores[0][0].name}: {scores[0][0].signature}"


def _format_joint_head(systems: Sequence[System]) -> str:
    first = systems[0]
    n_lines = len(first.texts)
    return f"{len(systems)} systems on {first.test.name}, {first.pair}: {n_lines:,} sentences"


def _explain_comparison(comparison: Comparison) -> str:
    if max(comparison.p_bootstrap, comparison.p_randomisation) >= 0.05:
        return (
            "not significant: two equally good systems would differ this much by chance "
            "in at least 5 of 100 cases"
        )
    better = "second" if comparison.difference > 0 else "first"
    return f"significant at p < 0.05: the {better} system is better on this kind of text"


def _describe_system(system: System) -> dict[str, Any]:
    """Describe what was scored, as JSON values."""
    values: dict[str, Any] = {"system": system.name}
    if system.model is not None:
        values["checkpoint"] = system.model.paths[0]
        values["ensemble"] = system.model.paths[1:]
        values["engine"] = system.model.translator.engine
        values["seconds"] = round(system.seconds, 2)
    return values | _describe_test_set(system)


def _describe_test_set(system: System) -> dict[str, Any]:
    return {
        "test_set": system.test.name,
        "pair": system.pair,
        "sentences": len(system.texts),
    }


def _scores_to_json(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Describe scores as JSON values; one without an interval has no `low` and `high`."""
    return [
        {key: value for key, value in asdict(score).items() if value is not None}
        for score in scores
    ]


def collect_texts(system: System) -> ScoredTexts:
    """Return what was scored, line by line."""
    name = system.name
    if system.model is not None and len(system.model.checkpoints) == 1:
        name = system.model.checkpoints[0].path.resolve().name
    hypotheses = "".join(text + "\n" for text in system.texts)
    return ScoredTexts(
        checkpoint=name,
        test_set=system.test.label,
        pair=system.pair,
        hypotheses_sha256=hashlib.sha256(hypotheses.encode()).hexdigest(),
        sources=list(system.test.src),
        references=list(system.test.ref),
        translations=list(system.texts),
    )


def describe_result(system: System, scores: Sequence[Score], texts: ScoredTexts) -> Result:
    """Describe the scores of any system, without what only the checkpoint of a run has."""
    test = system.test
    return Result(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        checkpoint=system.name,
        step=0,
        averaged=[],
        weights_sha256="",
        vocab_sha256="",
        test_set=ScoredTestSet(test.label, len(test.ref), test.src_sha256, test.ref_sha256),
        pair=system.pair,
        hypotheses_sha256=texts.hypotheses_sha256,
        decoding={},
        engine="read from a file" if system.model is None else system.model.translator.engine,
        scores=list(scores),
        versions={},
        seconds=round(system.seconds, 2),
    )


# ---- record ---------------------------------------------------------------------------------------------------------


def record_scores(evaluation: Evaluation) -> None:
    """Record each system's scores in the results of its run.

    If that fails (a damaged file, a folder owned by someone else, a full disk), it only warns: the
    scores are still valid.
    """
    for system, scores in zip(evaluation.systems, evaluation.scores, strict=True):
        try:
            _record(system, scores)
        except (UserError, OSError) as error:
            say(f"warning: not recorded: {error}")
        except Exception as error:
            say(f"warning: not recorded, because of a bug; please report it: {error!r}")


def _record(system: System, scores: Sequence[Score]) -> None:
    model = system.model
    # A file, an export or an ensemble belongs to no single run.
    if model is None or len(model.checkpoints) != 1:
        return
    (checkpoint,) = model.checkpoints
    run = find_run(checkpoint.path)
    if run is None:
        return
    texts = collect_texts(system)
    versions = {"python": python_version(), "nmt": nmt.__version__}
    versions |= {name: version(name) for name in ("torch", "sacrebleu")}
    result = replace(
        describe_result(system, scores, texts),
        checkpoint=checkpoint.path.resolve().name,
        step=checkpoint.step,
        averaged=checkpoint.averaged,
        weights_sha256=checkpoint.sha256[MODEL_FILE],
        vocab_sha256=checkpoint.vocab.digest,
        decoding=to_plain_values(system.config.decoding),
        versions=versions,
    )
    add_result(run, result)
    write_scored_texts(run, texts)
    write_average_card(checkpoint.path, read_results(run))
