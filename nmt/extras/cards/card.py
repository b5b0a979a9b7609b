"""The model card, README.md: what a model is, where it comes from, how it scored, and how to use
it.

Averages and exports share one template. A card states only what the checkpoint and results.json
record, and says so where they record nothing. The card of an average is written again whenever a score
is added, so it is not in the manifest; its last line holds a digest of the rest, and an edited card
is never overwritten. Names and signatures may be untrusted: they are shown as written, and never
become a link, HTML or another entry of the metadata.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nmt.checkpoint.checkpoint import Average, Checkpoint, read_origin
from nmt.config import DataConfig, RunConfig
from nmt.config_files import load_recorded_config
from nmt.data.vocab import Vocab, Vocabulary, load_vocab
from nmt.evaluate.results import Result, describe_other_search, find_last_step, find_run
from nmt.extras.cards.description import (
    describe_model,
    describe_search,
    describe_training,
    describe_training_text,
)
from nmt.known_test_sets import WMT14, WMT14_SPLITS
from nmt.score.score import Score
from nmt.system.errors import UserError
from nmt.system.escapes import escape_line, escape_markdown
from nmt.system.files import has_plain_file, read_manifest, write_text
from nmt.system.output_folder import is_unedited_card, sign_card
from nmt.system.run_folder import (
    CARD_FILE,
    CONFIG_FILE,
    MODEL_FILE,
    STATE_FILE,
)
from nmt.system.strict_json import Fields
from nmt.system.strict_yaml import format_yaml
from nmt.system.tables import Cell, Code, Table

TEMPLATE = """\
---
{metadata}
---

# {name}: {src} -> {tgt}

{introduction}

{facts}

All settings are in `config.yaml`, the sha256 of each file in `manifest.json`. {licence}

## Scores

{scores}

## Use

{usage}"""
AVERAGE_USAGE = """\
    nmt-translate . < {src_text} > {tgt_text}
    nmt-eval . --src {src_text} --ref {reference}
    nmt-export . --to huggingface -o ../exported
"""
METRIC_TYPES = {"BLEU": "bleu", "chrF": "chrf", "TER": "ter"}  # by how a score's name begins


def write_average_card(folder: Path, results: Sequence[Result]) -> None:
    """Write README.md into the folder of an average; other folders get none.

    Of the results only those of these very weights are listed.
    """
    if not has_plain_file(folder / STATE_FILE):
        return
    average = read_origin(folder)
    if not isinstance(average, Average):
        return
    path = folder / CARD_FILE
    if os.path.lexists(path) and not is_unedited_card(path):
        raise UserError(
            f"{path}: was edited, or was not written by nmt, so it is left unchanged; "
            "move it away to get a new one"
        )
    weights = read_manifest(folder)[MODEL_FILE]["sha256"]
    vocab = load_vocab(folder)
    own_results = [
        result
        for result in results
        if (result.weights_sha256, result.vocab_sha256) == (weights, vocab.digest)
    ]
    config = load_recorded_config(folder / CONFIG_FILE)
    n_updates = max(config.training.steps, find_last_step(folder))
    origin = _describe_origin(average.averaged, average.step, n_updates)
    facts: dict[str, Cell] = {
        "weights": f"{origin} of the run {config.name}",
        "checkpoints": _describe_checkpoints(average),
        **describe_model(config.model, vocab),
        "meant to decode with": describe_search(config.decoding),
        **describe_training(config.training, config.optimizer, config.model, config.seed),
        "sha256 of the weights": Code(weights),
        **_name_vocab(vocab),
    }
    unscored = "None was computed for these weights yet; "
    if find_run(folder) is not None:
        unscored += "`nmt-eval` adds what it finds."
    else:
        unscored += "what `nmt-eval` finds is kept, and added here, only while this folder is in a run folder."
    card = _render_card(
        config,
        library="nmt",
        introduction="A Transformer of *Attention Is All You Need*, trained with nmt.",
        facts=facts,
        unscored=unscored,
        usage=_explain_average(config.data),
        results=own_results,
    )
    write_text(path, sign_card(card + "\n"))


def _explain_average(data: DataConfig) -> str:
    def name_file(what: str, language: str) -> str:
        return shlex.quote(escape_line(f"{what}.{language}"))

    return AVERAGE_USAGE.format(
        src_text=name_file("text", data.src),
        tgt_text=name_file("text", data.tgt),
        reference=name_file("reference", data.tgt),
    )


def render_export_card(
    checkpoint: Checkpoint, to: str, quantization: str, library: str, agreement: str, usage: str
) -> str:
    """Return the card that is sealed with an export in the format `to`.

    `agreement` is the result of comparing the export with the checkpoint, and `usage` how its
    library loads it.
    """
    config = checkpoint.config
    origin = _describe_origin(checkpoint.averaged, checkpoint.step, config.training.steps)
    return _render_card(
        config,
        library=library,
        introduction="A Transformer of *Attention Is All You Need*, trained with nmt and exported by "
        f"`nmt-export --to {to}`.",
        facts={
            "weights": f"{origin} of the run {config.name}; {quantization}",
            **describe_model(config.model, checkpoint.vocab),
            "meant to decode with": describe_search(config.decoding),
            "sha256 of the weights it was made from": Code(checkpoint.sha256[MODEL_FILE]),
            **_name_vocab(checkpoint.vocab),
            "compared with its origin": agreement,
        },
        unscored="None was computed for this export.",
        usage=usage,
    )


def _render_card(
    config: RunConfig,
    *,
    library: str,
    introduction: str,
    facts: Mapping[str, Cell],
    unscored: str,
    usage: str,
    results: Sequence[Result] = (),
) -> str:
    """Return a card; `library` is what loads the model, by its name on the hub, and `unscored` what is
    said where scores would be.
    """
    data = config.data
    licence = "No licence of the weights is known."
    if config.license:
        licence = f"The licence of the weights is {escape_markdown(config.license)}."
    rows: dict[str, Cell] = {
        "languages": f"{data.src} -> {data.tgt}",
        "training text": describe_training_text(data),
        **facts,
    }
    scored = [result for result in results if result.scores]
    return TEMPLATE.format(
        metadata=_render_metadata(config, library, scored),
        name=escape_markdown(config.name),
        src=escape_markdown(data.src),
        tgt=escape_markdown(data.tgt),
        introduction=introduction,
        facts=Table(("", ""), list(rows.items())).to_markdown(),
        licence=licence,
        scores=_format_score_table(scored, config) if scored else unscored,
        usage=usage,
    )


# ---- what machines read ---------------------------------------------------------------------------------------------


def _render_metadata(config: RunConfig, library: str, results: Sequence[Result]) -> str:
    """Return the YAML at the top of the card, as the Hugging Face hub defines it."""
    metadata: Fields = {"language": [config.data.src, config.data.tgt]}
    if config.license:
        metadata["license"] = config.license
    metadata |= {
        "library_name": library,
        "pipeline_tag": "translation",
        "tags": ["translation", "transformer", "attention-is-all-you-need"],
    }
    if datasets := _list_hub_datasets(config.data):
        metadata["datasets"] = datasets
    if results:
        entries = [_describe_result(result, config) for result in results]
        metadata["model-index"] = [{"name": config.name, "results": entries}]
    return format_yaml(_escape_strings(metadata)).strip()


def _escape_strings(value: Any) -> Any:
    """Return plain values whose strings are each one line that does nothing but appear."""
    if isinstance(value, str):
        return escape_line(value)
    if isinstance(value, list):
        return [_escape_strings(item) for item in value]
    if isinstance(value, dict):
        return {key: _escape_strings(item) for key, item in value.items()}
    return value


def _describe_result(result: Result, config: RunConfig) -> Fields:
    """Return the scores of a test set as an entry of the hub's model-index, marked unverified."""
    test_set, languages = result.test_set, set(result.pair.split("-"))
    dataset = {"name": test_set.name, "type": re.sub("[/ ]", "-", test_set.name), "split": "test"}
    if test_set.name in WMT14_SPLITS and "en" in languages and len(languages) == 2:
        (other,) = languages - {"en"}
        dataset |= {"type": WMT14, "config": f"{other}-en", "split": WMT14_SPLITS[test_set.name]}
    digests = {"src_sha256": test_set.src_sha256, "ref_sha256": test_set.ref_sha256}
    return {
        "task": {"type": "translation", "name": f"Translation {result.pair}"},
        "dataset": dataset | {"args": {"lines": test_set.lines} | digests},
        "metrics": [
            _describe_metric(score, describe_other_search(result.find_other_search(config)))
            for score in result.scores
        ],
    }


def _describe_metric(score: Score, other_search: str) -> Fields:
    known = (kind for begin, kind in METRIC_TYPES.items() if score.name.startswith(begin))
    return {
        "type": next(known, score.name.lower()),
        "value": round(score.value, 4),
        "name": f"{score.name} ({score.signature}){other_search}",
        "verified": False,
    }


def _list_hub_datasets(data: DataConfig) -> list[str]:
    """Return the training corpora that are on the hub, by their names there."""
    names = set()
    for corpus in data.train:
        name = corpus.dataset
        if name is None or (Path(data.root) / name).exists():
            continue  # it is in files, or in a local folder
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            names.add(name)
    return sorted(names)


# ---- what people read -----------------------------------------------------------------------------------------------


def _describe_origin(averaged: Sequence[str], step: int, steps: int) -> str:
    if averaged and step == 0:  # a published model, which has no updates of its own here
        return f"those of {averaged[0]}"
    if not averaged:
        return f"the checkpoint at update {step:,} of {steps:,}"
    count = f"{len(averaged)} checkpoints" if len(averaged) > 1 else "one checkpoint"
    return f"the mean of {count}, the last at update {step:,} of {steps:,}"


def _name_vocab(vocab: Vocabulary) -> dict[str, Cell]:
    """Return a row with the digest of each BPE model."""
    if isinstance(vocab, Vocab):
        return {"sha256 of the BPE model": Code(vocab.digest)}
    return {f"sha256 of {name}": Code(side.digest) for name, side in vocab.files.items()}


def _describe_checkpoints(average: Average) -> str:
    described = []
    for i, name in enumerate(average.averaged):
        part = name
        if average.elapsed_s is not None:
            part += f" at minute {average.elapsed_s[i] / 60:.1f}"
        described.append(part)
    return "; ".join(described)


def _format_score_table(results: Sequence[Result], config: RunConfig) -> str:
    head = ("test set", "score", "95% interval", "signature", "search")
    rows: list[Sequence[Cell]] = []
    for result in results:
        for score in result.scores:
            value = f"{score.name} {score.value:.2f}"
            interval = score.format_interval()
            signature = Code(score.signature)
            search = result.search + describe_other_search(result.find_other_search(config))
            rows.append((result.scored_text, value, interval, signature, search))
    note = "Scores of different signatures are different scales: compare only equal ones."
    return f"{Table(head, rows).to_markdown()}\n\n{note}"
