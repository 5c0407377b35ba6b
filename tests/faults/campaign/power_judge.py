"""What the real readers say about a state that a power cut left, and whether that breaks a promise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from faults.campaign.file_system_model import Tree
from faults.campaign.io_events import Change, Event, Note
from faults.campaign.modelled_calls import ModelledCalls
from faults.campaign.power_traces import State
from torch.distributed.checkpoint import CheckpointException

from dcp_engine import ReshardLoadPlanner, ShardReader
from dcp_engine.errors import DcpEngineError
from dcp_engine.storage.attempts import MANIFEST_NAME, MARKER_NAME, marker_of
from dcp_engine.storage.backends.calls import installed
from dcp_engine.storage.envelope import Marker, parse_marker
from dcp_engine.storage.epochs import EpochRecord
from dcp_engine.storage.latest import LATEST_NAME, LatestHint
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.publish import open_checkpoint
from dcp_engine.storage.steps import parse_step_name, step_name
from dcp_engine.storage.verify import verify_checkpoint

__all__ = ["Judge", "Promise", "Promised", "Verdict", "promises", "state_digest"]

_PLACE = "/power/judged"
_SENTINEL = 0x5EED


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a directory is to a reader.

    Attributes:
        content: name of the state that it holds bit for bit; empty if none.
        refused: why a reader refuses it; empty if none does.
        silent: how a reader was deceived; empty if none was.
    """

    content: str = ""
    refused: str = ""
    silent: str = ""


@dataclass(frozen=True, slots=True)
class Promise:
    """What must hold of a step's name, whatever a power cut leaves.

    Attributes:
        contents: what it may hold, where it exists.
        required: it exists.
        anywhere: it may lie whole under another name instead, which a person can give back: see the two renames of ``publish_posix``.
    """

    contents: frozenset[str] = frozenset()
    required: bool = False
    anywhere: bool = False


@dataclass(frozen=True, slots=True)
class Promised:
    """What must hold at a moment.

    Attributes:
        steps: by path of the step.
        latest: the step that LATEST must name; empty if it need not be there.
        abandoned: paths of directories that are being removed: what is in them vouches for nothing any more.
        epochs: the claim in each epoch's file whose claim has returned, by path.
        revoked: paths of attempts that were taken away from writers who may live on.
    """

    steps: Mapping[str, Promise]
    latest: str
    abandoned: frozenset[str]
    epochs: Mapping[str, str] = field(default_factory=dict)
    revoked: frozenset[str] = frozenset()


def promises(events: Sequence[Event], *, can_exchange: bool) -> Promised:
    """What was promised by the time of some events."""
    found: dict[str, Promise] = {}
    abandoned: set[str] = set()
    latest = ""
    epochs: dict[str, str] = {}
    revoked: set[str] = set()
    for event in events:
        before = found.get(event.path, Promise())
        match event:
            case Change(what="unlink" | "rmdir"):
                abandoned |= {event.path, event.path.rpartition("/")[0]}
            case Note(what="saving"):
                anywhere = before.required and not can_exchange
                found[event.path] = Promise(before.contents | {event.content}, before.required, anywhere)
            case Note(what="saved"):
                found[event.path] = Promise(frozenset({event.content}), required=True)
            case Note(what="retiring"):
                found[event.path] = replace(before, required=False)
            case Note(what="retired"):
                found[event.path] = Promise()
            case Note(what="set aside"):
                found[event.path] = Promise(frozenset({event.content}), required=True, anywhere=True)
            case Note(what="pointed", path=path):
                latest = path
            case Note(what="claimed", path=path, content=claim):
                epochs[path] = claim
            case Note(what="revoked", path=path):
                revoked.add(path)
            case _:
                pass
    return Promised(found, latest, frozenset(abandoned), epochs, frozenset(revoked))


class Judge:
    """Verdicts, each made once for equal directories.

    Args:
        contents: every state that was ever saved, by name; all of the same keys and shapes.
        verify: the loading reader checks digests. False is a mutant.

    Attributes:
        num_read: directories that the readers were really asked about.
    """

    def __init__(self, contents: Mapping[str, State], *, verify: bool = True) -> None:
        self._contents = contents
        self._verify = verify
        self._known: dict[bytes, Verdict] = {}
        self._rescues: dict[bytes, str] = {}
        self.num_read = 0

    def broken(self, tree: Tree, root: str, promised: Promised) -> str:
        """The promise that a state breaks, in words; empty for none."""
        directory = tree.find(root)
        table = {} if directory is None else tree.table(directory)
        for name, inode in table.items():
            path = f"{root}/{name}"
            if parse_step_name(name) is not None:
                if text := self._broken_step(self.verdict(tree, inode), promised.steps.get(path, Promise())):
                    return f"{path}: {text}"
            elif (
                name.startswith(".tmp-")
                and path not in promised.abandoned
                and (text := self._broken_attempt(tree, inode, name.rpartition("-")[2]))
            ):
                return f"an attempt: {text}"
        for path, promise in promised.steps.items():
            if promise.required and tree.find(path) is None and not (promise.anywhere and self._lies_somewhere(tree, table, promise)):
                return f"{path}: is lost"
        return self._broken_latest(tree, root, table, promised) or _broken_claim(tree, promised)

    def verdict(self, tree: Tree, directory: int) -> Verdict:
        """What a directory under a step's name is."""
        key = tree.digest(directory)
        if key not in self._known:
            self._known[key] = self._read(_files(tree, directory))
        return self._known[key]

    def _lies_somewhere(self, tree: Tree, table: Mapping[str, int], promise: Promise) -> bool:
        return any(self.verdict(tree, inode).content in promise.contents for name, inode in table.items() if name[0] == ".")

    def _broken_latest(self, tree: Tree, root: str, table: Mapping[str, int], promised: Promised) -> str:
        """LATEST is a hint, but moves by one rename, to what is durable: no power cut makes it name what is not there."""
        if LATEST_NAME not in table:
            return "LATEST is lost" if promised.latest else ""
        try:
            hint = LatestHint.decode(tree.content(table[LATEST_NAME]), path=root)
        except DcpEngineError as error:
            return f"LATEST: {error}"
        named = f"{root}/{step_name(hint.step)}"
        step = tree.find(named)
        there = "" if step is None else _nonce_of(lambda: parse_marker(_files(tree, step).get(MARKER_NAME, b"")))
        if there != hint.nonce:
            return f"LATEST names {named}, which is not there"
        return f"LATEST names {named}, and {promised.latest} was the newest when the power was cut" if named < promised.latest else ""

    def _broken_step(self, verdict: Verdict, promise: Promise) -> str:
        if verdict.silent:
            return f"SILENT: {verdict.silent}"
        if verdict.refused:
            return f"exists, and is refused: {verdict.refused}"
        if verdict.content not in promise.contents:
            return f"holds {verdict.content!r}, which it must not: {sorted(promise.contents)}"
        return ""

    def _broken_attempt(self, tree: Tree, directory: int, nonce: str) -> str:
        """``docs/format.md``: shards, MANIFEST and COMPLETE, each durable before the next. So a whole one vouches for all before it.

        Not so one of another attempt: stale bytes of an old checkpoint may come to lie there, and whoever rescues an attempt by hand
        compares its nonce.
        """
        if MANIFEST_NAME not in tree.table(directory) and MARKER_NAME not in tree.table(directory):
            return ""
        key = tree.digest(directory) + nonce.encode()
        if key not in self._rescues:
            self._rescues[key] = self._rescue(_files(tree, directory), nonce)
        return self._rescues[key]

    def _rescue(self, files: Mapping[str, bytes], nonce: str) -> str:
        manifest = files.get(MANIFEST_NAME, b"")
        if _nonce_of(lambda: parse_marker(files.get(MARKER_NAME, b""))) == nonce:
            found, first = self._read(files), MARKER_NAME
        elif _nonce_of(lambda: Manifest.decode(manifest)) == nonce:
            found, first = self._read({**files, MARKER_NAME: marker_of(nonce, ".", manifest)}), MANIFEST_NAME
        else:
            return ""
        if found.silent:
            return f"SILENT: {found.silent}"
        return f"{first} is whole, and what it vouches for is refused: {found.refused}" if found.refused else ""

    def _read(self, files: Mapping[str, bytes]) -> Verdict:
        self.num_read += 1
        with installed(ModelledCalls(_PLACE, files)):
            try:
                open_checkpoint(_PLACE).hold.release()
                faults = verify_checkpoint(_PLACE, threads=1).faults
            except DcpEngineError as error:
                return Verdict(refused=str(error))
            content, refused = self._load()
        if refused and not faults:
            return Verdict(silent=f"verify finds nothing where load refuses: {refused}")
        if not refused and not content:
            return Verdict(silent="load gives what nobody saved")
        return Verdict(content, refused or "; ".join(map(str, faults[:1])))

    def _load(self) -> tuple[str, str]:
        """Name of the state that a load gives, if it is one that was saved; why it was refused."""
        some = next(iter(self._contents.values()))
        state = {part: {key: torch.full_like(value, _SENTINEL) for key, value in tensors.items()} for part, tensors in some.items()}
        before = logging.root.manager.disable
        logging.disable()  # torch writes the whole trace of every load that is refused, of which there are thousands
        try:
            reader = ShardReader(_PLACE, verify=self._verify, threads=1)
            dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner(), no_dist=True)
        except CheckpointException as error:
            return "", str(error.failures[0][0])
        finally:
            logging.disable(before)
        return next((name for name, content in self._contents.items() if _equal(state, content)), ""), ""


def _broken_claim(tree: Tree, promised: Promised) -> str:
    """Whoever has claimed a root is told of whoever claims it after him, and no older writer gets his attempt back."""
    for path, claim in promised.epochs.items():
        inode = tree.find(path)
        if inode is None:
            return f"{path}: the epoch is lost, so that whoever it has overtaken may write"
        try:
            record = EpochRecord.decode(tree.content(inode), file=path.rpartition("/")[2], path=path)
        except DcpEngineError as error:
            return f"{path}: {error}"
        if record.claim != claim:
            return f"{path}: holds another claim"
    back = [path for path in promised.revoked if tree.find(path) is not None]
    return f"{back[0]}: the attempt has its name back, and its writer may publish it" if back else ""


def _equal(state: State, content: State) -> bool:
    return all(torch.equal(value, content[part][key]) for part, tensors in state.items() for key, value in tensors.items())


def _nonce_of(parse: Callable[[], Marker | Manifest]) -> str:
    try:
        return parse().nonce
    except DcpEngineError:
        return ""


def _files(tree: Tree, directory: int) -> dict[str, bytes]:
    return {name: tree.content(inode) for name, inode in tree.table(directory).items() if not tree.is_directory(inode)}


def state_digest(tree: Tree, root: str) -> int:
    """A number for a whole state: equal for equal ones."""
    inode = tree.find(root.split("/")[0])
    return 0 if inode is None else xxhash.xxh3_64_intdigest(tree.digest(inode))
