"""What a rank holds of a tensor, without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_engine.errors import UnsupportedTensorError
from dcp_engine.planners.local_shards import describe, is_tensor_like


def test_plain_tensors_are_one_box_on_their_own_memory() -> None:
    value = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    described = describe("w", value)
    assert described is not None
    (shard,) = described.shards
    assert (described.kind, described.global_shape, described.may_be_replicated) == ("plain", (2, 3), True)
    assert (shard.offsets, shard.sizes) == ((0, 0), (2, 3))
    assert shard.tensor.data_ptr() == value.data_ptr()
    assert not shard.tensor.requires_grad


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (3, 0)])
def test_tensors_without_elements_or_dimensions_are_one_box(shape: tuple[int, ...]) -> None:
    described = describe("w", torch.zeros(shape))
    assert described is not None
    assert [(shard.offsets, shard.sizes, tuple(shard.tensor.shape)) for shard in described.shards] == [((0,) * len(shape), shape, shape)]


class Wrapper(torch.Tensor):
    """A tensor that intercepts operators and has no memory of its own."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2, 3), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


class Named(torch.Tensor):
    """A subclass with plain memory."""


class Duck(Wrapper):
    """Two boxes of a (4, 3) tensor, in DCP's duck protocol."""

    data_of = {(0, 0): torch.zeros(1, 3), (3, 0): torch.full((1, 3), 3.0)}

    def size(self, *args: Any) -> Any:
        return torch.Size((4, 3))

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        assert value is self
        return [
            WriteItem(
                MetadataIndex(fqn, offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offset), torch.Size((1, 3))), TensorProperties(torch.float32), torch.Size((4, 3))
                ),
            )
            for offset in self.data_of
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), torch.Size((1, 3))) for offset in self.data_of]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.data_of[tuple(index.offset)]  # type: ignore[index]


class Poison:
    """Reports a failure of its own, once DCP asks what there is to write."""

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        raise ConnectionError(f"staging of {fqn} failed")


@pytest.mark.parametrize("loading", [False, True])
def test_duck_protocol_gives_its_own_boxes(loading: bool) -> None:
    value = Duck()
    assert is_tensor_like(value)
    described = describe("w", value, loading=loading)
    assert described is not None
    assert (described.kind, described.global_shape, described.dtype) == ("duck", (4, 3), torch.float32)
    assert [(shard.offsets, shard.sizes, float(shard.tensor[0, 0])) for shard in described.shards] == [
        ((0, 0), (1, 3), 0),
        ((3, 0), (1, 3), 3),
    ]


def test_error_of_a_value_passes_unchanged() -> None:
    with pytest.raises(ConnectionError, match=r"staging of w failed"):
        describe("w", Poison())


def checkpointable(local: torch.Tensor, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(local, name, value)
    return local


def test_checkpointable_tensors_have_the_boxes_of_their_fields() -> None:
    local = torch.arange(10.0).reshape(5, 2)  # one row of padding
    value = checkpointable(
        local, global_shape=(8, 2), global_offsets=((0, 0), (6, 0)), local_offsets=((0, 0), (2, 0)), local_sizes=((2, 2), (2, 2))
    )
    described = describe("w", value)
    assert described is not None
    assert (described.kind, described.global_shape) == ("checkpointable", (8, 2))
    assert [(s.offsets, s.sizes, s.tensor.tolist()) for s in described.shards] == [
        ((0, 0), (2, 2), [[0, 1], [2, 3]]),
        ((6, 0), (2, 2), [[4, 5], [6, 7]]),
    ]
    assert described.shards[1].tensor.data_ptr() == local[2].data_ptr()


def test_checkpointable_rows_may_merge_leading_dimensions() -> None:
    value = checkpointable(
        torch.arange(12.0).reshape(6, 2),
        global_shape=(2, 4, 2),
        global_offsets=((1, 2, 0),),
        local_offsets=((2, 0),),
        local_sizes=((1, 2, 2),),
    )
    described = describe("w", value)
    assert described is not None
    assert described.shards[0].tensor.tolist() == [[[4, 5], [6, 7]]]


@pytest.mark.parametrize(
    "fields",
    [
        {"global_shape": (8, 2), "global_offsets": ((7, 0),), "local_offsets": ((0, 0),), "local_sizes": ((2, 2),)},
        {"global_shape": (8, 2), "global_offsets": ((0, 0),), "local_offsets": ((4, 0),), "local_sizes": ((2, 2),)},
        {"global_shape": (8, 2), "global_offsets": ((0, 0),), "local_offsets": (), "local_sizes": ((2, 2),)},
        {"global_shape": (8, 2), "global_offsets": ((0,),), "local_offsets": ((0, 0),), "local_sizes": ((2, 2),)},
    ],
)
def test_checkpointable_fields_that_contradict_each_other_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedTensorError) as caught:
        describe("w", checkpointable(torch.zeros(5, 2), **fields))
    assert caught.value.tensor == "w"


@pytest.mark.filterwarnings("ignore")  # torch is taking quantised tensors out
def test_quantised_tensors_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedTensorError, match="qint8"):
        describe("w", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2)


class LegacyShardedTensor(ShardedTensor):
    """As it is, but made without a process group."""

    def __new__(cls) -> Any:
        return torch.Tensor.__new__(cls)

    def __init__(self) -> None:
        pass

    def __del__(self) -> None:
        pass


def test_legacy_sharded_tensor_is_refused_with_the_remedy() -> None:
    with pytest.raises(UnsupportedTensorError, match="FSDP2"):
        describe("w", LegacyShardedTensor())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "jagged"),
        (lambda: torch.ones(2).to_mkldnn(), "mkldnn"),
        (lambda: torch.empty(2, device="meta"), "meta"),
        (lambda: nn.parameter.UninitializedParameter(), "not yet initialised"),
        (fake, "fake"),
        (Wrapper, "Wrapper"),
    ],
)
def test_what_has_no_bytes_is_refused_by_name(make: Any, named: str) -> None:
    with pytest.raises(UnsupportedTensorError) as caught:
        describe("w", make())
    assert named in str(caught.value)
    assert caught.value.tensor == "w"


def test_subclasses_with_plain_memory_are_taken_as_they_are() -> None:
    value = torch.arange(3.0).as_subclass(Named)
    described = describe("w", value)
    assert described is not None
    assert type(described.shards[0].tensor) is torch.Tensor
    assert described.shards[0].tensor.data_ptr() == value.data_ptr()


@pytest.mark.parametrize("loading", [False, True])
def test_meta_tensors_are_refused_as_sources_and_as_targets(loading: bool) -> None:
    with pytest.raises(UnsupportedTensorError, match="meta tensor"):
        describe("w", torch.empty(2, 3, device="meta"), loading=loading)


class HalfADuck:
    """Says what it holds, and nothing else."""

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        duck = Duck()
        return duck.__create_write_items__(fqn, duck)


@pytest.mark.parametrize(("loading", "named"), [(False, "__get_tensor_shard__"), (True, "__create_chunk_list__")])
def test_a_part_of_the_duck_protocol_is_refused_naming_the_rest(loading: bool, named: str) -> None:
    with pytest.raises(UnsupportedTensorError, match=f"no {named}") as caught:
        describe("w", HalfADuck(), loading=loading)
    assert caught.value.tensor == "w"


class AnswersAll(dict[str, int]):
    """A dict whose values are attributes, too: it has an answer for every name."""

    def __getattr__(self, name: str) -> int | None:
        return self.get(name)


def test_an_object_with_an_answer_for_every_name_is_no_tensor() -> None:
    assert not is_tensor_like(AnswersAll(a=1))


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(1, 6).expand(4, 6),
        torch.zeros(4, 1).expand(4, 6),
        torch.zeros(30).as_strided((4, 6), (2, 1)),
        torch.zeros(8).unfold(0, 4, 2),
    ],
)
def test_elements_that_share_memory_are_saved_and_never_loaded_into(target: torch.Tensor) -> None:
    assert describe("x", target) is not None
    with pytest.raises(UnsupportedTensorError, match="expand") as caught:
        describe("x", target, loading=True)
    assert caught.value.tensor == "x"


@given(data=st.data())
def test_views_whose_elements_have_memory_of_their_own_are_targets(data: st.DataObject) -> None:
    view = torch.zeros(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    for dim in range(view.ndim):
        begin = data.draw(st.integers(0, view.shape[dim] - 1))
        view = view[(slice(None),) * dim + (slice(begin, None, data.draw(st.integers(1, 3))),)]
    view = view.permute(data.draw(st.permutations(range(view.ndim))))
    described = describe("x", view, loading=True)
    assert described is not None
    assert described.global_shape == tuple(view.shape)
