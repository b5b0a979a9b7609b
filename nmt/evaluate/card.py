"""The card that travels with an export: what a model is, where it comes from, how to use it, and what was checked.

It says only what the checkpoint knows. There is no score in it, for none was computed, and no licence, for nobody has
said under which one the weights may be used. What the card of an average (average_card.py) says alike stands here too.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nmt.config import RunConfig
from nmt.corpus.reader import describe

USE = {
    "ctranslate2": """\
    import ctranslate2, sentencepiece

    pieces = sentencepiece.SentencePieceProcessor("vocab.model")
    engine = ctranslate2.Translator(".")
    line = pieces.encode("A sentence.", out_type=str)
    found = engine.translate_batch([line], beam_size={beam}, length_penalty={alpha}, min_decoding_length=0,
                                   max_decoding_length=len(line) + {extra}, max_input_length=0)
    print(pieces.decode(found[0].hypotheses[0]))
""",
    "huggingface": """\
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer  # 5 or newer

    tokenizer = AutoTokenizer.from_pretrained(".")
    model = AutoModelForSeq2SeqLM.from_pretrained(".", use_safetensors=True)
    line = tokenizer("A sentence.", return_tensors="pt")
    found = model.generate(**line, max_new_tokens=line.input_ids.shape[1] + {extra})
    print(tokenizer.decode(found[0], skip_special_tokens=True))
""",
    "safetensors": """\
    from safetensors import safe_open

    with safe_open("model.safetensors", "pt") as file:
        config = file.metadata()["config"]          # YAML, as in config.yaml
        weights = {{name: file.get_tensor(name) for name in file.keys()}}
""",
}
LIBRARIES = {
    "ctranslate2": "ctranslate2",
    "huggingface": "transformers",
    "safetensors": "safetensors",
}
FORMULAS = {"gnmt": "((5 + n) / 6)^{alpha:g}", "length": "n^{alpha:g}", "none": "1"}


def front_matter(config: RunConfig, library: str, more: Mapping[str, Any]) -> str:
    """What machines read of a card, as the Hugging Face hub has it."""
    values = {
        "language": [config.data.src, config.data.tgt],
        "library_name": library,
        "pipeline_tag": "translation",
        **more,
    }
    return f"---\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)}---\n"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of Markdown, the first above the line; a bar would begin another cell."""
    lines = [
        "| " + " | ".join(re.sub(r"\s+", " ", cell).replace("|", r"\|") for cell in row) + " |"
        for row in rows
    ]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def datasets(config: RunConfig) -> list[str]:
    """The training text that the hub has, by its names there."""
    names = [corpus.dataset for corpus in config.data.train if corpus.dataset is not None]
    return sorted(
        {
            name
            for name in names
            if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
            and not (Path(config.data.root) / name).exists()
        }
    )


def origin(averaged: Sequence[str], step: int, config: RunConfig) -> str:
    """Where the weights are from."""
    if averaged:
        count = f"{len(averaged)} checkpoints" if len(averaged) > 1 else "one checkpoint"
        return f"the mean of {count}, the last at update {step:,} of the run {config.name}"
    return (
        f"the checkpoint at update {step:,} of {config.training.steps:,} of the run {config.name}"
    )


def model_rows(config: RunConfig, vocab_size: int) -> dict[str, str]:
    """What it is and how it is meant to be searched."""
    model, decoding = config.model, config.decoding
    alpha = 0.0 if decoding.penalty == "none" else decoding.length_penalty
    return {
        "model": f"{model.n_layers} + {model.n_layers} layers, d_model {model.d_model}, d_ff {model.d_ff}, "
        f"{model.n_heads} heads, {model.norm}-norm, {model.positions} positions, "
        f"{'one matrix for' if model.tied else 'separate'} embeddings and projection",
        "pieces": f"joint BPE (SentencePiece), {vocab_size:,}",
        "meant to decode with": f"beam {decoding.beam}, log-probability / {FORMULAS[decoding.penalty]}, at most "
        f"{decoding.max_extra} pieces more than the source".format(alpha=alpha),
    }


def training_text(config: RunConfig) -> str:
    return "; ".join(map(describe, config.data.train)) or "not recorded"


def text(record: dict[str, Any], config: RunConfig, vocab_size: int, agreement: str) -> str:
    """The card in Markdown, of what `export` records."""
    data, model, decoding = config.data, config.model, config.decoding
    alpha = 0.0 if decoding.penalty == "none" else decoding.length_penalty
    averaged = record["averaged"]
    rows = {
        "languages": f"{data.src} -> {data.tgt}",
        "training text": training_text(config),
        "weights": f"{origin(averaged, record['step'], config)}; {record['quantization']}",
        **model_rows(config, vocab_size),
        "sha256 of the weights it was made from": f"`{record['weights_sha256']}`",
        "sha256 of the BPE model": f"`{record['vocab_sha256']}`",
        "compared with its origin": agreement,
    }
    note = (
        "\nThis engine divides by n^alpha, n being the pieces of an output with its end mark; it does not know the "
        "formula above, so a beam search can choose another output than nmt does.\n"
        if decoding.penalty == "gnmt" and record["format"] != "safetensors"
        else ""
    )
    if record["format"] == "huggingface" and model.positions == "learned" and model.norm == "post":
        note += (
            "\nThe learned positions are in `model.safetensors`, where Marian expects none but takes them. Its "
            "own `save_pretrained` leaves them out: do not save this model again.\n"
        )
    return f"""\
{front_matter(config, LIBRARIES[record["format"]], {})}
# {config.name}: {data.src} -> {data.tgt}

A Transformer of *Attention Is All You Need*, trained with nmt and exported by `nmt-export --to {record["format"]}`.

{table([("", ""), *rows.items()])}

The settings of the run stand in `config.yaml`, the sha256 of each file in `manifest.json`. No score was computed for
this export, and no licence of the weights is known to it.

## Use

{USE[record["format"]].format(beam=decoding.beam, alpha=alpha, extra=decoding.max_extra)}{note}"""
