"""Flatten a nested state into named leaves as DCP names them, and put loaded values back where they came from.

The names and paths are those of ``torch.distributed.checkpoint._nested_dict.flatten_state_dict``: keys of mappings as text and indices of
lists, joined by dots; a list without tensors and mappings inside is one leaf, and so is a tuple. What differs, and why:

- A tuple that holds tensors at any depth is traversed, so that they are stored as tensors (DCP pickles the tuple).
- A list that holds only such tuples, or objects that speak DCP's duck protocol for tensors, is traversed for the same reason.
- Two paths with one name are refused in every case. DCP notices only when both are leaves; ``{1: ..., "1": ...}`` slips through when they
  are mappings.

Everything is iterative, so that depth costs no stack.
"""

from __future__ import annotations

import reprlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from dcp_engine.errors import DuplicateKeyError, KeyMismatchError, StateError, UnencodableObjectError
from dcp_engine.object_registry import find_by_type
from dcp_engine.object_types import factory_name
from dcp_engine.planners.local_shards import is_tensor_like
from dcp_engine.planners.skeleton import Node
from dcp_engine.types import Path

__all__ = ["Flat", "assign", "flatten"]

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_LEAVES = _PLAIN | {torch.Tensor, torch.nn.Parameter}


@dataclass(slots=True)
class _Container:
    """A container that was traversed: itself, the number of the one around it (-1 for the state), and its typed key in that."""

    value: Any
    parent: int
    key: Any


@dataclass(frozen=True, slots=True)
class Flat:
    """A flattened state.

    Attributes:
        leaves: name -> value, in DCP's order.
        paths: name -> DCP's path.
        skeleton: the containers with their exact types, leaves replaced by their names.
    """

    leaves: dict[str, Any]
    paths: dict[str, Path]
    skeleton: Node


def flatten(state_dict: Mapping[Any, Any], *, is_leaf: Callable[[object], bool] = is_tensor_like) -> Flat:
    """Flatten a state.

    Args:
        state_dict: mappings, lists and tuples nested at any depth; not changed.
        is_leaf: what counts as a tensor: never traversed, and a list or tuple that holds one is. Not asked about plain dicts and scalars.

    Raises:
        DuplicateKeyError: two paths would get one name; names both.
        UnencodableObjectError: a container holds itself, or a tuple with tensors is of a class that is not registered.
        StateError: the state is no mapping.

    Thread-safety: safe, as long as nobody changes the state meanwhile.
    """
    if not isinstance(state_dict, Mapping):
        raise StateError("a state is a mapping from names to values", expected="a dict", found=type(state_dict).__qualname__)
    return _Walk(is_leaf).run(state_dict)


class _Walk:
    """State of one traversal."""

    def __init__(self, is_leaf: Callable[[object], bool]) -> None:
        self._is_leaf = is_leaf
        # Values are kept beside what is known of them: an id may be used again once its object is gone.
        self._known: dict[int, tuple[object, bool, bool]] = {}
        self._open: set[int] = set()
        self.leaves: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}
        self.containers: list[_Container] = []
        """Every container that was traversed, outer ones first."""

    def run(self, state: Mapping[Any, Any]) -> Flat:
        root = self._node(state, "")
        stack = [self._enter(state, -1, None, "", (), root)]
        leaves, paths = self.leaves, self.paths
        while stack:
            number, children, prefix, path, entries = stack[-1]
            if self._take_all(number, prefix, path, entries):
                children = ()
            for key, segment, value in children:
                name = f"{prefix}{segment}"
                cls = type(value)
                if cls not in _LEAVES and (cls is dict or self._is_container(value, name)):
                    entries[key] = node = self._node(value, name)
                    stack.append(self._enter(value, number, key, name + ".", (*path, segment), node))
                    break
                if name in leaves:
                    self._duplicate(name, (number, key))
                leaves[name] = value
                paths[name] = (*path, segment)
                entries[key] = Node("empty_list", name) if cls is list and not value else name
            else:
                stack.pop()
                self._open.discard(id(self.containers[number].value))
        return Flat(leaves, paths, root)

    def _take_all(self, number: int, prefix: str, path: Path, entries: dict[Any, Node | str]) -> bool:
        """Take all children of a mapping at once, where they are leaves by their types under new names: there may be 100,000 of them."""
        mapping = self.containers[number].value
        if entries or type(mapping) not in (dict, OrderedDict) or not _LEAVES.issuperset(map(type, mapping.values())):
            return False
        if not {str}.issuperset(map(type, mapping)):
            return False
        names = [prefix + key for key in mapping]
        if not self.leaves.keys().isdisjoint(names):
            return False
        self.leaves.update(zip(names, mapping.values(), strict=True))
        self.paths.update(zip(names, [(*path, key) for key in mapping], strict=True))
        entries.update(zip(mapping, names, strict=True))
        return True

    def _enter(self, value: Any, parent: int, key: Any, prefix: str, path: Path, node: Node) -> tuple[Any, ...]:
        if id(value) in self._open:
            self._refuse_cycle(prefix)
        self._open.add(id(value))
        number = len(self.containers)
        self.containers.append(_Container(value, parent, key))
        return number, self._children(number, prefix), prefix, path, node.entries

    def _children(self, number: int, prefix: str) -> Iterator[tuple[Any, Any, Any]]:
        """Typed key, its segment of the path, and value."""
        value = self.containers[number].value
        return self._items(value, number, prefix) if isinstance(value, Mapping) else ((i, i, item) for i, item in enumerate(value))

    def _items(self, mapping: Mapping[Any, Any], number: int, prefix: str) -> Iterator[tuple[Any, str, Any]]:
        if {str}.issuperset(map(type, mapping)):
            return ((key, key, value) for key, value in mapping.items())
        seen: dict[str, Any] = {}
        for key in mapping:
            text = str(key)
            if text in seen:
                self._raise_duplicate(self._show(number, seen[text]), self._show(number, key), prefix + text)
            seen[text] = key
        return ((key, str(key), value) for key, value in mapping.items())

    def _node(self, value: Any, name: str) -> Node:
        cls = type(value)
        if cls is dict:
            return Node("dict")
        if cls is OrderedDict:
            return Node("ordered")
        if cls is Counter:
            return Node("counter")
        if cls is defaultdict:
            try:
                return Node("default", factory_name(value.default_factory))
            except KeyError:
                return Node("mapping")
        if isinstance(value, Mapping):
            return Node("mapping")
        if isinstance(value, list):
            return Node("list")
        if cls is tuple:
            return Node("tuple")
        registration = find_by_type(cls)
        if registration is None or not hasattr(cls, "_fields"):
            raise UnencodableObjectError(
                f"{name} holds tensors in a {cls.__module__}.{cls.__qualname__}, which would come back as a plain tuple",
                tensor=name,
                remedy="register the namedtuple with dcp_engine.objects.register_type, or use a plain tuple",
            )
        return Node("record", registration.name)

    def _is_container(self, value: object, name: str) -> bool:
        if self._is_leaf(value):
            return False
        if isinstance(value, Mapping):
            return True
        if isinstance(value, list):
            return self._scan(value, name)[0]
        return isinstance(value, tuple) and self._scan(value, name)[1]

    def _scan(self, value: Any, name: str) -> tuple[bool, bool]:
        """Whether a container is traversed when it stands in a list (DCP's rule), and whether it holds tensors at any depth."""
        if id(value) not in self._known:
            stack = [_Scan(value)]
            active = {id(value)}
            while stack:
                top = stack[-1]
                child = self._next_unknown(top)
                if child is None:
                    self._known[id(top.value)] = (top.value, top.opens, top.deep)
                    active.discard(id(stack.pop().value))
                    if stack:
                        stack[-1].add(top.value, top.opens, top.deep)
                elif id(child) in active or id(child) in self._open:
                    self._refuse_cycle(name)
                else:
                    active.add(id(child))
                    stack.append(_Scan(child))
        _, opens, deep = self._known[id(value)]
        return opens, deep

    def _next_unknown(self, scan: _Scan) -> object | None:
        """Go on with the children of a container, up to one that has to be scanned first."""
        for child in scan.children:
            if type(child) in _PLAIN:
                continue
            if type(child) in _LEAVES or self._is_leaf(child):
                scan.opens = scan.deep = True
            elif isinstance(child, Mapping | list | tuple):
                known = self._known.get(id(child))
                if known is None:
                    return child
                scan.add(*known)
        return None

    def _show(self, number: int, key: Any) -> str:
        """A typed path in Python's notation."""
        steps = []
        while number >= 0:
            steps.append(f"[{reprlib.repr(key)}]")
            number, key = self.containers[number].parent, self.containers[number].key
        return "state" + "".join(reversed(steps))

    def _duplicate(self, name: str, site: tuple[int, Any]) -> NoReturn:
        prefixes = [""]
        for number, container in enumerate(self.containers):
            if number:
                prefixes.append(f"{prefixes[container.parent]}{container.key}.")
            for key, segment, value in self._children(number, prefixes[number]):
                if f"{prefixes[number]}{segment}" == name and value is self.leaves[name] and (number, key) != site:
                    self._raise_duplicate(self._show(number, key), self._show(*site), name)
        self._raise_duplicate(name, self._show(*site), name)

    def _raise_duplicate(self, one: str, other: str, name: str) -> NoReturn:
        raise DuplicateKeyError(
            f"{one} and {other} would have one name", tensor=name, found=f"{one}, {other}", remedy="rename one of the two keys"
        )

    def _refuse_cycle(self, name: str) -> NoReturn:
        name = name.removesuffix(".")
        raise UnencodableObjectError(f"{name} contains itself", tensor=name, remedy="break the cycle")


class _Scan:
    """A container whose contents are being looked through."""

    __slots__ = ("children", "deep", "opens", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.opens = isinstance(value, Mapping)
        self.deep = False
        self.children: Iterator[Any] = iter(value.values() if self.opens else value)

    def add(self, child: object, opens: bool, deep: bool) -> None:
        self.deep |= deep
        self.opens |= deep if isinstance(child, tuple) else opens


def assign(state: Mapping[Any, Any], path: Path, value: object) -> None:
    """Put one value into a state by DCP's path, rebuilding tuples on the way.

    Args:
        state: the caller's state; its containers stay the same objects.
        path: DCP's path. A str is looked up in a mapping as it is, then among the texts of its other keys (``"1"`` finds 1).
        value: what to put there.

    Raises:
        KeyMismatchError: there is no such place. Nothing is ever added.
        StateError: the innermost container cannot be written.

    Thread-safety: none.
    """
    name = ".".join(map(str, path))
    chain: list[tuple[Any, Any]] = []
    here: Any = state
    for segment in path:
        key = _find_key(here, segment)
        if key is _NOWHERE:
            raise KeyMismatchError("the state has no place for a value", tensor=name, unexpected=(name,))
        chain.append((here, key))
        here = here[key]
    while chain:
        container, key = chain.pop()
        if container[key] is value:
            return
        if not isinstance(container, tuple):
            if not isinstance(container, MutableMapping | list):
                raise StateError(
                    f"a {type(container).__module__}.{type(container).__qualname__} cannot be written",
                    tensor=name,
                    remedy="use a dict in its place",
                )
            container[key] = value
            return
        elements = (*container[:key], value, *container[key + 1 :])
        value = elements if type(container) is tuple else type(container)._make(elements)  # type: ignore[attr-defined]


_NOWHERE: Any = object()


def _find_key(container: Any, segment: str | int) -> Any:
    if isinstance(container, Mapping):
        if segment in container:
            return segment
        text = str(segment)
        if text.isdecimal() and len(text) < 20 and text == str(int(text)) and int(text) in container:
            return int(text)  # an optimizer's state by number: not to be searched for each of its values
        return next((key for key in container if type(key) is not str and str(key) == text), _NOWHERE)
    if isinstance(container, list | tuple) and isinstance(segment, int) and 0 <= segment < len(container):
        return segment
    return _NOWHERE
