"""The rows of the figures to reach, a module each: what it does, its systems, how they run, how the result is checked."""

from __future__ import annotations

from benchmarks.harness import Row
from benchmarks.rows.f1_save import SaveRaw
from benchmarks.rows.f2_load import LoadRaw
from benchmarks.rows.f3_compressed import Compressed
from benchmarks.rows.f4_slice import Slice
from benchmarks.rows.f5_tiny import Tiny
from benchmarks.rows.f6_plans import Plans
from benchmarks.rows.f7_async import Async
from benchmarks.rows.f8_gpu import Gpu
from benchmarks.rows.f9_replicas import Replicas

__all__ = ["ROWS"]

ROWS: dict[str, Row] = {row.NAME: row for row in (SaveRaw(), LoadRaw(), Compressed(), Slice(), Tiny(), Plans(), Async(), Gpu(), Replicas())}
"""By name."""
