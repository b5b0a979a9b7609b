"""All runs of a sweep: their list, and the work until the table is complete."""

import signal

from nmt.extras.sweep.grid import PlannedRun, Sweep
from nmt.extras.sweep.jobs import RunQueue
from nmt.extras.sweep.result import read_result
from nmt.extras.sweep.table import format_text, make_rows, write_tables
from nmt.model.size import count_weights
from nmt.system.progress import say


def list_runs(sweep: Sweep) -> None:
    for number, run in enumerate(sweep.runs, 1):
        config = run.config
        size = "? parameters (they depend on its vocabulary)"
        if config.vocab.model is None:
            n_weights = count_weights(config.model, config.vocab.sizes)
            size = f"{n_weights / 1e6:.2f}M parameters"
        state = ", finished" if read_result(sweep, run) else ""
        print(f"{number}  {run.label}  {size}, {config.training.steps:,} updates{state}")


def finish_sweep(sweep: Sweep, n_jobs: int) -> int:
    """Do all runs that are not finished, and print the table."""
    todo = [run for run in sweep.runs if read_result(sweep, run) is None]
    say(f"{sweep.folder}: {len(sweep.runs)} runs, of which {len(todo)} are to do")
    queue = RunQueue(sweep, todo, n_jobs)

    def report_end(run: PlannedRun) -> None:
        say(f"{run.label}: {describe_end(sweep, run, queue.failures)}")
        write_tables(sweep, make_rows(sweep, queue.failures))

    stop_signal = queue.finish_runs(report_end)
    if stop_signal:
        say("stopped and saved; run the same command again to continue")
        return 130 if stop_signal == signal.SIGINT else 75
    rows = make_rows(sweep, queue.failures)
    write_tables(sweep, rows)
    print(format_text(sweep, rows))
    return 1 if queue.failures else 0


def describe_end(sweep: Sweep, run: PlannedRun, failures: dict[str, str]) -> str:
    result = read_result(sweep, run)
    if run.label in failures or result is None:
        return f"failed: {failures.get(run.label, 'no result')}"
    scores = [f"{name} BLEU {score.bleu:.2f}" for name, score in result.scores.items()]
    return ", ".join([f"{result.updates:,} updates in {result.minutes:.1f} min", *scores])
