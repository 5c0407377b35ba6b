"""Leases of staged memory: found by address, given back once, from wherever."""

from __future__ import annotations

import gc
import os

import torch

from dcp_engine import leases
from dcp_engine.leases import Lease, SplitRun, is_staged, split_run_at
from dcp_engine.staged_memory import leases_of, writing


def lease_on(tensor: torch.Tensor, said: list[str]) -> Lease:
    return Lease(
        tensor.data_ptr(),
        tensor.nbytes,
        owner="a test",
        on_writing=lambda: said.append("writing"),
        on_release=lambda: said.append("released"),
        check=lambda: said.append("checked"),
    )


def test_any_tensor_in_the_memory_finds_its_lease_and_no_other_one() -> None:
    memory, other = torch.zeros(100), torch.zeros(100)
    said: list[str] = []
    lease = lease_on(memory, said)
    assert leases_of([other, "text", memory[:0], memory[99:]]) == [lease]
    assert leases_of([other]) == []
    lease.release()
    assert leases_of([memory]) == []


def test_a_byte_that_came_apart_is_found_by_its_address_while_the_lease_lives() -> None:
    memory, said = torch.zeros(100, dtype=torch.uint8), []  # type: ignore[var-annotated]
    start = memory.data_ptr()
    runs = (SplitRun(start + 60, 20, 17), SplitRun(start + 16, 8, 18))
    lease = Lease(
        start, 100, owner="a test", on_writing=lambda: None, on_release=lambda: said.append("released"), check=lambda: None, split=runs
    )
    codes = [None if (run := split_run_at(start + place)) is None else run.code for place in range(-1, 101)]
    assert codes == [None] * 17 + [18] * 8 + [None] * 36 + [17] * 20 + [None] * 21
    lease.release()
    assert split_run_at(start + 60) is None
    assert not leases._SPLIT


def test_writing_checks_and_then_releases_once() -> None:
    memory = torch.zeros(100)
    said: list[str] = []
    lease = lease_on(memory, said)
    with writing([memory]):
        assert said == ["writing"]
    lease.release()
    lease.begin_writing()
    assert said == ["writing", "checked", "released"]


def test_a_destructor_may_release_while_this_thread_looks_for_leases() -> None:
    memory, said = torch.zeros(100), []  # type: ignore[var-annotated]
    lease = lease_on(memory, said)

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            lease.abandon()

    with leases._LOCK, lease._lock:  # as the collector may run at any allocation, under any lock of this thread
        Cycle()
        gc.collect()
    assert said == ["released"]


def test_a_forked_process_gives_nothing_back_and_finds_nothing() -> None:
    memory, said = torch.zeros(100), []  # type: ignore[var-annotated]
    lease = lease_on(memory, said)
    child = os.fork()
    if child == 0:
        lease.abandon()
        os._exit(0 if said == [] and leases_of([memory]) == [] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert leases_of([memory]) == [lease]
    lease.release()


def test_a_run_is_staged_as_long_as_a_lease_holds_all_of_it() -> None:
    lease = Lease(4096, 100, owner="a test", on_writing=nothing, on_release=nothing, check=nothing)
    assert [is_staged(*run) for run in ((4096, 100), (4100, 10), (4095, 10), (4190, 11))] == [True, True, False, False]
    lease.release()
    assert not is_staged(4096, 100)


def nothing() -> None:
    """What happens then is of no interest."""
