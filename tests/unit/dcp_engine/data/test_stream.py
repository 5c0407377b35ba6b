"""Streams: every sample once on any numbers of ranks, ratios that hold, and a repeat window that is never too small."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_engine.data import ResumableStream, StreamSource
from dcp_engine.errors import DataOrderError, InvalidOptionError, UsageError
from dcp_engine.objects import decode_object, encode_object


class Shards:
    """A reader of shards with known lengths: sample (source, shard, i), offsets that move every ``block`` samples."""

    def __init__(self, name: str, lengths: list[int], block: int = 1) -> None:
        self.name, self.lengths, self.block = name, lengths, block

    def __call__(self, shard: str, offset: int) -> Iterator[tuple[Any, int]]:
        for i in range(offset, self.lengths[int(shard)]):
            yield (self.name, int(shard), i), (i + 1) // self.block * self.block

    def source(self, **options: Any) -> StreamSource:
        return StreamSource(shards=[str(i) for i in range(len(self.lengths))], read=self, **options)

    def samples(self) -> list[tuple[str, int, int]]:
        return [(self.name, shard, i) for shard, length in enumerate(self.lengths) for i in range(length)]


def ranks(sources: dict[str, StreamSource], world_size: int, state: dict[str, Any] | None = None, **options: Any) -> list[ResumableStream]:
    streams = [ResumableStream(sources, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for stream in streams:
        if state is not None:
            stream.load_state_dict(state)
    return streams


def merged(streams: list[ResumableStream]) -> dict[str, Any]:
    return ResumableStream.merge([stream.state_dict() for stream in reversed(streams)])


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=4, max_size=12),
    block=st.integers(1, 7),
    legs=st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 9), min_size=4, max_size=4)), max_size=5),
    num_passes=st.integers(1, 3),
)
def test_any_chain_of_world_sizes_reads_each_sample_once_a_pass(
    lengths: list[int], block: int, legs: list[tuple[int, list[int]]], num_passes: int
) -> None:
    """Ranks need not be in step, and readers need not be able to begin anywhere."""
    shards = Shards("a", lengths, block)
    taken: Counter[Any] = Counter()
    state = None
    for world_size, steps in [*legs, (2, [10**6] * 4)]:
        streams = ranks({"a": shards.source()}, world_size, state, num_passes=num_passes)
        for stream, num_samples in zip(streams, steps, strict=False):
            taken.update(sample for sample in islice(stream, num_samples))
        state = merged(streams)
        assert state["samples_before"] == sum(taken.values())
        assert state["repeat_window"] == state["largest_before"] == 0
    assert taken == Counter(shards.samples() * num_passes)


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 5), min_size=2, max_size=6), block=st.integers(1, 7), num_samples=st.integers(0, 60))
def test_same_ranks_resume_sample_for_sample(lengths: list[int], block: int, num_samples: int) -> None:
    sources = {"a": Shards("a", lengths, block).source(weight=3), "b": Shards("b", [7, 2], 2).source()}
    for rank in range(2):
        straight = ResumableStream(sources, rank=rank, world_size=2)
        iterator = iter(straight)
        for _ in range(num_samples):
            next(iterator)
        state = decode_object(encode_object(straight.state_dict(), key="data"), key="data")
        resumed = ResumableStream(sources, rank=rank, world_size=2)
        resumed.load_state_dict(state)  # type: ignore[arg-type]
        again = iter(resumed)
        assert [next(again) for _ in range(30)] == [next(iterator) for _ in range(30)]
        assert resumed.state_dict() == straight.state_dict()


@given(weights=st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_ratios_hold_in_every_prefix(weights: list[int]) -> None:
    sources = {str(i): Shards(str(i), [3]).source(weight=weight) for i, weight in enumerate(weights)}
    counts = dict.fromkeys(sources, 0)
    for number, sample in enumerate(islice(ResumableStream(sources, rank=0, world_size=1), 200), 1):
        counts[sample[0]] += 1
        for name, weight in zip(sources, weights, strict=True):
            assert abs(counts[name] - number * weight / sum(weights)) < len(weights)


def test_mixture_of_3_to_1_is_3_of_4_also_over_a_resume() -> None:
    sources = {"a": Shards("a", [50, 50]).source(weight=0.75), "b": Shards("b", [50, 50]).source(weight=0.25)}
    stream = ResumableStream(sources, rank=0, world_size=1)
    names = [sample[0] for sample in islice(stream, 41)]
    resumed = ResumableStream(sources, rank=0, world_size=1)
    resumed.load_state_dict(stream.state_dict())
    names += [sample[0] for sample in islice(resumed, 39)]
    assert [Counter(names[i : i + 4]) for i in range(0, 80, 4)] == [Counter(a=3, b=1)] * 20


def test_weights_can_be_changed_on_the_way() -> None:
    sources = {"a": Shards("a", [50]).source(), "b": Shards("b", [50]).source()}
    stream = ResumableStream(sources, rank=0, world_size=1)
    assert Counter(sample[0] for sample in islice(stream, 20)) == {"a": 10, "b": 10}
    stream.set_weights({"a": 1, "b": 9})
    assert Counter(sample[0] for sample in islice(stream, 20)) == {"a": 2, "b": 18}
    assert stream.samples_consumed == 40
    for weights, found in (({"a": 1}, r"\['a'\]"), ({}, r"\[\]"), (3, "3"), (None, "None"), (["a", "b"], r"\['a', 'b'\]"), ("ab", "'ab'")):
        with pytest.raises(InvalidOptionError, match=rf"expected a weight for each of \['a', 'b'\]; found {found}"):
            stream.set_weights(weights)  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="a weight is out of range"):
        stream.set_weights({"a": 1, "b": float("nan")})


@pytest.mark.parametrize(("num_samples", "window", "largest"), [(0, 0, 0), (4, 0, 3), (6, 2, 3), (11, 3, 3)])
def test_repeat_window_is_what_comes_twice(num_samples: int, window: int, largest: int) -> None:
    """Offsets move every 4 samples, and what lies between cannot be told apart when it is read again."""
    sources = {"live": Shards("live", [1000], 4).source(repeatable=False)}
    stream = ResumableStream(sources, rank=0, world_size=1)
    taken = list(islice(stream, num_samples))
    state = stream.state_dict()
    assert (stream.repeat_window, state["repeat_window"], stream.largest_repeat_window) == (window, window, largest)
    for loaded in (state, ResumableStream.merge([state])):
        resumed = ResumableStream(sources, rank=0, world_size=1)
        resumed.load_state_dict(loaded)
        assert resumed.largest_repeat_window == largest
        again = list(islice(resumed, 20))
        assert len(set(taken) & set(again)) == window
        assert taken[num_samples - window :] + again[window:] == [
            ("live", 0, i) for i in range(num_samples - window, num_samples + 20 - window)
        ]


def test_reader_that_cannot_seek_reports_all_it_read_of_the_shard() -> None:
    sources = {"live": Shards("live", [30, 30], 10**6).source(repeatable=False)}
    stream = ResumableStream(sources, rank=0, world_size=1)
    for sample in islice(stream, 45):
        assert sample[2] + 1 == stream.repeat_window
    assert (stream.repeat_window, stream.largest_repeat_window) == (15, 30)


def test_two_iterations_at_once_and_states_loaded_meanwhile_are_refused() -> None:
    stream = ResumableStream({"a": Shards("a", [9]).source()}, rank=0, world_size=1)
    state, one = stream.state_dict(), iter(stream)
    assert next(one) == ("a", 0, 0)
    other = iter(stream)
    assert next(other) == ("a", 0, 1)
    with pytest.raises(UsageError, match="one iteration at a time"):
        next(one)
    for loaded in (state, ResumableStream.merge([state])):
        iterator = iter(stream)
        stream.load_state_dict(loaded)
        with pytest.raises(UsageError, match="load states before iterating"):
            next(iterator)
        assert next(iter(stream)) == ("a", 0, 0)


def test_shard_that_became_shorter_is_named() -> None:
    shards = Shards("a", [10], 10**6)
    stream = ResumableStream({"a": shards.source()}, rank=0, world_size=1)
    for _ in islice(stream, 6):
        pass
    shards.lengths[0] = 4
    resumed = ResumableStream({"a": shards.source()}, rank=0, world_size=1)
    resumed.load_state_dict(stream.state_dict())
    with pytest.raises(DataOrderError, match=r"file '0'.*expected at least 6 samples from offset 0; found 4"):
        next(iter(resumed))


def test_source_without_samples_is_an_error_not_a_hang() -> None:
    with pytest.raises(DataOrderError, match="the shards of source 'a' that lane 0 reads hold no samples"):
        next(iter(ResumableStream({"a": Shards("a", [0, 0]).source()}, rank=0, world_size=1)))


def test_reader_whose_offset_is_none_is_refused() -> None:
    source = StreamSource(shards=["x"], read=lambda shard, offset: [(1, -1)])
    with pytest.raises(UsageError, match="expected an int of at least 0; found -1"):
        next(iter(ResumableStream({"a": source}, rank=0, world_size=1)))


SOURCE = Shards("a", [3, 3, 3]).source()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sources": {}}, "there are no valid sources"),
        ({"sources": {"a": ["x"]}}, "there are no valid sources"),
        ({"world_size": 0}, "world_size is out of range"),
        ({"rank": 4, "world_size": 3}, "rank is out of range"),
        (
            {"world_size": 4},
            "source 'a' has fewer shards than there are ranks and workers to read them; expected at least 4 x 1 shards; found 3",
        ),
        ({"num_workers": -1}, "num_workers is out of range"),
        ({"num_workers": 4}, "source 'a' has fewer shards"),
        ({"num_passes": 0}, "num_passes is out of range"),
        ({"seed": -1}, "seed is out of range"),
        ({"shuffle": None}, "shuffle is no bool"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        ResumableStream(**{"sources": {"a": SOURCE}, "rank": 0, "world_size": 1, **options})
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    "options", [{"shards": []}, {"shards": "abc"}, {"shards": ["a", "a"]}, {"shards": [1]}, {"weight": 0}, {"weight": True}, {"read": None}]
)
def test_bad_sources_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        StreamSource(**{"shards": ["a"], "read": print, **options})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 3}, "seed differs; expected seed 3"),
        ({"names": ["b"]}, "names differs"),
        ({"shard_hashes": ["0"]}, "shard_hashes differs"),
        ({"weights": [2.0]}, "weights differs"),
        ({"num_passes": 2}, "num_passes differs"),
        ({"turn": -1}, "a number is negative"),
        ({"lanes": [[[0, 0, -1, 0, 0, 0]]]}, "a number is negative"),
        ({"lanes": []}, "0 lanes for 0 workers"),
        ({"dealt": [[0, [[0, [7], []]]]]}, "it names shards that there are not"),
        ({"dealt": 3}, "this is no state of a stream"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"rank": 1}, "this is the state of one rank among others; expected rank 1 of 2 with 0 workers; found rank 0 of 2 with 0 workers"),
        ({"world_size": 3}, "ResumableStream.merge(states)"),
    ],
)
def test_bad_states_are_refused_and_change_nothing(change: dict[str, Any], says: str) -> None:
    stream = ranks({"a": SOURCE}, 2)[0]
    before = copy.deepcopy(stream.state_dict())
    with pytest.raises(DataOrderError) as caught:
        stream.load_state_dict({**before, **change})
    assert says in str(caught.value)
    assert stream.state_dict() == before


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, "this is no state of a stream; expected what state_dict() of a ResumableStream returned; found a dict without seed, shuffle"),
        ({"loader": ResumableStream({"a": SOURCE}, rank=0, world_size=1).state_dict()}, "load the state of the stream itself"),
        (3, "a stream's state is a dict; expected what state_dict() returned; found int"),
        (None, "a stream's state is a dict"),
    ],
)
def test_what_is_no_state_is_said_to_be_none(state: Any, says: str) -> None:
    stream = ranks({"a": SOURCE}, 2)[0]
    with pytest.raises(DataOrderError) as caught:
        stream.load_state_dict(state)
    assert says in str(caught.value)


def test_part_of_a_state_is_named_by_what_it_lacks() -> None:
    stream = ranks({"a": SOURCE}, 2)[0]
    state = stream.state_dict()
    del state["lanes"]
    with pytest.raises(DataOrderError, match="found a dict without lanes"):
        stream.load_state_dict(state)


@pytest.mark.parametrize("sources", [3, None, [SOURCE], {}, {"a": 3}, {3: SOURCE}, "a"])
def test_what_are_no_sources_is_refused(sources: Any) -> None:
    with pytest.raises(InvalidOptionError, match="there are no valid sources; expected a dict of StreamSource by name, at least one"):
        ResumableStream(sources)


@pytest.mark.parametrize("shards", [3, None, "abc", b"abc", [], ["a", "a"], [["a"]], [3]])
def test_what_are_no_shards_is_refused(shards: Any) -> None:
    with pytest.raises(InvalidOptionError, match="the shards of a source are not valid"):
        StreamSource(shards=shards, read=lambda shard, offset: [])


def test_what_is_no_batch_or_collate_function_is_refused() -> None:
    stream = ranks({"a": SOURCE}, 1)[0]
    with pytest.raises(InvalidOptionError, match="this is no batch of the stream"):
        stream.consumed(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="collate_fn is not callable"):
        stream.collate(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("states", [3, None, {}, "ab", [3], [None]])
def test_what_are_no_states_cannot_be_merged(states: Any) -> None:
    with pytest.raises(DataOrderError, match="there is no state of a stream to merge"):
        ResumableStream.merge(states)


def test_merge_wants_each_rank_once() -> None:
    streams = ranks({"a": SOURCE}, 3)
    states = [stream.state_dict() for stream in streams]
    for wrong in ([states[0], states[2]], [states[0], states[0], states[1]], []):
        with pytest.raises(DataOrderError):
            ResumableStream.merge(wrong)
    with pytest.raises(DataOrderError, match="one dealing out"):
        ResumableStream.merge([*states[:2], {**states[2], "dealt": [[1, []]]}])
