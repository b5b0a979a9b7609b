"""What clients that do everything wrong cost those that do not: a load test of a running nmt-serve.

    nmt-serve CHECKPOINT --port 8000 &
    python scripts/bench/serve_faults.py 127.0.0.1:8000 --pid $! [--seconds 120]

Healthy clients ask one after another, first alone, then beside idle connections, connections that
drip a request byte by byte, and requests of garbage. At the end comes SIGTERM, in the middle of requests.
It prints a row for each phase and what broke a promise; the exit code is 1 if anything did.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HEALTHY = 4  # clients
LINES = ["A man rides a bike.", "Two dogs run in the snow.", "A girl plays the guitar in the park."]
HEAD = "POST /v1/translate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
GARBAGE = [
    b"\x00" * 100,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n",
    b"POST /translate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 5\r\n\r\n[[[[[",
    b"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 11\r\n\r\n{"q": [{}]}',
    b"X" * 70_000,
]


@dataclass
class Tally:
    """What healthy clients saw."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    n_lost: int = 0  # requests whose connection ended without an answer
    n_refused: int = 0  # connections

    def percentile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[int(share * (len(ordered) - 1))] if ordered else float("nan")


class Target:
    def __init__(self, address: str) -> None:
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self.head = HEAD.format(host=address)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Read one answer; return its status, and whether the server closes the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = 0
    for row in head.split(b"\r\n"):
        if row.startswith(b"content-length:"):
            length = int(row.partition(b":")[2])
    await reader.readexactly(length)
    return int(head.split()[1]), b"connection: close" in head


async def ask_often(target: Target, tally: Tally, stop: asyncio.Event) -> None:
    """Be a healthy client, which connects anew when the server has closed its connection."""
    rng = random.Random(1)
    reader = writer = None
    while not stop.is_set():
        body = json.dumps({"q": [rng.choice(LINES)]}).encode()
        request = f"{target.head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        started_at = time.perf_counter()
        try:
            if reader is None or writer is None or reader.at_eof():
                reader, writer = await target.connect()
        except OSError:
            tally.n_refused += 1
            if stop.is_set() or tally.n_refused > 100:
                return
            await asyncio.sleep(0.05)
            continue
        try:
            writer.write(request)
            status, is_last = await read_answer(reader)
            tally.statuses[status] += 1
            tally.seconds.append(time.perf_counter() - started_at)
            if is_last:
                reader = writer = None
        except (OSError, asyncio.IncompleteReadError):
            tally.n_lost += 1
            reader = writer = None


async def send_garbage(target: Target, n: int, statuses: Counter[int]) -> None:
    rng = random.Random(2)
    for _ in range(n):
        data = bytearray(rng.choice(GARBAGE))
        if rng.random() < 0.5:
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            reader, writer = await target.connect()
        except OSError:
            statuses[0] += 1
            continue
        try:
            writer.write(bytes(data))
            answer = await asyncio.wait_for(reader.read(4096), 0.5)  # some of it only begins
            statuses[int(answer.split()[1]) if answer.startswith(b"HTTP") else 0] += 1
        except (TimeoutError, OSError, IndexError, ValueError):
            statuses[0] += 1
        writer.close()


async def idle_always(target: Target, stop: asyncio.Event) -> None:
    """Hold a connection open and say nothing; connect again when it is closed."""
    while not stop.is_set():
        try:
            reader, writer = await target.connect()
            await reader.read()
            writer.close()
        except OSError:
            await asyncio.sleep(0.5)


async def drip_always(target: Target, stop: asyncio.Event) -> None:
    """Send a request byte by byte."""
    request = f"{target.head}Content-Length: 1000\r\n\r\n{' ' * 1000}".encode()
    while not stop.is_set():
        try:
            _, writer = await target.connect()
            for byte in request:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.5)
        except OSError:
            await asyncio.sleep(0.5)


def read_memory(pid: int) -> int:
    """Read the resident memory of a process, in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) // 1024


def report(phase: str, tally: Tally, seconds: float, memory: int) -> None:
    print(
        f"{phase:10} {len(tally.seconds):7,} answers  {len(tally.seconds) / seconds:7.1f}/s  "
        f"p50 {tally.percentile(0.5) * 1000:6.0f} ms  p95 {tally.percentile(0.95) * 1000:6.0f} ms  "
        f"lost {tally.n_lost}  statuses {dict(tally.statuses)}  {memory:,} MB",
        flush=True,
    )


async def measure(target: Target, seconds: float) -> Tally:
    """Let healthy clients ask for some seconds."""
    tally, stop = Tally(), asyncio.Event()
    clients = [asyncio.create_task(ask_often(target, tally, stop)) for _ in range(HEALTHY)]
    await asyncio.sleep(seconds)
    stop.set()
    await asyncio.gather(*clients)
    return tally


async def torment(target: Target, args: argparse.Namespace) -> tuple[Tally, Counter[int]]:
    """Let healthy clients ask beside all others."""
    stop, statuses = asyncio.Event(), Counter[int]()
    others = [asyncio.create_task(idle_always(target, stop)) for _ in range(args.idle)]
    others += [asyncio.create_task(drip_always(target, stop)) for _ in range(args.slow)]
    share = args.garbage // 10
    garbage = [asyncio.create_task(send_garbage(target, share, statuses)) for _ in range(10)]
    tally = await measure(target, args.seconds)
    await asyncio.gather(*garbage)
    stop.set()
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return tally, statuses


async def drain(target: Target, pid: int) -> tuple[Tally, float]:
    """Send SIGTERM in the middle of requests; return what clients saw, and the seconds to the end."""
    tally, stop = Tally(), asyncio.Event()
    clients = [asyncio.create_task(ask_often(target, tally, stop)) for _ in range(4 * HEALTHY)]
    await asyncio.sleep(1)
    os.kill(pid, signal.SIGTERM)
    started_at = time.perf_counter()
    while is_running(pid) and time.perf_counter() - started_at < 30:
        await asyncio.sleep(0.05)
    seconds = time.perf_counter() - started_at
    stop.set()
    await asyncio.gather(*clients)
    return tally, seconds


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def run(args: argparse.Namespace) -> list[str]:
    """Run all phases; return what broke a promise."""
    target = Target(args.address)
    await measure(target, 2)  # the first requests take longer
    quiet_s = min(30.0, args.seconds)
    before = await measure(target, quiet_s)
    memory_before = read_memory(args.pid)
    report("quiet", before, quiet_s, memory_before)
    during, garbage = await torment(target, args)
    memory_after = read_memory(args.pid) if is_running(args.pid) else 0
    report("tormented", during, args.seconds, memory_after)
    print(f"garbage    {sum(garbage.values()):,} requests, statuses {dict(garbage)}")
    faults = []
    if not is_running(args.pid):
        return ["the server has ended"]
    after = await measure(target, quiet_s)
    report("quiet", after, quiet_s, read_memory(args.pid))
    # the mean of before and after: the machine may be busy otherwise
    quiet_p95 = (before.percentile(0.95) + after.percentile(0.95)) / 2
    if during.percentile(0.95) > 2 * quiet_p95:
        faults.append(f"p95 is {during.percentile(0.95) / quiet_p95:.1f} times the quiet one")
    for tally in (before, during, after):
        if tally.n_lost or tally.n_refused or set(tally.statuses) != {200}:
            faults.append(f"a healthy client was not answered: {tally.n_lost} {tally.statuses}")
    if any(status >= 500 for status in garbage):
        faults.append(f"garbage was answered with {dict(garbage)}")
    if memory_after - memory_before > args.memory:
        faults.append(f"memory grew by {memory_after - memory_before} MB")
    ended, seconds = await drain(target, args.pid)
    report("SIGTERM", ended, 1, 0)
    print(f"           ended after {seconds:.1f} s")
    if seconds > 10 or ended.n_lost or set(ended.statuses) != {200}:
        faults.append(f"SIGTERM: {seconds:.1f} s, {ended.n_lost} lost, {ended.statuses}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--pid", type=int, required=True, help="of the server")
    parser.add_argument("--seconds", type=float, default=120.0, help="beside the others")
    parser.add_argument("--garbage", type=int, default=10_000, help="requests")
    parser.add_argument("--idle", type=int, default=1_000, help="connections")
    parser.add_argument("--slow", type=int, default=200, help="connections")
    parser.add_argument("--memory", type=int, default=50, help="MB that it may grow")
    faults = asyncio.run(run(parser.parse_args()))
    for fault in faults:
        print(f"BROKEN: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
