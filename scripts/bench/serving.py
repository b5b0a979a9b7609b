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
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import fmean, median

from machine import describe_machine

from nmt.checkpoint import Checkpoint, open_checkpoint
from nmt.commands.cli import run_command
from nmt.export.export import export
from nmt.system.errors import UserError
from nmt.system.progress import say
from nmt.system.tables import Table

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
START_S, ANSWER_S = 120, 60
PACKAGES = ("torch", "ctranslate2", "uvicorn", "fastapi")
SYSTEMS = {
    "nmt": "nmt-serve",
    "nmt-ct2": "nmt-serve --engine ctranslate2",
    "ct2-inter": "CTranslate2 behind FastAPI, a request on each core",
    "ct2-intra": "CTranslate2 behind FastAPI, all cores for a request",
}


@dataclass(frozen=True)
class Server:
    """How to start a system, and to ask it."""

    name: str
    command: list[str]
    languages: dict[str, str]  # that a question names

    def make_request(self, sentence: str) -> bytes:
        body = json.dumps({"q": sentence} | self.languages).encode()
        head = (
            f"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass
class Measured:
    """What one system did with one number of clients; an item for each round."""

    rates: list[float] = field(default_factory=list)  # sentences a second
    p50: list[float] = field(default_factory=list)  # seconds
    p95: list[float] = field(default_factory=list)
    words: list[float] = field(default_factory=list)  # of an answer
    core: list[float] = field(default_factory=list)  # seconds of a core for a sentence


class ServingBench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work = Path(args.work).resolve()
        self.checkpoint: Checkpoint = open_checkpoint(Path(args.checkpoint))
        lines = Path(args.text).read_text(encoding="utf-8").split("\n")
        self.sentences = [line for line in lines if line.strip()]
        random.Random(1).shuffle(self.sentences)

    @property
    def export_folder(self) -> Path:
        return self.work / "ctranslate2"

    def prepare_export(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        if not self.export_folder.exists():
            say(f"exporting to {self.export_folder}")
            samples = self.sentences[:8]
            export(self.checkpoint, "ctranslate2", self.export_folder, "float32", samples)

    def describe_server(self, name: str, port: int) -> Server:
        config, threads = self.checkpoint.config, self.args.threads
        beam, alpha = config.decoding.beam, config.decoding.length_penalty
        if not name.startswith("nmt"):
            inter, intra = (threads, 1) if name == "ct2-inter" else (1, threads)
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

    def measure(self) -> dict[tuple[str, int], Measured]:
        found = {
            (name, n_clients): Measured()
            for name in self.args.systems
            for n_clients in self.args.clients
        }
        for number in range(self.args.rounds):
            for name in self.args.systems:
                port = find_free_port()
                server = self.describe_server(name, port)
                log = self.work / f"{name}.log"
                with run_server_process(server, port, self.args.threads, log) as pid:
                    for n_clients in self.args.clients:
                        load = Load(server, port, self.sentences, self.args)
                        before = read_core_seconds(pid)
                        asyncio.run(load.run(n_clients))
                        spent = read_core_seconds(pid) - before
                        load.add_to(found[name, n_clients], spent)
                        rate = found[name, n_clients].rates[-1]
                        say(
                            f"round {number + 1}, {name}, {n_clients} clients: {rate:.1f} sentences/s"
                        )
        return found


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
            process.send_signal(signal.SIGTERM)
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
    body = server.make_request("A house.").partition(b"\r\n\r\n")[2]
    request = urllib.request.Request(
        f"http://localhost:{port}/translate", body, {"Content-Type": "application/json"}
    )
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                answer.read()
                return
        except urllib.error.HTTPError as error:
            raise UserError(f"{server.name}: {error}: {error.read()[:300]!r}; see {log}") from None
        except OSError:
            time.sleep(0.2)
    raise UserError(f"{server.name}: does not answer; see {log}")


# ---- clients ---------------------------------------------------------------------------------------


class Load:
    """Clients in a closed loop. They speak HTTP by hand: a library would take a core from the server."""

    def __init__(
        self, server: Server, port: int, sentences: list[str], args: argparse.Namespace
    ) -> None:
        self.server, self.port, self.args = server, port, args
        self.requests = cycle([server.make_request(sentence) for sentence in sentences])
        self.begin = self.end = 0.0
        self.latencies: list[float] = []  # of what was answered after the warm-up
        self.n_done = 0  # answers between begin and end
        self.n_words = 0
        self.n_all = 0  # answers, with those of the warm-up

    async def run(self, n_clients: int) -> None:
        self.begin = time.perf_counter() + self.args.warm_up
        self.end = self.begin + self.args.seconds
        await asyncio.gather(*(self._ask() for _ in range(n_clients)))

    async def _ask(self) -> None:
        reader, writer = await asyncio.open_connection(HOST, self.port)
        while (asked := time.perf_counter()) < self.end:
            writer.write(next(self.requests))
            async with asyncio.timeout(ANSWER_S):
                body = await self._read_answer(reader)
            answered = time.perf_counter()
            self.n_all += 1
            if self.begin <= answered < self.end:
                self.n_done += 1
            if self.begin <= answered:
                self.latencies.append(answered - asked)
                self.n_words += len(json.loads(body)["translatedText"].split())
        writer.close()

    async def _read_answer(self, reader: asyncio.StreamReader) -> bytes:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = await reader.readexactly(int(fields["content-length"]))
        if head.split(" ", 2)[1] != "200":
            raise UserError(f"{self.server.name}: {head.splitlines()[0]}: {body[:300]!r}")
        return body

    def add_to(self, measured: Measured, core_seconds: float) -> None:
        if not self.latencies:
            raise UserError(f"{self.server.name}: no answer within {self.args.seconds} s")
        ordered = sorted(self.latencies)
        measured.rates.append(self.n_done / self.args.seconds)
        measured.p50.append(median(ordered))
        measured.p95.append(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))])
        measured.words.append(self.n_words / len(ordered))
        measured.core.append(core_seconds / self.n_all)


# ---- what is printed -------------------------------------------------------------------------------


def print_table(bench: ServingBench, found: dict[tuple[str, int], Measured]) -> None:
    args, shape = bench.args, bench.checkpoint.config.model
    print(
        f"{describe_machine(*PACKAGES)}\n\n    python {args.line}\n\n"
        f"d_model {shape.d_model}, {shape.encoder_depth} + {shape.decoder_depth} layers, beam "
        f"{bench.checkpoint.config.decoding.beam}, fp32, {args.threads} threads; {args.rounds} rounds in turn of "
        f"{args.seconds:g} s: medians, and the range of sentences/s.\n"
        "core: the computing time of the server for a sentence. words: of an answer.\n"
    )
    rows = []
    for (name, n_clients), one in found.items():
        rows.append(
            [
                SYSTEMS[name],
                str(n_clients),
                f"{median(one.rates):,.1f}",
                f"{min(one.rates):,.1f} to {max(one.rates):,.1f}",
                f"{1000 * median(one.p50):,.1f}",
                f"{1000 * median(one.p95):,.1f}",
                f"{1000 * median(one.core):,.1f}",
                f"{fmean(one.words):.1f}",
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
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--warm-up", type=float, default=1.5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args(line[1:])
    args.line = " ".join(line)
    return args


def main(line: list[str]) -> int:
    args = parse_line(line)
    bench = ServingBench(args)
    bench.prepare_export()
    print_table(bench, bench.measure())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv), "serving.py"))
