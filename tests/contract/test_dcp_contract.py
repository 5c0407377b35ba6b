"""DCP's documented contracts, call by call, in one process: ours with ours, and each of ours with DCP's own."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter
from dcp_engine.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DcpEngineError,
    DtypeMismatchError,
    InvalidOptionError,
    UnencodableObjectError,
    UnsupportedModeError,
    UntrustedDataError,
    UsageError,
)

Calls = list[str]


class RecordingWriter(ShardWriter):
    def __init__(self, path: Any, calls: Calls) -> None:
        super().__init__(path)
        self.calls = calls

    def reset(self, checkpoint_id: Any = None) -> None:
        self.calls.append("reset")
        super().reset(checkpoint_id)

    def storage_meta(self) -> Any:
        self.calls.append("storage_meta")
        return super().storage_meta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.calls.append("set_up_storage_writer")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.calls.append("prepare_local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.calls.append("prepare_global_plan")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        self.calls.append("write_data")
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        self.calls.append("finish")
        super().finish(metadata, results)


class RecordingReader(ShardReader):
    def __init__(self, path: Any, calls: Calls) -> None:
        super().__init__(path)
        self.calls = calls

    def reset(self, checkpoint_id: Any = None) -> None:
        self.calls.append("reset")
        super().reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.calls.append("read_metadata")
        return super().read_metadata(*args, **kwargs)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.calls.append("set_up_storage_reader")
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        self.calls.append("prepare_local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        self.calls.append("prepare_global_plan")
        return super().prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        self.calls.append("read_data")
        return super().read_data(plan, planner)


class OwnBytesPlanner(DefaultSavePlanner):
    """A user's planner that serialises objects in a way of its own."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return super().transform_object(write_item, object)


def state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.arange(4, dtype=torch.bfloat16), "none": torch.empty(0, 5)},
        "optimizer": {"step": torch.tensor(7), "groups": [{"lr": 0.25, "betas": (0.9, 0.999)}]},
        "progress": {"epoch": 3, "name": "run", "big": 2**70},
    }


def zeros() -> dict[str, Any]:
    return {
        "model": {"weight": torch.zeros(3, 4), "bias": torch.zeros(4, dtype=torch.bfloat16), "none": torch.empty(0, 5)},
        "optimizer": {"step": torch.tensor(0), "groups": [{"lr": 0.0, "betas": (0.0, 0.0)}]},
        "progress": {"epoch": 0, "name": "", "big": 0},
    }


def assert_is_state(found: dict[str, Any]) -> None:
    expected = state()
    for part in expected:
        for key, value in expected[part].items():
            if isinstance(value, torch.Tensor):
                assert found[part][key].dtype == value.dtype
                assert torch.equal(found[part][key], value), key
            else:
                assert found[part][key] == value, key
    assert type(found["optimizer"]["groups"][0]["betas"]) is tuple


def failure_of(error: CheckpointException, rank: int = 0) -> DcpEngineError:
    found = error.failures[rank][0]
    assert isinstance(found, DcpEngineError)
    return found


def test_save_calls_come_in_the_documented_order(tmp_path: Path) -> None:
    calls: Calls = []
    dcp.save(state(), checkpoint_id=tmp_path / "a", storage_writer=RecordingWriter(None, calls), planner=BalancedSavePlanner())
    assert calls[0] == "reset"
    assert [call for call in calls if call not in ("reset", "storage_meta")] == [
        "set_up_storage_writer",
        "prepare_local_plan",
        "prepare_global_plan",
        "write_data",
        "finish",
    ]
    assert calls.index("storage_meta") < calls.index("set_up_storage_writer")


def test_load_calls_come_in_the_documented_order(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=ShardWriter(tmp_path / "a"), planner=BalancedSavePlanner())
    calls: Calls = []
    dcp.load(zeros(), checkpoint_id=tmp_path / "a", storage_reader=RecordingReader(None, calls), planner=ReshardLoadPlanner())
    assert calls == ["reset", "read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data"]


@pytest.mark.parametrize("save_planner", [DefaultSavePlanner, BalancedSavePlanner])
@pytest.mark.parametrize("load_planner", [DefaultLoadPlanner, ReshardLoadPlanner])
@pytest.mark.parametrize("storage", ["ours", "stock"])
def test_planners_and_storage_of_either_side_mix(tmp_path: Path, save_planner: Any, load_planner: Any, storage: str) -> None:
    path = tmp_path / "a"
    writer = ShardWriter(path) if storage == "ours" else FileSystemWriter(path)
    reader = ShardReader(path) if storage == "ours" else FileSystemReader(path)
    dcp.save(state(), storage_writer=writer, planner=save_planner())
    found = zeros()
    dcp.load(found, storage_reader=reader, planner=load_planner())
    assert_is_state(found)


def test_our_planners_work_with_safetensors_storage(tmp_path: Path) -> None:
    flat = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(3)}
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(dict(flat), storage_writer=writer, planner=BalancedSavePlanner())
    found = {"a": torch.zeros(2, 3), "b": torch.zeros(3, dtype=torch.int64)}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path)), planner=ReshardLoadPlanner())
    assert torch.equal(found["a"], flat["a"])
    assert torch.equal(found["b"], flat["b"])


def test_nothing_of_ours_gets_into_a_stock_metadata_file(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path), planner=BalancedSavePlanner())
    assert b"dcp_engine" not in (tmp_path / ".metadata").read_bytes()


@pytest.mark.parametrize("planner", [DefaultSavePlanner, BalancedSavePlanner])
def test_save_returns_full_metadata(tmp_path: Path, planner: Any) -> None:
    metadata = dcp.save(state(), storage_writer=ShardWriter(tmp_path / "step-00000012"), planner=planner())
    weight = metadata.state_dict_metadata["model.weight"]
    assert isinstance(weight, TensorStorageMetadata)
    assert tuple(weight.size) == (3, 4)
    assert weight.properties.dtype == torch.float32
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in weight.chunks] == [((0, 0), (3, 4))]
    assert isinstance(metadata.state_dict_metadata["progress.epoch"], BytesStorageMetadata)
    assert metadata.planner_data["model.weight"] == ("model", "weight")
    location = metadata.storage_data[MetadataIndex("model.weight", (0, 0))]
    assert (location.file, location.nbytes, location.num_blocks) == ("model-00000.shard", 48, 1)
    assert metadata.storage_meta.checkpoint_id == str(tmp_path / "step-00000012")
    assert set(metadata.storage_data) >= {MetadataIndex("model.weight", (0, 0)), MetadataIndex("progress.epoch")}


def test_metadata_read_back_is_what_save_returned(tmp_path: Path) -> None:
    saved = dcp.save(state(), storage_writer=ShardWriter(tmp_path / "step-00000012", run_id="r7"), planner=BalancedSavePlanner())
    read = ShardReader(tmp_path / "step-00000012").read_metadata()
    assert dict(read.state_dict_metadata) == saved.state_dict_metadata
    assert read.planner_data == saved.planner_data
    assert set(read.storage_data) == set(saved.storage_data)
    assert (read.step, read.run_id) == (12, "r7")
    assert read.saved_at.endswith("Z")


def test_async_save_in_a_thread_gives_a_future_of_the_metadata(tmp_path: Path) -> None:
    future = dcp.async_save(state(), storage_writer=ShardWriter(tmp_path / "a"), planner=BalancedSavePlanner(), no_dist=True)
    assert isinstance(future, Future)
    assert "model.weight" in future.result().state_dict_metadata
    found = zeros()
    dcp.load(found, storage_reader=ShardReader(tmp_path / "a"), planner=ReshardLoadPlanner())
    assert_is_state(found)


def test_async_save_fails_through_its_future(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=ShardWriter(tmp_path / "a"), planner=BalancedSavePlanner())
    future = dcp.async_save(state(), storage_writer=ShardWriter(tmp_path / "a"), planner=BalancedSavePlanner(), no_dist=True)
    with pytest.raises(CheckpointException) as caught:
        future.result()
    assert isinstance(failure_of(caught.value), CheckpointExistsError)


def test_a_save_that_another_one_of_its_writer_has_overtaken_says_so(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "step-00000001")

    class Overtaking(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            writer.reset(tmp_path / "step-00000002")
            writer.set_up_storage_writer(True, rank=0, use_collectives=True)
            return super().resolve_data(write_item)

    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=Overtaking())
    reason = failure_of(caught.value)
    assert isinstance(reason, UsageError)
    assert "the writer began another save while this one was under way" in str(reason)
    assert (reason.step, reason.path, reason.rank) == (1, str(tmp_path / "step-00000001"), 0)
    assert list(tmp_path.iterdir()) == []


def test_one_writer_serves_many_checkpoints(tmp_path: Path) -> None:
    writer, planner = ShardWriter(), BalancedSavePlanner()
    for step in (1, 2, 3):
        dcp.save({"x": torch.full((5,), float(step))}, checkpoint_id=tmp_path / f"step-{step:08d}", storage_writer=writer, planner=planner)
    reader = ShardReader()
    for step in (3, 1, 2):
        found = {"x": torch.zeros(5)}
        dcp.load(found, checkpoint_id=tmp_path / f"step-{step:08d}", storage_reader=reader, planner=ReshardLoadPlanner())
        assert torch.equal(found["x"], torch.full((5,), float(step)))


def test_writer_without_a_path_says_so() -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"x": torch.zeros(1)}, storage_writer=ShardWriter(), planner=BalancedSavePlanner())
    assert isinstance(failure_of(caught.value), InvalidOptionError)


def test_saving_without_collectives_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DcpEngineError) as caught:
        dcp.save({"x": torch.zeros(1)}, storage_writer=ShardWriter(tmp_path / "a"), use_collectives=False)
    assert isinstance(caught.value, UnsupportedModeError)
    assert list(tmp_path.iterdir()) == []


def test_stock_plan_caching_is_refused_when_it_would_replay(tmp_path: Path) -> None:
    def save(step: int) -> None:
        dcp.save({"x": torch.zeros(1)}, storage_writer=ShardWriter(tmp_path / str(step)), planner=CachingPlanner(enable_plan_caching=True))

    class CachingPlanner(DefaultSavePlanner):
        """A class of its own, since the stock caches live on the class, by its name."""

    save(1)
    with pytest.raises(CheckpointException) as caught:
        save(2)
    assert isinstance(failure_of(caught.value), UnsupportedModeError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]


def test_our_plan_cache_survives_changes_of_the_state(tmp_path: Path) -> None:
    planner = BalancedSavePlanner()
    for step, size in enumerate((4, 4, 6, 6, 4)):
        dcp.save({"x": torch.full((size,), float(step))}, storage_writer=ShardWriter(tmp_path / str(step)), planner=planner)
    for step, size in enumerate((4, 4, 6, 6, 4)):
        found = {"x": torch.zeros(size)}
        dcp.load(found, storage_reader=ShardReader(tmp_path / str(step)), planner=ReshardLoadPlanner())
        assert torch.equal(found["x"], torch.full((size,), float(step)))


@pytest.mark.parametrize(
    ("checkpoint_id", "valid"),
    [("/a/b", True), (Path("a"), True), ("s3://bucket/a", True), ("memory://a", True), ("", False), ("no-such-scheme://a", False)],
)
def test_checkpoint_ids_are_validated(checkpoint_id: Any, valid: bool) -> None:
    assert ShardWriter.validate_checkpoint_id(checkpoint_id) is valid
    assert ShardReader.validate_checkpoint_id(checkpoint_id) is valid


def test_an_existing_checkpoint_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    dcp.save({"x": torch.ones(3)}, storage_writer=ShardWriter(path), planner=BalancedSavePlanner())
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"x": torch.zeros(3)}, storage_writer=ShardWriter(path), planner=BalancedSavePlanner())
    error = failure_of(caught.value)
    assert isinstance(error, CheckpointExistsError)
    assert error.path == str(path)
    found = {"x": torch.zeros(3)}
    dcp.load(found, storage_reader=ShardReader(path), planner=ReshardLoadPlanner())
    assert torch.equal(found["x"], torch.ones(3))
    dcp.save({"x": torch.full((3,), 2.0)}, storage_writer=ShardWriter(path, overwrite=True), planner=BalancedSavePlanner())
    dcp.load(found, storage_reader=ShardReader(path), planner=ReshardLoadPlanner())
    assert torch.equal(found["x"], torch.full((3,), 2.0))
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_a_failed_save_leaves_nothing_once_the_writer_saves_again(tmp_path: Path) -> None:
    writer = ShardWriter()
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"x": torch.ones(3), "f": lambda: 1}, checkpoint_id=tmp_path / "a", storage_writer=writer)
    error = failure_of(caught.value)
    assert isinstance(error, UnencodableObjectError)
    assert error.tensor == "f"
    assert not (tmp_path / "a").exists()
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "b", storage_writer=writer)
    assert [entry.name for entry in tmp_path.iterdir()] == ["b"]


def test_published_files_have_the_umasks_modes(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        dcp.save({"x": torch.ones(3)}, storage_writer=ShardWriter(tmp_path / "a"), planner=BalancedSavePlanner())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o750
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "a").iterdir()} == {0o640}


def test_a_missing_checkpoint_reaches_the_user_as_our_error(tmp_path: Path) -> None:
    for planner in (DefaultLoadPlanner(), ReshardLoadPlanner()):
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"x": torch.zeros(3)}, storage_reader=ShardReader(tmp_path / "none"), planner=planner)
        error = failure_of(caught.value)
        assert type(error) is CheckpointNotFoundError
        assert error.path == str(tmp_path / "none")
    with pytest.raises(CheckpointNotFoundError):
        ShardReader(tmp_path / "none").read_metadata()


def test_a_checkpoint_replaced_during_a_load_is_not_called_damaged(tmp_path: Path) -> None:
    def save(value: float) -> None:
        dcp.save({"w": torch.full((5,), value)}, storage_writer=ShardWriter(tmp_path / "c", overwrite=True), planner=BalancedSavePlanner())

    class Overtaken(ShardReader):
        def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
            super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
            save(2.0)

    save(1.0)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(5)}, storage_reader=Overtaken(tmp_path / "c"), planner=ReshardLoadPlanner())
    error = failure_of(caught.value)
    assert type(error) is CheckpointNotFoundError
    assert "replaced" in str(error)


def test_autograd_notices_that_a_load_changed_what_it_kept(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    dcp.save({"w": weight}, storage_writer=ShardWriter(tmp_path / "a"), planner=BalancedSavePlanner())
    loss = (weight * weight).sum()
    dcp.load({"w": weight}, storage_reader=ShardReader(tmp_path / "a"), planner=ReshardLoadPlanner())
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_bytes_of_a_users_planner_are_refused_unless_allowed(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(3), "note": "hello"}, storage_writer=ShardWriter(tmp_path / "a"), planner=OwnBytesPlanner())
    for planner in (DefaultLoadPlanner(), ReshardLoadPlanner()):
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"x": torch.zeros(3), "note": ""}, storage_reader=ShardReader(tmp_path / "a"), planner=planner)
        error = failure_of(caught.value)
        assert isinstance(error, UntrustedDataError)
        assert error.tensor == "note"
    found: dict[str, Any] = {"x": torch.zeros(3), "note": ""}
    dcp.load(found, storage_reader=ShardReader(tmp_path / "a", allow_opaque=True), planner=DefaultLoadPlanner())
    assert found["note"] == "hello"


def test_a_dtype_is_never_converted_silently_even_by_a_stock_planner(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(3)}, storage_writer=ShardWriter(tmp_path / "a"))
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"x": torch.zeros(3, dtype=torch.bfloat16)}, storage_reader=ShardReader(tmp_path / "a"))
    error = failure_of(caught.value)
    assert isinstance(error, DtypeMismatchError)
    assert error.tensor == "x"


def test_the_whole_state_loads_without_a_template(tmp_path: Path) -> None:
    saved = {**state(), "odd": {1: torch.ones(2), "pair": (torch.zeros(1), 2), "empty": {}, "ordered": OrderedDict(a=1)}}
    dcp.save(saved, storage_writer=ShardWriter(tmp_path / "a"), planner=BalancedSavePlanner())
    planner = ReshardLoadPlanner(build_from_metadata=True)
    dcp.load({}, storage_reader=ShardReader(tmp_path / "a"), planner=planner)
    found = planner.built
    assert_is_state(found)
    assert torch.equal(found["odd"][1], torch.ones(2))
    assert type(found["odd"]["pair"]) is tuple
    assert found["odd"]["pair"][1] == 2
    assert found["odd"]["empty"] == {}
    assert type(found["odd"]["ordered"]) is OrderedDict


def test_tied_tensors_are_stored_once_and_restored_twice(tmp_path: Path) -> None:
    shared = torch.arange(32768.0)
    metadata = dcp.save({"a": shared, "b": shared}, storage_writer=ShardWriter(tmp_path / "a", codec="raw"), planner=BalancedSavePlanner())
    assert sum(file.stat().st_size for file in (tmp_path / "a").glob("*.shard")) < 1.5 * shared.nbytes
    assert set(metadata.state_dict_metadata) == {"a", "b"}
    untied = {"a": torch.zeros(32768), "b": torch.zeros(32768)}
    dcp.load(untied, storage_reader=ShardReader(tmp_path / "a"), planner=ReshardLoadPlanner())
    assert torch.equal(untied["a"], shared)
    assert torch.equal(untied["b"], shared)
    tied = torch.zeros(32768)
    dcp.load({"a": tied, "b": tied}, storage_reader=ShardReader(tmp_path / "a"), planner=DefaultLoadPlanner())
    assert torch.equal(tied, shared)


def test_the_weights_load_when_other_components_cannot_be_read(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=ShardWriter(tmp_path / "a"), planner=BalancedSavePlanner())
    for file in (tmp_path / "a").glob("*.shard"):
        if not file.name.startswith("model-"):
            file.unlink()
            file.mkdir(mode=0)  # nobody can read it as a file, not even root
    found = {"model": zeros()["model"]}
    dcp.load(found, storage_reader=ShardReader(tmp_path / "a"), planner=ReshardLoadPlanner(keys=["model.*"]))
    assert torch.equal(found["model"]["weight"], state()["model"]["weight"])


@pytest.mark.slow
def test_async_save_in_a_process_works(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for step in (1, 2):
            future = dcp.async_save(
                state(),
                checkpoint_id=tmp_path / str(step),
                storage_writer=ShardWriter(),
                planner=BalancedSavePlanner(),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            assert isinstance(future, Future)
            assert isinstance(future.result(), Metadata)
    finally:
        dist.destroy_process_group()
    found = zeros()
    dcp.load(found, storage_reader=ShardReader(tmp_path / "2"), planner=ReshardLoadPlanner())
    assert_is_state(found)
