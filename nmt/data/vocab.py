"""The joint BPE: learned, kept and applied by SentencePiece inside this process, never through a text file.

Text goes in as it is (`identity`, not SentencePiece's default `nmt_nfkc`, which turns a half into 1/2 and U+2028 into
a space): scores are computed against raw references, so what stands in the reference must be writable. Only runs of
spaces shrink to one. The model's bytes are the vocabulary; their sha256 stands in every store and checkpoint.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece

from nmt.config import VocabConfig
from nmt.errors import UserError

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SILENT = (PAD, BOS, EOS)  # not part of any text; UNK is: it decodes to SentencePiece's mark for a lost character

sentencepiece.set_min_log_level(2)  # the C++ side would talk on standard error


class Vocab:
    def __init__(self, model: bytes) -> None:
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(model)
        except RuntimeError:
            raise UserError("damaged BPE model (SentencePiece cannot read it); use another copy") from None
        found = (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
        if found != (PAD, UNK, BOS, EOS):
            raise UserError(f"BPE model with pad, unk, bos, eos = {found} instead of {(PAD, UNK, BOS, EOS)}; "
                            "use one that nmt-prepare made")
        self.model = model
        self.digest = hashlib.sha256(model).hexdigest()
        self.size: int = processor.get_piece_size()
        self._processor = processor

    @classmethod
    def load(cls, path: Path) -> "Vocab":
        try:
            return cls(path.read_bytes())
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); expected a BPE model") from None
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    def encode(self, lines: Sequence[str], workers: int = 1) -> list[list[int]]:
        """The ids of each line, without bos and eos."""
        ids: list[list[int]] = self._processor.encode(list(lines), num_threads=workers)
        return ids

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The detokenised text of each list of ids, wherever pad, bos and eos stand in it."""
        texts: list[str] = self._processor.decode([[i for i in map(int, line) if i not in SILENT] for line in ids])
        return texts

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._processor.id_to_piece(int(i)) for i in ids]


def learn(lines: Iterable[str], config: VocabConfig) -> bytes:
    """The BPE model of `lines`; the same lines give the same bytes. Lines of more than 4192 bytes are passed over.

    One thread: more are no faster for BPE, and the model notes their number: its digest would depend on the machine.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=config.size,
            character_coverage=config.character_coverage, normalization_rule_name="identity",
            pad_id=PAD, unk_id=UNK, bos_id=BOS, eos_id=EOS, num_threads=1, minloglevel=2)
    except RuntimeError as error:
        raise UserError(_complaint(str(error), config)) from None
    return model.getvalue()


def _complaint(message: str, config: VocabConfig) -> str:
    """SentencePiece's message, in our words: it knows the smallest and the largest size that the text allows."""
    if largest := re.search(r"value <= (\d+)", message):
        return f"vocab.size: {config.size} is too large for this little text; at most {largest[1]} is possible"
    if smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (f"vocab.size: {config.size} is too small, the characters of the text alone need {smallest[1]}; "
                "raise it or lower vocab.character_coverage")
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return "vocab: no text to learn the BPE from; every line is empty or longer than 4192 bytes"
    return f"vocab: SentencePiece could not learn the BPE: {message.splitlines()[0]}"
