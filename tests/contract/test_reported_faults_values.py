"""Faults that users reported with shapes and dtypes: whatever the checkpoint holds arrives bit for bit, or is refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import attempts_in, load, refused, save
from support.values import DTYPES, full, same
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint import save as dcp_save

from dcp_engine import ReshardLoadPlanner, ShardWriter, verify_checkpoint
from dcp_engine.errors import DtypeMismatchError, KindMismatchError, ShapeMismatchError, UnsupportedTensorError

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3, 5), (2, 0, 3), (7, 2, 3), (40_000,))
OTHERS = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype) and value not in DTYPES},
    key=str,
)


def matrix(*, filled: bool) -> dict[str, Any]:
    """Every dtype in every shape, contiguous or not, beside a str and a None."""
    state: dict[str, Any] = {"name": "run" if filled else "", "none": None if filled else 1}
    for dtype in DTYPES:
        for shape in SHAPES:
            key = f"{dtype}{list(shape)}"
            value = full(key, shape, dtype)
            state[key] = value if filled else torch.zeros_like(value)
        column = full(f"{dtype}column", (6, 4), dtype)[:, 1]
        state[f"{dtype}column"] = column if filled else torch.zeros(12, dtype=dtype)[::2]
    return state


def assert_matrix(found: dict[str, Any]) -> None:
    expected = matrix(filled=True)
    assert found.keys() == expected.keys()
    assert (found["name"], found["none"]) == ("run", None)
    assert [key for key, value in expected.items() if isinstance(value, torch.Tensor) and not same(found[key], value)] == []


# -- dtypes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["auto", "raw", "zstd", "planes"])
def test_every_dtype_in_every_shape_arrives_beside_objects(tmp_path: Path, codec: str) -> None:
    save(matrix(filled=True), tmp_path / "a", codec=codec)
    assert verify_checkpoint(tmp_path / "a").faults == ()
    assert_matrix(load(matrix(filled=False), tmp_path / "a"))


@pytest.mark.parametrize("save_planner", [DefaultSavePlanner, None])
def test_every_dtype_arrives_through_stock_planners(tmp_path: Path, save_planner: Any) -> None:
    if save_planner is None:
        save(matrix(filled=True), tmp_path / "a")
    else:
        dcp_save(matrix(filled=True), storage_writer=ShardWriter(tmp_path / "a"), planner=save_planner())
    assert_matrix(load(matrix(filled=False), tmp_path / "a", planner=DefaultLoadPlanner()))


def test_every_dtype_is_built_without_a_template(tmp_path: Path) -> None:
    save(matrix(filled=True), tmp_path / "a")
    planner = ReshardLoadPlanner(build_from_metadata=True)
    load({}, tmp_path / "a", planner=planner)
    assert_matrix(planner.built)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("codec", ["auto", "planes", "zstd"])
def test_nan_payloads_infinities_and_signed_zeros_keep_every_bit(tmp_path: Path, dtype: torch.dtype, codec: str) -> None:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bits = full("bits", (50_000,), integers)  # any pattern at all, NaN of every payload among them
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")], dtype=dtype).view(integers)
    save({"x": torch.cat([bits, special]).view(dtype)}, tmp_path / "a", codec=codec)
    found = load({"x": torch.zeros(50_005, dtype=dtype)}, tmp_path / "a")["x"]
    assert torch.equal(found.view(integers), torch.cat([bits, special]))


def test_conjugate_and_negative_views_are_saved_as_the_values_they_show(tmp_path: Path) -> None:
    value = full("z", (4, 3), torch.complex64)
    save({"conjugate": value.conj(), "imaginary": value.conj().imag, "transposed": value.mH}, tmp_path / "a")
    found = load(
        {
            "conjugate": torch.zeros(4, 3, dtype=torch.complex64),
            "imaginary": torch.zeros(4, 3),
            "transposed": torch.zeros(3, 4, dtype=torch.complex64),
        },
        tmp_path / "a",
    )
    assert torch.equal(found["conjugate"], value.conj().resolve_conj())
    assert torch.equal(found["imaginary"], -value.imag)
    assert torch.equal(found["transposed"], value.conj().resolve_conj().T)


def made_of(dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates some of these
        return torch.empty(4, dtype=dtype)


def test_torch_has_dtypes_that_must_be_refused() -> None:
    names = {str(dtype) for dtype in OTHERS}
    assert {"torch.float4_e2m1fn_x2", "torch.int4", "torch.uint1", "torch.quint8", "torch.qint32", "torch.bits8"} <= names


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("planner", ["ours", "stock"])
def test_every_other_dtype_of_torch_is_refused_by_name(tmp_path: Path, dtype: torch.dtype, planner: str) -> None:
    state = {"fine": torch.ones(2), "odd": {"one": made_of(dtype)}}
    if planner == "ours":
        error = refused(save, state, tmp_path / "a")
    else:
        error = refused(dcp_save, state, storage_writer=ShardWriter(tmp_path / "a"), planner=DefaultSavePlanner())
    assert isinstance(error, UnsupportedTensorError)
    assert error.tensor == "odd.one"
    assert str(dtype) in str(error)
    assert attempts_in(tmp_path) == []


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_every_other_dtype_of_torch_is_refused_inside_an_object_too(tmp_path: Path, dtype: torch.dtype) -> None:
    error = refused(save, {"odd": {"pair": {1, 2}, "value": frozenset([(str(dtype), made_of(dtype))])}}, tmp_path / "a")
    assert error.tensor == "odd.value"
    assert attempts_in(tmp_path) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.ones(3, device="meta"),
    ],
    ids=["sparse", "nested", "meta"],
)
def test_tensors_without_a_plain_layout_are_refused_by_name(tmp_path: Path, make: Any) -> None:
    error = refused(save, {"a": {"odd": make()}}, tmp_path / "a")
    assert isinstance(error, UnsupportedTensorError)
    assert error.tensor == "a.odd"
    assert attempts_in(tmp_path) == []


# -- disagreement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 4), (16, 4), (4, 8), (8, 5), (8, 3), (32,), (8, 4, 1), (1, 8, 4), (), (0, 4), (8, 0)])
def test_another_shape_is_an_error_with_key_and_both_sizes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save({"model": {"w": full("w", (8, 4))}}, tmp_path / "a")
    template = torch.full(shape, 7.0)
    error = refused(load, {"model": {"w": template}}, tmp_path / "a")
    assert isinstance(error, ShapeMismatchError)
    assert error.tensor == "model.w"
    assert "[8, 4]" in str(error)
    assert str(list(shape)) in str(error)
    assert bool((template == 7.0).all())


@pytest.mark.parametrize("shape", [(4, 4), (32,), ()])
def test_another_shape_never_loads_silently_with_the_stock_planner(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """That planner takes the shapes of state and checkpoint on trust in older torch; ours are the last to look."""
    save({"w": full("w", (8, 4))}, tmp_path / "a")
    with pytest.raises(BaseException) as caught:
        load({"w": torch.zeros(shape)}, tmp_path / "a", planner=DefaultLoadPlanner())
    assert "w" in str(caught.value)


@pytest.mark.parametrize("wanted", [dtype for dtype in DTYPES if dtype != torch.float32], ids=str)
def test_another_dtype_is_refused_with_key_and_both_names(tmp_path: Path, wanted: torch.dtype) -> None:
    save({"w": full("w", (8, 4))}, tmp_path / "a")
    for planner in (ReshardLoadPlanner(), DefaultLoadPlanner()):
        error = refused(load, {"w": torch.zeros(8, 4, dtype=wanted)}, tmp_path / "a", planner=planner)
        assert isinstance(error, DtypeMismatchError)
        assert error.tensor == "w"
        assert "torch.float32" in str(error)
        assert str(wanted) in str(error)


@pytest.mark.parametrize("wanted", [torch.float64, torch.float16, torch.bfloat16])
def test_a_cast_of_floats_leaves_all_other_dtypes_alone(tmp_path: Path, wanted: torch.dtype) -> None:
    state = {str(dtype): full(str(dtype), (5, 3), dtype) for dtype in DTYPES if not dtype.is_floating_point} | {
        "w": torch.tensor([1.0, 1 / 3, -2.5, 1e-3])
    }
    save(state, tmp_path / "a")
    found = {key: torch.zeros_like(value) for key, value in state.items()} | {"w": torch.zeros(4, dtype=wanted)}
    planner = ReshardLoadPlanner(dtype="cast")
    load(found, tmp_path / "a", planner=planner)
    assert torch.equal(found["w"], state["w"].to(wanted))
    assert [key for key, value in state.items() if key != "w" and not same(found[key], value)] == []
    assert [(cast.key, cast.stored, cast.wanted) for cast in planner.report.cast] == [("w", torch.float32, wanted)]


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float32, torch.int64),
        (torch.int64, torch.float32),
        (torch.int64, torch.int32),
        (torch.bool, torch.uint8),
        (torch.complex64, torch.float32),
        (torch.float32, torch.complex64),
        (torch.float32, torch.float8_e8m0fnu),
    ],
)
def test_only_floats_are_ever_cast(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    save({"w": full("w", (6,), stored)}, tmp_path / "a")
    error = refused(load, {"w": torch.zeros(6, dtype=wanted)}, tmp_path / "a", dtype="cast")
    assert isinstance(error, DtypeMismatchError)
    assert error.tensor == "w"


@pytest.mark.parametrize(("stored", "template"), [(torch.ones(2), 3), (3, torch.ones(2)), (torch.ones(2), None), ("x", torch.ones(2))])
def test_a_tensor_never_takes_an_objects_place(tmp_path: Path, stored: Any, template: Any) -> None:
    save({"a": {"x": stored}}, tmp_path / "a")
    error = refused(load, {"a": {"x": template}}, tmp_path / "a")
    assert isinstance(error, KindMismatchError)
    assert error.tensor == "a.x"
