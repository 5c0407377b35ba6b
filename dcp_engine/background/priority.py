"""How little of the machine a background save may take: priorities of its threads or its process."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import threading
from dataclasses import dataclass
from typing import Literal

from dcp_engine.errors import InvalidOptionError

__all__ = ["Priority"]

_LOG = logging.getLogger(__name__)
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273}
"""Numbers of the system call, which the C library has no function for (ioprio_set(2))."""
_CLASSES = {"best-effort": 2, "idle": 3}
_WHO_PROCESS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """Priorities of whatever saves in the background.

    Attributes:
        nice: 0 to 19, added niceness of the CPU work; None leaves it.
        io_class: ``"best-effort"`` at its lowest level, ``"idle"`` (only when nobody else wants the disk), None leaves it. Linux only, and
            only with a disk scheduler that knows priorities.

    Raises:
        InvalidOptionError: out of range.
    """

    nice: int | None = None
    io_class: Literal["best-effort", "idle"] | None = None

    def __post_init__(self) -> None:
        if self.nice is not None and (isinstance(self.nice, bool) or not isinstance(self.nice, int) or not 0 <= self.nice <= 19):
            raise InvalidOptionError("nice is out of range", expected="None or an int from 0 to 19", found=repr(self.nice))
        if self.io_class is not None and self.io_class not in _CLASSES:
            raise InvalidOptionError("unknown io_class", expected=f"None or one of {', '.join(_CLASSES)}", found=repr(self.io_class))

    def apply(self) -> None:
        """To the calling thread, and so to all threads and processes that it starts afterwards. What the system refuses is logged."""
        thread = threading.get_native_id()
        if self.nice is not None:
            try:
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + self.nice)
            except OSError as error:
                _LOG.warning("the system refuses nice=%d for background saves: %s", self.nice, error)
        number = _IOPRIO_SET.get(platform.machine()) if platform.system() == "Linux" else None
        if self.io_class is not None and number is not None:
            level = 7 if self.io_class == "best-effort" else 0
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.syscall(number, _WHO_PROCESS, thread, _CLASSES[self.io_class] << 13 | level) != 0:
                reason = os.strerror(ctypes.get_errno())
                _LOG.warning("the system refuses io_class=%r for background saves: %s", self.io_class, reason)
