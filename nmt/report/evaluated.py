"""The report of an evaluation: of any system's translations, even without a run."""

from nmt.evaluate.evaluation import Evaluation, collect_texts, describe_result
from nmt.report.facts import RunFacts
from nmt.system.escapes import escape_line


def list_evaluated(evaluation: Evaluation) -> list[RunFacts]:
    """Return what a report can show of each system."""
    found = []
    for system, scores in zip(evaluation.systems, evaluation.scores, strict=True):
        texts = collect_texts(system)
        facts = RunFacts(
            name=escape_line(system.label),
            place=system.name,
            settings={},
            config=None if system.model is None else system.config,
            results=(describe_result(system, scores, texts),),
            texts=texts,
        )
        found.append(facts)
    return found
