"""nmt-eval: translate a test set and score the result, every score with its signature; or score anybody's output."""

import argparse
import os
import sys
from collections.abc import Sequence

from nmt.commands.cli import add_offline, go_offline, guarded, make_parser

EXAMPLES = """\
  nmt-eval runs/base/average                            the test set of its config
  nmt-eval runs/base/average --ladder                   counted in every way in which results are quoted
  nmt-eval runs/base --verdict                          its average against the paper: reproduced or not, and why
  nmt-eval runs/base/average --test-set newstest2013    by name, through sacreBLEU or from files
  nmt-eval runs/base/average --src news.en --ref news.de --output news.hyp --json news.json
  nmt-eval --hypotheses news.hyp --ref news.de --ladder      the output of any system
  nmt-eval --hypotheses fr.hyp --ref fr.ref data.tgt=fr
  nmt-eval --compare runs/a/average runs/b/average      is the difference more than luck? (checkpoints or files)
  nmt-eval runs/seed1/average runs/seed2/average runs/seed3/average      mean and spread
  nmt-eval runs/base decoding.beam=1                    the newest checkpoint of a run, greedily
  nmt-eval runs/a/average --ensemble runs/b/average     the mean of their probabilities
  nmt-eval exports/base --engine ctranslate2            what nmt-export wrote, scored as that engine's

docs/evaluation.md explains the ladder. Scores of a run are kept in its results.json."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "nmt-eval",
        "Translate a test set with a checkpoint and score it, or score a file.",
        EXAMPLES,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CHECKPOINT | section.key=value",
        help="checkpoint folders, averages or run folders; and settings of decoding or languages, or "
        "device=cpu",
    )
    parser.add_argument(
        "--hypotheses", metavar="FILE", help="score these translations, one a line, of any system"
    )
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="two systems, each a checkpoint or a file"
    )
    parser.add_argument(
        "--ladder", action="store_true", help="all metrics, from sacreBLEU's to the paper's"
    )
    parser.add_argument(
        "--verdict", action="store_true", help="was the paper's result reproduced by this run?"
    )
    parser.add_argument(
        "--test-set", metavar="NAME", help="such as newstest2014 or any name that sacreBLEU knows"
    )
    parser.add_argument("--src", metavar="FILE", help="source text, one sentence per line")
    parser.add_argument("--ref", metavar="FILE", help="its reference translation")
    parser.add_argument(
        "--force", action="store_true", help="score also what looks tokenised, escaped or like BPE"
    )
    parser.add_argument("--json", metavar="FILE", help="write the scores there as JSON")
    parser.add_argument("--output", metavar="FILE", help="write the translations there")
    parser.add_argument(
        "--ensemble",
        action="append",
        default=[],
        metavar="CHECKPOINT",
        help="translate together with this one, of the same vocabulary; may be given several times",
    )
    parser.add_argument(
        "--engine",
        choices=("nmt", "ctranslate2"),
        default="nmt",
        help="ctranslate2: CHECKPOINT is what nmt-export --to ctranslate2 wrote",
    )
    add_offline(parser)
    args = parser.parse_intermixed_args(argv)
    args.overrides = [word for word in args.words if "=" in word and not os.path.exists(word)]
    args.checkpoints = [word for word in args.words if word not in args.overrides]
    if complaint := misuse(args):
        parser.error(complaint)
    return guarded(lambda: work(args), "nmt-eval")


def misuse(args: argparse.Namespace) -> str:
    """What is wrong with a combination of arguments, if anything is."""
    n, is_file = len(args.checkpoints), args.hypotheses is not None
    if (n > 0) + is_file + (args.compare is not None) != 1:
        return "give CHECKPOINT, or several, or --hypotheses FILE, or --compare A B"
    if args.test_set == "":
        return "--test-set is empty; give a NAME"
    if args.ref is not None and args.test_set:
        return "give --test-set NAME or --ref FILE, not both"
    if is_file and args.ref is None and not args.test_set:
        return "--hypotheses needs --ref FILE or --test-set NAME"
    if (args.src is not None and args.ref is None) or (
        n and args.ref is not None and args.src is None
    ):
        return "give both --src and --ref, or --test-set NAME, or neither for the config's test set"
    if n != 1 and (args.ensemble or args.engine != "nmt" or args.output or args.verdict):
        return "--ensemble, --engine, --output and --verdict go with one CHECKPOINT"
    if args.engine != "nmt" and (args.ensemble or args.verdict):
        return f"--engine {args.engine} has neither --ensemble nor --verdict; leave one of them out"
    return "--ladder goes with one system" if args.ladder and (n > 1 or args.compare) else ""


def check_outputs(args: argparse.Namespace) -> None:
    """Said before the work, not after it: what cannot be read or written, and what must not be written over."""
    from pathlib import Path

    from nmt.system.errors import UserError
    from nmt.system.files import check_writable
    from nmt.system.run_folder import MANIFEST_FILE, RUN_FILES, RunFolder

    if args.hypotheses is not None and not os.path.exists(args.hypotheses):
        raise UserError(f"{args.hypotheses}: no such file of translations")
    taken = [
        os.path.realpath(name)
        for name in (args.src, args.ref, args.hypotheses, *(args.compare or ()))
        if name
    ]
    for file in (args.output, args.json):
        if file is None:
            continue
        check_writable(Path(file))
        folder = Path(file).resolve().parent
        if os.path.realpath(file) in taken:
            raise UserError(f"{file}: is read and written at once; choose another file")
        is_run = RunFolder(folder).checkpoints.exists() and Path(file).name in RUN_FILES
        if is_run or (folder / MANIFEST_FILE).exists():
            raise UserError(
                f"{file}: belongs to a run, a checkpoint or a store; choose another file"
            )
        taken.append(os.path.realpath(file))


def work(args: argparse.Namespace) -> int:
    go_offline(args)

    from pathlib import Path

    from nmt.system.runtime import tune_process

    tune_process()  # before torch comes in

    from nmt.evaluate.evaluation import Question, compared, record, scored, spread_of
    from nmt.evaluate.systems import Wanted
    from nmt.export.engine import open_ctranslate2
    from nmt.system.files import write_json, write_text
    from nmt.translate.translator import open_translator

    check_outputs(args)
    question = Question(
        Wanted(args.test_set, args.src, args.ref),
        tuple(args.overrides),
        args.force,
        open_ctranslate2 if args.engine == "ctranslate2" else open_translator,
    )
    if args.compare:
        answer = compared(question, args.compare)
    elif len(args.checkpoints) > 1:
        answer = spread_of(question, args.checkpoints)
    else:
        names = (*(args.checkpoints or [args.hypotheses]), *args.ensemble)
        answer = scored(question, names, args.hypotheses is not None, args.ladder, args.verdict)
    print(answer.told, flush=True)
    if args.output:
        write_text(Path(args.output), "".join(text + "\n" for text in answer.systems[0].texts))
    if args.json:
        write_json(Path(args.json), answer.figures)
    record(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
