"""What the benchmark of the data pipeline measures with: its corpus, its view of the memory, its kills."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from string import ascii_lowercase

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_data  # noqa: E402

ALLOCATE = "import time; held = bytearray(50 << 20); print('ready', flush=True); time.sleep(60)"
TREE = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ALLOCATE!r}])"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Real text is not needed to test: 500 sentences of random words."""
    rng = random.Random(1)
    folder = tmp_path / "data" / "news-en-de"
    folder.mkdir(parents=True)
    for language in ("en", "de"):
        lines = [" ".join("".join(rng.choices(ascii_lowercase, k=rng.randint(2, 12))) for _ in range(2 + i % 30))
                 for i in range(500)]
        for name in ("train", "newstest2013"):
            (folder / f"{name}.{language}").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path / "data"


def test_the_corpus_is_aligned_distinct_long_enough_and_always_the_same(data: Path, tmp_path: Path) -> None:
    program = f"""
import sys; sys.path.insert(0, {str(ROOT / "scripts")!r})
from pathlib import Path
import bench_data
bench_data.make_corpus(Path(sys.argv[1]), Path({str(data)!r}), 3000)
"""
    made = []
    for seed in ("1", "2"):  # of Python's own hashes
        subprocess.run([sys.executable, "-c", program, str(tmp_path / seed)], check=True, capture_output=True,
                       env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)})
        made.append({file.name: file.read_bytes() for file in (tmp_path / seed).iterdir()})
    assert made[0] == made[1]
    en, de = (made[0][f"train.{language}"].split(b"\n")[:-1] for language in ("en", "de"))
    assert len(en) == len(de) == 3000 == len(set(zip(en, de, strict=True)))
    lengths = [len(line.split()) for line in en]
    assert 20 < sum(lengths) / 3000 < 32 and max(lengths) > 80
    original = {word for line in (data / "news-en-de" / "train.de").read_bytes().split(b"\n") for word in line.split()}
    rare = sum(word not in original for line in de for word in line.split())
    assert 0.02 < rare / sum(len(line.split()) for line in de) < 0.06


def test_it_is_not_made_twice(data: Path, tmp_path: Path) -> None:
    summary = bench_data.make_corpus(tmp_path / "c", data, 100)
    (tmp_path / "c" / "train.en").write_text("kept")
    assert bench_data.make_corpus(tmp_path / "c", data, 100) == summary
    assert (tmp_path / "c" / "train.en").read_text() == "kept"
    bench_data.make_corpus(tmp_path / "c", data, 101)
    assert (tmp_path / "c" / "train.en").read_text().count("\n") == 101


def test_the_memory_is_that_of_all_processes_and_none_outlives_a_kill(monkeypatch: pytest.MonkeyPatch,
                                                                      tmp_path: Path) -> None:
    start = subprocess.Popen
    monkeypatch.setattr(bench_data.subprocess, "Popen", lambda _, **settings: start(
        [sys.executable, "-c", TREE], **settings))
    run = bench_data.Run(tmp_path, tmp_path, tmp_path)
    while not run.lines:
        time.sleep(0.01)
    assert not run.finish(bench_data.clock() - run.began + 0.5)
    assert run.lines == ["ready"] and 50 << 20 < run.peak_bytes < 200 << 20
    assert bench_data.memory_of_session(run.process.pid) == 0 < bench_data.memory_of_session(os.getsid(0))


def test_a_stage_line_of_nmt_prepare_is_understood() -> None:
    found = bench_data.STAGE.match("stage collect: 1,031.2 s, 9,000,000 lines, 144,000/s")
    assert found and found.groups() == ("collect", "1,031.2", "9,000,000", "lines", "144,000")
