"""What staging from a CUDA device has to get right, checked without a test runner: for a machine that has only torch and this package."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.files import remove
from benchmarks.harness import MismatchError
from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter
from dcp_engine.background import BackgroundSaver
from dcp_engine.staging import DoubleBufferStager

__all__ = ["CHECKS"]

_NUM = 1 << 20
_NUM_SAVES = 20


def changed_behind_a_fence(folder: str) -> None:
    """A tensor that is overwritten right after the call, behind a fence, is staged as it was."""
    stager = DoubleBufferStager()
    try:
        for value in range(5):
            source = torch.full((16 * _NUM,), float(value), device="cuda")
            staged = stager.stage({"source": source})
            stager.fence()
            source.fill_(-1)
            found = staged.result() if not isinstance(staged, dict) else staged
            _same("source", found["source"], torch.full((16 * _NUM,), float(value)))
            stager.release(found)
    finally:
        stager.close()


def freed_while_it_is_copied(folder: str) -> None:
    """Memory that is freed and taken by others right after the call is staged as it was."""
    stager = DoubleBufferStager()
    try:
        source = {str(number): torch.full((_NUM,), float(number), device="cuda") for number in range(64)}
        staged = stager.stage(source)
        source.clear()
        others = [torch.full((_NUM,), -1.0, device="cuda") for _ in range(128)]
        found = staged.result() if not isinstance(staged, dict) else staged
        for number in range(64):
            _same(str(number), found[str(number)], torch.full((_NUM,), float(number)))
        del others
    finally:
        stager.close()


def odd_tensors_through_many_saves(folder: str) -> None:
    """Small, empty, strided, conjugate and tied tensors of many types, on device and host, through both buffers again and again."""
    stager, planner = DoubleBufferStager(), BalancedSavePlanner()
    try:
        for number in range(_NUM_SAVES):
            state = _odd_state(number)
            expected = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
            path = os.path.join(folder, f"odd-{number}")
            answer: Any = dcp.async_save(state, storage_writer=ShardWriter(path), planner=planner, async_stager=stager)
            stager.fence()
            for tensor in state.values():
                tensor.zero_()
            answer.upload_completion.result()
            target = {name: torch.empty_like(tensor).contiguous() for name, tensor in expected.items()}
            dcp.load(target, storage_reader=ShardReader(path), planner=ReshardLoadPlanner())
            for name, tensor in expected.items():
                _same(name, target[name], tensor)
            remove(path)
    finally:
        stager.close()


def taken_apart_on_the_device(folder: str) -> None:
    """Floats that are split on the device are saved as they were, whatever training does to them behind a fence."""
    stager = DoubleBufferStager(split_on_device=True)
    try:
        with BackgroundSaver(stager=stager) as saver:
            for number in range(3):
                state = {name: tensor for name, tensor in _odd_state(number).items() if name != "host"}
                for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
                    state[f"large {dtype}"] = (0.02 * torch.randn(18 * _NUM + 5, device="cuda")).to(dtype)
                expected = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
                path = os.path.join(folder, f"split-{number}")
                handle = saver.submit(state, writer=ShardWriter(path, codec="planes"))
                stager.fence()
                for tensor in state.values():
                    tensor.zero_()
                handle.result()
                target = {name: torch.empty_like(tensor).contiguous() for name, tensor in expected.items()}
                dcp.load(target, storage_reader=ShardReader(path), planner=ReshardLoadPlanner())
                for name, tensor in expected.items():
                    _same(name, target[name], tensor)
                remove(path)
    finally:
        stager.close()


CHECKS: Mapping[str, Callable[[str], None]] = {
    check.__name__: check
    for check in (changed_behind_a_fence, freed_while_it_is_copied, odd_tensors_through_many_saves, taken_apart_on_the_device)
}
"""By name. Each takes a folder and raises where something is wrong."""


def _odd_state(number: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(number)
    base = torch.randn(600, 500, device="cuda")
    state = {
        "large": base,
        "tied": base.view(-1),
        "rows": base[10:20],
        "columns": torch.randn(300, 400, device="cuda")[:, 3:77],
        "transposed": torch.randn(64, 128, device="cuda").t(),
        "conjugate": torch.randn(33, device="cuda", dtype=torch.complex64).conj(),
        "scalar": torch.tensor(float(number), device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        "host": torch.randn(1000),
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
        state[str(dtype)] = torch.randn(777, device="cuda").to(dtype)
    for dtype in (torch.int8, torch.int64, torch.bool):
        state[str(dtype)] = (torch.randn(777, device="cuda") > 0).to(dtype)
    return state


def _same(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    ours, theirs = (tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for tensor in (found, expected))
    if found.dtype != expected.dtype or found.shape != expected.shape or not torch.equal(ours, theirs):
        raise MismatchError(f"{name} is not what was there when it was staged")
