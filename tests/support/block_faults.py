"""What replaces `draw_block` in tests: slow enough for other processes to be asked, and killed in
those.

A file of its own, because those processes import it, and nothing heavy with it.
"""

import os
import signal
import time
from multiprocessing import parent_process

from nmt.data.epoch_stores import Draw, StoredPairs, TokenRow, draw_block


def slow(draw: Draw, pairs: StoredPairs) -> list[TokenRow]:
    time.sleep(0.15)
    return draw_block(draw, pairs)


def die(draw: Draw, pairs: StoredPairs) -> list[TokenRow]:
    if parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return slow(draw, pairs)
