from __future__ import annotations

import contextlib

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_engine.errors import MalformedCheckpointError
from dcp_engine.storage.columns import pack_column, pack_document, pack_texts, unpack_column, unpack_document, unpack_texts

FIELDS: dict[str, type] = {"a": int, "b": bytes}


def test_columns_are_byte_planes_lowest_first() -> None:
    assert pack_column(np.array([0x0201, 0x0403]), "<u2") == b"\x01\x03\x02\x04"
    assert pack_column(np.array([-2, 1]), "<i8")[:4] == b"\xfe\x01\xff\x00"
    assert unpack_column(b"\x01\x03\x02\x04", "<u2", what="c", max_rows=2).tolist() == [0x0201, 0x0403]


@pytest.mark.parametrize("dtype", ["u1", "<u4", "<u8", "<i8"])
@given(data=st.data())
def test_columns_come_back(dtype: str, data: st.DataObject) -> None:
    limits = np.iinfo(dtype)
    values = data.draw(st.lists(st.integers(int(limits.min), int(limits.max)), max_size=20))
    packed = pack_column(np.array(values, dtype=dtype), dtype)
    assert unpack_column(packed, dtype, what="c", num_rows=len(values), max_rows=20).tolist() == values


@pytest.mark.parametrize(("num_bytes", "num_rows", "max_rows"), [(7, None, 9), (8, 1, 9), (8, 3, 9), (40, None, 9)])
def test_columns_of_a_wrong_length_are_malformed(num_bytes: int, num_rows: int | None, max_rows: int) -> None:
    with pytest.raises(MalformedCheckpointError, match="block_saved"):
        unpack_column(bytes(num_bytes), "<u4", what="block_saved", num_rows=num_rows, max_rows=max_rows)


TEXTS = st.text(st.characters(codec=None, exclude_categories=[]), max_size=8)


@settings(max_examples=200)
@given(st.lists(TEXTS, max_size=8))
def test_texts_come_back_lone_surrogates_included(texts: list[str]) -> None:
    data, lengths = pack_texts(texts)
    assert unpack_texts(data, lengths, what="names", max_rows=8, max_bytes=32) == texts


@pytest.mark.parametrize(
    ("data", "lengths"),
    [(b"abc", [1, 1]), (b"abc", [3, 1]), (b"abc", []), (b"\xc3\xa4", [1, 1]), (b"\xff", [1]), (b"a" * 33, [33]), (b"", [2**32 - 1])],
    ids=["short", "long", "none", "split character", "not UTF-8", "too long", "huge"],
)
def test_texts_that_do_not_add_up_are_malformed(data: bytes, lengths: list[int]) -> None:
    with pytest.raises(MalformedCheckpointError, match="names"):
        unpack_texts(data, pack_column(np.array(lengths), "<u4"), what="names", max_rows=8, max_bytes=32)


def test_documents_come_back_in_order() -> None:
    document = {"a": -5, "b": b"x"}
    assert pack_document(document) == b"\x82\xa1a\xfb\xa1b\xc4\x01x"
    assert unpack_document(pack_document(document), FIELDS, what="d") == document


BAD_DOCUMENTS = {
    "empty": b"",
    "cut off": b"\x82\xa1a\x01\xa1b\xc4\x02x",
    "trailing byte": b"\x82\xa1a\x01\xa1b\xc4\x01x\0",
    "missing field": b"\x81\xa1a\x01",
    "extra field": b"\x83\xa1a\x01\xa1b\xc4\x00\xa1c\x01",
    "another order": b"\x82\xa1b\xc4\x00\xa1a\x01",
    "a field twice": b"\x82\xa1a\x01\xa1a\x01",
    "not a map": b"\x01",
    "text for bytes": msgpack.packb({"a": 1, "b": "x"}),
    "bool for int": msgpack.packb({"a": True, "b": b""}),
    "float for int": msgpack.packb({"a": 1.0, "b": b""}),
    "nil": msgpack.packb({"a": None, "b": b""}),
    "list": msgpack.packb({"a": 1, "b": [1]}),
    "empty list": msgpack.packb({"a": 1, "b": []}),
    "map": msgpack.packb({"a": 1, "b": {}}),
    "extension": msgpack.packb({"a": 1, "b": msgpack.ExtType(1, b"")}),
    "time": msgpack.packb({"a": 1, "b": msgpack.Timestamp(1)}),
    "int key": msgpack.packb({1: 1, "b": b""}),
    "key that is not UTF-8": b"\x82\xa1\xff\x01\xa1b\xc4\x00",
    "unused byte": b"\xc1",
    "claims 4 G entries of a list": b"\xdd\xff\xff\xff\xff",
    "claims 4 G entries of a map": b"\xdf\xff\xff\xff\xff",
    "claims 4 GiB of bytes": b"\xc6\xff\xff\xff\xff",
    "nested lists": b"\x91" * 100_000,
    "nested maps": b"\x81\xa1a" * 100_000,
    "many small maps": b"\x82\xa1a" + (b"\x82\xa1a\x80\xa1b" * 50_000),
}


@pytest.mark.parametrize("name", BAD_DOCUMENTS)
def test_documents_are_parsed_strictly(name: str) -> None:
    with pytest.raises(MalformedCheckpointError, match="the footer"):
        unpack_document(BAD_DOCUMENTS[name], FIELDS, what="the footer")


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_but_our_errors(data: bytes) -> None:
    with contextlib.suppress(MalformedCheckpointError):
        assert set(unpack_document(data, FIELDS, what="d")) == {"a", "b"}
