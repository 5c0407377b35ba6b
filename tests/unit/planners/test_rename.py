"""Renames and hints: tables of names."""

from __future__ import annotations

import pickle

import pytest

from dcp_engine.errors import DuplicateKeyError, InvalidOptionError
from dcp_engine.planners.rename import (
    compile_rename,
    rename_all,
    rename_hint,
    rename_param_names,
    rename_path,
    strip,
)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("module.w", "w"),
        ("model.module.layers.0._orig_mod.weight", "model.layers.0.weight"),
        ("module._orig_mod.module.w", "w"),
        ("optimizer.state.module.w.exp_avg", "optimizer.state.w.exp_avg"),
        ("model.submodule.w", "model.submodule.w"),
        ("model.module_list.w", "model.module_list.w"),
        ("model.module", "model.module"),
    ],
)
def test_strip_removes_whole_elements_wherever_they_stand(key: str, name: str) -> None:
    for rename in (strip("module.", "_orig_mod."), strip("module", "_orig_mod"), strip(), pickle.loads(pickle.dumps(strip()))):
        assert rename(key) == name


def test_strip_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="empty path element"):
        strip("")


@pytest.mark.parametrize(
    ("prefixes", "key", "name"),
    [
        ({"module.": ""}, "module.w", "w"),
        ({"net": "model"}, "net.w", "model.w"),
        ({"net": "model"}, "net", "model"),
        ({"net": "model"}, "net_ema.w", "net_ema.w"),
        ({"net": "model"}, "a.net.w", "a.net.w"),
        ({"a": "x", "a.b": "y"}, "a.b.c", "y.c"),
        ({"a": "x", "a.b": "y"}, "a.c", "x.c"),
        ({"": "model."}, "w", "model.w"),
        ({"a.": "b.", "b.": "c."}, "a.w", "b.w"),
    ],
)
def test_the_longest_prefix_is_replaced_once(prefixes: dict[str, str], key: str, name: str) -> None:
    rename = compile_rename(prefixes)
    assert rename is not None
    assert rename(key) == name


def test_no_rename_is_none() -> None:
    assert compile_rename(None) is None
    assert compile_rename({}) is None


@pytest.mark.parametrize("bad", [7, {"a": 1}, {1: "a"}, "module."])
def test_a_bad_rename_is_refused(bad: object) -> None:
    with pytest.raises(InvalidOptionError):
        compile_rename(bad)  # type: ignore[arg-type]


def test_two_keys_that_become_one_are_both_named() -> None:
    with pytest.raises(DuplicateKeyError, match=r"'module\.w' and 'w' both become 'w'"):
        rename_all(["module.w", "w"], strip())


def test_a_rename_that_gives_no_string_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="NoneType for key 'w'"):
        rename_all(["w"], lambda key: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("path", "name", "renamed"),
    [
        (("model", "module.w"), "model.w", ("model", "w")),
        (("optimizer", "state", "module.w", "exp_avg"), "optimizer.state.w.exp_avg", ("optimizer", "state", "w", "exp_avg")),
        (("optimizer", "param_groups", 0, "lr"), "optim.param_groups.0.lr", ("optim", "param_groups", 0, "lr")),
        (("w",), "model.w", ("model", "w")),
        (("model", "w"), "w", ("w",)),
        (("model", "w"), "model.w", ("model", "w")),
    ],
)
def test_a_renamed_path_keeps_the_elements_that_stayed(path: tuple[str | int, ...], name: str, renamed: tuple[str | int, ...]) -> None:
    assert rename_path(path, ".".join(map(str, path)), name) == renamed


def test_parameter_names_in_groups_follow_the_rename() -> None:
    names = ["module.a.w", "module.b._orig_mod.w"]
    assert rename_param_names("optimizer.param_groups.0.params", names, strip()) == ["a.w", "b.w"]
    by_prefix = compile_rename({"optimizer.state.module.": "optimizer.state.", "optimizer.param_groups": "optimizer.param_groups"})
    assert by_prefix is not None
    assert rename_param_names("optimizer.param_groups.0.params", names, by_prefix) == ["a.w", "b._orig_mod.w"]
    assert rename_param_names("param_groups.0.params", ["module.w"], strip()) == ["w"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("optimizer.param_groups.0.lr", ["module.w"]), ("optimizer.param_groups.0.params", [0, 1]), ("params", ["module.w"])],
)
def test_other_values_are_left_alone_by_a_rename(key: str, value: list[object]) -> None:
    assert rename_param_names(key, value, strip()) is value


@pytest.mark.parametrize(
    ("missing", "unexpected", "hint"),
    [
        (["model.a", "model.b"], ["model.module.a", "model.module.b"], "strip('module.', '_orig_mod.')"),
        (["module.a", "module.b"], ["a", "b"], "state of the module itself"),
        (["model.a", "model.b"], ["a", "b"], "rename={'': 'model.'}"),
        (["a", "b.c"], ["net.a", "net.b.c"], "rename={'net.': ''}"),
    ],
)
def test_a_hint_says_the_rename_that_would_match(missing: list[str], unexpected: list[str], hint: str) -> None:
    found = rename_hint(missing, unexpected)
    assert found is not None
    assert hint in found


@pytest.mark.parametrize(("missing", "unexpected"), [([], ["a"]), (["a"], []), (["a"], ["b"]), (["x.a", "p", "q"], ["y.a", "r", "s"])])
def test_no_hint_where_no_rename_helps(missing: list[str], unexpected: list[str]) -> None:
    assert rename_hint(missing, unexpected) is None
