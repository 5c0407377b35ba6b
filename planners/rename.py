"""Renames: how a checkpoint's key becomes a key of the state.

Everything here is pure and decides from strings alone. A key is a path whose elements are joined by dots, as DCP flattens a state.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

from dcp_engine.errors import DuplicateKeyError, InvalidOptionError
from dcp_engine.types import Path

__all__ = ["Rename", "compile_rename", "rename_all", "rename_hint", "rename_param_names", "rename_path", "strip"]

Rename = Mapping[str, str] | Callable[[str], str]
"""From a key of the checkpoint to the key of the state: prefixes and what replaces them, or a function."""

WRAPPERS: Final = ("module.", "_orig_mod.")
"""Path elements that DistributedDataParallel and torch.compile put into names."""

_HINT_KEYS: Final = 1000


def strip(*wrappers: str) -> Callable[[str], str]:
    """A rename that removes path elements wherever they stand in a key.

    ``strip("module.", "_orig_mod.")`` turns ``model.module.layers.0._orig_mod.weight`` into ``model.layers.0.weight``. Two keys that become
    one are an error of the load, which names both.

    Args:
        wrappers: path elements, each with or without its dot; none of them may be empty. Default: those of DDP and ``torch.compile``.

    Returns:
        A pure, picklable function.
    """
    elements = tuple(wrapper.strip(".") for wrapper in wrappers or WRAPPERS)
    if not all(elements):
        raise InvalidOptionError("strip() was given an empty path element", expected="names such as 'module.'", found=repr(wrappers))
    return _Strip(re.compile(rf"(?:(?<=\.)|^)(?:(?:{'|'.join(map(re.escape, elements))})\.)+"))


class _Strip:
    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def __call__(self, key: str) -> str:
        return self._pattern.sub("", key)


class _ReplacePrefix:
    def __init__(self, prefixes: Mapping[str, str]) -> None:
        self._prefixes = sorted(prefixes.items(), key=lambda item: len(item[0]), reverse=True)

    def __call__(self, key: str) -> str:
        for prefix, replacement in self._prefixes:
            if _has_prefix(key, prefix):
                return replacement + key[len(prefix) :]
        return key


def _has_prefix(key: str, prefix: str) -> bool:
    """Whole path elements only: ``model`` is a prefix of ``model.w``, not of ``model_ema.w``."""
    return key.startswith(prefix) and (not prefix or prefix.endswith(".") or len(key) == len(prefix) or key[len(prefix)] == ".")


def compile_rename(rename: Rename | None) -> Callable[[str], str] | None:
    """The function that gives the state's key for a checkpoint's key; None where keys are not renamed.

    A mapping replaces the longest of its prefixes that the key starts with, once. A prefix ends at the end of a path element; the empty one
    matches every key, so that ``{"": "model."}`` puts a prefix before all keys.

    Raises:
        InvalidOptionError: not a mapping of strings to strings, nor callable.
    """
    if rename is None:
        return None
    if isinstance(rename, Mapping):
        for prefix, replacement in rename.items():
            if not isinstance(prefix, str) or not isinstance(replacement, str):
                raise InvalidOptionError(
                    "rename must map prefixes of the checkpoint's keys to their replacements",
                    expected="strings",
                    found=f"{prefix!r}: {replacement!r}",
                )
        return _ReplacePrefix(rename) if rename else None
    if callable(rename):
        return rename
    raise InvalidOptionError("rename is neither a mapping of prefixes nor a function", found=type(rename).__name__)


def rename_all(stored_keys: Iterable[str], rename: Callable[[str], str] | None) -> dict[str, str]:
    """State's key -> checkpoint's key, for all keys of a checkpoint.

    Raises:
        DuplicateKeyError: two keys of the checkpoint get one name; it names both.
        InvalidOptionError: the rename gave something that is not a string.
    """
    if rename is None:
        return {key: key for key in stored_keys}
    sources: dict[str, str] = {}
    for key in stored_keys:
        name = rename(key)
        if not isinstance(name, str):
            raise InvalidOptionError(f"rename gave a {type(name).__name__} for key {key!r}", expected="a string")
        if name in sources:
            raise DuplicateKeyError(
                f"rename gives two keys of the checkpoint one name: {sources[name]!r} and {key!r} both become {name!r}",
                tensor=name,
                remedy="make rename keep them apart",
            )
        sources[name] = key
    return sources


def rename_path(path: Path, key: str, name: str) -> Path:
    """Where a renamed value belongs when no state says it: the elements of ``path`` that the new name kept, and the rest as one element."""
    if key == name:
        return path
    head: list[str | int] = []
    rest = name
    for element in path[:-1]:
        if not rest.startswith(f"{element}."):
            break
        head.append(element)
        rest = rest[len(f"{element}.") :]
    tail: list[str | int] = []
    for element in reversed(path[len(head) :]):
        if not rest.endswith(f".{element}"):
            break
        tail.insert(0, element)
        rest = rest[: -len(f".{element}")]
    return (*head, rest, *tail)


def rename_param_names(key: str, value: object, rename: Callable[[str], str]) -> object:
    """An optimizer's list of parameter names, renamed as its state is; any other value as it is.

    ``torch.distributed.checkpoint.state_dict`` stores the names of a group's parameters as a value, under ``...param_groups.<i>.params``.
    """
    groups = re.match(r"((?:.*\.)?)param_groups\.(?:.+\.)?params\Z", key)
    if groups is None or not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return value
    head = f"{groups[1]}state."
    renamed_head = rename(f"{head}x.y").removesuffix("x.y")
    renamed = [rename(f"{head}{name}.y") for name in value]
    if not all(name.startswith(renamed_head) and name.endswith(".y") for name in renamed):
        return value
    return [name[len(renamed_head) : -len(".y")] for name in renamed]


def rename_hint(missing: Collection[str], unexpected: Collection[str]) -> str | None:
    """A rename that would make most of the smaller list match, as the argument to type; None where none was found.

    Args:
        missing: keys of the state that the checkpoint lacks.
        unexpected: keys of the checkpoint that no state wants.
    """
    if not missing or not unexpected:
        return None
    wanted, stored = set(sorted(missing)[:_HINT_KEYS]), set(sorted(unexpected)[:_HINT_KEYS])
    enough = (min(len(wanted), len(stored)) + 1) // 2
    bare = strip(*WRAPPERS)
    if len({bare(key) for key in stored} & wanted) >= enough:
        return "pass rename=dcp_engine.planners.strip('module.', '_orig_mod.')"
    if len({bare(key) for key in wanted} & stored) >= enough:
        return "take the state of the module itself, without the wrapper that puts 'module.' or '_orig_mod.' into its names"
    prefixes = Counter(_prefix_changes(wanted, stored))
    if not prefixes:
        return None
    (old, new), count = min(prefixes.items(), key=lambda item: (-item[1], item[0]))
    return f"pass rename={{{old!r}: {new!r}}}" if count >= enough else None


def _prefix_changes(wanted: Collection[str], stored: Collection[str]) -> Iterator[tuple[str, str]]:
    """(prefix of the checkpoint's key, prefix that the state's key has instead) for every pair where one of the two is empty."""
    for keys, others, adds in ((wanted, stored, True), (stored, wanted, False)):
        for key in keys:
            at = key.find(".")
            while at >= 0:
                prefix, rest = key[: at + 1], key[at + 1 :]
                if rest in others:
                    yield ("", prefix) if adds else (prefix, "")
                at = key.find(".", at + 1)
