"""A file system that keeps no more than it must: what a power cut may leave of calls whose effect nobody has flushed.

What POSIX promises about a crash is little. ``fsync`` of a file makes its bytes and its size durable; ``fsync`` of a directory makes the
names in it durable; nothing else is ever promised, and no order of anything. Real file systems promise more, each something else, as the
ALICE study ("All File Systems Are Not Created Equal", OSDI 2014) found by experiment: ext4 with ordered data flushes a file that is renamed
over another, btrfs does not order names of different directories, delayed allocation lets a size or a name become durable long before the
bytes (zeros or another file's old bytes come back), and a protocol that is right on one of them loses data on the next. So the model takes
the weakest that any of them does:

- Bytes: each sector of 512 bytes that was written survives or not, whatever was written before or after. One sector may be torn: its
  beginning new, its rest old.
- Size: may be durable before the bytes (what is missing reads as zeros, as noise, or as stale bytes of another file) or after them.
- Names: every change of a name in a directory survives or not, whatever the order. A rename is one change in the ``journal`` mode, as on
  all file systems with a journal; in the ``weak`` mode its two names are two changes, as where directories are written back block by block.
- Nodes: in the ``weak`` mode each rank is a machine of its own, and a directory that it flushes makes durable what that machine did there.
- A flush that fails makes nothing durable, and no later one does for the same bytes and names: the kernel has marked them clean.

No file system undoes what was flushed. A disk that lies about flushes is beyond what software can repair, and so is no part of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import xxhash
from faults.campaign.io_events import TOP, Change, Event, Flush, Link, Note, Spoil, Write
from faults.campaign.survivors import SECTOR_BYTES, Choice, Dirty

__all__ = ["JOURNAL", "WEAK", "Disk", "Mode", "Prefix", "Tree"]


@dataclass(frozen=True, slots=True)
class Mode:
    """How weak the file system is: see the module."""

    name: str
    whole_renames: bool
    own_nodes: bool


JOURNAL = Mode("journal", whole_renames=True, own_nodes=False)
WEAK = Mode("weak", whole_renames=False, own_nodes=True)


@dataclass(slots=True)
class _File:
    durable: bytes = b""
    writes: list[Write] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A change of one name that is not flushed; those with one ``unit`` survive together."""

    unit: int
    link: Link
    node: int
    doomed: bool = False


class Tree:
    """What a reader finds after a crash."""

    def __init__(self, tables: Mapping[int, Mapping[str, int]], files: Mapping[int, bytes], digests: dict[int, bytes]) -> None:
        self._tables = tables
        self._files = files
        self._digests = digests

    def table(self, directory: int) -> Mapping[str, int]:
        """Names in a directory."""
        return self._tables.get(directory, {})

    def is_directory(self, inode: int) -> bool:
        """Whether it is one."""
        return inode not in self._files

    def content(self, inode: int) -> bytes:
        """Bytes of a file."""
        return self._files[inode]

    def find(self, path: str) -> int | None:
        """Inode of a path relative to the top."""
        inode: int | None = TOP
        for name in filter(None, path.split("/")):
            inode = None if inode is None else self.table(inode).get(name)
        return inode

    def digest(self, inode: int) -> bytes:
        """Of all that is below a directory, or of a file: equal for equal states."""
        known = self._digests.get(inode)
        if known is None:
            table = self.table(inode)
            names = sorted(table)
            # No name holds a slash, and all digests have one length: two tables that differ never give the same bytes.
            known = xxhash.xxh3_128_digest("/".join(names).encode() + b"//" + b"".join([self.digest(table[name]) for name in names]))
            self._digests[inode] = known
        return known


class Prefix:
    """The moment after some calls: everything that a power cut then may leave."""

    def __init__(self, tables: dict[int, dict[str, int]], units: list[list[Link]], files: dict[int, bytes], dirty: list[Dirty]) -> None:
        self._tables = tables
        self._units = units
        self._files = files
        self._digests = {inode: xxhash.xxh3_128_digest(content) for inode, content in files.items()}
        self.dirty = dirty

    @property
    def num_changes(self) -> int:
        """Unflushed changes of names that survive or not."""
        return len(self._units)

    def tree(self, choice: Choice) -> Tree:
        """What is left."""
        tables = dict(self._tables)
        touched: set[int] = set()
        for index, unit in enumerate(self._units):
            if not choice.changes >> index & 1:
                continue
            for link in unit:
                if link.directory not in touched:
                    touched.add(link.directory)
                    tables[link.directory] = dict(tables.get(link.directory, {}))
                if link.inode is None:
                    tables[link.directory].pop(link.name, None)
                else:
                    tables[link.directory][link.name] = link.inode
        if not self.dirty:
            return Tree(tables, self._files, dict(self._digests))
        files, digests = dict(self._files), dict(self._digests)
        for dirty, survivor in zip(self.dirty, choice.files, strict=True):
            files[dirty.inode] = dirty.content(survivor)
            digests[dirty.inode] = xxhash.xxh3_128_digest(files[dirty.inode])
        return Tree(tables, files, digests)


class Disk:
    """The model: events go in, one after the other; between any two, ``prefix`` says what a power cut there may leave."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._tables: dict[int, dict[str, int]] = {TOP: {}}
        self._files: dict[int, _File] = {}
        self._pending: list[_Pending] = []
        self._num_units = 0
        self._names: dict[int, str] = {}
        self._stale: dict[str, bytes] = {}

    def apply(self, event: Event) -> None:
        """One call has returned."""
        match event:
            case Change():
                self._change(event)
            case Write(inode=inode):
                # An inode that does not exist yet: a mutant has moved the call before the creation, where it would have failed.
                if inode in self._files:
                    self._files[inode].writes.append(event)
            case Flush():
                self._flush(event)
            case Spoil(inode=inode):
                file = self._files[inode]
                file.writes.insert(0, Write(event.path, inode, 0, file.durable, lost=True))
                file.durable = b""
            case Note():
                pass

    def prefix(self) -> Prefix:
        """What a power cut may leave now."""
        units: dict[int, list[Link]] = {}
        for pending in self._pending:
            units.setdefault(pending.unit, []).append(pending.link)
        dirty = [self._dirty(inode, file) for inode, file in self._files.items() if file.writes]
        files = {inode: file.durable for inode, file in self._files.items()}
        return Prefix({inode: dict(table) for inode, table in self._tables.items()}, list(units.values()), files, dirty)

    def _change(self, event: Change) -> None:
        if event.made is not None:
            if event.what == "mkdir":
                self._tables[event.made] = {}
            else:
                self._files[event.made] = _File()
                self._names[event.made] = event.path.rpartition("/")[2]
        for link in event.links:
            self._pending.append(_Pending(self._num_units, link, event.node))
            self._num_units += not self._mode.whole_renames
        self._num_units += self._mode.whole_renames

    def _flush(self, event: Flush) -> None:
        file = self._files.get(event.inode)
        if file is not None:
            if event.failed:
                file.writes = [replace(write, lost=True) for write in file.writes]
            else:
                file.durable = _written(file.durable, (write for write in file.writes if not write.lost))
                file.writes = [write for write in file.writes if write.lost]
                self._stale.setdefault(self._names[event.inode], file.durable)
            return
        mine = {
            pending.unit
            for pending in self._pending
            if pending.link.directory == event.inode and not pending.doomed and (pending.node == event.node or not self._mode.own_nodes)
        }
        left: list[_Pending] = []
        for pending in self._pending:
            if pending.unit not in mine:
                left.append(pending)
            elif event.failed:
                left.append(replace(pending, doomed=True))
            else:
                self._settle(pending.link)
                # What the name was before, and was never flushed, has been overtaken.
                left = [other for other in left if (other.link.directory, other.link.name) != (pending.link.directory, pending.link.name)]
        self._pending = left

    def _settle(self, link: Link) -> None:
        if link.inode is None:
            self._tables[link.directory].pop(link.name, None)
        else:
            self._tables[link.directory][link.name] = link.inode

    def _dirty(self, inode: int, file: _File) -> Dirty:
        touched = {
            sector
            for write in file.writes
            for sector in range(write.position // SECTOR_BYTES, -(-(write.position + len(write.data)) // SECTOR_BYTES))
        }
        return Dirty(
            inode, file.durable, _written(file.durable, file.writes), tuple(sorted(touched)), self._stale.get(self._names[inode], b"")
        )


def _written(content: bytes, writes: Iterable[Write]) -> bytes:
    out = bytearray(content)
    for write in writes:
        end = write.position + len(write.data)
        if len(out) < end:
            out.extend(bytes(end - len(out)))
        out[write.position : end] = write.data
    return bytes(out)
