"""The containers of a state with their exact types, leaves replaced by their keys: what DCP's flattening loses, in a form to store.

A skeleton is a tree of :class:`Node`. A leaf is the key of a value: the path to it, joined by dots, as DCP names it.

Encoded, it is an object of :mod:`dcp_engine.objects`: ``[1, kinds, counts, keys, details]``. Nodes and leaves are listed in pre-order:

- ``kinds``: bin, one byte a node or leaf; 0 is a leaf, other codes are those of ``KINDS``;
- ``counts``: for each node, how many children it has;
- ``keys``: for each mapping, its keys in order; a str or int as itself, any other key as the tuple (key, its text in a path);
- ``details``: for each node of kind ``default`` the name of its factory or nil, for each ``record`` its registered name.

Names of leaves are not stored: they follow from the paths. Nothing here recurses, so that depth costs no stack.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_engine.errors import KeyMismatchError, LimitExceededError, MalformedCheckpointError, PlanError, StateError
from dcp_engine.object_registry import find_by_name
from dcp_engine.object_types import FACTORIES
from dcp_engine.objects import Buffer, decode_object, encode_object
from dcp_engine.types import Path

__all__ = [
    "KINDS",
    "MAPPINGS",
    "MAX_NAME_CHARS",
    "Node",
    "decode_skeleton",
    "encode_skeleton",
    "leaf_paths",
    "merge_skeletons",
    "unflatten",
]

KINDS = {"dict": 1, "ordered": 2, "default": 3, "counter": 4, "mapping": 5, "list": 6, "empty_list": 7, "tuple": 8, "record": 9}
"""Kind -> code in the file, append-only. ``mapping`` is any other Mapping, which comes back as a dict; ``empty_list`` is a list that is a
value of its own besides, as DCP makes of a list without tensors; ``record`` is a registered namedtuple.
"""
MAPPINGS = frozenset(("dict", "ordered", "default", "counter", "mapping"))
_KIND_OF_CODE = {code: kind for kind, code in KINDS.items()}
_FIXED_LENGTH = frozenset(("tuple", "record"))
_DETAILED = frozenset(("default", "record"))

MAX_NAME_CHARS = 16384
"""Names are longer than their paths are deep, so that this bounds what a hostile skeleton can ask for."""

_KEY = "skeleton"


@dataclass(slots=True, eq=False)
class Node:
    """One container.

    Attributes:
        kind: a key of ``KINDS``.
        detail: name of the factory (``default``) or of the registered class (``record``); own key of an ``empty_list``.
        entries: typed key (index for sequences, in order and without gaps) -> key of the leaf, or a node.
    """

    kind: str
    detail: str | None = None
    entries: dict[Any, Node | str] = field(default_factory=dict)


def encode_skeleton(skeleton: Node) -> bytes:
    """Encode a skeleton.

    Raises:
        UnencodableObjectError: a key of a mapping is of a type that cannot be stored.

    Thread-safety: safe, as long as nobody changes the skeleton.
    """
    kinds, counts, keys, details = bytearray(), [], list[object](), list[str | None]()
    stack: list[Node | str] = [skeleton]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            kinds.append(0)
            continue
        kinds.append(KINDS[item.kind])
        counts.append(len(item.entries))
        if item.kind in MAPPINGS:
            keys.extend(key if type(key) in (str, int) else (key, str(key)) for key in item.entries)
        if item.kind in _DETAILED:
            details.append(item.detail)
        stack.extend(reversed(item.entries.values()))
    return encode_object([1, bytes(kinds), counts, keys, details], key=_KEY)


def decode_skeleton(data: Buffer, *, budget_bytes: int | None = None) -> Node:
    """Decode a skeleton, strictly: counts, kinds and keys must fit each other exactly and no two leaves may have one name.

    Raises:
        MalformedCheckpointError: bytes that :func:`encode_skeleton` does not produce.
        LimitExceededError: a name is too long, or the budget is spent.
    """
    parts = decode_object(data, key=_KEY, budget_bytes=budget_bytes)
    if type(parts) is not list or list(map(type, parts)) != [int, bytes, list, list, list] or parts[0] != 1:
        raise _malformed("five columns of version 1 wanted")
    try:
        return _Decoding(*parts[1:]).run()
    except (ValueError, StopIteration, TypeError) as error:
        if isinstance(error, StopIteration):
            raise _malformed("a column is too short") from None
        raise _malformed(str(error)) from error


def _malformed(rule: str) -> MalformedCheckpointError:
    return MalformedCheckpointError(f"the skeleton of the state is malformed: {rule}", remedy="take another checkpoint")


class _Decoding:
    """Reads the columns in step."""

    def __init__(self, kinds: bytes, counts: list[Any], keys: list[Any], details: list[Any]) -> None:
        if any(type(n) is not int or n < 0 for n in counts) or sum(counts) != len(kinds) - 1:
            raise ValueError("the counts do not add up")
        self.kinds, self.counts, self.keys, self.details = iter(kinds), iter(counts), iter(keys), iter(details)
        self.names: set[str] = set()

    def run(self) -> Node:
        root, children = self.node(_KIND_OF_CODE.get(next(self.kinds), ""))
        if root.kind not in MAPPINGS:
            raise ValueError("the state is no mapping")
        stack = [(root, children, "")]
        while stack:
            node, pending, prefix = stack[-1]
            for key, segment in pending:
                name = prefix + segment
                if len(name) > MAX_NAME_CHARS:
                    raise LimitExceededError("a name in the skeleton is too long", expected=f"at most {MAX_NAME_CHARS} characters")
                code = next(self.kinds)
                if code == 0:
                    node.entries[key] = self.leaf(name)
                    continue
                child, children = self.node(_KIND_OF_CODE.get(code, ""))
                if child.kind == "empty_list":
                    child.detail = self.leaf(name)
                node.entries[key] = child
                stack.append((child, children, name + "."))
                break
            else:
                stack.pop()
        if any(next(column, self) is not self for column in (self.kinds, self.counts, self.keys, self.details)):
            raise ValueError("a column is too long")
        return root

    def leaf(self, name: str) -> str:
        if name in self.names:
            raise ValueError(f"two leaves are called {name!r}")
        self.names.add(name)
        return name

    def node(self, kind: str) -> tuple[Node, Iterator[tuple[Any, str]]]:
        if not kind:
            raise ValueError("an unknown kind of container")
        detail = next(self.details) if kind in _DETAILED else None
        if not (type(detail) is str or (detail is None and kind != "record")) or (
            kind == "default" and not (detail is None or detail in FACTORIES)
        ):
            raise ValueError("a detail that does not fit its container")
        count = next(self.counts)
        if kind not in MAPPINGS:
            return Node(kind, detail), ((i, str(i)) for i in range(count))
        keys = [_split_key(next(self.keys)) for _ in range(count)]
        if len(dict(keys)) != count or len({segment for _, segment in keys}) != count:
            raise ValueError("a key twice in a mapping")
        return Node(kind, detail), iter(keys)


def _split_key(item: Any) -> tuple[Any, str]:
    if type(item) is str:
        return item, item
    if type(item) is int:
        return item, str(item)
    if type(item) is tuple and len(item) == 2 and type(item[1]) is str and type(item[0]) not in (str, int):
        return item
    raise ValueError("a key in a form that is none")


def leaf_names(skeleton: Node) -> Iterator[str]:
    """Keys of all leaves. An ``empty_list`` is a node, and not among them."""
    stack = [skeleton]
    while stack:
        for child in stack.pop().entries.values():
            if isinstance(child, str):
                yield child
            else:
                stack.append(child)


def leaf_paths(skeleton: Node) -> dict[str, Path]:
    """Key of every leaf, and of every ``empty_list``, -> its path in DCP's form; in pre-order."""
    paths: dict[str, Path] = {}
    stack: list[tuple[Node, Path, Iterator[tuple[Any, Node | str]]]] = [(skeleton, (), iter(skeleton.entries.items()))]
    while stack:
        node, prefix, children = stack[-1]
        textual = node.kind in MAPPINGS
        for key, child in children:
            path = (*prefix, key if type(key) is str or not textual else str(key))
            if isinstance(child, str):
                paths[child] = path
                continue
            if child.kind == "empty_list" and child.detail is not None:
                paths[child.detail] = path
            stack.append((child, path, iter(child.entries.items())))
            break
        else:
            stack.pop()
    return paths


def merge_skeletons(skeletons: Sequence[Node], ranks: Sequence[int] | None = None) -> Node:
    """The union of what all ranks hold, in the order in which it is first met.

    Ranks may lack keys of a mapping (pipeline stages) and tails of a list (experts); a tuple has one length everywhere.

    Args:
        skeletons: one a rank, in the order of ranks; pass equal ones once. Not changed.
        ranks: the first rank that has each, for errors. Default: their positions.

    Raises:
        PlanError: one path is a leaf here and a container there, or containers of different types, or two paths have one name; names it
            and the rank.
    """
    if not skeletons:
        raise PlanError("no rank described its state")
    merged = _copy(skeletons[0])
    for rank, skeleton in list(zip(ranks or range(len(skeletons)), skeletons, strict=True))[1:]:
        stack = [(merged, skeleton, "")]
        while stack:
            ours, theirs, prefix = stack.pop()
            _check_same_kind(ours, theirs, prefix, rank)
            stack.extend(_merge_entries(ours, theirs, prefix, rank))
    seen: set[str] = set()
    for name in leaf_names(merged):
        if name in seen:
            raise PlanError("different paths on different ranks have one name", tensor=name, remedy="rename one of the keys")
        seen.add(name)
    return merged


def _check_same_kind(ours: Node, theirs: Node, prefix: str, rank: int) -> None:
    kinds = {ours.kind, theirs.kind}
    if kinds == {"list", "empty_list"}:
        ours.kind, ours.detail = "empty_list", prefix.removesuffix(".")
    elif len(kinds) > 1 or ours.detail != theirs.detail:
        raise PlanError(
            "ranks hold different containers under one key",
            tensor=prefix.removesuffix(".") or None,
            rank=rank,
            expected=f"{ours.kind} {ours.detail or ''}".rstrip(),
            found=f"{theirs.kind} {theirs.detail or ''}".rstrip(),
        )
    if ours.kind in _FIXED_LENGTH and len(ours.entries) != len(theirs.entries):
        raise PlanError(
            "ranks hold tuples of different lengths under one key",
            tensor=prefix.removesuffix("."),
            rank=rank,
            expected=len(ours.entries),
            found=len(theirs.entries),
        )


def _merge_entries(ours: Node, theirs: Node, prefix: str, rank: int) -> Iterator[tuple[Node, Node, str]]:
    """Add what is new; return the pairs of nodes that both have."""
    plain = {str}.issuperset(map(type, (*ours.entries, *theirs.entries)))
    # By text, as two keys of one name must not meet; by value, as 1 and True are one key of a dict under two names.
    types = {} if plain else {str(key): type(key) for key in ours.entries} | {(key,): type(key) for key in ours.entries}
    for key, child in theirs.entries.items():
        name = f"{prefix}{key}"
        if not plain and not {type(key)}.issuperset((types.get(str(key), type(key)), types.get((key,), type(key)))):
            raise PlanError("ranks hold keys of different types where one key belongs", tensor=name, rank=rank, found=type(key).__name__)
        mine = ours.entries.get(key)
        if mine is None:
            ours.entries[key] = child if isinstance(child, str) else _copy(child)
        elif isinstance(mine, Node) and isinstance(child, Node):
            yield mine, child, f"{name}."
        elif mine != child:
            raise PlanError(
                "one rank holds a container where another holds a value",
                tensor=name,
                rank=rank,
                expected=mine.kind if isinstance(mine, Node) else "a value",
                found=child.kind if isinstance(child, Node) else "a value",
            )


def _copy(node: Node) -> Node:
    root = Node(node.kind, node.detail, dict(node.entries))
    stack = [root]
    while stack:
        entries = stack.pop().entries
        for key, child in entries.items():
            if isinstance(child, Node):
                entries[key] = copied = Node(child.kind, child.detail, dict(child.entries))
                stack.append(copied)
    return root


_ABSENT: Any = object()


@dataclass(slots=True)
class _Frame:
    """A container under construction, and where it belongs in the one around it."""

    node: Node
    key: Any
    pending: Iterator[tuple[Any, Node | str]]
    built: list[tuple[Any, Any]] = field(default_factory=list)


def unflatten(skeleton: Node, values: Mapping[str, object], *, partial: bool = False) -> Any:
    """Build the state with its exact containers.

    Args:
        skeleton: what :func:`decode_skeleton` returned.
        values: key -> value. The key of an ``empty_list`` may be there or not.
        partial: leave out leaves without a value, and containers that become empty by that. Without it every leaf must have one.

    Returns:
        New containers around the given values.

    Raises:
        KeyMismatchError: leaves without a value (under ``partial``: only some elements of a sequence), or values without a leaf.
        StateError: a namedtuple's class is not registered, or its fields have changed.

    Thread-safety: safe.
    """
    missing: list[str] = []
    used: set[str] = set()
    result: Any = _ABSENT
    stack = [_Frame(skeleton, None, iter(skeleton.entries.items()))]
    while stack:
        frame = stack[-1]
        for key, child in frame.pending:
            if isinstance(child, Node):
                stack.append(_Frame(child, key, iter(child.entries.items())))
                break
            value = values.get(child, _ABSENT)
            (missing.append if value is _ABSENT else used.add)(child)
            frame.built.append((key, value))
        else:
            stack.pop()
            if frame.node.kind == "empty_list" and frame.node.detail is not None:
                used.add(frame.node.detail)
            result = _build(frame, is_root=not stack)
            if stack:
                stack[-1].built.append((frame.key, result))
    unexpected = values.keys() - used
    if unexpected or (missing and not partial):
        raise KeyMismatchError(
            "the values are not those of the saved state", missing=tuple(sorted(missing)), unexpected=tuple(sorted(unexpected))
        )
    return result


def _build(frame: _Frame, *, is_root: bool) -> Any:
    node = frame.node
    items = [(key, value) for key, value in frame.built if value is not _ABSENT]
    if not items and node.entries and not is_root:
        return _ABSENT
    if node.kind == "ordered":
        return OrderedDict(items)
    if node.kind == "default":
        return defaultdict(None if node.detail is None else FACTORIES[node.detail], items)
    if node.kind == "counter":
        return Counter(dict(items))
    if node.kind in MAPPINGS:
        return dict(items)
    if len(items) < len(node.entries):
        absent = tuple(str(node.entries[key]) for key, value in frame.built if value is _ABSENT and isinstance(node.entries[key], str))
        raise KeyMismatchError("a sequence cannot be built from some of its elements", missing=tuple(sorted(absent)))
    elements = [value for _, value in items]
    if node.kind in ("list", "empty_list"):
        return elements
    if node.kind == "tuple":
        return tuple(elements)
    cls: Any = find_by_name(node.detail or "").cls
    if len(getattr(cls, "_fields", ())) != len(elements):
        raise StateError(
            f"the class registered as {node.detail!r} is no namedtuple of {len(elements)} fields",
            remedy="register the class that was saved",
        )
    return cls._make(elements)
