"""Writes configs/references/NAME.json: the dev scores of several runs of a shipped config, with which
nmt-train compares a user's run (nmt/train/reference_curve.py).

    python scripts/make_reference_curve.py demo.yaml RUN RUN RUN
    python scripts/make_reference_curve.py demo.yaml RUN RUN RUN --store STORE

A RUN is a run folder, of which config.yaml and metrics.jsonl are enough. If its store has moved, --store
says where it is.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nmt.config import (
    RunConfig,
    find_shipped_configs,
    list_differences,
    load_config,
    load_recorded_config,
    to_plain_values,
)
from nmt.corpus.ledger import read_ledger
from nmt.system.errors import UserError
from nmt.system.files import write_text
from nmt.system.run_folder import RunFolder
from nmt.train.events import ValidEvent
from nmt.train.metrics_log import read_events
from nmt.train.reference_curve import IGNORED_KEYS, ReferenceCurve, ReferencePoint

SECTIONS = ("vocab", "model", "optimizer", "training", "decoding", "evaluation")
DIGITS = 4
Scores = dict[int, Mapping[str, float]]  # by update: the numbers of each validation


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the reference curve of a shipped config.")
    parser.add_argument("config", metavar="CONFIG", help="its name, such as demo.yaml")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs of it with different seeds")
    parser.add_argument("--store", help="what they were trained on; default: as the first run says")
    args = parser.parse_args()
    try:
        path = write_reference(args.config, list(map(Path, args.runs)), args.store)
    except UserError as error:
        parser.error(str(error))
    print(f"wrote {path}")
    return 0


def write_reference(name: str, runs: list[Path], store: str | None) -> Path:
    curve = make_reference(name, runs, store)
    path = find_shipped_configs() / "references" / f"{Path(name).stem}.json"
    path.parent.mkdir(exist_ok=True)
    write_text(path, format_reference(curve))
    return path


def make_reference(name: str, runs: list[Path], store: str | None) -> ReferenceCurve:
    shipped = load_config(name)
    if shipped.data.is_mixed:
        raise UserError(f"{name}: mixes corpora, which the digest of a store does not cover")
    configs = [load_recorded_config(RunFolder(run).config) for run in runs]
    for run, config in zip(runs, configs, strict=True):
        if differences := list_differences(shipped, config, IGNORED_KEYS):
            raise UserError(f"{run}: is no run of {name} ({'; '.join(differences)})")
    seeds = [config.seed for config in configs]
    if len(set(seeds)) < len(seeds):
        raise UserError(f"{name}: seeds {', '.join(map(str, seeds))}: each run needs its own")

    scores = [read_scores(run) for run in runs]
    steps = sorted(set(scores[0]).intersection(*scores[1:]))
    if not steps:
        raise UserError(f"{', '.join(map(str, runs))}: have no validation in common")
    points = [collect_point(step, scores) for step in steps]

    digest = read_ledger(Path(store or configs[0].data.store)).store
    curve = ReferenceCurve(digest, seeds, shipped, points)
    if problem := curve.check():
        raise UserError(f"{name}: {problem}")
    return curve


def collect_point(step: int, scores: list[Scores]) -> ReferencePoint:
    """Collect the scores of all runs after one update; BLEU only if each run has it."""
    nlls, bleus = [], []
    for own in scores:
        numbers = own[step]
        nlls.append(round(numbers["nll"], DIGITS))
        if "bleu" in numbers:
            bleus.append(round(numbers["bleu"], DIGITS))
    if len(bleus) < len(nlls):
        bleus = []
    return ReferencePoint(step, nlls, bleus)


def read_scores(run: Path) -> Scores:
    events, _ = read_events(RunFolder(run).metrics)
    validations = [event for event in events if isinstance(event, ValidEvent)]
    return {event.step: event.figures for event in validations if "nll" in event.figures}


def select_settings(config: RunConfig) -> dict[str, Any]:
    """The settings, by section, in which runs of the config must agree."""
    values = to_plain_values(config)
    sections: dict[str, dict[str, Any]] = {}
    for section in SECTIONS:
        for key, value in values[section].items():
            if is_kept(section, key):
                sections.setdefault(section, {})[key] = value
    return sections


def is_kept(section: str, key: str) -> bool:
    name = f"{section}.{key}"
    # The rates of a cosine schedule depend on the steps.
    return name == "training.steps" or name not in IGNORED_KEYS


def format_reference(curve: ReferenceCurve) -> str:
    """JSON with a line for each section of the settings and for each validation."""
    settings = select_settings(curve.settings)
    sections = [f'"{name}": {json.dumps(values)}' for name, values in settings.items()]
    points = [json.dumps(dataclasses.asdict(point)) for point in curve.points]
    parts = [
        f'"store": {json.dumps(curve.store)}',
        f'"seeds": {json.dumps(curve.seeds)}',
        '"settings": {\n  ' + ",\n  ".join(sections) + "\n }",
        '"points": [\n  ' + ",\n  ".join(points) + "\n ]",
    ]
    return "{\n " + ",\n ".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
