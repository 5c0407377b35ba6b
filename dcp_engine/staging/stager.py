"""``DoubleBufferStager``: DCP's ``AsyncStager`` over two reusable host buffers, with device copies beside training."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from torch.distributed.checkpoint.staging import AsyncStager

from dcp_engine.errors import (
    ClosedError,
    DcpEngineError,
    StagingMemoryError,
    StagingTimeoutError,
    UsageError,
)
from dcp_engine.garbage import without_gc
from dcp_engine.leases import Lease
from dcp_engine.staging.arena import Arena, MemoryKind, require_room
from dcp_engine.staging.buffers import Buffer, BufferInfo, BufferPool, BufferState
from dcp_engine.staging.copy_cuda import CudaCopier, wait_for
from dcp_engine.staging.copy_host import HostCopier
from dcp_engine.staging.digests import Thoroughness, place_digests
from dcp_engine.staging.failure import state_for_all_ranks, unexpected
from dcp_engine.staging.handed_out import HandedOut, StagedState, Staging
from dcp_engine.staging.layout import StagePlan, extent_of, place_of, plan_slots
from dcp_engine.staging.options import check_optimizer, check_save, staging_options
from dcp_engine.staging.proof import SharedBuffer, StagingProof, split_runs
from dcp_engine.staging.report import StagingReport
from dcp_engine.staging.split import slots_to_split
from dcp_engine.staging.state import StagedTensor, find_tensors, rebuilt, views_in
from dcp_engine.storage.options import local_ranks

__all__ = ["DoubleBufferStager"]

_NUM_BUFFERS = 2
_PATIENCE_SECS = 1.0
_State = dict[str, Any]
_Response = TypeVar("_Response")


class _StepHooks(Protocol):
    """What :meth:`DoubleBufferStager.protect` needs of an optimizer."""

    def register_step_pre_hook(self, hook: Callable[..., None]) -> Any: ...


class DoubleBufferStager(AsyncStager):
    """Copies a state into one of two host buffers, so that training may go on while the copy is written.

    ::

        stager = DoubleBufferStager()
        future = dcp.async_save(state, storage_writer=ShardWriter(path), planner=planner, async_stager=stager)
        ...
        stager.close()

    Buffers are flat, allocated once and used again; they are laid out anew when the state's structure changes. CPU tensors and all other
    mutable values are copied when ``stage`` returns. With CUDA tensors ``stage`` only queues copies on a stream of their own and returns a
    future, which makes ``dcp.async_save`` return an ``AsyncSaveResponse``. Until it is done the tensors must not be changed:
    :meth:`protect` an optimizer, and its ``step`` waits for the copy, on the device; or call :meth:`fence` before changing them. Small ones
    (up to 256 KiB, a batch norm's statistics, say) may be changed at once on the stream that staged them.

    A buffer is busy until its state has been written. ``ShardWriter`` gives it back when its bytes are written. With other writers, and
    with ``AsyncCheckpointerType.PROCESS``, it comes back when the last staged tensor is gone, which may be late or, with shared memory,
    never: call :meth:`track` on what ``async_save`` returned. When both are busy, ``stage`` waits for one. What the last staging took is in
    ``last_report``, a :class:`StagingReport`; None before one.

    With a process group, ``stage`` never raises a :class:`~dcp_engine.errors.DcpEngineError`: it returns a state that fails when it is
    planned, because an exception on one rank would leave the others waiting for it.

    Args:
        memory: ``"plain"``, ``"pinned"`` (needs CUDA), ``"shared"`` (for saves in another process; pages of shared memory are reserved when
            allocated), or ``"auto"``: pinned where CUDA is available, else plain.
        budget_bytes: most that both buffers together may take; None: what the machine has.
        wait_secs: longest wait for a free buffer.
        verify_staging: ``"sample"`` digests a few KiB of each tensor when staged and holds them against the buffer when it was written,
            ``"full"`` all of it, ``"off"`` nothing.
        threads: that copy CPU tensors, the caller's among them; None: the CPUs of this rank, at most 8.
        split_on_device: floats of CUDA tensors are taken apart on their device before they cross, and the writer has only to compress
            them; what is stored stays the same. Only where whoever stages says that its writer and planner know such tensors, as
            :class:`~dcp_engine.background.BackgroundSaver` does: see :meth:`stage`. Takes up to 128 MiB of the device's memory.

    Raises:
        InvalidOptionError: an option is out of range.

    Thread-safety: ``stage`` from one thread at a time, else it fails; the rest from any thread.
    """

    def __init__(
        self,
        *,
        memory: MemoryKind | str = "auto",
        budget_bytes: int | None = None,
        wait_secs: float = 600.0,
        verify_staging: Thoroughness | str = "sample",
        threads: int | None = None,
        split_on_device: bool = False,
    ) -> None:
        self._options = staging_options(
            memory=memory,
            budget_bytes=budget_bytes,
            wait_secs=wait_secs,
            verify_staging=verify_staging,
            threads=threads,
            split_on_device=split_on_device,
        )
        self._buffers = BufferPool(_NUM_BUFFERS)
        self._host = HostCopier(self._options.threads)
        self._watcher: ThreadPoolExecutor | None = None
        self._cuda = CudaCopier()
        self._in_stage = threading.Lock()
        self._stager: int | None = None
        self._places: list[tuple[object, ...]] = []
        self._plan = StagePlan()
        self._last: Staging | None = None
        self._handed_out = HandedOut()
        self._copied: Future[None] | None = None
        self._count = 0
        self._closed = False
        self.last_report: StagingReport | None = None

    # -- DCP's calls ------------------------------------------------------------------------------------------------------

    def stage(self, state_dict: _State, *, may_split: bool = False) -> Future[_State] | _State:
        """A copy of the state, in a buffer of this stager.

        Args:
            state_dict: nested mappings, lists and tuples. Not changed.
            may_split: nobody reads the staged tensors but a writer and a planner that say that they know floats that were taken apart
                (``ShardWriter.takes_split_tensors``, ``BalancedSavePlanner.leaves_tensors_alone``), in this process, or, from shared
                memory, in one that is given :meth:`proof_of`. To all others such tensors are noise. DCP never says so.

        Returns:
            The staged state: the same containers, tensors on the CPU. A future of it where it holds CUDA tensors.

        Raises:
            StagingMemoryError: the buffers do not fit. StagingTimeoutError: both were busy for ``wait_secs``. StagingError: a value cannot
                be copied. UnsupportedTensorError: a tensor cannot be saved. ClosedError, UsageError: closed, or in use by another thread.
                All of them only without a process group, see above.
        """
        try:
            with self._alone():
                self._last = None  # else track() would end an earlier state's lease together with this one's failure
                return self._stage(state_dict, may_split and self._options.split_on_device)
        except Exception as error:
            failure = error if isinstance(error, DcpEngineError) else unexpected(error)
            failing = state_for_all_ranks(failure)
            if failing is not None:
                return failing
            if failure is error:
                raise
            raise failure from error

    def synchronize_staging(self) -> None:
        """Wait until the last staged state is complete and its source may be changed."""
        copied = self._copied
        if copied is not None:
            copied.result()

    def close(self) -> None:
        """Give all memory back; what is still being written keeps its buffer until then. Idempotent.

        A ``stage`` under way in another thread ends first: well, or by ``ClosedError`` if it still waits for a buffer.
        """
        self._closed = True
        self._buffers.close()
        if self._stager != threading.get_ident():  # else a class in the state closes the stager that stages it
            with self._in_stage:
                pass  # nobody begins to stage any more
        self.synchronize_staging()
        self._host.close()
        if self._watcher is not None:
            self._watcher.shutdown(wait=False)

    # -- beyond DCP -------------------------------------------------------------------------------------------------------

    def fence(self) -> None:
        """Make the current stream of each device wait for copies under way. The host does not wait. Nothing to do for CPU tensors."""
        self._cuda.fence()

    def protect(self, optimizer: _StepHooks) -> Any:
        """Let each ``optimizer.step()`` wait, on the device, for copies under way. ``InvalidOptionError``: it is no optimizer.

        Returns:
            The hook's handle; ``remove()`` ends the protection.
        """
        check_optimizer(optimizer)
        return optimizer.register_step_pre_hook(lambda *_: self.fence())

    def track(self, response: _Response) -> _Response:
        """Give the buffer of the last staged state back when this save ends, however it ends.

        Args:
            response: what ``dcp.async_save`` returned, or a future of the save. ``InvalidOptionError``: it is neither.

        Returns:
            ``response`` itself.
        """
        last = self._last
        upload: Any = getattr(response, "upload_completion", response)
        check_save(upload)
        if last is not None:
            upload.add_done_callback(lambda _: last.lease.release())
        return response

    def release(self, staged: object) -> None:
        """Give back the buffer that holds this staged state, or future of one. Nothing to do where a writer has done it already."""
        if isinstance(staged, Future):
            staged.add_done_callback(lambda done: None if done.exception() else self.release(done.result()))
            return
        staging = self._handed_out.staging_of(staged)
        if staging is not None:
            staging.lease.release()

    def shared_buffers(self) -> list[SharedBuffer]:
        """The buffers that lie in shared memory, for a process that writes staged states."""
        return [SharedBuffer(arena.number, arena.shared) for arena in self._buffers.arenas() if arena.shared is not None]

    def proof_of(self, staged: object) -> StagingProof | None:
        """What a process that writes this staged state from shared memory has to find there; None if it does not lie there."""
        staging = self._handed_out.staging_of(staged)
        arena = None if staging is None or staging.lease.is_released else staging.buffer.arena
        return None if staging is None or arena is None or arena.shared is None else staging.proof

    @property
    def memory(self) -> MemoryKind:
        """The kind of memory that the buffers take."""
        return self._options.memory

    @property
    def buffers(self) -> tuple[BufferInfo, ...]:
        """What each buffer is doing."""
        return self._buffers.info()

    # -- inside -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While this is open, the calling thread stages, and no other one."""
        is_free = not self._closed and self._in_stage.acquire(blocking=False)
        if self._closed:
            if is_free:
                self._in_stage.release()
            raise ClosedError("the stager is closed", remedy="make a new DoubleBufferStager")
        if not is_free:
            raise UsageError("the stager is in use by another thread", remedy="stage from one thread, or use a stager for each")
        self._stager = threading.get_ident()
        try:
            yield
        finally:
            self._stager = None
            self._in_stage.release()

    def _stage(self, state_dict: _State, splits: bool) -> Future[_State] | _State:
        started = time.monotonic()
        with without_gc():
            tensors = find_tensors(state_dict)
            replanned = self._replan(tensors)
        self._count += 1
        buffer, waited_secs = self._acquire(f"staged state {self._count}")
        turn = buffer.turn
        try:
            with without_gc():
                staging, staged_state = self._fill(buffer, tensors, state_dict, splits)
        except BaseException:
            self._buffers.release(buffer, turn)
            raise
        self._last = staging
        self._handed_out.add(staged_state, staging)
        blocked_secs = time.monotonic() - started
        self.last_report = StagingReport(
            waited_secs, blocked_secs, self._plan.num_bytes, len(tensors), len(self._plan.slots), replanned, staging.content
        )
        if not staging.transfers:
            return staged_state
        if self._watcher is None:
            self._watcher = ThreadPoolExecutor(1, thread_name_prefix="dcp-engine-stager")
        staged: Future[_State] = Future()
        # Two futures: one that this object kept would keep the staged state alive.
        self._copied = self._watcher.submit(self._await_transfers, staging, staged_state, staged)
        return staged

    def _acquire(self, owner: str) -> tuple[Buffer, float]:
        patience_secs = min(_PATIENCE_SECS, self._options.wait_secs)
        try:
            return self._buffers.acquire(owner, patience_secs)
        except StagingTimeoutError:
            # The traceback of a failed save may hold its staged state, and itself, in a cycle.
            gc.collect()
            buffer, waited_secs = self._buffers.acquire(owner, self._options.wait_secs - patience_secs)
            return buffer, patience_secs + waited_secs

    def _replan(self, tensors: Sequence[StagedTensor]) -> bool:
        places = [place_of(tensor.local) for tensor in tensors]
        if places == self._places:
            return False
        plan = plan_slots([extent_of(tensor.local) for tensor in tensors])
        needed = _NUM_BUFFERS * plan.num_bytes
        if self._options.budget_bytes is not None and needed > self._options.budget_bytes:
            raise StagingMemoryError(
                "two buffers for this state do not fit into budget_bytes",
                needed_bytes=needed,
                available_bytes=self._options.budget_bytes,
                expected=f"budget_bytes of at least {needed:,}",
                found=f"{self._options.budget_bytes:,}",
                remedy="raise budget_bytes, or stage less state on this rank",
            )
        held = sum(arena.num_bytes for arena in self._buffers.arenas())
        if needed > held:
            # All of it now, though the second buffer is taken later: better refused at the first save than at some other one.
            require_room(needed, held, self._options.memory, 1 if self._options.budget_bytes is not None else local_ranks())
        self._places, self._plan = places, plan
        return True

    def _fill(self, buffer: Buffer, tensors: Sequence[StagedTensor], state_dict: _State, splits: bool) -> tuple[Staging, StagedState]:
        plan = self._plan
        split = slots_to_split(plan, tensors) if splits else {}
        split_places = tuple((*place, split[place[0]].code) for place in plan.places if place[0] in split)
        arena = self._arena(buffer, plan.num_bytes)
        if arena.kind != "plain" and plan.elsewhere:
            arena.pin()
        turn = buffer.turn
        lease = Lease(
            arena.address,
            arena.num_bytes,
            owner=buffer.owner,
            on_writing=lambda: self._buffers.enter(buffer, turn, BufferState.WRITING),
            on_release=lambda: self._buffers.release(buffer, turn),
            check=lambda: staging.proof.check(arena.memory),
            split=split_runs(arena.address, split_places),
        )
        names = tuple(tensors[slot.member].name for slot in plan.slots)
        proof = StagingProof(arena.number, plan.places, names, (), self._options.verify_staging, split_places)
        staging = Staging(buffer, turn, proof, lease, [], Future())
        try:
            flat = arena.open(lease.abandon)
            sources = [tensor.local for tensor in tensors]
            staging.transfers = self._cuda.start(plan, sources, flat, split)
            self._host.copy(plan, sources, flat)
            staged_state = StagedState(rebuilt(state_dict, views_in(flat, plan, tensors)))
            if not staging.transfers:
                self._staged(staging)
        except BaseException:
            try:
                wait_for(staging.transfers)
            finally:
                lease.release()
            raise
        return staging, staged_state

    def _arena(self, buffer: Buffer, num_bytes: int) -> Arena:
        """The buffer's memory, taken anew where it is too small or far too large for this state."""
        arena = buffer.arena
        if arena is None or not num_bytes <= arena.num_bytes <= _MAX_SLACK * max(num_bytes, _MIN_BYTES):
            if arena is not None:
                arena.close()
                buffer.arena = None
            buffer.arena = arena = Arena(max(num_bytes, _MIN_BYTES), self._options.memory)
        return arena

    def _staged(self, staging: Staging) -> None:
        """The buffer holds its state."""
        arena = staging.buffer.arena
        assert arena is not None, "a buffer that is held has its memory"
        digests = place_digests(arena.memory, staging.proof.places, staging.proof.thoroughness)
        staging.proof = replace(staging.proof, digests=tuple(digests))
        self._buffers.enter(staging.buffer, staging.turn, BufferState.STAGED)
        staging.content.set_result(hash(staging.proof.digests) if digests else None)

    def _await_transfers(self, staging: Staging, staged_state: StagedState, staged: Future[_State]) -> None:
        """In a thread of its own: when the copies from devices are through, the staged state is handed out."""
        try:
            wait_for(staging.transfers)
            self._staged(staging)
        except Exception as error:  # noqa: BLE001  whatever the device has raised
            staging.lease.release()
            staging.content.set_result(None)
            failure = unexpected(error)
            failing = state_for_all_ranks(failure)  # as in stage(): a future that raises would leave the other ranks waiting
            if failing is None:
                failure.__cause__ = error
                staged.set_exception(failure)
            else:
                staged.set_result(failing)
            return
        finally:
            staging.transfers = []
        staged.set_result(staged_state)


_MAX_SLACK = 2
_MIN_BYTES = 4096
