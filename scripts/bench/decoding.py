"""How fast search is beside CTranslate2 on the same model, and what it costs by beam, length and batch.

    python scripts/bench/decoding.py --data multi30k                     random weights of base, test.en in multi30k
    python scripts/bench/decoding.py --data multi30k --checkpoint runs/m30/average --rounds 5
    python scripts/bench/decoding.py --data multi30k --checkpoint runs/m30/average --invariance 1000

Each system lives in its own process; they are asked in turn, round after round, so that all share the machine's moods.
Sentences are given as ids and come back as ids. "forced" lets each translation have exactly 16 pieces; "free" ends by
itself, at source + 50 at the latest. Pieces per second count eos. Prints one JSON object for each system and setting.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

FORCED = 16
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
    "huggingface bfloat16",
)


def prepare(
    folder: Path, data: Path, checkpoint: Path | None, n_lines: int, systems: list[str]
) -> None:
    """The model for all systems, and the sentences."""
    import torch
    from safetensors.torch import save_file

    from nmt.checkpoint import open_checkpoint
    from nmt.config import ModelConfig, RunConfig, VocabConfig, format_config
    from nmt.data.vocab import Vocab, tally_words, train_bpe, write_word_counts
    from nmt.export import ctranslate2, huggingface
    from nmt.model.transformer import Transformer
    from nmt.system.files import write_text
    from nmt.system.run_folder import CONFIG_FILE, MODEL_FILE
    from nmt.translate.translator import make_translator

    if checkpoint is None:
        lines = [
            line
            for side in ("en", "de")
            for line in (data / f"train.{side}").read_bytes().split(b"\n")
        ]
        write_word_counts(folder / "words", tally_words(lines))
        vocab = Vocab(train_bpe(folder / "words", VocabConfig(size=10_000)))
        torch.manual_seed(1)
        config = RunConfig(model=ModelConfig())
        model = Transformer(config.model, vocab.size).eval()
    else:
        loaded = open_checkpoint(checkpoint)
        translator = make_translator(loaded, torch.device("cpu"), loaded.config.decoding)
        config, vocab, model = loaded.config, translator.vocab, translator.model
    text = (data / "test.en").read_text(encoding="utf-8").split("\n")[:n_lines]
    (folder / "ids.json").write_text(json.dumps(vocab.encode(text)))
    write_text(folder / CONFIG_FILE, format_config(config))
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / MODEL_FILE)
    for system in systems:
        engine, kind = system.split()
        (folder / kind).mkdir(exist_ok=True)
        if engine == "ctranslate2":
            ctranslate2.write_ctranslate2(folder / kind, model, vocab, config, kind)
        elif engine == "huggingface":
            huggingface.write_huggingface(folder / kind, model, vocab, config, kind)


class Ours:
    def __init__(self, folder: Path, precision: Literal["fp32", "bf16"]) -> None:
        import torch
        from safetensors.torch import load_file

        from nmt.config import load_config
        from nmt.model.cpu_linear import prepare_for_decoding
        from nmt.model.transformer import Transformer
        from nmt.system.run_folder import CONFIG_FILE, MODEL_FILE
        from nmt.system.runtime import choose_matmul_library

        choose_matmul_library()
        config, weights = load_config(str(folder / CONFIG_FILE)), load_file(folder / MODEL_FILE)
        model = (
            Transformer(config.model, len(weights["tgt_embedding.weight"]))
            .eval()
            .requires_grad_(False)
        )
        for name, p in model.named_parameters():
            p.copy_(weights[name])
        self.config = replace(config.decoding, precision=precision)
        self.model, self.device = (
            prepare_for_decoding(model, precision == "bf16"),
            torch.device("cpu"),
        )

    def translate(self, ids: list[list[int]], beam: int, is_forced: bool) -> list[list[int]]:
        from nmt.data.vocab import EOS
        from nmt.translate.batching import search_batches

        config = replace(self.config, beam=beam)
        if is_forced:
            config = replace(config, max_ratio=0.0, max_extra=FORCED, min_length=FORCED)
        found: list[list[int]] = [[] for _ in ids]
        for batch, bests in search_batches(
            self.model, [[*line, EOS] for line in ids], config, self.device
        ):
            for i, best in zip(batch, bests, strict=True):
                found[i] = best[0].ids
        return found


def invariance(folder: Path, n_lines: int) -> None:
    """Print how many lines change with their company: each alone, in batches of 64 lines, of 4,096 tokens."""
    import torch

    from nmt.data.batch import pack
    from nmt.data.vocab import EOS
    from nmt.translate.batching import search_batches
    from nmt.translate.beams import Hypothesis
    from nmt.translate.search import search

    sources = [[*line, EOS] for line in json.loads((folder / "ids.json").read_text())[:n_lines]]
    alone: list[Hypothesis] = []  # in fp32
    precisions: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    for precision in precisions:
        ours = Ours(folder, precision)
        each = [search(ours.model, pack([line]), ours.config)[0][0] for line in sources]
        alone = alone or each
        row: dict[str, Any] = {
            "precision": precision,
            "lines": len(each),
            "differ from fp32": sum(a.ids != b.ids for a, b in zip(alone, each, strict=True)),
        }
        for name, groups in (
            ("batches of 64", [sources[i : i + 64] for i in range(0, len(sources), 64)]),
            ("batches of 4,096 tokens", [sources]),
        ):
            found: list[Hypothesis] = []
            for group in groups:
                of_group: dict[int, Hypothesis] = {}
                for batch, some in search_batches(
                    ours.model, group, ours.config, torch.device("cpu")
                ):
                    of_group.update((i, one[0]) for i, one in zip(batch, some, strict=True))
                found += [of_group[i] for i in range(len(group))]
            row[f"differ in {name}"] = sum(a.ids != b.ids for a, b in zip(each, found, strict=True))
            row[f"largest difference of a score in {name}"] = max(
                (
                    abs(a.score - b.score)
                    for a, b in zip(each, found, strict=True)
                    if a.ids == b.ids
                ),
                default=0.0,
            )
        print(json.dumps(row), flush=True)


class CTranslate2:
    def __init__(self, folder: Path, kind: str, threads: int) -> None:
        from nmt.export.ctranslate2 import CTranslate2Engine

        self.engine = CTranslate2Engine(folder / kind, threads)
        self.pieces = self.engine.vocab.pieces(range(self.engine.vocab.size))

    def translate(self, ids: list[list[int]], beam: int, is_forced: bool) -> list[list[Any]]:
        names = [[self.pieces[i] for i in line] for line in ids]
        lengths = (FORCED, FORCED) if is_forced else (0, max(map(len, ids)) + 50)
        results = self.engine.translator.translate_batch(
            names,
            beam_size=beam,
            length_penalty=0.6,
            min_decoding_length=lengths[0],
            max_decoding_length=lengths[1],
            max_input_length=0,
            max_batch_size=4096,
            batch_type="tokens",
        )
        return [result.hypotheses[0] for result in results]


class HuggingFace:
    def __init__(self, folder: Path, kind: str) -> None:
        from transformers import AutoModelForSeq2SeqLM

        self.model = AutoModelForSeq2SeqLM.from_pretrained(folder / kind, dtype=kind).eval()

    def translate(self, ids: list[list[int]], beam: int, is_forced: bool) -> list[list[int]]:
        import torch

        from nmt.data.vocab import EOS, PAD

        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        found: list[list[int]] = [[] for _ in ids]
        with torch.inference_mode():
            for first in range(0, len(order), 128):
                part = order[first : first + 128]
                longest = max(len(ids[i]) for i in part) + 1
                rows = torch.tensor(
                    [[*ids[i], EOS, *[PAD] * (longest - 1 - len(ids[i]))] for i in part]
                )
                lengths = (
                    {"min_new_tokens": FORCED + 1, "max_new_tokens": FORCED + 1}
                    if is_forced
                    else {"max_new_tokens": longest + 50}
                )
                out = self.model.generate(
                    input_ids=rows,
                    attention_mask=(rows != PAD).long(),
                    num_beams=beam,
                    do_sample=False,
                    length_penalty=0.6,
                    **lengths,
                )
                for i, row in zip(part, out[:, 1:].tolist(), strict=True):
                    found[i] = [piece for piece in row if piece not in (PAD, EOS)]
        return found


def serve(folder: Path, system: str, threads: int) -> None:
    """In a process of its own: answer each setting with pieces and seconds."""
    from nmt.system.runtime import tune_process

    tune_process()

    import torch

    from nmt.system.progress import clock

    torch.set_num_threads(threads)
    engine, kind = system.split()
    ids = json.loads((folder / "ids.json").read_text())
    speaker = (
        Ours(folder, "bf16" if kind == "bf16" else "fp32")
        if engine == "ours"
        else CTranslate2(folder, kind, threads)
        if engine == "ctranslate2"
        else HuggingFace(folder, kind)
    )
    for beam in (1, 4):
        speaker.translate(ids[:100], beam, True)
    for line in sys.stdin:
        beam, is_forced = SETTINGS[line.strip()]
        groups = [[one] for one in ids[:ONE_BY_ONE]] if line.startswith("one") else [ids]
        began = clock()
        found = [one for group in groups for one in speaker.translate(group, beam, is_forced)]
        seconds = clock() - began
        print(json.dumps([len(found), sum(len(one) + 1 for one in found), seconds]), flush=True)


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
        help="instead of times: what N lines owe their company",
    )
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(Path(args.serve[0]), args.serve[1], args.threads)
        return
    with tempfile.TemporaryDirectory() as name:
        if args.invariance:
            prepare(Path(name), args.data, args.checkpoint, args.invariance, [])
            invariance(Path(name), args.invariance)
            return
        prepare(Path(name), args.data, args.checkpoint, args.lines, args.systems)
        servants = {
            system: subprocess.Popen(
                [sys.executable, __file__, "--serve", name, system, "--threads", str(args.threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for system in args.systems
        }
        speeds: dict[tuple[str, str], list[float]] = {}
        rows: dict[tuple[str, str], list[Any]] = {}
        for setting in args.settings:
            for _ in range(args.rounds):
                for system, servant in servants.items():
                    assert servant.stdin and servant.stdout
                    servant.stdin.write(setting + "\n")
                    servant.stdin.flush()
                    row = rows[system, setting] = json.loads(servant.stdout.readline())
                    speeds.setdefault((system, setting), []).append(row[1] / row[2])
            for system in args.systems:
                each = speeds[system, setting]
                n, n_pieces, _ = rows[system, setting]
                best = max(each)
                print(
                    json.dumps(
                        {
                            "system": system,
                            "setting": setting,
                            "pieces_per_s": round(best),
                            "median": round(statistics.median(each)),
                            "ms_per_sentence": round(1e3 * n_pieces / best / n, 1),
                            "pieces": n_pieces,
                        }
                    ),
                    flush=True,
                )
        for servant in servants.values():
            servant.communicate("")


if __name__ == "__main__":
    main()
