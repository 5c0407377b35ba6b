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
