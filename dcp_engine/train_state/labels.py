"""One object, a list or a dict of them: the labels under which a component keeps its parts. Checks what was handed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dcp_engine.errors import InvalidOptionError, StateError

__all__ = ["check_enabled", "check_labels", "check_stateful", "join", "labelled", "nest", "part_of", "require_type"]


def labelled(value: Any, *, argument: str, is_one: Callable[[Any], bool]) -> dict[str, Any]:
    """Label -> object: ``""`` for one that stands alone, ``"0"``, ``"1"``, ... for a list, the user's own names for a dict.

    Raises:
        InvalidOptionError: an object is of the wrong kind, or a name is not a text without dots.
    """
    if value is None:
        return {}
    if is_one(value):
        return {"": value}
    if isinstance(value, Mapping):
        found = dict(value)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        found = {str(number): part for number, part in enumerate(value)}
    else:
        raise InvalidOptionError(f"{argument} is of the wrong kind", expected="one object, a list or a dict of them", found=_kind(value))
    check_labels(found, argument=argument)
    for label, part in found.items():
        if not is_one(part):
            raise InvalidOptionError(f"{argument}[{label!r}] is of the wrong kind", found=_kind(part))
    return found


def check_labels(labels: Iterable[Any], *, argument: str) -> None:
    """Refuse names that cannot be part of a key.

    Raises:
        InvalidOptionError: naming the argument and the name.
    """
    for label in labels:
        if not isinstance(label, str) or not label or "." in label or "/" in label:
            raise InvalidOptionError(f"{argument}[{label!r}] is not a name", expected="a non-empty text without dots and slashes")


def check_stateful(parts: Mapping[str, Any], *, argument: str) -> None:
    """Refuse what has no ``state_dict`` and ``load_state_dict``.

    Raises:
        InvalidOptionError: naming the argument and the label.
    """
    for label, part in parts.items():
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(part, method, None)):
                raise InvalidOptionError(
                    f"{argument}{f'[{label!r}]' if label else ''} cannot be saved: it has no {method}()",
                    expected="an object with state_dict() and load_state_dict()",
                    found=_kind(part),
                )


def check_enabled(part: Any, stored: object, *, key: str) -> None:
    """Refuse the state of a scaler that was switched off for one that is on, which would find out in the middle of a load.

    Raises:
        StateError: naming the key.
    """
    is_enabled = getattr(part, "is_enabled", None)
    if callable(is_enabled) and is_enabled() and stored == {}:
        raise StateError("an enabled scaler cannot take up the state of one that was not", tensor=key, expected="a scale", found="{}")


def join(*elements: str) -> str:
    """A key of its elements; empty ones are left out."""
    return ".".join(element for element in elements if element)


def nest(parts: Mapping[str, Any]) -> Any:
    """What a component stores for its parts: the only one itself, or all by label."""
    return parts[""] if "" in parts else dict(parts)


def part_of(stored: Any, label: str) -> Any:
    """The inverse of :func:`nest` for one label."""
    return stored[label] if label else stored


def _kind(value: object) -> str:
    return f"a value of type {type(value).__module__}.{type(value).__qualname__}"


def require_type(value: object, kind: type, argument: str, expected: str) -> None:
    """Refuse an argument of another type; ``None`` passes.

    Raises:
        InvalidOptionError: names the argument and what is valid.
    """
    if value is not None and not isinstance(value, kind):
        raise InvalidOptionError(f"{argument} is of the wrong type", expected=expected, found=repr(value)[:300])
