"""States made from what a checkpoint records: whole ones where the caller has none, and containers that one side holds as one object."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from dcp_engine.errors import KeyMismatchError, MalformedCheckpointError
from dcp_engine.memory import require_memory
from dcp_engine.planners.catalogue import Catalogue
from dcp_engine.planners.local_shards import is_tensor_like
from dcp_engine.planners.rename import rename_path
from dcp_engine.planners.selection import Selection, dotted_prefixes
from dcp_engine.planners.skeleton import MAPPINGS, Node, decode_skeleton, unflatten
from dcp_engine.types import Path, PlannerData

__all__ = ["build_state", "collapse_containers"]

_SLACK = 1 << 20


def build_state(
    state_dict: dict[str, Any], metadata: Metadata, catalogue: Catalogue, device: torch.device | str | None, selection: Selection
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Fill an empty dict with the state that a catalogue describes: empty tensors, ``None`` for objects.

    Keys that were saved as ties share one tensor.

    Args:
        state_dict: empty; filled in place.
        metadata: of the checkpoint, for its containers.
        catalogue: the selected keys.
        device: of the tensors; ``None``: torch's default device.
        selection: what the catalogue was selected by.

    Returns:
        Key -> value, and key -> path, as flattening the state would give, if objects were leaves.

    Raises:
        MalformedCheckpointError: recorded paths or containers that no state has.
        LimitExceededError: the machine has less memory than the tensors take.
    """
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    on_cpu, num_bytes = torch.empty(0, device=device).device.type == "cpu", 0
    for name, entry in catalogue.entries.items():
        if isinstance(entry.stored, TensorStorageMetadata):
            if entry.owner not in tensors:
                num_bytes += entry.stored.size.numel() * entry.stored.properties.dtype.itemsize
                if on_cpu:
                    require_memory(num_bytes, what="the state in this checkpoint", tensor=entry.key)
                tensors[entry.owner] = torch.empty(entry.stored.size, dtype=entry.stored.properties.dtype, device=device)
            values[name] = tensors[entry.owner]
        else:
            values[name] = None
    paths = _paths(metadata.planner_data, catalogue)
    built = _exact_containers(metadata.planner_data, catalogue, values, selection)
    if built is None:
        built = _Nested(2 * len(paths) + _SLACK).build(paths, values)
    state_dict.update(built)
    return values, paths


def _paths(planner_data: object, catalogue: Catalogue) -> dict[str, Path]:
    recorded = planner_data if isinstance(planner_data, Mapping) else {}
    paths = {}
    for name, entry in catalogue.entries.items():
        path = recorded.get(entry.key, (entry.key,))
        if not isinstance(path, tuple | list) or not path or not all(_is_element(element) for element in path):
            raise MalformedCheckpointError("the recorded path of a key is no path", tensor=entry.key, expected="strings and indices")
        paths[name] = rename_path(tuple(path), entry.key, name)
    return paths


def _is_element(element: object) -> bool:
    return isinstance(element, str) or (type(element) is int and element >= 0)


def _exact_containers(
    planner_data: object, catalogue: Catalogue, values: Mapping[str, Any], selection: Selection
) -> Mapping[str, Any] | None:
    """The state in the containers that were saved; None where these are unknown, or no longer fit: keys renamed, half a list selected."""
    if not isinstance(planner_data, PlannerData) or not planner_data.skeleton:
        return None
    if any(entry.key != name for name, entry in catalogue.entries.items()):
        return None
    skeleton = decode_skeleton(planner_data.skeleton)
    if not selection.is_all:
        _drop_empty(skeleton, selection)
    try:
        built = unflatten(skeleton, values, partial=not selection.is_all)
    except KeyMismatchError:
        if not selection.is_all:
            return None
        raise
    if not isinstance(built, Mapping):
        raise MalformedCheckpointError("the recorded containers of a state are not a mapping", found=type(built).__name__)
    return built


def _drop_empty(skeleton: Node, selection: Selection) -> None:
    """Take out containers that were empty when saved and are not selected: no key stands for them, so that the catalogue says nothing."""
    stack = [(skeleton, "")]
    while stack:
        node, prefix = stack.pop()
        for key, child in list(node.entries.items()):
            if isinstance(child, str):
                continue
            if child.entries:
                stack.append((child, f"{prefix}{key}."))
            elif node.kind in MAPPINGS and not selection(f"{prefix}{key}"):
                del node.entries[key]


class _Nested:
    """Plain dicts and lists, as DCP makes them of its paths: a str is a key, an int an index, elements that are not there are None.

    Args:
        budget: how many list elements may be made in all: the indices come from storage.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def build(self, paths: Mapping[str, Path], values: Mapping[str, Any]) -> dict[str, Any]:
        root: dict[str, Any] = {}
        made: dict[int, Any] = {id(root): root}  # to tell our containers from values that happen to be containers
        for name, path in paths.items():
            here: Any = root
            for element, following in pairwise(path):
                child = self._get(here, element, name)
                if child is None:
                    child = [] if isinstance(following, int) else {}
                    made[id(child)] = child
                    here[element] = child
                elif id(child) not in made:
                    raise self._conflict(name)
                here = child
            if self._get(here, path[-1], name) is not None:
                raise self._conflict(name)
            here[path[-1]] = values[name]
        return root

    def _get(self, container: Any, element: str | int, name: str) -> Any:
        if isinstance(container, dict) != isinstance(element, str):
            raise self._conflict(name)
        if isinstance(element, str):
            return container.get(element)
        grow = element + 1 - len(container)
        if grow > 0:
            self._budget -= grow
            if self._budget < 0:
                raise MalformedCheckpointError("the recorded index of an element is far beyond its list", tensor=name, found=element)
            container.extend([None] * grow)
        return container[element]

    def _conflict(self, name: str) -> MalformedCheckpointError:
        return MalformedCheckpointError("the recorded paths of two keys contradict each other", tensor=name)


def collapse_containers(
    root: dict[str, Any], leaves: dict[str, Any], paths: dict[str, Path], catalogue: Catalogue, selection: Selection
) -> None:
    """Take containers of the state as one value where the checkpoint holds one object for them, which then replaces them whole.

    DCP's planners store a tuple as one object, and before torch 2.4 any container without tensors. A dict or list of tensors is never
    replaced by an object: that is a difference to report.

    Args:
        root: the state.
        leaves: its key -> value; changed in place.
        paths: its key -> path; changed in place.
        catalogue: of the checkpoint.
        selection: keys that are loaded at all.
    """
    containers: dict[str, list[str]] = {}
    for key in leaves:
        if key not in catalogue.names and selection(key):
            for prefix in dotted_prefixes(key):
                if prefix in catalogue.entries and prefix not in leaves:
                    containers.setdefault(prefix, [])
                    break
    if not containers:
        return
    for key in leaves:
        for prefix in dotted_prefixes(key):
            if prefix in containers:
                containers[prefix].append(key)
                break
    for prefix, members in containers.items():
        if not isinstance(catalogue.entries[prefix].stored, BytesStorageMetadata):
            continue
        path = _path_of(prefix, paths.get(members[0], ()))
        if path is None or any(key in catalogue.entries for key in members):
            continue
        container = _at(root, path)
        if not isinstance(container, tuple) and any(is_tensor_like(leaves[key]) for key in members):
            continue
        for key in members:
            del leaves[key], paths[key]
        leaves[prefix], paths[prefix] = container, path


def _path_of(prefix: str, path: Path) -> Path | None:
    """The beginning of ``path`` that is called ``prefix``."""
    for length in range(1, len(path)):
        if ".".join(map(str, path[:length])) == prefix:
            return path[:length]
    return None


def _at(root: Any, path: Path) -> Any:
    """The value at ``path``; None where there is none."""
    for element in path:
        try:
            root = root[element]
        except (KeyError, IndexError, TypeError):
            return None
    return root
