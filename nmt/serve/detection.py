"""Which language a text is in, of those that the server translates from.

py3langid looks at the bytes of a text; of a few words it is right nearly always when it has a few
languages to choose from (docs/serving.md). It takes a second to load, which only a server of several
source languages does.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from nmt.serve.messages import Detection

MOST_READ = 1_000  # characters of a text
PERCENT = 100.0  # LibreTranslate's confidences


class LanguageDetector:
    def __init__(self, languages: Sequence[str]) -> None:
        self.languages = languages

    @cached_property
    def _identifier(self) -> Any:
        """What ranks the languages that it knows; None if there is nothing to choose."""
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        known = [language for language in self.languages if language in identifier.labels]
        if len(known) < 2:
            return None
        identifier.set_languages(known)
        return identifier

    def load(self) -> None:
        """Be ready before the first question."""
        if len(self.languages) > 1:
            self.detect("")

    def detect(self, text: str) -> list[Detection]:
        """List the languages of the server, the most probable first."""
        if len(self.languages) == 1 or self._identifier is None:
            return [Detection(confidence=0.0, language=language) for language in self.languages]
        ranked = self._identifier.rank(text)
        return [
            Detection(confidence=round(PERCENT * float(share), 1), language=language)
            for language, share in ranked
        ]
