"""Sorts what a remote storage answers to a request by what it says of the request: done, not done, or nobody knows.

Drivers raise their own libraries' types, or translate them into ``OSError`` more or less well, so that codes and status numbers are looked
for along the chain of causes before the type of the exception counts.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Iterator

__all__ = ["Answer", "answer_of"]


class Answer(enum.Enum):
    """What is known of a request that was sent."""

    DONE = "done"
    """It took effect."""
    ABSENT = "absent"
    """404: there is nothing of that name."""
    EXISTS = "exists"
    """412: the condition does not hold. It took no effect."""
    BUSY = "busy"
    """409, 429, SlowDown: it took no effect, and may when it is sent again."""
    REFUSED = "refused"
    """It took no effect and never will: no permission, no space, not supported."""
    UNKNOWN = "unknown"
    """No answer, or 5xx: it may have taken effect, or may do so later."""


_EXISTS_CODES = frozenset({"PreconditionFailed", "ConditionNotMet", "BlobAlreadyExists", "412"})
_BUSY_CODES = frozenset(
    {
        "ConditionalRequestConflict",
        "OperationAborted",
        "RequestLimitExceeded",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
    }
)
_ANSWERS = {404: Answer.ABSENT, 408: Answer.UNKNOWN, 409: Answer.BUSY, 412: Answer.EXISTS, 429: Answer.BUSY}
_REFUSED_ERRNOS = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EINVAL,
        errno.EMSGSIZE,
        errno.ENAMETOOLONG,
        errno.ENOSPC,
        errno.ENOSYS,
        errno.EPERM,
        errno.EROFS,
    }
)
# Raised before anything is sent: by Python for a driver that lacks a parameter, by botocore for a call that it cannot make. Subclasses of
# ValueError also stand for replies that could not be parsed, so that only the class itself counts.
_NOT_SENT = frozenset(
    {"NoCredentialsError", "NotImplementedError", "ParamValidationError", "PartialCredentialsError", "TypeError", "ValueError"}
)


def answer_of(error: BaseException) -> Answer:
    """What an exception of a driver says of the request."""
    for cause in _causes(error):
        code, status = _code_and_status(cause)
        if code in _EXISTS_CODES:
            return Answer.EXISTS
        if code in _BUSY_CODES:
            return Answer.BUSY
        if status is not None:
            return _ANSWERS.get(status, Answer.REFUSED if 400 <= status < 500 else Answer.UNKNOWN)
    if isinstance(error, FileExistsError):
        return Answer.EXISTS
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return Answer.ABSENT
    if isinstance(error, PermissionError) or type(error).__name__ in _NOT_SENT:
        return Answer.REFUSED
    if isinstance(error, OSError) and error.errno in _REFUSED_ERRNOS:
        return Answer.REFUSED
    return Answer.UNKNOWN


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _code_and_status(error: BaseException) -> tuple[str | None, int | None]:
    """Error code and HTTP status, as botocore, Azure's and Google's libraries keep them."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        code = response.get("Error", {}).get("Code")
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if not isinstance(status, int) and isinstance(code, str) and code.isdecimal():
            status = int(code)
    else:
        code = getattr(error, "error_code", None)
        numbers = (getattr(error, name, None) for name in ("status_code", "status", "code"))
        status = next((number for number in numbers if isinstance(number, int)), None)
    return (code if isinstance(code, str) else None), (status if isinstance(status, int) and 100 <= status < 600 else None)
