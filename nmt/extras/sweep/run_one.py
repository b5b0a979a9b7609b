"""One run of a sweep in a process of its own: prepare and train as nmt-train does, average, score as nmt-eval does.

Each step keeps what is complete, so the same call continues however the last one ended. A stop signal
lets a training save, and ends everything else at once.
"""

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from nmt.config import RunConfig
from nmt.config_files import load_recorded_config
from nmt.extras.sweep.grid import PlannedRun, ScoredSet, Sweep
from nmt.extras.sweep.jobs import PREEMPTED_CODE, STOP_SIGNALS
from nmt.extras.sweep.result import RunResult, SetScore, read_result, write_result
from nmt.model.size import count_weights
from nmt.system.errors import Failure, UserError
from nmt.system.files import lock
from nmt.system.progress import say
from nmt.system.run_folder import RunFolder, dev_text_file

if TYPE_CHECKING:
    from nmt.checkpoint.checkpoint import Checkpoint

SAVING_S = 120.0  # how long a training that was asked to stop may take to save
PREPARING_S = 24 * 3600.0  # how long another run may prepare the same data


def run_process(sweep: Sweep, run: PlannedRun) -> int:
    """Finish a run, and return an exit code, as commands do."""

    def stop(_: int, __: FrameType | None) -> NoReturn:
        sys.exit(PREEMPTED_CODE)

    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    try:
        finish_run(sweep, run)
    except UserError as error:
        say(f"nmt-sweep: error: {run.label}: {error}")
        return 2
    except Failure as error:
        say(f"nmt-sweep: failed: {run.label}: {error}")
        return 1
    return 0


def finish_run(sweep: Sweep, run: PlannedRun) -> None:
    """Prepare, train, average and score, skipping the steps that are done."""
    if read_result(sweep, run) is not None:
        return
    # The process that a killed sweep left behind may still be saving.
    with lock(run.folder.path, "nmt-sweep", f".{run.label}.lock", SAVING_S):
        prepare_data(run)
        train_run(run)
        write_result(run, score_run(sweep, run))


def prepare_data(run: PlannedRun) -> None:
    """Prepare the store of a run, or wait until another run has prepared it."""
    from nmt.corpus.prepare import prepare
    from nmt.system.caches import provide_caches

    provide_caches()
    seed = RunConfig().seed  # the store must not depend on which run comes first
    prepare(run.config.data, run.config.vocab, seed, patience_s=PREPARING_S)


def train_run(run: PlannedRun) -> None:
    import nmt.api

    code = nmt.api.train(run.config)
    if code:  # stopped, and saved
        sys.exit(code)


# ---- average and scores --------------------------------------------------------------------------


def score_run(sweep: Sweep, run: PlannedRun) -> RunResult:
    """Average the last checkpoints if the grid says so, and score dev and test set as nmt-eval does."""
    from nmt.checkpoint.checkpoint import TrainState
    from nmt.checkpoint.run_checkpoints import find_newest, open_checkpoint

    newest = find_newest(run.folder)
    if newest is None or not isinstance(newest.origin, TrainState):
        raise Failure(f"{run.folder.path}: has no checkpoint after training")
    path = newest.path if sweep.average is None else make_average(run.folder, sweep.average)
    scored = open_checkpoint(path)
    return RunResult(
        average=sweep.average,
        parameters=count_weights(scored.config.model, scored.vocab.sizes),
        updates=newest.step,
        minutes=round(newest.origin.elapsed_s / 60, 2),
        nll=measure_nll(run, scored),
        scores={name: score_set(run, path, name) for name in sweep.score},
    )


def make_average(run: RunFolder, n: int) -> Path:
    """Write RUN/average, the mean of the last `n` planned checkpoints."""
    from nmt.average.mean import average_checkpoints
    from nmt.average.select import choose_checkpoints
    from nmt.evaluate.results import read_results
    from nmt.extras.cards.card import write_average_card

    chosen = choose_checkpoints(run, n, None, None)
    average_checkpoints([run.checkpoint(candidate.step) for candidate in chosen], run.average)
    write_average_card(run.average, read_results(run.path))
    return run.average


def score_set(run: PlannedRun, path: Path, name: ScoredSet) -> SetScore:
    """Translate and score the dev or the test set, and record the scores, as nmt-eval does."""
    from nmt.evaluate.evaluation import EvaluationRequest, evaluate_system, record_scores
    from nmt.evaluate.systems import TestSetChoice
    from nmt.extras.cards.card import write_average_card

    config = run.config
    overrides = [f"data.root={json.dumps(config.data.root)}", f"device={config.device}"]
    choice = TestSetChoice()
    if name == "dev":
        store = Path(config.data.store)
        choice = TestSetChoice(
            src=str(store / dev_text_file("src")), refs=(str(store / dev_text_file("tgt")),)
        )
        if config.dev_decoding.tag is not None:
            overrides.append(f"decoding.tag={json.dumps(config.dev_decoding.tag)}")
    evaluation = evaluate_system(EvaluationRequest(choice, tuple(overrides)), [str(path)])
    for line in evaluation.report.split("\n"):
        say(line)
    record_scores(evaluation, write_average_card)
    bleu = evaluation.systems[0].find_score("BLEU")
    return SetScore(bleu.value, bleu.signature)


def measure_nll(run: PlannedRun, scored: "Checkpoint") -> float | None:
    """Compute the NLL of the scored weights on the dev set; None if the run has none."""
    from nmt.average.dev_check import compute_nll
    from nmt.system.device import choose_device
    from nmt.train.validate import open_dev

    if run.config.data.valid is None:
        return None
    dev = open_dev(Path(run.config.data.store), scored.vocab)
    return compute_nll(scored, dev, choose_device(run.config.device))


def main() -> int:
    task = json.loads(sys.argv[1])
    run = PlannedRun("", load_recorded_config(Path(task["config"])))
    sweep = Sweep(Path(task["folder"]), task["average"], tuple(task["score"]), (run,))
    return run_process(sweep, run)


if __name__ == "__main__":
    sys.exit(main())
