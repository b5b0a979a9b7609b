"""Keeps a copy of a run at training.mirror, and fetches it onto a machine that has no copy.

Whenever a checkpoint is complete, a thread of the main rank makes the mirror like the run folder. It
compares what is there with what should be, so the next attempt makes up for one that failed or was
cut off by a kill. Nothing that fails there stops the training. metrics.jsonl is copied before the
checkpoint that counts on its lines becomes visible.
"""

import os
import threading
from pathlib import Path

from nmt.checkpoint import TrainState, list_steps, parse_step, read_origin
from nmt.config import RunConfig, TrainingConfig, list_differences, parse_recorded_config
from nmt.system.errors import Failure, UserError
from nmt.system.files import (
    VOLUME_FOLDER,
    check_own_folder,
    has_plain_file,
    is_fixed,
    list_own_names,
    lock,
    make_folder,
    make_workplace,
    write_bytes,
)
from nmt.system.progress import say
from nmt.system.remote import Remote, RemoteError
from nmt.system.run_folder import (
    CONFIG_FILE,
    MANIFEST_FILE,
    METRICS_FILE,
    OPTIMIZER_FILE,
    RunFolder,
)
from nmt.train.kept_checkpoints import choose_kept

RETRY_S = 30.0  # after a failure
END_RETRY_S = 1.0  # the same when the run has ended
CLOSE_S = 600.0  # that the end of a run waits for the last copies, at most
FAILURES_AT_END = 3  # after which the end waits no longer
STORE_PLACE, AVERAGE_PLACE = "store", "average"  # in the mirror


class Mirror:
    """Copies the run in a thread. Only the main rank has one."""

    def __init__(self, training: TrainingConfig, store: Path, run: RunFolder) -> None:
        assert training.mirror is not None
        self.training, self.store, self.run = training, store, run
        self.remote = Remote(training.mirror)
        self.failures = 0  # in a row
        self.warnings: list[str] = []  # not yet in the metrics
        # The last update whose checkpoint the mirror should hold, and the best ones; a new object for
        # each change.
        self._target = self._copied = (0, set[int]())
        self._is_closing = False
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return self._copied is self._target

    def update(self, best_steps: set[int], last_step: int) -> None:
        """Start to copy a run folder that has changed."""
        self._target = (last_step, best_steps)
        self._changed.set()

    def take_warnings(self) -> list[str]:
        """Return what went wrong since the last call."""
        warnings, self.warnings = self.warnings, []
        return warnings

    def close(self) -> None:
        """Wait until everything is copied, or cannot be."""
        self._is_closing = True
        self.failures = min(self.failures, 1)
        self._changed.set()
        self._thread.join(1.0)
        if self._thread.is_alive():
            say(f"copying to {self.remote.url}")
            self._thread.join(CLOSE_S)
        if not self.is_current:
            say(
                f"warning: {self.remote.url} is not up to date; the same command copies the rest, "
                "even if the run is done"
            )

    # ---- in the thread ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._is_closing or (not self.is_current and self.failures < FAILURES_AT_END):
            if self.is_current:
                self._changed.wait()
            elif self.failures:
                self._changed.wait(END_RETRY_S if self._is_closing else RETRY_S)
            self._changed.clear()
            if self.is_current:
                continue
            target = self._target
            try:
                self._copy(target)
            except Exception as error:  # whatever it is, training continues
                self._note_failure(error)
                continue
            if self.failures:
                say(f"{self.remote.url} is up to date again")
            self.failures = 0
            self._copied = target

    def _note_failure(self, error: Exception) -> None:
        self.failures += 1
        if self.failures > 1:
            return
        text = str(error) if isinstance(error, (Failure, UserError)) else repr(error)
        warning = f"training.mirror: {text}; training continues, and copying is tried again"
        say(f"warning: {warning}")
        self.warnings.append(warning)

    def _copy(self, target: tuple[int, set[int]]) -> None:
        last_step, best_steps = target
        here, there = set(list_steps(self.run)), list_mirrored_steps(self.remote)
        counted = sorted(step for step in here | there if step <= last_step)
        kept = choose_kept(counted, self.training, best_steps)
        for step in sorted(kept & here, reverse=True):
            if target is not self._target:
                return  # a newer checkpoint is complete, and goes first
            self._copy_files()
            self.remote.put_folder(self.run.checkpoint(step), name_checkpoint(step))
        self._copy_files()
        self.remote.put_folder(self.store, STORE_PLACE)
        self.remote.put_folder(self.run.average, AVERAGE_PLACE)
        for step in set(counted) & there - kept:
            self.remote.remove_folder(name_checkpoint(step))
        # A new machine has only the newest and the best, but averages need the others.
        for step in sorted(kept - here, reverse=True):
            _fetch_whole(self.remote, name_checkpoint(step), self.run.checkpoint(step))

    def _copy_files(self) -> None:
        run = self.run
        for path in (run.config, *run.vocabs, run.metrics, run.status, run.results, run.curve):
            if has_plain_file(path):
                self.remote.put_file(path, path.name)


def name_checkpoint(step: int) -> str:
    """Return its path in the mirror, which is that in a run folder."""
    return str(RunFolder(Path()).checkpoint(step))


def list_mirrored_steps(remote: Remote) -> set[int]:
    steps = map(parse_step, remote.list_sealed(RunFolder(Path()).checkpoints.name))
    return {step for step in steps if step is not None}


# ---- at the start of a run --------------------------------------------------------------------------------------


def fetch_run(config: RunConfig) -> None:
    """Fetch the newest checkpoint and the store if this machine has none as new.

    A run that has checkpoints here continues without a mirror that cannot be read; one that has
    none must not start over because of that.
    """
    if config.training.mirror is None:
        return
    run = RunFolder(config.folder)
    try:
        remote = Remote(config.training.mirror)
        recorded = remote.read(CONFIG_FILE)
        if recorded is not None:
            _check_same_settings(recorded, config, remote)
        elif found := remote.list_names() - {VOLUME_FOLDER, f"{CONFIG_FILE}.part"}:
            raise UserError(
                f"training.mirror={remote.url}: contains {min(found)!r}, but no {CONFIG_FILE} of a "
                "run; give an empty location, or one that does not exist yet"
            )
        there = list_mirrored_steps(remote)
        if max(there, default=0) > max(list_steps(run), default=0):
            make_folder(run.path)
            with lock(run.path, "nmt-train"):
                _fetch_checkpoints(remote, run, there, recorded)
        _fetch_store(remote, Path(config.data.store).resolve())
    except RemoteError as error:
        if not list_steps(run):
            raise Failure(
                f"training.mirror: {error}; try again, or give training.mirror=null to begin without it"
            ) from None
        say(f"warning: training.mirror: {error}; continuing from what is here")


def _check_same_settings(recorded: bytes, config: RunConfig, remote: Remote) -> None:
    earlier = parse_recorded_config(recorded, f"{remote.url}/{CONFIG_FILE}")
    changes = list_differences(earlier, config)
    if changes:
        raise UserError(
            f"training.mirror={remote.url}: holds a run with different settings "
            f"({'; '.join(changes)}); restore them, give another URL, or empty the place if nothing uses it"
        )


def _fetch_checkpoints(
    remote: Remote, run: RunFolder, there: set[int], config: bytes | None
) -> None:
    """Fetch the newest checkpoint that is whole, and the best."""
    check_own_folder(run.checkpoints, inside=run.path)
    make_folder(run.checkpoints)
    remote.get_file(METRICS_FILE, run.metrics)
    steps_here = list_steps(run)
    if config is not None and not steps_here:
        write_bytes(run.config, config)
    for step in sorted(there, reverse=True):
        manifest = remote.read(f"{name_checkpoint(step)}/{MANIFEST_FILE}") or b""
        if OPTIMIZER_FILE.encode() not in manifest:
            continue
        if step in steps_here:
            return
        say(f"fetching the checkpoint of update {step:,} from {remote.url}")
        if _fetch_whole(remote, name_checkpoint(step), run.checkpoint(step)):
            origin = read_origin(run.checkpoint(step))
            best_step = origin.best_step if isinstance(origin, TrainState) else 0
            if best_step in there - {step, *steps_here}:
                _fetch_whole(remote, name_checkpoint(best_step), run.checkpoint(best_step))
            return
    if not steps_here:
        raise Failure(
            f"{remote.url}: none of its {len(there)} checkpoints is complete; "
            "give another training.mirror to start over"
        )


def _fetch_whole(remote: Remote, name: str, path: Path) -> bool:
    """Fetch a sealed folder. If it is damaged, it no longer counts as complete there."""
    try:
        remote.get_folder(name, path)
    except UserError as error:
        say(f"warning: {error}")
        remote.unseal(name)
        return False
    return True


def _fetch_store(remote: Remote, store: Path) -> None:
    """Fetch the store if nothing is in its place; nmt-prepare judges what is."""
    if os.path.lexists(store) and (not store.is_dir() or list_own_names(store)):
        return
    if remote.read(f"{STORE_PLACE}/{MANIFEST_FILE}") is None:
        return
    make_workplace(store)
    with lock(store, "fetching", None if is_fixed(store) else f".{store.name}.lock"):
        say(f"fetching the store from {remote.url}")
        _fetch_whole(remote, STORE_PLACE, store)


def claim_mirror(config: RunConfig, run: RunFolder) -> None:
    """Write the config of the run to its mirror. A run that has done nothing yet fails if that
    fails: its mirror is perhaps misspelt.
    """
    if config.training.mirror is None:
        return
    try:
        Remote(config.training.mirror).put_file(run.config, CONFIG_FILE)
    except RemoteError as error:
        if not list_steps(run):
            raise Failure(f"training.mirror: {error}; is it the right place?") from None
