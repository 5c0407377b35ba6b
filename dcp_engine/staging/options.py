"""Options of a stager, refused when it is made rather than in the middle of a save."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dcp_engine.errors import InvalidOptionError
from dcp_engine.staging.arena import MemoryKind
from dcp_engine.staging.digests import Thoroughness
from dcp_engine.storage.options import default_threads

__all__ = ["StagingOptions", "check_optimizer", "check_save", "staging_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingOptions:
    """Validated options; see :class:`dcp_engine.staging.DoubleBufferStager`."""

    memory: MemoryKind
    budget_bytes: int | None
    wait_secs: float
    verify_staging: Thoroughness
    threads: int
    split_on_device: bool


def staging_options(
    *,
    memory: MemoryKind | str,
    budget_bytes: int | None,
    wait_secs: float,
    verify_staging: Thoroughness | str,
    threads: int | None,
    split_on_device: bool,
) -> StagingOptions:
    """Check and complete the options.

    Raises:
        InvalidOptionError: naming the option, what it was and what is valid.
    """
    if budget_bytes is not None and (isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < 1):
        raise InvalidOptionError("budget_bytes is no size", expected="None or an int of at least 1", found=repr(budget_bytes))
    if isinstance(wait_secs, bool) or not isinstance(wait_secs, int | float) or not 0 <= wait_secs < math.inf:
        raise InvalidOptionError("wait_secs is no duration", expected="a finite number of seconds from 0", found=repr(wait_secs))
    if verify_staging not in ("off", "sample", "full"):
        raise InvalidOptionError("unknown verify_staging", expected="off, sample or full", found=repr(verify_staging))
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 256):
        raise InvalidOptionError("threads is out of range", expected="None or an int from 1 to 256", found=repr(threads))
    if not isinstance(split_on_device, bool):
        raise InvalidOptionError("split_on_device is not a bool", expected="True or False", found=repr(split_on_device)[:300])
    return StagingOptions(
        memory=_memory_kind(memory),
        budget_bytes=budget_bytes,
        wait_secs=float(wait_secs),
        verify_staging=verify_staging,
        threads=threads or default_threads(),
        split_on_device=split_on_device,
    )


def _memory_kind(memory: str) -> MemoryKind:
    if memory not in ("auto", "plain", "pinned", "shared"):
        raise InvalidOptionError("unknown memory", expected="auto, plain, pinned or shared", found=repr(memory))
    if memory == "pinned" and not torch.cuda.is_available():
        raise InvalidOptionError(
            "pinned memory needs CUDA", expected="a CUDA device", found="none", remedy='use memory="auto", which takes what there is'
        )
    if memory == "shared":
        return "shared"
    return "pinned" if memory == "pinned" or (memory == "auto" and torch.cuda.is_available()) else "plain"


def check_optimizer(value: object) -> None:
    """Refuse what has no hook before its steps. Raises ``InvalidOptionError``."""
    if not callable(getattr(value, "register_step_pre_hook", None)):
        raise InvalidOptionError(
            "this is no optimizer to protect",
            expected="a torch.optim.Optimizer",
            found=repr(value)[:300],
            remedy="call protect() once for each optimizer, or fence() before whatever changes the parameters",
        )


def check_save(value: object) -> None:
    """Refuse what does not tell its end. Raises ``InvalidOptionError``."""
    if not callable(getattr(value, "add_done_callback", None)):
        raise InvalidOptionError("this is no save to track", expected="what dcp.async_save returned, or a future", found=repr(value)[:300])
