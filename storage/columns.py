"""Columns: numpy arrays as bytes, and the flat documents that hold them.

A document is one msgpack map of text keys to integers, text, bytes or nil: never a list, never a map inside. So its decoding costs no more
memory than its length, whatever the bytes say. A column is the array's little-endian bytes, byte plane by byte plane (all lowest bytes
first), which a general compressor turns into far less than the interleaved bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt

from dcp_engine.errors import MalformedCheckpointError

__all__ = ["Document", "Value", "pack_column", "pack_document", "pack_texts", "unpack_column", "unpack_document", "unpack_texts"]

Value: TypeAlias = int | str | bytes | None
Document: TypeAlias = dict[str, Value]

_MAX_KEYS = 64


def pack_document(document: Mapping[str, Value]) -> bytes:
    """The msgpack of a document, keys in their order."""
    packed: bytes = msgpack.packb(dict(document), use_bin_type=True, unicode_errors="surrogatepass")
    return packed


def unpack_document(data: bytes | memoryview, fields: Mapping[str, type | tuple[type, ...]], *, what: str) -> Document:
    """Parse a document strictly.

    Args:
        data: the whole document.
        fields: every key that must be there, in order, with the type or types of its value.
        what: name of the document, for messages.

    Raises:
        MalformedCheckpointError: not exactly those keys in that order with those types, or not msgpack at all.
    """
    try:
        found = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            unicode_errors="surrogatepass",
            object_pairs_hook=_OneMap(),
            max_array_len=0,
            max_map_len=_MAX_KEYS,
            max_ext_len=0,
            max_str_len=len(data),
            max_bin_len=len(data),
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        # msgpack's own errors are ValueErrors, and so are those of invalid text.
        raise MalformedCheckpointError(f"{what} is not a document of the format", found=f"{type(error).__name__}: {error}") from error
    if not isinstance(found, _Pairs) or tuple(key for key, _ in found) != tuple(fields):
        keys = [key for key, _ in found] if isinstance(found, _Pairs) else type(found).__name__
        raise MalformedCheckpointError(f"{what} has other fields", expected=list(fields), found=keys)
    for key, value in found:
        kind = fields[key]
        # bool is an int to isinstance, and would be one to the arithmetic that follows.
        if not isinstance(value, kind) or isinstance(value, bool):
            raise MalformedCheckpointError(f"{what}: field {key!r} has another type", expected=kind, found=type(value).__name__)
    return dict(found)


class _Pairs(tuple[tuple[str, Any], ...]):
    __slots__ = ()


class _OneMap:
    """Accepts the first map that ends and no second: an inner map ends before the outer one, so nesting stops the parser."""

    def __init__(self) -> None:
        self._seen = False

    def __call__(self, pairs: Sequence[tuple[str, Any]]) -> _Pairs:
        if self._seen:
            raise ValueError("a map within a map")
        self._seen = True
        return _Pairs(pairs)


def pack_column(values: npt.NDArray[Any], dtype: str) -> bytes:
    """The bytes of a one-dimensional column.

    Args:
        values: integers within the range of ``dtype``.
        dtype: numpy's name of a little-endian integer type, such as ``"<u4"``.
    """
    column = np.ascontiguousarray(values, dtype=np.dtype(dtype))
    width = column.dtype.itemsize
    return column.tobytes() if width == 1 else column.view(np.uint8).reshape(-1, width).T.tobytes()


def unpack_column(data: bytes, dtype: str, *, what: str, num_rows: int | None = None, max_rows: int) -> npt.NDArray[Any]:
    """The inverse of :func:`pack_column`; a fresh array in native order, writable where it is wider than a byte.

    Raises:
        MalformedCheckpointError: the length is no whole number of rows, not ``num_rows`` or above ``max_rows``.
    """
    width = np.dtype(dtype).itemsize
    rows, rest = divmod(len(data), width)
    if rest or (num_rows is not None and rows != num_rows) or rows > max_rows:
        expected = f"{num_rows} rows of {width} bytes" if num_rows is not None else f"rows of {width} bytes, at most {max_rows}"
        raise MalformedCheckpointError(f"column {what!r} has a wrong length", expected=expected, found=f"{len(data)} bytes")
    flat = np.frombuffer(data, dtype=np.uint8)
    if width > 1:
        flat = np.ascontiguousarray(flat.reshape(width, rows).T).reshape(-1)
    return flat.view(np.dtype(dtype)).astype(np.dtype(dtype).newbyteorder("="), copy=False)


def pack_texts(texts: Sequence[str]) -> tuple[bytes, bytes]:
    """Texts as one run of UTF-8 bytes and a column of their lengths in bytes (u32). Lone surrogates are kept."""
    joined = "".join(texts)
    if joined.isascii():
        return joined.encode("ascii"), pack_column(np.fromiter(map(len, texts), dtype=np.uint32, count=len(texts)), "<u4")
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return b"".join(encoded), pack_column(np.fromiter(map(len, encoded), dtype=np.uint32, count=len(encoded)), "<u4")


def unpack_texts(data: bytes, lengths: bytes, *, what: str, max_rows: int, max_bytes: int) -> list[str]:
    """The inverse of :func:`pack_texts`.

    Raises:
        MalformedCheckpointError: lengths that do not add up, a text that is too long or not UTF-8.
    """
    sizes = unpack_column(lengths, "<u4", what=f"{what} lengths", max_rows=max_rows).astype(np.int64)
    if len(sizes) and int(sizes.max()) > max_bytes:
        raise MalformedCheckpointError(f"{what}: a text is too long", expected=f"at most {max_bytes} bytes", found=f"{sizes.max()} bytes")
    stops = np.cumsum(sizes)
    total = int(stops[-1]) if len(stops) else 0
    if total != len(data):
        raise MalformedCheckpointError(f"{what}: lengths do not add up", expected=f"{len(data)} bytes", found=f"{total} bytes")
    bounds = [0, *stops.tolist()]
    pairs = itertools.pairwise(bounds)
    if data.isascii():
        joined = data.decode("ascii")
        return [joined[start:stop] for start, stop in pairs]
    try:
        return [data[start:stop].decode("utf-8", "surrogatepass") for start, stop in pairs]
    except UnicodeDecodeError as error:
        raise MalformedCheckpointError(f"{what}: not UTF-8", found=str(error)) from error
