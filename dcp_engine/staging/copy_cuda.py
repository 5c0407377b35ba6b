"""Copies of device memory into a buffer, on a stream of their own beside training: under way when the call returns."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from dcp_engine.compat import copy_many
from dcp_engine.staging.layout import SMALL_BYTES, Slot, StagePlan
from dcp_engine.staging.split import PIECE_BYTES, SplitSlots, pieces, split_blocks

__all__ = ["CudaCopier", "Transfer", "wait_for"]

_NONE_SPLIT: SplitSlots = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)  # equality would compare tensors
class Transfer:
    """Copies under way from one device.

    Attributes:
        device: of the sources.
        done: event after the last copy, on the copying stream.
        held: sources and gathered bytes. As long as they are referenced, nobody gets their memory, so that no allocation of the training
            loop can overwrite what is still being read. Empty when the copies are through.
    """

    device: torch.device
    done: torch.cuda.Event
    held: list[torch.Tensor]


def wait_for(transfers: Sequence[Transfer]) -> None:
    """Until the copies are through; then the sources are let go.

    Raises:
        RuntimeError: torch's, for whatever went wrong on a device.
    """
    try:
        for transfer in transfers:
            transfer.done.synchronize()
    finally:
        for transfer in transfers:
            transfer.held.clear()


class CudaCopier:
    """Copies from CUDA devices on side streams of high priority: copies run on engines of their own, and kernels that gather small tensors
    should not wait behind the training's. Gathering has a stream of its own, so that it does not wait for the copies of the state before,
    and so has taking floats apart, which runs beside them.

    Thread-safety: ``start`` from one thread at a time; ``fence`` from any.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
        self._lock = threading.Lock()
        self._under_way: list[Transfer] = []

    def start(
        self, plan: StagePlan, tensors: Sequence[torch.Tensor], flat: torch.Tensor, split: SplitSlots = _NONE_SPLIT
    ) -> list[Transfer]:
        """Begin to copy the slots of ``plan`` that lie on devices. The host waits for nothing.

        The current streams wait until small tensors have been gathered, which takes them microseconds: what a forward pass changes in
        place (a batch norm's statistics, say) is small, and no optimizer's hook would protect it.

        Args:
            plan: where everything goes.
            tensors: the plan's tensors, in its order.
            flat: the buffer, uint8 of shape ``(at least plan.num_bytes,)``, pinned.
            split: slots whose floats are taken apart before they cross.

        Raises:
            RuntimeError: torch's, for whatever went wrong; nothing is under way then.
        """
        by_device: dict[torch.device, list[Slot]] = {}
        for slot in plan.elsewhere:
            by_device.setdefault(slot.device, []).append(slot)
        transfers: list[Transfer] = []
        try:
            for device, slots in by_device.items():
                transfers.append(self._start(device, slots, tensors, flat, split))
        except BaseException:
            # Some copies may be under way, and the buffer is about to be somebody else's.
            for stream in self._streams.values():
                stream.synchronize()
            raise
        with self._lock:
            done = [transfer.done.query() for transfer in self._under_way]  # type: ignore[no-untyped-call]
            self._under_way = [transfer for transfer, is_done in zip(self._under_way, done, strict=True) if not is_done] + transfers
        return transfers

    def fence(self) -> None:
        """Make the current stream of each device wait for copies under way. Any number of streams may ask for the same copies."""
        with self._lock:
            under_way = list(self._under_way)
        for transfer in under_way:
            torch.cuda.current_stream(transfer.device).wait_event(transfer.done)

    def _stream(self, device: torch.device, purpose: str) -> torch.cuda.Stream:
        stream = self._streams.get((device, purpose))
        if stream is None:
            stream = self._streams[device, purpose] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        return stream

    def _start(
        self, device: torch.device, slots: Sequence[Slot], tensors: Sequence[torch.Tensor], flat: torch.Tensor, split: SplitSlots
    ) -> Transfer:
        stream, gatherer = self._stream(device, "copy"), self._stream(device, "gather")
        training = torch.cuda.current_stream(device)
        # What the training has queued so far must be done before its results are read; what it queues later runs beside.
        ready = training.record_event()
        stream.wait_event(ready)
        held: list[torch.Tensor] = []
        with torch.cuda.device(device), torch.no_grad():
            small = [slot for slot in slots if slot.num_bytes <= SMALL_BYTES]
            if small:
                gatherer.wait_event(ready)
                with torch.cuda.stream(gatherer):
                    run, held = _gathered(small, tensors)
                gathered = gatherer.record_event()
                training.wait_event(gathered)
                stream.wait_event(gathered)
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
            if small:
                flat[small[0].offset : small[0].offset + run.numel()].copy_(run, non_blocking=True)
            for slot in slots:
                if slot.num_bytes > SMALL_BYTES and slot.offset not in split:
                    source = _source(slot, tensors[slot.member])
                    flat[slot.offset : slot.offset + slot.num_bytes].copy_(source, non_blocking=True)
                    held += (source, tensors[slot.member])
        apart = [slot for slot in slots if slot.offset in split]
        if apart:
            splitter = self._stream(device, "split")
            splitter.wait_event(ready)
            held += _copy_apart(apart, tensors, flat, split, splitter, stream)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a thread that waits for it sleeps
            done.record(stream)
        return Transfer(device, done, held)


def _copy_apart(
    slots: Sequence[Slot],
    tensors: Sequence[torch.Tensor],
    flat: torch.Tensor,
    split: SplitSlots,
    splitter: torch.cuda.Stream,
    copier: torch.cuda.Stream,
) -> list[torch.Tensor]:
    """Take slots apart piece by piece, in two halves of a workspace: one crosses while the next piece comes apart. The caller has let both
    streams wait for the sources. Returns what must be held.
    """
    held: list[torch.Tensor] = []
    crossed: list[torch.cuda.Event | None] = [None, None]
    turn = 0
    device = tensors[slots[0].member].device
    half_bytes = min(PIECE_BYTES, max(slot.num_bytes for slot in slots))
    with torch.cuda.device(device), torch.no_grad():
        with torch.cuda.stream(splitter):
            workspace = torch.empty(2, half_bytes, dtype=torch.uint8, device=device)
        for slot in slots:
            with torch.cuda.stream(splitter):
                source = _source(slot, tensors[slot.member])
            held += (source, tensors[slot.member])
            for begin, end in pieces(slot.num_bytes):
                half, before = workspace[turn, : end - begin], crossed[turn]
                with torch.cuda.stream(splitter):
                    if before is not None:
                        splitter.wait_event(before)
                    split_blocks(source[begin:end], split[slot.offset], half)
                    is_apart = splitter.record_event()
                with torch.cuda.stream(copier):
                    copier.wait_event(is_apart)
                    flat[slot.offset + begin : slot.offset + end].copy_(half, non_blocking=True)
                    crossed[turn] = copier.record_event()
                turn = 1 - turn
    return [workspace, *held]


def _gathered(slots: Sequence[Slot], tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Small slots, which lie one after the other in the buffer: as one run on the device, which crosses at once; and what must be held."""
    begin = slots[0].offset
    end = slots[-1].offset + slots[-1].num_bytes
    run = torch.empty(end - begin, dtype=torch.uint8, device=tensors[slots[0].member].device)
    targets = [run[slot.offset - begin : slot.offset - begin + slot.num_bytes] for slot in slots]
    sources = [_source(slot, tensors[slot.member]) for slot in slots]
    copy_many(targets, sources)
    return run, [run, *sources, *(tensors[slot.member] for slot in slots)]


def _source(slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
    """A slot's bytes on the device, as uint8 of shape ``(num_bytes,)``."""
    if not slot.is_copied_whole:
        return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, slot.start - storage.data_ptr(), (slot.num_bytes,), (1,))
