"""What an evaluation found: one record, shown as text for people and as JSON for programs.

Each figure is computed once, by nmt/evaluate/evaluation.py; the scores of a system are in it. Here
they are only written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from nmt.config_files import ValuesByKey, format_setting
from nmt.evaluate.results import describe_other_search
from nmt.evaluate.systems import System
from nmt.evaluate.verdict import Verdict
from nmt.score.metrics import Metric
from nmt.score.score import Score
from nmt.score.significance import Comparison, Spread
from nmt.system.escapes import escape_line
from nmt.system.records import leave_out_none
from nmt.system.strict_json import Fields
from nmt.system.tables import Cell, Rows, Table


@dataclass(frozen=True)
class Findings:
    """What is reported besides the scores. The names are keys of the JSON, which has those that are not
    None.
    """

    filtered: list[Score] | None = None  # on the lines of sacreBLEU's filtered wmt14
    chrf: list[Score] | None = None  # of each system
    # runs of different recipes: the settings that differ, with the value in each, and each but the
    # first compared with the first
    settings: ValuesByKey | None = None
    comparisons: list[Comparison] | None = None
    comparison: Comparison | None = None
    spread: Spread | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Evaluation:
    systems: Sequence[System]  # with their scores; all have the same test set
    findings: Findings = Findings()
    ladder: Sequence[Metric] = ()  # if all were asked for, with the origins of their readings
    doubt: str | None = None  # about an average that is worse than one of its members

    @property
    def scores(self) -> list[Sequence[Score]]:
        """The scores of each system."""
        return [system.scores for system in self.systems]

    @property
    def json_values(self) -> Fields:
        first = self.systems[0]
        scores = first.scores
        values: Fields = {"system": first.name}
        if len(self.systems) > 1:
            values = {"systems": [system.label for system in self.systems]}
            scores = [system.scores[0] for system in self.systems]
        elif first.model is not None:
            values["checkpoint"], *values["ensemble"] = first.model.paths
            values["engine"] = first.model.translator.engine
            values["seconds"] = round(first.seconds, 2)
        if first.other_search:
            values["other_search"] = first.other_search
        if first.known_text is not None:
            values["known_text"] = first.known_text
        values |= {
            "test_set": first.test.name,
            "pair": first.pair,
            "sentences": len(first.texts),
            "scores": list(map(asdict, scores)),
        }
        return values | leave_out_none(asdict(self.findings))

    @property
    def report(self) -> str:
        """The text for people. Names of systems and test sets may be a stranger's."""
        first, findings = self.systems[0], self.findings
        is_one = len(self.systems) == 1
        who = first.label if is_one else f"{len(self.systems)} systems"
        head = f"{who} on {first.test.name}, {first.pair}: {len(first.texts):,} sentences"
        if is_one and first.model is not None:
            head += f" in {first.seconds:.1f} s"
        head += describe_other_search(first.other_search)
        if first.known_text == "valid":
            head += "; its dev set"
        lines = [head]
        if first.known_text == "train":
            lines.append(
                "  warning: the model was trained on this text; the scores say nothing of other text"
            )
        if is_one:
            lines += self._list_scores(first)
        elif findings.settings is None:
            lines += self._list_side_by_side()
        else:
            lines += self._list_ablation(findings.settings)
        if findings.verdict is not None:
            score = first.find_score(findings.verdict.score.name)
            lines += ["", *findings.verdict.to_lines(score.format_interval())]
        return "\n".join(map(escape_line, lines))

    def _list_scores(self, system: System) -> Iterator[str]:
        yield from _format_scores(system.scores)
        if self.doubt is not None:
            yield f"  warning: {self.doubt}"
        if self.ladder:
            yield "  The paper does not say how it counted tokens. Ways that are known:"
        for metric in self.ladder:
            if not metric.reading:
                continue
            line = f"    {metric.name}: {metric.reading}"
            # Only on the whole test set is one of them likely to be that of the paper.
            if metric.is_likeliest and system.filtered_set is None:
                line += "; the likeliest for Table 2, and the verdict's"
            yield line
        if self.findings.filtered is not None:
            assert system.test.subset is not None
            yield (
                f"on the {len(system.test.subset):,} of these lines that sacreBLEU's wmt14 contains; "
                f"Table 2 counts all {len(system.texts):,}, so no score below compares with it:"
            )
            yield from _format_scores(self.findings.filtered)

    def _list_side_by_side(self) -> Iterator[str]:
        yield from _indent([_make_row(system.label, system.scores[0]) for system in self.systems])
        headline = self.systems[0].scores[0]
        yield f"  {headline.name}: {headline.signature}"
        if self.findings.comparison is not None:
            yield from _format_comparison(self.findings.comparison)
        if self.findings.spread is not None:
            spread = self.findings.spread
            yield (
                f"  mean {spread.mean:.2f}, standard deviation {spread.std:.2f}; "
                f"95 % confidence {spread.format_interval()}"
            )

    def _list_ablation(self, settings: ValuesByKey) -> Iterator[str]:
        """Show each run beside the settings in which the runs differ: no mean, which would mix them."""
        from_first = [["", ""]]
        for comparison in self.findings.comparisons or ():
            from_first.append([f"{comparison.difference:+.2f}", f"{comparison.p_bootstrap:.4f}"])
        rows: Rows = [["", "BLEU", "95 %", "chrF2", "difference", "p", *settings]]
        for i, system in enumerate(self.systems):
            bleu, chrf = system.scores
            figures = [f"{bleu.value:.2f}", bleu.format_interval(), f"{chrf.value:.2f}"]
            own_settings = [format_setting(values[i]) for values in settings.values()]
            rows.append([system.label, *figures, *from_first[i], *own_settings])
        yield from _indent(rows)
        for score in self.systems[0].scores:
            yield f"  {score.name}: {score.signature}"
        yield "  difference from the first in BLEU, and its p by paired bootstrap"


def _format_scores(scores: Sequence[Score]) -> list[str]:
    return _indent([[*_make_row(score.name, score), score.signature] for score in scores])


def _make_row(name: str, score: Score) -> list[Cell]:
    """Name a score; its 95 % interval comes after it."""
    return [name, f"{score.value:5.2f}", score.format_interval()]


def _indent(rows: Sequence[Sequence[Cell]]) -> list[str]:
    return [f"  {line}" for line in Table(rows[0], rows[1:]).to_lines()]


def _format_comparison(comparison: Comparison) -> Iterator[str]:
    yield f"  difference {comparison.difference:+.2f}"
    yield (
        f"  p = {comparison.p_bootstrap:.4f} by paired bootstrap, "
        f"{comparison.n_bootstrap:,} resampled test sets"
    )
    yield (
        f"  p = {comparison.p_randomisation:.4f} by approximate randomisation, "
        f"{comparison.n_randomisation:,} trials"
    )
    if max(comparison.p_bootstrap, comparison.p_randomisation) >= 0.05:
        yield (
            "  not significant: two equally good systems would differ this much by chance "
            "in at least 5 of 100 cases"
        )
        return
    better = "second" if comparison.difference > 0 else "first"
    yield f"  significant at p < 0.05: the {better} system is better on this kind of text"
