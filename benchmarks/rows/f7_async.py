"""F7: a save beside training on the CPU: how long the call blocks, what training loses, and whether anything grows."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import StagingOptions

from benchmarks.async_engines import background_saver, dcp_async, plain_async_save
from benchmarks.beside import AsyncEngine, measure_save
from benchmarks.cpu_loop import CpuLoop, Marks
from benchmarks.files import Place, places, remove, size_of
from benchmarks.harness import Case, Facts, System, in_fresh_process
from benchmarks.limits import memcpy
from benchmarks.options import Options
from benchmarks.results import CaseResult, Claim
from benchmarks.state import State, check_same, mixed_state, scramble
from benchmarks.stats import ratio
from benchmarks.training import FULL, QUICK
from benchmarks.usage import usage, without_huge_pages
from dcp_engine import ReshardLoadPlanner, ShardReader, ShardWriter
from dcp_engine.background import BackgroundSaver, Priority, SaveHandle

__all__ = ["Async", "structure_at"]

_BESIDE = "one save beside training: training time lost"
_LIMIT = "memcpy, 1 thread, warm"
_EXECUTORS = ("thread", "process")
_NUM_SAVES = 30
_EVERY = 5
"""Saves between two looks at what is held. At the first one both buffers, all threads and the process are there."""
_MANY_BYTES = 500_000_000
_ALLOWED_GROWTH_BYTES = 16e6
_ALLOWED_SHARED_BYTES = 2 * mmap.PAGESIZE
"""The last structure's halved tensors begin at aligned places of their own, which is a page more for each of the two buffers."""


class Async:
    """The row."""

    NAME = "F7"
    TITLE = "a save beside training, CPU"

    def cases(self, options: Options) -> Iterator[Case]:
        """One save beside training, on the disk, where durable means something; then many."""
        place = places(options)[-1]
        yield _beside_case(place, options)
        name = f"{_NUM_SAVES} saves, structure changing twice: growth"
        yield Case(
            name=name,
            systems=[_many_system(executor, place.path(name, executor), options) for executor in _EXECUTORS],
            rounds=1,
            measure_memory=False,
            close=lambda: remove(place.path(name)),
        )

    def claims(self, results: list[CaseResult]) -> list[Claim]:
        """Against a memcpy, against DCP's best, and nothing that grows."""
        beside, many = results
        ours, stock, limit = (beside.best(role) for role in ("ours", "dcp", "limit"))
        claims = []
        for executor in _EXECUTORS:
            system = beside.named(f"dcp-engine {executor}")
            blocked = ratio(system.facts["blocked_secs"], limit.secs) if system and limit else None
            claims.append(Claim.of_ratio(f"{executor}: the call, times a one-thread memcpy", 1.2, blocked, at_most=True))
        lost = ratio(ours.secs, stock.secs) if ours and stock else None
        detail = f"{ours.name}; {stock.name}" if ours and stock else ""
        claims.append(Claim.of_ratio("training time lost, share of DCP's best", 0.5, lost, at_most=True, detail=detail))
        for executor in _EXECUTORS:
            system = many.named(f"dcp-engine {executor}")
            for fact, what, reach in (
                ("memory_growth_bytes", "MB of resident memory", _ALLOWED_GROWTH_BYTES / 1e6),
                ("shared_growth_bytes", "MB of shared memory", _ALLOWED_SHARED_BYTES / 1e6),
                ("threads_growth", "threads", 0.0),
                ("descriptors_growth", "descriptors", 0.0),
            ):
                value = system.fact(fact) if system else None
                scaled = value / 1e6 if value is not None and fact.endswith("bytes") else value
                claims.append(Claim(f"{executor}, {_NUM_SAVES} saves: {what} grown", reach, scaled, at_most=True))
        return claims

    def notes(self, options: Options) -> list[str]:
        """What a reader has to know."""
        return [
            "Seconds are training time lost: from the call to the end of the step in which the checkpoint became durable, without the "
            "time that as many undisturbed steps take, measured right before. The limit has a memcpy's seconds there.",
            "Every system has saved once before the first round: buffers are warm, processes run.",
            "Growth is the most after the first saves, of this process and the one that saves together; the ten saves in the middle are "
            "of two fifths of the bytes, which makes the stager give its buffers back and take smaller ones.",
            "Those processes get no transparent huge pages, which the kernel rounds up to at times that mean nothing.",
        ]


def _engines(options: Options) -> list[AsyncEngine]:
    threads = options.threads
    shared = StagingOptions(use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False)
    return [
        *(background_saver(executor=executor, threads=threads) for executor in _EXECUTORS),
        background_saver(executor="process", threads=threads, priority=Priority(nice=10), name="dcp-engine process, nice 10"),
        plain_async_save(threads=threads),
        dcp_async(name="DCP thread", threads=threads),
        dcp_async(name="DCP thread, stager kept", threads=threads, kept=replace(shared, use_shared_memory=False)),
        dcp_async(name="DCP process", threads=threads, process=True),
        dcp_async(name="DCP process, shared stager kept", threads=threads, process=True, kept=shared),
        dcp_async(name="DCP thread, pinned, async, non-blocking", threads=threads, kept=StagingOptions(), needs_cuda=True),
    ]


def _beside_case(place: Place, options: Options) -> Case:
    state = mixed_state(options)
    target = state.empty_like()
    marks = Marks(state)
    loop = CpuLoop(QUICK if options.quick else FULL, marks)
    engines = _engines(options)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    for _ in range(2):  # the first steps allocate
        loop.step(lambda: None)

    def close() -> None:
        for engine in engines:
            engine.close()
        torch.set_num_threads(threads_before)
        remove(place.path(_BESIDE))

    def system(engine: AsyncEngine) -> System:
        return _beside_system(
            engine, place.path(_BESIDE, engine.name), state, target, loop, marks, num_undisturbed=3 if options.quick else 8
        )

    limit = System(name=_LIMIT, role="limit", run=lambda: memcpy(state, target, threads=1), note="the state into memory that is there")
    return Case(
        name=_BESIDE,
        systems=[*(system(engine) for engine in engines), limit],
        rounds=1 if options.quick else 5,
        budget_secs=70,
        reserve_bytes=state.nbytes + state.nbytes // 4,
        measure_memory=False,
        close=close,
    )


def _beside_system(
    engine: AsyncEngine, path: str, state: State, target: State, loop: CpuLoop, marks: Marks, *, num_undisturbed: int
) -> System:
    def before() -> None:
        remove(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        engine.begin()

    def prepare() -> None:
        before()
        try:
            engine.open()
            engine.start(path, state.nested).durable.result()
        finally:
            after()

    def run() -> Facts:
        return measure_save(loop, lambda: engine.start(path, state.nested), num_undisturbed=num_undisturbed)

    def check() -> Facts:
        marks.restore()
        scramble(target)
        engine.load(path, target.nested)
        check_same(target, state)
        return {"stored_bytes": size_of(path)}

    def after() -> None:
        engine.end()
        remove(path)

    return System(
        name=engine.name,
        role=engine.role,
        run=run,
        prepare=prepare,
        before=before,
        check=check,
        after=after,
        note=engine.note,
        unavailable=engine.unavailable,
    )


def _many_system(executor: str, path: str, options: Options) -> System:
    return System(
        name=f"dcp-engine {executor}",
        role="ours",
        run=lambda: in_fresh_process(_many_saves, executor, path, options),  # type: ignore[no-any-return]
        note="seconds of all saves, their loads and comparisons included",
    )


def _many_saves(executor: str, path: str, options: Options) -> dict[str, float]:
    """Save again and again, each while the one before is still written; growth after the first ones."""
    without_huge_pages()
    torch.set_num_threads(1)
    small = replace(options, state_bytes=min(options.state_bytes, _MANY_BYTES))
    state = mixed_state(small)
    target = state.empty_like()
    marks = Marks(state)
    known = []

    def check(handle: SaveHandle, number: int) -> None:
        handle.result()
        marks.fill(number)  # the next one is staged: its tensors may be what they were
        found = structure_at(target, number)
        scramble(found)
        dcp.load(found.nested, storage_reader=ShardReader(handle.path, threads=options.threads), planner=ReshardLoadPlanner())
        check_same(found, structure_at(state, number))
        remove(handle.path)

    with BackgroundSaver(executor=executor) as saver:
        last: SaveHandle | None = None
        for number in range(_NUM_SAVES):
            marks.fill(number)
            where = os.path.join(path, str(number))
            os.makedirs(path, exist_ok=True)
            writer = ShardWriter(where, codec="raw", threads=options.threads)
            handle = saver.submit(structure_at(state, number).nested, writer=writer, step=number)
            if last is not None:
                check(last, number - 1)
            last = handle
            if number % _EVERY == _EVERY - 1:
                handle.wait_done()  # files that are just being written count, too
                known.append(usage())
        assert last is not None
        check(last, _NUM_SAVES - 1)
    base, *later = known
    return {
        "memory_growth_bytes": max(use.memory_bytes for use in later) - base.memory_bytes,
        "shared_growth_bytes": max(use.shared_bytes for use in later) - base.shared_bytes,
        "threads_growth": max(use.threads for use in later) - base.threads,
        "descriptors_growth": max(use.descriptors for use in later) - base.descriptors,
    }


def structure_at(state: State, number: int) -> State:
    """The state as it is at a save: whole; then its first tensors, two fifths of the bytes; then whole again, each tensor in two halves."""
    phase = number * 3 // _NUM_SAVES
    flat: dict[str, torch.Tensor] = {}
    room = state.nbytes * 2 // 5 if phase == 1 else state.nbytes
    for name, tensor in state.flat.items():
        room -= tensor.nbytes
        if room < 0:
            break
        rows = len(tensor) // 2
        if phase == 2 and rows:
            flat[f"{name}.first"], flat[f"{name}.second"] = tensor[:rows], tensor[rows:]
        else:
            flat[name] = tensor
    return State({"state": flat}, flat)
