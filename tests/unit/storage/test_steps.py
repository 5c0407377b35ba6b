"""Which names are steps, and which steps are committed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import publish, unprivileged, world_readable_directory, write_files
from support.s3 import make_bucket, storage_options

from dcp_engine.errors import InvalidOptionError, StoragePermissionError
from dcp_engine.storage.publish import open_publisher
from dcp_engine.storage.steps import STEP_NAME, committed_steps, parse_step_name, step_name


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-00000000", 0),
        ("step-00000100", 100),
        ("step-99999999", 99_999_999),
        ("step-100000000", 100_000_000),
        ("step-9223372036854775807", 2**63 - 1),
    ],
)
def test_steps_have_one_name_each(name: str, step: int) -> None:
    assert parse_step_name(name) == step
    assert step_name(step) == name


@pytest.mark.parametrize("step", [-1, 2**63, "7", None, 1.9, True])
def test_what_is_no_step_has_no_name(step: Any) -> None:
    with pytest.raises(InvalidOptionError, match="a whole number from 0 to 9223372036854775807"):
        step_name(step)


def test_whole_numbers_of_other_libraries_are_steps() -> None:
    assert step_name(cast("int", np.int32(7))) == step_name(cast("int", torch.tensor(7))) == "step-00000007"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "step-",
        "step-7",
        "step-007",
        "step-0000007",
        "step-000000007",
        "step-00000007.tmp",
        "step-00000007 ",
        "step-00000007\n",
        ".step-00000007",
        "Step-00000007",
        "step--0000007",
        "step-+0000007",
        "step-0000000\uff17",
        "step-" + "1" * 20,
        "step-9223372036854775808",
        ".tmp-step-00000007-0123456789abcdef0123456789abcdef",
        "LATEST",
    ],
)
def test_names_that_resemble_a_step_are_none(name: str) -> None:
    assert parse_step_name(name) is None


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_names_of_steps_read_back(step: int) -> None:
    assert step_name(step) == STEP_NAME % step
    assert parse_step_name(step_name(step)) == step


def test_only_committed_steps_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (30, 4, 200, 5, 6, 7, 8):
        publish(tmp_path / step_name(step))
    publish(tmp_path / "step-007")
    publish(tmp_path / "step-00000009.tmp")
    publish(tmp_path / "notes")
    (tmp_path / "step-00000010").symlink_to("step-00000004")
    (tmp_path / "step-00000011").touch()
    (tmp_path / "step-00000012").mkdir()
    (tmp_path / "LATEST").write_text("step-00000999")
    write_files(publisher := open_publisher(tmp_path / "step-00000013"), publisher.begin())
    (tmp_path / "step-00000005" / "COMPLETE").unlink()
    (tmp_path / "step-00000006" / "COMPLETE").write_bytes(b"")
    content = (tmp_path / "step-00000007" / "COMPLETE").read_bytes()
    (tmp_path / "step-00000007" / "COMPLETE").write_bytes(content[:-1])
    content = (tmp_path / "step-00000008" / "COMPLETE").read_bytes()
    (tmp_path / "step-00000008" / "COMPLETE").write_bytes(content.replace(b"checkpoint 1\n", b"checkpoint 2\n"))

    # 8 is of a newer version: committed, though this release cannot read it.
    assert committed_steps(tmp_path) == [4, 8, 30, 200]
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [6, 7]


def test_a_root_that_does_not_exist_has_no_steps(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert committed_steps(tmp_path / "absent") == []
    assert committed_steps(tmp_path / "file") == []
    assert committed_steps(tmp_path) == []


def test_a_root_that_may_not_be_read_is_an_error() -> None:
    with world_readable_directory() as place:
        publish(place / "root" / "step-00000001")
        (place / "root").chmod(0o000)
        with unprivileged(), pytest.raises(StoragePermissionError):
            committed_steps(place / "root")
        (place / "root").chmod(0o755)
        os.chmod(place / "root" / "step-00000001" / "COMPLETE", 0o000)
        with unprivileged(), pytest.raises(StoragePermissionError):
            committed_steps(place / "root")


@pytest.mark.parametrize("scheme", ["memory", "s3"])
def test_steps_of_an_object_store_are_listed_as_of_now(scheme: str) -> None:
    options: dict[str, Any] = storage_options() if scheme == "s3" else {}
    root = f"{scheme}://{make_bucket()}/run"
    assert committed_steps(root, storage_options=options) == []
    publisher = open_publisher(f"{root}/step-00000003", storage_options=options)
    ref = publisher.begin()
    reported = write_files(publisher, ref)
    assert committed_steps(root, storage_options=options) == []
    publisher.commit(ref, bytes(64), reported)
    assert committed_steps(root, storage_options=options) == [3]
    publish(f"{root}/step-00000001", storage_options=options)
    publish(f"{root}/step-1", storage_options=options)
    assert committed_steps(root, storage_options=options) == [1, 3]
