"""Options of a checkpointer are refused when it is made, by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dcp_engine import Checkpointer
from dcp_engine.checkpointer.options import CheckpointerOptions
from dcp_engine.errors import InvalidOptionError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_every": 0}, "save_every is no interval"),
        ({"save_every": True}, "save_every is no interval"),
        ({"save_every": 1.5}, "save_every is no interval"),
        ({"save_every": {"model": 0}}, "save_every is no interval"),
        ({"save_every": {1: 2}}, "save_every is no interval"),
        ({"save_every": {}}, "save_every names no component"),
        ({"best": "loss"}, "best is no metric"),
        ({"best": ("loss", "least")}, "best is no metric"),
        ({"if_busy": "never"}, "if_busy is not known"),
        ({"max_fallbacks": -1}, "max_fallbacks is no number"),
        ({"node_local": 1}, "node_local is not a bool"),
        ({"run_id": 3}, "run_id is not a name"),
        ({"timeout_secs": 0}, "timeout_secs is no duration"),
        ({"timeout_secs": float("inf")}, "timeout_secs is no duration"),
        ({"failure_secs": -1}, "failure_secs is no duration"),
        ({"executor": "fork"}, "unknown executor"),
        ({"writer_options": {"codek": "raw"}}, "writer_options holds 'codek', which is not known"),
        ({"writer_options": {"step": 1}}, "writer_options holds 'step', which the checkpointer decides"),
        ({"writer_options": {"signing_key": b"0" * 16}}, "which the checkpointer decides"),
        ({"writer_options": {"codec": "lzma"}}, "codec"),
        ({"writer_options": 3}, "writer_options is not a mapping"),
        ({"reader_options": {"verify": "no", "path": "x"}}, "reader_options holds 'path'"),
        ({"reader_options": {"threads": 0}}, "threads"),
        ({"signing_key": b"short"}, "signing_key"),
    ],
)
def test_what_is_out_of_range_is_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        Checkpointer(tmp_path / "run", **options)
    assert os.listdir(tmp_path) == []


def test_keys_are_not_shown() -> None:
    options = CheckpointerOptions(signing_key=b"0123456789abcdef", storage_options={"secret": "hunter2"})
    assert "0123" not in repr(options)
    assert "hunter2" not in repr(options)


def test_an_interval_for_all_is_a_number_or_a_star() -> None:
    assert CheckpointerOptions(save_every=5).cadence == {"*": 5}
    assert CheckpointerOptions(save_every={"model": 2}).cadence == {"model": 2}
    assert CheckpointerOptions().cadence is None
