"""For a small corpus: a model of each direction translates the training text, and the model that is wanted
learns from the text and both translations (data diversification, Nguyen et al. 2020).

    python scripts/diversify.py --gpus 2 --config multi30k.yaml data.root=multi30k

The arguments are those of nmt-launch, the text is files of lines, and half the steps have ten checkpoints. RUN,
the run folder, gets RUN/average, and RUN-forward, RUN-backward and RUN-text stay beside it. Killed, it goes on.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml


def run(*command: str, stdout: int | None = None) -> bytes:
    done = subprocess.run(command, stdout=stdout)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def train(folder: str, steps: int, data: dict[str, object]) -> str:
    """Train with these settings of `data`, and return the mean of the last ten checkpoints."""
    settings = [f"out={folder}", f"training.steps={steps}", f"data.store={folder}/store"]
    for key, value in data.items():
        settings.append(f"data.{key}={json.dumps(value)}")
    run("nmt-launch", *sys.argv[1:], *settings)
    run("nmt-average", folder, "--last", "10")
    return f"{folder}/average"


def turn(pair: dict[str, Any]) -> dict[str, Any]:
    if "src" not in pair:
        print("diversify.py: error: give files of lines, {src: FILE, tgt: FILE}", file=sys.stderr)
        sys.exit(2)
    return pair | {"src": pair["tgt"], "tgt": pair["src"]}


config = yaml.safe_load(run("nmt-train", *sys.argv[1:], "--print-config", stdout=subprocess.PIPE))
data, steps = config["data"], config["training"]["steps"]
final = config["out"] or f"runs/{config['name']}"
turned = {"src": data["tgt"], "tgt": data["src"], "valid": turn(data["valid"]), "test": None}
turned["train"] = list(map(turn, data["train"]))
forward = train(f"{final}-forward", steps // 2, {})
backward = train(f"{final}-backward", steps // 2, turned)

corpora = list(data["train"])
text = Path(f"{final}-text").absolute()
text.mkdir(exist_ok=True)
for number, pair in enumerate(data["train"]):
    for side, other, model in ("src", "tgt", forward), ("tgt", "src", backward):
        written = str(text / f"{number}.{data[other]}")
        source = str(Path(data["root"] or "", pair[side]))
        run("nmt-translate", model, "-i", source, "-o", written, "--resume")
        corpora.append(pair | {other: written})
train(final, steps, {"train": corpora})
