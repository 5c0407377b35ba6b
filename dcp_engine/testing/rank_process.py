"""One rank of a leg: a fresh process that joins its group, calls the training function, and ends."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import random
import resource
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dcp_engine.errors import StoppedOnPurposeError
from dcp_engine.objects import decode_object
from dcp_engine.testing.context import RunContext
from dcp_engine.testing.parent import leave_with_parent
from dcp_engine.testing.stops import StopAt

__all__ = ["run_job"]


def run_job(path: str) -> None:
    """Does a job and returns; raises what the training function raises, unless it was meant to.

    Args:
        path: of a file with the job, as :mod:`dcp_engine.testing.launch` writes it, in the encoding of the format's objects.
    """
    leave_with_parent()
    faulthandler.enable()  # the launcher ends a rank that hangs by SIGABRT, so that its log ends with its stacks
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    job: Any = decode_object(Path(path).read_bytes(), key="job")
    # After the function's module: its classes may be among the arguments, and are registered there.
    function = _function(job["module"], job["qualname"], job["file"])
    arguments: Any = decode_object(job["arguments"], key="arguments")
    try:
        _run(job, lambda context: function(*arguments["args"], context, **arguments["keywords"]))
    except StoppedOnPurposeError as error:
        print(error, file=sys.stderr)  # noqa: T201  to the log


def _run(job: dict[str, Any], function: Callable[[Any], object]) -> None:
    stops = [StopAt(**stop) for stop in job["stops"]]
    if job["init_group"]:
        dist.init_process_group("gloo", timeout=timedelta(seconds=job["timeout_secs"]))
    random.seed(job["seed"])
    np.random.seed(job["seed"])
    torch.manual_seed(job["seed"])
    try:
        function(RunContext(**job["context"], stops=stops))
    finally:
        # Peers that wait for a rank that raised get their error now, not at the group's timeout.
        if dist.is_initialized():
            dist.destroy_process_group()


def _function(module_name: str, qualname: str, file: str) -> Any:
    value: Any = _module(module_name, file)
    for name in qualname.split("."):
        value = getattr(value, name)
    return value


def _module(name: str, file: str) -> ModuleType:
    """The module, under the name that it has where the test runs. One that cannot be imported by it (a script, or a test module, which is
    part of no package) is loaded by its path; a script as no main program."""
    if name == "__main__":
        name = "__mp_main__"  # as multiprocessing calls it
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and os.path.samefile(spec.origin, file):
            return importlib.import_module(name)
    for depth in range(1, name.count(".") + 1):
        parent = ".".join(name.split(".")[:depth])
        sys.modules.setdefault(parent, ModuleType(parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
