"""What a benchmark says of the machine and the versions that it ran with."""

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path


def describe_machine(*packages: str) -> str:
    """The processor, its cores and memory, and the versions of Python and of these packages."""
    cpu_info = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^model name\s*:\s*(.+)$", cpu_info, re.MULTILINE)
    processor = found[1] if found else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {version(name)}" for name in packages]
    return f"{processor}, {os.cpu_count()} cores, {memory:.0f} GiB; {', '.join(versions)}"
