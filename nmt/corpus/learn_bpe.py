"""Learns a BPE from the words of a corpus and their counts, or takes a given one.

No piece spans a space, so SentencePiece needs only words and how often each occurs, which are far fewer
than lines.
"""

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import sentencepiece

from nmt.config import DataConfig, VocabConfig
from nmt.data.vocab import BOS, EOS, PAD, UNK, Vocab
from nmt.system.errors import UserError

LINES_AT_A_TIME = 4_096
TABS = b"\t"  # as a word: all tabs of a text


@dataclass(frozen=True)
class BpePart:
    """A BPE to learn: the joint one, or that of one side."""

    name: str
    kind: str  # for people
    sides: tuple[int, ...]  # 0: the source, 1: the target
    key: str  # how its keys begin
    vocab: VocabConfig  # with its own size and model

    def list_tags(self, data: DataConfig) -> list[str]:
        """List the tags of the training text, which belong to the source."""
        return data.train_tags if 0 in self.sides else []

    def load_given(self, data: DataConfig) -> Vocab | None:
        """Load the model that the config names, if it names one, and add the symbols that it lacks. Those
        of the source include the tags of the training text; then it must have those of all corpora.
        """
        if self.vocab.model is None:
            return None
        try:
            # The user names this file, so it may be a link, such as those of the Hugging Face cache.
            given = Vocab.load((Path(data.root) / self.vocab.model).resolve())
        except UserError as error:
            raise UserError(
                f"{self.key}model: {error}; relative paths start from data.root={data.root}"
            ) from None
        try:
            given = given.with_symbols(self.list_tags(data), self.vocab.user_symbols or ())
            for corpus in data.corpora:
                if 0 in self.sides and corpus.tag is not None:
                    given.find_symbol(corpus.tag)  # raises UserError if it has no such tag
        except UserError as error:
            raise UserError(f"{self.key}model={self.vocab.model}: {error}") from None
        return given


def list_bpe_parts(vocab: VocabConfig) -> list[BpePart]:
    if vocab.joint:
        return [BpePart("bpe", "joint BPE", (0, 1), "vocab.", vocab)]
    tgt = replace(vocab, size=vocab.sizes[1], model=vocab.tgt_model)
    return [
        BpePart("bpe-src", "BPE of the source", (0,), "vocab.", vocab),
        BpePart("bpe-tgt", "BPE of the target", (1,), "vocab.tgt_", tgt),
    ]


def tally_words(lines: Sequence[bytes]) -> Counter[bytes]:
    """Count how often each word occurs. Tabs also separate words; they are counted as a word."""
    counts: Counter[bytes] = Counter()
    for i in range(0, len(lines), LINES_AT_A_TIME):
        text = b" ".join(lines[i : i + LINES_AT_A_TIME])
        if TABS in text:
            counts[TABS] += text.count(TABS)
            text = text.replace(TABS, b" ")
        counts.update(text.split(b" "))
    del counts[b""]
    return counts


def write_word_counts(path: Path, counts: Counter[bytes]) -> int:
    """Write `word, tab, count` in each line, the frequent words first, behind a line for tabs if the
    text has any; return the number of words.
    """
    n_tabs = counts.pop(TABS, 0)
    by_count = sorted(counts.items(), key=lambda item: -item[1])
    if n_tabs:
        by_count.insert(0, (TABS, n_tabs))
    path.write_bytes(b"".join(b"%b\t%d\n" % item for item in by_count))
    return len(counts)


def _read_word_lines(path: Path) -> Iterator[str]:
    with open(path, "rb") as file:
        for line in file:
            if not line.startswith(TABS):
                yield line[:-1].decode()


def train_bpe(
    words: Path, config: VocabConfig, tags: Sequence[str] = (), size_key: str = "vocab.size"
) -> bytes:
    """Learn the BPE model of a file of `write_word_counts`. Words of more than 4192 bytes are
    ignored.

    Tags become pieces that no text contains, even if it contains their characters.
    """
    model = io.BytesIO()
    user_symbols = config.user_symbols or ()
    with open(words, "rb") as file:
        has_tabs = file.read(1) == TABS
    try:
        sentencepiece.SentencePieceTrainer.train(
            # An iterator, not the file's name, which SentencePiece would write into the model.
            sentence_iterator=_read_word_lines(words),
            input_format="tsv",
            model_writer=model,
            model_type="bpe",
            vocab_size=config.size,
            character_coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            required_chars="\t" if has_tabs else "",
            normalization_rule_name="identity",
            user_defined_symbols=list(user_symbols),
            control_symbols=[tag for tag in tags if tag not in user_symbols],
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            # More threads are no faster for BPE, and the model notes their number: its digest would
            # depend on them.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(_explain_training_error(str(error), config, size_key)) from None
    return model.getvalue()


def _explain_training_error(message: str, config: VocabConfig, size_key: str) -> str:
    """Reword SentencePiece's message, which gives the smallest or largest size that the text
    allows.
    """
    if largest := re.search(r"value <= (\d+)", message):
        return (
            f"{size_key}: {config.size} is too large for so little text; use at most {largest[1]}"
        )
    if smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"{size_key}: {config.size} is too small: the characters of the text alone need {smallest[1]} pieces; "
            "raise it or lower vocab.character_coverage"
        )
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return (
            "vocab: there is no text to learn the BPE from (words of more than 4192 bytes are ignored); "
            "check data.train"
        )
    return f"vocab: SentencePiece could not learn the BPE: {message.splitlines()[0]}"
