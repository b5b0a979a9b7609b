"""Compares the speed of search with that of CTranslate2 on the same model.

    python scripts/bench/decoding.py --data multi30k    # random weights of base, lines of test.en
    python scripts/bench/decoding.py --data multi30k --checkpoint runs/m30/average --rounds 5
    python scripts/bench/decoding.py --data multi30k --checkpoint runs/m30/average --invariance 1000

Each system has its own process. They are asked in turn, round after round, so that a slow moment of
the machine slows all of them. Sentences are given as ids and come back as ids. "forced" makes each
translation exactly 16 pieces long; "free" lets it end by itself, at source + 50 at the latest.
Pieces per second count eos. Prints one JSON object for each system and setting.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from nmt.config import DecodingConfig
    from nmt.translate.search_state import Hypothesis

FORCED = 16
# The beam, and whether the length is forced
SETTINGS = {
    "greedy forced": (1, True),
    "beam 4 forced": (4, True),
    "greedy free": (1, False),
    "beam 4 free": (4, False),
    "one by one, greedy forced": (1, True),
    "one by one, beam 4 forced": (4, True),
}
ONE_BY_ONE = 50  # sentences
SYSTEMS = (
    "ours fp32",
    "ours bf16",
    "ctranslate2 float32",
    "ctranslate2 int8",
)


class Answer(NamedTuple):
    """What a system did in one round."""

    n_sentences: int
    n_pieces: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.n_pieces / self.seconds


def prepare(
    folder: Path, data: Path, checkpoint: Path | None, n_lines: int, systems: list[str]
) -> None:
    """Write the model for all systems, and the sentences, into `folder`."""
    import torch
    from safetensors.torch import save_file

    from nmt.checkpoint import open_checkpoint
    from nmt.config import ModelConfig, RunConfig, VocabConfig, format_config
    from nmt.corpus.learn_bpe import tally_words, train_bpe, write_word_counts
    from nmt.data.vocab import Vocab, Vocabulary
    from nmt.export import ctranslate2
    from nmt.model.transformer import Transformer
    from nmt.system.files import write_text
    from nmt.system.run_folder import CONFIG_FILE, MODEL_FILE
    from nmt.translate.translator import make_translator

    if checkpoint is None:
        lines = []
        for side in ("en", "de"):
            lines += (data / f"train.{side}").read_bytes().split(b"\n")
        write_word_counts(folder / "words", tally_words(lines))
        vocab: Vocabulary = Vocab(train_bpe(folder / "words", VocabConfig(size=10_000)))
        torch.manual_seed(1)
        config = RunConfig(model=ModelConfig())
        model = Transformer(config.model, *vocab.sizes).eval()
    else:
        loaded = open_checkpoint(checkpoint)
        translator = make_translator(loaded, torch.device("cpu"), loaded.config.decoding)
        config, vocab, model = loaded.config, translator.vocab, translator.model
    text = (data / "test.en").read_text(encoding="utf-8").split("\n")[:n_lines]
    (folder / "ids.json").write_text(json.dumps(vocab.src.encode(text)))
    write_text(folder / CONFIG_FILE, format_config(config))
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / MODEL_FILE)
    for system in systems:
        engine, kind = system.split()
        if engine == "ctranslate2":
            (folder / kind).mkdir()
            ctranslate2.write_ctranslate2(folder / kind, model, vocab, config, kind)


class Ours:
    """Our own search, in this precision."""

    def __init__(self, folder: Path, precision: Literal["fp32", "bf16"]) -> None:
        import torch
        from safetensors.torch import load_file

        from nmt.config import load_config
        from nmt.model.transformer import Transformer
        from nmt.system.run_folder import CONFIG_FILE, MODEL_FILE
        from nmt.system.runtime import choose_matmul_library
        from nmt.translate.engine import choose_engine

        choose_matmul_library()
        config = load_config(str(folder / CONFIG_FILE))
        weights = load_file(folder / MODEL_FILE)
        n_vocab = len(weights["tgt_embedding.weight"])
        model = Transformer(config.model, n_vocab).eval().requires_grad_(False)
        for name, p in model.named_parameters():
            p.copy_(weights[name])
        self.config = replace(config.decoding, precision=precision, compile="on")
        self.device = torch.device("cpu")
        self.engine = choose_engine([model], self.config, self.device)
        self.model = self.engine.prepare(model, precision == "bf16")

    def translate(self, ids: list[list[int]], beam: int, is_forced: bool) -> list[list[int]]:
        from nmt.export.parity import add_eos

        config = replace(self.config, beam=beam)
        if is_forced:
            config = replace(config, max_ratio=0.0, max_extra=FORCED, min_length=FORCED)
        best = self.search_in_order(add_eos(ids), config)
        return [hypothesis.ids for hypothesis in best]

    def search_in_order(
        self, sources: list[list[int]], config: "DecodingConfig"
    ) -> "list[Hypothesis]":
        """Search in batches of the config's size; return the best output of each source, in order."""
        from nmt.translate.batching import Requests

        best = {}
        found = self.engine.search_batches(self.model, Requests(sources), config, self.device)
        for batch, results in found:
            for i, hypotheses in zip(batch, results, strict=True):
                best[i] = hypotheses[0]
        return [best[i] for i in range(len(sources))]


def measure_invariance(folder: Path, n_lines: int) -> None:
    """Print how many lines change with the lines beside them.

    Each line is translated alone, in batches of 64 lines, and in batches of 4,096 tokens.
    """
    from nmt.export.parity import add_eos
    from nmt.translate.search_state import Hypothesis

    sources = add_eos(json.loads((folder / "ids.json").read_text())[:n_lines])
    groups_of_64 = [sources[i : i + 64] for i in range(0, len(sources), 64)]
    reference: list[Hypothesis] = []  # alone, in fp32
    precisions: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    for precision in precisions:
        ours = Ours(folder, precision)

        # alone
        alone = []
        for line in sources:
            alone += ours.search_in_order([line], ours.config)
        reference = reference or alone
        row: dict[str, Any] = {
            "precision": precision,
            "lines": len(alone),
            "differ from fp32": count_differing(reference, alone),
        }

        # in batches
        for name, groups in (
            ("batches of 64", groups_of_64),
            ("batches of 4,096 tokens", [sources]),
        ):
            found: list[Hypothesis] = []
            for group in groups:
                found += ours.search_in_order(group, ours.config)
            row[f"differ in {name}"] = count_differing(alone, found)
            largest = find_largest_score_difference(alone, found)
            row[f"largest difference of a score in {name}"] = largest
        print(json.dumps(row), flush=True)


def count_differing(expected: "list[Hypothesis]", found: "list[Hypothesis]") -> int:
    return sum(a.ids != b.ids for a, b in zip(expected, found, strict=True))


def find_largest_score_difference(expected: "list[Hypothesis]", found: "list[Hypothesis]") -> float:
    """Compare the scores of equal outputs."""
    largest = 0.0
    for a, b in zip(expected, found, strict=True):
        if a.ids == b.ids:
            largest = max(largest, abs(a.score - b.score))
    return largest


class CTranslate2:
    def __init__(self, folder: Path, kind: str, threads: int) -> None:
        from nmt.export.ctranslate2 import CTranslate2Engine

        self.engine = CTranslate2Engine(folder / kind, threads)
        src = self.engine.vocab.src
        self.pieces = src.pieces(range(src.size))

    def translate(self, ids: list[list[int]], beam: int, is_forced: bool) -> list[list[Any]]:
        names = [[self.pieces[i] for i in line] for line in ids]
        shortest, longest = 0, max(map(len, ids)) + 50
        if is_forced:
            shortest = longest = FORCED
        results = self.engine.translator.translate_batch(
            names,
            beam_size=beam,
            length_penalty=0.6,
            min_decoding_length=shortest,
            max_decoding_length=longest,
            max_input_length=0,
            max_batch_size=4096,
            batch_type="tokens",
        )
        return [result.hypotheses[0] for result in results]


def make_speaker(folder: Path, system: str, threads: int) -> Ours | CTranslate2:
    engine, kind = system.split()
    if engine == "ours":
        return Ours(folder, "bf16" if kind == "bf16" else "fp32")
    return CTranslate2(folder, kind, threads)


def serve(folder: Path, system: str, threads: int) -> None:
    """Answer each setting on standard input, in a process of its own.

    An answer has the number of sentences, of pieces, and the seconds.
    """
    from nmt.system.runtime import tune_process

    tune_process()

    import torch

    from nmt.system.progress import clock

    torch.set_num_threads(threads)
    ids = json.loads((folder / "ids.json").read_text())
    speaker = make_speaker(folder, system, threads)

    # warm up
    for beam in (1, 4):
        speaker.translate(ids[:100], beam, True)

    # answer
    for line in sys.stdin:
        beam, is_forced = SETTINGS[line.strip()]
        groups = [ids]
        if line.startswith("one"):
            groups = [[sentence] for sentence in ids[:ONE_BY_ONE]]
        began = clock()
        found: list[list[Any]] = []  # ids, or pieces
        for group in groups:
            found += speaker.translate(group, beam, is_forced)
        seconds = clock() - began
        n_pieces = sum(len(output) + 1 for output in found)  # with eos
        print(json.dumps([len(found), n_pieces, seconds]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="a folder with train.{en,de} and test.en")
    parser.add_argument("--checkpoint", type=Path, help="instead of random weights")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument(
        "--invariance",
        type=int,
        metavar="N",
        help="instead of times: how many of N lines change with the lines beside them",
    )
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(Path(args.serve[0]), args.serve[1], args.threads)
        return
    with tempfile.TemporaryDirectory() as name:
        if args.invariance:
            prepare(Path(name), args.data, args.checkpoint, args.invariance, [])
            measure_invariance(Path(name), args.invariance)
        else:
            prepare(Path(name), args.data, args.checkpoint, args.lines, args.systems)
            found = compare_systems(name, args.systems, args.settings, args.rounds, args.threads)
            for (system, setting), answers in found.items():
                print(json.dumps(summarise(system, setting, answers)))


def compare_systems(
    folder: str, systems: Sequence[str], settings: Sequence[str], rounds: int, threads: int
) -> dict[tuple[str, str], list[Answer]]:
    """Start a process for each system, ask them in turn; return their answers, one for each round."""
    servers = {}
    for system in systems:
        servers[system] = subprocess.Popen(
            [sys.executable, __file__, "--serve", folder, system, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    found: dict[tuple[str, str], list[Answer]] = {}
    for setting in settings:
        for _ in range(rounds):
            for system, server in servers.items():
                found.setdefault((system, setting), []).append(ask(server, setting))
    for server in servers.values():
        server.communicate("")
    return found


def ask(server: "subprocess.Popen[str]", setting: str) -> Answer:
    assert server.stdin and server.stdout
    server.stdin.write(setting + "\n")
    server.stdin.flush()
    return Answer(*json.loads(server.stdout.readline()))


def summarise(system: str, setting: str, answers: list[Answer]) -> dict[str, object]:
    """Return the best and the median speed over the rounds."""
    speeds = [answer.speed for answer in answers]
    n_sentences, n_pieces, _ = answers[-1]
    best = max(speeds)
    return {
        "system": system,
        "setting": setting,
        "pieces_per_s": round(best),
        "median": round(statistics.median(speeds)),
        "ms_per_sentence": round(1e3 * n_pieces / best / n_sentences, 1),
        "pieces": n_pieces,
    }


if __name__ == "__main__":
    main()
