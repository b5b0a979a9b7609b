"""Writes tests/golden: what the Perl scripts of Moses make of the lines of tests/support/awkward.py, and of
real ones.

    git clone https://github.com/moses-smt/mosesdecoder && git -C mosesdecoder checkout 3a0631a05b
    python scripts/make_golden.py mosesdecoder/scripts --data corpora

That commit is the last of 2017. Run once, and again only when the generator changes; the tests need
no Perl. Of real text, which is not ours to hand on, only a digest per line is kept.
"""

import argparse
import hashlib
import json
import lzma
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.awkward import awkward_lines, damaged_pair, real_lines  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
LANGUAGES = ("de", "fr")
N = 4000  # lines of each kind and language
SEEDS = {"de": 2017, "fr": 2018}
N_PAIRS = 20
SCRIPTS = (
    "tokenizer/replace-unicode-punctuation.perl",
    "tokenizer/tokenizer.perl",
    "generic/multi-bleu.perl",
    "share/nonbreaking_prefixes/nonbreaking_prefix.de",
    "share/nonbreaking_prefixes/nonbreaking_prefix.fr",
)
SPLIT = r"s{(\S)-(\S)}{$1 ##AT##-##AT## $2}g"


def encode_lines(lines: Sequence[str]) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


def digest(lines: Sequence[str]) -> str:
    return hashlib.sha256(encode_lines(lines)).hexdigest()


def line_digest(tokens: str, split: str) -> str:
    """Return 32 bits for the two outputs of one line: enough to see that one differs, too few to
    recover the line.
    """
    return hashlib.sha256(f"{tokens}\n{split}".encode()).hexdigest()[:8]


def perl(lines: Sequence[str], *command: str) -> list[str]:
    """Return the lines that a Perl script makes of lines, byte by byte, in any locale."""
    done = subprocess.run(
        ["perl", *command],
        input=encode_lines(lines),
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
    )
    return done.stdout.decode().split("\n")[:-1]


def outputs(scripts: Path, language: str, lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the tokens of each line, and the tokens with compounds split."""
    replaced = perl(lines, str(scripts / SCRIPTS[0]))
    tokens = perl(replaced, str(scripts / SCRIPTS[1]), "-q", "-l", language)
    split = perl(tokens, "-ple", SPLIT)
    assert len(tokens) == len(split) == len(lines)
    return tokens, split


def pairs(split: dict[str, list[str]]) -> list[tuple[list[str], list[str]]]:
    """Return hypotheses and references, tokenised and split.

    Empty lines are left out, because a lone no-break space is a word to multi-bleu, which reads
    bytes, and none to sacreBLEU. The damage makes empty lines of its own.
    """
    by_language = []
    for language in LANGUAGES:
        by_language.append([line for line in split[language] if line.strip()])
    damaged = []
    for seed in range(N_PAIRS):
        lines = by_language[seed % len(by_language)]
        damaged.append(damaged_pair(lines, seed))
    return damaged


def multi_bleu(scripts: Path, hypotheses: Sequence[str], references: Sequence[str]) -> float:
    with TemporaryDirectory() as folder:
        reference = Path(folder, "reference")
        reference.write_bytes(encode_lines(references))
        (answer,) = perl(hypotheses, str(scripts / SCRIPTS[2]), str(reference))
    found = re.match(r"BLEU = (\d+\.\d\d), ", answer)
    assert found, answer
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "scripts", type=Path, help="the folder scripts/ of mosesdecoder, as of 2017"
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder with news-en-de, news-en-fr and multi30k"
    )
    arguments = parser.parse_args()
    scripts = arguments.scripts

    GOLDEN.mkdir(exist_ok=True)
    made, real, split = {}, {}, {}
    line_digests: list[str] = []
    for language in LANGUAGES:
        # made lines: everything is kept
        lines = awkward_lines(language, N, SEEDS[language])
        tokens, split[language] = outputs(scripts, language, lines)
        both = tokens + split[language]
        packed = lzma.compress(encode_lines(both), preset=9 | lzma.PRESET_EXTREME)
        (GOLDEN / f"moses.{language}.xz").write_bytes(packed)
        made[language] = {"inputs": digest(lines), "outputs": digest(both)}

        # real lines: only digests are kept
        lines = real_lines(arguments.data, language, N)
        tokens, compounds_split = outputs(scripts, language, lines)
        line_digests += map(line_digest, tokens, compounds_split)
        real[language] = digest(lines)
    (GOLDEN / "moses.real.xz").write_bytes(lzma.compress(encode_lines(line_digests)))

    # where it all comes from, and the scores
    script_digests = {}
    for name in SCRIPTS:
        script_digests[name] = hashlib.sha256((scripts / name).read_bytes()).hexdigest()
    (perl_version,) = perl([], "-e", 'print "$^V\n"')
    bleu = []
    for hypotheses, references in pairs(split):
        bleu.append(multi_bleu(scripts, hypotheses, references))
    record = {
        "scripts": script_digests,
        "perl": perl_version,
        "made": made,
        "real": {"inputs": real, "outputs": digest(line_digests)},
        "multi_bleu": bleu,
    }
    (GOLDEN / "moses.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
