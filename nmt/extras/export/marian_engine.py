"""The export to Marian, and an engine that computes a written model by Marian's formulas.

The engine takes from the folder all that Marian would: decoder.yml, the tensors by their names, and the settings
among them. It has none of our network's code, so that what is written wrong disagrees.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nmt.config import DataConfig, DecodingConfig, ModelConfig
from nmt.data.batch import Sentences
from nmt.data.vocab import EOS, UNK, EncodedLines, SymbolKind, Vocabulary, append_symbols
from nmt.extras.export.marian import check_marian, describe_for_marian, rename_for_marian
from nmt.extras.export.parity import add_eos, pad_rows
from nmt.extras.export.tensors import explain_penalty_and_tags, find_alpha
from nmt.extras.pair_scores.pair_scores import LogProbs
from nmt.model.transformer import Transformer
from nmt.system.files import replace_file, write_bytes, write_text
from nmt.system.strict_yaml import Values, format_yaml, parse_yaml

NPZ_FILE, SETTINGS_FILE, SETTINGS_ENTRY = "model.npz", "decoder.yml", "special:model.yml"
MARIAN_USAGE = """\
    marian-decoder -c decoder.yml < lines.{src}        # or, with `pip install pymarian`:
    pymarian decode -c decoder.yml < lines.{src}
"""


def write_marian(
    folder: Path,
    model: Transformer,
    vocab: Vocabulary,
    data: DataConfig,
    decoding: DecodingConfig,
    _quantization: str,
    _src: Sentences,
) -> str:
    """Fill `folder` with what marian-decoder loads: the model, its vocabularies and the settings of decoding;
    return how to use it.
    """
    check_marian(model.config, data, decoding)
    tensors = rename_for_marian(model)
    settings = format_yaml(describe_for_marian(model)).encode() + b"\0"
    tensors[SETTINGS_ENTRY] = np.frombuffer(settings, np.int8)
    with replace_file(folder / NPZ_FILE) as file:
        np.savez(
            file, **tensors
        )  # which does not compress: not every Marian reads what is compressed
    write_text(
        folder / SETTINGS_FILE, format_yaml(make_settings(folder, model.config, vocab, decoding))
    )
    usage = MARIAN_USAGE.format(src=data.src)
    return usage + explain_penalty_and_tags(decoding, [], "")


def make_settings(
    folder: Path, shape: ModelConfig, vocab: Vocabulary, decoding: DecodingConfig
) -> Values:
    """Write the vocabularies, with a piece for each row and the suffix that tells Marian what they are; return
    what decodes with them as nearly as Marian can to our search.
    """
    names = [Path(name).with_suffix(".spm").name for name in vocab.files]
    for name, side in zip(names, vocab.files.values(), strict=True):
        unused = [f"<unused-{i}>" for i in range(side.size, shape.count_rows(side.size))]
        rows = append_symbols(side.model, unused, SymbolKind.CONTROL)
        write_bytes(folder / name, rows)
    settings: Values = {
        "relative-paths": True,
        "models": [NPZ_FILE],
        "vocabs": [names[0], names[-1]],
        "beam-size": decoding.beam,
        "normalize": find_alpha(decoding),
        "allow-unk": not vocab.tgt.has_bytes,
    }
    if (
        decoding.max_extra == 0
    ):  # of the longest source of a batch; otherwise Marian's own factor, 3
        settings["max-length-factor"] = decoding.max_ratio
    return settings


class MarianEngine:
    """Marian's Transformer in plain float32, one piece at a time."""

    def __init__(
        self, tensors: Mapping[str, np.ndarray], settings: Values, writes_unknown: bool
    ) -> None:
        self.tensors = {name: torch.from_numpy(rows) for name, rows in tensors.items()}
        self.settings, self.writes_unknown = settings, writes_unknown
        self.d_model: int = settings["dim-emb"]
        self.epsilon = 1e-6  # of LayerNorm
        self.n_steps = max(
            1.0, self.d_model / 2 - 1
        )  # of the rates of positions, from 1 to 1/10000

    def take_constants(self, shape: ModelConfig) -> None:
        """Compute with our constants instead of Marian's."""
        self.epsilon = 1e-5
        if shape.positions == "sinusoidal":
            self.n_steps = self.d_model / 2

    @torch.inference_mode()
    def translate_greedily(self, src: Sentences, limit: int) -> EncodedLines:
        state, chosen = self._start(src), None
        rows: list[list[int]] = []
        for _ in range(limit):
            logits = self._step(chosen, state)
            if not self.writes_unknown:
                logits[:, UNK] = -math.inf
            chosen = logits.argmax(1)
            rows.append(chosen.tolist())
            if all(EOS in column for column in zip(*rows, strict=True)):
                break
        outputs = map(list, zip(*rows, strict=True))
        return [ids[: ids.index(EOS)] if EOS in ids else ids for ids in outputs]

    @torch.inference_mode()
    def score(self, src: Sentences, tgt: Sentences) -> LogProbs:
        expected, _ = pad_rows(add_eos(tgt))
        state, chosen, columns = self._start(src), None, []
        for ids in expected.T:
            log_probs = self._step(chosen, state).log_softmax(1)
            columns.append(log_probs.gather(1, ids[:, None]))
            chosen = ids
        scores = torch.cat(columns, 1).tolist()
        return [row[: len(line) + 1] for row, line in zip(scores, tgt, strict=True)]

    def _start(self, src: Sentences) -> dict[str, Any]:
        """Encode the source; return what the steps of the decoder share: keys and values, by the names of
        their attention, what is hidden as padding, and how many steps there were.
        """
        ids, mask = pad_rows(add_eos(src))
        state = {"hidden": (1.0 - mask)[:, None, None] * -1e9, "length": 0}  # (S, 1, 1, L)
        x = self._embed("encoder", ids) + self._make_signal(0, ids.shape[1])
        for n in range(1, self.settings["enc-depth"] + 1):
            x = self._attend(x, f"encoder_l{n}_self", state, state["hidden"])
            x = self._feed_forward(x, f"encoder_l{n}_ffn")
        for n in range(1, self.settings["dec-depth"] + 1):
            name = f"decoder_l{n}_context"
            state[name] = self._multiply(x, name, "k"), self._multiply(x, name, "v")
        return state

    def _step(self, chosen: Tensor | None, state: dict[str, Any]) -> Tensor:
        """Advance by one piece, the first time by none; return its logits, (S, V)."""
        x = torch.zeros(len(state["hidden"]), 1, self.d_model)
        if chosen is not None:
            x = self._embed("decoder", chosen[:, None])
        x = x + self._make_signal(state["length"], 1)
        state["length"] += 1
        for n in range(1, self.settings["dec-depth"] + 1):
            x = self._attend(x, f"decoder_l{n}_self", state)
            x = self._attend(x, f"decoder_l{n}_context", state, state["hidden"])
            x = self._feed_forward(x, f"decoder_l{n}_ffn")
        name = "decoder_ff_logit_out_W"
        if self.settings["tied-embeddings-all"] or self.settings["tied-embeddings"]:
            name = self._name_embedding("decoder")
        return self.multiply(x[:, 0], name) + self.tensors["decoder_ff_logit_out_b"]

    def _name_embedding(self, side: str) -> str:
        is_shared = self.settings["tied-embeddings-all"] or self.settings["tied-embeddings-src"]
        return "Wemb" if is_shared else f"{side}_Wemb"

    def _embed(self, side: str, ids: Tensor) -> Tensor:
        return self.tensors[self._name_embedding(side)][ids] * math.sqrt(self.d_model)

    def _make_signal(self, first: int, n: int) -> Tensor:
        """Compute the sinusoids of n positions, (n, d)."""
        rates = 10_000.0 ** (-torch.arange(self.d_model // 2).double() / self.n_steps)
        angles = torch.arange(first, first + n).double()[:, None] * rates
        return torch.cat((angles.sin(), angles.cos()), 1).float()

    def _multiply(self, x: Tensor, name: str, letter: str) -> Tensor:
        return self.multiply(x, f"{name}_W{letter}") + self.tensors[f"{name}_b{letter}"]

    def multiply(self, x: Tensor, name: str) -> Tensor:
        """Multiply by a matrix, or by the transpose of an embedding."""
        matrix = self.tensors[name]
        return x @ (matrix.T if name.endswith("Wemb") else matrix)

    def _normalize(self, x: Tensor, name: str) -> Tensor:
        scale, bias = (self.tensors[f"{name}_ln_{kind}"][0] for kind in ("scale", "bias"))
        return functional.layer_norm(x, (self.d_model,), scale, bias, self.epsilon)

    def _attend(
        self, x: Tensor, name: str, state: dict[str, Any], hidden: Tensor | None = None
    ) -> Tensor:
        n_heads = self.settings["transformer-heads"]

        def split(rows: Tensor) -> Tensor:
            return rows.unflatten(2, (n_heads, -1)).transpose(1, 2)  # (S, H, L, d / H)

        if name.endswith("_self"):
            new = self._multiply(x, name, "k"), self._multiply(x, name, "v")
            old = state.get(name, (x[:, :0], x[:, :0]))
            state[name] = tuple(map(torch.cat, zip(old, new, strict=True), (1, 1)))
        queries = split(self._multiply(x, name, "q"))
        keys, values = map(split, state[name])
        scores = queries @ keys.transpose(2, 3) / math.sqrt(keys.shape[3])
        weights = (scores if hidden is None else scores + hidden).softmax(3)
        found = self._multiply((weights @ values).transpose(1, 2).flatten(2), name, "o")
        return self._normalize(x + found, f"{name}_Wo")

    def _feed_forward(self, x: Tensor, name: str) -> Tensor:
        inner = self._multiply(x, name, "1")
        is_swish = self.settings["transformer-ffn-activation"] == "swish"
        inner = inner * inner.sigmoid() if is_swish else inner.relu()
        return self._normalize(x + self._multiply(inner, name, "2"), f"{name}_ffn")


def load_marian(folder: Path) -> MarianEngine:
    decoder = parse_yaml((folder / SETTINGS_FILE).read_text(), SETTINGS_FILE).values
    with np.load(folder / decoder["models"][0]) as archive:
        tensors = dict(archive)
    entry = tensors.pop(SETTINGS_ENTRY).tobytes().rstrip(b"\0").decode()
    settings = parse_yaml(entry, SETTINGS_ENTRY).values
    return MarianEngine(tensors, settings, decoder["allow-unk"])
