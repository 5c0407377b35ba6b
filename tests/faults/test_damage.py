"""Fail closed: whatever happens to any byte or file of a checkpoint, verifying and loading both fail and name it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.damage import copy_of, regions
from support.engine import load, refused, save
from support.values import full, same

from dcp_engine import ReshardLoadPlanner, ShardReader, verify_checkpoint
from dcp_engine.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpEngineError,
    DigestMismatchError,
    IncompleteCheckpointError,
    MissingFileError,
    TruncatedFileError,
    UnsupportedVersionError,
)

TINY = {"model": {"w": (3, 5)}, "optimizer": {"m": (4,)}}
FOUND = (CorruptCheckpointError, UnsupportedVersionError)
"""What a flipped bit may be. A version field with another number in it may look like a newer version's."""


def tiny(*, filled: bool = True) -> dict[str, Any]:
    return {
        part: {key: full(key, shape) if filled else torch.zeros(shape) for key, shape in tensors.items()} for part, tensors in TINY.items()
    }


def large(*, filled: bool = True) -> dict[str, Any]:
    """Every kind of block: raw, zstd and planes, several to a tensor, and small tensors and objects together in one."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "bf16": ((1500, 1999), torch.bfloat16),
        "raw": ((5_000_011,), torch.uint8),
        "small": ((7, 3), torch.float32),
        "tiny": ((), torch.float64),
    }
    tensors = {key: full(key, shape, dtype) if filled else torch.zeros(shape, dtype=dtype) for key, (shape, dtype) in shapes.items()}
    regular = torch.arange(300_000, dtype=torch.int64) // 7 if filled else torch.zeros(300_000, dtype=torch.int64)
    return {"model": tensors, "optimizer": {"regular": regular, "name": "run" if filled else "", "list": [1, 2] if filled else []}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("checkpoints")
    save(tiny(), place / "tiny")
    save(large(), place / "large")
    for name in ("tiny", "large"):
        assert verify_checkpoint(place / name).faults == ()
    return {name: place / name for name in ("tiny", "large")}


def verdict(path: Path) -> DcpEngineError | None:
    """What verifying says, whichever way it says it."""
    try:
        faults = verify_checkpoint(path, threads=1).faults
    except DcpEngineError as error:
        return error
    return faults[0] if faults else None


def failures(path: Path, state: Callable[..., dict[str, Any]]) -> tuple[DcpEngineError, DcpEngineError]:
    """The errors of verifying and of loading. Both must be there."""
    found = verdict(path)
    assert found is not None, "verifying saw nothing"
    return found, refused(load, state(filled=False), path)


def files_of(checkpoint: Path) -> list[str]:
    return sorted(entry.name for entry in checkpoint.iterdir())


# -- bits ----------------------------------------------------------------------------------------------------------------


def test_a_bit_of_every_byte_of_every_file_fails_load_and_verify(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """One random bit of each. All but the headers' long runs of zeros, of which every sixteenth byte is tried."""
    path = copy_of(checkpoints["tiny"], tmp_path / "a")
    rng = random.Random(0)
    for name in files_of(path):
        content = (path / name).read_bytes()
        places = [place for place in range(len(content)) if not 64 <= place < 4096 or place % 16 == 0 or not name.endswith(".shard")]
        with open(path / name, "r+b", buffering=0) as file:
            for place in places:
                os.pwrite(file.fileno(), bytes([content[place] ^ (1 << rng.randrange(8))]), place)
                for error in failures(path, tiny):
                    assert isinstance(error, FOUND), (name, place, error)
                    assert error.file == name, (name, place, error)
                    assert error.path == str(path)
                os.pwrite(file.fileno(), content[place : place + 1], place)
    assert verdict(path) is None


def test_a_flipped_bit_in_every_kind_of_region_fails_load_and_verify(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = copy_of(checkpoints["large"], tmp_path / "a")
    rng = random.Random(1)
    kinds = set()
    for name, kind, begin, end in list(regions(path)):
        kinds.add(kind)
        for place in {begin, end - 1, rng.randrange(begin, end)}:
            with open(path / name, "r+b", buffering=0) as file:
                before = os.pread(file.fileno(), 1, place)
                os.pwrite(file.fileno(), bytes([before[0] ^ (1 << rng.randrange(8))]), place)
                for error in failures(path, large):
                    assert isinstance(error, FOUND), (name, kind, place, error)
                    assert error.file == name, (name, kind, place, error)
                    assert error.path == str(path)
                    if kind in ("block", "padding"):
                        assert "block " in str(error), error
                        assert error.tensor, error
                os.pwrite(file.fileno(), before, place)
    assert kinds == {"marker", "record", "body", "header", "block", "padding", "footer", "trailer"}
    found = load(large(filled=False), path)
    assert same(found["model"]["bf16"], full("bf16", (1500, 1999), torch.bfloat16))


def test_a_damaged_block_is_named_with_its_tensor_by_both(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = copy_of(checkpoints["large"], tmp_path / "a")
    metadata = ShardReader(path).read_metadata()
    for index, location in metadata.storage_data.items():
        if index.fqn not in ("model.bf16", "model.raw", "optimizer.regular"):
            continue
        with open(path / location.file, "r+b", buffering=0) as file:
            before = os.pread(file.fileno(), 1, location.position + 100)
            os.pwrite(file.fileno(), bytes([before[0] ^ 16]), location.position + 100)
            for error in failures(path, large):
                assert isinstance(error, DigestMismatchError)
                assert (error.file, error.tensor) == (location.file, index.fqn)
            os.pwrite(file.fileno(), before, location.position + 100)


def test_all_damage_is_listed_at_once(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = copy_of(checkpoints["large"], tmp_path / "a")
    places = [(name, begin) for name, kind, begin, _ in regions(path) if kind == "block"]
    for name, begin in places:
        with open(path / name, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, begin)[0] ^ 1]), begin)
    report = verify_checkpoint(path)
    assert [fault.file for fault in report.faults] == [name for name, _ in places]
    assert report.num_blocks == len(places)


def test_a_blanked_checksum_is_a_wrong_one(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """No digest can be taken out: neither of a record, nor of the marker, nor a block's with all that vouches for it left as it was."""
    for name, begin, length, blank in [
        ("MANIFEST", 32, 32, b"\0"),
        ("model-00000.shard", -32, 32, b"\0"),
        ("optimizer-00000.shard", -32, 32, b"\0"),
        ("COMPLETE", -65, 64, b"0"),
    ]:
        path = copy_of(checkpoints["tiny"], tmp_path / "a")
        content = bytearray((path / name).read_bytes())
        start = begin % len(content)
        content[start : start + length] = blank * length
        (path / name).write_bytes(content)
        for error in failures(path, tiny):
            assert isinstance(error, CorruptCheckpointError)
            assert error.file == name


# -- lengths -------------------------------------------------------------------------------------------------------------


def test_every_truncation_and_extension_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = copy_of(checkpoints["tiny"], tmp_path / "a")
    rng = random.Random(2)
    for name in files_of(path):
        content = (path / name).read_bytes()
        size = len(content)
        cuts = {0, 1, size // 2, size - 65, size - 64, size - 1, *(rng.randrange(size) for _ in range(5))}
        changed = [content[:cut] for cut in sorted(cuts) if 0 <= cut < size]
        changed += [content + extra for extra in (b"\0", b"\n", b"\0" * 64, content)]
        for other in changed:
            (path / name).write_bytes(other)
            for error in failures(path, tiny):
                assert isinstance(error, CorruptCheckpointError), (name, len(other), error)
                assert error.file == name, (name, len(other), error)
        (path / name).write_bytes(content)
    assert verdict(path) is None


def test_a_tail_of_zeros_as_a_crash_leaves_them_is_found(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Right length, but the last pages never reached the disk."""
    path = copy_of(checkpoints["large"], tmp_path / "a")
    for name in files_of(path):
        content = (path / name).read_bytes()
        keep = len(content) // 2
        (path / name).write_bytes(content[:keep] + b"\0" * (len(content) - keep))
        for error in failures(path, large):
            assert isinstance(error, CorruptCheckpointError)
            assert error.file == name
        (path / name).write_bytes(content)


# -- files ---------------------------------------------------------------------------------------------------------------


def _fifo(place: Path) -> None:
    os.mkfifo(place)


def _directory(place: Path) -> None:
    place.mkdir()


def _link(place: Path) -> None:
    """To a copy with the very content: where a link leads to may change after it was checked."""
    place.symlink_to(place.parent.parent / "kept" / place.name)


def _link_to_nothing(place: Path) -> None:
    place.symlink_to("nowhere")


def _link_to_itself(place: Path) -> None:
    place.symlink_to(place.name)


def _nothing(place: Path) -> None:
    assert not place.exists()


@pytest.mark.parametrize("put", [_nothing, _fifo, _directory, _link, _link_to_nothing, _link_to_itself])
@pytest.mark.parametrize("name", ["COMPLETE", "MANIFEST", "model-00000.shard", "optimizer-00000.shard"])
def test_a_file_that_is_gone_or_no_file_is_named(checkpoints: dict[str, Path], tmp_path: Path, name: str, put: Any) -> None:
    """Nothing hangs on a pipe, and no link is followed."""
    path = copy_of(checkpoints["tiny"], tmp_path / "a")
    copy_of(checkpoints["tiny"], tmp_path / "kept")
    (path / name).unlink()
    put(path / name)
    for error in failures(path, tiny):
        if name == "COMPLETE" and put is _nothing:
            assert isinstance(error, IncompleteCheckpointError)
            assert "COMPLETE" in str(error)
        else:
            assert isinstance(error, MissingFileError), error
            assert error.file == name


def test_an_empty_or_foreign_directory_is_no_checkpoint(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("hello")
    (tmp_path / "file").write_bytes(b"\0" * 100)
    for name in ("absent", "empty", "notes", "file"):
        for error in failures(tmp_path / name, tiny):
            assert type(error) is CheckpointNotFoundError
            assert error.path == str(tmp_path / name)


def test_swapped_files_are_found(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Of one size too: only names and content differ."""
    save({"model": {"w": full("a", (4, 4))}, "optimizer": {"w": full("b", (4, 4))}}, tmp_path / "same", codec="raw")
    for source in (checkpoints["tiny"], tmp_path / "same"):
        path = copy_of(source, tmp_path / "a")
        one, other = path / "model-00000.shard", path / "optimizer-00000.shard"
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)
        error = verdict(path)
        assert isinstance(error, CorruptCheckpointError)
        assert error.file == "model-00000.shard"
        template = tiny(filled=False) if source is checkpoints["tiny"] else {p: {"w": torch.zeros(4, 4)} for p in ("model", "optimizer")}
        error = refused(load, template, path)
        assert isinstance(error, CorruptCheckpointError)
        assert error.file in ("model-00000.shard", "optimizer-00000.shard")


@pytest.mark.parametrize("name", ["COMPLETE", "MANIFEST", "model-00000.shard", "optimizer-00000.shard"])
def test_a_file_of_another_save_of_the_very_same_state_is_found(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Equal in content and size, but of another attempt: two saves are never mixed."""
    save(tiny(), tmp_path / "again")
    path = copy_of(checkpoints["tiny"], tmp_path / "a")
    shutil.copy(tmp_path / "again" / name, path / name)
    for error in failures(path, tiny):
        assert isinstance(error, CorruptCheckpointError)
        assert error.file == ("MANIFEST" if name == "COMPLETE" else name)


def test_only_what_is_read_has_to_be_whole(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The weights load while the optimizer's file is damaged, and verifying says what is damaged."""
    path = copy_of(checkpoints["tiny"], tmp_path / "a")
    (path / "optimizer-00000.shard").write_bytes(b"")
    found = load({"model": tiny(filled=False)["model"]}, path, keys=["model"])
    assert same(found["model"]["w"], full("w", (3, 5)))
    error = verdict(path)
    assert isinstance(error, TruncatedFileError)
    assert error.file == "optimizer-00000.shard"


def test_a_copy_elsewhere_is_the_checkpoint(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = copy_of(checkpoints["tiny"], tmp_path / "any name at all")
    assert verify_checkpoint(path).faults == ()
    assert same(load(tiny(filled=False), path)["model"]["w"], full("w", (3, 5)))


def test_the_planner_builds_nothing_from_a_damaged_checkpoint(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = copy_of(checkpoints["tiny"], tmp_path / "a")
    content = bytearray((path / "model-00000.shard").read_bytes())
    content[4096] ^= 1
    (path / "model-00000.shard").write_bytes(content)
    error = refused(load, {}, path, planner=ReshardLoadPlanner(build_from_metadata=True))
    assert isinstance(error, DigestMismatchError)
    assert (error.file, error.tensor) == ("model-00000.shard", "model.w")
