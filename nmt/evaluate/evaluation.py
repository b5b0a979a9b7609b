"""What nmt-eval answers: the scores of one system, the difference of two, or the spread of several.

All systems of a question are scored on the same test set. The headline is always there; `ladder` adds every other way
of counting, `verdict` what the paper says to it. What was scored of a run stands in its results.json, and in the model
card of its average.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from nmt.config import RunConfig, override_config, to_plain_values
from nmt.evaluate import results
from nmt.evaluate.card import write_average_card
from nmt.evaluate.systems import System, Wanted, examine, read, translated
from nmt.evaluate.verdict import judge
from nmt.score.metrics import CHRF2, HEADLINE, Metric, find_paper_metric, list_metrics, measure
from nmt.score.score import Score
from nmt.score.significance import Comparison, compare_systems, estimate_spread, read_seed
from nmt.system.errors import UserError
from nmt.system.progress import say, track
from nmt.system.run_folder import MODEL_FILE, RESULTS_FILE, VOCAB_FILE, RunFolder
from nmt.translate.translator import LoadedModel, open_translator

N_BOOTSTRAP = 1_000
OVERRIDES = (
    "decoding.",
    "data.src=",
    "data.tgt=",
    "data.root=",
    "data.test",
    "device=",
)  # how to translate, and what


@dataclass(frozen=True)
class Question:
    wanted: Wanted
    overrides: tuple[str, ...]
    is_forced: bool = False
    # of checkpoints, or of what nmt-export wrote; given their paths and the overrides
    open_translator: Callable[[Sequence[str], Sequence[str]], LoadedModel] = open_translator


@dataclass(frozen=True)
class Answer:
    told: str
    figures: dict[str, Any]  # for JSON
    systems: Sequence[System]
    scores: Sequence[Sequence[Score]]  # of each system


def system_of(question: Question, *names: str, is_text: bool = False) -> System:
    """A checkpoint's or an ensemble's translations, or a file of them."""
    if not is_text and not Path(names[0]).is_dir():
        what = (
            "is a file; translations are given with --hypotheses FILE"
            if Path(names[0]).is_file()
            else "no such checkpoint folder or file; give RUN, RUN/average or RUN/checkpoints/step-..."
        )
        raise UserError(f"{names[0]}: {what}")
    for override in question.overrides:
        if not override.startswith(OVERRIDES):
            raise UserError(
                f"{override}: is decided by training; nmt-eval takes {', '.join(OVERRIDES)}"
            )
    if is_text:
        system = read(names[0], question.wanted, override_config(RunConfig(), question.overrides))
    else:
        system = translated(question.open_translator(names, question.overrides), question.wanted)
    examine(system, question.wanted, question.is_forced)
    return system


# ---- one system -------------------------------------------------------------------------------------------------


def scored(
    question: Question, names: Sequence[str], is_text: bool, is_ladder: bool, is_judged: bool
) -> Answer:
    if is_judged and RunFolder(Path(names[0])).average.is_dir():  # the recipe ends with averaging
        names = (str(RunFolder(Path(names[0])).average), *names[1:])
    system = system_of(question, *names, is_text=is_text)
    paper_metric = find_paper_metric(system.config.data.tgt)
    if is_ladder:
        metrics = list_metrics(system.config.data.tgt)
    else:
        metrics = [HEADLINE, CHRF2]
        if is_judged:
            metrics.append(paper_metric)
    scores = score_system(system, metrics)
    told = [head(system), *table(metrics, scores)]
    figures = described(system) | {"scores": scores_to_json(scores)}
    if is_ladder and system.test.subset:
        filtered = score_system(system, metrics, system.test.subset)
        told += [
            f"the {len(system.test.subset):,} of these lines that are in sacreBLEU's wmt14",
            *table(metrics, filtered),
        ]
        figures["filtered"] = scores_to_json(filtered)
    if is_judged:
        score = next(score for score in scores if score.name == paper_metric.name)
        verdict = judge(score, system)
        told += ["", verdict.told()]
        figures["verdict"] = verdict.figures()
    return Answer("\n".join(told), figures, [system], [scores])


def described(system: System) -> dict[str, Any]:
    """What was scored, for JSON."""
    engine = system.engine
    made = (
        {}
        if engine is None
        else {
            "checkpoint": engine.paths[0],
            "ensemble": engine.paths[1:],
            "engine": engine.translator.engine,
            "seconds": round(system.seconds, 2),
        }
    )
    return (
        {"system": system.name}
        | made
        | {"test_set": system.test.name, "pair": system.pair, "sentences": len(system.texts)}
    )


def head(system: System) -> str:
    seconds = f" in {system.seconds:.1f} s" if system.engine else ""
    return f"{system.label} on {system.test.name}, {system.pair}: {len(system.texts):,} sentences{seconds}"


def score_system(
    system: System, metrics: Iterable[Metric], lines: Sequence[int] | None = None
) -> list[Score]:
    """Score the system with each of the metrics, on all lines or on these of sacreBLEU's filtered wmt14."""
    texts, references, name = system.texts, system.test.ref, system.test.label
    if lines is not None:
        texts = [texts[i] for i in lines]
        references = [references[i] for i in lines]
        name = f"{name}-filtered"
    return [
        measure(metric, texts, references, name, system.pair, N_BOOTSTRAP)
        for metric in track(list(metrics), "scoring", "metrics")
    ]


def table(metrics: Sequence[Metric], scores: Sequence[Score]) -> Iterator[str]:
    """A line each: the score, its 95 % interval, its signature."""
    width = max(len(score.name) for score in scores)
    for metric, score in zip(metrics, scores, strict=True):
        bounds = f"[{score.interval.low:.2f}, {score.interval.high:.2f}]" if score.interval else ""
        mark = "*" if metric.is_of_paper else " "
        yield f"  {score.name:<{width}} {score.value:6.2f}{mark} {bounds:<14}  {score.signature}"
    if any(metric.is_of_paper for metric in metrics):
        yield "  * as Table 2 of the paper was counted"


def scores_to_json(scores: Sequence[Score]) -> list[dict[str, Any]]:
    return [_score_to_json(score) for score in scores]


def _score_to_json(score: Score) -> dict[str, Any]:
    plain = {"name": score.name, "value": score.value, "signature": score.signature}
    if score.interval is not None:
        plain |= {"low": score.interval.low, "high": score.interval.high}
    return plain


def record(answer: Answer) -> None:
    """Write the scores into the results of the runs that the systems are of. Where that cannot be, they stand all the
    same: a damaged file, a colleague's folder, a full disk."""
    for system, scores in zip(answer.systems, answer.scores, strict=True):
        try:
            _record(system, scores)
        except UserError as error:
            say(f"warning: not recorded: {error}")
        except OSError as error:
            say(f"warning: not recorded: {error.filename or RESULTS_FILE}: {error.strerror}")


def _record(system: System, scores: Sequence[Score]) -> None:
    engine = system.engine
    if engine is None or len(engine.checkpoints) != 1:  # a file, an export, an ensemble
        return
    checkpoint, test = engine.checkpoints[0], system.test
    run = results.run_of(checkpoint.path)
    if run is None:
        return
    results.add(
        run,
        results.Result(
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            checkpoint=checkpoint.path.resolve().name,
            step=checkpoint.step,
            averaged=checkpoint.averaged,
            pair=system.pair,
            weights_sha256=checkpoint.sha256[MODEL_FILE],
            vocab_sha256=checkpoint.sha256[VOCAB_FILE],
            test_set=results.TestSet(test.label, len(test.ref), test.src_sha256, test.ref_sha256),
            hypotheses_sha256=hashlib.sha256(
                "".join(text + "\n" for text in system.texts).encode()
            ).hexdigest(),
            decoding=to_plain_values(system.config.decoding),
            engine=engine.translator.engine,
            scores=list(scores),
            versions={"python": python_version()}
            | {name: version(name) for name in ("nmt", "torch", "sacrebleu")},
            seconds=round(system.seconds, 2),
        ),
    )
    write_average_card(checkpoint.path, results.read(run))


# ---- several ----------------------------------------------------------------------------------------------------


def compared(question: Question, names: Sequence[str]) -> Answer:
    """Whether the difference between two systems is more than luck."""
    seed = read_seed()
    systems = a, b = _of_one_test(question, names)
    found = compare_systems(HEADLINE.make_counter(), a.texts, b.texts, a.test.ref, seed=seed)
    scores = [score_system(system, [HEADLINE])[0] for system in systems]
    told = [
        *side_by_side(systems, scores),
        f"  difference {found.difference:+.2f}",
        f"  p = {found.p_bootstrap:.4f} by paired bootstrap, {found.n_bootstrap:,} resampled test sets",
        f"  p = {found.p_randomisation:.4f} by approximate randomisation, {found.n_randomisation:,} trials",
        f"  {_meaning(found)}",
    ]
    return Answer(
        "\n".join(told),
        {
            "systems": [a.label, b.label],
            "test_set": a.test.name,
            "pair": a.pair,
            "sentences": len(a.texts),
            "scores": scores_to_json(scores),
            "comparison": asdict(found),
        },
        systems,
        [[score] for score in scores],
    )


def _meaning(found: Comparison) -> str:
    if max(found.p_bootstrap, found.p_randomisation) >= 0.05:
        return "not significant: two systems that are equally good differ as much by chance in 5 of 100 cases or more"
    return f"significant at p < 0.05: {'the second' if found.difference > 0 else 'the first'} is better on such text"


def side_by_side(systems: Sequence[System], scores: Sequence[Score]) -> Iterator[str]:
    """A line for each, and the signature that they have in common."""
    first, width = systems[0], max(len(system.label) for system in systems)
    yield f"{len(systems)} systems on {first.test.name}, {first.pair}: {len(first.texts):,} sentences"
    for system, score in zip(systems, scores, strict=True):
        interval = score.interval
        bounds = f"  [{interval.low:.2f}, {interval.high:.2f}]" if interval else ""
        yield f"  {system.label:<{width}} {score.value:6.2f}{bounds}"
    yield f"  {scores[0].name}: {scores[0].signature}"


def spread_of(question: Question, names: Sequence[str]) -> Answer:
    """What several runs of one recipe, from different seeds, reach."""
    systems = _of_one_test(question, names)
    weights = [
        system.engine.checkpoints[0].sha256[MODEL_FILE] for system in systems if system.engine
    ]
    if len(set(weights)) < len(systems):
        raise UserError(
            f"{' '.join(names)}: some have the same weights; a spread is that of different runs"
        )
    scores = [score_system(system, [HEADLINE])[0] for system in systems]
    found = estimate_spread([score.value for score in scores])
    told = [
        *side_by_side(systems, scores),
        f"  mean {found.mean:.2f}, standard deviation {found.std:.2f}; 95 % interval of the mean of such runs "
        f"[{found.low:.2f}, {found.high:.2f}] (Student's t)",
    ]
    return Answer(
        "\n".join(told),
        {
            "systems": [system.label for system in systems],
            "test_set": systems[0].test.name,
            "pair": systems[0].pair,
            "sentences": len(systems[0].texts),
            "scores": scores_to_json(scores),
            "spread": asdict(found),
        },
        systems,
        [[score] for score in scores],
    )


def _of_one_test(question: Question, names: Sequence[str]) -> list[System]:
    systems = [system_of(question, name, is_text=Path(name).is_file()) for name in names]
    for other in systems[1:]:
        if other.test.ref != systems[0].test.ref or other.pair != systems[0].pair:
            raise UserError(
                f"{other.name}: its test set is {other.test.name}, {other.pair}, that of {systems[0].name} "
                f"is {systems[0].test.name}, {systems[0].pair}; give --test-set NAME or files for all"
            )
    return systems
