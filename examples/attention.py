"""Attention, worked by hand: softmax(Q K^T / sqrt(d_k)) V in numbers that fit on paper.

    python examples/attention.py

Read it from top to bottom; editors that know `# %%` run it cell by cell. The comments derive each
result, and `show` prints what `nmt.api.attention` gives and checks that it is the same. All layers
of the model call the same function: there are three ways to use it, and one way to compute it.
"""

import math

import torch
from torch import Tensor

from nmt.api import attention


def matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def show(name: str, found: Tensor, by_hand: Tensor) -> None:
    """Print what the function gave, and check that the calculation by hand gives the same."""
    rows = found.flatten(0, -2).tolist()
    print(f"\n{name}, {' x '.join(map(str, found.shape))}")
    for row in rows:
        print("  " + "".join(f"{value:9.4f}" for value in row))
    assert torch.allclose(found, by_hand, rtol=0, atol=1e-9), f"by hand:\n{by_hand}"


# %% 1. One query asks, the keys answer, and the values are mixed.
#
# There are two keys with d_k = 4, so all scores are divided by sqrt(4) = 2. The queries are chosen so
# that the exponentials come out even: exp(ln 3) = 3 and exp(0) = 1.

LN3 = math.log(3)
Q = matrix([[2 * LN3, 0, 0, 0], [0, 2 * LN3, 0, 0], [0, 0, 0, 0]])
K = matrix([[1, 0, 0, 0], [0, 1, 0, 0]])
V = matrix([[4, 0], [0, 8]])

#     Q K^T        /2          exp      divided by the sum of the row
#   2 ln 3  0     ln 3  0      3  1     3/4  1/4
#   0  2 ln 3     0  ln 3      1  3     1/4  3/4
#   0       0     0     0      1  1     1/2  1/2

output, weights = attention(Q, K, V, return_weights=True)
show("1. weights, softmax(Q K^T / sqrt(d_k))", weights, matrix([[3, 1], [1, 3], [2, 2]]) / 4)

# Each row of the result is a mixture of the values (4, 0) and (0, 8):
#   3/4 (4, 0) + 1/4 (0, 8) = (3, 2)
#   1/4 (4, 0) + 3/4 (0, 8) = (1, 6)
#   1/2 (4, 0) + 1/2 (0, 8) = (2, 4): a query that fits no key takes the plain mean

show("1. output", output, matrix([[3, 2], [1, 6], [2, 4]]))


# %% 2. Attn(X, X'): the decoder asks the encoder.
#
# The queries come from what the decoder has so far, X, two positions; keys and values come from the
# encoder's output, X', three positions. Each is projected by a matrix that training learns. Here d_model
# is 2 and d_k is 4, two columns of which stay empty, so that the divisor is 2 again.

LN2 = math.log(2)
X = matrix([[1, 0], [1, 2]])
ENCODED = matrix([[1, 0], [0, 1], [1, 1]])  # X'
W_K = matrix([[1, 0, 0, 0], [0, 1, 0, 0]])
W_Q = 2 * LN2 * W_K
W_V = matrix([[35, 0], [0, 35]])

#   Q K^T / 2 = ln 2 times X X'^T        exp          weights
#       1  0  1                          2  1  2      2/5  1/5  2/5
#       1  2  3                          2  4  8      1/7  2/7  4/7

output, weights = attention(X @ W_Q, ENCODED @ W_K, ENCODED @ W_V, return_weights=True)
show("2. Attn(X, X'), weights", weights, matrix([[14, 7, 14], [5, 10, 20]]) / 35)

# The values are 35 times (1, 0), (0, 1), (1, 1):
#   (2/5 + 2/5, 1/5 + 2/5) times 35 = (28, 21)
#   (1/7 + 4/7, 2/7 + 4/7) times 35 = (25, 30)

show("2. Attn(X, X'), output", output, matrix([[28, 21], [25, 30]]))


# %% 3. Attn(X', X'): self-attention is the same function, with one text on both sides.
#
#   ln 2 times X' X'^T      exp          sum
#       1  0  1             2  1  2       5
#       0  1  1             1  2  2       5
#       1  1  2             2  2  4       8

q, k, v = ENCODED @ W_Q, ENCODED @ W_K, ENCODED @ W_V
output, weights = attention(q, k, v, return_weights=True)
last_row = [2 / 8, 2 / 8, 4 / 8]
of_all = matrix([[2 / 5, 1 / 5, 2 / 5], [1 / 5, 2 / 5, 2 / 5], last_row])
show("3. self-attention, weights", weights, of_all)

# The last row is 35 (2/8 + 4/8) = 26.25 in both columns.

show("3. self-attention, output", output, matrix([[28, 21], [21, 28], [26.25, 26.25]]))


# %% 4. The causal mask: the decoder must not see what it has yet to write.
#
# What lies ahead counts as exp(-infinity) = 0, and the sums shrink accordingly:
#
#   2  -  -      1    0    0
#   1  2  -      1/3  2/3  0
#   2  2  4      2/8  2/8  4/8

output, weights = attention(q, k, v, causal=True, return_weights=True)
show("4. causal, weights", weights, matrix([[1, 0, 0], [1 / 3, 2 / 3, 0], last_row]))

# The first position sees itself alone: its value is 35 (1, 0).

show("4. causal, output", output, matrix([[35, 0], [35 / 3, 70 / 3], [26.25, 26.25]]))


# %% 5. A restricted neighbourhood (section 4): at most r = 1 places away.
#
#   2  1  -      2/3  1/3  0
#   1  2  2      1/5  2/5  2/5
#   -  2  4      0    2/6  4/6

output, weights = attention(q, k, v, window=1, return_weights=True)
near = matrix([[2 / 3, 1 / 3, 0], [1 / 5, 2 / 5, 2 / 5], [0, 1 / 3, 2 / 3]])
show("5. r = 1, weights", weights, near)

#   35 (2/3, 1/3),  as before,  35 (2/3, 1/3 + 2/3)

show("5. r = 1, output", output, matrix([[70 / 3, 35 / 3], [21, 28], [70 / 3, 35]]))


# %% 6. Heads (section 3.2.2): several attentions side by side, each with projections of its own.
#
# The second dimension is the head. The first head is that of 3. The queries of the second are all
# zero, so each of its weights is 1/3: it takes the mean of the values, 35 (2/3, 2/3).

two_q = torch.stack((q, torch.zeros_like(q)), dim=1)  # (3 positions, 2 heads, 4)
two_k = torch.stack((k, k), dim=1)
two_v = torch.stack((v, v), dim=1)
output, weights = attention(two_q, two_k, two_v, return_weights=True)
of_second = matrix([[1 / 3] * 3] * 3)
show("6. two heads, weights", weights, torch.stack((of_all, of_second)))

# Concat(head_1, head_2), which the layer then multiplies by W_O:

mean = 70 / 3
joined = [[28, 21, mean, mean], [21, 28, mean, mean], [26.25, 26.25, mean, mean]]
show("6. two heads, side by side", output.flatten(1), matrix(joined))
