"""The report of an evaluation: of any system's translations, also where there is no run."""

from datetime import UTC, datetime

from nmt.evaluate.evaluation import Evaluation, collect_texts
from nmt.evaluate.results import Result, ScoredTestSet
from nmt.report.facts import RunFacts
from nmt.system.escapes import escape_line


def list_evaluated(evaluation: Evaluation) -> list[RunFacts]:
    """Return what a report can show of each system."""
    found = []
    for system, scores in zip(evaluation.systems, evaluation.scores, strict=True):
        texts, test = collect_texts(system), system.test
        result = Result(
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
            seconds=system.seconds,
        )
        found.append(
            RunFacts(
                name=escape_line(system.label),
                place=system.name,
                settings={},
                config=None if system.model is None else system.config,
                results=(result,),
                texts=texts,
            )
        )
    return found
