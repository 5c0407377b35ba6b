"""Which of the states that a power cut may leave are looked at: all where they are few, else those that tell most and then any."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from faults.campaign.file_system_model import Prefix
from faults.campaign.survivors import Choice, Dirty, Survivor

__all__ = ["capacity", "choices"]


def choices(prefix: Prefix, rng: random.Random, budget: int) -> Iterable[Choice]:
    """At most ``budget`` different choices of a prefix: all where they are few, else those that tell most and then any."""
    seen: dict[Choice, None] = {}
    for choice in _in_order(prefix, rng, budget):
        if choice not in seen:
            seen[choice] = None
            yield choice
        if len(seen) >= budget:
            return


def capacity(prefix: Prefix) -> int:
    """How many choices there are; of those with dirty files, no more than a draw will ever meet."""
    return 1 << prefix.num_changes + 40 * bool(prefix.dirty)


def _in_order(prefix: Prefix, rng: random.Random, budget: int) -> Iterable[Choice]:
    num, every = prefix.num_changes, (1 << prefix.num_changes) - 1
    whole, lost = tuple(dirty.whole() for dirty in prefix.dirty), tuple(dirty.lost() for dirty in prefix.dirty)
    if not prefix.dirty and every < budget:
        yield from (Choice(mask, ()) for mask in range(every + 1))
        return
    yield from (Choice(every, whole), Choice(0, lost), Choice(0, whole), Choice(every, lost))
    for index in range(num):
        yield from (Choice(every & ~(1 << index), whole), Choice(1 << index, whole), Choice(every & ~(1 << index), lost))
    for place, dirty in enumerate(prefix.dirty):
        for survivor in dirty.telling():
            yield Choice(every, _with(whole, place, survivor))
    for one in range(num):
        for other in range(one):
            yield Choice(every & ~(1 << one | 1 << other), whole)
    for _ in range(3 * budget):
        mask = rng.getrandbits(num) if num else 0
        if rng.random() < 0.5:
            mask |= rng.getrandbits(num) if num else 0
        yield Choice(mask, tuple(_any(dirty, rng) for dirty in prefix.dirty))


def _any(dirty: Dirty, rng: random.Random) -> Survivor:
    match rng.randrange(4):
        case 0:
            return dirty.whole()
        case 1:
            return dirty.lost()
    return dirty.drawn(rng)


def _with(survivors: Sequence[Survivor], place: int, survivor: Survivor) -> tuple[Survivor, ...]:
    return (*survivors[:place], survivor, *survivors[place + 1 :])
