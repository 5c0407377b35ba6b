"""Nothing that is read from storage reaches an unpickler: watched by the interpreter itself, in a process of its own."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.damage import forge_block
from support.engine import save

from dcp_engine.storage.manifest import Manifest

WATCHED = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp, pickle
from collections import OrderedDict
from torch.distributed.checkpoint import DefaultLoadPlanner
from dcp_engine import ReshardLoadPlanner, ShardReader, verify_checkpoint
import dcp_engine.storage.reader, dcp_engine.storage.verify, dcp_engine.planners.load

sound, hostile = sys.argv[1:]
events = []
watching = False

def hook(event, args):
    if watching and (event.startswith(("pickle.", "os.system", "os.exec", "subprocess."))):
        events.append((event, *map(str, args[:2])))

sys.addaudithook(hook)
watching = True
pickle.loads(pickle.dumps(OrderedDict(a=1)))
watching = False
assert [event[:3] for event in events] == [("pickle.find_class", "collections", "OrderedDict")], "the watch itself does not work"
events.clear()

def template():
    state = {"model": {"w": torch.zeros(50, 3), "tiny": torch.zeros(2, dtype=torch.bfloat16)}}
    return state | {"plain": {"epoch": 0, "name": "", "list": [], "bytes": b"", "none": 1}}

def typed():
    return {"typed": {"ordered": OrderedDict(), "array": None, "set": None, "dtype": None, "tuple": ()}}

reads = {
    "verify": lambda path: verify_checkpoint(path).raise_if_bad(),
    "metadata": lambda path: ShardReader(path).read_metadata(),
    "ours": lambda path: dcp.load(template() | typed(), storage_reader=ShardReader(path), planner=ReshardLoadPlanner(strict=False)),
    "built": lambda path: dcp.load({}, storage_reader=ShardReader(path), planner=ReshardLoadPlanner(build_from_metadata=True)),
    "stock": lambda path: dcp.load(template(), storage_reader=ShardReader(path), planner=DefaultLoadPlanner()),
}
report = {}
for place in (sound, hostile):
    for name, read in reads.items():
        watching = True
        try:
            read(place)
            outcome = "read"
        except dcp.CheckpointException as error:
            outcome = type(error.failures[0][0]).__name__
        watching = False
        report[f"{name} {'sound' if place == sound else 'hostile'}"] = [outcome, *events]
        events.clear()
import builtins
report["executed"] = hasattr(builtins, "dcp_engine_was_executed")
print(json.dumps(report))
"""


class Boom:
    def __reduce__(self) -> Any:
        return (eval, ("__import__('builtins').__dict__.__setitem__('dcp_engine_was_executed', True)",))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("watched") / "a"
    state = {
        "model": {"w": torch.randn(50, 3), "tiny": torch.ones(2, dtype=torch.bfloat16)},
        "plain": {"epoch": 3, "name": "run", "list": [1, "x", None], "bytes": b"abc", "none": None},
        "typed": {"ordered": OrderedDict(a=1), "array": np.arange(3), "set": {1}, "dtype": torch.float16, "tuple": (1, torch.Size([2]))},
    }
    save(state, path)
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pickle lies where the object of ``plain.bytes`` was, and its digest is right."""
    path = tmp_path_factory.mktemp("watched") / "b"
    state = {
        "model": {"w": torch.randn(50, 3), "tiny": torch.ones(2, dtype=torch.bfloat16)},
        "plain": {"epoch": 3, "name": "run", "list": [1, "x", None], "bytes": bytes(400), "none": None},
    }
    save(state, path, codec="raw")
    manifest = Manifest.decode((path / "MANIFEST").read_bytes())
    entry = manifest.entry_id("plain.bytes")
    assert entry is not None
    chunk = manifest.chunk(int(manifest.entry(entry).chunks[0]))
    data = (path / manifest.files[chunk.file].name).read_bytes()
    position = int(manifest.block_position[chunk.first_block])
    block = bytearray(data[position : position + int(manifest.table.block_stored_bytes[chunk.first_block])])
    payload = pickle.dumps(Boom()).ljust(chunk.nbytes, b"\0")
    assert len(payload) == chunk.nbytes
    block[chunk.block_offset : chunk.block_offset + chunk.nbytes] = payload
    forge_block(path, "plain.epoch", bytes(block))
    return path


@pytest.fixture(scope="module")
def report(checkpoint: Path, hostile: Path) -> dict[str, Any]:
    """What one process saw while it read both in every way."""
    done = subprocess.run([sys.executable, "-c", WATCHED, str(checkpoint), str(hostile)], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("what", ["verify", "metadata", "ours", "built", "stock"])
def test_reading_unpickles_nothing(report: dict[str, Any], what: str) -> None:
    """A stock planner unpickles what our reader hands it, made in that process of a decoded value. Its spelling of bytes needs a function,
    plain values need nothing at all.
    """
    made_here = [["pickle.find_class", "_codecs", "encode"]] if what == "stock" else []
    assert report[f"{what} sound"] == ["read", *made_here]


@pytest.mark.parametrize("what", ["ours", "built", "stock"])
def test_a_pickle_in_storage_is_an_error_and_not_executed(report: dict[str, Any], what: str) -> None:
    assert report[f"{what} hostile"] == ["MalformedCheckpointError"]
    assert not report["executed"]


def test_what_needs_no_object_reads_past_a_pickle(report: dict[str, Any]) -> None:
    """Verifying is of bytes, and theirs are what the manifest says."""
    assert report["verify hostile"] == ["read"]
    assert report["metadata hostile"] == ["read"]
