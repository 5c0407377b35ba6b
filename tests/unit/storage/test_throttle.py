"""A cap on writing: one for all files and threads of a rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from dcp_engine import BalancedSavePlanner, ShardWriter, verify_checkpoint
from dcp_engine.errors import InvalidOptionError
from dcp_engine.storage import throttle
from dcp_engine.storage.backends import WriteFile
from dcp_engine.storage.backends.local import LocalDirectory
from dcp_engine.storage.throttle import CappedFile, TokenBucket


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def sleep(self, secs: float) -> None:
        self.now += secs


def test_bytes_pass_at_the_rate_and_the_first_at_once() -> None:
    fake = FakeTime()
    bucket = TokenBucket(1000, clock=fake.clock, sleep=fake.sleep)
    passed = []
    for num_bytes in (500, 1000, 250, 0, 1):
        bucket.take(num_bytes)
        passed.append(fake.now - 100)
    assert passed == [0, 0.5, 1.5, 1.75, 1.75]


def test_a_pause_is_not_saved_up() -> None:
    fake = FakeTime()
    bucket = TokenBucket(1000, clock=fake.clock, sleep=fake.sleep)
    bucket.take(1000)
    fake.now += 60
    bucket.take(1000)
    assert fake.now == 160
    bucket.take(1)
    assert fake.now == 161


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 3)), min_size=1, max_size=30))
def test_no_interval_sees_more_than_its_share_and_one_request(requests: list[tuple[int, float]]) -> None:
    fake = FakeTime()
    bucket = TokenBucket(1000, clock=fake.clock, sleep=fake.sleep)
    passed = []
    for num_bytes, pause_secs in requests:
        fake.now += pause_secs
        bucket.take(num_bytes)
        passed.append((fake.now, num_bytes))
    for first, (begin, _) in enumerate(passed):
        total = 0
        for end, num_bytes in passed[first:]:
            assert total <= 1000 * (end - begin) + 1e-3
            total += num_bytes


def test_threads_share_one_rate() -> None:
    waited: list[float] = []
    bucket = TokenBucket(1000, clock=lambda: 0.0, sleep=waited.append)
    threads = [threading.Thread(target=bucket.take, args=(500,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waited) == [0.5, 1.0, 1.5, 2.0]


def test_a_capped_file_is_a_file_and_pays_for_every_byte_once(tmp_path: Path) -> None:
    fake = FakeTime()
    file = CappedFile(LocalDirectory(str(tmp_path)).create("a"), TokenBucket(100, clock=fake.clock, sleep=fake.sleep))
    assert isinstance(file, WriteFile)
    pieces: list[bytes] = []
    file.write([b"ab", memoryview(b"cd")])
    file.write_at(4, [memoryview(bytes(8)).cast("Q")])
    file.write_pieces(12, b"xyz", lambda piece: pieces.append(bytes(piece)))
    assert (file.position, b"".join(pieces)) == (15, b"xyz")
    file.settle(0, 15)
    file.commit()
    file.abort()
    assert (tmp_path / "a").read_bytes() == b"abcd" + bytes(8) + b"xyz"
    assert fake.now == pytest.approx(100 + 0.12)  # the last three bytes would be waited for by whoever came next


def test_all_files_of_a_save_share_the_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes: list[FakeTime] = []

    def bucket(bytes_per_sec: float, sleep: object) -> TokenBucket:
        fakes.append(FakeTime())
        return TokenBucket(bytes_per_sec, clock=fakes[-1].clock, sleep=fakes[-1].sleep)

    monkeypatch.setattr(throttle, "TokenBucket", bucket)
    state: dict[str, Any] = {"model": {"w": torch.arange(300_000.0)}, "optimizer": {"m": torch.arange(300_000.0)}}
    writer = ShardWriter(tmp_path / "a", codec="raw", threads=1, max_bytes_per_sec=2**20)
    dcp.save(state, storage_writer=writer, planner=BalancedSavePlanner())
    verify_checkpoint(tmp_path / "a")
    (fake,) = fakes
    total = sum(path.stat().st_size for path in (tmp_path / "a").glob("*.shard"))
    largest = 4 * 2**20
    assert (total - largest) / 2**20 <= fake.now - 100 <= total / 2**20


@pytest.mark.parametrize("value", [0, -1, 1000, True, float("nan"), float("inf"), "fast"])
def test_caps_that_make_no_sense_are_refused(value: Any) -> None:
    with pytest.raises(InvalidOptionError, match="max_bytes_per_sec"):
        ShardWriter("a", max_bytes_per_sec=value)
