"""For a small corpus: a model of each direction translates the training text, and the model that is wanted
learns from the text and both translations (data diversification, Nguyen et al. 2020).

    python scripts/diversify.py --gpus 2 --config multi30k.yaml data.root=multi30k

The arguments are those of nmt-launch, the text is files of lines. RUN, the run folder, gets RUN/average;
RUN-forward, RUN-backward and RUN-text stay beside it. After an interruption the same command goes on.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml


def run(*command: str) -> bytes:
    is_asked = "--print-config" in command
    done = subprocess.run(command, stdout=subprocess.PIPE if is_asked else None)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def train(folder: str, **data: object) -> str:
    """Train on the command's arguments and these settings of `data`; return the mean of ten checkpoints."""
    words = [f"data.{key}={json.dumps(value)}" for key, value in data.items()]
    half = [] if folder == final else [f"training.steps={config['training']['steps'] // 2}"]
    run("nmt-launch", *sys.argv[1:], f"out={folder}", f"data.store={folder}/store", *half, *words)
    run("nmt-average", folder, "--last", "10")
    return f"{folder}/average"


def turn(pair: Any) -> Any:
    return pair | {"src": pair["tgt"], "tgt": pair["src"]} if pair else pair


config = yaml.safe_load(run("nmt-train", *sys.argv[1:], "--print-config"))
final, asked = config["out"] or f"runs/{config['name']}", config["data"]
corpora = asked["train"]
if not all("src" in pair for pair in (*corpora, asked["valid"], asked["test"] or {"src": ""})):
    print(
        "diversify.py: error: data: give files of lines, as {src: FILE, tgt: FILE}", file=sys.stderr
    )
    sys.exit(2)
turned = {"src": asked["tgt"], "tgt": asked["src"], "train": [turn(pair) for pair in corpora]}
turned |= {name: turn(asked[name]) for name in ("valid", "test")}
models = {"src": train(f"{final}-forward"), "tgt": train(f"{final}-backward", **turned)}

text = Path(f"{final}-text").absolute()
text.mkdir(exist_ok=True)
written = []
for number, pair in enumerate(corpora):
    for side, other in ("src", "tgt"), ("tgt", "src"):
        source, output = Path(asked["root"] or "", pair[side]), text / f"{number}.{asked[other]}"
        run("nmt-translate", models[side], "-i", str(source), "-o", str(output), "--resume")
        written.append(pair | {other: str(output)})
train(final, train=corpora + written)
