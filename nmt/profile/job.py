"""Estimates the hours and bytes that translating or scoring a whole file will take, from half a minute of work in
this process: `--plan` of nmt-translate and nmt-score.
"""

from collections.abc import Iterable

import torch

from nmt.profile.dry_run import format_bytes, format_rows
from nmt.system.errors import UserError
from nmt.system.progress import clock, format_duration
from nmt.translate.stream import DoneChunk

TIMED_CHUNKS_S = 30.0
UNKNOWN_SIZE = "--plan needs to know the size of the input; give a file of lines, not a pipe"


def estimate_job(chunks: Iterable[DoneChunk], unit: str, n_workers: int, n_bytes: int) -> str:
    """Return a table. The work is done as `chunks` are drawn. The input has `n_bytes`, or 0 if that is
    unknown.
    """
    if not n_bytes:
        raise UserError(UNKNOWN_SIZE)
    n_units = n_written = 0
    began_at = clock()
    marks = [(began_at, 0.0)]  # times, and the share of the input that was read by then
    for chunk in chunks:
        n_units += chunk.n_lines
        n_written += len(chunk.data)
        ended_at = clock()
        marks.append((ended_at, chunk.share))
        if ended_at - began_at > TIMED_CHUNKS_S:
            break
    # The first chunk also compiles, so it is not timed if there are more.
    started_at, read_before = marks[1] if len(marks) > 2 else marks[0]
    ended_at, read = marks[-1]
    if not read:
        raise UserError(UNKNOWN_SIZE)
    seconds = (ended_at - started_at) / (read - read_before)
    measured = f"by {n_units:,} {unit}, {read:.2%} of the input; threads {torch.get_num_threads()}"
    rows = {
        "a worker": f"{n_units / read / seconds:,.1f} {unit}/s if as fast as this process, {measured}",
        "input": f"{n_units / read:,.0f} {unit}, {format_bytes(n_bytes)}",
        "output": format_bytes(n_written / read),
        "time": f"{format_duration(seconds / n_workers)} x {n_workers:,} workers = {format_duration(seconds)}",
    }
    return format_rows(rows)
