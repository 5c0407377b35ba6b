"""``RunRoot``: the directory whose steps one run writes. Who may write, what is there, what goes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dcp_engine.errors import (
    CheckpointNotFoundError,
    CommitError,
    CorruptCheckpointError,
    DcpEngineError,
    InvalidOptionError,
    MissingFileError,
    StepInUseError,
    StorageError,
    UnsupportedVersionError,
)
from dcp_engine.storage.attempts import read_marker
from dcp_engine.storage.backends import Location, locate, resolve
from dcp_engine.storage.envelope import Marker
from dcp_engine.storage.epochs import MAX_EPOCH, EpochClaim, epochs_of, new_record, newest_epoch
from dcp_engine.storage.good_steps import open_newest_good
from dcp_engine.storage.holds import Hold
from dcp_engine.storage.keys import KeySource, secret_key
from dcp_engine.storage.label import check_run_id
from dcp_engine.storage.latest import LATEST_NAME, LatestHint
from dcp_engine.storage.publish import OpenCheckpoint, open_checkpoint
from dcp_engine.storage.retention import PruneReport, check_keep_last, surplus_steps
from dcp_engine.storage.root_posix import PosixRoot
from dcp_engine.storage.root_store import Retirement, RootStore, refuse_strangers
from dcp_engine.storage.step_info import Decision, StepInfo, look_at_step
from dcp_engine.storage.steps import committed_steps, step_name
from dcp_engine.storage.texts import MAX_TEXT_FILE_BYTES

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Decision", "EpochClaim", "RunRoot"]

_logger = logging.getLogger(__name__)
_MAX_CLAIMS = 1000
_TRASH_SECS = 3600.0


class RunRoot:
    """The directory, or the prefix of an object store, whose steps one run writes.

    What one process of a run does with it:

    1. ``claim``, once, before it writes: older runs that still live can publish nothing any more.
    2. ``decide``, on all ranks, for the step to go on from.
    3. for each save: ``ShardWriter(root.path_of(step), fence=claim)``, then ``set_latest`` and ``prune``.

    Nothing is ever touched but exact names: ``step-<8 digits or more>``, ``.tmp-<such a name>-<nonce>``, ``.trash-<32 hex digits>``,
    ``.epochs``, ``LATEST``; symbolic links of such names are left alone.

    Args:
        path: directory or URL. It need not exist.
        storage_options: keyword arguments of the fsspec file system of a URL, and ``request_timeout_secs``, as for ``ShardWriter``.
        signing_key: as that of :class:`~dcp_engine.storage.writer.ShardWriter`. What is not signed with it is no good step: ``steps``,
            ``latest`` and ``decide`` pass it over, and for ``prune``, ``retire`` and ``clean`` it counts as damaged.

    Raises:
        InvalidOptionError: the path cannot be one, there is no driver for the URL, or the key is none.

    Thread-safety: callable from any thread, and from any number of processes and hosts.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        signing_key: KeySource | None = None,
    ) -> None:
        self._location: Location = locate(path)
        self._signing_key = secret_key(signing_key, "signing_key")
        self._storage_options = dict(storage_options or {})
        self._store: RootStore
        if self._location.remote:
            from dcp_engine.storage.root_remote import RemoteRoot  # fsspec is only paid for where it is used

            self._store = RemoteRoot(self._location, self._storage_options)
        else:
            self._store = PosixRoot(self._location.path)

    @property
    def path(self) -> str:
        """Absolute path or URL."""
        return self._location.path

    def path_of(self, step: int) -> str:
        """Path or URL of a step, whether it is there or not. ``InvalidOptionError`` if it cannot be the number of one."""
        return self._location.child(step_name(step)).path

    # -- who writes -----------------------------------------------------------------------------------------------------

    def claim(self, run_id: str = "") -> EpochClaim:
        """Takes the next epoch of the root, and every attempt of an older one away from its writer.

        When it returns, no writer with an older claim can publish here (see ``docs/decisions/0016`` for the reasons and their limits).

        Args:
            run_id: name of the run, which others are told who were overtaken.

        Raises:
            InvalidOptionError: the path is a file, a checkpoint or in a step of another root, or ``run_id`` is no name.
            FencedError: somebody else has claimed the epoch after this one meanwhile.
            StorageError kinds: nothing can be written there, or it cannot be told who claimed it.
        """
        check_run_id(run_id)
        self._store.prepare()
        epoch = newest_epoch(resolve(epochs_of(self._location), self._storage_options)) + 1
        # Others may create the same one, or a late listing may lack some: none is left out.
        for record in (new_record(number, run_id) for number in range(epoch, min(epoch + _MAX_CLAIMS, MAX_EPOCH))):
            if self._store.create_epoch(record):
                claim = EpochClaim(self.path, record, self._storage_options)
                self._store.revoke(claim.check)
                claim.check()
                return claim
        raise CommitError(
            "no epoch could be claimed",
            path=self.path,
            expected=f"one free number from {epoch} on, below {MAX_EPOCH}",
            found="all taken",
            remedy="find out what claims epochs there all the time",
        )

    # -- what is there --------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed steps, ascending; see :func:`~dcp_engine.storage.steps.committed_steps`."""
        return committed_steps(self.path, storage_options=self._storage_options, signing_key=self._signing_key)

    def latest(self) -> int | None:
        """The newest committed step; None if there is none. With a signing key: the newest good one, which is signed under its own name.

        LATEST helps where a listing is late, and is never believed unseen: what is wrong with it is a warning in the log.

        Raises:
            StorageError: the root cannot be read. UnsupportedVersionError: there is a key, and a newer release wrote the newest step.
        """
        steps = self.steps()
        try:
            hint = self.hint()
        except DcpEngineError as error:
            _logger.warning("the hint at the newest step is of no use: %s", error)
            hint = None
        newest = max([*steps, *([] if hint is None else [hint.step])], default=None)
        if self._signing_key is not None and newest is not None:
            good = self._newest_good({*steps, newest}, pass_newer_versions=False)
            newest = None if good is None else good[0]
        if hint is not None and newest is not None and hint.step < newest:
            _logger.info("LATEST of %s is behind: it names step %d, and %d is there", self.path, hint.step, newest)
        return newest

    def hint(self) -> LatestHint | None:
        """What LATEST says, held against the step that it names; None if there is no LATEST.

        Raises:
            MissingFileError: LATEST is no regular file. Other CorruptCheckpointError kinds: it is damaged, or foreign.
            CheckpointNotFoundError: the step that it names is not there. RetiredError: likewise, and why.
            CommitError: another checkpoint has the name of that step.
        """
        directory = resolve(self._location, self._storage_options)
        try:
            hint = LatestHint.decode(directory.read_small(LATEST_NAME, MAX_TEXT_FILE_BYTES), path=self.path)
        except MissingFileError as error:
            if error.found is None:
                return None
            raise
        there = self._marker(hint.step).nonce
        if there != hint.nonce:
            raise CommitError(
                "LATEST names another checkpoint than the one of that step",
                path=self.path,
                file=LATEST_NAME,
                step=hint.step,
                expected=hint.nonce,
                found=there,
                remedy="it comes from another root, or that step was written again: set_latest repairs it",
            )
        return hint

    def set_latest(self, step: int, claim: EpochClaim | None = None) -> None:
        """Has LATEST name a committed step. Atomic and durable.

        Raises:
            CheckpointNotFoundError kinds, CorruptCheckpointError: there is no such step. FencedError: the claim was overtaken.
            StorageError kinds: LATEST could not be written; the old one stays.
        """
        nonce = self._marker(step).nonce
        if claim is not None:
            self._check(claim)
        self._store.put_latest(LatestHint(step, nonce).encode())

    def look(self, step: int) -> StepInfo:
        """What is told of a step without reading its data. Its files are all there then, each of the right size.

        Raises:
            CheckpointNotFoundError kinds: there is no such step. CorruptCheckpointError kinds: a file is missing, or its size is another
                one, or the manifest is damaged, or not signed. UnsupportedVersionError. StorageError kinds: it cannot be told.
        """
        self._store.check_entry(step)
        place = self._location.child(step_name(step))
        return look_at_step(place, step, storage_options=self._storage_options, signing_key=self._signing_key)

    def check_own(self) -> None:
        """Returns if this is the root of a run, or may become one: see :func:`~dcp_engine.storage.root_store.refuse_strangers`."""
        refuse_strangers(resolve(self._location, self._storage_options))

    def decide(self, group: dist.ProcessGroup | None = None, *, choose: Callable[[], StepInfo | None] | None = None) -> Decision | None:
        """The newest good step, the same on all ranks: the lowest rank of the group looks, all others check that they see that very one.

        Args:
            group: with a backend for CPU tensors; all its ranks call this together. None: this process alone decides.
            choose: called on the rank that looks, in place of taking the newest good step.

        Returns:
            A decision with its ``step``; None, if there is no committed step. Damaged ones are passed over with a warning.

        Raises:
            RankDisagreementError: on all ranks, naming the first that sees something else, and what.
            UnsupportedVersionError: a newer release wrote the newest one.
            CorruptCheckpointError: there are committed steps, and none of them is good.
            StorageError kinds, of whichever rank.
        """
        look = self._decide if choose is None else lambda: info.decision if (info := choose()) else None
        if group is None:
            return look()
        from dcp_engine.storage.root_decision import decide_together

        return decide_together(group, look, self._seen, self._seen_steps, path=self.path)

    def free_bytes(self) -> int | None:
        """Bytes that the storage has left for this user; None for an object store. Quotas may allow less. Raises ``StorageError`` kinds."""
        return self._store.free_bytes()

    def hold(self, step: int) -> Hold:
        """Keeps a step from being retired, for a copy for instance, until the hold is released or its process ends.

        The hold is not ``locked`` on object stores, on file systems without locks, and where there is no such step.
        """
        self.path_of(step)
        return self._store.hold(step)

    # -- what goes ------------------------------------------------------------------------------------------------------

    def retire(self, step: int, claim: EpochClaim) -> None:
        """Removes a committed step. It is gone at once or not at all.

        Raises:
            InvalidOptionError: no other good step would be left, or the claim is of another root.
            FencedError: the claim was overtaken. StepInUseError: somebody reads it.
            CheckpointNotFoundError kinds, CorruptCheckpointError: there is no such step.
            StorageError kinds: it could not be removed.
        """
        self._check(claim)
        nonce = self._marker(step).nonce
        good = self._newest_good(set(self._committed()) - {step})
        if good is None:
            raise InvalidOptionError(
                "the last good step is never retired",
                path=self.path,
                step=step,
                expected="another good step beside it",
                found="none",
                remedy="publish another one first",
            )
        with good[1].hold:
            self._check(claim)
            outcome = self._store.retire(step, nonce)
        if outcome is Retirement.IN_USE:
            raise StepInUseError("somebody reads the step", path=self.path, step=step, remedy="try again when that is over")

    def prune(self, keep_last: int, claim: EpochClaim) -> PruneReport:
        """Retires all but the newest steps. A step that is being read stays until a later call.

        The newest good step stays whatever happens, also against others who prune or retire meanwhile: it is held while this runs. What is
        newer than that one, and damaged, stays as well and does not count.

        Args:
            keep_last: how many steps to keep, at least 1.

        Raises:
            InvalidOptionError: ``keep_last`` is out of range, or the claim is of another root.
            FencedError: the claim was overtaken, before all was done.
            StorageError kinds: likewise.
        """
        check_keep_last(keep_last)
        self._check(claim)
        committed = self._committed()
        good = self._newest_good(committed)
        if good is None:
            return PruneReport((), (), tuple(committed), guarded=None)
        retired, in_use, guarded = list[int](), list[int](), list[bool]()
        with good[1].hold:
            for step in surplus_steps(committed, newest_good=good[0], keep_last=keep_last):
                try:
                    nonce = self._marker(step).nonce
                except (CheckpointNotFoundError, CorruptCheckpointError, UnsupportedVersionError):
                    continue  # somebody else retired it, or this release cannot tell what it is
                self._check(claim)
                outcome = self._store.retire(step, nonce)
                if outcome is Retirement.CHANGED:
                    continue
                (in_use if outcome is Retirement.IN_USE else retired).append(step)
                guarded.append(outcome is not Retirement.UNGUARDED)
        kept = tuple(step for step in self._committed() if step not in in_use)
        return PruneReport(tuple(retired), tuple(in_use), kept, all(guarded) if guarded else None)

    def clean(self, claim: EpochClaim, *, older_than_secs: float = _TRASH_SECS) -> tuple[str, ...]:
        """Removes what was retired, and what ``claim`` took away from older runs.

        Args:
            older_than_secs: how long it must have been so, by the clock of the file system's server. On object stores it does not matter:
                nobody can publish what lies under a tombstone.

        Returns:
            the names of what is gone.

        Raises:
            InvalidOptionError: the time is out of range, or the claim is of another root. FencedError: the claim was overtaken.
            StorageError kinds.
        """
        number = isinstance(older_than_secs, (int, float)) and not isinstance(older_than_secs, bool)
        if not number or not older_than_secs >= 0:
            raise InvalidOptionError("older_than_secs is not a time", expected="seconds, at least 0", found=repr(older_than_secs)[:300])
        self._check(claim)
        good = self._newest_good(self._committed())
        if good is None:
            return self._store.clean(older_than_secs, keep_whole=True)
        with good[1].hold:
            return self._store.clean(older_than_secs, keep_whole=False)

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _check(self, claim: EpochClaim) -> None:
        if not isinstance(claim, EpochClaim) or claim.root != self.path:
            raise InvalidOptionError(
                "this is not a claim of this root",
                path=self.path,
                expected="what claim() of this root returned",
                found=claim.root if isinstance(claim, EpochClaim) else repr(claim)[:300],
            )
        claim.check()

    def _committed(self) -> list[int]:
        """The committed steps, whoever has signed them."""
        return committed_steps(self.path, storage_options=self._storage_options)

    def _marker(self, step: int) -> Marker:
        """COMPLETE of a committed step. Raises as ``open_checkpoint``."""
        path = self.path_of(step)
        self._store.check_entry(step)
        try:
            return read_marker(resolve(path, self._storage_options))
        except MissingFileError:
            opened = open_checkpoint(path, storage_options=self._storage_options)  # says what is there instead
            opened.hold.release()
            return opened.marker

    def _newest_good(self, steps: Iterable[int], *, pass_newer_versions: bool = True) -> tuple[int, OpenCheckpoint] | None:
        return open_newest_good(
            self._location,
            steps,
            storage_options=self._storage_options,
            signing_key=self._signing_key,
            pass_newer_versions=pass_newer_versions,
        )

    def _decide(self) -> Decision | None:
        committed = self._committed()
        if not committed:
            return None
        good = self._newest_good(committed, pass_newer_versions=False)
        if good is None:
            raise CorruptCheckpointError(
                "there are committed steps, and none of them is good",
                path=self.path,
                found=", ".join(map(str, committed[-5:])),
                remedy="the log says what is wrong with each; repair or remove them to start afresh",
            )
        step, opened = good
        with opened.hold:
            return Decision(step, opened.marker.nonce, opened.marker.manifest_sha256)

    def _seen_steps(self) -> str | None:
        """The committed steps that this process sees, in words; None for none."""
        steps = self._committed()
        return f"{len(steps)} of them, the newest step {steps[-1]}" if steps else None

    def _seen(self, step: int) -> Decision | str:
        """What this process sees of a step, or in words what it sees instead."""
        try:
            marker = self._marker(step)
        except StorageError:
            raise
        except DcpEngineError as error:
            return str(error)
        return Decision(step, marker.nonce, marker.manifest_sha256)
