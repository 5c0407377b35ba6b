"""Pictures of rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pictures import draw
from benchmarks.results import CaseResult, RowResult, SystemResult


def case(name: str, chunks: float, *, nbytes: int = 0) -> CaseResult:
    facts = {"chunks": {0: chunks}} if chunks else {}
    systems = [
        SystemResult(name="ours", role="ours", secs={0: chunks + 1, 1: chunks + 2}, facts=facts),
        SystemResult(name="DCP, no fsync", role="dcp", secs={0: 3.0}, comparable=False),
        SystemResult(name="absent", role="peer", failure="not installed"),
    ]
    return CaseResult(name=name, nbytes=nbytes, systems=systems)


@pytest.mark.parametrize(
    "cases",
    [
        [case("bars of bytes", 0, nbytes=10**9)],
        [case("16", 16), case("64", 64), case("256", 256)],  # and a line
        [CaseResult(name="nobody", nbytes=0, systems=[SystemResult(name="absent", role="peer", failure="not installed")])],
    ],
)
def test_a_row_has_a_small_picture_whatever_its_systems_have(cases: list[CaseResult], tmp_path: Path) -> None:
    row = RowResult(name="F6", title="plans", cases=cases, claims=[], notes=[], elapsed_secs=1.0)
    picture = Path(draw(row, str(tmp_path / "pictures"))).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 100_000
