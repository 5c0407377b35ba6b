"""The pool of rank processes itself: what it promises to every test that runs on it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankFailure, RankPool
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


@dataclass(frozen=True)
class Pair:
    left: int
    right: int


class UnpicklableError(Exception):
    def __init__(self, left: str, right: str) -> None:
        super().__init__(left)
        self.right = threading.Lock()


def summed(value: int) -> tuple[int, int, int]:
    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), int(tensor.item())


def swapped(pair: Pair, *, add: int) -> Pair:
    return Pair(pair.right + add, pair.left + add)


def process_id() -> int:
    return os.getpid()


def raise_on_rank_1(error: BaseException) -> None:
    if dist.get_rank() == 1:
        raise error
    dist.barrier()


def raise_unpicklable() -> None:
    raise UnpicklableError("first part", "second part")


def signal_itself(number: int) -> None:
    os.kill(os.getpid(), number)


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        signal_itself(signal.SIGKILL)
    dist.barrier()


def sleep_for_ever_in_a_function_with_this_name() -> None:
    time.sleep(1_000)


def warn(message: str) -> None:
    warnings.warn(message, stacklevel=1)


def lose_an_error_in_a_thread() -> None:
    thread = threading.Thread(target=warn, args=("lost",))
    thread.start()
    thread.join()


def leave_a_mess(directory: str) -> None:
    os.chdir(directory)
    os.environ["LEFT_BEHIND"] = "1"
    warnings.simplefilter("ignore")
    torch.manual_seed(7)


def surroundings() -> tuple[str, bool, int, int]:
    return os.getcwd(), "LEFT_BEHIND" in os.environ, torch.initial_seed(), torch.get_num_threads()


def start_a_sleeper(path: str) -> None:
    import subprocess

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    Path(path).write_text(str(child.pid))
    os._exit(3)


def assert_three(value: int) -> None:
    assert value == 3


def late_on_rank_1() -> int:
    """Rank 0 returns long before rank 1 uses the group."""
    group = dist.new_group([1])
    if dist.get_rank() == 1:
        time.sleep(0.5)
        dist.barrier(group)
    return dist.get_rank()


def mesh_of_a_computed_dtensor_is_this_runs() -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = distribute_tensor(torch.arange(12.0), mesh, [Shard(0)])
    return (value + value).device_mesh is mesh


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 4])
def test_every_rank_runs_in_a_fresh_group_of_the_asked_size(ranks: RankPool, world_size: int) -> None:
    total = sum(10 + rank for rank in range(world_size))
    assert ranks.run(world_size, summed, 10) == [(rank, world_size, total) for rank in range(world_size)]


def test_classes_of_a_test_module_travel_both_ways(ranks: RankPool) -> None:
    assert ranks.run(2, swapped, Pair(1, 2), add=10) == [Pair(12, 11), Pair(12, 11)]


def test_processes_live_on_from_one_run_to_the_next(ranks: RankPool) -> None:
    assert ranks.run(2, process_id) == ranks.run(2, process_id)


def test_an_exception_arrives_with_its_rank_its_type_and_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 3: .*in raise_on_rank_1.*KeyError: 'weight'") as caught:
        ranks.run(3, raise_on_rank_1, KeyError("weight"))
    assert next(iter(caught.value.failures)) == 1
    assert isinstance(caught.value.failures[1], KeyError)


def test_peers_of_a_failed_rank_are_told_at_once_and_the_pool_goes_on(ranks: RankPool) -> None:
    before = ranks.run(3, process_id)
    with pytest.raises(RankFailure) as caught:
        ranks.run(3, raise_on_rank_1, ValueError("x"))
    assert {rank: type(error) for rank, error in caught.value.failures.items()} == {1: ValueError, 0: RuntimeError, 2: RuntimeError}
    assert ranks.run(3, process_id) == before


@pytest.mark.parametrize("error", [CheckpointException("save", {}), SystemExit(4), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_base_exceptions_are_failures_like_any_other(ranks: RankPool, error: BaseException) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, raise_on_rank_1, error)
    assert type(caught.value.failures[1]) is type(error)


def test_an_exception_that_cannot_be_pickled_arrives_as_text(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"UnpicklableError: first part") as caught:
        ranks.run(1, raise_unpicklable)
    assert isinstance(caught.value.failures[0], str)


def test_a_killed_rank_is_named_with_its_signal_and_replaced(ranks: RankPool) -> None:
    before = ranks.run(2, process_id)
    with pytest.raises(RankFailure, match=r"rank 1 of 2: its process was killed by SIGKILL"):
        ranks.run(2, die_on_rank_1)
    after = ranks.run(2, process_id)
    assert not set(before) & set(after)


def test_a_hang_ends_with_the_stacks_of_the_rank(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 0 of 1: no answer after 1 s.*sleep_for_ever_in_a_function_with_this_name"):
        ranks.run(1, sleep_for_ever_in_a_function_with_this_name, timeout_secs=1)
    assert ranks.run(1, summed, 5) == [(0, 1, 5)]


def test_a_stopped_rank_is_killed_too(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 0 of 1: no answer after 1 s.*does not answer signals"):
        ranks.run(1, signal_itself, signal.SIGSTOP, timeout_secs=1)


def test_an_exit_is_reported_with_its_status_and_what_the_rank_started_dies_with_it(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 0 of 1: its process ended with exit status 3"):
        ranks.run(1, start_a_sleeper, str(tmp_path / "pid"))
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    deadline = time.monotonic() + 30
    while status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_warning_in_a_rank_is_an_error(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="UserWarning: careful"):
        ranks.run(1, warn, "careful")


def test_an_unavoidable_warning_of_torch_is_none(ranks: RankPool) -> None:
    text = "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to save in a single process."
    assert ranks.run(1, warn, text) == [None]


def test_an_error_that_a_thread_lost_fails_the_run(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"(?s)StrayError.*UserWarning: lost"):
        ranks.run(1, lose_an_error_in_a_thread)


def test_a_run_leaves_nothing_to_the_next_one(ranks: RankPool, tmp_path: Path) -> None:
    before = ranks.run(1, surroundings)
    ranks.run(1, leave_a_mess, str(tmp_path))
    assert ranks.run(1, surroundings) == before
    with pytest.raises(RankFailure, match="UserWarning"):
        ranks.run(1, warn, "still an error")
    assert before[0][1:] == (False, 0, 1)


def test_dtensors_do_not_meet_the_mesh_of_an_earlier_run(ranks: RankPool) -> None:
    for _ in range(2):
        assert ranks.run(2, mesh_of_a_computed_dtensor_is_this_runs) == [True, True]


def test_the_values_of_a_failed_assert_are_shown(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"(?s)AssertionError.*value = 4"):
        ranks.run(1, assert_three, 4)


def test_a_rank_that_returned_keeps_its_group_until_all_have(ranks: RankPool) -> None:
    assert ranks.run(2, late_on_rank_1) == [0, 1]


def test_a_function_that_no_process_could_find_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="<lambda> is not defined at the top level"):
        ranks.run(1, lambda: None)


def test_more_ranks_than_the_pool_has_are_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="this pool has 1 to 5 ranks"):
        ranks.run(6, summed, 1)
