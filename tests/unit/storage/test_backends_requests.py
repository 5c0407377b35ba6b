"""Requests to a remote storage: what an answer says, how long one is waited for, and when a request is sent again."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.storage_faults import ServerError

from dcp_engine.errors import InvalidOptionError
from dcp_engine.storage.backends import requests
from dcp_engine.storage.backends.answers import Answer, answer_of
from dcp_engine.storage.backends.requests import NUM_TIMEOUTS, NUM_TRIES, Requests, RequestTimeoutError, split_options


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_FIRST_WAIT_SECS", 0.0)


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


class AzureError(Exception):
    def __init__(self, status_code: int, error_code: str) -> None:
        self.status_code, self.error_code = status_code, error_code


class GoogleError(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


class NoCredentialsError(Exception):
    """botocore's name."""


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (FileNotFoundError("x"), Answer.ABSENT),
        (FileExistsError("x"), Answer.EXISTS),
        (PermissionError("AccessDenied"), Answer.REFUSED),
        (OSError(errno.ENOSPC, "full"), Answer.REFUSED),
        (OSError(errno.EBUSY, "SlowDown, or a conflict"), Answer.UNKNOWN),
        (OSError(errno.EIO, "x"), Answer.UNKNOWN),
        (TimeoutError("x"), Answer.UNKNOWN),
        (ConnectionResetError("x"), Answer.UNKNOWN),
        (RequestTimeoutError("x"), Answer.UNKNOWN),
        (KeyError("a driver's own mistake"), Answer.UNKNOWN),
        (TypeError("unexpected keyword argument"), Answer.REFUSED),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "half a reply"), Answer.UNKNOWN),
        (NoCredentialsError(), Answer.REFUSED),
        (ServerError(409), Answer.BUSY),
        (ServerError(412), Answer.EXISTS),
        (ServerError(500), Answer.UNKNOWN),
        (ServerError(503), Answer.UNKNOWN),
        (caused(OSError(errno.EINVAL, "translated"), ServerError(412)), Answer.EXISTS),
        (caused(OSError(errno.EBUSY, "translated"), ServerError(409)), Answer.BUSY),
        (AzureError(409, "BlobAlreadyExists"), Answer.EXISTS),
        (AzureError(409, "LeaseIdMissing"), Answer.BUSY),
        (GoogleError(412), Answer.EXISTS),
        (GoogleError(429), Answer.BUSY),
        (GoogleError(403), Answer.REFUSED),
        (GoogleError(404), Answer.ABSENT),
    ],
)
def test_an_answer_says_whether_the_request_took_effect(error: BaseException, answer: Answer) -> None:
    assert answer_of(error) is answer


def test_slow_down_is_no_effect_although_its_status_is_503() -> None:
    error = ServerError(503)
    error.response = {**error.response, "Error": {"Code": "SlowDown"}}
    assert answer_of(error) is Answer.BUSY


def failing(errors: list[BaseException]) -> tuple[Callable[[], str], list[int]]:
    """A call that raises these errors in turn, then gives a result; and how often it was made."""
    calls: list[int] = []

    def call() -> str:
        calls.append(len(calls))
        if len(calls) <= len(errors):
            raise errors[len(calls) - 1]
        return "result"

    return call, calls


def test_what_may_pass_is_sent_again() -> None:
    call, calls = failing([ConnectionResetError("x"), ServerError(503), ServerError(409)])
    assert Requests(60.0).ask(call) == "result"
    assert len(calls) == 4


def test_what_is_refused_is_not_sent_again() -> None:
    for error in (PermissionError("x"), FileNotFoundError("x"), ServerError(412)):
        call, calls = failing([error])
        with pytest.raises(type(error)):
            Requests(60.0).ask(call)
        assert len(calls) == 1


def test_tries_are_bounded() -> None:
    call, calls = failing([ServerError(503)] * 100)
    with pytest.raises(ServerError):
        Requests(60.0).ask(call)
    assert len(calls) == NUM_TRIES == 6


def test_a_request_that_stalls_ends_at_the_deadline_and_leaves_one_thread_each() -> None:
    release, before = threading.Event(), threading.active_count()
    try:
        with pytest.raises(RequestTimeoutError, match=r"no answer within 0\.05 s"):
            Requests(0.05).ask(release.wait)
        assert threading.active_count() == before + NUM_TIMEOUTS == before + 2
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "dcp-engine-request")
    finally:
        release.set()


def test_bytes_get_time_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    monkeypatch.setattr(threading.Event, "wait", lambda self, secs=None: waits.append(secs) or False)
    with pytest.raises(RequestTimeoutError):
        Requests(60.0).once(lambda: None, num_bytes=2**30)
    assert waits[-1] == 60 + 1024


def test_an_interrupt_reaches_the_caller() -> None:
    def call() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Requests(60.0).ask(call)


def test_pauses_double_up_to_a_bound_and_leave_the_users_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(requests, "_FIRST_WAIT_SECS", 0.5)
    monkeypatch.setattr(requests.time, "sleep", pauses.append)
    state = random.getstate()
    for number in range(1, 8):
        requests.pause(number)
    for number, secs in enumerate(pauses):
        longest = min(8.0, 0.5 * 2**number)
        assert longest / 2 <= secs <= longest
    assert random.getstate() == state


def test_the_deadline_is_an_option_of_ours_and_not_the_drivers() -> None:
    made, driver = split_options({"request_timeout_secs": 5, "key": "k"}, path="s3://b/x")
    assert (made.timeout_secs, driver) == (5.0, {"key": "k"})
    assert split_options({}, path="s3://b/x")[0].timeout_secs == 60.0


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), "60", None, True])
def test_a_deadline_that_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        split_options({"request_timeout_secs": value}, path="s3://b/x")
    assert (caught.value.path, caught.value.found) == ("s3://b/x", repr(value))
