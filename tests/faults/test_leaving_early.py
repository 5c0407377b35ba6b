"""A training process that leaves while a save is under way: the checkpoint is complete or not there, and the process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dcp_engine import committed_steps, verify_checkpoint

SCRIPT = """
import os, sys, tempfile
import torch, torch.distributed as dist
from dcp_engine import ShardWriter
from dcp_engine.background import BackgroundSaver

def main(root, executor, how):
    store = dist.FileStore(os.path.join(root, "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    saver = BackgroundSaver(executor=executor)
    saver.submit({{"w": torch.arange(2_000_000)}}, writer=ShardWriter(os.path.join(root, "steps", "step-00000001")), step=1)
    if how == "raise":
        raise ValueError("training failed")
    if how == "sys.exit":
        sys.exit(3)
    if how == "destroy":
        dist.destroy_process_group()
    if how == "os._exit":
        os._exit(4)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""

EXIT_STATUS = {"return": 0, "raise": 1, "sys.exit": 3, "destroy": 0, "os._exit": 4}
# Each takes a start of Python or two. How the interpreter ends is one thing for a thread, how its child learns of it another.
CASES = [("thread", "return"), ("thread", "raise"), ("thread", "sys.exit"), ("thread", "destroy"), ("process", "return")]
CASES += [("process", "destroy"), ("process", "os._exit")]


@pytest.mark.parametrize(("executor", "how"), CASES)
def test_leaving_right_after_a_save_began_ends_whole_or_absent(tmp_path: Path, how: str, executor: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{{", "{").replace("}}", "}"), encoding="utf-8")
    (tmp_path / "steps").mkdir()
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path), executor, how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == EXIT_STATUS[how], run.stderr
    steps = committed_steps(str(tmp_path / "steps"))
    assert steps in ([], [1])
    if how in ("return", "raise", "sys.exit"):
        assert steps == [1], run.stderr  # there was time, and nothing in the way
    for step in steps:
        verify_checkpoint(str(tmp_path / "steps" / f"step-{step:08d}"))


TWO_RANKS = """
import os, sys, time
import torch, torch.distributed as dist
from dcp_engine import ShardWriter
from dcp_engine.background import BackgroundSaver

def main(root, rank):
    dist.init_process_group("gloo", store=dist.FileStore(os.path.join(root, "store"), 2), rank=rank, world_size=2)
    saver = BackgroundSaver(failure_secs=30)
    saver.submit({f"w{rank}": torch.arange(1000)}, writer=ShardWriter(os.path.join(root, "steps", "step-00000001")), step=1)
    if rank == 1:
        sys.exit(17)
    saver.wait(60)
    error = saver.submit({"w0": torch.ones(3)}, writer=ShardWriter(os.path.join(root, "steps", "step-00000002")), step=2).exception(60)
    print(type(error).__name__, error.rank, error.found)

main(sys.argv[1], int(sys.argv[2]))
"""


def prepared(place: Path, program: str) -> tuple[list[str], dict[str, str]]:
    """Command, its last argument to come, and environment of one of two ranks that run a program; ``steps`` is there for it."""
    script = place / "train.py"
    script.write_text(program, encoding="utf-8")
    (place / "steps").mkdir()
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    return [sys.executable, "-P", "-W", "ignore", str(script), str(place)], environment


def test_a_rank_that_exits_first_ends_its_save_and_the_others_are_told_at_once_that_it_left(tmp_path: Path) -> None:
    command, environment = prepared(tmp_path, TWO_RANKS)
    runs = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment) for rank in range(2)]
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 17]
    assert outputs[0].strip() == "RankLostError 1 it has left: its saver was closed, or its process ends"
    assert committed_steps(str(tmp_path / "steps")) == [1]


LOSING = """
import os, signal, sys, time
import torch, torch.distributed as dist
from dcp_engine import BalancedSavePlanner, ShardWriter
from dcp_engine.background import BackgroundSaver

class Stopping(BalancedSavePlanner):
    def resolve_data(self, write_item):
        os.kill(os.getpid(), signal.SIGSTOP)
        return super().resolve_data(write_item)

def main(root, rank):
    dist.init_process_group("gloo", store=dist.FileStore(os.path.join(root, "store"), 2), rank=rank, world_size=2)
    saver = BackgroundSaver(failure_secs=4, exit_wait_secs=20)
    planner = Stopping() if rank == 1 else None
    writer = ShardWriter(os.path.join(root, "steps", "step-00000001"))
    saver.submit({f"w{rank}": torch.arange(1000)}, writer=writer, step=1, planner=planner)

main(sys.argv[1], int(sys.argv[2]))
"""


def test_a_rank_whose_peer_is_stopped_in_a_save_still_exits(tmp_path: Path) -> None:
    command, environment = prepared(tmp_path, LOSING)
    stopped = subprocess.Popen([*command, "1"], env=environment)
    try:
        survivor = subprocess.run([*command, "0"], env=environment, capture_output=True, text=True, timeout=100, check=False)
    finally:
        stopped.kill()
        stopped.wait()
    assert survivor.returncode == 0, survivor.stderr
    assert "rank 1" in survivor.stderr, "the log says whose fault it is"
    assert committed_steps(str(tmp_path / "steps")) == []


STORE = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""

LEAVING = """
import os, sys, time
import torch, torch.distributed as dist
from dcp_engine import BalancedSavePlanner, ShardWriter
from dcp_engine.background import BackgroundSaver

class Hanging(BalancedSavePlanner):
    def resolve_data(self, write_item):
        print("writing", flush=True)
        time.sleep(1000)

class Slow:
    def __init__(self, news):
        self.news = news

    def __del__(self, exists=os.path.exists, sleep=time.sleep):
        for _ in range(50):  # the interpreter is ending, and does so until the store answers again
            sleep(0.1)
            if exists(self.news):
                sleep(1)
                return

def main(root, port, failure_secs):
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    saver = BackgroundSaver(failure_secs=float(failure_secs), exit_wait_secs=0.1)
    sys.slow = Slow(os.path.join(root, "news"))
    saver.submit({"w": torch.arange(1000)}, writer=ShardWriter(os.path.join(root, "steps", "step-00000001")), planner=Hanging())
    sys.stdin.readline()
    print("leaving", flush=True)

main(*sys.argv[1:])
"""


@pytest.mark.parametrize(("failure_secs", "goes_on"), [(60, True), (6, False)])
def test_a_process_ends_whatever_becomes_of_the_host_of_its_store(tmp_path: Path, failure_secs: float, goes_on: bool) -> None:
    command, environment = prepared(tmp_path, LEAVING)
    with subprocess.Popen([sys.executable, "-P", "-W", "ignore", "-c", STORE], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        command += [host.stdout.readline().strip(), str(failure_secs)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        leaving = subprocess.Popen(command, **pipes, text=True, env=environment)  # type: ignore[call-overload]
        try:
            assert leaving.stdout.readline() == "writing\n"
            host.send_signal(signal.SIGSTOP)
            time.sleep(6)  # a beat, and no answer to it
            print(file=leaving.stdin, flush=True)
            assert leaving.stdout.readline() == "leaving\n"
            time.sleep(15)  # longer than a saver that is closed waits for its threads
            if goes_on:
                host.send_signal(signal.SIGCONT)
                (tmp_path / "news").touch()
            _, log = leaving.communicate(timeout=200)
        finally:
            leaving.kill()
            host.kill()
    assert leaving.returncode == 0, log
    assert committed_steps(tmp_path / "steps") == []
