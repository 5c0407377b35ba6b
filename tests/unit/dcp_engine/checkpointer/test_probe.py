"""Probes: what they record, what they leave alone, and how two records compare."""

from __future__ import annotations

import hashlib
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dcp_engine.checkpointer.probe import ProbeRecord, compare, run_probe
from dcp_engine.errors import InvalidOptionError, MalformedCheckpointError, ProbeError
from dcp_engine.train_state.rng import Generators


def record(**values: Any) -> ProbeRecord:
    return run_probe(lambda: values)


# -- what is recorded -----------------------------------------------------------------------------------------------------


def test_value_is_its_bytes() -> None:
    (value,) = run_probe(lambda: torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)).values
    assert (value.name, value.dtype, value.shape) == ("loss", "torch.bfloat16", (1, 2))
    assert value.sha256 == hashlib.sha256(bytes.fromhex("803f00c0")).hexdigest()
    assert value.kept == struct.pack("<2d", 1.0, -2.0)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (torch.tensor(1.0), ["loss"]),
        (1.5, ["loss"]),
        ((torch.ones(2), torch.tensor(0.5)), ["output", "loss"]),
        (({"logits": torch.ones(2), "cache": None}, 0.5), ["output.logits", "loss"]),
        ({"a": 1, "b": [np.ones(2), (2.0, 3)]}, ["a", "b.0", "b.1.0", "b.1.1"]),
        (np.float32(0.5), ["loss"]),
    ],
)
def test_probes_give_a_loss_or_both_or_values_by_name(given: Any, names: list[str]) -> None:
    assert [value.name for value in run_probe(lambda: given).values] == names


@pytest.mark.parametrize(
    ("given", "dtype", "kept"),
    [
        (0.1, "torch.float64", [0.1]),
        (2**40, "torch.int64", [float(2**40)]),
        (True, "torch.bool", [1.0]),
        (1 + 2j, "torch.complex128", [1.0, 2.0]),
        (torch.tensor([1 - 1j, 3j]).conj(), "torch.complex64", [1.0, 1.0, 0.0, -3.0]),
        (torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn), "torch.float8_e4m3fn", [0.5, 448.0]),
        (torch.zeros(0, 3), "torch.float32", []),
    ],
)
def test_kinds_of_values(given: Any, dtype: str, kept: list[float]) -> None:
    (value,) = run_probe(lambda: {"x": given}).values
    assert value.dtype == dtype
    assert value.kept == struct.pack(f"<{len(kept)}d", *kept)


def test_large_value_keeps_every_nth_element_and_all_its_bytes_count() -> None:
    ramp = torch.arange(10_000, dtype=torch.float32)
    (value,) = run_probe(lambda: ramp).values
    assert np.frombuffer(value.kept).tolist() == [float(number) for number in range(0, 10_000, 3)]
    other = ramp.clone()
    other[1] = 7.0
    result = compare(run_probe(lambda: ramp), run_probe(lambda: other), same_topology=True)
    assert (result.equal_bits, result.max_relative_difference, result.ok) == (False, 0.0, False)


def test_record_comes_back_from_plain_values() -> None:
    one = record(loss=torch.tensor(0.25), output=torch.ones(2, 3))
    assert ProbeRecord.from_dict(one.as_dict()) == one


@pytest.mark.parametrize(
    "value", [3, {"loss": 1}, {"loss": ["torch.float32", [1], "00", b"1234567"]}, {"loss": ["torch.float32", ["x"], "00", b""]}, {1: []}]
)
def test_damaged_record_is_no_record(value: object) -> None:
    with pytest.raises(MalformedCheckpointError, match="probe"):
        ProbeRecord.from_dict(value)


# -- what is refused ------------------------------------------------------------------------------------------------------


def fails() -> None:
    raise ZeroDivisionError("no batch")


@pytest.mark.parametrize(
    ("probe", "text"),
    [
        (fails, "the probe raised; found ZeroDivisionError: no batch"),
        (lambda: None, "no values"),
        (lambda: {}, "no values"),
        (lambda: {str(number): 1 for number in range(65)}, "found 65 values"),
        (lambda: "loss", "value 'loss' that cannot be compared"),
        (lambda: {"a": {"b": object()}}, "value 'a.b' that cannot be compared"),
        (lambda: torch.empty(2, device="meta"), "value 'loss' that cannot be read"),
        (lambda: torch.eye(2).to_sparse(), "value 'loss' that cannot be read"),
        (lambda: 2**80, "value 'loss' that cannot be read"),
        (lambda: np.array(["x"]), "value 'loss' that cannot be read"),
    ],
)
def test_probe_that_fails_is_a_typed_error(probe: Any, text: str) -> None:
    with pytest.raises(ProbeError) as caught:
        run_probe(probe)
    assert text in str(caught.value)


def test_probe_must_be_callable() -> None:
    with pytest.raises(InvalidOptionError, match="not callable"):
        run_probe(3)  # type: ignore[arg-type]


# -- what is left alone ---------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Whatever a forward pass can change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = self.drop(self.norm(self.linear(x)))
        return self.last.square().mean()


def rng_state(generator: torch.Generator) -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), generator.get_state().tolist()]  # type: ignore[index]


@pytest.mark.parametrize("raises", [False, True])
def test_training_goes_on_as_if_no_probe_had_run(raises: bool) -> None:
    torch.manual_seed(0)
    model, generator = Noisy(), torch.Generator().manual_seed(1)
    model.drop.train()
    x = torch.ones(2, 3)
    model(x).backward()
    grads = {name: (parameter.grad, parameter.grad.clone()) for name, parameter in model.named_parameters() if parameter.grad is not None}
    buffers = {name: (buffer, buffer.clone(), buffer._version) for name, buffer in model.named_buffers() if name != "calls"}
    before = rng_state(generator)

    def probe() -> tuple[Any, Any]:
        torch.rand(5), torch.rand(5, generator=generator), random.random(), np.random.rand()
        assert not torch.is_grad_enabled()
        assert not model.drop.training
        model.train()
        with torch.enable_grad():
            loss = model(x)
            loss.backward()
        if raises:
            raise ValueError
        return x, loss

    if raises:
        with pytest.raises(ProbeError):
            run_probe(probe, modules=[model], generators=Generators({"own": generator}))
    else:
        assert [value.name for value in run_probe(probe, modules=[model], generators=Generators({"own": generator})).values] == [
            "output",
            "loss",
        ]
    assert rng_state(generator) == before
    assert [module.training for module in (model, model.norm, model.drop, model.frozen)] == [True, True, True, False]
    assert torch.is_grad_enabled()
    for name, (grad, content) in grads.items():
        parameter = model.get_parameter(name)
        assert parameter.grad is grad
        assert grad.equal(content)
    for name, (buffer, content, _) in buffers.items():
        assert model.get_buffer(name) is buffer
        assert buffer.equal(content)
    assert model.calls == 1


def test_buffers_that_a_probe_does_not_change_are_not_written() -> None:
    """A write would make a graph that is still to run backward raise."""
    model = nn.BatchNorm1d(3)
    version = model.running_mean._version  # type: ignore[union-attr]
    run_probe(lambda: model(torch.ones(2, 3)), modules=[model])
    assert model.running_mean._version == version  # type: ignore[union-attr]


def test_probe_gives_the_same_wherever_the_generators_are_and_in_an_autocast_region() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    x = torch.ones(2, 8)
    first = run_probe(lambda: model(x + torch.rand(2, 8)), modules=[model])
    torch.manual_seed(99)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run_probe(lambda: model(x + torch.rand(2, 8)), modules=[model]) == first


# -- how records compare --------------------------------------------------------------------------------------------------


def test_equal_records_are_equal_bit_for_bit() -> None:
    one, other = record(loss=0.5, output=torch.tensor([float("nan")])), record(loss=0.5, output=torch.tensor([float("nan")]))
    result = compare(one, other, same_topology=True)
    assert (result.equal_bits, result.max_relative_difference, result.ok) == (True, 0.0, True)
    assert result.text == "2 values, equal bit for bit"


@pytest.mark.parametrize(
    ("then", "now", "difference"),
    [
        (2.0, 2.0001, 5e-5),
        (-2.0, 2.0, 2.0),
        (0.0, 1e-9, float("inf")),
        (1.0, float("nan"), float("inf")),
        (float("inf"), float("-inf"), float("inf")),
        (0.0, -0.0, 0.0),
    ],
)
def test_difference_is_relative(then: float, now: float, difference: float) -> None:
    result = compare(record(loss=then), record(loss=now), same_topology=False)
    assert not result.equal_bits
    assert result.max_relative_difference == pytest.approx(difference)
    assert result.ok == (difference <= 1e-4)


def test_difference_is_relative_to_the_largest_element_and_the_worst_value_is_named() -> None:
    then = record(loss=torch.tensor(1.0), output=torch.tensor([0.0, 10.0, float("inf")]))
    now = record(loss=torch.tensor(1.0), output=torch.tensor([0.001, 10.0, float("inf")]))
    result = compare(then, now, same_topology=False)
    assert result.max_relative_difference == pytest.approx(1e-4)
    assert result.text == "output differs by 1.0e-04, relative to its largest element; allowed: 1.0e-04 on another topology"


def test_same_topology_demands_equal_bits() -> None:
    then, now = record(loss=torch.tensor(1.0)), record(loss=torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))
    assert compare(then, now, same_topology=False).ok
    result = compare(then, now, same_topology=True)
    assert not result.ok
    assert result.text == "loss differs by 1.2e-07, relative to its largest element; allowed: equal bits on the same topology"


def test_tolerance_can_be_stated() -> None:
    then, now = record(loss=1.0), record(loss=1.01)
    assert compare(then, now, same_topology=False, tolerance=0.1).ok
    for tolerance in (-1.0, float("nan"), "x", True):
        with pytest.raises(InvalidOptionError, match="tolerance"):
            compare(then, now, same_topology=False, tolerance=tolerance)  # type: ignore[arg-type]


def test_other_values_are_another_probe() -> None:
    result = compare(record(loss=1.0), record(cost=1.0), same_topology=False)
    assert not result.ok
    assert result.text == "it gave ['cost'], and ['loss'] when it was recorded: it is another probe"
    shape = compare(record(loss=torch.ones(2)), record(loss=torch.ones(3)), same_topology=False)
    assert (shape.ok, shape.max_relative_difference) == (False, float("inf"))
    dtype = compare(record(loss=torch.ones(2)), record(loss=torch.ones(2, dtype=torch.float64)), same_topology=False)
    assert (dtype.equal_bits, dtype.max_relative_difference, dtype.ok) == (False, 0.0, True)
