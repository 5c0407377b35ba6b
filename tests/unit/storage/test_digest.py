from __future__ import annotations

from dcp_engine.storage.digest import block_digest


def test_digest_is_xxh3_64() -> None:
    # Reference values of the xxHash project.
    assert block_digest(b"") == 0x2D06800538D394C2
    assert block_digest(b"abc") == 0x78AF5F94892F3950


def test_parts_count_as_one_run_of_bytes() -> None:
    assert block_digest(b"a", memoryview(b"b"), b"", bytearray(b"c")) == 0x78AF5F94892F3950
    assert block_digest() == 0x2D06800538D394C2
