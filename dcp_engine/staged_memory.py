"""Which memory holds a staged state, and how a writer gives it back: by address, since DCP tells a writer nothing of the stager.

A stager registers the memory that it hands out. Whoever has written the state from there, or has failed to, releases the lease, so that
the next save finds a free buffer although planners, futures and tracebacks may keep the staged tensors alive for long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from dcp_engine.leases import Lease, live_leases

__all__ = ["leases_of", "writing"]


def leases_of(values: Iterable[object]) -> list[Lease]:
    """The leases in whose memory any of these tensors lies. Values that are no tensors have none.

    A state is staged as a whole: one tensor of it in a lease's memory is enough to find that lease.
    """
    wanted = live_leases()
    found: list[Lease] = []
    for value in values if wanted else ():
        if isinstance(value, DTensor):
            with torch.no_grad():
                value = value.to_local()
        if not isinstance(value, torch.Tensor) or not value.is_cpu or value.layout is not torch.strided or value.numel() == 0:
            continue
        address = value.data_ptr()
        for lease in wanted:
            if lease.start <= address < lease.end:
                wanted.remove(lease)
                found.append(lease)
                break
        if not wanted:
            break
    return found


@contextmanager
def writing(values: Iterable[object]) -> Iterator[None]:
    """While these values are written: their leases are in use, and are released at the end, however it ends.

    Raises:
        StagedDataChangedError: at the end, if what was written from is not what was staged.
    """
    leases = leases_of(values)
    for lease in leases:
        lease.begin_writing()
    try:
        yield
        for lease in leases:
            lease.check()
    finally:
        for lease in leases:
            lease.release()
