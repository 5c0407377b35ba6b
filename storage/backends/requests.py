"""How a remote storage is asked: each request bounded in time whatever its driver does, and sent again where that can help."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from dcp_engine.errors import InvalidOptionError
from dcp_engine.storage.backends.answers import Answer, answer_of

__all__ = ["NUM_TRIES", "RequestTimeoutError", "Requests", "pause", "split_options", "timed_out", "unclear"]

T = TypeVar("T")

TIMEOUT_OPTION: Final = "request_timeout_secs"
DEFAULT_TIMEOUT_SECS: Final = 60.0
SLOWEST_BYTES_PER_SEC: Final = 2**20
"""A request that carries bytes may take a second longer for each of these: a large object needs time on a slow line."""
NUM_TRIES: Final = 6
NUM_TIMEOUTS: Final = 2
"""Requests without an answer after which no further one is sent: each of them has cost the full timeout."""

_FIRST_WAIT_SECS = 0.5
_LONGEST_WAIT_SECS = 8.0
_AGAIN = frozenset({Answer.BUSY, Answer.UNKNOWN})
_random = random.Random()  # of its own: what training draws must not depend on requests


class RequestTimeoutError(TimeoutError):
    """The storage did not answer in time. The request may take effect later."""


class Requests:
    """Sends requests to one storage.

    Args:
        timeout_secs: longest wait for the answer to one request that carries no bytes.

    Thread-safety: any number of threads.
    """

    def __init__(self, timeout_secs: float) -> None:
        self.timeout_secs = timeout_secs

    def once(self, call: Callable[[], T], *, num_bytes: int = 0) -> T:
        """The result of one request, or what its driver raises.

        Args:
            call: makes the request. After a timeout it still runs, in a daemon thread that nobody waits for: whatever it uses must stay
                valid, and it must not matter when it takes effect.
            num_bytes: that it carries.

        Raises:
            RequestTimeoutError: there was no answer in time.
        """
        secs = self.timeout_secs + num_bytes / SLOWEST_BYTES_PER_SEC
        results: list[tuple[bool, Any]] = []
        answered = threading.Event()

        def work() -> None:
            try:
                results.append((True, call()))
            except BaseException as error:  # noqa: BLE001 - raised again where the answer is awaited
                results.append((False, error))
            finally:
                answered.set()

        threading.Thread(target=work, name="dcp-engine-request", daemon=True).start()
        if not answered.wait(secs):
            raise RequestTimeoutError(f"no answer within {secs:.4g} s")
        good, result = results.pop()
        if not good:
            raise result
        return result  # type: ignore[no-any-return]

    def ask(self, call: Callable[[], T], *, num_bytes: int = 0, again: frozenset[Answer] = _AGAIN) -> T:
        """The result of a request that may take effect any number of times. Parameters and errors as for :meth:`once`.

        Args:
            again: answers after which it is sent again.
        """
        number = timeouts = 0
        while True:
            number += 1
            try:
                return self.once(call, num_bytes=num_bytes)
            except Exception as error:
                timeouts += isinstance(error, RequestTimeoutError)
                if number == NUM_TRIES or timeouts == NUM_TIMEOUTS or answer_of(error) not in again:
                    raise
            pause(number)


def pause(number: int) -> None:
    """Waits after try ``number``, counted from 1: longer each time, and not as long as others that failed at the same moment."""
    time.sleep(min(_LONGEST_WAIT_SECS, _FIRST_WAIT_SECS * 2.0 ** (number - 1)) * _random.uniform(0.5, 1.0))


def timed_out(error: BaseException) -> bool:
    """Whether an error of the engine comes from a request without an answer."""
    return isinstance(error.__cause__, RequestTimeoutError)


def unclear(error: BaseException) -> bool:
    """Whether an error of the engine leaves open what another request of the same kind would be answered."""
    return error.__cause__ is not None and answer_of(error.__cause__) in _AGAIN


def split_options(storage_options: Mapping[str, Any], *, path: str) -> tuple[Requests, dict[str, Any]]:
    """How to ask the storage, and the keyword arguments of its driver, from what a user gives as ``storage_options``.

    Raises:
        InvalidOptionError: ``request_timeout_secs`` is no time.
    """
    driver = dict(storage_options)
    secs = driver.pop(TIMEOUT_OPTION, DEFAULT_TIMEOUT_SECS)
    if isinstance(secs, bool) or not isinstance(secs, (int, float)) or not 0 < secs < math.inf:
        raise InvalidOptionError(
            f"storage_options[{TIMEOUT_OPTION!r}] is no time", path=path, expected="a number of seconds above 0", found=repr(secs)[:300]
        )
    return Requests(float(secs)), driver
