"""``ShardReader``: DCP's ``StorageReader`` over the format and the read pipeline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_engine.errors import CorruptCheckpointError, DcpEngineError, InvalidOptionError, RankDisagreementError, StorageError
from dcp_engine.storage import dcp_records
from dcp_engine.storage.access import cipher_of, manifest_of
from dcp_engine.storage.backends import is_supported_path, locate
from dcp_engine.storage.dcp_metadata import ManifestIndex, ManifestMetadata, metadata_of_manifest
from dcp_engine.storage.encryption import BlockCipher, encryption_key_of
from dcp_engine.storage.keys import KeySource, secret_key
from dcp_engine.storage.options import DEFAULT_BYTES_IN_FLIGHT, pipeline_options
from dcp_engine.storage.publish import OpenCheckpoint, attach_checkpoint, open_checkpoint, require_unchanged
from dcp_engine.storage.rank_group import RankGroup, check_group
from dcp_engine.storage.read_pipeline import read_chunks
from dcp_engine.storage.read_shared import read_shared
from dcp_engine.storage.read_whole import WholeTargets
from dcp_engine.storage.records import ReadRequest
from dcp_engine.storage.workers import WorkerPool

__all__ = ["ShardReader"]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a rank saw when it opened the checkpoint, and whether it shares the reading; all ranks must say the same."""

    nonce: str
    manifest_sha256: str
    broadcast: bool


class ShardReader(StorageReader):
    """Reads one checkpoint: its metadata, then just the blocks that the wanted boxes touch.

    Calls by DCP, in order, and the ranks that run each:

    0. ``reset(checkpoint_id)`` (all ranks), only when the caller of ``dcp.load`` passed ``checkpoint_id``.
    1. ``read_metadata`` (all ranks): COMPLETE and MANIFEST, checked.
    2. ``set_up_storage_reader`` (all ranks).
    3. ``prepare_local_plan`` (all ranks): adds what this rank saw.
    4. ``prepare_global_plan`` (coordinator): refuses ranks that saw different checkpoints.
    5. ``read_data`` (all ranks): reads, checks, decodes into the planner's tensors.

    :class:`~dcp_engine.storage.root.RunRoot` retires no local checkpoint between 1 and the end of 5, as far as the file system has locks.
    After a failed load the targets are undefined.

    Args:
        path: directory or URL of the checkpoint; ``None``: it must come as ``checkpoint_id`` of ``dcp.load``.
        verify: check the digest of every block that is read. Sizes, structure and padding are always checked.
        threads: worker threads of this rank; ``None``: the CPUs it may use, shared among torchrun's local ranks, at most 8.
        broadcast: ranks share the reading: a block that several of them want (replicas; columns of one tensor, since blocks are rows) is
            read from storage by one of them, which passes it on over ``process_group``. Every rank of the group must load at the same
            time, also one that wants nothing. ``False``, or no group of several ranks: each rank reads all that it wants.
        bytes_in_flight: bytes that the pipeline may hold beyond the targets; at least 4 MiB, though one block in work takes up to 16 MiB.
            With ``broadcast`` half of them are buffers of what is passed on, at least 8 MiB; the smallest of all ranks counts.
        allow_opaque: hand bytes of unknown kind to the planner, which may unpickle them: only for checkpoints from people you trust,
            written with a planner that serialises objects itself.
        process_group: the group that ``dcp.load`` uses. With it the lowest rank reads COMPLETE and MANIFEST once and broadcasts them, so
            that all ranks load one checkpoint, and every rank must call ``read_metadata`` the same number of times. Without it
            disagreement is still found, when plans are compared. With ``broadcast`` it must carry CPU tensors, as gloo does, nothing else
            may use it during the load, and ``None`` stands for the default group where ``torch.distributed`` is initialised.
        storage_options: keyword arguments of the fsspec file system of a URL, and ``request_timeout_secs``: how long it may take to answer
            one request, and a second more for each MiB; 60 where it is not given.
        signing_key: refuse checkpoints that were not signed with this key: its bytes (16 or more), the path of a file whose whole content
            it is, or a callable that returns it, asked at every load. ``None``: anybody may have written them.
        encryption_key: what the blocks are encrypted with, likewise. Needs the extra ``crypto``. A checkpoint that is not encrypted is
            refused then. Neither key is shown, stored or pickled, but for ``multiprocessing``.

    Raises:
        InvalidOptionError: an option is out of range, or ``process_group`` cannot carry what ``broadcast`` would send.

    Thread-safety: one load at a time.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        verify: bool = True,
        broadcast: bool = False,
        threads: int | None = None,
        bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
        allow_opaque: bool = False,
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        signing_key: KeySource | None = None,
        encryption_key: KeySource | None = None,
    ) -> None:
        super().__init__()
        self._options = pipeline_options(threads=threads, bytes_in_flight=bytes_in_flight, verify=verify)
        self._signing_key = secret_key(signing_key, "signing_key")
        self._encryption_key = encryption_key_of(encryption_key)
        for name, value in (("allow_opaque", allow_opaque), ("broadcast", broadcast)):
            if not isinstance(value, bool):
                raise InvalidOptionError(f"{name} is not a bool", expected="True or False", found=repr(value)[:300])
        if broadcast and process_group is not None:
            check_group(process_group)
        self._allow_opaque = allow_opaque
        self._broadcast = broadcast
        self._process_group = process_group
        self._storage_options = dict(storage_options or {})
        self._path: str | None = None if path is None else locate(path).path
        self._rank: int | None = None
        self._opened: tuple[OpenCheckpoint, ManifestMetadata, BlockCipher | None] | None = None
        self._failure: DcpEngineError | None = None

    # -- DCP's calls ------------------------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The next load reads ``checkpoint_id``; ``None`` keeps the path."""
        if checkpoint_id is not None:
            self._path = locate(checkpoint_id).path
        self._release()
        self._opened = self._failure = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """COMPLETE and MANIFEST, checked, as DCP's metadata: an :class:`dcp_engine.types.EngineMetadata`.

        ``kwargs`` must keep its name. ``dcp.load`` swallows an exception of its first call, calls again with ``rank`` and, when that fails
        too, raises an ``AssertionError`` without our error. So the first call raises, for callers of their own, and the second returns
        metadata whose fields raise.

        Raises:
            CheckpointNotFoundError, IncompleteCheckpointError: there is none; the message says what is there.
            CorruptCheckpointError kinds, SignatureError among them; UnsupportedVersionError, StorageError kinds.
            EncryptionKeyError: its blocks are encrypted, and the key was not passed.
        """
        if "rank" in kwargs and self._failure is not None:
            self._rank = kwargs["rank"]
            return _FailedMetadata(self._failure)
        self._release()
        self._opened = self._failure = None
        try:
            self._opened = self._open()
        except DcpEngineError as error:
            self._failure = error
            raise
        return self._opened[1]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remember the rank. ``kwargs`` must keep its name: DCP looks for it and then passes ``rank``."""
        self._rank = kwargs.get("rank")
        if isinstance(metadata, _FailedMetadata):
            metadata.fail()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add what this rank saw."""
        metadata = self._metadata()
        return replace(plan, storage_data=self._seen(metadata))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse ranks that saw different checkpoints, or of which some share the reading and some do not.

        Raises:
            RankDisagreementError: naming the first rank that differs from rank 0.
        """
        group = self._group() if self._broadcast else None
        # A load without collectives shows one plan on each rank.
        if group is not None and len(plans) not in (1, dist.get_world_size(group)):
            raise RankDisagreementError(
                "the process group of the reader is not the one that loads",
                path=self._path,
                expected=f"the group of the load, of {len(plans)} ranks",
                found=f"a group of {dist.get_world_size(group)} ranks",
                remedy="give dcp.load and ShardReader the same process_group",
            )
        first = plans[0].storage_data
        for rank, plan in enumerate(plans):
            if plan.storage_data != first:
                raise RankDisagreementError(
                    "ranks opened different checkpoints under one path, or share the reading on some ranks only",
                    path=self._path,
                    rank=rank,
                    expected=f"what rank 0 saw: {first}",
                    found=plan.storage_data,
                    remedy="the path must lie on one file system that all ranks see, nobody may replace the checkpoint during a load, and "
                    "broadcast must be the same on all ranks",
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors and hand over its objects; done when it returns.

        Raises:
            CorruptCheckpointError kinds: naming file, tensor and block. The targets are undefined then.
            CheckpointNotFoundError: somebody replaced or removed the checkpoint meanwhile. Likewise.
            RankFailedError: with ``broadcast``, in place of an error that is not of the engine, a planner's for instance. All ranks raise
                the same error then, which names the ``rank`` that it comes from.
        """
        metadata = self._metadata()
        try:
            self._read(plan, planner, metadata.storage_data)
        except DcpEngineError as error:
            error.rank = self._rank if error.rank is None else error.rank
            error.path = self._path if error.path is None else error.path
            error.step = metadata.step if error.step is None else error.step
            raise
        finally:
            self._release()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` is a path or URL that this engine can read from."""
        return is_supported_path(checkpoint_id)

    # -- DCP's attribute --------------------------------------------------------------------------------------------------

    @property
    def checkpoint_id(self) -> str | None:
        """The path of the current or next load."""
        return self._path

    # -- inside -----------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot cross processes, and open files must not.
        return {**self.__dict__, "_process_group": None, "_opened": None}

    def _release(self) -> None:
        """Retention may have what was opened."""
        if self._opened is not None:
            self._opened[0].hold.release()

    def _metadata(self) -> ManifestMetadata:
        if self._opened is None:
            self.read_metadata()
        assert self._opened is not None
        return self._opened[1]

    def _read(self, plan: LoadPlan, planner: LoadPlanner, index: ManifestIndex) -> None:
        assert self._opened is not None
        opened, opened_metadata, cipher = self._opened

        def prepare() -> tuple[list[ReadRequest], WholeTargets | None]:
            items, whole = dcp_records.split_items(plan.items, opened_metadata.stored_tensors, index)
            return dcp_records.requests_of_plan(items, planner, index, allow_opaque=self._allow_opaque), whole

        source, options = (index.manifest, opened.directory.open), replace(self._options, cipher=cipher)
        group = self._group() if self._broadcast else None
        try:
            with WorkerPool(options.threads) as pool:
                if group is not None and dist.get_world_size(group) > 1:
                    ranks, seen = RankGroup(group), str(self._seen(opened_metadata))
                    read_shared(*source, prepare, options=options, pool=pool, ranks=ranks, seen=seen, path=index.path)
                else:
                    requests, whole = prepare()
                    read_chunks(*source, requests, whole=whole, options=options, pool=pool, path=index.path)
        except CorruptCheckpointError:
            require_unchanged(index.path, opened.marker, storage_options=self._storage_options)
            raise

    def _seen(self, metadata: ManifestMetadata) -> _Seen:
        return _Seen(metadata.nonce or "", metadata.manifest_sha256 or "", self._broadcast)

    def _group(self) -> dist.ProcessGroup | None:
        """The group that all ranks of a load are in, if it is known."""
        if self._process_group is None and self._broadcast and dist.is_initialized():
            check_group(dist.group.WORLD)
            return dist.group.WORLD
        return self._process_group

    def _open(self) -> tuple[OpenCheckpoint, ManifestMetadata, BlockCipher | None]:
        if self._path is None:
            raise InvalidOptionError("no path to read from", remedy="pass ShardReader(path) or dcp.load(..., checkpoint_id=path)")
        group = self._group()
        if group is None:
            opened = open_checkpoint(self._path, storage_options=self._storage_options)
        else:
            opened = self._open_together(self._path, group)
        try:
            manifest = manifest_of(opened, signing_key=self._signing_key, path=self._path)
            cipher = cipher_of(manifest, self._encryption_key, path=self._path)
        except BaseException:
            opened.hold.release()
            raise
        metadata = metadata_of_manifest(manifest, path=self._path, manifest_sha256=opened.marker.manifest_sha256)
        return opened, metadata, cipher

    def _open_together(self, path: str, group: dist.ProcessGroup) -> OpenCheckpoint:
        """The lowest rank of the group reads, all others take its word, or its error."""
        leads = dist.get_rank(group) == 0
        opened: OpenCheckpoint | None = None
        box: list[Any] = [None]
        if leads:
            try:
                opened = open_checkpoint(path, storage_options=self._storage_options)
                box[0] = (opened.marker, opened.manifest_bytes)
            except DcpEngineError as error:
                error.rank = 0
                box[0] = error
            except Exception as error:  # noqa: BLE001 - whatever it is, the others wait in the broadcast
                box[0] = StorageError("the checkpoint could not be opened", path=path, rank=0, found=repr(error))
                box[0].__cause__ = error
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
        if isinstance(box[0], DcpEngineError):
            raise box[0]
        if opened is None:
            marker, manifest_bytes = box[0]
            opened = attach_checkpoint(path, marker, manifest_bytes, storage_options=self._storage_options)
        return opened


class _FailedMetadata(Metadata):
    """Metadata of a checkpoint that could not be opened: every field raises the error that says why.

    It has neither ``__len__`` nor ``__bool__``: DCP asks ``not metadata``, and the error must be raised where DCP collects errors.
    """

    def __init__(self, error: DcpEngineError) -> None:
        self.__dict__["_error"] = error

    def fail(self) -> NoReturn:
        raise self.__dict__["_error"]

    def __getattribute__(self, name: str) -> Any:
        if name in _METADATA_FIELDS:
            self.fail()
        return super().__getattribute__(name)


_METADATA_FIELDS = frozenset(field.name for field in fields(Metadata))
