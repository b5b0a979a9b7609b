"""Where more workers stop helping: a simulation of `--on`, drawn into docs/clusters.svg.

    python scripts/bench/workers.py > docs/clusters.svg

The command reads, hands out and writes one chunk after the other. A worker has at most two of them, and
no chunk is begun that is more than the window, times the workers, ahead of the next one to be written.
Chunks take 1 +- 0.3 times their mean, where 1 % of the workers are slow, ten times as long there.
"""

import heapq
import math
import random
import sys
from collections import deque

import vl_convert

from nmt.system.cluster import WINDOW_ELSEWHERE
from nmt.system.pool import TASKS_AHEAD

LINES, CHUNK = 1_000_000_000, 1_024
HEAD_S = 1.7e-6 * CHUNK  # of the command, for a chunk; measured: docs/clusters.md
SPREAD, SLOW_SHARE, SLOWNESS = 0.3, 0.01, 10.0
COLOURS = [
    "#0072b2",
    "#d55e00",
    "#009e73",
]  # of Okabe and Ito, which colour-blind readers can tell apart
WORKERS = (1, 4, 16, 64, 250, 500, 1_000, 2_000, 4_000)
KINDS = {"CPUs, 300 lines/s each": 300.0, "GPUs, 2,693 lines/s each": 2_693.0}
CASES = {  # whether some workers are slow, and the window
    "all alike": (False, 8),
    "1 % slow, window 8": (True, 8),
    f"1 % slow, window {WINDOW_ELSEWHERE}": (True, WINDOW_ELSEWHERE),
}


def simulate(n_workers: int, chunk_s: float, has_slow: bool, window: int) -> float:
    """Return how many seconds it takes to write all lines."""
    rng, sigma = random.Random(1), math.sqrt(math.log(1 + SPREAD**2))
    n_slow = int(n_workers * SLOW_SHARE) if has_slow else 0
    n_chunks = -(-LINES // CHUNK)
    free = deque(list(range(n_workers)) * TASKS_AHEAD)  # as often as each may get a chunk
    busy_until = [0.0] * n_workers
    ends: list[tuple[float, int, int]] = []  # when, which chunk, by whom
    done = set()
    now = 0.0  # of the command
    n_given = n_written = 0
    while n_written < n_chunks:
        while free and n_given < min(n_chunks, n_written + window * n_workers):
            worker = free.popleft()
            takes = chunk_s * rng.lognormvariate(-(sigma**2) / 2, sigma)
            takes *= SLOWNESS if worker < n_slow else 1
            busy_until[worker] = max(busy_until[worker], now) + takes
            heapq.heappush(ends, (busy_until[worker], n_given, worker))
            n_given += 1
        at, chunk, worker = heapq.heappop(ends)
        now = max(now, at) + HEAD_S
        free.append(worker)
        done.add(chunk)
        while n_written in done:
            done.remove(n_written)
            n_written += 1
    return now


points = []
for kind, speed in KINDS.items():
    for case, (has_slow, window) in CASES.items():
        for n in WORKERS:
            took = simulate(n, CHUNK / speed, has_slow, window)
            points.append({"kind": kind, "case": case, "workers": n, "rate": LINES / took})
            busy = LINES / speed / n / took
            print(f"{kind}, {case}: {n:,}: {took / 3600:.2f} h, {busy:.0%}", file=sys.stderr)
axis = {"type": "quantitative", "scale": {"type": "log"}}
colour = {"field": "case", "title": None, "sort": None, "scale": {"range": COLOURS}}
rate = {"field": "rate", "title": "lines/s", **axis}
encoding = {"x": {"field": "workers", **axis}, "y": rate, "color": colour}
panel = {"mark": {"type": "line", "point": True}, "encoding": encoding, "width": 300}
column = {"field": "kind", "title": None, "sort": None}
spec = {"data": {"values": points}, "facet": {"column": column}, "spec": panel}
sys.stdout.write(vl_convert.vegalite_to_svg(spec))
