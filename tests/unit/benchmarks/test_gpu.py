"""The parts of the row for devices that a machine without one can check."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.files import Place
from benchmarks.gpu import main
from benchmarks.gpu_loop import MAX_LAYERS, GpuLoop, layers_that_fit
from benchmarks.harness import MismatchError, measure
from benchmarks.options import parse
from benchmarks.rows.f8_gpu import Gpu, beside_case

GIGABYTE = 10**9


@pytest.mark.parametrize(
    ("device", "host", "disk", "speed", "layers"),
    [
        (141, 128, 60, 2 * GIGABYTE, MAX_LAYERS),
        (16, 128, 60, 2 * GIGABYTE, 84),
        (141, 16, 60, 2 * GIGABYTE, 45),
        (141, 128, 5, 2 * GIGABYTE, 49),
        (141, 128, 60, GIGABYTE // 10, 19),
        (0, 0, 0, 0, 1),
    ],
)
def test_the_state_is_as_large_as_the_scarcest_thing_allows(device: int, host: int, disk: int, speed: float, layers: int) -> None:
    fit = layers_that_fit(
        device_bytes=device * GIGABYTE, host_bytes=host * GIGABYTE, disk_bytes=disk * GIGABYTE, write_bytes_a_sec=float(speed)
    )
    assert fit == layers


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> GpuLoop:
    monkeypatch.setattr("benchmarks.gpu_loop.LEAST_STEP_SECS", 0.001)
    return GpuLoop(2, device="cpu", width=16, rows=8)


def test_a_step_changes_all_of_the_state_and_what_was_held_stays(loop: GpuLoop) -> None:
    state = loop.state()
    assert len(state.flat) == 2 * 2 * 4, "weights and biases, each with two moments and a counter"
    loop.hold()
    loop.check(state)
    loop.begin()
    loop.check(state)
    loop.step(lambda: loop.check(state))
    for name, tensor in state.flat.items():
        assert not torch.equal(tensor, loop.held[name]), name
    with pytest.raises(MismatchError):
        loop.check(state)


def test_saves_beside_the_loop_hold_the_step_at_which_they_were_called(loop: GpuLoop, tmp_path: Path) -> None:
    options = parse(["--quick", "--rows", "F8", "--memory", ""])
    case = beside_case(loop, Place("disk", str(tmp_path), durable=True), options)
    try:
        result = measure(Gpu(), case, options, lambda _: None)
    finally:
        case.close()
    failures = {system.name: system.failure for system in result.systems if system.failure}
    assert set(failures) == {"DCP thread, pinned, non-blocking", "DCP thread, pinned, async, non-blocking"}
    assert set(failures.values()) == {"asks for a CUDA device"}
    assert {system.name for system in result.systems if system.secs} == {"dcp-engine thread", "DCP thread"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures for minutes where there is a CUDA device")
def test_without_a_device_the_script_says_so_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "gpu.json")]) == 0
    assert capsys.readouterr().out == "python -m benchmarks.gpu: there is no CUDA device here; nothing was checked or measured\n"
    assert list(tmp_path.iterdir()) == []
