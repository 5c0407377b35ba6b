"""What the ranks agree on, as it travels through the store."""

from __future__ import annotations

from dcp_engine.background.outcome import Outcome, State
from dcp_engine.errors import BackgroundSaveError, CommitStateUnknownError, ReplicaMismatchError, SaverDiedError, StorageError


def sent(outcome: Outcome) -> Outcome:
    return Outcome.decode(outcome.encode().encode())


def test_an_error_of_ours_arrives_with_class_rank_phase_and_text() -> None:
    outcome = sent(Outcome.of(SaverDiedError("it died", rank=3, found="exit code 17", remedy="look"), rank=1, phase="writing"))
    error = outcome.error(path="a/step-1", step=1)
    assert type(error) is SaverDiedError
    assert (error.message, error.rank, error.phase, error.found, error.remedy) == ("it died", 3, "writing", "exit code 17", "look")
    assert (error.path, error.step) == ("a/step-1", 1)


def test_any_other_error_arrives_as_its_text() -> None:
    error = sent(Outcome.of(ZeroDivisionError("by nought"), rank=2, phase="planning")).error(path=None, step=None)
    assert type(error) is BackgroundSaveError
    assert (error.rank, error.phase, error.found) == (2, "planning", "ZeroDivisionError: by nought")


def test_errors_with_attributes_of_their_own_can_be_made_again() -> None:
    for kind in (StorageError("full", errno=28), ReplicaMismatchError("differ", keys=("a",))):
        assert type(sent(Outcome.of(kind, rank=0, phase="writing")).error(path=None, step=None)) is type(kind)


def test_only_publishing_is_not_the_end() -> None:
    assert [state for state in State if not Outcome(state).is_final] == [State.PUBLISHING]
    assert Outcome.of(CommitStateUnknownError("who knows"), rank=0, phase="publishing").state is State.UNKNOWN


def test_a_long_text_is_cut() -> None:
    assert len(Outcome.of(ValueError("x" * 10**6), rank=0, phase="writing").encode()) < 5000
