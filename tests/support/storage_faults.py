"""What an object store may do to a request, put into the fake storage at one request or at all from one on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

from dcp_engine.storage.backends.requests import RequestTimeoutError

__all__ = ["FAULTS", "LASTS", "ServerError", "StorageFaults"]

FAULTS = (
    "applied, no answer",
    "dropped",
    "late",
    "409",
    "412",
    "503",
    "500",
    "stale listing: nothing yet",
    "stale listing: still there",
    "stalls",
    "applied, then stalls",
)
LASTS = ("once", "from then on", "for its like")
"""A fault is met by one request, by all that follow as well, or by those among them that ask the same of an object of that name."""
_CODES = {409: "ConditionalRequestConflict", 412: "PreconditionFailed", 500: "InternalError", 503: "ServiceUnavailable"}
_WRITES = frozenset({"create", "swap", "pipe_file", "put_file", "rm_file"})


class ServerError(OSError):
    """An answer that the driver did not translate, as botocore keeps it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response: dict[str, Any] = {"Error": {"Code": _CODES[status]}, "ResponseMetadata": {"HTTPStatusCode": status}}


class StorageFaults:
    """Install it as ``FakeFileSystem.intercept``. Counts every request; puts one kind of fault.

    Args:
        fault: one of ``FAULTS``, or None to count only.
        at: number of the request that meets it, from 0.
        lasts: one of ``LASTS``: which requests after that one meet it, too.
        waits: what stalls really does, until :meth:`release`. Else it ends at once, as what its caller sees when the deadline has passed.

    Attributes:
        calls: of the driver, one for each request so far.
        put: faults that were really put.
        stalled: requests that hang.
    """

    ghosts: ClassVar[tuple[str, ...]] = ("MANIFEST", "model-00000.shard")

    def __init__(self, fault: str | None = None, at: int = 0, *, lasts: str = "once", waits: bool = False) -> None:
        self.fault, self.at, self.lasts, self.waits = fault, at, lasts, waits
        self.calls: list[str] = []
        self.put = self.stalled = 0
        self._like: tuple[str, str] | None = None
        self._late: list[Callable[[], Any]] = []
        self._released = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, call: str, path: str, proceed: Callable[[], Any]) -> Any:
        with self._lock:
            number = len(self.calls)
            self.calls.append(call)
            like = (call, path.rpartition("/")[2])
            if number == self.at:
                self._like = like
            later = number > self.at and (self.lasts == "from then on" or (self.lasts == "for its like" and like == self._like))
            meets = self.fault is not None and (number == self.at or later)
            meets = meets and (call == "ls" or not str(self.fault).startswith("stale"))
            self.put += meets
        return self._fail(call, path, proceed) if meets else proceed()

    def _fail(self, call: str, path: str, proceed: Callable[[], Any]) -> Any:
        match self.fault:
            case "applied, no answer":
                proceed()
                raise ConnectionResetError("the connection was reset after the request was sent")
            case "dropped":
                raise ConnectionResetError("the connection was reset")
            case "late":
                if call in _WRITES:
                    self._late.append(proceed)
                raise TimeoutError("no answer")
            case "stale listing: nothing yet":
                raise FileNotFoundError(path)
            case "stale listing: still there":
                return sorted({*_or_nothing(proceed), *(f"{path.rstrip('/')}/{name}" for name in self.ghosts)})
            case "stalls" | "applied, then stalls":
                if self.fault != "stalls":
                    proceed()
                if not self.waits:
                    raise RequestTimeoutError("the deadline has passed")
                self.stalled += 1
                self._released.wait()
                raise ConnectionResetError("the connection was reset at last")
        raise ServerError(int(str(self.fault)))

    def settle(self) -> None:
        """What comes late takes effect now, in the order in which it was sent."""
        late, self._late = self._late, []
        for proceed in late:
            try:
                proceed()
            except OSError:
                continue  # a condition that does not hold any more; nobody waits for the answer

    def release(self) -> None:
        """Ends what stalls, so that its threads end."""
        self._released.set()


def _or_nothing(proceed: Callable[[], Any]) -> list[str]:
    try:
        return list(proceed())
    except FileNotFoundError:
        return []
