"""Which differences of keys are errors, decided from names alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dcp_engine.errors import InvalidOptionError, KeyMismatchError
from dcp_engine.planners.catalogue import Catalogue, Entry
from dcp_engine.planners.strictness import Strictness, Verdict, judge, report_keys


@pytest.mark.parametrize(
    ("strict", "key", "expected"),
    [
        (True, "optim.x", True),
        (False, "model.x", False),
        ({"optimizer": False}, "optim.state.w.exp_avg", False),
        ({"optim": False}, "optimizer.state.w.exp_avg", False),
        ({"optimizer": False}, "model.x", True),
        ({"model": False}, "anything.else", False),
        ({}, "model.x", True),
    ],
)
def test_strictness_goes_by_component(strict: bool | dict[str, bool], key: str, expected: bool) -> None:
    assert Strictness(strict).of(key) is expected


def test_components_of_the_writer_have_strictness_of_their_own() -> None:
    strictness = Strictness({"vision": False}, {"model.vision.*": "vision"})
    assert strictness.of("model.vision.w") is False
    assert strictness.of("model.text.w") is True


@pytest.mark.parametrize("bad", [None, {"modle": True}, {"model": 1}])
def test_a_bad_strictness_is_refused(bad: object) -> None:
    with pytest.raises(InvalidOptionError):
        Strictness(bad)  # type: ignore[arg-type]


def verdict_on(stored: Sequence[str], states: Sequence[Sequence[str]], strict: bool | dict[str, bool] = False) -> Verdict:
    """What is decided of states, one a rank, that are loaded from a checkpoint of the keys ``stored``."""
    catalogue = Catalogue({key: Entry(key, key, None) for key in sorted(stored)}, b"digest")  # type: ignore[arg-type]
    reports = [report_keys(catalogue, set(state), [key for key in state if key not in stored]) for state in states]
    return judge(catalogue, reports, Strictness(strict))


def test_keys_are_judged_over_all_ranks() -> None:
    assert verdict_on(["a", "b", "c"], [["a", "x"], ["b"]]) == Verdict(("x",), ("c",))
    with pytest.raises(KeyMismatchError) as caught:
        verdict_on(["a", "b", "c"], [["a", "x"], ["b"]], strict=True)
    assert (caught.value.missing, caught.value.unexpected) == (("x",), ("c",))


def test_the_remedy_names_the_components_that_differ() -> None:
    with pytest.raises(KeyMismatchError) as caught:
        verdict_on(["model.w", "rng.cpu", "ema.w"], [["model.w"]], strict=True)
    assert caught.value.remedy == (
        "make the state as it was saved, select with keys=, or allow differences with strict={'ema': False, 'rng': False}"
    )


@pytest.mark.parametrize(
    ("head", "groups"),
    [("optimizer.", []), ("", ["param_groups.0.lr"]), ("adam.", ["adam.param_groups.0.lr"]), ("a.b.", ["a.b.param_groups.w.lr"])],
)
def test_half_of_a_parameters_optimizer_state_is_fatal_wherever_the_optimizer_stands(head: str, groups: list[str]) -> None:
    stored = [f"{head}state.w.exp_avg", *groups]
    with pytest.raises(KeyMismatchError, match="only in part") as caught:
        verdict_on(stored, [[*stored, f"{head}state.w.exp_avg_sq"]])
    assert caught.value.missing == (f"{head}state.w.exp_avg_sq",)
    assert verdict_on(stored, [[*stored, f"{head}state.v.exp_avg"]]).missing == (f"{head}state.v.exp_avg",)


@pytest.mark.parametrize("head", ["", "model."])
def test_a_module_called_state_is_no_optimizer(head: str) -> None:
    verdict = verdict_on(
        [f"{head}state.proj.weight", "optimizer.param_groups.0.lr"], [[f"{head}state.proj.weight", f"{head}state.proj.bias"]]
    )
    assert verdict.missing == (f"{head}state.proj.bias",)
