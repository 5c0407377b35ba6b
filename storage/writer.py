"""``ShardWriter``: DCP's ``StorageWriter``. Which call does what, in which order, and what becomes of an attempt; all else is elsewhere."""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_engine import staged_memory
from dcp_engine.components import ComponentMap
from dcp_engine.errors import (
    CommitStateUnknownError,
    DcpEngineError,
    InvalidOptionError,
    PlanError,
    RankDisagreementError,
    RankFailedError,
    StorageError,
    UnsupportedModeError,
    UsageError,
    can_travel,
)
from dcp_engine.storage import dcp_records, planner_values
from dcp_engine.storage.attempts import Fence
from dcp_engine.storage.backends import is_supported_path, locate
from dcp_engine.storage.encryption import BlockCipher, encryption_key_of
from dcp_engine.storage.keys import KeySource, SecretKey, secret_key
from dcp_engine.storage.label import Label
from dcp_engine.storage.manifest_of_save import build_manifest, fill_metadata, receipts_of
from dcp_engine.storage.options import DEFAULT_BYTES_IN_FLIGHT, chosen_digest, pipeline_options
from dcp_engine.storage.publish import AttemptRef, Publisher, open_publisher
from dcp_engine.storage.records import ShardReceipt
from dcp_engine.storage.shard_set import Writer, write_shards
from dcp_engine.storage.tickets import LocalTicket, Ticket, token_of
from dcp_engine.storage.write_watch import WriteWatch, ask
from dcp_engine.types import EngineStorageMeta, WritePhases

__all__ = ["ShardWriter"]


class ShardWriter(StorageWriter):
    """Writes one checkpoint per save: per-rank shard files, a manifest, published atomically at ``path``.

    Calls by DCP, in order, and the ranks that run each:

    0. ``reset(checkpoint_id)`` (all ranks), only when the caller of ``dcp.save`` passed ``checkpoint_id``; then ``storage_meta()``.
    1. ``set_up_storage_writer`` (all ranks): begins a save. State of the previous one ends here.
    2. ``prepare_local_plan`` (all ranks): adds a token.
    3. ``prepare_global_plan`` (coordinator): checks the target, creates the attempt directory, tells every rank.
    4. ``write_data`` (all ranks): writes this rank's shard files, each durable when it returns.
    5. ``finish`` (coordinator): holds the receipts against the plans, writes MANIFEST and COMPLETE, publishes, fills the ``Metadata``.

    Nothing is visible at ``path`` before 5 is through, and it is there whole afterwards. DCP has no call for an abandoned save: what a
    failed one leaves beside ``path`` (``.tmp-<name>-<nonce>``) is removed when this writer begins its next save.

    Args:
        path: directory or URL of the checkpoint, for instance ``runs/7/step-00000100`` or ``s3://bucket/run/step-00000100``. ``None``: it
            must come as ``checkpoint_id`` of ``dcp.save``.
        codec: ``"planes"`` (the exponents of floats compressed; zstd for all else), ``"zstd"``, ``"raw"``, or ``"auto"``: planes as long as
            that makes the save faster, by what it measures of the codec and the storage meanwhile, else raw. Where the speed of the storage
            cannot be seen (object stores, systems other than Linux), ``"auto"`` compresses. What does not shrink is raw with any of them.
        size_target: with ``"auto"``, a share of the raw bytes, from 0 to 1: it compresses, even if that takes longer, while what this
            rank has stored so far is more than that. 0 asks for the smallest files; ``None``: time alone counts.
        level: zstd level, 1 to 22.
        threads: worker threads of this rank; ``None``: the CPUs it may use, shared among torchrun's local ranks, at most 8.
        bytes_in_flight: bytes that the pipeline may hold beyond the state itself; at least 4 MiB. A chunk that is not contiguous CPU memory
            is copied whole, so one larger than half of the bound exceeds it.
        max_bytes_per_sec: cap on what this rank writes to its files, all of them together, so that a save in the background leaves the
            storage to others; at least 64 KiB/s. With a URL it holds for the spool, before the upload. ``None``: no cap.
        overwrite: replace a checkpoint that is already at ``path`` (kept until the new one is published).
        step: training step; ``None``: taken from a name of the form ``step-00000100``, else unknown.
        run_id: name of the training run; ``None``: unknown.
        metadata: values to keep with the checkpoint, in the types of :mod:`dcp_engine.objects`.
        components: glob pattern of keys -> component, before the well-known names; see :class:`dcp_engine.components.ComponentMap`.
        process_group: the group that ``dcp.save`` uses; checked against the plan. Not pickled.
        storage_options: keyword arguments of the fsspec file system of a URL, and ``request_timeout_secs``: how long it may take to answer
            one request, and a second more for each MiB; 60 where it is not given.
        fence: asked on the coordinator right after the attempt is made and right before it is published, and on any rank whose files
            went away: an :class:`~dcp_engine.storage.epochs.EpochClaim`, or anything with its ``check()``. What that raises ends the save.
        digest: of blocks: ``"xxh3"`` finds damage; ``"sha256"``, at a fifteenth of its speed, makes a chain from COMPLETE to every byte.
            ``None``: ``"sha256"`` with a ``signing_key``, else ``"xxh3"``. The same on all ranks.
        signing_key: signs COMPLETE, so that readers with the same key refuse whatever its holders have not written: the key's bytes (16 or
            more), the path of a file whose whole content it is, or a callable that returns it, asked at every save.
        encryption_key: encrypts all blocks with AES-256-GCM; given likewise, the same on all ranks. Needs the extra ``crypto``. Names,
            shapes, dtypes and metadata stay in the clear. Neither key is shown, stored or pickled, but for ``multiprocessing``.

    Attributes:
        watch: for whoever supervises a save from another thread: see :class:`~dcp_engine.storage.write_watch.WriteWatch`.
        phases: where the time of the last save went on this rank; None until its files are written.

    Raises:
        InvalidOptionError: an option is out of range.
        UnencodableObjectError: ``metadata`` cannot be represented.

    Thread-safety: one save at a time. DCP calls it from one thread per save, which may be a background one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        codec: str = "auto",
        level: int = 1,
        size_target: float | None = None,
        threads: int | None = None,
        bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
        max_bytes_per_sec: float | None = None,
        overwrite: bool = False,
        step: int | None = None,
        run_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        components: Mapping[str, str] | None = None,
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        fence: Fence | None = None,
        digest: str | None = None,
        signing_key: KeySource | None = None,
        encryption_key: KeySource | None = None,
    ) -> None:
        super().__init__()
        self.watch = WriteWatch(fence)
        self._signing_key = secret_key(signing_key, "signing_key")
        self._encryption_key = encryption_key_of(encryption_key)
        self._options = pipeline_options(
            threads=threads,
            bytes_in_flight=bytes_in_flight,
            codec=codec,
            level=level,
            size_target=size_target,
            max_bytes_per_sec=max_bytes_per_sec,
            digest=chosen_digest(digest, signed=self._signing_key is not None),
        )
        self._components = ComponentMap(components)
        if not isinstance(overwrite, bool):
            raise InvalidOptionError("overwrite is not a bool", expected="True or False", found=repr(overwrite)[:300])
        self._overwrite = overwrite
        self._label = Label.checked(step=step, run_id=run_id, metadata=metadata)
        self._process_group = process_group
        self._storage_options = dict(storage_options or {})
        self._fence = fence
        self._path: str | None = None if path is None else locate(path).path
        self._rank = 0
        self._token = ""
        # The attempt in progress, on the coordinator. One that is still here when a save begins was abandoned: DCP has no call for that.
        self._attempt: tuple[Publisher, AttemptRef] | None = None
        self._began = 0.0
        self.phases: WritePhases | None = None

    # -- DCP's calls ------------------------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The next save goes to ``checkpoint_id``; ``None`` keeps the path."""
        if checkpoint_id is not None:
            self._path = locate(checkpoint_id).path

    def storage_meta(self) -> EngineStorageMeta:
        """The handshake: a planner that receives it knows that the writer is ours."""
        return EngineStorageMeta(checkpoint_id=self._path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save. ``kwargs`` must keep its name: DCP looks for it and then passes ``rank`` and ``use_collectives``.

        Raises:
            UnsupportedModeError: ``use_collectives=False``, where every rank would publish a checkpoint of its own.
            InvalidOptionError: no path was given, neither here nor as ``checkpoint_id``.
        """
        if not kwargs.get("use_collectives", True):
            raise UnsupportedModeError(
                "dcp.save(use_collectives=False) is not supported: without collectives no rank could know that all others have written",
                rank=kwargs.get("rank"),
                remedy="leave use_collectives at True, or save each rank to a path of its own with no_dist=True",
            )
        if self._path is None:
            raise InvalidOptionError("no path to write to", remedy="pass ShardWriter(path) or dcp.save(..., checkpoint_id=path)")
        self._rank = int(kwargs.get("rank", 0))
        self._token = secrets.token_hex(16)
        self._began, self.phases = time.monotonic(), None
        self.watch.begin()
        self._abort()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add this rank's token.

        Raises:
            UnsupportedModeError: a stock planner replays a cached plan, which would also replay the previous save's destination.
            UnsupportedTensorError: a tensor's dtype, layout or number of dimensions cannot be stored.
        """
        dcp_records.check_tensors(plan)
        if not plan.usable and plan.planner_data is None:
            raise UnsupportedModeError(
                "the stock planner's enable_plan_caching replays the previous save's plan, destination included",
                path=self._path,
                rank=self._rank,
                remedy="use BalancedSavePlanner, which caches safely, or DefaultSavePlanner(enable_plan_caching=False)",
            )
        return replace(plan, storage_data=LocalTicket(self._token))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check the target and create the attempt.

        Raises:
            CheckpointExistsError: something is at ``path`` already; StorageError kinds: it cannot be written.
            RankDisagreementError: the number of plans is not the group's size.
        """
        world_size = len(plans)
        if self._process_group is not None and dist.get_world_size(self._process_group) != world_size:
            raise RankDisagreementError(
                "the save runs on another process group than the writer was given",
                path=self._path,
                expected=f"{dist.get_world_size(self._process_group)} ranks",
                found=f"{world_size} plans",
                remedy="pass the same process_group to ShardWriter and to dcp.save",
            )
        try:
            # Now, not when it signs: a key that cannot be had must not cost a save whose data is written.
            key = self._signing_key
            publisher = self._publisher(signing_key=None if key is None else SecretKey(key.material(), "signing_key"))
            attempt = publisher.begin()
        except DcpEngineError as error:
            self._add_place(error)
            raise
        self._attempt = (publisher, attempt)
        return [replace(plan, storage_data=Ticket(token_of(plan), attempt, rank, world_size)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard files; they are durable when it returns. The result holds one record a file, in ``storage_data``.

        Raises:
            DcpEngineError: of the kind that fits, with this rank in it. A file that failed is removed; those that were whole by then stay
                in the attempt, and go with it.
        """
        ticket = plan.storage_data
        if not isinstance(ticket, Ticket) or ticket.token != self._token:
            raise PlanError(
                "the plan that came back does not belong to this save",
                path=self._path,
                rank=self._rank,
                expected="the storage_data that the coordinator's ShardWriter.prepare_global_plan returned for this rank",
                found=type(ticket).__name__,
                remedy="keep SavePlan.storage_data in custom planners, and do not replay cached plans",
            )
        may_write = time.monotonic()
        try:
            # A staged state's buffer is free for the next save from here on, whatever keeps the staged tensors alive.
            with staged_memory.writing(planner_values.held_values(planner)), planner_values.own_state(planner):
                receipts = self._write_files(plan, planner, ticket)
        except DcpEngineError as error:
            reason = self._reason(error, ticket)
            reason.rank = ticket.rank if reason.rank is None else reason.rank
            self._add_place(reason)
            if reason is error:
                raise
            raise reason from error
        except Exception as error:
            if can_travel(error):
                raise
            # DCP would fail to send it to the other ranks, and they would wait for it until the group's timeout.
            found = f"{type(error).__name__}: {error}"
            failure = RankFailedError("a rank failed to write", rank=ticket.rank, found=found)
            self._add_place(failure)
            raise failure from error
        self.phases = WritePhases(
            plan_secs=may_write - self._began,
            write_secs=time.monotonic() - may_write,
            raw_bytes=sum(receipt.raw_bytes for receipt in receipts),
            stored_bytes=sum(receipt.size_bytes for receipt in receipts),
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [WriteResult(index=MetadataIndex(r.name), size_in_bytes=r.size_bytes, storage_data=r) for r in receipts],
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish, and fill ``metadata``: ``dcp.save`` returns that very object.

        Raises:
            PlanError: what the ranks wrote is not what was planned. CommitError kinds: it could not be published. Nothing is visible then.
            UsageError: this writer is not the coordinator's, or the save is over.
        """
        if self._attempt is None:
            raise UsageError("no save is in progress here", path=self._path, remedy="call finish() once a save, on the coordinator alone")
        assert self._path is not None
        publisher, attempt = self._attempt
        try:
            receipts = receipts_of(results, nonce=attempt.nonce, path=self._path)
            manifest = build_manifest(
                metadata,
                receipts,
                self._label,
                nonce=attempt.nonce,
                path=self._path,
                world_size=len(results),
                codec=self._options.codec,
            )
            self.watch.tick()
            dcp_records.check_delivered(metadata, manifest)
            encoded = manifest.encode()
            # Before publishing: nothing may fail afterwards, or a checkpoint that is there would be told as failed.
            fill_metadata(metadata, manifest, encoded, self._label, path=self._path)
            self.watch.tick()
            publisher.commit(attempt, encoded, [(record.name, record.size_bytes) for record in manifest.files])
        except CommitStateUnknownError:
            self._attempt = None  # it may be published: nothing of it may be removed
            raise
        except BaseException as error:
            self._abort()
            if isinstance(error, DcpEngineError):
                self._add_place(error)
            raise
        self._attempt = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` is a path or URL that this engine can write to."""
        return is_supported_path(checkpoint_id)

    # -- for whoever supervises a save ------------------------------------------------------------------------------------

    @property
    def shows_progress(self) -> bool:
        """Whether ``watch.progress`` grows while bytes get on: an upload of a whole file shows nothing."""
        return self._path is not None and not locate(self._path).remote

    @property
    def reader_options(self) -> dict[str, Any]:
        """Keyword arguments of the ``ShardReader`` of what this one writes."""
        return {"storage_options": self._storage_options, "signing_key": self._signing_key, "encryption_key": self._encryption_key}

    def revoke(self, attempt: AttemptRef) -> bool:
        """Settle whether a checkpoint is published whose coordinator is lost: see ``Publisher.revoke``. Any rank may call it.

        Returns:
            Whether it will never be published; False: it is.

        Raises:
            CommitStateUnknownError: neither can be told.
        """
        return self._publisher().revoke(attempt)

    def abandon(self) -> None:
        """Remove what the last save has left, if that failed; on the coordinator. Never raises. Else the writer's next save does it."""
        self._abort()

    @property
    def takes_split_tensors(self) -> bool:
        """Whether it writes staged floats that were taken apart on their device as it would write them whole, and gains by it. A subclass
        may look at what it writes.
        """
        return type(self) is ShardWriter and self._options.codec in ("planes", "auto")

    # -- DCP's attribute --------------------------------------------------------------------------------------------------

    @property
    def checkpoint_id(self) -> str | None:
        """The path of the current or next save."""
        return self._path

    # -- inside -----------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot cross processes; the process that DCP saves from has a group of its own.
        return {**self.__dict__, "_process_group": None, "_attempt": None}

    def _abort(self) -> None:
        if self._attempt is not None:
            publisher, attempt = self._attempt
            self._attempt = None
            publisher.abort(attempt)

    def _reason(self, failure: DcpEngineError, ticket: Ticket) -> DcpEngineError:
        """Why this rank could not write: where the attempt went away, another save of this writer removed it, or the fence knows."""
        if ticket.token != self._token:
            target = ticket.attempt.target
            return UsageError(
                "the writer began another save while this one was under way",
                path=target,
                step=self._label.step_at(target),
                expected="one save at a time for each writer",
                remedy="give each save its own writer, or wait for the save before, as BackgroundSaver does",
            )
        gone = isinstance(failure, RankDisagreementError) or (isinstance(failure, StorageError) and failure.errno == errno.ENOENT)
        if gone and self._fence is not None:
            try:
                ask(self._fence)
            except DcpEngineError as error:
                return error
        return failure

    def _add_place(self, error: DcpEngineError) -> None:
        error.path = self._path if error.path is None else error.path
        if error.step is None and self._path is not None:
            error.step = self._label.step_at(self._path)

    def _publisher(self, *, signing_key: SecretKey | None = None) -> Publisher:
        assert self._path is not None
        return open_publisher(
            self._path,
            storage_options=self._storage_options,
            overwrite=self._overwrite,
            fence=self.watch,
            signing_key=signing_key,
        )

    def _write_files(self, plan: SavePlan, planner: SavePlanner, ticket: Ticket) -> list[ShardReceipt]:
        publisher = self._publisher()
        directory = publisher.attempt(ticket.attempt)
        by_component = dcp_records.sources_of_plan(plan, planner, self._components)
        writer = Writer(rank=ticket.rank, world_size=ticket.world_size, nonce=ticket.attempt.nonce)
        key = self._encryption_key
        cipher = None if key is None else BlockCipher(key.material(), ticket.attempt.nonce)
        receipts = write_shards(directory, by_component, writer, replace(self._options, cipher=cipher), self.watch)
        publisher.seal(ticket.attempt)
        return receipts
