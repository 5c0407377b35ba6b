"""States of all shapes that a save can have, as each rank holds them and as a reader must find them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from support.values import DTYPES, full, same
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ["KINDS", "State", "blank", "difference", "make_state"]

KINDS: Final = ("tiny", "packed", "blocks", "components", "objects", "empty", "sharded")
"""``blocks`` is of several megabytes, the others are of a few kilobytes at most."""


@dataclass(frozen=True, slots=True)
class State:
    """What a save is given, and what it must have stored.

    Attributes:
        ranks: for each rank, its state dict.
        whole: what one rank reads back.
    """

    ranks: tuple[dict[str, Any], ...]
    whole: dict[str, Any]


def make_state(kind: str, world_size: int, version: str) -> State:
    """A state whose values are a function of ``version``: no two versions share a tensor with elements, or an object."""
    shared, whole = _PARTS[kind](version)
    ranks: list[dict[str, Any]] = [copy.copy(shared) for _ in range(world_size)]
    if kind == "empty":
        return State(tuple(ranks), whole)
    for rank, state in enumerate(ranks):
        if kind != "objects":
            own = {f"rank{rank}": _tensor(version, f"rank{rank}", (5 + rank, 3))}
            state["model"] = {**state.get("model", {}), **own}
            whole["model"] = {**whole.get("model", {}), **own}
        if kind == "sharded":
            rows = _tensor(version, "rows", (2 * world_size, 33))
            # Two chunks a rank, which are no neighbours.
            chunks = [((row, 0), rows[row : row + 1].clone()) for row in (rank, world_size + rank)]
            state["model"]["rows"] = _Chunked((2 * world_size, 33), chunks)
            whole["model"]["rows"] = rows
    return State(tuple(ranks), whole)


def blank(whole: Mapping[str, Any]) -> dict[str, Any]:
    """A target of the same structure that holds none of the values."""
    result: dict[str, Any] = {}
    for key, value in whole.items():
        if isinstance(value, dict):
            result[key] = blank(value)
        elif isinstance(value, torch.Tensor):
            result[key] = torch.empty_like(value)
            if value.numel():
                result[key].reshape(-1).view(torch.uint8).fill_(0xA5)
        else:
            result[key] = None
    return result


def difference(found: Mapping[str, Any], expected: Mapping[str, Any], place: str = "") -> str | None:
    """The first key whose value is not what it must be, bit for bit; None if there is none."""
    if found.keys() != expected.keys():
        return f"{place or 'state'} has keys {sorted(found)}, not {sorted(expected)}"
    for key, value in expected.items():
        where = f"{place}{key}"
        if isinstance(value, dict) and isinstance(found[key], dict):
            inner = difference(found[key], value, f"{where}.")
            if inner is not None:
                return inner
        elif isinstance(value, torch.Tensor):
            if not isinstance(found[key], torch.Tensor) or not same(found[key], value):
                return f"{where} is not what was saved"
        elif type(found[key]) is not type(value) or found[key] != value:
            return f"{where} is {found[key]!r}, not {value!r}"
    return None


def _tensor(version: str, key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return full(f"{version}/{key}", shape, dtype)


def _tiny(version: str) -> dict[str, Any]:
    return {"model": {"w": _tensor(version, "w", (7, 3)), "b": _tensor(version, "b", ()), "version": version}}


def _packed(version: str) -> dict[str, Any]:
    return {"model": {f"t{index}": _tensor(version, f"t{index}", (index, 2), dtype) for index, dtype in enumerate(DTYPES)}, "step": version}


def _blocks(version: str) -> dict[str, Any]:
    # One block and a little; replicas, which ranks share among them in pieces.
    return {
        "model": {"large": _tensor(version, "large", ((4 << 20) // 32 + 1, 16), torch.bfloat16), "small": _tensor(version, "small", (9,))}
    }


def _components(version: str) -> dict[str, Any]:
    return {
        "model": {"w": _tensor(version, "w", (40, 40))},
        "optimizer": {"m": _tensor(version, "m", (40, 40)), "v": _tensor(version, "v", (3,)), "step": 2**70},
        "scheduler": {"last": version, "rates": [0.1, 0.2]},
        "rng": _tensor(version, "rng", (16,), torch.uint8),
    }


def _objects(version: str) -> dict[str, Any]:
    return {"progress": {"step": len(version), "name": version, "list": [1, (2.5, None)], "big": -(2**65)}, "note": version.encode()}


def _empty(version: str) -> dict[str, Any]:
    return {"model": {"nothing": torch.empty((0, 4)), "neither": torch.empty((3, 0), dtype=torch.int64)}}


def _both(parts: Any) -> Any:
    def make(version: str) -> tuple[dict[str, Any], dict[str, Any]]:
        return parts(version), copy.deepcopy(parts(version))

    return make


_PARTS: Final = {
    "tiny": _both(_tiny),
    "packed": _both(_packed),
    "blocks": _both(_blocks),
    "components": _both(_components),
    "objects": _both(_objects),
    "empty": _both(_empty),
    "sharded": _both(_tiny),
}


class _Chunked(torch.Tensor):
    """Speaks DCP's duck protocol: some chunks of a global tensor, so that a sharded one needs no process group."""

    chunks: list[tuple[tuple[int, ...], torch.Tensor]]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], torch.Tensor]]) -> _Chunked:
        made: _Chunked = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=chunks[0][1].dtype)  # type: ignore[attr-defined]
        made.chunks = chunks
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(tuple(args[0].shape), args[0].chunks)
        raise NotImplementedError(func)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, self.size()))
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), local.size()) for offsets, local in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(local for offsets, local in self.chunks if offsets == tuple(index.offset or ()))
