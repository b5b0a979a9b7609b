"""nmt-eval: translate a test set and score the result, every score with its signature; or score
the output of any system.
"""

import os
import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING

from nmt.commands.cli import (
    Argv,
    CommandParser,
    add_engine,
    add_offline,
    check_options,
    go_offline,
    start_command,
    write_card,
)

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES = """\
  nmt-eval runs/base/average                            the test set of its config
  nmt-eval runs/base/average --ladder                   scored in every way in which results are quoted
  nmt-eval runs/base --verdict                          its average against the paper: reproduced or not, and why
  nmt-eval runs/seed1 runs/seed2 runs/seed3 --verdict      runs that differ only in seed, judged by their mean
  nmt-eval runs/base/average --test-set newstest2013    by name, through sacreBLEU or from files
  nmt-eval runs/base/average --src news.en --ref news.de --output news.hyp --json news.json
  nmt-eval --hypotheses news.hyp --ref news.de --ladder      the output of any system
  nmt-eval --hypotheses fr.hyp --ref fr.ref data.tgt=fr
  nmt-eval --hypotheses news.hyp --ref first.de --ref second.de      two reference translations
  nmt-eval --hypotheses news.hyp --src news.en --ref news.de --report news.html      a page: lengths, worst lines
  nmt-eval --compare runs/a/average runs/b/average      is the difference more than luck? (checkpoints or files)
  nmt-eval runs/seed1/average runs/seed2/average runs/seed3/average      mean and spread
  nmt-eval runs/base decoding.beam=1                    the newest checkpoint of a run, greedily
  nmt-eval runs/a/average --ensemble runs/b/average     the mean of their probabilities
  nmt-eval exports/base --engine ctranslate2            an export of nmt-export, translated by that engine

docs/evaluation.md explains the ladder. The scores of a run are kept in its results.json."""


def build_parser() -> ArgumentParser:
    parser = CommandParser(
        "nmt-eval",
        "Translate a test set with a checkpoint and score it, or score a file.",
        EXAMPLES,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CHECKPOINT | section.key=value",
        help="checkpoint folders, averages or run folders; settings of decoding or of the languages, or device=cpu",
    )
    systems = parser.add_mutually_exclusive_group()
    systems.add_argument(
        "--hypotheses", metavar="FILE", help="score these translations of any system, one per line"
    )
    systems.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="compare two systems, each a checkpoint or a file of translations",
    )
    parser.add_argument(
        "--ladder",
        action="store_true",
        help="compute all metrics, from sacreBLEU's to those that the paper may have used",
    )
    parser.add_argument(
        "--verdict",
        action="store_true",
        help="judge whether this run, or these runs of one recipe, reproduced the paper's result",
    )
    references = parser.add_mutually_exclusive_group()
    references.add_argument(
        "--test-set",
        metavar="NAME",
        help="a test set, such as newstest2014 or any name that sacreBLEU knows",
    )
    references.add_argument(
        "--ref",
        metavar="FILE",
        action="append",
        default=[],
        help="the reference translation; may be given several times",
    )
    parser.add_argument("--src", metavar="FILE", help="source text, one sentence per line")
    parser.add_argument(
        "--force",
        action="store_true",
        help="score even text that looks tokenised, escaped or like BPE",
    )
    parser.add_argument("--json", metavar="FILE", help="write the scores to FILE as JSON")
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="write a page about the translations to FILE (docs/report.md)",
    )
    parser.add_argument("--output", metavar="FILE", help="write the translations to FILE")
    parser.add_argument(
        "--ensemble",
        action="append",
        default=[],
        metavar="CHECKPOINT",
        help="translate together with this checkpoint, which has the same vocabulary; may be given several times",
    )
    add_engine(parser)
    add_offline(parser)
    return parser


def parse_arguments(argv: Argv) -> Namespace:
    parser = build_parser()
    args = parser.parse_intermixed_args(argv)
    # A folder whose name contains "=" is still a checkpoint.
    args.overrides = [word for word in args.words if "=" in word and not os.path.exists(word)]
    args.checkpoints = [word for word in args.words if word not in args.overrides]
    check_options(parser, args, {"--engine": "--ensemble --verdict"}, {})
    if misuse := find_misuse(args):
        parser.error(misuse)
    return args


def find_misuse(args: Namespace) -> str | None:
    """Return what is wrong with the systems and the text named by the arguments, if anything."""
    n_checkpoints = len(args.checkpoints)
    is_other = args.hypotheses is not None or args.compare is not None
    if bool(n_checkpoints) == is_other:
        return "give CHECKPOINT, or several, or --hypotheses FILE, or --compare A B"
    if args.hypotheses is not None and not (args.ref or args.test_set):
        return "--hypotheses needs --ref FILE or --test-set NAME"
    if (args.src and not args.ref) or (n_checkpoints and args.ref and not args.src):
        return "give both --src and --ref, or --test-set NAME, or neither for the config's test set"
    if n_checkpoints != 1 and (args.ensemble or args.engine != "nmt" or args.output):
        return "--ensemble, --engine and --output need exactly one CHECKPOINT"
    if not n_checkpoints and args.verdict:
        return "--verdict needs a CHECKPOINT, or several, because it judges the training too"
    if is_other and all(map(os.path.isfile, args.compare or ())):
        for word in args.overrides:
            if word.startswith("decoding."):
                return f"{word}: has no effect on a file, which is translated already; leave it out"
    if args.ladder and (n_checkpoints > 1 or args.compare):
        return "--ladder accepts only one system; give one checkpoint or one file"
    return None


def check_files(args: Namespace) -> "tuple[Path, ...]":
    """Before the work begins, refuse files that cannot be read or written, or must not be overwritten.
    Return those to write.
    """
    from pathlib import Path

    from nmt.system.errors import UserError, explain_missing
    from nmt.system.extras import check_extra
    from nmt.system.files import check_writable, refuse_run_file

    if args.hypotheses is not None and not os.path.exists(args.hypotheses):
        raise explain_missing(args.hypotheses, "give a file of translations")
    inputs = [args.src, *args.ref, args.hypotheses, *(args.compare or ())]
    taken = {os.path.realpath(name) for name in inputs if name}
    outputs = tuple(Path(file) for file in (args.output, args.json, args.report) if file)
    for path in outputs:
        check_writable(path)
        if os.path.realpath(path) in taken:
            raise UserError(f"{path}: is given twice, once as an output; choose another file")
        taken.add(os.path.realpath(path))
        refuse_run_file(path)
    if args.report is not None:
        check_extra("report", "--report")
        from nmt.extras.report.page import check_report_output

        check_report_output(Path(args.report))
    return outputs


def evaluate(args: Namespace) -> int:
    go_offline(args)

    from pathlib import Path

    from nmt.system.runtime import tune_process

    tune_process()  # before torch is imported

    from nmt.api import find_checkpoints, open_checkpoints
    from nmt.evaluate.evaluation import (
        EvaluationRequest,
        evaluate_difference,
        evaluate_runs,
        evaluate_spread,
        evaluate_system,
        record_scores,
    )
    from nmt.evaluate.systems import TestSetChoice
    from nmt.system.files import write_json, write_text

    outputs = check_files(args)
    names = [args.hypotheses]
    if args.hypotheses is None:
        names = find_checkpoints(args.compare or [*args.checkpoints, *args.ensemble], args.engine)
    request = EvaluationRequest(
        TestSetChoice(args.test_set, args.src, tuple(args.ref)),
        tuple(args.overrides),
        args.force,
        outputs,
        partial(open_checkpoints, engine=args.engine),
    )
    if args.compare:
        evaluation = evaluate_difference(request, names)
    elif len(args.checkpoints) > 1 and args.verdict:
        evaluation = evaluate_runs(request, names)
    elif len(args.checkpoints) > 1:
        evaluation = evaluate_spread(request, names)
    else:
        evaluation = evaluate_system(
            request,
            names,
            is_text=args.hypotheses is not None,
            with_all_metrics=args.ladder,
            with_verdict=args.verdict,
        )
    try:
        print(evaluation.report, flush=True)
    finally:  # also where the reader of standard output has left
        if args.output:
            lines = [text + "\n" for text in evaluation.systems[0].texts]
            write_text(Path(args.output), "".join(lines))
        if args.json:
            write_json(Path(args.json), evaluation.json_values)
        if args.report:
            from nmt.extras.report.page import write_evaluation_page

            write_evaluation_page(evaluation, Path(args.report))
        record_scores(evaluation, write_card)
    return 0


main = partial(start_command, "nmt-eval", parse_arguments, evaluate)

if __name__ == "__main__":
    sys.exit(main())
