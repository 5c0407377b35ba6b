from __future__ import annotations

from dcp_engine.components import ComponentMap

KEYS = ["model.a", "optim.state.0", "x", "model.b", "lr_scheduler.k", "layer.3"]


def test_all_components_at_once_are_those_of_each_key() -> None:
    names, codes = ComponentMap().of_all(KEYS)
    assert names == ["model", "optimizer", "scheduler"]
    assert codes == [0, 1, 0, 0, 2, 0]


def test_patterns_are_asked_about_whole_keys() -> None:
    components = ComponentMap({"model.b": "special", "*.3": "third"})
    names, codes = components.of_all(KEYS)
    assert [names[code] for code in codes] == ["model", "optimizer", "model", "special", "scheduler", "third"]
    assert ComponentMap().of_all([]) == ([], [])


def test_what_is_below_one_state_of_everything_decides() -> None:
    keys = [
        "state.model.w",
        "state.optimizer.state.w.step",
        "app.optim.x",
        "state.rng.rank-00000",
        "state.progress.step",
        "state.weight",
        "state",
    ]
    names, codes = ComponentMap().of_all(keys)
    assert [names[code] for code in codes] == ["model", "optimizer", "optimizer", "state", "state", "model", "model"]
    assert [ComponentMap().of(key) for key in keys] == [names[code] for code in codes]
