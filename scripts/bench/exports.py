"""Compares exports with their checkpoints on real text: the same lines, log-probabilities, BLEU.

    python scripts/bench/exports.py --data multi30k runs/a runs/b > exports.jsonl

The folder multi30k has test.en and test.de. Each run is exported for each engine, and both sides
translate greedily and with beam 4, by log-probability alone and by log-probability / |Y|. Ours
follows the rules of the other: of a sentence's 2 * beam best continuations only those count as
ended that are among the best `beam`, and for CTranslate2 with a penalty a sentence is done when
`beam` outputs are. Where outputs differ, our model judges both. Outputs that reach the limit are
left out, because the rules differ there too.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nmt.checkpoint import Checkpoint, open_checkpoint
from nmt.export.ctranslate2 import CTranslate2Engine, write_ctranslate2
from nmt.export.huggingface import HuggingFaceEngine, write_huggingface
from nmt.export.parity import Engine, OwnEngine, compare_engines
from nmt.score.score import score_bleu
from nmt.system.progress import clock
from nmt.translate.beams import Hypothesis
from nmt.translate.translator import Translator, make_translator

SETTINGS = {"greedy": (1, 0.0), "beam 4": (4, 0.0), "beam 4 / |Y|": (4, 1.0)}  # beam, alpha
KINDS = ("ctranslate2:float32", "huggingface:float32", "ctranslate2:int8")
ROUNDING = 1e-5  # two scores that differ by less are equal


def make_engine(
    folder: Path, to: str, quantization: str, translator: Translator, checkpoint: Checkpoint
) -> Engine:
    """Export the model into `folder`, and load it there."""
    model, vocab, config = translator.model, translator.vocab, checkpoint.config
    if to == "ctranslate2":
        write_ctranslate2(folder, model, vocab, config, quantization)
        return CTranslate2Engine(folder, 1)
    write_huggingface(folder, model, vocab, config, quantization)
    return HuggingFaceEngine(folder)


def search_like(
    to: str, ours: OwnEngine, src: list[list[int]], limit: int
) -> dict[str, list[Hypothesis]]:
    """Return our outputs in each setting, found by the stopping rule of the other engine."""
    found = {}
    for name, (beam, alpha) in SETTINGS.items():
        is_full = to == "ctranslate2" and alpha != 0
        engine = OwnEngine(ours.model, "full" if is_full else "exact")
        found[name] = engine.search(src, beam, alpha, limit)
    return found


def compare_outputs(
    ours: list[Hypothesis],
    theirs: list[Hypothesis],
    judge: OwnEngine,
    src: list[list[int]],
    alpha: float,
    limit: int,
) -> dict[str, Any]:
    """Count, of the sentences that both sides ended, equal outputs, and whose are better otherwise.

    "score" is the largest difference of the scores that both sides gave the same output.
    """
    score_differences = []  # of equal outputs
    differing = []
    for i, (our_output, their_output) in enumerate(zip(ours, theirs, strict=True)):
        is_ended = len(our_output.ids) < limit and len(their_output.ids) < limit
        if is_ended and our_output.ids == their_output.ids:
            score_differences.append(abs(our_output.score - their_output.score))
        elif is_ended:
            differing.append(i)

    our_scores = judge_outputs(judge, ours, src, differing, alpha)
    their_scores = judge_outputs(judge, theirs, src, differing, alpha)
    n_ours_better = n_theirs_better = 0
    for our_score, their_score in zip(our_scores, their_scores, strict=True):
        n_ours_better += our_score > their_score + ROUNDING
        n_theirs_better += their_score > our_score + ROUNDING
    return {
        "ended": len(score_differences) + len(differing),
        "same": len(score_differences),
        "ours better": n_ours_better,
        "theirs better": n_theirs_better,
        "score": max(score_differences, default=0.0),
    }


def judge_outputs(
    judge: OwnEngine,
    outputs: list[Hypothesis],
    src: list[list[int]],
    chosen: list[int],
    alpha: float,
) -> list[float]:
    """Return our model's log-probability / |Y|^alpha of the chosen outputs."""
    sources = [src[i] for i in chosen]
    targets = [outputs[i].ids for i in chosen]
    scored = judge.score(sources, targets)
    return [sum(log_probs) / len(log_probs) ** alpha for log_probs in scored]


def compare_run(args: argparse.Namespace, path: Path) -> Iterator[dict[str, Any]]:
    """Export the run for each engine, and yield what the comparison found."""
    checkpoint = open_checkpoint(path)
    data = checkpoint.config.data
    lines = read_lines(args.data / f"test.{data.src}", args.lines)
    references = read_lines(args.data / f"test.{data.tgt}", args.lines)
    translator = make_translator(checkpoint, torch.device("cpu"), checkpoint.config.decoding)
    src = translator.vocab.src.encode(lines)
    ours = OwnEngine(translator.model)
    for kind in args.kinds:
        to, quantization = kind.split(":")
        our_outputs = search_like(to, ours, src, args.limit)
        with tempfile.TemporaryDirectory() as folder:
            theirs = make_engine(Path(folder), to, quantization, translator, checkpoint)
            began = clock()
            agreement = compare_engines(ours, theirs, src, args.limit)
            row: dict[str, Any] = {
                "run": str(path),
                "to": to,
                "type": quantization,
                "greedy lines": agreement.lines,
                "greedy same": agreement.lines - agreement.differing,
                "largest": agreement.largest,
                "mean": agreement.mean,
            }
            for name, (beam, alpha) in SETTINGS.items():
                mine = our_outputs[name]
                other = theirs.search(src, beam, alpha, args.limit)
                row[name] = compare_outputs(mine, other, ours, src, alpha, args.limit)
                our_bleu = measure_bleu(translator, mine, references)
                row[f"{name}, BLEU"] = [our_bleu, measure_bleu(translator, other, references)]
            row["seconds"] = round(clock() - began)
            yield row


def read_lines(path: Path, n_lines: int) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:n_lines]


def measure_bleu(translator: Translator, outputs: list[Hypothesis], references: list[str]) -> float:
    texts = translator.vocab.tgt.decode([output.ids for output in outputs])
    return round(score_bleu(texts, references).value, 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="CHECKPOINT")
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder with test.SRC and test.TGT"
    )
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--limit", type=int, default=100, help="pieces of an output")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    args = parser.parse_args()
    for path in args.runs:
        for row in compare_run(args, path):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
