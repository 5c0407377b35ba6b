"""Bad disks and steps that are there already: an error with the reason, nothing published, and the previous checkpoint as it was."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import unprivileged, world_readable_directory
from support.engine import attempts_in, contents, failure_of, load, refused, save
from support.ranks import RankPool
from support.tmpfs import resize, small_disk, used_pages
from support.values import full, same
from torch.distributed.checkpoint import CheckpointException

from dcp_engine import verify_checkpoint
from dcp_engine.errors import (
    CheckpointExistsError,
    StorageError,
    StoragePermissionError,
)

SHAPES = {"a": (50, 40), "b": (3_000,), "c": (7,)}


def state(*, filled: bool = True, prefix: str = "") -> dict[str, Any]:
    tensors = {key: full(prefix + key, shape) if filled else torch.zeros(shape) for key, shape in SHAPES.items()}
    return {"model": tensors, "optimizer": {"m": tensors["a"] + 1, "lr": 0.5 if filled else 0.0}}


def assert_previous(path: Path) -> None:
    assert verify_checkpoint(path).faults == ()
    found = load(state(filled=False), path)
    assert all(same(found["model"][key], value) for key, value in state()["model"].items())


# -- no permission -------------------------------------------------------------------------------------------------------


def test_a_read_only_parent_is_refused_with_the_reason() -> None:
    with world_readable_directory() as place:
        (place / "runs").mkdir(mode=0o755)
        save(state(), place / "runs" / "step-00000001")
        (place / "runs").chmod(0o555)
        with unprivileged():
            error = refused(save, state(), place / "runs" / "step-00000002")
        assert isinstance(error, StoragePermissionError)
        assert str(place / "runs") in str(error)
        assert [entry.name for entry in (place / "runs").iterdir()] == ["step-00000001"]
        assert_previous(place / "runs" / "step-00000001")


def test_an_existing_empty_read_only_target_does_not_lose_the_save_silently() -> None:
    """Either it is replaced whole or the save is refused; the target is never left half written."""
    with world_readable_directory() as place:
        runs = place / "runs"
        runs.mkdir()
        runs.chmod(0o777)
        with unprivileged():
            (runs / "a").mkdir()
            (runs / "a").chmod(0o555)
            try:
                save(state(), runs / "a")
                failure = None
            except CheckpointException as error:
                failure = failure_of(error)
            if failure is None:
                assert_previous(runs / "a")
            else:
                assert isinstance(failure, StorageError)
                assert list((runs / "a").iterdir()) == []


def test_the_weights_load_where_all_else_may_not_be_read() -> None:
    """A serving job is granted the weights alone."""
    with world_readable_directory() as place:
        save(state(), place / "a")
        (place / "a").chmod(0o755)
        for file in (place / "a").iterdir():
            file.chmod(0o644 if file.name in ("COMPLETE", "MANIFEST") or file.name.startswith("model-") else 0o600)
        with unprivileged():
            found = load({"model": state(filled=False)["model"]}, place / "a", keys=["model"])
            assert all(same(found["model"][key], value) for key, value in state()["model"].items())
            error = refused(load, state(filled=False), place / "a")
            assert isinstance(error, StoragePermissionError)
            assert error.file == "optimizer-00000.shard"
            faults = verify_checkpoint(place / "a").faults
        assert [(type(fault), fault.file) for fault in faults] == [(StoragePermissionError, "optimizer-00000.shard")]


@pytest.mark.parametrize("name", ["COMPLETE", "MANIFEST", "model-00000.shard"])
def test_a_file_that_may_not_be_read_is_named(name: str) -> None:
    with world_readable_directory() as place:
        save(state(), place / "a")
        (place / "a" / name).chmod(0)
        with unprivileged():
            error = refused(load, state(filled=False), place / "a")
        assert isinstance(error, StoragePermissionError)
        assert error.file == name


# -- no space ------------------------------------------------------------------------------------------------------------


def fill_disk(directory: str) -> list[tuple[str, str | None]] | None:
    """Save with one page more each time, until it works: the disk is full at data, at metadata, and at every page between.

    Returns kind and file of each error, or ``None`` where this process may not mount.
    """
    place = Path(directory) / "disk"
    outcomes: list[tuple[str, str | None]] = []
    with small_disk(place) as mounted:
        if not mounted:
            return None
        save(state(), place / "step-00000001", codec="raw")
        before = contents(place / "step-00000001")
        taken = used_pages(place)
        for spare in range(100):
            resize(place, taken + spare)
            try:
                save(state(prefix="next"), place / "step-00000002", codec="raw")
            except CheckpointException as error:
                failure = failure_of(error)
                outcomes.append((failure.kind, failure.file))
                assert attempts_in(place) == ["step-00000001"]
                assert contents(place / "step-00000001") == before
                for attempt in place.glob(".tmp-*"):  # the writer's next save removes it; here the pages are counted
                    shutil.rmtree(attempt)
                assert used_pages(place) == taken
            else:
                assert verify_checkpoint(place / "step-00000002").faults == ()
                assert_previous(place / "step-00000001")
                return [*outcomes, ("saved", None)]
    return outcomes


def limit_files(directory: str) -> list[tuple[str, str | None]]:
    """The same by a limit on the size of a file, which needs no privilege: full at data, then, without any data, at metadata."""
    outcomes: list[tuple[str, str | None]] = []
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    save(state(), Path(directory) / "one", codec="raw")
    # The last file's end is its trailer of 64 bytes; two saves differ by a byte or two, since a random nonce is compressed in the footer.
    size = (Path(directory) / "one" / "model-00000.shard").stat().st_size
    nothing = {f"key {i}": torch.empty(0) for i in range(100)}
    for limit, value in ((0, state()), (4096, state()), (size - 32, state()), (100, nothing)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            failure = refused(save, value, Path(directory) / "two", codec="raw")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert attempts_in(Path(directory)) == ["one"]
        outcomes.append((failure.kind, failure.file))
    assert_previous(Path(directory) / "one")
    return outcomes


def test_a_disk_that_fills_at_any_page_fails_the_save_and_nothing_else(ranks: RankPool, tmp_path: Path) -> None:
    (outcomes,) = ranks.run(1, fill_disk, str(tmp_path))
    if outcomes is None:
        return  # nobody may mount here; the test below fills by other means
    assert outcomes[-1] == ("saved", None)
    assert len(outcomes) > 8
    assert {kind for kind, _ in outcomes[:-1]} == {"storage_full"}
    assert {"model-00000.shard", "MANIFEST", "COMPLETE"} <= {file for _, file in outcomes[:-1]}


def test_a_limit_on_files_fails_the_save_and_nothing_else(ranks: RankPool, tmp_path: Path) -> None:
    (outcomes,) = ranks.run(1, limit_files, str(tmp_path))
    # Workers write the files of a rank side by side: where the limit stops both, either may be the first to fail.
    assert [kind for kind, _ in outcomes] == ["storage_full"] * 4
    assert {file for _, file in outcomes[:2]} <= {"model-00000.shard", "optimizer-00000.shard"}
    assert [file for _, file in outcomes[2:]] == ["model-00000.shard", "MANIFEST"]


# -- the same step again -------------------------------------------------------------------------------------------------


def test_a_step_that_exists_is_never_mixed_with_another(tmp_path: Path) -> None:
    path = tmp_path / "step-00000003"
    save(state(), path)
    before = contents(path)
    error = refused(save, state(prefix="other"), path)
    assert isinstance(error, CheckpointExistsError)
    assert error.path == str(path)
    assert contents(path) == before
    save(state(prefix="other"), path, overwrite=True)
    found = load(state(filled=False), path)
    assert all(same(found["model"][key], value) for key, value in state(prefix="other")["model"].items())
    assert attempts_in(tmp_path) == ["step-00000003"]


CRASH = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from dcp_engine import BalancedSavePlanner, ShardWriter
class Dying(ShardWriter):
    def write_data(self, plan, planner):
        result = super().write_data(plan, planner)
        os._exit(17)
state = {"model": {"stale": torch.ones(9)}, "ema": {"stale": torch.ones(3)}}
dcp.save(state, storage_writer=Dying(sys.argv[1], components={"ema.*": "ema"}), planner=BalancedSavePlanner())
"""


def test_what_a_crash_left_behind_is_no_part_of_the_next_save(tmp_path: Path) -> None:
    """Shards of another component and another world are lying about when the step is saved again."""
    path = tmp_path / "step-00000003"
    assert subprocess.run([sys.executable, "-c", CRASH, str(path)], check=False).returncode == 17
    left = [entry for entry in tmp_path.iterdir() if entry.name.startswith(".tmp-step-00000003-")]
    assert len(left) == 1
    assert {file.name for file in left[0].iterdir()} == {"ema-00000.shard", "model-00000.shard"}
    assert not path.exists()
    save(state(), path)
    assert_previous(path)
    assert {file.name for file in path.iterdir()} == {"COMPLETE", "MANIFEST", "model-00000.shard", "optimizer-00000.shard"}


def test_files_of_others_in_the_target_are_never_touched(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        error = refused(save, state(), path, overwrite=overwrite)
        assert isinstance(error, CheckpointExistsError | StorageError)
    assert (path / "notes.txt").read_text() == "mine"
    assert attempts_in(tmp_path) == ["a"]
