"""Compares the speed of search with that of CTranslate2 on the same model.

    python scripts/bench/decoding.py --data multi30k    # random weights of base, lines of test.en
    python scripts/bench/decoding.py --data multi30k --checkpoint runs/m30/average --rounds 5

Each system has its own process. They are asked in turn, round after round, so that a slow moment of
the machine slows all of them. Sentences are given as ids and come back as ids. "forced" makes each
translation exactly 16 pieces long; "free" lets it end by itself, at source + 50 at the latest.
Pieces per second count eos. Prints one JSON object for each system and setting.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from nmt.system.runtime import choose_matmul_library, tune_process

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
THREADS = 2
SYSTEMS = (
    "ours fp32",
    "ours bf16",
    "ctranslate2 float32",
    "ctranslate2 int8",
)
Sentences = list[list[int]]
Search = Callable[[Sentences], list[list[Any]]]  # to ids, or to pieces
System = Callable[[int, bool], Search]  # of a beam, and of whether the length is forced


class Answer(NamedTuple):
    """What a system did in one round."""

    n_sentences: int
    n_pieces: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.n_pieces / self.seconds


def prepare(
    folder: Path, data: Path, checkpoint: Path | None, n_lines: int, systems: Sequence[str]
) -> None:
    """Write the model for all systems, and the sentences, into `folder`."""
    import torch

    from nmt.checkpoint.run_checkpoints import open_checkpoint
    from nmt.extras.export import ctranslate2
    from nmt.translate.translator import make_translator

    if checkpoint is None:
        write_random_checkpoint(folder / "model", data)
    else:
        (folder / "model").symlink_to(checkpoint.resolve())
    opened = open_checkpoint(folder / "model")
    text = (data / "test.en").read_text(encoding="utf-8").split("\n")[:n_lines]
    (folder / "ids.json").write_text(json.dumps(opened.vocab.src.encode(text)))

    model = make_translator(opened, torch.device("cpu"), opened.config.decoding).model
    for system in systems:
        engine, kind = system.split()
        if engine == "ctranslate2":
            (folder / kind).mkdir()
            sections = opened.config.data, opened.config.decoding
            ctranslate2.write_ctranslate2(folder / kind, model, opened.vocab, *sections, kind)


def write_random_checkpoint(path: Path, data: Path) -> None:
    """Write base with random weights, and with pieces learned from the training set."""
    import torch

    from nmt.checkpoint.checkpoint import Snapshot, TrainState, save_checkpoint
    from nmt.config import ModelConfig, RunConfig, VocabConfig
    from nmt.corpus.learn_bpe import tally_words, train_bpe, write_word_counts
    from nmt.data.vocab import Vocab
    from nmt.model.transformer import Transformer

    lines = []
    for side in ("en", "de"):
        lines += (data / f"train.{side}").read_bytes().split(b"\n")
    config = RunConfig(model=ModelConfig(), vocab=VocabConfig(size=10_000))
    with tempfile.TemporaryDirectory() as scratch:
        words = Path(scratch) / "words"
        write_word_counts(words, tally_words(lines))
        vocab = Vocab(train_bpe(words, config.vocab))

    torch.manual_seed(1)
    model = Transformer(config.model, *vocab.sizes)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    save_checkpoint(path, Snapshot(weights, {}), TrainState(), config, vocab)


@cache
def open_system(folder: Path, system: str, threads: int) -> System:
    """Load the model, once in each process, and warm up."""
    tune_process()

    import torch

    torch.set_num_threads(threads)
    engine, kind = system.split()
    opened = open_ours(folder, kind) if engine == "ours" else open_theirs(folder, kind, threads)
    for beam in (1, 4):
        opened(beam, True)(read_sentences(folder)[:100])
    return opened


def open_ours(folder: Path, precision: str) -> System:
    """Our own search, compiled."""
    import torch

    from nmt.checkpoint.run_checkpoints import open_checkpoint
    from nmt.config_files import override_config
    from nmt.extras.export.parity import add_eos
    from nmt.translate.batching import Requests
    from nmt.translate.translator import make_translator

    choose_matmul_library()
    opened = open_checkpoint(folder / "model")
    settings = ["decoding.compile=on", f"decoding.precision={precision}"]
    decoding = override_config(opened.config, settings).decoding
    translator = make_translator(opened, torch.device("cpu"), decoding)
    engine, model = translator.search_engine, translator.decodable

    def choose(beam: int, is_forced: bool) -> Search:
        config = replace(decoding, beam=beam)
        if is_forced:
            config = replace(config, max_ratio=0.0, max_extra=FORCED, min_length=FORCED)

        def search(sentences: Sentences) -> list[list[int]]:
            outputs: list[list[int]] = []
            requests = Requests(add_eos(sentences))
            for _, found in engine.search_batches(model, requests, config, translator.device):
                outputs += [hypotheses[0].ids for hypotheses in found]
            return outputs

        return search

    return choose


def open_theirs(folder: Path, kind: str, threads: int) -> System:
    """CTranslate2's search, with weights of this kind."""
    from nmt.extras.export.ctranslate2 import CTranslate2Engine

    engine = CTranslate2Engine(folder / kind, threads)
    pieces = engine.vocab.src.list_pieces()

    def choose(beam: int, is_forced: bool) -> Search:
        def search(sentences: Sentences) -> list[list[str]]:
            results = engine.translator.translate_batch(
                [[pieces[i] for i in ids] for ids in sentences],
                beam_size=beam,
                length_penalty=0.6,
                min_decoding_length=FORCED if is_forced else 0,
                max_decoding_length=FORCED if is_forced else max(map(len, sentences)) + 50,
                max_input_length=0,
                max_batch_size=4096,
                batch_type="tokens",
            )
            return [result.hypotheses[0] for result in results]

        return search

    return choose


def read_sentences(folder: Path) -> Sentences:
    sentences: Sentences = json.loads((folder / "ids.json").read_text())
    return sentences


def measure(folder: Path, system: str, threads: int, setting: str) -> Answer:
    """Time one round; runs in the process of this system."""
    from nmt.system.progress import clock

    search = open_system(folder, system, threads)(*SETTINGS[setting])
    sentences = read_sentences(folder)
    groups = [sentences]
    if setting.startswith("one by one"):
        groups = [[sentence] for sentence in sentences[:ONE_BY_ONE]]
    began = clock()
    outputs: list[list[Any]] = []
    for group in groups:
        outputs += search(group)
    seconds = clock() - began
    n_pieces = sum(len(output) + 1 for output in outputs)  # with eos
    return Answer(len(outputs), n_pieces, seconds)


def compare_systems(
    folder: Path, systems: Sequence[str], settings: Sequence[str], rounds: int, threads: int
) -> dict[tuple[str, str], list[Answer]]:
    """Start a process for each system, ask them in turn; return their answers, one for each round."""
    found: dict[tuple[str, str], list[Answer]] = {}
    with ExitStack() as stack:
        processes = {}
        for system in systems:
            pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
            processes[system] = stack.enter_context(pool)
        for setting in settings:
            for _ in range(rounds):
                for system, process in processes.items():
                    asked = process.submit(measure, folder, system, threads, setting)
                    found.setdefault((system, setting), []).append(asked.result())
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder with train.{en,de} and test.en"
    )
    parser.add_argument("--checkpoint", type=Path, help="instead of random weights")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, args.data, args.checkpoint, args.lines, SYSTEMS)
        found = compare_systems(folder, SYSTEMS, list(SETTINGS), args.rounds, THREADS)
    for (system, setting), answers in found.items():
        print(json.dumps(summarise(system, setting, answers)))


if __name__ == "__main__":
    main()
