"""Which states are healthy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from dcp_engine.errors import InvalidOptionError
from dcp_engine.policies import Health, HealthVerdict


@pytest.mark.parametrize(
    ("metrics", "is_healthy", "reason"),
    [
        ({"loss": 2.5, "grad_norm": 1.0}, True, ""),
        ({"loss": 2.5}, True, ""),
        ({}, None, ""),
        ({"lr": math.nan}, None, ""),
        ({"loss": math.nan, "grad_norm": 1.0}, False, "loss is nan"),
        ({"loss": math.inf}, False, "loss is inf"),
        ({"loss": 1.0, "grad_norm": -math.inf}, False, "grad_norm is -inf"),
    ],
)
def test_loss_and_gradient_norm_are_finite(metrics: dict[str, float], is_healthy: bool | None, reason: str) -> None:
    assert Health().judge(metrics) == HealthVerdict(is_healthy=is_healthy, reason=reason)


@pytest.mark.parametrize(
    ("grad_norm", "is_healthy", "reason"),
    [(100.0, True, ""), (100.5, False, "grad_norm is 100.5, above 100"), (math.nan, False, "grad_norm is nan")],
)
def test_a_bound_is_kept(grad_norm: float, is_healthy: bool, reason: str) -> None:
    verdict = Health(at_most={"grad_norm": 100.0}).judge({"grad_norm": grad_norm})
    assert verdict == HealthVerdict(is_healthy=is_healthy, reason=reason)


def test_what_is_no_number_is_not_below_a_bound() -> None:
    assert Health(finite=(), at_most={"kl": 1.0}).judge({"kl": math.nan}).is_healthy is False


@pytest.mark.parametrize(
    ("answer", "metrics", "is_healthy"),
    [(True, {}, True), (False, {"loss": 1.0}, False), (None, {}, None), (None, {"loss": 1.0}, True), (True, {"loss": math.nan}, False)],
)
def test_the_callers_check_has_a_say(answer: bool | None, metrics: dict[str, float], is_healthy: bool | None) -> None:
    asked = []

    def check(given: Mapping[str, float]) -> bool | None:
        asked.append(dict(given))
        return answer

    assert Health(check=check).judge(metrics).is_healthy is is_healthy
    assert asked == ([] if "loss" in metrics and math.isnan(metrics["loss"]) else [metrics])


def test_a_check_that_fails_makes_a_state_suspect_and_says_why() -> None:
    verdict = Health(check=lambda metrics: metrics["accuracy"] > 0.5).judge({"loss": 1.0})
    assert verdict == HealthVerdict(is_healthy=False, reason="the check failed: KeyError: 'accuracy'")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"finite": "loss"}, '("loss", "grad_norm")'),
        ({"finite": (5,)}, "a text that is not empty"),
        ({"at_most": {}}, '{"grad_norm": 100.0}'),
        ({"at_most": {"grad_norm": math.nan}}, "a finite number"),
        ({"at_most": {"grad_norm": "big"}}, "a finite number"),
        ({"at_most": 5}, '{"grad_norm": 100.0}'),
        ({"check": 5}, "a function of the metrics"),
        ({"finite": ()}, "one of finite, at_most and check"),
    ],
)
def test_wrong_options_are_told_what_is_valid(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        Health(**options)
    assert expected in str(caught.value)
