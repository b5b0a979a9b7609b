"""The package for Argos Translate: what it holds, and that Argos's own steps give our translations."""

import dataclasses
import json
import zipfile
from pathlib import Path

import pytest
import sentencepiece
from support.needs import needs_package
from support.toy_corpus import sentences
from support.untrained import make_checkpoint

from nmt.checkpoint.checkpoint import Checkpoint
from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.commands.export import main as nmt_export
from nmt.commands.translate import main as nmt_translate
from nmt.data.vocab import Vocab
from nmt.extras.export.argos import check_packable
from nmt.system.errors import UserError

pytestmark = needs_package("ctranslate2")
LINES = [source for source, _ in sentences(16, seed=3)]


@pytest.fixture(scope="module", name="checkpoint")
def make_one(vocab: Vocab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("argos") / "average", vocab, seed=3)


def translate_as_argos(package: Path, lines: list[str]) -> list[str]:
    """As `apply_packaged_translation` of argostranslate 1.11 does, without its splitter of sentences."""
    import ctranslate2

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(package / "sentencepiece.model"))
    translator = ctranslate2.Translator(str(package / "model"), device="cpu")
    found = translator.translate_batch(
        [pieces.encode(line, out_type=str) for line in lines],
        target_prefix=None,
        replace_unknowns=True,
        max_batch_size=32,
        batch_type="tokens",
        beam_size=4,
        num_hypotheses=4,
        length_penalty=0.2,
        return_scores=True,
    )
    decoded = [pieces.decode_pieces(one.hypotheses[0]) for one in found]
    return [text.replace("▁", " ").replace("_", " ").removeprefix(" ") for text in decoded]


def test_argos_translates_as_we_do(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "toy.argosmodel"
    assert nmt_export([str(checkpoint), "--to", "argos", "-o", str(out)]) == 0
    with zipfile.ZipFile(out) as package:
        package.extractall(tmp_path)
    folder = tmp_path / "translate-en_de-nmt"
    metadata = json.loads((folder / "metadata.json").read_text())
    assert (metadata["from_code"], metadata["to_code"]) == ("en", "de")
    assert (metadata["from_name"], metadata["to_name"]) == ("English", "German")
    import ctranslate2

    # by default it computes in another type than the weights have
    chosen = ctranslate2.Translator(str(folder / "model"), compute_type="auto").compute_type
    told = f"; as Argos runs it here, in {chosen}: "
    assert told in capsys.readouterr().err
    assert told in (folder / "README.md").read_text().replace("\\", "")

    (tmp_path / "in").write_text("".join(f"{line}\n" for line in LINES))
    rules = "penalty=length length_penalty=0.2 max_ratio=0 max_extra=256 min_length=1 finishing=top stopping=full"
    search = [f"decoding.{rule}" for rule in rules.split()]
    files = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--beam", "4"]
    assert nmt_translate([str(checkpoint), *files, *search]) == 0
    ours = (tmp_path / "out").read_text().splitlines()
    theirs = translate_as_argos(folder, LINES)
    # An untrained model writes some outputs to the limit of 256 pieces, where the rules differ.
    whole = [pair for pair in zip(ours, theirs, strict=True) if len(pair[0]) < 100]
    assert len(whole) > 8
    assert [a for a, _ in whole] == [b for _, b in whole]

    # its own package is replaced
    assert nmt_export([str(checkpoint), "--to", "argos", "-o", str(out)]) == 0
    assert [path.name for path in tmp_path.glob("*.argosmodel")] == ["toy.argosmodel"]


def test_what_cannot_be_packed_is_refused_with_the_reason(checkpoint: Path, tmp_path: Path) -> None:
    whole = open_checkpoint(checkpoint)
    out = tmp_path / "x.argosmodel"

    def change(**sections: object) -> Checkpoint:
        return dataclasses.replace(whole, config=dataclasses.replace(whole.config, **sections))  # type: ignore[arg-type]

    vocab = dataclasses.replace(whole.config.vocab, joint=False)
    with pytest.raises(UserError, match="have vocabularies of their own"):
        check_packable(change(vocab=vocab), out, False)
    decoding = dataclasses.replace(whole.config.decoding, tag="<de>")
    with pytest.raises(UserError, match="begin with tags"):
        check_packable(change(decoding=decoding), out, False)
    with pytest.raises(UserError, match="NAME.argosmodel"):
        check_packable(whole, tmp_path / "x.zip", False)
    out.write_text("mine")
    with pytest.raises(UserError, match="is not an Argos package"):
        check_packable(whole, out, False)
    assert out.read_text() == "mine"
