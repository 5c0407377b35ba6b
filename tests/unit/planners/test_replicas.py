"""Digests of content, and policies by key."""

from __future__ import annotations

import pickle

import pytest
import torch
import xxhash

from dcp_engine.errors import InvalidOptionError
from dcp_engine.planners import replicas
from dcp_engine.planners.replicas import ContentDigests, ReplicaPolicy, device_digest, host_digest

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def bits(dtype: torch.dtype, num_elements: int = 24) -> torch.Tensor:
    return torch.arange(num_elements * dtype.itemsize, dtype=torch.uint8).remainder(2 if dtype is torch.bool else 251).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_digest_is_of_the_bits_in_row_major_order(dtype: torch.dtype) -> None:
    value = bits(dtype)
    assert host_digest(value) == xxhash.xxh3_64_intdigest(value.view(torch.uint8).numpy()) | 1
    transposed = value.reshape(4, 6).t()
    assert host_digest(transposed) == host_digest(transposed.clone(memory_format=torch.contiguous_format))
    assert int(device_digest(transposed)) == int(device_digest(transposed.clone(memory_format=torch.contiguous_format)))
    assert host_digest(transposed) != host_digest(value)
    assert int(device_digest(transposed)) != int(device_digest(value))


@pytest.mark.parametrize("dtype", DTYPES)
def test_device_digest_sees_every_bit(dtype: torch.dtype) -> None:
    value = bits(dtype)
    seen = {int(device_digest(value))}
    for byte in range(0, value.numel() * dtype.itemsize, 3):
        for bit in (0,) if dtype is torch.bool else (0, 7):
            changed = value.clone()
            changed.view(torch.uint8)[byte] ^= 1 << bit
            seen.add(int(device_digest(changed)))
    assert len(seen) == 1 + len(range(0, value.numel() * dtype.itemsize, 3)) * (1 if dtype is torch.bool else 2)


def test_device_digest_sees_order_across_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_DEVICE_ELEMENTS", 4)
    value = torch.arange(10)
    swapped = value.clone()
    swapped[[0, 4]] = swapped[[4, 0]]
    assert int(device_digest(value)) != int(device_digest(swapped))
    assert int(device_digest(value)) == int(device_digest(value.clone()))
    assert int(device_digest(value[:0])) != int(device_digest(torch.zeros(1, dtype=torch.int64)))


def test_device_digest_sees_two_signs_change() -> None:
    value = torch.arange(1.0, 9.0, dtype=torch.float64)
    negated = value.clone()
    negated[[1, 6]] *= -1
    assert int(device_digest(value)) != int(device_digest(negated))


def test_nan_equals_itself_and_zero_has_a_sign() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert host_digest(nan) == host_digest(nan.clone())
    assert host_digest(nan) != host_digest(torch.tensor([float("nan"), -0.0]))


def test_conjugate_and_negative_views_are_digested_as_values() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert host_digest(value.conj()) == host_digest(value.conj().resolve_conj()) != host_digest(value)
    negative = value.conj().imag
    assert negative.is_neg()
    assert host_digest(negative) == host_digest(negative.clone()) != host_digest(value.imag.clone())
    assert int(device_digest(value.conj())) == int(device_digest(value.conj().resolve_conj()))


def test_large_strided_tensors_are_copied_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.arange(4 * 6 * 8).reshape(4, 6, 8).transpose(0, 2)
    expected = host_digest(value)
    monkeypatch.setattr(replicas, "_COPY_BYTES", 64)
    assert max(part.numel() * 8 for part in replicas._parts(value)) <= 64
    assert host_digest(value) == expected
    assert host_digest(value[:1]) == host_digest(value[:1].clone())


def test_slots_without_content_have_no_digest() -> None:
    digests = ContentDigests(4)
    digests.add(1, b"")
    digests.add(2, torch.zeros(0))
    values = digests.finish().tolist()
    assert values[0] == values[3] == 0
    assert values[1] == values[2] == xxhash.xxh3_64_intdigest(b"") | 1


def test_first_matching_pattern_decides() -> None:
    policy = pickle.loads(pickle.dumps(ReplicaPolicy({"model.bn.weight": "error", "*.bn.*": "lowest_rank"})))
    assert policy.of("model.bn.running_mean") == "lowest_rank"
    assert policy.of("model.bn.weight") == "error"
    assert policy.of("model.fc.weight") == "error"


def test_unknown_policy_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(InvalidOptionError, match="lowest_rank"):
        ReplicaPolicy({"*": "average"})  # type: ignore[dict-item]
