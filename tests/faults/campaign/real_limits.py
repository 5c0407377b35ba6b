"""Limits that are real: a disk that is full, files that may not grow, a target that is read-only, a process that is short of memory."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from faults.campaign.ranks_in_turn import RanksFailedError, save_in_turn, state_of, writers_for
from support.checkpoints import unprivileged, world_readable_directory

from dcp_engine import verify_checkpoint
from dcp_engine.errors import DcpEngineError, StorageFullError, StoragePermissionError
from dcp_engine.storage.backends.calls import SystemCalls, installed

__all__ = ["ABSENT", "run"]

NO_MOUNT = "full tmpfs (not allowed to mount here)"
ABSENT = frozenset({NO_MOUNT})
"""Kinds that stand for what could not be done on this machine."""

_MS_RDONLY, _MS_REMOUNT, _MNT_DETACH, _M_MMAP_THRESHOLD, _M_ARENA_MAX = 1, 32, 2, -3, -8
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STEP_BYTES = 4096
_MIB = 2**20
_ENOUGH_BYTES = 20 * _MIB
"""A save of some megabytes lacks nothing with this much to spare."""
_CHILD_SECS = 900.0
_Point = tuple[str, str]
"""What is broken, or "", and the kind of fault."""


def run(*, full: bool, seed: int) -> Iterator[_Point]:
    """Every limit, in small steps where ``full``, else in larger ones; ``seed`` moves the larger ones."""
    for world_size in (1, 2):
        yield from _full_disk(world_size, 1 if full else 4)
        yield from _file_size_limit(world_size, _STEP_BYTES if full else 5 * _STEP_BYTES, seed)
        yield from _device_full(world_size)
    yield from _read_only()
    yield from _memory(_MIB // 8 if full else 2 * _MIB, seed)


def _states(step: int, world_size: int) -> list[dict[str, Any]]:
    return [state_of(step, rank) for rank in range(world_size)]


def _trial(root: Path, world_size: int, allowed: tuple[type[DcpEngineError], ...], limit: contextlib.AbstractContextManager[object]) -> str:
    """Saves step 2 beside step 1 under a limit, then again without. Returns what is broken, "survived" or "told"."""
    old, new = root / "step-00000001", root / "step-00000002"
    before = {file.name: file.read_bytes() for file in old.iterdir()}
    writers = writers_for(new, world_size, codec="raw")
    told = ""
    try:
        with limit:
            save_in_turn(writers, _states(2, world_size))
    except RanksFailedError as failed:
        told = next((f"not the error that was expected: {e!r}" for e in failed.failures.values() if not isinstance(e, allowed)), "told")
    if {file.name: file.read_bytes() for file in old.iterdir()} != before:
        return "the previous step is not as it was"
    if told.startswith("not") or (told and new.exists()):
        return told if told != "told" else "a save that failed is published"
    save_in_turn(writers if told else writers_for(new, world_size, codec="raw", overwrite=True), _states(2, world_size))
    if verify_checkpoint(new, threads=1).faults:
        return "the next save is not whole"
    left = sorted(entry.name for entry in root.iterdir() if entry.name not in (old.name, new.name))
    shutil.rmtree(new)
    return f"the next save did not clean up {left}" if left else told or "survived"


def _point(kind: str, result: str) -> _Point:
    return ("", f"{kind} {result}") if result in ("told", "survived") else (f"{kind}: {result}", f"{kind} told")


# -- full disks ----------------------------------------------------------------------------------------------------------


def _mount(place: Path, options: str, flags: int = 0) -> bool:
    return bool(ctypes.CDLL(None).mount(b"tmpfs", os.fsencode(place), b"tmpfs", ctypes.c_ulong(flags), options.encode()) == 0)


@contextlib.contextmanager
def _disk() -> Iterator[Path | None]:
    """A tmpfs with step 1 on it, gone afterwards. None: not allowed here."""
    with tempfile.TemporaryDirectory() as place:
        if not _mount(Path(place), "size=64m"):
            yield None
            return
        try:
            yield Path(place)
        finally:
            ctypes.CDLL(None).umount2(os.fsencode(place), _MNT_DETACH)


@contextlib.contextmanager
def _resized(place: Path, num_pages: int) -> Iterator[None]:
    """For a while the disk has this many pages."""
    assert _mount(place, f"size={num_pages * _PAGE_BYTES}", _MS_REMOUNT)
    try:
        yield
    finally:
        assert _mount(place, "size=64m", _MS_REMOUNT)


def _full_disk(world_size: int, step_pages: int) -> Iterator[_Point]:
    """With some pages more each time, until the save fits: the disk is full at data, at metadata, and in between."""
    with _disk() as place:
        if place is None:
            yield "", NO_MOUNT
            return
        save_in_turn(writers_for(place / "step-00000001", world_size, codec="raw"), _states(1, world_size))
        stats = os.statvfs(place)
        taken = (stats.f_blocks - stats.f_bfree) * stats.f_frsize // _PAGE_BYTES
        for spare in range(0, 1000, step_pages):
            result = _trial(place, world_size, (StorageFullError,), _resized(place, taken + spare))
            yield _point("full tmpfs", result)
            if result == "survived":
                return


@contextlib.contextmanager
def _limited(kind: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def _file_size_limit(world_size: int, step_bytes: int, seed: int) -> Iterator[_Point]:
    """Files may have so many bytes, until the save fits."""
    handler = signal.getsignal(signal.SIGXFSZ)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        save_in_turn(writers_for(place / "step-00000001", world_size, codec="raw"), _states(1, world_size))
        assert handler == signal.SIG_IGN, "Python ignores SIGXFSZ, so that a write fails with EFBIG"
        for limit in range(seed * 512 % step_bytes, 1000 * _STEP_BYTES, step_bytes):
            result = _trial(place, world_size, (StorageFullError,), _limited(resource.RLIMIT_FSIZE, limit))
            yield _point("RLIMIT_FSIZE", result)
            if result == "survived":
                return


class _FullDevice(SystemCalls):
    """The ``nth`` file that is created is /dev/full, which takes no byte and says ENOSPC."""

    def __init__(self, nth: int) -> None:
        self._left = nth

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if not flags & os.O_CREAT:
            return super().open(path, flags, mode)
        self._left -= 1
        if self._left != -1:
            return super().open(path, flags, mode)
        os.close(super().open(path, flags, mode))
        return os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)


def _device_full(world_size: int) -> Iterator[_Point]:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        save_in_turn(writers_for(place / "step-00000001", world_size, codec="raw"), _states(1, world_size))
        for nth in range(100):
            result = _trial(place, world_size, (StorageFullError,), installed(_FullDevice(nth)))
            yield _point("/dev/full", result)
            if result == "survived":
                return


# -- read-only -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _remounted_read_only(place: Path) -> Iterator[None]:
    assert _mount(place, "size=64m", _MS_REMOUNT | _MS_RDONLY)
    try:
        yield
    finally:
        assert _mount(place, "size=64m", _MS_REMOUNT)


@contextlib.contextmanager
def _not_ours(place: Path) -> Iterator[None]:
    """The directory may not be written to, and this process is bound by that."""
    place.chmod(0o555)
    try:
        with unprivileged():
            yield
    finally:
        place.chmod(0o755)


def _read_only() -> Iterator[_Point]:
    allowed = (StoragePermissionError,)
    with world_readable_directory() as place:
        save_in_turn(writers_for(place / "step-00000001", 1, codec="raw"), _states(1, 1))
        yield _point("read-only directory", _trial(place, 1, allowed, _not_ours(place)))
    with _disk() as disk:
        if disk is not None:
            save_in_turn(writers_for(disk / "step-00000001", 1, codec="raw"), _states(1, 1))
            yield _point("read-only mount", _trial(disk, 1, allowed, _remounted_read_only(disk)))


# -- memory --------------------------------------------------------------------------------------------------------------


def _memory(step_bytes: int, seed: int) -> Iterator[_Point]:
    """In a process of its own: what runs out of memory may take anything down."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        try:
            yield from child.submit(_short_of_memory, step_bytes, seed).result(timeout=_CHILD_SECS)
        except Exception as error:  # it died, or hangs
            for process in list(child._processes.values()):
                process.kill()
            yield f"memory limit: the process that saves died or hung: {error!r}", "memory limit told"


def _short_of_memory(step_bytes: int, seed: int) -> list[_Point]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Large pieces go back to the system when they are freed: else what the first save has used would do for all that follow.
    # Likewise one arena: each more reserves 64 MiB, which the limit then does not touch.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 * 1024)
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    columns = torch.randn(1500, 2000).t()  # to be copied as a whole, since its rows are not contiguous
    state = {"model": {"w": torch.randn(2_000_000), "h": torch.randn(1_000_000).bfloat16(), "t": columns}, "optimizer": {}, "step": 1}
    found: list[_Point] = []
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        save_in_turn(writers_for(place / "old", 1, codec="planes"), [state])  # whatever is loaded late is loaded now
        for extra in range(seed * 4096 % step_bytes, _ENOUGH_BYTES, step_bytes):
            found.append(_point("memory limit", _with_memory(place, state, extra)))
    return found


def _with_memory(place: Path, state: dict[str, Any], extra_bytes: int) -> str:
    writers, result, new = writers_for(place / "new", 1, codec="planes"), "survived", place / "new"
    before = len(os.listdir("/proc/self/fd"))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES
    try:
        with _limited(resource.RLIMIT_AS, used + extra_bytes):
            save_in_turn(writers, [state])
    except RanksFailedError as failed:
        result = _judged(list(failed.failures.values()))
        del failed
    except MemoryError:
        result = "told"
    if len(os.listdir("/proc/self/fd")) > before:
        return f"descriptors are left open with {extra_bytes} bytes to spare"
    if new.exists() != (result == "survived"):
        return f"{result}, and published: {new.exists()}, with {extra_bytes} bytes to spare"
    writers = writers if result == "told" else writers_for(new, 1, codec="planes", overwrite=True)
    save_in_turn(writers, [state])
    faults = verify_checkpoint(new, threads=1).faults
    left = sorted(entry.name for entry in place.iterdir() if entry.name not in ("old", "new"))
    shutil.rmtree(new)
    return f"the next save: {faults} {left}, with {extra_bytes} bytes to spare" if faults or left else result


def _judged(errors: Sequence[Exception]) -> str:
    """Ours, Python's, or the allocator's of torch, which is a RuntimeError that says so."""
    strange = [e for e in errors if not (isinstance(e, DcpEngineError | MemoryError) or "can't allocate memory" in str(e))]
    return f"an error that says nothing of memory: {strange[0]!r}" if strange else "told"
