"""The same training on any number of ranks, also when the number changes from start to start.

Which pairs make up update k, and what dropout does to them, does not depend on who computes it;
sums over ranks are taken in another order, which is all that may differ. A rank that has no
micro-batch left in an update gets a blank one, and nothing of it counts.
"""

import math
import re

from pytest import approx
from support.finished_run import read_lines, read_tensors
from support.ground import Ground
from support.rings import amount
from support.text_lines import read_json_lines

from nmt.checkpoint.checkpoint import TrainState
from nmt.checkpoint.run_checkpoints import find_newest
from nmt.config import COURSE_KEYS, MACHINE_KEYS
from nmt.config_files import list_setting_keys
from nmt.system.strict_json import Fields

BOUND = 1e-5
# The toy's own warm-up ends at a rate of 0.06, where the last bit of a sum becomes another model
# within fifty updates; this one reaches 0.0016, twice the peak of the paper's base model.
SETTINGS = (
    "optimizer.warmup_steps=400",
    "training.log_every=1",
    "training.validate_every=1000",
    "evaluation.bleu=false",
)

# All settings that change what an update computes, in runs of which each takes other values than the
# toy's. Frozen parts are in the last alone, because with them no weight is asked whether it learns.
RECIPES = {
    "averaged": """
        training.ema=0.9 optimizer.weight_decay=0.1 optimizer.scale=2
        optimizer.beta1=0.8 optimizer.beta2=0.997 optimizer.eps=1e-8 training.precision=bf16
        training.src_tokens=250 training.tgt_tokens=350 training.grouping=random data.temperature=2
    """,
    "pre-norm": """
        model.norm=pre model.tied=false model.encoder_layers=2 model.decoder_layers=3
        model.attention_dropout=0.1 model.ffn_dropout=0.1 model.activation=gelu vocab.bpe_dropout=0.1
        optimizer.schedule=inverse_sqrt optimizer.peak_lr=5e-4
    """,
    "learned": """
        model.positions=learned model.max_positions=300 model.attention_bias=true
        model.projection_bias=true model.scale_embeddings=projection
        model.embedding_norm=after_dropout model.n_heads=1 model.dropout=0 training.label_smoothing=0
        optimizer.schedule=cosine optimizer.peak_lr=1e-3 optimizer.final_lr=1e-4 optimizer.warmup_steps=2
    """,
    "rotary": """
        model.positions=rotary model.d_model=20 model.d_ff=28 model.n_layers=2 model.d_k=4 model.d_v=6
        model.window=1 model.tied=embeddings model.activation=swish model.vocab_rows=90
        model.scale_embeddings=none model.embedding_norm=before_dropout
    """,
    "two vocabularies": """
        vocab.joint=false vocab.tgt_size=70 model.tied=decoder data.store=FOLDER/two-store
        optimizer.schedule=constant optimizer.peak_lr=1e-3 training.clip_norm=1e-30
    """,
    "tuned": """
        training.init_from=FOLDER/averaged data.store=FOLDER/tuned-store training.freeze=[encoder]
        training.ema=0.9
    """,
}


def trained(
    ground: Ground, name: str, stages: list[tuple[int, int]], *settings: str
) -> dict[int, Fields]:
    """Train the run `name` in `stages` of (ranks, until which update); what the ranks saw of each
    update.
    """
    seen: dict[int, Fields] = {}
    for size, steps in stages:
        first = len(seen) + 1
        start = ground.start(
            name, *SETTINGS, *settings, f"training.steps={steps}", size=size, is_recorded=True
        )
        assert start.wait() == [0] * size, start.told()
        for folder in start.folders:
            lines = read_json_lines(folder / "updates.jsonl")
            assert [line["step"] for line in lines] == list(range(first, steps + 1))
            for line in lines:
                update = seen.setdefault(line["step"], line | {"micros": {}, "blanks": 0})
                assert update["n_tgt"] == line["n_tgt"]
                assert update["micros"].keys().isdisjoint(line["micros"])
                update["micros"] |= line["micros"]
                update["blanks"] += line["blanks"]
    return seen


def check_alike(
    ground: Ground,
    name: str,
    seen: dict[int, Fields],
    whole_name: str,
    whole: dict[int, Fields],
) -> None:
    """The same pairs in each micro-batch; sums, norms and weights but for rounding; the same place in the data."""
    assert seen.keys() == whole.keys()
    for step, update in whole.items():
        assert list_pairs(seen[step]) == list_pairs(update)
        for which in (0, 1):  # smoothed, NLL
            sums = [
                math.fsum(sums[which] for _, sums in each["micros"].values())
                for each in (seen[step], update)
            ]
            assert abs(sums[0] - sums[1]) <= BOUND * update["n_tgt"]
    runs = ground.run(name), ground.run(whole_name)
    norms = [[line["grad_norm"] for line in read_lines(run.path, "train")] for run in runs]
    assert norms[0] == approx(norms[1], rel=1e-3) and len(norms[0]) == len(whole)
    states = []
    for run in runs:
        newest = find_newest(run)
        assert newest and newest.step == max(whole) and isinstance(newest.origin, TrainState)
        states.append((newest.origin.cursor, newest.origin.tokens_seen))
    assert states[0] == states[1]
    ours, theirs = (read_tensors(run.path, max(whole), "model") for run in runs)
    assert ours.keys() == theirs.keys()
    for tensor, exact in theirs.items():
        gap = (ours[tensor].double() - exact.double()).norm() / exact.double().norm()
        assert gap <= BOUND, tensor


def list_pairs(update: Fields) -> dict[str, str]:
    """The micro-batches of an update by number: a digest of their pairs."""
    return {number: content for number, (content, _) in update["micros"].items()}


def test_one_two_four_and_one_again(ground: Ground) -> None:
    n = amount(3, 12)  # updates between two changes
    whole = trained(ground, "one", [(1, 4 * n)])
    assert {update["blanks"] for update in whole.values()} == {0}
    assert (
        len({content for update in whole.values() for content in list_pairs(update).values()})
        > 8 * n
    )
    seen = trained(ground, "changing", [(1, n), (2, 2 * n), (4, 3 * n), (1, 4 * n)])
    check_alike(ground, "changing", seen, "one", whole)


def test_more_ranks_than_micro_batches(ground: Ground) -> None:
    small = ("training.src_tokens=80", "training.tgt_tokens=80")
    whole = trained(ground, "one-small", [(1, 4)], *small)
    assert max(len(update["micros"]) for update in whole.values()) < 4
    seen = trained(ground, "many-small", [(4, 4)], *small)
    assert all(update["blanks"] == 4 - len(update["micros"]) for update in seen.values())
    check_alike(ground, "many-small", seen, "one-small", whole)


def test_every_recipe_trains_on_two_ranks(ground: Ground) -> None:
    words = " ".join((*SETTINGS, *RECIPES.values())).split()
    keys = {key for key in list_setting_keys() if re.match("(model|optimizer|training)\\.", key)}
    assert keys - {*COURSE_KEYS, *MACHINE_KEYS} <= {word.partition("=")[0] for word in words}
    for name, recipe in RECIPES.items():
        settings = recipe.replace("FOLDER", str(ground.folder)).split()
        seen = trained(ground, name, [(2, 3)], *settings)
        assert sum(update["n_tgt"] for update in seen.values()) > 300
