"""Whether the next save fits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dcp_engine.errors import InvalidOptionError
from dcp_engine.policies import Room, check_room


@pytest.mark.parametrize(
    ("room", "num_under_way", "needed_bytes"),
    [
        (Room(), 0, 1_100),
        (Room(growth=0), 0, 1_000),
        (Room(growth=0), 1, 2_000),
        (Room(growth=0.0001), 0, 1_001),
        (Room(growth=0.5, reserve_bytes=300), 1, 3_300),
    ],
)
def test_what_is_needed(room: Room, num_under_way: int, needed_bytes: int) -> None:
    exactly = check_room(room, newest_bytes=1_000, num_under_way=num_under_way, free_bytes=needed_bytes)
    assert (exactly.needed_bytes, exactly.is_enough) == (needed_bytes, True)
    assert not check_room(room, newest_bytes=1_000, num_under_way=num_under_way, free_bytes=needed_bytes - 1).is_enough


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"growth": -0.1}, "at least 0"),
        ({"growth": math.inf}, "at least 0"),
        ({"growth": "10 %"}, "at least 0"),
        ({"growth": True}, "at least 0"),
        ({"reserve_bytes": -1}, "at least 0"),
        ({"reserve_bytes": 1.5}, "a whole number"),
    ],
)
def test_wrong_options_are_told_what_is_valid(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        Room(**options)
    assert expected in str(caught.value)
