"""Writes configs/references/NAME.json: the dev scores of several runs of a shipped config, beside which
nmt-train puts those of a user's run (nmt/train/reference_curve.py).

    python scripts/make_reference_curve.py demo.yaml RUN RUN RUN
    python scripts/make_reference_curve.py small.yaml docs/results/small-seeds/*-seed* --store data/small

A RUN has config.yaml and metrics.jsonl: a run folder, or what is published of one. The store tells on
which text it was trained; published configs do not say where that is, hence --store.
"""

import argparse
import json
import sys
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
from nmt.system.run_folder import RunFolder
from nmt.train.metrics_log import read_metrics
from nmt.train.reference_curve import IGNORED, read_reference

SECTIONS = ("vocab", "model", "optimizer", "training", "decoding", "evaluation")
DIGITS = 4


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
    shipped = load_config(name)
    configs = [load_recorded_config(RunFolder(run).config) for run in runs]
    for run, config in zip(runs, configs, strict=True):
        # the same task, and everything that matters for the dev scores
        if differences := list_differences(shipped, config, IGNORED):
            raise UserError(f"{run}: is no run of {name} ({'; '.join(differences)})")
    seeds = [config.seed for config in configs]
    if len(set(seeds)) < max(2, len(seeds)):
        raise UserError(f"{', '.join(map(str, runs))}: give two or more runs of different seeds")

    scores = [read_scores(run) for run in runs]
    steps = sorted(set(scores[0]).intersection(*scores[1:]))
    if not steps:
        raise UserError(f"{', '.join(map(str, runs))}: have no validation in common")
    points = []
    for step in steps:
        nll, bleu = zip(*(own[step] for own in scores), strict=True)
        points.append({"step": step, "nll": nll, "bleu": [] if None in bleu else bleu})

    folder = Path(store or configs[0].data.store)
    values = {
        "store": read_ledger(folder).store,
        "seeds": seeds,
        "settings": list_sections(configs[0]),
        "points": points,
    }
    path = find_shipped_configs() / "references" / f"{Path(name).stem}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(format_values(values))
    assert read_reference(path, configs[-1], folder) is not None
    return path


def read_scores(run: Path) -> dict[int, tuple[float, float | None]]:
    """NLL and BLEU by update."""
    lines, _ = read_metrics(RunFolder(run).metrics)
    found = {}
    for line in lines:
        if line.kind == "valid":
            bleu = line.numbers.get("bleu")
            nll = round(line.numbers["nll"], DIGITS)
            found[line.step] = (nll, None if bleu is None else round(bleu, DIGITS))
    return found


def list_sections(config: RunConfig) -> dict[str, Any]:
    """The settings, without those that name places or do not matter."""
    values = to_plain_values(config)
    sections = {}
    for section in SECTIONS:
        kept = {key: value for key, value in values[section].items() if is_kept(section, key)}
        if kept:
            sections[section] = kept
    return sections


def is_kept(section: str, key: str) -> bool:
    name = f"{section}.{key}"
    return name == "training.steps" or name not in IGNORED  # a cosine depends on the steps


def format_values(values: dict[str, Any]) -> str:
    """JSON with a line for each section of the settings and for each validation."""
    sections = [f'"{name}": {json.dumps(keys)}' for name, keys in values["settings"].items()]
    points = [json.dumps(point) for point in values["points"]]
    parts = [
        f'"store": {json.dumps(values["store"])}',
        f'"seeds": {json.dumps(values["seeds"])}',
        '"settings": {\n  ' + ",\n  ".join(sections) + "\n }",
        '"points": [\n  ' + ",\n  ".join(points) + "\n ]",
    ]
    return "{\n " + ",\n ".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
