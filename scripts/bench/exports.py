"""What exports say beside their origin on real text: the same lines, log-probabilities, BLEU.

    python scripts/bench/exports.py --data multi30k runs/a runs/b > exports.jsonl      test.{en,de} in multi30k

Each run leaves for each engine, and both sides translate greedily and with beam 4, by log-probability alone and by
log-probability / |Y|, ours by the rules of the other: of a sentence's 2 * beam best continuations those that end count
among the best `beam` only, and for CTranslate2 with a penalty a sentence is done when `beam` outputs are. Where outputs
differ, our model judges both. Outputs that reach the limit are counted apart: there rules differ too.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from nmt.checkpoint import Checkpoint, open_checkpoint
from nmt.export import ctranslate2, huggingface
from nmt.export.parity import Engine, OwnEngine, compare_engines
from nmt.score.score import score_bleu
from nmt.system.progress import clock
from nmt.translate.beams import Hypothesis
from nmt.translate.translator import Translator, make_translator

SETTINGS = {"greedy": (1, 0.0), "beam 4": (4, 0.0), "beam 4 / |Y|": (4, 1.0)}
KINDS = ("ctranslate2:float32", "huggingface:float32", "ctranslate2:int8")


def exported(
    folder: Path, to: str, quantization: str, translator: Translator, checkpoint: Checkpoint
) -> Engine:
    room = ctranslate2 if to == "ctranslate2" else huggingface
    room.write(folder, translator.model, translator.vocab, checkpoint.config, quantization)
    return (
        ctranslate2.CTranslate2Engine(folder, 1)
        if to == "ctranslate2"
        else huggingface.HuggingFaceEngine(folder)
    )


def differences(
    mine: list[Hypothesis],
    other: list[Hypothesis],
    ours: OwnEngine,
    src: list[list[int]],
    alpha: float,
    limit: int,
) -> dict[str, Any]:
    """Of the sentences that both sides ended: how many are the same, whose output is better by our model, and the
    largest difference of the scores that both sides gave the same output."""
    ended = [i for i in range(len(src)) if max(len(mine[i].ids), len(other[i].ids)) < limit]
    differ = [i for i in ended if mine[i].ids != other[i].ids]
    judged = [
        [
            sum(scores) / len(scores) ** alpha
            for scores in ours.score([src[i] for i in differ], [found[i].ids for i in differ])
        ]
        for found in (mine, other)
    ]
    return {
        "ended": len(ended),
        "same": len(ended) - len(differ),
        "ours better": sum(a > b + 1e-5 for a, b in zip(*judged, strict=True)),
        "theirs better": sum(b > a + 1e-5 for a, b in zip(*judged, strict=True)),
        "score": max(
            abs(mine[i].score - other[i].score) for i in ended if mine[i].ids == other[i].ids
        ),
    }


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
        checkpoint = open_checkpoint(path)
        data = checkpoint.config.data
        src, ref = (
            (args.data / f"test.{language}").read_text(encoding="utf-8").split("\n")[: args.lines]
            for language in (data.src, data.tgt)
        )
        translator = make_translator(checkpoint, torch.device("cpu"), checkpoint.config.decoding)
        ids, ours = translator.vocab.encode(src), OwnEngine(translator.model)
        for to, quantization in (kind.split(":") for kind in args.kinds):
            found = {
                name: OwnEngine(
                    ours.model, "full" if to == "ctranslate2" and alpha else "exact"
                ).search(ids, beam, alpha, args.limit)
                for name, (beam, alpha) in SETTINGS.items()
            }
            with tempfile.TemporaryDirectory() as folder:
                theirs = exported(Path(folder), to, quantization, translator, checkpoint)
                began = clock()
                agreement = compare_engines(ours, theirs, ids, args.limit)
                row = {
                    "run": str(path),
                    "to": to,
                    "type": quantization,
                    "greedy lines": agreement.lines,
                    "greedy same": agreement.lines - agreement.differing,
                    "largest": agreement.largest,
                    "mean": agreement.mean,
                }
                for name, setting in SETTINGS.items():
                    other = theirs.search(ids, *setting, args.limit)
                    row[name] = differences(found[name], other, ours, ids, setting[1], args.limit)
                    texts = (
                        translator.vocab.decode([one.ids for one in side])
                        for side in (found[name], other)
                    )
                    row[f"{name}, BLEU"] = [
                        round(score_bleu(lines, ref).value, 2) for lines in texts
                    ]
                json.dump(row | {"seconds": round(clock() - began)}, sys.stdout)
                print(flush=True)


if __name__ == "__main__":
    main()
