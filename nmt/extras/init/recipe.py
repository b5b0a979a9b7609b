"""The part of a first config that is about the model and its training: of a new model, whose size follows
the amount of text, or of one that continues another.
"""

import math
from dataclasses import dataclass, replace

from nmt.config import ModelConfig, RunConfig
from nmt.config_files import to_plain_values
from nmt.extras.init.hours import Schedule, estimate_update_seconds
from nmt.system.strict_yaml import format_yaml

PIECES_A_WORD = 1.4
MIN_STEPS = 2_000
MAX_STEPS = 100_000
# With few passes over the text a model hardly overfits, and dropout only slows it down (docs/learning.md).
# Each is (passes, the most dropout for no more than these).
DROPOUT_LIMITS = ((1, 0.0), (10, 0.1), (30, 0.2))
N_CHECKPOINTS = 40
N_VALIDATIONS = 20
PAPER_D_MODEL = 512  # of the paper's base; a smaller model is small

# What docs/fine-tuning.md found best.
PASSES = 10  # over the text
UPDATES_A_PASS = 50
VALIDATIONS_OF_START = 10
MIN_TOKENS = 1_024  # of an update
RATE = 2e-4  # of a model of d_model 256

NEW = """
vocab:
  # this and the model: {size.reason}
  size: {size.vocab}
  # characters that the text lacks become bytes; nothing is unknown
  byte_fallback: true
  # of {alphabet:,} different characters; below 1, the rare ones become bytes, to leave pieces for words
  character_coverage: {coverage}

model:
  d_model: {size.d_model}
  d_ff: {size.d_ff}
  n_heads: {size.n_heads}
  n_layers: {size.n_layers}
  # no more than suits {schedule.passes:.1f} passes over the text
  dropout: {dropout}
  # a small model learns faster with pre, and is up to 5 BLEU better with rotary than with sinusoidal
  # (docs/learning.md). Hugging Face has no rotary positions; Marian and Bergamot want post and marian,
  # which cost 5 to 14 BLEU after 1,000 updates (docs/exports.md): train longer
  norm: {norm}
  positions: {positions}

optimizer:
  warmup_steps: {schedule.warmup_steps}
  # a peak rate of {size.peak_rate:g}, reached after the warm-up
  scale: {scale}

training:
  # {schedule.reason}
  steps: {schedule.steps}
  # a quarter of the run without a better dev score ends it
  patience: 5
  src_tokens: {schedule.tokens}
  tgt_tokens: {schedule.tokens}
  validate_every: {schedule.validate_every}
  # nmt-average --last 10 averages those of the last quarter of the run
  checkpoint_every: {schedule.checkpoint_every}
  keep_checkpoints: 12
  # bf16 where the processor has instructions for it
  precision: auto
"""
CONTINUED = """
{vocab}
{model}
optimizer:
  schedule: inverse_sqrt
  warmup_steps: {schedule.warmup_steps}
  # low, so that it forgets less; ten times as high if old text is mixed in
  peak_lr: {rate:.1g}

training:
  # {schedule.reason}
  steps: {schedule.steps}
  # ends the run after three validations without a better dev score
  patience: 3
  src_tokens: {schedule.tokens}
  tgt_tokens: {schedule.tokens}
  validate_every: {schedule.validate_every}
  checkpoint_every: {schedule.checkpoint_every}
  keep_checkpoints: 5
  # the mean over about a hundred updates is validated and saved
  ema: 0.99
  label_smoothing: {label_smoothing}
  # bf16 where the processor has instructions for it
  precision: auto
  # the model to continue, and its vocabulary; the dev set is scored before the first update
  {init_from}"""


@dataclass(frozen=True)
class Size:
    """A model that fits an amount of text, and how to train it."""

    max_words: float  # of one side of the training text
    vocab: int
    d_model: int
    d_ff: int
    n_heads: int
    n_layers: int
    dropout: float
    peak_rate: float  # of learning
    tokens: int  # of an update, on each side
    passes: int  # over the text
    fewest: int  # updates, with which it is better than a smaller model after as many hours
    reason: str

    def count_updates(self, n_words: float) -> float:
        updates = n_words * PIECES_A_WORD * self.passes / self.tokens
        return min(MAX_STEPS, max(MIN_STEPS, updates))

    def estimate_hours(self, n_words: float) -> float:
        """Estimate the hours that make this size worth while here, by a speed that is measured."""
        model = ModelConfig(
            d_model=self.d_model, d_ff=self.d_ff, n_heads=self.n_heads, n_layers=self.n_layers
        )
        seconds = estimate_update_seconds(model, self.vocab, self.tokens)
        return min(self.fewest, self.count_updates(n_words)) * seconds / 3600

    def plan(self, n_words: float) -> Schedule:
        every = _round_up(self.count_updates(n_words) / N_CHECKPOINTS)
        steps = N_CHECKPOINTS * every
        passes = steps * self.tokens / (n_words * PIECES_A_WORD)
        return Schedule(
            tokens=self.tokens,
            steps=steps,
            validate_every=steps // N_VALIDATIONS,
            checkpoint_every=every,
            warmup_steps=min(4_000, steps // 4),
            passes=passes,
            reason=f"about {passes:.0f} passes over the text, at {PIECES_A_WORD} pieces a word",
        )

    def format(self, schedule: Schedule, alphabet: int) -> str:
        is_small = self.d_model < PAPER_D_MODEL
        limits = [most for passes, most in DROPOUT_LIMITS if schedule.passes <= passes]
        return NEW.format(
            size=self,
            dropout=min([self.dropout, *limits]),
            schedule=schedule,
            alphabet=alphabet,
            coverage=0.9995 if alphabet > self.vocab // 4 else 1.0,
            norm="pre" if is_small else "post",
            positions="rotary" if is_small else "sinusoidal",
            scale=round(self.peak_rate * math.sqrt(self.d_model * schedule.warmup_steps), 2),
        )


MULTI30K = "as multi30k.yaml, for 345,000 words"
SMALLEST = "as multi30k.yaml, with fewer pieces; 8,000 are worse for 35,000 words"
SMALLER = "as multi30k.yaml, with more dropout; fewer pieces are worse from 65,000 words"
HOUR = "as hour.yaml, which gains 5 BLEU over multi30k.yaml from 1.1 million words"
IWSLT = "as fairseq's transformer_iwslt_de_en; not measured here"
BASE_DROPOUT = "the paper's base, with more dropout; not measured"
SIZES = (
    #    words     vocab   d_model d_ff  heads layers dropout rate  tokens  passes fewest
    Size(50e3,     2_000,  128,    256,  4,    4,     0.3,    5e-3,   4_096, 250, 0,       SMALLEST),
    Size(150e3,    10_000, 128,    256,  4,    4,     0.4,    5e-3,   4_096, 120, 0,       SMALLER),
    Size(500e3,    10_000, 128,    256,  4,    4,     0.3,    5e-3,   4_096, 60,  0,       MULTI30K),
    Size(3e6,      10_000, 256,    512,  4,    3,     0.2,    2.4e-3, 4_096, 40,  2_000,   HOUR),
    Size(10e6,     10_000, 512,    1024, 4,    6,     0.3,    5e-4, 4_096,  50,   50_000,  IWSLT),
    Size(50e6,     20_000, 512,    2048, 8,    6,     0.2,    7e-4, 12_500, 30,   100_000, BASE_DROPOUT),
    Size(math.inf, 37_000, 512,    2048, 8,    6,     0.1,    7e-4, 25_000, 20,   100_000, "the paper's base"),
)  # fmt: skip


def choose_size(n_words: float, hours: float | None) -> Size:
    """Return the size for this many words, or the largest below that gains by `hours` on this machine."""
    rank = next(i for i, size in enumerate(SIZES) if n_words <= size.max_words)
    wanted = SIZES[rank]
    while hours and SIZES[rank].estimate_hours(n_words) > hours:
        rank -= 1
    size = SIZES[rank]
    if size is wanted:
        return size
    reason = (
        f"{size.reason}; the text is enough for {wanted.vocab:,} pieces and d_model {wanted.d_model}, "
        "which take longer here"
    )
    return replace(size, reason=reason)


@dataclass(frozen=True)
class Start:
    """A model to continue from."""

    path: str
    config: RunConfig  # with which it was trained

    def plan(self, n_words: float) -> Schedule:
        n_tokens = n_words * PIECES_A_WORD
        wanted_tokens = max(MIN_TOKENS, _round_up(n_tokens / UPDATES_A_PASS))
        tokens = min(wanted_tokens, self.config.training.tgt_tokens)
        every = _round_up(max(10.0, n_tokens * PASSES / tokens / VALIDATIONS_OF_START))
        return Schedule(
            tokens=tokens,
            steps=VALIDATIONS_OF_START * every,
            validate_every=every,
            checkpoint_every=every,
            warmup_steps=every,
            passes=PASSES,
            reason=f"about {PASSES} passes over the text",
        )

    def format(self, schedule: Schedule, _alphabet: int) -> str:
        defaults = to_plain_values(ModelConfig())
        settings = to_plain_values(self.config.model)
        model = {key: value for key, value in settings.items() if value != defaults[key]}
        return CONTINUED.format(
            schedule=schedule,
            vocab=format_yaml({"vocab": {"joint": self.config.vocab.joint}}),
            model=format_yaml({"model": model}),
            rate=RATE * math.sqrt(256 / self.config.model.d_model),
            label_smoothing=self.config.training.label_smoothing,
            init_from=format_yaml({"init_from": self.path}),
        )


def _round_up(number: float) -> int:
    """Round up to two digits, so that people can remember the number."""
    unit = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit
