"""The footer of a shard file: its own table and whose it is, from which a lost manifest can be rebuilt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from dcp_engine.errors import MalformedCheckpointError
from dcp_engine.storage import columns
from dcp_engine.storage.envelope import nonce_bytes, shard_name
from dcp_engine.storage.limits import MAX_WORLD_SIZE
from dcp_engine.storage.shard_table import ShardTable
from dcp_engine.storage.table_columns import TABLE_FIELDS

__all__ = ["Footer", "decode_footer", "encode_footer"]

_FIELDS: dict[str, type] = {"nonce": bytes, "component": str, "rank": int, "stripe": int, "world_size": int, **TABLE_FIELDS}


@dataclass(frozen=True, slots=True)
class Footer:
    """The body of a shard file's footer.

    Attributes:
        nonce: of the attempt, 32 hex digits.
        component: what the file holds.
        rank: of the writer.
        world_size: number of ranks that wrote the checkpoint.
        table: of this file alone.
        stripe: which of the files that the writer gave the component, from 0 on.
    """

    nonce: str
    component: str
    rank: int
    world_size: int
    table: ShardTable
    stripe: int = 0

    @property
    def name(self) -> str:
        """Name of the file."""
        return shard_name(self.component, self.rank, self.stripe)


def encode_footer(footer: Footer) -> bytes:
    """The body, to be wrapped by :func:`dcp_engine.storage.envelope.pack_record`."""
    return columns.pack_document(
        {
            "nonce": nonce_bytes(footer.nonce),
            "component": footer.component,
            "rank": footer.rank,
            "stripe": footer.stripe,
            "world_size": footer.world_size,
            **footer.table.to_document(),
        }
    )


def decode_footer(body: bytes) -> Footer:
    """Parse and check a body.

    Raises:
        MalformedCheckpointError: it breaks a rule of the format. LimitExceededError: too many or too large.
    """
    document = columns.unpack_document(body, _FIELDS, what="footer")
    component, rank, stripe, world_size = cast(
        "tuple[str, int, int, int]", tuple(document[field] for field in ("component", "rank", "stripe", "world_size"))
    )
    nonce = cast("bytes", document["nonce"])
    if len(nonce) != 16 or not 0 <= rank < world_size <= MAX_WORLD_SIZE:
        raise MalformedCheckpointError(
            "footer with an invalid nonce or rank",
            expected=f"16 bytes, rank below a world size of at most {MAX_WORLD_SIZE}",
            found=f"{len(nonce)} bytes, rank {rank} of {world_size}",
        )
    shard_name(component, rank, stripe)
    return Footer(nonce.hex(), component, rank, world_size, ShardTable.from_document(document), stripe)
