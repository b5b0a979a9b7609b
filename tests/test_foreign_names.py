"""What other toolkits call a setting is answered with ours, which exists."""

import importlib
import re

from pytest import mark, raises
from support.capture import Capture, read_stderr

from nmt.config_files import list_setting_keys, load_config
from nmt.foreign_names import TOOLKITS, explain_foreign_name, read_counterparts
from nmt.system.errors import UserError

# What people write from memory, whatever the toolkit.
REMEMBERED = """
    accum_count adam_eps alpha arch batch-type batch_size beam beam_size bf16 bpe-codes clip-norm
    criterion dec_layers decoder-layers dropout early_stopping enc_layers encoder_ffn_dim eval-bleu
    eval_steps finetune-from-model fp16 gpu_ranks gradient_accumulation_steps heads hidden_size
    keep-best-checkpoints keep-last-epochs label-smoothing lc learning_rate lenpen load_from lowercase
    lr max-epoch max-tokens max-update max_grad_norm max_steps n_best nbest num_beams num_layers
    num_train_epochs optimizer pretrained-model replace-unk report_to restore-file rnn_size
    save-interval save_checkpoint_steps scoring seed share-all-embeddings share_decoder_embeddings
    src_vocab tensorboard-logdir tgt_vocab train_from train_steps transformer_ff update-freq valid_steps
    vocab_size warmup warmup-updates word_vec_size world_size
    """.split()


def test_every_counterpart_exists() -> None:
    settings = list_setting_keys()
    for counterpart in read_counterparts():
        assert set(counterpart.names) <= {*TOOLKITS, "others"}
        for ours in counterpart.ours:
            command, _, option = ours.partition(" ")
            if option:
                module = importlib.import_module(command.replace("nmt-", "nmt.commands."))
                assert option in module.build_parser()._option_string_actions, ours
            else:
                assert ours in settings
        named = re.findall(r"[a-z]+\.[a-z_]+", counterpart.note)
        assert set(named) <= set(settings)


@mark.parametrize("name", REMEMBERED)
def test_what_people_remember_is_known(name: str) -> None:
    assert explain_foreign_name(name)


@mark.parametrize(
    "setting, complaint",
    [
        (
            "batch_size=80",
            "batch_size: unknown setting; it is training.src_tokens here (tokens, not",
        ),
        ("max-tokens=80", "max-tokens: unknown setting; it is training.src_tokens here (tokens,"),
        ("training.max-epoch=3", "training.max-epoch: unknown setting; it is training.max_epochs"),
        ("training.max_epoch=3", "training.max_epoch: unknown setting; it is training.max_epochs"),
        ("training.seed=3", "training.seed: unknown setting; it is seed here"),
        ("model.nonsense=3", "model.nonsense: unknown key; known: "),
    ],
)
def test_a_setting_of_another_toolkit_is_explained(setting: str, complaint: str) -> None:
    with raises(UserError) as raised:
        load_config("demo.yaml", [setting])
    assert complaint in str(raised.value)


@mark.parametrize(
    "command, words, complaint",
    [
        (
            "translate",
            "runs/x --beam-size 5",
            "--beam-size: unknown option; it is decoding.beam=... here",
        ),
        (
            "translate",
            "x --batch-size 7",
            "--batch-size: unknown option; it is decoding.batch_tokens=...",
        ),
        (
            "train",
            "-c demo.yaml --steps 5",
            "--steps: unknown option; it is training.steps=... here",
        ),
        (
            "train",
            "-c demo.yaml --training.steps=5",
            "--training.steps: unknown option; it is training.steps=... here",
        ),
        ("translate", "runs/x --nbest=5", "--nbest: unknown option; it is nmt-translate --n-best"),
        (
            "train",
            "-c demo.yaml --max-update 9",
            "--max-update: unknown option; it is training.steps=...",
        ),
        (
            "train",
            "-c demo.yaml --arch transformer",
            "--arch: unknown option; it is nmt-train --config here (",
        ),
        (
            "train",
            "-c demo.yaml --optimizer adam",
            "--optimizer: unknown option; it is optimizer.beta1=... and",
        ),
        (
            "train",
            "-c demo.yaml --batch-type tokens",
            "--batch-type: unknown option; it is training.src_tokens=... here (tokens,",
        ),
        (
            "train",
            "-c demo.yaml --criterion label_smoothed_cross_entropy",
            "--criterion: unknown option; it is training.label_smoothing=... here (",
        ),
        (
            "eval",
            "--hypotheses a --ref b --lowercase",
            "--lowercase: unknown option; it is nmt-eval --ladder here (",
        ),
        ("train", "-c demo.yaml --out x", "--out: unknown option; it is out=... here"),
        ("translate", "runs/x --device cpu", "--device: unknown option; it is device=... here"),
        ("train", "-c demo.yaml --nonsense 9", "unrecognized arguments: --nonsense"),
    ],
)
def test_an_option_of_another_toolkit_is_explained(
    command: str, words: str, complaint: str, capsys: Capture
) -> None:
    module = importlib.import_module(f"nmt.commands.{command}")
    with raises(SystemExit):
        module.parse_arguments(words.split())
    error = read_stderr(capsys)
    assert complaint in error and error.count("\n") == 1
