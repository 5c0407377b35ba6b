"""The quick size of the campaign's part about ranks, and that its judgement finds broken promises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from faults.campaign import ranks as part
from faults.campaign.ranks import Answer, Point, all_points, chosen, judged

from dcp_engine import ShardWriter

SEED = 20261129
FAILED = ("RankLostError", 1, "writing", "no sign of life")


def test_all_combinations_are_there_and_the_quick_choice_has_every_fault_and_phase() -> None:
    points = all_points()
    assert len(points) == len(set(points)) == 213
    quick = chosen(full=False, seed=SEED)
    assert len(quick) == part.NUM_QUICK
    assert {point.fault for point in quick} == set(part.FAULTS)
    assert {point.phase for point in quick} == set(part.PHASES)
    assert chosen(full=False, seed=SEED) == quick


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_rank_that_fails_ends_a_save_alike_on_all_others() -> None:
    outcome = part.run(full=False, seed=SEED)
    assert outcome.bad == ()
    assert outcome.points >= part.NUM_QUICK


# -- the harness finds what is wrong ----------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> str:
    for step in (1, 3):
        dcp.save({"w": torch.ones(3)}, storage_writer=ShardWriter(tmp_path / f"step-{step:08d}"))
    return str(tmp_path)


def judge(root: str, *answers: Answer | None, fault: str = "stop") -> list[str]:
    return judged(Point(len(answers), 1, "write", fault), list(answers), root)[0]


def test_one_error_on_all_ranks_and_nothing_published_is_right(root: str) -> None:
    answer = Answer(FAILED, 3.0, True, None)
    assert judge(root, answer, answer) == []
    assert judge(root, answer, None, fault="kill") == []


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([Answer(FAILED, 3.0, True, None), Answer(None, 3.0, True, None)], "ranks disagree"),
        ([Answer(None, 3.0, True, None)] * 2, "are published after"),
        ([Answer(("RankLostError", 0, "writing", ""), 3.0, True, None)] * 2, "names rank 0"),
        ([Answer(FAILED, 99.0, True, None)] * 2, "was told after 99 s"),
        ([Answer(FAILED, 3.0, False, None)] * 2, "holds a buffer"),
        ([Answer(FAILED, 3.0, True, "no")] * 2, "the next save failed"),
        ([Answer(FAILED, 3.0, True, None), None], "are gone"),
    ],
)
def test_every_broken_promise_is_found(root: str, answers: list[Answer | None], text: str) -> None:
    assert any(text in found for found in judge(root, *answers))


def test_a_damaged_checkpoint_is_found(root: str) -> None:
    shard = next(Path(root, "step-00000003").glob("*.shard"))
    content = bytearray(shard.read_bytes())
    content[4096] ^= 1
    shard.write_bytes(content)
    answer = Answer(FAILED, 3.0, True, None)
    assert any("step 3 is damaged" in found for found in judge(root, answer, answer))
