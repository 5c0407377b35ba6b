"""The public way to save and load, the errors that it gives, and what two checkpoints have in common, for tests of the whole engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, LoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter
from dcp_engine.errors import DcpEngineError
from dcp_engine.storage.columns import unpack_document
from dcp_engine.storage.envelope import FOOTER_MAGIC, open_body, parse_record
from dcp_engine.storage.footer import _FIELDS as FOOTER_FIELDS
from dcp_engine.storage.limits import HEADER_BYTES, RECORD_BYTES
from dcp_engine.storage.manifest import Manifest

__all__ = ["attempts_in", "contents", "failure_of", "load", "refused", "save"]

StrPath = str | os.PathLike[str]


def save(state: dict[str, Any], path: StrPath, **options: Any) -> Metadata:
    """``dcp.save`` with our writer and planner; ``options`` of the writer."""
    return dcp.save(state, storage_writer=ShardWriter(path, **options), planner=BalancedSavePlanner())


def load(state: dict[str, Any], path: StrPath, *, planner: LoadPlanner | None = None, **options: Any) -> dict[str, Any]:
    """``dcp.load`` with our reader, by default with our planner; ``options`` of the planner. Returns ``state``."""
    dcp.load(state, storage_reader=ShardReader(path), planner=planner or ReshardLoadPlanner(**options))
    return state


def failure_of(error: CheckpointException, rank: int = 0) -> DcpEngineError:
    """What a rank raised, which must be an error of ours."""
    found = error.failures[rank][0]
    assert isinstance(found, DcpEngineError), repr(found)
    return found


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> DcpEngineError:
    """Runs a save or load that must fail with an error of ours, and returns that."""
    with pytest.raises(CheckpointException) as caught:
        call(*args, **kwargs)
    return failure_of(caught.value)


def attempts_in(directory: Path) -> list[str]:
    """Names of everything in a directory that is not an attempt left for the writer's next save."""
    return sorted(entry.name for entry in directory.iterdir() if not entry.name.startswith(".tmp-"))


def contents(path: StrPath) -> dict[str, Any]:
    """All that a checkpoint's files say, apart from when and by which attempt they were written: equal for equal states."""
    place = Path(path)
    manifest = Manifest.decode((place / "MANIFEST").read_bytes())
    found: dict[str, Any] = {
        "names": manifest.names,
        "aliases": dict(manifest.aliases),
        "planner_data": manifest.planner_data,
        "skeleton": manifest.skeleton,
        "metadata": manifest.metadata,
    }
    for index, record in enumerate(manifest.files):
        data = (place / record.name).read_bytes()
        footer = parse_record(data[-RECORD_BYTES:], FOOTER_MAGIC, file=record.name)
        begin = manifest.footer_position(index)
        body = open_body(footer, memoryview(data)[begin:-RECORD_BYTES], file=record.name)
        document = unpack_document(body, FOOTER_FIELDS, what="footer")
        del document["nonce"]
        found[record.name] = (data[HEADER_BYTES:begin], document)
    return found
