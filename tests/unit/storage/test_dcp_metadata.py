"""What DCP sees of a manifest, and that it is made when somebody looks."""

from __future__ import annotations

import dataclasses
import pickle
import tracemalloc

import pytest
import torch
from support.manifests import manifest_of, receipt_of
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_engine.errors import CorruptCheckpointError, MalformedCheckpointError
from dcp_engine.objects import encode_object
from dcp_engine.storage.dcp_metadata import ManifestIndex, ManifestMetadata, metadata_of_manifest
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.table import TableBuilder
from dcp_engine.stored_chunks import stored_chunks_of
from dcp_engine.types import PlannerData

F32, OBJECT, OPAQUE = 18, 254, 255


def manifest(code: int = OBJECT, **fields: object) -> Manifest:
    builder = TableBuilder()
    builder.add_block(16, 16, 0, 1)
    builder.add_chunk("w", F32, (4,), (0,), (2,), 0, 0)
    builder.add_chunk("w", F32, (4,), (2,), (2,), 0, 8)
    builder.add_block(5, 5, 0, 2)
    builder.add_chunk("o", code, (5,), (0,), (5,), 1, 0)
    return manifest_of([receipt_of(builder.build(), 0, 1)], world_size=1, empty_entries=[("nothing", OPAQUE, (0,))], **fields)


def metadata(**fields: object) -> ManifestMetadata:
    return metadata_of_manifest(manifest(**fields), path="p", manifest_sha256="s")


@pytest.mark.parametrize("code", [OBJECT, OPAQUE])
def test_the_index_lists_what_can_be_looked_up(code: int) -> None:
    index = ManifestIndex(manifest(code), "p")
    assert list(index) == [MetadataIndex("w", [0], 0), MetadataIndex("w", [2], 1), MetadataIndex("o")]
    assert len(index) == 3
    assert [(index[key].position, index[key].block_offset, index[key].nbytes) for key in index] == [
        (4096, 0, 8),
        (4096, 8, 8),
        (4160, 0, 5),
    ]
    assert MetadataIndex("nothing") not in index


def test_entries_are_those_of_the_manifest_and_its_aliases() -> None:
    entries = metadata(aliases={"tied": "w"}).state_dict_metadata
    assert list(entries) == ["w", "o", "nothing", "tied"]
    assert len(entries) == 4
    assert "tied" in entries
    assert "x" not in entries
    assert 7 not in entries
    weight = entries["w"]
    assert isinstance(weight, TensorStorageMetadata)
    assert (weight.size, weight.properties.dtype) == (torch.Size([4]), torch.float32)
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in weight.chunks] == [((0,), (2,)), ((2,), (2,))]
    assert entries["w"] is weight
    assert entries["tied"] == weight
    assert isinstance(entries["o"], BytesStorageMetadata)
    with pytest.raises(KeyError, match="x"):
        entries["x"]
    assert repr(entries) == "ManifestEntries(4 entries)"


def test_metadata_crosses_processes_and_replace() -> None:
    before = metadata(planner_data=encode_object({"w": ("w",)}, key="k"))
    for after in (pickle.loads(pickle.dumps(before)), dataclasses.replace(before)):
        assert dict(after.state_dict_metadata) == dict(before.state_dict_metadata)
        assert after.planner_data == {"w": ("w",)}
        assert after.manifest_sha256 == "s"
        assert after.stored_tensors.rows == {"w": 0, "o": 1, "nothing": 2}


def test_planner_data_is_decoded_at_the_first_look() -> None:
    found = metadata(planner_data=encode_object({"w": ("w",)}, key="k"), skeleton=b"\x80", aliases={"tied": "w"})
    assert "planner_data" not in vars(found)
    assert isinstance(found.planner_data, PlannerData)
    assert (found.planner_data, found.planner_data.ties) == ({"w": ("w",)}, {"tied": "w"})
    assert found.planner_data is found.planner_data
    assert metadata(planner_data=b"").planner_data is None


def test_planner_data_that_is_none_is_an_error_at_the_first_look() -> None:
    for fields in ({"planner_data": b"\xc1"}, {"planner_data": b"\x07", "skeleton": b"\x80"}):
        found = metadata(**fields)
        assert found.stored_tensors.ties == {}
        with pytest.raises(MalformedCheckpointError) as caught:
            found.planner_data  # noqa: B018 - the look is what fails
        assert (caught.value.path, caught.value.file) == ("p", "MANIFEST")


def test_aliases_are_ties_only_where_our_planner_saved_them() -> None:
    assert metadata(skeleton=b"\x80", aliases={"tied": "w"}).stored_tensors.ties == {"tied": "w"}
    assert metadata(aliases={"tied": "w"}).stored_tensors.ties == {}


def test_shapes_that_no_column_read_needs_are_not_unpacked() -> None:
    # A few kilobytes of a hostile manifest may say this: a python int for each extent takes five times the column.
    shape = (0, *(1000 + extent for extent in range(63)))
    entries = [(f"e{number}", F32, shape) for number in range(5000)]
    found = metadata_of_manifest(manifest_of([], world_size=1, empty_entries=entries), path="p", manifest_sha256="s")
    tracemalloc.start()
    stored = found.stored_tensors
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not any(stored.is_whole)
    assert len(stored.shapes) == 5000
    assert peak_bytes < 2_000_000


def test_the_index_is_decoded_where_it_arrives_when_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(ManifestIndex(manifest(), "p"))
    decoded: list[str | None] = []
    decode = Manifest.decode
    monkeypatch.setattr(Manifest, "decode", lambda data, *, path=None: decoded.append(path) or decode(data, path=path))
    index = pickle.loads(data)
    assert (index.path, decoded) == ("p", [])
    again = pickle.loads(pickle.dumps(index))
    assert decoded == []
    assert again[MetadataIndex("w", [2])].block_offset == 8
    assert [again[key].nbytes for key in again] == [8, 8, 5]
    assert decoded == ["p"]


def test_an_index_that_is_damaged_says_so_when_somebody_looks() -> None:
    index = ManifestIndex(manifest().encode()[:-1], "p")
    with pytest.raises(CorruptCheckpointError) as caught:
        len(index)
    assert (caught.value.path, caught.value.file) == ("p", "MANIFEST")


def test_the_record_of_a_tensor_lists_its_chunks_when_somebody_looks_and_travels_as_an_ordinary_one() -> None:
    found = metadata().state_dict_metadata["w"]
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size((2,))) for offsets in ((0,), (2,))]
    ordinary = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size((4,)), chunks)
    assert isinstance(found, TensorStorageMetadata)
    assert "chunks" not in vars(found)
    assert found == ordinary
    assert ordinary == found
    assert found != dataclasses.replace(ordinary, chunks=chunks[:1])
    assert found != "w"
    assert found.chunks is found.chunks
    assert type(pickle.loads(pickle.dumps(found))) is TensorStorageMetadata
    assert dataclasses.asdict(found) == dataclasses.asdict(ordinary)


def test_the_chunks_of_all_entries_are_columns() -> None:
    stored = metadata().stored_chunks
    assert stored_chunks_of(metadata()) is not None
    assert dict(stored.rows) == {"w": 0, "o": 1, "nothing": 2}
    assert (stored.order.tolist(), stored.starts.tolist()) == ([0, 1, 2], [0, 2, 3, 3])
    assert (stored.places.tolist(), stored.offsets.tolist(), stored.sizes.tolist()) == ([0, 1, 2, 3], [0, 2, 0], [2, 2, 5])
