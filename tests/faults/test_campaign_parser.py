"""The quick part of the hostile parser campaign, and proof that it sees a parser that breaks its promise."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import pytest
from faults.campaign import parser
from faults.campaign.parser_targets import NAMES, opened

from dcp_engine.errors import MalformedCheckpointError


def test_hostile_bytes_are_refused_in_bounds() -> None:
    outcome = parser.run(full=False, seed=5)
    assert outcome.bad == ()
    assert outcome.points >= sum(parser._QUICK.values())
    assert outcome.facts["accepted"] > 1000
    assert outcome.facts["malformed_checkpoint"] > 10_000
    assert outcome.facts["limit_exceeded"] > 10


@pytest.mark.parametrize("name", NAMES)
def test_seeds_are_sound_and_mutants_repeat(name: str) -> None:
    with opened(name) as target:
        for data in target.seeds:
            target.feed(data)
        first, second = ([parser.mutated(target, random.Random(f"7/{index}")) for index in range(20)] for _ in range(2))
    assert first == second
    assert len(set(first)) > 10


def hang(data: bytes) -> None:
    while True:
        time.process_time()


def warn(data: bytes) -> None:
    warnings.warn("overflow", RuntimeWarning, stacklevel=1)


def refuse(data: bytes) -> None:
    raise MalformedCheckpointError("as it should be")


def fail(data: bytes) -> None:
    raise KeyError("column")


@pytest.mark.parametrize(("feed", "text"), [(hang, "_Hang"), (warn, "RuntimeWarning"), (fail, "KeyError"), (refuse, None)])
def test_a_parser_that_breaks_its_promise_is_caught(feed: Callable[[bytes], None], text: str | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(parser, "INPUT_CPU_SECS", 0.2)
    with opened("marker") as target:
        found = parser.fuzz(replace(target, feed=feed), 0, 2)
    assert [text is not None and text in line for line in found.bad] == [True] * (0 if text is None else 2)
    assert found.counts == ({"malformed_checkpoint": 2} if text is None else {"broken": 2})


def test_an_allocation_beyond_the_bound_fails_in_a_child() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=parser._limit_memory) as pool:
        assert len(pool.submit(bytes, parser.MEMORY_BYTES // 4).result()) == parser.MEMORY_BYTES // 4
        with pytest.raises(MemoryError):
            pool.submit(bytes, 2 * parser.MEMORY_BYTES).result()
