"""Copies of device memory into a buffer, on a stream of their own beside training: under way when the call returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dcp_engine.compat import copy_many
from dcp_engine.staging.layout import SMALL_BYTES, Slot, StagePlan

__all__ = ["CudaCopier", "Transfer"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies under way from one device.

    Attributes:
        device: of the sources.
        done: event after the last copy, on the copying stream.
        held: sources and gathered bytes. As long as they are referenced, nobody gets their memory, so that no allocation of the training
            loop can overwrite what is still being read.
    """

    device: torch.device
    done: torch.cuda.Event
    held: list[torch.Tensor]


class CudaCopier:
    """Copies from CUDA devices on one side stream each, of high priority: copies run on engines of their own, and kernels that gather
    small tensors should not wait behind the training's.

    Thread-safety: none; the stager calls it from one thread at a time.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, plan: StagePlan, tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> list[Transfer]:
        """Begin to copy the slots of ``plan`` that lie on devices. The host waits for nothing.

        Args:
            plan: where everything goes.
            tensors: the plan's tensors, in its order.
            flat: the buffer, uint8 of shape ``(at least plan.num_bytes,)``, pinned.
        """
        by_device: dict[torch.device, list[Slot]] = {}
        for slot in plan.slots:
            device = tensors[slot.member].device
            if device.type == "cuda":
                by_device.setdefault(device, []).append(slot)
        return [self._start(device, slots, tensors, flat) for device, slots in by_device.items()]

    def _start(self, device: torch.device, slots: Sequence[Slot], tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> Transfer:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        # What the training has queued so far must be done before its results are read; what it queues later runs beside.
        stream.wait_event(torch.cuda.current_stream(device).record_event())
        held: list[torch.Tensor] = []
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
            held += _gather([slot for slot in slots if slot.num_bytes <= SMALL_BYTES], tensors, flat)
            for slot in slots:
                if slot.num_bytes > SMALL_BYTES:
                    source = _source(slot, tensors[slot.member])
                    flat[slot.offset : slot.offset + slot.num_bytes].copy_(source, non_blocking=True)
                    held += (source, tensors[slot.member])
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a thread that waits for it sleeps
            done.record(stream)
        return Transfer(device, done, held)


def _gather(slots: Sequence[Slot], tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Small slots, which lie one after the other in the buffer: into one run on the device, which crosses at once."""
    if not slots:
        return []
    begin = slots[0].offset
    end = slots[-1].offset + slots[-1].num_bytes
    run = torch.empty(end - begin, dtype=torch.uint8, device=tensors[slots[0].member].device)
    targets = [run[slot.offset - begin : slot.offset - begin + slot.num_bytes] for slot in slots]
    sources = [_source(slot, tensors[slot.member]) for slot in slots]
    copy_many(targets, sources)
    flat[begin:end].copy_(run, non_blocking=True)
    return [run, *sources, *(tensors[slot.member] for slot in slots)]


def _source(slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
    """A slot's bytes on the device, as uint8 of shape ``(num_bytes,)``."""
    if not slot.is_copied_whole:
        return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, slot.start - storage.data_ptr(), (slot.num_bytes,), (1,))
