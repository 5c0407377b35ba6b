"""Which keys are selected: tables of globs."""

from __future__ import annotations

import pytest

from dcp_engine.errors import InvalidOptionError
from dcp_engine.planners.selection import Selection


@pytest.mark.parametrize(
    ("patterns", "selected"),
    [
        (None, {"model.a.w", "model.b.w", "optim.x", "modelx"}),
        (["model"], {"model.a.w", "model.b.w"}),
        (["model.*"], {"model.a.w", "model.b.w"}),
        (["*.w"], {"model.a.w", "model.b.w"}),
        (["model.[a]"], {"model.a.w"}),
        (["model.b.w", "optim"], {"model.b.w", "optim.x"}),
        ([], set()),
    ],
)
def test_a_selection_takes_globs_and_whole_subtrees(patterns: list[str] | None, selected: set[str]) -> None:
    keys = ["model.a.w", "model.b.w", "optim.x", "modelx"]
    assert set(filter(Selection(patterns), keys)) == selected
    assert Selection(patterns).unmatched(keys) == ()


def test_patterns_that_select_nothing_are_told() -> None:
    assert Selection(["model", "modle", "x*", "optim.*"]).unmatched(["model.w", "optim.y"]) == ("modle", "x*")


@pytest.mark.parametrize("bad", ["model.*", [""], [3]])
def test_a_bad_selection_is_refused(bad: object) -> None:
    with pytest.raises(InvalidOptionError, match="sequence of globs"):
        Selection(bad)  # type: ignore[arg-type]
