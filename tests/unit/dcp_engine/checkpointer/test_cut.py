"""Facts about one step: where they come from, and which of them contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dcp_engine import Counters, PerRank, ResumableLoader, ResumableSampler, TrainState
from dcp_engine.checkpointer.cut import Fact, disagreements_by_fact, facts_of, idle_data, local_disagreements
from dcp_engine.data import ResumableStream, StreamSource


def trained(num_steps: int, **parts: Any) -> TrainState:
    """Linear model, Adam, a scheduler, and a sampler of 40 samples in batches of 4 on one rank."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    sampler = ResumableSampler(40, batch_size=4, seed=7)
    counters = Counters()
    for _ in range(num_steps):
        sampler.consumed()
        model(torch.ones(4, 3)).sum().backward()
        counters.micro_batch(samples=4)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counters.update()
    return TrainState(model, optimizer, **{"schedulers": scheduler, "data": sampler, "counters": counters, **parts})


AGREED: Mapping[str, Fact] = {
    "step": 6,
    "progress.step": 6,
    "progress.updates_applied": 5,
    "progress.micro_step": 0,
    "progress.epoch": 1,
    "progress.batch_in_epoch": 2,
    "progress.samples": 48,
    "progress.tokens": 0,
    "progress.grads_stepped": 0,
    "optimizer": 5,
    "scheduler": 5,
    "data.samples_consumed": 48,
    "data.global_batch": 8,
    "data.world_size": 2,
}


def test_facts_say_where_each_part_stands() -> None:
    facts = facts_of(trained(3), 3)
    assert facts.pop("data.next_batch_hash") == _at(12).next_batch_hash()
    assert facts == {
        "step": 3,
        "progress.step": 3,
        "progress.updates_applied": 3,
        "progress.micro_step": 0,
        "progress.epoch": 0,
        "progress.batch_in_epoch": 3,
        "progress.samples": 12,
        "progress.tokens": 0,
        "progress.grads_stepped": 0,
        "optimizer": 3,
        "scheduler": 3,
        "data.epoch": 0,
        "data.offset": 12,
        "data.samples_consumed": 12,
        "data.global_batch": 4,
        "data.world_size": 1,
    }


def _at(offset: int) -> ResumableSampler:
    sampler = ResumableSampler(40, batch_size=4, seed=7)
    sampler.consumed(offset // 4)
    return sampler


def test_facts_of_several_parts_bear_their_labels() -> None:
    models = {"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers.values()]
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    loader = ResumableLoader(DataLoader([0, 1, 2, 3], batch_sampler=ResumableSampler(4, batch_size=2)))
    facts = facts_of(TrainState(models, optimizers, schedulers=schedulers, scaler=scaler, data={"train": loader}), 0)
    assert {name: fact for name, fact in facts.items() if name.partition(".")[0] in ("optimizer", "scheduler", "scaler")} == {
        "scheduler.0": 0,
        "scheduler.1": 0,
        "scaler": 512.0,
    }
    assert facts["data.train.global_batch"] == 2


def test_what_ranks_hold_apart_is_no_fact() -> None:
    facts = facts_of(trained(1, data=PerRank(ResumableSampler(40, batch_size=4))), 1)
    assert not [name for name in facts if name.startswith("data")]


def test_unknown_state_has_its_step_alone() -> None:
    assert facts_of(None, 9) == {"step": 9}


def test_optimizer_stands_where_the_parameter_stands_that_was_trained_longest() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for with_bias in (True, False, False):
        model(torch.ones(1, 2)).sum().backward()
        if not with_bias:
            model.bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
    assert facts_of(TrainState(model, optimizer), 0)["optimizer"] == 3


@pytest.mark.parametrize("step", [float("nan"), 1.5, "three", None])
def test_slot_that_is_no_count_is_no_fact(step: object) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"step": step}
    assert "optimizer" not in facts_of(TrainState(model, optimizer), 0)


def test_count_in_the_groups_is_taken_where_parameters_have_none() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["step"] = 4
    assert facts_of(TrainState(model, optimizer), 0)["optimizer"] == 4


def test_state_of_one_step_agrees() -> None:
    assert disagreements_by_fact(AGREED) == {}
    assert disagreements_by_fact(facts_of(trained(5), 5)) == {}


def test_counters_that_were_never_moved_are_held_against_nothing() -> None:
    assert disagreements_by_fact({**AGREED, "progress.step": 0, "progress.epoch": 0}) == {}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"step": 7}, "the checkpoint is saved as step 7, and the counters are at step 6"),
        ({"progress.step": 7}, "the checkpoint is saved as step 6, and the counters are at step 7"),
        ({"optimizer": 6}, "the optimizer has taken 6 steps, and the counters say 5 (applied)"),
        (
            {"optimizer": 4},
            "the optimizer has taken 4 steps, and the counters say 5 (applied); an update that a scaler skipped is counted by "
            "update(applied=False)",
        ),
        ({"optimizer.critic": 6}, "optimizer 'critic' has taken 6 steps, and the counters say 5 (applied)"),
        ({"scheduler": 4}, "the scheduler has taken 4 steps, and the counters say 5 (applied) or 6 (attempted) or 1 (epoch)"),
        ({"scheduler.warm": 7}, "scheduler 'warm' has taken 7 steps, and the counters say 5 (applied) or 6 (attempted) or 1 (epoch)"),
        ({"data.samples_consumed": 56}, "data has handed out 56 samples, and the counters say 48: a batch of 8 apart"),
        ({"data.samples_consumed": 40}, "data has handed out 40 samples, and the counters say 48: a batch of 8 apart"),
        ({"progress.samples": 56}, "data has handed out 48 samples, and the counters say 56: a batch of 8 apart"),
    ],
)
def test_each_part_that_is_off_by_one_is_named(changed: dict[str, Fact], text: str) -> None:
    (name,) = changed
    disagreement = {"step": "progress.step", "progress.samples": "data.samples_consumed"}.get(name, name)
    found = disagreements_by_fact({**AGREED, **changed})
    assert found.pop(disagreement) == text
    # The step is what all others are held against.
    assert set(found) <= ({"optimizer", "scheduler"} if name == "progress.step" else set())


def test_texts_are_those_of_all_facts() -> None:
    torn = {**AGREED, "optimizer": 6, "scheduler.warm": 7}
    assert local_disagreements(torn) == tuple(disagreements_by_fact(torn).values())
    assert list(disagreements_by_fact(torn)) == ["optimizer", "scheduler.warm"]


def test_what_a_step_stands_for_can_be_said() -> None:
    assert disagreements_by_fact({**AGREED, "scheduler": 6}, scheduler_counts="attempted") == {}
    assert disagreements_by_fact({**AGREED, "scheduler": 6}, scheduler_counts="applied") == {
        "scheduler": "the scheduler has taken 6 steps, and the counters say 5 (applied)"
    }
    assert disagreements_by_fact({**AGREED, "optimizer": 30}, optimizer_counts=None) == {}


@pytest.mark.parametrize("samples", [0, 24, 47, 50, 1000])
def test_samples_that_are_counted_otherwise_are_not_held_against_the_position(samples: int) -> None:
    """Not at all, each rank its own, or something else altogether."""
    assert disagreements_by_fact({**AGREED, "progress.samples": samples}) == {}


@pytest.mark.parametrize("samples", [20, 28])
def test_batch_is_missed_where_each_rank_counts_its_own(samples: int) -> None:
    assert list(disagreements_by_fact({**AGREED, "progress.samples": samples})) == ["data.samples_consumed"]


def test_several_positions_are_held_against_no_single_count() -> None:
    second = {f"data.second.{name}": AGREED[f"data.{name}"] for name in ("global_batch", "world_size")}
    assert disagreements_by_fact({**AGREED, **second, "data.second.samples_consumed": 0, "progress.samples": 8}) == {}


def test_update_that_is_done_and_not_counted_yet_belongs_to_the_cycle() -> None:
    stepped: dict[str, Fact] = {**AGREED, "progress.micro_step": 2, "progress.grads_stepped": 1}
    assert disagreements_by_fact({**stepped, "optimizer": 6, "scheduler": 6}) == {}
    assert disagreements_by_fact({**stepped, "optimizer": 6, "scheduler": 5}) == {}
    assert len(disagreements_by_fact({**stepped, "optimizer": 7, "scheduler": 8})) == 2
    cycle = {**stepped, "progress.grads_stepped": 0}
    assert len(disagreements_by_fact({**cycle, "optimizer": 6})) == 1


def test_live_state_that_is_torn_is_named() -> None:
    state = trained(4)
    optimizer = state.parts("optimizer")[""]
    optimizer.step(lambda: state.parts("model")["0"](torch.ones(1, 3)).sum())
    assert disagreements_by_fact(facts_of(state, 4)) == {}  # no gradient, no step
    state.parts("model")["0"](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert disagreements_by_fact(facts_of(state, 4)) == {"optimizer": "the optimizer has taken 5 steps, and the counters say 4 (applied)"}
    state.parts("data")[""].consumed()
    assert disagreements_by_fact(facts_of(state, 4), optimizer_counts=None) == {
        "data.samples_consumed": "data has handed out 20 samples, and the counters say 16: a batch of 4 apart"
    }


def read_one_shard(shard: str, offset: int) -> Iterator[tuple[int, int]]:
    yield from ((number, number + 1) for number in range(offset, 40))


def stream_of(num_taken: int) -> ResumableStream:
    stream = ResumableStream({"text": StreamSource(shards=["a"], read=read_one_shard)}, rank=0, world_size=1)
    for _ in zip(range(num_taken), stream, strict=False):
        pass
    return stream


def counted(data: Any, **counts: int) -> TrainState:
    return TrainState(data=data, counters=Counters(**counts))


@pytest.mark.parametrize(
    ("counts", "moved"),
    [
        ({"samples": 12, "step": 3}, "12 samples, 3 updates"),
        ({"batch_in_epoch": 2}, "2 micro-batches of this epoch"),
        ({"step": 3}, "3 updates"),
    ],
)
def test_position_that_never_moved_while_the_counters_did_is_told(counts: dict[str, int], moved: str) -> None:
    sampler = ResumableSampler(40, batch_size=4)
    told = f"has handed out no sample, and the counters say that there were {moved}: iterate ResumableLoader(loader), or call consumed()"
    told += " after each batch"
    loader = ResumableLoader(DataLoader(list(range(40)), batch_sampler=sampler))
    for data in (sampler, loader, PerRank(sampler), PerRank(stream_of(0))):
        assert idle_data(counted(data, **counts)) == (f"data {told}",)
    assert idle_data(counted({"train": sampler, "other": stream_of(0)}, **counts)) == (f"data.train {told}", f"data.other {told}")


def test_position_that_moved_is_held_against_nothing() -> None:
    still, moved = ResumableSampler(40, batch_size=4), ResumableSampler(40, batch_size=4)
    moved.consumed()
    for data in (moved, PerRank(stream_of(1)), {"train": moved, "validation": still}):
        assert idle_data(counted(data, samples=8, step=2)) == ()
    assert idle_data(counted(still)) == ()
    assert idle_data(counted(PerRank([0]), samples=8, step=2)) == ()
    assert idle_data(TrainState(counters=Counters(step=2))) == ()
