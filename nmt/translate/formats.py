"""How a translation is written: its text alone, with figures beside it, the best few, or a JSON object.

Whatever the model says, it stays on its line: a line end that it wrote becomes a space, and so does a tab where tabs
part columns.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nmt.translate.translator import OURS, Request, TextToText, Translation


@dataclass(frozen=True)
class Layout:
    n_best: int | None = None  # so many lines `number, score, text` for each source
    has_scores: bool = False
    has_alignments: bool = False
    is_json: bool = False

    @property
    def request(self) -> Request:
        return Request(self.n_best or 1, self.has_alignments)

    def lines(
        self, number: int, source: str, candidates: Sequence[Translation], translator: TextToText
    ) -> str:
        """What is written for line `number`, counted from 1; ends with a line end."""
        if self.is_json:
            return (
                json.dumps(self._object(number, source, candidates, translator), ensure_ascii=False)
                + "\n"
            )
        if self.n_best is None:
            return self._row([], candidates[0], self.has_scores)
        return "".join(
            self._row([str(number - 1)], one, True) for one in candidates
        )  # as Marian and fairseq count

    def _row(self, before: list[str], one: Translation, has_score: bool) -> str:
        text = one.text.replace("\n", " ")
        columns = [*before, *([f"{one.score:.6f}"] if has_score else []), text]
        if self.has_alignments:
            columns.append(" ".join(f"{s}-{t}" for t, s in enumerate(one.links)))
        if len(columns) == 1:
            return text + "\n"
        return "\t".join(column.replace("\t", " ") for column in columns) + "\n"

    def _object(
        self, number: int, source: str, candidates: Sequence[Translation], translator: TextToText
    ) -> dict[str, Any]:
        made: dict[str, Any] = {
            "line": number,
            "source": source,
            "candidates": [{"text": one.text, "score": round(one.score, 6)} for one in candidates],
        }
        if self.has_alignments:
            vocab = translator.vocab
            made["source_pieces"] = vocab.pieces(vocab.encode([source])[0])
            for row, one in zip(made["candidates"], candidates, strict=True):
                row["pieces"] = vocab.pieces(one.ids)
                row["alignment"] = [[s, t] for t, s in enumerate(one.links)]
        return made | {"engine": translator.engine} if translator.engine != OURS else made
