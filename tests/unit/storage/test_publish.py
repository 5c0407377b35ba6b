"""``open_checkpoint`` says clearly what it found, for each kind of thing that may lie at a path."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.checkpoints import FILES, MANIFEST, publish, unprivileged, world_readable_directory, write_files
from support.s3 import make_bucket, storage_options

from dcp_engine.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpEngineError,
    DigestMismatchError,
    IncompleteCheckpointError,
    LimitExceededError,
    MissingFileError,
    StorageError,
    StoragePermissionError,
    TruncatedFileError,
    UnsupportedVersionError,
)
from dcp_engine.storage import publish as publish_module
from dcp_engine.storage.backends import Directory, local
from dcp_engine.storage.envelope import Marker, encode_marker
from dcp_engine.storage.publish import attach_checkpoint, open_checkpoint, open_publisher, require_unchanged


@pytest.fixture
def target(tmp_path: Path) -> Path:
    publish(tmp_path / "x")
    return tmp_path / "x"


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


# -- what is no checkpoint --------------------------------------------------------------------------------------------


def _nothing(path: Path) -> None:
    pass


def _file(path: Path) -> None:
    path.touch()


def _empty(path: Path) -> None:
    path.mkdir()


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def _others(path: Path) -> None:
    path.mkdir()
    for name in ("a.txt", "b.txt", "c", "d", "e", "f", "g"):
        (path / name).touch()


def _stock(path: Path) -> None:
    path.mkdir()
    (path / ".metadata").touch()
    (path / "__0_0.distcp").touch()


def _steps(path: Path) -> None:
    path.mkdir()
    (path / "step-00000001").mkdir()
    (path / "step-00000002").mkdir()
    (path / "LATEST").touch()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_nothing, "found nothing;"),
        (_file, "found a file;"),
        (_empty, "found nothing in it;"),
        (_dangling, "found a symbolic link to nothing;"),
        (_others, "found 'a.txt', 'b.txt', 'c', 'd', 'e' and 2 more;"),
        (_stock, "torch.distributed.checkpoint.FileSystemReader"),
        (_steps, "as in 'step-00000002'"),
    ],
)
def test_what_is_no_checkpoint_is_described(tmp_path: Path, make: Callable[[Path], None], text: str) -> None:
    make(tmp_path / "x")
    with pytest.raises(CheckpointNotFoundError) as caught:
        open_checkpoint(tmp_path / "x")
    assert type(caught.value) is CheckpointNotFoundError
    assert caught.value.path == str(tmp_path / "x")
    assert text in str(caught.value)


def test_a_path_below_a_file_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointNotFoundError, match="found nothing"):
        open_checkpoint(tmp_path / "file" / "x")


@pytest.mark.parametrize("name", ["MANIFEST", "model-00000.shard", "0123456789abcdef0123456789abcdef"])
def test_files_without_a_marker_are_an_incomplete_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(IncompleteCheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.found == repr(name)


def test_an_attempt_is_an_incomplete_checkpoint(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path / "x")
    ref = publisher.begin()
    write_files(publisher, ref)
    with pytest.raises(IncompleteCheckpointError, match="never committed"):
        open_checkpoint(ref.attempt)
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(tmp_path / "x")


def test_a_link_to_a_checkpoint_is_followed(target: Path) -> None:
    (target.parent / "best").symlink_to("x")
    assert open_checkpoint(target.parent / "best").manifest_bytes == MANIFEST


# -- damage -----------------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_in_the_marker_is_found(target: Path) -> None:
    whole = (target / "COMPLETE").read_bytes()
    for position in range(len(whole)):
        (target / "COMPLETE").write_bytes(whole)
        flip(target / "COMPLETE", position, position % 8)
        with pytest.raises((CorruptCheckpointError, UnsupportedVersionError)) as caught:
            open_checkpoint(target)
        assert (caught.value.path, caught.value.file) == (str(target), "COMPLETE")


@pytest.mark.parametrize("length", [0, 1, 24, 100, -1])
def test_a_torn_marker_is_found(target: Path, length: int) -> None:
    whole = (target / "COMPLETE").read_bytes()
    (target / "COMPLETE").write_bytes(whole[:length])
    with pytest.raises(CorruptCheckpointError) as caught:
        open_checkpoint(target)
    assert (caught.value.path, caught.value.file) == (str(target), "COMPLETE")


def test_an_endless_marker_is_not_read(target: Path) -> None:
    os.truncate(target / "COMPLETE", 2**40)
    with pytest.raises(LimitExceededError) as caught:
        open_checkpoint(target)
    assert caught.value.file == "COMPLETE"


@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
def test_a_marker_that_is_no_file_is_told(target: Path, kind: str) -> None:
    (target / "COMPLETE").rename(target.parent / "marker")
    if kind == "link":
        (target / "COMPLETE").symlink_to(target.parent / "marker")
    elif kind == "directory":
        (target / "COMPLETE").mkdir()
    else:
        os.mkfifo(target / "COMPLETE")
    with pytest.raises(MissingFileError, match="not a regular file") as caught:
        open_checkpoint(target)
    assert caught.value.file == "COMPLETE"


def test_a_newer_version_is_told(target: Path) -> None:
    content = (target / "COMPLETE").read_bytes().replace(b"checkpoint 1\n", b"checkpoint 2\n")
    (target / "COMPLETE").write_bytes(content)
    with pytest.raises(UnsupportedVersionError) as caught:
        open_checkpoint(target)
    assert caught.value.path == str(target)


def test_a_missing_manifest_is_named(target: Path) -> None:
    (target / "MANIFEST").unlink()
    with pytest.raises(MissingFileError) as caught:
        open_checkpoint(target)
    assert caught.value.file == "MANIFEST"


@pytest.mark.parametrize("size_bytes", [0, 255, 257])
def test_a_manifest_of_another_length_is_told(target: Path, size_bytes: int) -> None:
    os.truncate(target / "MANIFEST", size_bytes)
    with pytest.raises(TruncatedFileError) as caught:
        open_checkpoint(target)
    assert (caught.value.file, caught.value.expected, caught.value.found) == ("MANIFEST", "256 bytes", f"{size_bytes} bytes")


@pytest.mark.parametrize("position", [0, 100, 255])
def test_a_flipped_bit_of_the_manifest_is_told(target: Path, position: int) -> None:
    flip(target / "MANIFEST", position)
    with pytest.raises(DigestMismatchError) as caught:
        open_checkpoint(target)
    assert caught.value.file == "MANIFEST"


def test_the_manifest_of_another_checkpoint_is_told(target: Path) -> None:
    publish(target.parent / "y", manifest=bytes(256))
    shutil.copy(target.parent / "y" / "MANIFEST", target)
    with pytest.raises(DigestMismatchError):
        open_checkpoint(target)


@pytest.mark.parametrize("size_bytes", [1, 63, 2**62])
def test_a_manifest_of_impossible_size_is_not_read(target: Path, size_bytes: int) -> None:
    (target / "COMPLETE").write_bytes(encode_marker(Marker(nonce="0" * 32, data=".", manifest_bytes=size_bytes, manifest_sha256="0" * 64)))
    with pytest.raises(LimitExceededError) as caught:
        open_checkpoint(target)
    assert caught.value.found == f"{size_bytes} bytes"


def test_a_checkpoint_replaced_while_it_is_opened_is_opened_anew(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_marker = publish_module.read_marker
    later = []

    def read_then_replace(directory: Directory) -> Marker:
        marker = read_marker(directory)
        if not later:
            later.append(publish(target, manifest=b"another" * 20, overwrite=True))
        return marker

    monkeypatch.setattr(publish_module, "read_marker", read_then_replace)
    opened = open_checkpoint(target)
    assert (opened.marker.nonce, opened.manifest_bytes) == (later[0].nonce, b"another" * 20)


def test_a_checkpoint_that_is_always_replaced_is_given_up(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_marker = publish_module.read_marker
    lengths = iter(range(100, 200))

    def read_then_replace(directory: Directory) -> Marker:
        marker = read_marker(directory)
        publish(target, manifest=bytes(next(lengths)), overwrite=True)
        return marker

    monkeypatch.setattr(publish_module, "read_marker", read_then_replace)
    with pytest.raises(CheckpointNotFoundError, match="replaced"):
        open_checkpoint(target)


def test_a_replaced_and_a_removed_checkpoint_are_told_from_a_damaged_one(target: Path) -> None:
    marker = open_checkpoint(target).marker
    (target / "MANIFEST").unlink()
    require_unchanged(target, marker)
    ref = publish(target, overwrite=True)
    with pytest.raises(CheckpointNotFoundError, match=ref.nonce):
        require_unchanged(target, marker)
    shutil.rmtree(target)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint"):
        require_unchanged(target, marker)


def test_a_data_directory_that_leads_out_of_the_checkpoint_is_refused(target: Path) -> None:
    nonce = "0123456789abcdef0123456789abcdef"
    for name in ("COMPLETE", "MANIFEST"):
        (target / name).unlink()
    publish(target.parent / "elsewhere")
    (target / nonce).symlink_to(target.parent / "elsewhere")
    (target / "COMPLETE").write_bytes(encode_marker(Marker(nonce=nonce, data=nonce, manifest_bytes=256, manifest_sha256="0" * 64)))
    with pytest.raises(MissingFileError) as caught:
        open_checkpoint(target)
    assert (caught.value.file, caught.value.found) == (nonce, "a symbolic link")
    (target / nonce).unlink()
    with pytest.raises(MissingFileError) as caught:
        open_checkpoint(target)
    assert (caught.value.file, caught.value.found) == (nonce, "nothing")


# -- failures of the storage ----------------------------------------------------------------------------------------------------


def test_what_may_not_be_read_is_told() -> None:
    with world_readable_directory() as place:
        for name in ("closed", "marker", "manifest"):
            publish(place / name)
        (place / "closed").chmod(0o000)
        (place / "marker" / "COMPLETE").chmod(0o000)
        (place / "manifest" / "MANIFEST").chmod(0o000)
        with unprivileged():
            for name, file in {"closed": "COMPLETE", "marker": "COMPLETE", "manifest": "MANIFEST"}.items():
                with pytest.raises(StoragePermissionError) as caught:
                    open_checkpoint(place / name)
                assert (caught.value.path, caught.value.file) == (str(place / name), file)
            with pytest.raises(StoragePermissionError):
                open_checkpoint(place / "closed" / "deeper")


def test_a_failing_device_is_no_missing_checkpoint(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(local.os, "preadv", fail)
    with pytest.raises(StorageError) as caught:
        open_checkpoint(target)
    assert (caught.value.errno, caught.value.file) == (errno.EIO, "COMPLETE")


# -- the other ranks ----------------------------------------------------------------------------------------------------------------


def test_another_rank_attaches_without_reading_again(target: Path) -> None:
    opened = open_checkpoint(target)
    (target / "COMPLETE").unlink()
    (target / "MANIFEST").unlink()
    attached = attach_checkpoint(target, opened.marker, opened.manifest_bytes)

    assert (attached.marker, attached.manifest_bytes) == (opened.marker, opened.manifest_bytes)
    assert attached.directory.read_small("model-00000.shard", 99) == FILES["model-00000.shard"]


# -- the same checkpoint on another storage -------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "s3"])
def remote(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return (f"memory://{make_bucket()}/run", {}) if request.param == "memory" else (f"s3://{make_bucket()}/run", storage_options())


def check(path: str | Path, options: dict[str, Any], nonce: str) -> None:
    opened = open_checkpoint(path, storage_options=options)
    assert (opened.marker.nonce, opened.manifest_bytes) == (nonce, MANIFEST)
    assert {name: opened.directory.read_small(name, 99) for name in FILES} == FILES


def test_a_checkpoint_copied_between_storages_opens_unchanged(remote: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    url, options = remote
    file_system, key = fsspec.core.url_to_fs(url, **options)
    from_remote = publish(f"{url}/a", storage_options=options)
    file_system.get(f"{key}/a", f"{tmp_path}/a", recursive=True)
    check(tmp_path / "a", {}, from_remote.nonce)
    file_system.put(f"{tmp_path}/a", f"{key}/again", recursive=True)
    check(f"{url}/again", options, from_remote.nonce)

    from_local = publish(tmp_path / "b")
    file_system.put(f"{tmp_path}/b", f"{key}/b", recursive=True)
    check(f"{url}/b", options, from_local.nonce)


def test_a_copy_from_an_object_store_can_be_replaced(remote: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    url, options = remote
    file_system, key = fsspec.core.url_to_fs(url, **options)
    publish(f"{url}/a", storage_options=options)
    file_system.get(f"{key}/a", f"{tmp_path}/a", recursive=True)

    check(tmp_path / "a", {}, publish(tmp_path / "a", overwrite=True).nonce)
    assert sorted(os.listdir(tmp_path / "a")) == sorted([*FILES, "COMPLETE", "MANIFEST"])


@pytest.mark.parametrize(
    ("names", "kind", "text"),
    [
        ([], CheckpointNotFoundError, "found nothing in it"),
        ([""], CheckpointNotFoundError, "found an object"),
        (["/notes", "/more/notes"], CheckpointNotFoundError, "found 'more', 'notes'"),
        (["/.metadata", "/__0_0.distcp"], CheckpointNotFoundError, "FileSystemReader"),
        (["/step-00000003/COMPLETE"], CheckpointNotFoundError, "as in 'step-00000003'"),
        (["/0123456789abcdef0123456789abcdef/MANIFEST"], IncompleteCheckpointError, "never committed"),
        (["/COMPLETE"], CorruptCheckpointError, "not a completion marker"),
    ],
)
def test_what_is_no_checkpoint_in_an_object_store_is_described(
    remote: tuple[str, dict[str, Any]], names: list[str], kind: type[DcpEngineError], text: str
) -> None:
    url, options = remote
    file_system, key = fsspec.core.url_to_fs(url, **options)
    for name in names:
        file_system.pipe_file(f"{key}/x{name}", b"content")
    with pytest.raises(kind) as caught:
        open_checkpoint(f"{url}/x", storage_options=options)
    assert text in str(caught.value)
    assert caught.value.path == f"{url}/x"


def test_a_bucket_that_does_not_exist_holds_no_checkpoint() -> None:
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint("s3://no-such-bucket-anywhere/x", storage_options=storage_options())
