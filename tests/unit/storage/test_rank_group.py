"""The group of a shared read: which groups it takes, and how any error crosses to the other ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from dcp_engine import ShardReader
from dcp_engine.errors import (
    CoordinationError,
    DcpEngineError,
    InvalidOptionError,
    KeyMismatchError,
    MissingFileError,
    RankFailedError,
    StorageFullError,
)
from dcp_engine.storage.rank_group import RankGroup


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wrong", ["gloo", 3, object()])
def test_what_is_no_group_is_refused_when_the_reader_is_made(wrong: object) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        ShardReader("c", broadcast=True, process_group=wrong)  # type: ignore[arg-type]
    assert 'new_group(backend="gloo")' in str(caught.value)


def test_a_group_for_gpus_alone_is_refused_with_what_to_pass(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    # What torch says of a group made with backend="nccl"; a machine without GPUs cannot make one.
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
    with pytest.raises(InvalidOptionError) as caught:
        ShardReader("c", broadcast=True, process_group=group)
    assert caught.value.found == "backends cuda:nccl"
    assert 'new_group(backend="gloo")' in str(caught.value)
    # The default group is found at the first call.
    reader = ShardReader("c", broadcast=True)
    with pytest.raises(InvalidOptionError):
        reader.read_metadata()
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl")
    ShardReader("c", broadcast=True, process_group=group)


def test_without_broadcast_a_group_for_gpus_alone_is_accepted(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
    ShardReader("c", process_group=group)


def test_records_come_back_by_rank(group: dist.ProcessGroup) -> None:
    assert RankGroup(group).exchange("mine", None, str) == ["mine"]


def test_no_error_lets_the_ranks_go_on(group: dist.ProcessGroup) -> None:
    RankGroup(group).agree(None)


def test_lists_of_keys_stay_lists(group: dist.ProcessGroup) -> None:
    told = _raised(group, KeyMismatchError("keys differ", missing=("a", "b"), unexpected=()))
    assert isinstance(told, KeyMismatchError)
    assert (told.missing, told.unexpected) == (("a", "b"), ())


class _LocalError(MissingFileError):
    """Known in this process only."""


class _SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def _raised(group: dist.ProcessGroup, error: BaseException) -> BaseException:
    with pytest.raises(type(error) if not isinstance(error, Exception) else DcpEngineError) as caught:
        RankGroup(group).agree(error)
    return caught.value


def test_an_error_of_ours_keeps_its_type_and_place(group: dist.ProcessGroup) -> None:
    own = StorageFullError("full", errno=28, path="/c", file="f.shard", tensor="w", found=5, remedy="make room")
    told = _raised(group, own)
    assert type(told) is StorageFullError
    assert isinstance(told, StorageFullError)
    assert (told.errno, told.path, told.file, told.tensor, told.found, told.remedy) == (28, "/c", "f.shard", "w", 5, "make room")
    assert told.rank == 0
    assert told.__cause__ is own


def test_an_error_of_a_class_that_others_do_not_know_becomes_one_that_they_do(group: dist.ProcessGroup) -> None:
    told = _raised(group, _LocalError("gone", file="f.shard"))
    assert type(told) is MissingFileError
    assert str(told).startswith("gone [file 'f.shard', rank 0]")


def test_what_cannot_be_pickled_is_told_as_text(group: dist.ProcessGroup) -> None:
    told = _raised(group, MissingFileError("gone", found=lambda: 1))
    assert "<lambda>" in str(pickle.loads(pickle.dumps(told)))
    told = _raised(group, ValueError("a", lambda: 1))
    assert isinstance(told, RankFailedError)
    assert str(told.found).startswith("ValueError: ('a', <function")
    told = _raised(group, _SilentError())
    assert isinstance(told, RankFailedError)
    assert told.found == "_SilentError"


def test_an_interrupt_stays_one(group: dist.ProcessGroup) -> None:
    own = KeyboardInterrupt()
    assert _raised(group, own) is own


def test_a_group_that_fails_is_an_error_of_ours(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise dist.DistBackendError("connection closed by peer")

    ranks = RankGroup(group)
    monkeypatch.setattr(dist, "all_reduce", fail)
    with pytest.raises(CoordinationError, match="connection closed by peer"):
        ranks.agree(None)
    own = ValueError("this rank's own")
    with pytest.raises(ValueError, match="this rank's own"):
        ranks.agree(own)
