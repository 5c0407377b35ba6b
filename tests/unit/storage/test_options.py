"""Options are refused when the object is made, with what is valid."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_engine import ShardReader, ShardWriter
from dcp_engine.errors import InvalidOptionError


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        ({"codec": "lz4"}, "auto, raw, zstd, planes"),
        ({"level": 0}, "from 1 to 22"),
        ({"level": 23}, "from 1 to 22"),
        ({"threads": 0}, "from 1 to 256"),
        ({"threads": True}, "from 1 to 256"),
        ({"bytes_in_flight": (4 << 20) - 1}, "4 MiB"),
        ({"size_target": -0.1}, "from 0 to 1"),
        ({"size_target": 1.5}, "from 0 to 1"),
        ({"size_target": float("nan")}, "from 0 to 1"),
        ({"size_target": True}, "from 0 to 1"),
        ({"size_target": "small"}, "from 0 to 1"),
        ({"size_target": 0.5, "codec": "raw"}, 'codec="auto"'),
    ],
)
def test_an_option_of_the_writer_that_cannot_work_is_refused_with_what_is_valid(given: dict[str, Any], valid: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        ShardWriter("c", **given)
    assert valid in str(caught.value)


@pytest.mark.parametrize(
    ("given", "valid"),
    [({"threads": 257}, "from 1 to 256"), ({"bytes_in_flight": 1}, "4 MiB"), ({"verify": 1}, "True or False")],
)
def test_an_option_of_the_reader_that_cannot_work_is_refused_with_what_is_valid(given: dict[str, Any], valid: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        ShardReader("c", **given)
    assert valid in str(caught.value)
