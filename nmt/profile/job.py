"""What translating or scoring a whole file will take, in hours and bytes, by half a minute of its
beginning in this process: `--plan` of nmt-translate and nmt-score.
"""

from collections.abc import Iterable

import torch

from nmt.profile.dry_run import format_bytes, format_rows
from nmt.system.errors import UserError
from nmt.system.progress import clock, format_duration
from nmt.translate.stream import DoneChunk

TIMED_CHUNKS_S = 30.0
UNKNOWN_SIZE = "--plan needs to know how much there is: give a file with lines, no pipe"


def estimate_job(chunks: Iterable[DoneChunk], unit: str, n_workers: int, n_bytes: int) -> str:
    """Return a table. The work is done as `chunks` are drawn; the input has `n_bytes`; 0: unknown."""
    if not n_bytes:
        raise UserError(UNKNOWN_SIZE)
    n_units = n_written = 0
    marks = [(clock(), 0.0)]  # times, and how much was read by then
    for chunk in chunks:
        n_units, n_written = n_units + chunk.n_lines, n_written + len(chunk.data)
        marks.append((clock(), chunk.share))
        if marks[-1][0] - marks[0][0] > TIMED_CHUNKS_S:
            break
    started_at, unread = marks[min(1, len(marks) - 2)]  # the first chunk also compiles
    ended_at, read = marks[-1]
    if not read:
        raise UserError(UNKNOWN_SIZE)
    seconds = (ended_at - started_at) / (read - unread)
    measured = f"by {n_units:,} {unit}, {read:.2%} of the input; threads {torch.get_num_threads()}"
    rows = {
        "a worker": f"{n_units / read / seconds:,.1f} {unit}/s if as fast as this process, {measured}",
        "input": f"{n_units / read:,.0f} {unit}, {format_bytes(n_bytes)}",
        "output": format_bytes(n_written / read),
        "time": f"{format_duration(seconds / n_workers)} x {n_workers:,} workers = {format_duration(seconds)}",
    }
    return format_rows(rows)
