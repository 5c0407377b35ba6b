"""What a death leaves behind, looked at as a reader would, and what the next save of another process makes of it."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from faults.campaign.crash_calls import Board, Fault
from faults.campaign.crash_cases import Case, keep_two
from faults.campaign.crash_ranks import DONE, STOPPED, load_alone, save_in_turn
from faults.campaign.crash_states import State, blank, difference

from dcp_engine import ReshardLoadPlanner, ShardReader, ShardWriter, committed_steps, verify_checkpoint
from dcp_engine.storage.root import RunRoot
from dcp_engine.storage.steps import step_name

__all__ = ["Verdict", "cleaned_up", "digest_of", "fault_of", "judge", "judge_ends"]

_ATTEMPT = re.compile(r"\.tmp-step-[0-9]{8}-[0-9a-f]{32}")
_TRASH = re.compile(r"\.trash-[0-9a-f]{32}")
_STEP = re.compile(r"step-[0-9]{8}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found.

    Attributes:
        bad: broken promises in words; empty for none.
        outcome: ``"old"`` if what was there before is there, ``"new"`` if the save is, ``"aside"`` if the old one is in the trash,
            ``"retired"`` if the save is there and the oldest step has gone.
    """

    bad: tuple[str, ...]
    outcome: str


def fault_of(path: str, state: State) -> str | None:
    """What is wrong with the checkpoint at a path that must hold a state; None for nothing: every byte is checked, every value compared."""
    try:
        report = verify_checkpoint(path, threads=1)
        if report.faults:
            return f"verify: {report.faults[0]}"
        target = blank(state.whole)
        load_alone(target, ShardReader(path, threads=1), ReshardLoadPlanner())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return difference(target, state.whole)


def judge(case: Case, old: Mapping[int, State], new: State, after: State, root: str, board: Board) -> Verdict:
    """Looks at a root after a death, saves once more, and looks again.

    Args:
        old: what was there before, by step.
        new: what the save was given.
        after: what the next save is given.
        root: where the steps are.
        board: what the ranks noted.
    """
    bad: list[str] = []
    outcome = _outcome(case, old, root, board)
    if board.finished(0) and outcome not in ("new", "retired"):
        bad.append(f"the save was said to be through, and the {outcome} state is there")
    expected = _expected(case, old, new, outcome)
    bad += _look(root, expected)
    if case.scenario == "retention":
        bad += _look_at_root(root, expected)
    else:
        bad += _look_aside(case, old, new, root) if outcome == "aside" else _look_beside(case, root, outcome)
    if not bad:
        bad += _save_next(case, expected, after, root) if case.scenario != "retention" else _run_next(case, expected, after, root)
    return Verdict(tuple(bad), outcome)


def judge_ends(statuses: Sequence[int], fault: Fault | None) -> list[str]:
    """How the ranks ended: who had to die did, by SIGKILL, and the others ended as ranks do."""
    bad = []
    for rank, status in enumerate(statuses):
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        ended = os.WIFEXITED(status) and os.WEXITSTATUS(status) in ((DONE, STOPPED) if fault else (DONE,))
        may_be_killed = fault is not None and (rank == fault.rank or not fault.alone)
        if not ((killed and may_be_killed) or ended):
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
            bad.append(f"rank {rank} ended with {how}")
    return bad


def cleaned_up(root: str, statuses: Sequence[int], fault: Fault) -> list[str]:
    """A coordinator that saw a rank die, and went on to its next save, has left nothing of the failed one."""
    coordinator = statuses[0]
    if fault.rank == 0 or not os.WIFEXITED(coordinator) or os.WEXITSTATUS(coordinator) != STOPPED:
        return []
    return [f"{name} was not cleaned up" for name in _names(root) if _ATTEMPT.fullmatch(name)]


def digest_of(root: str) -> bytes:
    """SHA-256 of a tree: every name, what it is, every byte."""
    found = hashlib.sha256()
    _add_tree(found, root)
    return found.digest()


def _add_tree(found: hashlib._Hash, place: str) -> None:
    try:
        with os.scandir(place) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in ordered:
        found.update(f"{entry.name!r} {entry.stat(follow_symlinks=False).st_mode:o}\n".encode())
        if entry.is_dir(follow_symlinks=False):
            found.update(b"(")
            _add_tree(found, entry.path)
            found.update(b")")
        elif entry.is_symlink():
            found.update(os.fsencode(os.readlink(entry.path)))
        else:
            with open(entry.path, "rb", buffering=0) as file:
                content = file.read()
            found.update(f"{len(content)}\n".encode())
            found.update(content)


def _outcome(case: Case, old: Mapping[int, State], root: str, board: Board) -> str:
    """What must be there. Where a rank was killed by another's fault within the call that publishes, either may be."""
    if board.retired:
        return "retired"
    if board.published:
        return "new"
    if board.aside:
        return "aside"
    if not board.asked:
        return "old"
    place = case.path(root)
    return "new" if os.path.lexists(place) and (not case.replaces or fault_of(place, old[case.step]) is not None) else "old"


def _expected(case: Case, old: Mapping[int, State], new: State, outcome: str) -> dict[int, State]:
    expected = dict(old)
    if outcome in ("new", "retired"):
        expected[case.step] = new
    if outcome == "aside":
        del expected[case.step]
    if outcome == "retired" and case.retired_step is not None:
        del expected[case.retired_step]
    return expected


def _look(root: str, expected: Mapping[int, State]) -> list[str]:
    """Exactly these steps are there, each whole."""
    try:
        found = committed_steps(root)
    except Exception as error:
        return [f"steps cannot be listed: {type(error).__name__}: {error}"]
    if found != sorted(expected):
        return [f"steps {found} are committed, not {sorted(expected)}"]
    named = sorted(name for name in _names(root) if _STEP.fullmatch(name))
    if named != [step_name(step) for step in found]:
        return [f"names of steps are {named}, of which {found} are committed"]
    faults = [(step, fault_of(os.path.join(root, step_name(step)), state)) for step, state in expected.items()]
    return [f"step {step}: {fault}" for step, fault in faults if fault is not None]


def _look_beside(case: Case, root: str, outcome: str) -> list[str]:
    """No names but those of an attempt, or of what was replaced."""
    names = [name for name in _names(root) if not _STEP.fullmatch(name)]
    if len(names) > 1:
        return [f"more than one thing is left beside the steps: {names}"]
    if outcome == "new":
        # An exchange leaves the old one under the attempt's name, for a moment.
        return [] if case.replaces else [f"{name} is left after publishing" for name in names]
    return [f"{name} is left, and is no attempt" for name in names if not _ATTEMPT.fullmatch(name)]


def _look_at_root(root: str, expected: Mapping[int, State]) -> list[str]:
    """A root has its epochs and its hint, beside steps only attempts and trash, and names the newest step."""
    names = [name for name in _names(root) if not (_STEP.fullmatch(name) or _ATTEMPT.fullmatch(name) or _TRASH.fullmatch(name))]
    if sorted(names) != [".epochs", "LATEST"]:
        return [f"beside steps, attempts and trash there are {sorted(names)}"]
    try:
        hint, latest = RunRoot(root).hint(), RunRoot(root).latest()
    except Exception as error:
        return [f"the hint: {type(error).__name__}: {error}"]
    if hint is None or hint.step not in expected or latest != max(expected):
        return [f"LATEST names {hint}, the newest step is said to be {latest}, and is {max(expected)}"]
    return []


def _look_aside(case: Case, old: Mapping[int, State], new: State, root: str) -> list[str]:
    """Between two renames the old one is whole in the trash, and the new one whole in its attempt."""
    names = sorted(name for name in _names(root) if not _STEP.fullmatch(name))
    if len(names) != 2 or not _ATTEMPT.fullmatch(names[0]) or not _TRASH.fullmatch(names[1]):
        return [f"between two renames {names} are there"]
    faults = [fault_of(os.path.join(root, name), state) for name, state in zip(names, (new, old[case.step]), strict=True)]
    return [f"{name}: {fault}" for name, fault in zip(names, faults, strict=True) if fault is not None]


def _save_next(case: Case, expected: Mapping[int, State], after: State, root: str) -> list[str]:
    """The step that is missing, or the one that is replaced, or the next: saved by a writer that knows nothing of the dead one."""
    step = case.step if case.replaces or case.step not in expected else case.step + 1
    path = os.path.join(root, step_name(step))
    before = _entries(root)
    try:
        save_in_turn(after.ranks, lambda: ShardWriter(path, codec=case.codec, threads=1, overwrite=case.replaces))
    except Exception as error:
        return [f"the next save fails: {type(error).__name__}: {error}"]
    fault = fault_of(path, after)
    if fault is not None:
        return [f"the next save left step {step} bad: {fault}"]
    found = _entries(root)
    name = step_name(step)
    before.pop(name, None)
    if found.pop(name, None) is None or found != before:
        return [f"the next save left {sorted(found)} beside its step, where {sorted(before)} were, or changed one of them"]
    return []


def _run_next(case: Case, expected: Mapping[int, State], after: State, root: str) -> list[str]:
    """The next run claims the root, saves a step, keeps two: these two are there, and nothing else but what a root has."""
    step = max(expected) + 1
    try:
        steps = RunRoot(root)
        claim = steps.claim("next run")
        save_in_turn(after.ranks, lambda: ShardWriter(steps.path_of(step), codec=case.codec, threads=1, fence=claim))
        keep_two(steps, step, claim)
    except Exception as error:
        return [f"the next run fails: {type(error).__name__}: {error}"]
    left = {step - 1: expected[step - 1], step: after}
    names = sorted([".epochs", "LATEST", *map(step_name, left)])
    if sorted(_names(root)) != names:
        return [f"the next run left {sorted(_names(root))}, not {names}"]
    return [f"after the next run: {fault}" for fault in _look(root, left) + _look_at_root(root, left)]


def _names(root: str) -> list[str]:
    try:
        return os.listdir(root)
    except FileNotFoundError:
        return []


def _entries(root: str) -> dict[str, list[tuple[str, int, int, int]]]:
    """Everything in a root, with what would tell that a file is another, or was written to."""
    entries = {}
    for name in _names(root):
        place = os.path.join(root, name)
        with os.scandir(place) as files:
            infos = [(file.name, file.stat(follow_symlinks=False)) for file in files]
        entries[name] = sorted((inner, info.st_ino, info.st_size, info.st_mtime_ns) for inner, info in infos)
    return entries
