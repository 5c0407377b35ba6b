"""What a save beside training returns at once, and tells about itself when it is done."""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata

from dcp_engine.errors import DcpEngineError, EarlierSaveFailedError, SaveTimeoutError

__all__ = ["SaveHandle", "SaveTimings"]


@dataclass(frozen=True, slots=True)
class SaveTimings:
    """Where the time of one save went, on this rank, in seconds.

    Attributes:
        wait_secs: for a free staging buffer.
        stage_secs: copying the state, from the call's beginning, without ``wait_secs``; copies from a device to their end.
        queue_secs: behind the save before.
        plan_secs: plans, their exchange included.
        write_secs: writing this rank's files.
        commit_secs: from this rank's last byte to the published checkpoint, waiting for other ranks included.
    """

    wait_secs: float
    stage_secs: float
    queue_secs: float
    plan_secs: float
    write_secs: float
    commit_secs: float


class _DurableFuture(Future[Metadata]):
    """Remembers whether anybody has learned of a failure."""

    was_read = False

    def result(self, timeout: float | None = None) -> Metadata:
        try:
            return super().result(timeout)
        finally:
            self.was_read = self.was_read or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.was_read = True
        return error


class SaveHandle:
    """One save.

    Attributes:
        step: training step, None where unknown.
        path: of the checkpoint.
        staged: done when the state has been copied and may be changed.
        durable: done when the checkpoint is published and safe from a loss of power; its result is DCP's ``Metadata``.
        timings: set when ``durable`` is done.
        raw_bytes: of this rank's tensors and objects as they lie in memory; set when ``durable`` is done.
        stored_bytes: of this rank's files; set when ``durable`` is done.
        skipped: nothing was to be saved: ``result`` says why, and nobody has to ask it.

    A failure that nobody read from ``result``, ``exception`` or ``durable`` is raised by the next save.

    Thread-safety: all methods may be called from any thread.
    """

    def __init__(self, *, step: int | None, path: str) -> None:
        self.step = step
        self.path = path
        self.staged: Future[None] = Future()
        self.durable: Future[Metadata] = _DurableFuture()
        self.timings: SaveTimings | None = None
        self.raw_bytes: int | None = None
        self.stored_bytes: int | None = None
        self.skipped = False

    @classmethod
    def of_skipped(cls, error: DcpEngineError, *, step: int | None, path: str) -> SaveHandle:
        """The handle of a save that does not take place, for the reason that ``error`` gives."""
        handle = cls(step=step, path=path)
        handle.skipped = True
        handle.forgive()
        for future in (handle.staged, handle.durable):
            future.set_exception(error)
        return handle

    def forgive(self) -> None:
        """Whoever asks is told of a failure; nobody else is."""
        assert isinstance(self.durable, _DurableFuture)
        self.durable.was_read = True

    def result(self, timeout_secs: float | None = None) -> Metadata:
        """Wait until the checkpoint is durable.

        Raises:
            SaveTimeoutError: it is not within ``timeout_secs``; the save goes on.
            DcpEngineError: the save failed, on this rank or another one; nothing was published.
        """
        self._require_done(timeout_secs)
        return self.durable.result()

    def exception(self, timeout_secs: float | None = None) -> BaseException | None:
        """Wait for the end; the error of a failed save, else None. Raises as :meth:`result` where it does not come in time."""
        self._require_done(timeout_secs)
        return self.durable.exception()

    def wait_done(self, timeout_secs: float | None = None) -> bool:
        """Wait for the end without asking how it was; whether it came in time."""
        return bool(wait([self.durable], timeout_secs).done)

    def _require_done(self, timeout_secs: float | None) -> None:
        if not self.wait_done(timeout_secs):
            raise SaveTimeoutError(
                "the save is not done yet", path=self.path, step=self.step, expected=f"its end within {timeout_secs:g} s"
            )

    def done(self) -> bool:
        """Whether the save has ended, well or badly."""
        return self.durable.done()

    @property
    def is_durable(self) -> bool:
        """Whether the checkpoint is published. Reads no failure."""
        return self.done() and self.timings is not None

    @property
    def ratio(self) -> float | None:
        """Stored bytes as a share of the raw ones; None before the end, or without bytes."""
        return self.stored_bytes / self.raw_bytes if self.raw_bytes and self.stored_bytes is not None else None

    def __repr__(self) -> str:
        state = "skipped" if self.skipped else "saving" if not self.done() else "durable" if self.is_durable else "failed"
        return f"SaveHandle(step={self.step}, path={self.path!r}, {state})"

    def unread_failure(self) -> DcpEngineError | None:
        """The failure that nobody has read yet, which is read from now on; None where there is none."""
        durable = self.durable
        assert isinstance(durable, _DurableFuture)
        if not durable.done() or durable.was_read:
            return None
        error = durable.exception()
        assert error is None or isinstance(error, DcpEngineError)
        # Of that one, the rank that raised it was told; to raise it here again would cost the next state, and so on in turn for ever.
        return None if isinstance(error, EarlierSaveFailedError) else error
