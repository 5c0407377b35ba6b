"""Staged states that were handed out: which buffer each is in, for whoever comes back with one."""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from dcp_engine.leases import Lease
from dcp_engine.staging.buffers import Buffer
from dcp_engine.staging.copy_cuda import Transfer
from dcp_engine.staging.proof import StagingProof

__all__ = ["HandedOut", "StagedState", "Staging"]


@dataclass(slots=True)
class Staging:
    """One state in one buffer. Holds no tensor: those that were handed out must be free to go.

    Attributes:
        buffer, turn: where it is, and which holder of the buffer it is.
        proof: what the buffer held when it was filled.
        lease: the right to the buffer's memory.
        transfers: copies from devices under way.
        content: digest of all tensors, None without digests; done when the copies are through.
    """

    buffer: Buffer
    turn: int
    proof: StagingProof
    lease: Lease
    transfers: list[Transfer]
    content: Future[int | None]


class StagedState(dict[str, Any]):
    """A staged state: a dict that can be told from a later one at the same address. Travels to other processes as a plain dict."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)


class HandedOut:
    """Remembers where staged states are, by their identity: their memory is soon another state's, while some may still hold this one.

    Thread-safety: ``add`` from one thread at a time; ``staging_of`` from any, beside it, and from destructors.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[StagedState], Staging]] = {}

    def add(self, state: StagedState, staging: Staging) -> None:
        """Remember one. Those whose buffers were given back, or that nobody has any more, are forgotten."""
        live = {key: (known, held) for key, (known, held) in self._known.items() if known() is not None and not held.lease.is_released}
        live[id(state)] = (weakref.ref(state), staging)
        self._known = live  # at once: a reader sees the one or the other

    def staging_of(self, state: object) -> Staging | None:
        """Where it is; None for anything that was not handed out, or whose buffer was given back long ago."""
        known, staging = self._known.get(id(state), (None, None))
        # An address alone may be a dead state's.
        return staging if known is not None and known() is state else None
