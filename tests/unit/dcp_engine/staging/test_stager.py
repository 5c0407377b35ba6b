"""A staged state: equal to its source when it was staged, and deaf to it afterwards."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import resource
import threading
from collections import OrderedDict, UserDict, namedtuple
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.late_copies import LateCopies
from support.values import DTYPES, full, same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcp_engine import BalancedSavePlanner, ShardWriter, verify_checkpoint
from dcp_engine.errors import (
    ClosedError,
    InvalidOptionError,
    StagedDataChangedError,
    StagingError,
    StagingMemoryError,
    StagingTimeoutError,
    UnsupportedTensorError,
    UsageError,
)
from dcp_engine.staging import BufferState, DoubleBufferStager, arena
from dcp_engine.staging.arena import available_bytes
from dcp_engine.staging.handed_out import StagedState

FREE = [BufferState.FREE, BufferState.FREE]


def states(stager: DoubleBufferStager) -> list[BufferState]:
    return [buffer.state for buffer in stager.buffers]


@pytest.mark.parametrize("memory", ["plain", "shared"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_out_as_it_was_and_in_memory_of_its_own(dtype: torch.dtype, memory: str) -> None:
    state = {"dense": full("dense", (5, 7), dtype), "scalar": full("scalar", (), dtype), "empty": full("empty", (0, 3), dtype)}
    staged = DoubleBufferStager(memory=memory).stage(state)
    assert isinstance(staged, dict)
    for key, tensor in state.items():
        assert same(staged[key], tensor)
        assert tensor.numel() == 0 or staged[key].data_ptr() != tensor.data_ptr()


def test_what_changes_afterwards_is_not_in_the_staged_state() -> None:
    parameter = torch.nn.Parameter(full("parameter", (100,)))
    state: dict[str, Any] = {
        "parameter": parameter,
        "step": torch.tensor(3.0),
        "array": np.arange(4),
        "list": [1, {"inner": [2]}],
        "bytes": bytearray(b"abc"),
    }
    staged = DoubleBufferStager().stage(state)
    with torch.no_grad():
        parameter.zero_()
    state["step"] += 1
    state["array"] += 1
    state["list"][1]["inner"].append(3)
    state["bytes"][0] = 0
    assert same(staged["parameter"], full("parameter", (100,)))
    assert not staged["parameter"].requires_grad
    assert staged["step"].item() == 3
    assert staged["array"].tolist() == [0, 1, 2, 3]
    assert staged["list"] == [1, {"inner": [2]}]
    assert staged["bytes"] == bytearray(b"abc")


Point = namedtuple("Point", "x y")


@dataclass
class Holder:
    tensor: torch.Tensor = field(default_factory=lambda: torch.ones(2))


def test_containers_keep_their_types_and_immutable_values_are_shared() -> None:
    text = "a text that is long enough to be an object of its own"
    state = {
        "ordered": OrderedDict(a=torch.ones(1)),
        "point": Point(torch.zeros(2), text),
        "tuple": (1, [torch.ones(3)]),
        "holder": Holder(),
    }
    staged = DoubleBufferStager().stage(state)
    assert type(staged["ordered"]) is OrderedDict
    assert type(staged["point"]) is Point
    assert staged["point"].y is text
    assert staged["tuple"][0] == 1
    assert staged["holder"].tensor.data_ptr() != state["holder"].tensor.data_ptr()


def test_ties_and_views_stay_what_they_are_to_each_other() -> None:
    base = torch.arange(100.0)
    state = {"whole": base, "tie": base.view(10, 10), "part": base[10:20], "other": torch.arange(100.0)}
    staged = DoubleBufferStager().stage(state)
    assert staged["whole"].data_ptr() == staged["tie"].data_ptr() != staged["other"].data_ptr()
    assert staged["part"].data_ptr() == staged["whole"].data_ptr() + 40
    assert staged["part"].tolist() == [float(value) for value in range(10, 20)]


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    base = torch.arange(400).to(draw(st.sampled_from([torch.int16, torch.float64, torch.complex64])))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    view = torch.as_strided(base, shape, [draw(st.integers(0, 12)) for _ in shape], draw(st.integers(0, 200)))
    return view.conj() if view.is_complex() and draw(st.booleans()) else view


@given(st.lists(views(), max_size=8))
def test_any_strides_come_out_with_their_values(found: list[torch.Tensor]) -> None:
    staged = DoubleBufferStager().stage({str(index): tensor for index, tensor in enumerate(found)})
    for index, tensor in enumerate(found):
        assert torch.equal(staged[str(index)], tensor)


def test_shared_memory_between_arrays_that_torch_takes_for_separate_storages() -> None:
    array = np.arange(20, dtype=np.float32)
    staged = DoubleBufferStager().stage({"all": torch.from_numpy(array), "tail": torch.from_numpy(array[5:])})
    assert staged["all"].tolist() == list(range(20))
    assert staged["tail"].tolist() == list(range(5, 20))


def test_a_dtensor_can_be_pickled_wherever_in_the_buffer_it_lies() -> None:
    # torch takes a wrapper whose local tensor does not begin its storage for one with memory of its own, and reads from address 64.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        state = {"first": torch.ones(100), "second": DTensor.from_local(full("second", (4, 3)), mesh, [Shard(0)])}
        staged = DoubleBufferStager(memory="shared").stage(state)
        assert staged["second"].to_local().storage_offset() > 0
        arrived = ForkingPickler.loads(ForkingPickler.dumps(staged["second"]))
        assert torch.equal(arrived.to_local(), full("second", (4, 3)))
        assert torch.equal(staged["second"].full_tensor(), full("second", (4, 3)))
    finally:
        dist.destroy_process_group()


# -- buffers ----------------------------------------------------------------------------------------------------------------


def test_the_writer_gives_the_buffer_back_though_somebody_keeps_the_staged_state(tmp_path: Path) -> None:
    stager, planner = DoubleBufferStager(), BalancedSavePlanner()
    state = {"w": full("w", (1000,))}
    for step in range(5):
        future = dcp.async_save(state, storage_writer=ShardWriter(tmp_path / str(step)), planner=planner, async_stager=stager)
        future.result()
        assert states(stager) == FREE
    addresses = {buffer.num_bytes for buffer in stager.buffers}
    assert addresses == {0, 4096}, "the first buffer was used again, the second never needed"
    verify_checkpoint(tmp_path / "4")


def test_a_failed_save_frees_its_buffer_though_its_future_is_kept(tmp_path: Path) -> None:
    stager = DoubleBufferStager(wait_secs=0)
    kept = []
    for _ in range(4):
        kept.append(
            dcp.async_save(
                {"w": torch.ones(3)}, storage_writer=FailingWriter(tmp_path / "a"), planner=BalancedSavePlanner(), async_stager=stager
            )
        )
        with pytest.raises(BaseException, match="the disk is gone"):
            kept[-1].result()
    assert states(stager) == FREE


class FailingWriter(ShardWriter):
    def _write_files(self, *_: Any) -> Any:
        raise OSError("the disk is gone")


def test_a_foreign_writer_frees_the_buffer_by_letting_go_or_by_tracking(tmp_path: Path) -> None:
    stager, planner = DoubleBufferStager(), dcp.DefaultSavePlanner()
    writer = dcp.FileSystemWriter(tmp_path / "a")
    dcp.async_save({"w": torch.ones(3)}, storage_writer=writer, async_stager=stager).result()
    gc.collect()
    assert states(stager) == FREE
    future = dcp.async_save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "b"), planner=planner, async_stager=stager)
    assert stager.track(future) is future
    future.result()
    assert states(stager) == FREE


@pytest.mark.parametrize("value", [None, 3, [torch.optim.SGD([torch.ones(1)], lr=0.1)], torch.nn.Linear(1, 1)])
def test_what_is_no_optimizer_cannot_be_protected(value: Any) -> None:
    with pytest.raises(InvalidOptionError, match=r"this is no optimizer to protect; expected a torch\.optim\.Optimizer"):
        DoubleBufferStager().protect(value)


@pytest.mark.parametrize("value", [None, 3, {"w": torch.ones(1)}])
def test_what_is_no_save_cannot_be_tracked(value: Any) -> None:
    with pytest.raises(InvalidOptionError, match=r"this is no save to track; expected what dcp\.async_save returned, or a future"):
        DoubleBufferStager().track(value)


def test_a_held_buffer_makes_the_third_staging_wait_and_fail_with_a_name() -> None:
    stager = DoubleBufferStager(wait_secs=0.05)
    held = [stager.stage({"w": torch.ones(3)}), stager.stage({"w": torch.ones(3)})]
    with pytest.raises(StagingTimeoutError, match=r"staged for .* by staged state 1; staged for .* by staged state 2"):
        stager.stage({"w": torch.ones(3)})
    del held[0]
    gc.collect()
    stager.stage({"w": torch.ones(3)})


def test_memory_descriptors_and_threads_stay_the_same_over_many_saves_of_changing_structure() -> None:
    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    stager = DoubleBufferStager(memory="shared", threads=2)
    sizes = []
    for number in range(30):
        count = 8 if 10 <= number < 20 else 2
        staged = stager.stage({str(index): torch.full((2**18,), float(number)) for index in range(count)})
        assert staged["1"][-1].item() == number
        stager.release(staged)
        sizes.append((stager.buffers[0].num_bytes, *used()))
    assert {size for size, _, _ in sizes[:10]} == {2**21}
    assert {size for size, _, _ in sizes[10:20]} == {2**23}
    assert {size for size, _, _ in sizes[20:]} == {2**21}, "four times what is needed is not kept"
    assert {usage[1:] for usage in sizes[10:]} == {sizes[10][1:]}, "with the helping threads that large states need"
    before = len(os.listdir("/proc/self/fd"))
    stager.close()
    del staged
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before


def test_a_report_says_what_was_done() -> None:
    stager = DoubleBufferStager()
    first = stager.stage({"a": torch.ones(4), "b": torch.ones(4)})
    report = stager.last_report
    assert report is not None
    assert (report.num_bytes, report.num_tensors, report.num_slots, report.replanned) == (128, 2, 2, True)
    stager.release(first)
    weight = torch.ones(4)
    contents = []
    for value in (0.0, 0.0, 1.0):
        weight += value
        stager.release(stager.stage({"w": weight}))
        contents.append(stager.last_report.content.result())
    assert contents[0] == contents[1] != contents[2]
    assert stager.last_report.replanned is False


def test_tracking_a_failed_staging_leaves_the_state_before_it_alone() -> None:
    stager = DoubleBufferStager()
    held = stager.stage({"w": torch.ones(3)})
    with pytest.raises(UnsupportedTensorError):
        stager.stage({"w": torch.empty(3, device="meta")})
    failed: Future[None] = Future()
    stager.track(failed)
    failed.set_result(None)
    assert states(stager) == [BufferState.STAGED, BufferState.FREE]
    stager.release(held)
    assert states(stager) == FREE


def test_a_future_of_a_staged_state_gives_its_buffer_back_when_it_comes() -> None:
    stager = DoubleBufferStager(memory="shared")
    staged = stager.stage({"w": torch.ones(3)})
    coming: Future[Any] = Future()
    stager.release(coming)
    assert states(stager) == [BufferState.STAGED, BufferState.FREE]
    coming.set_result(staged)
    assert states(stager) == FREE


def test_a_state_that_holds_itself_is_given_back_like_any_other() -> None:
    state: dict[str, Any] = {"w": torch.ones(3), "list": []}
    state["list"] += [state["list"], state]
    stager = DoubleBufferStager(memory="shared")
    staged = stager.stage(state)
    assert staged["list"][0] is staged["list"]
    stager.release(staged)
    assert states(stager) == FREE


def test_a_forked_process_neither_holds_nor_frees_staged_memory() -> None:
    stager = DoubleBufferStager()
    staged = stager.stage({"w": torch.ones(3)})
    child = os.fork()
    if child == 0:
        del staged
        gc.collect()
        os._exit(0 if states(stager)[0] is BufferState.STAGED else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert staged["w"].tolist() == [1, 1, 1]


def test_giving_a_state_back_twice_leaves_the_next_one_in_its_memory_alone() -> None:
    stager = DoubleBufferStager()
    first = stager.stage({"w": torch.ones(3)})
    stager.release(first)
    second = stager.stage({"w": torch.zeros(3)})
    assert second["w"].data_ptr() == first["w"].data_ptr()
    stager.release(first)
    assert states(stager) == [BufferState.STAGED, BufferState.FREE]
    assert second["w"].tolist() == [0, 0, 0]


# -- what was written is what was staged --------------------------------------------------------------------------------------


class MeddlingPlanner(BalancedSavePlanner):
    """Writes to the staged state while it is saved."""

    def resolve_data(self, write_item: Any) -> Any:
        value = super().resolve_data(write_item)
        if isinstance(value, torch.Tensor):
            value.add_(1)
        return value


@pytest.mark.parametrize("thoroughness", ["sample", "full"])
def test_a_staged_tensor_that_changes_while_it_is_written_fails_the_save(tmp_path: Path, thoroughness: str) -> None:
    stager = DoubleBufferStager(verify_staging=thoroughness)
    future = dcp.async_save(
        {"model": {"w": torch.ones(50_000)}}, storage_writer=ShardWriter(tmp_path / "a"), planner=MeddlingPlanner(), async_stager=stager
    )
    with pytest.raises(dcp.CheckpointException) as caught:
        future.result()
    error = caught.value.failures[0][0]
    assert isinstance(error, StagedDataChangedError)
    assert error.tensor == "model.w"
    assert not (tmp_path / "a").exists()
    assert states(stager) == FREE


# -- bad input ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "vram"}, "unknown memory"),
        ({"budget_bytes": 0}, "budget_bytes is no size"),
        ({"budget_bytes": True}, "budget_bytes is no size"),
        ({"wait_secs": -1}, "wait_secs is no duration"),
        ({"wait_secs": float("nan")}, "wait_secs is no duration"),
        ({"verify_staging": "some"}, "unknown verify_staging"),
        ({"threads": 0}, "threads is out of range"),
        ({"split_on_device": 1}, "split_on_device is not a bool"),
    ],
)
def test_options_out_of_range_are_refused_when_the_stager_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        DoubleBufferStager(**options)


def test_tensors_of_the_host_stay_whole_with_split_on_device() -> None:
    stager = DoubleBufferStager(split_on_device=True, memory="plain")
    state = {"w": torch.randn(1_000_000)}
    staged = stager.stage(state, may_split=True)
    assert isinstance(staged, dict)
    assert torch.equal(staged["w"], state["w"])
    stager.close()


def test_pinned_memory_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidOptionError, match="pinned memory needs CUDA"):
        DoubleBufferStager(memory="pinned")


def test_a_budget_that_is_too_small_is_refused_with_the_figure_that_is_needed() -> None:
    stager = DoubleBufferStager(budget_bytes=1000)
    with pytest.raises(StagingMemoryError, match="at least 2,048") as caught:
        stager.stage({"w": torch.ones(256)})
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (2048, 1000)
    stager.stage({"w": torch.ones(112)})


@pytest.mark.parametrize("memory", ["plain", "shared"])
def test_a_state_beyond_the_machines_memory_is_refused_before_anything_is_taken(memory: str, tmp_path: Path) -> None:
    there = available_bytes()
    assert there is not None
    with open(tmp_path / "sparse", "w+b") as file:
        file.truncate(2 * there)
        huge = torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), 2 * there), dtype=np.uint8))
    stager = DoubleBufferStager(memory=memory)
    with pytest.raises(StagingMemoryError) as caught:
        stager.stage({"huge": huge})
    assert caught.value.needed_bytes >= 2 * there
    assert states(stager) == FREE


def freed() -> torch.Tensor:
    tensor = torch.ones(300)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged),
        freed(),
    ],
    ids=["sparse", "meta", "nested", "freed"],
)
def test_tensors_that_cannot_be_saved_are_refused_by_name(value: torch.Tensor) -> None:
    with pytest.raises(UnsupportedTensorError) as caught:
        DoubleBufferStager().stage({"model": {"odd": value}})
    assert caught.value.tensor == "model.odd"


def test_a_value_that_cannot_be_copied_is_refused_by_name() -> None:
    stager = DoubleBufferStager()
    with pytest.raises(StagingError) as caught:
        stager.stage({"fine": 1, "nested": [{"lock": threading.Lock()}]})
    assert caught.value.tensor == "nested.0.lock"
    assert states(stager) == FREE


def test_a_state_that_is_nested_too_deeply_is_refused_at_once() -> None:
    state: dict[str, Any] = {}
    for _ in range(5000):
        state = {"inner": state}
    with pytest.raises(StagingError, match="nested too deeply"):
        DoubleBufferStager().stage(state)


class BrokenMapping(UserDict[str, Any]):
    def items(self) -> Any:
        raise OSError("the table is gone")


def test_whatever_a_class_of_the_state_raises_is_a_typed_error() -> None:
    with pytest.raises(StagingError, match="OSError: the table is gone"):
        DoubleBufferStager().stage({"broken": BrokenMapping()})


@pytest.mark.parametrize(("ranks_here", "fits"), [("1", True), ("4", False)])
def test_both_buffers_of_all_ranks_of_the_machine_must_fit(monkeypatch: pytest.MonkeyPatch, ranks_here: str, fits: bool) -> None:
    monkeypatch.setattr(arena, "available_bytes", lambda: 66 * 2**20)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
    stager = DoubleBufferStager()
    state = {"w": torch.ones(2**17)}  # twice that is 1 MiB, of the 2 MiB beyond the reserve
    if fits:
        stager.stage(state)
        return
    with pytest.raises(StagingMemoryError) as caught:
        stager.stage(state)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (2**20, 2**19)
    DoubleBufferStager(budget_bytes=2**20).stage(state)


def test_shared_memory_that_would_hold_one_buffer_but_not_two_is_refused_at_the_first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena.os, "statvfs", lambda _: SimpleNamespace(f_bavail=3 * 2**18, f_frsize=1))
    with pytest.raises(StagingMemoryError, match=r"shared memory \(/dev/shm\)") as caught:
        DoubleBufferStager(memory="shared").stage({"w": torch.ones(2**17)})
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (2**20, 3 * 2**18)


@pytest.mark.parametrize(("limit", "size"), [("RLIMIT_FSIZE", 2**16), ("RLIMIT_NOFILE", 0)])
def test_limits_of_the_process_are_a_typed_error(limit: str, size: int) -> None:
    stager = DoubleBufferStager(memory="shared")
    which = getattr(resource, limit)
    before = resource.getrlimit(which)
    resource.setrlimit(which, (size, before[1]))
    try:
        with pytest.raises(StagingMemoryError):
            stager.stage({"w": torch.ones(2**17)})
    finally:
        resource.setrlimit(which, before)
        for left in Path("/dev/shm").glob(f"torch_{os.getpid()}_*"):  # torch forgets the name of what it could not make long enough
            left.unlink()
    assert states(stager) == FREE
    stager.stage({"w": torch.ones(2**17)})


def test_a_second_thread_is_refused_while_the_first_stages() -> None:
    stager = DoubleBufferStager(wait_secs=5)
    held = [stager.stage({"w": torch.ones(1)}), stager.stage({"w": torch.ones(1)})]
    waiting = threading.Thread(target=lambda: stager.stage({"w": torch.ones(1)}))
    waiting.start()
    while not stager._in_stage.locked():
        pass
    with pytest.raises(UsageError, match="in use by another thread"):
        stager.stage({"w": torch.ones(1)})
    for one in held:
        stager.release(one)
    waiting.join()


def test_a_closed_stager_is_refused_and_closing_twice_is_fine() -> None:
    stager = DoubleBufferStager()
    staged = stager.stage({"w": torch.ones(3)})
    stager.close()
    stager.close()
    with pytest.raises(ClosedError):
        stager.stage({"w": torch.ones(3)})
    assert staged["w"].tolist() == [1, 1, 1], "what was handed out lives as long as its holder"


def test_closing_waits_for_a_state_that_another_thread_stages() -> None:
    stager = DoubleBufferStager()
    reached, go_on = threading.Event(), threading.Event()

    class Slow:
        def __deepcopy__(self, _: object) -> Slow:
            reached.set()
            assert go_on.wait(30)
            return self

    found: list[Any] = []
    stages = threading.Thread(target=lambda: found.append(stager.stage({"w": torch.ones(2**21), "slow": Slow()})))
    stages.start()
    assert reached.wait(30)
    closes = threading.Thread(target=stager.close)
    closes.start()
    while not stager._closed:
        pass
    with pytest.raises(ClosedError):
        stager.stage({"w": torch.ones(3)})
    assert closes.is_alive()
    go_on.set()
    stages.join(30)
    closes.join(30)
    assert found[0]["w"].sum().item() == 2**21
    for helper in [thread for thread in threading.enumerate() if thread.name.startswith("dcp-engine-copy")]:
        helper.join(30)
        assert not helper.is_alive()


def test_closing_ends_the_wait_of_another_thread_for_a_buffer() -> None:
    stager = DoubleBufferStager(wait_secs=600)
    held = [stager.stage({"w": torch.ones(1)}), stager.stage({"w": torch.ones(1)})]
    errors: list[Exception] = []

    def stage() -> None:
        try:
            stager.stage({"w": torch.ones(1)})
        except ClosedError as error:
            errors.append(error)

    waiting = threading.Thread(target=stage)
    waiting.start()
    while not stager._in_stage.locked():
        pass
    stager.close()
    waiting.join(30)
    assert len(errors) == 1
    assert [one["w"].item() for one in held] == [1, 1]


def test_a_class_of_the_state_may_close_the_stager_that_stages_it() -> None:
    stager = DoubleBufferStager()

    class Closes:
        def __deepcopy__(self, _: object) -> Closes:
            stager.close()
            return self

    assert stager.stage({"w": torch.ones(3), "closes": Closes()})["w"].tolist() == [1, 1, 1]
    with pytest.raises(ClosedError):
        stager.stage({"w": torch.ones(3)})


def test_a_dict_at_the_address_of_a_staged_state_that_is_gone_gives_nothing_back() -> None:
    stager = DoubleBufferStager(memory="shared")  # whose buffers do not come back when the last tensor is gone
    staged = stager.stage({"w": torch.ones(3)})
    assert stager.proof_of(staged) is not None
    address = id(staged)
    del staged
    strangers = []
    while not strangers or id(strangers[-1]) != address:
        strangers.append(StagedState(w=1))
        assert len(strangers) < 100_000
    assert stager.proof_of(strangers[-1]) is None
    stager.release(strangers[-1])
    assert states(stager) == [BufferState.STAGED, BufferState.FREE]


def test_a_staged_state_travels_as_a_plain_dict() -> None:
    staged = DoubleBufferStager().stage({"n": 1})
    assert type(pickle.loads(pickle.dumps(staged))) is dict


def test_a_state_on_a_device_has_a_digest_when_it_has_been_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = LateCopies(monkeypatch)
    stager = DoubleBufferStager(memory="plain")
    staged = stager.stage({"w": torch.ones(3)})
    assert isinstance(staged, Future)
    assert stager.last_report is not None
    assert not stager.last_report.content.done()
    copies.end()
    assert staged.result(60)["w"].tolist() == [1, 1, 1]
    assert isinstance(stager.last_report.content.result(60), int)
    stager.close()


def test_a_device_that_fails_leaves_no_digest_and_frees_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = LateCopies(monkeypatch, RuntimeError("the device is gone"))
    stager = DoubleBufferStager(memory="plain")
    staged = stager.stage({"w": torch.ones(3)})
    copies.end()
    assert isinstance(staged, Future)
    with pytest.raises(StagingError, match="the device is gone"):
        staged.result(60)
    assert stager.last_report is not None
    assert stager.last_report.content.result(60) is None
    assert states(stager) == FREE
    stager.close()
