"""The writer alone: what it refuses when it is made, and what it leaves behind when a save fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from support.engine import refused, save

from dcp_engine.errors import StorageError


def test_a_flush_that_fails_ends_the_save_and_leaves_no_descriptor_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def fail_for_files(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".shard"):
            raise OSError(errno.EIO, "injected")
        fsync(fd)

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_for_files)
        error = refused(save, {"model": {"w": torch.ones(3)}, "optimizer": {"m": torch.ones(3)}}, tmp_path / "c")
    assert isinstance(error, StorageError)
    assert (error.errno, error.rank) == (errno.EIO, 0)
    assert error.file in ("model-00000.shard", "optimizer-00000.shard")
    assert len(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / "c").exists()
