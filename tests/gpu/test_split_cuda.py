"""``split_on_device`` with a CUDA device: what the device takes apart is what the host would, in its place, whatever training does next."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.values import full

from dcp_engine import ReshardLoadPlanner, ShardReader, ShardWriter
from dcp_engine.background import BackgroundSaver
from dcp_engine.staging import DoubleBufferStager
from dcp_engine.staging.split import PIECE_BYTES, split_blocks
from dcp_engine.storage.dtypes import of_tensor_dtype

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SPLIT = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128]


@pytest.mark.parametrize("num", [1, 15, 16, 2**18 - 1, 2**21, 2**21 + 17], ids=str)
@pytest.mark.parametrize("dtype", SPLIT, ids=str)
def test_the_device_takes_apart_as_the_host_does(dtype: torch.dtype, num: int) -> None:
    raw = full("raw", (num * dtype.itemsize,), torch.uint8)
    expected, found = torch.zeros_like(raw), torch.zeros(raw.shape, dtype=torch.uint8, device="cuda")
    split_blocks(raw, of_tensor_dtype(dtype), expected)
    split_blocks(raw.cuda(), of_tensor_dtype(dtype), found)
    assert torch.equal(found.cpu(), expected)


def state_of() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    large = 3 * PIECE_BYTES // 4 + 7  # of float32: three pieces and a part of one
    state = {str(dtype): (0.02 * torch.randn(large, device="cuda")).to(dtype) for dtype in SPLIT[:4]}
    state["moments"] = state["torch.float32"].square()
    state["complex"] = torch.randn(2**20, dtype=torch.complex64, device="cuda").conj()
    state["columns"] = torch.randn(2000, 1000, device="cuda")[:, 7:900]
    state["tie"] = state["torch.float64"]
    state["small"] = torch.randn(100, device="cuda")
    state["numbers"] = torch.arange(2**20, device="cuda")
    state["host"] = torch.randn(2**20)
    return state


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_save_is_what_it_would_be_without(tmp_path: Path, executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda num_bytes: "a5" * num_bytes)
    expected = {key: tensor.cpu() for key, tensor in state_of().items()}
    for split in (False, True):
        stager = DoubleBufferStager(split_on_device=split, memory="shared" if executor == "process" else "auto")
        with BackgroundSaver(stager=stager, executor=executor) as saver:
            for number in range(3):  # the third finds a buffer and a workspace that were used before
                state = state_of()
                handle = saver.submit(state, writer=ShardWriter(tmp_path / f"{split}-{number}", codec="planes"))
                stager.fence()
                for tensor in state.values():
                    tensor.zero_()
                handle.result(120)
        stager.close()
    target = {key: torch.zeros_like(tensor).contiguous() for key, tensor in expected.items()}
    for number in range(3):
        dcp.load(target, storage_reader=ShardReader(tmp_path / f"True-{number}"), planner=ReshardLoadPlanner())
        assert all(torch.equal(target[key], tensor) for key, tensor in expected.items())
    if executor == "thread":
        files = [{file.name: file.read_bytes() for file in (tmp_path / f"{split}-2").glob("*.shard")} for split in (False, True)]
        assert files[0] == files[1]


def test_the_call_does_not_wait_for_the_device() -> None:
    stager = DoubleBufferStager(split_on_device=True)
    state = {"w": torch.ones(16 * 1024**2, device="cuda")}
    stager.release(stager.stage(state, may_split=True))
    stager.synchronize_staging()
    torch.cuda.synchronize()
    square = torch.ones(8192, 8192, device="cuda")
    for _ in range(2):
        torch.mm(square, square)
    under_way = torch.cuda.Event()
    under_way.record()
    stager.stage(state, may_split=True)
    assert not under_way.query(), "stage() came back while the device was still at what was queued before"
    stager.synchronize_staging()
    stager.close()


def test_the_workspace_is_given_back() -> None:
    stager = DoubleBufferStager(split_on_device=True)
    state = {"w": torch.ones(16 * 1024**2, device="cuda")}
    before = torch.cuda.memory_allocated()
    stager.stage(state, may_split=True)
    stager.close()  # its thread is through with the transfer, too
    assert torch.cuda.memory_allocated() == before
