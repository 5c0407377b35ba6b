"""Real loaders with workers that fetch ahead: only what training got counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from dcp_engine.data import ResumableLoader, ResumableSampler, ResumableStream, StreamSource, read_lines, sample_generator
from dcp_engine.data.order import Order
from dcp_engine.errors import InvalidOptionError, UnsupportedModeError, UsageError

# Machines with fewer cores than workers hear of it.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning")


class Squares(Dataset[torch.Tensor]):
    """Sample i is [i, i squared, a number of its own in epoch 0]."""

    def __len__(self) -> int:
        return 101

    def __getitem__(self, index: int) -> torch.Tensor:
        draw = torch.rand((), dtype=torch.float64, generator=sample_generator(9, 0, index).torch)
        return torch.stack([torch.tensor(float(index)).double(), torch.tensor(float(index * index)).double(), draw])


def make(rank: int, world_size: int, **options: Any) -> ResumableLoader:
    sampler = ResumableSampler(Squares(), batch_size=4, seed=3, rank=rank, world_size=world_size)
    return ResumableLoader(DataLoader(Squares(), batch_sampler=sampler, **options))


def epoch_of(number: int) -> list[int]:
    return [int(i) for i in Order(101, seed=3, epoch=number).between(0, 101)]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "prefetch_factor": 4}, {"num_workers": 2, "persistent_workers": True}])
def test_position_is_what_training_got_whatever_was_fetched(options: dict[str, Any]) -> None:
    loader = make(0, 1, **options)
    iterator = iter(loader)
    got = [next(iterator) for _ in range(5)]
    state = loader.state_dict()
    assert (state["offset"], state["samples_consumed"]) == (20, 20)
    assert torch.cat(got)[:, 0].tolist() == epoch_of(0)[:20] == state["last_ids"]
    resumed = make(0, 1, **options)
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert torch.cat(rest)[:, 0].tolist() == epoch_of(0)[20:]
    assert torch.equal(torch.cat(rest), torch.cat(list(iterator))), "augmented otherwise"
    assert resumed.state_dict() == loader.state_dict()
    assert torch.cat(list(resumed))[:, 0].tolist() == epoch_of(1)


def test_4_to_2_ranks_in_the_middle_of_an_epoch_with_workers() -> None:
    four = [make(rank, 4, num_workers=1) for rank in range(4)]
    iterators = [iter(loader) for loader in four]
    taken = [sample for _ in range(3) for iterator in iterators for sample in next(iterator)[:, 0].tolist()]
    two = [make(rank, 2) for rank in range(2)]
    for loader in two:
        loader.load_state_dict(four[3].state_dict())
    for parts in zip(*two, strict=True):
        taken += [sample for part in parts for sample in part[:, 0].tolist()]
    assert taken == epoch_of(0)
    assert [loader.source.epoch for loader in two if isinstance(loader.source, ResumableSampler)] == [1, 1]


def test_loop_over_epochs_resumes_after_the_last_batch_without_training_it_again() -> None:
    loader = make(0, 1)
    for number, _ in enumerate(loader):
        if number == len(loader) - 1:
            state = loader.state_dict()
    resumed = make(0, 1)
    resumed.load_state_dict(state)
    assert list(resumed) == []
    assert torch.cat(list(resumed))[:, 0].tolist() == epoch_of(1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterating_draws_nothing_from_training(num_workers: int) -> None:
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    iterator = iter(make(0, 1, num_workers=num_workers))
    next(iterator)
    assert torch.equal(torch.rand(4), expected)
    generator = torch.Generator().manual_seed(4)
    before = generator.get_state()
    next(iter(make(0, 1, num_workers=num_workers, generator=generator)))
    assert torch.equal(generator.get_state(), before)


class Failing(Squares):
    """Fails once."""

    failures = 1

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.failures:
            self.failures -= 1
            raise OSError("the network is away")
        return super().__getitem__(index)


def test_loader_that_failed_before_the_first_batch_can_be_iterated_again() -> None:
    sampler = ResumableSampler(3, batch_size=4, rank=0, world_size=1)
    loader = ResumableLoader(DataLoader(Failing(), batch_sampler=sampler))
    with pytest.raises(OSError, match="network"):
        list(loader)
    assert sampler.offset == 0
    assert sorted(torch.cat(list(loader))[:, 0].tolist()) == [0, 1, 2]


def test_broken_off_iteration_goes_on_from_there() -> None:
    loader = make(0, 1, num_workers=1)
    taken = [next(iter(loader))[:, 0].tolist() for _ in range(3)]
    assert taken == [epoch_of(0)[:4], epoch_of(0)[4:8], epoch_of(0)[8:12]]


class Whole(Squares):
    """Takes a list of indices at once."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.stack([super(Whole, self).__getitem__(i) for i in index])


def test_data_sets_that_take_whole_batches_are_read_without_a_batch_sampler() -> None:
    sampler = ResumableSampler(101, batch_size=4, seed=3, rank=0, world_size=1)
    loader = ResumableLoader(DataLoader(Whole(), sampler=sampler, batch_size=None))
    assert torch.cat(list(loader))[:, 0].tolist() == epoch_of(0)
    with pytest.raises(InvalidOptionError, match="no position to count in"):
        ResumableLoader(DataLoader(Squares(), sampler=sampler, batch_size=4))


def test_two_iterations_at_once_and_states_loaded_meanwhile_are_refused() -> None:
    loader = make(0, 1)
    one, other = iter(loader), iter(loader)
    next(one)
    with pytest.raises(UsageError, match="the position was changed while the loader was iterated"):
        next(other)
        next(one)
    loader = make(0, 1)
    start, iterator = loader.state_dict(), iter(loader)
    next(iterator)
    loader.load_state_dict(start)
    with pytest.raises(UsageError, match="expected offset 4 of epoch 0; found offset 0 of epoch 0"):
        next(iterator)


def test_loader_without_a_position_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match=r"batch_sampler=ResumableSampler\(\.\.\.\)"):
        ResumableLoader(DataLoader(Squares(), batch_size=4))
    sampler = ResumableSampler(Squares(), batch_size=4, rank=0, world_size=1)
    with pytest.raises(UnsupportedModeError, match="out of order"):
        ResumableLoader(DataLoader(Squares(), batch_sampler=sampler, num_workers=1, in_order=False))


def numbers(shard: str, offset: int) -> Any:
    first = 100 * int(shard)
    for i in range(offset, 17):
        yield first + i, i + 1


def stream(num_workers: int, **options: Any) -> ResumableStream:
    source = StreamSource(shards=[str(i) for i in range(12)], read=numbers)
    return ResumableStream(
        {"numbers": source}, **{"seed": 1, "rank": 0, "world_size": 1, "num_workers": num_workers, "num_passes": 1, **options}
    )


def over(source: ResumableStream, num_workers: int) -> ResumableLoader:
    return ResumableLoader(DataLoader(source, batch_size=5, num_workers=num_workers, collate_fn=source.collate()))


ALL = sorted(100 * shard + i for shard in range(12) for i in range(17))


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("num_batches", [1, 8, 20])
def test_stream_resumes_batch_for_batch_with_workers(num_workers: int, num_batches: int) -> None:
    loader = over(stream(num_workers), num_workers)
    iterator = iter(loader)
    taken = [next(iterator).tolist() for _ in range(num_batches)]
    state = loader.state_dict()
    assert loader.source.samples_consumed == 5 * num_batches
    resumed = over(stream(num_workers), num_workers)
    resumed.load_state_dict(state)
    rest = [batch.tolist() for batch in resumed]
    assert sorted(sample for batch in taken + rest for sample in batch) == ALL
    straight = [batch.tolist() for batch in iterator]
    whole = sum(len(batch) == 5 for batch in straight)
    assert rest[: whole // 2] == straight[: whole // 2], "order until the first worker runs out"
    assert sorted(rest) == sorted(straight)


def test_stream_goes_on_with_other_numbers_of_workers() -> None:
    loader = over(stream(3), 3)
    iterator = iter(loader)
    taken = [next(iterator).tolist() for _ in range(7)]
    resumed = over(stream(0), 0)
    resumed.load_state_dict(loader.state_dict())
    taken += [batch.tolist() for batch in resumed]
    assert sorted(sample for batch in taken for sample in batch) == ALL


def test_stream_is_refused_where_its_position_would_be_unknown() -> None:
    source = stream(0)
    with pytest.raises(UsageError, match=r"collate_fn=stream.collate\(your_collate_fn\)"):
        next(iter(ResumableLoader(DataLoader(source, batch_size=5))))
    with pytest.raises(UsageError, match="another number of workers"):
        next(iter(over(stream(2), 0)))
    with pytest.raises(UsageError, match="another number of workers"):
        next(iter(over(stream(2), 1)))
    source = stream(1)
    with pytest.raises(UnsupportedModeError, match="persistent"):
        ResumableLoader(DataLoader(source, num_workers=1, persistent_workers=True, collate_fn=source.collate()))
    with pytest.raises(TypeError, match="no length"):
        len(over(stream(0), 0))


def test_files_of_lines_are_read_on_from_their_byte(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"".join(f"{name} {i}".encode() + b"\r\n"[i % 2 :] for i in range(6)))
    source = StreamSource(shards=[str(tmp_path / "a"), str(tmp_path / "b")], read=read_lines)
    first = ResumableStream({"lines": source}, rank=0, world_size=1, num_passes=1, shuffle=False)
    lines = iter(first)
    assert [next(lines) for _ in range(8)] == [b"a 0", b"a 1", b"a 2", b"a 3", b"a 4", b"a 5", b"b 0", b"b 1"]
    second = ResumableStream({"lines": source}, rank=0, world_size=1, num_passes=1, shuffle=False)
    second.load_state_dict(first.state_dict())
    assert first.state_dict()["lanes"][0][0][:3] == [0, 1, 9]
    assert list(second) == [b"b 2", b"b 3", b"b 4", b"b 5"]
