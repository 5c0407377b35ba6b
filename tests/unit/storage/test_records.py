"""The vocabulary between the layers."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from dcp_engine.storage.packed_table import PackedTable
from dcp_engine.storage.records import PipelineOptions, ShardReceipt


def test_a_receipt_crosses_ranks_by_pickle() -> None:
    receipt = ShardReceipt("model-00003.shard", "model", 3, 8, "0" * 32, 8192, PackedTable(b"e", b"l", b"o"), b"\1" * 32, 100, 64)
    assert pickle.loads(pickle.dumps(receipt)) == receipt


def test_records_are_frozen() -> None:
    options = PipelineOptions(threads=1, bytes_in_flight=1 << 22, codec="raw", level=1, verify=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.threads = 2  # type: ignore[misc]


def test_options_are_named_at_the_call() -> None:
    with pytest.raises(TypeError):
        PipelineOptions(1, 1 << 22, "raw", 1, True)  # type: ignore[misc]
