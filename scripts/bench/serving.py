"""Measures translation servers side by side: sentences a second and latency, by number of clients.

    python scripts/bench/serving.py runs/m/average --text multi30k/test.en --work build/serving

nmt-serve with both engines, and CTranslate2 behind FastAPI (plain_server.py), in fp32, with one beam
and one number of threads. Clients send one sentence at a time and the next when the answer is there.
One server runs at a time, all in each round, so that a machine that drifts drifts for all; the figures
are medians over rounds. Clients share the machine with the server. Outputs of about the same length
make about the same work, so the words of an answer are printed too.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from machine import describe_machine

from nmt.checkpoint.checkpoint import Checkpoint
from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.commands.cli import run_command
from nmt.extras.export.export import export
from nmt.system.errors import UserError
from nmt.system.progress import say
from nmt.system.tables import Table

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
START_S, ANSWER_S = 120, 60
CLIENTS = (1, 8, 64)
SECONDS, WARM_UP_S = 6.0, 1.5  # of each number of clients
THREADS = os.cpu_count() or 1
PACKAGES = ("torch", "ctranslate2", "uvicorn", "fastapi")
SYSTEMS = {
    "nmt": "nmt-serve",
    "nmt-ct2": "nmt-serve --engine ctranslate2",
    "ct2-inter": "CTranslate2 behind FastAPI, a request on each core",
    "ct2-intra": "CTranslate2 behind FastAPI, all cores for a request",
}


def make_request(path: str, question: Mapping[str, object]) -> bytes:
    body = json.dumps(question).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(frozen=True)
class Server:
    """How to start a system, and to ask it."""

    name: str
    command: list[str]
    languages: dict[str, str]  # that a question names

    def make_request(self, sentence: str) -> bytes:
        return make_request("/translate", {"q": sentence} | self.languages)


class Measured(NamedTuple):
    """What one system did with one number of clients in one round."""

    rate: float  # sentences a second
    p50: float  # seconds
    p95: float
    core: float  # seconds of a core for a sentence
    n_words: float  # of an answer


class ServingBench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work = Path(args.work).resolve()
        self.checkpoint: Checkpoint = open_checkpoint(Path(args.checkpoint))
        lines = Path(args.text).read_text(encoding="utf-8").split("\n")
        self.sentences = [line for line in lines if line.strip()]
        random.Random(1).shuffle(self.sentences)

        self.export_folder = self.work / "ctranslate2"
        self.work.mkdir(parents=True, exist_ok=True)
        if not self.export_folder.exists():
            say(f"exporting to {self.export_folder}")
            samples = self.sentences[:8]
            export(self.checkpoint, "ctranslate2", self.export_folder, "float32", samples)

    def describe_server(self, name: str, port: int) -> Server:
        config = self.checkpoint.config
        beam, alpha = config.decoding.beam, config.decoding.length_penalty
        if not name.startswith("nmt"):
            inter, intra = (THREADS, 1) if name == "ct2-inter" else (1, THREADS)
            command = [sys.executable, str(Path(__file__).with_name("plain_server.py"))]
            command += [str(self.export_folder), *map(str, (port, inter, intra, beam, alpha))]
            return Server(name, command, {})

        command = [sys.executable, "-m", "nmt.commands.serve", "--port", str(port)]
        command += ["device=cpu", f"decoding.beam={beam}"]
        if name == "nmt":
            command.append(str(self.checkpoint.path))
        else:
            command += ["--engine", "ctranslate2", str(self.export_folder)]
        languages = {"source": config.data.src, "target": config.data.tgt}
        return Server(name, command, languages)

    def measure(self) -> dict[tuple[str, int], list[Measured]]:
        """Let each number of clients ask each server, round after round."""
        found: dict[tuple[str, int], list[Measured]] = {}
        for number in range(self.args.rounds):
            for name in SYSTEMS:
                port = find_free_port()
                server = self.describe_server(name, port)
                requests = [server.make_request(sentence) for sentence in self.sentences]
                log = self.work / f"{name}.log"
                with run_server_process(server, port, THREADS, log) as pid:
                    for n_clients in CLIENTS:
                        load = Load((HOST, port), requests, SECONDS, WARM_UP_S)
                        before = read_core_seconds(pid)
                        asyncio.run(load.run(n_clients))
                        spent = read_core_seconds(pid) - before
                        one = summarise(load, name, spent)
                        found.setdefault((name, n_clients), []).append(one)
                        say(
                            f"round {number + 1}, {name}, {n_clients} clients: {one.rate:.1f} sentences/s"
                        )
        return found


def summarise(load: "Load", name: str, core_seconds: float) -> Measured:
    if fault := load.find_fault():
        raise UserError(f"{name}: {fault}")
    words = [len(json.loads(body)["translatedText"].split()) for body in load.bodies]
    return Measured(
        rate=load.n_done / load.seconds,
        p50=load.percentile(0.5),
        p95=load.percentile(0.95),
        core=core_seconds / load.n_all,
        n_words=fmean(words),
    )


# ---- a server process ------------------------------------------------------------------------------


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


@contextmanager
def run_server_process(server: Server, port: int, threads: int, log: Path) -> Iterator[int]:
    """Start a server, wait until it translates, and end it. Yields its process's number."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    with open(log, "wb") as file:
        process = subprocess.Popen(
            server.command,
            env=environment,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
        )
        try:
            wait_until_it_answers(server, port, process, log)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def read_core_seconds(pid: int) -> float:
    """What a process has computed so far: other work on the machine changes this least."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_it_answers(
    server: Server, port: int, process: "subprocess.Popen[bytes]", log: Path
) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        load = Load((HOST, port), [server.make_request("A house.")], seconds=0.1)
        asyncio.run(load.run(1))
        if load.statuses and 200 not in load.statuses:
            raise UserError(
                f"{server.name}: {dict(load.statuses)}: {load.bodies[0][:300]!r}; see {log}"
            )
        if load.statuses:
            return
    raise UserError(f"{server.name}: does not answer; see {log}")


# ---- clients ---------------------------------------------------------------------------------------


class Load:
    """Clients in a closed loop. They speak HTTP by hand: a library would take a core from the server."""

    def __init__(
        self,
        address: tuple[str, int],
        requests: Iterable[bytes],
        seconds: float,
        warm_up: float = 0.0,
    ) -> None:
        self.address, self.seconds, self.warm_up = address, seconds, warm_up
        self.requests = cycle(requests)
        self.begin = self.end = 0.0
        self.latencies: list[float] = []  # of what was answered after the warm-up
        self.bodies: list[bytes] = []  # of the same answers
        self.n_done = 0  # answers between begin and end
        self.statuses: Counter[int] = Counter()  # of all answers
        self.n_lost = 0  # requests whose connection ended without an answer
        self.n_refused = 0  # connections

    @property
    def n_all(self) -> int:
        """How many answers there were, with those of the warm-up."""
        return self.statuses.total()

    async def run(self, n_clients: int) -> None:
        self.begin = time.perf_counter() + self.warm_up
        self.end = self.begin + self.seconds
        await asyncio.gather(*(self._ask() for _ in range(n_clients)))

    async def _ask(self) -> None:
        """Be one client, which connects anew when the server has closed its connection."""
        reader = writer = None
        while (asked := time.perf_counter()) < self.end:
            try:
                if reader is None or writer is None or reader.at_eof():
                    reader, writer = await asyncio.open_connection(*self.address)
            except OSError:
                self.n_refused += 1
                await asyncio.sleep(0.05)
                continue
            try:
                writer.write(next(self.requests))
                async with asyncio.timeout(ANSWER_S):
                    status, body, is_last = await read_answer(reader)
            except (OSError, asyncio.IncompleteReadError):
                self.n_lost += 1
                reader = None
                continue
            if is_last:
                reader = None
            answered = time.perf_counter()
            self.statuses[status] += 1
            if self.begin <= answered < self.end:
                self.n_done += 1
            if self.begin <= answered:
                self.latencies.append(answered - asked)
                self.bodies.append(body)
        if writer is not None:
            writer.close()

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[int(share * (len(ordered) - 1))] if ordered else float("nan")

    def find_fault(self) -> str | None:
        """Say what was not answered as it should be, if anything."""
        if not (self.n_lost or self.n_refused) and set(self.statuses) == {200} and self.latencies:
            return None
        return (
            f"{len(self.latencies)} answers within {self.seconds:.0f} s, statuses {dict(self.statuses)}, "
            f"{self.n_lost} lost, {self.n_refused} connections refused"
        )


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Read one answer: its status, its body, and whether the server closes the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
    body = await reader.readexactly(int(fields.get("content-length", 0)))
    return int(head.split()[1]), body, fields.get("connection") == "close"


# ---- what is printed -------------------------------------------------------------------------------


def print_table(bench: ServingBench, found: dict[tuple[str, int], list[Measured]]) -> None:
    args, shape = bench.args, bench.checkpoint.config.model
    print(
        f"{describe_machine(*PACKAGES)}\n\n    python {args.line}\n\n"
        f"d_model {shape.d_model}, {shape.encoder_depth} + {shape.decoder_depth} layers, beam "
        f"{bench.checkpoint.config.decoding.beam}, fp32, {THREADS} threads; {args.rounds} rounds in turn of "
        f"{SECONDS:g} s: medians, and the range of sentences/s.\n"
        "core: the computing time of the server for a sentence. words: of an answer.\n"
    )
    rows = []
    for (name, n_clients), rounds in found.items():
        rates = [one.rate for one in rounds]
        rows.append(
            [
                SYSTEMS[name],
                str(n_clients),
                f"{median(rates):,.1f}",
                f"{min(rates):,.1f} to {max(rates):,.1f}",
                f"{1000 * median(one.p50 for one in rounds):,.1f}",
                f"{1000 * median(one.p95 for one in rounds):,.1f}",
                f"{1000 * median(one.core for one in rounds):,.1f}",
                f"{fmean(one.n_words for one in rounds):.1f}",
            ]
        )
    head = ("server", "clients", "sentences/s", "range", "p50, ms", "p95, ms", "core, ms", "words")
    print(Table(head, rows).to_markdown())


def parse_line(line: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--text", required=True, help="source sentences, one a line")
    parser.add_argument("--work", required=True, help="a folder for the export and logs")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(line[1:])
    args.line = " ".join(line)
    return args


def main(line: list[str]) -> int:
    args = parse_line(line)
    bench = ServingBench(args)
    print_table(bench, bench.measure())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv), "serving.py"))
