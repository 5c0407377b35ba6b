"""A save that is watched: it shows that it gets on, ends when it is told to, and asks before it publishes."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_engine import ShardWriter, committed_steps
from dcp_engine.errors import BackgroundSaveError, CommitError, CommitStateUnknownError, DcpEngineError
from dcp_engine.storage.attempts import AttemptRef
from dcp_engine.storage.backends.calls import SystemCalls, installed
from dcp_engine.storage.backends.local import LocalDirectory
from dcp_engine.storage.publish import open_publisher
from dcp_engine.storage.throttle import TokenBucket
from dcp_engine.storage.write_watch import WriteWatch, watched


class Fence:
    """Says no at the ``refusal``-th question."""

    def __init__(self, refusal: int = 0) -> None:
        self.num_asked = 0
        self.refusal = refusal

    def check(self) -> None:
        self.num_asked += 1
        if self.num_asked == self.refusal:
            raise CommitError("somebody else writes here now")


def test_progress_grows_with_every_write(tmp_path: Path) -> None:
    watch = WriteWatch()
    file = watched(LocalDirectory(str(tmp_path)).create, watch)("model-00000.shard")
    seen = [watch.progress]
    file.write([b"abc"])
    seen.append(watch.progress)
    file.write_at(3, [b"def"])
    seen.append(watch.progress)
    file.commit()
    seen.append(watch.progress)
    assert sorted(set(seen)) == seen
    assert (tmp_path / "model-00000.shard").read_bytes() == b"abcdef"


def test_no_write_begins_once_a_save_was_broken_off(tmp_path: Path) -> None:
    watch = WriteWatch()
    create = watched(LocalDirectory(str(tmp_path)).create, watch)
    file = create("model-00000.shard")
    error = BackgroundSaveError("another rank is dead")
    watch.break_off(error)
    for call in (lambda: file.write([b"a"]), lambda: file.write_at(0, [b"a"]), file.commit, lambda: create("model-00001.shard")):
        with pytest.raises(BackgroundSaveError) as caught:
            call()
        assert caught.value is error
    file.abort()
    assert list(tmp_path.iterdir()) == []
    watch.begin()
    watch.tick()


def test_waiting_for_the_cap_on_bytes_is_progress() -> None:
    watch = WriteWatch()
    bucket = TokenBucket(1000, sleep=watch.sleep)
    bucket.take(1200)
    before = watch.progress
    bucket.take(0)
    assert watch.progress - before >= 2


def test_all_fences_are_asked_when_the_attempt_is_made_and_before_it_is_published(tmp_path: Path) -> None:
    own, added = Fence(), Fence()
    writer = ShardWriter(tmp_path / "step-00000001", fence=own)
    with writer.watch.fenced_by(added):
        dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    assert (own.num_asked, added.num_asked) == (2, 2)
    dcp.save({"w": torch.ones(3)}, storage_writer=ShardWriter(tmp_path / "step-00000002", fence=own))
    assert (own.num_asked, added.num_asked) == (4, 2)


@pytest.mark.parametrize("refusal", [1, 2])
def test_a_fence_that_says_no_leaves_nothing(tmp_path: Path, refusal: int) -> None:
    with pytest.raises(dcp.api.CheckpointException, match="somebody else writes here now"):
        dcp.save({"w": torch.ones(3)}, storage_writer=ShardWriter(tmp_path / "step-00000001", fence=Fence(refusal)))
    assert list(tmp_path.iterdir()) == []


class Unsendable(Exception):
    """No pickle makes one again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second, threading.Lock())


@pytest.mark.parametrize("refusal", [1, 2])
@pytest.mark.parametrize("error", [ValueError("odd"), Unsendable("odd", "even"), OSError(5, "odd")])
def test_a_fence_that_fails_is_an_error_that_reaches_all_ranks(tmp_path: Path, error: Exception, refusal: int) -> None:
    class Failing(Fence):
        def check(self) -> None:
            self.num_asked += 1
            if self.num_asked == refusal:
                raise error

    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save({"w": torch.ones(3)}, storage_writer=ShardWriter(tmp_path / "step-00000001", fence=Failing()))
    ((reason, _),) = caught.value.failures.values()
    assert isinstance(reason, CommitError)
    assert (reason.step, reason.path) == (1, str(tmp_path / "step-00000001"))
    assert "the fence failed" in str(reason)
    assert f"found {type(error).__name__}: " in str(reason)
    assert pickle.loads(pickle.dumps(reason)).found == reason.found
    assert list(tmp_path.iterdir()) == []


# -- an attempt whose coordinator is lost -----------------------------------------------------------------------------------


def test_an_attempt_that_was_revoked_cannot_be_published(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path / "step-00000001")
    ref = publisher.begin()
    others = open_publisher(tmp_path / "step-00000001")
    assert others.revoke(ref)
    assert others.revoke(ref), "a second rank comes to the same end"
    with pytest.raises(DcpEngineError):
        publisher.commit(ref, b"manifest", [])
    assert list(tmp_path.iterdir()) == []


def test_an_attempt_that_was_published_cannot_be_revoked(tmp_path: Path) -> None:
    for overwrite in (False, True):
        publisher = open_publisher(tmp_path / "step-00000001", overwrite=overwrite)
        ref = publisher.begin()
        publisher.commit(ref, b"manifest", [])
        assert not open_publisher(tmp_path / "step-00000001", overwrite=overwrite).revoke(ref)
    assert committed_steps(str(tmp_path)) == [1]


class _LosesTheCoordinator(SystemCalls):
    """The process that publishes is lost after its rename, before anything else."""

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        raise KeyboardInterrupt("lost")


class _Flushes(SystemCalls):
    """Notes which directories are flushed, or fails to."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.flushed: list[str] = []

    def fsync(self, fd: int) -> None:
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fsync(fd)
        self.flushed.append(os.readlink(f"/proc/self/fd/{fd}"))


def _renamed_and_lost(path: Path) -> AttemptRef:
    publisher = open_publisher(path)
    ref = publisher.begin()
    with installed(_LosesTheCoordinator()), pytest.raises(KeyboardInterrupt, match="lost"):
        publisher.commit(ref, b"manifest", [])
    return ref


def test_what_a_lost_coordinator_has_renamed_is_flushed_before_it_counts_as_published(tmp_path: Path) -> None:
    ref, calls = _renamed_and_lost(tmp_path / "step-00000001"), _Flushes()
    with installed(calls):
        assert not open_publisher(tmp_path / "step-00000001").revoke(ref)
    assert calls.flushed == [str(tmp_path)]


def test_what_cannot_be_flushed_after_its_coordinator_was_lost_is_unknown(tmp_path: Path) -> None:
    ref = _renamed_and_lost(tmp_path / "step-00000001")
    with installed(_Flushes(fails=True)), pytest.raises(CommitStateUnknownError, match="whether a power cut would leave it there"):
        open_publisher(tmp_path / "step-00000001").revoke(ref)
    assert committed_steps(str(tmp_path)) == [1]
