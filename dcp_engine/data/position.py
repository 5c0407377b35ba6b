"""The recorded position of a sampler: what it holds, and whether it is one that this sampler can take. Pure.

Its windows are ids that were handed out before and ids that come after, so that a position that is wrong, by one batch, say, does not fit
them: the order has an inverse, which tells by how much it is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import numpy as np

from dcp_engine.data.batches import Layout
from dcp_engine.data.order import MAX_SEED, Ids, Order, hash_ids
from dcp_engine.errors import DataOrderError

__all__ = ["WINDOW_IDS", "SampleOrder", "SavedPosition", "check_continuation", "next_batch", "next_ids", "read_position"]

WINDOW_IDS = 1000
"""Ids that a checkpoint holds on each side of the position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """What decides the order of all epochs. A position means something in one such order alone.

    Attributes:
        order: name of the algorithm.
        num_samples: samples of the data set.
        seed: of the run.
        shuffle: whether epochs are shuffled.
    """

    order: str
    num_samples: int
    seed: int
    shuffle: bool

    def epoch(self, epoch: int) -> Order:
        """The order of one epoch."""
        return Order(self.num_samples, seed=self.seed, epoch=epoch, shuffle=self.shuffle)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPosition:
    """What a checkpoint holds of a sampler. Its fields are the keys of the state dict, next to those of ``SampleOrder`` and ``Layout``.

    Attributes:
        epoch: number of the epoch.
        offset: samples of it that training has behind it.
        samples_consumed: samples that training took in all epochs, on all ranks; a sample that a second rank got again counts once.
        next_batch_hash: ``hash_ids`` of the next global batch, on the ranks of the save.
        last_ids: what training took last, on all ranks, oldest first; at most ``WINDOW_IDS``.
        next_ids: what it takes next.
    """

    epoch: int
    offset: int
    samples_consumed: int
    next_batch_hash: str
    last_ids: list[int]
    next_ids: list[int]


def next_batch(order: SampleOrder, layout: Layout, epoch: int, offset: int) -> tuple[int, int, int]:
    """Where the next global batch lies: epoch, offset, and offset of its end. After the last of an epoch comes the first of the next."""
    size = layout.take(order.num_samples - offset)
    if size == 0:
        epoch, offset, size = epoch + 1, 0, layout.take(order.num_samples)
    return epoch, offset, offset + size


def next_ids(order: SampleOrder, layout: Layout, epoch: int, offset: int) -> Ids:
    """What is taken next, ``WINDOW_IDS`` at most: the rest of this epoch without what is left out, then the beginning of the next one."""
    stop = offset + min(layout.reach(order.num_samples - offset), WINDOW_IDS)
    here = order.epoch(epoch).between(offset, stop)
    there = order.epoch(epoch + 1).between(0, min(layout.reach(order.num_samples), WINDOW_IDS - here.size))
    return np.concatenate([here, there])


def read_position(state: Mapping[str, Any], order: SampleOrder) -> SavedPosition:
    """Reads a state dict, and checks that it is a position in this order.

    Raises:
        DataOrderError: it is not: a key is missing or no such value, the data set, seed or order is another one, or the position does not
            fit the ids that were recorded with it. Says which, and by how many batches.
    """
    if not isinstance(state, Mapping):
        raise DataOrderError("a sampler's state is a dict", expected="what state_dict() returned", found=type(state).__qualname__)
    for field in fields(order):
        ours, theirs = getattr(order, field.name), _get(state, field.name, type(getattr(order, field.name)))
        if ours != theirs:
            raise DataOrderError(
                f"the checkpoint's position is in another order of samples: {field.name} differs",
                expected=f"{field.name} {theirs!r}, as when it was saved",
                found=repr(ours),
                remedy="make the sampler as it was, or start with a fresh one on purpose",
            )
    layout = Layout(
        batch_size=_number(state, "batch_size", least=1),
        world_size=_number(state, "world_size", least=1),
        drop_last=_get(state, "drop_last", bool),
        pad=_get(state, "pad", bool),
    )
    position = SavedPosition(
        epoch=_number(state, "epoch", most=MAX_SEED - 1),
        offset=_number(state, "offset", most=order.num_samples),
        samples_consumed=_number(state, "samples_consumed"),
        next_batch_hash=_get(state, "next_batch_hash", str),
        last_ids=_ids(state, "last_ids", order.num_samples),
        next_ids=_ids(state, "next_ids", order.num_samples),
    )
    _check_windows(position, order, layout)
    return position


def _check_windows(position: SavedPosition, order: SampleOrder, layout: Layout) -> None:
    epoch, offset = position.epoch, position.offset
    if _fits(position, order, layout, epoch, offset):
        start_epoch, start, stop = next_batch(order, layout, epoch, offset)
        found = hash_ids(order.epoch(start_epoch).between(start, stop))
        if found == position.next_batch_hash:
            return
        raise DataOrderError(
            "the next batch is not the one that was recorded", expected=f"hash {position.next_batch_hash}", found=f"hash {found}"
        )
    place = f"offset {offset} of epoch {epoch}"
    true_place = _true_place(position, order, layout)
    if true_place is None:
        raise DataOrderError(
            "the ids that were recorded are not those around the position",
            expected=f"other ids at {place}",
            found=f"last {position.last_ids[-3:]}, next {position.next_ids[:3]}",
            remedy="take another checkpoint",
        )
    true_epoch, true_offset = true_place
    same_epoch = true_epoch == epoch
    where = f"{_distance(offset - true_offset, layout.global_size)} of" if same_epoch else "in another epoch than"
    raise DataOrderError(
        f"the position is {where} the ids that were recorded with it",
        expected=f"offset {true_offset} of epoch {true_epoch}",
        found=place,
        remedy="take another checkpoint, and find out what counted batches that training had not consumed, or did not count some",
    )


def _fits(position: SavedPosition, order: SampleOrder, layout: Layout, epoch: int, offset: int) -> bool:
    """Whether the recorded ids are those around this place. Ids of earlier epochs are not looked at."""
    behind: list[int] = order.epoch(epoch).between(max(offset - WINDOW_IDS, 0), offset).tolist()
    recorded = position.last_ids[len(position.last_ids) - len(behind) :] if len(behind) <= len(position.last_ids) else None
    ahead: list[int] = next_ids(order, layout, epoch, offset).tolist()
    return behind == recorded and ahead == position.next_ids


def _true_place(position: SavedPosition, order: SampleOrder, layout: Layout) -> tuple[int, int] | None:
    """The epoch and offset that the recorded ids belong to, if there is one in this epoch, the next or the one before."""
    for epoch in (position.epoch, position.epoch + 1, position.epoch - 1):
        if epoch >= 0:
            after = order.epoch(epoch).positions(position.last_ids[-1:]) + 1
            before = order.epoch(epoch).positions(position.next_ids[:1])
            for offset in (*after.tolist(), *before.tolist()):
                if _fits(position, order, layout, epoch, offset):
                    return epoch, offset
    return None


def check_continuation(state: Mapping[str, Any], ids: Iterable[int]) -> None:
    """Checks that what training took after a resume follows what it took before.

    Args:
        state: the sampler's state dict that was loaded.
        ids: what all ranks together took since, in order: rank 0's part of the first batch, rank 1's part, ..., the second batch. As many
            are looked at as the state holds; with ``drop_last``, where other ranks leave out others, those of its epoch.

    Raises:
        DataOrderError: samples come twice, or are left out, or come in another order; says how many, also in batches.
    """
    expected: list[int] = list(state["next_ids"])
    last: list[int] = list(state["last_ids"])
    size = int(state["batch_size"]) * int(state["world_size"])
    if state["drop_last"]:
        num_left = int(state["num_samples"]) - int(state["offset"]) or int(state["num_samples"])
        expected = expected[: num_left - num_left % size]
    found = [int(sample) for sample in islice(ids, len(expected))]
    if found == expected[: len(found)]:
        return
    if found[0] in expected:
        shift = expected.index(found[0])
        if shift > 0:
            raise DataOrderError(
                f"training resumed {_distance(shift, size)} of its position: samples were left out",
                expected=f"sample {expected[0]} first",
                found=f"sample {found[0]}",
            )
    elif found[0] in last:
        shift = last[::-1].index(found[0]) + 1
        raise DataOrderError(
            f"training resumed {_distance(-shift, size)} of its position: samples came twice",
            expected=f"sample {expected[0]} first",
            found=f"sample {found[0]}",
        )
    at = next(i for i, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other)
    raise DataOrderError(
        f"training takes samples in another order since the resume, from the {at + 1}. on",
        expected=str(expected[at : at + 3]),
        found=str(found[at : at + 3]),
    )


def _distance(shift: int, global_size: int) -> str:
    """``"1 batch (64 samples) ahead"``."""
    side = "ahead" if shift > 0 else "behind"
    samples = f"{abs(shift)} sample{'s' if abs(shift) > 1 else ''}"
    batches, rest = divmod(abs(shift), global_size)
    if rest:
        return f"{samples} {side}"
    return f"{batches} batch{'es' if batches > 1 else ''} ({samples}) {side}"


def _get(state: Mapping[str, Any], key: str, wanted: type) -> Any:
    value = state.get(key)
    if type(value) is not wanted:
        raise DataOrderError(
            f"the state holds no valid {key}",
            expected=f"what state_dict() returned, with {key} as {wanted.__name__}",
            found="no such key" if key not in state else repr(value),
        )
    return value


def _number(state: Mapping[str, Any], key: str, *, least: int = 0, most: int | None = None) -> int:
    value: int = _get(state, key, int)
    if value < least or (most is not None and value > most):
        valid = f"at least {least}" if most is None else f"from {least} to {most}"
        raise DataOrderError(f"the state's {key} is out of range", expected=f"{key} {valid}", found=str(value))
    return value


def _ids(state: Mapping[str, Any], key: str, num_samples: int) -> list[int]:
    ids: list[int] = _get(state, key, list)
    if len(ids) > WINDOW_IDS or not all(type(sample) is int and 0 <= sample < num_samples for sample in ids):
        raise DataOrderError(f"the state's {key} are no sample ids", expected=f"up to {WINDOW_IDS} ids from 0 to {num_samples - 1}")
    return ids
