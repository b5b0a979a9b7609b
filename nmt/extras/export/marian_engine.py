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
from nmt.extras.export.parity import add_eos, pad_sentences, pick_log_probs
from nmt.extras.export.tensors import explain_penalty_and_tags, find_alpha
from nmt.extras.pair_scores.pair_scores import LogProbs
from nmt.model.positions import sinusoids
from nmt.model.transformer import Transformer
from nmt.system.files import replace_file, write_bytes, write_text
from nmt.system.strict_yaml import Values, format_yaml, parse_yaml

NPZ_FILE, DECODER_FILE, SETTINGS_ENTRY = "model.npz", "decoder.yml", "special:model.yml"
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
    tensors: dict[str, Any] = rename_for_marian(model)
    settings = format_yaml(describe_for_marian(model)).encode() + b"\0"
    tensors[SETTINGS_ENTRY] = np.frombuffer(settings, np.int8)
    with replace_file(folder / NPZ_FILE) as file:
        np.savez(file, **tensors)  # not compressed, which not every Marian can read
    write_text(
        folder / DECODER_FILE, format_yaml(make_settings(folder, model.config, vocab, decoding))
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
        self.epsilon, self.has_own_rates = 1e-6, True  # of LayerNorm; of positions

    def take_constants(self, shape: ModelConfig) -> None:
        """Compute with our constants instead of Marian's."""
        self.epsilon, self.has_own_rates = 1e-5, shape.positions == "marian"

    @torch.inference_mode()
    def translate_greedily(self, src: Sentences, limit: int) -> EncodedLines:
        state, chosen = self._start(src), None
        outputs: EncodedLines = [[] for _ in src]
        for _ in range(limit):
            logits = self._step(chosen, state)
            if not self.writes_unknown:
                logits[:, UNK] = -math.inf
            chosen = logits.argmax(1)
            for ids, i in zip(outputs, chosen.tolist(), strict=True):
                ids.append(i)
            if all(EOS in ids for ids in outputs):
                break
        return [ids[: ids.index(EOS)] if EOS in ids else ids for ids in outputs]

    @torch.inference_mode()
    def score(self, src: Sentences, tgt: Sentences) -> LogProbs:
        expected, _ = pad_sentences(add_eos(tgt))
        state = self._start(src)
        steps = [self._step(ids, state) for ids in (None, *expected.T[:-1])]
        return pick_log_probs(torch.stack(steps, 1), tgt)

    def _start(self, src: Sentences) -> dict[str, Any]:
        """Encode the source; return what the steps of the decoder share, with the keys and values of each
        attention by its name.
        """
        ids, mask = pad_sentences(add_eos(src))
        state = {"mask": mask[:, None, None].bool()}
        state["memory"] = self._run_layers("encoder", self._embed("encoder", ids), 0, state)
        return state

    def _step(self, chosen: Tensor | None, state: dict[str, Any]) -> Tensor:
        """Advance by one piece, the first time by none; return its logits, (S, V)."""
        x = torch.zeros(len(state["mask"]), 1, self.d_model)
        if chosen is not None:
            x = self._embed("decoder", chosen[:, None])
        state["length"] = state.get("length", -1) + 1
        x = self._run_layers("decoder", x, state["length"], state)
        name = "decoder_ff_logit_out_W"
        if self.settings["tied-embeddings-all"] or self.settings["tied-embeddings"]:
            name = self._name_embedding("decoder")
        return self.multiply(x[:, 0], name) + self.tensors["decoder_ff_logit_out_b"]

    def _name_embedding(self, side: str) -> str:
        is_shared = self.settings["tied-embeddings-all"] or self.settings["tied-embeddings-src"]
        return "Wemb" if is_shared else f"{side}_Wemb"

    def _embed(self, side: str, ids: Tensor) -> Tensor:
        return self.tensors[self._name_embedding(side)][ids] * math.sqrt(self.d_model)

    def _run_layers(self, side: str, x: Tensor, first: int, state: dict[str, Any]) -> Tensor:
        """Add positions, of which x begins with the `first`, and run the layers of one side."""
        table = sinusoids(first + x.shape[1], self.d_model, self.has_own_rates)
        x = x + table[first:]
        for n in range(1, self.settings[f"{side[:3]}-depth"] + 1):
            layer = f"{side}_l{n}"
            x = self._attend(x, f"{layer}_self", state)
            if side == "decoder":
                x = self._attend(x, f"{layer}_context", state)
            inner = self._apply(x, f"{layer}_ffn", "1")
            is_swish = self.settings["transformer-ffn-activation"] == "swish"
            inner = inner * inner.sigmoid() if is_swish else inner.relu()
            x = self._normalize(x + self._apply(inner, f"{layer}_ffn", "2"), f"{layer}_ffn_ffn")
        return x

    def _attend(self, x: Tensor, name: str, state: dict[str, Any]) -> Tensor:
        keys, values = state.setdefault(name, ([], []))
        is_memory = name.endswith("_context")
        if not (is_memory and keys):
            attended = state["memory"] if is_memory else x
            keys.append(self._apply(attended, name, "k"))
            values.append(self._apply(attended, name, "v"))
        rows = self._apply(x, name, "q"), torch.cat(keys, 1), torch.cat(values, 1)
        heads = [y.unflatten(2, (self.settings["transformer-heads"], -1)) for y in rows]
        q, k, v = (y.transpose(1, 2) for y in heads)  # (S, H, L, d / H)
        mask = None if name.startswith("decoder") and not is_memory else state["mask"]
        found = functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        return self._normalize(x + self._apply(found, name, "o"), f"{name}_Wo")

    def _apply(self, x: Tensor, name: str, letter: str) -> Tensor:
        return self.multiply(x, f"{name}_W{letter}") + self.tensors[f"{name}_b{letter}"]

    def multiply(self, x: Tensor, name: str) -> Tensor:
        """Multiply by a matrix, or by the transpose of an embedding."""
        matrix = self.tensors[name]
        return x @ (matrix.T if name.endswith("Wemb") else matrix)

    def _normalize(self, x: Tensor, name: str) -> Tensor:
        scale, bias = (self.tensors[f"{name}_ln_{kind}"][0] for kind in ("scale", "bias"))
        return functional.layer_norm(x, (self.d_model,), scale, bias, self.epsilon)


def load_marian(folder: Path) -> MarianEngine:
    decoder = parse_yaml((folder / DECODER_FILE).read_text(), DECODER_FILE).values
    with np.load(folder / decoder["models"][0]) as archive:
        tensors = dict(archive)
    entry = tensors.pop(SETTINGS_ENTRY).tobytes().rstrip(b"\0").decode()
    settings = parse_yaml(entry, SETTINGS_ENTRY).values
    return MarianEngine(tensors, settings, decoder["allow-unk"])
