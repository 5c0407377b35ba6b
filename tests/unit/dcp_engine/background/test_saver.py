"""One process that saves beside its training: what was staged is saved, nothing grows, nobody waits for ever."""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.odd_planners import FailingPlanner, MeddlingPlanner, SlowPlanner
from torch.distributed.checkpoint.metadata import Metadata

from dcp_engine import ReshardLoadPlanner, ShardReader, ShardWriter, committed_steps, verify_checkpoint
from dcp_engine.background import BackgroundSaver, Priority, UnchangedStateWarning, steps
from dcp_engine.background.watch import Liveness
from dcp_engine.errors import BackgroundSaveError, ClosedError, InvalidOptionError, SaveTimeoutError, StagedDataChangedError
from dcp_engine.staging import DoubleBufferStager

WAIT_SECS = 60
EXECUTORS = pytest.mark.parametrize("executor", ["thread", "process"])


def loaded(path: Path | str, like: dict[str, Any]) -> dict[str, Any]:
    target = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in like.items()}
    dcp.load(target, storage_reader=ShardReader(path), planner=ReshardLoadPlanner())
    return target


# -- what was staged is what is saved ---------------------------------------------------------------------------------------


def test_fifty_saves_hold_old_values_alone_whatever_training_does_at_once(tmp_path: Path) -> None:
    parameter, step = torch.zeros(20_000), torch.tensor(0.0)
    with BackgroundSaver(stager=DoubleBufferStager(threads=2)) as saver:
        for number in range(1, 51):
            temporary = torch.full((5_000,), float(number))
            parameter.fill_(number)
            step.fill_(number)
            state = {"parameter": parameter, "step": step, "temporary": temporary, "number": number}
            saver.submit(state, writer=ShardWriter(tmp_path / f"step-{number:08d}", codec="raw"), step=number)
            parameter.add_(1)
            step.add_(1)
            temporary = state = None  # type: ignore[assignment]
            torch.full((5_000,), -1.0)  # likely where it was
        saver.wait(60)
    assert committed_steps(str(tmp_path)) == list(range(1, 51))
    for number in range(1, 51):
        target = loaded(
            tmp_path / f"step-{number:08d}", {"parameter": parameter, "step": step, "temporary": torch.empty(5_000), "number": None}
        )
        for key in ("parameter", "step", "temporary"):
            assert (target[key] == number).all()
        assert target["number"] == number


@EXECUTORS
def test_who_writes_to_the_staged_state_is_found_wherever_it_is_written(tmp_path: Path, executor: str) -> None:
    with BackgroundSaver(executor=executor) as saver:
        handle = saver.submit({"model": {"w": torch.ones(50_000)}}, writer=ShardWriter(tmp_path / "a"), planner=MeddlingPlanner())
        error = handle.exception(60)
        assert isinstance(error, StagedDataChangedError)
        assert error.tensor == "model.w"
        saver.submit({"model": {"w": torch.ones(50_000)}}, writer=ShardWriter(tmp_path / "b")).result(60)
    assert not (tmp_path / "a").exists()
    verify_checkpoint(tmp_path / "b")


# -- nothing grows ----------------------------------------------------------------------------------------------------------


def used() -> dict[str, int]:
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "resident": int(fields["VmRSS"].split()[0]) * 1024,
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared": int(fields["RssShmem"].split()[0]) * 1024,
    }


@EXECUTORS
def test_thirty_saves_leave_memory_threads_and_descriptors_as_they_were(tmp_path: Path, executor: str) -> None:
    small = {f"w{index}": torch.full((2**18,), float(index)) for index in range(4)}
    large = {f"w{index}": torch.full((2**18,), float(index)) for index in range(16)}
    buffer_bytes = 16 * 2**20
    usage = {}
    with BackgroundSaver(executor=executor) as saver:
        for number in range(30):
            state = large if 10 <= number < 20 else small
            state["w0"].fill_(number)
            writer = ShardWriter(tmp_path / "a", overwrite=True, codec="raw", threads=1)
            saver.submit(state, writer=writer, step=number).result(60)
            if number in (5, 9, 15, 19, 25, 29):
                usage[number] = used()
        assert sum(buffer.num_bytes for buffer in saver.stager.buffers) <= 2 * buffer_bytes
        child_maps = ""
        if executor == "process":
            child_maps = Path(f"/proc/{saver._executor._child._process.pid}/maps").read_text()  # type: ignore[attr-defined]
    verify_checkpoint(tmp_path / "a")
    assert usage[5]["descriptors"] == usage[9]["descriptors"] == usage[25]["descriptors"] == usage[29]["descriptors"]
    assert max(usage[25]["shared"], usage[29]["shared"]) <= usage[9]["shared"] + 2**20
    # With those threads that copy large states, once there was one.
    assert usage[15]["threads"] == usage[19]["threads"] == usage[25]["threads"] == usage[29]["threads"]
    assert max(usage[25]["resident"], usage[29]["resident"]) - usage[9]["resident"] <= buffer_bytes
    assert child_maps.count("/torch_") <= 2, "the buffers that were replaced are still mapped"


# -- nobody waits for ever ----------------------------------------------------------------------------------------------------


def test_waiting_and_closing_have_an_end(tmp_path: Path) -> None:
    saver = BackgroundSaver(executor="process")
    saver.submit({"w": torch.ones(3)}, writer=ShardWriter(tmp_path / "step-00000001")).result(60)
    handle = saver.submit({"w": torch.ones(3), "v": torch.zeros(9)}, writer=ShardWriter(tmp_path / "step-00000002"), planner=SlowPlanner())
    queued = saver.submit({"w": torch.ones(4)}, writer=ShardWriter(tmp_path / "step-00000003"))
    for call in (handle.result, handle.exception, saver.wait, saver.close):
        with pytest.raises(SaveTimeoutError, match="step-00000002"):
            call(0.01)
    assert isinstance(handle.exception(10), BackgroundSaveError)
    assert isinstance(queued.exception(10), ClosedError)
    assert committed_steps(str(tmp_path)) == [1]
    with pytest.raises(ClosedError):
        saver.submit({}, writer=ShardWriter(tmp_path / "b"))
    saver.close()


@pytest.mark.parametrize("keys", [{}, {"signing_key": b"s" * 16, "encryption_key": b"e" * 16}], ids=["in the clear", "signed, encrypted"])
def test_what_fails_after_publishing_is_no_failure_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, bytes]
) -> None:
    """As for want of memory. What the coordinator cannot tell is read from the checkpoint, with the writer's keys."""
    pack = steps.packed

    def fail(value: object) -> bytes:
        if isinstance(value, Metadata):
            raise MemoryError("no room for the metadata")  # noqa: TRY004 - it is not about the type
        return pack(value)

    monkeypatch.setattr(steps, "packed", fail)
    with BackgroundSaver() as saver:
        handle = saver.submit({"w": torch.ones(3)}, writer=ShardWriter(tmp_path / "step-00000001", **keys))
        assert set(handle.result(WAIT_SECS).state_dict_metadata) == {"w"}
    assert committed_steps(str(tmp_path)) == [1]


def test_a_failure_that_nobody_reads_is_raised_at_the_end_and_not_over_the_bodys_own(tmp_path: Path) -> None:
    def fail() -> None:
        with BackgroundSaver() as saver:
            saver.submit({"w": torch.ones(3)}, writer=ShardWriter(tmp_path / "a"), planner=FailingPlanner(rank=0))

    with pytest.raises(BackgroundSaveError, match="a hook of the user's failed"):
        fail()

    def fail_twice() -> None:
        with BackgroundSaver() as saver:
            saver.submit({"w": torch.ones(3)}, writer=ShardWriter(tmp_path / "a"), planner=FailingPlanner(rank=0))
            raise KeyError("the training's own")

    with pytest.raises(KeyError, match="the training's own"):
        fail_twice()
    assert not (tmp_path / "a").exists()


def test_a_kept_failure_does_not_keep_the_staged_state(tmp_path: Path) -> None:
    with BackgroundSaver() as saver:
        handle = saver.submit({"w": torch.ones(3)}, writer=ShardWriter(tmp_path / "a"), planner=FailingPlanner(rank=0))
        error = handle.exception(60)
    pending: list[Any] = [error]
    seen = set()
    while pending:  # all that the error holds, but for modules and classes
        one = pending.pop()
        if id(one) in seen or isinstance(one, type | type(os)) or callable(one):
            continue
        seen.add(id(one))
        assert not isinstance(one, torch.Tensor)
        pending += gc.get_referents(one) if isinstance(one, BaseException | dict | list | tuple) else []
        trace = getattr(one, "__traceback__", None)
        while trace is not None:
            assert not any(isinstance(value, torch.Tensor) for value in trace.tb_frame.f_locals.values())
            trace = trace.tb_next


def test_the_alarm_rings_when_steps_advance_and_tensors_do_not(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    with BackgroundSaver() as saver:
        for step in (1, 1):  # the same step again is no news
            saver.submit(state, writer=ShardWriter(tmp_path / "a", overwrite=True), step=step).result(60)
        with pytest.warns(UnchangedStateWarning, match="step 2 are those of step 1"):
            saver.submit(state, writer=ShardWriter(tmp_path / "b"), step=2)


def test_at_exit_the_thread_is_ended_before_the_interpreter_is(tmp_path: Path) -> None:
    saver = BackgroundSaver()
    handle = saver.submit({"w": torch.ones(3)}, writer=ShardWriter(tmp_path / "a"))
    saver._leave()
    assert handle.done()
    assert not saver._thread.is_alive()
    with pytest.raises(ClosedError):
        saver.submit({"w": torch.ones(3)}, writer=ShardWriter(tmp_path / "b"))
    atexit.unregister(saver._leave)


ORPHAN = """
import os, sys, time
import torch
from dcp_engine import ShardWriter
from dcp_engine.background import steps
from dcp_engine.background import BackgroundSaver
from torch.distributed.checkpoint.metadata import Metadata
from support.odd_planners import SlowPlanner

if __name__ == "__main__":
    saver = BackgroundSaver(executor="process")
    saver.submit({"w": torch.ones(3)}, writer=ShardWriter(sys.argv[1] + "/step-00000001")).result(60)
    if os.fork() == 0:
        time.sleep(60)  # as a data loader's worker does, with a copy of all descriptors
        os._exit(0)
    state = {str(index): torch.ones(index) for index in range(60)}
    saver.submit(state, writer=ShardWriter(sys.argv[1] + "/step-00000002"), planner=SlowPlanner())
    print(saver._executor._child._process.pid, flush=True)
    time.sleep(60)
"""


def test_the_saving_process_ends_with_the_training_process_even_in_a_save(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ORPHAN, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as training:
        assert training.stdout is not None
        child = int(training.stdout.readline())
        training.kill()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{child}/status").exists() and "State:\tZ" not in Path(f"/proc/{child}/status").read_text():
            assert time.monotonic() < deadline, "the saving process lives on"
            time.sleep(0.1)
        os.killpg(training.pid, 9)  # the forked one
    assert committed_steps(str(tmp_path)) == [1]


# -- options ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "fiber"}, "unknown executor"),
        ({"timeout_secs": 0}, "timeout_secs is no duration"),
        ({"failure_secs": "soon"}, "failure_secs is no duration"),
        ({"failure_secs": 61, "timeout_secs": 60}, "failure_secs is above timeout_secs.*; expected failure_secs of at most 60; found 61"),
        ({"failure_secs": 2000}, "failure_secs is above timeout_secs"),
        ({"exit_wait_secs": float("inf")}, "exit_wait_secs is no duration"),
        ({"timeout_secs": True}, "timeout_secs is no duration"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        BackgroundSaver(**options)


def test_failures_are_found_within_the_patience_where_only_that_is_said() -> None:
    with BackgroundSaver(timeout_secs=30) as saver:
        assert saver._supervisor._liveness == Liveness(failure_secs=30, patience_secs=30)
    with BackgroundSaver() as saver:
        assert saver._supervisor._liveness == Liveness(failure_secs=60, patience_secs=1800)


@pytest.mark.parametrize("options", [{"nice": -1}, {"nice": 20}, {"nice": True}, {"io_class": "realtime"}])
def test_priorities_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        Priority(**options)


@EXECUTORS
def test_a_low_priority_is_that_of_whoever_saves_and_of_nobody_else(tmp_path: Path, executor: str) -> None:
    with BackgroundSaver(executor=executor, priority=Priority(nice=3, io_class="idle")) as saver:
        saver.submit({"w": torch.ones(3)}, writer=ShardWriter(tmp_path / "a")).result(60)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        thread = saver._thread.native_id
        child = getattr(saver._executor, "_child", None)
        assert thread is not None
        assert os.getpriority(os.PRIO_PROCESS, thread) == own + (0 if child else 3)
        if child:
            assert os.getpriority(os.PRIO_PROCESS, child._process.pid) == own + 3


@pytest.mark.parametrize(("options", "message"), [({"priority": 10}, "priority is of the wrong type"), ({"stager": 5}, "stager is of")])
def test_objects_of_other_types_are_refused_before_a_thread_begins(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        BackgroundSaver(**options)


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        (None, {}, "the state is no mapping"),
        ([1], {}, "the state is no mapping"),
        ({"a": 1}, {"writer": "runs/step-00000001"}, "writer is of the wrong type"),
        ({"a": 1}, {"planner": 3}, "planner is of the wrong type"),
        ({"a": 1}, {"step": "x"}, "step is no step"),
        ({"a": 1}, {"step": True}, "step is no step"),
    ],
)
def test_what_cannot_be_submitted_is_refused_at_once_and_the_next_save_works(
    tmp_path: Path, state: Any, options: dict[str, Any], message: str
) -> None:
    with BackgroundSaver() as saver:
        with pytest.raises(InvalidOptionError, match=message):
            saver.submit(state, **{"writer": ShardWriter(tmp_path / "a"), **options})
        saver.submit({"w": torch.ones(3)}, writer=ShardWriter(tmp_path / "b")).result(60)
    assert [entry.name for entry in tmp_path.iterdir()] == ["b"]
