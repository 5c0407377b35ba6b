"""``split_on_device``: the files of a save are those of a save without it, and whoever does not know such tensors never gets one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.host_as_device import host_as_device
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter, verify_checkpoint
from dcp_engine.background import BackgroundSaver
from dcp_engine.errors import StagedDataChangedError
from dcp_engine.staging import DoubleBufferStager
from dcp_engine.storage import split_memory

KEY = bytes(range(32))


class OtherPlanner(BalancedSavePlanner):
    """May look at what it saves."""


class OtherWriter(ShardWriter):
    """May look at what it writes."""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """See ``host_as_device``."""
    # Files say whose attempt they are: with one and the same nonce, all of their bytes can be compared.
    monkeypatch.setattr(secrets, "token_hex", lambda num_bytes: "a5" * num_bytes)
    return host_as_device(monkeypatch)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Dtypes of the blocks that came apart in this process."""
    found: list[str] = []
    original = split_memory.split_floats

    def counted(raw: memoryview, dtype: Any) -> Any:
        found.append(dtype.name)
        return original(raw, dtype)

    monkeypatch.setattr(split_memory, "split_floats", counted)
    return found


def weights(num: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.complex(*(0.02 * torch.randn(2, num, generator=generator, dtype=torch.float64))).to(dtype)
    return (0.02 * torch.randn(num, generator=generator)).to(dtype)


def state_of() -> dict[str, Any]:
    tied, strided = weights(300_007, seed=1), weights(400_000, seed=2)
    return {
        "bfloat16": weights(2**21 + 13, torch.bfloat16).view(-1, 1),
        "float16": weights(2**21 + 7, torch.float16),
        "float32": weights(3 * 2**20 + 5).view(1, -1),
        "float64": weights(2**19 + 1, torch.float64),
        "complex64": weights(2**19 + 3, torch.complex64),
        "moments": weights(2**20).square(),
        "zeros": torch.zeros(2**20),
        "tie": tied,
        "tied": tied,
        "whole": strided,
        "part": strided[7:200_000],
        "transposed": weights(800 * 700, seed=3).view(800, 700).t(),
        "columns": weights(800 * 700, seed=4).view(800, 700)[:, 5:300],
        "conjugate": weights(200_000, torch.complex64).conj(),
        "small": weights(1_000),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "numbers": torch.arange(300_000),
        "float8": weights(600_000).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(weights(200_000, seed=5)),
        "object": {"step": 7},
    }


def save(path: Path, state: dict[str, Any], *, split_on_device: bool, **options: Any) -> None:
    executor = options.pop("executor", "thread")
    stager = DoubleBufferStager(split_on_device=split_on_device, memory="shared" if executor == "process" else "plain")
    options = {"codec": "planes", "threads": 2, **options}
    with BackgroundSaver(stager=stager, executor=executor) as saver:
        saver.submit(state, writer=ShardWriter(path, **options)).result(120)
    stager.close()


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.glob("*.shard"))}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("options", [{}, {"codec": "auto", "size_target": 0.0}, {"encryption_key": KEY}], ids=str)
def test_a_save_writes_the_files_that_it_would_write_without(tmp_path: Path, split: list[str], options: dict[str, Any]) -> None:
    state = state_of()
    save(tmp_path / "plain", state, split_on_device=False, **options)
    assert not split
    save(tmp_path / "split", state, split_on_device=True, **options)
    # Blocks of 4 MiB and what is left over: transposed and sparse tensors lie row by row once they are staged, parts of others do not.
    assert {name: split.count(name) for name in set(split)} == {
        "bfloat16": 2,
        "float16": 2,
        "float32": 4 + 1 + 1 + 1 + 1 + 1,  # float32, moments, zeros, tie, columns, parameter
        "float64": 2,
        "complex64": 2 + 1,
    }
    assert files(tmp_path / "plain") == files(tmp_path / "split")


def test_a_process_that_saves_knows_what_came_apart(tmp_path: Path, device: list[set[int]]) -> None:
    state = state_of()
    save(tmp_path / "plain", state, split_on_device=False)
    stager = DoubleBufferStager(split_on_device=True, memory="shared", verify_staging="full")
    with BackgroundSaver(stager=stager, executor="process") as saver:
        saver.submit(state, writer=ShardWriter(tmp_path / "split", codec="planes", threads=2)).result(120)
    stager.close()
    assert [len(lengths) for lengths in device] == [10]  # of eleven slots: moments and zeros are equally long
    (plain,), (split,) = (files(tmp_path / name).values() for name in ("plain", "split"))
    # The process has a nonce of its own, so header and footer differ.
    blocks = slice(4096, min(len(plain), len(split)) - 2**16)
    assert plain[blocks] == split[blocks]
    target = {key: torch.empty_like(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
    dcp.load(target, storage_reader=ShardReader(tmp_path / "split"), planner=ReshardLoadPlanner(keys=[*target]))
    assert all(bits(tensor) == bits(state[key]) for key, tensor in target.items())


@pytest.mark.parametrize("case", ["raw", "zstd", "writer", "planner", "stock planner", "patched", "by value"])
def test_nothing_is_taken_apart_for_others(tmp_path: Path, device: list[set[int]], split: list[str], case: str) -> None:
    tensor = weights(2**20)
    writer = (OtherWriter if case == "writer" else ShardWriter)(tmp_path / "a", codec=case if case in ("raw", "zstd") else "planes")
    planner: Any = {"planner": OtherPlanner, "stock planner": DefaultSavePlanner}.get(case, BalancedSavePlanner)()
    if case == "patched":
        planner.transform_object = lambda _item, value: value
    stager = DoubleBufferStager(split_on_device=True, memory="plain")
    with BackgroundSaver(stager=stager, executor="process" if case == "by value" else "thread") as saver:
        saver.submit({"w": tensor}, writer=writer, planner=planner).result(120)
    stager.close()
    found = torch.zeros_like(tensor)
    dcp.load({"w": found}, storage_reader=ShardReader(tmp_path / "a"), planner=ReshardLoadPlanner())
    assert torch.equal(found, tensor)
    assert not device
    assert not split


def test_dcps_own_calls_get_plain_tensors(tmp_path: Path, split: list[str]) -> None:
    tensor = weights(2**20)
    stager = DoubleBufferStager(split_on_device=True, memory="plain")
    staged = stager.stage({"w": tensor})
    assert isinstance(staged, Future)
    assert torch.equal(staged.result(60)["w"], tensor)
    stager.release(staged)
    with BackgroundSaver(stager=stager) as saver:
        saver.submit({"w": tensor}, writer=FileSystemWriter(tmp_path / "dcp"), planner=DefaultSavePlanner()).result(60)
    found = torch.zeros_like(tensor)
    dcp.load({"w": found}, storage_reader=FileSystemReader(tmp_path / "dcp"))
    assert torch.equal(found, tensor)
    stager.close()
    assert not split


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_a_writer_wants_whole_is_joined(tmp_path: Path, split: list[str], codec: str) -> None:
    """As "auto" may choose for any batch."""
    state = state_of()
    save(tmp_path / "plain", state, split_on_device=False, codec=codec)
    stager = DoubleBufferStager(split_on_device=True, memory="plain")
    staged = stager.stage(state, may_split=True)
    assert isinstance(staged, Future)
    dcp.save(staged.result(60), storage_writer=ShardWriter(tmp_path / "split", codec=codec, threads=2), planner=BalancedSavePlanner())
    stager.close()
    assert len(split) == 18
    assert files(tmp_path / "plain") == files(tmp_path / "split")


def test_damage_to_what_came_apart_is_found_when_it_is_written(tmp_path: Path) -> None:
    stager = DoubleBufferStager(split_on_device=True, memory="plain", verify_staging="full")
    staged = stager.stage({"w": weights(2**20)}, may_split=True)
    assert isinstance(staged, Future)
    state = staged.result(60)
    state["w"].view(torch.uint8)[12_345] ^= 1
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=ShardWriter(tmp_path / "a", codec="planes"), planner=BalancedSavePlanner())
    assert isinstance(caught.value.failures[0][0], StagedDataChangedError)
    stager.close()


def test_the_next_save_of_the_same_tensors_may_be_whole_again(tmp_path: Path) -> None:
    tensor = weights(2**20)
    stager = DoubleBufferStager(split_on_device=True, memory="plain")
    with BackgroundSaver(stager=stager) as saver:
        for number, codec in enumerate(("planes", "raw", "planes", "raw", "planes")):
            tensor += 1
            saver.submit({"w": tensor}, writer=ShardWriter(tmp_path / str(number), codec=codec)).result(60)
            verify_checkpoint(tmp_path / str(number))
            found = torch.zeros_like(tensor)
            dcp.load({"w": found}, storage_reader=ShardReader(tmp_path / str(number)), planner=ReshardLoadPlanner())
            assert torch.equal(found, tensor)
    stager.close()


# -- parts of a tensor that came apart ----------------------------------------------------------------------------------------

PARTS = {
    "rows at a block": lambda whole: whole[1024:2048],
    "rows to the end": lambda whole: whole[1024:],
    "rows within a block": lambda whole: whole[3:300],
    "rows over two blocks": lambda whole: whole[1000:1100],
    "columns": lambda whole: whole[:, 7:900],
    "a row": lambda whole: whole[1030],
    "one element": lambda whole: whole[2047:2048, 1023:],
    "transposed": lambda whole: whole.t(),
    "steps": lambda whole: whole[::3, ::2],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_any_part_has_its_values(part: str, dtype: torch.dtype) -> None:
    tensor = weights(2050 * 1024, dtype).view(2050, 1024)
    stager = DoubleBufferStager(split_on_device=True, memory="plain")
    staged = stager.stage({"w": tensor}, may_split=True)
    assert isinstance(staged, Future)
    mine, expected = PARTS[part](staged.result(60)["w"]), PARTS[part](tensor)
    found = split_memory.chunk_tensor(mine)
    if found is mine:
        assert part.startswith("rows at") or part.startswith("rows to")
        raw = memoryview(mine.view(-1).view(torch.uint8).numpy())
        blocks = [split_memory.staged_block(raw[begin : begin + 2**22]) for begin in range(0, len(raw), 2**22)]
        out = np.empty(len(raw), np.uint8)
        for begin, block in zip(range(0, len(raw), 2**22), blocks, strict=True):
            assert not isinstance(block, memoryview)
            block.join(out.data[begin : begin + block.num_bytes], split_memory.Scratch())
        assert out.tobytes() == bits(expected)
    else:
        assert bits(found) == bits(expected)
    stager.close()
