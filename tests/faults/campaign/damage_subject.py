"""The checkpoint that is damaged, and its two judges: the engine's own verifying and loading, ready to run again and again."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support.damage import regions

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter, verify_checkpoint
from dcp_engine.errors import DcpEngineError
from dcp_engine.storage.access import cipher_of, manifest_of
from dcp_engine.storage.keys import secret_key
from dcp_engine.storage.publish import open_checkpoint
from dcp_engine.storage.verify import verify_files
from dcp_engine.storage.workers import WorkerPool

__all__ = ["ENCRYPTION_KEY", "KEYS", "MIN_BYTES", "SIGNING_KEY", "Region", "Subject", "state_of"]

SIGNING_KEY, ENCRYPTION_KEY = b"s" * 32, b"e" * 32
KEYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "secret": {"signing_key": SIGNING_KEY, "encryption_key": ENCRYPTION_KEY},
    "signed": {"signing_key": SIGNING_KEY},
    "encrypted": {"encryption_key": ENCRYPTION_KEY},
}
"""What each kind of subject is protected with."""
MIN_BYTES = 65_536
_BYTES_IN_FLIGHT = 16 << 20


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of one kind in one file: from ``begin`` up to, not including, ``end``."""

    file: str
    kind: str
    begin: int
    end: int


def state_of(seed: int, *, filled: bool = True) -> dict[str, Any]:
    """Every kind of block: raw, zstd, planes, several small tensors in one, an object."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "model": {
            "floats": torch.randn(60, 40, generator=generator),
            "halves": torch.randn(64, 32, generator=generator).bfloat16(),
            "regular": torch.arange(3000) // 7,
            "scalar": torch.randn((), generator=generator),
        },
        "optimizer": {"noise": torch.randint(0, 255, (38_000,), dtype=torch.uint8, generator=generator)},
    }
    if not filled:
        tensors = {part: {key: torch.zeros_like(value) for key, value in values.items()} for part, values in tensors.items()}
    return {**tensors, "extra": {"run": "seven" if filled else "", "list": [1, None, "x"] if filled else []}}


class Subject:
    """A checkpoint in a directory of its own, to be damaged and restored, and what the engine says of it.

    Args:
        place: an empty directory.
        kind: of :data:`KEYS`.
        seed: of its values.

    Attributes:
        path: the checkpoint.
        other: another save of the very same state.
        contents: what each file of the checkpoint holds.
        regions: all bytes of it.
    """

    def __init__(self, place: Path, kind: str, seed: int) -> None:
        self.keys = KEYS[kind]
        self.path, self.other = place / "a", place / "b"
        self._state = state_of(seed)
        for path in (self.path, self.other):
            with _quiet():
                writer = ShardWriter(path, codec="planes", threads=1, **self.keys)
                dcp.save(self._state, storage_writer=writer, planner=BalancedSavePlanner())
        self.contents = {entry.name: entry.read_bytes() for entry in sorted(self.path.iterdir())}
        assert sum(map(len, self.contents.values())) >= MIN_BYTES
        self.regions = [Region(*region) for region in regions(self.path)]
        opened = open_checkpoint(self.path)
        opened.hold.release()
        self._directory = opened.directory
        self._manifest = manifest_of(opened, signing_key=secret_key(self.keys.get("signing_key"), "signing_key"), path=str(self.path))
        self._cipher = cipher_of(self._manifest, secret_key(self.keys.get("encryption_key"), "encryption_key"), path=str(self.path))
        self._indices = {record.name: index for index, record in enumerate(self._manifest.files)}
        self._pool = WorkerPool(1).__enter__()
        self._target = state_of(seed, filled=False)
        self._reader, self._planner, self._plan = self._planned()

    def close(self) -> None:
        """Remove everything."""
        self._pool.__exit__(None, None, None)
        shutil.rmtree(self.path.parent, ignore_errors=True)

    # -- judges -----------------------------------------------------------------------------------------------------------

    def verdicts(self, file: str) -> tuple[DcpEngineError | None, DcpEngineError | None]:
        """What verifying and loading say, where nothing but ``file`` may be damaged; ``None``: nothing is wrong.

        What is sound is not read anew for each of half a million faults: a damaged shard is judged with the manifest that was read before.
        """
        if file not in self._indices:
            return self.verify(), self.load()
        index = self._indices[file]
        faults = verify_files(
            self._manifest, self._directory, [index], cipher=self._cipher, pool=self._pool, bytes_in_flight=_BYTES_IN_FLIGHT
        )
        return (faults[0] if faults else None), _error_of(lambda: self._reader.read_data(self._plan, self._planner))

    def verify(self) -> DcpEngineError | None:
        """What verifying says, from COMPLETE on."""
        try:
            faults = verify_checkpoint(self.path, threads=1, **self.keys).faults
        except DcpEngineError as error:
            return error
        return faults[0] if faults else None

    def load(self) -> DcpEngineError | None:
        """What loading says, from COMPLETE on, by the calls of ``dcp.load`` in their order."""
        return _error_of(lambda: self._read(*self._planned()))

    def loads_what_was_saved(self) -> bool:
        """Whether a load succeeds and every value is the one that was saved."""
        target = self._target
        for values in target.values():
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        if self.load() is not None:
            return False
        pairs = [(values[key], target[part][key]) for part, values in self._state.items() for key in values]
        return all(torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two for one, two in pairs)

    def _planned(self) -> tuple[ShardReader, ReshardLoadPlanner, Any]:
        reader, planner = ShardReader(self.path, threads=1, bytes_in_flight=_BYTES_IN_FLIGHT, **self.keys), ReshardLoadPlanner()
        metadata = reader.read_metadata()
        planner.set_up_planner(self._target, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        local = reader.prepare_local_plan(planner.create_local_plan())
        plan = reader.prepare_global_plan(planner.create_global_plan([local]))[0]
        return reader, planner, planner.finish_plan(plan)

    @staticmethod
    def _read(reader: ShardReader, planner: ReshardLoadPlanner, plan: Any) -> None:
        reader.read_data(plan, planner)

    # -- damage -----------------------------------------------------------------------------------------------------------

    def flip(self, file: str, bit: int) -> None:
        """Change one bit of a file, or change it back: bit ``i`` is bit ``i % 8`` of byte ``i // 8``."""
        with open(self.path / file, "r+b", buffering=0) as handle:
            before = os.pread(handle.fileno(), 1, bit // 8)
            os.pwrite(handle.fileno(), bytes([before[0] ^ 1 << bit % 8]), bit // 8)

    def write(self, file: str, content: bytes) -> None:
        """Replace a file's content."""
        (self.path / file).write_bytes(content)

    def restore(self, *files: str) -> None:
        """Put files back as they were, whatever lies there."""
        for file in files:
            place = self.path / file
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)
            place.write_bytes(self.contents[file])


def _error_of(read: Callable[[], object]) -> DcpEngineError | None:
    try:
        read()
    except DcpEngineError as error:
        return error
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield
