"""The quick part of the campaign of power cuts, and proof that it would find what it looks for."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from faults.campaign import power
from faults.campaign.crash_choices import capacity, choices
from faults.campaign.file_system_model import JOURNAL, WEAK, Disk, Mode, Tree
from faults.campaign.io_events import TOP, Change, Event, Flush, Link, Spoil, Write
from faults.campaign.power_judge import Judge
from faults.campaign.power_mutants import EQUIVALENT, Mutant, equivalent, mutants
from faults.campaign.power_traces import first_save, overwrite, record
from faults.campaign.recorded_calls import Fault
from faults.campaign.survivors import Choice, Survivor

# -- the campaign ---------------------------------------------------------------------------------------------------------------------


def test_no_power_cut_leaves_anything_but_whole_checkpoints() -> None:
    outcome = power.run(full=False, seed=1)
    assert outcome.bad == ()
    assert outcome.points >= 20_000
    assert outcome.facts["mutants caught"] + outcome.facts["mutants without effect"] == outcome.facts["mutants"]
    assert outcome.facts["mutants caught"] >= 100


@cache
def all_mutants() -> dict[str, Mutant]:
    return {mutant.name: mutant for mutant in mutants()}


def test_each_flush_each_order_each_error_and_each_digest_has_a_mutant() -> None:
    names = list(all_mutants())
    assert len(names) == len(set(names))
    dropped = [name for name in names if ": no flush" in name]
    # Three directories above the attempt, the last of them twice; two shards, MANIFEST and COMPLETE; the attempt three times.
    assert len([name for name in dropped if name.startswith("first_save of 1")]) == 11
    assert [name for name in dropped if equivalent(name)] == [
        "first_save of 1: no flush job, 1",
        "next_save of 2: no flush job, 1",
        "overwrite of 1: no flush job, 1",
        "move_latest of 1: no flush job, 1",
    ]
    assert sum("swallowed" in name for name in names) == 44
    assert {"load does not check digests", "verify does not check digests"} <= set(names)


def test_each_reason_for_having_no_effect_is_that_of_a_mutant() -> None:
    assert all(any(re.match(pattern, name) for name in all_mutants()) for pattern, _ in EQUIVALENT)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("first_save of 1: write MANIFEST before flush attempt by 0", "MANIFEST is whole, and what it vouches for is refused"),
        ("first_save of 1: write COMPLETE before flush attempt by 0", "COMPLETE is whole, and what it vouches for is refused"),
        ("first_save of 1: publish step-00000001 before flush attempt by 0", "exists, and is refused"),
        ("first_save of 1: saved before flush job", "is lost"),
        ("overwrite of 1: remove old before flush job", "exists, and is refused"),
        ("overwrite of 1 without exchange: no flush job, 2", "is lost"),
        ("move_latest of 1: LATEST before the step is durable", "LATEST names runs/job/step-00000002, which is not there"),
        ("move_latest of 1: publish LATEST before flush LATEST", "LATEST: "),
        ("retirement of 1: no flush job", "exists, and is refused"),
    ],
)
def test_a_mutant_breaks_the_promise_that_it_should(name: str, words: str) -> None:
    (mutant,) = (mutant for found, mutant in all_mutants().items() if found.startswith(name))
    assert words in power.caught(mutant, seed=1)


def test_a_lost_flush_is_never_silent_as_long_as_digests_are_checked() -> None:
    mutant = all_mutants()["load does not check digests"]
    tally = power.Tally()
    for mode in (JOURNAL, WEAK):
        power.crash(mutant.trace, mode, Judge(mutant.trace.contents), tally, seed=1, budget=20)
    assert tally.bad
    assert tally.silent == 0


def test_replacing_by_two_renames_keeps_a_whole_checkpoint_where_half_a_rename_survives() -> None:
    trace = record(overwrite, 1, can_exchange=False)
    tally = power.Tally()
    power.crash(trace, WEAK, Judge(trace.contents), tally, seed=1, budget=64)
    assert tally.bad == []


def names_left(events: Sequence[Event], mode: Mode, attempt: str) -> Iterator[set[frozenset[tuple[int, str, int]]]]:
    """After each event: all sets of (directory, name, inode) that a power cut may leave, without the name of one attempt."""
    disk = Disk(mode)
    for event in events:
        disk.apply(event)
        prefix = disk.prefix()
        whole = tuple(dirty.whole() for dirty in prefix.dirty)
        trees = [prefix.tree(Choice(mask, whole)) for mask in range(1 << prefix.num_changes)]
        yield {
            frozenset(
                (directory, name, inode)
                for directory in range(len(events))
                for name, inode in tree.table(directory).items()
                if name != attempt
            )
            for tree in trees
        }


@pytest.mark.parametrize("mode", [JOURNAL, WEAK], ids=lambda mode: mode.name)
@pytest.mark.parametrize(("scenario", "index"), [(first_save, 2), (overwrite, 0)])
def test_a_swallowed_error_of_the_flush_of_an_attempts_name_leaves_no_state_of_its_own(scenario: Any, index: int, mode: Mode) -> None:
    fault = Fault("fsync", index, swallowed=True, act=int(scenario is overwrite))
    wrong = record(scenario, 1, fault=fault).events
    right = [replace(event, failed=False) if isinstance(event, Flush) else event for event in wrong]
    (failed,) = (event for event in wrong if isinstance(event, Flush) and event.failed)
    attempt = next(event.path for event in reversed(wrong) if isinstance(event, Change) and event.what == "mkdir").rpartition("/")[2]
    assert failed.path == "runs/job"
    assert attempt.startswith(".tmp-step-00000001-")
    found = list(zip(names_left(wrong, mode, attempt), names_left(right, mode, attempt), strict=True))
    assert all(one <= other for one, other in found)
    assert sum(len(one) for one, _ in found) >= 60
    if scenario is overwrite:  # the step that was there never loses its name
        begin = wrong.index(failed)
        assert all(any(name == "step-00000001" for _, name, _ in names) for one, _ in found[begin:] for names in one)


def test_states_are_shared_among_moments_by_how_many_each_has() -> None:
    assert power.shared(10, [1, 2, 100]) == 7
    assert power.shared(1000, [1, 2, 4]) == 4


def test_what_ranks_do_at_once_is_mixed_by_the_seed() -> None:
    def order(seed: int) -> list[int]:
        return [event.node for event in record(first_save, 2, seed=seed).events if isinstance(event, Change) and event.what == "create"]

    assert sorted(order(1)) == [0, 0, 0, 0, 1, 1]
    assert len({tuple(order(seed)) for seed in range(8)}) > 1


# -- the model ------------------------------------------------------------------------------------------------------------------------

DIRECTORY, FILE = 1, 2
MADE = [
    Change("mkdir", "d", (Link(TOP, "d", DIRECTORY),), made=DIRECTORY),
    Change("create", "d/f", (Link(DIRECTORY, "f", FILE),), made=FILE),
]
CONTENT = bytes(range(256)) * 4
FULL = [*MADE, Write("d/f", FILE, 0, CONTENT)]


def states(events: list[Event], mode: Mode = JOURNAL) -> set[tuple[tuple[str, bytes], ...]]:
    """All files that may be left, by name and content: those choices that are few."""
    disk = Disk(mode)
    for event in events:
        disk.apply(event)
    prefix = disk.prefix()
    found = set()
    for choice in choices(prefix, random.Random(0), 3000):
        tree = prefix.tree(choice)
        found.add(tuple(sorted(_walk(tree, TOP, ""))))
    return found


def _walk(tree: Tree, directory: int, path: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for name, inode in tree.table(directory).items():
        place = f"{path}/{name}"
        found += _walk(tree, inode, place) if tree.is_directory(inode) else [(place, tree.content(inode))]
    return found


def test_bytes_size_and_name_of_a_file_survive_each_on_its_own() -> None:
    found = states(FULL)
    assert {(), (("/d/f", b""),), (("/d/f", CONTENT),), (("/d/f", bytes(1024)),), (("/d/f", CONTENT[:512]),)} <= found
    assert (("/d/f", CONTENT[:512] + bytes(512)),) in found  # the second sector lost, or not yet there
    assert any(content[:38] == CONTENT[:38] and content[38:512] != CONTENT[38:512] for state in found for _, content in state if content)


def test_a_flushed_file_keeps_its_bytes_and_not_its_name() -> None:
    assert states([*FULL, Flush("d/f", FILE)]) == {(), (("/d/f", CONTENT),)}


def test_flushed_directories_keep_their_names_each_for_itself() -> None:
    assert states([*FULL, Flush("d/f", FILE), Flush("d", DIRECTORY)]) == {(), (("/d/f", CONTENT),)}
    assert states([*FULL, Flush("d/f", FILE), Flush("d", DIRECTORY), Flush("", TOP)]) == {(("/d/f", CONTENT),)}


def test_a_rename_survives_whole_or_not_at_all_or_by_halves() -> None:
    durable = [*FULL, Flush("d/f", FILE), Flush("d", DIRECTORY), Flush("", TOP)]
    renamed = [*durable, Change("rename", "d/g", (Link(DIRECTORY, "f", None), Link(DIRECTORY, "g", FILE)))]
    whole = {(("/d/f", CONTENT),), (("/d/g", CONTENT),)}
    assert states(renamed, JOURNAL) == whole
    assert states(renamed, WEAK) == whole | {(), (("/d/f", CONTENT), ("/d/g", CONTENT))}
    assert states([*renamed, Flush("d", DIRECTORY)], WEAK) == {(("/d/g", CONTENT),)}


def test_a_failed_flush_makes_nothing_durable_and_neither_does_the_next() -> None:
    again = [*MADE[:1], Flush("", TOP), *FULL[1:], Flush("d", DIRECTORY), Flush("d/f", FILE, failed=True), Flush("d/f", FILE)]
    assert (("/d/f", b""),) in states(again)
    names = [*MADE[:1], Flush("", TOP, failed=True), Flush("", TOP)]
    assert states([*names, *FULL[1:], Flush("d", DIRECTORY), Flush("d/f", FILE)]) == {(), (("/d/f", CONTENT),)}


def test_a_failed_close_takes_back_what_was_flushed() -> None:
    closed = [*FULL, Flush("d/f", FILE), Flush("d", DIRECTORY), Flush("", TOP), Spoil("d/f", FILE)]
    assert {(("/d/f", b""),), (("/d/f", CONTENT),)} <= states(closed)


def test_a_node_flushes_its_own_names_only_where_nodes_are_told_apart() -> None:
    other = [Flush("", TOP), Flush("d/f", FILE), Flush("d", DIRECTORY, node=1)]
    assert states([*FULL, *other], WEAK) == {(), (("/d/f", CONTENT),)}
    assert states([*FULL, *other], JOURNAL) == {(("/d/f", CONTENT),)}


def test_what_is_stale_comes_from_a_file_of_the_same_name() -> None:
    old = [*FULL, Flush("d/f", FILE), Change("create", "f", (Link(TOP, "f", 3),), made=3), Write("f", 3, 0, bytes(1024))]
    disk = Disk(JOURNAL)
    for event in old:
        disk.apply(event)
    (dirty,) = disk.prefix().dirty
    assert dirty.content(Survivor(1024, 0, "stale")) == CONTENT


def test_few_choices_are_all_looked_at_and_none_twice() -> None:
    disk = Disk(WEAK)
    for event in MADE:
        disk.apply(event)
    prefix = disk.prefix()
    assert prefix.num_changes == 2
    found = list(choices(prefix, random.Random(0), 100))
    assert len(found) == len(set(found))
    assert {choice.changes for choice in found} == {0, 1, 2, 3}
    assert capacity(Disk(WEAK).prefix()) == 1
    assert list(choices(Disk(WEAK).prefix(), random.Random(0), 100)) == [Choice(0, ())]
