"""The only place that touches private names of torch and of Python, with the versions for which each is needed.

Everything is looked up when used and may be absent: a name that a release of torch lacks means that no value can be of that kind.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

__all__ = [
    "copy_many",
    "default_store",
    "dtensor_rng_options",
    "is_fake_tensor",
    "is_legacy_sharded_tensor",
    "is_strided_shard",
    "is_traceable_wrapper",
    "limit_start",
    "new_shared_bytes",
    "rewrapped",
    "set_dtensor_rng_options",
    "wait_for_collective",
]


def _loaded(module: str, name: str) -> Any:
    """An attribute of a module, None where the module was never imported: then no object of its types can exist."""
    return getattr(sys.modules.get(module), name, None)


def _is_instance_of(value: object, module: str, name: str) -> bool:
    cls = _loaded(module, name)
    return isinstance(cls, type) and isinstance(value, cls)


def is_fake_tensor(value: object) -> bool:
    """A tensor without data from a tracing mode (private in 2.11 to 2.14)."""
    return _is_instance_of(value, "torch._subclasses.fake_tensor", "FakeTensor")


def is_legacy_sharded_tensor(value: object) -> bool:
    """``ShardedTensor`` of FSDP1's sharded state dicts (2.11 to 2.14, where it still exists)."""
    return _is_instance_of(value, "torch.distributed._shard.sharded_tensor.api", "ShardedTensor")


def is_strided_shard(placement: object) -> bool:
    """FSDP2 over TP on one dimension. A subclass of ``Shard`` in 2.11, a class beside it in later releases."""
    return _is_instance_of(placement, "torch.distributed.tensor.placement_types", "_StridedShard")


def is_traceable_wrapper(value: torch.Tensor) -> bool:
    """Whether the tensor's class intercepts operators, so that its own memory is not its content."""
    return type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def wait_for_collective(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the finished result where it stands for a functional collective in flight (2.11 to 2.14)."""
    if _is_instance_of(tensor, "torch.distributed._functional_collectives", "AsyncCollectiveTensor"):
        return tensor.wait()  # type: ignore[attr-defined, no-any-return]
    return tensor


def new_shared_bytes(num_bytes: int) -> torch.Tensor:
    """uint8 tensor of shape ``(num_bytes,)`` in POSIX shared memory with all its pages reserved (private in 2.11 to 2.14).

    Raises:
        OSError: ENOSPC where the file system behind shared memory is full. Without the reservation the process would end by SIGBUS later.
    """
    storage = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]
    if hasattr(os, "posix_fallocate") and torch.multiprocessing.get_sharing_strategy() == "file_descriptor":  # type: ignore[no-untyped-call]
        descriptor, _ = storage._share_fd_cpu_()  # the storage's own
        os.posix_fallocate(descriptor, 0, num_bytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def rewrapped(value: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor like ``value`` around another local tensor of equal shape.

    The public ``DTensor.from_local`` takes 80 us, which is too much for thousands of tensors on a training loop's path; the constructor
    (2.11 to 2.14) takes 6.

    The constructor also gives the wrapper the local tensor's place in its storage, and pickling takes a wrapper that does not begin at 0
    for one with memory of its own: the process ends by SIGSEGV. So it is made around a tensor without elements.
    """
    try:
        empty = torch.empty(0, dtype=local.dtype, device=local.device)
        wrapper = DTensor(empty, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        wrapper._local_tensor = local
        return wrapper
    except (AttributeError, TypeError):
        return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride())


def copy_many(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors of one device in one kernel where torch can (2.11 to 2.14), else one by one."""
    foreach = getattr(torch, "_foreach_copy_", None)
    if foreach is not None:
        foreach(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def default_store() -> Any:
    """The store through which the default process group was made (private in 2.11 to 2.14)."""
    return dist.distributed_c10d._get_default_store()


class _PatientEvent(threading.Event):
    """An event whose waits without a timeout have one."""

    def __init__(self, secs: float) -> None:
        super().__init__()
        self._secs = secs

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(self._secs if timeout is None else timeout)


def limit_start(thread: threading.Thread, secs: float) -> None:
    """Has ``thread.start()`` wait no longer than this for the thread to run; ``thread.is_alive()`` then tells whether it does.

    It waits for ever for a thread that dies at once for want of memory, by an event of its own (private in CPython 3.11 to 3.14). Where a
    later Python waits by something else, it would wait as long as it does without this.
    """
    thread._started = _PatientEvent(secs)  # type: ignore[attr-defined]


def dtensor_rng_options() -> dict[str, bool]:
    """What DTensor's RNG tracker keeps of its own; empty where no tracker was made.

    Private in 2.11 to 2.14. There it keeps no seeds and offsets any more: it draws from the device's default generator.
    """
    tracker = _loaded("torch.distributed.tensor._random", "_rng_tracker")
    return {} if tracker is None else {"distribute_region_enabled": bool(tracker.distribute_region_enabled)}


def set_dtensor_rng_options(options: Mapping[str, bool]) -> None:
    """Gives the tracker, where there is one, what :func:`dtensor_rng_options` gave."""
    tracker = _loaded("torch.distributed.tensor._random", "_rng_tracker")
    if tracker is not None and "distribute_region_enabled" in options:
        tracker.distribute_region_enabled = options["distribute_region_enabled"]
