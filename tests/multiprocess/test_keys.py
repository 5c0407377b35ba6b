"""Keys over real ranks and processes: all protect alike, whoever shares the reading checks for itself, keys reach the saving process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import RankPool
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_engine import BackgroundSaver, BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter, verify_checkpoint
from dcp_engine.errors import DcpEngineError

SIGNING, ENCRYPTION = b"s" * 32, b"e" * 32
KEYS: dict[str, Any] = {"signing_key": SIGNING, "encryption_key": ENCRYPTION}
ROWS = 2_000_003
"""Of float32: more than one block a rank."""


def values() -> torch.Tensor:
    return torch.arange(ROWS, dtype=torch.float32) % 8191


def state(*, filled: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = values() if filled else torch.zeros(ROWS)
    return {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "replica": whole.clone()}


def save_and_load(path: str, broadcast: bool) -> bool:
    dcp.save(state(filled=True), storage_writer=ShardWriter(path, **KEYS), planner=BalancedSavePlanner())
    found = state(filled=False)
    reader = ShardReader(path, broadcast=broadcast, bytes_in_flight=8 << 20, **KEYS)
    dcp.load(found, storage_reader=reader, planner=ReshardLoadPlanner())
    sharded = found["sharded"]
    assert isinstance(sharded, DTensor)
    return torch.equal(sharded.full_tensor(), values()) and torch.equal(found["replica"], values())


@pytest.mark.parametrize("broadcast", [False, True])
def test_ranks_save_and_load_with_keys(ranks: RankPool, tmp_path: Path, broadcast: bool) -> None:
    assert ranks.run(2, save_and_load, str(tmp_path / "a"), broadcast) == [True, True]
    assert verify_checkpoint(tmp_path / "a", **KEYS).faults == ()


def save_with(path: str, options: list[dict[str, Any]]) -> tuple[str, str]:
    try:
        writer = ShardWriter(path, **options[dist.get_rank()])
        dcp.save(state(filled=True), storage_writer=writer, planner=BalancedSavePlanner())
    except CheckpointException as caught:
        error = next(iter(caught.failures.values()))[0]
        assert isinstance(error, DcpEngineError)
        return error.kind, str(error)
    return "saved", ""


@pytest.mark.parametrize(
    "options",
    [
        [{"encryption_key": ENCRYPTION}, {"encryption_key": SIGNING}],
        [{"encryption_key": ENCRYPTION}, {}],
        [{"digest": "sha256"}, {}],
        [{"signing_key": SIGNING}, {}],
    ],
)
def test_ranks_that_protect_in_different_ways_publish_nothing(ranks: RankPool, tmp_path: Path, options: list[dict[str, Any]]) -> None:
    for kind, text in ranks.run(2, save_with, str(tmp_path / "a"), options):
        assert kind == "plan"
        assert "in different ways" in text
        assert ENCRYPTION.decode() not in text
    assert not (tmp_path / "a").exists()


def load_with(path: str, options: list[dict[str, Any]]) -> dict[int, str]:
    """Kinds of the errors of ranks, as rank 0 tells them."""
    found = {"x": torch.zeros(1000)}
    group = dist.new_group(backend="gloo")
    reader = ShardReader(path, process_group=group, **options[dist.get_rank()])
    try:
        dcp.load(found, storage_reader=reader, planner=ReshardLoadPlanner(), process_group=group)
    except CheckpointException as caught:
        return {rank: error.kind for rank, (error, _) in caught.failures.items() if isinstance(error, DcpEngineError)}
    return {}


def test_a_rank_with_a_key_takes_no_other_ranks_word(ranks: RankPool, tmp_path: Path) -> None:
    """The first rank reads COMPLETE and MANIFEST for all, and has no key: the other one holds them against its own."""
    dcp.save({"x": torch.ones(1000)}, storage_writer=ShardWriter(tmp_path / "a"), planner=BalancedSavePlanner())
    assert ranks.run(2, load_with, str(tmp_path / "a"), [{}, {"signing_key": SIGNING}])[0] == {1: "signature"}
    assert ranks.run(2, load_with, str(tmp_path / "a"), [{}, {}])[0] == {}


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("as_file", [False, True])
def test_a_save_beside_training_is_signed_and_encrypted(tmp_path: Path, executor: str, as_file: bool) -> None:
    keys = KEYS
    if as_file:
        keys = {name: tmp_path / name for name in KEYS}
        for name, place in keys.items():
            place.write_bytes(KEYS[name])
    with BackgroundSaver(executor=executor) as saver:
        saver.submit({"x": torch.ones(50_000)}, writer=ShardWriter(tmp_path / "a", **keys)).result(60)
    assert verify_checkpoint(tmp_path / "a", **KEYS).faults == ()
    with pytest.raises(DcpEngineError, match="is encrypted"):
        ShardReader(tmp_path / "a").read_metadata()
