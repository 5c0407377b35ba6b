"""What our reader tells our load planner of the chunks of a checkpoint: columns, of which a plan looks at those that it needs.

The handshake is an attribute of the metadata, ``stored_chunks``. A checkpoint of a thousand ranks has millions of chunks, and a record of
each takes a hundred times as long as finding those that meet a box.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["StoredChunks", "stored_chunks_of"]

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunks:
    """The chunks of all entries of a checkpoint. Those of each entry tile it. Thread-safety: arrays are not to be written to.

    Attributes:
        rows: key -> row of its entry. Aliases of ties are not there.
        order: ids of all chunks by their entries' rows; within an entry as its metadata lists them.
        starts: where each row's chunks begin in ``order``, and where the last row's end.
        places: where the box of each chunk begins in ``offsets`` and ``sizes``.
        offsets: flat: where each chunk begins in its entry, dimension by dimension, in elements.
        sizes: flat: its extents, in elements.
    """

    rows: Mapping[str, int]
    order: Int64s
    starts: Int64s
    places: Int64s
    offsets: Int64s
    sizes: Int64s


def stored_chunks_of(metadata: object) -> StoredChunks | None:
    """The chunks of a checkpoint of ours; ``None`` for any other reader's metadata."""
    stored = getattr(metadata, "stored_chunks", None)
    return stored if isinstance(stored, StoredChunks) else None
