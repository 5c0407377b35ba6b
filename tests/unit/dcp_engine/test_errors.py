"""The error tree: kinds are stable, and every error keeps its attributes through pickle and names its place."""

from __future__ import annotations

import pickle

import pytest

from dcp_engine import errors
from dcp_engine.errors import DcpEngineError

# Append-only: scripts match on these.
KINDS = {
    "DcpEngineError": "error",
    "UsageError": "usage",
    "InvalidOptionError": "invalid_option",
    "UnsupportedModeError": "unsupported_mode",
    "StateError": "state",
    "UnencodableObjectError": "unencodable_object",
    "UnsupportedTensorError": "unsupported_tensor",
    "DuplicateKeyError": "duplicate_key",
    "ReplicaMismatchError": "replica_mismatch",
    "KeyMismatchError": "key_mismatch",
    "ShapeMismatchError": "shape_mismatch",
    "DtypeMismatchError": "dtype_mismatch",
    "KindMismatchError": "kind_mismatch",
    "CheckpointNotFoundError": "checkpoint_not_found",
    "IncompleteCheckpointError": "incomplete_checkpoint",
    "RetiredError": "retired",
    "UnsupportedVersionError": "unsupported_version",
    "CorruptCheckpointError": "corrupt_checkpoint",
    "MissingFileError": "missing_file",
    "TruncatedFileError": "truncated_file",
    "DigestMismatchError": "digest_mismatch",
    "MalformedCheckpointError": "malformed_checkpoint",
    "LimitExceededError": "limit_exceeded",
    "SignatureError": "signature",
    "DecryptionError": "decryption",
    "EncryptionKeyError": "encryption_key",
    "UntrustedDataError": "untrusted_data",
    "StorageError": "storage",
    "StorageFullError": "storage_full",
    "StoragePermissionError": "storage_permission",
    "CommitError": "commit",
    "CheckpointExistsError": "checkpoint_exists",
    "ConcurrentCommitError": "concurrent_commit",
    "FencedError": "fenced",
    "StepInUseError": "step_in_use",
    "CommitStateUnknownError": "commit_state_unknown",
    "CoordinationError": "coordination",
    "RankDisagreementError": "rank_disagreement",
    "PlanError": "plan",
    "RankFailedError": "rank_failed",
    "ClosedError": "closed",
    "StagingError": "staging",
    "StagingMemoryError": "staging_memory",
    "StagingTimeoutError": "staging_timeout",
    "StagedDataChangedError": "staged_data_changed",
    "BackgroundSaveError": "background_save",
    "SaverDiedError": "saver_died",
    "EarlierSaveFailedError": "earlier_save_failed",
    "SaveTimeoutError": "save_timeout",
    "RankLostError": "rank_lost",
    "ExchangeBrokenError": "exchange_broken",
    "DataOrderError": "data_order",
    "MixedStepsError": "mixed_steps",
    "SaverBusyError": "saver_busy",
    "ProbeError": "probe",
}
BUILTIN_BASES = {
    "UsageError": ValueError,
    "UnencodableObjectError": TypeError,
    "UnsupportedTensorError": TypeError,
    "KeyMismatchError": KeyError,
    "CheckpointNotFoundError": FileNotFoundError,
    "StorageError": OSError,
    "StoragePermissionError": PermissionError,
    "CheckpointExistsError": FileExistsError,
}
PLACE = {
    "step": 41000,
    "path": "/ckpt/step-00041000",
    "file": "model-00003.shard",
    "tensor": "model.w",
    "rank": 3,
    "phase": "writing",
    "expected": "(8, 4)",
    "found": "(4, 4)",
    "remedy": "use another checkpoint",
}
EXTRA = {
    "ReplicaMismatchError": {"keys": ("a", "b"), "ranks": (((0, 1), (2,)), ((0,), (1, 2)))},
    "KeyMismatchError": {"missing": ("a",), "unexpected": ("b", "c")},
    "StorageError": {"errno": 28},
    "StorageFullError": {"errno": 28},
    "StoragePermissionError": {"errno": 13},
}


def _tree() -> dict[str, type[DcpEngineError]]:
    return {name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, DcpEngineError)}


def test_kinds_are_those_that_scripts_match_on() -> None:
    assert {name: cls.kind for name, cls in _tree().items()} == KINDS
    assert len(set(KINDS.values())) == len(KINDS)


def test_errors_are_caught_as_the_builtin_that_a_caller_expects() -> None:
    tree = _tree()
    for name, base in BUILTIN_BASES.items():
        assert issubclass(tree[name], base), name


@pytest.mark.parametrize("name", KINDS)
def test_pickle_keeps_type_message_and_every_attribute(name: str) -> None:
    attributes = PLACE | EXTRA.get(name, {})
    error = _tree()[name]("it broke", **attributes)
    error.__notes__ = ["seen on rank 3"]
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.message == "it broke"
    assert {key: getattr(copy, key) for key in attributes} == attributes
    assert copy.__notes__ == ["seen on rank 3"]
    assert str(copy) == str(error)


@pytest.mark.parametrize("name", KINDS)
def test_message_names_place_expected_found_and_remedy(name: str) -> None:
    assert str(_tree()[name]("it broke", **PLACE)) == (
        "it broke [step 41000, path '/ckpt/step-00041000', file 'model-00003.shard', tensor 'model.w', rank 3, phase 'writing']; "
        "expected (8, 4); found (4, 4); use another checkpoint"
    )


DAMAGE = [
    "CorruptCheckpointError",
    "MissingFileError",
    "TruncatedFileError",
    "DigestMismatchError",
    "DecryptionError",
    "MalformedCheckpointError",
]


@pytest.mark.parametrize("name", [name for name in KINDS if name not in DAMAGE])
def test_message_alone_stands_alone(name: str) -> None:
    error = _tree()[name]("it broke")
    assert str(error) == "it broke"
    assert [getattr(error, key) for key in PLACE] == [None] * len(PLACE)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_says_what_to_do_where_no_better_remedy_is_given(name: str) -> None:
    assert str(_tree()[name]("it broke")) == "it broke; load another checkpoint; if this one is a copy, copy it again"
    assert str(_tree()[name]("it broke", remedy="use tape")) == "it broke; use tape"


def test_rank_and_step_zero_are_named() -> None:
    assert str(DcpEngineError("it broke", step=0, rank=0)) == "it broke [step 0, rank 0]"
