"""One process of scripts/bench/train.py or gpu_runs.py: another trainer at our sizes, timed from
inside; prints one JSON object.

    PEERS/bin/python scripts/bench/peers.py JOB.json

A loop over Hugging Face's Marian or torch's Transformer, and eole's own command. An update lasts from
the end of one step of torch's Adam to the end of the next, whatever happens in between; its tokens are
the labels that the loss counts. Nothing of nmt is imported, so any Python with torch and the other
trainer will do.
"""

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

PAD, BOS, EOS = 0, 2, 3  # as in our store; the text holds none of them
LONGEST = 1_024  # positions


@dataclass(frozen=True)
class Job:
    system: str
    precision: str
    text: str  # folder with train.{src,tgt}, lines of t17 t4 ..., and vocab.txt
    scratch: str  # folder for configs and what a peer writes
    n_vocab: int
    d_model: int
    d_ff: int
    n_heads: int
    n_layers: int
    tokens: int  # target tokens in an update
    updates: int  # to time
    threads: int
    seconds: float  # at most, for the timed ones
    skip: int  # first updates, left out: they allocate
    dropout: float = 0.1
    smoothing: float = 0.1
    seed: int = 1


class Finished(BaseException):
    """Leaves a loop that may catch any Exception."""


class Meter:
    """Target tokens and seconds of each update."""

    def __init__(self, job: Job) -> None:
        self.job, self.pending, self.n_steps, self.last = job, 0, 0, 0.0
        self.tokens: list[int] = []
        self.seconds: list[float] = []
        self.hook = register_optimizer_step_post_hook(self.stepped)

    def count(self, labels: Tensor, pad: int) -> None:
        self.pending += int((labels != pad).sum())

    def stepped(self, *_: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.n_steps += 1
        if self.n_steps > self.job.skip:
            self.tokens.append(self.pending)
            self.seconds.append(now - self.last)
            print(f"{self.pending} target tokens in {now - self.last:.2f} s", file=sys.stderr)
        self.last, self.pending = now, 0
        if len(self.tokens) >= self.job.updates or sum(self.seconds) > self.job.seconds:
            raise Finished

    def watch_losses(self) -> None:
        """Count what any nn.CrossEntropyLoss counts."""
        loss = nn.CrossEntropyLoss.forward

        def counted(criterion: nn.CrossEntropyLoss, scores: Tensor, labels: Tensor) -> Tensor:
            self.count(labels, criterion.ignore_index)
            return loss(criterion, scores, labels)

        nn.CrossEntropyLoss.forward = counted  # type: ignore[method-assign, assignment]


# ---- others' models, in a loop of our own ------------------------------------------------------------------------


def make_marian(job: Job) -> nn.Module:
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=job.n_vocab,
        d_model=job.d_model,
        encoder_layers=job.n_layers,
        decoder_layers=job.n_layers,
        encoder_attention_heads=job.n_heads,
        decoder_attention_heads=job.n_heads,
        encoder_ffn_dim=job.d_ff,
        decoder_ffn_dim=job.d_ff,
        dropout=job.dropout,
        attention_dropout=0.0,
        activation_dropout=0.0,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=EOS,
        max_position_embeddings=LONGEST,
        use_cache=False,
        # The faster one
        attn_implementation="sdpa" if torch.cuda.is_available() else "eager",
    )
    return Marian(MarianMTModel(config))


class Marian(nn.Module):
    """Logits of source and target, as those of `TorchTransformer`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, src: Tensor, inputs: Tensor) -> Tensor:
        found = self.model(input_ids=src, attention_mask=src != PAD, decoder_input_ids=inputs)
        logits: Tensor = found.logits
        return logits


class TorchTransformer(nn.Module):
    """nn.Transformer between shared embeddings."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        d_model, n_layers = job.d_model, job.n_layers
        self.pieces = nn.Embedding(job.n_vocab, d_model)
        self.positions = nn.Embedding(LONGEST, d_model)
        sizes = d_model, job.n_heads, n_layers, n_layers, job.d_ff, job.dropout
        self.transformer = nn.Transformer(*sizes, batch_first=True)
        nn.init.normal_(self.pieces.weight, std=d_model**-0.5)

    def embed(self, ids: Tensor) -> Tensor:
        scale: float = self.pieces.embedding_dim**0.5
        return self.pieces(ids) * scale + self.positions.weight[: ids.shape[1]]

    def forward(self, src: Tensor, inputs: Tensor) -> Tensor:
        n = inputs.shape[1]
        is_later = torch.ones(n, n, dtype=torch.bool, device=src.device).triu(1)
        is_padding = src == PAD
        hidden = self.transformer(
            self.embed(src),
            self.embed(inputs),
            tgt_mask=is_later,
            tgt_is_causal=True,
            src_key_padding_mask=is_padding,
            memory_key_padding_mask=is_padding,
        )
        return F.linear(hidden, self.pieces.weight)


def read_side(job: Job, side: str) -> list[list[int]]:
    lines = (Path(job.text) / f"train.{side}").read_text(encoding="ascii").splitlines()
    return [[int(token[1:]) for token in line.split()] for line in lines]


def generate_batches(job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    """Padded (sentences, length) of like lengths: the source with its end mark, the target with
    both marks.
    """
    pairs = list(zip(read_side(job, "src"), read_side(job, "tgt"), strict=True))
    pairs.sort(key=lambda pair: (len(pair[1]), len(pair[0])))
    groups: list[list[tuple[list[int], list[int]]]] = []
    room = 0
    for pair in pairs:
        room -= len(pair[1]) + 1
        if room < 0:
            groups.append([])
            room = job.tokens - len(pair[1]) - 1
        groups[-1].append(pair)
    draw = random.Random(job.seed)
    while True:
        for group in draw.sample(groups, len(groups)):
            yield (
                pad([[*src, EOS] for src, _ in group]),
                pad([[BOS, *tgt, EOS] for _, tgt in group], 1),
            )


def pad(rows: list[list[int]], n_beside: int = 0) -> Tensor:
    longest = max(map(len, rows))
    if (
        torch.cuda.is_available()
    ):  # whose products want whole eights, of the target without its last
        longest = -(-(longest - n_beside) // 8) * 8 + n_beside
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def train_marian(job: Job, meter: Meter) -> None:
    train_padded(job, meter, make_marian(job))


def train_compiled_marian(job: Job, meter: Meter) -> None:
    model = make_marian(job)
    model.compile(dynamic=True)
    train_padded(job, meter, model)


def train_torch(job: Job, meter: Meter) -> None:
    train_padded(job, meter, TorchTransformer(job))


def train_padded(job: Job, meter: Meter, model: nn.Module) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train()
    optimizer = torch.optim.Adam(
        model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=torch.cuda.is_available()
    )
    for src, tgt in generate_batches(job):
        src, inputs, labels = src.to(device), tgt[:, :-1].to(device), tgt[:, 1:].to(device)
        meter.count(tgt[:, 1:], PAD)
        with torch.autocast(device.type, torch.bfloat16, enabled=job.precision == "bf16"):
            logits = model(src, inputs)
            loss = F.cross_entropy(
                logits.flatten(0, 1),
                labels.flatten(),
                ignore_index=PAD,
                label_smoothing=job.smoothing,
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ---- eole, through its own command ------------------------------------------------------------------------------


def train_eole(job: Job, meter: Meter) -> None:
    meter.watch_losses()
    training = {
        "batch_type": "tokens",
        # Padded tokens of the longer side with both marks, so more than `tokens` are asked for
        "batch_size": round(job.tokens * 1.09),
        "normalization": "tokens",
        "dropout": [job.dropout],
        "attention_dropout": [0.0],
        "label_smoothing": job.smoothing,
        "optim": "adam",
        "adam_beta2": 0.98,
        "learning_rate": 2.0,
        "decay_method": "noam",
        "warmup_steps": 4000,
        "max_grad_norm": 0,
        "num_workers": 0,
        "train_steps": 1_000_000,
        "valid_steps": 1_000_000,
        "save_checkpoint_steps": 0,
        "world_size": 1,
        "gpu_ranks": [0] if torch.cuda.is_available() else [],
        "compute_dtype": job.precision,
        "model_path": f"{job.scratch}/model",
        "log_attention_entropy": False,
        "param_init_method": "xavier_uniform",
    }
    model = {
        "architecture": "transformer",
        "layers": job.n_layers,
        "hidden_size": job.d_model,
        "heads": job.n_heads,
        "transformer_ff": job.d_ff,
        "share_embeddings": True,
        "share_decoder_embeddings": True,
        "embeddings": {
            "word_vec_size": job.d_model,
            "position_encoding_type": "SinusoidalInterleaved",
        },
    }
    config = {
        "data": {"all": {"path_src": f"{job.text}/train.src", "path_tgt": f"{job.text}/train.tgt"}},
        "src_vocab": f"{job.text}/vocab.txt",
        "tgt_vocab": f"{job.text}/vocab.txt",
        "share_vocab": True,
        "src_vocab_size": job.n_vocab + 1,  # with marks that the text lacks
        "tgt_vocab_size": job.n_vocab + 1,
        "seed": job.seed,
        "report_every": 100,
        "training": training,
        "model": model,
    }
    path = Path(job.scratch) / "eole.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    sys.argv = ["eole", "train", "-config", str(path)]
    import_module("eole.bin.main").main()


# And the package whose version is reported
SYSTEMS: dict[str, tuple[str, Callable[[Job, Meter], None]]] = {
    "marian": ("transformers", train_marian),
    "marian_compiled": ("transformers", train_compiled_marian),
    "nn_transformer": ("torch", train_torch),
    "eole": ("eole", train_eole),
}


def main(path: str) -> None:
    job = Job(**json.loads(Path(path).read_text(encoding="utf-8")))
    # stdout is for the answer alone: what eole prints goes to stderr from now on
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    package, work = SYSTEMS[job.system]
    meter = Meter(job)
    with suppress(Finished):
        work(job, meter)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, on Linux
    print(
        json.dumps(
            {
                "tgt_tokens": meter.tokens,
                "seconds": meter.seconds,
                "peak_rss_mb": round(rss / 1024, 1),
                "precision": job.precision,
                "versions": {name: version(name) for name in dict.fromkeys(("torch", package))},
            }
        ),
        file=answer,
        flush=True,
    )
    os._exit(0)  # a toolkit's threads and workers may wait for a loop that has been left


if __name__ == "__main__":
    main(sys.argv[1])
