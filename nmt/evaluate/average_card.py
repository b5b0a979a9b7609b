"""The model card beside an average: README.md with the fields that the Hugging Face hub reads, scores and all.

It is written with the average and again whenever a score is added, from what the folder and results.json know; of
the scores only those of these very weights. It is no part of the manifest, for it changes while the model does not. Its
last line holds a digest of the rest: a card that somebody has edited is theirs, and is refused, never overwritten.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nmt.average.mean import is_our_card, marked
from nmt.checkpoint import Average, read_origin
from nmt.config import RunConfig, load_config
from nmt.data.vocab import Vocab
from nmt.evaluate.card import datasets, front_matter, model_rows, origin, table, training_text
from nmt.evaluate.results import Result, run_of
from nmt.score.score import Score
from nmt.system.errors import UserError
from nmt.system.files import read_manifest, write_text
from nmt.system.run_folder import CARD_FILE, CONFIG_FILE, MODEL_FILE, STATE_FILE, VOCAB_FILE

NEWSTEST = {
    "newstest2014": "test",
    "newstest2013": "validation",
}  # splits of wmt/wmt14; the filtered wmt14 is none
METRICS = {"BLEU": "bleu", "chrF": "chrf", "TER": "ter"}  # by how a score's name begins
COMPARE = "\n\nScores of different signatures are different scales: compare only equal ones."
SHOWN = ("beam", "penalty", "length_penalty", "sample")  # of the search, in the table


def write_card(folder: Path, results: Sequence[Result]) -> None:
    """Write README.md into the folder of an average; any other kind of folder has none."""
    if not (folder / STATE_FILE).is_file():
        return
    average = read_origin(folder)
    if not isinstance(average, Average):
        return
    path = folder / CARD_FILE
    if (path.exists() or path.is_symlink()) and not is_our_card(path):
        raise UserError(
            f"{path}: was edited since nmt wrote it, or is not nmt's; it is left as it is: move it away to "
            "have it written anew"
        )
    manifest, config = read_manifest(folder), load_config(str(folder / CONFIG_FILE))
    digests = {name: manifest[name]["sha256"] for name in (MODEL_FILE, VOCAB_FILE)}
    ours = [
        result
        for result in results
        if (result.weights_sha256, result.vocab_sha256)
        == (digests[MODEL_FILE], digests[VOCAB_FILE])
    ]
    write_text(
        path,
        marked(
            text(
                average,
                config,
                Vocab.load(folder / VOCAB_FILE).size,
                digests,
                ours,
                run_of(folder) is not None,
            )
        ),
    )


def text(
    average: Average,
    config: RunConfig,
    vocab_size: int,
    digests: dict[str, str],
    results: Sequence[Result],
    is_in_run: bool,
) -> str:
    data = config.data
    more: dict[str, Any] = {"tags": ["translation", "transformer", "attention-is-all-you-need"]}
    if known := datasets(config):
        more["datasets"] = known
    if results:
        more["model-index"] = [
            {"name": config.name, "results": [_indexed(result) for result in results]}
        ]
    rows = {
        "languages": f"{data.src} -> {data.tgt}",
        "weights": origin(average.checkpoints, average.step, config),
        "checkpoints": _ages(average),
        "training text": training_text(config),
        **model_rows(config, vocab_size),
        **_recipe(config),
        "sha256 of the weights": f"`{digests[MODEL_FILE]}`",
        "sha256 of the BPE model": f"`{digests[VOCAB_FILE]}`",
    }
    scored = [_row(result, score) for result in results for score in result.scores]
    scores = (
        table([("test set", "score", "95% interval", "signature", "search"), *scored]) + COMPARE
        if scored
        else "None was computed for these weights yet; "
        + (
            "`nmt-eval` adds what it finds."
            if is_in_run
            else "what `nmt-eval` finds is kept, and added here, only while this folder lies in a run folder."
        )
    )
    return f"""\
{front_matter(config, "nmt", more)}
# {config.name}: {data.src} -> {data.tgt}

A Transformer of *Attention Is All You Need*, trained with nmt.

{table([("", ""), *rows.items()])}

All settings stand in `config.yaml`, the sha256 of each file in `manifest.json`. No licence of the weights is known.

## Scores

{scores}

## Use

    nmt-translate . < text.{data.src} > text.{data.tgt}
    nmt-eval . --src text.{data.src} --ref reference.{data.tgt}
    nmt-export . --to huggingface -o ../exported

"""


def _ages(average: Average) -> str:
    names, seconds, weights = average.checkpoints, average.elapsed_s, average.weights
    ages = (
        [""] * len(names)
        if seconds is None
        else [f" at minute {each / 60:.1f}" for each in seconds]
    )
    shares = [""] * len(names) if weights is None else [f", weight {each:.4f}" for each in weights]
    return "; ".join(map("".join, zip(names, ages, shares, strict=True)))


def _recipe(config: RunConfig) -> dict[str, str]:
    training, optimizer = config.training, config.optimizer
    return {
        "updates planned": f"{training.steps:,} of about {training.src_tokens:,} + {training.tgt_tokens:,} tokens",
        "optimizer": f"Adam, beta {optimizer.beta1:g} and {optimizer.beta2:g}, epsilon {optimizer.eps:g}; rate "
        f"{optimizer.scale:g} * d_model^-0.5 * min(step^-0.5, step * {optimizer.warmup_steps}^-1.5)",
        "regularisation": f"dropout {config.model.dropout:g}, label smoothing {training.label_smoothing:g}",
        "precision, seed": f"{training.precision}, {config.seed}",
    }


def _row(result: Result, score: Score) -> tuple[str, ...]:
    interval = f"{score.interval.low:.2f} to {score.interval.high:.2f}" if score.interval else ""
    search = ", ".join(f"{key} {result.decoding[key]}" for key in SHOWN if key in result.decoding)
    return (
        f"{result.test_set.name} {result.pair}, {result.test_set.lines:,} lines",
        f"{score.name} {score.value:.2f}",
        interval,
        f"`{score.signature}`",
        f"{result.engine}: {search}",
    )


def _indexed(result: Result) -> dict[str, Any]:
    """A result as the hub's model-index has it; nobody but ourselves has verified it."""
    name, pair = result.test_set.name, set(result.pair.split("-"))
    dataset: dict[str, Any] = {
        "name": name,
        "type": name.replace("/", "-").replace(" ", "-"),
        "split": "test",
    }
    if name in NEWSTEST and "en" in pair and len(pair) == 2:
        (other,) = pair - {"en"}
        dataset |= {"type": "wmt/wmt14", "config": f"{other}-en", "split": NEWSTEST[name]}
    dataset["args"] = {
        "lines": result.test_set.lines,
        "src_sha256": result.test_set.src_sha256,
        "ref_sha256": result.test_set.ref_sha256,
    }
    metrics = []
    for score in result.scores:
        kind = next(
            (kind for begin, kind in METRICS.items() if score.name.startswith(begin)),
            score.name.lower(),
        )
        metrics.append(
            {
                "type": kind,
                "value": round(score.value, 4),
                "name": f"{score.name} ({score.signature})",
                "verified": False,
            }
        )
    return {
        "task": {"type": "translation", "name": f"Translation {result.pair}"},
        "dataset": dataset,
        "metrics": metrics,
    }
