"""Copies between file systems and object stores: valid when whole, whatever made them, and never mistaken for whole before."""

from __future__ import annotations

import itertools
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from support import s3
from support.engine import failure_of
from support.values import full, same
from torch.distributed.checkpoint import CheckpointException

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter, verify_checkpoint
from dcp_engine.errors import CheckpointNotFoundError, CorruptCheckpointError, DcpEngineError, IncompleteCheckpointError, MissingFileError

WEIGHTS, MOMENTS = full("weights", (300, 70)), full("moments", (300, 70))


def save(path: str, epoch: int, **options: Any) -> None:
    state = {"model": {"w": WEIGHTS + epoch}, "optimizer": {"m": MOMENTS + epoch}, "progress": {"epoch": epoch}}
    dcp.save(state, storage_writer=ShardWriter(path, **options), planner=BalancedSavePlanner())


def load(path: str, storage_options: Mapping[str, Any]) -> int:
    """The epoch of a checkpoint, all of whose values have been compared."""
    found: dict[str, Any] = {
        "model": {"w": torch.zeros_like(WEIGHTS)},
        "optimizer": {"m": torch.zeros_like(MOMENTS)},
        "progress": {"epoch": 0},
    }
    dcp.load(found, storage_reader=ShardReader(path, storage_options=storage_options), planner=ReshardLoadPlanner())
    epoch = found["progress"]["epoch"]
    assert same(found["model"]["w"], WEIGHTS + epoch)
    assert same(found["optimizer"]["m"], MOMENTS + epoch)
    return int(epoch)


def refusal(path: str, storage_options: Mapping[str, Any]) -> DcpEngineError:
    with pytest.raises(CheckpointException) as caught:
        load(path, storage_options)
    return failure_of(caught.value)


def fails_verification(path: str, storage_options: Mapping[str, Any]) -> bool:
    try:
        return verify_checkpoint(path, storage_options=storage_options).faults != ()
    except DcpEngineError:
        return True


def files_under(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that was published by a rename, of epoch 1."""
    place = tmp_path_factory.mktemp("disk") / "step-00000001"
    save(str(place), 1)
    return place


class Bucket:
    """A fresh bucket, filled and emptied by a plain client."""

    def __init__(self) -> None:
        self.name = s3.make_bucket()
        self.url, self.options = f"s3://{self.name}/runs/step-00000001", s3.storage_options()

    def upload(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            s3.boto_client().put_object(Bucket=self.name, Key=f"runs/step-00000001/{name}", Body=content)

    def download(self, place: Path) -> None:
        for entry in s3.boto_client().list_objects_v2(Bucket=self.name, Prefix="runs/").get("Contents", []):
            path = place / entry["Key"].removeprefix("runs/")
            path.parent.mkdir(parents=True, exist_ok=True)
            s3.boto_client().download_file(self.name, entry["Key"], str(path))


@pytest.fixture(scope="module")
def in_store() -> Bucket:
    """A checkpoint that was published by its marker, of epoch 1."""
    bucket = Bucket()
    save(bucket.url, 1, storage_options=bucket.options)
    return bucket


@pytest.fixture
def memory() -> Iterator[str]:
    root = uuid.uuid4().hex
    yield f"memory://{root}/step-00000001"
    for key in [key for key in MemoryFileSystem.store if key.startswith(f"/{root}/")]:
        del MemoryFileSystem.store[key]


def fill(url: str, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        MemoryFileSystem().pipe_file(f"{url.removeprefix('memory:/')}/{name}", content)


# -- whole copies ---------------------------------------------------------------------------------------------------------


def test_a_download_from_an_object_store_is_a_checkpoint(in_store: Bucket, tmp_path: Path) -> None:
    in_store.download(tmp_path)
    copy = str(tmp_path / "step-00000001")
    assert load(copy, {}) == 1
    assert verify_checkpoint(copy).faults == ()


@pytest.mark.parametrize("copy", [shutil.copytree, lambda source, to: fsspec.filesystem("file").put(f"{source}/", to, recursive=True)])
def test_a_copy_of_a_download_is_a_checkpoint(in_store: Bucket, tmp_path: Path, copy: Callable[[str, str], object]) -> None:
    in_store.download(tmp_path)
    copy(str(tmp_path / "step-00000001"), str(tmp_path / "again"))
    assert load(str(tmp_path / "again"), {}) == 1


def test_an_upload_of_a_directory_is_a_checkpoint(on_disk: Path) -> None:
    bucket = Bucket()
    bucket.upload(files_under(on_disk))
    assert load(bucket.url, bucket.options) == 1
    assert verify_checkpoint(bucket.url, storage_options=bucket.options).faults == ()


def test_there_and_back_again(on_disk: Path, tmp_path: Path) -> None:
    bucket = Bucket()
    bucket.upload(files_under(on_disk))
    bucket.download(tmp_path)
    assert files_under(tmp_path / "step-00000001") == files_under(on_disk)


# -- copies under way: every set of files that any order of copying passes through ----------------------------------------------


def subsets(files: Mapping[str, bytes]) -> list[dict[str, bytes]]:
    names = list(files)
    return [{name: files[name] for name in some} for count in range(len(names)) for some in itertools.combinations(names, count)]


def kind_of_part(part: Mapping[str, bytes]) -> type[DcpEngineError]:
    """What a part of a checkpoint is to be called."""
    if "COMPLETE" in part:
        return MissingFileError
    return IncompleteCheckpointError if part else CheckpointNotFoundError


def test_an_upload_counts_when_its_last_object_is_there(on_disk: Path) -> None:
    files = files_under(on_disk)
    assert sorted(files) == ["COMPLETE", "MANIFEST", "model-00000.shard", "optimizer-00000.shard", "progress-00000.shard"][: len(files)]
    for part in subsets(files):
        bucket = Bucket()
        bucket.upload(part)
        assert type(refusal(bucket.url, bucket.options)) is kind_of_part(part), sorted(part)
        assert fails_verification(bucket.url, bucket.options), sorted(part)
        bucket.upload({name: content for name, content in files.items() if name not in part})
        assert load(bucket.url, bucket.options) == 1


def test_a_download_counts_when_its_last_file_is_there(in_store: Bucket, tmp_path: Path) -> None:
    in_store.download(tmp_path)
    files = files_under(tmp_path / "step-00000001")
    for number, part in enumerate(subsets(files)):
        place = tmp_path / f"part-{number}"
        place.mkdir()
        for name, content in part.items():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_bytes(content)
        assert type(refusal(str(place), {})) is kind_of_part(part), sorted(part)
        assert fails_verification(str(place), {}), sorted(part)


def test_an_upload_over_an_older_checkpoint_is_the_old_one_or_the_new_one_or_an_error(on_disk: Path, tmp_path: Path, memory: str) -> None:
    newer = tmp_path / "step-00000001"
    save(str(newer), 2)
    old, new = files_under(on_disk), files_under(newer)
    assert sorted(old) == sorted(new)
    fill(memory, old)
    assert load(memory, {}) == 1
    for part in subsets(new):
        fill(memory, {**old, **part})
        if part:
            assert isinstance(refusal(memory, {}), CorruptCheckpointError), sorted(part)
            assert fails_verification(memory, {}), sorted(part)
    fill(memory, new)
    assert load(memory, {}) == 2
