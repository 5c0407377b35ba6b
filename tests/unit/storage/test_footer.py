from __future__ import annotations

from typing import Any

import pytest
from support.manifests import NONCE

from dcp_engine.errors import MalformedCheckpointError
from dcp_engine.storage.columns import pack_document, unpack_document
from dcp_engine.storage.footer import Footer, decode_footer, encode_footer
from dcp_engine.storage.table import TableBuilder


def footer() -> Footer:
    builder = TableBuilder()
    builder.add_block(4, 4, 0, 77)
    builder.add_chunk("w", 18, (1,), (0,), (1,), 0, 0)
    return Footer(NONCE, "optimizer", 2, 4, builder.build(), 3)


def test_footers_come_back() -> None:
    found = decode_footer(encode_footer(footer()))
    assert (found.nonce, found.component, found.rank, found.stripe, found.world_size) == (NONCE, "optimizer", 2, 3, 4)
    assert found.name == "optimizer-00002.3.shard"
    assert found.table.names == ["w"]
    assert found.table.block_digests.tolist() == [77]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nonce", b"short"),
        ("nonce", "text"),
        ("rank", -1),
        ("rank", 4),
        ("rank", 2**63),
        ("stripe", -1),
        ("stripe", 1000),
        ("world_size", 2),
        ("world_size", 1 << 21),
        ("component", "../x"),
        ("component", ""),
        ("component", "Model"),
    ],
)
def test_fields_that_break_a_rule_are_malformed(field: str, value: Any) -> None:
    body = encode_footer(footer())
    kinds: dict[str, Any] = dict.fromkeys(
        ["nonce", "component", "rank", "stripe", "world_size", *footer().table.to_document()], (bytes, str, int)
    )
    document = unpack_document(body, kinds, what="footer")
    with pytest.raises(MalformedCheckpointError):
        decode_footer(pack_document({**document, field: value}))
