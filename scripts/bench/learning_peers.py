"""One process of scripts/bench/learning.py: trains with one system, judges its model from inside
the process, and prints one JSON object.

    PEERS/bin/python scripts/bench/learning_peers.py JOB.json

A trainer runs its own loop on its own batches. This file sets only the rate of each update, and at
some updates asks its model for the NLL of the dev set; at the end one beam search, the same for
all, translates that set. The time that judging takes does not count. Ids are those of our store;
each model's `Probe` knows its own. Only `ours` imports nmt, so any Python with torch will do.
"""

import json
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peers import BOS, EOS, PAD, SYSTEMS, Finished, Job, Meter, open_answer, padded
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

SENTENCES = 64  # of the dev set, at a time
Pair = tuple[list[int], list[int]]  # without marks


@dataclass(frozen=True, kw_only=True)
class LearningJob(Job):
    every: int  # updates between two points of the curve
    warmup: int
    scale: float
    beam: int
    alpha: float  # of the length penalty
    extra: int  # pieces that a translation may have beyond its source's
    arguments: list[str]  # of nmt-train, for ours


def compute_rate(step: int, job: LearningJob) -> float:
    return job.scale * job.d_model**-0.5 * min(step**-0.5, step * job.warmup**-1.5)


# ---- how to ask each model ------------------------------------------------------------------------


class Probe(ABC):
    """Encodes and decodes with a trainer's model: ids of our store in, (sentences, length) padded.

    Sources have their end mark, targets both marks or, for a search, only the first. `ids` gives
    the trainer's id of each of ours.
    """

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        self.model: Any = model
        self.ids = ids

    @abstractmethod
    def encode(self, src: Tensor) -> Tensor:
        """Return the encoder's output (sentences, length, d_model)."""

    @abstractmethod
    def decode(self, memory: Tensor, src: Tensor, tgt: Tensor) -> Tensor:
        """Return hidden states (sentences, length, d_model)."""

    @abstractmethod
    def project(self, hidden: Tensor) -> Tensor:
        """Return logits, in the order of the trainer's ids."""


class PlainProbe(Probe):
    def encode(self, src: Tensor) -> Tensor:
        layers = self.model.transformer.encoder
        return layers(self.model.embed(src), src_key_padding_mask=src == PAD)

    def decode(self, memory: Tensor, src: Tensor, tgt: Tensor) -> Tensor:
        future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        return self.model.transformer.decoder(
            self.model.embed(tgt), memory, tgt_mask=future, memory_key_padding_mask=src == PAD
        )

    def project(self, hidden: Tensor) -> Tensor:
        return self.model.project(hidden)


class OwnProbe(Probe):
    def encode(self, src: Tensor) -> Tensor:
        return self._pad(self.model.encode(self._pack(src)), src)

    def decode(self, memory: Tensor, src: Tensor, tgt: Tensor) -> Tensor:
        packed = self._pack(src)
        return self._pad(self.model.decode(self._pack(tgt), memory[src != PAD], packed), tgt)

    def project(self, hidden: Tensor) -> Tensor:
        return self.model.projection(hidden)

    def _pack(self, rows: Tensor) -> Any:
        lengths = (rows != PAD).sum(1)
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        packed = import_module("nmt.data.batch").Packed
        return packed(rows[rows != PAD], offsets, rows.shape[1], int(offsets[-1]))

    def _pad(self, hidden: Tensor, rows: Tensor) -> Tensor:
        result = hidden.new_zeros(*rows.shape, hidden.shape[1])
        result[rows != PAD] = hidden
        return result


class EoleProbe(Probe):
    """Their sources have no end mark."""

    def __init__(self, model: nn.Module, ids: Tensor, generator: nn.Module) -> None:
        super().__init__(model, ids)
        self.generator = generator

    def encode(self, src: Tensor) -> Tensor:
        src = self._drop_end(src)
        mask = (src == PAD).unsqueeze(1)
        return self.model.encoder(self.model.src_emb(self.ids[src]), pad_mask=mask)[0]

    def decode(self, memory: Tensor, src: Tensor, tgt: Tensor) -> Tensor:
        n = tgt.shape[1]
        if n == 1:  # it takes a lone piece for a step with a cache
            tgt = tgt.expand(-1, 2)
        src_mask = (self._drop_end(src) == PAD).unsqueeze(1)
        tgt_mask = (tgt == PAD).unsqueeze(1)
        embedded = self.model.tgt_emb(self.ids[tgt])
        hidden = self.model.decoder(
            embedded, enc_out=memory, src_pad_mask=src_mask, tgt_pad_mask=tgt_mask
        )[0]
        return hidden[:, :n]

    def project(self, hidden: Tensor) -> Tensor:
        return self.generator(hidden)

    def _drop_end(self, src: Tensor) -> Tensor:
        return src.masked_fill(src == EOS, PAD)[:, :-1]


class OpenNmtProbe(EoleProbe):
    def encode(self, src: Tensor) -> Tensor:
        src = self._drop_end(src)
        return self.model.encoder(self.ids[src].unsqueeze(2), (src != PAD).sum(1))[0]

    def decode(self, memory: Tensor, src: Tensor, tgt: Tensor) -> Tensor:
        src = self._drop_end(src)
        self.model.decoder.init_state(self.ids[src].unsqueeze(2), memory, None)
        lengths = (src != PAD).sum(1)
        return self.model.decoder(self.ids[tgt].unsqueeze(2), memory, src_len=lengths)[0]


class JoeyProbe(Probe):
    def encode(self, src: Tensor) -> Tensor:
        mask = (src != PAD).unsqueeze(1)
        return self.model.encoder(self.model.src_embed(self.ids[src]), mask.sum(2), mask)[0]

    def decode(self, memory: Tensor, src: Tensor, tgt: Tensor) -> Tensor:
        return self.model.decoder(
            trg_embed=self.model.trg_embed(self.ids[tgt]),
            encoder_output=memory,
            encoder_hidden=None,
            src_mask=(src != PAD).unsqueeze(1),
            unroll_steps=None,
            hidden=None,
            trg_mask=(tgt != PAD).unsqueeze(1),
        )[1]

    def project(self, hidden: Tensor) -> Tensor:
        return self.model.decoder.output_layer(hidden)


class FairseqProbe(Probe):
    """Its targets begin with the end mark."""

    def encode(self, src: Tensor) -> Tensor:
        lengths = (src != PAD).sum(1)
        return self.model.encoder(self.ids[src], src_lengths=lengths)["encoder_out"][0].transpose(
            0, 1
        )

    def decode(self, memory: Tensor, src: Tensor, tgt: Tensor) -> Tensor:
        encoded = {
            "encoder_out": [memory.transpose(0, 1)],
            "encoder_padding_mask": [src == PAD],
        }
        return self.model.decoder(self.ids[tgt], encoder_out=encoded, features_only=True)[0]

    def project(self, hidden: Tensor) -> Tensor:
        return self.model.decoder.output_layer(hidden)


# ---- judging --------------------------------------------------------------------------------------


def measure_nll(probe: Probe, pairs: list[Pair]) -> float:
    """Return the NLL of a target piece, end marks included, without smoothing."""
    total, n_labels = 0.0, 0
    for first in range(0, len(pairs), SENTENCES):
        src, tgt = pad_pairs(pairs[first : first + SENTENCES])
        labels = tgt[:, 1:]
        inputs = tgt[:, :-1].where(labels != PAD, PAD)  # the end mark is a label, never an input
        hidden = probe.decode(probe.encode(src), src, inputs)
        logs = probe.project(hidden).float().log_softmax(2)
        nll = -logs.gather(2, probe.ids[labels].unsqueeze(2)).squeeze(2)
        total += float(nll[labels != PAD].double().sum())
        n_labels += int((labels != PAD).sum())
    return total / n_labels


def translate(probe: Probe, src: Tensor, beam: int, alpha: float, extra: int) -> list[list[int]]:
    """Translate by beam search with the paper's length penalty.

    A sentence is done when no active hypothesis would beat the best finished one if it ended now. Each
    step decodes whole prefixes again, so it needs no cache of any trainer's.
    """
    n = len(src)
    found: list[list[int]] = [[] for _ in range(n)]
    best = torch.full((n,), -torch.inf)
    memory, open_rows = probe.encode(src), torch.arange(n)
    prefixes = torch.full((n, beam, 1), BOS)
    scores = torch.full((n, beam), -torch.inf)
    scores[:, 0] = 0.0
    limits = (src != PAD).sum(1) - 1 + extra
    for length in range(1, int(limits.max()) + 2):
        # log-probabilities of each prefix with each of our pieces after it
        rows = open_rows.repeat_interleave(beam)
        hidden = probe.decode(memory[rows], src[rows], prefixes.flatten(0, 1))
        logs = probe.project(hidden[:, -1]).float().log_softmax(1)[:, probe.ids]
        logs[:, [PAD, BOS]] = -torch.inf
        is_over = (limits[rows] < length)[:, None]
        logs = logs.masked_fill(is_over & (torch.arange(logs.shape[1]) != EOS), -torch.inf)

        # the best of all, for each sentence
        totals = (scores.flatten()[:, None] + logs).view(len(open_rows), -1)
        values, places = totals.topk(2 * beam, 1)
        parents, pieces = places // logs.shape[1], places % logs.shape[1]
        parent_rows = parents.unsqueeze(2).expand(-1, -1, length)
        extended = torch.cat((prefixes.gather(1, parent_rows), pieces.unsqueeze(2)), 2)
        has_ended = pieces == EOS

        # those that end here
        penalty = ((5 + length) / 6) ** alpha
        ended, which = (values / penalty).masked_fill(~has_ended, -torch.inf).max(1)
        for row, sentence in enumerate(open_rows.tolist()):
            if ended[row] > best[sentence]:
                best[sentence] = ended[row]
                found[sentence] = extended[row, which[row], 1:-1].tolist()

        # those that go on
        scores, order = values.masked_fill(has_ended, -torch.inf).topk(beam, 1)
        prefixes = extended.gather(1, order.unsqueeze(2).expand(-1, -1, length + 1))
        is_open = scores[:, 0] / penalty > best[open_rows]
        open_rows, scores, prefixes = open_rows[is_open], scores[is_open], prefixes[is_open]
        if not len(open_rows):
            break
    return found


def pad_pairs(pairs: list[Pair]) -> tuple[Tensor, Tensor]:
    src = padded([[*src, EOS] for src, _ in pairs])
    return src, padded([[BOS, *tgt, EOS] for _, tgt in pairs])


class Course(Meter):
    """Records the learning curve of one training; takes the place of the Meter of peers.py."""

    def __init__(self, job: LearningJob, pairs: list[Pair]) -> None:
        super().__init__(job)
        self.job: LearningJob = job
        self.order = sorted(range(len(pairs)), key=lambda row: len(pairs[row][0]))
        self.pairs = [pairs[row] for row in self.order]
        self.trained = take_sample(read_pairs(job, "train"), len(pairs))
        self.modules: dict[str, nn.Module] = {}  # what `watch` has seen, by class
        self.make_probe: Callable[[], Probe] | None = None
        self.points: list[dict[str, float]] = []
        self.translations: list[list[int]] = [[] for _ in pairs]
        self.n_tokens = 0
        self.restart_clock()
        register_optimizer_step_pre_hook(self.set_rate)

    def restart_clock(self) -> None:
        self.began = (time.process_time(), time.perf_counter())

    def watch(self, module: str, name: str, count: Callable[[Any], int] | None = None) -> None:
        """Remember the last instance of a class that was called; `count` labels in its arguments."""
        owner = getattr(import_module(module), name)
        forward = owner.forward

        def watched(instance: nn.Module, *args: Any, **options: Any) -> Any:
            self.modules[name] = instance
            if count is not None and instance.training:
                self.pending += count(args)
            return forward(instance, *args, **options)

        owner.forward = watched

    def set_rate(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Set the same rate for all peers, whose schedules differ in the first update. nmt sets its own."""
        if self.job.system != "ours":
            for group in optimizer.param_groups:
                group.update(
                    lr=compute_rate(self.n_steps + 1, self.job), betas=(0.9, 0.98), eps=1e-9
                )

    def stepped(self, *hooked: Any) -> None:
        optimizer = hooked[0]
        self.n_steps += 1
        self.n_tokens, self.pending = self.n_tokens + self.pending, 0
        is_last = self.n_steps == self.job.updates
        if not is_last and self.n_steps % self.job.every:
            return
        now = (time.process_time(), time.perf_counter())
        point = {
            "update": self.n_steps,
            "tokens": self.n_tokens,
            "cpu_s": round(now[0] - self.began[0], 2),
            "wall_s": round(now[1] - self.began[1], 2),
            "rate": float(optimizer.param_groups[0]["lr"]),
        }
        assert self.make_probe is not None
        probe = self.make_probe()
        probe.model.eval()
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            point["nll"] = measure_nll(probe, self.pairs)
            point["train_nll"] = measure_nll(probe, self.trained)
            if is_last:
                self.translate_all(probe)
                probe.model.train()  # what dropout alone costs
                point["dropout_nll"] = measure_nll(probe, self.pairs)
        probe.model.train()
        self.points.append(point)
        print(json.dumps(point), file=sys.stderr, flush=True)
        if is_last:
            raise Finished
        spent = (time.process_time() - now[0], time.perf_counter() - now[1])
        self.began = (self.began[0] + spent[0], self.began[1] + spent[1])

    def translate_all(self, probe: Probe) -> None:
        for first in range(0, len(self.pairs), SENTENCES):
            src, _ = pad_pairs(self.pairs[first : first + SENTENCES])
            rows = self.order[first : first + SENTENCES]
            found = translate(probe, src, self.job.beam, self.job.alpha, self.job.extra)
            for row, ids in zip(rows, found, strict=True):
                self.translations[row] = ids


# ---- the trainers ---------------------------------------------------------------------------------


def list_own_ids(n_vocab: int) -> Tensor:
    return torch.arange(n_vocab)


def find_ids(n_vocab: int, marks: tuple[str, str, str], look_up: Callable[[str], int]) -> Tensor:
    """Return the trainer's id of each of ours; its names of pad, bos and eos are `marks`."""
    words = [f"t{i}" for i in range(n_vocab)]
    words[PAD], words[BOS], words[EOS] = marks
    return torch.tensor([look_up(word) for word in words])


def train_ours(job: LearningJob, course: Course) -> None:
    from nmt import api

    course.watch("nmt.model.transformer", "Transformer", lambda args: args[1].n_live)
    course.make_probe = lambda: OwnProbe(course.modules["Transformer"], list_own_ids(job.n_vocab))
    config, *overrides = job.arguments
    api.train(api.load_config(config, overrides))


def train_plain(job: LearningJob, course: Course) -> None:
    course.watch("peers", "Plain")
    course.make_probe = lambda: PlainProbe(course.modules["Plain"], list_own_ids(job.n_vocab))
    SYSTEMS[job.system][1](job, course)


def train_eole(job: LearningJob, course: Course) -> None:
    course.watch("eole.models.model", "EncoderDecoderModel")
    course.watch("eole.utils.loss", "LossCompute")

    def make_probe() -> Probe:
        loss: Any = course.modules["LossCompute"]
        ids = loss.vocabs["tgt"].tokens_to_ids
        own = find_ids(job.n_vocab, ("<blank>", "<s>", "</s>"), ids.__getitem__)
        return EoleProbe(course.modules["EncoderDecoderModel"], own, loss.generator)

    course.make_probe = make_probe
    SYSTEMS["eole"][1](job, course)


def train_opennmt(job: LearningJob, course: Course) -> None:
    course.watch("onmt.models.model", "NMTModel")
    course.watch("onmt.utils.loss", "LossCompute")

    def make_probe() -> Probe:
        loss: Any = course.modules["LossCompute"]
        ids = loss.vocab.tokens_to_ids
        own = find_ids(job.n_vocab, ("<blank>", "<s>", "</s>"), ids.__getitem__)
        return OpenNmtProbe(course.modules["NMTModel"], own, loss.generator)

    course.make_probe = make_probe
    SYSTEMS["opennmt"][1](job, course)


def train_joeynmt(job: LearningJob, course: Course) -> None:
    course.watch("joeynmt.model", "Model")

    def make_probe() -> Probe:
        model: Any = course.modules["Model"]
        own = find_ids(job.n_vocab, ("<pad>", "<s>", "</s>"), model.trg_vocab.lookup)
        return JoeyProbe(model, own)

    course.make_probe = make_probe
    SYSTEMS["joeynmt"][1](job, course)


def train_fairseq(job: LearningJob, course: Course) -> None:
    text, binary = Path(job.text), Path(job.scratch) / "fairseq"
    shutil.rmtree(binary, ignore_errors=True)  # fairseq refuses the files of an earlier seed
    words = (text / "vocab.txt").read_text().split()
    (text / "dict.txt").write_text("".join(f"{word} 1\n" for word in words))
    languages = ["--source-lang", "src", "--target-lang", "tgt"]
    prefixes = ["--trainpref", str(text / "train"), "--validpref", str(text / "valid")]
    dictionaries = ["--srcdict", str(text / "dict.txt"), "--joined-dictionary"]
    sys.argv = ["preprocess", *languages, *prefixes, *dictionaries, "--destdir", str(binary)]
    import_module("fairseq_cli.preprocess").cli_main()

    course.watch("fairseq.models.transformer", "TransformerModel")
    criterion = "label_smoothed_cross_entropy"
    course.watch(
        f"fairseq.criterions.{criterion}",
        "LabelSmoothedCrossEntropyCriterion",
        lambda args: args[1]["ntokens"],
    )

    def make_probe() -> Probe:
        model: Any = course.modules["TransformerModel"]
        own = find_ids(job.n_vocab, ("<pad>", "</s>", "</s>"), model.encoder.dictionary.index)
        return FairseqProbe(model, own)

    course.make_probe = make_probe
    course.restart_clock()  # data are prepared before a training
    options = {
        "arch": "transformer",
        "dropout": job.dropout,
        "optimizer": "adam",
        "lr": 1e-4,
        "lr-scheduler": "fixed",
        "criterion": criterion,
        "label-smoothing": job.smoothing,
        "max-tokens": round(
            job.tokens * 1.09
        ),  # padded, of the longer side: job.tokens without padding
        "max-update": job.updates + 1,  # so that the judgement of the last one comes first
        "seed": job.seed,
        "num-workers": 0,
        "required-batch-size-multiple": 1,
        "log-interval": job.every,
        "log-format": "simple",
    }
    for side in ("encoder", "decoder"):
        options[f"{side}-embed-dim"] = job.d_model
        options[f"{side}-ffn-embed-dim"] = job.d_ff
        options[f"{side}-attention-heads"] = job.n_heads
        options[f"{side}-layers"] = job.n_layers
    flags = ["--share-all-embeddings", "--cpu", "--no-save", "--disable-validation"]
    sys.argv = ["train", str(binary), *flags]
    for name, value in options.items():
        sys.argv += [f"--{name}", str(value)]
    import_module("fairseq_cli.train").cli_main()


TRAINERS: dict[str, Callable[[LearningJob, Course], None]] = {
    "ours": train_ours,
    "plain": train_plain,
    "lean": train_plain,
    "eole": train_eole,
    "opennmt": train_opennmt,
    "joeynmt": train_joeynmt,
    "fairseq": train_fairseq,
}


def take_sample(pairs: list[Pair], size: int) -> list[Pair]:
    """Take some pairs spread evenly over a corpus, in order of length, which saves padding."""
    step = max(1, len(pairs) // size)
    return sorted(pairs[::step], key=lambda pair: len(pair[0]))


def read_pairs(job: LearningJob, split: str) -> list[Pair]:
    sides = []
    for side in ("src", "tgt"):
        lines = (Path(job.text) / f"{split}.{side}").read_text(encoding="ascii").splitlines()
        sides.append([[int(word[1:]) for word in line.split()] for line in lines])
    return list(zip(*sides, strict=True))


def main(path: str) -> None:
    job = LearningJob(**json.loads(Path(path).read_text(encoding="utf-8")))
    answer = open_answer()
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    course = Course(job, read_pairs(job, "valid"))
    with suppress(Finished):
        TRAINERS[job.system](job, course)
    assert course.make_probe is not None
    packages = {"ours": "torch", "fairseq": "fairseq"}
    package = packages.get(job.system) or SYSTEMS[job.system][0]
    parameters = course.make_probe().model.parameters()
    result = {
        "points": course.points,
        "translations": course.translations,
        "n_parameters": sum(parameter.numel() for parameter in parameters),
        "versions": {name: version(name) for name in ("torch", package)},
    }
    print(json.dumps(result), file=answer, flush=True)
    os._exit(0)  # a toolkit's threads and workers may wait for a loop that has been left


if __name__ == "__main__":
    main(sys.argv[1])
