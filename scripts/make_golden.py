"""Write tests/golden: what the Perl scripts of Moses make of the lines that tests/awkward.py makes,
and of real ones.

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

from awkward import awkward_lines, damaged_pair, real_lines  # noqa: E402

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


def digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("".join(line + "\n" for line in lines).encode()).hexdigest()


def line_digest(tokens: str, split: str) -> str:
    """32 bits for the two outputs of one line: enough to see that one differs, too few to find the
    line again.
    """
    return hashlib.sha256(f"{tokens}\n{split}".encode()).hexdigest()[:8]


def perl(lines: Sequence[str], *command: str) -> list[str]:
    """The lines that a Perl script makes of lines, byte by byte, whatever the environment says
    about languages.
    """
    done = subprocess.run(
        ["perl", *command],
        input="".join(line + "\n" for line in lines).encode(),
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
    )
    return done.stdout.decode().split("\n")[:-1]


def outputs(scripts: Path, language: str, lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tokens, and tokens with compounds split, of each line."""
    replaced = perl(lines, str(scripts / SCRIPTS[0]))
    tokens = perl(replaced, str(scripts / SCRIPTS[1]), "-q", "-l", language)
    split = perl(tokens, "-ple", SPLIT)
    assert len(tokens) == len(split) == len(lines)
    return tokens, split


def pairs(split: dict[str, list[str]]) -> list[tuple[list[str], list[str]]]:
    """Hypotheses and references, tokenised and split. A line of a lone no-break space is a word to
    multi-bleu's bytes and none to sacreBLEU, so empty lines are left out; damage makes others."""
    lines = [[line for line in split[language] if line.strip()] for language in LANGUAGES]
    return [damaged_pair(lines[seed % len(lines)], seed) for seed in range(N_PAIRS)]


def multi_bleu(scripts: Path, hypotheses: Sequence[str], references: Sequence[str]) -> float:
    with TemporaryDirectory() as folder:
        reference = Path(folder, "reference")
        reference.write_bytes("".join(line + "\n" for line in references).encode())
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

    made, real, digests, split = {}, {}, [], {}
    for language in LANGUAGES:
        lines = awkward_lines(language, N, SEEDS[language])
        tokens, split[language] = outputs(scripts, language, lines)
        GOLDEN.mkdir(exist_ok=True)
        content = "".join(line + "\n" for line in tokens + split[language]).encode()
        (GOLDEN / f"moses.{language}.xz").write_bytes(
            lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)
        )
        made[language] = {"inputs": digest(lines), "outputs": digest(tokens + split[language])}

        lines = real_lines(arguments.data, language, N)
        digests += list(map(line_digest, *outputs(scripts, language, lines)))
        real[language] = digest(lines)
    (GOLDEN / "moses.real.xz").write_bytes(lzma.compress(("\n".join(digests) + "\n").encode()))
    written = {
        "scripts": {
            name: hashlib.sha256((scripts / name).read_bytes()).hexdigest() for name in SCRIPTS
        },
        "perl": perl([], "-e", 'print "$^V\n"')[0],
        "made": made,
        "real": {"inputs": real, "outputs": digest(digests)},
        "multi_bleu": [multi_bleu(scripts, *pair) for pair in pairs(split)],
    }
    (GOLDEN / "moses.json").write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
