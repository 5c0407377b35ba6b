"""Staging from CUDA devices: what comes out is what was there when ``stage`` was called, whatever training does to it afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.values import same
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter, verify_checkpoint
from dcp_engine.background import BackgroundSaver
from dcp_engine.errors import ClosedError, StagingError, StagingMemoryError, UnsupportedTensorError
from dcp_engine.staging import BufferState, DoubleBufferStager

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LARGE = 16 * 1024**2
"""Elements of a tensor whose copy takes milliseconds: time enough for what comes after it to do harm."""
FREE = [BufferState.FREE, BufferState.FREE]


@pytest.fixture
def stager() -> Iterator[DoubleBufferStager]:
    stager = DoubleBufferStager()
    yield stager
    stager.close()


def states(stager: DoubleBufferStager) -> list[BufferState]:
    return [buffer.state for buffer in stager.buffers]


def staged_by(stager: DoubleBufferStager, state: dict[str, Any]) -> dict[str, Any]:
    """Staged and waited for."""
    staged = stager.stage(state)
    assert isinstance(staged, Future)
    found = staged.result(timeout=60)
    assert isinstance(found, dict)
    return found


def busy() -> None:
    """Some ten milliseconds or more of work on the device, which the host does not wait for."""
    square = torch.ones(8192, 8192, device="cuda")
    for _ in range(2):
        torch.mm(square, square)


# -- what training does right after the call ----------------------------------------------------------------------------------


def test_a_fence_lets_the_next_change_wait_for_the_copy(stager: DoubleBufferStager) -> None:
    for value in range(5):
        source = torch.full((LARGE,), float(value), device="cuda")
        staged = stager.stage({"w": source})
        stager.fence()
        source.fill_(-1)
        found = staged.result(timeout=60)
        assert torch.equal(found["w"], torch.full((LARGE,), float(value)))
        stager.release(found)


def test_what_was_queued_before_the_call_is_in_the_staged_state(stager: DoubleBufferStager) -> None:
    source = torch.zeros(LARGE, device="cuda")
    busy()
    source.fill_(7)
    assert torch.equal(staged_by(stager, {"w": source})["w"], torch.full((LARGE,), 7.0))


def test_a_second_stream_that_asks_for_a_fence_waits_as_well(stager: DoubleBufferStager) -> None:
    source = torch.zeros(LARGE, device="cuda")
    busy()
    staged = stager.stage({"w": source})
    stager.fence()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        stager.fence()
        source.fill_(-1)
    assert torch.equal(staged.result(timeout=60)["w"], torch.zeros(LARGE))


def test_a_protected_optimizer_steps_after_the_copy_and_no_step_is_lost(stager: DoubleBufferStager) -> None:
    weight = torch.nn.Parameter(torch.zeros(LARGE, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    protection = stager.protect(optimizer)
    weight.grad = torch.ones_like(weight)
    for step in range(6):
        staged = stager.stage({"w": weight})
        optimizer.step()
        found = staged.result(timeout=60)
        assert torch.equal(found["w"], torch.full((LARGE,), float(-step)))
        stager.release(found)
    protection.remove()
    torch.cuda.synchronize()
    assert torch.equal(weight.detach().cpu(), torch.full((LARGE,), -6.0))


def test_memory_that_is_freed_and_taken_by_others_is_staged_as_it_was(stager: DoubleBufferStager) -> None:
    source = {str(number): torch.full((LARGE // 64,), float(number), device="cuda") for number in range(64)}
    busy()
    staged = stager.stage(source)
    source.clear()
    others = [torch.full((LARGE // 64,), -1.0, device="cuda") for _ in range(128)]
    found = staged.result(timeout=60)
    assert [float(found[str(number)].unique()) for number in range(64)] == [float(number) for number in range(64)]
    assert len(others) == 128


def test_sources_are_let_go_when_the_copy_is_through(stager: DoubleBufferStager) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    source = {"w": torch.ones(LARGE, device="cuda"), "small": torch.ones(10, device="cuda")}
    staged = stager.stage(source)
    source.clear()
    staged.result(timeout=60)
    stager.close()  # its thread is through with the transfer, too
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_the_call_does_not_wait_for_the_device(stager: DoubleBufferStager) -> None:
    state = {"w": torch.ones(LARGE, device="cuda"), "small": torch.ones(10, device="cuda")}
    stager.release(staged_by(stager, state))
    torch.cuda.synchronize()
    busy()
    under_way = torch.cuda.Event()
    under_way.record()
    staged = stager.stage(state)
    assert not under_way.query(), "stage() came back while the device was still at what was queued before"
    staged.result(timeout=60)


# -- all kinds of tensors -----------------------------------------------------------------------------------------------------

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.randint(-4, 5, shape, device="cuda")
    return (values > 0) if dtype is torch.bool else values.abs().to(dtype) if dtype is torch.uint8 else values.float().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_dense_strided_scalar_empty_small_and_large(dtype: torch.dtype, stager: DoubleBufferStager) -> None:
    wide = random((600, 700), dtype)
    state = {
        "large": wide,
        "columns": random((600, 700), dtype)[:, 3:77],
        "transposed": random((60, 70), dtype).t(),
        "small": random((5, 7), dtype),
        "scalar": random((), dtype),
        "empty": torch.empty(0, 3, dtype=dtype, device="cuda"),
        "expanded": random((1, 9), dtype).expand(4, 9),
    }
    staged = staged_by(stager, state)
    for name, tensor in state.items():
        assert staged[name].device.type == "cpu"
        assert same(staged[name], tensor.cpu()), name


def test_lazy_conjugates_and_negatives_come_out_as_values(stager: DoubleBufferStager) -> None:
    values = torch.randn(1000, dtype=torch.complex64, device="cuda")
    state = {"conjugate": values.conj(), "imaginary": values.conj().imag, "plain": values}
    staged = staged_by(stager, state)
    for name, tensor in state.items():
        assert torch.equal(staged[name], tensor.cpu()), name


def test_ties_and_views_stay_what_they_are_to_each_other(stager: DoubleBufferStager) -> None:
    base = torch.arange(200_000.0, device="cuda")
    staged = staged_by(stager, {"whole": base, "tie": base.view(100, 2000), "part": base[10:20], "other": torch.zeros(5, device="cuda")})
    assert staged["whole"].data_ptr() == staged["tie"].data_ptr() != staged["other"].data_ptr()
    assert staged["part"].data_ptr() == staged["whole"].data_ptr() + 40
    assert staged["part"].tolist() == [float(value) for value in range(10, 20)]


def test_many_small_tensors_are_gathered_and_keep_their_values(stager: DoubleBufferStager) -> None:
    state = {str(number): torch.full((number % 7 + 1,), float(number), device="cuda") for number in range(1000)}
    staged = staged_by(stager, state)
    assert all(staged[name].tolist() == tensor.tolist() for name, tensor in state.items())


def test_a_state_of_device_and_host_tensors_and_other_values(stager: DoubleBufferStager) -> None:
    state: dict[str, Any] = {
        "device": torch.arange(300_000, device="cuda"),
        "host": torch.arange(300_000),
        "step": torch.tensor(3.0),
        "list": [1, {"inner": torch.ones(2, device="cuda")}],
        "parameter": torch.nn.Parameter(torch.ones(4, device="cuda")),
    }
    staged = stager.stage(state)
    state["host"].zero_()
    state["step"] += 1
    state["list"].append(2)
    found = staged.result(timeout=60)
    assert torch.equal(found["device"], torch.arange(300_000))
    assert torch.equal(found["host"], torch.arange(300_000))
    assert found["step"].item() == 3
    assert len(found["list"]) == 2
    assert found["list"][1]["inner"].tolist() == [1, 1]
    assert not found["parameter"].requires_grad


def test_small_tensors_may_be_changed_at_once_on_the_stream_that_staged_them(stager: DoubleBufferStager) -> None:
    statistics = torch.zeros(100, device="cuda")
    large = torch.zeros(LARGE, device="cuda")
    for value in range(5):
        busy()
        staged = stager.stage({"statistics": statistics, "large": large})
        statistics.add_(1)
        found = staged.result(timeout=60)
        assert found["statistics"].tolist() == [float(value)] * 100
        stager.release(found)


def test_torch_takes_the_buffer_for_pinned_memory(stager: DoubleBufferStager) -> None:
    assert staged_by(stager, {"w": torch.ones(LARGE, device="cuda")})["w"].is_pinned()


@pytest.mark.parametrize("memory", ["plain", "shared"])
def test_other_kinds_of_memory_hold_the_same_values(memory: str) -> None:
    stager = DoubleBufferStager(memory=memory)
    source = torch.arange(300_000, device="cuda")
    assert torch.equal(staged_by(stager, {"w": source, "small": source[:3]})["w"], torch.arange(300_000))
    stager.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_state_on_two_devices(stager: DoubleBufferStager) -> None:
    state = {f"{device}-{size}": torch.full((size,), float(device), device=f"cuda:{device}") for device in (0, 1) for size in (10, LARGE)}
    with torch.cuda.device(1):
        staged = staged_by(stager, state)
    assert all(torch.equal(staged[name], tensor.cpu()) for name, tensor in state.items())


# -- saves ------------------------------------------------------------------------------------------------------------------


def loaded(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    target = {name: torch.empty_like(tensor, device="cpu") for name, tensor in like.items()}
    dcp.load(target, storage_reader=ShardReader(path), planner=ReshardLoadPlanner())
    return target


def test_async_save_answers_with_both_futures_and_the_buffer_comes_back(tmp_path: Path, stager: DoubleBufferStager) -> None:
    state = {"w": torch.arange(300_000, device="cuda")}
    answer = dcp.async_save(state, storage_writer=ShardWriter(tmp_path / "a"), planner=BalancedSavePlanner(), async_stager=stager)
    assert isinstance(answer, AsyncSaveResponse)
    answer.staging_completion.result(timeout=60)
    state["w"].zero_()
    answer.upload_completion.result(timeout=60)
    assert torch.equal(loaded(tmp_path / "a", state)["w"], torch.arange(300_000))
    assert states(stager) == FREE


def test_twenty_saves_use_two_buffers_and_each_holds_its_own_step(tmp_path: Path, stager: DoubleBufferStager) -> None:
    weight = torch.zeros(300_000, device="cuda")
    answers = []
    for step in range(20):
        writer, planner = ShardWriter(tmp_path / str(step)), BalancedSavePlanner()  # saves overlap: a planner plans one at a time
        answers.append(dcp.async_save({"w": weight}, storage_writer=writer, planner=planner, async_stager=stager))
        stager.fence()
        weight.add_(1)
    for step, answer in enumerate(answers):
        assert isinstance(answer, AsyncSaveResponse)
        answer.upload_completion.result(timeout=60)
        verify_checkpoint(tmp_path / str(step))
        assert loaded(tmp_path / str(step), {"w": weight})["w"].unique().tolist() == [float(step)]
    assert states(stager) == FREE
    assert max(buffer.num_bytes for buffer in stager.buffers) < 2 * weight.nbytes


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_background_save_resolves_staged_and_durable(tmp_path: Path, executor: str) -> None:
    weight = torch.arange(300_000, device="cuda")
    with BackgroundSaver(executor=executor) as saver:
        handle = saver.submit({"w": weight}, writer=ShardWriter(tmp_path / "a"), step=1)
        handle.staged.result(timeout=60)
        weight.zero_()
        handle.result(timeout_secs=120)
    assert torch.equal(loaded(tmp_path / "a", {"w": weight})["w"], torch.arange(300_000))


def test_both_buffers_while_both_copies_are_under_way(stager: DoubleBufferStager) -> None:
    source = torch.zeros(LARGE, device="cuda")
    busy()
    first = stager.stage({"w": source})
    stager.fence()
    source.add_(1)
    second = stager.stage({"w": source})
    stager.fence()
    source.add_(1)
    assert torch.equal(first.result(timeout=60)["w"], torch.zeros(LARGE))
    assert torch.equal(second.result(timeout=60)["w"], torch.ones(LARGE))


def test_a_new_structure_takes_new_buffers(stager: DoubleBufferStager) -> None:
    for size in (LARGE, 1000, LARGE // 2):
        staged = staged_by(stager, {"w": torch.full((size,), 3.0, device="cuda")})
        assert staged["w"].shape == (size,)
        assert staged["w"].unique().tolist() == [3.0]
        stager.release(staged)
        del staged


# -- ends and failures ---------------------------------------------------------------------------------------------------------


def test_closing_while_copying_leaves_the_staged_state_whole() -> None:
    stager = DoubleBufferStager()
    source = torch.full((LARGE,), 5.0, device="cuda")
    busy()
    staged = stager.stage({"w": source})
    stager.close()
    assert staged.done()
    assert torch.equal(staged.result()["w"], torch.full((LARGE,), 5.0))
    with pytest.raises(ClosedError):
        stager.stage({"w": source})


def test_a_stager_that_is_dropped_gives_its_pinned_memory_back() -> None:
    for _ in range(20):  # memory at the same addresses: what stayed registered could not be registered again
        stager = DoubleBufferStager()
        staged = staged_by(stager, {"w": torch.ones(LARGE, device="cuda")})
        assert staged["w"].sum().item() == LARGE
        stager.release(staged)
        del staged, stager
        gc.collect()


def test_a_failure_half_way_waits_for_copies_under_way_and_frees_the_buffer(stager: DoubleBufferStager) -> None:
    state: dict[str, Any] = {"w": torch.full((LARGE,), 2.0, device="cuda"), "lock": threading.Lock()}
    busy()
    with pytest.raises(StagingError, match="cannot be copied"):
        stager.stage(state)
    assert states(stager) == FREE
    del state["lock"]
    assert torch.equal(staged_by(stager, state)["w"], torch.full((LARGE,), 2.0))


def test_bad_input_is_refused_as_on_the_host(stager: DoubleBufferStager) -> None:
    with pytest.raises(UnsupportedTensorError) as caught:
        stager.stage({"model": {"odd": torch.eye(3, device="cuda").to_sparse()}})
    assert caught.value.tensor == "model.odd"
    small = DoubleBufferStager(budget_bytes=1000)
    with pytest.raises(StagingMemoryError):
        small.stage({"w": torch.ones(LARGE, device="cuda")})
    assert states(stager) == FREE
