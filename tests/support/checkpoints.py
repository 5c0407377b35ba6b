"""Small published checkpoints whose files hold known bytes, for tests of publishing: the format inside does not matter there."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dcp_engine.storage.publish import AttemptRef, Publisher, open_publisher

__all__ = ["FILES", "MANIFEST", "publish", "unprivileged", "world_readable_directory", "write_files"]

MANIFEST = bytes(range(256))
FILES = {"model-00000.shard": b"weights of rank 0", "model-00001.shard": b"weights of rank 1, longer", "optimizer-00000.shard": b""}


def write_files(publisher: Publisher, ref: AttemptRef, files: Mapping[str, bytes] = FILES) -> list[tuple[str, int]]:
    """What the ranks do between ``begin`` and ``commit``; returns what they report."""
    directory = publisher.attempt(ref)
    for name, content in files.items():
        file = directory.create(name)
        file.write([content])
        file.commit()
    publisher.seal(ref)
    return [(name, len(content)) for name, content in files.items()]


def publish(path: str | os.PathLike[str], *, manifest: bytes = MANIFEST, **options: Any) -> AttemptRef:
    """Publishes ``FILES`` and ``manifest`` at a path."""
    publisher = open_publisher(path, **options)
    ref = publisher.begin()
    publisher.commit(ref, manifest, write_files(publisher, ref))
    return ref


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Runs a block as a user whom permissions bind: the superuser passes all of them."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def world_readable_directory() -> Iterator[Path]:
    """A temporary directory that any user can enter, which pytest's own are not."""
    place = Path(tempfile.mkdtemp(prefix="dcp-engine-test-"))
    place.chmod(0o755)
    try:
        yield place
    finally:
        for directory, _, _ in os.walk(place):
            os.chmod(directory, 0o755)
        shutil.rmtree(place)
