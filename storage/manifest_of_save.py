"""From what the ranks of a save report to its MANIFEST, and from that to the ``Metadata`` that ``dcp.save`` returns."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from dcp_engine import __version__
from dcp_engine.errors import PlanError
from dcp_engine.objects import encode_object
from dcp_engine.storage import dcp_records
from dcp_engine.storage.dcp_metadata import ManifestIndex
from dcp_engine.storage.label import Label
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.records import ShardReceipt
from dcp_engine.types import EngineMetadata, EngineStorageMeta, PlannerData

__all__ = ["build_manifest", "fill_metadata", "receipts_of"]


def receipts_of(results: Sequence[Sequence[WriteResult]], *, nonce: str, path: str) -> list[ShardReceipt]:
    """The receipts of all ranks.

    Args:
        results: what ``ShardWriter.write_data`` returned, by rank.
        nonce: of the attempt that they must belong to.
        path: of the checkpoint, for messages.

    Raises:
        PlanError: a rank reports something else.
    """
    receipts: list[ShardReceipt] = []
    for rank, written in enumerate(results):
        for result in written:
            receipt = result.storage_data
            if not isinstance(receipt, ShardReceipt) or receipt.nonce != nonce or receipt.rank != rank:
                raise PlanError(
                    "a rank reported files of another save",
                    path=path,
                    rank=rank,
                    file=result.index.fqn,
                    expected=f"what ShardWriter.write_data returned for attempt {nonce}",
                    remedy="one save at a time may run on a process group, with one ShardWriter on each rank",
                )
            receipts.append(receipt)
    return receipts


def build_manifest(
    metadata: Metadata, receipts: list[ShardReceipt], label: Label, *, nonce: str, path: str, world_size: int, codec: str
) -> Manifest:
    """The manifest of a save whose files are all written.

    Args:
        metadata: of the global plan: the entries that have no bytes, ties, and the planner's own data are in it.
        receipts: of all ranks.
        label: what the user says of the checkpoint.
        nonce: of the attempt.
        path: of the checkpoint, whose name may say the step.
        world_size: number of ranks.
        codec: the one that was asked for.

    Raises:
        PlanError: the receipts contradict one another.
    """
    planner_data = metadata.planner_data
    ours = isinstance(planner_data, PlannerData)
    return Manifest.build(
        receipts=receipts,
        empty_entries=list(dcp_records.empty_entries(metadata)),
        nonce=nonce,
        writer_version=__version__,
        run_id=label.run_id or "",
        step=label.step_at(path),
        saved_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        world_size=world_size,
        aliases=planner_data.ties if ours else {},
        planner_data=b"" if planner_data is None else encode_object(dict(planner_data) if ours else planner_data, key="planner_data"),
        skeleton=planner_data.skeleton if ours else b"",
        metadata=encode_object(
            {"user": label.metadata, "environment": _environment(), "raw_bytes_by_codec": _by_codec(receipts)}, key="metadata"
        ),
        codec=codec,
    )


def fill_metadata(metadata: Metadata, manifest: Manifest, encoded: bytes, label: Label, *, path: str) -> None:
    """Adds to DCP's ``Metadata`` what is known of the checkpoint that is about to be published.

    Args:
        encoded: the manifest as it will be published.
        path: of the checkpoint.
    """
    metadata.storage_data = ManifestIndex(manifest, path)
    metadata.storage_meta = EngineStorageMeta(checkpoint_id=path, save_id=manifest.nonce)
    metadata.version = str(manifest.format_version)
    if isinstance(metadata, EngineMetadata):
        metadata.step = manifest.step
        metadata.run_id = label.run_id
        metadata.saved_at = manifest.saved_at
        metadata.nonce = manifest.nonce
        metadata.manifest_sha256 = hashlib.sha256(encoded).hexdigest()
        metadata.user_metadata = label.metadata


def _environment() -> dict[str, str | None]:
    """The versions that a reader may want to compare; the fuller contract belongs to whoever knows the training job."""
    return {"python": platform.python_version(), "torch": str(torch.__version__), "cuda": torch.version.cuda}


def _by_codec(receipts: list[ShardReceipt]) -> dict[str, int]:
    """What the codecs that were chosen have stored, over all ranks."""
    total: Counter[str] = Counter()
    for receipt in receipts:
        total.update(receipt.raw_bytes_by_codec)
    return dict(sorted(total.items()))
