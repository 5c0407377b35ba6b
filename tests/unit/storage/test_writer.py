"""The writer alone: what it refuses when it is made, and what it leaves behind when a save fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import refused, save
from torch.distributed.checkpoint.metadata import Metadata

from dcp_engine import ShardReader, ShardWriter
from dcp_engine.errors import InvalidOptionError, StorageError, UnsupportedModeError, UsageError
from dcp_engine.objects import decode_object
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.publish import open_checkpoint
from dcp_engine.types import EngineMetadata


def test_a_flush_that_fails_ends_the_save_and_leaves_no_descriptor_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def fail_for_files(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".shard"):
            raise OSError(errno.EIO, "injected")
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_for_files)
        error = refused(save, {"model": {"w": torch.ones(3)}, "optimizer": {"m": torch.ones(3)}}, tmp_path / "c")
    assert isinstance(error, StorageError)
    assert (error.errno, error.rank) == (errno.EIO, 0)
    assert error.file in ("model-00000.shard", "optimizer-00000.shard")
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert [path for path in opened if path.startswith(str(tmp_path))] == []
    assert not (tmp_path / "c").exists()


# "no" is true: taken for a bool, it would replace a checkpoint.
@pytest.mark.parametrize("options", [{"overwrite": "no"}, {"metadata": [1]}, {"metadata": "note"}])
def test_options_of_another_type_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match=next(iter(options))):
        ShardWriter("c", **options)


@pytest.mark.parametrize("options", [{"step": -1}, {"step": 2**63}, {"step": True}, {"run_id": 7}, {"run_id": "é" * 2049}])
def test_what_no_manifest_holds_is_refused_before_anything_is_written(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match=next(iter(options))):
        ShardWriter("c", **options)


def test_a_machine_of_another_byte_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(UnsupportedModeError, match="little-endian"):
        ShardWriter("c")


def test_the_metadata_of_a_save_is_the_one_that_is_read_back(tmp_path: Path) -> None:
    saved = save({"model": {"w": torch.ones(3)}}, tmp_path / "step-00000007", run_id="r", metadata={"note": (1, 2)})
    read = ShardReader(tmp_path / "step-00000007").read_metadata()
    assert isinstance(saved, EngineMetadata)
    assert isinstance(read, EngineMetadata)
    assert (read.step, read.run_id, read.user_metadata) == (7, "r", {"note": (1, 2)})
    for name in ("step", "run_id", "saved_at", "nonce", "manifest_sha256", "user_metadata", "version"):
        assert getattr(saved, name) == getattr(read, name), name


def test_a_finish_without_a_save_is_told(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "c")
    with pytest.raises(UsageError, match="coordinator"):
        writer.finish(Metadata({}), [[]])
    assert not list(tmp_path.iterdir())


def test_the_manifest_says_which_codecs_were_chosen(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(100_000), "n": torch.arange(50_000)}}
    save(state, tmp_path / "c", codec="planes")
    manifest = open_checkpoint(str(tmp_path / "c")).manifest_bytes
    kept: Any = decode_object(Manifest.decode(manifest).metadata, key="metadata")
    assert kept["raw_bytes_by_codec"] == {"planes": 400_000, "zstd": 400_000}
