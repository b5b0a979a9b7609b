"""A toy corpus and the settings of a toy run, shared by the tests that go through whole commands."""

import gc
import importlib.util
import os
import shlex
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest import TempPathFactory, fixture

# Before torch is loaded, and for all processes that tests start: toy sizes, for which a second thread only costs. On
# a busy machine it costs much, because OpenMP's threads spin while they wait for one another; where a test asks
# for several, they sleep.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import pytest
import torch
from support.ground import Ground, make_ground
from support.prepared_toy import prepare_toy
from support.rings import amount
from support.small_disk import SmallDisk, mount_small_disk
from support.toy_corpus import write_toy_config, write_toy_corpus
from support.untrained import make_vocab

from nmt.config import RunConfig
from nmt.data.vocab import Vocab
from nmt.system.caches import find_cache_folder
from nmt.system.device import choose_device

# Where commands keep compiled code too: it is compiled once, and that of other versions is never read.
caches = find_cache_folder()
if caches is not None:
    os.environ.setdefault("NUMBA_CACHE_DIR", str(caches / "numba"))
# A shell's background jobs ignore Ctrl-C and those of nohup SIGHUP; processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# The power does not fail here, and waiting for the disk would take minutes; test_files.py has what is written when.
os.fsync = lambda fd: None
choose_device("cpu")  # with it comes the library of fp32 products, which rounds in its own way
IS_SOAK = amount(False, True)

if importlib.util.find_spec("hypothesis"):  # the environments for GPUs do without it
    import hypothesis
    from hypothesis.internal.conjecture import providers

    # An example may take any time: on a busy machine limits of time are exceeded at random.
    too_slow = hypothesis.HealthCheck.too_slow
    # The same examples each time, or an unlucky one fails for a change that has nothing to do with it;
    # `make soak` looks for others.
    hypothesis.settings.register_profile(
        "nmt", deadline=None, suppress_health_check=[too_slow], derandomize=not IS_SOAK
    )
    hypothesis.settings.load_profile("nmt")
    if not IS_SOAK:
        # Hypothesis tries the constants of our files too, but knows only those that tests loaded before.
        providers._get_local_constants = lambda: providers._local_constants


HANDLED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGPIPE,
)
N_SLOWEST = 10  # tests that are named at the end
SECONDS = "nmt/seconds"  # of each file, in pytest's cache, from the last run of all
# Files that begin before others where there was no such run: what takes long, or waits for other processes
SLOW_FILES = (
    "tests/system/test_ranks.py",
    "tests/test_core_alone.py",
    "tests/train/test_fast_paths.py",
    "tests/engines/test_interpreted.py",
    "tests/commands/test_translate.py",
    "tests/train/test_trainer.py",
    "tests/promises/test_signals.py",
    "tests/promises/test_any_clock.py",
    "tests/corpus/test_prepare.py",
    "tests/hostile/test_commands_and_damage.py",
)
# Tests with one of these marks run where it is on, and are otherwise left out without a word.
MODES = {
    "soak": IS_SOAK,
    "gpu_dry": os.environ.get("NMT_GPU_DRY") == "1",
    "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
    "on_gpu": torch.cuda.is_available(),
}


def is_left_out(item: pytest.Item) -> bool:
    modes = {mark.name for mark in item.iter_markers()} & MODES.keys()
    return bool(modes) and not any(MODES[mode] for mode in modes)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow files first, so that no worker is left alone with one at the end."""
    seconds = dict.fromkeys(SLOW_FILES, 1.0)
    if hasattr(config, "cache"):  # which -p no:cacheprovider takes away
        seconds = config.cache.get(SECONDS, seconds)
    taken = [item for item in items if not is_left_out(item)]
    items[:] = sorted(taken, key=lambda item: -seconds.get(item.location[0], 0.0))


def pytest_collection_finish() -> None:
    """What is loaded by now stays, so looking for garbage among it would only take time."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How to repeat a failure, what was skipped for want of what, and where the time went."""
    stats = terminalreporter.stats
    for report in stats.get("failed", []) + stats.get("error", []):
        terminalreporter.write_line(f"alone: .venv/bin/pytest {shlex.quote(report.nodeid)}")
    reasons = Counter(report.longrepr[2] for report in stats.get("skipped", []))
    for reason, n in reasons.most_common():
        terminalreporter.write_line(f"{n} skipped: {reason.removeprefix('Skipped: ')}")
    seconds: defaultdict[str, float] = defaultdict(float)
    of_files: defaultdict[str, float] = defaultdict(float)
    for reports in stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
                of_files[report.location[0]] += report.duration
    if len(seconds) > N_SLOWEST:
        slowest = sorted(seconds, key=lambda name: -seconds[name])[:N_SLOWEST]
        told = (f"{name.rpartition('/')[2]} {seconds[name]:.0f} s" for name in slowest)
        terminalreporter.write_line(f"slowest: {', '.join(told)}")
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and config.cache is not None:
        config.cache.set(SECONDS, config.cache.get(SECONDS, {}) | of_files)


@fixture(autouse=True)
def _sets_back_what_all_tests_share() -> Iterator[None]:
    """Commands run in the process of the tests, and change it as they change their own."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    environment = dict(os.environ)
    products, n_threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name in os.environ.keys() - environment.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(environment)
    torch.set_float32_matmul_precision(products)
    if torch.get_num_threads() != n_threads:
        torch.set_num_threads(n_threads)


@fixture
def corpus(tmp_path: Path) -> Path:
    return write_toy_corpus(tmp_path)


@fixture
def toy(corpus: Path, tmp_path: Path) -> Path:
    return write_toy_config(corpus, tmp_path)


@fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A file system of 1 MB."""
    with mount_small_disk(tmp_path / "disk") as disk:
        yield disk


@fixture(scope="module")
def module_path(tmp_path_factory: TempPathFactory) -> Path:
    """A folder for what the tests of one file share."""
    return tmp_path_factory.mktemp("module")


@fixture(scope="session")
def vocab(tmp_path_factory: TempPathFactory) -> Vocab:
    return make_vocab(tmp_path_factory.mktemp("words"))


@fixture(scope="module")
def prepared(tmp_path_factory: TempPathFactory) -> RunConfig:
    return prepare_toy(tmp_path_factory.mktemp("toy"))


@fixture(scope="module")
def ground(tmp_path_factory: TempPathFactory) -> Ground:
    return make_ground(tmp_path_factory.mktemp("ground"))
