"""nmt-eval: translate a test set and score the result, every score with its signature."""

import argparse
import sys
from collections.abc import Sequence

from nmt.commands.entry import add_offline, add_overrides, go_offline, guarded, make_parser

EXAMPLES = """\
  nmt-eval runs/base/average                            the test set of its config
  nmt-eval runs/base/average --test-set wmt14/full      newstest2014, all 3,003 lines, through sacreBLEU
  nmt-eval runs/base/average --src news.en --ref news.de --output news.hyp --json news.json
  nmt-eval runs/base decoding.beam=1                    the newest checkpoint of a run, greedily
  nmt-eval runs/a/average --ensemble runs/b/average     the mean of their probabilities
  nmt-eval exports/base --engine ctranslate2            what nmt-export wrote, scored as that engine's"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("nmt-eval", "Translate a test set with a checkpoint and score it.", EXAMPLES)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint folder, an average, or a run folder")
    parser.add_argument("--test-set", metavar="NAME", help="a test set that sacreBLEU knows, such as wmt14/full")
    parser.add_argument("--src", metavar="FILE", help="source text, one sentence per line")
    parser.add_argument("--ref", metavar="FILE", help="its reference translation")
    parser.add_argument("--json", metavar="FILE", help="write the scores there as JSON")
    parser.add_argument("--output", metavar="FILE", help="write the translations there")
    parser.add_argument("--ensemble", action="append", default=[], metavar="CHECKPOINT",
                        help="translate together with this one, of the same vocabulary; may be given several times")
    parser.add_argument("--engine", choices=("nmt", "ctranslate2"), default="nmt",
                        help="ctranslate2: CHECKPOINT is what nmt-export --to ctranslate2 wrote")
    add_offline(parser)
    add_overrides(parser)
    args = parser.parse_intermixed_args(argv)
    if args.ensemble and args.engine != "nmt":
        parser.error(f"--engine {args.engine} has no --ensemble; leave one of them out")
    return guarded(lambda: work(args), "nmt-eval")


def work(args: argparse.Namespace) -> int:
    go_offline(args)

    from dataclasses import replace
    from pathlib import Path

    from nmt.process import settle

    settle()  # before torch comes in

    from nmt.config import CorpusConfig
    from nmt.data.corpus import describe, read_pairs
    from nmt.decode.job import Job, opened
    from nmt.decode.translator import OURS
    from nmt.errors import UserError
    from nmt.files import check_writable, write_json, write_text
    from nmt.progress import Progress, clock

    if "=" in args.checkpoint:
        raise UserError(f"{args.checkpoint}: the checkpoint comes before settings; see nmt-eval --help")
    if (args.src is None) != (args.ref is None) or (args.src is not None and args.test_set):
        raise UserError("give both --src and --ref, or --test-set NAME, or neither for the config's test set")
    for file in (args.output, args.json):
        if file is not None:  # said before the work, not after it
            check_writable(Path(file))
    engine = opened(Job((args.checkpoint, *args.ensemble), tuple(args.overrides), is_exported=args.engine != "nmt"))
    translator, config = engine.translator, engine.config
    data, corpus = config.data, config.data.test
    if args.src is not None:
        data, corpus = replace(data, root="."), CorpusConfig(src=args.src, tgt=args.ref)
    elif args.test_set:
        corpus = CorpusConfig(sacrebleu=args.test_set)
    if corpus is None:
        raise UserError("the config names no test set; give --test-set NAME, or --src and --ref")
    pairs = list(read_pairs(corpus, data))

    from nmt.score.bleu import bleu, chrf

    progress = Progress("translating", len(pairs), "sentences")
    began = clock()
    texts = [t.text for t in translator.translate([pair.src for pair in pairs], progress)]
    seconds = clock() - began
    progress.close()
    references = [pair.tgt for pair in pairs]
    scores = [bleu(texts, references), chrf(texts, references)]
    if args.output:
        write_text(Path(args.output), "".join(text + "\n" for text in texts))
    if args.json:
        write_json(Path(args.json), {
            "checkpoint": engine.paths[0], "ensemble": engine.paths[1:], "engine": translator.engine,
            "test_set": describe(corpus), "sentences": len(pairs),
            "seconds": round(seconds, 2), "scores": [vars(score) for score in scores]})
    with_engine = "" if translator.engine == OURS else f" with {translator.engine}"
    names = " + ".join(engine.paths)
    print(f"{names}{with_engine} on {describe(corpus)}, {data.src}-{data.tgt}: {len(pairs)} sentences "
          f"in {seconds:.1f} s")
    for score in scores:
        print(f"  {score.name:<6} {score.value:6.2f}   {score.signature}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
