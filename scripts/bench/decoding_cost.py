"""What search costs on this machine by beam, by length and by batch: a table and a plot.

    python scripts/bench/decoding_cost.py > cost.jsonl                    measure; a line for each point
    python scripts/bench/decoding_cost.py --plot docs/decoding-cost.svg < cost.jsonl

Base model, random weights, random sources; each translation is forced to the length of its source (by beam and by
batch: 16 pieces), two batches at a time. Each point is measured in a process of its own, which also tells its peak
of memory.
"""

import argparse
import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

BEAMS = (1, 2, 4, 6, 8, 12, 16)
LENGTHS = (5, 10, 25, 50, 100, 200, 400)
BATCHES = (256, 1024, 4096, 8192)
N_VOCAB = 10_000
NAMES = {"length": "pieces of source and of translation", "batch_tokens": "decoding.batch_tokens"}


def points(precision: str) -> list[dict[str, int | str]]:
    usual: dict[str, int | str] = {
        "precision": precision,
        "beam": 4,
        "length": 16,
        "batch_tokens": 1024,
    }
    return [
        *({"by": "beam", **usual, "beam": beam} for beam in BEAMS),
        *({"by": "length", **usual, "length": length} for length in LENGTHS),
        *({"by": "batch", **usual, "batch_tokens": batch} for batch in BATCHES),
    ]


def measure(point: dict[str, int | str]) -> dict[str, float]:
    from nmt.system.runtime import tune_process

    tune_process()

    import torch

    from nmt.config import DecodingConfig, ModelConfig
    from nmt.data.vocab import EOS
    from nmt.model.cpu_linear import prepare_for_decoding
    from nmt.model.transformer import Transformer
    from nmt.system.progress import clock
    from nmt.translate.batching import search_batches

    torch.manual_seed(1)
    length, batch_tokens = int(point["length"]), int(point["batch_tokens"])
    model = prepare_for_decoding(
        Transformer(ModelConfig(), N_VOCAB).eval().requires_grad_(False),
        point["precision"] == "bf16",
    )
    n = max(8, 2 * batch_tokens // (length + 1))
    sources = [[*row, EOS] for row in torch.randint(4, N_VOCAB, (n, length)).tolist()]
    config = replace(
        DecodingConfig(),
        beam=int(point["beam"]),
        max_ratio=0.0,
        max_extra=length,
        min_length=length,
        batch_tokens=batch_tokens,
    )

    def go(some: list[list[int]]) -> float:
        began = clock()
        for _ in search_batches(model, some, config, torch.device("cpu")):
            pass
        return clock() - began

    go(sources[:4])
    seconds = go(sources)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "sentences": n,
        "ms_per_sentence": round(1e3 * seconds / n, 3),
        "pieces_per_s": round(n * (length + 1) / seconds),
        "peak_mb": round(peak / 1e6),
    }


def plot(rows: list[dict[str, float | str]], path: Path) -> None:
    import vl_convert

    panels = []
    for by, x, y, unit in (
        ("beam", "beam", "ms_per_sentence", "ms for a sentence of 16 pieces"),
        ("length", "length", "ms_per_sentence", "ms for a sentence, beam 4"),
        ("batch", "batch_tokens", "peak_mb", "MB at the peak, beam 4, two batches at a time"),
    ):
        scale = {"type": "linear" if by == "beam" else "log", "nice": False}
        encoding = {
            "x": {"field": x, "type": "quantitative", "title": NAMES.get(x, x), "scale": scale},
            "y": {"field": y, "type": "quantitative", "title": unit, "scale": scale},
            "color": {"field": "precision", "type": "nominal", "title": None},
        }
        values = [row for row in rows if row["by"] == by]
        mark = {"type": "line", "point": True}
        panels.append({"data": {"values": values}, "mark": mark, "encoding": encoding})
    path.write_text(vl_convert.vegalite_to_svg({"hconcat": panels}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", type=Path, metavar="SVG", help="draw what standard input holds")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plot:
        plot([json.loads(line) for line in sys.stdin], args.plot)
    elif args.point:
        point = json.loads(args.point)
        print(json.dumps({**point, **measure(point)}))
    else:
        for precision in ("fp32", "bf16"):
            for point in points(precision):
                subprocess.run([sys.executable, __file__, "--point", json.dumps(point)], check=True)


if __name__ == "__main__":
    main()
