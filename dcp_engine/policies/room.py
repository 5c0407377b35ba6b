"""Whether there is room for the next save, before anything of it is written."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dcp_engine.errors import InvalidOptionError
from dcp_engine.policies.checked import check_count

__all__ = ["Room", "RoomVerdict", "check_room"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What has to be free before a save starts: the size of the newest checkpoint, and more.

    Attributes:
        growth: by what share the next checkpoint may be larger than the newest: compression varies.
        reserve_bytes: what stays free beside it.

    Raises:
        InvalidOptionError: an option is out of range.
    """

    growth: float = 0.1
    reserve_bytes: int = 0

    def __post_init__(self) -> None:
        growth: object = self.growth
        if isinstance(growth, bool) or not isinstance(growth, int | float) or not 0 <= growth < math.inf:
            raise InvalidOptionError("growth is no share", expected="a finite number, at least 0, as in 0.1", found=repr(growth)[:300])
        check_count("reserve_bytes", self.reserve_bytes, minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomVerdict:
    """Whether a save fits.

    Attributes:
        needed_bytes: by it, by saves that are under way, and by the reserve.
        free_bytes: on the storage.
    """

    needed_bytes: int
    free_bytes: int

    @property
    def is_enough(self) -> bool:
        """Whether it does."""
        return self.free_bytes >= self.needed_bytes


def check_room(room: Room, *, newest_bytes: int, num_under_way: int, free_bytes: int) -> RoomVerdict:
    """Whether the next save fits. Pure.

    Args:
        room: what has to be free.
        newest_bytes: stored bytes of the newest checkpoint of the whole state.
        num_under_way: saves that have begun and may not have written anything yet.
        free_bytes: as the storage tells.
    """
    needed = (1 + num_under_way) * math.ceil(newest_bytes * (1 + room.growth)) + room.reserve_bytes
    return RoomVerdict(needed_bytes=needed, free_bytes=free_bytes)
