"""Whether a storage really puts objects on conditions: tried once on each storage, since drivers and storages may ignore them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dcp_engine.errors import StorageError
from dcp_engine.storage.backends.answers import Answer
from dcp_engine.storage.backends.requests import unclear

if TYPE_CHECKING:
    from dcp_engine.storage.backends.remote import RemoteDirectory

__all__ = ["creates", "forget", "known", "swaps"]

_MAX_PROBE_BYTES = 64

# By driver, and within it by bucket: one driver serves many, on which others may have set rules of their own.
_known: WeakKeyDictionary[Any, dict[tuple[str, str], bool]] = WeakKeyDictionary()
_lock = threading.Lock()


def known(condition: str, directory: RemoteDirectory, find_out: Callable[[], bool]) -> bool:
    """What is known of a condition on the storage of a directory; ``find_out`` is called if nothing is, and its errors are not kept."""
    driver, bucket = directory.storage
    with _lock:
        answer = _known.get(driver, {}).get((condition, bucket))
    if answer is None:
        answer = find_out()
        with _lock:
            _known.setdefault(driver, {})[condition, bucket] = answer
    return answer


def forget() -> None:
    """Finds out everything anew: for tests, and for storages whose rules were changed."""
    with _lock:
        _known.clear()


def creates(directory: RemoteDirectory, probe: str) -> bool:
    """Tries whether an object is created only where there is none. What the object holds in the end decides; no answer decides nothing.

    Raises:
        StorageError: it could not be found out, or nothing can be written there at all.
    """
    with _removed_at_last(directory, probe):
        try:
            directory.put_until_answered(probe, b"first", create=True)
        except StorageError as error:
            if unclear(error):
                raise
            directory.replace(probe, b"first")  # raises where the storage itself is at fault; else the driver refused the condition
            return False
        try:
            answer, _ = directory.put_until_answered(probe, b"second", create=True)
        except StorageError as error:
            if unclear(error):
                raise
            answer = Answer.REFUSED
        return answer is not Answer.DONE and directory.read_small(probe, _MAX_PROBE_BYTES) == b"first"


def swaps(directory: RemoteDirectory, probe: str) -> bool:
    """Tries whether an object is put only in place of what it is said to be. Raises as :func:`creates`."""
    with _removed_at_last(directory, probe):
        directory.replace(probe, b"first")
        tag = directory.tag(probe)
        if tag is None:
            return False
        for content in (b"second", b"third"):
            try:
                answer, _ = directory.put_until_answered(probe, content, over=tag)
            except StorageError as error:
                if unclear(error):
                    raise
                return False
        return answer is Answer.EXISTS and directory.read_small(probe, _MAX_PROBE_BYTES) == b"second"


@contextlib.contextmanager
def _removed_at_last(directory: RemoteDirectory, probe: str) -> Iterator[None]:
    """Storages that never delete keep the probe: it lies in the attempt's own prefix, where nobody reads it."""
    try:
        yield
    finally:
        with contextlib.suppress(StorageError):
            directory.remove(probe)
