"""A save as it is seen from outside: that it gets on, that it shall end, and who has a say before it is published."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from dcp_engine.errors import CommitError, DcpEngineError, InvalidOptionError

if TYPE_CHECKING:
    from dcp_engine.storage.attempts import Fence
    from dcp_engine.storage.backends.base import Buffer, WriteFile

__all__ = ["WatchedFile", "WriteWatch", "ask", "watched"]

_SLICE_SECS = 0.5


class WriteWatch:
    """What one writer shows of its save, and is told.

    It stands for all fences of the writer, so it is a ``Fence`` itself.

    Attributes:
        progress: grows with every write that the storage has taken, and with every other step that is done. Only that it grows means
            something: a save whose progress stands still is in one call of the storage, or hangs.

    Raises:
        InvalidOptionError: the fence cannot be asked.

    Thread-safety: all methods may be called from any thread. May cross processes by pickle if the fences may.
    """

    def __init__(self, fence: Fence | None = None) -> None:
        if fence is not None and not callable(getattr(fence, "check", None)):
            raise InvalidOptionError("fence cannot be asked", expected="None or an object with check()", found=repr(fence)[:300])
        self.progress = 0
        self._fences = [] if fence is None else [fence]
        self._ended: DcpEngineError | None = None

    def begin(self) -> None:
        """A save begins: what broke the last one off does not hold any more."""
        self._ended = None

    def tick(self) -> None:
        """One more step is done.

        Raises:
            DcpEngineError: the save was broken off.
        """
        self.progress += 1
        self.check_going_on()

    def check_going_on(self) -> None:
        """Raise if the save was broken off."""
        if self._ended is not None:
            raise self._ended

    def break_off(self, error: DcpEngineError) -> None:
        """The save shall end with this error: no further write begins."""
        self._ended = error

    def sleep(self, secs: float) -> None:
        """Wait on purpose, which is no standing still."""
        deadline = time.monotonic() + secs
        while (left_secs := deadline - time.monotonic()) > 0:
            time.sleep(min(_SLICE_SECS, left_secs))
            self.tick()

    @contextlib.contextmanager
    def fenced_by(self, fence: Fence) -> Iterator[None]:
        """Meanwhile this one is asked, too, before anything is published; last."""
        self._fences.append(fence)
        try:
            yield
        finally:
            self._fences.remove(fence)

    def check(self) -> None:
        """Ask all fences.

        Raises:
            DcpEngineError: of the first that says no, or of what broke the save off.
        """
        self.check_going_on()
        for fence in self._fences:
            ask(fence)


def ask(fence: Fence) -> None:
    """Returns if a fence lets its writer go on.

    Raises:
        DcpEngineError: it does not. CommitError: it raised what no fence should, which might not even reach the other ranks.
    """
    try:
        fence.check()
    except DcpEngineError:
        raise
    except Exception as error:
        raise CommitError(
            "the fence failed, so that it cannot be told whether this writer may go on",
            expected="FencedError, or another error of the engine",
            found=f"{type(error).__name__}: {error}",
            remedy="repair the fence",
        ) from error


class WatchedFile:
    """A ``WriteFile`` of a save that is watched. Thread-safety: that of the file."""

    def __init__(self, file: WriteFile, watch: WriteWatch) -> None:
        self._file = file
        self._watch = watch

    @property
    def position(self) -> int:
        """See ``WriteFile``, as for all that follows."""
        return self._file.position

    def write_at(self, position: int, parts: Sequence[Buffer]) -> None:
        self._watch.check_going_on()
        self._file.write_at(position, parts)
        self._watch.tick()

    def write_pieces(self, position: int, part: Buffer, seen: Callable[[memoryview], object]) -> None:
        def passed(piece: memoryview) -> object:
            self._watch.tick()
            return seen(piece)

        self._watch.check_going_on()
        self._file.write_pieces(position, part, passed)
        self._watch.tick()

    def write(self, parts: Sequence[Buffer]) -> None:
        self._watch.check_going_on()
        self._file.write(parts)
        self._watch.tick()

    def settle(self, start: int, num_bytes: int) -> bool:
        settled = self._file.settle(start, num_bytes)
        self._watch.tick()
        return settled

    def commit(self) -> None:
        self._watch.check_going_on()
        self._file.commit()
        self._watch.tick()

    def abort(self) -> None:
        self._file.abort()


def watched(create: Callable[[str], WriteFile], watch: WriteWatch) -> Callable[[str], WriteFile]:
    """What makes new files, each watched."""

    def make(name: str) -> WriteFile:
        watch.check_going_on()
        return WatchedFile(create(name), watch)

    return make
