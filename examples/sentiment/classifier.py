"""The classifier: the encoder of nmt's Transformer, the mean over the pieces, one linear layer.

The layers are those of `nmt.model`. Texts lie end to end, so there is no padding to compute or to leave
out of the mean, and a text gets the same result alone and in any batch. A trained model is a folder:
the weights, the vocabulary, and what both mean, sealed with digests.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nmt.config import ModelConfig
from nmt.data.batch import Packed, pack
from nmt.data.vocab import EOS, Vocab
from nmt.model.attention_mask import AttentionMask
from nmt.model.dropout import Dropout
from nmt.model.positions import Positions
from nmt.model.transformer import EncoderLayer
from nmt.system.errors import UserError
from nmt.system.files import verify, write_folder, write_json
from nmt.system.records import read_record
from nmt.system.tensor_files import write_tensors

WEIGHTS, VOCAB, RECIPE = "classifier.safetensors", "vocab.model", "classifier.json"


@dataclass(frozen=True)
class Recipe:
    labels: tuple[str, ...]
    max_pieces: int  # of a text; the rest is cut off
    model: ModelConfig


class Classifier(nn.Module):
    layers: list[EncoderLayer]  # an nn.ModuleList, which mypy cannot see into

    def __init__(self, recipe: Recipe, n_pieces: int) -> None:
        super().__init__()
        config = recipe.model
        self.scale = math.sqrt(config.d_model)  # section 3.4
        self.embedding = nn.Embedding(n_pieces, config.d_model)
        self.positions = Positions(config)
        self.dropout = Dropout(config.dropout)
        layers = [EncoderLayer(config) for _ in range(config.encoder_depth)]
        self.layers = cast(Any, nn.ModuleList(layers))
        self.output = nn.Linear(config.d_model, len(recipe.labels))
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)

    def forward(self, texts: Packed, weights: list[Tensor] | None = None) -> Tensor:
        """Compute the logits of each text's labels, (S, labels). If `weights` is given, each layer's
        attention weights (S, H, L, L) are appended to it.
        """
        x = self.embedding(texts.tokens) * self.scale
        x = self.dropout(self.positions(x, texts.positions, texts.longest))
        mask = AttentionMask(texts, texts, is_single_group=weights is not None)
        for layer in self.layers:
            x = layer(x, mask, weights)  # (T, d_model)
        return self.output(average_texts(x, texts))


def average_texts(x: Tensor, texts: Packed) -> Tensor:
    """Average the pieces of each text: (T, d_model) -> (S, d_model)."""
    # A batch may end with padding; `texts.sentence` counts it as one more text, which is left out.
    sums = x.new_zeros(texts.n_sentences + 1, x.shape[1]).index_add(0, texts.sentence, x)
    return sums[:-1] / texts.lengths[:, None]


class BagOfWords(nn.Module):
    """Logistic regression on the counts of the pieces: what can be said without their order."""

    def __init__(self, recipe: Recipe, n_pieces: int) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(n_pieces, len(recipe.labels), mode="sum")
        nn.init.zeros_(self.weights.weight)

    def forward(self, texts: Packed) -> Tensor:
        return self.weights(texts.tokens, texts.offsets[:-1])


def encode_texts(vocab: Vocab, texts: Sequence[str], max_pieces: int) -> list[list[int]]:
    """Return the ids of each text, </s> last, so that no text is empty."""
    return [[*ids[: max_pieces - 1], EOS] for ids in vocab.encode(texts)]


@torch.inference_mode()
def compute_probabilities(model: nn.Module, ids: Sequence[Sequence[int]], size: int = 64) -> Tensor:
    """Compute the probability of each label for each text, (texts, labels)."""
    model.eval()
    batches = [pack(ids[first : first + size]) for first in range(0, len(ids), size)]
    return torch.cat([model(batch).softmax(-1) for batch in batches])


def check_output(folder: Path) -> None:
    """Refuse to replace what is no classifier."""
    if folder.exists() and not (folder / RECIPE).is_file():
        raise UserError(f"{folder}: exists and is no classifier; choose another --out")


def save_classifier(folder: Path, model: Classifier, vocab: Vocab, recipe: Recipe) -> None:
    def fill(path: Path) -> None:
        write_tensors(path / WEIGHTS, model.state_dict())
        (path / VOCAB).write_bytes(vocab.model)
        write_json(path / RECIPE, asdict(recipe))

    write_folder(folder, fill)


def load_classifier(folder: Path) -> tuple[Classifier, Vocab, Recipe]:
    verify(folder, needed=(WEIGHTS, VOCAB, RECIPE))
    recipe = read_record(folder / RECIPE, Recipe, "train the classifier again")
    vocab = Vocab.load(folder / VOCAB)
    model = Classifier(recipe, vocab.size)
    model.load_state_dict(load_file(folder / WEIGHTS))
    return model.eval(), vocab, recipe
