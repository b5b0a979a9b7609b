"""Positional encodings: how the model knows the order of pieces.

Sinusoids and learned positions are added to the embeddings (section 3.5). Rotary ones (Su et al. 2021)
rotate queries and keys of self-attention, pair by pair, by the angles whose sines the sinusoids are; so
a score depends on the distance of two pieces, wherever they are.

Sinusoids are defined for any length: a sentence longer than the table gets a longer table, which is
kept. A learned table has a fixed length, and longer sentences raise UserError. The sines fill the
first half of the columns and the cosines the second, as in the authors' code; the paper interleaves
them, which differs only by a permutation of columns. The rates are the paper's, or those of the
authors' code and of Marian, which fall all the way to 1/10000.
"""

import math

import torch
from torch import Tensor, nn

from nmt.config import ModelConfig
from nmt.model.backend import BackendModule
from nmt.system.errors import UserError


def sinusoids(n: int, d_model: int, is_marian: bool = False) -> Tensor:
    """Compute the sinusoids of n positions, with the paper's rates or Marian's: (n, d_model)."""
    # In fp64: fp32 would round the angles of late positions visibly.
    columns = torch.arange(d_model // 2, dtype=torch.float64)
    n_steps = max(1, d_model / 2 - is_marian)  # from the rate of 1 to that of 1/10000
    rates = torch.exp(columns * (-math.log(10_000.0) / n_steps))
    angles = torch.outer(torch.arange(n, dtype=torch.float64), rates)
    return torch.cat((angles.sin(), angles.cos()), dim=1).float()


class Positions(BackendModule):
    """Sinusoids or a learned table, added to embeddings; or sinusoids by which attention rotates."""

    table: Tensor  # (positions, d_model), or as wide as a key

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_learned = config.positions == "learned"
        self.is_rotary = config.positions == "rotary"
        self.is_marian = config.positions == "marian"
        self.width = config.key_size if self.is_rotary else config.d_model
        rows = torch.empty(config.max_positions, self.width)
        if self.is_learned:
            self.table = nn.Parameter(rows)
            return
        if not rows.is_meta:  # otherwise only the shape is wanted, and torch would be slow to start
            rows = sinusoids(config.max_positions, self.width, self.is_marian)
        self.register_buffer("table", rows, persistent=False)
        self.longer_table = rows  # for sentences longer than `table`, once there are such

    def forward(self, x: Tensor, positions: Tensor, longest: int) -> Tensor:
        return x if self.is_rotary else x + self.find_rows(positions, longest)

    def find_rotation(self, positions: Tensor, longest: int) -> Tensor | None:
        """Return the sines and cosines that `rotate` needs, (T, K); None unless positions are rotary."""
        return self.find_rows(positions, longest) if self.is_rotary else None

    def find_rows(self, positions: Tensor, longest: int) -> Tensor:
        table = self.table if longest <= len(self.table) else self.make_longer_table(longest)
        return self.backend.look_up(table, positions)

    def make_longer_table(self, longest: int) -> Tensor:
        """Return a table for a sentence too long for `self.table`, which is left unchanged."""
        if self.is_learned:
            raise UserError(
                f"a sentence of {longest} pieces is longer than model.max_positions {len(self.table)}; "
                "split it, or train with more positions"
            )
        if longest > len(self.longer_table):
            self.longer_table = sinusoids(2 * longest, self.width, self.is_marian)
        return self.longer_table.to(self.table)

    def reserve(self, longest: int) -> None:
        """Make `self.table` long enough for a sentence of `longest` pieces."""
        if longest > len(self.table):
            self.table = self.make_longer_table(longest)
