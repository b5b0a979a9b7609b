"""Dev BLEU against the number of checkpoints averaged: what the paper's 5 and 20 were chosen by, on your own run.

Only the dev set of the run's store is decoded, by the path that validation takes; the test set is never opened, for a
number chosen on it would be none that can be reported. Each mean is made in memory, one model large: nothing but
RUN/averaging.json is ever written, complete or not at all.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nmt.average.mean import mixed, opened, pour
from nmt.average.select import Moment, fading
from nmt.config import RunConfig
from nmt.data.vocab import Vocab
from nmt.system.device import choose_device
from nmt.system.errors import UserError
from nmt.system.files import digest, verify, write_json
from nmt.system.progress import clock, duration, say
from nmt.system.ranks import World
from nmt.system.run_folder import RunFolder, dev_text_file, ids_file, offsets_file
from nmt.train.memory_probe import resolve_micro_tokens
from nmt.train.validate import DevSet, open_dev, validate
from nmt.translate.translator import make_translator

SIZES = (1, 2, 3, 5, 10, 20)
DEV = [
    name
    for side in ("src", "tgt")
    for name in (dev_text_file(side), ids_file("valid", side), offsets_file("valid", side))
]  # files of the store


@dataclass(frozen=True)
class Point:
    """What the mean of the newest `n` scores."""

    n: int
    steps: list[int]
    minutes: list[float]  # of training, at each of them
    bleu: float
    nll: float


def curve(
    run: RunFolder,
    moments: Sequence[Moment],
    sizes: Sequence[int] = SIZES,
    decay: float | None = None,
    choice: str = "last",
    asked: Literal["auto", "cpu"] = "auto",
) -> list[Point]:
    """Score the mean of the newest N of `moments`, with a decay weighted, for each N; write RUN/averaging.json."""
    world = World(0, 1, choose_device(asked))
    paths = [run.checkpoint(moment.step) for moment in moments[-max(sizes) :]]
    (newest,) = opened(paths[-1:])
    config = replace(newest.config, evaluation=replace(newest.config.evaluation, bleu=True))
    store = Path(config.data.store)
    dev = _dev_of(config, store, newest.vocab)
    micro_tokens = resolve_micro_tokens(config, world)
    checkpoints = [*opened(paths[:-1]), newest]
    points, signature = [], ""
    for n in sizes:
        began, chosen = clock(), list(moments[-n:])
        if decay is not None:
            chosen = fading(chosen, decay)
        translator = make_translator(newest, world.device, config.decoding)
        pour(mixed(checkpoints[-n:], [moment.weight for moment in chosen]), translator.model)
        result = validate(translator, dev, config, micro_tokens, world, _gone_through)
        assert result is not None and result.bleu is not None
        signature = result.bleu.signature
        points.append(
            Point(
                n,
                [moment.step for moment in chosen],
                [round(moment.elapsed_s / 60, 2) for moment in chosen],
                result.bleu.value,
                result.nll,
            )
        )
        say(f"the last {n}: dev BLEU {result.bleu.value:.2f}, in {duration(clock() - began)}")
    record: dict[str, Any] = {
        "choice": choice,
        "decay": decay,
        "best_n": best(points).n,
        "points": [asdict(point) for point in points],
        "dev_set": {
            "store": str(store),
            "lines": len(dev.sources[: config.evaluation.sentences]),
            "src_sha256": digest(store / dev_text_file("src")),
            "ref_sha256": digest(store / dev_text_file("tgt")),
        },
        "signature": signature,
        "decoding": asdict(config.decoding),
    }
    write_json(run.curve, record)
    return points


def best(points: Sequence[Point]) -> Point:
    """Of equals, the one of fewer checkpoints."""
    return max(points, key=lambda point: (point.bleu, -point.n))


def table(points: Sequence[Point]) -> str:
    """For people, the best marked."""
    rows = [("N", "updates", "minutes", "dev BLEU", "dev perplexity")]
    for point in points:
        ends = slice(None, None, max(1, point.n - 1))  # the first and the last
        rows.append(
            (
                str(point.n),
                "-".join(f"{step:,}" for step in point.steps[ends]),
                "-".join(f"{minutes:.1f}" for minutes in point.minutes[ends]),
                f"{point.bleu:.2f}{'*' if point is best(points) else ' '}",
                f"{math.exp(min(point.nll, 700.0)):.3f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def _dev_of(config: RunConfig, store: Path, vocab: Vocab) -> DevSet:
    if config.data.valid is None:
        raise UserError(
            "the config of this run names no data.valid; without a dev set there is no curve"
        )
    try:
        verify(store, DEV, only=DEV)
        return open_dev(store, vocab)
    except UserError as error:
        raise UserError(
            f"{error}; the curve needs the dev set that training had, in the run's data.store: make it "
            "again with nmt-prepare --config RUN/config.yaml, or work where training worked"
        ) from None


def _gone_through(work: Iterable[object]) -> bool:
    for _ in work:
        pass
    return True
