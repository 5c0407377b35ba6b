"""Which step is good: what can be told of a checkpoint without reading its data."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dcp_engine.errors import CheckpointNotFoundError, CorruptCheckpointError, SignatureError, TruncatedFileError, UnsupportedVersionError
from dcp_engine.storage.access import manifest_of
from dcp_engine.storage.attempts import MANIFEST_NAME
from dcp_engine.storage.backends import Location
from dcp_engine.storage.keys import SecretKey
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.publish import OpenCheckpoint, open_checkpoint
from dcp_engine.storage.steps import step_name

__all__ = ["check_whole", "open_newest_good"]

_logger = logging.getLogger(__name__)
_NUM_REQUESTS = 16


def open_newest_good(
    root: Location,
    steps: Iterable[int],
    *,
    storage_options: Mapping[str, Any] | None = None,
    signing_key: SecretKey | None = None,
    pass_newer_versions: bool = True,
) -> tuple[int, OpenCheckpoint] | None:
    """Opens the newest of some steps whose COMPLETE, MANIFEST and files are there as they must be. One that is not is told in a warning.

    Args:
        signing_key: whose holder must have signed a good step; ``None``: it need not be signed.
        pass_newer_versions: what a newer release wrote is no good step, instead of an error.

    Returns:
        the step and what was opened, whose ``hold`` the caller releases; None if none of them is good.

    Raises:
        StorageError: it cannot be told. UnsupportedVersionError
    """
    bad = (CorruptCheckpointError, UnsupportedVersionError) if pass_newer_versions else (CorruptCheckpointError,)
    for step in sorted(steps, reverse=True):
        try:
            opened = open_checkpoint(root.child(step_name(step)).path, storage_options=storage_options)
        except CheckpointNotFoundError:
            continue  # retired meanwhile
        except bad as error:
            _logger.warning("step %d does not count as a good one: %s", step, error)
            continue
        try:
            check_whole(opened, signing_key, step=step)
        except bad as error:
            opened.hold.release()
            _logger.warning("step %d does not count as a good one: %s", step, error)
        except BaseException:
            opened.hold.release()
            raise
        else:
            return step, opened
    return None


def check_whole(opened: OpenCheckpoint, signing_key: SecretKey | None = None, *, step: int | None = None) -> Manifest:
    """Holds the files of a checkpoint against its manifest: each must be there, of the right size. Their content is not looked at.

    Args:
        signing_key: whose holder must have signed it, for the step of its name; ``None``: it need not be signed.
        step: of its name; ``None``: it has no such name.

    Returns:
        its manifest.

    Raises:
        SignatureError, MissingFileError, TruncatedFileError, or whatever is wrong with the manifest. StorageError: it cannot be told.
    """
    directory = opened.directory
    manifest = manifest_of(opened, signing_key=signing_key, path=directory.path)
    if signing_key is not None and step is not None and manifest.step != step:
        # A copy of an old step under a new name would take the run back, and retention would remove all that is newer.
        raise SignatureError(
            "the checkpoint is signed for another step than that of its name",
            path=directory.path,
            file=MANIFEST_NAME,
            expected=f"step {step}",
            found="no step" if manifest.step is None else f"step {manifest.step}",
            remedy="take another step, and find out who copied this one",
        )
    with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
        sizes = list(pool.map(directory.file_size, [record.name for record in manifest.files]))
    for record, size_bytes in zip(manifest.files, sizes, strict=True):
        if size_bytes != record.size_bytes:
            raise TruncatedFileError(
                "a file is not as long as the manifest says",
                path=directory.path,
                file=record.name,
                expected=f"{record.size_bytes} bytes",
                found=f"{size_bytes} bytes",
            )
    return manifest
