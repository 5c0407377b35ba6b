"""What a user says of a checkpoint, to be kept in it: step, run, values of any kind that can be stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

from dcp_engine.errors import InvalidOptionError
from dcp_engine.objects import decode_object, encode_object
from dcp_engine.storage.limits import MAX_STEP, MAX_TEXT_BYTES
from dcp_engine.storage.steps import parse_step_name

__all__ = ["Label", "check_run_id"]


@dataclass(frozen=True, slots=True)
class Label:
    """Checked when made, by :meth:`checked`."""

    step: int | None
    """Training step; None: the name of the checkpoint says it, or nothing does."""
    run_id: str | None
    metadata: dict[str, Any]
    """The user's values."""

    @classmethod
    def checked(cls, *, step: int | None, run_id: str | None, metadata: Mapping[str, Any] | None) -> Self:
        """A label of what a user has passed.

        Raises:
            InvalidOptionError: naming the option, what it was and what is valid.
            UnencodableObjectError: ``metadata`` cannot be represented.
        """
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP):
            raise InvalidOptionError("step is not a step", expected=f"None or an int from 0 to {MAX_STEP}", found=repr(step)[:300])
        if run_id is not None:
            check_run_id(run_id)
        if metadata is not None and not isinstance(metadata, Mapping):
            raise InvalidOptionError("metadata is not a mapping", expected="None or a dict", found=repr(metadata)[:300])
        # A copy through the codec: refused now if it cannot be stored, and deaf to later changes of the caller's containers.
        copy = decode_object(encode_object(dict(metadata or {}), key="metadata"), key="metadata")
        return cls(step, run_id, cast("dict[str, Any]", copy))

    def step_at(self, path: str) -> int | None:
        """Training step of a checkpoint at a path or URL: as was said, else of a name like ``step-00000100``, else None."""
        return self.step if self.step is not None else parse_step_name(path.rstrip("/").rpartition("/")[2])


def check_run_id(run_id: object) -> None:
    """Refuses what cannot be the name of a run. Raises ``InvalidOptionError``."""
    if not isinstance(run_id, str) or len(run_id.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise InvalidOptionError("run_id is not a name", expected=f"a str of at most {MAX_TEXT_BYTES} bytes", found=repr(run_id)[:300])
