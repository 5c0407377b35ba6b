"""Two keys of a state on one memory: loaded once, and checked where the checkpoint holds two values for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from dcp_engine.errors import ReplicaMismatchError

__all__ = ["TieCheck"]


class TieCheck:
    """Holds what the checkpoint has for the later keys of a tie until all pieces of the first key are in place, then compares.

    Args:
        ties: later key -> first key, where the checkpoint holds both apart.
        num_items: number of reads of each key.

    Thread-safety: all methods may be called from any thread.
    """

    def __init__(self, ties: Mapping[str, str], num_items: Mapping[str, int]) -> None:
        self._first = dict(ties)
        self._members = {*ties, *ties.values()}
        self._left: dict[str, int] = {}
        for key in self._members:
            first = ties.get(key, key)
            self._left[first] = self._left.get(first, 0) + num_items[key]
        self._held: dict[str, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
        self._lock = threading.Lock()

    def is_later(self, key: str) -> bool:
        """Whether values of ``key`` must not be written to the state: its memory belongs to the first key of its tie."""
        return key in self._first

    def committed(self, key: str, target: torch.Tensor, value: torch.Tensor) -> None:
        """One read of ``key`` is done: ``value`` is what the checkpoint has for ``target``.

        Raises:
            ReplicaMismatchError: it was the tie's last read, and the checkpoint's values differ.
        """
        if key not in self._members:
            return
        first = self._first.get(key, key)
        with self._lock:
            if key in self._first:
                self._held.setdefault(first, []).append((key, target, value))
            self._left[first] -= 1
            if self._left[first]:
                return
            held = self._held.pop(first, [])
        for later, place, found in held:
            if not torch.equal(_bits(place), _bits(found.to(place.dtype))):
                raise ReplicaMismatchError(
                    f"{first!r} and {later!r} are one tensor in the state, but the checkpoint holds different values for them",
                    keys=(first, later),
                    tensor=later,
                    expected=f"the values of {first!r}",
                    remedy="untie them in the state, or load one of them alone with keys=",
                )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes, so that NaN equals itself."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
