"""The examples as a user runs them: ended in the middle, started again with the same command, and compared with a run that was not."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from support.ranks import RankPool

from dcp_engine import committed_steps

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LOSS = re.compile(r"step (\d+) loss ([0-9.e+-]+)")


def documented_command(example: Path) -> str:
    """The line of the docstring that starts it."""
    (command,) = re.findall(rf"^    ((?:python|torchrun) .*examples/{example.name} .*)$", example.read_text(encoding="utf-8"), re.MULTILINE)
    return str(command)


def command_of(example: str, root: Path, *, num_ranks: int | None = None) -> list[str]:
    """The documented command, with another root, and another number of ranks if one is given."""
    program, *arguments = shlex.split(documented_command(ROOT / "examples" / example))
    arguments[arguments.index("--root") + 1] = str(root)
    if num_ranks is not None:
        arguments[arguments.index("--nproc-per-node") + 1] = str(num_ranks)
    return [str(Path(sys.executable).with_name(program)), *arguments]


def losses_in(output: str) -> dict[int, str]:
    return {int(step): loss for step, loss in LOSS.findall(output)}


def floats(losses: dict[int, str]) -> dict[int, float]:
    return {step: float(loss) for step, loss in losses.items()}


def environment() -> dict[str, str]:
    # One thread: what a sum of floats is depends on their number, and the pool's ranks, which run the uninterrupted runs, have one.
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def run_to_the_end(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_until(step: int, command: list[str], root: Path, end: Callable[[subprocess.Popen[str]], None]) -> str:
    """Starts a run, ends it when it has printed this step and there is a checkpoint, and returns what it has printed."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # a few lines fill it: a run that is not read from cannot come to its end
    with (
        ours,
        ours.makefile() as output,
        subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=theirs, stderr=subprocess.PIPE, text=True) as process,
    ):
        theirs.close()
        printed = ""
        try:
            while step not in losses_in(printed):
                line = output.readline()
                assert line, "it ended too early"
                printed += line
            while not committed_steps(root):  # training waits to be read from, and the save beside it does not
                assert process.poll() is None, "it ended too early"
                time.sleep(0.05)
        except BaseException as error:
            process.terminate()  # it would wait to be read from for ever; torchrun ends its ranks, too
            error.add_note(f"{printed}{process.communicate()[1]}")
            raise
        end(process)
        printed += output.read()
        process.communicate()
        assert process.returncode != 0, printed
    return printed


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()


def kill_a_rank(process: subprocess.Popen[str]) -> None:
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), signal.SIGKILL)


def terminate(process: subprocess.Popen[str]) -> None:
    process.terminate()


def train_here(source: Path, arguments: list[str]) -> str:
    """On each rank of a pool, which has imported torch already and has joined a group: runs a script, and returns what it prints."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        mock.patch.object(sys, "argv", [str(source), *arguments]),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        runpy.run_path(str(source), run_name="__main__")
    return printed.getvalue()


def uninterrupted(ranks: RankPool, num_ranks: int, command: list[str], root: Path) -> dict[int, str]:
    """The losses of a run that nothing ended. A warning in it is an error."""
    script = next(number for number, argument in enumerate(command) if argument.endswith(".py"))
    arguments = command[script + 1 :]
    arguments[arguments.index("--root") + 1] = str(root)
    losses = losses_in(ranks.run(num_ranks, train_here, ROOT / command[script], arguments)[0])
    assert list(losses) == list(range(1, int(arguments[arguments.index("--steps") + 1]) + 1))
    return losses


@pytest.mark.slow
@pytest.mark.timeout(600)  # up to eight processes that import torch, on cores that other tests use, too
@pytest.mark.parametrize(
    ("example", "num_ranks", "step", "end", "saved"),
    [
        ("single_process.py", 1, 25, kill, 20),
        ("one_line_change.py", 1, 25, kill, 20),
        # A save is wanted after 504 samples, inside the cycle of 32 that makes step 16: it is moved to its end.
        ("accumulation_amp.py", 1, 20, terminate, 16),
        ("ddp.py", 2, 25, kill_a_rank, 20),
    ],
)
def test_run_that_was_ended_goes_on_bit_for_bit(
    ranks: RankPool, tmp_path: Path, example: str, num_ranks: int, step: int, end: Callable[[subprocess.Popen[str]], None], saved: int
) -> None:
    command = command_of(example, tmp_path / "run")
    losses = uninterrupted(ranks, num_ranks, command, tmp_path / "uninterrupted")
    before = losses_in(run_until(step, command, tmp_path / "run", end))
    assert committed_steps(tmp_path / "run") == [saved]
    after = losses_in(run_to_the_end(command))
    assert list(before) == list(range(1, len(before) + 1))
    assert list(after) == list(range(saved + 1, len(losses) + 1))
    assert {**before, **after} == losses
    assert before.items() <= losses.items()


@pytest.mark.slow
@pytest.mark.timeout(600)  # up to eight
def test_run_on_four_ranks_goes_on_with_two(ranks: RankPool, tmp_path: Path) -> None:
    command = command_of("fsdp2_tp.py", tmp_path / "run")
    losses = uninterrupted(ranks, 2, command, tmp_path / "uninterrupted")
    before = losses_in(run_until(13, command, tmp_path / "run", terminate))
    assert committed_steps(tmp_path / "run") == [10]
    after = losses_in(run_to_the_end(command_of("fsdp2_tp.py", tmp_path / "run", num_ranks=2)))
    assert list(before) == list(range(1, len(before) + 1))
    assert list(after) == list(range(11, len(losses) + 1))
    for part in (before, after):
        assert floats(part) == pytest.approx(floats({step: losses[step] for step in part}), rel=1e-4, abs=0)


def test_lines_before_the_change_are_those_of_plain_dcp(ranks: RankPool, tmp_path: Path) -> None:
    source = (ROOT / "examples/one_line_change.py").read_text(encoding="utf-8")
    plain, num_lines = re.subn(r"( +)# Before: (.*)\n.*\n", r"\1\2\n", source)
    plain, num_imports = re.subn(r"\n.*import ShardReader, ShardWriter\n", "\n", plain)
    assert (num_lines, num_imports, "dcp_engine" in plain) == (2, 1, False)
    (tmp_path / "plain.py").write_text(plain, encoding="utf-8")
    printed = [
        losses_in(ranks.run(1, train_here, path, ["--root", str(tmp_path / root), "--steps", steps])[0])
        for path, root in ((tmp_path / "plain.py", "plain"), (ROOT / "examples/one_line_change.py", "changed"))
        for steps in ("20", "24")
    ]
    assert [list(losses) for losses in printed] == 2 * [list(range(1, 21)), list(range(21, 25))]
    assert printed[:2] == printed[2:]


def test_table_has_every_example_and_its_command() -> None:
    table = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[(.*?)\]\(\1\) \| .* \| `(.*)` \|$", table, re.MULTILINE))
    assert rows == {example.name: documented_command(example) for example in EXAMPLES}
