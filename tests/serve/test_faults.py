"""Thousands of clients that do everything wrong, beside a few healthy ones: idle connections, connections that
drip a request byte by byte, and garbage; then SIGTERM in the middle of requests.

The small cases of it are in test_server.py. What it measures needs a machine without other work.
"""

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support.serve_process import start_server
from support.soaking import IS_SOAK
from support.untrained import make_checkpoint, make_vocab

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

from serving import Load, make_request  # noqa: E402

QUIET_S, FAULTY_S = 30.0, 120.0
N_HEALTHY, N_IDLE, N_SLOW, N_GARBAGE = 4, 1_000, 200, 10_000
MAY_GROW_MB = 50
LINES = ["A man rides a bike.", "Two dogs run in the snow.", "A girl plays the guitar in the park."]
REQUESTS = [make_request("/v1/translate", {"q": [line]}) for line in LINES]
Address = tuple[str, int]
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


async def send_garbage(address: Address, n: int, statuses: Counter[int]) -> None:
    rng = random.Random(2)
    for _ in range(n):
        data = bytearray(rng.choice(GARBAGE))
        if rng.random() < 0.5:
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            reader, writer = await asyncio.open_connection(*address)
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


async def idle_always(address: Address, stop: asyncio.Event) -> None:
    """Hold a connection open and say nothing; connect again when it is closed."""
    while not stop.is_set():
        try:
            reader, writer = await asyncio.open_connection(*address)
            await reader.read()
            writer.close()
        except OSError:
            await asyncio.sleep(0.5)


async def drip_always(address: Address, stop: asyncio.Event) -> None:
    """Send a request byte by byte."""
    request = make_request("/v1/translate", {"q": [" " * 1000]})
    while not stop.is_set():
        try:
            _, writer = await asyncio.open_connection(*address)
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


async def measure(address: Address, seconds: float) -> Load:
    """Let healthy clients ask for some seconds; all must be answered."""
    load = Load(address, REQUESTS, seconds)
    await load.run(N_HEALTHY)
    assert load.find_fault() is None
    return load


async def measure_beside_others(address: Address) -> tuple[Load, Counter[int]]:
    """Let healthy clients ask beside all others; also return the statuses that garbage got."""
    stop, statuses = asyncio.Event(), Counter[int]()
    others = [asyncio.create_task(idle_always(address, stop)) for _ in range(N_IDLE)]
    others += [asyncio.create_task(drip_always(address, stop)) for _ in range(N_SLOW)]
    share = N_GARBAGE // 10
    garbage = [asyncio.create_task(send_garbage(address, share, statuses)) for _ in range(10)]
    load = await measure(address, FAULTY_S)
    await asyncio.gather(*garbage)
    stop.set()
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return load, statuses


async def check_end(address: Address, process: "subprocess.Popen[bytes]") -> None:
    """After SIGTERM in the middle of requests, all of them are answered and the server ends."""
    load = Load(address, REQUESTS, 60)
    clients = asyncio.create_task(load.run(4 * N_HEALTHY))
    await asyncio.sleep(1)
    process.send_signal(signal.SIGTERM)
    signalled_at = time.perf_counter()
    while process.poll() is None and time.perf_counter() - signalled_at < 30:
        await asyncio.sleep(0.05)
    assert time.perf_counter() - signalled_at < 10
    load.stop()
    await clients
    assert load.n_lost == 0 and set(load.statuses) == {200}, (load.n_lost, load.statuses)


async def check(process: "subprocess.Popen[bytes]", port: int) -> None:
    address = "127.0.0.1", port
    await measure(address, 2)  # the first requests take longer
    before = await measure(address, QUIET_S)
    memory_before = read_memory(process.pid)
    during, statuses = await measure_beside_others(address)
    assert process.poll() is None
    assert read_memory(process.pid) - memory_before <= MAY_GROW_MB
    assert max(statuses) < 500, statuses
    after = await measure(address, QUIET_S)
    # The mean of before and after, because the machine may be busy otherwise
    quiet_p95 = (before.percentile(0.95) + after.percentile(0.95)) / 2
    assert during.percentile(0.95) <= 2 * quiet_p95
    await check_end(address, process)


@pytest.mark.skipif(not IS_SOAK, reason="takes four minutes; NMT_SOAK=1 runs it")
@pytest.mark.timeout(900)
def test_the_healthy_are_answered_beside_all_others(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "average", make_vocab(tmp_path))
    with start_server(tmp_path, str(checkpoint)) as (process, port):
        asyncio.run(check(process, port))
    assert "Traceback" not in (tmp_path / "stderr").read_text()
