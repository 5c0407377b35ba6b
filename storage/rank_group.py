"""What ranks that share a read do together: agree that none has failed, tell each other of an error, pass bytes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcp_engine.errors import CoordinationError, DcpEngineError, InvalidOptionError, RankFailedError
from dcp_engine.storage.read_sharing import Message

__all__ = ["RankGroup", "check_group"]

_Record = TypeVar("_Record")
_SHARED_READ = "ranks shared a read"
_PLAIN = (bool, int, float, str, bytes, type(None))


def check_group(group: object) -> None:
    """Refuse what cannot carry CPU tensors among ranks.

    Raises:
        InvalidOptionError: naming what the group can do, and which one to pass.
    """
    remedy = 'pass process_group=torch.distributed.new_group(backend="gloo"), made by all ranks'
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise InvalidOptionError(
            "process_group is no process group with this rank", expected="a process group or None", found=repr(group)[:300], remedy=remedy
        )
    backends = dist.get_backend_config(group)
    if "cpu" not in (pair.split(":")[0] for pair in backends.split(",")):
        raise InvalidOptionError(
            "broadcast=True passes bytes on in CPU memory, which this process group cannot do",
            expected="a process group with a backend for CPU tensors",
            found=f"backends {backends}",
            remedy=remedy,
        )


class RankGroup:
    """The ranks of a process group at one shared read.

    All ranks make the same calls in the same order. Whatever fails on one rank is told at its next call, and raised on all ranks there.

    Args:
        group: with a backend for CPU tensors. Nobody else may use it meanwhile.
        doing: what the ranks do together, for messages.
        remedy: what to do where the group fails.

    Attributes:
        rank: of this process in the group.
        size: number of ranks.

    Thread-safety: none; one thread makes all calls.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        doing: str = _SHARED_READ,
        remedy: str = "see why another rank died or did not come in time",
    ) -> None:
        self._group = group
        self._doing = doing
        self._remedy = remedy
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def exchange(self, record: _Record | None, error: BaseException | None, kind: type[_Record]) -> list[_Record]:
        """Give every rank the records of all. To be called first.

        Args:
            record: of this rank, picklable; ``None`` only with an ``error``.
            error: why it has none.
            kind: type of the records.

        Raises:
            DcpEngineError: of the lowest rank that has one.
        """
        told = self._gather(record if error is None else _portable(error, self.rank, self._doing), error)
        strangers = {rank: entry for rank, entry in enumerate(told) if not isinstance(entry, (kind, DcpEngineError))}
        if strangers:
            raise _LoadIsOverError(strangers)
        self._raise_first(told, error)
        return [entry for entry in told if isinstance(entry, kind)]

    def agree(self, error: BaseException | None) -> None:
        """Go on if no rank has an error.

        Raises:
            DcpEngineError: of the lowest rank that has one.
        """
        flag = torch.tensor([int(error is not None)])
        with self._group_failures(error):
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        if int(flag):
            self._raise_first(self._gather(None if error is None else _portable(error, self.rank, self._doing), error), error)

    def pass_on(self, messages: Sequence[Message], buffer: torch.Tensor) -> Callable[[], None]:
        """Begin to send and receive the messages of a round, and return the wait for their end.

        Args:
            messages: of this rank.
            buffer: CPU bytes in which they lie; must stay untouched until the wait is over, but for what arrives.
        """
        works = []
        with self._group_failures(None):
            for message in messages:
                part = buffer[message.begin : message.end]
                if message.reader != self.rank:
                    works.append(dist.irecv(part, group=self._group, group_src=message.reader, tag=message.tag))
                works += [dist.isend(part, group=self._group, group_dst=rank, tag=message.tag) for rank in message.receivers]

        def finish() -> None:
            with self._group_failures(None):
                for work in works:
                    assert work is not None, "this rank is in the group"
                    work.wait()

        return finish

    def _gather(self, record: object, error: BaseException | None) -> list[object]:
        told: list[object] = [None] * self.size
        with self._group_failures(error):
            dist.all_gather_object(told, record, group=self._group)
        return told

    def _raise_first(self, told: Sequence[object], error: BaseException | None) -> None:
        first = next(((rank, entry) for rank, entry in enumerate(told) if isinstance(entry, DcpEngineError)), None)
        if first is None:
            return
        if error is not None and not isinstance(error, Exception):
            raise error  # an interrupt of this process stays one, whatever happened elsewhere
        # Also on the rank whose own error it is: what ``dcp.load`` cannot pickle would leave the others waiting.
        raise first[1] from (error if first[0] == self.rank else None)

    @contextmanager
    def _group_failures(self, error: BaseException | None) -> Iterator[None]:
        """Turn a failure of the group itself into an error of ours, unless this rank has one of its own, which says more."""
        try:
            yield
        except RuntimeError as failure:  # that is what torch.distributed raises
            if error is not None:
                raise error from failure
            raise CoordinationError(
                f"the process group failed while {self._doing}", found=str(failure)[:1000], remedy=self._remedy
            ) from failure


class _LoadIsOverError(CoordinationError):
    """A rank failed before it came to ``read_data``: what it sent is the result of its load, which ``dcp.load`` gathers at the end.

    It has left that exchange with our records, so the others must not enter it, or they would wait until the group's timeout. ``dcp.load``
    pickles what ``read_data`` raises before it calls the others: then this raises what ``dcp.load`` would have raised after it.
    """

    def __init__(self, told: dict[int, object]) -> None:
        super().__init__("a rank failed before it came to read", rank=min(told), found=repr(told)[:1000])
        self._told = told

    def __reduce__(self) -> NoReturn:
        # DCP's own form of an exception that crosses ranks; any other message is not part of a load at all.
        failures = {rank: entry for rank, entry in self._told.items() if isinstance(entry, tuple) and isinstance(entry[0], BaseException)}
        if not failures:
            raise CoordinationError("others call on the process group of a shared read", rank=self.rank, found=self.found)
        raise CheckpointException("read", failures)


def _portable(error: BaseException, rank: int, doing: str) -> DcpEngineError:
    """What all ranks can unpickle and raise in place of ``error``."""
    if not isinstance(error, DcpEngineError):
        return RankFailedError(f"a rank failed while {doing}", rank=rank, found=_text_of(error))
    kind = next(base for base in type(error).__mro__ if base.__module__ == DcpEngineError.__module__)
    assert issubclass(kind, DcpEngineError)
    copy = kind(error.message)
    for name, value in error.__reduce__()[2].items():
        setattr(copy, name, value if _is_plain(value) else repr(value)[:1000])
    copy.rank = rank if copy.rank is None else copy.rank
    return copy


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) in (tuple, list) and all(map(_is_plain, value)))  # type: ignore[call-overload]


def _text_of(error: BaseException) -> str:
    try:
        text = f"{type(error).__qualname__}: {error}"
    except Exception:  # noqa: BLE001 - an exception whose own text fails must still be told
        text = type(error).__qualname__
    return "; ".join([text[:1000], *getattr(error, "__notes__", ())])
