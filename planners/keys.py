"""Names on load: how a checkpoint's key becomes a key of the state, which keys are asked for, and how strict each component is.

Everything here is pure and decides from strings alone. A key is a path whose elements are joined by dots, as DCP flattens a state.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from dcp_engine.components import DEFAULT_COMPONENT, WELL_KNOWN, ComponentMap
from dcp_engine.errors import DuplicateKeyError, InvalidOptionError
from dcp_engine.types import Path

__all__ = [
    "Rename",
    "Selection",
    "Strictness",
    "compile_rename",
    "dotted_prefixes",
    "optimizer_slot",
    "rename_all",
    "rename_hint",
    "rename_param_names",
    "rename_path",
    "strip",
]

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


class Selection:
    """Which keys are asked for: those of which the whole, or a part up to a dot, matches one of the globs.

    ``*`` also matches dots. ``"model"`` asks for all of ``model.*``.

    Args:
        patterns: globs by the rules of ``fnmatch``, case-sensitive. ``None`` asks for all keys.

    Raises:
        InvalidOptionError: a single string, or an empty or non-string pattern.

    Thread-safety: immutable after construction.
    """

    def __init__(self, patterns: Sequence[str] | None = None) -> None:
        if patterns is not None and (isinstance(patterns, str) or not all(isinstance(glob, str) and glob for glob in patterns)):
            raise InvalidOptionError("keys is not a sequence of globs", expected="such as ['model.*']", found=repr(patterns))
        self.is_all = patterns is None
        self._plain = {glob for glob in patterns or () if not _GLOB.search(glob)}
        self._globs = [glob for glob in patterns or () if _GLOB.search(glob)]
        self._matches = [_compile_globs([glob]) for glob in self._globs]
        self._match_any = _compile_globs(self._globs) if self._globs else None

    def __call__(self, key: str) -> bool:
        """Whether ``key`` is asked for."""
        if self.is_all:
            return True
        if self._plain and any(part in self._plain for part in dotted_prefixes(key)):
            return True
        return self._match_any is not None and self._match_any(key) is not None

    def unmatched(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Patterns that none of ``keys`` matches."""
        if self.is_all:
            return ()
        plain, globs = set(self._plain), dict(zip(self._globs, self._matches, strict=True))
        for key in keys:
            plain.difference_update(dotted_prefixes(key))
            for glob in [glob for glob, match in globs.items() if match(key)]:
                del globs[glob]
            if not plain and not globs:
                break
        return (*sorted(plain), *globs)


_GLOB = re.compile(r"[*?\[]")


def _compile_globs(globs: Sequence[str]) -> Callable[[str], re.Match[str] | None]:
    return re.compile("|".join(fnmatch.translate(form) for glob in globs for form in (glob, f"{glob}.*"))).match


def dotted_prefixes(key: str) -> Iterator[str]:
    """``a``, ``a.b`` and ``a.b.c`` for ``a.b.c``."""
    at = key.find(".")
    while at >= 0:
        yield key[:at]
        at = key.find(".", at + 1)
    yield key


class Strictness:
    """Whether missing and unexpected keys are errors, by component.

    Args:
        strict: for all components, or per component; components that are not named are strict. Names of top-level entries that stand for a
            component (``optim``) are taken for it.
        components: glob pattern of keys -> component, before the well-known names (:mod:`dcp_engine.components`).

    Raises:
        InvalidOptionError: a name that is no component, or a value that is not a bool.

    Thread-safety: immutable after construction.
    """

    def __init__(self, strict: bool | Mapping[str, bool], components: Mapping[str, str] | None = None) -> None:
        self._components = ComponentMap(components)
        if isinstance(strict, bool):
            self._default, self._by_component = strict, {}
            return
        if not isinstance(strict, Mapping):
            raise InvalidOptionError("strict is neither a bool nor a mapping of components to bools", found=repr(strict))
        known = {DEFAULT_COMPONENT, *WELL_KNOWN.values(), *(components or {}).values()}
        self._default, self._by_component = True, dict[str, bool]()
        for name, value in strict.items():
            component = name if name in known else WELL_KNOWN.get(name)
            if component is None or not isinstance(value, bool):
                raise InvalidOptionError(
                    f"strict[{name!r}] is not a component's strictness",
                    expected=f"True or False for one of {', '.join(sorted(known))}",
                    found=repr(value),
                )
            self._by_component[component] = value

    def of(self, key: str) -> bool:
        """Whether a missing or unexpected ``key`` is an error."""
        return self._by_component.get(self._components.of(key), self._default) if self._by_component else self._default

    def is_optimizer(self, key: str) -> bool:
        """Whether ``key`` is of the optimizer's component."""
        return self._components.of(key) == "optimizer"


def optimizer_slot(key: str) -> tuple[str, str] | None:
    """An optimizer's state of one parameter: (key up to the parameter's name, name of the slot such as ``exp_avg``); None for other keys.

    Call it for keys of the optimizer's component, or of an optimizer's own state dict: elsewhere a module may be named ``state``.
    """
    head, found, rest = f".{key}".partition(".state.")
    owner, dot, slot = rest.rpartition(".")
    return (f"{head}.state.{owner}"[1:], slot) if found and dot else None


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
