"""What replaces `draw_block` in tests: slow enough for other processes to be asked.

A file of its own, because those processes import it, and nothing heavy with it.
"""

import time

from nmt.data.epoch_stores import Draw, StoredPairs, TokenRow, draw_block


def slow(draw: Draw, pairs: StoredPairs) -> list[TokenRow]:
    time.sleep(0.15)
    return draw_block(draw, pairs)
