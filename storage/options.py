"""Options of the pipelines: defaults, and refusal of what cannot work, when the object is made rather than in the middle of a save."""

from __future__ import annotations

import math
import os
import sys
from typing import Final

from dcp_engine.errors import InvalidOptionError, UnsupportedModeError
from dcp_engine.storage.codecs import CHOICES
from dcp_engine.storage.digest import DIGESTS
from dcp_engine.storage.limits import BLOCK_BYTES
from dcp_engine.storage.records import PipelineOptions
from dcp_engine.storage.throttle import MIN_BYTES_PER_SEC

__all__ = ["DEFAULT_BYTES_IN_FLIGHT", "LEVELS", "chosen_digest", "default_threads", "local_ranks", "pipeline_options"]

LEVELS: Final = range(1, 23)
"""zstd levels that the format's writers accept."""
DEFAULT_BYTES_IN_FLIGHT: Final = 256 * 2**20
MAX_THREADS: Final = 256


def default_threads() -> int:
    """CPUs this process may use, shared among the ranks that torchrun started on this machine, at least 1 and at most 8."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cpus // local_ranks()))


def local_ranks() -> int:
    """Ranks that torchrun started on this machine, as far as is known; at least 1."""
    local_world = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(local_world)) if local_world.isdecimal() else 1


def pipeline_options(
    *,
    threads: int | None,
    bytes_in_flight: int,
    codec: str = "auto",
    level: int = 1,
    verify: bool = True,
    size_target: float | None = None,
    max_bytes_per_sec: float | None = None,
    digest: str = "xxh3",
) -> PipelineOptions:
    """Validated options.

    Args:
        threads: worker threads of this rank; ``None`` for :func:`default_threads`.
        bytes_in_flight: bytes that a pipeline may hold beyond the caller's tensors; at least one block (4 MiB).
        codec: one of :data:`dcp_engine.storage.codecs.CHOICES`.
        level: zstd level, 1 to 22.
        verify: check block digests on read.
        size_target: share of the raw bytes, from 0 to 1, that "auto" compresses for even where that takes longer.
        max_bytes_per_sec: cap on writing, at least :data:`dcp_engine.storage.throttle.MIN_BYTES_PER_SEC`.
        digest: one of :data:`dcp_engine.storage.digest.DIGESTS`.

    Raises:
        InvalidOptionError: naming the option, what it was and what is valid.
        UnsupportedModeError: this machine is not little-endian.
    """
    _check_machine()
    if threads is None:
        threads = default_threads()
    _check_resources(threads, bytes_in_flight)
    if codec not in CHOICES:
        raise InvalidOptionError("unknown codec", expected=f"one of {', '.join(CHOICES)}", found=repr(codec))
    if isinstance(level, bool) or not isinstance(level, int) or level not in LEVELS:
        raise InvalidOptionError("level is out of range", expected="an int from 1 to 22", found=repr(level))
    if not isinstance(verify, bool):
        raise InvalidOptionError("verify is not a bool", expected="True or False", found=repr(verify))
    if not isinstance(digest, str) or digest not in DIGESTS:
        raise InvalidOptionError("unknown digest", expected=f"one of {', '.join(DIGESTS)}", found=repr(digest)[:300])
    _check_size_target(size_target, codec)
    _check_cap(max_bytes_per_sec)
    return PipelineOptions(
        threads=threads,
        bytes_in_flight=bytes_in_flight,
        codec=codec,
        level=level,
        verify=verify,
        size_target=size_target,
        max_bytes_per_sec=max_bytes_per_sec,
        digest=DIGESTS[digest],
    )


def chosen_digest(digest: str | None, *, signed: bool) -> str:
    """The kind of digest for what a user has asked for.

    Raises:
        InvalidOptionError: a signature of checksums that anybody can forge would vouch for nothing.
    """
    if signed and digest not in (None, "sha256"):
        raise InvalidOptionError(
            "a signature needs digests that cannot be forged", expected='digest="sha256" with signing_key', found=f"digest={digest!r}"[:300]
        )
    return digest if digest is not None else "sha256" if signed else "xxh3"


def _check_machine() -> None:
    if sys.byteorder != "little":
        raise UnsupportedModeError(
            "the format is little-endian and elements are moved as they lie in memory",
            expected="a little-endian machine",
            found=f"{sys.byteorder}-endian",
            remedy="save and load on x86-64 or little-endian ARM or POWER",
        )


def _check_resources(threads: int, bytes_in_flight: int) -> None:
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise InvalidOptionError("threads is out of range", expected=f"None or an int from 1 to {MAX_THREADS}", found=repr(threads))
    if isinstance(bytes_in_flight, bool) or not isinstance(bytes_in_flight, int) or bytes_in_flight < BLOCK_BYTES:
        raise InvalidOptionError(
            "bytes_in_flight is smaller than one block", expected=f"an int of at least {BLOCK_BYTES} (4 MiB)", found=repr(bytes_in_flight)
        )


def _check_size_target(size_target: float | None, codec: str) -> None:
    if size_target is None:
        return
    if isinstance(size_target, bool) or not isinstance(size_target, (int, float)) or not 0 <= size_target <= 1:
        raise InvalidOptionError("size_target is no share", expected="None or a number from 0 to 1", found=repr(size_target))
    if codec != "auto":
        raise InvalidOptionError(
            "size_target leaves the choice to the writer, and codec takes it away",
            expected='size_target with codec="auto"',
            found=f"codec={codec!r}",
        )


def _check_cap(max_bytes_per_sec: float | None) -> None:
    if max_bytes_per_sec is not None and (
        isinstance(max_bytes_per_sec, bool)
        or not isinstance(max_bytes_per_sec, (int, float))
        or not MIN_BYTES_PER_SEC <= max_bytes_per_sec < math.inf
    ):
        raise InvalidOptionError(
            "max_bytes_per_sec is out of range",
            expected=f"None or a number of at least {MIN_BYTES_PER_SEC:,} (64 KiB/s)",
            found=repr(max_bytes_per_sec),
        )
