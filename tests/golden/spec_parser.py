"""A reader of format version 1 made from ``docs/format.md`` alone: it imports nothing of the package, and stops at the first rule broken.

Slow and simple on purpose. It checks every rule that a damaged or foreign file could break, so that the page and the package are held
against each other.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash
import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

BLOCK, PACK, HEADER, RECORD = 4194304, 65536, 4096, 64
ITEMSIZE = {
    **{1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 4, 8: 8, 9: 8, 16: 2, 17: 2, 18: 4, 19: 8},
    **{24: 1, 25: 1, 26: 1, 27: 1, 28: 1, 32: 4, 33: 8, 34: 16, 254: 1, 255: 1},
}
PLANES = {16: 2, 17: 2, 18: 4, 19: 8, 24: 1, 25: 1, 26: 1, 27: 1, 28: 1, 32: 2, 33: 4, 34: 8}
TABLE = [
    *("entry_names", "entry_name_bytes", "entry_dtypes", "entry_dims", "entry_shapes"),
    *("chunk_entries", "chunk_offsets", "chunk_sizes", "chunk_begins"),
    *("block_saved", "block_codecs", "block_digests", "encryption_key_id"),
]
FOOTER = ["nonce", "component", "rank", "stripe", "world_size", *TABLE]
MANIFEST = [
    *("writer_version", "nonce", "run_id", "step", "saved_at", "world_size", "codec"),
    *("file_names", "file_name_bytes", "file_chunks", "file_blocks", "file_footer_bytes", "file_footer_sha256"),
    *TABLE[:-1],
    *("alias_names", "alias_name_bytes", "alias_targets", "planner_data", "skeleton", "metadata", "encryption_key_id"),
]


class SpecError(Exception):
    """A rule of the page is broken."""


def rule(holds: object, text: str) -> None:
    if not holds:
        raise SpecError(text)


@dataclass
class Entry:
    dtype: int
    shape: tuple[int, ...]
    data: bytes
    codecs: set[int]
    num_chunks: int
    num_blocks: int


@dataclass
class Checkpoint:
    fields: dict[str, Any]
    entries: dict[str, Entry]
    aliases: dict[str, str]
    files: list[str]
    codecs_of_dtypes: set[tuple[int, int]]
    heads_of_planes: list[bytes]


# --- sections 4 and 5


def frame(stored: bytes, raw: int) -> bytes:
    parameters = zstandard.get_frame_parameters(stored)
    rule(parameters.content_size == raw and parameters.dict_id == 0, "a frame declares its size and has no dictionary")
    content = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    rule(len(content) == raw, "a frame holds what it declares")
    return content


def record(data: bytes, magic: bytes) -> tuple[int, int, bytes]:
    found, version, zero, stored, raw, sha256 = struct.unpack("<8sIIQQ32s", data)
    rule((found, version, zero) == (magic, 1, 0), "magic, version and zero of a record")
    rule(stored <= 2**30 and raw <= 2**31 and raw <= 2**24 + 128 * stored, "limits of a record")
    return stored, raw, sha256


def document(body: bytes, fields: list[str]) -> dict[str, Any]:
    found = msgpack.unpackb(body, raw=False, strict_map_key=True, unicode_errors="surrogatepass")
    rule(isinstance(found, dict) and list(found) == fields, "a document has exactly its fields, in order")
    rule(all(type(value) in (int, str, bytes, type(None)) for value in found.values()), "values of a document")
    return dict(found)


def column(data: bytes, width: int, *, signed: bool = False) -> list[int]:
    rule(len(data) % width == 0, "a column has whole rows")
    rows = len(data) // width
    return [int.from_bytes(bytes(data[plane * rows + row] for plane in range(width)), "little", signed=signed) for row in range(rows)]


def texts(data: bytes, lengths: bytes, limit: int) -> list[str]:
    found, position = [], 0
    for length in column(lengths, 4):
        rule(length <= limit, "a text is too long")
        found.append(data[position : position + length].decode("utf-8", "surrogatepass"))
        position += length
    rule(position == len(data), "texts use up their bytes")
    return found


# --- section 7


@dataclass
class Chunk:
    entry: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int
    begins: int
    first_block: int = 0
    block_offset: int = 0


@dataclass
class Table:
    names: list[str]
    dtypes: list[int]
    shapes: list[tuple[int, ...]]
    chunks: list[Chunk] = field(default_factory=list)
    raw: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    codecs: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    key_id: bytes = b""


def table(fields: dict[str, Any]) -> Table:
    names = texts(fields["entry_names"], fields["entry_name_bytes"], 4096)
    dtypes, dims = column(fields["entry_dtypes"], 1), column(fields["entry_dims"], 1)
    rule(len(names) == len(dtypes) == len(dims) == len(set(names)), "entries have one name, dtype and number of dimensions each")
    rule(all(code in ITEMSIZE for code in dtypes) and all(dim <= 64 for dim in dims), "dtypes and dimensions are known")
    extents = iter(column(fields["entry_shapes"], 8, signed=True))
    found = Table(names, dtypes, [tuple(next(extents) for _ in range(dim)) for dim in dims])
    rule(next(extents, None) is None, "shapes use up their column")
    for shape in found.shapes:
        rule(all(0 <= extent <= 2**56 for extent in shape) and math.prod(shape) <= 2**56, "extents are within the limits")
    steps, sizes = (iter(column(fields[name], 8, signed=True)) for name in ("chunk_offsets", "chunk_sizes"))
    marks = column(fields["chunk_begins"], 1)
    owners = column(fields["chunk_entries"], 4)
    rule(len(marks) == len(owners), "every chunk has a mark")
    before: dict[int, tuple[int, ...]] = {}
    for owner, mark in zip(owners, marks, strict=True):
        rule(owner < len(names) and mark <= 1, "a chunk belongs to an entry, its mark is 0 or 1")
        last = before.get(owner, (0,) * dims[owner])
        offsets = tuple(base + next(steps) for base in last)
        before[owner] = offsets
        box = tuple(next(sizes) for _ in offsets)
        rule(all(size >= 1 for size in box), "chunks have elements")
        found.chunks.append(Chunk(owner, offsets, box, math.prod(box) * ITEMSIZE[dtypes[owner]], mark))
    rule(next(steps, None) is None and next(sizes, None) is None, "boxes use up their columns")
    lay_out(found)
    found.codecs, found.key_id = column(fields["block_codecs"], 1), fields["encryption_key_id"]
    found.digests = digests_of(fields["block_digests"], len(found.codecs))
    rule(len(found.key_id) in (0, 8), "a key's id")
    saved = column(fields["block_saved"], 4)
    rule(len(found.raw) == len(saved) == len(found.codecs) == len(found.digests), "blocks are those that the chunks need")
    for raw, less, codec in zip(found.raw, saved, found.codecs, strict=True):
        rule(codec in (0, 1, 2) and (less == 0 if codec == 0 else 1 <= less < raw), "what a block saves")
        found.stored.append(raw - less + (16 if found.key_id else 0))
    return found


def digests_of(data: bytes, num_blocks: int) -> list[bytes]:
    if num_blocks and len(data) == 32 * num_blocks:
        return [data[start : start + 32] for start in range(0, len(data), 32)]
    rule(len(data) == 8 * num_blocks, "a digest for each block")
    return [value.to_bytes(8, "big") for value in column(data, 8)]


def lay_out(found: Table) -> None:
    leader: Chunk | None = None
    for chunk in found.chunks:
        if chunk.begins:
            leader = chunk
            chunk.first_block = len(found.raw)
            full, rest = divmod(chunk.nbytes, BLOCK)
            found.raw += [BLOCK] * full + ([rest] if rest else [])
        else:
            rule(leader is not None, "the first chunk begins a block")
            assert leader is not None
            rule(chunk.nbytes < PACK and leader.nbytes < PACK, "only small chunks share a block")
            rule(found.dtypes[chunk.entry] == found.dtypes[leader.entry], "a block has one dtype")
            chunk.first_block, chunk.block_offset = len(found.raw) - 1, found.raw[-1]
            found.raw[-1] += chunk.nbytes
            rule(found.raw[-1] <= BLOCK, "a shared block is a block at most")


# --- section 9


def decode(codec: int, stored: bytes, raw: int, dtype: int) -> bytes:
    if codec == 0:
        rule(len(stored) == raw, "raw blocks are as they are")
        return stored
    if codec == 1:
        return frame(stored, raw)
    width = PLANES[dtype]
    count = raw // width
    if stored[1] == 0 and width in (2, 4):
        return unpair(stored, count, width)
    rule(raw == count * width and stored[0] == width and stored[2:4] == b"\0\0", "header of planes")
    mask, lengths = stored[1], struct.unpack_from(f"<{width}I", stored, 4)
    rule(0 < mask < 1 << width and 4 + 4 * width + sum(lengths) == len(stored), "mask and lengths of planes")
    planes, position = np.empty((count, width), dtype=np.uint8), 4 + 4 * width
    for index, length in enumerate(lengths):
        part = stored[position : position + length]
        position += length
        plane = frame(part, count) if mask >> index & 1 else part
        rule(len(plane) == count, "length of a plane")
        planes[:, index] = np.frombuffer(plane, dtype=np.uint8)
    if width > 1:
        upper = planes[:, -2].astype(np.uint16) | planes[:, -1].astype(np.uint16) << 8
        upper = upper >> 1 | upper << 15
        planes[:, -2], planes[:, -1] = upper & 255, upper >> 8
    return planes.tobytes()


def unpair(stored: bytes, count: int, width: int) -> bytes:
    """The paired layout, float by float."""
    pairs = 8 * (count // 16)
    found, _, base, folded, length, listed, zero = struct.unpack_from("<BBBBIII", stored)
    rule(found == width and base <= 240 and folded <= 1 and zero == 0 and pairs >= 8 and listed <= pairs / 4, "header of the paired layout")
    words = 2 * pairs if width == 4 else 0
    rests = pairs // 8 * 7 if folded else pairs
    tail = 16 + 2 * words + 2 * rests
    start = tail + (count - 2 * pairs) * width
    rule(start + length == len(stored), "parts of the paired layout")
    low = struct.unpack_from(f"<{words}H", stored, 16)
    rest = unfold(list(struct.unpack_from(f"<{rests}H", stored, 16 + 2 * words)), pairs, bool(folded))
    content = frame(stored[start:], pairs + 3 * listed)
    exponents = [base + (code & 15) for code in content[:pairs]] + [base + (code >> 4) for code in content[:pairs]]
    position = -1
    for index in range(pairs, pairs + listed):
        position += 1 + content[index] + (content[index + listed] << 8)
        rule(position < 2 * pairs, "listed exponents are of floats")
        exponents[position] = content[index + 2 * listed]
    found_bytes = bytearray()
    for index, exponent in enumerate(exponents):
        word = rest[index % pairs]
        if index >= pairs:
            word = word >> 8 | (word & 255) << 8
        top = word & 0x807F | exponent << 7
        found_bytes += struct.pack("<HH", low[index], top) if width == 4 else struct.pack("<H", top)
    return bytes(found_bytes) + stored[tail:start]


def unfold(rest: list[int], pairs: int, folded: bool) -> list[int]:
    if not folded:
        return rest
    eighth = pairs // 8
    last = [sum((rest[part * eighth + index] & 0x8080) >> (7 - part) for part in range(7)) for index in range(eighth)]
    return [word & 0x7F7F for word in rest] + last


# --- sections 2, 3 and 6


def parse(root: Path, signing_key: bytes | None = None, encryption_key: bytes | None = None) -> Checkpoint:
    """Read a whole checkpoint, checking everything on the way."""
    lines = re.fullmatch(
        rb"((dcp-engine checkpoint 1\nnonce ([0-9a-f]{32})\ndata (\.|[0-9a-f]{32})\nmanifest-bytes ([1-9][0-9]*)\n"
        rb"manifest-sha256 ([0-9a-f]{64})\n)(?:(key ([0-9a-f]{16})\n)signature ([0-9a-f]{64})\n)?)check ([0-9a-f]{64})\n",
        (root / "COMPLETE").read_bytes(),
    )
    rule(lines, "COMPLETE has its six lines")
    assert lines is not None
    text, start, nonce, place, size, sha256, key_line, key, signature, check = lines.groups()
    rule(hashlib.sha256(text).hexdigest().encode() == check and place in (b".", nonce), "check and data of COMPLETE")
    if signing_key is not None:
        rule(signature, "a signature is asked for")
        rule(hmac.new(signing_key, b"dcp-engine signing key id", "sha256").hexdigest()[:16].encode() == key, "signed with the key")
        rule(hmac.new(signing_key, start + key_line, "sha256").hexdigest().encode() == signature, "signature")
    directory = root / place.decode()
    data = (directory / "MANIFEST").read_bytes()
    rule(len(data) == int(size) and hashlib.sha256(data).hexdigest().encode() == sha256, "MANIFEST is the one of COMPLETE")
    stored, raw, digest = record(data[:RECORD], b"DCPEMANI")
    rule(len(data) == RECORD + stored and hashlib.sha256(data[RECORD:]).digest() == digest, "MANIFEST is its record and its body")
    fields = document(frame(data[RECORD:], raw), MANIFEST)
    rule(fields["nonce"].hex().encode() == nonce, "one nonce")
    whole = table(fields)
    rows = len(whole.names) + len(whole.chunks) + len(whole.raw) + len(fields["alias_targets"]) // 4
    rule(rows <= 2**17 + 2 * stored, "rows of a manifest")
    rule(not signature or len(fields["block_digests"]) == 32 * len(whole.raw), "signed checkpoints have SHA-256 digests")
    if whole.key_id:
        rule(encryption_key is not None, "a key is needed")
        assert encryption_key is not None
        rule(hmac.new(encryption_key, b"dcp-engine encryption key id", "sha256").digest()[:8] == whole.key_id, "the key is the right one")
    return contents(directory, fields, whole, encryption_key)


def decrypt(key: bytes, nonce: bytes, name: str, block: int, stored: bytes) -> bytes:
    """Section 15."""
    prk = hmac.new(nonce, key, "sha256").digest()
    derived = hmac.new(prk, b"dcp-engine aes-256-gcm\0" + name.encode("ascii") + b"\1", "sha256").digest()
    bound = nonce + name.encode("ascii") + b"\0" + block.to_bytes(8, "little")
    return AESGCM(derived).decrypt(block.to_bytes(12, "big"), stored, bound)


def contents(directory: Path, fields: dict[str, Any], whole: Table, key: bytes | None) -> Checkpoint:
    names = texts(fields["file_names"], fields["file_name_bytes"], 255)
    counts = zip(*(column(fields[name], 4) for name in ("file_chunks", "file_blocks", "file_footer_bytes")), strict=True)
    blocks: list[bytes] = []
    used: set[tuple[int, int]] = set()
    heads: list[bytes] = []
    first_chunk = 0
    places: list[tuple[str, int, int]] = []
    for index, (name, (num_chunks, num_blocks, footer_bytes)) in enumerate(zip(names, counts, strict=True)):
        match = re.fullmatch(r"([a-z][a-z0-9_]{0,31})-([0-9]{5,7})(?:\.([1-9][0-9]{0,2}))?\.shard", name)
        rule(match is not None and f"{int(match[2]):05d}" == match[2], "name of a shard file")
        assert match is not None
        component, rank, stripe = match[1], int(match[2]), int(match[3] or 0)
        rule(stripe == 0 or places[-1:] == [(component, rank, stripe - 1)], "stripes follow each other from 0")
        places.append((component, rank, stripe))
        rule(places[-1][1] < fields["world_size"], "rank of a file")
        chunks = whole.chunks[first_chunk : first_chunk + num_chunks]
        rule(bool(num_chunks) == bool(num_blocks), "blocks without chunks")
        rule(not chunks or (chunks[0].begins and chunks[0].first_block == len(blocks)), "a file begins with a block of its own")
        first_chunk += num_chunks
        rows = slice(len(blocks), len(blocks) + num_blocks)
        sha256 = fields["file_footer_sha256"][32 * index : 32 * index + 32]
        data = (directory / name).read_bytes()
        check_ends(data, name, places[-1], fields, footer_bytes, sha256, whole, chunks, rows)
        place_in_key = (key, fields["nonce"], name) if key is not None and whole.key_id else None
        blocks += read_blocks(data, footer_bytes, whole, rows, chunks, used, heads, place_in_key)
    rule(first_chunk == len(whole.chunks) and len(blocks) == len(whole.raw), "files hold all chunks and blocks")
    rule(places == sorted(set(places)) and len(fields["file_footer_sha256"]) == 32 * len(names), "order of files")
    aliases = texts(fields["alias_names"], fields["alias_name_bytes"], 4096)
    targets = [whole.names[target] for target in column(fields["alias_targets"], 4)]
    rule(len(set(aliases)) == len(aliases) and not set(aliases) & set(whole.names), "aliases are names of their own")
    entries = {name: assemble(whole, index, blocks) for index, name in enumerate(whole.names)}
    return Checkpoint(fields, entries, dict(zip(aliases, targets, strict=True)), names, used, heads)


def check_ends(
    data: bytes,
    name: str,
    place: tuple[str, int, int],
    fields: dict[str, Any],
    footer_bytes: int,
    sha256: bytes,
    whole: Table,
    chunks: list[Chunk],
    rows: slice,
) -> None:
    header = b"DCPESHRD" + struct.pack("<II", 1, place[1]) + fields["nonce"] + struct.pack("<I", len(name)) + name.encode("ascii")
    rule(data[:HEADER] == header.ljust(HEADER, b"\0"), "header of a shard file")
    stored, raw, digest = record(data[-RECORD:], b"DCPEFOOT")
    body = data[-RECORD - stored : -RECORD]
    rule(stored == footer_bytes and digest == sha256 == hashlib.sha256(body).digest(), "footer is the one of the manifest")
    found = document(frame(body, raw), FOOTER)
    identity = (found["nonce"], found["component"], found["rank"], found["stripe"], found["world_size"])
    rule(identity == (fields["nonce"], *place, fields["world_size"]), "footer is the file's own")
    own = table(found)
    rule((own.raw, own.stored) == (whole.raw[rows], whole.stored[rows]), "footer and manifest agree on block lengths")
    rule((own.codecs, own.digests) == (whole.codecs[rows], whole.digests[rows]), "footer and manifest agree on blocks")
    rule(not own.raw or own.key_id == whole.key_id, "footer and manifest agree on the key")
    described = [
        [(t.names[c.entry], t.dtypes[c.entry], t.shapes[c.entry], c.offsets, c.sizes) for c in cs]
        for t, cs in ((own, own.chunks), (whole, chunks))
    ]
    rule(described[0] == described[1], "footer and manifest agree on chunks")


def read_blocks(
    data: bytes,
    footer_bytes: int,
    whole: Table,
    rows: slice,
    chunks: list[Chunk],
    used: set[tuple[int, int]],
    heads: list[bytes],
    place_in_key: tuple[bytes, bytes, str] | None,
) -> list[bytes]:
    dtype_of: dict[int, int] = {}
    for chunk in chunks:
        for block in range(chunk.first_block, chunk.first_block + -(-chunk.nbytes // BLOCK)):
            dtype_of[block] = whole.dtypes[chunk.entry]
    found, position = [], HEADER
    for block in range(rows.start, rows.stop):
        size = whole.stored[block]
        stored = data[position : position + size]
        digest = hashlib.sha256(stored).digest() if len(whole.digests[block]) == 32 else xxhash.xxh3_64_digest(stored)
        rule(digest == whole.digests[block], "digest of a block")
        end = position + -(-size // 64) * 64
        rule(not any(data[position + size : end]), "padding is zero")
        position = end
        if place_in_key is not None:
            stored = decrypt(*place_in_key, block - rows.start, stored)
        used.add((whole.codecs[block], dtype_of[block]))
        if whole.codecs[block] == 2:
            heads.append(stored[:16])
        found.append(decode(whole.codecs[block], stored, whole.raw[block], dtype_of[block]))
    rule(position + footer_bytes + RECORD == len(data), "size of a shard file")
    return found


def assemble(whole: Table, entry: int, blocks: list[bytes]) -> Entry:
    code, shape = whole.dtypes[entry], whole.shapes[entry]
    target = np.zeros(shape, dtype=f"V{ITEMSIZE[code]}")
    cover = np.zeros(shape, dtype=np.int8)
    codecs: set[int] = set()
    chunks = [chunk for chunk in whole.chunks if chunk.entry == entry]
    num_blocks = 0
    for chunk in chunks:
        owned = range(chunk.first_block, chunk.first_block + -(-chunk.nbytes // BLOCK))
        data = b"".join(blocks[block] for block in owned)[chunk.block_offset : chunk.block_offset + chunk.nbytes]
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        rule(all(o >= 0 and o + s <= n for o, s, n in zip(chunk.offsets, chunk.sizes, shape, strict=True)), "a chunk lies within its entry")
        target[box] = np.frombuffer(data, dtype=target.dtype).reshape(chunk.sizes)
        cover[box] += 1
        codecs |= {whole.codecs[block] for block in owned}
        num_blocks += len(owned)
    rule((cover == 1).all() and (chunks or not cover.size), "chunks tile their entry")
    rule(code not in (254, 255) or (len(shape) == 1 and len(chunks) == (1 if shape[0] else 0) and (shape[0] or code == 255)), "objects")
    return Entry(code, shape, target.tobytes(), codecs, len(chunks), num_blocks)
