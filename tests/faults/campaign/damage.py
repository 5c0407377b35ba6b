"""Damage: every bit flipped, every length cut, files swapped, missing, copied, replaced by what is no file; all of it found and named."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from faults.campaign.damage_latest import HAS_ROOTS, damage_latest
from faults.campaign.damage_subject import Subject
from faults.campaign.outcome import MAX_BAD, Outcome

from dcp_engine.errors import CorruptCheckpointError, DcpEngineError, IncompleteCheckpointError, UnsupportedVersionError

__all__ = ["PART", "PROMISE", "TITLE", "Tally", "complaint", "cut_lengths", "flip_bits", "misplace_files", "run", "subject_of"]

PART = "damage"
TITLE = "damaged checkpoints"
PROMISE = "a flipped bit, a cut, a missing, swapped or foreign file is found by load and by verify, and named; none is silent"

_QUICK_BITS, _QUICK_LENGTHS = 3_000, 1_000
_SECRET_BITS, _SECRET_LENGTHS = 20_000, 4_000
_CHUNKS_PER_WORKER = 4


class Tally:
    """What was put and what went wrong."""

    def __init__(self, kind: str, seed: int) -> None:
        self._what = f"{kind} checkpoint, seed {seed}"
        self.counts: Counter[str] = Counter()
        self.bad: list[str] = []

    def judge(self, subject: Subject, family: str, fault: str, file: str, *, tensor: bool = False, whole: bool = False) -> None:
        """Count a fault that was put, and look at what both judges say of it.

        Args:
            subject: damaged in ``file`` alone.
            family: under which it counts.
            fault: what was done, in words that reproduce it.
            file: which the errors must name.
            tensor: they must name a tensor and a block as well.
            whole: judge from COMPLETE on, even where the damage is in a shard.
        """
        self.counts[family] += 1
        try:
            verdicts = (subject.verify(), subject.load()) if whole else subject.verdicts(file)
        except Exception as error:  # the promise is that there is no such thing
            self._report(f"{fault} of {file}: {type(error).__name__}: {error}")
            return
        for judge, error in zip(("verify", "load"), verdicts, strict=True):
            if (text := complaint(error, file, str(subject.path), tensor)) is not None:
                self._report(f"{fault} of {file}: {judge} {text}")

    def require(self, holds: bool, text: str) -> None:
        """Report ``text`` unless it holds."""
        if not holds:
            self._report(text)

    def note(self, family: str, fault: str, complaint: str | None) -> None:
        """Count a fault that somebody else has judged."""
        self.counts[family] += 1
        if complaint is not None:
            self._report(f"{family}, {fault}: {complaint}")

    def add(self, other: Tally) -> None:
        """Take over what another has found."""
        self.counts.update(other.counts)
        self.bad += other.bad[: MAX_BAD - len(self.bad)]

    def _report(self, text: str) -> None:
        if len(self.bad) < MAX_BAD:
            self.bad.append(f"{self._what}: {text}")


def complaint(error: DcpEngineError | None, file: str, path: str, tensor: bool = False) -> str | None:
    """What is wrong with an error that must name a file, and a tensor as well where asked; ``None``: nothing."""
    if error is None:
        return "says nothing"
    if isinstance(error, IncompleteCheckpointError):
        return None if file == "COMPLETE" and "COMPLETE" in str(error) else f"takes it for an unfinished one: {error}"
    if not isinstance(error, CorruptCheckpointError | UnsupportedVersionError):
        return f"raises {type(error).__name__}: {error}"
    if error.file != file or error.path != path:
        return f"names {error.file} of {error.path}: {error}"
    if tensor and (not error.tensor or "block " not in str(error)):
        return f"names neither block nor tensor: {error}"
    return None


# ------------------------------------------------------------------------------------------------------------------ bits


def flip_bits(subject: Subject, tally: Tally, bits: Iterable[tuple[str, int]]) -> None:
    """Flip bits one by one, each in a file, and back."""
    in_block = {
        file: [(region.begin, region.end) for region in subject.regions if region.file == file and region.kind in ("block", "padding")]
        for file in subject.contents
    }
    for file, bit in bits:
        subject.flip(file, bit)
        tensor = any(begin <= bit // 8 < end for begin, end in in_block[file])
        tally.judge(subject, "bits", f"bit {bit}", file, tensor=tensor)
        subject.flip(file, bit)


def _all_bits(subject: Subject) -> list[tuple[str, int]]:
    return [(file, bit) for file, content in subject.contents.items() for bit in range(8 * len(content))]


def _chosen_bits(subject: Subject, number: int, seed: int) -> list[tuple[str, int]]:
    """Every bit of COMPLETE, of records and of what is at the start of headers, and some of all others."""
    small = [
        (region.file, bit)
        for region in subject.regions
        if region.kind in ("marker", "record", "header", "trailer")
        for bit in range(8 * region.begin, 8 * min(region.end, region.begin + 64 if region.kind != "marker" else region.end))
    ]
    return [*small, *random.Random(seed).sample(_all_bits(subject), number)]


# --------------------------------------------------------------------------------------------------------------- lengths


def cut_lengths(subject: Subject, tally: Tally, lengths: Iterable[tuple[str, int]]) -> None:
    """Give files other lengths: cut off, or longer by zeros."""
    for file, length in lengths:
        content = subject.contents[file]
        with open(subject.path / file, "r+b", buffering=0) as handle:
            handle.truncate(length)
            tally.judge(subject, "lengths", f"length {length} instead of {len(content)}", file)
            if length < len(content):
                os.pwrite(handle.fileno(), content[length:], length)
            handle.truncate(len(content))


def _all_lengths(subject: Subject) -> list[tuple[str, int]]:
    return [
        (file, length)
        for file, content in subject.contents.items()
        for length in (*range(len(content)), *range(len(content) + 1, len(content) + 66), 2 * len(content))
    ]


def _chosen_lengths(subject: Subject, number: int, seed: int) -> list[tuple[str, int]]:
    edges = {(region.file, place) for region in subject.regions for place in (region.begin, region.end - 1)}
    return [*sorted(edges), *random.Random(seed).sample(_all_lengths(subject), number)]


# ----------------------------------------------------------------------------------------------------------------- files


def misplace_files(subject: Subject, tally: Tally) -> None:
    """Files missing, swapped, doubled, of another attempt, or no files at all. Each judged from COMPLETE on."""
    names = list(subject.contents)
    for file in names:
        for fault, put in _STRANGERS.items():
            place = subject.path / file
            place.unlink()
            put(place, subject)
            tally.judge(subject, "strangers", fault, file, whole=True)
            subject.restore(file)
        # A marker of another attempt vouches for a manifest that is not there.
        subject.write(file, (subject.other / file).read_bytes())
        tally.judge(subject, "other attempt", "content of another attempt", "MANIFEST" if file == "COMPLETE" else file, whole=True)
        subject.restore(file)
    for one, two in itertools.permutations(names, 2):
        subject.write(one, subject.contents[two])
        tally.judge(subject, "doubled", f"content of {two}", one, whole=True)
        if one < two:
            subject.write(two, subject.contents[one])
            tally.judge(subject, "swapped", f"swap with {two}", one, whole=True)
        subject.restore(one, two)
    for other in _mixtures(names):
        for file in other:
            subject.write(file, (subject.other / file).read_bytes())
        shards = [file for file in names if file.endswith(".shard")]
        culprit = "MANIFEST" if "COMPLETE" in other or "MANIFEST" in other else min(other)
        if {"COMPLETE", "MANIFEST"} <= set(other):
            culprit = min(file for file in shards if file not in other)
        tally.judge(subject, "mixtures", f"{', '.join(other)} of another attempt, the first", culprit, whole=True)
        subject.restore(*other)


def _mixtures(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Some files of another attempt, but not all."""
    for number in range(2, len(names)):
        yield from itertools.combinations(names, number)


def add_strangers(subject: Subject, tally: Tally) -> None:
    """Files that no manifest names change nothing: what was saved is what is loaded."""
    shard = next(name for name in subject.contents if name.endswith(".shard"))
    for name in ("model-00007.shard", "notes.txt", "LATEST", ".metadata", "0" * 32, "COMPLETE.tmp"):
        (subject.path / name).write_bytes(subject.contents[shard])
        tally.counts["additions"] += 1
        tally.require(subject.verify() is None and subject.loads_what_was_saved(), f"{name} added: the checkpoint is no longer read")
        (subject.path / name).unlink()


def _socket(place: Path, _: Subject) -> None:
    # The name of a socket is short: it is bound in its directory.
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(place.parent)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(place.name)
    finally:
        os.fchdir(before)
        os.close(before)


def _link_to(target: Callable[[Path, Subject], str | Path]) -> Callable[[Path, Subject], None]:
    return lambda place, subject: place.symlink_to(target(place, subject))


def _kept(place: Path, subject: Subject) -> Path:
    kept = subject.path.parent / f"kept-{place.name}"
    kept.write_bytes(subject.contents[place.name])
    return kept


_STRANGERS: dict[str, Callable[[Path, Subject], object]] = {
    "loss": lambda place, subject: None,
    "emptying": lambda place, subject: place.write_bytes(b""),
    "zeros instead": lambda place, subject: place.write_bytes(bytes(len(subject.contents[place.name]))),
    "a directory instead": lambda place, subject: place.mkdir(),
    "a FIFO instead": lambda place, subject: os.mkfifo(place),
    "a socket instead": _socket,
    "a link to its twin of another attempt": _link_to(lambda place, subject: subject.other / place.name),
    "a link to a copy of itself": _link_to(_kept),
    "a link to a directory": _link_to(lambda place, subject: subject.other),
    "a link to nothing": _link_to(lambda place, subject: "nowhere"),
    "a link to itself": _link_to(lambda place, subject: place.name),
    "a link to /dev/zero": _link_to(lambda place, subject: "/dev/zero"),
}


# ------------------------------------------------------------------------------------------------------------------- run


@contextmanager
def subject_of(kind: str, seed: int) -> Iterator[Subject]:
    """A subject in memory, where the system has such a place."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    place = Path(tempfile.mkdtemp(prefix="dcp-engine-damage-", dir=memory))
    try:
        subject = Subject(place, kind, seed)
        try:
            yield subject
        finally:
            subject.close()
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _share(kind: str, seed: int, full: bool, number: int, of: int) -> Tally:
    """One worker's share of bits and lengths; the first one's has the rest as well."""
    tally = Tally(kind, seed)
    with subject_of(kind, seed) as subject:
        tally.require(subject.verify() is None and subject.loads_what_was_saved(), "the sound checkpoint is refused")
        if full and kind == "plain":
            bits, lengths = _all_bits(subject), _all_lengths(subject)
        else:
            bits = _chosen_bits(subject, _SECRET_BITS if full else _QUICK_BITS // (1 + (kind == "secret")), seed)
            lengths = _chosen_lengths(subject, _SECRET_LENGTHS if full else _QUICK_LENGTHS // (1 + (kind == "secret")), seed)
        flip_bits(subject, tally, bits[number::of])
        cut_lengths(subject, tally, lengths[number::of])
        if number == 0:
            misplace_files(subject, tally)
            add_strangers(subject, tally)
            if kind == "plain" and HAS_ROOTS:
                damage_latest(subject.path.parent / "roots", partial(tally.note, "LATEST"))
        tally.require(subject.verify() is None and subject.loads_what_was_saved(), "the restored checkpoint is refused")
    return tally


def run(*, full: bool, seed: int, workers: int = 1) -> Outcome:
    """Damage a plain checkpoint and one that is signed and encrypted.

    Args:
        full: every bit and every length of the plain one; else a seeded sample, with every bit of markers, records and headers.
        seed: of the checkpoint's values and of samples.
        workers: processes.
    """
    begin = time.perf_counter()
    of = workers * _CHUNKS_PER_WORKER if full else 1
    shares = [(kind, number) for kind in ("plain", "secret") for number in range(of)]
    total = Tally("any", seed)
    if workers == 1:
        for kind, number in shares:
            total.add(_share(kind, seed, full, number, of))
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(_share, kind, seed, full, number, of) for kind, number in shares]
            for future in futures:
                total.add(future.result())
    return Outcome(
        part=PART,
        points=total.counts.total(),
        seed=seed,
        facts=dict(sorted(total.counts.items())),
        bad=tuple(total.bad),
        secs=time.perf_counter() - begin,
    )
