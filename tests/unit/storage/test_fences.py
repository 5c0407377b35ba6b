"""When a publisher asks its fence, and what it leaves where the answer is no."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import MANIFEST, write_files
from support.engine import refused, save

from dcp_engine import RunRoot, ShardWriter
from dcp_engine.errors import FencedError, InvalidOptionError, RankFailedError, StorageError
from dcp_engine.storage.publish import open_publisher


class Scripted:
    """A fence that lets pass so often, then raises."""

    def __init__(self, passes: int, error: BaseException | None = None) -> None:
        self.passes, self.error, self.asked = passes, error or FencedError("over"), 0

    def check(self) -> None:
        self.asked += 1
        if self.asked > self.passes:
            raise self.error


class Both:
    """Two fences in one."""

    def __init__(self, *fences: Any) -> None:
        self.fences = fences

    def check(self) -> None:
        for fence in self.fences:
            fence.check()


@pytest.fixture(params=["local", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run" / "step-00000001") if request.param == "local" else f"memory://{uuid.uuid4().hex}/step-00000001"


@pytest.mark.parametrize("error", [FencedError("over"), RankFailedError("rank 3"), StorageError("unreadable"), KeyboardInterrupt()])
def test_a_no_at_the_beginning_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        open_publisher(tmp_path / "x", fence=Scripted(0, error)).begin()
    assert os.listdir(tmp_path) == []


def test_a_fence_is_asked_twice_and_right_before_the_end(target: str) -> None:
    fence = Scripted(2)
    publisher = open_publisher(target, fence=fence)
    ref = publisher.begin()
    assert fence.asked == 1
    files = write_files(publisher, ref)
    assert fence.asked == 1
    publisher.commit(ref, MANIFEST, files)
    assert fence.asked == 2


def test_a_no_at_the_end_publishes_nothing(target: str) -> None:
    publisher = open_publisher(target, fence=Scripted(1))
    ref = publisher.begin()
    with pytest.raises(FencedError, match="over"):
        publisher.commit(ref, MANIFEST, write_files(publisher, ref))
    publisher.abort(ref)
    if "://" not in target:
        assert os.listdir(os.path.dirname(target)) == []


def test_fences_compose(tmp_path: Path) -> None:
    claim = RunRoot(tmp_path).claim()
    other = Scripted(100)
    save({"x": 1}, tmp_path / "step-00000001", fence=Both(claim, other))
    assert other.asked == 2
    assert isinstance(refused(save, {"x": 1}, tmp_path / "step-00000002", fence=Both(claim, Scripted(1))), FencedError)
    assert sorted(os.listdir(tmp_path)) == [".epochs", "step-00000001"]


@pytest.mark.parametrize("fence", [7, "claim", object(), RunRoot])
def test_what_cannot_be_asked_is_no_fence(fence: Any) -> None:
    with pytest.raises(InvalidOptionError, match="check"):
        ShardWriter("x", fence=fence)
