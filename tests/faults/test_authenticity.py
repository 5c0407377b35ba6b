"""Whoever can rewrite every file, digests and all, is found out by a signature; whoever has no key reads no block."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.damage import copy_of, forge, forge_block
from support.engine import failure_of, save
from support.values import full
from support.values import same as same_tensor
from torch.distributed.checkpoint import CheckpointException

from dcp_engine import ReshardLoadPlanner, ShardReader, ShardWriter, verify_checkpoint
from dcp_engine.errors import (
    CorruptCheckpointError,
    DcpEngineError,
    DecryptionError,
    DigestMismatchError,
    EncryptionKeyError,
    InvalidOptionError,
    PlanError,
    SignatureError,
)
from dcp_engine.storage.envelope import encode_marker, parse_marker
from dcp_engine.storage.keys import SecretKey, key_id
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.signing import sign

SIGNING, ENCRYPTION, OTHER = b"s" * 32, b"e" * 32, b"o" * 32
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "w": ((1500, 1999), torch.bfloat16),
    "raw": ((5_000_011,), torch.uint8),
    "small": ((7, 3), torch.float32),
}


def state(*, filled: bool = True) -> dict[str, Any]:
    tensors = {key: full(key, shape, dtype) if filled else torch.zeros(shape, dtype=dtype) for key, (shape, dtype) in SHAPES.items()}
    return {"model": {**tensors, "note": "secret text" if filled else ""}}


def load_with(path: Path, template: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Load everything, into zeros or into ``template``."""
    found = state(filled=False) if template is None else template
    dcp.load(found, storage_reader=ShardReader(path, **options), planner=ReshardLoadPlanner())
    return found


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found["model"].keys() == expected["model"].keys() and all(
        same_tensor(value, expected["model"][key]) if isinstance(value, torch.Tensor) else value == expected["model"][key]
        for key, value in found["model"].items()
    )


def refusals(path: Path, **keys: Any) -> list[DcpEngineError]:
    """The errors of verifying and of loading; both must be there."""
    try:
        faults = verify_checkpoint(path, **keys).faults
        assert faults, "verifying saw nothing"
        found = [faults[0]]
    except DcpEngineError as error:
        found = [error]
    with pytest.raises(CheckpointException) as caught:
        load_with(path, **keys)
    return [*found, failure_of(caught.value)]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("authenticity")
    save(state(), root / "plain")
    save(state(), root / "digested", digest="sha256")
    save(state(), root / "signed", signing_key=SIGNING)
    save(state(), root / "encrypted", encryption_key=ENCRYPTION)
    save(state(), root / "both", signing_key=SIGNING, encryption_key=ENCRYPTION)
    return {name: root / name for name in ("plain", "digested", "signed", "encrypted", "both")}


KEYS: dict[str, dict[str, bytes]] = {
    "plain": {},
    "digested": {},
    "signed": {"signing_key": SIGNING},
    "encrypted": {"encryption_key": ENCRYPTION},
    "both": {"signing_key": SIGNING, "encryption_key": ENCRYPTION},
}


@pytest.mark.parametrize("name", KEYS)
def test_what_was_saved_is_what_is_loaded(places: dict[str, Path], name: str) -> None:
    assert verify_checkpoint(places[name], **KEYS[name]).faults == ()
    assert same(load_with(places[name], **KEYS[name]), state())


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes", "auto"])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_codec_is_encrypted_and_digested(tmp_path: Path, codec: str, threads: int) -> None:
    keys = KEYS["both"]
    save(state(), tmp_path / "a", codec=codec, threads=threads, bytes_in_flight=16 << 20, **keys)
    assert same(load_with(tmp_path / "a", threads=threads, bytes_in_flight=4 << 20, **keys), state())
    stored = b"".join(place.read_bytes() for place in (tmp_path / "a").iterdir())
    assert b"secret text" not in stored
    assert full("raw", (5_000_011,), torch.uint8).numpy().tobytes()[:64] not in stored


def test_part_of_an_encrypted_tensor_is_read_by_itself(places: dict[str, Path]) -> None:
    template = {"model": {"small": torch.zeros(7, 3)}}
    dcp.load(template, storage_reader=ShardReader(places["both"], **KEYS["both"]), planner=ReshardLoadPlanner(keys=["model.small"]))
    assert same_tensor(template["model"]["small"], full("small", (7, 3)))


def test_the_kind_of_digest_is_the_one_that_was_asked_for(places: dict[str, Path]) -> None:
    widths = {name: Manifest.decode((place / "MANIFEST").read_bytes()).table.block_digests.dtype.itemsize for name, place in places.items()}
    assert widths == {"plain": 8, "digested": 32, "signed": 32, "encrypted": 8, "both": 32}


# -- signatures ----------------------------------------------------------------------------------------------------------


def test_unsigned_and_otherwise_signed_checkpoints_are_refused_by_a_reader_with_a_key(places: dict[str, Path]) -> None:
    own, other = (key_id(key, "signing").hex() for key in (SIGNING, OTHER))
    for name, key, expected, found in [
        ("digested", SIGNING, f"a signature of key {own}", "no signature"),
        ("signed", OTHER, f"key {other}", f"key {own}"),
    ]:
        for error in refusals(places[name], signing_key=key):
            assert isinstance(error, SignatureError)
            assert (error.kind, error.file, error.expected, error.found) == ("signature", "COMPLETE", expected, found)
            assert key.decode() not in str(error)


def test_a_reader_without_a_key_reads_a_signed_checkpoint(places: dict[str, Path]) -> None:
    assert verify_checkpoint(places["signed"]).faults == ()
    assert same(load_with(places["signed"]), state())


def reseal(path: Path, change: Callable[[Any], Any]) -> None:
    """Rewrite COMPLETE as somebody without the key can: its check line is right."""
    marker = change(parse_marker((path / "COMPLETE").read_bytes()))
    (path / "COMPLETE").write_bytes(encode_marker(marker))


def test_whatever_is_forged_fails_the_signature_before_it_is_believed(places: dict[str, Path], tmp_path: Path) -> None:
    """With every digest repaired; a reader without a key takes each."""
    marker = parse_marker((places["signed"] / "COMPLETE").read_bytes())

    def forged_metadata(path: Path) -> None:
        forge(path, lambda document: document.update(step=7))
        reseal(path, lambda found: replace(found, key_id=marker.key_id, signature=marker.signature))

    def forged_signature(path: Path) -> None:
        reseal(path, lambda found: replace(found, signature="0" * 64))

    for change, readable in ((forged_metadata, True), (forged_signature, True)):
        path = copy_of(places["signed"], tmp_path / "a")
        change(path)
        assert (verify_checkpoint(path).faults == ()) is readable
        for error in refusals(path, signing_key=SIGNING):
            assert isinstance(error, SignatureError)
            assert "forged" in str(error)


def test_a_forged_block_fails_the_chain(places: dict[str, Path], tmp_path: Path) -> None:
    """Its bytes alone: the digest tells. Its digest, too: then the manifest is another, and no longer the signed one."""
    path = copy_of(places["signed"], tmp_path / "a")
    manifest = Manifest.decode((path / "MANIFEST").read_bytes())
    name = next(record.name for record in manifest.files)
    with open(path / name, "r+b") as file:
        file.seek(5000)
        file.write(b"forged")
    for error in refusals(path, signing_key=SIGNING):
        assert isinstance(error, DigestMismatchError)
        assert error.file == name
        assert len(str(error.found)) == 64
    path = copy_of(places["signed"], tmp_path / "a")
    entry = manifest.entry_id("model.small")
    assert entry is not None
    block = manifest.chunk(int(manifest.entry(entry).chunks[0])).first_block
    forge_block(path, "model.small", b"\1" * int(manifest.table.block_stored_bytes[block]))
    assert all(isinstance(error, SignatureError) for error in refusals(path, signing_key=SIGNING))


def test_a_signature_over_checksums_that_anybody_can_forge_is_refused(places: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="cannot be forged"):
        ShardWriter(tmp_path / "a", signing_key=SIGNING, digest="xxh3")
    path = copy_of(places["plain"], tmp_path / "a")
    reseal(path, lambda found: sign(found, SecretKey(SIGNING, "signing_key")))
    for error in refusals(path, signing_key=SIGNING):
        assert isinstance(error, SignatureError)
        assert error.found == "xxh3 digests"


def test_every_bit_of_a_signed_marker_is_found_with_and_without_the_key(places: dict[str, Path], tmp_path: Path) -> None:
    path = copy_of(places["signed"], tmp_path / "a")
    content = (path / "COMPLETE").read_bytes()
    assert content.count(b"\n") == 8
    for place in range(8 * len(content)):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        (path / "COMPLETE").write_bytes(changed)
        for keys in ({}, {"signing_key": SIGNING}):
            with pytest.raises(DcpEngineError) as caught:
                ShardReader(path, **keys).read_metadata()
            assert caught.value.file == "COMPLETE"


def test_a_manifest_of_another_attempt_is_refused(places: dict[str, Path], tmp_path: Path) -> None:
    path = copy_of(places["plain"], tmp_path / "a")
    reseal(path, lambda found: replace(found, nonce="0" * 32))
    for error in refusals(path):
        assert isinstance(error, CorruptCheckpointError)
        assert error.file == "MANIFEST"


# -- encryption ----------------------------------------------------------------------------------------------------------


def test_a_wrong_or_missing_key_is_said_before_anything_is_read(places: dict[str, Path]) -> None:
    own, other = (key_id(key, "encryption").hex() for key in (ENCRYPTION, OTHER))
    cases = [
        ("encrypted", None, f"encryption key {own}", "no encryption_key"),
        ("encrypted", OTHER, f"encryption key {other}, which was passed", f"encryption key {own}"),
        ("plain", OTHER, f"encryption key {other}, which was passed", "blocks in the clear"),
    ]
    for name, key, expected, found in cases:
        target = state(filled=False)
        with pytest.raises(CheckpointException) as caught:
            load_with(places[name], target, encryption_key=key)
        error = failure_of(caught.value)
        assert isinstance(error, EncryptionKeyError)
        assert (error.kind, error.expected, error.found) == ("encryption_key", expected, found)
        assert same(target, state(filled=False))
        assert (key or ENCRYPTION).decode() not in str(error)


def test_verifying_needs_no_key(places: dict[str, Path], tmp_path: Path) -> None:
    report = verify_checkpoint(places["encrypted"])
    assert report.faults == ()
    assert report.num_blocks > 0
    path = copy_of(places["encrypted"], tmp_path / "a")
    with open(path / "model-00000.shard", "r+b") as file:
        file.seek(4100)
        file.write(b"damage")
    assert [type(fault) for fault in verify_checkpoint(path).faults] == [DigestMismatchError]


def test_a_block_replaced_with_its_digest_does_not_decrypt(places: dict[str, Path], tmp_path: Path) -> None:
    path = copy_of(places["encrypted"], tmp_path / "a")
    manifest = Manifest.decode((path / "MANIFEST").read_bytes())
    entry = manifest.entry_id("model.small")
    assert entry is not None
    chunk = manifest.chunk(int(manifest.entry(entry).chunks[0]))
    forge_block(path, "model.small", b"\1" * int(manifest.table.block_stored_bytes[chunk.first_block]))
    assert verify_checkpoint(path).faults == ()
    for error in refusals(path, encryption_key=ENCRYPTION):
        assert isinstance(error, DecryptionError)
        assert (error.kind, error.tensor, error.file) == ("decryption", "model.small", manifest.files[chunk.file].name)
        assert "block " in str(error)


def test_two_saves_of_one_state_have_no_block_in_common(tmp_path: Path) -> None:
    blocks = set()
    value = {"model": {"a": torch.zeros(5_000_000), "b": torch.zeros(5_000_000)}}
    for name in ("one", "two"):
        save(value, tmp_path / name, codec="raw", threads=2, encryption_key=ENCRYPTION)
        manifest = Manifest.decode((tmp_path / name / "MANIFEST").read_bytes())
        for index, position, size in zip(
            manifest.block_file.tolist(), manifest.block_position.tolist(), manifest.table.block_stored_bytes.tolist(), strict=True
        ):
            data = (tmp_path / name / manifest.files[index].name).read_bytes()[position : position + size]
            blocks.add(hashlib.sha256(data[:65536]).digest())
    assert len(blocks) == 20


def test_ranks_with_different_protection_do_not_publish(tmp_path: Path) -> None:
    """As tables meet on the coordinator: the kinds are told apart there."""
    from support.manifests import manifest_of, receipt_of

    from dcp_engine.storage.digest import SHA256, XXH3
    from dcp_engine.storage.table import TableBuilder

    tables = []
    for rank, (digest, identity) in enumerate([(XXH3, b""), (SHA256, b""), (XXH3, b"8 bytes!")]):
        table = TableBuilder(digest, identity)
        block = table.add_block(8, 8, 0, digest.of(b"12345678"))
        table.add_chunk(f"t{rank}", 18, (2,), (0,), (2,), block, 0)
        tables.append(table.build())
    for pair in ((0, 1), (0, 2), (1, 2)):
        with pytest.raises(PlanError, match="different ways"):
            manifest_of([receipt_of(tables[index], rank, 2) for rank, index in enumerate(pair)])
