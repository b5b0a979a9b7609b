"""Estimates the hours and bytes that translating or scoring a whole file, or preparing whole corpora, will take,
from half a minute of work in this process: `--plan` of nmt-translate, nmt-score and nmt-prepare.
"""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from nmt.config import DataConfig, VocabConfig
from nmt.corpus.prepare import estimate_text, list_parts
from nmt.corpus.reader import read_blocks
from nmt.corpus.shards import PAIRS_PER_SHARD
from nmt.corpus.stages import (
    CollectedPart,
    Preparation,
    collect_blocks,
    encode_part,
    learn_bpe,
    list_bpe_parts,
)
from nmt.profile.dry_run import format_bytes, format_rows
from nmt.system.errors import UserError
from nmt.system.pool import use_processes
from nmt.system.progress import clock, format_duration
from nmt.translate.stream import DoneChunk

TIMED_CHUNKS_S = 30.0
TIMED_SHARDS = 16  # of all corpora together; they have 524,288 pairs
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


def estimate_preparation(data: DataConfig, vocab: VocabConfig, seed: int) -> str:
    """Return a table. The first shards of the training corpora are prepared, in a temporary folder."""
    parts = [part for part in list_parts(data) if part.split == "train"]
    n_bytes = estimate_text(parts, data)
    n_shards = -(-TIMED_SHARDS // len(parts))
    n_timed = 0
    n_pairs = n_written = alone_s = shared_s = 0.0
    with TemporaryDirectory() as folder:
        job = Preparation(Path(folder), data, vocab, seed, use_processes(1))
        texts, shares = [], []
        for part in parts:
            began_at = clock()
            blocks = list(islice(read_blocks(part.corpus, data, PAIRS_PER_SHARD), n_shards))
            read_at = clock()
            share = blocks[-1].share if blocks else 1.0  # of the corpus
            shards = job.work / part.name
            shards.mkdir()
            report = collect_blocks(job, part, None, shards, blocks)
            texts.append(CollectedPart(part, shards, report, []))
            shares.append(share)
            alone_s += (read_at - began_at) / share
            shared_s += (clock() - read_at) / share
        began_at = clock()
        bpes = [learn_bpe(job, part, texts, None) for part in list_bpe_parts(vocab)]
        alone_s += clock() - began_at
        for text, share in zip(texts, shares, strict=True):
            began_at = clock()
            report = encode_part(job, text, bpes, None).report
            shared_s += (clock() - began_at) / share
            n_timed += text.report.lines
            n_pairs += text.report.lines / share
            # ids of two bytes, and for each side of a pair an offset of eight
            store_bytes = 2 * sum(report.tokens) + 16 * report.n_kept
            n_written += store_bytes / share
    rows = {
        "a worker": f"{n_pairs / shared_s:,.0f} pairs/s if as fast as this process, by {n_timed:,} pairs, "
        f"{n_timed / n_pairs:.2%} of the input",
        "input": f"{n_pairs:,.0f} pairs, {format_bytes(n_bytes)}",
        "store": f"{format_bytes(n_written)}; {format_bytes(n_bytes + 2 * n_written)} while it is made",
        "time": f"{format_duration(alone_s)} to read and to learn the BPE + {format_duration(shared_s)} / "
        f"{data.workers:,} workers = {format_duration(alone_s + shared_s / data.workers)}",
    }
    return format_rows(rows)
