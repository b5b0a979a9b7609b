"""Measures dev BLEU against the number of checkpoints averaged: the paper took 5 and 20, your run
may want another.

Only the dev set of the run's store is decoded, by the code that validation uses. The test set is
never opened, because a score that was tuned on it could not be reported. Each mean is made in
memory, which takes as much as one model; the only file written is RUN/averaging.json, complete or
not at all.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from nmt.average.dev_check import open_dev_of_run
from nmt.average.mean import average_tensors, open_all, sort_as_one_run
from nmt.average.select import Candidate, list_candidates, take_last
from nmt.checkpoint.checkpoint import Checkpoint
from nmt.score.score import compute_perplexity
from nmt.system.device import choose_device
from nmt.system.files import digest_file, write_json
from nmt.system.progress import clock, format_duration, say
from nmt.system.ranks import World
from nmt.system.run_folder import RunFolder, dev_text_file
from nmt.system.strict_json import Fields
from nmt.train.resolve import resolve_micro_tokens
from nmt.train.validate import choose_dev_lines, validate
from nmt.translate.translator import make_translator

CURVE_SIZES = (1, 2, 3, 5, 10, 20)


@dataclass(frozen=True)
class Point:
    """The scores of the mean of the newest `n`."""

    n: int
    steps: list[int]
    minutes: list[float]  # of training, at each of these updates
    bleu: float
    nll: float


def measure_curve(
    run: RunFolder,
    candidates: Sequence[Candidate],
    sizes: Sequence[int],
    choice: str,
    device: Literal["auto", "cpu"],
) -> list[Point]:
    """Score the mean of the newest N candidates for each N; write RUN/averaging.json."""
    world = World(0, 1, choose_device(device))
    paths = [run.checkpoint(candidate.step) for candidate in candidates[-max(sizes) :]]

    # Open the dev set before the other checkpoints: it may be missing, and verifying takes long.
    (newest,) = open_all(paths[-1:])
    config = replace(newest.config, evaluation=replace(newest.config.evaluation, bleu=True))
    store = Path(config.data.store)
    dev = open_dev_of_run(config.data, newest.vocab)
    n_lines = len(choose_dev_lines(len(dev.sources), config.evaluation.sentences))
    if n_lines < len(dev.sources):
        part = f"{n_lines:,} of the {len(dev.sources):,} dev lines"
        say(f"this curve uses {part}; evaluation.sentences=null uses them all")
    micro_tokens = resolve_micro_tokens(config, config, world)
    checkpoints = [*open_all(paths[:-1]), newest]

    points = []
    signature = ""
    for n in sizes:
        started_at = clock()

        # average
        translator = make_translator(newest, world.device, config.dev_decoding)
        load_mean(sort_as_one_run(checkpoints[-n:]), translator.model)

        # score
        result = validate(
            translator, dev, candidates[-1].step, config.evaluation, micro_tokens, world
        )
        assert result is not None and result.bleu is not None
        bleu = result.bleu.value
        signature = result.bleu.signature
        chosen = candidates[-n:]
        steps = [candidate.step for candidate in chosen]
        minutes = [round(candidate.elapsed_s / 60, 2) for candidate in chosen]
        points.append(Point(n, steps, minutes, bleu, result.nll))
        duration = format_duration(clock() - started_at)
        say(f"mean of the last {n}: dev BLEU {bleu:.2f}, in {duration}")

    record: Fields = {
        "choice": choice,
        "best_n": find_best_point(points).n,
        "points": [asdict(point) for point in points],
        "dev_set": {
            "store": str(store),
            "lines": n_lines,
            "all_lines": len(dev.sources),
            "src_sha256": digest_file(store / dev_text_file("src")),
            "ref_sha256": digest_file(store / dev_text_file("tgt")),
        },
        "signature": signature,
        "decoding": asdict(config.dev_decoding),
    }
    write_json(run.curve, record)
    return points


@torch.no_grad()
def load_mean(checkpoints: Sequence[Checkpoint], model: nn.Module) -> None:
    """Copy the mean into the weights of `model`."""
    weights = dict(model.named_parameters())
    for name, tensor in average_tensors(checkpoints):
        weights[name].copy_(tensor)


def draw_curve(
    run: RunFolder, counts: Sequence[int], minutes: float | None, device: Literal["auto", "cpu"]
) -> str:
    """Measure the curve of `nmt-average --curve`; without counts, of as many as there are."""
    candidates = list_candidates(run, minutes)
    sizes = sorted(set(counts))
    if not sizes:
        sizes = [n for n in CURVE_SIZES if n <= len(candidates)] or [1]
    take_last(candidates, max(sizes), run, minutes)  # an error if there are too few
    choice = "the last N" if minutes is None else f"the last N, {minutes:g} minutes apart"
    points = measure_curve(run, candidates, sizes, choice, device)
    return (
        f"{run.path}: dev BLEU of the mean of {choice}\n{format_curve(points)}\n"
        f"best: N = {find_best_point(points).n}; {run.curve}"
    )


def find_best_point(points: Sequence[Point]) -> Point:
    """Return the point of highest BLEU; among equals, the one of fewest checkpoints."""
    return max(points, key=lambda point: (point.bleu, -point.n))


def format_curve(points: Sequence[Point]) -> str:
    """Format the points as a table, with the best marked by a star."""
    lines = [" N          updates      minutes  dev BLEU   dev perplexity"]
    best = find_best_point(points)
    for point in points:
        mark = "*" if point is best else " "
        updates, minutes = _format_range(point.steps, ",d"), _format_range(point.minutes, ".1f")
        perplexity = compute_perplexity(point.nll)
        lines.append(
            f"{point.n:2} {updates:>16} {minutes:>12} {point.bleu:9.2f}{mark} {perplexity:15.3f}"
        )
    return "\n".join(lines)


def _format_range(values: Sequence[float], style: str) -> str:
    first, last = format(values[0], style), format(values[-1], style)
    return first if len(values) == 1 else f"{first}-{last}"
