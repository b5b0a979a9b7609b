"""What stands in for `draw_block` in tests: slow enough for other processes to be asked, and what goes wrong in those.

A file of its own, because those processes import it, and nothing heavy with it.
"""

import os
import signal
import time
from multiprocessing import parent_process

from nmt.data.bpe_dropout import Recipe, Row, draw_block
from nmt.system.errors import UserError


def slow(recipe: Recipe, epoch: int, block: tuple[int, int]) -> list[Row]:
    time.sleep(0.15)
    return draw_block(recipe, epoch, block)


def die(recipe: Recipe, epoch: int, block: tuple[int, int]) -> list[Row]:
    if parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return slow(recipe, epoch, block)


def stumble(recipe: Recipe, epoch: int, block: tuple[int, int]) -> list[Row]:
    if parent_process() is not None:
        raise UserError("stumbled")
    return slow(recipe, epoch, block)
