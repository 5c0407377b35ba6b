"""Cases of saves and loads, made from engines: what F1, F2, F3 and F5 have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from benchmarks.engines import Engine
from benchmarks.files import Place, bytes_read, evict, fsync_tree, remove, size_of
from benchmarks.harness import Case, Facts, System
from benchmarks.state import State, check_same, scramble

__all__ = ["load_case", "save_case"]


def save_case(
    name: str,
    engines: Sequence[Engine],
    place: Place,
    state: State,
    target: State,
    *,
    rounds: int,
    budget_secs: float = 20.0,
    measure_memory: bool = False,
    compared: frozenset[str] = frozenset(),
    keep: bool = False,
    count_bytes: bool = True,
    max_rounds: dict[str, int] | None = None,
) -> Case:
    """Every engine saves the same state to a new path. The first save of each is loaded and compared, here or in the case that loads it.

    Args:
        name: of the case.
        engines: in the order of the tables.
        place: where to save.
        state: what is saved.
        target: tensors of the same shapes, to check with.
        rounds: how often each saves at most.
        budget_secs: see :class:`benchmarks.harness.Case`, as for the next two.
        measure_memory: as there.
        compared: as there.
        keep: leave the last saves to the case that is made next, by :func:`load_case` with this one's name; it compares them.
        count_bytes: bytes are the point: show them a second.
        max_rounds: engine -> rounds, for those that take minutes.
    """

    def system(engine: Engine) -> System:
        path = place.path(name, engine.name)
        checked: list[str] = []

        def before() -> None:
            remove(path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            engine.begin()

        def check() -> Facts:
            if not checked and not keep:
                scramble(target)
                engine.load(path, target)
                check_same(target, state)
                checked.append(path)
            return {"stored_bytes": size_of(path)}

        def after() -> None:
            engine.end()
            if not keep:
                remove(path)

        return _system(engine, run=lambda: engine.save(path, state), before=before, check=check, after=after, max_rounds=max_rounds)

    return Case(
        name=name,
        systems=[system(engine) for engine in engines],
        rounds=rounds,
        budget_secs=budget_secs,
        measure_memory=measure_memory,
        compared=compared,
        nbytes=state.nbytes if count_bytes else 0,
        reserve_bytes=state.nbytes + state.nbytes // 4,
        close=lambda: None if keep else remove(place.path(name)),
    )


def load_case(
    name: str,
    engines: Sequence[Engine],
    place: Place,
    state: State,
    target: State,
    *,
    rounds: int,
    budget_secs: float = 20.0,
    measure_memory: bool = False,
    compared: frozenset[str] = frozenset(),
    saved_in: str = "",
    count_bytes: bool = True,
    cold: bool = False,
    max_rounds: dict[str, int] | None = None,
) -> Case:
    """Every engine loads the state, which it has saved itself, into the same tensors; every load is compared.

    Who has no save from the case before makes one.

    Args:
        name: of the case.
        engines: in the order of the tables.
        place: where to save.
        state: what is saved.
        target: what is loaded into.
        rounds: how often each loads at most.
        budget_secs: see :class:`benchmarks.harness.Case`, as for the next two.
        measure_memory: as there.
        compared: as there.
        saved_in: name of the case whose saves are there.
        count_bytes: bytes are the point: show them a second.
        cold: drop the files from the page cache before every load.
        max_rounds: engine -> rounds, for those that take minutes.
    """

    def system(engine: Engine) -> System:
        path = place.path(saved_in or name, engine.name)
        read = [0, 0]

        def prepare() -> None:
            if not os.path.exists(path):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                engine.save(path, state)
            if os.path.exists(path):
                fsync_tree(path)

        def before() -> None:
            scramble(target)
            if cold and os.path.exists(path):
                evict(path)
            read[:] = bytes_read()

        def run() -> None:
            engine.load(path, target)

        def check() -> Facts:
            called, delivered = (now - then for now, then in zip(bytes_read(), read, strict=True))
            check_same(target, state)
            return {"bytes_by_calls": called, "bytes_from_device": delivered}

        return _system(engine, prepare=prepare, run=run, before=before, check=check, max_rounds=max_rounds)

    return Case(
        name=name,
        systems=[system(engine) for engine in engines],
        rounds=rounds,
        budget_secs=budget_secs,
        measure_memory=measure_memory,
        compared=compared,
        nbytes=state.nbytes if count_bytes else 0,
        reserve_bytes=state.nbytes // 4,
        close=lambda: remove(place.path(saved_in or name)),
    )


def _system(
    engine: Engine,
    *,
    run: Callable[[], None],
    before: Callable[[], None],
    check: Callable[[], Facts],
    prepare: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
    max_rounds: dict[str, int] | None,
) -> System:
    return System(
        name=engine.name,
        role=engine.role,
        prepare=prepare,
        before=before,
        run=run,
        check=check,
        after=after,
        max_rounds=(max_rounds or {}).get(engine.name, 1000),
        comparable=engine.comparable,
        note=engine.note,
        unavailable=engine.unavailable,
    )
