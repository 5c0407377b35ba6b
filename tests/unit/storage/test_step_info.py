"""What a root tells of a step without reading its data, and whose directory it is."""

from __future__ import annotations

import pickle
import uuid
from pathlib import Path

import pytest
from support.roots import RootPlace

from dcp_engine import RunRoot
from dcp_engine.errors import CheckpointNotFoundError, InvalidOptionError, MissingFileError, SignatureError, TruncatedFileError
from dcp_engine.storage.entry_names import strangers
from dcp_engine.storage.step_info import Decision


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> RootPlace:
    return RootPlace(str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}/run")


def test_a_step_tells_who_wrote_it_when_and_with_what(place: RootPlace) -> None:
    place.save(7, metadata={"note": "a"}, run_id="r")
    info = place.root().look(7)
    assert (info.step, info.path, info.run_id, info.world_size) == (7, place.root().path_of(7), "r", 1)
    assert info.metadata == {"note": "a"}
    assert info.saved_at is not None
    assert info.stored_bytes > 4096  # a header, and little else
    assert info.decision == place.root().decide() == Decision(7, info.nonce, info.manifest_sha256)
    assert pickle.loads(pickle.dumps(info)) == info


def test_a_step_that_is_not_there_or_not_whole_says_what_is_wrong(tmp_path: Path) -> None:
    place = RootPlace(str(tmp_path))
    place.save(1)
    place.save(2, signing_key=b"k" * 16)
    with pytest.raises(CheckpointNotFoundError):
        place.root().look(3)
    (tmp_path / "step-00000004").symlink_to(tmp_path / "step-00000001")
    with pytest.raises(CheckpointNotFoundError, match="no step of the root"):
        place.root().look(4)
    assert RunRoot(tmp_path, signing_key=b"k" * 16).look(2).step == 2
    with pytest.raises(SignatureError):
        RunRoot(tmp_path, signing_key=b"k" * 16).look(1)
    file = next((tmp_path / "step-00000001").glob("*.shard"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(TruncatedFileError):
        place.root().look(1)
    file.unlink()
    with pytest.raises(MissingFileError):
        place.root().look(1)


def test_a_step_may_be_chosen_in_place_of_the_newest(place: RootPlace) -> None:
    for step in (1, 2):
        place.save(step)
    root = place.root()
    assert root.decide(choose=lambda: root.look(1)) == root.look(1).decision
    assert root.decide(choose=lambda: None) is None


def test_a_root_may_be_new_empty_or_a_runs(place: RootPlace) -> None:
    place.root().check_own()
    place.save(1)
    place.root().check_own()


def test_a_file_a_checkpoint_and_somebody_elses_directory_are_no_roots(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    with pytest.raises(InvalidOptionError, match="cannot be a root"):
        RunRoot(tmp_path / "file").check_own()
    with pytest.raises(InvalidOptionError, match="somebody else") as caught:
        RunRoot(tmp_path).check_own()
    assert caught.value.found == "'file'"
    RootPlace(str(tmp_path / "run")).save(1)
    with pytest.raises(InvalidOptionError, match="this is a checkpoint"):
        RunRoot(tmp_path / "run" / "step-00000001").check_own()


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], []),
        ([".git", "lost+found"], []),
        (["b", "a"], ["a", "b"]),
        (["step-7", "a"], ["a", "step-7"]),
        (["a", "step-00000007"], []),
        (["a", "LATEST"], []),
        (["a", ".epochs"], []),
        (["a", f".trash-{'0' * 32}"], []),
        (["a", f".tmp-step-00000001-{'0' * 32}"], []),
        (["a", f".tmp-model-{'0' * 32}"], ["a"]),
    ],
)
def test_what_makes_a_directory_somebody_elses(names: list[str], found: list[str]) -> None:
    assert strangers(names) == found
