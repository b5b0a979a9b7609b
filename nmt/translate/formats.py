"""How a translation is written: its text alone, with scores and alignments, the n best, or a JSON
object.

Whatever the model writes stays on its line: a line end in a translation becomes a space, and so
does a tab where tabs separate columns.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from nmt.system.strict_json import Fields
from nmt.translate.translator import (
    OUR_ENGINE,
    TextToText,
    TranslatedText,
    Translation,
)


@dataclass(frozen=True)
class Layout:
    n_best: int | None = None  # as many lines `number, score, text` for each source line
    has_scores: bool = False
    has_alignments: bool = False
    is_json: bool = False
    keeps_translations: bool = False  # and not their text alone: their attention is wanted
    is_text: bool = False  # a line is a paragraph of sentences

    @property
    def n_candidates(self) -> int:
        return self.n_best or 1

    def lines(
        self, number: int, source: str, candidates: Sequence[Translation], translator: TextToText
    ) -> str:
        """The output for line `number`, counted from 1; ends with a line end."""
        if self.is_json:
            fields = self._fields(number, source, candidates, translator)
            return json.dumps(fields, ensure_ascii=False) + "\n"
        if self.n_best is None:
            return self._row([], candidates[0], self.has_scores)
        columns = [str(number - 1)]  # Marian and fairseq count from 0
        return "".join(self._row(columns, candidate, True) for candidate in candidates)

    def paragraph(
        self, number: int, source: str, translated: TranslatedText, translator: TextToText
    ) -> str:
        """The output for a line that is a paragraph: with scores and candidates of each sentence in
        JSON, otherwise its text.
        """
        if not self.is_json:
            return translated.text + "\n"
        fields: Fields = {"line": number, "source": source, "text": translated.text}
        fields["sentences"] = [
            self._fields(n, sentence.text, candidates, translator)
            for n, (sentence, candidates) in enumerate(
                zip(translated.sentences, translated.candidates, strict=True), 1
            )
        ]
        return json.dumps(fields, ensure_ascii=False) + "\n"

    def _row(self, first_columns: list[str], candidate: Translation, has_score: bool) -> str:
        columns = [*first_columns]
        if has_score:
            columns.append(f"{candidate.score:.6f}")
        text = candidate.text.replace("\n", " ")
        columns.append(text)
        if self.has_alignments:
            links = [f"{source}-{target}" for target, source in enumerate(candidate.alignment)]
            columns.append(" ".join(links))
        if len(columns) == 1:
            return text + "\n"  # no columns to confuse, so it may keep its tabs
        cells = [column.replace("\t", " ") for column in columns]
        return "\t".join(cells) + "\n"

    def _fields(
        self, number: int, source: str, candidates: Sequence[Translation], translator: TextToText
    ) -> Fields:
        rows: list[Fields] = []
        for candidate in candidates:
            row: Fields = {"text": candidate.text, "score": round(candidate.score, 6)}
            if self.has_alignments:
                row["pieces"] = translator.vocab.tgt.pieces(candidate.piece_ids)
                row["alignment"] = [[s, t] for t, s in enumerate(candidate.alignment)]
            if candidate.is_cut:
                row["is_cut"] = True
            rows.append(row)
        name = "sentence" if self.is_text else "line"
        fields: Fields = {name: number, "source": source, "candidates": rows}
        if translator.direction is not None and not self.is_text:
            fields["direction"] = translator.direction
        if self.has_alignments:
            vocab = translator.vocab.src
            fields["source_pieces"] = vocab.pieces(vocab.encode([source])[0])
        if translator.engine != OUR_ENGINE:
            fields["engine"] = translator.engine
        return fields
