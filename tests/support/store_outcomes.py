"""What a reader finds in an object store after a save with faults, and whether that is what the save promised."""

from __future__ import annotations

from typing import Any

from support.checkpoints import FILES

from dcp_engine.errors import CheckpointNotFoundError, CommitStateUnknownError, ConcurrentCommitError, DcpEngineError
from dcp_engine.storage.publish import open_checkpoint

__all__ = ["judge", "seen", "whole_nonce"]


def seen(url: str, options: dict[str, Any]) -> str | None:
    """Nonce of the checkpoint that a reader finds; None for none, words for a broken one."""
    try:
        return whole_nonce(url, options)
    except CheckpointNotFoundError:
        return None
    except DcpEngineError as error:
        return f"a broken one ({error})"


def whole_nonce(url: str, options: dict[str, Any]) -> str:
    """Nonce of a checkpoint all of whose files hold what was written. Raises what a reader would."""
    opened = open_checkpoint(url, storage_options=options)
    for name, content in FILES.items():
        file = opened.directory.open(name)
        data = bytearray(file.size_bytes)
        file.read_into(0, [memoryview(data)])
        if data != content:
            return f"a broken one ({name})"
    return opened.marker.nonce


def judge(error: DcpEngineError | None, found: str | None, *, old: str | None, new: str | None, rival: str | None) -> list[str]:
    """What a save that ended like this has broken.

    Args:
        error: what it raised; None if it claimed success.
        found: nonce that a reader finds, or words for what is not whole.
        old: nonce of what was there before; None for nothing.
        new: nonce of the save.
        rival: nonce that another writer published meanwhile.
    """
    before = old if rival is None else rival
    if error is None:
        allowed = {new} if rival is None else set()
    elif isinstance(error, CommitStateUnknownError):
        allowed = {before, new}
    elif isinstance(error, ConcurrentCommitError):
        allowed = {rival} - {None}
    else:
        allowed = {before}
    if found in allowed:
        return []
    outcome = "success" if error is None else type(error).__name__
    return [f"after {outcome} a reader finds {found}, not one of {sorted(map(str, allowed))} (old {old}, new {new}, rival {rival})"]
