"""A training function that another process can find is told from one that it cannot."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from dcp_engine.errors import InvalidOptionError, UnencodableObjectError
from dcp_engine.objects import decode_object
from dcp_engine.testing.launch import target_of


def train(*args: Any, **options: Any) -> None:
    raise NotImplementedError


class Trainer:
    def __call__(self, run: object) -> None:
        raise NotImplementedError

    @staticmethod
    def train(run: object) -> None:
        raise NotImplementedError


def test_function_and_arguments_are_told() -> None:
    target = target_of(functools.partial(train, 3, path=Path("a"), rates=(0.5,)))
    assert (target.module, target.qualname, Path(target.file)) == (train.__module__, "train", Path(__file__).resolve())
    assert decode_object(target.arguments, key="arguments") == {"args": [3], "keywords": {"path": Path("a"), "rates": (0.5,)}}
    assert target_of(Trainer.train).qualname == "Trainer.train"


@pytest.mark.parametrize(
    "make_run",
    [lambda run: None, Trainer(), Trainer().__call__, 3, print],
    ids=["lambda", "object", "bound call", "number", "builtin"],
)
def test_function_that_cannot_be_found_is_refused(make_run: Any) -> None:
    with pytest.raises(InvalidOptionError, match="cannot find"):
        target_of(make_run)


def test_argument_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(UnencodableObjectError, match="arguments"):
        target_of(functools.partial(train, model=object()))
