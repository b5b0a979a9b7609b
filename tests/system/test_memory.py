"""The most memory that a process can have, from what the kernel says of machines, containers and
jobs.
"""

import resource
from pathlib import Path

from pytest import MonkeyPatch, mark

from nmt.system.memory import ADDRESS_SPACE, find_memory_limit, format_memory

GIB = 1 << 30


def find(tmp_path: Path, cgroup: str, files: dict[str, str]) -> int:
    """The limit, in GiB, on a machine with 64 GiB and 8 GiB of swap."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nHuge: 0\nSwapTotal: {8 << 20} kB\n")
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    return find_memory_limit(proc, cgroups).n_bytes // GIB


@mark.parametrize(
    "cgroup, files, expected",
    [
        ("", {}, 72),
        ("0::/\n", {"memory.max": "max\n"}, 72),
        ("0::/\n", {"memory.max": f"{16 * GIB}\n"}, 24),
        ("0::/a/b\n", {"a/memory.max": f"{4 * GIB}\n", "a/b/memory.max": "max\n"}, 12),
        ("3:cpu,memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": f"{GIB}\n"}, 9),
        ("3:memory:/job\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 72),
        ("3:cpu:/job\n", {"memory/job/memory.limit_in_bytes": f"{GIB}\n"}, 72),
        ("no such line\n0::/../..\n", {"memory.max": "-1\n"}, 72),
    ],
)
def test_the_lowest_limit_counts(
    cgroup: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert find(tmp_path, cgroup, files) == expected


def test_a_shells_limit_counts(monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3 * GIB, resource.RLIM_INFINITY))
    assert find(tmp_path, "", {}) == 3


def test_where_nothing_is_known_the_address_space_is_the_limit(tmp_path: Path) -> None:
    assert find_memory_limit(tmp_path, tmp_path).n_bytes == ADDRESS_SPACE


@mark.parametrize(
    "n_bytes, text",
    [(3 * GIB // 2, "1.5 GiB"), (1e15, "931,322.6 GiB"), (4**100, "1.5e+51 GiB")],
)
def test_sizes_beyond_all_bounds_stay_short(n_bytes: int, text: str) -> None:
    assert format_memory(n_bytes) == text
