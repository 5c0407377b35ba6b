"""Planning without the garbage collector, which looks at every record that was ever made each time some more are: most of the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_gc"]


@contextmanager
def without_gc() -> Iterator[None]:
    """Switches cyclic collection off for the process, and on again if it was on. Reference counts still free what no cycle holds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
