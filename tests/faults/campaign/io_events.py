"""What the calls of a save did to a file system, in order: the vocabulary between who records them and who replays them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["TOP", "Change", "Event", "Flush", "Link", "Note", "Spoil", "Write"]

TOP: Final = 0
"""Inode of the directory that everything is in. It was there before, and is durable."""


@dataclass(frozen=True, slots=True)
class Link:
    """A name in a directory comes to lead to an inode, or to nothing."""

    directory: int
    name: str
    inode: int | None


@dataclass(frozen=True, slots=True)
class Change:
    """A call that changes names.

    Attributes:
        what: ``create``, ``mkdir``, ``rename``, ``exchange``, ``unlink`` or ``rmdir``.
        path: what it is called on, relative to the top: for messages and for telling the steps of a protocol.
        links: what it does; two for a rename.
        node: the machine that called.
        made: the inode that is new, if one is.
    """

    what: str
    path: str
    links: tuple[Link, ...]
    node: int = 0
    made: int | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes at a position of a file. ``lost``: the device refused them, and nobody was told."""

    path: str
    inode: int
    position: int
    data: bytes
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Flush:
    """fsync of a file or directory. ``failed``: it reported an error."""

    path: str
    inode: int
    node: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Spoil:
    """close of a file reported an error: none of its bytes can be relied on, as on file systems that write when a file is closed."""

    path: str
    inode: int


@dataclass(frozen=True, slots=True)
class Note:
    """What the caller knows of a path.

    Attributes:
        what: ``saving``, ``saved``, ``failed``, ``retiring``, ``retired``: of a step's name, with a content; ``pointed``: LATEST names it;
            ``set aside``: the only whole checkpoint, which has lost its name; ``claimed``: an epoch, whose content is the claim;
            ``revoked``: an attempt; ``acting``: something else begins that may fail.
        path: relative to the top.
        content: see there.
    """

    what: str
    path: str
    content: str = ""


Event = Change | Write | Flush | Spoil | Note
