"""The figures of saves beside training, from results that are known."""

from __future__ import annotations

import torch

from benchmarks.results import CaseResult, Claim, Role, SystemResult
from benchmarks.rows.f7_async import Async, structure_at
from benchmarks.rows.f8_gpu import Gpu
from benchmarks.state import State


def result(name: str, role: Role, secs: float, **facts: float) -> SystemResult:
    return SystemResult(name=name, role=role, secs={0: secs}, facts={fact: {0: value} for fact, value in facts.items()})


def measured(claims: list[Claim]) -> dict[str, tuple[float | None, bool | None]]:
    return {claim.text: (claim.measured, claim.holds) for claim in claims}


def test_f7_holds_the_call_against_a_memcpy_and_the_loss_against_the_best_of_dcp() -> None:
    beside = CaseResult(
        name="beside",
        nbytes=0,
        systems=[
            result("dcp-engine thread", "ours", 0.5, blocked_secs=0.5625),
            result("dcp-engine process", "ours", 0.25, blocked_secs=0.75),
            result("DCP thread", "dcp", 2.0, blocked_secs=0.3),
            result("DCP process", "dcp", 1.0, blocked_secs=0.3),
            result("memcpy, 1 thread, warm", "limit", 0.5),
        ],
    )
    grown = {"memory_growth_bytes": 4e6, "shared_growth_bytes": 0.0, "threads_growth": 1.0, "descriptors_growth": 0.0}
    many = CaseResult(name="many", nbytes=0, systems=[result("dcp-engine thread", "ours", 9.0, **grown)])
    claims = Async().claims([beside, many])
    assert measured(claims) == {
        "thread: the call, times a one-thread memcpy": (1.125, True),
        "process: the call, times a one-thread memcpy": (1.5, False),
        "training time lost, share of DCP's best": (0.25, True),
        "thread, 30 saves: MB of resident memory grown": (4.0, True),
        "thread, 30 saves: MB of shared memory grown": (0.0, True),
        "thread, 30 saves: threads grown": (1.0, False),
        "thread, 30 saves: descriptors grown": (0.0, True),
        "process, 30 saves: MB of resident memory grown": (None, None),
        "process, 30 saves: MB of shared memory grown": (None, None),
        "process, 30 saves: threads grown": (None, None),
        "process, 30 saves: descriptors grown": (None, None),
    }
    assert claims[2].detail == "dcp-engine process; DCP process"


def test_the_structure_changes_twice_and_holds_all_bytes_again_in_the_end() -> None:
    flat = {str(number): torch.zeros(4, 2) for number in range(10)}
    state = State({"state": flat}, flat)
    kinds = [structure_at(state, number) for number in (0, 9, 10, 19, 20, 29)]
    assert [len(kind.flat) for kind in kinds] == [10, 10, 4, 4, 20, 20]
    assert [kind.nbytes for kind in kinds] == [320, 320, 128, 128, 320, 320]
    assert kinds[4].flat["0.second"].data_ptr() == flat["0"].data_ptr() + 16
    assert kinds[4].nested == {"state": kinds[4].flat}


def test_f8_holds_the_call_the_copy_and_the_steps_against_their_bounds() -> None:
    copy = CaseResult(name="copy", nbytes=0, systems=[result("dcp-engine stager", "ours", 0.2), result("pinned copy", "limit", 0.19)])
    beside = CaseResult(
        name="beside",
        nbytes=0,
        systems=[
            result("dcp-engine thread", "ours", 0.1, blocked_secs=0.008, slowdown=0.03),
            result("DCP thread", "dcp", 4.0, blocked_secs=4.0, slowdown=0.5),
        ],
    )
    assert measured(Gpu().claims([copy, beside])) == {
        "the call blocks, ms": (8.0, True),
        "copy: share of a pinned copy's bandwidth": (0.95, True),
        "a step beside the save, slower by": (0.03, False),
        "training time lost, share of DCP's best": (0.025, True),
    }
    assert Gpu().claims([]) == []
