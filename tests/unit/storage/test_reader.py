"""The reader alone: how the rank that opens for all tells the others that it failed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from dcp_engine import ShardReader
from dcp_engine.errors import CheckpointNotFoundError, DcpEngineError, InvalidOptionError, StorageError


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("option", ["allow_opaque", "verify", "broadcast"])
def test_a_text_is_no_bool(option: str) -> None:
    with pytest.raises(InvalidOptionError, match=option):
        ShardReader("c", **{option: "no"})  # type: ignore[arg-type]


def test_every_failure_of_the_rank_that_opens_is_broadcast(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []
    broadcast = dist.broadcast_object_list

    def noted(box: list[object], *args: object, **options: object) -> None:
        sent.append(box[0])
        broadcast(box, *args, **options)

    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("the driver of the storage is broken")

    monkeypatch.setattr(dist, "broadcast_object_list", noted)
    with pytest.raises(CheckpointNotFoundError):
        ShardReader(tmp_path / "none", process_group=group).read_metadata()
    monkeypatch.setattr("dcp_engine.storage.reader.open_checkpoint", fail)
    with pytest.raises(StorageError) as caught:
        ShardReader(tmp_path / "c", process_group=group).read_metadata()
    assert (caught.value.rank, caught.value.path) == (0, str(tmp_path / "c"))
    assert caught.value.found == "RuntimeError('the driver of the storage is broken')"
    assert [type(error) for error in sent] == [CheckpointNotFoundError, StorageError]
    assert all(isinstance(error, DcpEngineError) and error.rank == 0 for error in sent)
