"""The names, paths and containers of all ranks put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dcp_engine.errors import DuplicateKeyError, PlanError
from dcp_engine.plan_columns import decompress
from dcp_engine.planners.skeleton import Node, decode_skeleton, encode_skeleton, leaf_paths, merge_skeletons
from dcp_engine.types import Path

__all__ = ["unite_names"]


def unite_names(packed: Sequence[bytes], *, flattened: bool, own: tuple[bytes, Mapping[str, Path]]) -> tuple[dict[str, Path] | None, bytes]:
    """The paths of all keys, and the skeleton of the whole state.

    Args:
        packed: by rank, its skeleton, encoded and compressed; empty where the rank did not flatten its state.
        flattened: what the ranks ought to have done.
        own: the packed skeleton of the coordinator and its paths, which need not be worked out again.

    Returns:
        Key -> path, None for states that were not flattened; the encoded skeleton, empty for these.

    Raises:
        DuplicateKeyError: two paths of different ranks have one name. PlanError: ranks flatten in different ways, or hold different
            containers in one place.
    """
    skeletons: dict[bytes, int] = {}
    for rank, data in enumerate(packed):
        if bool(data) != flattened:
            raise PlanError(
                "ranks name their state in different ways",
                rank=rank,
                expected=f"flatten_state_dict={flattened}, as on the coordinator",
                remedy="make the planner with the same options on every rank",
            )
        skeletons.setdefault(data, rank)
    if not flattened:
        return None, b""
    decoded: dict[bytes, Node] = {}
    if len(skeletons) > 1 or own[0] not in skeletons:
        decoded = {data: decode_skeleton(decompress(data)) for data in skeletons}
    mapping: dict[str, Path] = {}
    for data, rank in skeletons.items():
        paths = own[1] if data == own[0] else leaf_paths(decoded[data])
        if not mapping:
            mapping = dict(paths)
            continue
        for key, path in paths.items():
            if mapping.setdefault(key, path) != path:
                raise DuplicateKeyError("two paths of different ranks have one name", tensor=key, rank=rank, found=(mapping[key], path))
    if len(skeletons) == 1:
        return mapping, decompress(next(iter(skeletons)))
    return mapping, encode_skeleton(merge_skeletons(list(decoded.values()), list(skeletons.values())))
