"""F8: a save beside training on a CUDA device."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.staging import StagingOptions

from benchmarks.async_engines import background_saver, dcp_async
from benchmarks.beside import AsyncEngine, measure_save
from benchmarks.files import Place, places, remove, size_of
from benchmarks.gpu_loop import GpuLoop, layers_that_fit
from benchmarks.harness import Case, Facts, System
from benchmarks.memory import available_bytes
from benchmarks.options import Options
from benchmarks.results import CaseResult, Claim
from benchmarks.state import State, scramble
from dcp_engine.staging import DoubleBufferStager

__all__ = ["Gpu", "beside_case"]

_COPY = "copy from the device"
_BESIDE = "one save beside training on the device: training time lost"
_OURS = "dcp-engine thread"
_PROBE_BYTES = 256 << 20
_NUM_UNDISTURBED = 8
_QUICK_LAYERS = 8


class Gpu:
    """The row."""

    NAME = "F8"
    TITLE = "a save beside training, CUDA"

    def cases(self, options: Options) -> Iterator[Case]:
        """The copy alone, then saves beside training, on the disk. Nothing without a CUDA device."""
        if not torch.cuda.is_available():
            return
        place = places(options)[-1]
        os.makedirs(place.folder, exist_ok=True)
        fit = layers_that_fit(
            device_bytes=torch.cuda.mem_get_info()[0],
            host_bytes=available_bytes(),
            disk_bytes=shutil.disk_usage(place.folder).free,
            write_bytes_a_sec=_write_speed(place.path("probe")),
        )
        loop = GpuLoop(min(fit, _QUICK_LAYERS) if options.quick else fit)
        yield _copy_case(loop, options)
        yield beside_case(loop, place, options)

    def claims(self, results: list[CaseResult]) -> list[Claim]:
        """The call, the copy, and the steps beside it."""
        if not results:
            return []
        copy, beside = results
        ours, stock = beside.named(_OURS), beside.best("dcp")
        blocked = ours.fact("blocked_secs") if ours else None
        claims = [
            Claim("the call blocks, ms", 10.0, None if blocked is None else blocked * 1e3, at_most=True),
            Claim.of_ratio("copy: share of a pinned copy's bandwidth", 0.9, copy.times_faster(copy.best("limit"))),
            Claim("a step beside the save, slower by", 0.02, ours.fact("slowdown") if ours else None, at_most=True),
        ]
        if stock and ours and stock.time and ours.time:
            lost = ours.time.median / stock.time.median
            claims.append(Claim("training time lost, share of DCP's best", 0.5, lost, at_most=True, detail=stock.name))
        return claims

    def notes(self, options: Options) -> list[str]:
        """What a reader has to know."""
        if not torch.cuda.is_available():
            return ["not measured: there is no CUDA device here"]
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return [
            f"On {properties.name}, {properties.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}.",
            "The call comes while forward and backward are under way on the device; the optimizer's step comes right after, and waits on "
            "the device for our copy, on the host for DCP's.",
            "Seconds are training time lost, as in F7. The state is that of the model which trains: all of it changes with each step.",
        ]


def _write_speed(path: str) -> float:
    """Bytes a second that the disk takes, roughly."""
    block = os.urandom(1 << 20)
    begin = time.perf_counter()
    try:
        with open(path, "wb") as file:
            for _ in range(_PROBE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    finally:
        remove(path)
    return _PROBE_BYTES / (time.perf_counter() - begin)


def _copy_case(loop: GpuLoop, options: Options) -> Case:
    state = loop.state()
    stager = DoubleBufferStager(split_on_device=True)  # only where it is told so
    chunk = torch.empty(min(state.nbytes, 1 << 30), dtype=torch.uint8, device="cuda")
    pinned: list[torch.Tensor] = []

    def copy_pinned() -> None:
        for begin in range(0, state.nbytes, chunk.numel()):
            num = min(chunk.numel(), state.nbytes - begin)
            pinned[0][:num].copy_(chunk[:num], non_blocking=True)
        torch.cuda.synchronize()

    def stage(may_split: bool = False) -> Facts:
        begin = time.perf_counter()
        staged = stager.stage(state.nested, may_split=may_split)
        blocked = time.perf_counter() - begin
        stager.synchronize_staging()
        stager.release(staged)
        return {"blocked_secs": blocked}

    return Case(
        name=_COPY,
        systems=[
            System(name="dcp-engine stager", role="ours", run=stage, prepare=lambda: _dropped(stage()), before=torch.cuda.synchronize),
            System(
                name="dcp-engine stager, floats split on the device",
                role="ours",
                run=lambda: stage(may_split=True),
                prepare=lambda: _dropped(stage(may_split=True)),
                before=torch.cuda.synchronize,
                comparable=False,
                note="more than a copy: what it saves is the writer's work, later",
            ),
            System(
                name="pinned copy, 1 GiB at a time",
                role="limit",
                run=copy_pinned,
                prepare=lambda: pinned.append(torch.empty(chunk.numel(), dtype=torch.uint8, pin_memory=True)),
                before=torch.cuda.synchronize,
            ),
        ],
        rounds=2 if options.quick else 5,
        nbytes=state.nbytes,
        measure_memory=False,
        close=stager.close,
    )


def _dropped(_: object) -> None:
    """A call for its effect."""


def _engines(loop: GpuLoop, options: Options) -> list[AsyncEngine]:
    threads = options.threads
    pinned = StagingOptions(use_pinned_memory=True, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=True)
    in_thread = StagingOptions(use_pinned_memory=True, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=True)
    return [
        background_saver(executor="thread", threads=threads, optimizer=loop.optimizer),
        dcp_async(name="DCP thread", threads=threads),
        dcp_async(name="DCP thread, pinned, non-blocking", threads=threads, kept=pinned, needs_cuda=True),
        dcp_async(name="DCP thread, pinned, async, non-blocking", threads=threads, kept=in_thread, needs_cuda=True),
    ]


def beside_case(loop: GpuLoop, place: Place, options: Options) -> Case:
    """Saves beside the loop; every checkpoint is loaded and compared with the state at which its save was called."""
    engines = _engines(loop, options)
    target = loop.target()

    def close() -> None:
        for engine in engines:
            engine.close()
        remove(place.path(_BESIDE))

    return Case(
        name=_BESIDE,
        systems=[_beside_system(engine, loop, place.path(_BESIDE, engine.name), target) for engine in engines],
        rounds=1 if options.quick else 3,
        budget_secs=150,
        measure_memory=False,
        close=close,
    )


def _beside_system(engine: AsyncEngine, loop: GpuLoop, path: str, target: State) -> System:
    def before() -> None:
        remove(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        engine.begin()

    def prepare() -> None:
        before()
        try:
            engine.open()
            engine.start(path, loop.state().nested).durable.result()
        finally:
            after()

    def run() -> Facts:
        state = loop.state().nested
        facts = measure_save(loop, lambda: engine.start(path, state), num_undisturbed=_NUM_UNDISTURBED)
        return {**facts, "state_dict_secs": loop.state_dict_secs}

    def check() -> Facts:
        scramble(target)
        engine.load(path, target.nested)
        loop.check(target)
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
        max_rounds=1000 if engine.role == "ours" else 1,  # gigabytes each: one round tells a factor
        note=engine.note,
        unavailable=engine.unavailable,
    )
