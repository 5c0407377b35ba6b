"""How ranks come to a save, on a store in this process: all use one group, and a new one as soon as a single rank has lost its own."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dcp_engine.background.exchange import Exchange
from dcp_engine.background.outcome import Outcome, State
from dcp_engine.background.pulse import Beat
from dcp_engine.background.run import SaveRun
from dcp_engine.background.steps import HANDED, PUBLISHING, WRITING
from dcp_engine.background.watch import Liveness, RankWatch
from dcp_engine.errors import BackgroundSaveError, RankLostError


class Watch:
    """Nobody watches."""

    def hurry(self) -> None:
        """Nothing to hurry."""


def run_of(rank: int, size: int = 2, number: int = 1) -> SaveRun:
    return SaveRun(number, Watch(), rank=rank, size=size, progress=lambda: None, path="p", step=1)  # type: ignore[arg-type]


def exchange() -> Exchange:
    return Exchange(None, lambda: None)


def joined(store: Any, exchanges: list[Exchange | None], number: int = 1) -> list[tuple[Exchange, int]]:
    """Each rank's, when all come at the same time to a save and had the group of save 4."""
    results: dict[int, tuple[Exchange, int]] = {}

    def join(rank: int) -> None:
        run = run_of(rank, len(exchanges), number)
        results[rank] = run.join(store, exchanges[rank], 4, lambda _: exchange())

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(exchanges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [results[rank] for rank in range(len(exchanges))]


def test_ranks_that_have_a_group_keep_it() -> None:
    own: list[Exchange | None] = [exchange() for _ in range(3)]
    assert joined(dist.HashStore(), own) == [(each, 4) for each in own]


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("how", ["none", "broken"])
def test_one_rank_without_a_group_gives_all_a_new_one(lost: int, how: str) -> None:
    own: list[Exchange | None] = [exchange() for _ in range(3)]
    if how == "none":
        own[lost] = None
    else:
        own[lost].is_broken = True  # type: ignore[union-attr]
    results = joined(dist.HashStore(), own, number=7)
    assert [number for _, number in results] == [7] * 3
    assert all(made is not old for (made, _), old in zip(results, own, strict=True))


def test_keys_of_the_save_before_are_removed_when_all_have_come() -> None:
    store = dist.HashStore()
    for number in (1, 2, 3):
        joined(store, [exchange(), exchange()], number)
    assert sorted(key for key in ("1/go", "2/go", "3/go", "3/arrived", "3/stale") if store.check([key])) == ["3/arrived", "3/go", "3/stale"]
    assert store.num_keys() == 3


def test_a_rank_that_comes_to_a_save_that_is_over_is_told_so() -> None:
    run = run_of(1)
    run.break_off(RankLostError("a rank is lost", rank=0))
    with pytest.raises(RankLostError):
        run.join(dist.HashStore(), None, 0, lambda _: exchange())


# -- who may publish, and who may say that nothing was ----------------------------------------------------------------------


def coordinator(store: Any) -> SaveRun:
    run = run_of(0, size=1)
    run.join(store, exchange(), 0, lambda _: exchange())
    return run


def test_the_right_to_publish_is_claimed_once_and_in_that_phase_alone() -> None:
    store = dist.HashStore()
    run = coordinator(store)
    run.enter(WRITING)
    run.check()
    assert run.outcome is None
    run.enter(PUBLISHING)
    run.check()
    run.check()
    assert run.outcome == Outcome(State.PUBLISHING, rank=0)
    assert not run.break_off(BackgroundSaveError("closed")), "it may be published: nobody may say that it was not"


def test_no_right_to_publish_after_a_failure() -> None:
    store = dist.HashStore()
    run = coordinator(store)
    run.enter(PUBLISHING)
    store.compare_set("1/outcome", "", Outcome.of(RankLostError("a rank is lost", rank=1), rank=1, phase=WRITING).encode())
    with pytest.raises(RankLostError) as caught:
        run.check()
    assert (caught.value.rank, caught.value.phase, caught.value.path) == (1, WRITING, "p")


def test_no_right_to_publish_for_a_save_that_was_broken_off() -> None:
    run = coordinator(dist.HashStore())
    run.enter(PUBLISHING)
    assert run.break_off(BackgroundSaveError("closed"))
    with pytest.raises(BackgroundSaveError, match="closed"):
        run.check()


def test_a_rank_knows_that_nothing_is_published_until_it_hands_over_its_results() -> None:
    early, late = run_of(1), run_of(1)
    early.enter(WRITING)
    assert early.break_off(BackgroundSaveError("closed"))
    with pytest.raises(BackgroundSaveError):
        early.enter(HANDED)
    late.enter(HANDED)
    assert not late.break_off(BackgroundSaveError("closed"))


# -- the watch --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hash", "tcp", "file"])
def test_a_watch_reads_what_there_is_and_waits_for_nothing(tmp_path: Path, kind: str) -> None:
    if kind == "hash":
        store = dist.HashStore()
    elif kind == "tcp":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    else:
        store = dist.FileStore(str(tmp_path / "store"), 1)
    watch = RankWatch(dist.PrefixStore("saver", store), 0, 1, Liveness(failure_secs=600, patience_secs=600))
    run = SaveRun(1, watch, rank=0, size=1, progress=lambda: None, path="p", step=1)
    before = set(threading.enumerate())
    try:
        watch._read_outcome(run)
        assert run.outcome is None
        lost = Outcome.of(RankLostError("a rank is lost", rank=0), rank=0, phase=WRITING)
        watch.begin(run)
        run.put_reports([(lost, False), (Outcome(State.PUBLISHED), False)])
        watch.hurry()
        assert run.changed.wait(60)
        assert run.outcome == lost, "the first holds"
    finally:
        watch.close()
    assert set(threading.enumerate()) <= before
    watch._store.delete_key("1/outcome")
    watch._read_outcome(run)
    assert run.outcome == lost


@pytest.mark.parametrize("value", ["{", "[1]", "null", '["x", {}, 3, 4, 5, 6]', "\xff"])
@pytest.mark.parametrize("key", ["beat/1", "1/outcome"])
def test_a_value_that_nobody_wrote_is_as_good_as_no_answer_and_ends_no_watch(key: str, value: str) -> None:
    store = dist.PrefixStore("saver", dist.HashStore())
    store.set("beat/1", Beat(1, 1, WRITING).encode())
    store.set(key, value)
    watch = RankWatch(store, 0, 2, Liveness(failure_secs=0.4, patience_secs=600))
    try:
        watch.begin(SaveRun(1, watch, rank=0, size=2, progress=lambda: None, path="p", step=1))
        deadline = time.monotonic() + 60
        while watch.silent_secs < 0.5:  # ten beats without an answer that says something
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert watch._thread.is_alive()
    finally:
        watch.close()
