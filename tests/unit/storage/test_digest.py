"""The checksums of blocks: values from the algorithms' own test vectors."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from dcp_engine.storage.digest import DIGESTS, SHA256, XXH3, DigestKind, DigestValue, digest_of_column

VECTORS: list[tuple[DigestKind, bytes, DigestValue]] = [
    (XXH3, b"", 0x2D06800538D394C2),
    (XXH3, b"abc", 0x78AF5F94892F3950),
    (SHA256, b"", bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")),
    (SHA256, b"abc", bytes.fromhex("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")),
]


@pytest.mark.parametrize(("kind", "data", "value"), VECTORS)
def test_values_are_those_of_the_algorithms(kind: DigestKind, data: bytes, value: DigestValue) -> None:
    assert kind.of(data) == value
    begun = kind.begin()
    for index in range(len(data)):
        begun.update(data[index : index + 1])
    assert begun.value() == value


@pytest.mark.parametrize("kind", DIGESTS.values())
def test_parts_are_one_run_of_bytes(kind: DigestKind) -> None:
    assert kind.of(b"a", memoryview(b"b"), b"", bytearray(b"c")) == kind.of(b"abc")
    assert kind.of() == kind.of(b"")


@pytest.mark.parametrize("kind", DIGESTS.values())
def test_a_column_gives_back_what_it_was_made_of_and_tells_its_kind(kind: DigestKind) -> None:
    values = [kind.of(bytes([value])) for value in range(3)]
    column = kind.column(values)
    assert column.tolist() == values
    assert digest_of_column(column) is kind
    assert digest_of_column(np.concatenate([kind.column(()), column])) is kind
    assert pickle.loads(pickle.dumps(kind)) is kind


def test_texts_have_all_digits() -> None:
    assert XXH3.text(1) == "0000000000000001"
    assert SHA256.text(bytes(31) + b"\1") == "0" * 63 + "1"
