"""The learning rate of the demo's schedule."""

from __future__ import annotations

import pytest

from dcp_engine.demo.state import lr_factor


@pytest.mark.parametrize(
    ("done", "factor"),
    [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (9, 0.55), (14, 0.1), (99, 0.1)],
)
def test_warm_up_is_linear_and_the_rest_half_a_cosine(done: int, factor: float) -> None:
    assert lr_factor(done, num_steps=15, num_warmup_steps=4) == pytest.approx(factor, rel=1e-12)


def test_run_shorter_than_its_warm_up_never_leaves_it() -> None:
    assert [lr_factor(done, num_steps=2, num_warmup_steps=4) for done in range(2)] == [0.25, 0.5]
