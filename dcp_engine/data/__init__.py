"""Data in an order, and from a position, that do not depend on the ranks.

``sampler`` is for data sets with a length (``order`` has the permutation, ``batches`` the cuts, ``position`` what a checkpoint holds and
its check), ``stream`` for shards that are read through (``progress`` deals them out, ``stream_state`` is what a checkpoint holds).
``loader`` counts what training got of either, ``augment`` has random numbers that belong to a sample.
"""

from __future__ import annotations

from dcp_engine.data.augment import SampleGenerator, sample_generator
from dcp_engine.data.loader import ResumableLoader
from dcp_engine.data.position import check_continuation
from dcp_engine.data.sampler import ResumableSampler
from dcp_engine.data.stream import ResumableStream, StreamSource, read_lines

__all__ = [
    "ResumableLoader",
    "ResumableSampler",
    "ResumableStream",
    "SampleGenerator",
    "StreamSource",
    "check_continuation",
    "read_lines",
    "sample_generator",
]
