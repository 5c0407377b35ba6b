"""What the figures were measured on: enough to judge them, nothing that names the machine."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from benchmarks.engines import PEERS, version_of

__all__ = ["describe"]

_LIBRARIES = ("dcp-engine", "numpy", "zstandard", "xxhash", "msgpack", *PEERS)


def describe(folders: dict[str, str]) -> dict[str, Any]:
    """CPU, cores, memory, kernel, versions, and the file system type of each folder (by the name given to it).

    Args:
        folders: name -> path; paths do not come back.
    """
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "versions": {name: version_of(name) or "not installed" for name in _LIBRARIES},
        "file_systems": {name: _file_system(path) for name, path in folders.items()},
        "load_average": list(os.getloadavg()),
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _file_system(path: str) -> str:
    """Type of the mount that the path lies on: the longest mount point that is a prefix of it."""
    best = ("", "unknown")
    real = os.path.realpath(path)
    with open("/proc/mounts", encoding="utf-8", errors="replace") as file:
        for line in file:
            point, kind = line.split()[1:3]
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best[0]):
                best = (point, kind)
    return best[1]
