"""Every error of the engine: one tree, grouped by what a caller can do about it.

    DcpEngineError
    ├── UsageError (ValueError)            fix the call
    │   ├── InvalidOptionError             an argument is out of range; the message names what is valid
    │   ├── UnsupportedModeError           a mode of DCP that this engine refuses
    │   ├── ClosedError                    a stager or saver that was closed is used again
    │   └── ProbeError                     the function that was passed as probe fails
    ├── StateError                         fix the state that was handed in
    │   ├── UnencodableObjectError         a value that the format has no type for
    │   ├── UnsupportedTensorError         a dtype, layout or placement that cannot be stored
    │   ├── DuplicateKeyError              two values would get one name
    │   ├── ReplicaMismatchError           ranks hold different values under one key
    │   ├── KeyMismatchError               missing or unexpected keys
    │   ├── ShapeMismatchError             one key, two shapes
    │   ├── DtypeMismatchError             one key, two dtypes, and the policy forbids a cast
    │   ├── KindMismatchError              a tensor on one side, an object on the other
    │   ├── MixedStepsError                parts of the state, or ranks, are not at one step
    │   └── DataOrderError                 a position in other data, or one that does not fit its own ids
    ├── CheckpointNotFoundError            look elsewhere, or start afresh on purpose
    │   ├── IncompleteCheckpointError      an attempt that was never committed
    │   └── RetiredError                   it was there, and was retired on purpose
    ├── UnsupportedVersionError            upgrade the engine
    ├── CorruptCheckpointError             take another checkpoint
    │   ├── MissingFileError               a file that the manifest names is not there
    │   ├── TruncatedFileError             a file is shorter or longer than it must be
    │   ├── DigestMismatchError            bytes are not the ones that were written
    │   ├── SignatureError                 not signed with the reader's key
    │   ├── DecryptionError                an encrypted block is not the one that was encrypted
    │   ├── MalformedCheckpointError       bytes that no writer of ours produces
    │   └── LimitExceededError             a size beyond the format's limits
    ├── EncryptionKeyError                 pass the encryption key that the message names
    ├── UntrustedDataError                 opaque (pickled) data, refused unless asked for
    ├── StorageError                       the storage failed; repair it, then try again
    │   ├── StorageFullError               no space or quota left
    │   └── StoragePermissionError         not allowed to read or write there
    ├── CommitError                        nothing was replaced; look at what is there
    │   ├── CheckpointExistsError          the target holds something already
    │   ├── ConcurrentCommitError          another writer published the same checkpoint
    │   ├── CommitStateUnknownError        cannot be told whether the publish took effect
    │   ├── FencedError                    a newer run has taken over the root: this one must stop writing there
    │   └── StepInUseError                 somebody reads the step that was to be retired
    ├── StagingError                       the copy beside training was not made; nothing was written
    │   ├── StagingMemoryError             the buffers do not fit into memory or the budget
    │   ├── StagingTimeoutError            both buffers were busy until the deadline
    │   └── StagedDataChangedError         what was about to be published is not what was staged
    ├── BackgroundSaveError                saving beside training failed outside the save itself
    │   ├── RankLostError                  a rank is dead, stopped or hangs; replace it
    │   ├── SaverDiedError                 the process that saves has died
    │   ├── EarlierSaveFailedError         not saved: a rank raised the failure of an earlier save instead
    │   ├── SaverBusyError                 not saved: an earlier save was under way, and waiting for it was not wanted
    │   └── SaveTimeoutError               the save is not done within the time that was given; it goes on
    ├── CoordinationError                  ranks do not agree
    │   ├── RankDisagreementError          ranks see different checkpoints or file systems
    │   ├── PlanError                      the global plan does not cover the state exactly once
    │   ├── RankFailedError                a rank failed, with an error that is not of the engine
    │   └── ExchangeBrokenError            ranks lost each other, most likely since another one failed
    └── ResumeTestError                    a test of a resumed run says no; look at what it names
        ├── ResumeMismatchError            the resumed run is another one (also an AssertionError)
        ├── LegFailedError                 a leg of the run failed, hung, or was never at its stop
        └── StoppedOnPurposeError          raised inside a run that is to end by an exception

An error carries a stable ``kind`` (append-only; scripts may match on it) and the place where it happened as attributes:
``step``, ``path``, ``file``, ``tensor``, ``rank``, ``phase``, ``expected``, ``found``, ``remedy``. Each is ``None`` where it does not
apply. Errors cross ranks by pickle with all their attributes.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar


class DcpEngineError(Exception):
    """Base of all errors of the engine.

    Args:
        message: what happened, one sentence without a full stop.
        step: training step of the checkpoint.
        path: checkpoint directory or URL.
        file: file within the checkpoint.
        tensor: key of the tensor or object.
        rank: rank on which it happened (of the process group in use).
        phase: of a save, what that rank was doing.
        expected: what should have been found.
        found: what was found.
        remedy: what the caller can do, one sentence without a full stop. ``None``: the class's :attr:`usual_remedy`.

    Thread-safety: layers that know more about the place fill it in while the error travels up, in one thread; nobody changes it later.
    """

    kind: ClassVar[str] = "error"
    usual_remedy: ClassVar[str | None] = None
    """``remedy`` of errors of this class that are raised without one."""

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        path: str | None = None,
        file: str | None = None,
        tensor: str | None = None,
        rank: int | None = None,
        phase: str | None = None,
        expected: object = None,
        found: object = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.step = step
        self.path = path
        self.file = file
        self.tensor = tensor
        self.rank = rank
        self.phase = phase
        self.expected = expected
        self.found = found
        self.remedy = self.usual_remedy if remedy is None else remedy

    def __str__(self) -> str:
        place = [
            f"{name} {value!r}" if isinstance(value, str) else f"{name} {value}"
            for name in ("step", "path", "file", "tensor", "rank", "phase")
            if (value := getattr(self, name)) is not None
        ]
        parts = [self.message + (f" [{', '.join(place)}]" if place else "")]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.found is not None:
            parts.append(f"found {self.found}")
        if self.remedy is not None:
            parts.append(self.remedy)
        return "; ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException's own reduce passes ``args`` only, which loses every keyword.
        return (_rebuild, (type(self), self.message), dict(self.__dict__))


def can_travel(error: BaseException) -> bool:
    """Whether an exception of any class can be sent to another process and made there again."""
    if "<locals>" in type(error).__qualname__:
        return False
    try:
        copy.deepcopy(error)  # takes the same way, but for the bytes
    except Exception:  # noqa: BLE001  whatever a class of the user's raises
        return False
    return True


def _rebuild(cls: type[DcpEngineError], message: str) -> DcpEngineError:
    return cls(message)


class UsageError(DcpEngineError, ValueError):
    """The call itself is wrong: nothing was touched."""

    kind = "usage"


class InvalidOptionError(UsageError):
    """An option is out of range or contradicts another one."""

    kind = "invalid_option"


class UnsupportedModeError(UsageError):
    """A mode of DCP that the engine refuses, with the reason."""

    kind = "unsupported_mode"


class ClosedError(UsageError):
    """The object was closed before."""

    kind = "closed"


class ProbeError(UsageError):
    """The function that was passed as probe raised, or gave values that cannot be compared."""

    kind = "probe"


class StateError(DcpEngineError):
    """The state handed in cannot be saved, or does not fit what is stored."""

    kind = "state"


class UnencodableObjectError(StateError, TypeError):
    """An object that is not a tensor has a type that the format cannot hold."""

    kind = "unencodable_object"


class UnsupportedTensorError(StateError, TypeError):
    """A tensor's dtype, layout, subclass or placement cannot be stored."""

    kind = "unsupported_tensor"


class DuplicateKeyError(StateError):
    """Two different paths of the state would get the same key."""

    kind = "duplicate_key"


class ReplicaMismatchError(StateError):
    """Ranks hold different values where replicas were expected.

    Attributes:
        keys: the keys that differ, sorted.
        ranks: for each key, the ranks that hold it, grouped by equal content: a tuple of tuples.
    """

    kind = "replica_mismatch"

    def __init__(
        self,
        message: str,
        *,
        keys: tuple[str, ...] = (),
        ranks: tuple[tuple[tuple[int, ...], ...], ...] = (),
        **place: Any,
    ) -> None:
        super().__init__(message, **place)
        self.keys = keys
        self.ranks = ranks


class KeyMismatchError(StateError, KeyError):
    """Keys of the state and keys of the checkpoint differ.

    Attributes:
        missing: keys that the state wants and the checkpoint lacks, sorted.
        unexpected: keys that the checkpoint has and no rank's state wants, sorted.
    """

    kind = "key_mismatch"

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        **place: Any,
    ) -> None:
        super().__init__(message, **place)
        self.missing = missing
        self.unexpected = unexpected


class ShapeMismatchError(StateError):
    """A tensor's global shape in the state differs from the stored one."""

    kind = "shape_mismatch"


class DtypeMismatchError(StateError):
    """A tensor's dtype in the state differs from the stored one and the dtype policy forbids the cast."""

    kind = "dtype_mismatch"


class KindMismatchError(StateError):
    """A key is a tensor on one side and an object on the other."""

    kind = "kind_mismatch"


class MixedStepsError(StateError):
    """What was to be saved is no state of one step: optimizers, schedulers, counters or data stand elsewhere, or ranks do.

    Attributes:
        disagreements: each in words, with the ranks and values.
    """

    kind = "mixed_steps"

    def __init__(self, message: str, *, disagreements: tuple[str, ...] = (), **place: Any) -> None:
        super().__init__(message, **place)
        self.disagreements = disagreements


class DataOrderError(StateError):
    """A position in the data is one in another data set, seed or order, or samples that were recorded with it are not those around it."""

    kind = "data_order"


class CheckpointNotFoundError(DcpEngineError, FileNotFoundError):
    """There is no checkpoint at the path."""

    kind = "checkpoint_not_found"


class IncompleteCheckpointError(CheckpointNotFoundError):
    """There are files of a checkpoint, but no valid COMPLETE marker: it was never committed."""

    kind = "incomplete_checkpoint"


class RetiredError(CheckpointNotFoundError):
    """The checkpoint was retired: a tombstone is where COMPLETE was."""

    kind = "retired"


class UnsupportedVersionError(DcpEngineError):
    """The checkpoint was written in a format version that this release does not read."""

    kind = "unsupported_version"


class CorruptCheckpointError(DcpEngineError):
    """The checkpoint is damaged. Its data must not be used."""

    kind = "corrupt_checkpoint"
    usual_remedy: ClassVar[str | None] = "load another checkpoint; if this one is a copy, copy it again"


class MissingFileError(CorruptCheckpointError):
    """A file named by the manifest is absent or is not a regular file."""

    kind = "missing_file"


class TruncatedFileError(CorruptCheckpointError):
    """A file is shorter or longer than recorded."""

    kind = "truncated_file"


class DigestMismatchError(CorruptCheckpointError):
    """Stored bytes do not have the recorded digest."""

    kind = "digest_mismatch"


class SignatureError(CorruptCheckpointError):
    """The checkpoint is not signed with the reader's key, or not as it is now."""

    kind = "signature"
    usual_remedy = None  # it depends on whether the checkpoint or the key is the wrong one


class DecryptionError(CorruptCheckpointError):
    """An encrypted block does not authenticate: it was replaced by somebody who could repair its digest, but not its tag."""

    kind = "decryption"


class MalformedCheckpointError(CorruptCheckpointError):
    """A structure that breaks a rule of the format."""

    kind = "malformed_checkpoint"


class LimitExceededError(CorruptCheckpointError):
    """A size or count beyond the format's limits or the reader's budget."""

    kind = "limit_exceeded"
    usual_remedy = None  # a save can meet a limit, too


class EncryptionKeyError(DcpEngineError):
    """The checkpoint's blocks are encrypted and no key was passed, or another one; or a key was passed and they are not."""

    kind = "encryption_key"


class UntrustedDataError(DcpEngineError):
    """Opaque bytes that only an unpickler could read, which the engine never does unasked."""

    kind = "untrusted_data"


class StorageError(DcpEngineError, OSError):
    """The storage refused or failed an operation. ``errno`` is kept where the system gave one."""

    kind = "storage"

    def __init__(self, message: str, *, errno: int | None = None, **place: Any) -> None:
        super().__init__(message, **place)
        self.errno = errno

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError keeps errno in a slot of its own, which is not part of ``__dict__``.
        rebuild, args, state = super().__reduce__()
        return (rebuild, args, {**state, "errno": self.errno})


class StorageFullError(StorageError):
    """No space, or no quota, left."""

    kind = "storage_full"


class StoragePermissionError(StorageError, PermissionError):
    """Not allowed to read or write there."""

    kind = "storage_permission"


class CommitError(DcpEngineError):
    """Publishing did not happen, or cannot be proven. Nothing that existed was replaced."""

    kind = "commit"


class CheckpointExistsError(CommitError, FileExistsError):
    """The target exists and overwriting was not asked for."""

    kind = "checkpoint_exists"


class ConcurrentCommitError(CommitError):
    """Another writer published at the same path first."""

    kind = "concurrent_commit"


class CommitStateUnknownError(CommitError):
    """It cannot be told whether the publish took effect; nothing was deleted."""

    kind = "commit_state_unknown"


class FencedError(CommitError):
    """A newer run has claimed the root. Nothing was published; whoever gets this must stop writing there."""

    kind = "fenced"


class StepInUseError(CommitError):
    """Somebody reads or copies the step that was to be retired."""

    kind = "step_in_use"


class StagingError(DcpEngineError):
    """The state could not be copied for a save beside training."""

    kind = "staging"


class StagingMemoryError(StagingError, MemoryError):
    """The staging buffers would not fit: into the budget, into memory, or into shared memory.

    Attributes:
        needed_bytes: what the state takes, all buffers together.
        available_bytes: what there is.
    """

    kind = "staging_memory"

    def __init__(self, message: str, *, needed_bytes: int = 0, available_bytes: int = 0, **place: Any) -> None:
        super().__init__(message, **place)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class StagingTimeoutError(StagingError, TimeoutError):
    """No staging buffer became free in time; the message names who holds them."""

    kind = "staging_timeout"


class StagedDataChangedError(StagingError):
    """Staged bytes are not those that were copied from the state."""

    kind = "staged_data_changed"


class BackgroundSaveError(DcpEngineError):
    """A save beside training could not be carried out, for a reason outside of the save."""

    kind = "background_save"


class RankLostError(BackgroundSaveError):
    """A rank took no part in a save any more: its process is dead or stopped, its write hangs, or it never came."""

    kind = "rank_lost"


class SaverDiedError(BackgroundSaveError):
    """The process that saves for this rank, or for another one, has died."""

    kind = "saver_died"


class EarlierSaveFailedError(BackgroundSaveError):
    """A state was not saved, on any rank, because one of them raised the failure of an earlier save, which nobody had read, instead."""

    kind = "earlier_save_failed"


class SaverBusyError(BackgroundSaveError):
    """A state was not saved, on any rank, because an earlier save was still under way on one of them."""

    kind = "saver_busy"


class SaveTimeoutError(BackgroundSaveError, TimeoutError):
    """Waiting for a save took as long as was allowed. The save goes on."""

    kind = "save_timeout"


class CoordinationError(DcpEngineError):
    """The ranks do not agree with each other."""

    kind = "coordination"


class RankDisagreementError(CoordinationError):
    """Ranks see different checkpoints, or a file system that is not the same one."""

    kind = "rank_disagreement"


class PlanError(CoordinationError):
    """The plans of all ranks together do not describe every tensor exactly once."""

    kind = "plan"


class RankFailedError(CoordinationError):
    """A rank failed in a work that all of them share, with an error of a type that is not ours: ``found`` is its text."""

    kind = "rank_failed"


class ExchangeBrokenError(CoordinationError):
    """Ranks cannot reach each other: a consequence of what happened to another rank, most likely."""

    kind = "exchange_broken"


class ResumeTestError(DcpEngineError):
    """A comparison of a resumed run with one that never stopped did not come out, or not well."""

    kind = "resume_test"


class ResumeMismatchError(ResumeTestError, AssertionError):
    """A run that was stopped and resumed is another one than the run that never stopped.

    Attributes:
        what: the part of the state that differs first: ``data``, ``rng``, ``scheduler``, ``scaler``, ``progress``, ``model``,
            ``optimizer``, ``values``, or another component.
        report: the ``ResumeReport``; None where there is none.
    """

    kind = "resume_mismatch"

    def __init__(self, message: str, *, what: str = "", report: Any = None, **place: Any) -> None:
        super().__init__(message, **place)
        self.what = what
        self.report = report


class LegFailedError(ResumeTestError):
    """A leg of a run that is compared did not do what it had to: it failed, hung, was never at its stop, or told nothing."""

    kind = "leg_failed"


class StoppedOnPurposeError(ResumeTestError):
    """Raised inside a run that is compared, because it is to end by an exception there."""

    kind = "stopped_on_purpose"
