"""nmt from Python: what the commands do, as functions, and the attention of the paper.

    import nmt.api

    translator = nmt.api.load("runs/base/average")
    for translation in translator.translate(["A sentence.", "Another one."]):
        print(translation.text, translation.score)
    print(translator.translate_text("A paragraph. It has two sentences.").text)

    config = nmt.api.load_config("demo.yaml", ["training.steps=200", "out=runs/short"])
    nmt.api.train(config)
    print(nmt.api.evaluate("runs/short").report)

The commands call these functions too. Settings are written as on the command line, such as
["decoding.beam=1"], or are a dictionary, such as {"decoding.beam": 1}. A user's mistake raises
`nmt.system.errors.UserError`, with the message that the command would print. Importing this file is
quick: torch is imported by the first function that needs it.
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import nmt.config_files
from nmt.config import USERS_TEXT, RunConfig
from nmt.system.arguments import take, take_pairs
from nmt.system.errors import UserError
from nmt.system.extras import check_extra

if TYPE_CHECKING:
    from torch import Tensor

    from nmt.evaluate.outcome import Evaluation
    from nmt.extras.pair_scores.pair_scores import PairScore
    from nmt.score.score import Score
    from nmt.system.pool import Executor
    from nmt.train.checkpoint_writer import Mirror
    from nmt.train.events import Listener
    from nmt.translate.translator import LoadedModel, TextToText

__all__ = [
    "attention",
    "evaluate",
    "load",
    "load_config",
    "open_model",
    "prepare",
    "score",
    "score_pairs",
    "train",
]

EngineName = Literal["nmt", "ctranslate2"]
Settings = Sequence[str] | Mapping[str, object]
NO_CONFIG = "which is no config; give load_config(NAME)"


def load_config(name: str | Path, overrides: Settings = ()) -> RunConfig:
    """Load a config file with settings."""
    take(name, (str, Path), "name", "which is no name of a file; give load_config(NAME, SETTINGS)")
    return nmt.config_files.load_config(str(name), _list_settings(overrides))


def _list_settings(settings: Settings) -> list[str]:
    """Write settings as on the command line; one may also be a text by itself."""
    if isinstance(settings, str):
        return [settings]
    if isinstance(settings, Mapping):
        # JSON is YAML too
        return [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()]
    return list(settings)


def load(*paths: str | Path, settings: Settings = (), engine: EngineName = "nmt") -> "TextToText":
    """Load a translator: a run, an average or a checkpoint; several with one vocabulary are an
    ensemble.

        translator = nmt.api.load("runs/base/average", settings={"decoding.beam": 1})
        best = translator.translate(["A sentence."])[0]
        best.text, best.score
        best = translator.translate(lines, beam=5, n_best=3)[0]
        best.alternatives                                # the two next best
        translator.vocab.tgt.pieces(best.piece_ids)      # as text
        translator.translate_text("A paragraph. It has two sentences.").text

    `lines` is any iterable of texts, such as an open file. With engine="ctranslate2" the path is a
    folder that nmt-export wrote.

    On a CPU the search is compiled, whatever the model's config says. That takes 20 seconds the
    first time on a machine; `settings=["decoding.compile=auto"]` compiles it where nmt-translate
    would.
    """
    overrides = [*USERS_TEXT, *_list_settings(settings)]
    if engine == "nmt":  # a model loaded from Python usually translates many times
        overrides = ["decoding.compile=on", *overrides]
    from nmt.translate.translator import warn_if_untagged

    model = open_model(paths, overrides, engine)
    warn_if_untagged(model.config)
    return model.translator


def open_model(
    paths: Sequence[str | Path], settings: Sequence[str] = (), engine: EngineName = "nmt"
) -> "LoadedModel":
    """Load a translator with its config and the checkpoints that it came from."""
    return open_checkpoints(find_checkpoints(paths, engine), settings, engine)


def open_checkpoints(
    checkpoints: Sequence[str], settings: Sequence[str], engine: EngineName
) -> "LoadedModel":
    """Load a translator from what `find_checkpoints` returns."""
    from nmt.system.runtime import tune_process

    tune_process()  # before torch is imported

    from nmt.translate.translator import open_translator

    if engine == "ctranslate2":
        check_extra("export", "--engine ctranslate2")
        from nmt.extras.export.ctranslate2 import open_ctranslate2

        return open_ctranslate2(checkpoints, settings)
    return open_translator(checkpoints, settings)


def find_checkpoints(paths: Sequence[str | Path], engine: EngineName = "nmt") -> list[str]:
    """Return the paths of checkpoints, published models converted, or of what another engine reads."""
    if not paths:
        raise UserError("no path is given; give a run, an average or a checkpoint")
    for path in paths:
        take(
            path,
            (str, Path),
            "a path",
            "not a str or Path; give each path by itself, and settings as settings=[...]",
        )
    return [str(convert_published(path) if engine == "nmt" else path) for path in paths]


def convert_published(name: str | Path, out: Path | None = None, is_forced: bool = False) -> Path:
    """Return the path of a checkpoint. A Marian model of Hugging Face, a folder or hf:OWNER/NAME, is
    first converted to one, `out` or in the cache.
    """
    if not nmt.config_files.is_published(str(name)):
        return Path(name)

    check_extra("export", f"{name}: a published model")
    from nmt.extras.export.marian import convert_if_published

    return convert_if_published(Path(name), out, is_forced)


def prepare(config: RunConfig, executor: "Executor | None" = None) -> bool:
    """Prepare the token store of a config, if it does not exist yet; returns whether it is new. The
    work is done by data.workers processes of this machine, or on `executor`.
    """
    from nmt.corpus import prepare as preparation
    from nmt.data.store import open_store, warn_of_unknown
    from nmt.system.caches import provide_caches

    take(config, RunConfig, "config", NO_CONFIG)
    provide_caches()  # before `datasets` or sacreBLEU is imported
    is_new = preparation.prepare(config.data, config.vocab, config.seed, executor)
    warn_of_unknown(open_store(Path(config.data.store), "train"))
    return is_new


def train(config: RunConfig) -> int:
    """Prepare what is missing, then train or continue the run in `config.folder`.

    Returns the exit code of nmt-train: 0 when training is complete, 75 or 130 when a signal stopped
    it; the run is saved then. Under torchrun every rank calls this.
    """
    from nmt.model.size import check_weights_fit
    from nmt.system.files import check_free, make_folder
    from nmt.system.runtime import tune_process

    take(config, RunConfig, "config", NO_CONFIG)
    check_weights_fit(config.model, config.vocab)
    listener = _open_trackers(config.training.track)
    tune_process()  # before torch is imported

    from nmt.system.ranks import join_world
    from nmt.train import run_start
    from nmt.train.resolve import check_training_fits
    from nmt.train.setup import check_initial_model

    mirror = _open_mirror(config)

    def prepare_run() -> RunConfig:
        # A mistake in the settings must leave neither a folder nor an unwanted store, and another
        # training in the same folder must not be discovered after hours of preparation.
        check_training_fits(config.model, config.vocab, config.training, world)
        check_free(config.folder)
        recorded = run_start.find_begun_run(config)
        recorded = mirror.fetch() or recorded
        check_initial_model(config)
        # Fail now, not after an hour of preparation, if the folder cannot be written.
        make_folder(config.folder)
        prepare(config)
        return recorded

    with join_world(config.device) as world:
        recorded = world.on_main(prepare_run) or config  # the other ranks leave it to the main one
        exit_code = run_start.train(config, recorded, world, listener, mirror)
        # All ranks wait: torchrun kills the others as soon as one exits with a nonzero code.
        world.on_main(lambda: _end_run(config.folder, exit_code))
        return exit_code


def _open_trackers(names: Sequence[str]) -> "Listener":
    if not names:
        from nmt.train.events import Listener

        return Listener()
    check_extra("tracking", "training.track")
    from nmt.extras.tracking.sinks import Trackers

    return Trackers(names)


def _open_mirror(config: RunConfig) -> "Mirror":
    if config.training.mirror is None:
        from nmt.train.checkpoint_writer import Mirror

        return Mirror()
    check_extra("mirror", "training.mirror")
    from nmt.extras.mirror import RunMirror

    return RunMirror(config.training.mirror, config)


def _end_run(folder: Path, exit_code: int) -> None:
    """Write the run's HTML report, even if the run was stopped, and name the next command. A failure only
    causes a warning: training is unaffected.
    """
    from nmt.system.progress import say

    try:
        check_extra("report", "the page")
        from nmt.extras.report.page import write_report

        say(f"its curves and samples: {write_report(folder)}")
    except (OSError, UserError) as error:
        say(f"warning: no report: {error}")
    except Exception as error:  # a bug, but the training is done and saved
        say(f"warning: no report, because of a bug; please report it: {error!r}")
    if not exit_code:
        say(f"next: nmt-average {shlex.quote(str(folder))}")


def evaluate(
    *paths: str | Path,
    test_set: str | None = None,
    src: str | None = None,
    ref: str | Sequence[str] = (),
    settings: Settings = (),
    engine: EngineName = "nmt",
    all_metrics: bool = False,
    verdict: bool = False,
) -> "Evaluation":
    """Translate a test set and score it: by default that of the config, otherwise `test_set` or the
    files `src`, `ref`; `ref` may be a list, of several references.

    Several paths are an ensemble, or with `verdict` runs of one recipe, which are judged by their
    mean. The result has a `report` for people, `json_values`, and the scores with their intervals and
    signatures. Nothing is recorded in the run's folder; nmt-eval does that.
    """
    from functools import partial

    from nmt.evaluate.evaluation import EvaluationRequest, evaluate_runs, evaluate_system
    from nmt.evaluate.systems import TestSetChoice

    refs = (ref,) if isinstance(ref, str) else tuple(ref)
    if bool(refs) != bool(src) or (refs and test_set):
        raise UserError("give both src and ref, or test_set, or neither for the config's test set")
    request = EvaluationRequest(
        TestSetChoice(test_set, src, refs),
        tuple(_list_settings(settings)),
        open_translator=partial(open_checkpoints, engine=engine),
    )
    names = find_checkpoints(paths, engine)
    if verdict and len(names) > 1:
        if all_metrics:
            raise UserError(
                "all_metrics and verdict together accept only one run; leave one of them out"
            )
        return evaluate_runs(request, names)
    return evaluate_system(request, names, with_all_metrics=all_metrics, with_verdict=verdict)


def score(
    pairs: Iterable[tuple[str, str]], src: str = "en", tgt: str = "de", all_metrics: bool = False
) -> "list[Score]":
    """Score pairs of a translation and its reference: BLEU and chrF, or every metric of the ladder.

        nmt.api.score(zip(hypotheses, references))

    Text whose score would be wrong, such as BPE pieces or tokenised text on one side, is refused.
    """
    from nmt.evaluate.evaluation import N_BOOTSTRAP
    from nmt.score.metrics import CHRF2, HEADLINE, compute_score, list_metrics
    from nmt.score.text_checks import Text, find_problems, warn_of_unrelated
    from nmt.system.progress import say

    texts, references = take_pairs(pairs, "hypotheses, references")
    translated = Text("translations", texts, tgt)
    expected = Text("references", references, tgt)
    for problem in find_problems(translated, expected):
        if problem.is_fatal:
            raise UserError(problem.message)
        say(f"warning: {problem.message}")
    warn_of_unrelated("translations", texts, "references", references)

    metrics = list_metrics(tgt) if all_metrics else [HEADLINE, CHRF2]
    return [
        compute_score(metric, texts, references, "pairs", f"{src}-{tgt}", N_BOOTSTRAP)
        for metric in metrics
    ]


def score_pairs(
    pairs: Iterable[tuple[str, str]], *paths: str | Path, settings: Settings = ()
) -> "list[PairScore]":
    """Score pairs of a source and a given translation with a model, or with several as an ensemble.

    Each result has `log_prob`, the log-probability of the translation given the source, and
    `log_probs`, that of each of its pieces and of the end mark. A pair that the model could not
    have produced has -inf and a `problem`.
    """
    from nmt.system.runtime import tune_process

    sources, targets = take_pairs(pairs, "sources, translations")
    check_extra("pair_scores", "score_pairs")
    tune_process()  # before torch is imported

    from nmt.extras.pair_scores.pair_scores import open_pair_scorer

    scorer = open_pair_scorer(find_checkpoints(paths), _list_settings(settings))
    return scorer.score_pairs(sources, targets)


@overload
def attention(
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    *,
    causal: bool = ...,
    window: int | None = ...,
    return_weights: Literal[False] = ...,
) -> "Tensor": ...


@overload
def attention(
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    *,
    causal: bool = ...,
    window: int | None = ...,
    return_weights: Literal[True],
) -> "tuple[Tensor, Tensor]": ...


def attention(
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    *,
    causal: bool = False,
    window: int | None = None,
    return_weights: bool = False,
) -> "Tensor | tuple[Tensor, Tensor]":
    """Attn(X, X') = softmax(Q K^T / sqrt(d_k)) V (section 3.2.1), as all layers of the model compute it.

    Q = X W_q are the queries, (Lq, d_k); K = X' W_k and V = X' W_v are the keys and values, (Lk, d_k) and
    (Lk, d_v); the result is (Lq, d_v). With X' the output of the encoder and X of the decoder it is the
    attention between them; self-attention is Attn(X, X). With heads all tensors are (L, H, size).

    With `causal` no query attends to a later position, and with `window` to none more than this many places
    away. With `return_weights` the softmax is returned too, (Lq, Lk) or (H, Lq, Lk), each row with
    the sum 1; no gradient flows through it.
    """
    from nmt.model.packed_attention import attend_matrices

    output, weights = attend_matrices(q, k, v, causal, window)
    return (output, weights) if return_weights else output
