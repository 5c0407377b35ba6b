"""Saves and loads as cases: what is written where, what is compared, what is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks.engines import Engine
from benchmarks.files import Place
from benchmarks.harness import Case, MismatchError, System
from benchmarks.moves import load_case, save_case
from benchmarks.state import State

OTHER = 7.0


def make_state(value: float) -> State:
    tensor = torch.full((4,), value)
    return State({"model": {"weight": tensor}}, {"model.weight": tensor})


class Recorded:
    """An engine that saves with torch.save and counts its calls; a false one loads other values than it saved."""

    def __init__(self, *, false: bool = False) -> None:
        self.calls: list[str] = []
        self.engine = Engine(name="e", role="peer", save=self.save, load=self.load)
        self._false = false

    def save(self, path: str, state: State) -> None:
        self.calls.append("save")
        torch.save(state.flat, path)

    def load(self, path: str, state: State) -> None:
        self.calls.append("load")
        state.flat["model.weight"].copy_(torch.load(path)["model.weight"])
        if self._false:
            state.flat["model.weight"][3] = OTHER


def run(case: Case, *, rounds: int) -> None:
    (system,) = case.systems
    system.prepare()
    for _ in range(rounds):
        one_round(system)
    case.close()


def one_round(system: System) -> None:
    system.before()
    try:
        system.run()
        system.check()
    finally:
        system.after()


def cases(recorded: Recorded, folder: Path) -> tuple[Case, Case]:
    place = Place("tmpfs", str(folder), durable=False)
    state, target = make_state(1.0), make_state(0.0)
    return (
        save_case("save", [recorded.engine], place, state, target, rounds=3, keep=True),
        load_case("load", [recorded.engine], place, state, target, rounds=3, saved_in="save"),
    )


def test_a_save_alone_is_compared_once_and_leaves_nothing(tmp_path: Path) -> None:
    recorded = Recorded()
    place = Place("tmpfs", str(tmp_path), durable=False)
    run(save_case("save", [recorded.engine], place, make_state(1.0), make_state(0.0), rounds=2), rounds=2)
    assert recorded.calls == ["save", "load", "save"]
    assert os.listdir(tmp_path) == []


def test_a_save_that_is_kept_is_loaded_by_the_next_case_and_every_load_compared(tmp_path: Path) -> None:
    recorded = Recorded()
    save, load = cases(recorded, tmp_path)
    run(save, rounds=2)
    run(load, rounds=2)
    assert recorded.calls == ["save", "save", "load", "load"]
    assert os.listdir(tmp_path) == []


def test_a_load_without_a_save_makes_one(tmp_path: Path) -> None:
    recorded = Recorded()
    run(cases(recorded, tmp_path)[1], rounds=1)
    assert recorded.calls == ["save", "load"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_value_that_is_not_what_was_saved_is_found(number: int, tmp_path: Path) -> None:
    recorded = Recorded(false=True)
    place = Place("tmpfs", str(tmp_path), durable=False)
    case = (
        save_case("save", [recorded.engine], place, make_state(1.0), make_state(0.0), rounds=1),
        load_case("load", [recorded.engine], place, make_state(1.0), make_state(0.0), rounds=1),
    )[number]
    with pytest.raises(MismatchError, match=r"model\.weight is not what was saved"):
        run(case, rounds=1)
