"""The classes that a program registered for the object encoding: the only ones beyond the fixed table that are ever made from a file."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_engine.errors import InvalidOptionError, StateError
from dcp_engine.object_arrays import ARRAYS
from dcp_engine.object_types import STANDARD, Extension, Fields, Refusal, check_parts, require

__all__ = ["ENUM", "RECORD", "Registration", "find_by_name", "find_by_type", "register_type"]

_MAX_NAME_CHARS = 256

_lock = threading.Lock()
_by_type: dict[type, Registration] = {}
_by_name: dict[str, Registration] = {}


@dataclass(frozen=True, slots=True)
class Registration:
    """A registered class.

    Attributes:
        cls: the class; instances of subclasses are not covered.
        name: its name in files.
        to_fields: instance -> fields (unused for an Enum).
        from_fields: fields -> instance (unused for an Enum).
    """

    cls: type
    name: str
    to_fields: Callable[[Any], Mapping[str, object]]
    from_fields: Callable[[dict[str, Any]], object]


def register_type(
    cls: type,
    *,
    name: str,
    to_fields: Callable[[Any], Mapping[str, object]] | None = None,
    from_fields: Callable[[dict[str, Any]], object] | None = None,
) -> None:
    """Let instances of a class be stored in checkpoints, and be made again from them.

    Register at import time of the module that defines the class, in the program that saves and in the one that loads.

    Args:
        cls: an Enum, a dataclass or a namedtuple; any other class together with both functions. Instances of subclasses are not covered.
        name: the name in files; it must stay the same for ever, whatever becomes of the class's own name.
        to_fields: instance -> mapping from field names to encodable values. Default: the fields of the dataclass or namedtuple.
        from_fields: what ``to_fields`` returned, as a dict -> instance; a place to accept the fields of older versions. Default: the
            instance is made with exactly these fields, and neither ``__init__`` nor ``__post_init__`` runs.

    Raises:
        InvalidOptionError: the class cannot be registered, or the class or the name already stands for another one.

    Thread-safety: safe. Registering a class again, or its redefinition of the same module and name, replaces the earlier registration.
    """
    if not isinstance(cls, type):
        raise InvalidOptionError("only a class can be registered", expected="a class", found=repr(cls))
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS or not name.isprintable():
        raise InvalidOptionError("a registered name is printable text", expected=f"1 to {_MAX_NAME_CHARS} characters", found=repr(name))
    if cls in STANDARD or cls in ARRAYS or cls in (int, float, str, bytes, bool, list, dict, type(None), object):
        raise InvalidOptionError(f"{cls.__qualname__} is encoded as it is and cannot be registered")
    registration = _make(cls, name, to_fields, from_fields)
    with _lock:
        for other in (_by_name.get(name), _by_type.get(cls)):
            if other is not None and not (_same_class(other.cls, cls) and other.name == name):
                raise InvalidOptionError(
                    f"{cls.__qualname__} cannot be registered as {name!r}",
                    found=f"{other.cls.__module__}.{other.cls.__qualname__} registered as {other.name!r}",
                )
        replaced = _by_name.get(name)
        if replaced is not None:
            _by_type.pop(replaced.cls, None)
        _by_name[name] = _by_type[cls] = registration


def find_by_type(cls: type) -> Registration | None:
    """The registration of exactly this class."""
    return _by_type.get(cls)


def find_by_name(name: str) -> Registration:
    """The registration under a name that a file holds.

    Raises:
        StateError: nothing is registered under it here.
    """
    found = _by_name.get(name)
    if found is None:
        raise StateError(
            f"the checkpoint holds a value of the registered type {name!r}, which this program has not registered",
            remedy=f"call dcp_engine.objects.register_type(..., name={name!r}) before loading",
        )
    return found


def _same_class(one: type, other: type) -> bool:
    # A notebook cell or a reloaded module that runs again defines the class anew.
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def _make(
    cls: type,
    name: str,
    to_fields: Callable[[Any], Mapping[str, object]] | None,
    from_fields: Callable[[dict[str, Any]], object] | None,
) -> Registration:
    if issubclass(cls, enum.Enum):
        if to_fields is not None or from_fields is not None:
            raise InvalidOptionError(f"the Enum {cls.__qualname__} is stored by its members' names and takes no functions")
        return Registration(cls, name, _unused, _unused)
    if (to_fields is None) != (from_fields is None):
        raise InvalidOptionError(f"{cls.__qualname__} needs both to_fields and from_fields, or neither")
    if to_fields is not None and from_fields is not None:
        return Registration(cls, name, to_fields, from_fields)
    if dataclasses.is_dataclass(cls):
        return Registration(cls, name, _dataclass_fields, lambda fields: _make_dataclass(cls, fields))
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return Registration(cls, name, lambda value: value._asdict(), lambda fields: _make_namedtuple(cls, fields))
    raise InvalidOptionError(
        f"{cls.__qualname__} is no Enum, dataclass or namedtuple",
        remedy="pass to_fields and from_fields, which take it apart and make it again",
    )


def _unused(_: Any) -> Any:
    raise StateError("an Enum has no fields")


def _dataclass_fields(value: Any) -> dict[str, object]:
    names = [field.name for field in dataclasses.fields(value)]
    extra = sorted(set(getattr(value, "__dict__", ())) - set(names))
    if extra:
        raise Refusal(f"its attributes {', '.join(extra)} are no fields of the dataclass", "register it with to_fields and from_fields")
    return {name: getattr(value, name) for name in names}


def _check_names(cls: type, wanted: Sequence[str], fields: dict[str, Any]) -> None:
    if sorted(wanted) != sorted(fields):
        raise StateError(
            f"the stored fields of {cls.__qualname__} are not those of the registered class",
            expected=", ".join(sorted(wanted)),
            found=", ".join(sorted(fields)),
            remedy="register it with a from_fields that accepts the older fields",
        )


def _make_dataclass(cls: type, fields: dict[str, Any]) -> object:
    _check_names(cls, [field.name for field in dataclasses.fields(cls)], fields)
    value: object = object.__new__(cls)
    for name, item in fields.items():
        object.__setattr__(value, name, item)  # frozen dataclasses refuse the ordinary way
    return value


def _make_namedtuple(cls: Any, fields: dict[str, Any]) -> object:
    _check_names(cls, cls._fields, fields)
    return cls._make(fields[name] for name in cls._fields)


# --- rows of the table


def _explode_enum(value: enum.Enum) -> Sequence[object]:
    registration = _by_type[type(value)]
    if isinstance(value, enum.Flag):
        return (registration.name, value.value)
    return (registration.name, value.name)


def _build_enum(parts: list[Any]) -> object:
    name, member = check_parts(parts, str, (str, int))
    cls: Any = find_by_name(name).cls
    require(issubclass(cls, enum.Enum), f"{name!r} is registered, but not as an Enum")
    if issubclass(cls, enum.Flag):
        require(type(member) is int, "a Flag is stored by its int")
        return cls(member)
    if member not in cls.__members__:
        raise StateError(f"the registered Enum {name!r} has no member {member!r}", expected=", ".join(cls.__members__))
    return cls.__members__[member]


def _explode_record(value: object) -> Sequence[object]:
    registration = _by_type[type(value)]
    try:
        fields = registration.to_fields(value)
    except Refusal:
        raise
    except Exception as error:  # the user's function may raise anything; the place in the state must reach its author
        raise Refusal(f"to_fields of {registration.name!r} failed: {error!r}") from error
    if not isinstance(fields, Mapping) or any(type(name) is not str for name in fields):
        raise Refusal(f"to_fields of {registration.name!r} did not return a mapping from str")
    return (registration.name, Fields(fields))


def _build_record(parts: list[Any]) -> object:
    name, fields = check_parts(parts, str, dict)
    require(all(type(field) is str for field in fields), "a field that is no str")
    registration = find_by_name(name)
    require(not issubclass(registration.cls, enum.Enum), f"{name!r} is registered as an Enum")
    try:
        value = registration.from_fields(fields)
    except StateError:
        raise
    except Exception as error:  # the user's function may raise anything; it is not damage of the file
        raise StateError(f"from_fields of {name!r} failed: {error!r}", remedy="repair it, or load with the version that saved") from error
    if type(value) is not registration.cls:
        raise StateError(
            f"from_fields of {name!r} made another type", expected=registration.cls.__qualname__, found=type(value).__qualname__
        )
    return value


ENUM = Extension(40, _explode_enum, _build_enum)
RECORD = Extension(41, _explode_record, _build_record)
