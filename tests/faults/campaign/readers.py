"""Readers that skip a check: damage and forgeries must find each of them, or nothing would be found if that check went missing."""

from __future__ import annotations

import contextlib
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from faults.campaign.careless import Check, checks_of, hint_guards, reader_guards, skipped
from faults.campaign.damage import complaint, subject_of
from faults.campaign.damage_latest import complaint_about, silent_log, two_roots
from faults.campaign.damage_subject import KEYS, Region, Subject
from faults.campaign.forgeries import Forgery, checked, forgeries
from faults.campaign.outcome import MAX_BAD, Outcome

from dcp_engine.errors import DcpEngineError

__all__ = ["EQUIVALENT", "PART", "PROMISE", "TITLE", "Bench", "Found", "equivalent", "find", "outcome_of", "run"]

PART = "readers"
TITLE = "Readers that skip a check"
PROMISE = (
    "each check between the bytes of a checkpoint and its reader is needed: without it damage or a forgery that is put here gets through, "
    "or it is said which other check finds the same"
)

_NUM_BITS = {False: 30, True: 4_000}
_NUM_LENGTHS = {False: 5, True: 500}
_DAMAGED_KINDS = ("plain", "secret")

EQUIVALENT: tuple[tuple[str, str], ...] = (
    (
        r"envelope\.check_header: len\(found\)|envelope\.parse_record: len\(data\)",
        "Whoever calls it reads that many bytes, or is told by the storage that there are fewer; a MANIFEST shorter than its record is "
        "refused by the size that COMPLETE names. It is for those who get the bytes in another way.",
    ),
    (
        r"envelope\.open_body: except zstandard\.ZstdError",
        "What cannot be decompressed is no document, and whoever parses it says so. The error would tell less.",
    ),
    (
        r"publish\._read_manifest: size_bytes != marker\.manifest_bytes",
        "No more is read than COMPLETE names, and its SHA-256 is of all that was read. The error would tell less.",
    ),
    (
        r"signing\.check_signature: not (marker\.signature|hmac\.compare_digest\(marker\.key_id, own\))$",
        "No signature, and one of another key, is not what this key has signed, which is looked at last. The error would tell less.",
    ),
    (
        r"shard_files\.check_shard_file: footer_position \+",
        "The footer's digest is the one that MANIFEST names, and of bytes that begin where the blocks end: fewer or more have another one.",
    ),
)
"""Checks that other checks stand behind: a pattern of their names, and why nothing gets through without them."""


def equivalent(name: str) -> str:
    """Why nothing gets through without a check; empty for one whose lack must be found."""
    return next((reason for pattern, reason in EQUIVALENT if re.match(pattern, name)), "")


@dataclass(frozen=True, slots=True)
class Damage:
    """One bit of a file flipped, or its length changed: ``amount`` is the number of the bit, or the length."""

    kind: str
    family: str
    file: str
    amount: int
    tensor: bool = False

    @property
    def name(self) -> str:
        """In words that reproduce it."""
        return f"{self.family} {self.amount} of {self.file} of the {self.kind} checkpoint"


Fault: TypeAlias = Damage | Forgery


class Bench:
    """Subjects of all kinds, and the faults that are put to them.

    Args:
        seed: of the subjects and of what is drawn.
        full: every bit of markers, records and starts of headers, and many others; else a few of each field.

    Attributes:
        faults: all of them, forgeries first, the rest in an order that is drawn.
        counts: of what was put, by family.
    """

    def __init__(self, stack: ExitStack, *, seed: int, full: bool) -> None:
        self._subjects = {kind: stack.enter_context(subject_of(kind, seed)) for kind in KEYS}
        rng = random.Random(seed)
        forged = [forgery for kind, subject in self._subjects.items() for forgery in forgeries(subject, kind)]
        damage = [fault for kind in _DAMAGED_KINDS for fault in _damage_of(self._subjects[kind], kind, rng, full=full)]
        rng.shuffle(damage)
        self.faults: tuple[Fault, ...] = (*forged, *damage)
        self.counts: Counter[str] = Counter()

    def first_complaint(self, check: Check) -> str:
        """The first fault that gets past readers without a check, and what comes of it, in words; empty for none."""
        with skipped(check):
            return next((found for fault in self.faults for found in self.complaints(fault)), "")

    def complaints(self, fault: Fault) -> Iterator[str]:
        """What is wrong with what the readers say of a fault, in words. The subject is as it was when this ends."""
        subject = self._subjects[fault.kind]
        judge = self._judge_damage if isinstance(fault, Damage) else self._judge_forgery
        self.counts["forgeries" if isinstance(fault, Forgery) else f"{fault.family}s"] += 1
        try:
            yield from [f"{fault.name}: {text}" for text in judge(subject, fault)]  # type: ignore[arg-type]
        except Exception as error:
            yield f"{fault.name}: {type(error).__name__}: {error}"

    @staticmethod
    def _judge_damage(subject: Subject, fault: Damage) -> list[str]:
        content = subject.contents[fault.file]
        if fault.family == "length":
            subject.write(fault.file, (content + bytes(max(0, fault.amount - len(content))))[: fault.amount])
        else:
            subject.flip(fault.file, fault.amount)
        try:
            verdicts = subject.verdicts(fault.file)
        finally:
            subject.restore(fault.file)
        found = [complaint(error, fault.file, str(subject.path), fault.tensor) for error in verdicts]
        return [f"{judge} {text}" for judge, text in zip(("verify", "load"), found, strict=True) if text is not None]

    @staticmethod
    def _judge_forgery(subject: Subject, forgery: Forgery) -> list[str]:
        before = subject.keys
        try:
            for name, content in forgery.contents.items():
                subject.write(name, content)
            for name in forgery.links:
                (subject.path / name).symlink_to(".")
            if forgery.put is not None:
                forgery.put()
            subject.keys = before if forgery.keys is None else dict(forgery.keys)
            verdicts = {judge: getattr(subject, judge)() for judge in forgery.judges}
        finally:
            subject.keys = before
            subject.restore(*subject.contents)
            for name in forgery.links:
                (subject.path / name).unlink()
        found = {judge: _complaint_of(error, forgery) for judge, error in verdicts.items()}
        return [f"{judge} {text}" for judge, text in found.items() if text]


def _complaint_of(error: DcpEngineError | None, forgery: Forgery) -> str:
    """What is wrong with the refusal of a forgery; empty for nothing."""
    if error is None:
        return "says nothing"
    if not isinstance(error, forgery.error):
        return f"raises {type(error).__name__} instead of {forgery.error.__name__}: {error}"
    return "" if not forgery.file or error.file == forgery.file else f"names {error.file}: {error}"


def _damage_of(subject: Subject, kind: str, rng: random.Random, *, full: bool) -> Iterator[Damage]:
    in_block = [region for region in subject.regions if region.kind in ("block", "padding")]

    def flip(file: str, bit: int) -> Damage:
        tensor = any(region.file == file and region.begin <= bit // 8 < region.end for region in in_block)
        return Damage(kind, "bit", file, bit, tensor)

    for region in subject.regions:
        for byte in _telling_bytes(region, full=full):
            for bit in range(8) if full else (rng.randrange(8),):
                yield flip(region.file, 8 * byte + bit)
    for _ in range(_NUM_BITS[full]):
        file = rng.choice(list(subject.contents))
        yield flip(file, rng.randrange(8 * len(subject.contents[file])))
    for file, content in subject.contents.items():
        lengths = {len(content) - 1, len(content) + 1}
        lengths |= {rng.randrange(len(content)) for _ in range(_NUM_LENGTHS[full] // len(subject.contents))}
        for length in sorted(lengths):
            yield Damage(kind, "length", file, length)


def _telling_bytes(region: Region, *, full: bool) -> Sequence[int]:
    """Bytes of a region that tell: some of each field of what has fields, all where ``full``; else its ends."""
    if region.kind in ("record", "trailer"):
        return range(region.begin, region.end, 1 if full else 8)
    if region.kind == "header":
        return [*range(region.begin, region.begin + 64, 1 if full else 8), region.end - 1]
    if region.kind == "marker":
        return range(region.begin, region.end, 1 if full else 16)
    return sorted({region.begin, region.end - 1})


class Hints:
    """A root whose LATEST is damaged in the ways that each check of it is for.

    Args:
        place: an empty directory.

    Attributes:
        num_put: faults so far.
    """

    def __init__(self, place: Path) -> None:
        roots = two_roots(place)
        self._root, self._latest = roots[0], place / "a" / "LATEST"
        self._content, self._foreign = ((place / name / "LATEST").read_bytes() for name in ("a", "b"))
        self.num_put = 0

    def first_complaint(self, check: Check | None = None) -> str:
        """The first fault that gets past a root without a check, or past the right one, in words; empty for none."""
        with silent_log("dcp_engine.storage.root"), contextlib.nullcontext() if check is None else skipped(check):
            for fault, content in self._faults():
                self._latest.write_bytes(content)
                self.num_put += 1
                try:
                    text = complaint_about(self._root)
                except Exception as error:
                    text = f"{type(error).__name__}: {error}"
                if text is not None:
                    return f"LATEST {fault}: {text}"
        return ""

    def _faults(self) -> Iterator[tuple[str, bytes]]:
        content = self._content
        text = content[: content.rindex(b"check ")]
        yield "of another root", self._foreign
        yield "of a newer format", checked(text.replace(b"latest 1\n", b"latest 2\n"))
        yield "that is a text of another kind", checked(text.replace(b"latest", b"epoch", 1))
        yield "with another check line", content[:-2] + bytes([content[-2] ^ 1]) + b"\n"
        yield "without a check line", text
        yield "that ends early", content[:-9]
        yield "that is empty", b""


@dataclass(frozen=True, slots=True)
class Found:
    """What the faults have found.

    Attributes:
        past: by the name of a check: the first fault that gets past whoever skips it, in words; empty for none.
        honest: what readers that skip nothing do wrong, in words.
        counts: of what was put, by family.
    """

    past: dict[str, str]
    honest: tuple[str, ...]
    counts: Counter[str]

    def bad(self) -> list[str]:
        """Broken promises, in words."""
        bad = list(self.honest)
        for name, text in self.past.items():
            if not text and not equivalent(name):
                bad.append(f"nothing gets past a reader without the check {name!r}, or what would is not put")
            if text and equivalent(name):
                bad.append(f"nothing was said to get past a reader without the check {name!r}, and this does: {text}")
        return bad


def find(*, full: bool, seed: int) -> Found:
    """Puts the faults to readers that skip nothing, and then to those that skip one check each, until one gets past."""
    with contextlib.ExitStack() as stack:
        bench = Bench(stack, seed=seed, full=full)
        hints = Hints(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dcp-engine-readers-"))))
        honest = [text for fault in bench.faults for text in bench.complaints(fault)]
        honest += [text for text in [hints.first_complaint()] if text]
        past = {check.name: bench.first_complaint(check) for check in checks_of(reader_guards())}
        past |= {check.name: hints.first_complaint(check) for check in checks_of(hint_guards())}
    return Found(past, tuple(f"a reader that skips nothing: {text}" for text in honest), bench.counts + Counter(LATEST=hints.num_put))


def outcome_of(found: Found, *, seed: int, secs: float) -> Outcome:
    """For the table."""
    facts = {
        "checks": len(found.past),
        "checks whose lack is found": sum(map(bool, found.past.values())),
        "checks that others stand behind": sum(not text for text in found.past.values()),
        **dict(sorted(found.counts.items())),
    }
    return Outcome(part=PART, points=found.counts.total(), seed=seed, facts=facts, bad=tuple(found.bad()[:MAX_BAD]), secs=secs)


def run(*, full: bool, seed: int, workers: int = 1) -> Outcome:
    """The whole part. ``workers`` is not used: one core does.

    Args:
        full: many more bits and lengths for each reader that nothing gets past.
        seed: of the checkpoints and of what is drawn.
    """
    begin = time.perf_counter()
    found = find(full=full, seed=seed)
    return outcome_of(found, seed=seed, secs=time.perf_counter() - begin)
